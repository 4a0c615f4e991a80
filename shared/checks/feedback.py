"""What an exercise's check says: what passed, what was expected, what was got, and where to look.

A topic's file writes each check as a function of a `Trial` and the student's object:

    @exercise("15-01.1", "Swish as a Function", points=20)
    def swish(trial, answer):
        trial.close("forward is x · sigmoid(x)", answer.apply(x), F.silu(x), hint="compare with the formula", see=1)

and the notebook calls `check.swish(Swish)`. The call prints what passed and how far the topic is done, and returns the
answer. A wrong answer raises `CheckFailed`, which Jupyter shows without a traceback. An untouched stub is reported as
not attempted, and the exercise's stand-in is returned, so that the cells below still run.

A failed item says what is wrong and which of the task's folded hints to open (`see`); its `hint` says where to look and
gives nothing of the solution away, so that a check never tells more than the hints that a reader has chosen to open.
"""

import linecache
import math
import random
import sysconfig
import textwrap
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from shared.text import WIDTH

_HERE = str(Path(__file__).parent.parent)
_TORCH = str(Path(torch.__file__).parent)
_PYTHON = sysconfig.get_path("stdlib")
# (rtol, atol): a few roundings of differently ordered arithmetic, and no more
_TOLERANCES = {
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.float32: (1e-5, 1e-6),
    torch.float64: (1e-9, 1e-10),
}
RAISED = "the answer runs"  # the item that fails when an answer raises where no item looks for it


class CheckFailed(AssertionError):
    """An answer is wrong; the message says in what, with a hint."""

    def _render_traceback_(self) -> list[str]:
        # IPython shows these lines in place of a traceback through the checks' own code.
        return str(self).splitlines()


class _Stop(Exception):
    """Ends a check at its first failed item."""


