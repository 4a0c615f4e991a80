"""Rules on exercises: their cells, headings, hints and metadata. tests/check_protocol.py holds heading and check."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator

from course import exercise_form
from course.rules.form import CLOSING, OPENING
from course.rules.notebook import Cell, Notebook
from course.rules.table import Complaint, rule


@rule("exercise-cells")
def exercise_cells(notebook: Notebook) -> Iterator[Complaint]:
    for slug, cells in notebook.exercises.items():
        wanted = {"task": f"ex-{slug}-task", "answer": f"ex-{slug}", "check": f"ex-{slug}-check"}
        lacking = [wanted[part] for part in wanted if part not in cells]
        if lacking:
            some = next(iter(cells.values()))
            yield some.id, f"has no partner {', '.join(lacking)}; an exercise is a task, an answer and a check cell"
            continue
        for part, kind in (("task", "markdown"), ("answer", "code"), ("check", "code")):
            if cells[part].kind != kind:
                yield cells[part].id, f"is a {cells[part].kind} cell, but must be a {kind} cell"
        start = cells["task"].index
        if [cells["answer"].index, cells["check"].index] != [start + 1, start + 2]:
            yield wanted["task"], f"must be followed directly by {wanted['answer']} and {wanted['check']}"
        if cells["task"].section in (*OPENING.values(), *CLOSING.values()):
            yield wanted["task"], f"stands under ## {cells['task'].section}; put it in the section that it practises"
    for cell in notebook.markdown:
        for _, text in cell.headings:
            if text.startswith("Exercise ") and not re.fullmatch(r"ex-.+-task", cell.id):
                yield cell.id, f"has the heading {text!r}; an exercise's cell has an id like ex-swish-task"


@rule("exercise-headings")
def exercise_headings(notebook: Notebook) -> Iterator[Complaint]:
    number = notebook.topic.number
    for place, cells in enumerate(notebook.exercises.values(), start=1):
        task = cells.get("task")
        if task is None:
            continue
        form = f"### Exercise {number}.{place} — Title (10 points, 20 minutes)"
        level, text = task.headings[0] if task.headings else (0, "")
        match = exercise_form.HEADING.fullmatch(text)
        if level != 3 or match is None or not task.source.startswith("### "):
            yield task.id, f"must start with a heading of the form '{form}'"
            continue
        if (match[1], int(match[2])) != (number, place):
            yield task.id, f"is numbered {match[1]}.{match[2]}, but is exercise {number}.{place}"
        if not 10 <= int(match[5]) <= 60:
            yield task.id, f"is to take {match[5]} minutes; an exercise takes 10 to 60"
        check = cells.get("check")
        points = check.metadata.get("nbgrader", {}).get("points") if check else None
        if points is not None and points != int(match[4]):
            yield task.id, f"promises {match[4]} points, but the metadata of {check.id} gives {points}"


@rule("exercise-hints")
def exercise_hints(notebook: Notebook) -> Iterator[Complaint]:
    for cells in notebook.exercises.values():
        task = cells.get("task")
        if task is None:
            continue
        summaries = re.findall(r"<summary>\s*(.*?)\s*</summary>", task.text.text(tags=True), re.DOTALL)
        if not summaries:
            yield task.id, "has no folded hint; add <details><summary>Hint 1: in a few words</summary> … </details>"
        elif re.search(r"^\W*hints?\b", task.text.text(folded=False), re.IGNORECASE | re.MULTILINE):
            yield task.id, "has a hint in the open; put it inside <details>"
        for place, summary in enumerate(summaries, start=1):
            if not re.match(rf"Hint {place}: \S", summary):
                yield task.id, f"calls a hint {summary!r}; write 'Hint {place}: …', since checks name hints by number"


@rule("exercise-metadata")
def exercise_metadata(notebook: Notebook) -> Iterator[Complaint]:
    parts = {cell.id: part for cells in notebook.exercises.values() for part, cell in cells.items()}
    for cell in notebook.cells:
        part = parts.get(cell.id, "")
        found = cell.metadata.get("nbgrader")
        if part == "answer":
            wanted = exercise_form.answer_metadata(cell.id)
        elif part == "check":
            points = found.get("points") if isinstance(found, dict) else None
            whole = isinstance(points, int) and not isinstance(points, bool) and points > 0
            wanted = exercise_form.check_metadata(cell.id, points if whole else 10)
        else:
            if found is not None:
                yield cell.id, "has nbgrader metadata, but is no answer or check cell; remove it"
            continue
        if json.dumps(found, sort_keys=True) != json.dumps(wanted, sort_keys=True):
            yield cell.id, f"needs the nbgrader metadata {json.dumps(wanted)}; it has {json.dumps(found)}"


@rule("exercise-markers")
def exercise_markers(notebook: Notebook) -> Iterator[Complaint]:
    answers = {cells["answer"].id for cells in notebook.exercises.values() if "answer" in cells}
    pair = f"{exercise_form.BEGIN} … {exercise_form.END}"
    for cell in notebook.code:
        marked, problem = False, ""
        try:
            marked = bool(exercise_form.solution_blocks(cell.source))
        except exercise_form.MarkerError as error:
            problem = str(error)
        if cell.id not in answers:
            if marked or problem:
                yield cell.id, "has solution markers, but is no answer cell; remove them"
        elif problem:
            yield cell.id, f"has no student's form: {problem}"
        elif not marked:
            yield cell.id, f"has no {pair}, so the student edition would hold the solution"
        else:
            yield from _student_form(cell)


def _student_form(cell: Cell) -> Iterator[Complaint]:
    """The stub that a student gets must be Python that fails only when it is called, and must say what to return."""
    try:
        tree = ast.parse(exercise_form.student_source(cell.source))
    except exercise_form.MarkerError as error:
        yield cell.id, f"has no student's form: {error}"
        return
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    if not any(ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)):
        yield cell.id, "has no docstring outside the markers; the stub must say what to take and what to return"


@rule("exercise-import", not_for=("draft",))
def exercise_import(notebook: Notebook) -> Iterator[Complaint]:
    setup, line = notebook.by_id.get("setup"), f"from shared.checks import {notebook.topic.check_file.stem} as check"
    if setup and notebook.exercises and line not in setup.source:
        yield "setup", f"must have the line: {line}"


@rule("exercise-count", not_for=("draft",))
def exercise_count(notebook: Notebook) -> Iterator[Complaint]:
    count = len(notebook.exercises)
    if not 4 <= count <= 6:
        yield "-", f"has {count} exercises; CONTRIBUTING.md asks for 4 to 6"


@rule("exercise-tests", not_for=("draft",))
def exercise_tests(notebook: Notebook) -> Iterator[Complaint]:
    for path in (notebook.topic.check_file, notebook.topic.test_file):
        name = path.relative_to(notebook.root).as_posix()
        if not path.is_file():
            yield "-", f"needs {name}, which is not there (CONTRIBUTING.md says how to write it)"
        elif found := re.search(r"^.*\bTODO\b.*$", path.read_text(encoding="utf-8"), re.MULTILINE):
            yield "-", f"still has {found[0].strip()!r} in {name}; fill it in"
