"""Answers and definitions, taken out of a notebook and run.

Tests use them to hold the lesson's own code and no copy of it, `mutate` and `grade` to find and run the exercises.
"""

from __future__ import annotations

import ast
import itertools
import json
import linecache
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

from course.syllabus import SYLLABUS_FILE

CHECK = "check"  # what the setup cells call the topic's checks

_numbers = itertools.count(1)


class TargetError(ValueError):
    """An exercise cannot be tried; the message names the notebook, the cell and what is missing."""


@dataclass(frozen=True)
class Answer:
    """An answer cell: its id and source, and the check, "check.swish", with what it is called with, "Swish"."""

    cell: str
    source: str
    check: str
    argument: str


def exercises(path: Path) -> tuple[dict[str, str], list[Answer]]:
    """The sources of a notebook's code cells by their ids, and its answer cells, both in its order.

    TargetError if the notebook can't be read, or an answer cell has no check cell that calls `check.NAME(…)`.
    """
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        code = {cell["id"]: "".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"}
        trees = {name: ast.parse(source) for name, source in code.items()}
    except (OSError, ValueError, KeyError, SyntaxError) as error:
        raise TargetError(f"{path.name} can't be read: {type(error).__name__}: {error}") from None
    found = []
    for cell in cells:
        if cell["id"] in code and cell["metadata"].get("nbgrader", {}).get("solution"):
            check, argument = _check_call(trees.get(f"{cell['id']}-check"), f"{path.name}, cell '{cell['id']}'")
            found.append(Answer(cell["id"], code[cell["id"]], check, argument))
    return code, found


def _check_call(tree: ast.Module | None, where: str) -> tuple[str, str]:
    """The check and its argument, as expressions, from a check cell such as `swish = check.swish(Swish).apply`."""
    for node in ast.walk(tree or ast.Module()):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name)) as check, args=[argument]) if name == CHECK:
                return ast.unparse(check), ast.unparse(argument)
    raise TargetError(f"{where} needs a check cell, '…-check', with a call {CHECK}.NAME(answer)")


def answers(
    number: str, edit: Callable[[str], str] = lambda source: source, given: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Run a notebook's setup cell and its answer cells, nothing else; return the names they define.

    `edit` is applied to each answer cell's source first: course.exercise_form.student_source makes the stubs.
    `given` are names that answers use and the lesson defines.
    """
    code, found = exercises(_path(number))
    edited = {answer.cell: edit(answer.source) for answer in found}
    namespace = fresh_namespace(given)
    for cell, source in code.items():
        if cell in ("setup", *edited):
            run_source(edited.get(cell, source), f"{number}#{cell}", namespace)
    return _own(namespace)


def definitions(number: str, *cells: str) -> dict[str, Any]:
    """Run a notebook's setup cell and the cells with the given ids, in the order of the page; return their namespace.

    KeyError if there is no such cell.
    """
    code, _ = exercises(_path(number))
    if missing := sorted(set(cells) - code.keys()):
        raise KeyError(f"{number} has no code cell {', '.join(missing)}")
    namespace = fresh_namespace()
    for cell, source in code.items():
        if cell in ("setup", *cells):
            run_source(source, f"{number}#{cell}", namespace)
    return namespace


def _path(number: str) -> Path:
    (path,) = SYLLABUS_FILE.parent.glob(f"{number}_*.ipynb")
    return path


def fresh_namespace(given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The namespace of a new module, with the names of `given`; cloudpickle sends what it defines by value.

    A module that can be found, as a kernel's `__main__` can: torch.export of PyTorch 2.11 looks a function's globals up
    in the module of that name.
    """
    module = ModuleType(f"lesson_{next(_numbers)}")
    sys.modules[module.__name__] = module
    cloudpickle.register_pickle_by_value(module)
    vars(module).update(_own(given or {}))
    return vars(module)


def _own(namespace: Mapping[str, Any]) -> dict[str, Any]:
    """The names without those that each module has for itself."""
    return {name: value for name, value in namespace.items() if not (name.startswith("__") and name.endswith("__"))}


def run_source(source: str, name: str, namespace: dict[str, Any]) -> None:
    """Run code under a file name of its own, so that `inspect.getsource` finds it, as it does in a notebook.

    torch.jit.script reads the source of what it compiles.
    """
    lines = source.splitlines(keepends=True)
    for number in itertools.count():
        filename = f"{name}~{number}" if number else name
        if linecache.cache.setdefault(filename, (len(source), None, lines, filename))[2] == lines:
            break
    exec(compile(source, filename, "exec", dont_inherit=True), namespace)
