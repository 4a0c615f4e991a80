"""Code taken out of a notebook: which cells run, and under which names and rules."""

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
        "other": "def other():\n    return Later",
    }
    cells = [{"id": id_, "cell_type": "code", "metadata": {}, "source": text} for id_, text in sources.items()]
    cells[2]["metadata"]["nbgrader"] = answer_metadata("ex-half")
    (tmp_path / "15-01_x.ipynb").write_text(json.dumps({"cells": cells}), encoding="utf-8")


def test_setup_and_answers_run_and_nothing_else():
    found = answers("15-01")
    assert found["half"](3.0) == 1.5
    assert "other" not in found
    assert found["half"].__annotations__["x"] is float, "this project's own __future__ imports don't reach it"


def test_answers_can_be_changed_first_and_given_names():
    with pytest.raises(NotImplementedError):
        answers("15-01", edit=student_source)["half"](3.0)
    assert answers("15-01", given={"from_lesson": 5})["from_lesson"] == 5


def test_other_processes_get_definitions_by_value():
    found = definitions("15-01", "other")
    assert found["other"]() is float
    assert "half" not in found
    program = "import pickle, sys; print(pickle.load(sys.stdin.buffer)())"
    data = cloudpickle.dumps(found["other"])
    said = subprocess.run([sys.executable, "-c", program], input=data, timeout=60, check=True, capture_output=True)
    assert said.stdout.split() == [b"<class", b"'float'>"]


def test_what_runs_belongs_to_a_module_of_its_own():
    one, two = definitions("15-01", "other"), answers("15-01", given={"__name__": "mine", "Early": int})
    module_of_one, module_of_two = (sys.modules[f.__module__] for f in (one["other"], two["half"]))
    assert vars(module_of_one) is one
    assert module_of_two.Early is int
    assert module_of_one is not module_of_two
    assert not [name for name in two if name.startswith("__")]


def test_a_cell_that_is_not_there_is_named():
    with pytest.raises(KeyError, match="no code cell nowhere"):
        definitions("15-01", "other", "nowhere")
