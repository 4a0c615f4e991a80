"""Code taken out of a notebook: which cells run, and under which names and rules."""

import json

import pytest

from course import answers as module
from course.answers import answers, definitions
from course.exercises import answer_metadata, student_source

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


def test_definitions_belong_to_main_so_that_other_processes_get_them_by_value():
    found = definitions("15-01", "other")
    assert found["other"]() is float
    assert found["other"].__module__ == "__main__"
    assert "half" not in found


def test_a_cell_that_is_not_there_is_named():
    with pytest.raises(KeyError, match="no code cell nowhere"):
        definitions("15-01", "other", "nowhere")
