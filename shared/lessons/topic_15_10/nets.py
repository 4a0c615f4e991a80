"""Networks that notebooks train and don't teach."""

import torch
from torch import nn


class RandomFlips(nn.Module):
    """In training half of the images are mirrored."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        return torch.where(torch.rand(len(x), 1, 1, 1, device=x.device) < 0.5, x.flip(3), x)


def conv_net(width: int = 16, depth: int = 1, *, flips: bool = False, seed: int = 0) -> nn.Sequential:
    """Two stages of `depth` convolutions that halve a (1, 28, 28) image, and two linear layers to ten classes.

    With `flips` images are mirrored at random in training, which helps where there is time for many epochs. `seed`
    goes to PyTorch's global generator, so what is drawn afterwards follows from it, too.
    """
    torch.manual_seed(seed)
    layers: list[nn.Module] = [RandomFlips()] if flips else []
    inputs = 1
    for outputs in (width, 2 * width):
        for stride in (2, *[1] * (depth - 1)):
            conv = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
            layers += [conv, nn.BatchNorm2d(outputs), nn.ReLU()]
            inputs = outputs
    layers += [nn.Flatten(), nn.Dropout(0.2), nn.Linear(98 * width, 64), nn.ReLU(), nn.Linear(64, 10)]
    return nn.Sequential(*layers)


def same_bits(one: nn.Module, two: nn.Module) -> bool:
    """Whether two models hold the same parameters and buffers, bit for bit."""
    mine, yours = one.state_dict(), two.state_dict()
    return mine.keys() == yours.keys() and all(torch.equal(mine[name], yours[name]) for name in mine)
