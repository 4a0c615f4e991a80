"""Times of small pieces of code: warmed up, device-synchronised, median of repeats.

COURSE_TIMING=rough takes a tenth of the time. Tests that run a notebook without reading its times set it.
"""

import os
import timeit
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import quantiles
from types import SimpleNamespace

import torch


@dataclass(frozen=True)
class Timing:
    """Seconds for one call: median, first and third quartile over the blocks."""

    label: str
    median: float
    low: float
    high: float

    def __str__(self) -> str:
        median, low, high = (pretty_seconds(seconds) for seconds in (self.median, self.low, self.high))
        return f"{self.label}: {median} ({low} to {high})"


def pretty_seconds(seconds: float) -> str:
    """`0.00123` as `1.23 ms`; three significant digits in s, ms or µs."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


def rough() -> bool:
    """Whether nobody reads the times: COURSE_TIMING=rough."""
    return os.environ.get("COURSE_TIMING", "") == "rough"


def measure(function: Callable[[], object], *, seconds: float = 0.2, blocks: int = 7) -> Timing:
    """Time one function that takes no arguments, as `compare` does."""
    return compare({"": function}, seconds=seconds, blocks=blocks)[""]


def compare(
    functions: Mapping[str, Callable[[], object]], *, seconds: float = 0.2, blocks: int = 7
) -> dict[str, Timing]:
    """Time several functions in turns, so that a busy moment of the machine meets all of them alike.

    Args:
        functions: label → function without arguments.
        seconds: about how long to measure each of them, warm-up not counted.
        blocks: how many blocks each one's calls are split into.

    Returns:
        label → Timing, in the order given.
    """
    if rough():
        seconds, blocks = seconds / 10, min(blocks, 2)
    timers, calls = {}, {}
    for label, function in functions.items():
        # not torch.utils.benchmark's Timer: importing that asks for CUDA, which no fork server may do
        timers[label] = timeit.Timer(function, timer=_synchronised_clock)
        once = timers[label].timeit(1)  # first call: warm-up, lazy initialisation
        once = min(once, timers[label].timeit(1))
        calls[label] = max(1, round(seconds / blocks / max(once, 1e-7)))
    times: dict[str, list[float]] = {label: [] for label in functions}
    for _ in range(blocks):
        for label, timer in timers.items():
            times[label].append(timer.timeit(calls[label]) / calls[label])
    return {label: _summary(label, found) for label, found in times.items()}


@contextmanager
def stopwatch() -> Iterator[SimpleNamespace]:
    """Time a block once, device-synchronised: `with stopwatch() as watch: ...`, then `watch.seconds`."""
    watch = SimpleNamespace(seconds=float("nan"))
    start = _synchronised_clock()
    try:
        yield watch
    finally:
        watch.seconds = _synchronised_clock() - start


def _summary(label: str, times: list[float]) -> Timing:
    low, middle, high = quantiles(times, n=4) if len(times) > 1 else times * 3
    return Timing(label, middle, low, high)


def _synchronised_clock() -> float:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return timeit.default_timer()
