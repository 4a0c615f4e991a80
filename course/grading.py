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

import ast
import builtins
import contextlib
import math
import re
import secrets
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from types import ModuleType, SimpleNamespace
from typing import Any

from course import confined
from course.confined import START_SECONDS, Confined, Limits, Stopped, say
from course.lesson_code import CHECK, run_source
from course.needs import bound, needed_for, used
from course.skeleton import Skeleton, Task, skeleton
from course.submission import Submission

# where a process is, which it says on its way
BEFORE, ANSWER, CHECKING = "before the answer cell", "the answer cell", "the check of the answer"
# what becomes of an exercise: a check's statuses,
PASSED, FAILED, NOT_ATTEMPTED, BROKEN = "passed", "failed", "not attempted", "check broken"
REFUSED = "refused"  # the course's own answer, or one that replaced what judges it
MISSING = "missing"  # there is no answer cell
STOPPED = "stopped"  # it ran for too long, died, or took too much
ABSENT, UNREADABLE = "not handed in", "unreadable"  # of all exercises of a topic
NOT_HANDED_IN = {ABSENT, UNREADABLE}
PROBLEMS = {BROKEN, REFUSED, STOPPED, MISSING}  # what an instructor may want to look at

NO_RESULT = "it sent what is no result"
TEXT = 2_000  # characters that are kept of what a check shows


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

    def __str__(self) -> str:
        """What the student is told, in lines."""
        lines = [f"{self.status}: {self.reason}" if self.reason else self.status]
        for demand in self.demands:
            lines.append(f"{'ok   ' if demand['passed'] else 'WRONG'}  {demand['name']}")
            if not demand["passed"]:
                lines += [f"       {name}: {demand[name]}" for name in ("expected", "got", "hint") if demand[name]]
        return "\n".join(lines)


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


@dataclass(frozen=True)
class Job:
    """An answer that is to be judged."""

    lesson: Skeleton
    task: Task
    submission: Submission
    passed: tuple[str, ...]  # ids of earlier answer cells, which take the place of the lesson's
    seed: int  # of the check
    seconds: float  # for the answer, and for its check
    key: str = field(default_factory=secrets.token_hex)  # what each message has to hold


def prepare(topics: Iterable[str]) -> str:
    """Have processes start with what these topics need. Returns why they can't be sealed here; nothing if they can."""
    confined.prepare([skeleton(topic).code["setup"] for topic in topics], also=["course.grading"])
    return confined.can_seal()


def grade(submission: Submission, *, seed: int, seconds: float = 60.0) -> Graded:
    """Grade what was read from a file, with another seed of the checks' random cases than the students'.

    An answer with what it needs may take so many seconds, and its check as many.
    """
    lesson = skeleton(submission.topic)
    is_sealed = not prepare([submission.topic])
    graded: list[GradedExercise] = []
    passed: list[str] = []
    for task in lesson.tasks:
        nothing = GradedExercise(task.number, task.title, task.points)
        if task.cell not in submission.answers:
            one = replace(nothing, status=MISSING, reason="its answer cell is not in the notebook")
        elif not task.is_attempted_in(submission.answers[task.cell]):
            one = replace(nothing, status=NOT_ATTEMPTED, reason="there is nothing but the stub")
        else:
            one = _judged(nothing, Job(lesson, task, submission, tuple(passed), seed, seconds), is_sealed)
        graded.append(one)
        if one.status == PASSED:
            passed.append(task.cell)
    return Graded(submission.topic, tuple(graded), submission.notes)


def absent(topic: str, status: str, reason: str) -> Graded:
    """No points for a topic of which there is nothing to judge."""
    tasks = skeleton(topic).tasks
    exercises = [GradedExercise(one.number, one.title, one.points, status=status, reason=reason) for one in tasks]
    return Graded(topic, tuple(exercises))


