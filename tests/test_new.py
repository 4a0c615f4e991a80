"""`python -m course new`: what it makes passes lint, what it must not touch stays as it was."""

import argparse
import json
import re
import shutil
import tomllib

import pytest

from course import lint, new
from course.environment import ROOT
from course.new import NewError, Wish, create, fill, slug
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


@pytest.mark.notebook
@pytest.mark.parametrize(
    ("template", "dataset", "category"),
    [("algorithm", None, "A — Algorithm"), ("capstone", "CIFAR-10", "E — Capstone/Integration")],
)
def test_a_new_topic_passes_lint(copy, template, dataset, category):
    syllabus_file, _ = copy
    before = syllabus_file.read_bytes()
    topic = create(Wish("15-91", "Sparse & Nested Tensors", template, dataset=dataset), *copy, run=True)
    assert complaints(syllabus_file) == []

    assert syllabus_file.read_bytes().startswith(before)
    assert topic == load(syllabus_file).topics["15-91"]
    assert (topic.category, topic.dataset, topic.is_draft) == (category, dataset or "FashionMNIST", True)
    assert topic.path.name == "15-91_sparse_and_nested_tensors.ipynb"
    text = markdown_of(topic.path)
    assert text.startswith("# 15-91: Sparse & Nested Tensors\n")
    assert "### Exercise 15-91.1 — Mean absolute error" in text
    assert "{{" not in text
    assert topic.file in (syllabus_file.parent / "README.md").read_text(encoding="utf-8")
    cells = json.loads(topic.path.read_text(encoding="utf-8"))["cells"]
    data = next(cell for cell in cells if cell["id"] == "data")
    assert ("load_cifar10" in "".join(data["source"])) == (dataset == "CIFAR-10")
    assert "sample" in json.dumps(data["outputs"])


def test_options_fill_the_row(copy):
    wish = Wish(
        "15-92",
        'A "quoted" title \\ and more',
        "algorithm",
        "CIFAR-10",
        7,
        ("5-07", "15-03"),
        "one; two",
        "the concept | of it",
        "What they do.",
    )
    topic = create(wish, *copy, run=False)
    row = tomllib.loads(copy[0].read_text(encoding="utf-8"))["topics"]["15-92"]
    assert row == {
        "status": "draft",
        "title": 'A "quoted" title \\ and more',
        "file": "15-92_a_quoted_title_and_more.ipynb",
        "key_content": "one; two",
        "dataset": "CIFAR-10",
        "time": "~7 min",
        "minutes": 7,
        "budget_seconds": 60,
        "category": "A — Algorithm",
        "template": "TEMPLATE_ALGORITHM.ipynb",
        "prerequisites": ["5-07", "15-03"],
        "owns": "the concept | of it",
        "description": "What they do.",
    }
    assert "| **Prerequisites** | 5-07, 15-03 |" in markdown_of(topic.path)
    assert complaints(copy[0]) == []
    cells = json.loads(topic.path.read_text(encoding="utf-8"))["cells"]
    assert not [cell["id"] for cell in cells if cell.get("outputs") or cell.get("execution_count")]


def test_a_topic_of_the_syllabus_needs_no_title(copy):
    """15-04 has cross-references to name and another data set; only its status changes in the file."""
    syllabus_file, _ = copy
    before = syllabus_file.read_text(encoding="utf-8")
    topic = create(Wish("15-04"), *copy, run=False)
    after = syllabus_file.read_text(encoding="utf-8")
    assert after == before.replace('[topics."15-04"]\n', '[topics."15-04"]\nstatus = "draft"\n')
    text = markdown_of(topic.path)
    assert text.startswith("# 15-04: Custom Loss Functions & Training Utilities")
    for number in ("5-04", "5-06", "16-06", "9-06", "12-04"):
        assert number in text


def test_windows_line_ends_are_kept(copy):
    syllabus_file, _ = copy
    syllabus_file.write_bytes(syllabus_file.read_bytes().replace(b"\n", b"\r\n"))
    before = syllabus_file.read_bytes()
    create(Wish("15-91", "One", "algorithm"), *copy, run=False)
    after = syllabus_file.read_bytes()
    assert after.startswith(before)
    assert after.count(b"\n") == after.count(b"\r\n")
    create(Wish("15-05"), *copy, run=False)
    assert load(syllabus_file).topics["15-05"].is_draft


