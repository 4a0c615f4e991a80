"""The workbook's start page, and what it says about the exercises that are done."""

import argparse
import re

import nbformat
import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from course import lab, start_page, syllabus, workbook
from course.exercise_form import check_metadata
from course.site import PARTS
from shared.checks.exercise import exercise
from shared.checks.report import CheckFailed
from shared.checks.warm_up import reference
from shared.progress import show_progress


def cell(page, name):
    """The page's cell of this id."""
    return next(cell for cell in page.cells if cell.id == name)


def printed(capsys):
    """The lines since the last call, without what aligns them."""
    return re.sub(" +", " ", capsys.readouterr().out).splitlines()


def test_the_page_names_every_topic_links_those_that_are_there_and_counts_their_exercises(
    tmp_path, monkeypatch, capsys
):
    book = syllabus.load()
    assert workbook.main(argparse.Namespace(notebooks=["15-03", "15-07"], output=tmp_path)) == 0
    page = nbformat.read(tmp_path / start_page.NAME, as_version=4)
    nbformat.validate(page)
    assert page.cells[1].metadata.jupyter.source_hidden
    text = cell(page, "topics").source.replace("\N{NO-BREAK SPACE}", " ")
    assert re.findall(r"^\| (?:\[)?(15-\d\d) .*$", text, re.MULTILINE) == list(book.topics)
    assert {tmp_path / link for link in re.findall(r"\]\(([^)#]+)\)", text)} == set(tmp_path.glob("15-*.ipynb"))
    assert text.count("not written yet") == len(book.topics) - 2
    assert "| 15-06 torch.fx & Graph Transformations<br>Many layers must change" in text
    assert "| 15-05 | not written yet |" in text
    capsys.readouterr()
    monkeypatch.chdir(tmp_path)
    exec(cell(page, "progress").source, {})
    said = printed(capsys)
    assert [line[:5] for line in said] == ["15-03", "15-07", "All 0"]
    assert all(re.search(r" 0 of \d+ exercises 0 of \d+ points$", line) for line in said)


def test_exercises_points_and_minutes_are_those_of_the_headings():
    headings = "### Exercise 15-02.1 — A (10 points, 20 minutes)", "### Exercise 15-02.2 — B (1 point, 45 minutes)"
    lesson = new_notebook(
        cells=[
            new_markdown_cell("word " * 1000),
            *map(new_markdown_cell, headings),
            new_code_cell("x = 1\n" * 40),
            new_code_cell("answer\n" * 500, metadata={"nbgrader": {}}),
        ]
    )
    page = start_page.start_page(syllabus.load(), {"15-02": lesson})
    # 1,000 words are 5 minutes, the headings' words none worth counting, 40 lines 2 minutes
    assert "| 10 min | 2 for 11 points, 1 h 5 min |" in cell(page, "topics").source.replace("\N{NO-BREAK SPACE}", " ")
    told = [start_page.duration(minutes).replace("\N{NO-BREAK SPACE}", " ") for minutes in (0, 50, 50.1, 60)]
    assert told == ["0 min", "50 min", "55 min", "1 h"]


def test_jupyterlab_opens_on_the_page_which_is_renewed_and_keeps_what_was_done(monkeypatch, tmp_path, capsys):
    started = []
    monkeypatch.setattr(lab, "subprocess_status", lambda command, env: started.append(command) or 0)
    monkeypatch.setattr(workbook, "make", lambda notebooks, folder: 0)
    arguments = argparse.Namespace(output=tmp_path / "my work", extra=[])
    assert lab.main(arguments) == 0
    assert "--LabApp.default_url=/lab/tree/00_START_HERE.ipynb" in started[0]

    path = tmp_path / "my work" / start_page.NAME
    page = nbformat.read(path, as_version=4)
    cell(page, "progress").update(
        execution_count=1, outputs=[new_output("stream", name="stdout", text="All 0 of 55\n")]
    )
    cell(page, "warm-up").source = "def cube_backward(x, upstream):\n    return 3 * x ** 2 * upstream"
    nbformat.write(page, path)
    saved = path.read_bytes()
    assert lab.main(arguments) == 0
    assert path.read_bytes() == saved, "the page that is there is the newest"

    monkeypatch.setattr(start_page, "WORDS_A_MINUTE", 123)
    capsys.readouterr()
    assert lab.main(arguments) == 0
    assert capsys.readouterr().out.startswith("00_START_HERE.ipynb: renewed, with what you wrote: 'warm-up'.")
    renewed = nbformat.read(path, as_version=4)
    assert "counted at 123 words" in cell(renewed, "topics").source
    assert cell(renewed, "warm-up").source == cell(page, "warm-up").source


def warm_up(answer):
    """What the warm-up's check cell shows for an answer cell."""
    page = start_page.start_page(syllabus.load(), {})
    with capture_output() as captured:
        try:
            exec(f"{answer}\n{cell(page, 'warm-up-check').source}", {})
        except CheckFailed as error:
            print(error.shown)
    return captured.stdout


