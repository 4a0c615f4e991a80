"""The student edition: what is taken out, what is refused, and that student work is never overwritten."""

import copy
import json
from dataclasses import replace

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from course import workbook
from course.selection import Selected
from course.syllabus import load
from course.workbook import EditionError, solutions, student_edition, write_edition

ANSWER = '''\
class Swish:
    """Returns x·σ(x)."""

    def forward(self, x):
        ### BEGIN SOLUTION
        secret = x.sigmoid()
        return x * secret
        ### END SOLUTION


def helper(x):
    y = 1
    if x:
            ### BEGIN SOLUTION
            return y + 41
            ### END SOLUTION
    return y
'''
STUBBED = '''\
class Swish:
    """Returns x·σ(x)."""

    def forward(self, x):
        # YOUR CODE HERE
        raise NotImplementedError


def helper(x):
    y = 1
    if x:
            # YOUR CODE HERE
            raise NotImplementedError
    return y
'''
ANSWER_METADATA = {"nbgrader": {"grade_id": "ex-a", "solution": True, "grade": False, "schema_version": 3}}
CHECK_METADATA = {"nbgrader": {"grade_id": "ex-a-check", "solution": False, "grade": True, "schema_version": 3}}


def lesson(answer=ANSWER, metadata=ANSWER_METADATA):
    printed = [new_output("stream", name="stdout", text="out")]
    return new_notebook(
        cells=[
            new_markdown_cell("# Title", id="title"),
            new_code_cell("print(1)  # 1", id="demo", outputs=copy.deepcopy(printed), execution_count=1),
            new_code_cell(
                answer, id="ex-a", metadata=copy.deepcopy(metadata), outputs=copy.deepcopy(printed), execution_count=2
            ),
            new_code_cell(
                "check(Swish)", id="ex-a-check", metadata=copy.deepcopy(CHECK_METADATA), outputs=copy.deepcopy(printed),
                execution_count=3,
            ),
        ]
    )  # fmt: skip


def test_solutions_become_stubs_and_all_else_stays():
    notebook = lesson()
    before = copy.deepcopy(notebook)
    edition = student_edition(notebook)
    assert notebook == before, "the lesson itself is not changed"
    title, demo, answer, check = edition.cells
    assert answer.source == STUBBED
    assert (answer.outputs, answer.execution_count) == ([], None)
    assert (check.outputs, check.execution_count, check.source) == ([], None, "check(Swish)")
    assert title == before.cells[0]
    assert (demo.outputs, demo.execution_count, demo.source) == ([], None, "print(1)  # 1")
    assert answer.metadata == before.cells[2].metadata
    assert "secret" not in json.dumps(edition)
    nbformat.validate(edition)
    assert solutions(notebook) == {
        "ex-a": ["        secret = x.sigmoid()\n        return x * secret", "            return y + 41"]
    }


def test_closed_widgets_are_not_handed_out():
    notebook = lesson()
    notebook.metadata["widgets"] = {"application/vnd.jupyter.widget-state+json": {"state": {}}}
    assert "widgets" not in student_edition(notebook).metadata
    assert "widgets" in notebook.metadata


def test_links_to_notebooks_that_are_not_there_become_text(tmp_path):
    (tmp_path / "15-01_a.ipynb").touch()
    (tmp_path / "15-04_a b.ipynb").touch()
    text = """See [15-01](15-01_a.ipynb), [15-02](15-02_b.ipynb), [**15-03**, `x[0]`](15-03_c.ipynb#part),
[here](15-01_a.ipynb#part), [4](15-04_a%20b.ipynb), [site](https://example.org/15-02_b.ipynb), [page](README.md)."""
    notebook = new_notebook(cells=[new_markdown_cell(text), new_code_cell("x = d['[15-02](15-02_b.ipynb)']")])
    workbook.unlink_missing(notebook, tmp_path)
    assert (
        notebook.cells[0].source
        == """See [15-01](15-01_a.ipynb), 15-02, **15-03**, `x[0]`,
[here](15-01_a.ipynb#part), [4](15-04_a%20b.ipynb), [site](https://example.org/15-02_b.ipynb), [page](README.md)."""
    )
    assert notebook.cells[1].source == "x = d['[15-02](15-02_b.ipynb)']"


