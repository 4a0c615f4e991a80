"""The student edition of a notebook: each solution a stub, no hidden tests, no links to what isn't there."""

from __future__ import annotations

import copy
import re
from collections.abc import Container

from nbformat import NotebookNode

from course.exercise_form import BEGIN, END, MarkerError, solution_blocks, student_source, without_hidden_tests

# of the first table: what says something to instructors alone
_FOR_INSTRUCTORS = re.compile(r"^\| (?:Topic|Category) \|.*\n| \(the curriculum allows [^)]*\)", re.MULTILINE)
_NOTEBOOK_LINK = re.compile(r"\[([^\[\]]+)\]\(([^()\s:]+\.ipynb)(?:#[^()\s]*)?\)")  # [text](file.ipynb#part)


class EditionError(ValueError):
    """A notebook can't be turned into a student edition; the message names the cell and what is wrong with it."""


def student_edition(notebook: NotebookNode) -> NotebookNode:
    """A copy of a notebook in which every solution is a stub; the notebook itself isn't changed.

    Stored outputs are removed: many answer the question above them. So are hidden tests. All else stays as it is.

    Raises EditionError for what would hand out a solution, or a cell that raises as soon as it runs.
    """
    edition = copy.deepcopy(notebook)
    edition.metadata.pop("widgets", None)
    for number, cell in enumerate(edition.cells, start=1):
        if cell.get("id") == "glance":
            cell.source = _FOR_INSTRUCTORS.sub("", cell.source)
        try:
            _hide_solution(cell)
        except MarkerError as error:
            raise EditionError(f"cell '{cell.get('id', number)}': {error}") from None
    return edition


def _hide_solution(cell: NotebookNode) -> None:
    if "id" not in cell:
        raise MarkerError("it has no id: open the notebook in JupyterLab and save it")
    nbgrader = cell.metadata.get("nbgrader", {})
    has_solution = bool(solution_blocks(cell.source))
    if has_solution != nbgrader.get("solution", False):
        raise MarkerError(
            f'{BEGIN} belongs into each code cell with the nbgrader metadata "solution": true, and only there'
        )
    if has_solution:
        cell.source = student_source(cell.source)
    if (shown := without_hidden_tests(cell.source)) != cell.source:
        if not nbgrader.get("grade"):
            raise MarkerError('hidden tests belong into code cells with the nbgrader metadata "grade": true')
        cell.source = shown.rstrip("\n")
    if cell.cell_type == "code":
        cell.outputs, cell.execution_count = [], None


def solutions(notebook: NotebookNode) -> dict[str, list[str]]:
    """The solution blocks (without markers) by cell id."""
    block = re.compile(rf"{BEGIN}\n(.*?)\n *{END}", re.DOTALL)
    return {cell.id: found for cell in notebook.cells if (found := block.findall(cell.source))}


def unlink_missing(notebook: NotebookNode, there: Container[str]) -> None:
    """Turn links in Markdown to notebooks that aren't `there` (topics that aren't written yet) into plain text."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = _NOTEBOOK_LINK.sub(lambda link: link[0] if link[2] in there else link[1], cell.source)
