"""The student edition: what is taken out, what is refused, and what becomes of a student's work when it is renewed."""

import copy
import json
import os
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import run_kernel
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output, new_raw_cell

from course import renewing, workbook
from course.edition import EditionError, solutions, student_edition, unlink_missing
from course.exercise_form import answer_metadata, check_metadata
from course.files import NotWritableError
from course.renewing import EARLIER, RECORD, write_edition
from course.selection import Selected
from course.syllabus import load

# --------------------------------------------------------------------------------------------------------------------
# no solutions

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
HIDDEN = "### BEGIN HIDDEN TESTS\nassert Swish(1) == 1\n### END HIDDEN TESTS"


def lesson(answer=ANSWER, metadata=None):
    """A lesson as it is committed: title, demo, ex-a, ex-a-check, with outputs."""
    notebook = new_notebook(
        cells=[
            new_markdown_cell("# Title", id="title"),
            new_code_cell("print(1)  # 1", id="demo"),
            new_code_cell(answer, id="ex-a", metadata={"nbgrader": answer_metadata("ex-a")}),
            new_code_cell("check(Swish)", id="ex-a-check", metadata={"nbgrader": check_metadata("ex-a-check", 10)}),
        ]
    )
    runs(notebook)
    return notebook


def runs(notebook):
    """Run all cells: outputs, and what an editor notes beside them."""
    for number, cell in enumerate((cell for cell in notebook.cells if cell.cell_type == "code"), start=1):
        cell.execution_count = number
        cell.outputs = [new_output("stream", name="stdout", text=f"output of {cell.id}\n")]
        cell.metadata["execution"] = {"iopub.status.idle": "2026-11-20T10:00:00Z"}
    return notebook


def test_solutions_hidden_tests_and_outputs_are_taken_out_and_all_else_stays():
    notebook = lesson()
    notebook.metadata["widgets"] = {"application/vnd.jupyter.widget-state+json": {"state": {}}}
    notebook.cells[3].source = f"check(Swish)\n{HIDDEN}\nprint(1)\n\n{HIDDEN}"
    before = copy.deepcopy(notebook)
    edition = student_edition(notebook)
    assert notebook == before, "the lesson itself is not changed"
    nbformat.validate(edition)
    assert edition.metadata == {}
    assert [cell.source for cell in edition.cells] == ["# Title", "print(1)  # 1", STUBBED, "check(Swish)\nprint(1)"]
    for cell, given in zip(edition.cells, before.cells, strict=True):
        assert (cell.id, cell.cell_type, cell.metadata) == (given.id, given.cell_type, given.metadata)
        assert (cell.get("outputs", []), cell.get("execution_count")) == ([], None)
    assert solutions(notebook) == {
        "ex-a": ["        secret = x.sigmoid()\n        return x * secret", "            return y + 41"]
    }


@pytest.mark.parametrize(
    ("place", "source", "phrase"),
    [
        ("ex-a", "def f():\n    ### BEGIN SOLUTION\n    return 1", "line 2: ### BEGIN SOLUTION without"),
        ("ex-a", "def f():\n    return 1\n    ### END SOLUTION", "line 3: ### END SOLUTION without"),
        ("ex-a", ANSWER.replace("        ### END", "        ### BEGIN", 1), "line 8: ### BEGIN SOLUTION inside"),
        ("ex-a", ANSWER.replace("### BEGIN", "## begin"), "alone on its line"),
        ("ex-a", "def f():\n    return 1  ### BEGIN SOLUTION\n    ### END SOLUTION", "alone on its line"),
        ("ex-a", "def f():\n    return 1", "answer cell without"),
        ("ex-a", "class A:\n    ### BEGIN SOLUTION\n    x = 1\n    ### END SOLUTION", "outside a function"),
        ("ex-a", "def f(:\n    ### BEGIN SOLUTION\n    x = 1\n    ### END SOLUTION", "isn't valid Python"),
        ("demo", ANSWER, "a solution, but"),
        ("title", "### BEGIN SOLUTION", "isn't code"),
        ("ex-a-check", "# BEGIN HIDDEN TEST\n1", "must be '### BEGIN HIDDEN TESTS'"),
        ("demo", HIDDEN, "hidden tests, but"),
        ("title", HIDDEN, "isn't code"),
    ],
)
def test_what_would_hand_out_a_solution_is_refused_with_the_cell(place, source, phrase):
    notebook = lesson()
    cell_of(notebook, place).source = source
    with pytest.raises(EditionError, match=f"cell '{place}'") as caught:
        student_edition(notebook)
    assert phrase in str(caught.value)


