"""Seeds, times, expected errors, warnings that are kept back: what notebooks rely on."""

import contextlib
import gc
import itertools
import logging
import os
import random
import sys
import time
import warnings
import weakref

import numpy as np
import pytest
import torch

from shared import compare, expect_error, make_generator, measure, pretty_seconds, quiet, seed_everything, stopwatch
from shared.text import wrapped


def test_one_seed_for_all_generators():
    def draw():
        return random.random(), np.random.rand(), torch.rand(1).item()

    with torch.random.fork_rng(devices=[]):
        seed_everything(7)
        first = draw()
        seed_everything(7)
        assert draw() == first
        seed_everything(8)
        assert all(a != b for a, b in zip(draw(), first, strict=True))
    assert make_generator(3).initial_seed() == 3


# ---------------------------------------------------------------- timing


def test_a_time_is_that_of_one_call_and_rough_ones_take_a_tenth(monkeypatch):
    """By a clock that only the measured functions move. The first call may compile: it counts for nothing."""
    now, calls = 0.0, []

    def taking(*durations):
        upcoming = itertools.chain(durations, itertools.repeat(durations[-1]))

        def work():
            nonlocal now
            now += next(upcoming)
            calls.append(now)

        return work

    monkeypatch.setattr("shared.timing._synchronised_clock", lambda: now)
    monkeypatch.delenv("COURSE_TIMING", raising=False)  # `python -m course test` sets it
    timing = measure(taking(8.0, 0.0625), seconds=1, blocks=4)
    assert (timing.low, timing.median, timing.high) == (0.0625, 0.0625, 0.0625)
    assert len(calls) == 2 + 16, "two to warm up, then for one second"

    timings = compare({"short": taking(0.002), "long": taking(0.02, 0.02, 0.01, 0.03, 0.02)}, seconds=0.06, blocks=3)
    assert list(timings) == ["short", "long"]
    assert str(timings["short"]) == "short: 2 ms (2 ms to 2 ms)"
    assert str(timings["long"]) == "long: 20 ms (10 ms to 30 ms)"

    assert measure(taking(5.0), seconds=1).median == 5, "once at least"
    calls.clear()
    monkeypatch.setenv("COURSE_TIMING", "rough")
    measure(taking(0.0625), seconds=10, blocks=4)
    assert len(calls) == 2 + 16


def test_stopwatch_counts_even_if_the_block_raises():
    with contextlib.suppress(KeyError), stopwatch() as watch:
        time.sleep(0.01)
        raise KeyError
    assert watch.seconds >= 0.01


def test_pretty_seconds():
    assert [pretty_seconds(s) for s in (2, 0.0123, 0.001, 4.56e-5)] == ["2 s", "12.3 ms", "1 ms", "45.6 µs"]


# ---------------------------------------------------------------- expected errors


def test_the_error_is_printed_short_and_kept_without_its_tensors(capsys):
    def fail():
        tensor = torch.zeros(3)
        alive.append(weakref.ref(tensor))
        raise ValueError("this is no good\nsecond\nthird")

    alive = []
    with expect_error(ValueError, match="no good", lines=2) as caught:
        fail()
    assert capsys.readouterr().out == "ValueError: this is no good\nsecond ...\n"
    assert str(caught.error).startswith("this is no good")
    with expect_error():
        raise RuntimeError("short")
    assert capsys.readouterr().out == "RuntimeError: short\n"
    gc.collect()
    assert alive[0]() is None


@pytest.mark.parametrize("length", [80, 89, 92])
def test_no_printed_line_is_wider_than_the_column(length, capsys):
    """Whole words, a word that is cut, and the dots for what is left out all have to fit."""
    with expect_error(ValueError, lines=2):
        raise ValueError(f"{'x' * length} {'a word ' * 30}\n")
    with expect_error(ValueError, lines=1):
        raise ValueError("y" * (length // 2) + " " + "y" * (length // 2) + "\nmore")
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 3
    assert max(map(len, printed)) <= 96
    assert printed[1].endswith(" ...")
    assert printed[2].endswith("y ...")
    assert wrapped("x" * 90 + " --no-deps").endswith("\n--no-deps"), "no word is cut at a hyphen"


def test_what_is_not_the_expected_failure_fails():
    with pytest.raises(AssertionError, match="expected RuntimeError, but nothing was raised"), expect_error():
        pass
    with pytest.raises(AssertionError, match="matching 'in-place', got RuntimeError: other"):  # noqa: SIM117
        with expect_error(match="in-place"):
            raise RuntimeError("other")
    with pytest.raises(KeyError), expect_error(RuntimeError):
        raise KeyError


# ---------------------------------------------------------------- kept back


def test_quiet_collects_warnings_and_keeps_back_lines_until_the_block_ends(capsys, monkeypatch):
    monkeypatch.setattr(logging.root.manager, "disable", logging.INFO)  # as in another quiet block
    stream, filters, level = sys.stderr, list(warnings.filters), logging.root.manager.disable
    with contextlib.suppress(KeyError), quiet() as caught:
        for _ in range(2):  # repeated ones count, too
            warnings.warn("old", FutureWarning, stacklevel=1)
        logging.getLogger("some").error("a line")
        print("another line", file=sys.stderr)
        raise KeyError
    assert [(w.category, str(w.message)) for w in caught] == [(FutureWarning, "old")] * 2
    assert capsys.readouterr().err == ""
    assert (sys.stderr, list(warnings.filters), logging.root.manager.disable) == (stream, filters, level)


def test_the_hurried_compiler_has_a_cache_of_its_own():
    from shared.quick_compiler import quick_compiler  # which takes Inductor along

    with quick_compiler():
        assert os.listdir(inside := os.environ["TORCHINDUCTOR_CACHE_DIR"]) == []
    assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") != inside
