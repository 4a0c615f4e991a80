"""Seeding, timing and expected errors: what notebooks rely on."""

import contextlib
import gc
import itertools
import random
import time
import weakref

import numpy as np
import pytest
import torch

from shared import (
    compare,
    expect_error,
    measure,
    pretty_seconds,
    seed_everything,
    stopwatch,
)
from shared.errors import NothingRaised


@pytest.fixture(autouse=True)
def _restored():
    with torch.random.fork_rng(devices=[]):
        state, np_state = random.getstate(), np.random.get_state()
        yield
        random.setstate(state)
        np.random.set_state(np_state)


# ---------------------------------------------------------------- seeding


def draw():
    return random.random(), np.random.rand(), torch.rand(1).item()


def test_one_seed_for_all_generators():
    seed_everything(7)
    first = draw()
    seed_everything(7)
    assert draw() == first
    seed_everything(8)
    assert all(a != b for a, b in zip(draw(), first, strict=True))


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_out_of_range_is_an_error(seed):
    with pytest.raises(ValueError, match=str(seed)):
        seed_everything(seed)


# ---------------------------------------------------------------- timing


def test_times_are_ordered():
    timings = compare({"short": lambda: time.sleep(0.002), "long": lambda: time.sleep(0.02)}, seconds=0.1, blocks=3)
    assert list(timings) == ["short", "long"]
    assert 0.002 <= timings["short"].median < timings["long"].median
    assert timings["long"].low <= timings["long"].median <= timings["long"].high


def test_a_time_is_that_of_one_call(monkeypatch):
    """By a clock that only the measured function moves. Its first call may compile: that one counts for nothing."""
    monkeypatch.delenv("COURSE_TIMING", raising=False)  # `python -m course test` sets it
    now, durations = 0.0, itertools.chain([8.0], itertools.repeat(0.0625))

    def work():
        nonlocal now
        now += next(durations)

    monkeypatch.setattr("shared.timing._synchronised_clock", lambda: now)
    timing = measure(work, seconds=1, blocks=4)
    assert (timing.low, timing.median, timing.high) == (0.0625, 0.0625, 0.0625)
    assert timing.calls == 16, "for one second"


def test_rough_times_take_a_tenth(monkeypatch):
    monkeypatch.delenv("COURSE_TIMING", raising=False)
    calls = []
    usual = compare({"": lambda: calls.append(1)}, seconds=0.05)[""].calls
    monkeypatch.setenv("COURSE_TIMING", "rough")
    hasty = compare({"": lambda: calls.append(1)}, seconds=0.05)[""]
    assert len(calls) == usual + hasty.calls + 4  # two of each to warm up
    assert hasty.calls < usual / 2
    assert hasty.low <= hasty.median <= hasty.high


def test_measure_uses_all_threads():
    before = torch.get_num_threads()
    seen = set()
    assert measure(lambda: seen.add(torch.get_num_threads()), "threads", seconds=0.01, blocks=1).label == "threads"
    assert seen == {before}
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("bad", [{"seconds": 0}, {"blocks": 0}])
def test_bad_arguments(bad):
    with pytest.raises(ValueError, match="must be positive"):
        measure(lambda: None, **bad)


def test_stopwatch_counts_even_if_the_block_raises():
    watches = []
    with contextlib.suppress(KeyError), stopwatch() as watch:
        watches.append(watch)
        time.sleep(0.01)
        raise KeyError
    assert watches[0].seconds >= 0.01


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(2, "2 s"), (1, "1 s"), (0.0123, "12.3 ms"), (0.001, "1 ms"), (4.56e-5, "45.6 µs"), (0, "0 µs")],
)
def test_pretty_seconds(seconds, text):
    assert pretty_seconds(seconds) == text


# ---------------------------------------------------------------- expected errors


def test_the_error_is_printed_short_and_kept(capsys):
    with expect_error(ValueError, match="no good", lines=2) as caught:
        raise ValueError("this is no good\nsecond\nthird")
    assert capsys.readouterr().out == "ValueError: this is no good\nsecond ...\n"
    assert str(caught.error).startswith("this is no good")


@pytest.mark.parametrize("length", range(80, 110))
def test_no_printed_line_is_wider_than_the_column(length, capsys):
    """Whole words, a word that is cut, and the dots for what is left out all have to fit."""
    words = "a word " * 30
    with expect_error(ValueError, lines=2):
        raise ValueError(f"{'x' * length} {words}\n{words}")
    with expect_error(ValueError, lines=1):
        raise ValueError("y" * (length // 2) + " " + "y" * (length // 2) + "\nmore")
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 3
    assert max(map(len, printed)) <= 96
    assert printed[1].endswith(" ...")
    assert printed[2].startswith("ValueError: yyy")
    assert printed[2].endswith("y ...")


def test_nothing_raised_is_a_failure():
    with pytest.raises(NothingRaised, match="expected RuntimeError, but nothing was raised"), expect_error():
        pass


def test_another_message_is_a_failure():
    with (
        pytest.raises(NothingRaised, match=r"matching 'in-place', got RuntimeError: other"),
        expect_error(match="in-place"),
    ):
        raise RuntimeError("other")


def test_another_type_passes_through():
    with pytest.raises(KeyError), expect_error(RuntimeError):
        raise KeyError


def test_a_caught_error_keeps_no_tensors_alive():
    def fail():
        tensor = torch.zeros(3)
        alive.append(weakref.ref(tensor))
        raise RuntimeError("with a local")

    alive = []
    with expect_error(match="local") as caught:
        fail()
    gc.collect()
    assert caught.error is not None
    assert alive[0]() is None
