"""Rules on exercises: their cells, headings, hints and metadata. tests/check_protocol.py holds heading and check."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator

from course import exercise_form
from course.edition import EditionError, student_edition
from course.rules.notebook import Complaint, Notebook, rule


@rule("exercise-cells")
def exercise_cells(notebook: Notebook) -> Iterator[Complaint]:
    ids = [cell.id for cell in notebook.cells]
    for slug, cells in notebook.exercises.items():
        wanted = [f"ex-{slug}-task", f"ex-{slug}", f"ex-{slug}-check"]
        first = next(iter(cells.values())).index
        if ids[first : first + 3] != wanted:
            yield ids[first], f"an exercise is three cells in a row, {', '.join(wanted)}: task, answer and check"


@rule("exercise-headings")
def exercise_headings(notebook: Notebook) -> Iterator[Complaint]:
    for place, cells in enumerate(notebook.exercises.values(), start=1):
        if "task" not in cells:
            continue
        task, number = cells["task"], f"{notebook.topic.number}.{place}"
        match = re.match("### " + exercise_form.HEADING.pattern, task.source)
        if match is None:
            form = f"### Exercise {number} — Title (10 points, 20 minutes)"
            yield task.id, f"must start with a heading of the form '{form}'"
            continue
        if f"{match[1]}.{match[2]}" != number:
            yield task.id, f"is numbered {match[1]}.{match[2]}, but is exercise {number}"
        if not 10 <= int(match[5]) <= 60:
            yield task.id, f"is to take {match[5]} minutes; an exercise takes 10 to 60"
        points = cells["check"].metadata.get("nbgrader", {}).get("points") if "check" in cells else None
        if points not in (None, int(match[4])):
            yield task.id, f"promises {match[4]} points, but the metadata of its check cell gives {points}"


@rule("exercise-hints")
def exercise_hints(notebook: Notebook) -> Iterator[Complaint]:
    for cells in notebook.exercises.values():
        if "task" not in cells:
            continue
        task = cells["task"]
        summaries = re.findall(r"<summary>\s*(.*?)\s*</summary>", task.prose, re.DOTALL)
        if not summaries:
            yield task.id, "has no folded hint; add <details><summary>Hint 1: in a few words</summary> … </details>"
        for place, summary in enumerate(summaries, start=1):
            if not re.match(rf"Hint {place}: \S", summary):
                yield task.id, f"calls a hint {summary!r}; write 'Hint {place}: …', since checks name hints by number"


@rule("exercise-metadata")
def exercise_metadata(notebook: Notebook) -> Iterator[Complaint]:
    parts = {cell.id: part for cells in notebook.exercises.values() for part, cell in cells.items()}
    for cell in notebook.cells:
        part, found = parts.get(cell.id), cell.metadata.get("nbgrader")
        if part == "answer":
            wanted = exercise_form.answer_metadata(cell.id)
        elif part == "check":
            wanted = exercise_form.check_metadata(cell.id, (found or {}).get("points", 10))
        elif found is not None:
            yield cell.id, "has nbgrader metadata, but is no answer or check cell; remove it"
            continue
        else:
            continue
        if found != wanted:
            yield cell.id, f"needs the nbgrader metadata {json.dumps(wanted)}; it has {json.dumps(found)}"


@rule("student-edition")
def has_student_edition(notebook: Notebook) -> Iterator[Complaint]:
    """Solutions are between markers, in functions, in answer cells; the stub says what to take and what to return."""
    try:
        edition = student_edition(notebook.document)
    except EditionError as error:
        for problem in str(error).splitlines():
            yield "-", problem
        return
    for cells in notebook.exercises.values():
        if "answer" in cells:
            answer = cells["answer"]
            nodes = ast.walk(ast.parse(edition.cells[answer.index].source))
            kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
            if not any(ast.get_docstring(node) for node in nodes if isinstance(node, kinds)):
                yield answer.id, "has no docstring outside the markers; the stub must say what to take and return"


@rule("exercise-count", drafts=False)
def exercise_count(notebook: Notebook) -> Iterator[Complaint]:
    count = len(notebook.exercises)
    if not 4 <= count <= 6:
        yield "-", f"has {count} exercises; CONTRIBUTING.md asks for 4 to 6"


@rule("exercise-tests", drafts=False)
def exercise_tests(notebook: Notebook) -> Iterator[Complaint]:
    for path in (notebook.topic.check_file, notebook.topic.test_file):
        if not path.is_file():
            yield (
                "-",
                f"needs {path.parent.name}/{path.name}, which is not there (CONTRIBUTING.md says how to write it)",
            )
