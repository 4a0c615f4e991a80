"""What grading takes from a notebook of the course: its exercises, and the code that answers need."""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from course import fingerprint, syllabus
from course.answers import TargetError, exercises
from course.environment import ROOT
from course.exercise_form import HEADING, student_source
from course.needs import bound, used


@dataclass(frozen=True)
class Task:
    """An exercise.

    Attributes:
        number, title, points: as in the heading.
        cell: id of the answer cell.
        place, check_place: of the answer cell and the check cell among the code cells, from 0.
        stub: source of the answer cell as students get it.
        check, argument: expressions, such as "check.swish" and "Swish".
        uses: names that the course's answer uses.
    """

    number: str
    title: str
    points: int
    cell: str
    place: int
    check_place: int
    stub: str
    check: str
    argument: str
    uses: frozenset[str]

    def is_attempted_in(self, source: str) -> bool:
        """Whether there is code in an answer cell that isn't the stub's."""
        lines = [line.strip() for line in source.splitlines()]
        has_code = any(line and not line.startswith("#") for line in lines)
        return has_code and plain(source) != plain(self.stub)


@dataclass(frozen=True)
class Statement:
    """A statement at the top of a cell: the place of that cell among the code cells, its source and its names."""

    place: int
    source: str
    binds: frozenset[str]
    uses: frozenset[str]
    is_students: bool = False


@dataclass(frozen=True)
class Skeleton:
    """What grading takes from a notebook.

    Attributes:
        topic: its number.
        setup: source of the setup cell.
        code: sources of the code cells by their ids, in their order, with stubs as answers.
        tasks: the exercises.
        sources: of all code cells but the answers, as `plain` gives them.
        digest: differs when anything does that decides a grade.
    """

    topic: str
    code: dict[str, str]
    tasks: tuple[Task, ...]
    sources: frozenset[str]
    digest: str

    @property
    def setup(self) -> str:
        """Source of the setup cell."""
        return self.code.get("setup", "")

    @functools.cached_property
    def places(self) -> dict[str, int]:
        """The code cells' places by their ids."""
        return {cell: place for place, cell in enumerate(self.code)}

    @functools.cached_property
    def statements(self) -> tuple[Statement, ...]:
        """What stands in all code cells but setup."""
        found = []
        for cell, source in self.code.items():
            if cell != "setup":
                found += statements(source, self.places[cell])
        return tuple(found)


def statements(source: str, place: int, *, is_students: bool = False) -> list[Statement]:
    """The statements of a cell. Raises SyntaxError or ValueError if it isn't Python."""
    found = []
    for node in ast.parse(source).body:
        text = ast.unparse(node)
        found.append(Statement(place, text, frozenset(bound(node)), frozenset(used(text)), is_students))
    return found


def plain(source: str) -> str:
    """A source without what an editor may change: spaces at the ends of lines, empty lines at the end."""
    return "\n".join(line.rstrip() for line in source.splitlines()).rstrip("\n")


def editions() -> dict[str, Path]:
    """The course's notebooks that exist, by topic."""
    return {number: topic.path for number, topic in syllabus.load().topics.items() if topic.path.is_file()}


def skeleton(topic: str) -> Skeleton:
    """What grading takes from the course's notebook on a topic.

    Raises:
        TargetError: there is no such notebook, or it is not in order.
    """
    known = editions()
    if topic not in known:
        raise TargetError(f"there is no notebook of topic {topic}; there are {', '.join(known)}")
    return _read(topic, known[topic], known[topic].stat().st_mtime_ns)


@functools.lru_cache(64)
def _read(topic: str, path: Path, _changed: int) -> Skeleton:
    code, answers = exercises(path)
    places = {cell: place for place, cell in enumerate(code)}
    texts = ["".join(cell["source"]) for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]]
    headings = [heading for text in texts if re.match("### ", text) and (heading := HEADING.search(text))]
    if len(headings) != len(answers):
        raise TargetError(f"{path.name} has {len(answers)} answer cells and {len(headings)} headings of exercises")
    tasks = tuple(
        Task(
            number=f"{heading[1]}.{heading[2]}",
            title=heading[3],
            points=int(heading[4]),
            cell=answer.cell,
            place=places[answer.cell],
            check_place=places[f"{answer.cell}-check"],
            stub=student_source(answer.source),
            check=answer.check,
            argument=answer.argument,
            uses=frozenset(used(answer.source)),
        )
        for answer, heading in zip(answers, headings, strict=True)
    )
    own = {task.cell for task in tasks}
    sources = frozenset(plain(source) for cell, source in code.items() if cell not in own)
    digest = hashlib.sha256(json.dumps([topic, code, _surroundings()]).encode()).hexdigest()
    return Skeleton(topic, code | {task.cell: task.stub for task in tasks}, tasks, sources, digest)


@functools.cache
def _surroundings() -> str:
    return fingerprint.surroundings(ROOT, ROOT / "course" / "grading.py", None, os.environ)
