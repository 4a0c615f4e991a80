"""The student edition: what is taken out, what is refused, and what becomes of a student's work when it is renewed."""

import copy
import hashlib
import json
import os
import shutil
import threading
import warnings
from dataclasses import replace

import nbformat
import pytest
from jupyter_client import KernelManager
from jupyter_client.kernelspec import KernelSpecManager
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from course import renewing, workbook
from course.edition import EditionError, jupyter_metadata, solutions, student_edition, unlink_missing
from course.exercise_form import answer_metadata, check_metadata
from course.kernels import connection
from course.renewing import EARLIER, EDITIONS_KEPT, OLD_RECORD, RECORDS, write_edition
from course.selection import Selected
from course.syllabus import load

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
    unlink_missing(notebook, tmp_path)
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


def test_hidden_tests_are_not_handed_out():
    hidden = "### BEGIN HIDDEN TESTS\nassert Swish(1) == 1\n### END HIDDEN TESTS"
    notebook = lesson()
    notebook.cells[3].source = f"check(Swish)\n{hidden}\nprint(1)\n\n{hidden}"
    assert student_edition(notebook).cells[3].source == "check(Swish)\nprint(1)"
    for source, phrase in (
        ("### BEGIN HIDDEN TESTS", "without ### END"),
        ("# BEGIN HIDDEN TEST\n1", "must be '### BEGIN HIDDEN TESTS'"),
    ):
        notebook.cells[3].source = source
        with pytest.raises(EditionError, match=phrase):
            student_edition(notebook)
    for place in (0, 1):  # where nbgrader would leave them in
        notebook = lesson()
        notebook.cells[place].source = hidden
        with pytest.raises(EditionError, match="hidden tests"):
            student_edition(notebook)


def test_a_cell_without_an_id_is_refused():
    notebook = lesson()
    del notebook.cells[1]["id"]
    with pytest.raises(EditionError, match="cell 2 has no id"):
        student_edition(notebook)


# --------------------------------------------------------------------------------------------------------------------
# a new edition of a lesson

NAME = "15-95_a.ipynb"
STUB = "def double(x):\n    # YOUR CODE HERE\n    raise NotImplementedError"
ANSWER_OF_MINE = "def double(x):\n    return x + x"


def edition(text="The lesson", demo="print(1)", stub=STUB, check="check.double(double)"):
    """A lesson of six cells: title, task, ex-a, ex-a-check, demo, last."""
    return new_notebook(
        cells=[
            new_markdown_cell(f"# {text}", id="title"),
            new_markdown_cell("### Exercise 15-95.1 — Double (10 points, 20 minutes)", id="task"),
            new_code_cell(stub, id="ex-a", metadata={"nbgrader": answer_metadata("ex-a")}),
            new_code_cell(check, id="ex-a-check", metadata={"nbgrader": check_metadata("ex-a-check", 10)}),
            new_code_cell(demo, id="demo"),
            new_code_cell("print('last')", id="last"),
        ]
    )


def put(notebook, folder):
    return write_edition(notebook, folder, NAME)


def read(path):
    notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    return notebook


def work(path, change):
    """What a student does in JupyterLab: open, change something, save. Returns the file's content afterwards."""
    notebook = read(path)
    change(notebook)
    nbformat.write(notebook, path)
    return path.read_bytes()


def cell_of(notebook, cell_id):
    (cell,) = (cell for cell in notebook.cells if cell.id == cell_id)
    return cell


def writes(cell_id, source):
    """A change for `work`."""

    def change(notebook):
        cell_of(notebook, cell_id).source = source

    return change


def answers(notebook):
    writes("ex-a", ANSWER_OF_MINE)(notebook)


def adds(cell, behind):
    """A change for `work`. Behind None is the top."""

    def change(notebook):
        above = [one.id for one in notebook.cells].index(behind) if behind else -1
        notebook.cells.insert(above + 1, copy.deepcopy(cell))

    return change


def sources(path):
    return {cell.id: cell.source for cell in read(path).cells}


def as_list(path):
    return [cell.source for cell in read(path).cells]


def tidy(notebook):
    """The sources without spaces at the ends of lines."""
    return ["\n".join(line.rstrip() for line in cell.source.splitlines()) for cell in notebook.cells]


