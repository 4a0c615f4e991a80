"""Judge one answer; what runs in the process that course/grading.py starts for it."""

from __future__ import annotations

import ast
import contextlib
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import FunctionType, ModuleType
from typing import Any

from course.answers import CHECK, run_source
from course.confined import say
from course.needs import needed, used
from course.skeleton import Statement, Task, statements
from course.submission import Piece

# what a process says on its way, and at last: a check's statuses, and one more
READY, DEFINED = "ready", "defined"
PASSED, FAILED, NOT_ATTEMPTED, BROKEN = "passed", "failed", "not attempted", "check broken"
REFUSED = "refused"  # the course's own answer, or one that replaced what judges it


@dataclass(frozen=True)
class Job:
    """What is to be done.

    Attributes:
        task: the exercise.
        setup: source of the setup cell.
        statements: the lesson's before the answer cell.
        earlier: the student's answers to earlier exercises.
        others: what else the student wrote.
        answer: source of the answer cell.
        seed, seconds: of the check.
        key: what each message has to hold.
    """

    task: Task
    setup: str
    statements: tuple[Statement, ...]
    earlier: tuple[Piece, ...]
    others: tuple[Piece, ...]
    answer: str
    seed: int
    seconds: float
    key: str


class _RefusedError(BaseException):
    """An answer that isn't judged; not an Exception, so that none catches it by accident."""


class _LessonError(BaseException):
    """What comes before any line of the student's fails."""


class _NoCheck:
    """What a check is to a student's code while it is graded: it judges nothing and gives nothing."""

    used = ""

    def __call__(self, answer: Any) -> Any:
        return answer

    def skip(self) -> None:
        """Nothing."""

    @property
    def stand_in(self) -> Any:
        raise _RefusedError("it takes the course's stand-in")


class _NoChecks:
    def __getattr__(self, name: str) -> _NoCheck:
        return _NoCheck()


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
    except _RefusedError as error:
        return tell(REFUSED, str(error))
    except _LessonError as error:
        return tell(BROKEN, str(error))
    except BaseException as error:
        return tell(FAILED, describe(error))
    if replaced := _replaced(held):
        return tell(REFUSED, f"it has replaced {replaced}")
    reason = result.note or "; ".join(item.name for item in result.failures)
    if result.unjudged:
        reason += f"; {result.unjudged} more could not be judged"
    shown = [item for item in result.items if not (item.passed and item.guard)]
    return tell(result.status, reason, result.earned, map(_lines, shown))


def _lines(item: Any) -> list:
    see = f"open Hint {item.see} of the task" if item.see else ""
    return [item.name, item.passed, item.expected, item.got, "; ".join(filter(None, (item.hint, see)))]


def _run_cells(job: Job, namespace: dict[str, Any]) -> None:
    """Run the answer cell and what it needs."""
    check = namespace[CHECK]
    answer = _runnable(job.answer)
    compile(answer, "your answer", "exec", dont_inherit=True)  # raises what a reader understands
    candidates = sorted([*job.statements, *_students(job, set(namespace))], key=lambda one: one.place)
    names = used(answer) | job.task.uses | used(job.task.argument)
    indices = needed(names, [one.binds for one in candidates], lambda index: candidates[index].uses)
    chosen = [candidates[index] for index in indices]
    if any(_takes_checks(source) for source in (answer, *(one.source for one in chosen if one.is_students))):
        raise _RefusedError("it imports the course's checks")
    is_ours = True
    for statement in chosen:
        is_ours = is_ours and not statement.is_students
        namespace[CHECK] = _NoChecks() if statement.is_students else check
        try:
            run_source(statement.source, "cell above", namespace)
        except Exception as error:
            if is_ours:
                raise _LessonError(f"the lesson's own code fails: {type(error).__name__}: {error}") from None
            raise
    namespace[CHECK] = _NoChecks()
    run_source(answer, "answer", namespace)


