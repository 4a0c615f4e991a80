"""Make the student edition: a start page and the notebooks without their solutions, in workbook/.

A file that you have changed (running a notebook changes it, too) is never overwritten: when the lesson has a newer
edition, that is put beside it as NAME.updated.ipynb, and a line says so.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

import nbformat
from nbformat import NotebookNode

from course import start_page, syllabus
from course.environment import ROOT
from course.execution import NotebookError, read_notebook
from course.exercise_form import BEGIN, END, MarkerError, solution_blocks, student_source
from course.files import NotWritableError, require_writable, write_whole
from course.selection import Selected, SelectionError, select
from course.syllabus import Syllabus

RECORD = ".made.json"  # in the workbook: file name -> SHA-256 of each edition that was written there, newest last

# [text, which may hold one pair of brackets in another](file.ipynb#part)
_NOTEBOOK_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s:]+\.ipynb)(?:#[^()\s]*)?\)")


class EditionError(ValueError):
    """A notebook can't be turned into a student edition; the message names the cell and what is wrong with it."""


@dataclass(frozen=True)
class Written:
    """What became of one edition. `kept`: files of the student's that were left alone; `path`: where the edition is."""

    path: Path
    is_new: bool  # written now, not there already
    kept: tuple[Path, ...]


# --------------------------------------------------------------------------------------------------------------------
# the edition


def student_edition(notebook: NotebookNode) -> NotebookNode:
    """A copy of a notebook in which every solution is a stub; the notebook itself isn't changed.

    Each block from BEGIN to END becomes, at the indentation of BEGIN, a comment and `raise NotImplementedError`. Stored
    outputs are removed: many answer the question above them. All else stays as it is. Raises EditionError for markers
    that don't pair, an answer cell without a solution, a solution outside an answer cell, and a stub that would raise
    as soon as the cell runs (it must be inside a function).
    """
    edition = copy.deepcopy(notebook)
    edition.metadata.pop("widgets", None)
    problems = []
    for index, cell in enumerate(edition.cells):
        name = f"cell '{cell.get('id', index)}'"
        try:
            _hide_solution(cell)
        except (EditionError, MarkerError) as error:
            problems.append(f"{name}: {error}")
    if problems:
        raise EditionError("\n".join(problems))
    return edition


def solutions(notebook: NotebookNode) -> dict[str, list[str]]:
    """The solution blocks (without markers) by cell id. Raises EditionError as `student_edition` does."""
    student_edition(notebook)
    found = {}
    for index, cell in enumerate(notebook.cells):
        if cell.cell_type == "code" and BEGIN in cell.source:
            lines = cell.source.split("\n")
            blocks = solution_blocks(cell.source)
            found[cell.get("id", str(index))] = ["\n".join(lines[i + 1 : j]) for i, j in blocks]
    return found


def _hide_solution(cell: NotebookNode) -> None:
    if cell.cell_type != "code":
        if any(line.strip() in (BEGIN, END) for line in cell.source.split("\n")):
            raise EditionError("a solution marker in a cell that isn't code")
        return
    nbgrader = cell.metadata.get("nbgrader", {})
    blocks = solution_blocks(cell.source)
    if blocks and not nbgrader.get("solution"):
        raise EditionError("a solution, but the cell's nbgrader metadata doesn't say \"solution\": true")
    if nbgrader.get("solution") and not blocks:
        raise EditionError(f"an answer cell without {BEGIN}")
    cell.outputs, cell.execution_count = [], None
    if blocks:
        cell.source = student_source(cell.source)


def unlink_missing(notebook: NotebookNode, folder: Path) -> None:
    """Turn links in Markdown to notebooks that `folder` lacks (topics that aren't written yet) into plain text."""

    def plain(link: re.Match) -> str:
        return link[0] if (folder / unquote(link[2])).is_file() else link[1]

    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = _NOTEBOOK_LINK.sub(plain, cell.source)


# --------------------------------------------------------------------------------------------------------------------
# the folder


def write_edition(notebook: NotebookNode, folder: Path, name: str) -> Written:
    """Write an edition as `name` into `folder`, without ever overwriting a file that isn't as it was written there.

    The first free place is taken of NAME.ipynb, NAME.updated.ipynb, NAME.updated-2.ipynb …: one that doesn't exist, or
    holds an older edition nobody has changed. A changed file that was made from this same edition ends the search: the
    student is working on it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    content = nbformat.writes(notebook, version=nbformat.NO_CONVERT).rstrip("\n").encode() + b"\n"
    digest = _sha(content)
    made = _read_record(folder)
    stem = Path(name).stem
    kept: list[Path] = []
    number = 0
    while True:
        suffix = "" if number == 0 else ".updated" if number == 1 else f".updated-{number}"
        path = folder / f"{stem}{suffix}.ipynb"
        number += 1
        if not path.exists():
            break
        present = _sha(path.read_bytes())
        if present == digest:
            return Written(path, False, tuple(kept))
        if present in made.get(path.name, []):
            break  # an older edition, untouched
        kept.append(path)
        if made.get(path.name, [])[-1:] == [digest]:
            return Written(path, False, tuple(kept))
    # The record first, beside the older ones: ended in between, this leaves no file that counts as the student's.
    made[path.name] = [*made.get(path.name, []), digest]
    write_whole(folder / RECORD, json.dumps(made, indent=1, sort_keys=True) + "\n")
    write_whole(path, content)
    return Written(path, True, tuple(kept))


def _sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _read_record(folder: Path) -> dict[str, list[str]]:
    """What was written; empty if the record is missing or damaged: then every file counts as the student's."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        # one digest a file, not a list, is how records began
        return {name: [made] if isinstance(made, str) else list(made) for name, made in record.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


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
    written = write_edition(start_page.start_page(syllabus, notebooks), folder, start_page.NAME)
    if written.is_new:
        print(_account(written, start_page.NAME))
    return written.path


def _account(written: Written, name: str) -> str:
    """What to tell about an edition, in a line."""
    if written.kept and written.path not in written.kept:
        mine = ", ".join(path.name for path in written.kept)
        news = "The lesson has a newer edition" if written.is_new else "A newer edition of the lesson"
        verb = ": it is in" if written.is_new else " is in"
        return f"{mine}: yours, left as it is. {news}{verb} {written.path.name}."
    if written.is_new:
        return f"{name}: written."
    return f"{name}: {'yours, left as it is' if written.kept else 'up to date'}."