def earlier_files(folder):
    return sorted((folder / EARLIER).glob("*")) if (folder / EARLIER).exists() else []


def account(written):
    told = workbook._account(written, NAME)
    assert "\n" not in told
    return told


def test_a_file_in_which_nobody_wrote_is_renewed(tmp_path):
    first = put(edition("v1"), tmp_path)
    path = tmp_path / NAME
    assert (first.path, first.what) == (path, "written")
    assert account(first) == f"{NAME}: written."
    before = path.stat().st_mtime_ns
    assert account(put(edition("v1"), tmp_path)) == f"{NAME}: up to date."
    assert path.stat().st_mtime_ns == before, "JupyterLab would say that the file has changed"

    renewed = put(edition("v2"), tmp_path)
    assert (renewed.path, account(renewed)) == (path, f"{NAME}: renewed.")
    assert sources(path)["title"] == "# v2"
    assert list(tmp_path.glob("*.ipynb")) == [path]
    assert earlier_files(tmp_path) == []


def runs(notebook):
    for number, cell in enumerate((cell for cell in notebook.cells if cell.cell_type == "code"), start=1):
        cell.execution_count = number
        cell.outputs = [new_output("stream", name="stdout", text=f"output of {cell.id}\n")]
        cell.metadata["execution"] = {"iopub.status.idle": "2026-11-20T10:00:00Z"}
    notebook.cells.append(new_code_cell(""))  # Shift+Enter in the last cell


def opens(notebook):
    notebook.metadata = {"kernelspec": {"name": "other", "display_name": "Other", "language": "python"}}
    notebook.cells[0].metadata["collapsed"] = True


def reformats(notebook):
    for cell in notebook.cells:
        cell.source = cell.source.replace("\n", "  \n") + " "


@pytest.mark.parametrize("change", [opens, runs, reformats])
def test_opened_run_and_saved_is_not_written(tmp_path, change):
    path = put(edition("v1", demo="print(1)"), tmp_path).path
    work(path, change)
    path.write_bytes(path.read_bytes() + b"\n\n")
    saved = path.read_bytes()
    assert put(edition("v1", demo="print(1)"), tmp_path).what == "up to date"
    assert path.read_bytes() == saved

    assert account(put(edition("v2", demo="print(2)"), tmp_path)) == f"{NAME}: renewed."
    assert tidy(read(path)) == tidy(edition("v2", demo="print(2)"))
    assert earlier_files(tmp_path) == []


def test_outputs_stay_where_the_source_does(tmp_path):
    """The start page counts the checks that have printed "passed"."""
    path = put(edition(demo="print(1)"), tmp_path).path
    work(path, answers)
    work(path, runs)
    put(edition(demo="print(2)"), tmp_path)
    renewed = read(path)
    for cell_id in ("ex-a", "ex-a-check", "last"):
        assert cell_of(renewed, cell_id).outputs[0].text == f"output of {cell_id}\n"
        assert cell_of(renewed, cell_id).execution_count
    assert cell_of(renewed, "demo").outputs == []
    assert cell_of(renewed, "demo").execution_count is None


def test_an_answer_goes_along_and_the_file_as_it_was_is_kept(tmp_path):
    path = put(edition("v1"), tmp_path).path
    mine = work(path, answers)
    assert put(edition("v1"), tmp_path).what == "up to date"
    assert path.read_bytes() == mine

    renewed = put(edition("v2"), tmp_path)
    assert sources(path) == {**{cell.id: cell.source for cell in edition("v2").cells}, "ex-a": ANSWER_OF_MINE}
    assert list(tmp_path.glob("*.ipynb")) == [path]
    (earlier,) = earlier_files(tmp_path)
    assert earlier.read_bytes() == mine
    assert account(renewed) == (
        f"{NAME}: renewed, with your answers to 15-95.1. Your file as it was is {EARLIER}/{earlier.name}."
    )
    assert cell_of(read(path), "ex-a").metadata.nbgrader.grade_id == "ex-a"
    assert put(edition("v2"), tmp_path).what == "up to date"


