"""The workbook's start page, and what it says about the exercises that are done."""

import argparse
import re
import subprocess
import sys

import nbformat
import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from course import lab, start_page, syllabus, workbook
from course.exercise_form import check_metadata
from course.selection import select
from course.site import PARTS
from shared.checks.exercise import exercise
from shared.checks.report import CheckFailed
from shared.checks.warm_up import reference
from shared.progress import read_progress, show_progress


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A workbook of all notebooks that there are."""
    folder = tmp_path_factory.mktemp("workbook")
    book = syllabus.load()
    assert workbook.make(select([], book), folder) == 0
    workbook.make_start_page(book, folder)
    return folder


def test_the_page_names_every_topic_in_order_and_links_those_that_are_there(folder):
    page = nbformat.read(folder / start_page.NAME, as_version=4)
    nbformat.validate(page)
    assert page.cells[1].metadata.jupyter.source_hidden
    rows = re.findall(r"^\| (?:\[)?(15-\d\d) .*$", page.cells[0].source, re.MULTILINE)
    assert rows == list(syllabus.load().topics)
    links = re.findall(r"\]\(([^)#]+)\)", page.cells[0].source)
    assert links
    assert {folder / link for link in links} == set(folder.glob("15-*.ipynb"))
    missing = [topic for topic in syllabus.load().topics.values() if not topic.path.is_file()]
    assert page.cells[0].source.replace("\N{NO-BREAK SPACE}", " ").count("not written yet") == len(missing)


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
    assert "| 10 min | 2 for 11 points, 1 h 5 min |" in page.cells[0].source.replace("\N{NO-BREAK SPACE}", " ")


def test_jupyterlab_opens_on_the_page_which_is_always_renewed(monkeypatch, tmp_path, capsys):
    started = []
    monkeypatch.setattr(lab, "subprocess_status", lambda command, env: started.append(command) or 0)
    monkeypatch.setattr(workbook, "make", lambda notebooks, folder: 0)
    arguments = argparse.Namespace(output=tmp_path / "my work", extra=[])
    assert lab.main(arguments) == 0
    assert "--LabApp.default_url=/lab/tree/00_START_HERE.ipynb" in started[0]

    path = tmp_path / "my work" / start_page.NAME
    page = nbformat.read(path, as_version=4)
    page.cells[2].update(execution_count=1, outputs=[new_output("stream", name="stdout", text="All 0 of 55\n")])
    nbformat.write(page, path)
    saved = path.read_bytes()
    assert lab.main(arguments) == 0
    assert path.read_bytes() == saved, "the page that is there is the newest"

    monkeypatch.setattr(start_page, "INTRODUCTION", start_page.INTRODUCTION.replace("Choose a topic", "Take a topic"))
    capsys.readouterr()
    assert lab.main(arguments) == 0
    assert started[2] == started[1] == started[0]
    assert capsys.readouterr().out == "00_START_HERE.ipynb: renewed.\n"
    assert "Take a topic" in nbformat.read(path, as_version=4).cells[0].source
    assert [file.name for file in path.parent.iterdir() if not file.name.startswith(".")] == [start_page.NAME]


def warm_up(answer):
    """What the warm-up's check cell shows for an answer cell."""
    page = start_page.start_page(syllabus.load(), {}).cells
    with capture_output() as captured:
        try:
            exec(f"{answer}\n{page[-1].source}", {})
        except CheckFailed as error:
            print(error.shown)
    return captured.stdout


def test_the_way_on_works_where_the_check_says_that_it_goes():
    """Also after a restart, when nothing has imported the check before its cell."""
    page = start_page.start_page(syllabus.load(), {}).cells
    answer = "def cube_backward(x, upstream):\n    return x"
    assert warm_up(page[-2].source).startswith("Exercise 0 · Warm-up: not attempted yet"), "as it is handed out"
    where, line = warm_up(answer).splitlines()[-2:]
    assert "above the check's call" in where
    above, call = page[-1].source.rsplit("\n", 1)
    namespace = {}
    exec("\n".join((answer, above, line.strip(), call)), namespace)
    assert namespace["cube_backward"] is reference


def test_the_site_quotes_what_the_warm_up_s_check_says():
    text = (PARTS / "check.md").read_text(encoding="utf-8")
    quoted = re.findall(r"```python\n(.*?)```.*?```text\n(.*?)```", text, re.DOTALL)
    assert [warm_up(answer) for answer, _ in quoted] == [said for _, said in quoted]
    assert ["failed, 1 of 2" in said for _, said in quoted] == [True, False]


