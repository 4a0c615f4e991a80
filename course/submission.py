"""Read what a student has handed in: the answer cells and what they wrote around them, whatever became of the rest.

An answer cell is found by its id, else by its grade_id or the id that Colab keeps, else by what it defines. Of several
the last one that isn't the untouched stub counts: in a notebook, too, what runs last defines the name.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from course.needs import used
from course.skeleton import Skeleton, Task, editions, plain, skeleton

FILE_SIZE = 30_000_000  # bytes of a notebook; a larger one isn't read


class UnreadableError(ValueError):
    """A file is no submission; the message says what is wrong with it."""


@dataclass(frozen=True)
class Submission:
    """What grading takes from a student's file."""

    topic: str  # "15-03"
    answers: dict[str, str]  # sources of the answer cells by their ids
    others: tuple[str, ...] = ()  # sources of the code cells that the student added or changed
    notes: tuple[str, ...] = ()  # sentences on how it was found and read


def read_submission(content: bytes, name: str = "", topic: str | None = None) -> Submission:
    """Find a student's cells in a file.

    `name` is the file's, which may name the topic, as in "15-03 final.ipynb", where cells can't. Raises UnreadableError
    if it is none of the course's notebooks, TargetError if the course has no such topic.
    """
    cells = _code_cells(content)
    topic = topic or _topic_of(cells, name)
    lesson = skeleton(topic)
    answers, notes = {}, []
    others = {index: cell.source for index, cell in enumerate(cells) if plain(cell.source) not in lesson.lesson_sources}
    for task in lesson.tasks:
        claims = {index: claim for index, cell in enumerate(cells) if (claim := _claim(cell, task, lesson))}
        if not claims:
            continue
        chosen = max(claims, key=lambda index: (task.is_attempted_in(cells[index].source), claims[index], index))
        answers[task.cell] = cells[chosen].source
        for index in claims:
            others.pop(index, None)
        if len(claims) > 1:
            notes.append(f"{task.number}: {len(claims)} cells could be the answer; cell {cells[chosen].number} counts.")
        elif claims[chosen] == 1:
            notes.append(f"{task.number}: the answer's cell has lost its id; cell {cells[chosen].number} defines it.")
    if not answers:
        raise UnreadableError(f"it is another notebook: it has no answer cell of {topic}")
    return Submission(topic, answers, tuple(others.values()), tuple(notes))


@dataclass(frozen=True)
class _Cell:
    number: int  # among all cells of the file, from 1
    source: str
    id: str
    other_ids: tuple[str, str]  # where nbgrader and Colab keep one


def _code_cells(content: bytes) -> list[_Cell]:
    if not content.strip():
        raise UnreadableError("the file is empty")
    if len(content) > FILE_SIZE:
        raise UnreadableError(f"the file has more than {FILE_SIZE / 1e6:g} MB; its outputs can be cleared")
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"it isn't JSON ({error}), so no notebook") from None
    cells = document.get("cells") if isinstance(document, dict) else None
    if not isinstance(cells, list):
        raise UnreadableError("it is JSON, but no notebook of format 4")
    numbered = [(number, cell) for number, cell in enumerate(cells, 1) if isinstance(cell, dict)]
    return [_cell(number, cell) for number, cell in numbered if cell.get("cell_type") == "code"]


def _cell(number: int, cell: dict) -> _Cell:
    source = cell.get("source", "")
    source = "".join(map(str, source)) if isinstance(source, list) else str(source)
    source = source.encode("utf-8", "replace").decode("utf-8")  # JSON can hold half a character
    metadata = cell["metadata"] if isinstance(cell.get("metadata"), dict) else {}
    nbgrader = metadata["nbgrader"] if isinstance(metadata.get("nbgrader"), dict) else {}
    return _Cell(number, source, str(cell.get("id")), (str(nbgrader.get("grade_id")), str(metadata.get("id"))))


def _topic_of(cells: list[_Cell], name: str) -> str:
    """The topic whose answer cells are in it; where that doesn't decide, the one that the file's name has."""
    ids = {one for cell in cells for one in (cell.id, *cell.other_ids)}
    counts = {number: sum(task.cell in ids for task in skeleton(number).tasks) for number in editions()}
    best = [number for number, count in counts.items() if count == max(counts.values())]
    if len(best) == 1:
        return best[0]
    if (named := topic_in(name)) in best:
        return named
    raise UnreadableError("it is another notebook: neither its cells nor its name are those of a topic")


def topic_in(name: str) -> str:
    """The course's topic that a file's name has in it, such as 15-03 in "15-3 final.ipynb"; "" if it has none."""
    named = [f"{module}-{int(number):02d}" for module, number in re.findall(r"(\d+)-(\d+)", name)]
    return next((topic for topic in named if topic in editions()), "")


def _claim(cell: _Cell, task: Task, lesson: Skeleton) -> int:
    """How much speaks for a cell to be the answer: 3 its id, 2 another id, 1 what it defines, 0 nothing."""
    if cell.id == task.cell:
        return 3
    if cell.id in lesson.code:
        return 0
    if task.cell in cell.other_ids:
        return 2
    if plain(cell.source) in lesson.lesson_sources or f"{task.check}(" in cell.source:
        return 0
    names = "|".join(map(re.escape, sorted(used(task.argument))))
    definition = rf"^(?:(?:async +)?def|class) +(?:{names})\b|^(?:{names}) *=(?!=)"
    return int(bool(re.search(definition, cell.source, re.MULTILINE)))