def test_a_cell_without_an_id_is_refused():
    notebook = lesson()
    del notebook.cells[1]["id"]
    with pytest.raises(EditionError, match="cell 2 has no id"):
        student_edition(notebook)


def test_links_to_notebooks_that_are_not_there_become_text():
    text = "[15-01](15-01_a.ipynb#part), {}, {}, [site](https://example.org/15-02_b.ipynb), [page](README.md)."
    code = "x = d['[15-02](15-02_b.ipynb)']"
    linked = text.format("[15-02](15-02_b.ipynb)", "[**15-03**, `x[0]`](15-03_c.ipynb#part)")
    notebook = new_notebook(cells=[new_markdown_cell(linked), new_code_cell(code)])
    unlink_missing(notebook, ["15-01_a.ipynb"])
    assert [cell.source for cell in notebook.cells] == [text.format("15-02", "**15-03**, `x[0]`"), code]


def test_no_edition_replaces_the_lessons_themselves_however_their_folder_is_called(tmp_path, monkeypatch):
    here = tmp_path.resolve()
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    lessons = [Selected(None, "a", here / "a.ipynb")]
    for folder in (here, Path("..")):
        with pytest.raises(NotWritableError, match="holds the notebooks themselves"):
            workbook.require_folder(folder, lessons)
    workbook.require_folder(Path(), lessons)


# --------------------------------------------------------------------------------------------------------------------
# a new edition of a lesson

NAME = "15-95_a.ipynb"
STUB = "def double(x):\n    # YOUR CODE HERE\n    raise NotImplementedError"
STUB_2 = STUB.replace("x", "x, times=2")
MINE = "def double(x):\n    return x + x"
IDS = ["title", "task", "ex-a", "ex-a-check", "demo", "last"]


def edition(text="The lesson", demo="print(1)", stub=STUB):
    """A lesson's student edition, with the cells IDS."""
    answer, check = answer_metadata("ex-a"), check_metadata("ex-a-check", 10)
    return new_notebook(
        cells=[
            new_markdown_cell(f"# {text}", id="title"),
            new_markdown_cell("### Exercise 15-95.1 — Double (10 points, 20 minutes)", id="task"),
            new_code_cell(stub, id="ex-a", metadata={"nbgrader": answer}),
            new_code_cell("check.double(double)", id="ex-a-check", metadata={"nbgrader": check}),
            new_code_cell(demo, id="demo"),
            new_code_cell("print('last')", id="last"),
        ]
    )


class Book:
    """A workbook with one lesson, which the student opens, changes and saves, and which is renewed."""

    def __init__(self, folder):
        self.folder = folder
        self.path = folder / NAME

    def renew(self, *given, **more):
        """Put a new edition into the workbook; what is said of it, without the file's name."""
        made = given[0] if given and not isinstance(given[0], str) else edition(*given, **more)
        told = write_edition(made, self.folder, NAME)
        assert told.startswith(f"{NAME}: ")
        assert "\n" not in told
        return told.removeprefix(f"{NAME}: ")

    def read(self):
        notebook = nbformat.read(self.path, as_version=nbformat.NO_CONVERT)
        nbformat.validate(notebook)
        return notebook

    def work(self, *changes, **sources):
        """Change the notebook and save it; `ex_a="…"` writes into a cell. Returns the file's content."""
        notebook = self.read()
        for name, source in sources.items():
            cell_of(notebook, name.replace("_", "-")).source = source
        for change in changes:
            change(notebook)
        nbformat.write(notebook, self.path)
        return self.path.read_bytes()

    def sources(self):
        return {cell.id: cell.source for cell in self.read().cells}

    def earlier(self):
        """The files as they were."""
        return {path.read_bytes() for path in (self.folder / EARLIER).glob("15-95_a.*.ipynb")}