def test_an_answer_stays_if_the_stub_has_changed_and_that_is_said(tmp_path):
    path = put(edition(), tmp_path).path
    work(path, answers)
    renewed = put(edition(stub=STUB.replace("x", "x, times=2")), tmp_path)
    assert sources(path)["ex-a"] == ANSWER_OF_MINE
    assert "The stub of 15-95.1 has changed, too: see whether your answer still fits." in account(renewed)
    again = put(edition("v3", stub=STUB.replace("x", "x, times=2")), tmp_path)
    assert sources(path)["ex-a"] == ANSWER_OF_MINE
    assert "stub" not in account(again), "said once"


def test_a_stub_without_an_answer_is_renewed(tmp_path):
    path = put(edition(), tmp_path).path
    stub = STUB.replace("x", "x, times=2")
    assert account(put(edition(stub=stub), tmp_path)) == f"{NAME}: renewed."
    assert sources(path)["ex-a"] == stub


def test_points_and_tags_of_the_lesson_are_renewed(tmp_path):
    path = put(edition(), tmp_path).path
    work(path, answers)
    new = edition()
    cell_of(new, "ex-a-check").metadata.nbgrader.points = 30
    cell_of(new, "demo").metadata["tags"] = ["hide-input"]
    assert put(new, tmp_path).what == "renewed"
    assert cell_of(read(path), "ex-a-check").metadata.nbgrader.points == 30
    assert cell_of(read(path), "demo").metadata.tags == ["hide-input"]


def test_cells_that_were_added_follow_the_cell_that_they_followed(tmp_path):
    path = put(edition("v1"), tmp_path).path
    picture = {"dot.png": {"image/png": "iVBORw0KGgo="}}
    note = new_markdown_cell("![](attachment:dot.png)", id="own-note", attachments=picture)
    for cell, behind in (
        (new_code_cell("first", id="own-1"), None),
        (new_code_cell("third", id="own-3"), "ex-a"),
        (new_code_cell("second", id="own-2"), "ex-a"),
        (note, "demo"),
        (new_code_cell("at the end", id="own-4"), "last"),
    ):
        work(path, adds(cell, behind))
    new = edition("v2")
    new.cells = [cell for cell in new.cells if cell.id != "demo"]  # what follows it follows the one before
    new.cells.insert(3, new_markdown_cell("An addition", id="addition"))
    renewed = put(new, tmp_path)
    assert [cell.id for cell in read(path).cells] == [
        *("own-1", "title", "task", "ex-a", "own-2", "own-3", "addition", "ex-a-check", "own-note", "last", "own-4")
    ]
    assert cell_of(read(path), "own-note").attachments == picture
    assert account(renewed).startswith(f"{NAME}: renewed, with 5 of your own cells. Your file as it was")
    put(edition("v3"), tmp_path)
    assert "own-note" in sources(path)
    assert len(earlier_files(tmp_path)) == 2


def test_a_lesson_cell_that_was_edited_stays_until_the_lesson_changes_it(tmp_path):
    path = put(edition("v1", demo="print(1)"), tmp_path).path
    mine = work(path, writes("demo", "print('mine')"))
    renewed = put(edition("v2", demo="print(1)"), tmp_path)
    assert sources(path)["title"] == "# v2"
    assert sources(path)["demo"] == "print('mine')"
    assert account(renewed).startswith(f"{NAME}: renewed, with your changes of 'demo'. Your file as it was is ")

    second = path.read_bytes()
    renewed = put(edition("v2", demo="print(3)"), tmp_path)
    assert sources(path)["demo"] == "print(3)"
    assert account(renewed).startswith(
        f"{NAME}: renewed. The lesson has changed 'demo', too: its version is in place of yours. Your file as it was"
    )
    assert {file.read_bytes() for file in earlier_files(tmp_path)} == {mine, second}
    assert account(put(edition("v3", demo="print(3)"), tmp_path)) == f"{NAME}: renewed."


def test_a_cell_that_became_another_kind_of_cell_was_edited(tmp_path):
    """A lesson's code that the student doesn't want to run."""
    path = put(edition("v1"), tmp_path).path

    def change(notebook):
        raw = nbformat.v4.new_raw_cell(cell_of(notebook, "demo").source, id="demo")
        notebook.cells = [raw if cell.id == "demo" else cell for cell in notebook.cells]

    mine = work(path, change)
    put(edition("v2"), tmp_path)
    assert cell_of(read(path), "demo").cell_type == "raw"
    assert [file.read_bytes() for file in earlier_files(tmp_path)] == [mine]


