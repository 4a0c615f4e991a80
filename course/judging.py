"""Judge one answer; what runs in the process that course/grading.py starts for it."""

from __future__ import annotations

import ast
import builtins
import contextlib
import math
import re
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import FunctionType, ModuleType
from typing import Any

from course.confined import say
from course.lesson_code import CHECK, run_source
from course.needs import bound, needed_for, used
from course.skeleton import Task

# where a process is, which it says on its way
BEFORE, ANSWER, CHECKING = "before the answer cell", "the answer cell", "the check of the answer"
# what it says at last: a check's statuses, and one more
PASSED, FAILED, NOT_ATTEMPTED, BROKEN = "passed", "failed", "not attempted", "check broken"
REFUSED = "refused"  # the course's own answer, or one that replaced what judges it
TEXT = 2_000  # characters that are kept of what a check shows


@dataclass(frozen=True)
class Job:
    """What is to be done."""

    task: Task  # the exercise
    setup: str  # source of the setup cell
    lesson: dict[str, str]  # sources of the lesson's cells above the check, by their ids
    # the student's earlier answers that passed, by their cells: they take the place of the lesson's
    passed: dict[str, str]
    others: list[str]  # what else the student wrote
    answer: str  # source of the answer cell
    seed: int  # of the check
    seconds: float
    key: str  # what each message has to hold


class _RefusedError(BaseException):
    """An answer that isn't judged; not an Exception, so that none catches it by accident."""


class _LessonError(BaseException):
    """What comes before any line of the student's fails."""


class _NoChecks:
    """What the checks are to a student's code while it is graded: they judge nothing and give nothing."""

    used = ""

    def __getattr__(self, name: str) -> _NoChecks:
        if name == "stand_in":
            raise _RefusedError("it takes the course's stand-in")
        return self

    def __call__(self, answer: Any = None) -> Any:
        return answer


def judge(link: Connection, job: Job) -> None:
    """Run what comes before, then the answer, then the check, and say at each stage how it went."""
    from shared.checks.report import Item
    from shared.checks.traces import describe

    module = ModuleType("__main__")  # as a notebook's, so that pickle and torch.export find what is defined here
    sys.modules["__main__"] = module
    namespace = vars(module)
    namespace["display"] = lambda *_, **__: None

    def tell(stage: str, reason: str = "", earned: float = 0, demands: Any = (), say: Any = say) -> None:
        shown = [
            {name: text[:TEXT] if isinstance(text, str) else text for name, text in one.items()} for one in demands
        ]
        say(link, {"key": job.key, "stage": stage, "reason": reason[:TEXT], "earned": earned, "demands": shown})

    try:
        run_source(job.setup, "setup", namespace)
        exercise = eval(job.task.check, namespace)
    except BaseException as error:
        return tell(BROKEN, f"the setup cell fails: {describe(error)}")
    # what decides is taken before any line of the student's has run
    run, owners = type(exercise).run, _deciding(exercise)
    held = _contents(owners)
    tell(ANSWER)
    try:
        _run_cells(job, namespace)
        answer = eval(job.task.argument, namespace)
        if _is_courses(answer, exercise):
            raise _RefusedError("it is the course's own")
        tell(CHECKING)
        result = run(exercise, answer, seed=job.seed, seconds=job.seconds)
        hidden = _hidden_failure(job, namespace) if result.status == PASSED else ""
    except _RefusedError as error:
        return tell(REFUSED, str(error))
    except _LessonError as error:
        return tell(BROKEN, str(error))
    except BaseException as error:
        return tell(FAILED, describe(error))
    if replaced := _replaced(held, _contents(owners)):
        return tell(REFUSED, f"it has replaced {replaced}")
    demands = [_demand(one) for one in result.items if not (one.passed and one.guard)]
    if hidden:
        failed = _demand(Item("hidden tests", False, expected="no exception", got=hidden))
        return tell(FAILED, "a hidden test fails", 0, [*demands, failed])
    reason = result.note or "; ".join(item.name for item in result.failures)
    if result.unjudged:
        reason += f"; {result.unjudged} more could not be judged"
    tell(result.status, reason, result.earned, demands)


