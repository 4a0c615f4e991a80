"""`python -m course new`: what it makes passes lint, what it must not touch stays as it was."""

import re
import shutil

import nbformat
import pytest

from course import lint
from course.environment import ROOT
from course.new import NewError, create
from course.syllabus import SyllabusError, load

REAL = load()


@pytest.fixture
def syllabus_file(tmp_path):
    """The syllabus, with templates and the module's page, in a folder of its own."""
    folder = tmp_path / REAL.module.folder
    folder.mkdir()
    shutil.copy(REAL.path.parent / "README.md", folder)
    # without the drafts of the day
    text = REAL.path.read_text(encoding="utf-8").replace('status = "draft"\n', "")
    (folder / "syllabus.toml").write_text(text, encoding="utf-8", newline="\n")
    shutil.copytree(ROOT / "templates", tmp_path / "templates", ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    lint.lint_pages(load(folder / "syllabus.toml"), write=True)
    return folder / "syllabus.toml"


def complaints(syllabus_file):
    return [": ".join(finding) for finding in lint.lint_repository(syllabus_file.parents[1], load(syllabus_file))]


def markdown_of(topic):
    cells = nbformat.read(topic.path, as_version=4).cells
    return "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")


def state(folder):
    return {path: path.read_bytes() for path in folder.iterdir()}


def test_a_new_topic_passes_lint(syllabus_file):
    before = syllabus_file.read_bytes()
    topic = create("15-91", 'A "quoted" Title & more', "algorithm", syllabus_file)
    assert complaints(syllabus_file) == []
    assert syllabus_file.read_bytes().startswith(before)
    assert topic == load(syllabus_file).topics["15-91"]
    assert (topic.category, topic.dataset, topic.is_draft) == ("A — Algorithm", "FashionMNIST", True)
    assert topic.path.name == "15-91_a_quoted_title_and_more.ipynb"
    text = markdown_of(topic)
    assert text.startswith(f"# 15-91: {topic.title}\n")
    assert "### Exercise 15-91.1 — Mean absolute error" in text
    assert "{{" not in text
    assert "load_fashion_mnist" in topic.path.read_text(encoding="utf-8")
    assert f"({topic.file}) (draft)" in (syllabus_file.parent / "README.md").read_text(encoding="utf-8")


def test_a_topic_of_the_syllabus_needs_no_title(syllabus_file):
    """15-04 has cross-references to name and another data set; only its status changes in the file."""
    before = syllabus_file.read_text(encoding="utf-8")
    topic = create("15-04", syllabus_file=syllabus_file)
    after = syllabus_file.read_text(encoding="utf-8")
    assert after == before.replace('[topics."15-04"]\n', '[topics."15-04"]\nstatus = "draft"\n')
    assert complaints(syllabus_file) == []
    text = markdown_of(topic)
    assert text.startswith("# 15-04: Custom Loss Functions & Training Utilities")
    assert set(re.findall(r"\d+-\d\d", text)) >= {"5-04", "5-06", "16-06", "9-06", "12-04"}
    assert "load_cifar10" in topic.path.read_text(encoding="utf-8")
    topic.path.unlink()
    create("15-04", syllabus_file=syllabus_file)  # its row is a draft's already
    assert syllabus_file.read_text(encoding="utf-8") == after


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        (("16-01", "T", "algorithm"), 'the number must look like "15-01"'),
        (("15-03", "Other Patterns", "algorithm"), "15-03 is taken: syllabus.toml has 'Advanced nn.Module"),
        (("15-03", None, "capstone"), "with TEMPLATE_ALGORITHM.ipynb"),
        (("15-91", None, "algorithm"), "15-91 has no row"),
        (("15-02", None, None), "is there already"),
    ],
)
def test_refused_without_a_trace(syllabus_file, wish, message):
    folder = syllabus_file.parent
    (folder / REAL.topics["15-02"].file).write_text("mine", encoding="utf-8")
    before = state(folder)
    with pytest.raises((NewError, SyllabusError), match=re.escape(message)):
        create(*wish, syllabus_file)
    assert state(folder) == before
