"""course.run on real kernels: good notebooks, every fault we know of, and Ctrl-C. Kernel starts are shared."""

import io
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import nbformat
import psutil
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from rich.console import Console

from course import execution, kernels, run, selection
from course.environment import ROOT
from course.execution import NotebookError, Progress, execute_blocking, read_notebook
from course.processes import share_of_cores
from course.selection import Selected, SelectionError

CHILD = """\
import subprocess, sys
subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)', '{}'], start_new_session=True)"""

REACHED = "import ipykernel.connect as c\nprint(c.get_connection_info(unpack=True)['transport'])"


def write(path, *sources, **metadata):
    """A notebook with one code cell for each source, ids c0, c1, …"""
    cells = [new_code_cell(source, id=f"c{index}") for index, source in enumerate(sources)]
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(new_notebook(cells=cells, metadata=metadata), path)
    return path


def run_files(paths, output, monkeypatch, **options):
    """Run `main` in this process; returns (exit status, what it printed)."""
    printed = io.StringIO()
    monkeypatch.setattr(run, "_console", lambda: Console(file=printed, width=140, highlight=False))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    args = {"jobs": 2, "save": False, "cell": [], "rehearse": False, "timeout": 60.0, **options}
    parsed = run.argparse.Namespace(notebooks=[str(path) for path in paths], output=output, **args)
    return run.main(parsed), printed.getvalue()


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


# --------------------------------------------------------------------------------------------------------------------
# notebooks that are all right


@pytest.mark.notebook
def test_good_notebooks(tmp_path, monkeypatch):
    monkeypatch.delenv("COURSE_DATA", raising=False)
    first = write(
        tmp_path / "a" / "one.ipynb",
        "import os, sys\ndef get_device(): print('┃ device   cpu'); print('  name     a processor')\nget_device()",
        "print(os.environ['COURSE_DATA'], os.getcwd(), sys.executable, os.environ['MPLBACKEND'])",
        "for i in range(3): print(i, flush=True)\nprint('no', file=sys.stderr)\n6 * 7",
        "block = bytearray(200_000_000)\nimport time\ntime.sleep(0.8)",
        # a name that no kernel has: ignored
        kernelspec={"name": "no-such-kernel", "display_name": "x", "language": "python"},
    )
    second = write(tmp_path / "b" / "one.ipynb", "print('the other')", REACHED)
    before = first.read_bytes()
    status, printed = run_files([first, second], tmp_path / "out", monkeypatch)
    assert status == 0, printed
    assert first.read_bytes() == before, "sources are left alone without --save"
    cells = texts(tmp_path / "out" / "one.ipynb")
    data, folder, python, backend = cells["c1"].split()
    assert (data, folder, python) == ("sample", str(first.parent), sys.executable)
    assert "inline" in backend
    other = texts(tmp_path / "out" / "b-one.ipynb")
    assert other["c0"] == "the other\n", "same file name, another copy"
    assert os.name == "nt" or other["c1"] == "ipc\n", "a port may be taken before the kernel opens it"
    executed = nbformat.read(tmp_path / "out" / "one.ipynb", as_version=4)
    kinds = [output.output_type for output in executed.cells[2].outputs]
    assert kinds == ["stream", "stream", "execute_result"], "pieces of one stream are joined"
    assert "execution" not in executed.cells[0].metadata, "no timestamps"
    row = next(line for line in printed.splitlines() if "one" in line and "passed" in line and "cpu" in line)
    assert float(row.split("GB")[0].split("│")[-1]) > 0.2, "peak memory"
    assert str(tmp_path / "out") in printed.splitlines()[-1]


@pytest.mark.parametrize(("longest", "transport"), [(100, "ipc"), (101, None)])
def test_a_path_that_is_too_long_for_a_socket_means_ports(longest, transport):
    stem = "/" + "ä" + "x" * (longest - len("/ä-ipc-5") - 1)  # the letter has two bytes
    found = kernels.connection(Path(f"{stem}.json"))
    assert found["connection_file"].endswith(".json")
    assert found.get("transport") == (transport if os.name != "nt" else None)