@dataclass(frozen=True)
class Item:
    """One thing that a check holds.

    Attributes:
        name: what it holds, the same in every run.
        passed: whether it did.
        guard: it keeps what follows from breaking, or turns an exception into a message.
        expected, got, hint: what is shown when it fails.
        see: number of the task's folded hint that helps, or None.
    """

    name: str
    passed: bool
    guard: bool = False
    expected: str = ""
    got: str = ""
    hint: str = ""
    see: int | None = None

    def lines(self) -> list[str]:
        """How the item is shown; a guard that passed is not."""
        if self.passed:
            return [] if self.guard else [f"  ok     {self.name}"]
        open_hint = f"open Hint {self.see} of the task" if self.see else ""
        hint = "; ".join(filter(None, (self.hint, open_hint)))
        shown = textwrap.wrap(f"  WRONG  {self.name}", WIDTH, subsequent_indent=" " * 9)
        indent = " " * 19
        for label, text in (("expected", self.expected), ("got", self.got), ("hint", hint)):
            first, *more = text.splitlines() or [""]
            shown += textwrap.wrap(
                f"{label + ':':<10}{first}", WIDTH, initial_indent=indent[:9], subsequent_indent=indent
            )
            for line in more:  # a report of several lines keeps them
                shown += textwrap.wrap(line, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ")
        return shown


@dataclass
class Result:
    """The outcome of one check.

    Attributes:
        exercise: the number, e.g. '15-01.1'.
        title: the exercise's title.
        points: what the exercise is worth.
        status: 'passed', 'failed' or 'not attempted'.
        items: what was held, in order; the last one is the failure if there is one.
    """

    exercise: str
    title: str
    points: int
    status: Literal["passed", "failed", "not attempted"] = "passed"
    items: list[Item] = field(default_factory=list)

    @property
    def earned(self) -> int:
        """Points for this answer: all or none, since a check ends at the first item that fails."""
        return self.points if self.status == "passed" else 0

    @property
    def failure(self) -> Item | None:
        """The item that failed."""
        return self.items[-1] if self.status == "failed" else None

    def __str__(self) -> str:
        head = f"Exercise {self.exercise} · {self.title}: {self.status}"
        return "\n".join([head, *(line for item in self.items for line in item.lines())])


class Trial:
    """Collects the items of one check. Every method ends the check when its item fails.

    Args:
        without: an item to leave out, so that a test can ask which answers only this item catches.
    """

    def __init__(self, without: str | None = None) -> None:
        self.items: list[Item] = []
        self._without = without
        self._group: tuple[str, str, int | None] | None = None

    @property
    def attempted(self) -> bool:
        """Whether something has passed that an untouched stub does not fulfil."""
        return any(item.passed and not item.guard for item in self.items)

    def that(
        self, item: str, condition: bool, *, expected: object, got: object, hint: str = "", see: int | None = None
    ) -> None:
        """Pass if `condition` holds; `expected` and `got` are shown if it does not."""
        self._hold(item, condition, expected, got, hint, see)

    def needs(
        self, item: str, condition: bool, *, expected: object, got: object, hint: str = "", see: int | None = None
    ) -> None:
        """Like `that`, for what later items rely on: an untouched stub may fulfil it, so a pass is not listed."""
        self._hold(item, condition, expected, got, hint, see, guard=True)

    def equal(self, item: str, got: Any, want: Any, *, hint: str = "", see: int | None = None) -> None:
        """Pass if the two are the same.

        Tensors agree in dtype, shape, device and every bit (all NaNs count as one); a whole number is any integer type
        but bool, a float any real number; lists, tuples and dictionaries agree in their type and all they hold.
        """
        expected, found = _difference(got, want, exact=True) or ("", "")
        self._hold(item, not expected, expected, found, hint, see)

    def close(
        self,
        item: str,
        got: Any,
        want: torch.Tensor | float,
        *,
        hint: str = "",
        see: int | None = None,
        rtol: float | None = None,
        atol: float | None = None,
    ) -> None:
        """Like `equal`, but values may differ by atol + rtol·|want|; the defaults follow the dtype."""
        expected, found = _difference(got, want, exact=False, rtol=rtol, atol=atol) or ("", "")
        self._hold(item, not expected, expected, found, hint, see)

    def call(self, item: str, function: Callable[[], Any], *, hint: str = "", see: int | None = None) -> Any:
        """Return function(); an exception of the answer's own fails the item with `hint`."""
        try:
            value = function()
        except _Stop:
            raise
        except Exception as error:
            if _is_stub(error):
                raise
            self._hold(item, False, "no exception", _describe(error), hint, see, guard=True)
            return None  # reached only when this item is left out
        self._hold(item, True, "", "", hint, see, guard=True)
        return value

    @contextmanager
    def group(self, item: str, *, hint: str = "", see: int | None = None) -> Iterator[None]:
        """Hold many cases of one demand as one item. The case that fails is named after it, an exception of the
        answer's own fails it, and `hint` and `see` serve the cases that have none.

        with trial.group("equals the brute force", see=2):
            for n in range(5):
                trial.equal(f"{n} elements", answer(n), brute_force(n))
        """
        if self._group is not None:
            raise RuntimeError(f"group {item!r} inside of group {self._group[0]!r}; end one before the next")
        self._group = (item, hint, see)
        try:
            yield
        except _Stop:
            raise
        except Exception as error:
            if _is_stub(error):
                raise
            self._hold("it raised", False, "no exception", _describe(error), hint, see)
        finally:
            self._group = None
        self._record(Item(item, passed=True))

    def _hold(
        self,
        item: str,
        passed: bool,
        expected: object,
        got: object,
        hint: str,
        see: int | None,
        guard: bool = False,
    ) -> None:
        case = ""
        if self._group is not None:
            case, guard = f"\n({item})", False
            item = self._group[0]
            hint, see = (hint, see) if hint or see else self._group[1:]
        if item == self._without:
            return
        if not passed:
            self.items.append(Item(item, False, guard, str(expected), f"{got}{case}", hint, see))
            raise _Stop
        if not case:
            self._record(Item(item, passed=True, guard=guard))

    def _record(self, item: Item) -> None:
        # the same demand on several cases in a row is one item
        if item.name != self._without and item not in self.items:
            self.items.append(item)


class Exercise:
    """A check that can be called on an answer.

    Attributes:
        number: e.g. '15-01.1'.
        title: the exercise's title.
        points: what it is worth.
        used: after a call, what the cells below work with: "your Swish", or "stand-in: F.silu".
    """

    def __init__(
        self,
        body: Callable[[Trial, Any], None],
        number: str,
        title: str,
        points: int,
        stand_in: Callable[[], Any] | None,
        stand_in_name: str,
    ) -> None:
        self.body, self.number, self.title, self.points = body, number, title, points
        self.stand_in, self.stand_in_name = stand_in, stand_in_name
        self.used = ""

    def run(self, answer: Any, *, without: str | None = None) -> Result:
        """Check an answer without printing or raising. Random state (PyTorch's, NumPy's, Python's) stays as it was.

        Args:
            answer: the student's object.
            without: name of an item to leave out.
        """
        result = Result(self.number, self.title, self.points)
        trial = Trial(without)
        result.items = trial.items
        try:
            with _own_random_state(), torch.enable_grad():
                self.body(trial, answer)
        except _Stop:
            result.status = "failed"
        except (Exception, SystemExit) as error:
            if _is_stub(error) and not trial.attempted:
                result.status, result.items = "not attempted", []
            else:
                result.status = "failed"
                result.items.append(_raised(error))
        return result

    def __call__(self, answer: Any) -> Any:
        """Check an answer, print the outcome, and return the answer (or the stand-in if not attempted).

        Raises:
            CheckFailed: the answer is wrong.
        """
        result = self.run(answer)
        _DONE.discard(self.number)
        if result.status == "failed":
            raise CheckFailed(str(result))
        if result.status == "not attempted":
            print(f"Exercise {self.number} · {self.title}: not attempted yet")
            if self.stand_in is None:
                return None
            self.used = f"stand-in: {self.stand_in_name}"
            print(f"  the cells below use a stand-in: {self.stand_in_name}")
            return self.stand_in()
        self.used = f"your {getattr(answer, '__name__', 'answer')}"
        _DONE.add(self.number)
        print(f"{result}\n{_progress(self.number)}")
        return answer


_KNOWN: dict[str, Exercise] = {}  # number → exercise, of every topic that was imported
_DONE: set[str] = set()  # numbers that passed since the kernel was started


def exercise(
    number: str, title: str, *, points: int, stand_in: Callable[[], Any] | None = None, stand_in_name: str = ""
) -> Callable[[Callable[[Trial, Any], None]], Exercise]:
    """Turn a function of (trial, answer) into an `Exercise`.

    Args:
        number, title, points: as in the heading of the notebook's task, which lint compares.
        stand_in: makes what the cells below use when the exercise was not attempted; None if they need nothing.
        stand_in_name: what the stand-in is, in a word or two.

    Raises:
        ValueError: a stand-in without a name, or a name without a stand-in.
    """
    if (stand_in is None) == bool(stand_in_name):
        raise ValueError(f"exercise {number}: give stand_in and stand_in_name together")

    def wrap(body: Callable[[Trial, Any], None]) -> Exercise:
        made = Exercise(body, number, title, points, stand_in, stand_in_name)
        _KNOWN[number] = made
        return made

    return wrap


def exercises_of(topic: str) -> list[Exercise]:
    """The exercises of a topic ('15-01') whose checks have been imported, in order."""
    return [known for number, known in sorted(_KNOWN.items()) if number.rpartition(".")[0] == topic]


def _progress(number: str) -> str:
    mine = exercises_of(number.rpartition(".")[0])
    done = [one for one in mine if one.number in _DONE]
    points = sum(one.points for one in done)
    return f"{len(done)} of {len(mine)} exercises, {points} of {sum(one.points for one in mine)} points"


@contextmanager
def _own_random_state() -> Iterator[None]:
    """Seeded generators inside, and the old state afterwards."""
    python, numpy_ = random.getstate(), np.random.get_state()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices=devices):
            random.seed(1501)
            np.random.seed(1501)
            torch.manual_seed(1501)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_)


