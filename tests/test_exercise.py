"""`python -m course exercise`: what it writes passes lint and is tested honestly; what was there stays."""

import argparse
import json
import os
import shutil
import subprocess
import sys

import pytest

from course import exercise, lint, new
from course.environment import ROOT
from course.exercise import ExerciseError, Wish, add
from course.exercise_form import answer_metadata, check_metadata
from course.syllabus import load

REAL = load()
NUMBER = "15-91"


@pytest.fixture
def draft(tmp_path):
    """A repository of its own with a fresh draft: its topic and its syllabus."""
    folder = tmp_path / REAL.module.folder
    folder.mkdir()
    shutil.copy(REAL.path.parent / "README.md", folder)
    shutil.copy(REAL.path, folder)
    shutil.copytree(ROOT / "templates", tmp_path / "templates", ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    (tmp_path / "shared" / "checks").mkdir(parents=True)
    (tmp_path / "tests").mkdir()
    for name in ("__init__.py", "feedback.py", "template.py"):
        shutil.copy(ROOT / "shared" / "checks" / name, tmp_path / "shared" / "checks")
    topic = new.create(
        new.Wish(NUMBER, "Sparse Tensors", "algorithm"), folder / REAL.path.name, tmp_path / "templates", run=False
    )
    return topic, load(folder / REAL.path.name)


def cells(topic):
    found = json.loads(topic.path.read_text(encoding="utf-8"))["cells"]
    return {cell["id"]: cell | {"source": "".join(cell["source"])} for cell in found}


def files_of(topic):
    root = topic.path.parent.parent
    return root / "shared" / "checks" / "topic_15_91.py", root / "tests" / "test_checks_15_91.py"


def everything(topic):
    return {path: path.read_bytes() for path in topic.path.parent.parent.rglob("*") if path.is_file()}


def change(path, old, new_text):
    text = path.read_text(encoding="utf-8")
    assert old in text, old
    path.write_text(text.replace(old, new_text), encoding="utf-8")


def rename_cells(topic, **ids):
    """Give cells of the notebook other ids: the template's example becomes the author's exercise."""
    for old, wanted in ids.items():
        change(topic.path, f'"{old.replace("_", "-")}"', f'"{wanted}"')


def test_the_first_exercise_takes_the_examples_place(draft):
    topic, syllabus = draft
    before = cells(topic)
    notebook, checks, tests = add(Wish("half-of-it", "Half of it", 30, 15), topic, syllabus)
    assert (notebook, checks, tests) == (topic.path, *files_of(topic))
    assert lint.lint_files([topic.path], syllabus) == []

    after = cells(topic)
    example = ["ex-mae-task", "ex-mae", "ex-mae-check"]
    made = ["ex-half-of-it-task", "ex-half-of-it", "ex-half-of-it-check"]
    assert list(after) == [made[example.index(id_)] if id_ in example else id_ for id_ in before]
    assert after["ex-half-of-it-task"]["source"].startswith(
        "### Exercise 15-91.1 — Half of it (30 points, 15 minutes)\n"
    )
    assert after["ex-half-of-it"]["metadata"] == {"nbgrader": answer_metadata("ex-half-of-it")}
    assert after["ex-half-of-it-check"]["metadata"] == {"nbgrader": check_metadata("ex-half-of-it-check", 30)}
    setup = "from shared.checks import {} as check".format
    assert after.pop("setup")["source"] == before.pop("setup")["source"].replace(
        setup("template"), setup("topic_15_91")
    )
    assert {id_: cell for id_, cell in after.items() if id_ not in made} == {
        id_: cell for id_, cell in before.items() if id_ not in example
    }


def test_exercises_are_numbered_by_their_places(draft):
    topic, syllabus = draft
    for wish in (Wish("half", "Half"), Wish("twice", "Twice"), Wish("first", "First", after="scale-read")):
        add(wish, topic, syllabus)
    headings = [cell["source"].split(" (")[0] for id_, cell in cells(topic).items() if id_.endswith("-task")]
    assert headings == [f"### Exercise 15-91.{text}" for text in ("1 — First", "2 — Half", "3 — Twice")]
    checks, tests = (path.read_text(encoding="utf-8") for path in files_of(topic))
    for place, title in enumerate(("First", "Half", "Twice"), start=1):
        assert f'@exercise("15-91.{place}", "{title}", points=20)' in checks
        assert f'"{title.lower()}": check.{title.lower()},' in tests
    assert lint.lint_files([topic.path], syllabus) == []


def test_what_an_author_wrote_stays(draft):
    topic, syllabus = draft
    rename_cells(topic, ex_mae_task="ex-own-task", ex_mae="ex-own", ex_mae_check="ex-own-check")
    change(topic.path, "from shared.checks import template as check", "from shared.checks import topic_15_91 as check")
    checks, tests = files_of(topic)
    own_checks = (
        '# mine\n@exercise(\n    "15-91.1", "Mean absolute error", points=10\n)\ndef mean_absolute_error(t, a): ...\n'
    )
    checks.write_text(own_checks, encoding="utf-8")
    own = "class TestMine(CheckProtocol):\n    X = 1\n"
    tables = (
        "CHECKS = {'é': 1}\nRIGHT: dict = {\n    'é': [],  # mine\n}\nWRONG = {}\nPROMISES = {'é': {}}; CONTEXT = {}\n"
    )
    tests.write_text(f"{tables}\n\n{own}", encoding="utf-8")
    before = cells(topic)
    add(Wish("zero", "Zero", after="standardise"), topic, syllabus)

    after = cells(topic)
    task = before.pop("ex-own-task")["source"].replace("15-91.1", "15-91.2")
    assert after["ex-own-task"]["source"] == task
    assert all(after[id_] == cell for id_, cell in before.items())
    assert checks.read_text(encoding="utf-8").startswith(own_checks.replace("15-91.1", "15-91.2"))
    text = tests.read_text(encoding="utf-8")
    assert text.endswith(own)
    namespace = {"check": argparse.Namespace(zero=0), "zero_in_another_style": 1, "zero_gone_wrong": 2}
    exec(text[: text.index("# -----")], namespace)
    for table in exercise.ENTRIES:
        assert "zero" in namespace[table], table
        assert ("é" in namespace[table]) == (table in ("CHECKS", "RIGHT", "PROMISES")), table
    assert "# mine" in text


def test_an_example_that_was_changed_stays(draft):
    topic, syllabus = draft
    change(topic.path, "Squares let a few pixels dominate.", "Mine.")
    add(Wish("half", "Half"), topic, syllabus)
    assert "Mine." in cells(topic)["ex-mae-task"]["source"]
    assert "15-91.2 — Half" in cells(topic)["ex-half-task"]["source"]
    findings = lint.lint_files([topic.path], syllabus)
    assert [finding.cell for finding in findings] == ["ex-mae-check"], "lint names the check that is no longer there"


REFUSED = {
    "capitals": (Wish("Half", "T"), "is no slug"),
    "underscore": (Wish("half_of", "T"), "is no slug"),
    "path": (Wish("../half", "T"), "is no slug"),
    "ends like another cell": (Wish("half-check", "T"), "is no slug"),
    "keyword": (Wish("lambda", "T"), "has another meaning"),
    "name of the check module": (Wish("check", "T"), "has another meaning"),
    "no title": (Wish("half", "  "), "cannot be a title"),
    "title of two lines": (Wish("half", "One\nTwo"), "cannot be a title"),
    "title that lint refuses": (Wish("half", "Fast!"), "exclamation mark"),
    "no points": (Wish("half", "T", points=0), "--points must be from 1 to 100"),
    "many points": (Wish("half", "T", points=101), "--points must be from 1 to 100"),
    "few minutes": (Wish("half", "T", minutes=9), "--minutes must be from 10 to 60"),
    "many minutes": (Wish("half", "T", minutes=61), "--minutes must be from 10 to 60"),
    "slug that is taken": (Wish("mae", "T"), "has a cell 'ex-mae-task' already"),
    "no such cell": (Wish("half", "T", after="nowhere"), "--after nowhere: there is no such cell"),
    "before the sections": (Wish("half", "T", after="objectives"), "stands under ## Learning objectives"),
    "after the sections": (Wish("half", "T", after="takeaways"), "stands under ## Key takeaways"),
}


def refuse(wish, topic, syllabus, message):
    before = everything(topic)
    with pytest.raises(ExerciseError) as refusal:
        add(wish, topic, syllabus)
    assert message in str(refusal.value)
    assert everything(topic) == before


@pytest.mark.parametrize(("wish", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_without_a_trace(draft, wish, message):
    refuse(wish, *draft, message)


def test_refused_between_the_cells_of_another_exercise(draft):
    topic, syllabus = draft
    add(Wish("half", "Half"), topic, syllabus)
    for cell in ("ex-half-task", "ex-half"):
        refuse(Wish("twice", "Twice", after=cell), topic, syllabus, "must be followed directly by")


DAMAGE = {
    "checks that are no Python": (0, "import torch", "import (torch", "is not valid Python: line"),
    "a check of this name": (0, "def half(", "def twice(", "has a twice already"),
    "tests that are no Python": (1, "import torch", "import (torch", "is not valid Python: line"),
    "an answer of this name": (1, "half_gone_wrong(x", "twice_gone_wrong(x", "has a twice_gone_wrong already"),
    "tests without a table": (1, "PROMISES: ClassVar = {", "PROMISED = {", "must have one dictionary PROMISES"),
    "a table given twice": (
        1,
        "PROMISES: ClassVar = {",
        "PROMISES = {}\n    PROMISES = {",
        "must have one dictionary PROMISES",
    ),
    "tests without the protocol": (1, "(CheckProtocol)", "", "has no class with CheckProtocol"),
}


@pytest.mark.parametrize(("file", "old", "new_text", "message"), DAMAGE.values(), ids=DAMAGE.keys())
def test_files_that_cannot_take_it_are_left_alone(draft, file, old, new_text, message):
    topic, syllabus = draft
    add(Wish("half", "Half"), topic, syllabus)
    change(files_of(topic)[file], old, new_text)
    refuse(Wish("twice", "Twice"), topic, syllabus, message)


def test_a_setup_cell_without_checks(draft):
    topic, syllabus = draft
    change(topic.path, "from shared.checks import template as check", "import time")
    refuse(Wish("half", "Half"), topic, syllabus, "add the line: from shared.checks import topic_15_91 as check")


def test_a_notebook_that_is_none(draft):
    topic, syllabus = draft
    topic.path.write_text("{", encoding="utf-8")
    refuse(Wish("half", "Half"), topic, syllabus, "not JSON")
    topic.path.unlink()
    refuse(Wish("half", "Half"), topic, syllabus, "python -m course new 15-91")


@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_all_files_are_written_or_none(draft, monkeypatch, fails_at):
    real, calls = exercise.write_whole, []

    def write(path, content):
        calls.append(path)
        if path == calls[min(fails_at, len(calls)) - 1] and len(calls) >= fails_at:  # then and ever after
            raise OSError(28, "No space left on device")
        real(path, content)

    monkeypatch.setattr(exercise, "write_whole", write)
    refuse(Wish("half", "Half"), *draft, "cannot be written: No space left on device")


def test_a_finished_notebook_with_outputs_gets_one_too(tmp_path):
    number = "15-07"
    for folder in ("templates", "shared/checks", REAL.module.folder):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    (tmp_path / "tests").mkdir()
    shutil.copy(REAL.topics[number].test_file, tmp_path / "tests")
    syllabus = load(tmp_path / REAL.module.folder / REAL.path.name)
    notebook, checks, tests = add(Wish("half", "Half"), syllabus.topics[number], syllabus)
    assert "ex-half-check" in notebook.read_text(encoding="utf-8")
    assert "def half(" in checks.read_text(encoding="utf-8")
    assert "half_gone_wrong" in tests.read_text(encoding="utf-8")
    findings = {finding.rule for finding in lint.lint_files([notebook], syllabus)}
    assert {"executed", "placeholders"} <= findings, "what is left to do"


def run_tests(root):
    """pytest on the generated tests, in a copy of the repository."""
    env = {**os.environ, "PYTHONPATH": str(root), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    return subprocess.run(command, cwd=root, env=env, timeout=300, check=False, capture_output=True, text=True)


@pytest.mark.slow
def test_the_tests_of_a_draft_wait_and_those_of_a_finished_topic_fail(draft):
    topic, syllabus = draft
    root = topic.path.parent.parent
    add(Wish("half", "Half"), topic, syllabus)
    wish = new.Wish("15-92", "Finished", "algorithm")
    finished = new.create(wish, syllabus.path, root / "templates", run=False)
    add(Wish("half", "Half"), finished, load(syllabus.path))
    change(syllabus.path, '[topics."15-92"]\nstatus = "draft"', '[topics."15-92"]')
    for folder in ("course", "shared"):
        shutil.copytree(ROOT / folder, root / folder, dirs_exist_ok=True)
    shutil.copy(ROOT / "tests" / "check_protocol.py", root / "tests")
    tested = run_tests(root)
    assert tested.returncode == 1, tested.stdout
    assert " xfailed" in tested.stdout
    failed = [line for line in tested.stdout.splitlines() if line.startswith("FAILED")]
    assert failed
    assert all("test_checks_15_92" in line for line in failed), "those of a draft wait"
    for what in ("own_answer_passes", "words of the message", "words of the task"):
        assert what in tested.stdout, what
    findings = {finding.rule for finding in lint.lint_files([finished.path], load(syllabus.path))}
    assert {"placeholders", "exercise-placeholders", "exercise-points"} <= findings


def command_line(*arguments):
    parser = argparse.ArgumentParser()
    exercise.add_arguments(parser)
    return exercise.main(parser.parse_args(arguments))


def test_command_line(monkeypatch, capsys):
    made = []

    def fake_add(wish, topic, syllabus):
        made.append((wish, topic.number))
        return [ROOT / "a.ipynb", ROOT / "b.py", ROOT / "tests" / "c.py"]

    monkeypatch.setattr(exercise, "add", fake_add)
    options = ["--points", "25", "--minutes", "40", "--after", "idea"]
    assert command_line("2", "half", "Half of it", *options) == 0
    assert made == [(Wish("half", "Half of it", 25, 40, "idea"), "15-02")]
    assert "python -m course test tests/c.py --runxfail" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("topic", "message"),
    [
        ("15-77", "there is no topic 15-77"),
        ("templates/TEMPLATE_CAPSTONE.ipynb", "is no topic"),
        ("templates", "is no topic"),
        ("README.md", "is no notebook"),
        ("x", "neither a topic"),
    ],
)
def test_command_line_error(capsys, topic, message):
    assert command_line(topic, "half", "Half") == 1
    assert message in capsys.readouterr().err
