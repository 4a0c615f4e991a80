"""Read what a student has handed in: the answer cells and what they wrote around them, whatever became of the rest.

An answer cell is found by its id, else by its grade_id or the id that Colab keeps, else by what it defines. Of several
the last one that isn't the untouched stub counts: in a notebook, too, what runs last defines the name.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass

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
    notes: tuple[str, ...] = ()  # sentences on how it was read

    def digest(self) -> str:
        """Differs when the skeleton or anything of the student's does that decides a grade."""
        return hashlib.sha256(json.dumps([skeleton(self.topic).digest, asdict(self)]).encode()).hexdigest()


def read_submission(content: bytes, name: str = "", topic: str | None = None) -> Submission:
    """Find a student's cells in a file.

    `name` is the file's, which may name the topic, as in "15-03 final.ipynb", where cells can't. Raises UnreadableError
    if it is none of the course's notebooks, TargetError if the course has no such topic.
    """
    cells = _code_cells(content)
    topic = topic or _topic_of(cells, name)
    lesson = skeleton(topic)
    sources = lesson.lesson_sources
    answers, notes = {}, []
    others = {index: cell.source for index, cell in enumerate(cells) if plain(cell.source) not in sources}
    for task in lesson.tasks:
        claims = {index: claim for index, cell in enumerate(cells) if (claim := _claim(cell, task, lesson, sources))}
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
        document = json.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UnreadableError(f"it isn't UTF-8 text (byte {error.start}), so no notebook") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}: {error.msg}"
        raise UnreadableError(f"it isn't JSON ({where}), so no notebook") from None
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"its JSON can't be read: {error}") from None
    cells = document.get("cells") if isinstance(document, dict) else None
    if not isinstance(cells, list):
        if isinstance(document, dict) and "worksheets" in document:
            raise UnreadableError("it has notebook format 3; JupyterLab saves it in format 4")
        raise UnreadableError("it is JSON, but no notebook")
    is_code = [isinstance(cell, dict) and cell.get("cell_type") == "code" for cell in cells]
    return [_cell(number, cell) for number, cell in enumerate(cells, 1) if is_code[number - 1]]


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
    for number in topics_in(name):
        if number in best:
            return number
    raise UnreadableError("it is another notebook: neither its cells nor its name are those of a topic")


def topics_in(name: str) -> list[str]:
    """The topics that a file's name has in it, such as "15-03" in "15-3 final.ipynb"."""
    return [f"{module}-{int(number):02d}" for module, number in re.findall(r"(\d+)-(\d+)", name)]


def _claim(cell: _Cell, task: Task, lesson: Skeleton, lesson_sources: set[str]) -> int:
    """How much speaks for a cell to be the answer: 3 its id, 2 another id, 1 what it defines, 0 nothing."""
    if cell.id == task.cell:
        return 3
    if cell.id in lesson.code:
        return 0
    if task.cell in cell.other_ids:
        return 2
    if plain(cell.source) in lesson_sources or f"{task.check}(" in cell.source:
        return 0
    names = "|".join(map(re.escape, sorted(used(task.argument))))
    definition = rf"^(?:(?:async +)?def|class) +(?:{names})\b|^(?:{names}) *=(?!=)"
    return int(bool(re.search(definition, cell.source, re.MULTILINE)))