def test_the_warm_up_shows_what_the_site_quotes_and_a_way_on_that_works():
    """Also after a restart, when nothing has imported the check before its cell."""
    text = (PARTS / "check.md").read_text(encoding="utf-8")
    quoted = re.findall(r"```python\n(.*?)```.*?```text\n(.*?)```", text, re.DOTALL)
    assert [warm_up(answer) for answer, _ in quoted] == [said for _, said in quoted]
    assert ["failed, 1 of 2" in said for _, said in quoted] == [True, False]

    page = start_page.start_page(syllabus.load(), {})
    assert warm_up(cell(page, "warm-up").source).startswith("Exercise 0 · Warm-up: not attempted yet"), (
        "as it is handed out"
    )
    answer = "def cube_backward(x, upstream):\n    return x"
    where, line = warm_up(answer).splitlines()[-2:]
    assert "above the check's call" in where
    above, call = cell(page, "warm-up-check").source.rsplit("\n", 1)
    namespace = {}
    exec("\n".join((answer, above, line.strip(), call)), namespace)
    assert namespace["cube_backward"] is reference
    with capture_output() as captured:
        exec(cell(page, "warm-up-use").source, namespace)
    theirs, ours = (line.split(": ")[1].strip() for line in captured.stdout.splitlines())
    assert theirs == ours


# --------------------------------------------------------------------------------------------------------------------
# what is done


@exercise("15-95.1", "Double · it", points=10, demands=1)
def double(trial, answer):
    trial.equal("doubles", answer(torch.ones(2)), torch.full((2,), 2.0))


def right(x):
    return 2 * x


def wrong(x):
    return x


def unattempted(x):
    raise NotImplementedError


def check_cell(grade_id, points, answer=None):
    """A check cell as Jupyter stores it after it was run with this answer; not run if None."""
    cell = new_code_cell("check.double(answer)", metadata={"nbgrader": check_metadata(grade_id, points)})
    if answer is not None:
        InteractiveShell.clear_instance()
        shell = InteractiveShell.instance()
        with capture_output() as captured:
            try:
                double(answer)
            except CheckFailed as error:
                text = str(error)
                cell.outputs = [new_output("error", ename="CheckFailed", evalue=text, traceback=text.splitlines())]
        InteractiveShell.clear_instance()
        shell.history_manager.end_session()
        for shown in captured.outputs:
            cell.outputs.insert(0, new_output("display_data", data=shown.data, metadata=shown.metadata))
    return cell


def save(path, *cells, title="15-95: A | title"):
    path.parent.mkdir(exist_ok=True)
    nbformat.write(new_notebook(cells=[new_markdown_cell(f"# {title}\n\ntext"), *cells]), path)


def test_passed_checks_count_once_and_a_line_that_was_printed_is_no_record(tmp_path, capsys):
    fake, passed, failed, other = (check_cell("a", 10, answer) for answer in (None, right, wrong, unattempted))
    fake.outputs = [new_output("stream", name="stdout", text="Exercise 15-95.1 · Double · it: passed\n")]
    beside = check_cell("b", 20, wrong)
    for number, (cells, said) in enumerate(
        [
            ([passed, beside, check_cell("c", 30, unattempted), check_cell("d", 40)], "1 of 4 exercises 10 of 100"),
            ([fake], "0 of 1 exercises 0 of 10"),
            ([check_cell("a", 10), passed, beside], "1 of 2 exercises 10 of 30"),  # a copy of a cell
            ([passed, failed, other, beside], "1 of 2 exercises 10 of 30"),
        ]
    ):
        save(tmp_path / f"{number}" / "a.ipynb", *cells)
        show_progress(tmp_path / f"{number}")
        assert printed(capsys) == [f"15-95: A | title {said} points", f"All {said} points"]


OF_NOTHING = """{"cells": [{
"cell_type": "code", "source": "", "metadata": {"nbgrader": {"grade": true, "grade_id": "a"}},
"outputs": [{"metadata": {"course": {"points": 1, "of": 0, "status": "passed"}}}]}]}"""


@pytest.mark.parametrize("content", ["", '{"cells": [{}]}', "\udcff", OF_NOTHING])
def test_a_damaged_notebook_is_named_and_the_others_counted(tmp_path, capsys, content):
    (tmp_path / "broken.ipynb").write_bytes(content.encode("utf-8", "surrogateescape"))
    save(tmp_path / "whole.ipynb", check_cell("a", 10, right))
    show_progress(tmp_path)
    broken, *said = printed(capsys)
    assert broken == "broken.ipynb cannot be read as a notebook and is not counted."
    assert said == [f"{name} 1 of 1 exercises 10 of 10 points" for name in ("15-95: A | title", "All")]


def test_lines_fit_and_a_folder_without_exercises_is_said(tmp_path, capsys):
    show_progress(tmp_path)
    assert capsys.readouterr().out == "There is no notebook with exercises here.\n"
    save(tmp_path / "a.ipynb", check_cell("a", 10, right), title="long " * 40)
    show_progress(tmp_path)
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2
    assert max(map(len, said)) <= 96
