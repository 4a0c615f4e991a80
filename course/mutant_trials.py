"""Run an exercise's check on a changed answer, in a process of its own, so that nothing a mutant does reaches the next.

    for target in targets(path):                       # one for each answer cell
        outcome = try_answer(target, target.answer)    # 'passed', or the answer is wrong and something is wrong
        try_answer(target, mutant.source, limit=10)    # 'passed': the check has let the mutant through

What an answer needs is found in the notebook itself: the setup cell is run, and of the cells before the check those
statements that define a name which the answer, the check's argument or another of these statements uses.
"""

from __future__ import annotations

import ast
import hashlib
import re
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


def targets(path: Path) -> list[Target]:
    """The exercises of a notebook (full edition), in its order. Raises TargetError as `exercises` does."""
    code, answers = exercises(path)
    checks = re.search(rf"^from shared\.checks import (\w+) as {CHECK}$", code.get("setup", ""), re.MULTILINE)
    module = _parsed(ROOT / "shared" / "checks" / f"{checks[1]}.py").body if checks else []
    mutator = _parsed(Path(mutants.__file__))
    order = list(code)
    found = []
    for number, answer in enumerate(answers, 1):
        call = f"{answer.check}({answer.argument})"
        before = [cell for cell in order[: order.index(f"{answer.cell}-check")] if cell != answer.cell]
        statements = [(cell, statement) for cell in before for statement in ast.parse(code[cell]).body]
        needed = needed_for(used(answer.source) | used(call), [statement for _, statement in statements])
        lesson = [ast.unparse(statement) for cell, statement in statements if statement in needed and cell != "setup"]
        # not the words that all checks are written in: a change of these would have all ten topics tried again
        words = ast.Import | ast.ImportFrom
        check = [
            statement
            for statement in needed_for({answer.check.removeprefix(f"{CHECK}.")}, module)
            if not isinstance(statement, words)
        ]
        found.append(
            Target(
                number=number,
                cell=answer.cell,
                answer=answer.source,
                before="\n".join([code.get("setup", ""), *lesson]),
                check=answer.check,
                argument=answer.argument,
                digest=digest([*ast.parse(answer.source).body, *needed, ast.parse(call), *check, mutator]),
            )
        )
    return found


def _parsed(path: Path) -> ast.Module:
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


def prepare(chosen: Iterable[Target]) -> None:
    """Let the processes that follow start with the imports of these exercises done; no effect where they can't fork."""
    confined.prepare((target.before for target in chosen), also=["course.mutant_trials"])


def try_answer(target: Target, answer: str, limit: float = 600) -> Outcome:
    """Run the check on the answer (source of an answer cell) in a new process; nothing it does is left behind.

    limit: seconds for the answer and the check, not for the start.
    Raises TargetError if what comes before the answer fails.
    """
    try:
        with Confined(_judge, (target, answer), Limits()) as process:
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
    except BaseException:
        say(link, ["broken", traceback.format_exc()])
        return
    say(link, ["begins", ""])
    try:
        run_source(answer, "answer", namespace)
        result = eval(target.check, namespace).run(eval(target.argument, namespace))
        say(link, [result.status, str(result)])
    except BaseException as error:
        say(link, ["raised", f"{type(error).__name__}: {error}"])
