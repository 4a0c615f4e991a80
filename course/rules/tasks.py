"""Rules on exercises: their cells, and that heading, check and tests belong together."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from course import exercise_form
from course.rules.form import CLOSING, OPENING
from course.rules.notebook import Cell, Notebook
from course.rules.table import Complaint, rule

POINTS = 100
TESTED_IN = ("CHECKS", "RIGHT", "WRONG")  # tables of a topic's CheckProtocol


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
    wanted = notebook.topic.check_file.stem
    if "setup" in notebook.by_id and notebook.exercises and check_module(notebook) != wanted:
        yield "setup", f"must have the line: from shared.checks import {wanted} as check"


@rule("exercise-count", not_for=("draft",))
def exercise_count(notebook: Notebook) -> Iterator[Complaint]:
    count = len(notebook.exercises)
    if not 4 <= count <= 6:
        yield "-", f"has {count} exercises; CONTRIBUTING.md asks for 4 to 6"


# --- heading, check and tests -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Declared:
    """What @exercise says of a check; None for what is no constant."""

    number: str | None
    title: str | None
    points: int | None


def declared_in(source: str) -> dict[str, Declared]:
    """Name of the function → what its @exercise says, read without importing. Raises SyntaxError."""
    found = {}
    for node in ast.parse(source).body:
        for decorator in node.decorator_list if isinstance(node, ast.FunctionDef) else []:
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func).split(".")[-1] == "exercise":
                given = dict(zip(("number", "title"), decorator.args, strict=False))
                given |= {keyword.arg: keyword.value for keyword in decorator.keywords if keyword.arg}
                plain = {key: value.value for key, value in given.items() if isinstance(value, ast.Constant)}
                found[node.name] = Declared(plain.get("number"), plain.get("title"), plain.get("points"))
    return found


def check_module(notebook: Notebook) -> str | None:
    """What the setup cell imports from shared.checks as check: "topic_15_04", "template" in a fresh draft."""
    setup = notebook.by_id.get("setup")
    froms = [n for n in (setup.nodes if setup else []) if isinstance(n, ast.ImportFrom) and n.module == "shared.checks"]
    return next((alias.name for node in froms for alias in node.names if alias.asname == "check"), None)


@rule("exercise-checks")
def exercise_checks(notebook: Notebook) -> Iterator[Complaint]:
    module = check_module(notebook)
    if module is None:
        return  # the rule "exercise-import" says so
    path = notebook.root / "shared" / "checks" / f"{module}.py"
    try:
        declared = declared_in(path.read_text(encoding="utf-8"))
    except OSError:
        yield "setup", f"imports {module} as check, but there is no shared/checks/{path.name}"
        return
    except SyntaxError as error:
        yield "setup", f"imports shared/checks/{path.name}, which is not valid Python: line {error.lineno}: {error.msg}"
        return
    called = set()
    for cells in notebook.exercises.values():
        check, task = cells.get("check"), cells.get("task")
        if check is None or check.tree is None:
            continue
        names = [name.removeprefix("check.") for name in check.calls if name.startswith("check.")]
        called.update(names)
        if not names:
            yield check.id, "does not call check.something(…), so it checks nothing"
        for name in names:
            if name not in declared:
                there = f"; it has {', '.join(declared)}" if declared else ""
                yield check.id, f"calls check.{name}, which is no @exercise of shared/checks/{path.name}{there}"
            elif task is not None:
                yield from _differences(task, declared[name], f"{path.name}, {name}", numbered=module != "template")
    for name in declared.keys() - called:
        yield "-", f"lacks a check cell that calls check.{name}, which shared/checks/{path.name} has"


def _differences(task: Cell, said: Declared, where: str, *, numbered: bool) -> Iterator[Complaint]:
    match = exercise_form.HEADING.fullmatch(task.headings[0][1] if task.headings else "")
    if match is None:
        return  # the rule "exercise-headings" says so
    pairs = [("title", match[3], said.title), ("points", int(match[4]), said.points)]
    if numbered:
        pairs.insert(0, ("number", f"{match[1]}.{match[2]}", said.number))
    for what, here, there in pairs:
        if here != there:
            yield task.id, f"has the {what} {here!r} in its heading, but @exercise in {where} says {there!r}"


@rule("exercise-points", not_for=("draft",))
def exercise_points(notebook: Notebook) -> Iterator[Complaint]:
    headings = [cells["task"].headings for cells in notebook.exercises.values() if "task" in cells]
    matches = [exercise_form.HEADING.fullmatch(found[0][1]) for found in headings if found]
    points = sum(int(match[4]) for match in matches if match)
    if points != POINTS and all(matches):
        yield "-", f"gives {points} points for all exercises together; a notebook gives {POINTS}"


@rule("exercise-tests", not_for=("draft",))
def exercise_tests(notebook: Notebook) -> Iterator[Complaint]:
    path = notebook.topic.test_file
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except OSError:
        yield (
            "-",
            f"has checks that nobody tests: write tests/{path.name} with a CheckProtocol (CONTRIBUTING.md says how)",
        )
        return
    except SyntaxError as error:
        yield "-", f"has tests that are not valid Python: tests/{path.name}, line {error.lineno}: {error.msg}"
        return
    tables = _tables(tree)
    answer_of = {value: key for key, value in tables["CHECKS"].items()}
    for cells in notebook.exercises.values():
        for name in cells["check"].calls if "check" in cells else []:
            if not name.startswith("check."):
                continue
            answer = answer_of.get(name)
            lacking = [table for table in TESTED_IN if answer is None or answer not in tables[table]]
            if lacking:
                yield (
                    cells["check"].id,
                    f"calls {name}, which is not in {', '.join(lacking)} of tests/{path.name}",
                )


def _tables(tree: ast.Module) -> dict[str, dict[str, str]]:
    """The dictionaries that are assigned to the names in TESTED_IN: key → source of the value."""
    tables: dict[str, dict[str, str]] = {name: {} for name in TESTED_IN}
    for node in ast.walk(tree):
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        for target in targets:
            if isinstance(target, ast.Name) and target.id in tables and isinstance(node.value, ast.Dict):
                pairs = zip(node.value.keys, node.value.values, strict=True)
                tables[target.id] |= {k.value: ast.unparse(v) for k, v in pairs if isinstance(k, ast.Constant)}
    return tables


@rule("exercise-placeholders", not_for=("draft",))
def exercise_placeholders(notebook: Notebook) -> Iterator[Complaint]:
    for path in (notebook.topic.check_file, notebook.topic.test_file):
        if path.is_file() and (found := re.search(r"^.*\bTODO\b.*$", path.read_text(encoding="utf-8"), re.MULTILINE)):
            yield "-", f"still has {found[0].strip()!r} in {path.relative_to(notebook.root).as_posix()}; fill it in"
