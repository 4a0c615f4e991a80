"""What a check says: outcome, place, hint; what counts as equal; and that only an untouched stub isn't attempted."""

import json
import random
import re
from collections import OrderedDict

import numpy as np
import pytest
import torch

from shared.checks.feedback import CheckFailed, exercise, exercises_of
from shared.text import WIDTH

INF, NAN = float("inf"), float("nan")


@exercise("15-99.1", "Doubling", points=30, stand_in=lambda: "stand-in", stand_in_name="2 * x")
def doubling(trial, answer):
    trial.close("doubles", answer(torch.ones(2, 3)), torch.full((2, 3), 2.0), hint="multiply", see=2)
    trial.equal("twice", answer(torch.tensor(2)), torch.tensor(4), hint="twice")


@exercise("15-99.2", "Tripling", points=70)
def tripling(trial, answer):
    trial.equal("triples", answer(2), 6, hint="three times")


def held(body):
    """A check that was made of one function of the trial, run."""
    return exercise("15-98.1", "Held", points=1)(lambda trial, answer: body(trial)).run(None)


def spoilt(x):
    y = 2.0 * x
    y[1, 2] += 1
    return y


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
        doubling(lambda x: x)  # it passed before, and does no longer
    tripling(lambda x: 3 * x)
    assert capsys.readouterr().out.splitlines()[-1] == "1 of 2 exercises, 70 of 100 points"


def test_a_result_carries_number_title_points_and_items():
    assert [known.number for known in exercises_of("15-99")] == ["15-99.1", "15-99.2"]
    right = doubling.run(lambda x: 2 * x)
    assert (right.exercise, right.title, right.points, right.earned) == ("15-99.1", "Doubling", 30, 30)
    assert [item.name for item in right.items] == ["doubles", "twice"]
    assert right.failure is None
    wrong = doubling.run(lambda x: 2 * x.float())
    assert (wrong.status, wrong.earned) == ("failed", 0)
    assert [(item.name, item.passed) for item in wrong.items] == [("doubles", True), ("twice", False)]
    assert wrong.failure.name == "twice"
    assert str(wrong).startswith("Exercise 15-99.1 · Doubling: failed\n")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda x: x, r"expected: 2 at index \(0, 0\)\s+got:\s+1 at index \(0, 0\), the largest of 6 differences"),
        (spoilt, r"got:\s+3 at index \(1, 2\)"),
        (lambda x: 2 * x[:1], r"expected: shape \(2, 3\)\s+got:\s+shape \(1, 3\)"),
        (lambda x: 2 * x.double(), "dtype torch.float64"),
        (lambda x: torch.empty_like(x, device="meta"), "device meta"),
        (lambda x: None, "got:.*NoneType"),
        (lambda x: x * NAN, r"got:\s+nan"),
        (lambda x: 2 * x.float(), "dtype torch.int64"),
        (lambda x: undefined(x), "NameError: name 'undefined' is not defined.*undefined"),  # noqa: F821
        (lambda x: exit(), "SystemExit"),
    ],
)
def test_a_failure_says_what_and_where(answer, message):
    with pytest.raises(CheckFailed, match=message) as failure:
        doubling(answer)
    assert "hint:" in str(failure.value)


def test_a_failure_names_the_folded_hint_to_open():
    assert doubling.run(lambda x: x).failure.see == 2
    assert "hint:     multiply; open Hint 2 of the task" in str(doubling.run(lambda x: x))
    assert "open Hint" not in str(doubling.run(lambda x: 2 * x.float()))


@pytest.mark.parametrize(
    ("got", "want", "message"),
    [
        ([INF, 1.0], [INF, 2.0], r"expected: 2 at index \(1,\)\s+got:\s+1 at index \(1,\)"),
        ([NAN], [0.0], "expected: 0 at"),
        ([0.0], [NAN], "expected: nan at"),
        ([INF], [-INF], "expected: -inf"),
        ([INF], [3.4e38], "got:  *inf"),
        ([1 + 1e-4], [1.0], "expected: 1 at"),
        ([1e-4], [0.0], "expected: 0 at"),
        ([1.0, 1.5, 1.25], [1.0, 1.0, 1.0], r"1.5 at index \(1,\), the largest of 2"),
        ([1.00002], [1.0], r"1\.00002"),
        ([True, False], [True, True], r"expected: True at index \(1,\)\s+got:\s+False"),
        ([1, 2], [1, 3], "expected: 3"),
    ],
)
def test_close_rejects(got, want, message):
    result = held(lambda trial: trial.close("same", torch.tensor(got), torch.tensor(want)))
    assert result.status == "failed"
    assert re.search(message, str(result)), str(result)