@pytest.fixture
def book(tmp_path):
    return Book(tmp_path)


def cell_of(notebook, cell_id):
    (cell,) = (cell for cell in notebook.cells if cell.get("id") == cell_id)
    return cell


def adds(source, behind, **more):
    """A change that puts a cell of the student's below another one; None is the top."""

    def change(notebook):
        above = [cell.id for cell in notebook.cells].index(behind) if behind else -1
        notebook.cells.insert(above + 1, new_code_cell(source, **more))

    return change


def runs_to_the_end(notebook):
    runs(notebook).cells.append(new_code_cell(""))  # Shift+Enter in the last cell


def opens(notebook):
    notebook.metadata["kernelspec"] = {"name": "other", "display_name": "Other", "language": "python"}
    notebook.cells[0].metadata["collapsed"] = True


def reformats(notebook):
    for cell in notebook.cells:
        cell.source = cell.source.replace("\n", "  \n") + " \n"


@pytest.mark.parametrize("change", [opens, runs_to_the_end, reformats])
def test_a_file_in_which_nobody_wrote_is_renewed(book, change):
    assert book.renew("v1") == "written."
    saved = book.work(change)
    before = book.path.stat().st_mtime_ns
    assert book.renew("v1") == "up to date."
    assert book.path.stat().st_mtime_ns == before, "JupyterLab would say that the file has changed"
    assert book.path.read_bytes() == saved

    assert book.renew("v2", demo="print(2)", stub=STUB_2) == "renewed."
    assert [text.rstrip().replace("  \n", "\n") for text in book.sources().values()] == [
        cell.source for cell in edition("v2", demo="print(2)", stub=STUB_2).cells
    ]
    assert list(book.folder.iterdir()) == [book.path]
    book.path.unlink()
    assert book.renew("v2") == "written."


def test_a_students_work_goes_along_and_the_file_as_it_was_is_kept(book):
    book.renew("v1", demo="print(1)")
    picture = {"dot.png": {"image/png": "iVBORw0KGgo="}}
    note = new_markdown_cell("![](attachment:dot.png)", id="own-note", attachments=picture)
    mine = book.work(
        adds("first", None, id="own-1"),
        adds("third", "ex-a", id="own-3"),
        adds("second", "ex-a", id="own-2"),
        adds("at the end", "last", id="own-4"),
        lambda notebook: notebook.cells.insert(-2, note),  # below demo
        runs,
        ex_a=MINE,
        ex_a_check="check.double.skip()\ncheck.double(double)",
    )
    assert book.renew("v1", demo="print(1)") == "up to date."
    assert book.path.read_bytes() == mine

    new = edition("v2", demo="print(2)")
    new.cells.insert(3, new_markdown_cell("An addition", id="addition"))
    cell_of(new, "ex-a-check").metadata.nbgrader.points = 30
    cell_of(new, "last").metadata["tags"] = ["hide-input"]
    told = book.renew(new)
    renewed = book.read()
    ids = [cell.id for cell in renewed.cells]
    assert ids[:6] == ["own-1", "title", "task", "ex-a", "own-2", "own-3"]
    assert ids[6:] == ["addition", "ex-a-check", "demo", "own-note", "last", "own-4"]
    assert book.sources() | {"title": "# v2", "demo": "print(2)", "ex-a": MINE} == book.sources()
    assert book.sources()["ex-a-check"].startswith("check.double.skip()")
    assert cell_of(renewed, "own-note").attachments == picture
    # the start page counts the checks that have printed "passed"
    for cell_id in ("ex-a", "ex-a-check", "last", "own-1"):
        assert cell_of(renewed, cell_id).outputs[0].text == f"output of {cell_id}\n"
    assert (cell_of(renewed, "demo").outputs, cell_of(renewed, "demo").execution_count) == ([], None)
    assert cell_of(renewed, "ex-a-check").metadata.nbgrader.points == 30
    assert cell_of(renewed, "last").metadata.tags == ["hide-input"]
    assert book.earlier() == {mine}
    (kept,) = (book.folder / EARLIER).iterdir()
    assert told == (
        "renewed, with your answers to 15-95.1, with your changes of 'ex-a-check', with 5 of your own cells. "
        f"Your file as it was is {EARLIER}/{kept.name}."
    )

    # the second time: without the cell that a note stands below, and with another stub
    second = book.work(ex_a=MINE + "  # better")
    new = edition("v3", stub=STUB_2)
    new.cells.remove(cell_of(new, "demo"))
    assert "The stub of 15-95.1 has changed, too: see whether your answer still fits." in book.renew(new)
    assert list(book.sources())[-4:] == ["ex-a-check", "own-note", "last", "own-4"]
    assert book.sources()["ex-a"] == MINE + "  # better"
    new = edition("v3", stub=STUB_2)
    new.cells.remove(cell_of(new, "demo"))
    cell_of(new, "ex-a-check").metadata.nbgrader.points = 40
    assert "stub" not in book.renew(new), "said once"
    assert cell_of(book.read(), "ex-a-check").metadata.nbgrader.points == 40, "though no source has changed"
    assert {mine, second} < book.earlier()


