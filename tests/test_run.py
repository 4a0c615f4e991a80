"""course.run on real kernels: good notebooks, every fault that people make, and Ctrl-C. Kernel starts are shared."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid

import nbformat
import psutil
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from course import execution, run
from course.environment import ROOT
from course.execution import NotebookError, read_notebook
from course.processes import share_of_cores
from course.selection import Selected, SelectionError, select
from course.syllabus import load
from shared.device import DEVICE_VARIABLE, PRETENDED

CHILD = """\
import subprocess, sys
subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)', '{}'], start_new_session=True)"""
ENVIRONMENT = {**os.environ, "COURSE_ENV": "current", "PYTHONIOENCODING": "utf-8"}
for setting in ("COURSE_DATA", "OMP_NUM_THREADS"):
    ENVIRONMENT.pop(setting, None)


def write(path, *sources, **metadata):
    """A notebook with one code cell for each source, ids c0, c1, …, each with an output of an earlier run."""
    old = new_output("stream", text="old")
    cells = [new_code_cell(source, id=f"c{index}", outputs=[old]) for index, source in enumerate(sources)]
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(new_notebook(cells=cells, metadata=metadata), path)
    return path


def texts(path):
    """All text outputs of an executed copy, by cell id."""
    notebook = nbformat.read(path, as_version=4)
    return {
        cell.id: "".join(output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.outputs)
        for cell in notebook.cells
        if cell.cell_type == "code"
    }


def sleepers(mark):
    """Processes that the CHILD source with this mark has left over."""
    return [process.pid for process in psutil.process_iter(["cmdline"]) if mark in (process.info["cmdline"] or [])]


