"""What a notebook's call of a check does: report, points, stand-in, the way on, interrupts, endless answers."""

import contextlib
import random
import re
import signal
import threading
import time

import numpy as np
import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell

from shared.checks import notebook, words
from shared.checks.exercise import exercise
from shared.checks.report import CheckFailed, Item


def _double(x):
    return 2 * x


@exercise("15-99.1", "Doubling", points=30, demands=2, stand_in=lambda: _double, stand_in_name="2 * x")
def doubling(trial, answer):
    trial.close("doubles", answer(torch.ones(2, 3)), torch.full((2, 3), 2.0), hint="multiply", see=2)
    trial.equal("twice", answer(torch.tensor(2)), torch.tensor(4), hint="twice")


@exercise("15-99.2", "Tripling", points=70, demands=1)
def tripling(trial, answer):
    trial.equal("triples", answer(2), 6, hint="three times")


@pytest.fixture(autouse=True)
def _forgotten():
    notebook.REMEMBERED.clear()
    doubling._skipped = False
    doubling._handed_out.clear()


def stub(*args, **options):
    raise NotImplementedError


def half_right(x):
    return 2.0 * x  # a float also for an integer


def test_a_pass_prints_each_item_and_the_progress_and_returns_the_answer(capsys):
    def answer(x):
        return x + x

    assert doubling(answer) is answer
    assert capsys.readouterr().out.splitlines() == [
        "Exercise 15-99.1 · Doubling: passed",
        "  ok     doubles",
        "  ok     twice",
        "1 of 2 exercises, 30 of 100 points",
    ]
    assert doubling.used == "your answer"
    tripling(lambda x: 3 * x)
    assert capsys.readouterr().out.splitlines()[-1] == "2 of 2 exercises, 100 of 100 points"
    with pytest.raises(CheckFailed):
        doubling(half_right)  # it passed before, and does no longer
    tripling(lambda x: 3 * x)
    assert capsys.readouterr().out.splitlines()[-1] == "1 of 2 exercises, 85 of 100 points"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda x: x, r"expected: 2 at index \(0, 0\)\s+got:\s+1 at index \(0, 0\), the largest of 6 differences"),
        (lambda x: x, r"hint:     multiply; open Hint 2 of the task"),
        (half_right, r"expected: dtype torch.int64\s+got:\s+dtype torch.float32\s+hint:     twice\n"),
        (lambda x: 2 * y, r"(?s)NameError: name 'y' is not defined.*is the name misspelt, or not defined"),  # noqa: F821
        (lambda x: exit(), r"(?s)SystemExit.*hint:"),
    ],
)
def test_a_failure_says_what_and_where_and_which_folded_hint_to_open(answer, message):
    with pytest.raises(CheckFailed, match=message):
        doubling(answer)


def test_a_hint_that_asks_or_is_empty_is_followed_by_the_folded_one():
    assert Item("i", False, hint="why?", see=2).advice == "why? Open Hint 2 of the task"
    assert Item("i", False, see=2).advice == "open Hint 2 of the task"


def test_a_skipped_exercise_is_judged_but_hands_out_its_stand_in_until_its_line_is_gone(capsys):
    doubling.skip()
    assert doubling(half_right) is _double
    said = capsys.readouterr().out
    assert "failed, 15 of 30 points" in said
    assert said.splitlines()[-1] == "  the cells below use the course's answer: 2 * x"
    assert doubling.used == "the course's answer: 2 * x"
    with pytest.raises(CheckFailed):
        doubling(half_right)


@pytest.mark.parametrize(("run_by", "goes_on"), [("autograde", True), ("validate", False)])
def test_a_part_is_a_grade_for_nbgrader_and_no_success_for_its_validate(monkeypatch, run_by, goes_on):
    monkeypatch.setenv("NBGRADER_EXECUTION", run_by)
    monkeypatch.setattr(notebook, "grade", lambda result: None)  # it needs a kernel
    with contextlib.nullcontext() if goes_on else pytest.raises(CheckFailed):
        doubling(half_right)


def test_only_a_bare_notimplementederror_is_a_stub(capsys):
    def torchs_own(x):
        raise NotImplementedError("Could not run 'aten::foo'")

    def half(x):
        if x.dim() == 2:
            return 2 * x
        raise NotImplementedError

    assert doubling(stub) is _double
    assert doubling.used == "the course's answer: 2 * x"
    assert capsys.readouterr().out.splitlines() == [
        "Exercise 15-99.1 · Doubling: not attempted yet",
        "  If you have written an answer, run its cell first (Shift+Enter), then this one.",
        "  the cells below use the course's answer: 2 * x",
    ]
    doubling(doubling(stub))  # a check cell that is run twice
    assert capsys.readouterr().out.count("not attempted yet") == 2
    assert notebook.REMEMBERED[doubling.number] == 0
    assert tripling(stub) is None
    assert "course's answer" not in capsys.readouterr().out, "there is none"
    with pytest.raises(CheckFailed, match="Could not run"):
        doubling(torchs_own)
    with pytest.raises(CheckFailed, match="still raises NotImplementedError"):
        doubling(half)

    def body(trial, answer):
        trial.needs("is a class", True, expected="a class", got="a class")  # what a stub fulfils is no attempt
        with trial.group("a group"):
            trial.call("a case", lambda: answer(1))

    assert exercise("15-97.2", "x", points=1, demands=1)(body).run(stub).status == "not attempted"


