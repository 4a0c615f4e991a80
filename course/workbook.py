"""Make the student edition: a start page and the notebooks without their solutions, in workbook/.

Given again, it renews the notebooks: course/renewing.py says what becomes of a student's work in them.
"""

from __future__ import annotations

import argparse
import copy
import re
import sys
from pathlib import Path
from urllib.parse import unquote

from ipykernel.ipkernel import IPythonKernel
from ipykernel.kernelspec import KERNEL_NAME, get_kernel_dict
from nbformat import NotebookNode

from course import start_page, syllabus
from course.environment import ROOT
from course.execution import NotebookError, read_notebook
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
from course.files import NotWritableError, require_writable
from course.renewing import EARLIER, Written, write_edition
from course.selection import Selected, SelectionError, select
from course.syllabus import Syllabus

# [text, which may hold one pair of brackets in another](file.ipynb#part)
_NOTEBOOK_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s:]+\.ipynb)(?:#[^()\s]*)?\)")


class EditionError(ValueError):
    """A notebook can't be turned into a student edition; the message names the cell and what is wrong with it."""


# --------------------------------------------------------------------------------------------------------------------
# the edition


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
    """The solution blocks (without markers) by cell id. Raises EditionError as `student_edition` does."""
    student_edition(notebook)
    found = {}
    for cell in notebook.cells:
        if cell.cell_type == "code" and BEGIN in cell.source:
            lines = cell.source.split("\n")
            blocks = solution_blocks(cell.source)
            found[cell.id] = ["\n".join(lines[i + 1 : j]) for i, j in blocks]
    return found


def _hide_solution(cell: NotebookNode) -> None:
    if cell.cell_type != "code":
        if any(line.strip() in (BEGIN, END, BEGIN_HIDDEN, END_HIDDEN) for line in cell.source.split("\n")):
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


def unlink_missing(notebook: NotebookNode, folder: Path) -> None:
    """Turn links in Markdown to notebooks that `folder` lacks (topics that aren't written yet) into plain text."""

    def plain(link: re.Match) -> str:
        return link[0] if (folder / unquote(link[2])).is_file() else link[1]

    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = _NOTEBOOK_LINK.sub(plain, cell.source)


def jupyter_metadata() -> dict[str, dict]:
    """What JupyterLab writes into a notebook once this Python's kernel has answered. Where it is there already, opening
    the notebook changes nothing.
    """
    spec = get_kernel_dict()
    return {
        "kernelspec": {"name": KERNEL_NAME, "display_name": spec["display_name"], "language": spec["language"]},
        "language_info": dict(IPythonKernel.language_info),
    }


# --------------------------------------------------------------------------------------------------------------------
# the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m course workbook`."""
    parser.add_argument("notebooks", nargs="*", metavar="TOPIC|FILE", help="default: all that are no drafts")
    parser.add_argument("--output", type=Path, default=ROOT / "workbook", help="folder (default: workbook)")


def main(args: argparse.Namespace) -> int:
    """Run the command; 1 if a notebook couldn't be made, 2 for wrong usage."""
    try:
        book = syllabus.load()
        notebooks = select(args.notebooks, book) if args.notebooks else finished(book)
        require_folder(args.output, notebooks)
    except (SelectionError, syllabus.SyllabusError, NotWritableError) as error:
        print(f"workbook: {error}", file=sys.stderr)
        return 2
    status = make(notebooks, args.output)
    page = make_start_page(book, args.output)
    print(f"The student edition is in {page.resolve().parent}")
    return status


def require_folder(folder: Path, notebooks: list[Selected]) -> None:
    """Make the folder of an edition; NotWritableError if nothing can be written there, or it has the sources."""
    if any(notebook.path.parent == folder.resolve() for notebook in notebooks):
        raise NotWritableError(f"{folder} holds the notebooks themselves; name another --output.")
    require_writable(folder, "; name another --output")


def finished(syllabus: Syllabus) -> list[Selected]:
    """The notebooks for students: all but drafts, which come into a workbook only when they are named."""
    return [notebook for notebook in select([], syllabus) if not syllabus.topics[notebook.topic].is_draft]


def make(notebooks: list[Selected], folder: Path) -> int:
    """Write the student edition of the notebooks that exist, saying what was done; 1 if one couldn't be made."""
    failed = False
    made = 0
    for notebook in notebooks:
        if not notebook.path.is_file():
            continue
        try:
            edition = student_edition(read_notebook(notebook.path)[0])
            unlink_missing(edition, notebook.path.parent)
            edition.metadata.update(jupyter_metadata())
            written = write_edition(edition, folder, notebook.path.name)
        except (NotebookError, EditionError) as error:
            failed = True
            lines = "\n".join(f"  {line}" for line in str(error).splitlines())
            print(f"{notebook.path.name}: no student edition, because of\n{lines}")
            continue
        made += 1
        print(_account(written, notebook.path.name))
    if not made and not failed:
        print("There is no notebook to make a student edition of.")
        return 1
    return 1 if failed else 0


def make_start_page(syllabus: Syllabus, folder: Path) -> Path:
    """Write the page that the workbook opens with, for the topics that are in it, and return where it is."""
    notebooks = {}
    for number, topic in syllabus.topics.items():
        if (folder / topic.file).is_file():
            try:
                notebooks[number] = read_notebook(topic.path)[0]
            except NotebookError:
                continue  # `make` has said so
    page = start_page.start_page(syllabus, notebooks)
    page.metadata.update(jupyter_metadata())
    written = write_edition(page, folder, start_page.NAME)
    if written.what != "up to date":
        print(_account(written, start_page.NAME))
    return written.path


def _account(written: Written, name: str) -> str:
    """What to tell about an edition, in a line."""
    told = f"{name}: {written.what}"
    if written.refused:
        reasons = "; ".join(f"{path.name} is left as it is: {reason}" for path, reason in written.refused)
        told = f"{reasons}. The newest edition is {written.path.name}: {written.what}"
    merged = written.merged
    if merged is None or not merged.has_work:
        return f"{told}."

    taken_over = []
    if merged.answers:
        taken_over.append(f"your answers to {_listed(merged.answers)}")
    if merged.added:
        taken_over.append("a cell that you added" if merged.added == 1 else f"{merged.added} cells that you added")
    if merged.edits:
        taken_over.append(f"your changes of {_listed(merged.edits)}")
    told += f", with {_listed(taken_over)}." if taken_over else "."
    if merged.new_stubs:
        told += f" The stub of {_listed(merged.new_stubs)} has changed, too: see whether your answer still fits."
    if merged.overruled:
        told += f" The lesson has changed {_listed(merged.overruled)}, too: its version is in place of yours."
    if merged.removed:
        told += f" The lesson no longer has {_listed(merged.removed)}, which you had changed."
    if not merged.is_base_known:
        told += " What you were given isn't on record, so all that differs counts as yours."
    return f"{told} Your file as it was is {EARLIER}/{written.earlier.name}."


def _listed(words: list[str]) -> str:
    """a, b and c"""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))
