"""How a check judges: which demands are listed, what a failure stops, what it says of exceptions."""

import json

import pytest
import torch

from shared.checks.exercise import exercise
from shared.checks.trial import AGAIN
from shared.text import WIDTH


def judged(body, demands=1):
    """A check that was made of one function of the trial, run."""
    return exercise("15-98.1", "Held", points=12, demands=demands)(lambda trial, answer: body(trial)).run(None)


def outcomes(result):
    return [(item.name, item.passed) for item in result.items]


def test_a_demand_that_fails_keeps_no_other_from_being_judged():
    def body(trial):
        trial.equal("one", 1, 2)
        trial.equal("two", 2, 2)
        trial.that("three", False, expected="a", got="b")
        for name in "abcd":
            trial.close(name, 1.0, 1.0)

    result = judged(body, demands=7)
    assert outcomes(result)[:4] == [("one", False), ("two", True), ("three", False), ("a", True)]
    assert (result.status, result.earned, result.unjudged) == ("failed", 8.6, 0)  # 12 · 5/7, to one decimal
    assert str(result).splitlines()[0] == "Exercise 15-98.1 · Held: failed, 8.6 of 12 points"
    assert str(result).count("WRONG") == 2


@pytest.mark.parametrize("way", ["needs", "call"])
def test_what_needs_a_failed_demand_is_not_judged_and_the_report_says_how_much_that_is(way):
    def body(trial):
        trial.equal("one", 1, 1)
        if way == "needs":
            trial.needs("runs", False, expected="a list", got="None", hint="look here")
        else:
            trial.equal("value", trial.call("returns", lambda: 3), 3)
            trial.call("runs", lambda: 1 / 0, hint="look here")
        trial.equal("last", 1, 1)

    result = judged(body, demands=3)
    assert outcomes(result)[-1] == ("runs", False)
    assert result.earned == (4 if way == "needs" else 8), "a guard earns nothing"
    assert result.failure.hint == "look here"
    left = "2 more demands build" if way == "needs" else "1 more demand builds"
    assert f"{left} on what is wrong above" in str(result)


def test_demands_that_doing_nothing_meets_earn_nothing_alone():
    def body(trial, works):
        trial.that("computes", works, expected="4", got="None")
        trial.equal("x stays as it is", 1, 1, free=True)
        with trial.group("the model stays as it is", free=True):
            trial.equal("its mode", True, True)
        trial.equal("and returns it", 1, 2)

    nothing = judged(lambda trial: body(trial, False), demands=4)
    assert nothing.earned == 0
    assert "also holds for an answer that does nothing" in str(nothing)
    assert judged(lambda trial: body(trial, True), demands=4).earned == 9


def test_a_group_is_one_demand_that_fails_with_its_first_case_that_does_and_hints_for_those_that_have_none():
    def body(trial):
        for limit in (9, 2, 9):
            with trial.group("small", hint="look", see=1):
                for n in range(4):
                    trial.that(f"n = {n}", n < limit, expected="below", got=n)
        with trial.group("a number", hint="look", see=1):
            trial.equal("value", 3, 2, hint="count")
        with trial.group("a folded hint", hint="look", see=1):
            trial.equal("value", 3, 2, see=2)
        with trial.group("another", hint="look", see=1):
            trial.equal("type", 3, 3)

    result = judged(body, demands=4)
    assert outcomes(result) == [("small", False), ("a number", False), ("a folded hint", False), ("another", True)]
    assert result.earned == 3
    assert result.failure.got == "2\n(n = 2)"
    assert [line.strip() for line in str(result).splitlines()[3:5]] == ["got:      2", "(n = 2)"]
    assert [(failure.hint, failure.see) for failure in result.failures] == [("look", 1), ("count", None), ("", 2)]


def test_an_exception_of_the_same_line_is_told_once_and_the_other_groups_are_not_judged():
    def answer(n):
        return 1 / n

    def body(trial):
        for n, name in enumerate("abc"):
            with trial.group(name, hint=f"a hint for {name}", see=1):
                answer(max(n - 1, 0))
        with trial.group("called"):
            trial.call("0", lambda: answer(0))
        with trial.group("another line", hint="look"):
            int("x")
        with trial.group("another exception"):
            answer("x")

    result = judged(body, demands=6)
    names = [("a", False), ("c", True), ("another line", False), ("another exception", False)]
    assert outcomes(result) == names
    assert "ZeroDivisionError" in result.failure.got
    assert "in answer, line " in result.failure.got
    assert [failure.hint for failure in result.failures] == [AGAIN, "look", ""]
    assert result.failure.see is None
    assert result.unjudged == 2


def test_what_an_answer_raises_on_purpose_is_told_each_time():
    def answer():
        raise ValueError("no such size")

    def body(trial):
        for name in "ab":
            with trial.group(name, hint=f"a hint for {name}"):
                answer()

    assert [failure.hint for failure in judged(body, demands=2).failures] == ["a hint for a", "a hint for b"]


def test_a_result_of_none_is_told_once_and_the_other_groups_are_not_judged():
    def body(trial):
        for name, got in (("a", None), ("b", None), ("c", 3)):
            with trial.group(name, hint=f"a hint for {name}"):
                trial.returned("a case", got, "a number")

    result = judged(body, demands=3)
    assert outcomes(result) == [("a", False), ("c", True)]
    assert "is `return` missing?" in result.failure.hint
    assert result.unjudged == 1


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
        failed = judged(lambda trial, function=function: trial.call("it runs", function)).failure
        assert said in failed.got
        assert f"in {function.__name__}, line " in failed.got
        assert line in failed.got


def test_a_part_that_is_still_a_stub_fails_its_group_once_another_was_judged():
    def stub():
        raise NotImplementedError

    def body(trial):
        trial.equal("one", 1, 1)
        with trial.group("two"):
            stub()
        trial.equal("three", 3, 3)

    result = judged(body, demands=3)
    assert outcomes(result) == [("one", True), ("two", False), ("three", True)]
    assert "still raises NotImplementedError" in str(result)


def test_lines_fit_and_a_report_of_several_lines_keeps_them():
    def body(trial):
        trial.that("long " * 40, False, expected="e " * 90, got="rank 0 waits\nrank 1 waits", hint="h " * 90)

    shown = str(judged(body)).splitlines()
    assert max(map(len, shown)) <= WIDTH
    first = next(i for i, line in enumerate(shown) if "rank 0 waits" in line)
    assert shown[first + 1].strip() == "rank 1 waits"
    assert shown[first + 1].index("rank") == shown[first].index("rank")