def test_a_renewed_page_keeps_the_answer_to_the_warm_up(monkeypatch, tmp_path):
    path = workbook.make_start_page(syllabus.load(), tmp_path)
    page = nbformat.read(path, as_version=4)
    page.cells[-2].source = "def cube_backward(x, upstream):\n    return 3 * x ** 2 * upstream"
    nbformat.write(page, path)
    monkeypatch.setattr(start_page, "INTRODUCTION", start_page.INTRODUCTION.replace("Choose a topic", "Take a topic"))
    workbook.make_start_page(syllabus.load(), tmp_path)
    renewed = nbformat.read(path, as_version=4)
    assert "Take a topic" in renewed.cells[0].source
    assert renewed.cells[-2].source == page.cells[-2].source


# --------------------------------------------------------------------------------------------------------------------
# what is done


@exercise("15-95.1", "Double · it", points=10, demands=1)
def double(trial, answer):
    trial.equal("doubles", answer(torch.ones(2)), torch.full((2,), 2.0))


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
    nbformat.write(new_notebook(cells=[new_markdown_cell(f"# {title}\n\ntext"), *cells]), path)


def right(x):
    return 2 * x


def wrong(x):
    return x


def test_passed_checks_count_and_points_that_were_earned(tmp_path):
    save(
        tmp_path / "15-95_a.ipynb",
        check_cell("a", 10, right),
        check_cell("b", 20, wrong),
        check_cell("c", 30, unattempted),
        check_cell("d", 40),
    )
    (progress,), unreadable = read_progress(tmp_path)
    assert (progress.title, progress.exercises, progress.points) == ("15-95: A | title", 4, 100)
    assert (progress.done, progress.earned) == (1, 10)
    assert unreadable == []


def test_a_line_that_was_printed_is_no_record(tmp_path):
    cell = check_cell("a", 10)
    cell.outputs = [new_output("stream", name="stdout", text="Exercise 15-95.1 · Double · it: passed\n")]
    save(tmp_path / "a.ipynb", cell)
    (progress,), _ = read_progress(tmp_path)
    assert (progress.done, progress.earned) == (0, 0)


def test_a_copied_check_counts_once(tmp_path):
    for copies in ((None, right), (right, wrong), (wrong, right)):
        save(tmp_path / "a.ipynb", *(check_cell("a", 10, one) for one in copies), check_cell("b", 90, wrong))
        (progress,), _ = read_progress(tmp_path)
        assert (progress.exercises, progress.points, progress.done, progress.earned) == (2, 100, 1, 10)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"cells": [{}]}', '{"cells": 3}', "\udcff"])
def test_a_damaged_notebook_is_named_and_the_others_counted(tmp_path, capsys, content):
    (tmp_path / "broken.ipynb").write_bytes(content.encode("utf-8", "surrogateescape"))
    save(tmp_path / "whole.ipynb", check_cell("a", 10, right))
    show_progress(tmp_path)
    said = re.sub(" +", " ", capsys.readouterr().out).splitlines()
    assert said[0] == "broken.ipynb cannot be read as a notebook and is not counted."
    assert said[1] == "15-95: A | title 1 of 1 exercises 10 of 10 points"
    assert said[2] == "All 1 of 1 exercises 10 of 10 points"


def test_lines_fit_and_a_folder_without_exercises_is_said(tmp_path, capsys):
    show_progress(tmp_path)
    assert capsys.readouterr().out == "There is no notebook with exercises here.\n"
    for number in range(3):
        save(tmp_path / f"{number}.ipynb", check_cell("a", 100, right), title="long " * 40)
    show_progress(tmp_path)
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 4
    assert max(map(len, said)) <= 96
    assert re.sub(" +", " ", said[-1]) == "All 3 of 3 exercises 300 of 300 points"


def test_the_page_s_cell_counts_the_workbook(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    exec(nbformat.read(folder / start_page.NAME, as_version=4).cells[2].source, {})
    said = capsys.readouterr().out.splitlines()
    assert len(said) == len(list(folder.glob("15-*.ipynb"))) + 1
    assert all(re.search(r" 0 of \d+ exercises +0 of \d+ points$", line) for line in said)


def test_alone_in_another_python_the_page_says_what_to_do(tmp_path):
    """-I and -S: neither the repository nor what is installed can be seen."""
    command = [sys.executable, "-I", "-S", "-c", start_page.GUARD]
    answer = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert answer.returncode == 1
    assert answer.stderr.splitlines()[-1] == (
        f"ImportError: The kernel's Python, {sys.executable}, lacks torch or `shared`. Choose another kernel "
        "(VS Code: Select Kernel, `.venv` of the course's folder), or "
        "run `make lab` in the course's folder and restart the kernel."
    )