def test_file_without_a_last_line_end(copy):
    syllabus_file, _ = copy
    syllabus_file.write_bytes(syllabus_file.read_bytes().rstrip())
    before = syllabus_file.read_bytes()
    create(Wish("15-91", "One", "algorithm"), *copy, run=False)
    assert syllabus_file.read_bytes().startswith(before + b'\n\n[topics."15-91"]\n')


REFUSED = {
    "another module": (Wish("16-01", "T", "algorithm"), "'16-01' is not a number of this module"),
    "one digit": (Wish("15-1", "T", "algorithm"), "it must look like 15-11"),
    "zero": (Wish("15-00", "T", "algorithm"), "is not a number"),
    "no number": (Wish("../15-91", "T", "algorithm"), "is not a number"),
    "newline": (Wish("15-91\n", "T", "algorithm"), "is not a number"),
    "taken": (
        Wish("15-03", "Other Patterns", "algorithm"),
        "15-03 is taken: it is called 'Advanced nn.Module Patterns'",
    ),
    "other template": (Wish("15-03", None, "capstone"), "15-03 has the template TEMPLATE_ALGORITHM.ipynb"),
    "other data set": (Wish("15-03", dataset="CIFAR-10"), "says otherwise than --dataset"),
    "unknown template": (
        Wish("15-91", "T", "notebook"),
        "there is no template 'notebook'; there are algorithm, capstone",
    ),
    "unknown data set": (Wish("15-91", "T", "algorithm", "MNIST"), "there is no data set 'MNIST'"),
    "no title": (Wish("15-91", None, "algorithm"), "15-91 has no row"),
    "no template": (Wish("15-91", "T"), "15-91 has no row"),
    "title without letters": (Wish("15-91", "—", "algorithm"), "cannot be a title"),
    "title of two lines": (Wish("15-91", "One\nTwo", "algorithm"), "cannot be a title"),
    "title of another topic": (Wish("15-91", "Advanced Data Pipelines", "algorithm"), "is a duplicate of 15-02's"),
    "title that lint refuses": (Wish("15-91", "Fast!", "algorithm"), "exclamation mark"),
    "no minutes": (Wish("15-91", "T", "algorithm", minutes=0), "--minutes must be at least 1"),
    "requires nonsense": (Wish("15-91", "T", "algorithm", requires=("autograd",)), "'autograd', which is not a topic"),
    "requires itself": (Wish("15-91", "T", "algorithm", requires=("15-91",)), "lead back to 15-91"),
}


