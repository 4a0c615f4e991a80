"""`python -m course new`: what it makes passes lint, what it must not touch stays as it was."""

import argparse
import json
import re
import shutil

import pytest

from course import lint, new
from course.environment import ROOT
from course.new import NewError, create, slug
from course.syllabus import SyllabusError, load

REAL = load()


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """Syllabus and templates, with the module's page, in a folder of their own; notebooks aren't executed."""
    folder = tmp_path / REAL.module.folder
    folder.mkdir()
    shutil.copy(REAL.path.parent / "README.md", folder)
    # without the drafts of the day
    text = REAL.path.read_text(encoding="utf-8").replace('status = "draft"\n', "")
    (folder / "syllabus.toml").write_text(text, encoding="utf-8", newline="\n")
    shutil.copytree(ROOT / "templates", tmp_path / "templates", ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    lint.write_readme(load(folder / "syllabus.toml"))
    monkeypatch.setattr(new, "execute", lambda *_: None)
    return folder / "syllabus.toml", tmp_path / "templates"


def make(copy, *wish):
    return create(*wish, syllabus_file=copy[0], templates=copy[1])


def complaints(syllabus_file):
    return [str(finding) for finding in lint.lint_repository(syllabus_file.parent.parent, load(syllabus_file))]


def markdown_of(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def state(folder):
    return {path: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.notebook
def test_a_new_topic_runs_and_passes_lint(copy, monkeypatch):
    syllabus_file, _ = copy
    monkeypatch.undo()
    before = syllabus_file.read_bytes()
    topic = make(copy, "15-91", "A “quoted” Ünïcode | Title & more", "algorithm")
    assert complaints(syllabus_file) == []
    assert syllabus_file.read_bytes().startswith(before)
    assert topic == load(syllabus_file).topics["15-91"]
    assert (topic.category, topic.dataset, topic.is_draft) == ("A — Algorithm", "FashionMNIST", True)
    assert topic.path.name == "15-91_a_quoted_unicode_title_and_more.ipynb"
    text = markdown_of(topic.path)
    assert text.startswith(f"# 15-91: {topic.title}\n")
    assert "### Exercise 15-91.1 — Mean absolute error" in text
    assert "{{" not in text
    assert topic.file in (syllabus_file.parent / "README.md").read_text(encoding="utf-8")
    cells = json.loads(topic.path.read_text(encoding="utf-8"))["cells"]
    assert "sample" in json.dumps(next(cell["outputs"] for cell in cells if cell["id"] == "data"))


def test_a_topic_of_the_syllabus_needs_no_title(copy):
    """15-04 has cross-references to name and another data set; only its status changes in the file."""
    syllabus_file, _ = copy
    before = syllabus_file.read_text(encoding="utf-8")
    topic = make(copy, "15-04")
    after = syllabus_file.read_text(encoding="utf-8")
    assert after == before.replace('[topics."15-04"]\n', '[topics."15-04"]\nstatus = "draft"\n')
    assert complaints(syllabus_file) == []
    text = markdown_of(topic.path)
    assert text.startswith("# 15-04: Custom Loss Functions & Training Utilities")
    for number in ("5-04", "5-06", "16-06", "9-06", "12-04"):
        assert number in text
    assert "load_cifar10" in topic.path.read_text(encoding="utf-8")


REFUSED = {
    "another module": (("16-01", "T", "algorithm"), 'the number must look like "15-01"'),
    "taken": (("15-03", "Other Patterns", "algorithm"), "15-03 is taken: syllabus.toml has 'Advanced nn.Module"),
    "other template": (("15-03", None, "capstone"), "with TEMPLATE_ALGORITHM.ipynb"),
    "no title": (("15-91", None, "algorithm"), "15-91 has no row"),
    "no template": (("15-91", "T"), "15-91 has no row"),
    "title of another topic": (("15-91", "Advanced Data Pipelines", "algorithm"), "another topic has the title"),
    "there already": (("15-02",), "is there already"),
}


@pytest.mark.parametrize(("wish", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_without_a_trace(copy, wish, message):
    folder = copy[0].parent
    (folder / REAL.topics["15-02"].file).write_text("mine", encoding="utf-8")
    before = state(folder)
    with pytest.raises((NewError, SyllabusError), match=re.escape(message)):
        make(copy, *wish)
    assert state(folder) == before


def test_a_notebook_that_appears_meanwhile_is_not_overwritten(copy, monkeypatch):
    """Executing the template takes seconds: somebody may have saved the file when it is done."""
    path = copy[0].parent / "15-91_one.ipynb"
    monkeypatch.setattr(new, "execute", lambda *_: path.write_text("mine", encoding="utf-8"))
    with pytest.raises(NewError, match="is there already"):
        make(copy, "15-91", "One", "algorithm")
    assert path.read_text(encoding="utf-8") == "mine"
    assert "15-91" not in load(copy[0]).topics


@pytest.mark.notebook
def test_a_template_that_does_not_run_leaves_nothing(copy, monkeypatch):
    monkeypatch.undo()
    syllabus_file, templates = copy
    path = templates / "TEMPLATE_ALGORITHM.ipynb"
    document = json.loads(path.read_text(encoding="utf-8"))
    next(cell for cell in document["cells"] if cell["id"] == "setup")["source"] = "1 / 0"
    path.write_text(json.dumps(document), encoding="utf-8")
    before = state(syllabus_file.parent)
    with pytest.raises(NewError, match="cell 'setup': ZeroDivisionError"):
        make(copy, "15-91", "One", "algorithm")
    assert state(syllabus_file.parent) == before


def test_file_names_of_the_syllabus_follow_the_titles():
    for topic in REAL.topics.values():
        assert topic.file == f"{topic.number}_{slug(topic.title)}.ipynb"


def test_the_command_makes_a_capstone_too(copy, monkeypatch, capsys):
    parser = argparse.ArgumentParser()
    new.add_arguments(parser)
    monkeypatch.setattr(new, "create", lambda *wish: make(copy, *wish))
    assert new.main(parser.parse_args(["15-91", "One", "--template", "capstone"])) == 0
    out = capsys.readouterr().out
    assert "15-91_one.ipynb" in out
    assert "Fill in key_content, owns, description in its row of syllabus.toml." in out
    assert load(copy[0]).topics["15-91"].category == "E — Capstone/Integration"
    assert complaints(copy[0]) == []
    assert new.main(parser.parse_args(["15-1", "Title", "--template", "algorithm"])) == 1
    assert 'the number must look like "15-01"' in capsys.readouterr().err
