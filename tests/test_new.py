"""`python -m course new`: what it makes passes lint, what it must not touch stays as it was."""

import argparse
import json
import re
import shutil

import pytest

from course import lint, new
from course.environment import ROOT
from course.new import NewError, create, slug
from course.syllabus import SyllabusError, load, parse

REAL = load()
TEXT = REAL.path.read_text(encoding="utf-8")


@pytest.fixture
def copy(tmp_path):
    """Syllabus, module's page and templates in a folder of their own: (syllabus file, templates)."""
    folder = tmp_path / REAL.module.folder
    folder.mkdir()
    shutil.copy(REAL.path.parent / "README.md", folder)
    # without the drafts of the day
    text = REAL.path.read_text(encoding="utf-8").replace('status = "draft"\n', "")
    (folder / "syllabus.toml").write_text(text, encoding="utf-8", newline="\n")
    shutil.copytree(ROOT / "templates", tmp_path / "templates", ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    (tmp_path / "shared" / "checks").mkdir(parents=True)
    shutil.copy(ROOT / "shared" / "checks" / "template.py", tmp_path / "shared" / "checks")
    lint.write_readme(load(folder / "syllabus.toml"))
    return folder / "syllabus.toml", tmp_path / "templates"


def complaints(syllabus_file):
    return [str(finding) for finding in lint.lint_repository(syllabus_file.parent.parent, load(syllabus_file))]


def markdown_of(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def make(copy, *wish, run=False):
    return create(*wish, run=run, syllabus_file=copy[0], templates=copy[1])


@pytest.mark.notebook
@pytest.mark.parametrize(
    ("template", "category"), [("algorithm", "A — Algorithm"), ("capstone", "E — Capstone/Integration")]
)
def test_a_new_topic_passes_lint(copy, template, category):
    syllabus_file, _ = copy
    before = syllabus_file.read_bytes()
    topic = make(copy, "15-91", "Sparse & Nested Tensors", template, run=True)
    assert complaints(syllabus_file) == []

    assert syllabus_file.read_bytes().startswith(before)
    assert topic == load(syllabus_file).topics["15-91"]
    assert (topic.category, topic.dataset, topic.is_draft) == (category, "FashionMNIST", True)
    assert topic.path.name == "15-91_sparse_and_nested_tensors.ipynb"
    text = markdown_of(topic.path)
    assert text.startswith("# 15-91: Sparse & Nested Tensors\n")
    assert "### Exercise 15-91.1 — Mean absolute error" in text
    assert "{{" not in text
    assert topic.file in (syllabus_file.parent / "README.md").read_text(encoding="utf-8")
    cells = json.loads(topic.path.read_text(encoding="utf-8"))["cells"]
    data = next(cell for cell in cells if cell["id"] == "data")
    assert "sample" in json.dumps(data["outputs"])


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


def test_an_awkward_title(copy):
    title = 'A "quoted" title \\ and | Ünïcode'
    topic = make(copy, "15-92", title, "algorithm")
    assert (topic.title, topic.file) == (title, "15-92_a_quoted_title_and_unicode.ipynb")
    assert complaints(copy[0]) == []


REFUSED = {
    "another module": (("16-01", "T", "algorithm"), 'the number must look like "15-01"'),
    "no number": (("../15-91", "T", "algorithm"), "the number must look like"),
    "taken": (("15-03", "Other Patterns", "algorithm"), "15-03 is taken: syllabus.toml has 'Advanced nn.Module"),
    "other template": (("15-03", None, "capstone"), "with TEMPLATE_ALGORITHM.ipynb"),
    "no title": (("15-91", None, "algorithm"), "15-91 has no row"),
    "no template": (("15-91", "T"), "15-91 has no row"),
    "title without letters": (("15-91", "—", "algorithm"), "file must look like"),
    "title of another topic": (("15-91", "Advanced Data Pipelines", "algorithm"), "another topic has the title"),
}


@pytest.mark.parametrize(("wish", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_without_a_trace(copy, wish, message):
    syllabus_file, _ = copy
    before = {path: path.read_bytes() for path in syllabus_file.parent.iterdir()}
    with pytest.raises((NewError, SyllabusError), match=re.escape(message)):
        make(copy, *wish)
    assert {path: path.read_bytes() for path in syllabus_file.parent.iterdir()} == before


@pytest.mark.parametrize("number", ["15-91", "15-03"])
def test_an_existing_notebook_is_never_overwritten(copy, number):
    syllabus_file, _ = copy
    title = "One" if number == "15-91" else None
    path = syllabus_file.parent / ("15-91_one.ipynb" if title else REAL.topics[number].file)
    path.write_text("mine", encoding="utf-8")
    before = syllabus_file.read_bytes()
    with pytest.raises(NewError, match="is there already"):
        make(copy, number, title, "algorithm")
    assert path.read_text(encoding="utf-8") == "mine"
    assert syllabus_file.read_bytes() == before


def test_a_notebook_that_appears_meanwhile_is_not_overwritten(copy, monkeypatch):
    """Executing the template takes seconds: somebody may have saved the file when it is done."""
    syllabus_file, _ = copy
    path = syllabus_file.parent / "15-91_one.ipynb"
    before = syllabus_file.read_bytes()
    monkeypatch.setattr(new, "execute", lambda *_: path.write_text("mine", encoding="utf-8"))
    with pytest.raises(NewError, match="is there already"):
        make(copy, "15-91", "One", "algorithm", run=True)
    assert path.read_text(encoding="utf-8") == "mine"
    assert syllabus_file.read_bytes() == before


@pytest.mark.notebook
@pytest.mark.parametrize(
    ("code", "message"), [("1 / 0", "ZeroDivisionError"), ("import os\nos.kill(os.getpid(), 9)", "does not run")]
)
def test_a_template_that_does_not_run_leaves_nothing(copy, code, message):
    syllabus_file, templates = copy
    path = templates / "TEMPLATE_ALGORITHM.ipynb"
    document = json.loads(path.read_text(encoding="utf-8"))
    next(cell for cell in document["cells"] if cell["id"] == "setup")["source"] = code
    path.write_text(json.dumps(document), encoding="utf-8")
    before = syllabus_file.read_bytes()
    with pytest.raises(NewError, match=message):
        make(copy, "15-91", "One", "algorithm", run=True)
    assert syllabus_file.read_bytes() == before
    assert not list(syllabus_file.parent.glob("*.ipynb"))


@pytest.mark.parametrize("topic", REAL.topics.values(), ids=lambda topic: topic.number)
def test_file_names_of_the_syllabus_follow_the_titles(topic):
    assert topic.file == f"{topic.number}_{slug(topic.title)}.ipynb"


def test_command_line(monkeypatch, capsys):
    made = []
    open_row = parse(new._appended(TEXT, "15-91", "One", "algorithm"), REAL.path).topics["15-91"]
    monkeypatch.setattr(new, "create", lambda *wish, run: made.append((*wish, run)) or open_row)
    parser = argparse.ArgumentParser()
    new.add_arguments(parser)
    assert new.main(parser.parse_args(["15-91", "One", "--template", "algorithm", "--no-run"])) == 0
    assert made == [("15-91", "One", "algorithm", False)]
    out = capsys.readouterr().out
    assert "15-91_one.ipynb" in out
    assert "Fill in key_content, owns, description in its row of syllabus.toml." in out


def test_command_line_error(capsys):
    parser = argparse.ArgumentParser()
    new.add_arguments(parser)
    assert new.main(parser.parse_args(["15-1", "Title", "--template", "algorithm"])) == 1
    assert 'the number must look like "15-01"' in capsys.readouterr().err
