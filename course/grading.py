"""Grade one submission: a function of a file.

    graded = grade_file(Path("alice/15-03_advanced_nn_module_patterns.ipynb"), seed=7)
    graded.points, [(exercise.number, exercise.status) for exercise in graded.exercises]

The course's own notebook is the skeleton. For each exercise a new process (course/confined.py) runs

1. its setup cell, and of the cells before the answer those statements that define a name which the answer uses.
   Earlier exercises have the student's answers where these passed, and the course's elsewhere: a mistake costs points
   once;
2. of what the student wrote elsewhere the statements that define such a name, if the lesson doesn't;
3. the answer cell as the student wrote it;
4. the course's check, with another seed than in the notebook, and its hidden tests.

Nothing else of the file runs: what became of its check cells, its outputs or its metadata changes nothing.

What a hostile answer can do: it runs in one process with the check. That process reaches no other submission's, its
word counts only with a key, and an answer that replaced a function which decides earns nothing. But code that looks at
the frames above it finds the key, or changes what a check has recorded, and nothing within one process keeps it from
that. Nobody writes such a thing by mistake: read the answers that touch frames, gc, ctypes or `shared.checks`. Where
processes can't be sealed (anywhere but on Linux, and in most containers) an answer can also do what the user may: read
and change files, use the network. Then grade in a container that is thrown away; the instructor's guide has the recipe.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from course import confined, judging
from course.confined import START_SECONDS, Confined, Limits, Stopped
from course.judging import BROKEN, FAILED, NOT_ATTEMPTED, PASSED, REFUSED, Job
from course.skeleton import Skeleton, Task, skeleton
from course.submission import Submission, UnreadableError, read_submission

# further statuses of an exercise
MISSING = "missing"  # there is no answer cell
STOPPED = "stopped"  # it ran for too long, died, or took too much
ABSENT, UNREADABLE = "not handed in", "unreadable"  # of all exercises of a topic
NOT_HANDED_IN = {ABSENT, UNREADABLE}
PROBLEMS = {BROKEN, REFUSED, STOPPED, MISSING, UNREADABLE}  # what an instructor may want to look at

TEXT = 2_000  # characters that are kept of what a check shows


@dataclass(frozen=True)
class GradingLimits:
    """What a submission may take."""

    cell: float = 60  # seconds for an answer cell with what it needs, and again for its check
    total: float = 900  # seconds for all exercises of a submission; those that are left then are stopped
    process: Limits = field(default_factory=Limits)  # what each process may take


@dataclass(frozen=True)
class GradedExercise:
    """What became of one exercise."""

    number: str  # as in the heading, and title and of
    title: str
    of: int
    points: float = 0  # what was earned
    status: str = PASSED  # one of the words above
    reason: str = ""  # one line, empty if it passed
    demands: tuple[dict[str, Any], ...] = ()  # what was judged, as dictionaries of name, passed, expected, got, hint


@dataclass(frozen=True)
class Graded:
    """What became of a submission. `notes` say what a reader should know of how it was read."""

    topic: str
    exercises: tuple[GradedExercise, ...]
    notes: tuple[str, ...] = ()

    @property
    def points(self) -> float:
        """The sum, to one decimal as each part."""
        return round(sum(exercise.points for exercise in self.exercises), 1)

    @property
    def of(self) -> int:
        """How many points there are."""
        return sum(exercise.of for exercise in self.exercises)

    @property
    def is_judged(self) -> bool:
        """Whether no check was at fault."""
        return all(exercise.status != BROKEN for exercise in self.exercises)

    def to_json(self) -> dict[str, Any]:
        """For `from_json`."""
        return asdict(self)

    @staticmethod
    def from_json(document: dict[str, Any]) -> Graded:
        """What `to_json` gave. Raises TypeError or KeyError for anything else."""
        exercises = tuple(GradedExercise(**(one | {"demands": tuple(one["demands"])})) for one in document["exercises"])
        return Graded(document["topic"], exercises, tuple(document["notes"]))


# ---------------------------------------------------------------- grading


def prepare(topics: Iterable[str]) -> str:
    """Have processes start with what these topics need. Returns why they can't be sealed here; nothing if they can."""
    setups = [skeleton(topic).setup for topic in topics]
    checks = {name for setup in setups for name in re.findall(r"^from shared\.checks import (topic_\w+)", setup, re.M)}
    confined.prepare(setups, also=["course.judging", *(f"shared.checks.{name}" for name in checks)])
    return confined.can_seal()