@pytest.mark.notebook
def test_save_changes_outputs_and_nothing_else(tmp_path, monkeypatch):
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}, "title": "é"}
    path = write(tmp_path / "n.ipynb", "1 + 1", "print('é')", **metadata)
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.insert(0, new_markdown_cell("# T", id="title", metadata={"tags": ["x"]}))
    notebook.cells[1].metadata = {"tags": ["nbval-check-output"]}
    nbformat.write(notebook, path)
    failing = write(tmp_path / "f.ipynb", "1 + 1", "1 / 0")
    before, failing_before = json.loads(path.read_text(encoding="utf-8")), failing.read_bytes()
    status, printed = run_files([path, failing], tmp_path / "out", monkeypatch, save=True)
    assert status == 1
    assert failing.read_bytes() == failing_before, "only notebooks that passed are saved"
    after = json.loads(path.read_text(encoding="utf-8"))
    assert after["cells"][1]["outputs"][0]["data"]["text/plain"] == ["2"]
    assert "outputs saved" in printed
    for cell in [*before["cells"], *after["cells"]]:
        for key in ("outputs", "execution_count"):
            cell.pop(key, None)
    assert after == before
    once = path.read_bytes()
    run_files([path], tmp_path / "out", monkeypatch, save=True)
    assert path.read_bytes() == once, "saving again changes nothing"


@pytest.mark.notebook
def test_save_may_be_for_one_cell(tmp_path, monkeypatch):
    path = write(tmp_path / "n.ipynb", "1 + 1", "2 + 2")
    notebook = nbformat.read(path, as_version=4)
    first, second = (cell.id for cell in notebook.cells)
    status, _ = run_files([path], tmp_path / "out", monkeypatch, save=True, cell=[second])
    assert status == 0
    saved = nbformat.read(path, as_version=4).cells
    assert [len(cell.outputs) for cell in saved] == [0, 1]
    for wrong, said in (({"save": True, "cell": ["c77"]}, "no code cell 'c77'"), ({"cell": [first]}, "add --save")):
        status, printed = run_files([path], tmp_path / "out", monkeypatch, **wrong)
        assert (status, said in printed) == (2, True)


@pytest.mark.notebook
def test_save_leaves_a_file_alone_that_changed_meanwhile_or_whose_output_was_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(execution, "OUTPUT_LIMIT", 1000)
    changed = write(tmp_path / "changed.ipynb", "with open('changed.ipynb', 'a') as file: print(file=file)\n1")
    chatters = write(tmp_path / "chatters.ipynb", "print('x' * 2000)")
    before = changed.read_bytes() + b"\n", chatters.read_bytes()
    status, printed = run_files([changed, chatters], tmp_path / "out", monkeypatch, save=True)
    assert status == 0, printed
    assert "not saved: the file was changed while it ran" in printed
    assert "not saved: output was cut" in printed
    assert (changed.read_bytes(), chatters.read_bytes()) == before


@pytest.mark.notebook
def test_a_copy_that_was_changed_is_kept(tmp_path, monkeypatch):
    path, out = write(tmp_path / "n.ipynb", "1 + 1"), tmp_path / "out"
    for _ in range(2):
        run_files([path], out, monkeypatch)
    assert [file.name for file in out.iterdir()] == ["n.ipynb"], "what nobody changed is replaced"
    for name in ("n.edited.ipynb", "n.edited-2.ipynb"):
        copy = nbformat.read(out / "n.ipynb", as_version=4)
        copy.cells[0].source = f"'notes of mine for {name}'"
        nbformat.write(copy, out / "n.ipynb")
        _, printed = run_files([path], out, monkeypatch)
        assert name in printed
        assert name in (out / name).read_text(encoding="utf-8")
        assert texts(out / "n.ipynb")["c0"] == "2"
    path.write_text("")  # no notebook any more: there is no copy, and yet nothing of the user's is lost
    (out / "n.ipynb").write_text("my own")
    run_files([path], out, monkeypatch)
    assert (out / "n.edited-3.ipynb").read_text() == "my own"
    assert not (out / "n.ipynb").exists()


def test_a_folder_that_cannot_be_written_is_noticed_before_the_work(tmp_path, monkeypatch):
    path = write(tmp_path / "n.ipynb", "open('ran', 'w').close()")
    (tmp_path / "file").write_text("")
    status, printed = run_files([path], tmp_path / "file" / "out", monkeypatch)
    assert status == 2
    assert "can't write in" in printed
    assert "name another --output" in printed
    assert not (tmp_path / "ran").exists()


@pytest.mark.notebook
def test_the_time_limit_is_for_a_cell(tmp_path):
    sleeps = ["import time; time.sleep(1)"] * 7
    notebook, _ = read_notebook(write(tmp_path / "n.ipynb", *sleeps))
    progress = execute_blocking(notebook, tmp_path, timeout=6)
    assert progress.failure is None
    assert progress.seconds > 6


