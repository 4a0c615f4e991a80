"""What grading takes from a notebook of the course: its exercises, and the code that answers need."""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from course import syllabus
from course.environment import ROOT
from course.exercise_form import HEADING, student_source, without_hidden_tests
from course.lesson_code import Answer, exercises
from course.needs import used


@dataclass(frozen=True)
class Task(Answer):
    """An exercise, with the course's answer."""

    number: str  # as in the heading, and title and points
    title: str
    points: int
    stub: str  # source of the answer cell as students get it
    hidden: str  # source of the check cell if it has hidden tests, else ""
    uses: frozenset[str]  # names that the course's answer, the argument and the hidden tests use

    def is_attempted_in(self, source: str) -> bool:
        """Whether there is code in an answer cell that isn't the stub's."""
        lines = [line.strip() for line in source.splitlines()]
        has_code = any(line and not line.startswith("#") for line in lines)
        return has_code and plain(source) != plain(self.stub)


@dataclass(frozen=True)
class Skeleton:
    """What grading takes from a notebook."""

    code: dict[str, str]  # sources of the code cells by their ids, in their order
    tasks: tuple[Task, ...]
    lesson_sources: frozenset[str]  # of all cells but the answers, as `plain` gives them

    def before(self, task: Task) -> dict[str, str]:
        """The cells above an exercise's check, without setup and its own answer."""
        order = list(self.code)
        above = order[: order.index(f"{task.cell}-check")]
        return {cell: self.code[cell] for cell in above if cell not in ("setup", task.cell)}


def plain(source: str) -> str:
    """A source without what an editor may change: spaces at the ends of lines, empty lines at the end."""
    return "\n".join(line.rstrip() for line in source.splitlines()).rstrip("\n")


@functools.cache
def editions() -> dict[str, Path]:
    """The course's notebooks that exist, by topic."""
    return {number: topic.path for number, topic in syllabus.load().topics.items() if topic.path.is_file()}


@functools.cache
def skeleton(topic: str) -> Skeleton:
    """What grading takes from the course's notebook on a topic of `editions`. TargetError if that isn't in order."""
    path = editions()[topic]
    code, answers = exercises(path)
    texts = ["".join(cell["source"]) for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]]
    headings = [heading for text in texts if text.startswith("### ") and (heading := HEADING.search(text))]
    tasks = []
    for answer, heading in zip(answers, headings, strict=True):
        check_cell = code[f"{answer.cell}-check"]
        hidden = check_cell if without_hidden_tests(check_cell) != check_cell else ""
        tasks.append(
            Task(
                **vars(answer),
                number=f"{heading[1]}.{heading[2]}",
                title=heading[3],
                points=int(heading[4]),
                stub=student_source(answer.source),
                hidden=hidden,
                uses=frozenset(used(answer.source) | used(answer.argument) | used(hidden)),
            )
        )
    own = {task.cell for task in tasks}
    lesson_sources = frozenset(plain(source) for cell, source in code.items() if cell not in own)
    return Skeleton(code, tuple(tasks), lesson_sources)


@functools.cache
def edition(topic: str) -> str:
    """A hash of all that decides a grade beside the answer: PyTorch's version, the notebook, `shared`, the grader."""
    digest = hashlib.sha256(metadata.version("torch").encode())
    for path in sorted([editions()[topic], *ROOT.glob("shared/**/*.py"), *ROOT.glob("course/*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()