def test_what_the_lesson_no_longer_has_is_in_the_kept_file(tmp_path):
    path = put(edition(), tmp_path).path
    work(path, answers)
    mine = work(path, writes("demo", "print('mine')"))
    new = edition()
    new.cells = [cell for cell in new.cells if cell.id in ("title", "last")]
    renewed = put(new, tmp_path)
    assert list(sources(path)) == ["title", "last"]
    assert "The lesson no longer has 'ex-a' and 'demo', which you had changed." in account(renewed)
    assert [file.read_bytes() for file in earlier_files(tmp_path)] == [mine]


def test_a_lesson_cell_that_was_deleted_or_moved_is_back_in_its_place(tmp_path):
    path = put(edition("v1"), tmp_path).path

    def change(notebook):
        answers(notebook)
        del notebook.cells[0]
        notebook.cells.insert(0, notebook.cells.pop())

    work(path, change)
    put(edition("v2"), tmp_path)
    assert list(sources(path)) == [cell.id for cell in edition().cells]
    assert sources(path)["ex-a"] == ANSWER_OF_MINE


# --------------------------------------------------------------------------------------------------------------------
# which cell is which


def loses_ids(notebook):
    for cell in notebook.cells:
        del cell["id"]
    notebook.nbformat_minor = 4


def gets_other_ids(notebook):
    for number, cell in enumerate(notebook.cells):
        cell.id = f"c{number}"


@pytest.mark.parametrize("change", [loses_ids, gets_other_ids])
def test_without_their_ids_cells_are_recognised_by_grade_id_and_source(tmp_path, change):
    path = put(edition("v1"), tmp_path).path
    work(path, change)
    assert put(edition("v1"), tmp_path).what == "up to date", "no source has changed"

    def writes_something(notebook):
        own = new_code_cell("own")
        if change is loses_ids:
            del own["id"]
        notebook.cells[2].source = ANSWER_OF_MINE
        notebook.cells.insert(5, own)

    work(path, writes_something)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nbformat's, of cells that have no id
        renewed = put(edition("v2"), tmp_path)
    v2 = [cell.source for cell in edition("v2").cells]
    assert as_list(path) == [*v2[:2], ANSWER_OF_MINE, *v2[3:5], "own", *v2[5:]]
    assert account(renewed).startswith(f"{NAME}: renewed, with your answers to 15-95.1 and 1 of your own cells.")


def test_without_ids_and_record_cells_are_recognised_all_the_same(tmp_path):
    path = put(edition("v1"), tmp_path).path
    work(path, answers)
    work(path, gets_other_ids)
    shutil.rmtree(tmp_path / RECORDS)
    put(edition("v1"), tmp_path)
    assert sources(path) == {**{cell.id: cell.source for cell in edition("v1").cells}, "ex-a": ANSWER_OF_MINE}


def test_a_copy_of_a_cell_is_a_cell_that_was_added(tmp_path):
    """JupyterLab's copy has the metadata of the original, so the grade_id, too."""
    path = put(edition("v1"), tmp_path).path

    def change(notebook):
        answer, demo = copy.deepcopy(cell_of(notebook, "ex-a")), copy.deepcopy(cell_of(notebook, "demo"))
        answer.update(id="5a0c71d2", source="def double(x):\n    return 3 * x  # first try")
        demo.update(id="5a0c71d3")
        answers(notebook)
        notebook.cells[2:2] = [answer, demo]

    work(path, change)
    put(edition("v2"), tmp_path)
    assert list(sources(path)) == ["title", "task", "5a0c71d2", "5a0c71d3", "ex-a", "ex-a-check", "demo", "last"]
    assert sources(path)["ex-a"] == ANSWER_OF_MINE
    assert "first try" in sources(path)["5a0c71d2"]


def test_an_answer_in_two_cells_stays_in_two_cells(tmp_path):
    """JupyterLab splits a cell so that the last part keeps the id, and all have its metadata."""
    path = put(edition("v1"), tmp_path).path

    def change(notebook):
        last = cell_of(notebook, "ex-a")
        first = new_code_cell("def helper(x):\n    return x", metadata=last.metadata)
        last.source = "def double(x):\n    return helper(x) + x"
        notebook.cells.insert(notebook.cells.index(last), first)

    work(path, change)
    put(edition("v2"), tmp_path)
    code = [text for text in as_list(path) if text.startswith("def")]
    assert code == ["def helper(x):\n    return x", "def double(x):\n    return helper(x) + x"]


