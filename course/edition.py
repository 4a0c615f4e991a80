"""The student edition of a notebook: each solution a stub, no hidden tests, no links to what isn't there."""

from __future__ import annotations

import copy
import re
from collections.abc import Container

from ipykernel.ipkernel import IPythonKernel
from ipykernel.kernelspec import KERNEL_NAME, get_kernel_dict
from nbformat import NotebookNode

from course.exercise_form import (
    BEGIN,
    BEGIN_HIDDEN,
    END,
    END_HIDDEN,
    MarkerError,
    hidden_tests,
    solution_blocks,
    student_source,
    without_hidden_tests,
)

# [text, which may hold one pair of brackets in another](file.ipynb#part)
_NOTEBOOK_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s:]+\.ipynb)(?:#[^()\s]*)?\)")


class EditionError(ValueError):
    """A notebook can't be turned into a student edition; the message names the cell and what is wrong with it."""


def student_edition(notebook: NotebookNode) -> NotebookNode:
    """A copy of a notebook in which every solution is a stub; the notebook itself isn't changed.

    Each block from BEGIN to END becomes, at the indentation of BEGIN, a comment and `raise NotImplementedError`. Stored
    outputs are removed: many answer the question above them. So are hidden tests. All else stays as it is.

    Raises EditionError for markers that don't pair, an answer cell without a solution, a solution outside an answer
    cell, hidden tests outside a check cell, a stub that would raise as soon as the cell runs (it must be inside a
    function), and a cell without an id.
    """
    edition = copy.deepcopy(notebook)
    edition.metadata.pop("widgets", None)
    problems = []
    for number, cell in enumerate(edition.cells, start=1):
        if "id" not in cell:
            problems.append(f"cell {number} has no id: open the notebook in JupyterLab and save it")
            continue
        try:
            _hide_solution(cell)
        except (EditionError, MarkerError) as error:
            problems.append(f"cell '{cell.id}': {error}")
    if problems:
        raise EditionError("\n".join(problems))
    return edition


def solutions(notebook: NotebookNode) -> dict[str, list[str]]:
    """The solution blocks (without markers) by cell id. Raises MarkerError for markers that don't pair."""
    found = {}
    for cell in notebook.cells:
        if cell.cell_type == "code" and BEGIN in cell.source:
            lines = cell.source.split("\n")
            found[cell.id] = ["\n".join(lines[begin + 1 : end]) for begin, end in solution_blocks(cell.source)]
    return found


def _hide_solution(cell: NotebookNode) -> None:
    if cell.cell_type != "code":
        if any(marker in cell.source.split("\n") for marker in (BEGIN, END, BEGIN_HIDDEN, END_HIDDEN)):
            raise EditionError("a marker of solutions or hidden tests in a cell that isn't code")
        return
    nbgrader = cell.metadata.get("nbgrader", {})
    blocks = solution_blocks(cell.source)
    if blocks and not nbgrader.get("solution"):
        raise EditionError("a solution, but the cell's nbgrader metadata doesn't say \"solution\": true")
    if nbgrader.get("solution") and not blocks:
        raise EditionError(f"an answer cell without {BEGIN}")
    if hidden_tests(cell.source) and not nbgrader.get("grade"):
        raise EditionError("hidden tests, but the cell's nbgrader metadata doesn't say \"grade\": true")
    cell.outputs, cell.execution_count = [], None
    cell.source = without_hidden_tests(cell.source)
    if blocks:
        cell.source = student_source(cell.source)


def unlink_missing(notebook: NotebookNode, there: Container[str]) -> None:
    """Turn links in Markdown to notebooks that aren't `there` (topics that aren't written yet) into plain text."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = _NOTEBOOK_LINK.sub(lambda link: link[0] if link[2] in there else link[1], cell.source)


def jupyter_metadata() -> dict[str, dict]:
    """What JupyterLab writes into a notebook once this Python's kernel has answered. Where it is there already, opening
    the notebook changes nothing.
    """
    spec = get_kernel_dict()
    return {
        "kernelspec": {"name": KERNEL_NAME, "display_name": spec["display_name"], "language": spec["language"]},
        "language_info": dict(IPythonKernel.language_info),
    }
