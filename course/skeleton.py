"""What grading takes from a notebook of the course: its exercises, and the code that answers need."""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import re
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from course import syllabus
from course.environment import ROOT
from course.exercise_form import HEADING, hidden_tests, student_source, without_hidden_tests
from course.lesson_code import CHECK, TargetError, exercises
from course.needs import bound, used


@dataclass(frozen=True)
class Task:
    """An exercise."""

    number: str  # as in the heading, and title and points
    title: str
    points: int
    cell: str  # id of the answer cell
    stub: str  # source of the answer cell as students get it
    check: str  # this and the next are expressions, such as "check.swish" and "Swish"
    argument: str
    hidden: str  # source of the check cell, without the check's call, if it has hidden tests; else ""
    uses: frozenset[str]  # names that the course's answer, the argument and the hidden tests use

    def is_attempted_in(self, source: str) -> bool:
        """Whether there is code in an answer cell that isn't the stub's."""
        lines = [line.strip() for line in source.splitlines()]
        has_code = any(line and not line.startswith("#") for line in lines)
        return has_code and plain(source) != plain(self.stub)


@dataclass(frozen=True)
class Statement:
    """A statement at the top of a cell: the cell's id, the source, the names that it binds and those that it uses."""

    cell: str
    source: str
    binds: frozenset[str]
    uses: frozenset[str]


@dataclass(frozen=True)
class Skeleton:
    """What grading takes from a notebook."""

    topic: str  # its number
    code: dict[str, str]  # sources of the code cells by their ids, in their order
    tasks: tuple[Task, ...]  # the exercises
    digest: str  # differs when anything does that decides a grade
    _statements: list[Statement] = field(default_factory=list, compare=False)

    @property
    def setup(self) -> str:
        """Source of the setup cell."""
        return self.code.get("setup", "")

    @property
    def lesson_sources(self) -> set[str]:
        """All cells but the answers, as `plain` gives them."""
        own = {task.cell for task in self.tasks}
        return {plain(source) for cell, source in self.code.items() if cell not in own}

    def before(self, task: Task) -> list[Statement]:
        """What stands above an exercise's check, without setup and its own answer; each check is taken to pass."""
        if not self._statements:
            for cell, source in self.code.items():
                if cell != "setup":
                    self._statements.extend(
                        statements(_WithoutChecks().visit(ast.parse(without_hidden_tests(source))), cell)
                    )
        order = list(self.code)
        above = set(order[: order.index(f"{task.cell}-check")]) - {task.cell}
        return [statement for statement in self._statements if statement.cell in above]


class _WithoutChecks(ast.NodeTransformer):
    """`swish = check.swish(Swish).apply` becomes `swish = Swish.apply`."""

    def visit_Call(self, node: ast.Call) -> ast.expr:
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name)), args=[answer]) if name == CHECK:
                return answer
        return self.generic_visit(node)


def statements(tree: ast.Module, cell: str) -> list[Statement]:
    """The statements of a cell."""
    found = []
    for node in tree.body:
        text = ast.unparse(node)
        found.append(Statement(cell, text, frozenset(bound(node)), frozenset(used(text))))
    return found


def plain(source: str) -> str:
    """A source without what an editor may change: spaces at the ends of lines, empty lines at the end."""
    return "\n".join(line.rstrip() for line in source.splitlines()).rstrip("\n")


def editions() -> dict[str, Path]:
    """The course's notebooks that exist, by topic."""
    return {number: topic.path for number, topic in syllabus.load().topics.items() if topic.path.is_file()}


def skeleton(topic: str) -> Skeleton:
    """What grading takes from the course's notebook on a topic. TargetError if there is none that is in order."""
    known = editions()
    if topic not in known:
        raise TargetError(f"there is no notebook of topic {topic}; there are {', '.join(known)}")
    return _read(topic, known[topic], known[topic].stat().st_mtime_ns)


@functools.lru_cache(64)
def _read(topic: str, path: Path, _changed: int) -> Skeleton:
    code, answers = exercises(path)
    texts = ["".join(cell["source"]) for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]]
    headings = [heading for text in texts if re.match("### ", text) and (heading := HEADING.search(text))]
    if len(headings) != len(answers):
        raise TargetError(f"{path.name} has {len(answers)} answer cells and {len(headings)} headings of exercises")
    tasks = []
    for answer, heading in zip(answers, headings, strict=True):
        check_cell = code[f"{answer.cell}-check"]
        hidden = ast.unparse(_WithoutChecks().visit(ast.parse(check_cell))) if hidden_tests(check_cell) else ""
        tasks.append(
            Task(
                number=f"{heading[1]}.{heading[2]}",
                title=heading[3],
                points=int(heading[4]),
                cell=answer.cell,
                stub=student_source(answer.source),
                check=answer.check,
                argument=answer.argument,
                hidden=hidden,
                uses=frozenset(used(answer.source) | used(answer.argument) | used(hidden)),
            )
        )
    digest = hashlib.sha256(json.dumps([topic, code, _judges()]).encode()).hexdigest()
    return Skeleton(topic, code, tuple(tasks), digest)


@functools.cache
def _judges() -> str:
    """A hash of what judges: PyTorch's version, `shared`, and the grader."""
    digest = hashlib.sha256(metadata.version("torch").encode())
    for path in sorted([*ROOT.glob("shared/**/*.py"), *ROOT.glob("course/*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()
