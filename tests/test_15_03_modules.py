"""What 15-03 builds: routing, groups, surgery, against PyTorch's own and brute force.

What the notebook prints as a checked output isn't tested again: the small module system, errors of rules, nets that
answer as before.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from course.lesson_code import definitions

CELLS = """
    rule rule-find rule-complete rule-results rule-tensors rule-entries apply-rule remap
    moves exit-net exit-class exit-route skip residual gate assert-partition successor replace-modules
"""


@pytest.fixture(scope="module")
def lesson():
    return SimpleNamespace(**definitions("15-03", *CELLS.split()))


@pytest.mark.parametrize("threshold", [0.0, 0.15, 0.3, 2.0])
def test_each_image_gets_the_first_confident_exit_and_later_stages_see_what_is_left(lesson, threshold):
    torch.manual_seed(0)
    net = lesson.ExitNet().eval()
    for head in net.heads:
        head[-1].weight.data *= 4
    x, seen = torch.randn(37, 1, 28, 28), []
    with torch.no_grad():
        everything = net(x)
        for stage in net.stages:
            stage.register_forward_pre_hook(lambda m, args: seen.append(len(args[0])))
        logits, exits = lesson.route(net, x, threshold)
    for row in range(len(x)):
        sure = [z[row].softmax(0).max() >= threshold for z in everything]
        wanted = sure.index(True) if any(sure) else 2
        assert exits[row] == wanted
        assert torch.allclose(logits[row], everything[wanted][row], atol=1e-4)
    assert seen == [int((exits >= k).sum()) for k in range(3) if (exits >= k).any()]


def test_stochastic_depth_keeps_the_whole_block_of_a_row_or_nothing(lesson):
    torch.manual_seed(0)
    x = torch.ones(200, 3, 2)
    added = lesson.StochasticDepth(nn.Identity(), survive=0.5)(x) - x
    assert set(added.flatten().tolist()) == {0.0, 2.0}
    assert bool((added.flatten(1).amax(1) == added.flatten(1).amin(1)).all())


def test_a_shut_gate_runs_nothing_and_an_open_one_everything(lesson):
    block, ran = nn.Linear(4, 4), []
    net = lesson.Gated(block, 4).eval()
    net.gate.weight.data.zero_()
    x = torch.randn(5, 4)
    with torch.no_grad():
        opened = x + torch.sigmoid(torch.tensor(1.0)) * block(x)
        block.register_forward_hook(lambda m, args, out: ran.append(len(out)))
        for bias, wanted in ((-1.0, x), (1.0, opened)):
            net.gate.bias.fill_(bias)
            assert torch.allclose(net(x), wanted, atol=1e-6)
    assert ran == [0, 5]


def test_what_is_no_partition_of_the_parameters_is_named(lesson):
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))
    first = list(net[0].parameters())
    lesson.assert_partition(net, [{"params": first}])
    wrong = {
        r"1\.bias in 1 group": [net[1].bias],  # frozen
        r"0\.bias in 2 group": [net[0].bias],
        "not the model's": [nn.Parameter(torch.ones(1))],
    }
    for message, parameters in wrong.items():
        with pytest.raises(ValueError, match=message):
            lesson.assert_partition(net, [{"params": first}, {"params": parameters}])


def test_what_is_replaced_keeps_names_order_modes_dtypes_and_sharing(lesson):
    norm = nn.BatchNorm2d(4).double().eval()
    root = nn.ModuleDict({"a": nn.Sequential(nn.Conv2d(1, 4, 3), norm), "b": nn.ModuleList([norm, nn.ReLU()])})
    root.c = nn.BatchNorm2d(4).requires_grad_(False)
    before = [name for name, _ in root.named_modules(remove_duplicate=False)]
    names = lesson.replace_modules(root, nn.BatchNorm2d, lambda old: nn.GroupNorm(2, old.num_features))
    assert names == ["a.1", "b.0", "c"]
    assert [name for name, _ in root.named_modules(remove_duplicate=False)] == before
    assert root["a"][1] is root["b"][0]
    found = [(module.weight.dtype, module.training, module.weight.requires_grad) for module in (root["a"][1], root.c)]
    assert found == [(torch.float64, False, True), (torch.float32, True, False)]
    # only the outermost, and never the root
    root = nn.Sequential(nn.Sequential(nn.ReLU(), nn.Sequential(nn.ReLU())), nn.ReLU())
    assert lesson.replace_modules(root, nn.Sequential, lambda old: nn.Identity()) == ["0"]
    assert list(dict(root.named_modules())) == ["", "0", "1"]


# ---------------------------------------------------------------- checkpoints for another net


def test_every_key_is_accounted_for(lesson):
    state = {f"net.{i}.{k}": torch.full((2,), float(i)) for i in (0, 1, 10) for k in ("w", "b")}
    state |= {"step": torch.tensor(3), "stay": torch.zeros(1), "odd": torch.zeros(1), "wide": torch.zeros(3)}
    given = dict(state)
    rules = [
        lesson.Rule(r"net\.(\d+)\.(\w)", r"layers.\1.\2"),
        lesson.Rule(r"layers\.1\.b", r"layers.1.b", torch.neg),
        lesson.Rule("step", None),
    ]
    target = {f"layers.{i}.{k}": torch.zeros(2) for i in (0, 1, 10, 11) for k in ("w", "b")}
    target |= {"stay": torch.zeros(1), "wide": torch.zeros(2)}
    result, report = lesson.remap_state_dict(state, rules, target)
    assert report.kept == ["stay", "wide"]
    assert report.dropped == ["step"]
    assert report.left == ["odd"]
    assert report.missing == ["layers.11.w", "layers.11.b"]
    assert report.mismatched == ["wide"]
    assert report.changed == {f"layers.{i}.{k}": [f"net.{i}.{k}"] for i in (0, 1, 10) for k in ("w", "b")}
    assert (float(result["layers.10.w"][0]), float(result["layers.1.b"][0])) == (10, -1)
    assert state == given


def test_a_report_is_complete_if_nothing_is_left_missing_or_mismatched(lesson):
    state = nn.Linear(2, 3).state_dict() | {"_extra_state": {"scale": 2}}
    lazy = {**nn.LazyLinear(3).state_dict(), "_extra_state": {"scale": 1}}  # neither has a shape to compare
    wider = state | {"bias": torch.zeros(4)}
    targets = {"complete": lazy, "left": {}, "missing": lazy | {"more": torch.zeros(1)}, "mismatched": wider}
    for name, target in targets.items():
        assert lesson.remap_state_dict(state, [], target)[1].complete == (name == "complete"), name


def test_a_rule_may_swap_two_keys_split_one_and_be_left_out(lesson):
    state = {"a.b": torch.zeros(1), "b.a": torch.arange(4)}
    swap = lesson.Rule(r"(\w)\.(\w)", r"\2.\1")
    split = lesson.Rule(r"a\.b", ("c", "d"), lambda tensor: tensor.chunk(2))
    missing = lesson.Rule(r"module\.(.+)", r"\1", optional=True)
    swapped, _ = lesson.remap_state_dict(state, [missing, swap, split], {})
    assert {key: tensor.tolist() for key, tensor in swapped.items()} == {"b.a": [0], "c": [0, 1], "d": [2, 3]}


@pytest.mark.parametrize("size", [5, 20])
def test_positions_are_resized_like_an_image(lesson, size):
    """Pillow's bicubic is the oracle, which smooths before it shrinks."""
    position = torch.randn(1, 14 * 14, 3)
    resized = lesson.resize_positions(position, size)
    for channel in range(3):
        image = Image.fromarray(position[0, :, channel].reshape(14, 14).numpy())
        wanted = torch.from_numpy(np.array(image.resize((size, size), Image.Resampling.BICUBIC)))
        assert torch.allclose(resized[0, :, channel].reshape(size, size), wanted, atol=1e-5)
    half = lesson.resize_positions(torch.cat([torch.ones(1, 1, 3), position], dim=1).bfloat16(), size, tokens=1)
    assert (half.shape, half.dtype) == ((1, 1 + size**2, 3), torch.bfloat16)