def test_a_lesson_cell_that_was_edited_stays_until_the_lesson_changes_it(book):
    book.renew("v1")

    def no_code(notebook):  # what the student doesn't want to run
        notebook.cells[5] = new_raw_cell(cell_of(notebook, "last").source, id="last")

    mine = book.work(no_code, demo="print('mine')")
    assert "with your changes of 'demo', 'last'." in book.renew("v2")
    assert book.sources()["title"] == "# v2"
    assert book.sources()["demo"] == "print('mine')"
    assert cell_of(book.read(), "last").cell_type == "raw"

    second = book.path.read_bytes()
    told = book.renew("v2", demo="print(3)")
    assert "The lesson has changed 'demo', too: its version is in place of yours. Your file as it was is" in told
    assert book.sources()["demo"] == "print(3)"
    assert book.earlier() == {mine, second}


def test_what_the_lesson_no_longer_has_is_the_students_if_they_changed_it(book):
    book.renew()
    mine = book.work(ex_a=MINE)
    new = edition()
    new.cells = [cell_of(new, "title"), cell_of(new, "last")]
    assert "with 1 of your own cells" in book.renew(new)
    assert list(book.sources().values()) == ["# The lesson", MINE, "print('last')"]
    assert book.earlier() == {mine}


def test_a_lesson_cell_that_was_deleted_or_moved_is_back_in_its_place(book):
    book.renew("v1")

    def change(notebook):
        del notebook.cells[0]
        notebook.cells.insert(0, notebook.cells.pop())

    book.work(change, ex_a=MINE)
    book.renew("v2")
    assert list(book.sources()) == IDS
    assert book.sources()["ex-a"] == MINE


# --------------------------------------------------------------------------------------------------------------------
# which cell is which


def loses_ids(notebook):
    for cell in notebook.cells:
        del cell["id"]
    notebook.nbformat_minor = 4


def gets_other_ids(notebook):
    for number, cell in enumerate(notebook.cells):
        cell.id = f"c{number}"


def has_an_id_twice(notebook):
    notebook.cells[5].id = "title"


@pytest.mark.parametrize("change", [loses_ids, gets_other_ids, has_an_id_twice])
@pytest.mark.parametrize("is_recorded", [True, False])
def test_without_their_ids_cells_are_recognised_by_grade_id_and_source(book, change, is_recorded):
    book.renew("v1")

    def forgets(notebook):
        if not is_recorded:
            del notebook.metadata[RECORD]

    with warnings.catch_warnings(action="ignore"):  # nbformat's, of ids that are there twice
        book.work(adds("own", "demo"), forgets, change, ex_a=MINE)
    with warnings.catch_warnings(action="error"):  # a student would see them
        told = book.renew("v1", demo="print(1)", stub=STUB_2)
    sources = [cell.source for cell in edition("v1").cells]
    assert list(book.sources().values()) == [*sources[:2], MINE, sources[3], sources[4], "own", sources[5]]
    assert told.startswith("renewed, with your answers to 15-95.1, with 1 of your own cells.")


