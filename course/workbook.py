"""Make the student edition: a start page and the notebooks without their solutions, in workbook/.

Given again, it renews the notebooks: course/renewing.py says what becomes of a student's work in them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from course import start_page, syllabus
from course.edition import EditionError, jupyter_metadata, student_edition, unlink_missing
from course.environment import ROOT
from course.execution import NotebookError, read_notebook
from course.files import NotWritableError, require_writable
from course.renewing import EARLIER, Written, write_edition
from course.selection import Selected, SelectionError, select
from course.syllabus import Syllabus


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
        taken_over.append(f"{merged.added} of your own cells")
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
