"""Every notebook and template: its student edition has no solution, and runs unsolved, on a pretended accelerator too.

`--notebook FILE` takes only that one.
"""

import copy
from pathlib import Path

import pytest

from course import syllabus
from course.edition import solutions, student_edition
from course.environment import ROOT
from course.execution import execute_blocking, read_notebook
from course.exercise_form import BEGIN, END

# nbval runs all as a reader does; 15-05's C++ program isn't built once more
IN_SHORT = {"COURSE_DATA": "sample", "COURSE_AOTI": "0"}


def pytest_generate_tests(metafunc):
    chosen = [Path(name).resolve() for name in metafunc.config.getoption("--notebook")]
    if not chosen:
        chosen = [topic.path for topic in syllabus.load().topics.values() if topic.path.is_file()]
        chosen += sorted((ROOT / "templates").glob("*.ipynb"))
    metafunc.parametrize("path", chosen, ids=[path.stem for path in chosen])


def code(source: str) -> str:
    """Source without comments, blank lines and indentation, so that a moved or re-indented copy is recognised."""
    lines = [line.strip() for line in source.splitlines()]
    return "\n".join(line for line in lines if line and not line.startswith("#"))


def text_of(cell) -> str:
    """What a cell printed or showed as text."""
    shown = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.get("outputs", [])]
    return "".join("".join(text) for text in shown)


def test_no_solution_is_left(path):
    notebook, _ = read_notebook(path)
    edition = student_edition(notebook)
    everything = "\n\n".join(f"{cell.source}\n{text_of(cell)}" for cell in edition.cells)
    assert BEGIN not in everything
    assert END not in everything
    everything = code(everything)
    for cell_id, blocks in solutions(notebook).items():
        for block in map(code, blocks):
            assert block, f"{path.name}, cell '{cell_id}': an empty solution"
            # a line or two, like `return x`, may well be elsewhere in a lesson
            left = block.count("\n") >= 2 and block in everything
            assert not left, f"{path.name}: the solution of cell '{cell_id}' is in the edition"
    assert not any(cell.get("outputs") for cell in edition.cells), "many answer the question above them"


@pytest.mark.notebook("edition")
def test_edition_runs_unsolved_where_the_device_is_no_cpu(path):
    """On a pretended accelerator, where a tensor on the wrong device fails its cell.

    Each check is run three times: on our answer, which gets all points; on the stub, which gets none; and once more, as
    a cell such as `f = check.f(f)` is by a reader: that gets the stand-in which the run before handed out.
    """
    notebook, _ = read_notebook(path)
    answers = {cell.id: cell for cell in notebook.cells}
    edition = student_edition(notebook)
    stubs = {cell.id: cell for cell in edition.cells}
    cells = []
    for cell in edition.cells:
        if is_check(cell):
            answer = cell.id.removesuffix("-check")
            cells += [copied(answers[answer], "solved"), copied(cell, "solved"), copied(stubs[answer], "again")]
        cells += [cell, copied(cell, "again")] if is_check(cell) else [cell]
    edition.cells = cells
    progress = execute_blocking(edition, path.parent, timeout=300, rehearse=True, env=IN_SHORT)
    assert progress.failure is None, f"{path.name}, cell '{progress.cell.id}': {progress.failure}"
    for cell in filter(is_check, edition.cells):
        said = text_of(cell)
        (record,) = [found for output in cell.outputs if (found := output.get("metadata", {}).get("course"))]
        if cell.id.endswith("-solved"):
            assert record["points"] == record["of"] > 0, f"{path.name}, cell '{cell.id}' said: {said!r}"
        else:
            assert said.lower().count("not attempted yet") == 1, f"{path.name}, cell '{cell.id}' said: {said!r}"
            assert (record["status"], record["points"]) == ("not attempted", 0)


def is_check(cell):
    return cell.metadata.get("nbgrader", {}).get("grade", False)


def copied(cell, suffix):
    again = copy.deepcopy(cell)
    again.id = f"{cell.id}-{suffix}"
    return again