def test_copies_and_parts_of_a_cell_are_the_students(book):
    """JupyterLab's copy has the original's metadata. It splits a cell so that the last part keeps the id."""
    book.renew("v1")

    def change(notebook):
        answer, demo = (copy.deepcopy(cell_of(notebook, name)) for name in ("ex-a", "demo"))
        answer.update(id="5a0c71d2", source="def helper(x):\n    return x")
        demo.update(id="5a0c71d3")
        notebook.cells[2:2] = [answer, demo]

    book.work(change, ex_a="def double(x):\n    return helper(x) + x")
    book.renew("v2")
    assert list(book.sources()) == ["title", "task", "5a0c71d2", "5a0c71d3", "ex-a", "ex-a-check", "demo", "last"]
    assert book.sources()["5a0c71d2"] == "def helper(x):\n    return x"
    assert book.sources()["ex-a"] == "def double(x):\n    return helper(x) + x"


def test_an_exercise_with_a_new_cell_id_has_the_grade_id(book):
    book.renew("v1")
    book.work(ex_a=MINE)
    new = edition("v2")
    cell_of(new, "ex-a").id = "ex-double"
    book.renew(new)
    assert list(book.sources()) == ["title", "task", "ex-double", "ex-a-check", "demo", "last"]
    assert book.sources()["ex-double"] == MINE


# --------------------------------------------------------------------------------------------------------------------
# which edition it was made from


def test_it_does_not_matter_how_an_older_edition_came_back(book):
    """The lesson is reverted; JupyterLab, open during an update, overwrites; the student puts an earlier file back."""
    book.renew("v1", demo="print(1)")
    first = book.work(ex_a=MINE)
    book.renew("v2", demo="print(2)")
    assert book.renew("v1", demo="print(1)").startswith("renewed, with your answers to 15-95.1. Your file")
    for demo in ("print(2)", "print(3)"):
        book.path.write_bytes(first)
        overwritten = book.work(ex_a=f"{MINE}  # {demo}")
        assert book.renew("v2", demo=demo).startswith("renewed, with your answers to 15-95.1. Your file")
        assert book.sources() == {cell.id: cell.source for cell in edition("v2", demo=demo).cells} | {
            "ex-a": f"{MINE}  # {demo}"
        }
        assert {first, overwritten} <= book.earlier()


def test_if_nobody_knows_what_was_handed_out_all_that_differs_counts_as_the_students(book):
    book.renew("v1", demo="print(1)")
    mine = book.work(lambda notebook: notebook.metadata.pop(RECORD), adds("own", "demo", id="own"), ex_a=MINE)
    told = book.renew("v2", demo="print(2)")
    assert [book.sources()[name] for name in ("ex-a", "title", "demo", "own")] == [MINE, "# v2", "print(2)", "own"]
    assert book.earlier() == {mine}
    assert "The lesson has changed 'title', 'demo', too" in told
    assert "stub" not in told
    assert book.renew("v2", demo="print(2)") == "up to date."


# --------------------------------------------------------------------------------------------------------------------
# nothing is lost


@pytest.mark.parametrize(
    ("broken", "reason"),
    [(b"{broken", "not JSON"), (b"", "the file is empty"), (b'{"cells": 3}', "notebook"), (b"\xff\xfe", "not UTF-8")],
)
def test_a_file_that_is_no_notebook_is_kept_and_the_lesson_takes_its_place(book, broken, reason):
    book.path.write_bytes(broken)
    told = book.renew("v2")
    assert book.earlier() == {broken}
    (kept,) = (book.folder / EARLIER).iterdir()
    assert told.startswith("written anew. What was there is no notebook (")
    assert reason in told
    assert told.endswith(f"is now {EARLIER}/{kept.name}.")
    assert book.sources()["title"] == "# v2"


