"""`python -m course exercise 15-02 half "Half of it"`: add an exercise to a notebook.

Writes its task, answer and check cells (ex-half-task, ex-half, ex-half-check), the stub of its check in
shared/checks/topic_15_02.py and the stubs of the check's tests in tests/test_checks_15_02.py. What is left to write
says TODO. The cells go to the end of the last section, or behind the cell named by --after; exercises below are
numbered anew. The template's example exercise is taken away, if it is there as the template has it. Nothing else is
changed.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import keyword
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell

from course import exercise_form
from course.environment import ROOT
from course.execution import NotebookError, read_notebook
from course.files import write_whole
from course.rules import lint_document
from course.selection import SelectionError, select
from course.syllabus import Syllabus, SyllabusError, Topic, load

# the last cell before which an exercise may stand, by template
END_OF_SECTIONS = {"TEMPLATE_ALGORITHM.ipynb": "self-assessment", "TEMPLATE_CAPSTONE.ipynb": "integration-test"}
TEMPLATE_IMPORT = "from shared.checks import template as check"
EXAMPLE = ("ex-mae-task", "ex-mae", "ex-mae-check")
# rules on what the draft lacks by its nature, and on files that are not written when the notebook is looked at
NOT_YET = ("exercise-checks", "exercise-tests", "exercise-placeholders", "placeholders", "executed")

TASK = """\
### {heading}

TODO: what to write, what it takes and what it returns. Each sentence that promises or demands something is held by an
item of the check.

<details>
<summary>Hint 1: TODO, in a few words</summary>

TODO: what helps, and not more.

</details>"""

ANSWER = '''\
def {name}(x: torch.Tensor) -> torch.Tensor:
    """TODO: what it does; shapes, units and errors where they aren't obvious."""
    ### BEGIN SOLUTION
    raise NotImplementedError  # TODO: the solution
    ### END SOLUTION'''

CHECK_FILE = '''\
"""The checks of {number}."""

import torch

from shared.checks.feedback import Trial, exercise
'''

CHECK = '''

@exercise("{number}.{place}", {title}, points={points})
def {name}(trial: Trial, answer) -> None:
    """TODO: what `answer(x)` takes and returns."""
    x = torch.randn(5)  # TODO: cases that are irregular, with an oracle of brute force
    trial.equal("TODO: what it holds", answer(x), x, hint="TODO: where to look, not what to write", see=1)
'''

TEST_FILE = '''\
"""The checks of {number} accept right answers, however written, and reject what a student might really write."""

from typing import ClassVar

import pytest
import torch
from check_protocol import CheckProtocol

from course.answers import answers
from course.exercise_form import student_source
from course.syllabus import load
from shared.checks import {module} as check

# `python -m course test tests/{file} --runxfail` shows what is to be filled in
pytestmark = pytest.mark.xfail(load().topics["{number}"].is_draft, reason="a draft: fill in the TODOs", strict=False)
ANSWERS, STUBS = answers("{number}"), answers("{number}", edit=student_source)


class TestChecks(CheckProtocol):
    TOPIC = "{number}"
    ANSWERS, STUBS = ANSWERS, STUBS
    CHECKS: ClassVar = {{}}
    RIGHT: ClassVar = {{}}
    WRONG: ClassVar = {{}}
    PROMISES: ClassVar = {{}}
    CONTEXT: ClassVar = {{}}
'''

TEST = '''\
# ---------------------------------------------------------------- {name}


def {name}_in_another_style(x: torch.Tensor) -> torch.Tensor:
    """TODO: a right answer in another style; write two."""
    raise NotImplementedError


def {name}_gone_wrong(x: torch.Tensor) -> torch.Tensor:
    """TODO: what a student might really write; three or more."""
    return x + 1


'''

ENTRIES = {
    "CHECKS": "check.{name}",
    "RIGHT": "[{name}_in_another_style]",
    "WRONG": '{{"TODO: what is wrong": ({name}_gone_wrong, "TODO: words of the message")}}',
    "PROMISES": '[("TODO: words of the task", "TODO: the item that holds them", "TODO: what is wrong")]',
    "CONTEXT": '["TODO: sentences of the task that ask for nothing"]',
}


