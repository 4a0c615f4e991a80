"""Read what a student has handed in: the answer cells and what they wrote around them, whatever became of the rest.

An answer cell is found by an id (its own, nbgrader's, or the one that Colab keeps), else by what it defines. Of several
the last one that isn't the untouched stub counts: in a notebook, too, what runs last defines the name.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import NamedTuple

from course.needs import used
from course.skeleton import Skeleton, Task, editions, plain, skeleton


class UnreadableError(ValueError):
    """A file is no submission; the message says what is wrong with it."""


@dataclass(frozen=True)
class Submission:
    """What grading takes from a student's file."""

    topic: str  # "15-03"
    answers: dict[str, str]  # sources of the answer cells by their ids
    others: tuple[str, ...] = ()  # sources of the code cells that the student added or changed
    notes: tuple[str, ...] = ()  # sentences on how it was found and read


class _Cell(NamedTuple):
    number: int  # among all cells of the file, from 1
    source: str
    ids: set[str]


def read_submission(content: bytes, name: str = "", topic: str = "") -> Submission:
    """Find a student's cells in a file.

    `name` is the file's, which may name the topic, as in "15-03 final.ipynb", where cells can't; `topic` is one of the
    course's that it has to be of. Raises UnreadableError if it is none of the course's notebooks.
    """
    cells = _code_cells(content)
    topic = topic or _topic_of(cells, name)
    lesson = skeleton(topic)
    answers, notes = {}, []
    others = {cell.number: cell.source for cell in cells if plain(cell.source) not in lesson.lesson_sources}
    for task in lesson.tasks:
        claims = {cell.number: (claim, cell) for cell in cells if (claim := _claim(cell, task, lesson))}
        if not claims:
            continue
        # the one that was attempted, has the id, is the last
        ranks = {number: (task.is_attempted_in(cell.source), claim) for number, (claim, cell) in claims.items()}
        chosen = max(claims, key=lambda number: (ranks[number], number))
        claim, cell = claims[chosen]
        answers[task.cell] = cell.source
        others = {number: source for number, source in others.items() if number not in claims}
        if len(claims) > 1 or claim == 1:
            notes.append(f"{task.number}: cell {chosen} of the file counts as the answer.")
    if not answers:
        raise UnreadableError(f"it is another notebook: it has no answer cell of {topic}")
    return Submission(topic, answers, tuple(others.values()), tuple(notes))


def _code_cells(content: bytes) -> list[_Cell]:
    try:
        cells = enumerate(json.loads(content)["cells"], 1)
        return [_cell(number, cell) for number, cell in cells if cell.get("cell_type") == "code"]
    except Exception as error:  # in what isn't a notebook anything may be anything
        raise UnreadableError(f"it is no notebook ({type(error).__name__}: {error})") from None


def _cell(number: int, cell: dict) -> _Cell:
    about = cell.get("metadata") or {}  # a tool may have lost it
    ids = {cell.get("id"), (about.get("nbgrader") or {}).get("grade_id"), about.get("id")}
    return _Cell(number, "".join(cell.get("source") or ""), ids)


def _topic_of(cells: list[_Cell], name: str) -> str:
    """The topic whose answer cells are in it; where that doesn't decide, the one that the file's name has."""
    ids = set().union(*(cell.ids for cell in cells))
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
    """How much speaks for a cell to be the answer: 2 an id, 1 what it defines, 0 nothing."""
    if task.cell in cell.ids:
        return 2
    if not cell.ids.isdisjoint(lesson.code) or plain(cell.source) in lesson.lesson_sources:
        return 0
    names = "|".join(map(re.escape, sorted(used(task.argument))))
    definition = rf"^(?:def|class) +(?:{names})\b|^(?:{names}) *="
    return int(f"{task.check}(" not in cell.source and bool(re.search(definition, cell.source, re.MULTILINE)))
