"""Run an exercise's check on a changed answer, in a process of its own, so that nothing a mutant does reaches the next.

    for target in targets(path):                       # one for each answer cell
        outcome = try_answer(target, target.answer)    # 'passed', or the answer is wrong and something is wrong
        try_answer(target, mutant.source, limit=10)    # 'passed': the check has let the mutant through

What an answer needs is found in the notebook itself: the setup cell is run, and of the cells before the check those
statements that define a name which the answer, the check's argument or another of these statements uses.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import functools
import hashlib
import json
import math
import multiprocessing as mp
import os
import signal
import symtable
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

import psutil

from course import mutants
from course.answers import run_source
from course.environment import ROOT

CHECK = "check"  # what the setup cells call the topic's checks
MEMORY = 4 * 2**30  # bytes that a mutant may take for itself
_START_SECONDS = 180  # for a process to exist and to have run what the notebook has before the answer

_STARTING = threading.Lock()


class TargetError(ValueError):
    """An exercise cannot be tried; the message names the notebook, the cell and what is missing."""


@dataclass(frozen=True)
class Target:
    """An exercise as its notebook has it.

    Attributes:
        number: its place in the notebook, from 1.
        cell: id of the answer cell.
        answer: source of the answer cell.
        before: source of what has to run before it.
        check: the check, an expression such as "check.swish".
        argument: what the check is called with, an expression such as "Swish".
        digest: differs if the answer, the check, what either of them uses, or the mutator does.
    """

    number: int
    cell: str
    answer: str
    before: str
    check: str
    argument: str
    digest: str


@dataclass(frozen=True)
class Outcome:
    """How an answer did. `status` is the check's, or "raised" (before the check), "timed out" or "died"."""

    status: str
    detail: str
    seconds: float


# ---------------------------------------------------------------- what a notebook has


def targets(path: Path) -> list[Target]:
    """The exercises of a notebook (full edition), in its order.

    Raises:
        TargetError: the notebook can't be read, or an answer cell has no check cell that calls `check.NAME(…)`.
    """
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        code = {cell["id"]: "".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"}
        trees = {name: ast.parse(source) for name, source in code.items()}
    except (OSError, ValueError, KeyError, SyntaxError) as error:
        raise TargetError(f"{path.name} can't be read: {type(error).__name__}: {error}") from None
    answers = [c["id"] for c in cells if c["id"] in code and c["metadata"].get("nbgrader", {}).get("solution")]
    order = list(code)
    found = []
    for number, answer in enumerate(answers, 1):
        where = f"{path.name}, cell '{answer}'"
        check, argument = _check_call(trees.get(f"{answer}-check"), where)
        before = [name for name in order[: order.index(f"{answer}-check")] if name != answer]
        statements = [(name, statement) for name in before for statement in trees[name].body]
        names = _used(code[answer]) | _used(f"{check}({argument})")
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


def _check_call(tree: ast.Module | None, where: str) -> tuple[str, str]:
    """The check and its argument, as expressions, from a check cell such as `swish = check.swish(Swish).apply`."""
    if tree is None:
        raise TargetError(f"{where} has no check cell (its id must be the answer's with '-check')")
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name)) as check, args=[argument]) if name == CHECK:
                return ast.unparse(check), ast.unparse(argument)
    raise TargetError(f"{where}: its check cell has no call {CHECK}.NAME(answer)")


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


def needed_for(names: set[str], statements: list[ast.stmt]) -> list[ast.stmt]:
    """Those statements of a module that bind one of the names, or a name that these use, and so on; in their order."""
    bound = [_bound(statement) for statement in statements]
    chosen: set[int] = set()
    waiting, asked = list(names), set(names)
    while waiting:
        name = waiting.pop()
        for index, statement in enumerate(statements):
            if name in bound[index] and index not in chosen:
                chosen.add(index)
                more = _used(ast.unparse(statement)) - asked
                waiting += more
                asked |= more
    return [statements[index] for index in sorted(chosen)]


@functools.lru_cache(4096)
def _bound(statement: ast.stmt) -> set[str]:
    """Names that a statement of a module binds; `Arena.free = …` and `table["a"] = …` belong to what they change."""
    table = symtable.symtable(ast.unparse(statement), "lesson", "exec")
    names = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    for target in ast.walk(statement):
        if isinstance(target, ast.Attribute | ast.Subscript) and isinstance(target.ctx, ast.Store):
            while isinstance(target, ast.Attribute | ast.Subscript):
                target = target.value
            if isinstance(target, ast.Name) and not isinstance(statement, ast.FunctionDef | ast.ClassDef):
                names.add(target.id)
    return names


