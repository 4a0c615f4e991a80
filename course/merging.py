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


class MergeError(ValueError):
    """It can't be told which cell of the lesson a student's cell is; the message says which one, and why."""


@dataclass
class Merged:
    """A new edition with the student's work in it, and what became of that work.

    An exercise is named by its number (15-01.2), any other cell by its id ('setup').
    """

    notebook: NotebookNode
    is_base_known: bool  # whether it is known what was handed out
    answers: list[str] = field(default_factory=list)  # taken over
    new_stubs: list[str] = field(default_factory=list)  # those of the answers whose stub the lesson has changed
    edits: list[str] = field(default_factory=list)  # lesson cells that only the student changed: taken over
    added: int = 0  # cells that the student wrote: taken over
    overruled: list[str] = field(default_factory=list)  # lesson cells that both changed: the lesson's is in place
    removed: list[str] = field(default_factory=list)  # cells that the student changed, and the lesson no longer has

    @property
    def has_work(self) -> bool:
        """Whether the student wrote anything at all."""
        return bool(self.answers or self.edits or self.added or self.overruled or self.removed)


def fingerprint(cell: NotebookNode) -> str:
    """A hash of a cell's type and source. Spaces at the ends of lines don't count, nor do empty lines at its end."""
    text = "\n".join(line.rstrip() for line in cell.source.splitlines()).rstrip("\n")
    return hashlib.sha256(f"{cell.cell_type}\n{text}".encode()).hexdigest()[:16]


def fingerprints(notebook: NotebookNode) -> dict[str, str]:
    """The cells' fingerprints by cell id, of those that have one."""
    return {cell.id: fingerprint(cell) for cell in notebook.cells if "id" in cell}


def merge(edition: NotebookNode, students: NotebookNode, handed_out: dict[str, str]) -> Merged:
    """The new edition with the student's answers, with the cells they added, and with those they edited if the lesson
    hasn't changed them, too.

    Outputs stay where the source does. A lesson cell that the student deleted comes back. No argument is changed.

    `handed_out` are the fingerprints of the edition that the student began with; empty if that isn't known. Then
    whatever differs from the new edition counts as the student's. MergeError if a cell's id names one exercise, and its
    grade_id another.
    """
    merged = Merged(copy.deepcopy(edition), bool(handed_out))
    names = _names(edition)
    present: dict[str, NotebookNode] = {}  # the student's version of the edition's cells
    added: dict[str | None, list[NotebookNode]] = defaultdict(list)  # the student's own, by the edition's cell above
    above = None
    for cell, lesson_id in zip(students.cells, _lesson_ids(students, edition, handed_out), strict=True):
        if lesson_id in names:
            present[lesson_id] = cell
            above = lesson_id
        elif lesson_id is not None:
            if fingerprint(cell) != handed_out[lesson_id]:
                merged.removed.append(f"'{lesson_id}'")
        elif cell.source.strip():  # JupyterLab adds an empty cell when the last one is run
            added[above].append(_with_id(cell))
            merged.added += 1

    cells = list(added[None])
    for cell in merged.notebook.cells:
        students_cell = present.get(cell.id, cell)
        cells.append(_chosen(cell, students_cell, handed_out.get(cell.id), names[cell.id], merged))
        cells.extend(added[cell.id])
    merged.notebook.cells = cells
    return merged


def _chosen(
    lessons: NotebookNode, students: NotebookNode, handed_out: str | None, name: str, merged: Merged
) -> NotebookNode:
    """Which of two versions of a cell goes into the new edition. What the student wrote is listed in `merged`."""
    old, new, present = handed_out, fingerprint(lessons), fingerprint(students)
    if present == old != new:
        return lessons
    if present != new:
        if _is_answer(lessons):
            merged.answers.append(name)
            if old not in (new, None):
                merged.new_stubs.append(name)
        elif old == new:
            merged.edits.append(name)
        else:
            merged.overruled.append(name)
            return lessons
    chosen = copy.deepcopy(students)
    chosen.id = lessons.id
    chosen.metadata = lessons.metadata
    return chosen


def _lesson_ids(students: NotebookNode, edition: NotebookNode, handed_out: dict[str, str]) -> list[str | None]:
    """For each of the student's cells the id of the lesson cell that it is; None if the student added it.

    A cell is recognised by its id. If a tool has lost that, the grade_id says which one it is, or a source that is the
    same. So a copy of a cell counts as added as long as the original is there.
    """
    in_edition = {cell.id for cell in edition.cells}
    by_grade_id = {_nbgrader(cell)["grade_id"]: cell.id for cell in edition.cells if "grade_id" in _nbgrader(cell)}
    by_source = defaultdict(list)
    for cells in (handed_out, fingerprints(edition)):
        for cell_id, source in cells.items():
            by_source[source].append(cell_id)

    found = [cell.get("id") if cell.get("id") in in_edition else None for cell in students.cells]
    for index, cell in enumerate(students.cells):
        graded_as = by_grade_id.get(str(_nbgrader(cell).get("grade_id")))
        if found[index] is None:
            old = cell.get("id") if cell.get("id") in handed_out else None
            candidates = [graded_as, old, *by_source[fingerprint(cell)]]
            found[index] = next((one for one in candidates if one is not None and one not in found), None)
        elif graded_as not in (None, found[index]):
            raise MergeError(f"its cell '{found[index]}' has the grade_id of '{graded_as}'")
    return found


def _names(notebook: NotebookNode) -> dict[str, str]:
    """How a message names each cell: an answer by its exercise's number, any other by its id."""
    names = {}
    exercise = None
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and (heading := HEADING.search(cell.source)):
            exercise = f"{heading[1]}.{heading[2]}"
        names[cell.id] = exercise if exercise and _is_answer(cell) else f"'{cell.id}'"
    return names


def _is_answer(cell: NotebookNode) -> bool:
    return bool(_nbgrader(cell).get("solution"))


def _nbgrader(cell: NotebookNode) -> dict:
    """nbgrader's metadata of a cell; a student's file may have anything in its place."""
    metadata = cell.metadata.get("nbgrader")
    return metadata if isinstance(metadata, dict) else {}


def _with_id(cell: NotebookNode) -> NotebookNode:
    cell = copy.deepcopy(cell)
    cell.setdefault("id", uuid.uuid4().hex[:8])
    return cell