def test_an_exercise_with_a_new_cell_id_has_the_grade_id(tmp_path):
    path = put(edition("v1"), tmp_path).path
    work(path, answers)
    new = edition("v2")
    cell_of(new, "ex-a").id = "ex-double"
    put(new, tmp_path)
    assert sources(path)["ex-double"] == ANSWER_OF_MINE
    assert len(read(path).cells) == 6


def duplicates_an_id(notebook):
    notebook["cells"].append({**notebook["cells"][0], "source": "mine"})


def renames_an_id(notebook):
    notebook["cells"][2]["id"], notebook["cells"][3]["id"] = "ex-a-check", "ex-a"


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (duplicates_an_id, "two of its cells have the id 'title'"),
        (renames_an_id, "its cell 'ex-a-check' has the grade_id of 'ex-a'"),
        (b"{broken", "not JSON, so not a notebook (line 1, column 2"),
        (b"", "the file is empty"),
        (b'{"cells": 3}', "notebook"),
        (b"\xff\xfe", "not UTF-8 text"),
    ],
)
def test_a_file_that_cannot_be_renewed_is_left_alone(tmp_path, broken, reason):
    path = put(edition("v1"), tmp_path).path
    if callable(broken):
        notebook = json.loads(path.read_bytes())
        broken(notebook)
        path.write_text(json.dumps(notebook))
    else:
        path.write_bytes(broken)
    mine = path.read_bytes()

    written = put(edition("v2"), tmp_path)
    beside = tmp_path / "15-95_a.updated.ipynb"
    assert written.path == beside
    assert account(written).startswith(f"{NAME} is left as it is: {reason}")
    assert account(written).endswith(f". The newest edition is {beside.name}: written.")
    assert sources(beside)["title"] == "# v2"
    assert account(put(edition("v2"), tmp_path)).endswith(f". The newest edition is {beside.name}: up to date.")

    work(beside, answers)
    put(edition("v3"), tmp_path)
    assert (sources(beside)["title"], sources(beside)["ex-a"]) == ("# v3", ANSWER_OF_MINE)
    beside.write_text("broken as well")
    assert put(edition("v3"), tmp_path).path.name == "15-95_a.updated-2.ipynb"
    assert path.read_bytes() == mine
    assert beside.read_text() == "broken as well"
    path.unlink()
    assert put(edition("v4"), tmp_path).path == path


@pytest.mark.parametrize("metadata", ["text", ["list"], {"grade_id": ["list"]}, {"solution": True}])
def test_strange_metadata_does_not_stop_it(tmp_path, metadata):
    path = put(edition("v1"), tmp_path).path

    def change(notebook):
        answers(notebook)
        cell_of(notebook, "ex-a").metadata["nbgrader"] = metadata

    work(path, change)
    put(edition("v2"), tmp_path)
    assert sources(path)["ex-a"] == ANSWER_OF_MINE
    assert cell_of(read(path), "ex-a").metadata.nbgrader.grade_id == "ex-a"


# --------------------------------------------------------------------------------------------------------------------
# which edition it was made from


def test_a_lesson_that_was_reverted_is_renewed_like_any_other(tmp_path):
    path = put(edition("v1"), tmp_path).path
    put(edition("v2"), tmp_path)
    work(path, answers)
    assert put(edition("v1"), tmp_path).what == "renewed"
    assert (sources(path)["title"], sources(path)["ex-a"]) == ("# v1", ANSWER_OF_MINE)
    work(path, writes("title", "# v1, with my notes"))
    put(edition("v1", demo="print(2)"), tmp_path)
    assert sources(path)["title"] == "# v1, with my notes"