@pytest.mark.parametrize(
    ("dtype", "near", "far"),
    [
        (torch.float64, 1e-10, 1e-7),
        (torch.float32, 5e-6, 1e-4),
        (torch.bfloat16, 1e-2, 0.1),
        (torch.float16, 1e-3, 0.01),
    ],
)
def test_close_allows_roundings_and_no_more(dtype, near, far):
    one = torch.ones(2, dtype=dtype)
    for error, status in ((near, "passed"), (-near, "passed"), (far, "failed"), (-far, "failed")):
        assert held(lambda trial, e=error: trial.close("same", one * (1 + e), one)).status == status
    assert held(lambda trial: trial.close("wider", one * (1 + far), one, rtol=0.2, atol=0)).status == "passed"
    special = torch.tensor([INF, -INF, NAN], dtype=dtype)
    assert held(lambda trial: trial.close("special", special.clone(), special)).status == "passed"
    assert held(lambda trial: trial.close("none", one[:0], one[:0])).status == "passed"


@pytest.mark.parametrize(
    ("got", "want"),
    [
        (torch.tensor([INF]), torch.tensor([torch.finfo(torch.float32).max])),
        (torch.tensor([-0.0]), torch.tensor([0.0])),
        (torch.tensor([1.0]).nextafter(torch.tensor(2.0)), torch.tensor([1.0])),
        (torch.tensor([0.0]), torch.tensor([NAN])),
        (torch.tensor(1), 1),
        (1.0, 1),
        (True, 1),
        (1, True),
        (0.1 + 0.2, 0.3),
        ([1, 2], (1, 2)),
        ([1, 2, 3], [1, 2]),
        ({"a": 1}, {"b": 1}),
        ([torch.tensor([1.0])], [torch.tensor([2.0])]),
        ("a", "b"),
        (None, 0),
    ],
)
def test_equal_rejects(got, want):
    assert held(lambda trial: trial.equal("same", got, want)).status == "failed"


@pytest.mark.parametrize(
    ("got", "want"),
    [
        (torch.tensor([NAN, INF, -0.0]), torch.tensor([NAN, INF, -0.0])),
        (torch.tensor([1 + 2j]), torch.tensor([1 + 2j])),
        (torch.ones(0, 3), torch.ones(0, 3)),
        (np.float64(0.5), 0.5),
        (np.int64(3), 3),
        (1, 1.0),
        (np.True_, True),
        ([torch.tensor([1.0]), 2], [torch.tensor([1.0]), 2]),
        (OrderedDict(a=1), {"a": 1}),
        (NAN, NAN),
    ],
)
def test_equal_accepts(got, want):
    assert held(lambda trial: trial.equal("same", got, want)).status == "passed"


def test_numbers_that_print_alike_are_shown_in_full():
    shown = str(held(lambda trial: trial.equal("same", torch.tensor([1.0000001]), torch.tensor([1.0]))))
    assert "1.0000001192" in shown


def test_jupyter_shows_the_message_without_a_traceback():
    with pytest.raises(CheckFailed) as failure:
        doubling(lambda x: x)
    assert failure.value._render_traceback_() == str(failure.value).splitlines()


def test_only_a_bare_notimplementederror_is_a_stub(capsys):
    def stub(x):
        raise NotImplementedError

    def torchs_own(x):
        raise NotImplementedError("Could not run 'aten::foo'")

    def half(x):
        if x.dim() == 2:
            return 2 * x
        raise NotImplementedError

    assert doubling(stub) == "stand-in"
    assert doubling.used == "stand-in: 2 * x"
    assert capsys.readouterr().out.splitlines() == [
        "Exercise 15-99.1 · Doubling: not attempted yet",
        "  the cells below use a stand-in: 2 * x",
    ]
    assert tripling(stub) is None
    assert capsys.readouterr().out.splitlines() == ["Exercise 15-99.2 · Tripling: not attempted yet"]
    assert doubling.run(stub).earned == 0
    with pytest.raises(CheckFailed, match="Could not run"):
        doubling(torchs_own)
    with pytest.raises(CheckFailed, match="still raises NotImplementedError"):
        doubling(half)


