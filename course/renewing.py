"""Write an edition into the workbook, in place of an older one, without losing anything that a student wrote there.

Three versions meet: the edition that was handed out, what the student made of it, and the new edition. Of the first one
each file has the cells' ids and fingerprints in its metadata. The student's file as it was goes to workbook/earlier/.
"""

from __future__ import annotations

import hashlib
import json
import uuid
import warnings
from collections import defaultdict
from datetime import date
from pathlib import Path

from nbformat import NotebookNode

from course.execution import NotebookError, read_notebook, write_notebook
from course.files import write_whole

EARLIER = "earlier"  # folder for the students' files as they were
RECORD = "course_edition"  # key of a notebook's metadata: the digest of its edition, and the cells' fingerprints


def write_edition(edition: NotebookNode, folder: Path, name: str) -> str:
    """Write an edition as `name` into `folder`, with what the student wrote into an older one there.

    Returns what was done, in a line. A file that is broken is kept, like any in which a student wrote, and the edition
    takes its place. OSError if nothing can be written.
    """
    path = folder / name
    digest = hashlib.sha256(json.dumps(edition.cells, sort_keys=True).encode()).hexdigest()
    edition.metadata[RECORD] = {"digest": digest, "cells": {cell.id: fingerprint(cell) for cell in edition.cells}}
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
    record = students.metadata.get(RECORD, {})  # none if a tool has lost it
    if record.get("digest") == digest:
        return f"{name}: up to date."
    cells, taken_over, overruled = merge(edition, students, record.get("cells", {}))
    told = f"{name}: renewed{', with what you wrote: ' if taken_over else ''}{', '.join(taken_over)}."
    if overruled:
        told += f" The lesson has changed {', '.join(overruled)}, too: its version is in place of yours."
    if taken_over or overruled:
        told += f" Your file as it was is {EARLIER}/{_keep(path, content)}."
    if path.read_bytes() != content:
        return write_edition(edition, folder, name)  # the student has just saved it
    write_notebook(NotebookNode({**edition, "cells": cells}), path)
    return told


def _keep(path: Path, content: bytes) -> str:
    """Put a file's content into EARLIER, under its name, the date and a digest that no other content has."""
    folder = path.parent / EARLIER
    folder.mkdir(exist_ok=True)
    kept = f"{path.stem}.{date.today()}-{hashlib.sha256(content).hexdigest()[:8]}.ipynb"
    write_whole(folder / kept, content)
    return kept


def fingerprint(cell: NotebookNode) -> str:
    """A hash of a cell's type and source. Spaces at the ends of lines don't count, nor do empty lines at its end."""
    text = "\n".join(line.rstrip() for line in cell.source.splitlines()).rstrip("\n")
    return hashlib.sha256(f"{cell.cell_type}\n{text}".encode()).hexdigest()[:16]


def merge(
    edition: NotebookNode, students: NotebookNode, handed_out: dict[str, str]
) -> tuple[list[NotebookNode], list[str], list[str]]:
    """The cells of the new edition with the student's answers, with the cells they added, and with those they edited if
    the lesson hasn't changed them, too; what was taken over; and the cells in which the lesson's version is in place.

    Outputs stay where the source does. A lesson cell that the student deleted comes back; one that they changed and the
    lesson no longer has is theirs from now on. `handed_out` are the fingerprints of the edition that the student began
    with; empty if that isn't known, so that whatever differs from the new edition counts as the student's.

    A cell is recognised by its id; if a tool has lost that, by its grade_id, which is the same, or by its source. So a
    copy of a cell counts as added as long as the original is there.
    """
    fingerprints = {cell.id: fingerprint(cell) for cell in edition.cells}
    known = {**handed_out, **fingerprints}
    recognised = {cell.get("id") for cell in students.cells}
    present = {}  # the student's version of the edition's cells
    own = defaultdict(list)  # the student's own cells, by the edition's cell above them
    above = None
    for cell in students.cells:
        lesson_id = cell.get("id")
        if lesson_id not in known:
            source = fingerprint(cell)
            same = [one for one in known if source in (known[one], handed_out.get(one))]
            candidates = [(cell.metadata.get("nbgrader") or {}).get("grade_id"), *same]
            lesson_id = next((one for one in candidates if one in known and one not in recognised), None)
            recognised.add(lesson_id)
        if lesson_id in fingerprints:
            present[lesson_id] = cell
            above = lesson_id
        # JupyterLab adds an empty cell when the last one is run
        elif cell.source.strip() and fingerprint(cell) != handed_out.get(lesson_id):
            cell.setdefault("id", uuid.uuid4().hex[:8])
            own[above].append(cell)

    taken_over, overruled = [], []
    cells = [*own[None]]
    for lessons in edition.cells:
        old, new = handed_out.get(lessons.id), fingerprints[lessons.id]
        chosen = present.get(lessons.id, lessons)
        if fingerprint(chosen) not in (old, new):
            if lessons.metadata.get("nbgrader", {}).get("solution") or old == new:
                taken_over.append(f"'{lessons.id}'")
            else:
                overruled.append(f"'{lessons.id}'")
                chosen = lessons
        elif fingerprint(chosen) != new:
            chosen = lessons
        chosen.id, chosen.metadata = lessons.id, lessons.metadata
        cells += [chosen, *own[lessons.id]]
    if any(own.values()):
        taken_over.append("your own cells")
    return cells, taken_over, overruled
