"""`python -m course` from outside: help, wrong usage, Pythons without anything installed, what each command starts."""

import argparse
import ast
import importlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from course import __main__ as cli
from course import clean, environment, lab
from course import test as course_test
from course.selection import Selected

ROOT = environment.ROOT


def course(*arguments, python=(sys.executable,), cwd=ROOT, **env):
    return subprocess.run(
        [*python, "-m", "course", *arguments], cwd=cwd, env={**os.environ, **env}, timeout=120, check=False,
        capture_output=True, text=True, encoding="utf-8",
    )  # fmt: skip


def test_help_needs_no_environment_and_nothing_installed():
    start = time.monotonic()
    answer = course("help", python=(sys.executable, "-I", "-S", "-c", BARE), COURSE_ENV="")
    assert answer.returncode == 0, answer.stderr
    assert all(command in answer.stdout for command in cli.COMMANDS)
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("arguments", [("grade", "--help"), ("help", "lab"), ("run", "-h")])
def test_to_ask_for_options_installs_nothing(monkeypatch, capsys, arguments):
    monkeypatch.delenv("COURSE_ENV", raising=False)
    monkeypatch.setattr(environment.Environment, "ready", lambda self: False)
    monkeypatch.setattr(environment.Environment, "ensure", lambda self: pytest.fail("it set the environment up"))
    with pytest.raises(SystemExit):
        cli.main(list(arguments))
    assert "usage:" in capsys.readouterr().out


def test_where_options_cannot_be_shown_the_way_to_them_is():
    # no .venv was made with this index, so none is ready, whatever the clone has
    bare = (sys.executable, "-I", "-S", "-c", BARE)
    answer = course("grade", "--help", python=bare, COURSE_ENV="", COURSE_TORCH_INDEX="http://127.0.0.1:9/none")
    assert answer.returncode == 0, answer.stderr
    assert "python -m course setup" in answer.stdout
    assert "Installing" not in answer.stderr


def test_to_look_at_the_site_first_nobody_waits_for_pytorch(monkeypatch, capsys):
    monkeypatch.delenv("COURSE_ENV", raising=False)
    monkeypatch.setattr(environment, "can_build_site", lambda: False)
    monkeypatch.setattr(environment.Environment, "ready", lambda self: False)
    monkeypatch.setattr(environment.Environment, "ensure", lambda self: pytest.fail("it set the environment up"))
    assert cli.main(["site"]) == 1
    advice = capsys.readouterr().err
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = [line for line in advice.splitlines() if line.startswith("    ")]
    assert len(lines) == 3
    assert all(line in readme for line in lines)
    wanted = (ROOT / "requirements-site.txt").read_text(encoding="utf-8")
    assert "torch" not in wanted.replace("PyTorch", "")


# `-m course` with neither site-packages nor the environment variables: what a fresh clone has
BARE = """
import runpy, sys
sys.path.insert(0, ".")
sys.argv = sys.argv[2:]
runpy.run_module("course", run_name="__main__")
"""


@pytest.mark.parametrize("file", ["__main__.py", "environment.py", "__init__.py"])
def test_what_runs_first_parses_on_old_pythons(file):
    ast.parse((ROOT / "course" / file).read_text(encoding="utf-8"), feature_version=(3, 8))


def test_too_old_a_python_is_told_so(monkeypatch, capsys):
    monkeypatch.setattr(sys, "version_info", (3, 10, 4))
    assert cli.main(["run"]) == 2
    assert "needs Python 3.11" in capsys.readouterr().err


def test_unknown_command_names_the_nearest(capsys):
    assert cli.main(["rnu"]) == 2
    assert "Did you mean 'run'?" in capsys.readouterr().err


def test_a_setup_error_is_a_message_not_a_traceback(monkeypatch, capsys):
    monkeypatch.setenv("COURSE_ENV", "nonsense")
    assert cli.main(["run"]) == 1
    assert "nonsense" in capsys.readouterr().err


