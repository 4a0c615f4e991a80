"""Judge one answer; what runs in the process that course/grading.py starts for it."""

from __future__ import annotations

import ast
import builtins
import contextlib
import math
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from inspect import getattr_static
from multiprocessing.connection import Connection
from types import FunctionType, ModuleType
from typing import Any

from course.confined import say
from course.lesson_code import CHECK, run_source
from course.needs import needed, used
from course.skeleton import Statement, Task, statements

# what a process says on its way, and at last: a check's statuses, and one more
READY, DEFINED = "ready", "defined"
PASSED, FAILED, NOT_ATTEMPTED, BROKEN = "passed", "failed", "not attempted", "check broken"
REFUSED = "refused"  # the course's own answer, or one that replaced what judges it

_NOTHING = object()


@dataclass(frozen=True)
class Job:
    """What is to be done."""

    task: Task  # the exercise
    setup: str  # source of the setup cell
    lesson: list[Statement]  # the lesson's statements above the check
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
    from shared.checks.traces import describe

    module = ModuleType("__main__")  # as a notebook's, so that pickle and torch.export find what is defined here
    sys.modules["__main__"] = module
    namespace = vars(module)
    namespace["display"] = lambda *_, **__: None

    def tell(stage: str, reason: str = "", earned: float = 0, demands: Iterable[list] = (), say: Any = say) -> None:
        say(link, {"key": job.key, "stage": stage, "reason": reason, "earned": earned, "demands": list(demands)})

    try:
        run_source(job.setup, "setup", namespace)
        exercise = eval(job.task.check, namespace)
    except BaseException as error:
        return tell(BROKEN, f"the setup cell fails: {describe(error)}")
    # what decides is taken before any line of the student's has run
    run, held = type(exercise).run, _held(exercise)
    tell(READY)
    try:
        _run_cells(job, namespace)
        answer = eval(job.task.argument, namespace)
        if _is_courses(answer, exercise):
            raise _RefusedError("it is the course's own")
        tell(DEFINED)
        result = run(exercise, answer, seed=job.seed, seconds=job.seconds)
        hidden = _hidden_failure(job, namespace) if result.status == PASSED else ""
    except _RefusedError as error:
        return tell(REFUSED, str(error))
    except _LessonError as error:
        return tell(BROKEN, str(error))
    except BaseException as error:
        return tell(FAILED, describe(error))
    if replaced := _replaced(held):
        return tell(REFUSED, f"it has replaced {replaced}")
    demands = [_lines(item) for item in result.items if not (item.passed and item.guard)]
    if hidden:
        return tell(FAILED, "a hidden test fails", 0, [*demands, ["hidden tests", False, "no exception", hidden, ""]])
    reason = result.note or "; ".join(item.name for item in result.failures)
    if result.unjudged:
        reason += f"; {result.unjudged} more could not be judged"
    tell(result.status, reason, result.earned, demands)


def _lines(item: Any) -> list:
    return [item.name, item.passed, item.expected, item.got, item.advice]


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
    lesson = _with_passed(job)
    known = set(namespace).union(*(one.binds for one in lesson))
    others = [one for source in job.others for one in _statements(source) if not one.binds & known]
    candidates = lesson + others
    names = used(answer) | job.task.uses
    chosen = needed(names, [one.binds for one in candidates], lambda index: candidates[index].uses)
    own = [one.source for one in (candidates[index] for index in chosen) if not one.cell]
    if any(map(_takes_checks, (answer, *own))):
        raise _RefusedError("it imports the course's checks")
    for index in chosen:
        statement = candidates[index]
        namespace[CHECK] = check if statement.cell else _NoChecks()
        try:
            run_source(statement.source, "cell above", namespace)
        except Exception as error:
            if index < len(lesson):
                raise _LessonError(f"the lesson's own code fails: {type(error).__name__}: {error}") from None
            raise
    namespace[CHECK] = _NoChecks()
    run_source(answer, "answer", namespace)


def _with_passed(job: Job) -> list[Statement]:
    """The lesson's statements, in the place of the course's earlier answers those of the student's that passed."""
    found, seen = [], set()
    for statement in job.lesson:
        if statement.cell not in job.passed:
            found.append(statement)
        elif statement.cell not in seen:
            seen.add(statement.cell)
            found += _statements(job.passed[statement.cell])
    return found


def _statements(source: str) -> list[Statement]:
    """A student's statements; none of a cell that can't run."""
    with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        return statements(ast.parse(_runnable(source)), "")
    return []


def _runnable(source: str) -> str:
    """A source without lines that only IPython understands, if it isn't Python with them."""
    try:
        ast.parse(source)
    except SyntaxError:
        return re.sub(r"^[%!].*$", "", source, flags=re.MULTILINE)
    return source


# ---------------------------------------------------------------- deceit


def _takes_checks(source: str) -> bool:
    """Whether code imports from shared.checks."""
    imports = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imports += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imports += [f"{node.module}.{alias.name}" for alias in node.names]
    return any(f"{name}.".startswith("shared.checks.") for name in imports)


def _is_courses(answer: Any, exercise: Any) -> bool:
    """Whether an answer, or a part of it, is the course's and not the student's."""
    parts = [answer, *(answer if type(answer) in (tuple, list) else ())]
    homes = [str(getattr(part, "__module__", "")) for part in parts]
    return exercise.is_stand_in(answer) or any(home.startswith("shared.checks") for home in homes)


def _held(exercise: Any) -> list[tuple]:
    """What decides, as it is now: the exercise, and the functions of the checks, of Python and of torch."""
    import torch

    from shared.checks import comparing

    checks = [module for name, module in sys.modules.items() if name.startswith("shared.checks")]
    classes = [one for module in checks for one in vars(module).values() if isinstance(one, type)]
    classes = [one for one in classes if one.__module__.startswith("shared.checks")]
    others = [builtins, math, torch, torch.nn.functional, torch.testing, torch.Tensor]
    held = [(exercise, name, vars(exercise)[name], None) for name in ("body", "points", "demands", "stand_in")]
    held.append((comparing, "_TOLERANCES", comparing._TOLERANCES, dict(comparing._TOLERANCES)))
    for owner in (*checks, *classes, *others):
        # what a class has inherited, too, but for the topics' own models: torch.export exchanges things in nn.Module
        is_model = isinstance(owner, type) and issubclass(owner, torch.nn.Module)
        for name in list(vars(owner)) if is_model else dir(owner):
            value = getattr_static(owner, name, _NOTHING)
            if callable(value) or isinstance(value, property | staticmethod | classmethod):
                held.append((owner, name, value, _inside(value)))
    # a module's own name goes before the builtin one
    held += [
        (module, name, _NOTHING, None) for module in checks for name in vars(builtins).keys() - vars(module).keys()
    ]
    return held


def _inside(value: Any) -> object:
    """What can be changed in a function or a table without replacing it."""
    if type(value) is dict:
        return dict(value)
    value = getattr(value, "fget", None) or getattr(value, "__func__", value)
    if not isinstance(value, FunctionType):
        return None
    return value.__code__, value.__defaults__, value.__kwdefaults__


def _replaced(held: list[tuple]) -> str:
    """The name of something that isn't what it was; nothing if all is."""
    for owner, name, value, inside in held:
        if getattr_static(owner, name, _NOTHING) is not value or (inside is not None and _inside(value) != inside):
            return f"{getattr(owner, '__name__', 'its check')}.{name}"
    return ""
