"""What a doctor of training scripts needs besides its checks."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves


@contextmanager
def restored(model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    """After the block, model and optimizer are as they were before it, and so are PyTorch's random numbers."""
    weights = copy.deepcopy(model.state_dict())
    state = copy.deepcopy(optimizer.state_dict())
    was_training = {module: module.training for module in model.modules()}
    grads = {q: q.grad for q in model.parameters()}
    model.zero_grad()  # so that nobody adds to the gradients that are kept here
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices=gpus):
            yield
    finally:
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        for module, training in was_training.items():
            module.training = training
        for q, grad in grads.items():
            q.grad = grad


def parameters_in(value: object) -> list[Tensor]:
    """What can learn in an attribute, also in lists and dictionaries."""
    found: list[Tensor] = []
    for part in tree_leaves(value):
        if isinstance(part, nn.Module):
            found += [q for q in part.parameters() if q.requires_grad]
        elif isinstance(part, Tensor) and part.is_leaf and part.requires_grad:
            found.append(part)
    return found


def probe_accuracy(x: Tensor, y: Tensor) -> float:
    """Fit ridge regression to one half of the data; return its accuracy on the other half.

    Args:
        x: images (N, C, H, W), which are shrunk to 8 × 8, or other features with N in front.
        y: their classes (N,).
    """
    small = F.adaptive_avg_pool2d(x, 8) if x.dim() == 4 else x
    features = small.detach().cpu().double().flatten(1)
    features = (features - features.mean(0)) / features.std(0).clamp(min=1e-6)
    features = F.pad(features, (0, 1), value=1.0)  # a column for the bias
    y = y.cpu()
    targets = F.one_hot(y).double()

    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    fit = order[: len(y) // 2]
    rest = order[len(y) // 2 :]

    # ridge regression: (XᵀX + 100 I) W = XᵀY
    known = features[fit]
    ridge = 100 * torch.eye(known.shape[1], dtype=known.dtype)
    weights = torch.linalg.solve(known.T @ known + ridge, known.T @ targets[fit])
    guess = (features[rest] @ weights).argmax(dim=1)
    return (guess == y[rest]).double().mean().item()