@pytest.fixture
def run_files(tmp_path, monkeypatch, capsys):
    """Run the command in this process; returns (exit status, what it printed)."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(run, "COPIES", tmp_path / "out")

    def call(*arguments):
        parser = run.argparse.ArgumentParser()
        run.add_arguments(parser)
        status = run.main(parser.parse_args(["--output", str(tmp_path / "out"), *map(str, arguments)]))
        return status, capsys.readouterr().out

    return call


@pytest.fixture(scope="module")
def called(tmp_path_factory):
    """(exit status, printed, folder of copies, marks of child processes, folder of notebooks)."""
    folder = tmp_path_factory.mktemp("notebooks")
    marks = [uuid.uuid4().hex for _ in range(2)]  # no other run of these tests has the same
    write(
        folder / "good.ipynb",
        "import os, sys\nprint(os.environ['COURSE_DATA'], os.getcwd(), sys.executable, os.environ['MPLBACKEND'])",
        "import ipykernel.connect as c\nprint(c.get_connection_info(unpack=True)['transport'])\n"
        "print(os.environ['OMP_NUM_THREADS'], 'mine' in globals())",
        "for i in range(3): print(i, flush=True)\nprint('no', file=sys.stderr)\n6 * 7",
        "import subprocess\n"
        "child = 'import time; block = bytearray(200_000_000); time.sleep(2)'\n"
        "subprocess.run([sys.executable, '-c', child])",
        "import time\ntime.sleep(1)",
    )
    write(folder / "raises.ipynb", "def f(x):\n    return 1 / x", "a = 1\nb = f(0)\nc = 2", "print('never')")
    write(folder / "hangs.ipynb", CHILD.format(marks[0]), "import time\nwhile True:\n    time.sleep(0.1)")
    write(folder / "stuck.ipynb", "sum(range(10**13))")  # C code: no interrupt reaches it
    write(folder / "dies.ipynb", "print('last words')", "import os; os.write(2, b'no memory'); os._exit(3)")
    write(folder / "chatters.ipynb", "while True: print('x' * 1000)")
    if os.name == "posix":
        write(folder / "killed.ipynb", CHILD.format(marks[1]), "import os\nos.kill(os.getpid(), 9)")
    (folder / "notjson.ipynb").write_text('{"cells": [\n  oops')
    startup = folder / "ipython" / "profile_default" / "startup"
    startup.mkdir(parents=True)
    (startup / "mine.py").write_text("mine = 1")
    other = folder / "kernels" / "python3" / "kernel.json"
    other.parent.mkdir(parents=True)
    other.write_text(json.dumps({"argv": ["another-python"], "display_name": "x", "language": "python"}))
    output = folder / "out"
    answer = subprocess.run(
        [sys.executable, "-m", "course", "run", str(folder), "--output", str(output), "--timeout", "5", "--jobs", "3"],
        cwd=ROOT, env={**ENVIRONMENT, "IPYTHONDIR": str(folder / "ipython"), "JUPYTER_PATH": str(folder)},
        timeout=280, check=False, capture_output=True, text=True, encoding="utf-8",
    )  # fmt: skip
    assert "Traceback (most recent call last):\n  File" not in answer.stderr, answer.stderr
    return answer.returncode, answer.stdout, output, marks, folder


@pytest.mark.notebook
@pytest.mark.slow
def test_a_good_notebook_passes_among_bad_ones_which_leave_copies_with_their_errors(called):
    status, printed, output, marks, folder = called
    assert status == 1
    assert "1 passed" in printed.splitlines()[-2]
    assert "\x1b" not in printed, "no colours where there is no terminal"
    assert str(output) in printed.splitlines()[-1]
    assert not any(map(sleepers, marks)), "no process is left over"
    cells = texts(output / "good.ipynb")
    data, kernel_folder, python, backend = cells["c0"].split()
    assert (data, kernel_folder, python) == ("sample", str(folder), sys.executable)
    assert "inline" in backend
    transport, threads, mine = cells["c1"].split()
    assert os.name == "nt" or transport == "ipc", "a port may be taken before the kernel opens it"
    assert int(threads) == max(1, os.cpu_count() // 3), "three at a time share the cores"
    assert mine == "False", "no start-up file of the user's runs before a notebook"
    executed = nbformat.read(output / "good.ipynb", as_version=4)
    kinds = [output.output_type for output in executed.cells[2].outputs]
    assert kinds == ["stream", "stream", "execute_result"], "pieces of one stream are joined"
    assert "execution" not in executed.cells[0].metadata, "no timestamps"
    row = next(line for line in printed.splitlines() if "good" in line and "│ passed" in line)
    assert 0.2 < float(row.split("GB")[0].split("│")[-1]) < 1, "peak memory, with that of a child"
    assert texts(folder / "good.ipynb")["c2"] == "old", "sources are left alone without --save"
    failed = nbformat.read(output / "raises.ipynb", as_version=4)
    assert failed.cells[1].outputs[-1].ename == "ZeroDivisionError"
    assert failed.cells[2].outputs == [], "an old one could be taken for this run's"
    assert texts(output / "dies.ipynb")["c0"] == "last words\n"
    assert len(texts(output / "chatters.ipynb")["c0"]) <= execution.OUTPUT_LIMIT
    assert not (output / "notjson.ipynb").exists()


@pytest.mark.notebook
@pytest.mark.parametrize(
    ("name", "phrases"),
    [
        ("raises", ["cell 'c1'", "ZeroDivisionError", "----> 2 b = f(0)", "----> 2     return 1 / x"]),
        ("hangs", ["did not finish within 5 s", "----> 3     time.sleep(0.1)"]),
        ("stuck", ["did not finish within 5 s", "sum(range("]),
        ("dies", ["Kernel died (exit status 3)", "no memory", "cell 'c1'"]),
        ("chatters", ["gave more than 5,000,000 characters", "while True"]),
        ("notjson", ["not JSON", "line 2"]),
        *([("killed", ["perhaps for lack of memory", "cell 'c1'"])] if os.name == "posix" else []),
    ],
)
def test_a_fault_is_explained(called, name, phrases):
    printed = called[1]
    marker = f"{name}.ipynb\n"
    said = printed[printed.index(marker) :].split("FAILED")[0].split("┏")[0]
    for phrase in phrases:
        assert phrase in said, said


@pytest.mark.notebook
def test_save_changes_outputs_of_what_passed_and_nothing_else(tmp_path, run_files):
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}, "title": "é"}
    path = write(tmp_path / "n.ipynb", "1 + 1", "print('é')", **metadata)
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.insert(0, new_markdown_cell("# T", id="title", metadata={"tags": ["x"]}))
    nbformat.write(notebook, path)
    failing = write(tmp_path / "f.ipynb", "1 + 1", "1 / 0")
    changed = write(tmp_path / "changed.ipynb", "with open('changed.ipynb', 'a') as file: print(file=file)\n1")
    before = json.loads(path.read_text(encoding="utf-8"))
    untouched = failing.read_bytes(), changed.read_bytes() + b"\n"
    status, printed = run_files(path, failing, changed, "--save")
    assert status == 1
    assert "outputs saved" in printed
    assert "not saved: the file was changed while it ran" in printed
    assert (failing.read_bytes(), changed.read_bytes()) == untouched
    after = json.loads(path.read_text(encoding="utf-8"))
    assert path.read_bytes().endswith(b"}\n")
    assert texts(path) == {"c0": "2", "c1": "é\n"}
    for cell in [*before["cells"], *after["cells"]]:
        for key in ("outputs", "execution_count"):
            cell.pop(key, None)
    assert after == before


@pytest.mark.notebook
def test_one_cell_is_saved_and_the_last_runs_copy_is_replaced(tmp_path, run_files):
    path, out = write(tmp_path / "n.ipynb", "1 + 1", "2 + 2"), tmp_path / "out"
    assert run_files(path, "--save", "--cell", "c1")[0] == 0
    assert texts(path) == {"c0": "old", "c1": "4"}
    assert [cell.execution_count for cell in nbformat.read(path, as_version=4).cells] == [1, 2], "as lint wants them"
    path.write_text("")  # no notebook any more
    assert run_files(path)[0] == 1
    assert list(out.iterdir()) == [], "the copy of the last run isn't taken for this one's"


@pytest.mark.notebook
def test_a_rehearsal_pretends_the_device_and_leaves_the_other_copies(tmp_path, monkeypatch, run_files):
    """That a tensor on the wrong device fails then is tests/test_pretended.py's matter."""
    names = [DEVICE_VARIABLE, "COURSE_TIMING", "COURSE_DATA", "OMP_NUM_THREADS", "OMP_WAIT_POLICY"]
    path = write(tmp_path / "n.ipynb", f"import os\nprint(*map(os.environ.get, {names}))")
    monkeypatch.setenv("COURSE_DATA", "full")
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    status, printed = run_files(path, "--rehearse")
    assert (status, "n  started" in printed) == (0, True)
    said = texts(tmp_path / "out" / "rehearsed" / "n.ipynb")["c0"]
    assert said == f"{PRETENDED} rough full None PASSIVE\n", "one alone has all cores"
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["rehearsed"]