# --------------------------------------------------------------------------------------------------------------------
# rehearsals

DEVICE_CELL = "import torch\nfrom shared import get_device\ndevice = get_device()"


@pytest.mark.notebook
def test_a_rehearsal_names_the_cell_with_a_tensor_on_the_wrong_device(tmp_path, monkeypatch):
    right = write(
        tmp_path / "right.ipynb",
        DEVICE_CELL,
        "x = torch.ones(3, device=device, requires_grad=True)\n(x * x.new_ones(3)).sum().backward()\nx.grad.device",
        "import matplotlib.pyplot as plt\n_ = plt.plot(x.detach().cpu())",
        DEVICE_CELL,
    )
    mixed = write(tmp_path / "mixed.ipynb", DEVICE_CELL, "x = torch.ones(3, device=device)\ny = x + torch.ones(3)")
    plots = write(
        tmp_path / "plots.ipynb",
        DEVICE_CELL,
        "import matplotlib.pyplot as plt\nx = torch.ones(3, device=device)\nplt.plot(x)",
    )
    never = write(tmp_path / "never.ipynb", "1 + 1")
    out = tmp_path / "out"
    status, printed = run_files([right], out, monkeypatch)
    assert status == 0, printed
    ordinary = (out / "right.ipynb").read_bytes()
    status, printed = run_files([right, mixed, plots, never], out, monkeypatch, rehearse=True)
    assert status == 1
    assert "1 passed, 3 failed" in printed
    assert "mps (pretended)" in next(line for line in printed.splitlines() if "│ right" in line)
    assert texts(out / "rehearsed" / "right.ipynb")["c1"] == "device(type='mps', index=0)"
    assert (out / "right.ipynb").read_bytes() == ordinary, "a rehearsal's copies are elsewhere"
    said = explanation(printed, "mixed")
    assert "RuntimeError: Expected all tensors to be on the same device" in said
    assert "id 'c1'" in said
    assert ">   2 | y = x + torch.ones(3)" in said
    said = explanation(printed, "plots")
    assert "TypeError: can't convert mps:0 device type tensor to numpy" in said
    assert ">   3 | plt.plot(x)" in said
    assert "nothing was rehearsed" in explanation(printed, "never")


@pytest.mark.notebook
def test_ranks_are_not_rehearsed_and_get_no_tensor_of_the_device(tmp_path):
    source = "import torch.distributed as dist\nfrom shared import launch\ndef double(x): return 2 * x"
    good = "launch(double, 2, torch.ones(2), backend='gloo')[1] + torch.ones(2)"
    bad = "launch(double, 2, torch.ones(2, device=device), backend='gloo')"
    notebook, _ = read_notebook(write(tmp_path / "n.ipynb", DEVICE_CELL, source, good, bad))
    progress = execute_blocking(notebook, tmp_path, rehearse=True)
    assert progress.failure.cell_id == "c3"
    assert "mps" in progress.failure.reason


def test_outputs_of_a_rehearsal_are_not_saved(tmp_path, monkeypatch):
    path = write(tmp_path / "n.ipynb", "open('ran', 'w').close()")
    status, printed = run_files([path], tmp_path / "out", monkeypatch, rehearse=True, save=True)
    assert status == 2
    assert "leave out --save or --rehearse" in printed
    assert not (tmp_path / "ran").exists()


def test_the_settings_are_those_that_shared_knows(monkeypatch):
    from shared import device, timing

    assert execution.REHEARSAL[device.DEVICE_VARIABLE] == device.PRETENDED
    monkeypatch.setenv("COURSE_TIMING", execution.REHEARSAL["COURSE_TIMING"])
    assert timing.rough()