def test_after_overwrite_in_jupyterlab_the_lesson_is_renewed_again(tmp_path):
    """The notebook was open during the update. JupyterLab asks, and "Overwrite" saves the old edition."""
    path = put(edition("v1", demo="print(1)"), tmp_path).path
    work(path, answers)
    opened = path.read_bytes()
    put(edition("v2", demo="print(2)"), tmp_path)
    path.write_bytes(opened)
    overwritten = work(path, writes("ex-a", "def double(x):\n    return 2 * x"))

    renewed = put(edition("v2", demo="print(2)"), tmp_path)
    assert renewed.what == "renewed"
    assert sources(path)["title"] == "# v2"
    assert sources(path)["demo"] == "print(2)", "the student never changed it"
    assert sources(path)["ex-a"] == "def double(x):\n    return 2 * x"
    assert [file.read_bytes() for file in earlier_files(tmp_path)] == [opened, overwritten]
    assert account(renewed).startswith(f"{NAME}: renewed, with your answers to 15-95.1. Your file")


@pytest.mark.parametrize("grows", [True, False])
def test_after_overwrite_cells_come_and_go_with_the_lesson(tmp_path, grows):
    short, long = edition(), edition()
    long.cells.insert(1, new_markdown_cell("An addition", id="addition"))
    first, second = (short, long) if grows else (long, short)
    path = put(first, tmp_path).path
    opened = path.read_bytes()
    put(second, tmp_path)
    path.write_bytes(opened)
    assert put(second, tmp_path).what == "renewed"
    assert as_list(path) == [cell.source for cell in second.cells]


def test_an_old_file_that_was_put_back_is_renewed(tmp_path):
    path = put(edition("v1"), tmp_path).path
    work(path, answers)
    for text in ("v2", "v3"):
        put(edition(text), tmp_path)
    shutil.copy(earlier_files(tmp_path)[0], path)
    put(edition("v4"), tmp_path)
    assert (sources(path)["title"], sources(path)["ex-a"]) == ("# v4", ANSWER_OF_MINE)


@pytest.mark.parametrize("record", [None, "{broken", "[]", "null", '{"0": 3}', '{"0": [1]}', "\udcff"])
def test_without_its_record_all_that_differs_counts_as_the_students(tmp_path, record):
    path = put(edition("v1", demo="print(1)"), tmp_path).path
    work(path, answers)
    mine = work(path, adds(new_code_cell("own", id="own"), "demo"))
    (recorded,) = (tmp_path / RECORDS).iterdir()
    if record is None:
        recorded.unlink()
    else:
        recorded.write_bytes(record.encode("utf-8", "surrogateescape"))
    renewed = put(edition("v2", demo="print(2)"), tmp_path)
    assert sources(path)["ex-a"] == ANSWER_OF_MINE
    assert [sources(path)[cell_id] for cell_id in ("title", "demo", "own")] == ["# v2", "print(2)", "own"]
    assert [file.read_bytes() for file in earlier_files(tmp_path)] == [mine]
    assert "The lesson has changed 'title' and 'demo', too" in account(renewed)
    assert "isn't on record" in account(renewed)
    assert "stub" not in account(renewed), "nobody knows"
    assert put(edition("v2", demo="print(2)"), tmp_path).what == "up to date"


def test_the_record_does_not_grow_for_ever(tmp_path):
    for number in range(EDITIONS_KEPT + 5):
        put(edition(f"v{number}"), tmp_path)
    (recorded,) = (tmp_path / RECORDS).iterdir()
    assert len(json.loads(recorded.read_text())) == EDITIONS_KEPT
    assert account(put(edition("the last one"), tmp_path)) == f"{NAME}: renewed."


def as_made_before(folder, notebook, form):
    """A workbook of the course's earlier version: the file, and a record of its digest."""
    path = folder / NAME
    content = nbformat.writes(notebook, version=nbformat.NO_CONVERT).rstrip("\n").encode() + b"\n"
    path.write_bytes(content)
    (folder / OLD_RECORD).write_text(json.dumps({NAME: form(hashlib.sha256(content).hexdigest())}))
    return path


@pytest.mark.parametrize("form", [str, lambda digest: [digest], lambda digest: ["0" * 64, digest]])
def test_the_record_of_earlier_versions_is_understood(tmp_path, form):
    path = as_made_before(tmp_path, edition("v1"), form)
    assert account(put(edition("v2"), tmp_path)) == f"{NAME}: renewed."
    assert as_list(path) == [cell.source for cell in edition("v2").cells]

    path = as_made_before(tmp_path, edition("v1"), form)
    shutil.rmtree(tmp_path / RECORDS)
    mine = work(path, answers)
    put(edition("v2"), tmp_path)
    assert (sources(path)["title"], sources(path)["ex-a"]) == ("# v2", ANSWER_OF_MINE)
    assert [file.read_bytes() for file in earlier_files(tmp_path)] == [mine]


