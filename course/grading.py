"""Grade one submission.

    graded = grade(read_submission(path.read_bytes(), path.name), seed=7)
    graded.points, [(exercise.number, exercise.status) for exercise in graded.exercises]

The course's own notebook is the skeleton. For each exercise a new process (course/confined.py) runs

1. its setup cell, and of the cells before the answer those statements that define a name which the answer uses.
   Earlier exercises have the student's answers where these passed, and the course's elsewhere: a mistake costs points
   once;
2. of what the student wrote elsewhere the statements that define such a name, if the lesson doesn't;
3. the answer cell as the student wrote it;
4. the course's check, with another seed than in the notebook, and its hidden tests.

Nothing else of the file runs: what became of its check cells, its outputs or its metadata changes nothing. The
instructor's guide says what an answer can do that is meant to deceive.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from course import confined
from course.confined import START_SECONDS, Confined, Limits, Stopped
from course.judging import ANSWER, BEFORE, BROKEN, CHECKING, FAILED, NOT_ATTEMPTED, PASSED, REFUSED, Job, judge
from course.skeleton import skeleton
from course.submission import Submission

# further statuses of an exercise
MISSING = "missing"  # there is no answer cell
STOPPED = "stopped"  # it ran for too long, died, or took too much
ABSENT, UNREADABLE = "not handed in", "unreadable"  # of all exercises of a topic
NOT_HANDED_IN = {ABSENT, UNREADABLE}
PROBLEMS = {BROKEN, REFUSED, STOPPED, MISSING}  # what an instructor may want to look at


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
    """What became of a submission. `notes` say what a reader should know of how it was found and read."""

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

    @staticmethod
    def from_json(document: dict[str, Any]) -> Graded:
        """What dataclasses.asdict and JSON have made of one. Raises TypeError or KeyError for anything else."""
        exercises = tuple(GradedExercise(**(one | {"demands": tuple(one["demands"])})) for one in document["exercises"])
        return Graded(document["topic"], exercises, tuple(document["notes"]))


def prepare(topics: Iterable[str]) -> str:
    """Have processes start with what these topics need. Returns why they can't be sealed here; nothing if they can."""
    setups = [skeleton(topic).code["setup"] for topic in topics]
    checks = {name for setup in setups for name in re.findall(r"^from shared\.checks import (topic_\w+)", setup, re.M)}
    confined.prepare(setups, also=["course.judging", *(f"shared.checks.{name}" for name in checks)])
    return confined.can_seal()


def grade(submission: Submission, *, seed: int, seconds: float = 60.0, total: float = 900.0) -> Graded:
    """Grade what was read from a file, with another seed of the checks' random cases than the students'.

    An answer with what it needs may take so many seconds, its check as many, and all exercises together `total`.
    """
    lesson = skeleton(submission.topic)
    is_sealed = not prepare([submission.topic])
    deadline = time.monotonic() + total
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
            # a helper that stands beside another answer serves this one, too
            beside = [text for cell, text in submission.answers.items() if cell != task.cell and cell not in passed]
            job = Job(
                task=task,
                setup=lesson.code["setup"],
                lesson=lesson.before(task),
                passed=dict(passed),
                others=[*beside, *submission.others],
                answer=answer,
                seed=seed,
                seconds=seconds,
                key=secrets.token_hex(),
            )
            graded.append(_grade_exercise(nothing, job, deadline, is_sealed))
            if graded[-1].status == PASSED:
                passed[task.cell] = answer
    return Graded(submission.topic, tuple(graded), submission.notes)


def absent(topic: str, status: str, reason: str) -> Graded:
    """No points for a topic of which there is nothing to judge."""
    tasks = skeleton(topic).tasks
    exercises = [GradedExercise(one.number, one.title, one.points, status=status, reason=reason) for one in tasks]
    return Graded(topic, tuple(exercises))


def _grade_exercise(nothing: GradedExercise, job: Job, deadline: float, is_sealed: bool) -> GradedExercise:
    # a check ends itself, and says where it was
    stages = {BEFORE: START_SECONDS, ANSWER: job.seconds, CHECKING: 1.25 * job.seconds + 1}
    stage = BEFORE
    try:
        with Confined(judge, (job,), Limits(), is_sealed=is_sealed) as process:
            while stage in stages:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise Stopped("all exercises together took too long")
                said = process.hear(min(stages[stage], left))
                if not isinstance(said, dict) or said.get("key") != job.key:
                    raise Stopped("it sent what is no result")
                stage = str(said.get("stage"))
    except Stopped as error:
        return replace(nothing, status=STOPPED, reason=f"{stage}: {error}")
    except OSError as error:
        return replace(nothing, status=BROKEN, reason=str(error))
    try:
        return _verdict(nothing, said)
    except (KeyError, TypeError, ValueError, OverflowError):
        return replace(nothing, status=STOPPED, reason="it sent what is no result")


def _verdict(nothing: GradedExercise, said: dict[str, Any]) -> GradedExercise:
    """What a process said at last. From an answer that deceives it may be anything: then this raises."""
    status = said["stage"]
    if status not in (PASSED, FAILED, NOT_ATTEMPTED, BROKEN, REFUSED):
        raise ValueError(status)
    demands = tuple(
        {"passed": one["passed"] is True, **{name: str(one[name]) for name in ("name", "expected", "got", "hint")}}
        for one in said["demands"]
    )
    points = {PASSED: nothing.of, FAILED: min(max(0.0, float(said["earned"])), nothing.of)}.get(status, 0)
    return replace(nothing, points=points, status=status, reason=str(said["reason"]), demands=demands)