# --------------------------------------------------------------------------------------------------------------------
# faults


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    """One real call of the command with every fault; (exit status, printed, folder of copies, marks)."""
    folder = tmp_path_factory.mktemp("faults")
    marks = [uuid.uuid4().hex for _ in range(2)]  # no other run of these tests has the same
    write(folder / "good.ipynb", "print('fine')")
    write(folder / "syntax.ipynb", "x = 1", "y = 2\nz = = 3")
    write(folder / "raises.ipynb", "def f(x):\n    return 1 / x", "a = 1\nb = f(0)\nc = 2", "print('never')")
    write(folder / "hangs.ipynb", CHILD.format(marks[0]), "import time\nwhile True:\n    time.sleep(0.1)")
    write(folder / "stuck.ipynb", "sum(range(10**13))")  # C code: no interrupt reaches it
    write(folder / "dies.ipynb", "import os\nprint('last words')", "os._exit(1)")
    write(folder / "exits.ipynb", "exit()", "print('never')")
    write(folder / "asks.ipynb", "input('name?')")
    write(folder / "chatters.ipynb", "print('\\n'.join(f'line {i}' for i in range(1_000_000)))")
    if os.name == "posix":
        write(folder / "killed.ipynb", CHILD.format(marks[1]), "import os\nos.kill(os.getpid(), 9)")
    (folder / "empty.ipynb").write_text("")
    (folder / "notjson.ipynb").write_text('{"cells": [\n  oops')
    (folder / "list.ipynb").write_text("[1]")
    (folder / "invalid.ipynb").write_text(
        '{"cells": [{"cell_type": "code"}], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}'
    )
    output = folder / "out"
    answer = subprocess.run(
        [sys.executable, "-m", "course", "run", str(folder), "--output", str(output), "--timeout", "8", "--jobs", "3"],
        cwd=ROOT, env={**os.environ, "COURSE_ENV": "current", "PYTHONIOENCODING": "utf-8"}, timeout=280, check=False,
        capture_output=True, text=True, encoding="utf-8",
    )  # fmt: skip
    assert "Traceback (most recent call last):\n  File" not in answer.stderr, answer.stderr
    return answer.returncode, answer.stdout, output, marks


def explanation(printed, name):
    """What was said about a failed notebook."""
    marker = f"{name}.ipynb\n"
    return printed[printed.index(marker) :].split("FAILED")[0].split("┏")[0]


@pytest.mark.notebook
def test_faults_fail_the_run_and_stop_no_other(faults):
    status, printed, output, _ = faults
    assert status == 1
    assert texts(output / "good.ipynb")["c0"] == "fine\n"
    table = printed[printed.index("┏") :]
    assert table.count(" passed") == 2 + 1, "good, chatters, and the line that counts them"
    assert "\x1b" not in printed, "no colours where there is no terminal"


@pytest.mark.notebook
@pytest.mark.parametrize(
    ("name", "phrases"),
    [
        ("syntax", ["code cell 2 of 2, id 'c1'", "SyntaxError", ">   2 | z = = 3"]),
        ("raises", ["code cell 2 of 3, id 'c1'", "ZeroDivisionError", ">   2 | b = f(0)", "----> 2     return 1 / x"]),
        ("hangs", ["did not finish within 8 s", "time-out", ">   3 |     time.sleep(0.1)"]),
        ("stuck", ["did not finish within 8 s", "sum(range("]),
        ("dies", ["the kernel died", "exit status 1", "id 'c1'"]),
        ("exits", ["calls exit()"]),
        ("asks", ["id 'c0'", "does not support input"]),
        ("empty", ["the file is empty"]),
        ("notjson", ["not JSON", "line 2"]),
        ("list", ["not a notebook"]),
        ("invalid", ["not a valid notebook"]),
        pytest.param(
            "killed", ["SIGKILL", "id 'c1'"], marks=pytest.mark.skipif(os.name != "posix", reason="a POSIX signal")
        ),
    ],
)
def test_fault_is_explained(faults, name, phrases):
    said = explanation(faults[1], name)
    for phrase in phrases:
        assert phrase in said, said


@pytest.mark.notebook
def test_failed_notebooks_have_copies_with_their_errors(faults):
    _, _, output, _ = faults
    copy = nbformat.read(output / "raises.ipynb", as_version=4)
    assert copy.cells[1].outputs[-1].ename == "ZeroDivisionError"
    assert copy.cells[2].outputs == []
    assert texts(output / "dies.ipynb")["c0"] == "last words\n"
    assert not (output / "notjson.ipynb").exists()


@pytest.mark.notebook
def test_output_without_end_is_cut(faults):
    _, printed, output, _ = faults
    assert "gave too much output" in printed
    text = texts(output / "chatters.ipynb")["c0"]
    assert text.startswith("line 0\nline 1\n")
    assert "output cut here" in text
    assert len(text) < 1.1 * execution.OUTPUT_LIMIT


@pytest.mark.notebook
def test_no_process_is_left_over(faults):
    assert not any(sleepers(mark) for mark in faults[3])


@pytest.mark.notebook
def test_kernel_that_does_not_start(tmp_path):
    notebook, _ = read_notebook(write(tmp_path / "n.ipynb", "1"))
    command = [sys.executable, "-c", "import sys; sys.exit('no kernel today')"]
    progress = execute_blocking(notebook, tmp_path, kernel=command)
    assert "did not start" in progress.failure.reason
    assert "no kernel today" in progress.failure.reason
    progress = execute_blocking(notebook, tmp_path, kernel=["/no/such/python"])
    assert "could not be started" in progress.failure.reason