@pytest.mark.parametrize("name", [name for name in cli.COMMANDS if name not in ("help", "setup")])
def test_each_command_explains_itself(name, capsys):
    """`--help` builds its options; what its module says of it in full is there, and the list has it in one line."""
    with pytest.raises(SystemExit) as ended:
        cli.run_command(name, ["--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"usage: python -m course {name} ")
    module = importlib.import_module(f"course.{name}")
    assert module.__doc__.strip().splitlines()[0] in printed
    assert callable(module.main)
    assert re.search(rf"^  {name} +\w", cli.usage(), re.MULTILINE)


def test_no_command_is_left_out_of_the_list():
    """A module with options for a command line is a command."""
    modules = [path for path in (ROOT / "course").glob("*.py") if "\ndef add_arguments(" in path.read_text("utf-8")]
    assert {path.stem for path in modules} == set(cli.COMMANDS) - {"help", "setup"}


@pytest.fixture
def made(monkeypatch, tmp_path):
    """The folder of the programs in a .venv that is ready."""
    programs = tmp_path / ".venv" / "bin"
    monkeypatch.delenv("COURSE_ENV", raising=False)
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    monkeypatch.setattr(environment.Environment, "ensure", lambda self: programs / "python")
    monkeypatch.setenv("PATH", os.environ["PATH"])
    return programs


def test_hand_over_starts_the_command_again(monkeypatch, made):
    started = []
    monkeypatch.setattr(os, "execv", lambda path, arguments: started.append(arguments))
    monkeypatch.setattr(environment, "CAN_EXEC", True)

    class Stop(Exception):
        pass

    def popen(command):
        raise Stop

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setenv("PYTHONHOME", "/elsewhere")
    with pytest.raises(Stop):
        environment.enter("run", ["15-01"])
    assert "PYTHONHOME" not in os.environ
    assert started == [[str(made / "python"), "-m", "course", "run", "15-01"]]
    assert os.environ["PATH"].startswith(f"{made}{os.pathsep}")


def test_hand_over_without_exec_passes_the_status_on(monkeypatch, made):
    """The way of Windows, on any system."""
    monkeypatch.setattr(environment, "CAN_EXEC", False)
    real = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda _: real([sys.executable, "-c", "import sys; sys.exit(7)"]))
    assert environment.enter("run", []) == 7


def test_nothing_is_handed_over_in_the_environment_itself(monkeypatch, made):
    monkeypatch.setattr(sys, "prefix", str(made.parent))
    assert environment.enter("run", []) is None


# --------------------------------------------------------------------------------------------------------------------
# test, lab, clean


def test_test_command_runs_everything_unless_a_path_is_named():
    everything = course_test.pytest_arguments([], [])
    assert "--nbval-lax" in everything
    assert "tests" in everything
    notebooks = [argument for argument in everything if argument.endswith(".ipynb")]
    assert len(notebooks) == len({*ROOT.glob("module_15_*/15-*.ipynb"), *ROOT.glob("templates/*.ipynb")}) > 2
    assert "--ignore-glob=*test_notebooks.py" in everything, "half an hour, for those who ask for --all"
    assert not any("ignore" in argument for argument in course_test.pytest_arguments([], ["--all", "-x"]))
    narrowed = course_test.pytest_arguments([], ["tests/test_cli.py::test_x", "-x"])
    assert "tests" not in narrowed
    assert narrowed[-2:] == ["tests/test_cli.py::test_x", "-x"]


def test_test_command_works_without_xdist(monkeypatch):
    assert "-n" in course_test.pytest_arguments([], [])
    monkeypatch.setattr(course_test.importlib.util, "find_spec", lambda _: None)
    assert "-n" not in course_test.pytest_arguments([], [])


@pytest.mark.processes
def test_test_command_passes_pytests_status_on(tmp_path):
    (tmp_path / "test_one.py").write_text("def test_one(): assert 1 == 2\n")
    answer = course("test", str(tmp_path / "test_one.py"), "-n", "0", COURSE_ENV="current")
    assert answer.returncode == 1
    assert "assert 1 == 2" in answer.stdout
    assert "test: failed" in answer.stdout


@pytest.mark.parametrize(("status", "expected"), [(0, 0), (5, 5), (-9, 137)])
def test_test_command_fails_when_nothing_was_found_or_pytest_was_ended(monkeypatch, capsys, status, expected):
    monkeypatch.setattr(course_test, "subprocess_status", lambda command, env: status)
    assert course_test.main(argparse.Namespace(extra=["tests"])) == expected
    assert capsys.readouterr().out.startswith(
        "test: passed in" if status == 0 else f"test: failed (exit status {expected})"
    )


def test_lab_opens_the_workbook_and_passes_options_on(monkeypatch, tmp_path):
    started = []
    monkeypatch.setattr(lab, "subprocess_status", lambda command, env: started.append((command, env)) or 0)
    monkeypatch.setattr(lab.workbook, "make", lambda notebooks, folder: 0)
    assert lab.main(argparse.Namespace(output=tmp_path / "w", extra=["--no-browser"])) == 0
    command, env = started[0]
    assert command[1:3] == ["-m", "jupyterlab"]
    assert command[-1] == "--no-browser"
    assert f"--ServerApp.root_dir={(tmp_path / 'w').resolve()}" in command
    assert env["JUPYTER_PREFER_ENV_PATH"] == "1"
    settings = Path(env["JUPYTER_CONFIG_PATH"].split(os.pathsep)[0], "labconfig", "page_config.json")
    disabled = json.loads(settings.read_text(encoding="utf-8"))
    assert disabled["disabledExtensions"]["@jupyter/nbgrader"], "students need no instructor's buttons"


def test_lab_opens_the_server_that_has_the_folder_open_already(monkeypatch, tmp_path, capsys):
    answering = ThreadingHTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler)  # says that it has no /api
    threading.Thread(target=answering.serve_forever, daemon=True).start()
    free = socket.create_server(("127.0.0.1", 0))
    closed = free.getsockname()[1]
    free.close()
    runtime, started, opened = tmp_path / "runtime", [], []
    runtime.mkdir()
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(runtime))
    monkeypatch.setattr(lab, "subprocess_status", lambda command, env: started.append(command) or 0)
    monkeypatch.setattr(lab.webbrowser, "open", opened.append)
    monkeypatch.setattr(lab.workbook, "make", lambda notebooks, folder: 0)

    def make_lab(port, folder, *extra):
        server = {"pid": os.getpid(), "root_dir": str(folder), "url": f"http://127.0.0.1:{port}/", "token": "t"}
        (runtime / "jpserver-1.json").write_text(json.dumps(server))
        assert lab.main(argparse.Namespace(output=tmp_path / "w", extra=list(extra))) == 0
        return capsys.readouterr().out

    try:
        make_lab(answering.server_port, tmp_path / "another")
        make_lab(closed, tmp_path / "w")
        assert (len(started), opened) == (2, [])
        said = make_lab(answering.server_port, tmp_path / "w")
        address = f"http://127.0.0.1:{answering.server_port}/lab/tree/00_START_HERE.ipynb?token=t"
        assert said.splitlines()[-1] == f"JupyterLab is already running in {tmp_path.resolve() / 'w'}: {address}"
        make_lab(answering.server_port, tmp_path / "w", "--no-browser")
        assert (len(started), opened) == (2, [address])
    finally:
        answering.shutdown()
        answering.server_close()


