"""What a check says: outcome, place, hint; and that only an untouched stub counts as not attempted."""

import pytest
import torch

from shared.checks.feedback import CheckFailed, exercise


@exercise("15-99.1", "Doubling", stand_in=lambda: "stand-in")
def doubling(trial, answer):
    trial.close("doubles", answer(torch.ones(2, 3)), torch.full((2, 3), 2.0), hint="multiply by two")
    trial.equal("twice", answer(torch.tensor(2)), torch.tensor(4), hint="twice")


def spoilt(x):
    y = 2.0 * x
    y[1, 2] += 1
    return y


def test_a_pass_prints_each_item_and_returns_the_answer(capsys):
    def answer(x):
        return x + x

    assert doubling(answer) is answer
    assert capsys.readouterr().out.splitlines() == [
        "Exercise 15-99.1 · Doubling: passed",
        "  ok     doubles",
        "  ok     twice",
    ]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda x: x, r"expected: 2 at index \(0, 0\)\s+got:\s+1 at index \(0, 0\), the largest of 6 differences"),
        (spoilt, r"got:\s+3 at index \(1, 2\)"),
        (lambda x: 2 * x[:1], r"expected: shape \(2, 3\)\s+got:\s+shape \(1, 3\)"),
        (lambda x: 2 * x.double(), "dtype torch.float64"),
        (lambda x: None, "got:.*NoneType"),
        (lambda x: x * float("nan"), r"got:\s+nan"),
        (lambda x: 2 * x.float(), "dtype torch.int64"),
        (lambda x: undefined(x), "NameError: name 'undefined' is not defined.*undefined"),  # noqa: F821
        (lambda x: exit(), "SystemExit"),
    ],
)
def test_a_failure_says_what_and_where(answer, message):
    with pytest.raises(CheckFailed, match=message) as failure:
        doubling(answer)
    assert "hint:" in str(failure.value)


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
    assert capsys.readouterr().out.strip() == "Exercise 15-99.1 · Doubling: not attempted yet"
    with pytest.raises(CheckFailed, match="Could not run"):
        doubling(torchs_own)
    with pytest.raises(CheckFailed, match="still raises NotImplementedError"):
        doubling(half)


def test_call_reports_the_answers_own_exception_with_the_items_hint():
    @exercise("15-99.2", "Raising")
    def raising(trial, answer):
        trial.call("runs", answer, hint="look here")

    with pytest.raises(CheckFailed, match=r"WRONG  runs[\s\S]*ZeroDivisionError[\s\S]*look here"):
        raising(lambda: 1 / 0)


def test_an_interrupt_is_not_taken_for_a_wrong_answer():
    def interrupted(x):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        doubling(interrupted)


def test_a_report_of_several_lines_keeps_them():
    @exercise("15-99.3", "Lines")
    def lines(trial, answer):
        trial.that("holds", False, expected="one", got="rank 0 waits\nrank 1 waits", hint="look")

    shown = str(lines.run(None)).splitlines()
    first = next(i for i, line in enumerate(shown) if "rank 0 waits" in line)
    assert shown[first + 1].strip() == "rank 1 waits"
    assert shown[first + 1].index("rank") == shown[first].index("rank")