def test_a_stand_in_has_a_name():
    for arguments in ({"stand_in": lambda: 1}, {"stand_in_name": "one"}):
        with pytest.raises(ValueError, match="together"):
            exercise("15-97.1", "x", points=1, **arguments)


def test_what_a_stub_fulfils_already_is_no_sign_of_an_attempt():
    def body(trial, answer):
        trial.needs("is a class", True, expected="a class", got="a class")
        answer()

    def stub():
        raise NotImplementedError

    result = exercise("15-97.2", "x", points=1)(body).run(stub)
    assert result.status == "not attempted"


def test_call_reports_the_answers_own_exception_with_the_items_hint():
    result = held(lambda trial: trial.call("runs", lambda: 1 / 0, hint="look here"))
    assert "WRONG  runs" in str(result)
    assert "ZeroDivisionError" in result.failure.got
    assert result.failure.hint == "look here"
    assert held(lambda trial: trial.equal("value", trial.call("runs", lambda: 3), 3)).status == "passed"


def test_an_exception_is_shown_with_the_students_line_and_what_stands_behind_a_colon():
    model = torch.nn.Linear(2, 2)

    def load():
        model.load_state_dict({"weight": torch.zeros(2, 2)})

    def decode():
        json.loads("{")

    for function, said, line in (
        (load, "Missing key(s) in state_dict", "model.load_state_dict({"),
        (decode, "JSONDecodeError: Expecting property name", 'json.loads("{")'),
    ):
        failed = held(lambda trial, function=function: trial.call("it runs", function)).failure
        assert said in failed.got
        assert f"in {function.__name__}, line " in failed.got
        assert line in failed.got


def test_a_group_is_one_item_named_after_the_case_that_fails():
    def body(trial, worst):
        with trial.group("all small", see=1):
            for n in range(4):
                trial.that(f"n = {n}", n < worst, expected="small", got=n)
        trial.equal("after", 1, 1)

    assert [item.name for item in held(lambda trial: body(trial, 9)).items] == ["all small", "after"]
    failed = held(lambda trial: body(trial, 2))
    assert failed.failure.name == "all small"
    assert failed.failure.see == 1
    assert [line.strip() for line in str(failed).splitlines()[3:5]] == ["got:      2", "(n = 2)"]


def test_an_exception_in_a_group_fails_its_item():
    def body(trial):
        with trial.group("all run", hint="look"):
            trial.that("one", 1 / 0 > 1, expected=1, got=0)

    failure = held(body).failure
    assert (failure.name, failure.hint) == ("all run", "look")
    assert "ZeroDivisionError" in failure.got


def test_an_item_can_be_left_out():
    def body(trial, answer):
        trial.equal("one", answer, 1)
        with trial.group("two"):
            trial.equal("case", answer, 2)
        trial.call("three", lambda: 1 / (answer - 3))

    check = exercise("15-96.1", "x", points=1)(body)
    assert check.run(2).failure.name == "one"
    assert check.run(2, without="one").status == "passed"
    assert check.run(1).failure.name == "two"
    assert check.run(1, without="two").status == "passed"
    assert check.run(3, without="one").failure.name == "two"


def test_an_interrupt_is_not_taken_for_a_wrong_answer():
    def interrupted(x):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        doubling(interrupted)


def test_a_report_of_several_lines_keeps_them():
    def lines(trial):
        trial.that("holds", False, expected="one", got="rank 0 waits\nrank 1 waits", hint="look")

    shown = str(held(lines)).splitlines()
    first = next(i for i, line in enumerate(shown) if "rank 0 waits" in line)
    assert shown[first + 1].strip() == "rank 1 waits"
    assert shown[first + 1].index("rank") == shown[first].index("rank")


def test_lines_fit():
    result = held(lambda trial: trial.that("long " * 40, False, expected="e " * 90, got="g " * 90, hint="h " * 90))
    assert max(map(len, str(result).splitlines())) <= WIDTH


def test_random_state_and_grad_mode_are_the_callers_again():
    def draws():
        return random.random(), np.random.rand(), torch.rand(1).item()

    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    want = draws()
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    inside = []

    def answer(x):
        inside.append((*draws(), torch.is_grad_enabled()))
        return 2 * x

    with torch.no_grad():
        assert doubling.run(answer).status == "passed"
        assert not torch.is_grad_enabled()
    first = list(inside)
    assert draws() == want
    inside.clear()
    doubling.run(answer)
    assert inside == first, "a check is the same in every run"
    assert all(enabled for *_, enabled in inside)
