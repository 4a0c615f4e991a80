"""Times of small pieces of code: warmed up, device-synchronised, median of repeats.

COURSE_TIMING=rough takes a tenth of the time. Tests that run a notebook without reading its times set it.
"""

import os
import timeit
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median, quantiles

import torch


@dataclass(frozen=True)
class Timing:
    """Seconds for one call.

    Attributes:
        label: what was timed.
        median: median over the blocks, in seconds.
        low, high: first and third quartile over the blocks, in seconds.
        calls: how many calls were timed in all.
    """

    label: str
    median: float
    low: float
    high: float
    calls: int

    def __str__(self) -> str:
        return (
            f"{self.label}: {pretty_seconds(self.median)} ({pretty_seconds(self.low)} to {pretty_seconds(self.high)})"
        )


def pretty_seconds(seconds: float) -> str:
    """`0.00123` as `1.23 ms`; three significant digits in s, ms or µs."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


def rough() -> bool:
    """Whether nobody reads the times: COURSE_TIMING=rough."""
    return os.environ.get("COURSE_TIMING", "") == "rough"


def measure(function: Callable[[], object], label: str = "", *, seconds: float = 0.2, blocks: int = 7) -> Timing:
    """Time one function.

    Args:
        function: called without arguments; its result is dropped.
        label: what it is, for tables.
        seconds: about how long to measure, warm-up not counted.
        blocks: how many blocks the calls are split into; the result is the median over them.
    """
    return compare({label: function}, seconds=seconds, blocks=blocks)[label]


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

    Raises:
        ValueError: `seconds` or `blocks` is not positive.
    """
    if seconds <= 0 or blocks < 1:
        raise ValueError(f"seconds and blocks must be positive, got seconds={seconds}, blocks={blocks}")
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
    return {label: _summary(label, found, calls[label] * blocks) for label, found in times.items()}


class _Watch:
    seconds: float = float("nan")


@contextmanager
def stopwatch() -> Iterator[_Watch]:
    """Time a block once, device-synchronised: `with stopwatch() as watch: ...`, then `watch.seconds`."""
    watch = _Watch()
    start = _synchronised_clock()
    try:
        yield watch
    finally:
        watch.seconds = _synchronised_clock() - start


def _summary(label: str, times: list[float], calls: int) -> Timing:
    low, _, high = quantiles(times, n=4) if len(times) > 1 else (times[0],) * 3
    return Timing(label, median(times), low, high, calls)


def _synchronised_clock() -> float:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return timeit.default_timer()