@pytest.mark.parametrize("record", ["{", "[]", "null", '{"15-95_a.ipynb": 3}', '{"15-95_a.ipynb": null}'])
def test_a_damaged_old_record_is_none(tmp_path, record):
    path = as_made_before(tmp_path, edition("v1"), str)
    (tmp_path / OLD_RECORD).write_text(record)
    before = path.read_bytes()
    put(edition("v2"), tmp_path)
    assert [file.read_bytes() for file in earlier_files(tmp_path)] == [before]


def test_editions_beside_the_file_that_earlier_versions_wrote_stay(tmp_path):
    path = as_made_before(tmp_path, edition("v1"), str)
    beside = tmp_path / "15-95_a.updated.ipynb"
    beside.write_text("mine")
    assert put(edition("v2"), tmp_path).path == path
    assert beside.read_text() == "mine"


# --------------------------------------------------------------------------------------------------------------------
# nothing is lost


def test_files_that_are_kept_are_never_overwritten(tmp_path):
    path = put(edition("v0"), tmp_path).path
    kept = []
    for number in range(1, 5):
        kept.append(work(path, writes("ex-a", f"{ANSWER_OF_MINE}  # {number}")))
        put(edition(f"v{number}"), tmp_path)
    assert sorted(file.read_bytes() for file in earlier_files(tmp_path)) == sorted(kept)
    assert all(file.name.startswith("15-95_a.") and file.suffix == ".ipynb" for file in earlier_files(tmp_path))


STEPS = range(1, 7)  # two of each file that is written


def end_at(monkeypatch, step):
    """The process ends before a file is put in its place (odd steps) or right after (even ones)."""
    real, count = os.replace, 0

    def put_in_place(source, target):
        nonlocal count
        count += 1
        if 2 * count - 1 == step:
            raise KeyboardInterrupt
        real(source, target)
        if 2 * count == step:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", put_in_place)


@pytest.mark.parametrize("step", STEPS[:4])
@pytest.mark.parametrize("before", [[], ["v1"]])
@pytest.mark.parametrize("after", [["v2", "v3"], ["v3"]])
def test_ended_halfway_no_cell_counts_as_the_students(tmp_path, monkeypatch, step, before, after):
    for text in before:
        put(edition(text, stub=f"{STUB}  # {text}"), tmp_path)
    with monkeypatch.context() as patch:
        end_at(patch, step)
        with pytest.raises(KeyboardInterrupt):
            put(edition("v2", stub=f"{STUB}  # v2"), tmp_path)
    for text in after:
        put(edition(text, stub=f"{STUB}  # {text}"), tmp_path)
        assert as_list(tmp_path / NAME) == [cell.source for cell in edition(text, stub=f"{STUB}  # {text}").cells]
    assert earlier_files(tmp_path) == []


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("after", [["v2", "v3"], ["v3"]])
@pytest.mark.parametrize("is_recorded", [True, False])
def test_ended_halfway_nothing_of_the_students_is_lost(tmp_path, monkeypatch, step, after, is_recorded):
    path = put(edition("v1"), tmp_path).path
    mine = work(path, answers)
    if not is_recorded:
        shutil.rmtree(tmp_path / RECORDS)
    with monkeypatch.context() as patch:
        end_at(patch, step)
        with pytest.raises(KeyboardInterrupt):
            put(edition("v2"), tmp_path)
    assert sources(path)["ex-a"] == ANSWER_OF_MINE
    for text in after:
        put(edition(text), tmp_path)
        assert (sources(path)["title"], sources(path)["ex-a"]) == (f"# {text}", ANSWER_OF_MINE)
    assert mine in [file.read_bytes() for file in earlier_files(tmp_path)]
    assert list(tmp_path.glob("*.ipynb")) == [path]