@pytest.mark.parametrize("step", range(1, 5))  # before and after each of the two files that are written
def test_ended_halfway_nothing_is_lost(book, monkeypatch, step):
    book.renew("v1")
    mine = book.work(ex_a=MINE)
    real, calls = os.replace, []

    def ends(source, target):
        calls.append(target)
        if 2 * len(calls) - 1 == step:
            raise KeyboardInterrupt
        real(source, target)
        if 2 * len(calls) == step:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", ends)
        with pytest.raises(KeyboardInterrupt):
            book.renew("v2")
    assert book.sources()["ex-a"] == MINE
    book.renew("v3")
    assert book.sources() == {cell.id: cell.source for cell in edition("v3").cells} | {"ex-a": MINE}
    assert mine in book.earlier()


def test_what_is_saved_during_the_update_is_not_lost(book, monkeypatch):
    book.renew("v1")
    book.work(ex_a=MINE)
    real, saved = renewing.merge, []

    def merge_while_the_student_saves(*given):
        merged = real(*given)
        if not saved:
            saved.append(book.work(ex_a=f"{MINE}  # saved last"))
        return merged

    monkeypatch.setattr(renewing, "merge", merge_while_the_student_saves)
    book.renew("v2")
    assert book.sources()["title"] == "# v2"
    assert book.sources()["ex-a"] == f"{MINE}  # saved last"
    assert saved[0] in book.earlier()


# --------------------------------------------------------------------------------------------------------------------
# the command


def test_opening_a_lesson_or_the_start_page_changes_nothing(tmp_path):
    """JupyterLab sets both, from the kernel's answer and its specification, and saves only what differs."""
    nbformat.write(lesson(), tmp_path / "a.ipynb")
    assert workbook.make([Selected(None, "a", tmp_path / "a.ipynb")], tmp_path / "w") == 0
    page = workbook.make_start_page(load(), tmp_path / "w")
    with run_kernel(kernel_name="python3") as client:
        reply = client.kernel_info(reply=True, timeout=60)["content"]
    spec = KernelSpecManager().get_kernel_spec("python3")
    for path in (tmp_path / "w" / "a.ipynb", page):
        metadata = nbformat.read(path, as_version=4).metadata
        assert metadata.language_info == reply["language_info"]
        assert metadata.kernelspec.display_name == spec.display_name
        assert metadata.kernelspec.language == spec.language


def test_drafts_are_not_for_students_unless_they_are_named():
    book = load()
    topics = {**book.topics, "15-02": replace(book.topics["15-02"], status="draft")}
    chosen = [notebook.topic for notebook in workbook.finished(replace(book, topics=topics))]
    assert "15-01" in chosen
    assert "15-02" not in chosen


def test_a_bad_notebook_does_not_stop_the_others(tmp_path, capsys):
    (tmp_path / "bad.ipynb").write_text("not json")
    nbformat.write(lesson("def f():\n    ### BEGIN SOLUTION\n    return 1"), tmp_path / "unbalanced.ipynb")
    notebook = lesson()
    notebook.cells[0].source = "# [There](bad.ipynb) and [away](15-99_away.ipynb)"
    nbformat.write(notebook, tmp_path / "good.ipynb")
    shutil.copy(tmp_path / "good.ipynb", tmp_path / "stuck.ipynb")
    (tmp_path / "w" / "stuck.ipynb").mkdir(parents=True)  # stands for a file that the system doesn't give away
    names = ("bad", "unbalanced", "absent", "stuck", "good")
    chosen = [Selected(None, name, tmp_path / f"{name}.ipynb") for name in names]
    assert workbook.make(chosen, tmp_path / "w") == 1
    said = capsys.readouterr().out
    assert "bad.ipynb: no student edition, because of\n  not JSON" in said
    assert "unbalanced.ipynb: no student edition, because of\n  cell 'ex-a'" in said
    assert "absent.ipynb: no student edition" in said
    assert "stuck.ipynb: left as it is, because of\n" in said
    assert said.endswith("good.ipynb: written.\n")
    assert json.loads((tmp_path / "w" / "good.ipynb").read_text())["cells"][0]["source"] == [
        "# [There](bad.ipynb) and away"
    ]