def test_a_stub_is_reached_only_when_called():
    namespace = {}
    exec(student_edition(lesson()).cells[2].source, namespace)
    assert namespace["helper"](0) == 1
    with pytest.raises(NotImplementedError):
        namespace["Swish"]().forward(1)


@pytest.mark.parametrize(
    ("answer", "phrase"),
    [
        ("def f():\n    ### BEGIN SOLUTION\n    return 1", "line 2: ### BEGIN SOLUTION without"),
        ("def f():\n    return 1\n    ### END SOLUTION", "line 3: ### END SOLUTION without"),
        ("def f():\n    ### BEGIN SOLUTION\n    ### BEGIN SOLUTION\n    ### END SOLUTION", "line 3"),
        ("def f():\n    ## begin solution\n    return 1\n    ### END SOLUTION", "alone on its line"),
        ("def f():\n    ### BEGIN SOLUTION here\n    return 1\n    ### END SOLUTION", "alone on its line"),
        ("def f():\n    return 1  ### BEGIN SOLUTION\n    ### END SOLUTION", "alone on its line"),
        ("def f():\n    return 1", "answer cell without"),
        ("### BEGIN SOLUTION\nx = 1\n### END SOLUTION", "outside a function"),
        ("class A:\n    ### BEGIN SOLUTION\n    x = 1\n    ### END SOLUTION", "outside a function"),
        ("def f(:\n    ### BEGIN SOLUTION\n    x = 1\n    ### END SOLUTION", "isn't valid Python"),
    ],
)
def test_bad_markers_are_refused_with_the_cell(answer, phrase):
    with pytest.raises(EditionError, match="cell 'ex-a'") as caught:
        student_edition(lesson(answer))
    assert phrase in str(caught.value)


def test_a_solution_outside_an_answer_cell_is_refused():
    with pytest.raises(EditionError, match="nbgrader"):
        student_edition(lesson(metadata={}))
    notebook = lesson()
    notebook.cells[0].source += "\n### BEGIN SOLUTION"
    with pytest.raises(EditionError, match="title"):
        student_edition(notebook)


# --------------------------------------------------------------------------------------------------------------------


def edition(text):
    return new_notebook(cells=[new_code_cell(text, id="c")])


def test_unchanged_files_are_renewed_and_changed_ones_never(tmp_path):
    first = write_edition(edition("v1"), tmp_path, "15-01_a.ipynb")
    path = tmp_path / "15-01_a.ipynb"
    assert (first.path, first.is_new, first.kept) == (path, True, ())
    assert not write_edition(edition("v1"), tmp_path, "15-01_a.ipynb").is_new

    renewed = write_edition(edition("v2"), tmp_path, "15-01_a.ipynb")
    assert renewed.path == path, "nobody has changed it, so it is replaced"
    assert "v2" in path.read_text()

    path.write_text(path.read_text() + "\n")  # opened and saved, or worked on: the student's now
    mine = path.read_bytes()
    same = write_edition(edition("v2"), tmp_path, "15-01_a.ipynb")
    assert (same.path, same.is_new, same.kept) == (path, False, (path,)), "they work on this very edition"

    updated = write_edition(edition("v3"), tmp_path, "15-01_a.ipynb")
    assert updated.path.name == "15-01_a.updated.ipynb"
    assert updated.kept == (path,)
    assert not write_edition(edition("v3"), tmp_path, "15-01_a.ipynb").is_new

    assert write_edition(edition("v4"), tmp_path, "15-01_a.ipynb").path == updated.path
    updated.path.write_text("also worked on")
    last = write_edition(edition("v5"), tmp_path, "15-01_a.ipynb")
    assert last.path.name == "15-01_a.updated-2.ipynb"
    assert path.read_bytes() == mine
    assert updated.path.read_text() == "also worked on"