class ExerciseError(ValueError):
    """The exercise cannot be added; the message says why and what to do. Nothing was written."""


@dataclass(frozen=True)
class Wish:
    """What the command line asks for."""

    slug: str
    title: str
    points: int = 20
    minutes: int = 20
    after: str | None = None

    @property
    def name(self) -> str:
        """What the answer and its check are called."""
        return self.slug.replace("-", "_")

    @property
    def cells(self) -> tuple[str, str, str]:
        """Ids of the task, answer and check cells."""
        return f"ex-{self.slug}-task", f"ex-{self.slug}", f"ex-{self.slug}-check"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m course exercise`."""
    parser.add_argument("topic", help="the topic, e.g. 15-02")
    parser.add_argument("slug", help="a word or two for ids and names, e.g. half or half-of-it")
    parser.add_argument("title", help="title of the exercise")
    parser.add_argument("--points", type=int, default=20, help="of the notebook's 100 (default 20)")
    parser.add_argument("--minutes", type=int, default=20, help="10 to 60 (default 20)")
    parser.add_argument("--after", metavar="CELL", help="id of the cell to follow (default: end of the last section)")


def main(args: argparse.Namespace) -> int:
    """Run the command; 0 when the exercise was added, 1 with a message when not."""
    try:
        syllabus = load()
        named = select([args.topic], syllabus)
        if len(named) != 1 or named[0].topic is None:
            raise ExerciseError(f"{args.topic} is no topic of syllabus.toml")
        topic = syllabus.topics[named[0].topic]
        wish = Wish(args.slug, args.title, args.points, args.minutes, args.after)
        written = add(wish, topic, syllabus)
    except (ExerciseError, SelectionError, SyllabusError) as error:
        print(f"exercise: {error}", file=sys.stderr)
        return 1
    for path in written:
        print(f"wrote {path.relative_to(ROOT).as_posix()}")
    print("Fill in what says TODO; until then, lint says what is missing. Then:")
    print(f"  python -m course run {topic.number} --save")
    print(f"  python -m course test {written[-1].relative_to(ROOT).as_posix()} --runxfail")
    return 0


def add(wish: Wish, topic: Topic, syllabus: Syllabus) -> list[Path]:
    """Add the exercise; returns the files that were written: notebook, checks, tests.

    They lie in the repository of the topic's path. Raises ExerciseError before anything is written.
    """
    _refuse_nonsense(wish)
    root = topic.path.parent.parent
    checks, tests = topic.check_file, topic.test_file
    module = checks.stem
    if not topic.path.is_file():
        raise ExerciseError(f"{topic.number} has no notebook yet: python -m course new {topic.number}")
    try:
        notebook, _ = read_notebook(topic.path)
    except NotebookError as error:
        raise ExerciseError(f"{topic.path}: {error}") from None

    changed = copy.deepcopy(notebook)
    numbers = _insert_cells(changed, wish, topic, module, root)
    _refuse_findings(notebook, changed, topic, syllabus)
    words = {
        "number": topic.number,
        "place": numbers.pop(0),
        "name": wish.name,
        "points": wish.points,
        "module": module,
    }
    words |= {"title": json.dumps(wish.title, ensure_ascii=False), "file": tests.name}
    texts = {
        topic.path: nbformat.writes(changed, version=nbformat.NO_CONVERT).rstrip("\n") + "\n",
        checks: _with_check(_read(checks) or CHECK_FILE.format(**words), checks, wish, words, numbers),
        tests: _with_tests(_read(tests) or TEST_FILE.format(**words), tests, wish, words),
    }
    _write_all(texts)
    return list(texts)


def _refuse_nonsense(wish: Wish) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", wish.slug) or re.search(r"-(task|check)$", wish.slug):
        raise ExerciseError(f"{wish.slug!r} is no slug; write small letters, digits and single hyphens: half-of-it")
    if keyword.iskeyword(wish.name) or wish.name in ("check", "torch", "trial", "answer", "exercise"):
        raise ExerciseError(f"{wish.name!r} has another meaning in the files; choose another slug")
    if not wish.title.strip() or not wish.title.isprintable():
        raise ExerciseError(f"{wish.title!r} cannot be a title: it needs a word, and no control characters")
    if not 1 <= wish.points <= 100:
        raise ExerciseError(f"--points must be from 1 to 100, not {wish.points}; a notebook has 100 together")
    if not 10 <= wish.minutes <= 60:
        raise ExerciseError(f"--minutes must be from 10 to 60, not {wish.minutes}")


# --- the notebook -----------------------------------------------------------------------------------------------------


def _insert_cells(notebook: NotebookNode, wish: Wish, topic: Topic, module: str, root: Path) -> dict[int, int]:
    """Put the three cells and the import of the checks in place, and number all exercises by their places.

    Returns old number → new number; the new exercise's old number is 0.
    """
    ids = [cell.id for cell in notebook.cells]
    taken = [id_ for id_ in wish.cells if id_ in ids]
    if taken:
        raise ExerciseError(f"the notebook has a cell {taken[0]!r} already; choose another slug")
    if wish.after is not None and wish.after not in ids:
        raise ExerciseError(f"--after {wish.after}: there is no such cell")
    _import_checks(notebook, module)
    last = END_OF_SECTIONS[topic.template]
    if wish.after is None and last not in ids:
        raise ExerciseError(f"the notebook has no cell {last!r} to stand before; name one to follow with --after")
    index = ids.index(last) if wish.after is None else ids.index(wish.after) + 1
    example = _example(notebook, root / "templates" / topic.template, topic.number)
    if example and (wish.after is None or wish.after in EXAMPLE):
        index = ids.index(example[-1]) + 1
    heading = exercise_form.heading(topic.number, 0, wish.title, wish.points, wish.minutes)
    task, answer, check = wish.cells
    notebook.cells[index:index] = [
        new_markdown_cell(TASK.format(heading=heading), id=task),
        new_code_cell(
            ANSWER.format(name=wish.name), id=answer, metadata={"nbgrader": exercise_form.answer_metadata(answer)}
        ),
        new_code_cell(
            f"check.{wish.name}({wish.name});",
            id=check,
            metadata={"nbgrader": exercise_form.check_metadata(check, wish.points)},
        ),
    ]
    notebook.cells = [cell for cell in notebook.cells if cell.id not in example]
    numbers: dict[int, int] = {}
    tasks = (cell for cell in notebook.cells if re.fullmatch(r"ex-.+-task", cell.id))
    for place, cell in enumerate(tasks, start=1):
        head = re.match(rf"### Exercise {topic.number}\.(\d+)", cell.source)
        if head:
            numbers[int(head[1])] = place
            cell.source = f"### Exercise {topic.number}.{place}{cell.source[head.end() :]}"
    return numbers


def _import_checks(notebook: NotebookNode, module: str) -> None:
    line = f"from shared.checks import {module} as check"
    setup = next((cell for cell in notebook.cells if cell.id == "setup"), None)
    if setup is None or (TEMPLATE_IMPORT not in setup.source and line not in setup.source):
        raise ExerciseError(f"the cell 'setup' does not import the checks; add the line: {line}")
    setup.source = setup.source.replace(TEMPLATE_IMPORT, line)


def _example(notebook: NotebookNode, template: Path, number: str) -> tuple[str, ...]:
    """Ids of the template's example exercise, if the notebook has it as the template does."""
    try:
        theirs = {cell.id: cell.source.replace("{{number}}", number) for cell in read_notebook(template)[0].cells}
    except NotebookError as error:
        raise ExerciseError(f"{template}: {error}") from None
    ours = {cell.id: cell.source for cell in notebook.cells}
    return EXAMPLE if all(id_ in ours and ours[id_] == theirs.get(id_) for id_ in EXAMPLE) else ()


def _refuse_findings(before: NotebookNode, after: NotebookNode, topic: Topic, syllabus: Syllabus) -> None:
    """Raise if lint finds something that it did not find before, other than what is to be filled in."""

    def found(notebook: NotebookNode) -> set:
        return {
            (finding.cell, finding.rule, finding.message)
            for finding in lint_document(notebook, topic.path, 0, topic, syllabus.module)
            if finding.cell != "-" and finding.rule not in NOT_YET
        }

    new = sorted(found(after) - found(before))
    if new:
        raise ExerciseError("the notebook would not pass lint:\n" + "\n".join(f"  {c}: {r}: {m}" for c, r, m in new))


# --- checks and tests -------------------------------------------------------------------------------------------------


def _read(path: Path) -> str:
    """The file's text; empty if it isn't there."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise ExerciseError(f"{path} cannot be read: {error}") from None


def _names(text: str, path: Path) -> set[str]:
    """Names of the functions and classes at the top of a Python file."""
    try:
        body = ast.parse(text).body
    except SyntaxError as error:
        raise ExerciseError(f"{path} is not valid Python: line {error.lineno}: {error.msg}") from None
    return {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def _with_check(text: str, path: Path, wish: Wish, words: dict, numbers: dict[int, int]) -> str:
    """The file of checks with the new stub at its end, and its exercises under their new numbers."""
    if wish.name in _names(text, path):
        raise ExerciseError(f"{path} has a {wish.name} already; choose another slug")

    def renumbered(match: re.Match) -> str:
        return f"{match[1]}{numbers.get(int(match[2]), match[2])}"

    text = re.sub(rf'(@exercise\(\s*(?:number=)?"{words["number"]}\.)(\d+)(?=")', renumbered, text)
    return text.rstrip("\n") + "\n" + CHECK.format(**words)


def _with_tests(text: str, path: Path, wish: Wish, words: dict) -> str:
    """The file of tests with stubs of answers before its CheckProtocol, and an entry in each of its tables."""
    if f"{wish.name}_gone_wrong" in _names(text, path):
        raise ExerciseError(f"{path} has a {wish.name}_gone_wrong already; choose another slug")
    for table, entry in ENTRIES.items():
        text = _with_entry(text, path, table, f'"{wish.name}": {entry.format(**words)}')
    protocol = re.search(r"^class \w+\(CheckProtocol\)", text, re.MULTILINE)
    if protocol is None:
        raise ExerciseError(f"{path} has no class with CheckProtocol as its base, which the tests belong to")
    return text[: protocol.start()] + TEST.format(**words) + text[protocol.start() :]


def _with_entry(text: str, path: Path, table: str, entry: str) -> str:
    """The text with the entry as the last one of the dictionary that is assigned to `table`."""
    found = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name) and target.id == table
    ]
    if len(found) != 1:
        raise ExerciseError(f"{path} must have one dictionary {table} = {{…}}, which gets: {entry}")
    value, data = found[0].value, text.encode("utf-8")  # ast counts bytes
    end = sum(len(line) + 1 for line in data.split(b"\n")[: value.end_lineno - 1]) + value.end_col_offset
    before, rest = data[: end - 1].decode("utf-8").rstrip(), data[end:].decode("utf-8")
    comma = "" if before.endswith((",", "{")) else ","
    indent = " " * found[0].col_offset
    new = f"{before}{comma}\n{indent}    {entry},\n{indent}}}{rest}"
    _names(new, path)
    return new


def _write_all(texts: dict[Path, str]) -> None:
    """Write all files or none."""
    old = {path: path.read_bytes() if path.exists() else None for path in texts}
    done: list[Path] = []
    for path, text in texts.items():
        try:
            write_whole(path, text)
            done.append(path)
        except OSError as error:
            for written in done:
                if old[written] is None:
                    written.unlink(missing_ok=True)
                else:
                    write_whole(written, old[written])
            raise ExerciseError(f"{path} cannot be written: {error.strerror or error}") from None
