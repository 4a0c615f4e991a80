"""Every notebook and template: it runs on a pretended accelerator, and its student edition unsolved, without solutions.

`--notebook FILE` takes only that one. conftest.py lets each of these tests go to another worker.
"""

import copy
from pathlib import Path

import pytest

from course import syllabus
from course.environment import ROOT
from course.execution import execute_blocking, read_notebook
from course.workbook import BEGIN, END, solutions, student_edition

# nbval runs all as a reader does; here nobody reads times, and 15-05's C++ program isn't built once more
IN_SHORT = {"COURSE_DATA": "sample", "COURSE_TIMING": "rough", "COURSE_AOTI": "0"}


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
    everything = [f"{cell.source}\n{text_of(cell)}" for cell in edition.cells]
    assert not any(marker in text for text in everything for marker in (BEGIN, END))
    normalised = "\n\n".join(map(code, everything))
    for cell_id, blocks in solutions(notebook).items():
        for block in map(code, blocks):
            assert block, f"{path.name}, cell '{cell_id}': an empty solution"
            # a line or two, like `return x`, may well be elsewhere in a lesson
            if block.count("\n") >= 2:
                assert block not in normalised, f"{path.name}: the solution of cell '{cell_id}' is in the edition"
    for cell in edition.cells:
        nbgrader = cell.metadata.get("nbgrader", {})
        if nbgrader.get("solution") or nbgrader.get("grade"):
            assert cell.outputs == [], f"{path.name}, cell '{cell.id}': outputs kept"


@pytest.mark.notebook("edition")
def test_edition_runs_unsolved_and_earns_nothing_though_each_check_is_run_twice(path):
    """The second run of a check cell such as `f = check.f(f)` gets the stand-in that the first one handed out."""
    edition = student_edition(read_notebook(path)[0])
    edition.cells = [one for cell in edition.cells for one in (doubled(cell) if is_check(cell) else [cell])]
    progress = execute_blocking(edition, path.parent, timeout=200, env=IN_SHORT)
    assert progress.failure is None, f"{path.name}, cell '{progress.failure.cell_id}': {progress.failure.reason}"
    for cell in filter(is_check, edition.cells):
        said = text_of(cell)
        assert said.lower().count("not attempted yet") == 1, f"{path.name}, cell '{cell.id}' said: {said!r}"
        (record,) = [found for output in cell.outputs if (found := output.get("metadata", {}).get("course"))]
        assert (record["status"], record["points"]) == ("not attempted", 0)


def is_check(cell):
    return cell.metadata.get("nbgrader", {}).get("grade", False)


def doubled(cell):
    again = copy.deepcopy(cell)
    again.id = f"{cell.id}-again"
    return [cell, again]


@pytest.mark.notebook("rehearsal")
def test_no_tensor_is_on_the_wrong_device(path):
    progress = execute_blocking(read_notebook(path)[0], path.parent, timeout=300, rehearse=True, env=IN_SHORT)
    assert progress.failure is None, f"{path.name}, cell '{progress.failure.cell_id}': {progress.failure.reason}"