# ---------------------------------------------------------------- whose mistake


def in_checks(*lines):
    """A check whose code counts as the course's own, since its file lies there."""
    names = {}
    exec(compile("\n    ".join(["def body(trial, answer):", *lines]), words.__file__, "exec"), names)
    return exercise("15-97.4", "x", points=9, demands=3, stand_in=lambda: _double, stand_in_name="2 * x")(names["body"])


@pytest.mark.parametrize("line", ["undefined_name", "import os; os.path.join(None)"])  # the latter raises in <frozen …>
def test_an_exception_of_the_checks_own_code_is_not_the_students(line):
    made = in_checks(f"with trial.group('two'): {line}")
    result = made.run(lambda x: 2 * x)
    assert (result.status, result.earned) == ("check broken", 0)
    assert "WRONG" not in str(result)
    with pytest.raises(CheckFailed, match=r"(?s)the check itself failed.*Please\s+report this"):
        made(lambda x: 2 * x)


def test_an_exception_on_what_the_answer_returns_is_the_students():
    result = in_checks("with trial.group('two'): answer(1).bit_length()").run(lambda x: None)
    assert (result.status, result.failure.name) == ("failed", "two")
    assert "'NoneType' object has no attribute 'bit_length'" in result.failure.got


def test_what_breaks_after_a_failure_could_not_be_judged():
    made = in_checks(
        "trial.equal('one', answer, 1)",
        "with trial.group('two'): answer.x",
        "trial.equal('three', 3, 3)",
    )
    result = made.run(0)
    assert [(item.name, item.passed) for item in result.items] == [("one", False), ("three", True)]
    assert (result.earned, result.unjudged) == (3.0, 1)


# ---------------------------------------------------------------- interrupts and endless answers


@pytest.mark.parametrize("timer", [True, False], ids=["timer signal", "without one, as on Windows"])
def test_an_endless_answer_ends_with_the_line_where_it_was(timer, monkeypatch):
    if not timer:
        monkeypatch.delattr(signal, "setitimer", raising=False)

    def endless(x):
        while True:
            with contextlib.suppress(Exception):
                x = x + 1

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # as a kernel does; nohup has it ignored
    result = doubling.run(endless, seconds=0.3)
    signal.signal(signal.SIGINT, before)
    assert (result.status, result.earned) == ("failed", 0)
    assert re.search(r"no end after 0\.3 s \(in endless, line \d+: ", str(result))


def test_an_answer_that_catches_everything_is_told_to_end_again_and_again():
    caught = []

    def stubborn(x):
        began = time.monotonic()
        while len(caught) < 2 and time.monotonic() < began + 30:
            try:
                time.sleep(0.01)
            except BaseException:
                caught.append(time.monotonic())
        raise ValueError("let go")

    assert doubling.run(stubborn, seconds=0.2).status == "failed"
    assert len(caught) == 2


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs a timer signal")
def test_a_wait_without_end_ends_too_and_the_alarm_goes_back_to_whoever_had_it():
    before = signal.getsignal(signal.SIGALRM)
    result = doubling.run(lambda x: threading.Event().wait(), seconds=0.3)
    assert "the answer comes to an end" in str(result)
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    assert signal.getsignal(signal.SIGALRM) is before


def test_jupyter_shows_no_traceback_of_a_failure_or_of_an_interrupt_but_the_way_on(capsys):
    InteractiveShell.clear_instance()
    shell = InteractiveShell.instance()
    shell.user_ns["check"] = doubling
    try:
        shell.run_cell("def endless(x):\n    raise KeyboardInterrupt\ncheck(endless)")
        interrupted = capsys.readouterr().out
        shell.run_cell("check(lambda x: x)")
        failed = capsys.readouterr().out
    finally:
        InteractiveShell.clear_instance()
        shell.history_manager.end_session()
    assert re.fullmatch(r"Exercise 15-99\.1: interrupted in endless, line 2: raise KeyboardInterrupt\n", interrupted)
    assert failed.startswith("Exercise 15-99.1 · Doubling: failed, 0 of 30 points\n  WRONG  doubles\n")
    assert "put this line above the check's call in this cell:" in failed.splitlines()[-2]
    assert failed.splitlines()[-1].strip() == "check.doubling.skip()"


def test_random_state_and_grad_mode_are_the_callers_again():
    def draws():
        return random.random(), np.random.rand(), torch.rand(1).item()

    def seed():
        random.seed(3)
        np.random.seed(3)
        torch.manual_seed(3)

    def seen(**options):
        inside = []
        with torch.no_grad():
            doubling.run(lambda x: inside.append((*draws(), torch.is_grad_enabled())) or 2 * x, **options)
            assert not torch.is_grad_enabled()
        return inside

    seed()
    want = draws()
    seed()
    first = seen()
    assert draws() == want
    assert seen() == first, "a check is the same in every run"
    assert all(enabled for *_, enabled in first)
    assert seen(seed=7) != first, "another seed, other cases"