def test_a_fault_of_the_program_itself_stops_no_other_and_a_run_of_nothing_is_no_success(
    tmp_path, monkeypatch, run_files
):
    def half_broken(notebook, folder, progress, **_):
        progress.seconds = 75.0
        if folder == tmp_path:
            raise OSError("disk on fire")

    monkeypatch.setattr(run, "execute_blocking", half_broken)
    status, printed = run_files("15-01", *(write(tmp_path / f"{name}.ipynb", "1") for name in "ab"))
    assert status == 1
    assert printed.count("OSError: disk on fire") == 2
    assert "75.0 / 60" in printed, "the budget is in the table"
    assert "1 passed, 2 failed" in printed
    monkeypatch.setattr(run, "select", lambda *_: [Selected("15-99", "Later", tmp_path / "15-99_later.ipynb")])
    status, printed = run_files()
    assert (status, "15-99" in printed) == (1, False), "what isn't written yet is left out, unless it is named"
    status, printed = run_files("15-99")
    assert (status, "15-99  failed" in printed) == (1, True)


@pytest.mark.notebook
@pytest.mark.skipif(os.name != "posix", reason="sends a POSIX signal")
def test_to_be_asked_to_end_ends_kernels_and_keeps_what_is_finished(tmp_path):
    mark = uuid.uuid4().hex
    write(tmp_path / "a.ipynb", "print('done')")
    write(tmp_path / "b.ipynb", CHILD.format(mark), "open('started', 'w').close()\nwhile True: pass")
    write(tmp_path / "c.ipynb", "print('never')")
    command = [sys.executable, "-m", "course", "run", str(tmp_path), "--output", str(tmp_path / "out"), "--jobs", "1"]
    with subprocess.Popen(
        command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            deadline = time.monotonic() + 60
            while not ((tmp_path / "started").exists() and sleepers(mark)):
                assert time.monotonic() < deadline
                time.sleep(0.1)
            process.terminate()
            printed, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130, printed
    assert "1 passed, 2 interrupted" in printed
    assert "c  started" not in printed
    assert texts(tmp_path / "out" / "a.ipynb")["c0"] == "done\n"
    assert not (tmp_path / "out" / "b.ipynb").exists()
    assert not sleepers(mark)


def test_wrong_usage_is_said_before_any_work(tmp_path, monkeypatch, run_files, capsys):
    path = write(tmp_path / "a.ipynb", "open('ran', 'w').close()")
    (tmp_path / "file").write_text("")
    (tmp_path / "none.ipynb").write_text("{")
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "b" / "a.ipynb")
    for arguments, phrase in [
        (["99"], "no topic 15-99"),
        (["nosuch.ipynb"], "neither a topic"),
        ([path, "--output", "."], "overwrite"),
        ([write(tmp_path / "out" / "made.ipynb")], "overwrite"),
        ([path, "--output", tmp_path / "b"], "overwrite"),
        ([path, tmp_path / "b" / "a.ipynb"], "the same name"),
        ([path, "--output", tmp_path / "file" / "out"], "name another --output"),
        ([path, "--rehearse", "--save"], "leave out --save or --rehearse"),
        ([path, "--cell", "c0"], "add --save"),
        ([path, "--cell", "c7", "--save"], "no cell c7"),
        ([tmp_path / "none.ipynb", "--cell", "c0", "--save"], "not JSON"),
        (["15-01", "15-02", "--cell", "setup", "--save"], "--cell needs one notebook"),
    ]:
        status, printed = run_files(*arguments)
        assert status == 2
        assert phrase in printed
    for option, value in (("--jobs", "0"), ("--timeout", "abc")):
        with pytest.raises(SystemExit):
            run_files(path, option, value)
        assert f"{value} is not a positive whole number" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