@pytest.mark.parametrize("record", [None, "{broken", "[]", "null", '{"a.ipynb": 3}'])
def test_without_its_record_every_file_counts_as_the_students(tmp_path, record):
    write_edition(edition("v1"), tmp_path, "a.ipynb")
    if record is None:
        (tmp_path / workbook.RECORD).unlink()
    else:
        (tmp_path / workbook.RECORD).write_text(record)
    before = (tmp_path / "a.ipynb").read_bytes()
    assert write_edition(edition("v2"), tmp_path, "a.ipynb").path.name == "a.updated.ipynb"
    assert (tmp_path / "a.ipynb").read_bytes() == before


def end_at_write(monkeypatch, number):
    """The process ends at the write of this number; the next one is another process."""
    real, count = workbook.write_whole, 0

    def write(path, content):
        nonlocal count
        count += 1
        if count == number:
            raise KeyboardInterrupt
        real(path, content)

    monkeypatch.setattr(workbook, "write_whole", write)


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("before", [[], ["v1"]])
def test_ended_halfway_no_file_counts_as_the_students(tmp_path, monkeypatch, number, before):
    for text in before:
        write_edition(edition(text), tmp_path, "a.ipynb")
    with monkeypatch.context() as patch:
        end_at_write(patch, number)
        with pytest.raises(KeyboardInterrupt):
            write_edition(edition("v2"), tmp_path, "a.ipynb")
    for text in ("v2", "v3"):
        written = write_edition(edition(text), tmp_path, "a.ipynb")
        assert (written.path.name, written.kept) == ("a.ipynb", ())
        assert text in written.path.read_text()


def test_a_record_with_one_digest_a_file_is_understood(tmp_path):
    path = write_edition(edition("v1"), tmp_path, "a.ipynb").path
    record = {name: digests[-1] for name, digests in json.loads((tmp_path / workbook.RECORD).read_text()).items()}
    (tmp_path / workbook.RECORD).write_text(json.dumps(record))
    assert write_edition(edition("v2"), tmp_path, "a.ipynb").path == path


def test_a_deleted_file_is_made_again(tmp_path):
    path = write_edition(edition("v1"), tmp_path, "a.ipynb").path
    path.unlink()
    assert write_edition(edition("v1"), tmp_path, "a.ipynb").is_new


def test_drafts_are_not_for_students_unless_they_are_named(tmp_path):
    book = load()
    topics = {**book.topics, "15-02": replace(book.topics["15-02"], status="draft")}
    chosen = [notebook.topic for notebook in workbook.finished(replace(book, topics=topics))]
    assert "15-01" in chosen
    assert "15-02" not in chosen


def test_a_bad_notebook_does_not_stop_the_others(tmp_path, capsys):
    (tmp_path / "bad.ipynb").write_text("not json")
    nbformat.write(lesson("def f():\n    ### BEGIN SOLUTION\n    return 1"), tmp_path / "unbalanced.ipynb")
    nbformat.write(lesson(), tmp_path / "good.ipynb")
    chosen = [Selected(None, name, tmp_path / f"{name}.ipynb") for name in ("bad", "unbalanced", "good", "absent")]
    assert workbook.make(chosen, tmp_path / "w") == 1
    said = capsys.readouterr().out
    assert "bad.ipynb: no student edition" in said
    assert "unbalanced.ipynb: no student edition, because of\n  cell 'ex-a'" in said
    assert [path.name for path in (tmp_path / "w").glob("*.ipynb")] == ["good.ipynb"]

    (tmp_path / "w" / "good.ipynb").write_text("mine")
    changed = lesson()
    changed.cells[0].source = "# A better title"
    nbformat.write(changed, tmp_path / "good.ipynb")
    assert workbook.make(chosen[2:], tmp_path / "w") == 0
    assert "good.ipynb: yours, left as it is. The lesson has a newer edition: it is in good.updated.ipynb" in (
        capsys.readouterr().out
    )
