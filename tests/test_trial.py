"""How a check judges: which demands are listed, what a failure stops, what it says of exceptions."""

import json

import pytest
import torch

from shared.checks.exercise import exercise
from shared.checks.trial import AGAIN, Trial
from shared.text import WIDTH


def judged(body, demands=1, stand_in=None):
    """A check that was made of one function of the trial, run."""
    given = {"stand_in": stand_in, "stand_in_name": "its own"} if stand_in else {}
    made = exercise("15-98.1", "Held", points=12, demands=demands, **given)
    return made(lambda trial, answer: body(trial)).run(None)


def outcomes(result):
    return [(item.name, item.passed) for item in result.items]


def test_a_demand_that_fails_keeps_no_other_from_being_judged():
    def body(trial):
        trial.equal("one", 1, 2)
        trial.equal("two", 2, 2)
        trial.that("three", False, expected="a", got="b")
        trial.close("four", 1.0, 1.0)

    result = judged(body, demands=4)
    assert outcomes(result) == [("one", False), ("two", True), ("three", False), ("four", True)]
    assert (result.status, result.earned, result.unjudged) == ("failed", 6.0, 0)
    assert result.failure.name == "one"
    assert str(result).splitlines()[0] == "Exercise 15-98.1 · Held: failed, 6 of 12 points"
    assert str(result).count("WRONG") == 2


def test_what_needs_a_failed_demand_is_not_judged_and_the_report_says_how_much_that_is():
    def body(trial):
        trial.equal("one", 1, 1)
        trial.needs("a list", False, expected="a list", got="None")
        trial.equal("two", 2, 2)
        trial.equal("three", 3, 3)

    result = judged(body, demands=3)
    assert outcomes(result) == [("one", True), ("a list", False)]
    assert (result.earned, result.unjudged) == (4.0, 2)
    assert "2 more demands build on what is wrong above" in str(result)


def test_points_are_a_share_to_one_decimal():
    def body(trial):
        for name in "abcdefg":
            trial.that(name, name != "c", expected="", got="")

    assert judged(body, demands=7).earned == round(12 * 6 / 7, 1)
    assert judged(lambda trial: trial.equal("a", 1, 1)).earned == 12


def test_demands_that_doing_nothing_meets_earn_nothing_alone():
    def body(trial, works):
        trial.that("computes", works, expected="4", got="None")
        trial.equal("x stays as it is", 1, 1, free=True)
        with trial.group("the model stays as it is", free=True):
            trial.equal("its mode", True, True)

    assert judged(lambda trial: body(trial, False), demands=3).earned == 0

    def half(trial):
        body(trial, True)
        trial.equal("and returns it", 1, 2)

    assert judged(half, demands=4).earned == 9


def test_a_demand_in_many_places_counts_once_and_fails_with_its_first_case():
    def body(trial):
        for n in range(4):
            with trial.group("small"):
                trial.that(f"n = {n}", n < 2, expected="below 2", got=n)
            with trial.group("a number"):
                trial.equal("type", type(n).__name__, "int")

    result = judged(body, demands=2)
    assert outcomes(result) == [("small", False), ("a number", True)]
    assert result.failure.got == "2\n(n = 2)"
    assert result.earned == 6


def test_a_group_is_one_item_named_after_the_case_that_fails():
    def body(trial, worst):
        with trial.group("all small", see=1):
            for n in range(4):
                trial.that(f"n = {n}", n < worst, expected="small", got=n)
        trial.equal("after", 1, 1)

    assert outcomes(judged(lambda trial: body(trial, 9), 2)) == [("all small", True), ("after", True)]
    failed = judged(lambda trial: body(trial, 2), 2)
    assert failed.failure.name == "all small"
    assert failed.failure.see == 1
    assert [line.strip() for line in str(failed).splitlines()[3:5]] == ["got:      2", "(n = 2)"]


def test_a_groups_hints_serve_the_cases_that_have_none():
    def body(trial, **own):
        with trial.group("small", hint="look", see=1):
            trial.equal("n = 3", 3, 2, **own)

    for own, told in (({}, ("look", 1)), ({"hint": "count"}, ("count", None)), ({"see": 2}, ("", 2))):
        failure = judged(lambda trial, own=own: body(trial, **own)).failure
        assert (failure.hint, failure.see) == told


def test_groups_are_not_nested():
    trial = Trial()
    with trial.group("outer"):
        inner = trial.group("inner")
        with pytest.raises(RuntimeError, match="'inner' inside of group 'outer'"):
            inner.__enter__()


def test_an_exception_of_the_answers_own_fails_the_group_and_the_next_is_judged():
    def answer():
        return 1 / 0

    def body(trial):
        with trial.group("all run", hint="look"):
            answer()
        trial.equal("after", 1, 1)

    result = judged(body, demands=2)
    assert outcomes(result) == [("all run", False), ("after", True)]
    assert result.failure.hint == "look"
    assert "ZeroDivisionError" in result.failure.got
    assert "in answer, line " in result.failure.got


def test_an_exception_of_the_same_line_is_told_once_and_the_other_groups_are_not_judged():
    def answer(n):
        return 1 / n

    def body(trial):
        for n, name in enumerate("abc"):
            with trial.group(name, hint=f"a hint for {name}", see=1):
                answer(max(n - 1, 0))
        with trial.group("called"):
            trial.call("0", lambda: answer(0))
        with trial.group("another line"):
            int("x")
        with trial.group("another exception"):
            answer("x")

    result = judged(body, demands=6)
    names = [("a", False), ("c", True), ("another line", False), ("another exception", False)]
    assert outcomes(result) == names
    assert (result.failure.hint, result.failure.see) == (AGAIN, None)
    assert result.unjudged == 2


def test_what_an_answer_raises_on_purpose_is_told_each_time():
    def answer():
        raise ValueError("no such size")

    def body(trial):
        for name in "ab":
            with trial.group(name, hint=f"a hint for {name}"):
                answer()

    result = judged(body, demands=2)
    assert [failure.hint for failure in result.failures] == ["a hint for a", "a hint for b"]


def test_a_result_of_none_is_told_once_and_the_other_groups_are_not_judged():
    def body(trial):
        for name, got in (("a", None), ("b", None), ("c", 3)):
            with trial.group(name, hint=f"a hint for {name}"):
                trial.returned("a case", got, "a number")

    result = judged(body, demands=3)
    assert outcomes(result) == [("a", False), ("c", True)]
    assert "is `return` missing?" in result.failure.hint
    assert result.unjudged == 1


def test_call_reports_the_answers_own_exception_and_ends_the_check():
    def body(trial):
        trial.call("runs", lambda: 1 / 0, hint="look here")
        trial.equal("after", 1, 1)

    result = judged(body)
    assert outcomes(result) == [("runs", False)]
    assert "ZeroDivisionError" in result.failure.got
    assert result.failure.hint == "look here"
    assert judged(lambda trial: trial.equal("value", trial.call("runs", lambda: 3), 3)).status == "passed"


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


def test_a_report_of_several_lines_keeps_them():
    def lines(trial):
        trial.that("holds", False, expected="one", got="rank 0 waits\nrank 1 waits", hint="look")

    shown = str(judged(lines)).splitlines()
    first = next(i for i, line in enumerate(shown) if "rank 0 waits" in line)
    assert shown[first + 1].strip() == "rank 1 waits"
    assert shown[first + 1].index("rank") == shown[first].index("rank")


def test_lines_fit():
    result = judged(lambda trial: trial.that("long " * 40, False, expected="e " * 90, got="g " * 90, hint="h " * 90))
    assert max(map(len, str(result).splitlines())) <= WIDTH