def test_selection(tmp_path, monkeypatch):
    book = load()
    topics = list(book.topics)
    assert [selected.topic for selected in select([], book)] == topics
    monkeypatch.chdir(ROOT)
    for name in ("15-01", "15-1", "1", "01", str(book.topics["15-01"].path.relative_to(ROOT))):
        (selected,) = select([name], book)
        assert (selected.topic, selected.budget_seconds) == ("15-01", 60), name
    assert len(select(["1", "15-01", "10"], book)) == 2, "each once"
    # in workbook/, say, a student's notebooks have the names of the full edition
    own = write(tmp_path / book.topics["15-01"].file, "1")
    monkeypatch.chdir(tmp_path)
    for name in (own.name, str(tmp_path)):
        (selected,) = select([name], book)
        assert (selected.topic, selected.path, selected.title) == (None, own.resolve(), own.stem)
    for name in ("99", "16-01", "nothing", str(ROOT / "README.md"), str(ROOT / "shared")):
        with pytest.raises(SelectionError):
            select([name], book)


@pytest.mark.parametrize(
    ("content", "phrase"),
    [
        (b"", "empty"),
        (b"\xff\xfe\x00", "UTF-8"),
        (b'{"nbformat": 3, "nbformat_minor": 0, "metadata": {}, "worksheets": []}', "format 3"),
        (b'{"cells": [{"cell_type": "code"}], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}', "not a valid"),
        (b"[1]", "not a valid notebook"),
        (None, "can't be read"),
    ],
)
def test_reading_names_what_is_wrong(tmp_path, content, phrase):
    if content is not None:
        (tmp_path / "n.ipynb").write_bytes(content)
    with pytest.raises(NotebookError, match=phrase):
        read_notebook(tmp_path / "n.ipynb")


def test_notebooks_at_once_share_the_cores(monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    waiting = {"OMP_WAIT_POLICY": "PASSIVE"}
    assert share_of_cores(1) == waiting
    assert share_of_cores(2) == {**waiting, "OMP_NUM_THREADS": "4"}
    assert share_of_cores(16) == {**waiting, "OMP_NUM_THREADS": "1"}
    os.environ.update(OMP_NUM_THREADS="3", OMP_WAIT_POLICY="ACTIVE")
    assert share_of_cores(2) == {}