def _judged(nothing: GradedExercise, job: Job, is_sealed: bool) -> GradedExercise:
    """Have an answer judged in a process of its own."""
    # a check ends itself, and says where it was
    stages = {BEFORE: START_SECONDS, ANSWER: job.seconds, CHECKING: 1.25 * job.seconds + 1}
    stage = BEFORE
    try:
        with Confined(judge, (job,), Limits(), is_sealed=is_sealed) as process:
            while stage in stages:
                said = process.hear(stages.pop(stage))
                if not isinstance(said, dict) or said.get("key") != job.key:
                    raise Stopped(NO_RESULT)
                stage = str(said.get("stage"))
        return _verdict(nothing, said)
    except Stopped as error:
        return replace(nothing, status=STOPPED, reason=f"{stage}: {error}")
    except (KeyError, TypeError, ValueError, OverflowError):  # an answer has found the key
        return replace(nothing, status=STOPPED, reason=NO_RESULT)


def _verdict(nothing: GradedExercise, said: dict[str, Any]) -> GradedExercise:
    """What a process said at last. From an answer that deceives it may be anything: then this raises."""
    status = said["stage"]
    earned = min(max(0.0, float(said["earned"])), nothing.of)
    points = {PASSED: nothing.of, FAILED: earned, NOT_ATTEMPTED: 0, BROKEN: 0, REFUSED: 0}[status]
    texts = ("name", "expected", "got", "hint")
    demands = tuple(
        {"passed": one["passed"] is True} | {name: _text(one[name]) for name in texts} for one in said["demands"]
    )
    return replace(nothing, points=points, status=status, reason=_text(said["reason"]), demands=demands)


def _text(said: Any) -> str:
    """A text that can be written: JSON can hold half a character."""
    return str(said).encode("utf-8", "replace").decode("utf-8")


# ---------------------------------------------------------------- in the process of an exercise


class _RefusedError(BaseException):
    """An answer that isn't judged; not an Exception, so that none catches it by accident."""


class _LessonError(BaseException):
    """What comes before any line of the student's fails."""


class _NoChecks:
    """What the checks are to code while it is graded: they judge nothing and give the answer back."""

    used = ""

    def __getattr__(self, name: str) -> _NoChecks:
        if name == "stand_in":
            raise _RefusedError("it takes the course's stand-in")
        return self

    def __call__(self, answer: Any = None) -> Any:
        return answer


def judge(link: Connection, job: Job) -> None:
    """Run what comes before, then the answer, then the check, and say at each stage how it went."""
    from shared.checks.traces import describe

    module = ModuleType("__main__")  # as a notebook's, so that pickle and torch.export find what is defined here
    sys.modules["__main__"] = module
    namespace = vars(module)
    namespace["display"] = lambda *_, **__: None

    def tell(stage: str, reason: str = "", earned: float = 0, demands: Any = (), say: Any = say) -> None:
        say(link, {"key": job.key, "stage": stage, "reason": reason[:TEXT], "earned": earned, "demands": demands})

    try:
        run_source(job.lesson.code["setup"], "setup", namespace)
        exercise = eval(job.task.check, namespace)
    except BaseException as error:
        return tell(BROKEN, f"the setup cell fails: {describe(error)}")
    # what decides is taken before any line of the student's has run
    run, owners = type(exercise).run, _deciding(exercise)
    before = _contents(owners)
    tell(ANSWER)
    hidden_fails = False
    try:
        _run_cells(job, namespace, type(exercise))
        answer = eval(job.task.argument, namespace)
        if _is_courses(answer, exercise):
            raise _RefusedError("it is the course's own")
        tell(CHECKING)
        result = run(exercise, answer, seed=job.seed, seconds=job.seconds)
        if result.status == PASSED:
            try:
                run_source(job.task.hidden, "hidden tests", namespace)
            except Exception:
                hidden_fails = True
    except _RefusedError as error:
        return tell(REFUSED, str(error))
    except _LessonError as error:
        return tell(BROKEN, str(error))
    except BaseException as error:
        return tell(FAILED, describe(error))
    after = _contents(owners)
    if replaced := [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]:
        return tell(REFUSED, f"it has replaced {', '.join(sorted(replaced))}")
    if hidden_fails:
        return tell(FAILED, "a hidden test fails")
    demands = [
        {"name": one.name, "passed": one.passed}
        | {"expected": one.expected[:TEXT], "got": one.got[:TEXT], "hint": one.advice}
        for one in result.items
        if not (one.passed and one.guard)
    ]
    reason = result.note or "; ".join(item.name for item in result.failures)
    if result.unjudged:
        reason += f"; {result.unjudged} more could not be judged"
    tell(result.status, reason, result.earned, demands)