def test_lab_opens_a_topic_that_is_named(monkeypatch, tmp_path, capsys):
    started = []
    monkeypatch.setattr(lab, "subprocess_status", lambda command, env: started.append(command) or 0)
    assert lab.main(argparse.Namespace(output=tmp_path / "w", extra=["15-07", "--port", "8889"])) == 0
    assert "--LabApp.default_url=/lab/tree/15-07_cuda_memory_management_and_gpu_internals.ipynb" in started[0]
    assert started[0][-2:] == ["--port", "8889"]
    assert "15-07" not in started[0], "JupyterLab would look for a file of that name, and end"
    assert lab.main(argparse.Namespace(output=tmp_path / "w", extra=["15-77"])) == 2
    draft = Selected("15-11", "A draft", tmp_path / "15-11_a_draft.ipynb")
    monkeypatch.setattr(lab, "select", lambda names, book: [draft])
    assert lab.main(argparse.Namespace(output=tmp_path / "w", extra=["15-11"])) == 2
    assert "15-11 is not written yet" in capsys.readouterr().err
    assert len(started) == 1


@pytest.mark.parametrize("make", [lab.main, lab.workbook.main])
def test_a_file_in_the_workbooks_place_is_said(tmp_path, capsys, make):
    (tmp_path / "w").write_text("mine")
    assert make(argparse.Namespace(output=tmp_path / "w", extra=[], notebooks=[])) == 2
    assert f"can't write in {tmp_path / 'w'}: File exists; name another --output" in capsys.readouterr().err


@pytest.mark.parametrize("make", [lab.main, lab.workbook.main])
def test_the_notebooks_own_folder_is_no_workbook(monkeypatch, capsys, make):
    written = []
    for name in ("make", "make_start_page"):
        monkeypatch.setattr(lab.workbook, name, lambda *given: written.append(given))
    folder = lab.syllabus.SYLLABUS_FILE.parent
    assert make(argparse.Namespace(output=folder, extra=[], notebooks=[])) == 2
    assert "holds the notebooks themselves; name another --output" in capsys.readouterr().err
    assert written == []


def test_clean_keeps_work_data_and_environment(tmp_path):
    made = ["executed/a.ipynb", "shared/__pycache__/a.pyc", ".ruff_cache/x", "module/.ipynb_checkpoints/a.ipynb"]
    kept = [
        "workbook/mine.ipynb", "workbook/.ipynb_checkpoints/mine.ipynb", "datasets/full/x.npy", "datasets/sample.npy",
        ".venv/lib/__pycache__/a.pyc", ".git/__pycache__/a", "shared/a.py",
    ]  # fmt: skip
    for name in made + kept:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    assert len(list(clean.remove(tmp_path))) == 4
    assert not any((tmp_path / name).exists() for name in made)
    assert all((tmp_path / name).exists() for name in kept)


def test_what_clean_cannot_remove_is_named(monkeypatch, tmp_path, capsys):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "executed").mkdir()
    monkeypatch.setattr(clean, "ROOT", tmp_path)
    monkeypatch.setattr(clean.shutil, "rmtree", refuse)
    assert clean.main(argparse.Namespace(all=False)) == 1
    assert f"{tmp_path / 'executed'} can't be removed: Permission denied" in capsys.readouterr().err


def test_every_make_target_is_one_call_of_course():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for command in cli.COMMANDS:
        line = rf"^{command}:\n\t@\$\(PYTHON\) -m course {command}( --\w+( all)?| .\$\(SUBMISSIONS\).)? \$\(ARGS\)$"
        assert re.search(line, makefile, re.MULTILINE), command
    runner = ROOT / ".ci" / "run"
    assert "make test ARGS=--all" in runner.read_text(encoding="utf-8")
    assert os.name == "nt" or os.access(runner, os.X_OK)