def test_a_fault_of_the_program_itself_stops_no_other(tmp_path, monkeypatch):
    async def broken(*_, **__):
        raise OSError("disk on fire")

    monkeypatch.setattr(run, "execute", broken)
    paths = [write(tmp_path / f"{name}.ipynb", "1") for name in "ab"]
    status, printed = run_files(paths, tmp_path / "out", monkeypatch)
    assert status == 1
    assert printed.count("OSError: disk on fire") == 2


@pytest.mark.notebook
@pytest.mark.skipif(os.name != "posix", reason="sends a POSIX signal")
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_ends_kernels_and_keeps_what_is_finished(tmp_path, sent):
    mark = uuid.uuid4().hex
    write(tmp_path / "a.ipynb", "print('done')")
    write(tmp_path / "b.ipynb", CHILD.format(mark), "open('started', 'w').close()\nwhile True: pass")
    write(tmp_path / "c.ipynb", "print('never')")
    process = subprocess.Popen(
        [sys.executable, "-m", "course", "run", str(tmp_path), "--output", str(tmp_path / "out"), "--jobs", "1"],
        cwd=ROOT, env={**os.environ, "COURSE_ENV": "current"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "started").exists():
            assert time.monotonic() < deadline
            assert process.poll() is None, process.communicate(timeout=60)[0]
            time.sleep(0.1)
        while not sleepers(mark):  # its command line is empty for a moment after it has started
            assert time.monotonic() < deadline
            time.sleep(0.1)
        os.kill(process.pid, sent)
        printed, _ = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            process.kill()
            for pid in sleepers(mark):  # a failed test leaves nothing behind either
                os.kill(pid, signal.SIGKILL)
            process.communicate(timeout=60)
    assert process.returncode == 130, printed
    assert "1 passed, 2 interrupted" in printed
    assert texts(tmp_path / "out" / "a.ipynb")["c0"] == "done\n"
    assert not (tmp_path / "out" / "b.ipynb").exists()
    assert not sleepers(mark)


# --------------------------------------------------------------------------------------------------------------------
# without kernels


def job(status, **progress):
    notebook = Selected("15-01", "A title", Path("/nowhere/a.ipynb"), 60)
    return run.Job(notebook, Path("/nowhere/out/a.ipynb"), status, Progress(**progress))


def test_table_shows_budget_and_what_is_missing():
    printed = io.StringIO()
    jobs = [job("passed", seconds=41.23, peak=1_500_000_000, device="cuda:0"), job("passed", seconds=75.0)]
    jobs.append(job("not written yet"))
    Console(file=printed, width=140).print(run._summary(jobs))
    rows = [line for line in printed.getvalue().splitlines() if "15-01" in line]
    assert "41.2 / 60 " in rows[0]
    assert "1.50 GB" in rows[0]
    assert "cuda:0" in rows[0]
    assert "75.0 / 60 over budget" in rows[1]
    assert "not written yet" in rows[2]


def test_a_running_notebook_is_told_of(monkeypatch):
    monkeypatch.setattr(run, "REPORT_SECONDS", 0.01)
    printed = io.StringIO()
    jobs = [job("running", cells=9, cell=3, memory=10**9, started=time.monotonic())]
    with run._Display(jobs, Console(file=printed, width=100)):
        time.sleep(0.5)
    assert "15-01  cell 3/9  0 s  1.00 GB" in printed.getvalue()


def test_wrong_usage(tmp_path, monkeypatch):
    path = write(tmp_path / "a.ipynb", "1")
    for names, options, phrase in [
        (["99"], {}, "no topic 15-99"),
        (["nosuch.ipynb"], {}, "neither a topic"),
        ([tmp_path / "out"], {}, "neither a topic"),
        ([path], {"output": tmp_path}, "overwrite"),
    ]:
        output = options.pop("output", tmp_path / "out")
        status, printed = run_files(names, output, monkeypatch, **options)
        assert status == 2
        assert phrase in printed
    monkeypatch.setenv("COURSE_DATA", "smaple")
    status, printed = run_files([path], tmp_path / "out", monkeypatch)
    assert status == 2
    assert "COURSE_DATA='smaple' is not known" in printed
    monkeypatch.setenv("COURSE_DATA", " SAMPLE ")  # as a notebook takes it
    monkeypatch.setenv("COURSE_DEVICE", "gpu")
    status, printed = run_files([path], tmp_path / "out", monkeypatch)
    assert status == 2, "and no kernel was started"
    assert "COURSE_DEVICE='gpu' is not available here" in printed


@pytest.mark.parametrize(
    "arguments", [["--jobs", "0"], ["--timeout", "-1"], ["--timeout", "nan"], ["--timeout", "abc"], ["--jobs", "1.5"]]
)
def test_options_out_of_range_are_refused(arguments, capsys):
    parser = run.argparse.ArgumentParser()
    run.add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(arguments)
    assert f"{arguments[1]} is not a positive" in capsys.readouterr().err


@pytest.fixture
def small_syllabus(tmp_path):
    """What `select` looks at, with two topics; only the first is written."""
    from types import SimpleNamespace

    write(tmp_path / "module" / "15-01_a.ipynb", "1")
    topics = {
        f"15-{number:02d}": SimpleNamespace(
            title=f"T{number}", path=tmp_path / "module" / f"15-{number:02d}_a.ipynb", budget_seconds=60
        )
        for number in (1, 10)
    }
    return SimpleNamespace(module=SimpleNamespace(number=15), topics=topics)


def test_selection(small_syllabus, tmp_path):
    assert [selected.topic for selected in selection.select([], small_syllabus)] == ["15-01", "15-10"]
    for name in ("15-01", "15-1", "1", "01", str(tmp_path / "module" / "15-01_a.ipynb"), "15-01_a.ipynb"):
        (selected,) = selection.select([name], small_syllabus)
        assert (selected.topic, selected.budget_seconds) == ("15-01", 60), name
    assert len(selection.select(["1", "15-01", "10"], small_syllabus)) == 2, "each once"
    other = write(tmp_path / "other.ipynb", "1")
    (selected,) = selection.select([str(other)], small_syllabus)
    assert (selected.topic, selected.title) == (None, "other")
    for name in ("2", "16-01", "nothing"):
        with pytest.raises(SelectionError):
            selection.select([name], small_syllabus)


def test_a_bare_file_name_means_the_file_in_the_current_folder_first(small_syllabus, tmp_path, monkeypatch):
    """In workbook/, say, where a student's notebooks have the names of the full edition."""
    own = write(tmp_path / "workbook" / "15-01_a.ipynb", "1")
    monkeypatch.chdir(own.parent)
    (selected,) = selection.select([own.name], small_syllabus)
    assert (selected.topic, selected.path) == (None, own.resolve())


@pytest.mark.notebook
def test_topics_not_written_are_no_failure(small_syllabus, tmp_path, monkeypatch):
    monkeypatch.setattr(run.syllabus, "load", lambda: small_syllabus)
    status, printed = run_files([], tmp_path / "out", monkeypatch)
    assert status == 0
    assert "1 passed, 1 not written yet" in printed


def test_reading_names_what_is_wrong(tmp_path):
    path = tmp_path / "n.ipynb"
    for content, phrase in [
        (b"", "empty"),
        (b"\xff\xfe\x00", "UTF-8"),
        (b'{"a": 1}', "format"),
        (b"3", "not a notebook"),
        (b'{"nbformat": 3, "nbformat_minor": 0, "metadata": {}, "worksheets": []}', "format 3"),
    ]:
        path.write_bytes(content)
        with pytest.raises(NotebookError, match=phrase):
            read_notebook(path)
    with pytest.raises(NotebookError, match="can't be read"):
        read_notebook(tmp_path)


def test_notebooks_at_once_share_the_cores(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert share_of_cores(1) == {}
    assert share_of_cores(2) == {"OMP_NUM_THREADS": "4"}
    assert share_of_cores(16) == {"OMP_NUM_THREADS": "1"}
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert share_of_cores(2) == {}


@pytest.mark.notebook
def test_kernels_get_their_share(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    ask = "import os; print(os.environ.get('OMP_NUM_THREADS'))"
    paths = [write(tmp_path / f"{name}.ipynb", ask) for name in ("one", "two")]
    out = tmp_path / "out"
    status, printed = run_files(paths, out, monkeypatch)
    assert status == 0, printed
    assert [texts(out / path.name)["c0"] for path in paths] == ["3\n", "3\n"]
    status, printed = run_files(paths[:1], out, monkeypatch)
    assert texts(out / "one.ipynb")["c0"] == "None\n", "alone it may have all cores"