# ---------------------------------------------------------------- running an answer


def _run_cells(job: Job, namespace: dict[str, Any], kind: type) -> None:
    """Run the answer cell and what it needs. `kind` is the type of a check."""
    answers, own = job.submission.answers, job.task.cell
    answer = _runnable(answers[own])
    compile(answer, "your answer", "exec", dont_inherit=True)  # raises what a reader understands
    above = {
        cell: _statements(answers[cell] if cell in job.passed else source)
        for cell, source in job.lesson.before(job.task).items()
    }
    courses = {one for cell, statements in above.items() if cell not in job.passed for one in statements}
    known = [one for statements in above.values() for one in statements]
    names = set(namespace).union(*map(bound, known))
    # a helper that stands beside another answer serves this one, too
    beside = [source for cell, source in answers.items() if cell != own and cell not in job.passed]
    others = [one for source in [*beside, *job.submission.others] for one in _statements(source)]
    others = [one for one in others if not bound(one) & names]
    chosen = needed_for(used(answer) | job.task.uses, known + others)
    if any(map(_imports_checks, [answer, *(ast.unparse(one) for one in chosen if one not in courses)])):
        raise _RefusedError("it imports the course's checks")
    nothing, checks = _NoChecks(), vars(namespace[CHECK])
    lessons = SimpleNamespace(**{name: nothing if isinstance(one, kind) else one for name, one in checks.items()})
    for statement in chosen:
        namespace[CHECK] = lessons if statement in courses else nothing
        try:
            run_source(ast.unparse(statement), "cell above", namespace)
        except Exception as error:
            if statement in courses:
                raise _LessonError(f"the lesson's own code fails: {type(error).__name__}: {error}") from None
            raise
    namespace[CHECK] = nothing
    run_source(answer, "answer", namespace)


def _statements(source: str) -> list[ast.stmt]:
    """The statements of a cell; none if it can't run."""
    with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        tree = ast.parse(_runnable(source))
        compile(tree, "cell above", "exec")
        return tree.body
    return []


def _runnable(source: str) -> str:
    """A source without lines that only IPython understands, if it isn't Python with them."""
    try:
        ast.parse(source)
    except SyntaxError:
        return re.sub(r"^[%!].*$", "", source, flags=re.MULTILINE)
    return source


# ---------------------------------------------------------------- deceit


def _imports_checks(source: str) -> bool:
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return any(f"{name}.".startswith("shared.checks.") for name in names)


def _is_courses(answer: Any, exercise: Any) -> bool:
    """Whether an answer, or a part of it, is the course's and not the student's."""
    parts = [answer, *(answer if type(answer) in (tuple, list) else ())]
    homes = [str(getattr(part, "__module__", "")) for part in parts]
    return exercise.is_stand_in(answer) or any(home.startswith("shared.checks") for home in homes)


def _deciding(exercise: Any) -> dict[str, Any]:
    """What decides, by its name: the exercise, and modules and classes of the checks, of Python and of torch."""
    import torch

    checks = [module for name, module in sys.modules.items() if name.startswith("shared.checks")]
    classes = {one for module in checks for one in vars(module).values() if isinstance(one, type)}
    classes = {one for one in classes if one.__module__.startswith("shared.checks")}
    modules = [*checks, builtins, math, torch, torch.nn.functional, torch.testing]
    owners = {module.__name__: module for module in modules}
    owners |= {f"{one.__module__}.{one.__name__}": one for one in [*classes, torch.Tensor]}
    return owners | {"its check": exercise}


def _contents(owners: dict[str, Any]) -> dict[str, tuple[object, int]]:
    """Which object is what: all that can be called of each, all of the exercise, and the tolerances."""
    found = {}
    for where, owner in owners.items():
        for name, value in vars(owner).items():
            function = value
            if isinstance(value, property):
                function = value.fget
            elif isinstance(value, staticmethod | classmethod):
                function = value.__func__
            if callable(function) or where == "its check":
                found[f"{where}.{name}"] = id(value), id(getattr(function, "__code__", None))
            elif name == "_TOLERANCES":
                found[f"{where}.{name}"] = repr(value), id(value)
    return found