def test_what_is_saved_during_the_update_is_not_lost(tmp_path, monkeypatch):
    path = put(edition("v1"), tmp_path).path
    work(path, answers)
    real, saved = renewing.merge, []

    def merge_while_the_student_saves(*given):
        merged = real(*given)
        if not saved:
            saved.append(work(path, writes("ex-a", "def double(x):\n    return 2 * x  # saved last")))
        return merged

    monkeypatch.setattr(renewing, "merge", merge_while_the_student_saves)
    put(edition("v2"), tmp_path)
    assert sources(path)["title"] == "# v2"
    assert "saved last" in sources(path)["ex-a"]
    assert saved[0] in [file.read_bytes() for file in earlier_files(tmp_path)]


def test_two_at_once_destroy_nothing(tmp_path):
    path = put(edition("v1"), tmp_path).path
    mine = work(path, answers)
    together = threading.Barrier(6)
    failed = []

    def renew():
        together.wait(timeout=30)
        try:
            put(edition("v2"), tmp_path)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=renew) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert failed == []
    assert (sources(path)["title"], sources(path)["ex-a"]) == ("# v2", ANSWER_OF_MINE)
    assert mine in [file.read_bytes() for file in earlier_files(tmp_path)]
    assert all(ANSWER_OF_MINE in sources(file)["ex-a"] for file in earlier_files(tmp_path))
    assert not list(tmp_path.rglob("*.new")), "no part of a file is left"


def test_a_deleted_file_is_made_again(tmp_path):
    path = put(edition("v1"), tmp_path).path
    path.unlink()
    assert put(edition("v1"), tmp_path).what == "written"
    assert path.exists()


# --------------------------------------------------------------------------------------------------------------------
# the command


def test_opening_a_notebook_changes_nothing_since_it_has_the_kernel_s_metadata(tmp_path):
    """JupyterLab sets both, from the kernel's answer and its specification, and saves only what differs."""
    manager = KernelManager(kernel_name="python3", **connection(tmp_path / "kernel.json"))
    manager.start_kernel()
    client = manager.client()
    try:
        client.start_channels()
        client.wait_for_ready(timeout=120)
        reply = client.kernel_info(reply=True, timeout=60)["content"]
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    specification = KernelSpecManager().get_kernel_spec("python3")
    metadata = jupyter_metadata()
    assert metadata["language_info"] == reply["language_info"]
    assert metadata["kernelspec"] == {
        "name": "python3",
        "display_name": specification.display_name,
        "language": specification.language,
    }

    nbformat.write(lesson(), tmp_path / "a.ipynb")
    workbook.make([Selected(None, "a", tmp_path / "a.ipynb")], tmp_path / "w")
    workbook.make_start_page(load(), tmp_path / "w")
    for path in (tmp_path / "w").glob("*.ipynb"):
        assert read(path).metadata == metadata


@pytest.mark.parametrize("topic", ["15-01", "15-06"])
def test_all_answers_of_a_lesson_go_along(tmp_path, topic):
    full = read(load().topics[topic].path)
    new = student_edition(full)
    path = put(new, tmp_path).path
    answered = {cell.id: cell.source for cell in full.cells if cell.metadata.get("nbgrader", {}).get("solution")}
    assert len(answered) >= 4
    for cell_id, source in answered.items():
        work(path, writes(cell_id, source))
    for cell in new.cells:
        if cell.cell_type == "markdown":
            cell.source += "\n\nA better sentence."
    renewed = put(new, tmp_path)
    assert sources(path) == {cell.id: answered.get(cell.id, cell.source) for cell in new.cells}
    assert account(renewed).count(f"{topic}.") == len(answered)


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
    said = capsys.readouterr().out
    assert said.startswith("good.ipynb is left as it is: not JSON, so not a notebook (line 1, column 1")
    assert said.endswith(". The newest edition is good.updated.ipynb: written.\n")
    assert (tmp_path / "w" / "good.ipynb").read_text() == "mine"


def test_a_file_in_the_place_of_the_earlier_ones_is_said(tmp_path):
    path = put(edition("v1"), tmp_path).path
    mine = work(path, answers)
    (tmp_path / EARLIER).write_text("a file")
    with pytest.raises(OSError, match=f"can't write in .*{EARLIER}"):
        put(edition("v2"), tmp_path)
    assert path.read_bytes() == mine
