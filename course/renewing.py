"""Write an edition into the workbook, in place of an older one, without losing anything that a student wrote there.

What the student wrote is taken over (course/merging.py), and the file as it was goes to workbook/earlier/. To know what
the student wrote, each file has on record, in its metadata, the fingerprints of the cells that were handed out.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from datetime import date
from pathlib import Path

from nbformat import NotebookNode

from course.execution import NotebookError, read_notebook, write_notebook
from course.files import require_writable, write_whole
from course.merging import Merged, fingerprints, merge

EARLIER = "earlier"  # folder for the students' files as they were
RECORD = "course_edition"  # key of a notebook's metadata: the digest of its edition, and the cells' fingerprints


def write_edition(edition: NotebookNode, folder: Path, name: str) -> str:
    """Write an edition as `name` into `folder`, with what the student wrote into an older one there.

    Returns what was done, in a line. A file that is broken is kept, like any in which a student wrote, and the edition
    takes its place. NotWritableError if nothing can be written.
    """
    require_writable(folder)
    path = folder / name
    digest = hashlib.sha256(json.dumps(edition.cells, sort_keys=True).encode()).hexdigest()
    edition.metadata[RECORD] = {"digest": digest, "cells": fingerprints(edition)}
    if not path.exists():
        write_notebook(edition, path)
        return f"{name}: written."
    content = path.read_bytes()
    try:
        with warnings.catch_warnings(action="ignore"):  # nbformat's: it mends ids that are missing or there twice
            students, _ = read_notebook(path)
    except NotebookError as error:
        kept = _keep(path, content)
        write_notebook(edition, path)
        return f"{name}: written anew. What was there is no notebook ({error}) and is now {EARLIER}/{kept}."
    record = students.metadata.get(RECORD, {})
    if record.get("digest") == digest:
        return f"{name}: up to date."
    merged = merge(edition, students, record.get("cells", {}))
    kept = f" Your file as it was is {EARLIER}/{_keep(path, content)}." if merged.has_work else ""
    if path.read_bytes() != content:
        return write_edition(edition, folder, name)  # the student has just saved it
    write_notebook(NotebookNode({**edition, "cells": merged.cells}), path)
    return f"{name}: renewed{_account(merged)}{kept}"


def _keep(path: Path, content: bytes) -> str:
    """Put a file's content into EARLIER, under its name, the date and a digest that no other content has."""
    folder = path.parent / EARLIER
    require_writable(folder)
    kept = f"{path.stem}.{date.today()}-{hashlib.sha256(content).hexdigest()[:8]}.ipynb"
    write_whole(folder / kept, content)
    return kept


def _account(merged: Merged) -> str:
    """What became of the student's work."""
    taken_over = []
    if merged.answers:
        taken_over.append(f"with your answers to {', '.join(merged.answers)}")
    if merged.edits:
        taken_over.append(f"with your changes of {', '.join(merged.edits)}")
    if merged.own:
        taken_over.append(f"with {len(merged.own)} of your own cells")
    told = ", ".join(["", *taken_over]) + "."
    if merged.new_stubs:
        told += f" The stub of {', '.join(merged.new_stubs)} has changed, too: see whether your answer still fits."
    if merged.overruled:
        told += f" The lesson has changed {', '.join(merged.overruled)}, too: its version is in place of yours."
    return told