def _raised(error: BaseException) -> Item:
    if _is_stub(error):
        expected, hint = "a finished answer", "a part of the answer still raises NotImplementedError"
    else:
        expected, hint = "no exception", "if a line of yours is named, run it by itself; else read the task on results"
    return Item(RAISED, False, True, expected, _describe(error), hint)


def _is_stub(error: BaseException) -> bool:
    # PyTorch raises NotImplementedError too, but never without a message.
    return type(error) is NotImplementedError and not error.args


def _describe(error: BaseException) -> str:
    """The exception, and the last line of the student's own code that it came through."""
    first, *more = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    said = f"{first} {more[0]}" if more and first.endswith(":") else first  # "Error(s) in loading ...:" and then what
    text = f"{type(error).__name__}: {said}"[:240]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((_HERE, _TORCH, _PYTHON)):
            source = (frame.line or linecache.getline(frame.filename, frame.lineno or 0)).strip()
            return f"{text} (in {frame.name}, line {frame.lineno}: {source})"
    return text


# ---------------------------------------------------------------- what differs


def _difference(
    got: Any, want: Any, *, exact: bool, rtol: float | None = None, atol: float | None = None
) -> tuple[str, str] | None:
    """What was expected and what was got where the two differ; None if they don't."""
    if isinstance(want, torch.Tensor):
        return _tensors_differ(got, want, exact, rtol, atol)
    if isinstance(want, list | tuple | dict):
        if type(got) is not type(want) and not (type(want) is dict and isinstance(got, dict)):
            return f"a {type(want).__name__}", _show(got)
        keys = [set(range(len(value))) if not isinstance(value, dict) else set(value) for value in (want, got)]
        if keys[0] != keys[1]:
            return _show(want), _show(got)
        for key in want if isinstance(want, dict) else range(len(want)):
            found = _difference(got[key], want[key], exact=exact, rtol=rtol, atol=atol)
            if found is not None:
                return f"{found[0]} in entry {key!r}", f"{found[1]} in entry {key!r}"
        return None
    if isinstance(want, bool | np.bool_):
        same = isinstance(got, bool | np.bool_) and bool(got) == bool(want)
    elif isinstance(want, Integral):
        same = isinstance(got, Integral) and not isinstance(got, bool) and got == want
    elif isinstance(want, Real):
        same = isinstance(got, Real) and not isinstance(got, bool) and _near(got, want, exact, rtol, atol)
    else:
        same = type(got) is type(want) and bool(got == want)
    if same:
        return None
    return _show(want), _show(got) + ("" if isinstance(got, type(want)) else f" (a {type(got).__name__})")


