"""The student edition: what is taken out, what is refused, and what becomes of a student's work when it is renewed."""

import argparse
import copy
import re
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import run_kernel
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from course import renewing, workbook
from course.edition import EditionError, solutions, student_edition, unlink_missing
from course.exercise_form import answer_metadata, check_metadata
from course.files import NotWritableError
from course.renewing import EARLIER, RECORD, fingerprint, write_edition
from course.selection import Selected
from course.start_page import NAME as START_PAGE
from course.syllabus import load

# --------------------------------------------------------------------------------------------------------------------
# no solutions

ANSWER = '''\
def double(x):
    """Twice x."""
    ### BEGIN SOLUTION
    secret = x
    return x + secret
    ### END SOLUTION


def helper(x):
    if x:
            ### BEGIN SOLUTION
            return 42
            ### END SOLUTION'''
STUB = '''\
def double(x):
    """Twice x."""
    # YOUR CODE HERE
    raise NotImplementedError


def helper(x):
    if x:
            # YOUR CODE HERE
            raise NotImplementedError'''
HIDDEN = "### BEGIN HIDDEN TESTS\nassert double(1) == 2\n### END HIDDEN TESTS"


def cell_of(notebook, cell_id):
    (cell,) = (cell for cell in notebook.cells if cell.get("id") == cell_id)
    return cell


def runs(notebook):
    """Run all cells: outputs, and what an editor notes beside them."""
    for number, cell in enumerate((cell for cell in notebook.cells if cell.cell_type == "code"), start=1):
        cell.execution_count = number
        cell.outputs = [new_output("stream", name="stdout", text=f"output of {cell.id}\n")]
        cell.metadata["execution"] = {"iopub.status.idle": "2026-11-20T10:00:00Z"}
    return notebook


def lesson(**sources):
    """A lesson as it is committed; `demo="…"` is the source of a cell."""
    answer, check = answer_metadata("answer"), check_metadata("check", 10)
    notebook = new_notebook(
        cells=[
            new_markdown_cell("# Title", id="title"),
            new_code_cell(ANSWER, id="answer", metadata={"nbgrader": answer}),
            new_code_cell("check.double(double)", id="check", metadata={"nbgrader": check}),
            new_code_cell("print(1)", id="demo"),
            new_code_cell("print('last')", id="last"),
        ]
    )
    for name, source in sources.items():
        cell_of(notebook, name).source = source
    return notebook


def test_solutions_hidden_tests_and_outputs_are_taken_out_and_all_else_stays():
    notebook = runs(lesson(check=f"check.double(double)\n{HIDDEN}\nprint(1)\n\n{HIDDEN}"))
    notebook.metadata["widgets"] = {"application/vnd.jupyter.widget-state+json": {"state": {}}}
    before = copy.deepcopy(notebook)
    edition = student_edition(notebook)
    assert notebook == before, "the lesson itself is not changed"
    nbformat.validate(edition)
    assert edition.metadata == {}
    assert [cell.source for cell in edition.cells[:3]] == ["# Title", STUB, "check.double(double)\nprint(1)"]
    for cell, given in zip(edition.cells, before.cells, strict=True):
        assert (cell.id, cell.cell_type, cell.metadata) == (given.id, given.cell_type, given.metadata)
        assert (cell.get("outputs", []), cell.get("execution_count")) == ([], None)
    assert solutions(notebook) == {"answer": ["    secret = x\n    return x + secret", "            return 42"]}


def test_the_first_table_says_what_students_need():
    full = nbformat.read(load().topics["15-01"].path, as_version=4)
    lines = cell_of(student_edition(full), "glance").source.splitlines()
    assert [line.split(" | ")[0] for line in lines[2:5]] == ["| Dataset", "| Time", "| Prerequisites"]
    assert re.search(r"run on a laptop; about .* to read", lines[3])


