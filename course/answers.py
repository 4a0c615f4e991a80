"""Answers and definitions, taken out of a notebook and run: half of a grader.

Tests use them to hold the lesson's own code and no copy of it.
"""

from __future__ import annotations

import itertools
import json
import linecache
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from course.syllabus import SYLLABUS_FILE


def answers(
    number: str, edit: Callable[[str], str] = lambda source: source, given: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Run a notebook's setup cell and its answer cells, nothing else; return the names they define.

    `edit` is applied to each answer cell's source first: course.exercises.student_source makes the stubs.
    `given` are names that answers use and the lesson defines.
    """
    path, cells = _code_cells(number)
    namespace: dict[str, Any] = {"__name__": "answers", **(given or {})}
    for cell in cells:
        is_answer = cell["metadata"].get("nbgrader", {}).get("solution", False)
        if is_answer or cell["id"] == "setup":
            _run(path, cell["id"], edit(cell["source"]) if is_answer else cell["source"], namespace)
    return namespace


def definitions(number: str, *cells: str) -> dict[str, Any]:
    """Run a notebook's setup cell and the cells with the given ids, in the order of the page; return their names.

    The functions belong to `__main__`, so cloudpickle sends them to other processes by value.

    Raises:
        KeyError: the notebook has no code cell with one of the ids.
    """
    path, found = _code_cells(number)
    missing = sorted(set(cells) - {cell["id"] for cell in found})
    if missing:
        raise KeyError(f"{path.name} has no code cell {', '.join(missing)}")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for cell in found:
        if cell["id"] in ("setup", *cells):
            _run(path, cell["id"], cell["source"], namespace)
    return namespace


def _code_cells(number: str) -> tuple[Path, list[dict[str, Any]]]:
    """The topic's notebook and its code cells, each with its source as one string."""
    (path,) = SYLLABUS_FILE.parent.glob(f"{number}_*.ipynb")
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return path, [{**c, "source": "".join(c["source"])} for c in cells if c["cell_type"] == "code"]


def _run(path: Path, cell: str, source: str, namespace: dict[str, Any]) -> None:
    run_source(source, f"{path.name}#{cell}", namespace)


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