def _near(got: Real, want: Real, exact: bool, rtol: float | None, atol: float | None) -> bool:
    if exact or not math.isfinite(want) or not math.isfinite(got):
        return got == want or (math.isnan(got) and math.isnan(want))
    default = _TOLERANCES[torch.float64]
    return abs(got - want) <= (default[1] if atol is None else atol) + (default[0] if rtol is None else rtol) * abs(
        want
    )


def _tensors_differ(
    got: Any, want: torch.Tensor, exact: bool, rtol: float | None, atol: float | None
) -> tuple[str, str] | None:
    if not isinstance(got, torch.Tensor):
        return f"a tensor of shape {tuple(want.shape)}", f"{_show(got)} (a {type(got).__name__})"
    for name, wanted, found in (
        ("shape", tuple(want.shape), tuple(got.shape)),
        ("dtype", want.dtype, got.dtype),
        ("device", want.device, got.device),
    ):
        if wanted != found:
            return f"{name} {wanted}", f"{name} {found}"
    got, want = got.detach().cpu(), want.detach().cpu()  # float64 below, which MPS lacks
    floating = want.is_floating_point() or want.is_complex()
    same = got == want
    if floating:
        same |= got.isnan() & want.isnan()
        if exact and want.is_floating_point():
            same &= (got.signbit() == want.signbit()) | want.isnan()  # -0.0 == 0.0, but not bit for bit
    wide = torch.complex128 if want.is_complex() else torch.float64
    error = (got.to(wide) - want.to(wide)).abs().nan_to_num(nan=torch.inf)
    if not exact and floating:
        default = _TOLERANCES.get(want.dtype, _TOLERANCES[torch.float32])
        rtol, atol = default[0] if rtol is None else rtol, default[1] if atol is None else atol
        same |= want.isfinite() & (error <= atol + rtol * want.to(wide).abs())
    if bool(same.all()):
        return None
    error[same] = -1.0
    worst = int(error.argmax())
    place = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), error.shape))
    where = f" at index {place}" if place else ""
    values = [value.flatten()[worst].item() for value in (want, got)]
    shown = [f"{value:.6g}" if isinstance(value, float) else str(value) for value in values]
    if shown[0] == shown[1]:  # they differ further behind
        shown = [repr(value) for value in values]
    count = int((~same).sum())
    return f"{shown[0]}{where}", f"{shown[1]}{where}" + (f", the largest of {count} differences" if count > 1 else "")


def _show(value: object) -> str:
    if isinstance(value, torch.Tensor):
        numbers = ", ".join(f"{number:.6g}" for number in value.detach().flatten()[:6].tolist())
        return f"[{numbers}{', ...' if value.numel() > 6 else ''}] of shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 200 else text[:197] + "..."
