"""Code taken out of a notebook: which cells run, and under which names and rules."""

import inspect
import json
import subprocess
import sys

import cloudpickle
import pytest

from course import lesson_code as module
from course.exercise_form import answer_metadata, student_source
from course.lesson_code import answers, definitions

SOLVED = "def half(x: Later) -> float:\n    ### BEGIN SOLUTION\n    return x / 2\n    ### END SOLUTION"


@pytest.fixture(autouse=True)
def notebook(tmp_path, monkeypatch):
    """A topic 15-01 with a setup cell, a lesson cell that would fail, an answer and a definition."""
    monkeypatch.setattr(module, "SYLLABUS_FILE", tmp_path / "syllabus.toml")
    sources = {
        "setup": "Later = float",
        "lesson": "1 / 0",
        "ex-half": SOLVED,
        "ex-half-check": "check.half(half)",
        "other": "def other():\n    return Later",
    }
    cells = [{"id": id_, "cell_type": "code", "metadata": {}, "source": text} for id_, text in sources.items()]
    cells[2]["metadata"]["nbgrader"] = answer_metadata("ex-half")
    (tmp_path / "15-01_x.ipynb").write_text(json.dumps({"cells": cells}), encoding="utf-8")


def test_setup_and_answers_run_and_nothing_else():
    found = answers("15-01", given={"from_lesson": 5})
    assert found["half"](3.0) == 1.5
    assert found["half"].__annotations__["x"] is float, "this project's own __future__ imports don't reach it"
    assert found.keys() == {"Later", "half", "from_lesson"}
    stub = answers("15-01", edit=student_source)["half"]
    with pytest.raises(NotImplementedError):
        stub(3.0)
    sources = [inspect.getsource(found["half"]), inspect.getsource(stub)]  # as torch.jit.script reads them
    assert ["x / 2" in source for source in sources] == [True, False]


def test_other_processes_get_definitions_by_value():
    found = definitions("15-01", "other")
    assert "half" not in found
    assert vars(sys.modules[found["other"].__module__]) is found
    program = "import pickle, sys; print(pickle.load(sys.stdin.buffer)())"
    data = cloudpickle.dumps(found["other"])
    said = subprocess.run([sys.executable, "-c", program], input=data, timeout=60, check=True, capture_output=True)
    assert said.stdout.split() == [b"<class", b"'float'>"]
    with pytest.raises(KeyError, match="no code cell nowhere"):
        definitions("15-01", "other", "nowhere")