@pytest.mark.parametrize(("wish", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_without_a_trace(copy, wish, message):
    syllabus_file, _ = copy
    before = {path: path.read_bytes() for path in syllabus_file.parent.iterdir()}
    with pytest.raises((NewError, SyllabusError), match=re.escape(message)):
        create(wish, *copy, run=False)
    assert {path: path.read_bytes() for path in syllabus_file.parent.iterdir()} == before


@pytest.mark.parametrize("number", ["15-91", "15-03"])
def test_an_existing_notebook_is_never_overwritten(copy, number):
    syllabus_file, _ = copy
    title = "One" if number == "15-91" else None
    path = syllabus_file.parent / ("15-91_one.ipynb" if title else REAL.topics[number].file)
    path.write_text("mine", encoding="utf-8")
    before = syllabus_file.read_bytes()
    with pytest.raises(NewError, match="is there already"):
        create(Wish(number, title, "algorithm"), *copy, run=False)
    assert path.read_text(encoding="utf-8") == "mine"
    assert syllabus_file.read_bytes() == before


def test_a_notebook_that_appears_meanwhile_is_not_overwritten(copy, monkeypatch):
    """Executing the template takes seconds: somebody may have saved the file when it is done."""
    syllabus_file, _ = copy
    path = syllabus_file.parent / "15-91_one.ipynb"
    before = syllabus_file.read_bytes()

    def slow_execute(document, folder):
        path.write_text("mine", encoding="utf-8")
        return document

    monkeypatch.setattr(new, "execute", slow_execute)
    monkeypatch.setattr(new, "lint_document", lambda *_: [])
    with pytest.raises(NewError, match="is there already"):
        create(Wish("15-91", "One", "algorithm"), *copy, run=True)
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
        create(Wish("15-91", "One", "algorithm"), *copy, run=True)
    assert syllabus_file.read_bytes() == before
    assert not list(syllabus_file.parent.glob("*.ipynb"))


@pytest.mark.parametrize("content", [None, "{"])
def test_a_broken_template_is_named(copy, content):
    _, templates = copy
    path = templates / "TEMPLATE_CAPSTONE.ipynb"
    path.unlink()
    if content:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(NewError, match="TEMPLATE_CAPSTONE"):
        create(Wish("15-91", "One", "capstone"), *copy, run=False)


def test_the_template_itself_is_not_changed():
    template = json.loads((ROOT / "templates" / "TEMPLATE_ALGORITHM.ipynb").read_text(encoding="utf-8"))
    before = json.dumps(template)
    fill(template, REAL.topics["15-09"])
    assert json.dumps(template) == before


@pytest.mark.parametrize("topic", REAL.topics.values(), ids=lambda topic: topic.number)
def test_file_names_of_the_syllabus_follow_the_titles(topic):
    assert topic.file == f"{topic.number}_{slug(topic.title)}.ipynb"


@pytest.mark.parametrize(
    ("title", "expected"),
    [("torch.fx & Graphs", "torch_fx_and_graphs"), ("Überblick, 2nd part", "uberblick_2nd_part"), ("…", "")],
)
def test_slug(title, expected):
    assert slug(title) == expected


def test_command_line(monkeypatch, capsys):
    made = []

    def fake_create(wish, *, run):
        made.append((wish, run))
        return REAL.topics["15-01"]

    monkeypatch.setattr(new, "create", fake_create)
    parser = argparse.ArgumentParser()
    new.add_arguments(parser)
    line = ["15-91", "Title", "--template", "algorithm", "--requires", "5-07", "15-03", "--minutes", "6", "--no-run"]
    assert new.main(parser.parse_args(line)) == 0
    assert made == [(Wish("15-91", "Title", "algorithm", None, 6, ("5-07", "15-03")), False)]
    out = capsys.readouterr().out
    assert "15-01_custom_autograd" in out
    assert "Fill in" not in out, "its row is complete"


def test_what_is_open_in_the_row_is_named(monkeypatch, capsys):
    topic = parse(new._appended(TEXT, Wish("15-91", "One", "algorithm", owns="a concept")), REAL.path).topics["15-91"]
    monkeypatch.setattr(new, "create", lambda wish, *, run: topic)
    parser = argparse.ArgumentParser()
    new.add_arguments(parser)
    assert new.main(parser.parse_args(["15-91", "One", "--template", "algorithm"])) == 0
    assert "Fill in key_content, description in its row of syllabus.toml." in capsys.readouterr().out


def test_a_draft_of_a_topic_of_the_syllabus_passes_lint(copy):
    syllabus_file, _ = copy
    create(Wish("15-02"), *copy, run=False)
    syllabus = load(syllabus_file)
    assert syllabus.topics["15-02"].is_draft
    assert lint.lint_repository(syllabus_file.parent.parent, syllabus) == []


def test_command_line_error(capsys):
    parser = argparse.ArgumentParser()
    new.add_arguments(parser)
    assert new.main(parser.parse_args(["15-1", "Title", "--template", "algorithm"])) == 1
    assert "new: '15-1' is not a number" in capsys.readouterr().err


def test_appended_row_is_valid_for_awkward_texts():
    wish = Wish("15-91", "Ünïcode “quotes” & \\backslash\\ 'single'", "algorithm", owns='tab"\t" and\nline')
    parsed = parse(new._appended(TEXT, wish), REAL.path)
    assert parsed.topics["15-91"].title == wish.title
    assert parsed.topics["15-91"].owns == wish.owns
