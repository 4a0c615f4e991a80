"""What a step of a training loop costs, and the loop of a framework to compare with."""

import gc
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from shared.timing import rough

SHORT, LONG = 10, 60  # steps of two fits; their difference is free of what a fit costs once
# of processor time: other programs take less from it; Windows counts it in ticks of 16 ms
CLOCK = time.perf_counter if sys.platform == "win32" else time.process_time


def small_problem(
    steps: int,
) -> tuple[nn.Module, torch.optim.Optimizer, Callable, list[tuple[torch.Tensor, torch.Tensor]]]:
    """A 64-64-10 perceptron, SGD, cross-entropy and a list of batches of 32: always the same."""
    dice = torch.Generator().manual_seed(1)
    xs, ys = torch.randn(steps, 32, 64, generator=dice), torch.randint(10, (steps, 32), generator=dice)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return model, torch.optim.SGD(model.parameters(), 0.1), F.cross_entropy, list(zip(xs, ys, strict=True))


def fitted(way: Callable[..., object]) -> nn.Module:
    """The small problem's model after `way(model, optimizer, loss_fn, batches)`."""
    problem = small_problem(LONG)
    way(*problem)
    return problem[0]


def step_costs(ways: Mapping[str, Callable[..., object]], rounds: int = 60) -> dict[str, float]:
    """Microseconds a step, for functions that are called as `way(model, optimizer, loss_fn, batches)`.

    One thread, the ways in turns, a fit of 10 and one of 60 steps each; the difference of low quantiles of many such
    fits' processor times, which other programs disturb least and which has nothing of what a fit costs once.
    """
    rounds = min(rounds, 2) if rough() else rounds
    threads = torch.get_num_threads()
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in ways}
    torch.set_num_threads(1)
    try:
        for name, way in [*ways.items()] * rounds:
            for times, steps in zip(found[name], (SHORT, LONG), strict=True):
                problem = small_problem(steps)
                gc.disable()
                start = CLOCK()
                way(*problem)
                times.append((CLOCK() - start) * 1e6)
                gc.enable()
    finally:
        gc.enable()
        torch.set_num_threads(threads)
    low = {name: [float(np.quantile(times, 0.1)) for times in both] for name, both in found.items()}
    return {name: (long - short) / (LONG - SHORT) for name, (short, long) in low.items()}


class _Idle:
    """A model and an optimizer that do nothing, on the CPU."""

    param_groups = ({"lr": 0.1},)

    def __init__(self) -> None:
        self.loss = torch.ones((), requires_grad=True) * 1
        self.loss.backward = lambda: None  # type: ignore[method-assign]

    def __call__(self, x: Any) -> Any:
        return x

    def train(self, mode: bool = True) -> None: ...
    def zero_grad(self) -> None: ...
    def step(self) -> None: ...

    def parameters(self) -> Iterator[torch.Tensor]:
        return iter([self.loss])


def own_costs(ways: Mapping[str, Callable[..., object]], rounds: int = 400) -> dict[str, float]:
    """Microseconds of a loop's own work in a step: the model, the loss and the optimizer do nothing.

    Called as in `step_costs`. The ways in turns, fits of 10 and of 110 steps; the difference of the shortest times.
    The fits take less than a millisecond or two, so that even on a busy machine some of them aren't interrupted.
    """
    rounds = min(rounds, 2) if rough() else rounds
    idle = _Idle()
    shortest: dict[tuple[str, int], float] = {}
    for name, way in [*ways.items()] * rounds:
        for steps in (SHORT, SHORT + 100):
            batches = [(0, 0)] * steps
            start = time.perf_counter()
            way(idle, idle, lambda output, y: idle.loss, batches)
            seconds = time.perf_counter() - start
            shortest[name, steps] = min(seconds, shortest.get((name, steps), seconds))
    return {name: (shortest[name, SHORT + 100] - shortest[name, SHORT]) / 100 * 1e6 for name in ways}


def lightning_fit(model: nn.Module, optimizer: Any, loss_fn: Callable, batches: Any, log: bool = False) -> None:
    """Train with Lightning's Trainer, on the CPU and with all that can be switched off switched off.

    With `log` the step calls `self.log` for its loss; no logger writes it anywhere.

    Raises:
        ImportError: Lightning is not installed.
    """
    import lightning

    class Wrapped(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = loss_fn(self.model(batch[0]), batch[1])
            if log:
                self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return optimizer

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    off = {f"enable_{name}": False for name in ("progress_bar", "model_summary", "checkpointing")}
    with warnings.catch_warnings(action="ignore"):
        trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", logger=False, **off)
        trainer.fit(Wrapped(), DataLoader(batches, batch_size=None))
