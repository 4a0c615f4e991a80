"""What an exercise's check says: what passed, what was expected, what was got, and where to look.

A topic's file writes each check as a function of a `Trial` and the student's object:

    @exercise("15-01.1", "Swish as a Function")
    def swish(trial, answer):
        trial.close("forward is x · sigmoid(x)", answer.apply(x), F.silu(x), hint="...")

and the notebook calls `check.swish(Swish)`. The call prints what passed and returns the answer; a wrong
answer raises `CheckFailed`, which Jupyter shows without a traceback; an untouched stub is reported as
not attempted, and the exercise's stand-in is returned, so that the cells below still run.
"""

import linecache
import textwrap
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

_HERE = str(Path(__file__).parent.parent)
_TORCH = str(Path(torch.__file__).parent)


class CheckFailed(AssertionError):
    """An answer is wrong; the message says in what, with a hint."""

    def _render_traceback_(self) -> list[str]:
        # IPython shows these lines in place of a traceback through the checks' own code.
        return str(self).splitlines()


class _Stop(Exception):
    """Ends a check at its first failed item."""


@dataclass
class Result:
    """The outcome of one check.

    Attributes:
        exercise: the number, e.g. '15-01.1'.
        title: the exercise's title.
        status: 'passed', 'failed' or 'not attempted'.
        lines: what is shown, one entry per item, failure included.
    """

    exercise: str
    title: str
    status: Literal["passed", "failed", "not attempted"] = "passed"
    lines: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        head = f"Exercise {self.exercise} · {self.title}: {self.status}"
        return "\n".join([head, *self.lines])


class Trial:
    """Collects the items of one check. Every method ends the check when its item fails."""

    def __init__(self, result: Result) -> None:
        self._result = result

    @property
    def passed(self) -> int:
        """How many items have passed so far."""
        return len(self._result.lines)

    def needs(self, item: str, condition: bool, *, expected: object, got: object, hint: str) -> None:
        """Like `that`, for what an untouched stub already fulfils: a pass is no sign of an attempt and not listed."""
        if not condition:
            self._fail(item, expected, got, hint)

    def passes(self, item: str) -> None:
        """List an item as passed whose many parts have been held with `needs`."""
        self._pass(item)

    def that(self, item: str, condition: bool, *, expected: object, got: object, hint: str) -> None:
        """Pass if `condition` holds; `expected` and `got` are shown if it does not."""
        if condition:
            self._pass(item)
        else:
            self._fail(item, expected, got, hint)

    def equal(self, item: str, got: Any, want: Any, *, hint: str) -> None:
        """Pass if the two are the same; tensors must agree in dtype, shape and every bit (NaN equals NaN)."""
        if isinstance(want, torch.Tensor):
            self._comparable(item, got, want, hint)
            same = torch.equal(torch.nan_to_num(got), torch.nan_to_num(want)) and torch.equal(got.isnan(), want.isnan())
            self.that(item, same, expected=_show(want), got=_show(got), hint=hint)
        else:
            self.that(item, type(got) is type(want) and got == want, expected=repr(want), got=repr(got), hint=hint)

    def close(
        self, item: str, got: Any, want: torch.Tensor, *, hint: str, rtol: float = 1e-5, atol: float = 1e-6
    ) -> None:
        """Pass if the tensors agree in dtype and shape, and in value within rtol and atol."""
        self._comparable(item, got, want, hint)
        if torch.allclose(got, want, rtol=rtol, atol=atol, equal_nan=True):
            self._pass(item)
            return
        error = (got - want).detach().abs().nan_to_num(nan=torch.inf)
        worst = int(error.argmax())
        place = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), error.shape))
        where = f" at index {place}" if place else ""
        self._fail(
            item,
            f"{want.flatten()[worst].item():.6g}{where}",
            f"{got.flatten()[worst].item():.6g}{where}, the largest of {int((error > atol).sum())} differences",
            hint,
        )

    def call(self, item: str, function: Callable[[], Any], *, hint: str) -> Any:
        """Return function(); an exception of the answer's own fails the item with `hint`."""
        try:
            return function()
        except _Stop:
            raise
        except Exception as error:
            if _is_stub(error):
                raise
            self._fail(item, "no exception", _describe(error), hint)

    def _comparable(self, item: str, got: Any, want: torch.Tensor, hint: str) -> None:
        if not isinstance(got, torch.Tensor):
            self._fail(item, f"a tensor of shape {tuple(want.shape)}", f"{type(got).__name__}: {got!r}"[:200], hint)
        if got.shape != want.shape:
            self._fail(item, f"shape {tuple(want.shape)}", f"shape {tuple(got.shape)}", hint)
        if got.dtype != want.dtype:
            self._fail(item, f"dtype {want.dtype}", f"dtype {got.dtype}", hint)

    def _pass(self, item: str) -> None:
        self._result.lines.append(f"  ok     {item}")

    def _fail(self, item: str, expected: object, got: object, hint: str) -> None:
        self._result.status = "failed"
        self._result.lines.append(f"  WRONG  {item}")
        for name, text in (("expected", expected), ("got", got), ("hint", hint)):
            first, *more = str(text).splitlines() or [""]
            indent = " " * 19
            self._result.lines += textwrap.wrap(
                f"{name + ':':<10}{first}", 100, initial_indent=indent[:9], subsequent_indent=indent
            )
            for line in more:  # a report of several lines keeps them
                self._result.lines += textwrap.wrap(line, 100, initial_indent=indent, subsequent_indent=indent + "  ")
        raise _Stop


