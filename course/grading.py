"""Grade one submission: a function of a file.

    graded = grade_file(Path("alice/15-03_advanced_nn_module_patterns.ipynb"), seed=7)
    graded.points, [(exercise.number, exercise.status) for exercise in graded.exercises]

The course's own notebook is the skeleton. For each exercise a new process (course/confined.py) runs

1. its setup cell, and of the cells before the answer those statements that define a name which the answer uses;
2. of the cells that the student added, and of their earlier answers, the statements that define such a name, too, and
   imports that they wrote into cells of the lesson;
3. the answer cell as the student wrote it;
4. the course's check, with another seed than in the notebook.

In 1, earlier exercises are not attempted, so that what builds on them gets the checks' stand-ins, as in the student
edition, and a mistake costs points once. Nothing else of the file runs: what became of its check cells, its outputs or
its metadata changes nothing.

What a hostile answer can do: it runs in one process with the check. That process reaches no other submission's, its
word counts only with a key, and an answer that replaced a function which decides earns nothing. But code that looks at
the frames above it finds the key, or changes what a check has recorded, and nothing within one process keeps it from
that. Nobody writes such a thing by mistake: read the answers that touch frames, gc, ctypes or `shared.checks`. Where
processes can't be sealed (anywhere but on Linux, and in most containers) an answer can also do what the user may: read
and change files, use the network. Then grade in a container that is thrown away:

    docker run --rm --network none --memory 8g --pids-limit 512 --shm-size 1g --read-only --tmpfs /tmp:exec,size=2g \\
        -e HOME=/tmp -v "$PWD":/course:ro -v "$PWD/grades":/out -w /course IMAGE \\
        env COURSE_ENV=current python -m course grade submissions --output /out
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
    """What a submission may take.

    Attributes:
        answer: seconds for an answer cell with what it needs.
        check: seconds for a check.
        total: seconds for all exercises of a submission; those that are left then are stopped.
        process: what each process may take.
    """

    answer: float = 60
    check: float = 60
    total: float = 900
    process: Limits = field(default_factory=Limits)


@dataclass(frozen=True)
class Demand:
    """A demand that was judged, as the check shows it."""

    name: str
    passed: bool
    expected: str = ""
    got: str = ""
    hint: str = ""


@dataclass(frozen=True)
class GradedExercise:
    """What became of one exercise. `status` is one of the words above; `reason` is one line, empty if it passed."""

    number: str
    title: str
    of: int
    points: float = 0
    status: str = PASSED
    reason: str = ""
    demands: tuple[Demand, ...] = ()
    seconds: float = 0


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
        exercises = []
        for exercise in document["exercises"]:
            demands = tuple(Demand(**demand) for demand in exercise["demands"])
            exercises.append(GradedExercise(**(exercise | {"demands": demands})))
        return Graded(document["topic"], tuple(exercises), tuple(document["notes"]))


# ---------------------------------------------------------------- grading


def prepare(topics: Iterable[str]) -> str:
    """Have processes start with what these topics need. Returns why they can't be sealed here; nothing if they can."""
    setups = [skeleton(topic).setup for topic in topics]
    checks = {name for setup in setups for name in re.findall(r"^from shared\.checks import (topic_\w+)", setup, re.M)}
    confined.prepare(setups, also=["course.judging", *(f"shared.checks.{name}" for name in checks)])
    return confined.can_seal()


def grade_file(path: Path, topic: str | None = None, *, seed: int, limits: GradingLimits | None = None) -> Graded:
    """Grade a notebook.

    Args:
        path: the student's file.
        topic: "15-03"; None if the file's cells or its name say so.
        seed: of the checks' random cases; another one than the students'.
        limits: what it may take.

    Raises:
        UnreadableError: the file can't be read, or is none of the course's notebooks.
        TargetError: the course has no such topic, or its notebook is not in order.
    """
    if not path.is_file():
        raise UnreadableError("there is no such file")
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
    answers = {piece.place: piece.source for piece in submission.pieces if piece.kind == "answer"}
    deadline = time.monotonic() + limits.total
    graded = []
    for task in lesson.tasks:
        nothing = GradedExercise(task.number, task.title, task.points)
        if task.place not in answers:
            graded.append(replace(nothing, status=MISSING, reason="its answer cell is not in the notebook"))
        elif not task.is_attempted_in(answers[task.place]):
            graded.append(replace(nothing, status=NOT_ATTEMPTED, reason="there is nothing but the stub"))
        else:
            start = time.monotonic()
            job = _job(lesson, task, submission, seed, limits)
            found = _grade_exercise(nothing, job, limits, deadline, is_sealed, stop)
            graded.append(replace(found, seconds=round(time.monotonic() - start, 2)))
    return Graded(submission.topic, tuple(graded), submission.notes)


def absent(topic: str, status: str, reason: str) -> Graded:
    """No points for a topic of which there is nothing to judge."""
    tasks = skeleton(topic).tasks
    exercises = [GradedExercise(one.number, one.title, one.points, status=status, reason=reason) for one in tasks]
    return Graded(topic, tuple(exercises))


def _job(lesson: Skeleton, task: Task, submission: Submission, seed: int, limits: GradingLimits) -> Job:
    answers = {piece.place: piece for piece in submission.pieces if piece.kind == "answer"}
    earlier = [one for one in lesson.tasks if one.place < task.place and one.place in answers]
    return Job(
        task=task,
        setup=lesson.setup,
        statements=tuple(statement for statement in lesson.statements if statement.place < task.place),
        # an earlier answer comes after its check: the student's own names are in the place of the stub's
        earlier=tuple(replace(answers[one.place], place=one.check_place) for one in earlier),
        others=tuple(piece for piece in submission.pieces if piece.kind != "answer"),
        answer=answers[task.place].source,
        seed=seed,
        seconds=limits.check,
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
                said = hear(process, limits.answer)
            if said.get("stage") == judging.DEFINED:
                stage = "the check of the answer"
                said = hear(process, 1.25 * limits.check + 1)  # it ends itself, and says where it was
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
            Demand(_text(name), passed is True, _text(expected), _text(got), _text(hint))
            for name, passed, expected, got, hint in said["demands"]
        )
        earned = {PASSED: nothing.of, FAILED: min(max(0.0, round(float(said["earned"]), 1)), nothing.of)}
        return replace(nothing, points=earned.get(status, 0), status=status, reason=reason, demands=demands)
    except (KeyError, TypeError, ValueError, OverflowError):
        return replace(nothing, status=STOPPED, reason="it sent what is no result")


def _text(value: object) -> str:
    text = str(value)
    return text if len(text) <= TEXT else text[: TEXT - 4] + " ..."
