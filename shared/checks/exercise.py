"""An exercise's check as the notebook calls it.

A topic's file writes each check as a function of a `Trial` and the student's object:

    @exercise("15-01.1", "Swish as a Function", points=20, demands=1)
    def swish(trial, answer):
        trial.close("forward is x · sigmoid(x)", answer.apply(x), F.silu(x), hint="compare with the formula", see=1)

and the notebook calls `check.swish(Swish)`. The call prints what is right and what is wrong, and returns the answer. A
wrong answer raises `CheckFailed`, which Jupyter shows without a traceback. An untouched stub is reported as not
attempted, and the exercise's stand-in is returned, so that the cells below still run; the stand-in itself, handed back
to the check, is not attempted either.

A failed demand says what is wrong and which of the task's folded hints to open (`see`). Its `hint` says where to look
and gives nothing of the solution away: a check never tells more than the hints that a reader has chosen to open.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from shared.checks import notebook
from shared.checks.limits import TooSlowError, time_limit
from shared.checks.report import CheckFailed, Item, Result
from shared.checks.traces import describe, is_stub, looks_like_our_fault, students_line
from shared.checks.trial import UNFINISHED, StopChecking, Trial

RUNS = "the answer runs"  # the item that fails when an answer raises where no demand looks for it
ENDS = "the answer comes to an end"
NOT_RUN = "If you have written an answer, run its cell first (Shift+Enter), then this one."
MISSPELT = "is the name misspelt, or not defined yet?"
SECONDS = 60.0  # after which a check is ended
SEED = 1501


class CheckInterrupted(KeyboardInterrupt):
    """The reader has interrupted a check. Jupyter shows one line."""

    def _render_traceback_(self) -> list[str]:  # IPython asks for it
        return [str(self)]


@dataclass(eq=False, repr=False)
class Exercise:
    """A check that can be called on an answer.

    Attributes:
        body: the function of (trial, answer) that judges.
        number, title, points: e.g. '15-01.1', as in the heading of the notebook's task.
        demands: how many demands it has; each is worth the same share of the points.
        stand_in, stand_in_name: makes what takes the answer's place, and says what that is.
        used: after a call, what the cells below work with: "your Swish", or "the course's answer: F.silu".
    """

    body: Callable[[Trial, Any], None]
    number: str
    title: str
    points: int
    demands: int
    stand_in: Callable[[], Any] | None
    stand_in_name: str
    used: str = ""
    _skipped: bool = False
    _handed_out: list[Any] = field(default_factory=list)

    def run(self, answer: Any, *, seed: int = SEED, seconds: float = SECONDS) -> Result:
        """Judge an answer without printing or raising. Random state (PyTorch's, NumPy's, Python's) stays as it was.

        Args:
            answer: the student's object.
            seed: another seed gives other random cases.
            seconds: after which the check is ended, and the demand that an answer ends has failed.
        """
        trial = Trial()
        error = self._judge(trial, answer, seed, seconds)
        result = Result(self.number, self.title, self.points, items=trial.items, demands=self.demands)
        if error is not None:
            ours = looks_like_our_fault(error)
            if is_stub(error) and not trial.attempted:
                result.status = "not attempted"
            elif ours and not trial.has_failed and self._breaks_for_its_stand_in():
                result.status = "check broken"
                result.note = f"the check itself failed, which says nothing about your answer: {describe(error)}. "
                result.note += f"Please report this; PyTorch is {torch.__version__}."
            elif not (ours and trial.has_failed):  # else it builds on what has failed, and could not be judged
                result.items.append(_raised(error, trial.suspect, seconds))
        if result.status == "passed" and result.failures:
            result.status = "failed"
        return result

    def _judge(self, trial: Trial, answer: Any, seed: int, seconds: float) -> BaseException | None:
        """Run the check; return the exception that has ended it, if one has that no demand looked for."""
        try:
            with _own_random_state(seed), torch.enable_grad(), time_limit(seconds):
                self.body(trial, answer)
        except StopChecking:
            return None
        except (Exception, SystemExit, TooSlowError) as error:
            return error
        return None

    def _breaks_for_its_stand_in(self) -> bool:
        """Whether the check raises for the course's own answer, too. If there is none, the student's is to blame."""
        if self.stand_in is None:
            return False
        error = self._judge(Trial(), self.stand_in(), SEED, SECONDS)
        return error is not None and looks_like_our_fault(error)

    def is_stand_in(self, answer: Any) -> bool:
        """Whether an answer is the course's and not the student's."""
        return any(answer is known for known in self._handed_out)

    def __call__(self, answer: Any) -> Any:
        """Check an answer, print the outcome, and return the answer, or the stand-in if there is none yet.

        Raises:
            CheckFailed: the answer is wrong, and `skip` was not called.
            CheckInterrupted: the reader has interrupted it.
        """
        if self.is_stand_in(answer):
            result = Result(self.number, self.title, self.points, "not attempted")
        else:
            try:
                with notebook.no_stderr_if_graded():
                    result = self.run(answer)
            except KeyboardInterrupt as error:
                where = students_line(error) or "in the check, not in a line of yours"
                raise CheckInterrupted(f"Exercise {self.number}: interrupted {where}") from None
        skipped, self._skipped = self._skipped, False  # so that it counts no more when its line is gone
        notebook.remember(result)
        if result.status == "passed":
            self.used = f"your {getattr(answer, '__name__', 'answer')}"
            notebook.show(f"{result}\n{self._progress()}", result)
            return answer
        goes_on = result.status == "not attempted" or skipped or notebook.is_graded()
        text = str(result)
        if result.status == "not attempted":
            text += f" yet\n  {NOT_RUN}"
        ours = "the course's answer" + ("" if self.stand_in_name == "ours" else f": {self.stand_in_name}")
        if goes_on and self.stand_in is not None:
            text += f"\n  the cells below use {ours}"
        notebook.show(text, result)
        notebook.grade(result)
        if not goes_on:
            way_on = "To go on without solving it, put this line above the check's call in this cell:\n"
            way_on += f"    check.{self.body.__name__}.skip()"
            raise CheckFailed(f"{result}\n{way_on}", way_on)
        if self.stand_in is None:
            self.used = ""
            return None
        self.used = ours
        self._handed_out.append(self.stand_in())
        return self._handed_out[-1]

    def skip(self) -> None:
        """Let the next call of this exercise's check return the stand-in also for a wrong answer, and not raise."""
        self._skipped = True

    def _progress(self) -> str:
        mine = exercises_of(self.number.rpartition(".")[0])
        done = [one for one in mine if notebook.REMEMBERED.get(one.number, 0) == one.points]
        points = sum(notebook.REMEMBERED.get(one.number, 0) for one in mine)
        return f"{len(done)} of {len(mine)} exercises, {points:g} of {sum(one.points for one in mine)} points"


_KNOWN: dict[str, Exercise] = {}  # number → exercise, of every topic that was imported


def exercise(
    number: str,
    title: str,
    *,
    points: int,
    demands: int,
    stand_in: Callable[[], Any] | None = None,
    stand_in_name: str = "",
) -> Callable[[Callable[[Trial, Any], None]], Exercise]:
    """Turn a function of (trial, answer) into an `Exercise`.

    Args:
        number, title, points: as in the heading of the notebook's task, which lint compares.
        demands: how many demands the function judges; guards (`needs`, `call`) don't count.
        stand_in: makes what the cells below use when the exercise was not attempted; None if they need nothing.
        stand_in_name: what the stand-in is, in a word or two.
    """

    def wrap(body: Callable[[Trial, Any], None]) -> Exercise:
        made = Exercise(body, number, title, points, demands, stand_in, stand_in_name)
        _KNOWN[number] = made
        return made

    return wrap


def exercises_of(topic: str) -> list[Exercise]:
    """The exercises of a topic ('15-01') whose checks have been imported, in order."""
    return [known for number, known in sorted(_KNOWN.items()) if number.rpartition(".")[0] == topic]


def _raised(error: BaseException, group: str, seconds: float) -> Item:
    """The item for an exception that has ended the check."""
    if isinstance(error, TooSlowError):
        hint = "what should make this loop, or this wait, end?"
        return Item(ENDS, False, True, f"an end within {seconds:g} s", describe(error), hint)
    if is_stub(error):
        return Item(RUNS, False, True, "a finished answer", describe(error), UNFINISHED)
    hint = "if a line of yours is named, run it by itself; else read what the task says of results, "
    hint += "and report the check if yours are right"
    if isinstance(error, NameError) and students_line(error):
        hint = MISSPELT
    return Item(group or RUNS, False, not group, "no exception", describe(error), hint)


@contextmanager
def _own_random_state(seed: int) -> Iterator[None]:
    """Seeded generators inside, and the old state afterwards."""
    python = random.getstate()
    numpy_ = np.random.get_state()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices=devices):
            random.seed(seed)
            np.random.seed(seed)
            torch.manual_seed(seed)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_)