@dataclass(frozen=True)
class Exercise:
    """A check that can be called on an answer.

    Attributes:
        number: e.g. '15-01.1'.
        title: the exercise's title.
        body: the check itself, a function of a Trial and the answer.
        stand_in: makes what the cells below use when the exercise was not attempted.
    """

    number: str
    title: str
    body: Callable[[Trial, Any], None]
    stand_in: Callable[[], Any]

    def run(self, answer: Any) -> Result:
        """Check an answer without printing or raising. Global random state is left as it was."""
        result = Result(self.number, self.title)
        trial = Trial(result)
        try:
            with torch.random.fork_rng(devices=[]), torch.enable_grad():
                torch.manual_seed(1501)
                self.body(trial, answer)
        except _Stop:
            pass
        except (Exception, SystemExit) as error:
            if _is_stub(error) and trial.passed == 0:
                result.status = "not attempted"
                result.lines = []
            else:
                result.status = "failed"
                expected = "a finished answer" if _is_stub(error) else "no exception"
                hint = (
                    "a part of the answer still raises NotImplementedError"
                    if _is_stub(error)
                    else "if a line of yours is named, run it by itself; else compare what you return with the task"
                )
                result.lines.append("  WRONG  the answer raised an exception")
                for name, text in (("expected", expected), ("got", _describe(error)), ("hint", hint)):
                    result.lines.append(f"{'':9}{name + ':':<10}{text}")
        return result

    def __call__(self, answer: Any) -> Any:
        """Check an answer, print the outcome, and return the answer (or the stand-in if not attempted).

        Raises:
            CheckFailed: the answer is wrong.
        """
        result = self.run(answer)
        if result.status == "failed":
            raise CheckFailed(str(result))
        if result.status == "not attempted":
            print(f"Exercise {self.number} · {self.title}: not attempted yet")
            return self.stand_in()
        print(result)
        return answer


def exercise(number: str, title: str, stand_in: Callable[[], Any] = lambda: None) -> Callable[[Callable], Exercise]:
    """Turn a function of (trial, answer) into an `Exercise`."""

    def wrap(body: Callable[[Trial, Any], None]) -> Exercise:
        return Exercise(number, title, body, stand_in)

    return wrap


def _is_stub(error: BaseException) -> bool:
    # PyTorch raises NotImplementedError too, but never without a message.
    return type(error) is NotImplementedError and not error.args


def _describe(error: BaseException) -> str:
    """The exception, and the last line of the student's own code that it came through."""
    text = f"{type(error).__name__}: {error}".splitlines()[0][:240]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((_HERE, _TORCH)):
            source = (frame.line or linecache.getline(frame.filename, frame.lineno or 0)).strip()
            return f"{text} (in {frame.name}, line {frame.lineno}: {source})"
    return text


def _show(tensor: torch.Tensor) -> str:
    values = ", ".join(f"{value:.6g}" for value in tensor.detach().flatten()[:6].tolist())
    return f"[{values}{', ...' if tensor.numel() > 6 else ''}] of shape {tuple(tensor.shape)}"
