"""Rules on exercises: their cells, headings, hints and metadata. tests/check_protocol.py holds heading and check."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator

from course import exercise_form
from course.edition import EditionError, student_edition
from course.rules import Complaint, Notebook, rule


@rule("exercise-cells")
def exercise_cells(notebook: Notebook) -> Iterator[Complaint]:
    ids = [cell.id for cell in notebook.cells]
    for slug, cells in notebook.exercises.items():
        wanted = [f"ex-{slug}-task", f"ex-{slug}", f"ex-{slug}-check"]
        first = ids.index(next(iter(cells.values())).id)
        if ids[first : first + 3] != wanted:
            yield ids[first], f"an exercise is three cells in a row, {', '.join(wanted)}: task, answer and check"


@rule("exercise-headings")
def exercise_headings(notebook: Notebook) -> Iterator[Complaint]:
    for place, cells in enumerate(notebook.exercises.values(), start=1):
        if not {"task", "check"} <= cells.keys():
            continue  # the rule "exercise-cells" says so
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
        points = cells["check"].metadata.get("nbgrader", {}).get("points", int(match[4]))
        if points != int(match[4]):
            yield task.id, f"promises {match[4]} points, but the metadata of its check cell gives {points}"


@rule("exercise-hints")
def exercise_hints(notebook: Notebook) -> Iterator[Complaint]:
    for task in [cells["task"] for cells in notebook.exercises.values() if "task" in cells]:
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
        found = cell.metadata.get("nbgrader")
        wanted = {
            "answer": exercise_form.answer_metadata(cell.id),
            "check": exercise_form.check_metadata(cell.id, (found or {}).get("points", 10)),
        }.get(parts.get(cell.id))
        if found != wanted:
            form = f"needs the nbgrader metadata {json.dumps(wanted)}" if wanted else "is no answer or check"
            yield cell.id, f"{form}; it has the nbgrader metadata {json.dumps(found)}"


@rule("student-edition")
def has_student_edition(notebook: Notebook) -> Iterator[Complaint]:
    """Solutions are between markers, in functions, in answer cells; the stub says what to take and what to return."""
    try:
        edition = student_edition(notebook.document)
    except EditionError as error:
        yield from (("-", problem) for problem in str(error).splitlines())
        return
    answers = {cells["answer"].id for cells in notebook.exercises.values() if "answer" in cells}
    for stub in [cell for cell in edition.cells if cell.id in answers]:
        definitions = [n for n in ast.walk(ast.parse(stub.source)) if isinstance(n, ast.FunctionDef | ast.ClassDef)]
        if not any(map(ast.get_docstring, definitions)):
            yield stub.id, "has no docstring outside the markers; the stub must say what to take and return"


@rule("exercise-tests", drafts=False)
def exercise_tests(notebook: Notebook) -> Iterator[Complaint]:
    for path in (notebook.topic.check_file, notebook.topic.test_file):
        if not path.is_file():
            file = f"{path.parent.name}/{path.name}"
            yield "-", f"needs {file}, which is not there (CONTRIBUTING.md says how to write it)"
