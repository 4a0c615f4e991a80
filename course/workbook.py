"""Make the student edition: a start page and the notebooks without their solutions, in workbook/.

Given again, it renews the notebooks: course/renewing.py says what becomes of a student's work in them.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress
from pathlib import Path

from ipykernel.ipkernel import IPythonKernel
from ipykernel.kernelspec import KERNEL_NAME, get_kernel_dict
from nbformat import NotebookNode

from course import start_page, syllabus
from course.edition import EditionError, student_edition
from course.environment import ROOT
from course.execution import NotebookError, read_notebook
from course.files import NotWritableError, require_writable
from course.renewing import write_edition
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
    make_start_page(book, args.output)
    print(f"The student edition is in {args.output.resolve()}")
    return status


def require_folder(folder: Path, notebooks: list[Selected]) -> None:
    """Make an edition's folder; NotWritableError if nothing can be written there, or it has the sources."""
    if any(notebook.path.parent == folder.resolve() for notebook in notebooks):
        raise NotWritableError(f"{folder} holds the notebooks themselves; name another --output.")
    require_writable(folder, "; name another --output")


def finished(syllabus: Syllabus) -> list[Selected]:
    """The notebooks for students: all but drafts, which come into a workbook only when they are named."""
    return [notebook for notebook in select([], syllabus) if not syllabus.topics[notebook.topic].is_draft]


def make(notebooks: list[Selected], folder: Path) -> int:
    """Write the student edition of the notebooks, saying what was done; 1 if one couldn't be made."""
    status = 0
    for notebook in notebooks:
        name = notebook.path.name
        try:
            edition = student_edition(read_notebook(notebook.path)[0])
        except (NotebookError, EditionError) as error:
            status = 1
            print(f"{name}: no student edition: {error}")
            continue
        status = max(status, _write(edition, folder, name))
    return status


def make_start_page(syllabus: Syllabus, folder: Path) -> Path:
    """Write the page that the workbook opens with, for the topics that are in it, and return where it is."""
    notebooks = {}
    for number, topic in syllabus.topics.items():
        if (folder / topic.file).is_file():
            with suppress(NotebookError):  # `make` has said so
                notebooks[number] = read_notebook(topic.path)[0]
    _write(start_page.start_page(syllabus, notebooks), folder, start_page.NAME)
    return folder / start_page.NAME


def _write(edition: NotebookNode, folder: Path, name: str) -> int:
    """Write an edition, saying what was done; 1 if the system refuses, as while Windows has the file in use."""
    # as JupyterLab does once this Python's kernel has answered: so opening the notebook changes nothing
    spec = get_kernel_dict()
    edition.metadata["kernelspec"] = {"name": KERNEL_NAME, **{key: spec[key] for key in ("display_name", "language")}}
    edition.metadata["language_info"] = dict(IPythonKernel.language_info)
    try:
        told = write_edition(edition, folder, name)
    except OSError as error:
        print(f"{name}: left as it is: {error}")
        return 1
    if not told.endswith(": up to date."):  # nobody needs eleven lines of that
        print(told)
    return 0