@pytest.mark.parametrize(
    ("place", "source", "phrase"),
    [
        ("answer", "def f():\n    ### BEGIN SOLUTION\n    return 1", "line 2: ### BEGIN SOLUTION without"),
        ("answer", "### BEGIN SOLUTION\n### BEGIN SOLUTION\n### END SOLUTION", "line 2: '### BEGIN SOLUTION' must be"),
        ("answer", "def f():\n    return 1\n    ### END SOLUTION", "line 3: '### END SOLUTION' must be"),
        ("answer", ANSWER.replace("### BEGIN", "## begin"), "'## begin SOLUTION' must be '### BEGIN SOLUTION'"),
        ("answer", "def f():\n    return 1  ### BEGIN SOLUTION\n    ### END SOLUTION", "alone on its line"),
        ("answer", "def f():\n    return 1", "### BEGIN SOLUTION belongs into"),
        ("answer", "class A:\n    ### BEGIN SOLUTION\n    x = 1\n    ### END SOLUTION", "outside a function"),
        ("answer", "def f(:\n    ### BEGIN SOLUTION\n    x = 1\n    ### END SOLUTION", "isn't valid Python"),
        ("demo", ANSWER, "### BEGIN SOLUTION belongs into"),
        ("check", "# BEGIN HIDDEN TEST\n1", "must be '### BEGIN HIDDEN TESTS'"),
        ("demo", HIDDEN, "hidden tests belong into"),
    ],
)
def test_what_would_hand_out_a_solution_is_refused_with_the_cell(place, source, phrase):
    with pytest.raises(EditionError, match=f"cell '{place}'") as caught:
        student_edition(lesson(**{place: source}))
    assert phrase in str(caught.value)


def test_links_to_notebooks_that_are_not_there_become_text():
    text = "[15-01](15-01_a.ipynb#part), {}, [site](https://example.org/15-02_b.ipynb), [page](README.md)."
    code = "x = d['[15-02](15-02_b.ipynb)']"
    linked = text.format("[**15-02**, `x`](15-02_b.ipynb#part)")
    notebook = new_notebook(cells=[new_markdown_cell(linked), new_code_cell(code)])
    unlink_missing(notebook, ["15-01_a.ipynb"])
    assert [cell.source for cell in notebook.cells] == [text.format("**15-02**, `x`"), code]