def _demand(item: Any) -> dict[str, Any]:
    texts = {"name": item.name, "expected": item.expected, "got": item.got, "hint": item.advice}
    return {"passed": item.passed, **{name: text[:TEXT] for name, text in texts.items()}}


def _hidden_failure(job: Job, namespace: dict[str, Any]) -> str:
    """What a hidden test raises, in a word that gives nothing of the test away; "" if they pass or there are none."""
    try:
        run_source(job.task.hidden, "hidden tests", namespace)
    except Exception as error:
        return type(error).__name__
    return ""


# ---------------------------------------------------------------- running an answer


def _run_cells(job: Job, namespace: dict[str, Any]) -> None:
    """Run the answer cell and what it needs."""
    check = namespace[CHECK]
    answer = _runnable(job.answer)
    compile(answer, "your answer", "exec", dont_inherit=True)  # raises what a reader understands
    courses, lesson = [], []
    for cell, source in job.lesson.items():
        if cell in job.passed:
            lesson += _statements(job.passed[cell])
        else:
            own = ast.parse(source).body
            courses += own
            lesson += own
    known = set(namespace).union(*map(bound, lesson))
    others = [one for source in job.others for one in _statements(source) if not bound(one) & known]
    chosen = needed_for(used(answer) | job.task.uses, lesson + others)
    if any(map(_imports_checks, [answer, *(ast.unparse(one) for one in chosen if one not in courses)])):
        raise _RefusedError("it imports the course's checks")
    for statement in chosen:
        is_courses = statement in courses
        namespace[CHECK] = check if is_courses else _NoChecks()
        try:
            run_source(ast.unparse(statement), "cell above", namespace)
        except Exception as error:
            if is_courses:
                raise _LessonError(f"the lesson's own code fails: {type(error).__name__}: {error}") from None
            raise
    namespace[CHECK] = _NoChecks()
    run_source(answer, "answer", namespace)


def _statements(source: str) -> list[ast.stmt]:
    """A student's statements; none of a cell that can't run."""
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


def _deciding(exercise: Any) -> list[Any]:
    """What decides: the exercise, and modules and classes of the checks, of Python and of torch."""
    import torch

    checks = [module for name, module in sys.modules.items() if name.startswith("shared.checks")]
    classes = {one for module in checks for one in vars(module).values() if isinstance(one, type)}
    classes = [one for one in classes if one.__module__.startswith("shared.checks")]
    return [exercise, *checks, *classes, builtins, math, torch, torch.nn.functional, torch.testing, torch.Tensor]


def _contents(owners: list[Any]) -> dict[tuple[int, str], tuple[str, Any, Any]]:
    """What can be called of each, and all of the exercise and of the tolerances; with where it is."""
    contents = {}
    for number, owner in enumerate(owners):
        where = getattr(owner, "__name__", "its check")
        for name, value in vars(owner).items():
            is_code = callable(value) or isinstance(value, property | staticmethod | classmethod)
            if is_code or number == 0 or name == "_TOLERANCES":
                contents[number, name] = (f"{where}.{name}", value, _inside(value))
    return contents


def _inside(value: Any) -> Any:
    """What can be changed in a function or a table without replacing it."""
    if type(value) is dict:
        return dict(value)
    value = getattr(value, "fget", None) or getattr(value, "__func__", value)
    if isinstance(value, FunctionType):
        return value.__code__, value.__defaults__, value.__kwdefaults__
    return None


def _replaced(before: dict, after: dict) -> str:
    """The name of something that isn't what it was, or wasn't there; nothing if all is."""
    for place in before.keys() | after.keys():
        name, old, inside = before.get(place) or after[place]
        if place not in before or place not in after or after[place][1] is not old or after[place][2] != inside:
            return name
    return ""
