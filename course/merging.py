"""Take a student's work over into a new edition of a notebook, cell by cell.

Three versions meet: the edition that was handed out, what the student made of it, and the new edition. Of the first
one only the cells' ids and fingerprints are needed.
"""

from __future__ import annotations

import copy
import hashlib
import uuid
from collections import defaultdict
from dataclasses import dataclass, field

from nbformat import NotebookNode

from course.exercise_form import HEADING


@dataclass
class Merged:
    """What became of a student's work. An exercise is named by its number (15-01.2), any other cell by its id."""

    answers: list[str] = field(default_factory=list)  # taken over
    new_stubs: list[str] = field(default_factory=list)  # those of the answers whose stub the lesson has changed
    edits: list[str] = field(default_factory=list)  # lesson cells that only the student changed: taken over
    own: list[NotebookNode] = field(default_factory=list)  # cells that the student wrote: taken over
    overruled: list[str] = field(default_factory=list)  # lesson cells that both changed: the lesson's is in place
    cells: list[NotebookNode] = field(default_factory=list)  # the new edition's, with all that was taken over

    @property
    def has_work(self) -> bool:
        """Whether the student wrote anything at all."""
        return bool(self.answers or self.edits or self.own or self.overruled)


def fingerprint(cell: NotebookNode) -> str:
    """A hash of a cell's type and source. Spaces at the ends of lines don't count, nor do empty lines at its end."""
    text = "\n".join(line.rstrip() for line in cell.source.splitlines()).rstrip("\n")
    return hashlib.sha256(f"{cell.cell_type}\n{text}".encode()).hexdigest()[:16]


def fingerprints(notebook: NotebookNode) -> dict[str, str]:
    """The cells' fingerprints by cell id."""
    return {cell.id: fingerprint(cell) for cell in notebook.cells}


def merge(edition: NotebookNode, students: NotebookNode, handed_out: dict[str, str]) -> Merged:
    """The new edition with the student's answers, with the cells they added, and with those they edited if the lesson
    hasn't changed them, too.

    Outputs stay where the source does. A lesson cell that the student deleted comes back; one that they changed and the
    lesson no longer has is theirs from now on.

    `handed_out` are the fingerprints of the edition that the student began with; empty if that isn't known. Then
    whatever differs from the new edition counts as the student's.
    """
    merged = Merged()
    present = {}  # the student's version of the edition's cells
    own = defaultdict(list)  # the student's own cells, by the edition's cell above them
    above = None
    ids = {cell.id for cell in edition.cells}
    for cell, lesson_id in zip(students.cells, _lesson_ids(students, edition, handed_out), strict=True):
        if lesson_id in ids:
            present[lesson_id] = cell
            above = lesson_id
        # JupyterLab adds an empty cell when the last one is run
        elif cell.source.strip() and fingerprint(cell) != handed_out.get(lesson_id):
            cell.setdefault("id", uuid.uuid4().hex[:8])
            own[above].append(cell)
            merged.own.append(cell)

    merged.cells = own[None]
    exercise = ""
    for lessons in edition.cells:
        if heading := HEADING.search(lessons.source):
            exercise = f"{heading[1]}.{heading[2]}"
        old, new = handed_out.get(lessons.id), fingerprint(lessons)
        chosen = copy.deepcopy(present.get(lessons.id, lessons))
        if fingerprint(chosen) == old != new:
            chosen = lessons
        elif fingerprint(chosen) != new:
            if _nbgrader(lessons).get("solution"):
                merged.answers.append(exercise)
                if old not in (new, None):
                    merged.new_stubs.append(exercise)
            elif old == new:
                merged.edits.append(f"'{lessons.id}'")
            else:
                merged.overruled.append(f"'{lessons.id}'")
                chosen = lessons
        chosen.id, chosen.metadata = lessons.id, lessons.metadata
        merged.cells += [chosen, *own[lessons.id]]
    return merged


def _lesson_ids(students: NotebookNode, edition: NotebookNode, handed_out: dict[str, str]) -> list[str | None]:
    """For each of the student's cells the id of the lesson cell that it is; None if the student added it.

    A cell is recognised by its id. If a tool has lost that, the grade_id says which one it is, or a source that is the
    same. So a copy of a cell counts as added as long as the original is there.
    """
    in_edition = {cell.id for cell in edition.cells}
    by_grade_id = {_nbgrader(cell).get("grade_id"): cell.id for cell in edition.cells}
    by_source = defaultdict(list)
    for cells in (handed_out, fingerprints(edition)):
        for cell_id, source in cells.items():
            by_source[source].append(cell_id)

    found = [cell.get("id") if cell.get("id") in in_edition else None for cell in students.cells]
    for index, cell in enumerate(students.cells):
        if found[index] is None:
            old = cell.get("id") if cell.get("id") in handed_out else None
            graded_as = by_grade_id.get(_nbgrader(cell).get("grade_id", ""))
            candidates = [graded_as, old, *by_source[fingerprint(cell)]]
            found[index] = next((one for one in candidates if one is not None and one not in found), None)
    return found


def _nbgrader(cell: NotebookNode) -> dict:
    return cell.metadata.get("nbgrader", {})