def _used(source: str) -> set[str]:
    """The module's names that code uses, inside of its functions too."""
    names: set[str] = set()
    tables = [symtable.symtable(source, "lesson", "exec")]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        at_top = table.get_type() == "module"
        names |= {s.get_name() for s in table.get_symbols() if s.is_referenced() and (at_top or s.is_global())}
    return names


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
    # the optimizers import torch._dynamo at first use, which takes 2 s
    modules = {"course.mutant_trials", "shared.checks.exercise", "torch._dynamo"}
    for target in chosen:
        for node in ast.parse(target.before).body:
            if isinstance(node, ast.Import):
                modules |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                modules |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    # a topic's checks are what is being worked on: should they fail, each process says so and the server lives
    modules = {name for name in modules if not name.startswith("shared.checks.topic")}
    if sys.platform == "linux":
        mp.get_context("forkserver").set_forkserver_preload(sorted(modules))


def try_answer(target: Target, answer: str, limit: float = 600) -> Outcome:
    """Run the check on the answer (source of an answer cell) in a new process; nothing it does is left behind.

    limit: seconds for the answer and the check, not for the start.
    Raises TargetError if what comes before the answer fails.
    """
    # forked from a server that has imported PyTorch and never ran anything; elsewhere made anew, which takes seconds
    context = mp.get_context("forkserver" if sys.platform == "linux" else "spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory(prefix="mutant-", ignore_cleanup_errors=True) as folder:
        process = context.Process(target=_judge, args=(target, answer, folder, limit, theirs))
        try:
            with _STARTING:
                process.start()
        except (EOFError, OSError) as error:
            message = f"no process can be started ({type(error).__name__}: {error}); does an import of its setup fail?"
            raise TargetError(f"cell '{target.cell}': {message}") from None
        theirs.close()
        start = time.monotonic()
        try:
            said = _hear(ours, _START_SECONDS)
            if said != ("begins", ""):
                detail = said[1] if said else "its process died or did not start"
                raise TargetError(f"cell '{target.cell}': what comes before it fails: {detail}")
            start = time.monotonic()
            said = _hear(ours, limit)
            late = time.monotonic() - start >= limit
        finally:
            ours.close()
            _end(process)
    status, detail = said or (("timed out", "") if late else ("died", ""))
    return Outcome(status, detail, time.monotonic() - start)


def _hear(link: Connection, seconds: float) -> tuple[str, str] | None:
    """What the process says next; None if it dies or says nothing in time."""
    try:
        return link.recv() if wait([link], seconds) else None
    except (EOFError, OSError):
        return None


def _end(process: mp.process.BaseProcess) -> None:
    """End a process with all that it has started."""
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.Error:
        family = []
    with contextlib.suppress(OSError, AttributeError):
        if os.getpgid(process.pid) == process.pid:  # a child that begins meanwhile is in no list, but in the group
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join(60)  # close() raises if it is still there
    for member in family:
        try:
            member.kill()
        except psutil.Error:
            continue
    process.close()


def _end_with_parent() -> None:
    """Linux: end this process when the thread that started it ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _judge(target: Target, answer: str, folder: str, limit: float, link: Connection) -> None:
    """In the new process: run what comes before, then the answer, then the check, and say how it went."""
    if hasattr(os, "setsid"):
        os.setsid()  # a group of its own, which _end kills as a whole
    _confine(folder, _START_SECONDS + limit)
    namespace = {"__name__": "__main__"}  # so that cloudpickle sends what is defined here to ranks by value
    try:
        run_source(target.before, "lesson", namespace)
        link.send(("begins", ""))
    except BaseException:
        link.send(("broken", traceback.format_exc()))
        raise
    try:
        run_source(answer, "answer", namespace)
        result = eval(target.check, namespace).run(eval(target.argument, namespace))
        link.send((result.status, str(result)))
    except BaseException as error:
        link.send(("raised", f"{type(error).__name__}: {error}"))
    os._exit(0)  # a thread that the answer has left must not hold the process


def _confine(folder: str, seconds: float) -> None:
    """What an answer prints goes nowhere, what it writes into a folder that is removed; memory and time are limited."""
    if hasattr(signal, "alarm"):
        signal.alarm(math.ceil(seconds))  # for the case that nobody is left who would end this process
    os.chdir(folder)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nowhere, stream)
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    except (ImportError, ValueError, OSError):
        pass  # Windows, or a lower limit is set already
    os.environ |= {"COURSE_DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": ""}  # the same verdict on every machine
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    import torch

    torch.set_num_threads(1)
    if sys.platform == "linux":
        # Ranks that a check starts are forked from here, where all is imported and nothing ever ran on two threads: a
        # fork server for them, new in each process, would take 3 s a mutant.
        fork = mp.get_context("fork")
        mp.get_context = lambda method=None: fork
        # Ranks forked from one process hold the ends of each other's links, so they would not see that it is gone.
        os.register_at_fork(after_in_child=_end_with_parent)