def grade_file(path: Path, topic: str | None = None, *, seed: int, limits: GradingLimits | None = None) -> Graded:
    """Grade a student's file, with another seed of the checks' random cases than the students'.

    `topic` is "15-03", or None if the file's cells or its name say so. Raises UnreadableError if the file is none of
    the course's notebooks, TargetError if the course has no such topic or its own notebook is not in order.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UnreadableError(f"it can't be read: {error.strerror or error}") from None
    return grade(read_submission(content, path.name, topic), seed=seed, limits=limits)


def grade(
    submission: Submission,
    *,
    seed: int,
    limits: GradingLimits | None = None,
    stop: threading.Event | None = None,
) -> Graded:
    """Grade what was read from a file. Raises Stopped if `stop` is set meanwhile."""
    limits = limits or GradingLimits()
    lesson = skeleton(submission.topic)
    is_sealed = not prepare([submission.topic])
    deadline = time.monotonic() + limits.total
    graded: list[GradedExercise] = []
    passed: dict[str, str] = {}
    for task in lesson.tasks:
        nothing = GradedExercise(task.number, task.title, task.points)
        answer = submission.answers.get(task.cell)
        if answer is None:
            graded.append(replace(nothing, status=MISSING, reason="its answer cell is not in the notebook"))
        elif not task.is_attempted_in(answer):
            graded.append(replace(nothing, status=NOT_ATTEMPTED, reason="there is nothing but the stub"))
        else:
            job = _job(lesson, task, submission, passed, seed, limits.cell)
            graded.append(_grade_exercise(nothing, job, limits, deadline, is_sealed, stop))
            if graded[-1].status == PASSED:
                passed[task.cell] = answer
    return Graded(submission.topic, tuple(graded), submission.notes)


def absent(topic: str, status: str, reason: str) -> Graded:
    """No points for a topic of which there is nothing to judge."""
    tasks = skeleton(topic).tasks
    exercises = [GradedExercise(one.number, one.title, one.points, status=status, reason=reason) for one in tasks]
    return Graded(topic, tuple(exercises))


def _job(
    lesson: Skeleton, task: Task, submission: Submission, passed: dict[str, str], seed: int, seconds: float
) -> Job:
    # a helper that stands beside another answer serves this one, too
    beside = [source for cell, source in submission.answers.items() if cell != task.cell and cell not in passed]
    return Job(
        task=task,
        setup=lesson.setup,
        lesson=lesson.before(task),
        passed=dict(passed),
        others=[*beside, *submission.others],
        answer=submission.answers[task.cell],
        seed=seed,
        seconds=seconds,
        key=secrets.token_hex(),
    )


def _grade_exercise(
    nothing: GradedExercise,
    job: Job,
    limits: GradingLimits,
    deadline: float,
    is_sealed: bool,
    stop: threading.Event | None,
) -> GradedExercise:
    def hear(process: Confined, seconds: float) -> dict[str, Any]:
        left = deadline - time.monotonic()
        if left <= 0:
            raise Stopped(f"all exercises together took more than {limits.total:g} s")
        message = process.hear(min(seconds, left))
        if not isinstance(message, dict) or message.get("key") != job.key:
            raise Stopped("it sent what is no result")
        return message

    stage = "before the answer cell"
    try:
        with Confined(judging.judge, (job,), limits.process, is_sealed=is_sealed, stop=stop) as process:
            said = hear(process, START_SECONDS)
            if said.get("stage") == judging.READY:
                stage = "the answer cell"
                said = hear(process, limits.cell)
            if said.get("stage") == judging.DEFINED:
                stage = "the check of the answer"
                said = hear(process, 1.25 * limits.cell + 1)  # it ends itself, and says where it was
    except Stopped as error:
        if stop is not None and stop.is_set():
            raise
        return replace(nothing, status=STOPPED, reason=f"{stage}: {error}")
    except OSError as error:
        return replace(nothing, status=BROKEN, reason=str(error))
    return _read(nothing, said)


def _read(nothing: GradedExercise, said: dict[str, Any]) -> GradedExercise:
    """What a process said at last; it may say anything."""
    try:
        status, reason = said["stage"], _text(said["reason"])
        if status not in (PASSED, FAILED, NOT_ATTEMPTED, BROKEN, REFUSED):
            raise ValueError(status)
        demands = tuple(
            {
                "name": _text(name),
                "passed": passed is True,
                "expected": _text(want),
                "got": _text(got),
                "hint": _text(hint),
            }
            for name, passed, want, got, hint in said["demands"]
        )
        earned = {PASSED: nothing.of, FAILED: min(max(0.0, round(float(said["earned"]), 1)), nothing.of)}
        return replace(nothing, points=earned.get(status, 0), status=status, reason=reason, demands=demands)
    except (KeyError, TypeError, ValueError, OverflowError):
        return replace(nothing, status=STOPPED, reason="it sent what is no result")


def _text(value: object) -> str:
    text = str(value)
    return text if len(text) <= TEXT else text[: TEXT - 4] + " ..."