def test_no_edition_replaces_the_lessons_themselves_however_their_folder_is_called(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(NotWritableError, match="holds the notebooks themselves"):
        workbook.require_folder(Path(".."), [Selected(None, "a", tmp_path.resolve() / "a.ipynb")])


# --------------------------------------------------------------------------------------------------------------------
# a new edition of a lesson

NAME = "15-95_a.ipynb"
MINE = "def double(x):\n    return x + x"
WITH_TIMES = ANSWER.replace("(x)", "(x, times=2)")
IDS = ["title", "answer", "check", "demo", "last"]


def edition(title="v1", **sources):
    return student_edition(lesson(title=title, **sources))


class Book:
    """A workbook with one lesson, which the student opens, changes and saves, and which is renewed."""

    def __init__(self, folder):
        self.folder = folder
        self.path = folder / NAME

    def renew(self, title="v1", *, to=None, **more):
        """Put a new edition into the workbook; what is said of it, without the file's name."""
        told = write_edition(to or edition(title=title, **more), self.folder, NAME)
        assert told.startswith(f"{NAME}: ")
        assert "\n" not in told
        return told.removeprefix(f"{NAME}: ")

    def read(self):
        notebook = nbformat.read(self.path, as_version=nbformat.NO_CONVERT)
        nbformat.validate(notebook)
        return notebook

    def work(self, *changes, **sources):
        """Change the notebook and save it; `answer="…"` writes into a cell. Returns the file's content."""
        notebook = self.read()
        for name, source in sources.items():
            cell_of(notebook, name).source = source
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
    book = Book(tmp_path)
    assert book.renew() == "written."
    return book


def adds(source, behind, **more):
    """A change that puts a cell of the student's below another one; None is the top."""

    def change(notebook):
        above = [cell.id for cell in notebook.cells].index(behind) if behind else -1
        notebook.cells.insert(above + 1, new_code_cell(source, **more))

    return change


def runs_to_the_end(notebook):
    runs(notebook).cells.append(new_code_cell(""))  # Shift+Enter in the last cell


def loses_ids(notebook):
    for cell in notebook.cells:
        del cell["id"]
    notebook.nbformat_minor = 4


def reformats(notebook):
    notebook.cells[0].metadata["collapsed"] = True
    for cell in notebook.cells:
        cell.source = cell.source.replace("\n", "  \n") + " \n"


@pytest.mark.parametrize("change", [runs_to_the_end, reformats, loses_ids])
def test_a_file_in_which_nobody_wrote_is_renewed(book, change):
    saved = book.work(change)
    before = book.path.stat().st_mtime_ns
    assert book.renew() == "up to date."
    assert book.path.stat().st_mtime_ns == before, "JupyterLab would say that the file has changed"
    assert book.path.read_bytes() == saved

    new = edition("v2", demo="print(2)", answer=WITH_TIMES)
    assert book.renew(to=new) == "renewed."
    cell_of(new, "check").metadata.nbgrader.points = 30
    assert book.renew(to=new) == "renewed."
    assert cell_of(book.read(), "check").metadata.nbgrader.points == 30
    shown = [text.rstrip().replace("  \n", "\n") for text in book.sources().values()]
    assert shown == [cell.source for cell in new.cells]
    assert list(book.folder.iterdir()) == [book.path]


def test_a_students_work_goes_along_and_the_file_as_it_was_is_kept(book):
    picture = {"dot.png": {"image/png": "iVBORw0KGgo="}}
    note = new_markdown_cell("![](attachment:dot.png)", id="own-note", attachments=picture)
    mine = book.work(
        adds("first", None, id="own-1"),
        adds("third", "answer", id="own-3"),
        adds("second", "answer", id="own-2"),
        adds("at the end", "last", id="own-4"),
        lambda notebook: notebook.cells.insert(-2, note),  # below demo
        runs,
        answer=MINE,
        check="check.double.skip()\ncheck.double(double)",
    )
    new = edition("v2", demo="print(2)")
    new.cells.insert(2, new_markdown_cell("An addition", id="addition"))
    told = book.renew(to=new)
    renewed = book.read()
    ids = ["own-1", "title", "answer", "own-2", "own-3", "addition", "check", "demo", "own-note", "last", "own-4"]
    assert [cell.id for cell in renewed.cells] == ids
    assert book.sources() | {"title": "v2", "demo": "print(2)", "answer": MINE} == book.sources()
    assert book.sources()["check"].startswith("check.double.skip()")
    assert cell_of(renewed, "own-note").attachments == picture
    # the start page counts the checks that have printed "passed"
    for cell_id in ("answer", "check", "last", "own-1"):
        assert cell_of(renewed, cell_id).outputs[0].text == f"output of {cell_id}\n"
    assert (cell_of(renewed, "demo").outputs, cell_of(renewed, "demo").execution_count) == ([], None)
    (kept,) = (book.folder / EARLIER).iterdir()
    assert kept.read_bytes() == mine
    assert told == (
        "renewed, with what you wrote: 'answer', 'check', your own cells. "
        f"Your file as it was is {EARLIER}/{kept.name}."
    )

    # the second time: without the cell that a note stands below, and with another stub
    second = book.work(answer=MINE + "  # better")
    new = edition("v3", answer=WITH_TIMES)
    new.cells.remove(cell_of(new, "demo"))
    book.renew(to=new)
    assert list(book.sources())[-4:] == ["check", "own-note", "last", "own-4"]
    assert book.sources()["answer"] == MINE + "  # better"
    assert book.earlier() == {mine, second}


def test_a_lesson_cell_that_was_edited_stays_until_the_lesson_changes_it(book):
    mine = book.work(demo="print('mine')")
    assert "with what you wrote: 'demo'." in book.renew("v2")
    assert (book.sources()["title"], book.sources()["demo"]) == ("v2", "print('mine')")

    second = book.path.read_bytes()
    told = book.renew("v2", demo="print(3)")
    assert told.startswith("renewed. The lesson has changed 'demo', too: its version is in place of yours. Your file")
    assert book.sources()["demo"] == "print(3)"
    assert book.earlier() == {mine, second}


def test_lesson_cells_that_only_one_side_has(book):
    """One that the student deleted or moved is back in its place; one that the lesson no longer has is theirs."""

    def change(notebook):
        del notebook.cells[0]
        notebook.cells.insert(0, notebook.cells.pop())

    book.work(change, answer=MINE)
    book.renew("v2")
    assert list(book.sources()) == IDS
    new = edition("v3")
    new.cells = [cell_of(new, "title"), cell_of(new, "last")]
    assert "with what you wrote: your own cells." in book.renew(to=new)
    assert list(book.sources().values()) == ["v3", MINE, "print('last')"]


def has_an_id_twice(notebook):
    notebook.cells[4].id = "title"


@pytest.mark.parametrize("change", [loses_ids, has_an_id_twice])
@pytest.mark.parametrize("is_recorded", [True, False])
def test_without_their_ids_cells_are_recognised_by_grade_id_and_source(book, change, is_recorded):
    def forgets(notebook):
        if not is_recorded:
            del notebook.metadata[RECORD]

    book.renew(last="print(1)")  # as another cell
    with warnings.catch_warnings(action="ignore"):  # nbformat's, of ids that are there twice
        copied = adds("a copy", "answer", metadata={"nbgrader": answer_metadata("answer")})
        book.work(adds("own", "demo"), copied, forgets, change, answer=MINE)
    with warnings.catch_warnings(action="error"):  # a student would see them
        told = book.renew(answer=WITH_TIMES, last="print(1)")
    check = "check.double(double)"
    assert list(book.sources().values()) == ["v1", MINE, "a copy", check, "print(1)", "own", "print(1)"]
    assert told.startswith("renewed, with what you wrote: 'answer', your own cells.")


def test_what_a_file_has_on_record_is_understood_by_every_later_course():
    assert fingerprint(new_code_cell("x = 1  \n\ny = 2\n")) == "bdb3be0a1e088574"


def test_if_nobody_knows_what_was_handed_out_all_that_differs_counts_as_the_students(book):
    mine = book.work(lambda notebook: notebook.metadata.pop(RECORD), adds("own", "demo", id="own"), answer=MINE)
    told = book.renew("v2", demo="print(2)")
    assert [book.sources()[name] for name in ("answer", "title", "demo", "own")] == [MINE, "v2", "print(2)", "own"]
    assert book.earlier() == {mine}
    assert "The lesson has changed 'title', 'demo', too" in told
    assert book.renew("v2", demo="print(2)") == "up to date."


# --------------------------------------------------------------------------------------------------------------------
# nothing is lost


@pytest.mark.parametrize(("broken", "reason"), [(b"{broken", "not JSON"), (b"\xff\xfe", "not UTF-8")])
def test_a_file_that_is_no_notebook_is_kept_and_the_lesson_takes_its_place(book, broken, reason):
    book.path.write_bytes(broken)
    told = book.renew("v2")
    (kept,) = (book.folder / EARLIER).iterdir()
    assert kept.read_bytes() == broken
    assert told.startswith(f"written anew. What was there is no notebook ({reason}")
    assert told.endswith(f"is now {EARLIER}/{kept.name}.")
    assert book.sources()["title"] == "v2"


def test_ended_halfway_nothing_is_lost(book, monkeypatch):
    mine = book.work(answer=MINE)
    monkeypatch.delattr(renewing, "write_notebook")
    with pytest.raises(NameError):
        book.renew("v2")
    assert book.path.read_bytes() == mine
    assert book.earlier() == {mine}


def test_what_is_saved_during_the_update_is_not_lost(book, monkeypatch):
    book.work(answer=MINE)
    real, saved = renewing.merge, []

    def merge_while_the_student_saves(*given):
        merged = real(*given)
        if not saved:
            saved.append(book.work(answer=f"{MINE}  # saved last"))
        return merged

    monkeypatch.setattr(renewing, "merge", merge_while_the_student_saves)
    book.renew("v2")
    assert (book.sources()["title"], book.sources()["answer"]) == ("v2", f"{MINE}  # saved last")
    assert saved[0] in book.earlier()


# --------------------------------------------------------------------------------------------------------------------
# the command


def test_a_bad_notebook_does_not_stop_the_others_and_opening_one_changes_nothing(tmp_path, capsys):
    (tmp_path / "bad.ipynb").write_text("not json")
    nbformat.write(lesson(answer="def f():\n    ### BEGIN SOLUTION\n    return 1"), tmp_path / "unbalanced.ipynb")
    old = lesson()
    loses_ids(old)
    nbformat.write(old, tmp_path / "old.ipynb")
    nbformat.write(lesson(), tmp_path / "good.ipynb")
    shutil.copy(tmp_path / "good.ipynb", tmp_path / "stuck.ipynb")
    (tmp_path / "w" / "stuck.ipynb").mkdir(parents=True)  # stands for a file that the system doesn't give away
    names = ("bad", "unbalanced", "old", "stuck", "good")
    chosen = [Selected(None, name, tmp_path / f"{name}.ipynb") for name in names]
    assert workbook.make(chosen, tmp_path / "w") == 1
    said = capsys.readouterr().out
    assert "bad.ipynb: no student edition: not JSON" in said
    assert "unbalanced.ipynb: no student edition: cell 'answer'" in said
    assert "old.ipynb: no student edition: cell '1': it has no id" in said
    assert "stuck.ipynb: left as it is: " in said
    assert said.endswith("good.ipynb: written.\n")
    assert [workbook.make([one], tmp_path / "w") for one in chosen[-2:]] == [1, 0]
    assert "good" not in capsys.readouterr().out, "nobody needs eleven lines on what is up to date"

    # JupyterLab sets both, from the kernel's answer and its specification, and saves only what differs
    metadata = nbformat.read(tmp_path / "w" / "good.ipynb", as_version=4).metadata
    with run_kernel(kernel_name="python3") as client:
        assert metadata.language_info == client.kernel_info(reply=True, timeout=60)["content"]["language_info"]
    spec = KernelSpecManager().get_kernel_spec("python3")
    assert (metadata.kernelspec.display_name, metadata.kernelspec.language) == (spec.display_name, spec.language)


def test_the_command_leaves_drafts_out_and_makes_a_start_page_whatever_is_broken(tmp_path, monkeypatch, capsys):
    """A draft comes into a workbook when it is named."""
    book, folder = workbook.syllabus.load(), tmp_path / "w"
    topics = {number: replace(topic, path=tmp_path / topic.file) for number, topic in book.topics.items()}
    topics["15-02"] = replace(topics["15-02"], status="draft")
    monkeypatch.setattr(workbook.syllabus, "load", lambda: replace(book, topics=topics))
    files = [topics[number].file for number in ("15-01", "15-02", "15-03")]
    for file in files[:2]:
        nbformat.write(lesson(), tmp_path / file)
    folder.mkdir()
    for place in (tmp_path, folder):
        (place / files[2]).write_text("not json")
    assert workbook.main(argparse.Namespace(notebooks=[], output=folder)) == 1
    assert {path.name for path in folder.iterdir()} == {START_PAGE, files[0], files[2]}
    assert workbook.main(argparse.Namespace(notebooks=["15-02"], output=folder)) == 0
    assert (folder / files[1]).is_file()
    assert workbook.main(argparse.Namespace(notebooks=["15-99"], output=folder)) == 2
    assert capsys.readouterr().err.startswith("workbook: there is no topic 15-99")