def _students(job: Job, known: set[str]) -> list[Statement]:
    """The statements outside of the answer cell that may be run. `known` are the names that setup has bound."""
    lesson = known.union(*(one.binds for one in job.statements))
    rebound = set().union(*(one.binds for one in job.statements if CHECK in one.uses))
    # where a check has put a stand-in in its place, an earlier answer isn't wanted
    found = [one for one in _all_of(job.earlier) if not one.binds <= rebound]
    found += [one for one in _all_of(job.others, "added") if not (_is_import(one) and _takes_checks(one.source))]
    found += [one for one in _all_of(job.others, "changed") if _is_import(one) and not one.binds & lesson]
    return found


def _all_of(pieces: Iterable[Piece], kind: str = "answer") -> list[Statement]:
    found = []
    for piece in pieces:
        if piece.kind == kind:
            with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):  # a cell that can't run
                found += statements(_runnable(piece.source), piece.place, is_students=True)
    return found


def _is_import(statement: Statement) -> bool:
    return statement.source.startswith(("import ", "from "))


def _runnable(source: str) -> str:
    """A source without lines that only IPython understands, if it isn't Python with them."""
    try:
        ast.parse(source)
    except SyntaxError:
        return re.sub(r"^[%!].*$", "", source, flags=re.MULTILINE)
    return source


def _takes_checks(source: str) -> bool:
    """Whether code imports from shared.checks."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError):
        return False  # running it says what is wrong
    imports = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            imports += [f"{node.module}.{alias.name}" for alias in node.names]
    return any(f"{name}.".startswith("shared.checks.") for name in imports)


def _is_courses(answer: Any, exercise: Any) -> bool:
    """Whether an answer, or a part of it, is the course's and not the student's."""
    parts = [answer]
    if type(answer) in (tuple, list):
        parts += answer
    homes = [getattr(part, "__module__", None) for part in parts]
    return exercise.is_stand_in(answer) or any(str(home).startswith("shared.checks") for home in homes)


def _held(exercise: Any) -> list[tuple]:
    """What decides: callables of the checks, of Python and of torch, with what is inside of those that Python runs."""
    import builtins
    import math
    import operator
    import random
    import statistics

    import numpy
    import torch

    owners: list[tuple[str, Any]] = [("its check", exercise)]
    for name, module in list(sys.modules.items()):
        if name.startswith("shared.checks"):
            own = [value for value in vars(module).values() if isinstance(value, type) and value.__module__ == name]
            owners += [(name, module), *((f"{name}.{one.__name__}", one) for one in own)]
    for module in (builtins, math, operator, random, statistics, numpy, torch, torch.nn.functional, torch.testing):
        owners.append((module.__name__, module))
    owners.append(("torch.Tensor", torch.Tensor))
    held = []
    for label, owner in owners:
        names = dict(vars(owner))
        values = [(name, value, _inside(value)) for name, value in names.items() if _decides(label, name, value)]
        held.append((label, owner, names, values))
    return held


def _decides(label: str, name: str, value: Any) -> bool:
    is_table = label == "shared.checks.comparing" and type(value) is dict and not name.startswith("__")
    return callable(value) or isinstance(value, property | staticmethod | classmethod) or is_table


def _inside(value: Any) -> tuple:
    if isinstance(value, FunctionType):
        return value.__code__, value.__defaults__, value.__kwdefaults__
    if isinstance(value, property):
        return value.fget, value.fset
    if isinstance(value, staticmethod | classmethod):
        return (value.__func__.__code__,)
    return tuple(value.values()) if type(value) is dict else ()


def _replaced(held: list[tuple]) -> str:
    """The name of something that isn't what it was; nothing if all is."""
    for label, owner, names, values in held:
        for name, value, inside in values:
            if owner.__dict__.get(name) is not value:
                return f"{label}.{name}"
            now = _inside(value)
            if len(now) != len(inside) or any(a is not b for a, b in zip(now, inside, strict=True)):
                return f"{label}.{name}"
        for name in owner.__dict__.keys() - names.keys() if isinstance(owner, type) else ():
            now, inherited = owner.__dict__[name], [b.__dict__[name] for b in owner.__mro__[1:] if name in b.__dict__]
            if inherited and callable(now) and now is not inherited[0]:  # putting one back may leave it here
                return f"{label}.{name}"
    return ""
