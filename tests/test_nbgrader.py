"""nbgrader on the exercises of 15-07 and what they need: untouched it earns nothing, half-solved its part."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from course import exercise_form
from course.environment import ROOT

pytest.importorskip("nbgrader")

(SOURCE,) = ROOT.glob("module*/15-07_*.ipynb")
# the lesson's own cells are left out: nbgrader would run them once for each student, and nbval does so already
NEEDED = re.compile(r"course|setup|device|schedule|ex-.*")
HIDDEN = "assert 4711"
CONFIG = """\
c = get_config()
c.CourseDirectory.root = "."
c.ExecutePreprocessor.timeout = 300
"""


def nbgrader(folder: Path, *arguments: str) -> None:
    settings = {"COURSE_DATA": "sample", "COURSE_TIMING": "rough", "PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"}
    command = [sys.executable, "-m", "nbgrader", *arguments]
    run = subprocess.run(
        command, cwd=folder, env={**os.environ, **settings}, timeout=600, check=False, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]


def submit(folder: Path, student: str, answers: dict[str, str]) -> None:
    """Hand in the released notebook with the sources of these cells."""
    notebook = json.loads((folder / "release" / "ps" / SOURCE.name).read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        cell["source"] = answers.get(cell["id"], "".join(cell["source"]))
    path = folder / "submitted" / student / "ps" / SOURCE.name
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(notebook), encoding="utf-8")


@pytest.mark.slow
@pytest.mark.processes
def test_nothing_earns_nothing_and_a_part_its_part(tmp_path, monkeypatch):
    from nbgrader.api import Gradebook

    programs = str(Path(sys.executable).parent)  # nbgrader calls one of them by its bare name
    monkeypatch.setenv("PATH", programs + os.pathsep + os.environ["PATH"])

    source = tmp_path / "source" / "ps" / SOURCE.name
    source.parent.mkdir(parents=True)
    lesson = json.loads(SOURCE.read_text(encoding="utf-8"))
    lesson["cells"] = [c for c in lesson["cells"] if c["cell_type"] == "markdown" or NEEDED.fullmatch(c["id"])]
    (drawn,) = [cell for cell in lesson["cells"] if cell["id"] == "ex-plan-check"]
    drawn["source"] = "check.plan(plan);"  # without the picture, which needs most of the lesson
    (check,) = [cell for cell in lesson["cells"] if cell["id"] == "ex-roofline-check"]
    check["source"] = "".join(check["source"]) + f"\n### BEGIN HIDDEN TESTS\n{HIDDEN}\n### END HIDDEN TESTS"
    source.write_text(json.dumps(lesson), encoding="utf-8")
    (tmp_path / "nbgrader_config.py").write_text(CONFIG)
    nbgrader(tmp_path, "generate_assignment", "ps")
    released = (tmp_path / "release" / "ps" / SOURCE.name).read_text(encoding="utf-8")
    assert "4711" not in released
    assert exercise_form.BEGIN not in released
    cells = {cell["id"]: "".join(cell["source"]) for cell in json.loads(SOURCE.read_text(encoding="utf-8"))["cells"]}
    solved = {name: text for name, text in cells.items() if exercise_form.BEGIN in text}
    # two right answers, and one that reads the units of a message wrongly
    partly = solved["ex-post-mortem"].replace('2**10, "MiB": 2**20, "GiB": 2**30', '1e3, "MiB": 1e6, "GiB": 1e9')
    assert partly != solved["ex-post-mortem"]
    submit(tmp_path, "untouched", {})
    right = ("ex-fixed", "ex-roofline")
    submit(tmp_path, "half", {**{name: solved[name] for name in right}, "ex-post-mortem": partly})
    nbgrader(tmp_path, "autograde", "ps")
    with Gradebook(f"sqlite:///{tmp_path / 'gradebook.db'}") as book:
        nothing, half = (
            {grade.cell.name: grade.auto_score for grade in book.find_submission("ps", student).notebooks[0].grades}
            for student in ("untouched", "half")
        )
    assert set(nothing.values()) == {0}
    assert (half["ex-fixed-check"], half["ex-roofline-check"]) == (15, 15)
    assert (half["ex-wait-free-check"], half["ex-plan-check"]) == (0, 0)
    assert 0 < half["ex-post-mortem-check"] < 20
