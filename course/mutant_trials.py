"""Run an exercise's check on a changed answer, in a process of its own, so that nothing a mutant does reaches the next.

    for target in targets(path):                       # one for each answer cell
        outcome = try_answer(target, target.answer)    # 'passed', or the answer is wrong and something is wrong
        try_answer(target, mutant.source, limit=10)    # 'passed': the check has let the mutant through

What an answer needs is found in the notebook itself: the setup cell is run, and of the cells before the check those
statements that define a name which the answer, the check's argument or another of these statements uses.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from course import confined, mutants
from course.confined import START_SECONDS, Confined, Limits, Stopped, say
from course.environment import ROOT
from course.lesson_code import CHECK, TargetError, exercises, run_source
from course.needs import needed_for, used

LIMITS = Limits()  # what a mutant may take


@dataclass(frozen=True)
class Target:
    """An exercise as its notebook has it."""

    number: int  # its place in the notebook, from 1
    cell: str  # id of the answer cell
    answer: str  # source of the answer cell
    before: str  # source of what has to run before it
    check: str  # the check, an expression such as "check.swish"
    argument: str  # what the check is called with, an expression such as "Swish"
    digest: str  # differs if the answer, the check, what either of them uses, or the mutator does


@dataclass(frozen=True)
class Outcome:
    """How an answer did. `status` is the check's, or "raised" (before the check), "timed out" or "died"."""

    status: str
    detail: str
    seconds: float


# ---------------------------------------------------------------- what a notebook has


def targets(path: Path) -> list[Target]:
    """The exercises of a notebook (full edition), in its order. Raises TargetError as `exercises` does."""
    code, found_answers = exercises(path)
    trees = {name: ast.parse(source) for name, source in code.items()}
    order = list(code)
    found = []
    for number, exercise in enumerate(found_answers, 1):
        answer, check, argument = exercise.cell, exercise.check, exercise.argument
        before = [name for name in order[: order.index(f"{answer}-check")] if name != answer]
        statements = [(name, statement) for name in before for statement in trees[name].body]
        names = used(code[answer]) | used(f"{check}({argument})")
        needed = needed_for(names, [statement for _, statement in statements])
        lesson = [ast.unparse(statement) for name, statement in statements if statement in needed and name != "setup"]
        decides = [*trees[answer].body, *needed, ast.parse(f"{check}({argument})"), *_code_of_check(check, needed)]
        found.append(
            Target(
                number=number,
                cell=answer,
                answer=code[answer],
                before="\n".join([code.get("setup", ""), *lesson]),
                check=check,
                argument=argument,
                digest=digest([*decides, ast.parse(Path(mutants.__file__).read_text(encoding="utf-8"))]),
            )
        )
    return found


def _code_of_check(check: str, needed: Iterable[ast.stmt]) -> list[ast.AST]:
    """The check's function and what it uses of its topic's module.

    Not of the words that all checks are written in: these have tests of their own, and a change in them would make all
    ten topics be tried again. `python -m course mutate --fresh` does that.
    """
    imported = [
        f"{statement.module}.{alias.name}"
        for statement in needed
        if isinstance(statement, ast.ImportFrom) and statement.level == 0
        for alias in statement.names
        if (alias.asname or alias.name) == CHECK
    ]
    if not imported:  # the notebook defines its checks
        return []
    code = needed_for({check.removeprefix(CHECK + ".")}, _module(imported[0]).body)
    return [statement for statement in code if not isinstance(statement, ast.Import | ast.ImportFrom)]


@functools.cache
def _module(name: str) -> ast.Module:
    path = ROOT.joinpath(*name.split(".")).with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8"))


def digest(trees: Iterable[ast.AST]) -> str:
    """A hash of code, the same whatever its layout, comments and docstrings, and for every version of Python."""

    def shape(node: object) -> object:
        if isinstance(node, list):
            return [shape(item) for item in node if not _is_docstring(item)]
        if isinstance(node, ast.AST):
            fields = [(name, shape(value)) for name, value in ast.iter_fields(node) if value not in (None, [])]
            return [type(node).__name__, *(field for field in fields if field[0] not in ("ctx", "kind"))]
        return repr(node)

    return hashlib.sha256(repr([shape(tree) for tree in trees]).encode()).hexdigest()[:16]


def _is_docstring(node: object) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


# ---------------------------------------------------------------- trying an answer


def prepare(chosen: Iterable[Target]) -> None:
    """Let the processes that follow start with the imports of these exercises done; no effect where they can't fork."""
    confined.prepare((target.before for target in chosen), also=["course.mutant_trials"])


def try_answer(target: Target, answer: str, limit: float = 600) -> Outcome:
    """Run the check on the answer (source of an answer cell) in a new process; nothing it does is left behind.

    limit: seconds for the answer and the check, not for the start.
    Raises TargetError if what comes before the answer fails.
    """
    try:
        with Confined(_judge, (target, answer), LIMITS) as process:
            status, detail = process.hear(START_SECONDS)
            if status != "begins":
                raise TargetError(f"cell '{target.cell}': what comes before it fails: {detail}")
            start = time.monotonic()
            try:
                status, detail = process.hear(limit)
            except Stopped:
                status, detail = "timed out" if time.monotonic() - start >= limit else "died", ""
            return Outcome(status, detail, time.monotonic() - start)
    except (Stopped, OSError) as error:
        raise TargetError(f"cell '{target.cell}': {error}; does an import of its setup fail?") from None


def _judge(link: Connection, target: Target, answer: str) -> None:
    """In the new process: run what comes before, then the answer, then the check, and say how it went."""
    namespace = {"__name__": "__main__"}  # so that cloudpickle sends what is defined here to ranks by value
    try:
        run_source(target.before, "lesson", namespace)
        say(link, ["begins", ""])
    except BaseException:
        say(link, ["broken", traceback.format_exc()])
        raise
    try:
        run_source(answer, "answer", namespace)
        result = eval(target.check, namespace).run(eval(target.argument, namespace))
        say(link, [result.status, str(result)])
    except BaseException as error:
        say(link, ["raised", f"{type(error).__name__}: {error}"])
