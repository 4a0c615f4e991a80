"""`python -m course` from outside: help, wrong usage, Pythons without anything installed, what each command starts."""

import argparse
import ast
import importlib
import io
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from course import __main__ as cli
from course import clean, environment, lab

ROOT = environment.ROOT

# `-m course` with neither site-packages nor the environment variables: what a fresh clone has
BARE = """
import runpy, sys
sys.path.insert(0, ".")
sys.argv = sys.argv[2:]
runpy.run_module("course", run_name="__main__")
"""


def bare(*arguments, chosen=""):
    """In a clone whose .venv isn't ready: none was made with this index."""
    answer = subprocess.run(
        [sys.executable, "-I", "-S", "-c", BARE, "-m", "course", *arguments], cwd=ROOT, timeout=60, check=False,
        env={**os.environ, "COURSE_ENV": chosen, "COURSE_TORCH_INDEX": "http://127.0.0.1:9/none"},
        capture_output=True, text=True, encoding="utf-8",
    )  # fmt: skip
    return answer.returncode, answer.stdout + answer.stderr


def test_to_ask_for_help_installs_nothing():
    for arguments in ((), ("-h",), ("--help",), ("help",)):
        status, said = bare(*arguments)
        assert status == 0
        assert all(command in said for command in cli.COMMANDS)
    for arguments in (("grade", "--help"), ("help", "lab"), ("help", "setup")):
        status, said = bare(*arguments)
        assert status == 0, said
        assert "Installing" not in said
        assert cli.COMMANDS[arguments[0] if arguments[0] != "help" else arguments[1]] in said


def test_to_look_at_the_site_first_nobody_waits_for_pytorch():
    assert bare("site") == (1, f"\n{environment.SITE_ADVICE}\n")
    assert "## Look first" in (ROOT / "README.md").read_text(encoding="utf-8")
    wanted = (ROOT / "requirements-site.txt").read_text(encoding="utf-8")
    assert "torch" not in wanted.replace("PyTorch", "")


def test_too_old_a_python_is_told_so(monkeypatch, capsys):
    for file in ("__main__.py", "environment.py", "files.py", "__init__.py"):
        ast.parse((ROOT / "course" / file).read_text(encoding="utf-8"), feature_version=(3, 8))
    monkeypatch.setattr(sys, "version_info", (3, 10, 4))
    assert cli.main(["run"]) == 2
    assert "needs Python 3.11" in capsys.readouterr().err
    status, said = bare("lab", "--allow-root", chosen="current")
    assert status == 1
    assert "packaging is missing" in said


def test_a_console_that_cannot_show_a_sign_ends_nothing(monkeypatch):
    console = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stderr", console)
    assert cli.main(["läb"]) == 2
    console.seek(0)
    assert "There is no command 'l?b'" in console.read()


@pytest.mark.parametrize(
    ("command", "chosen", "status", "said"),
    [
        ("rnu", "current", 2, "There is no command 'rnu'.\n\nusage: python -m course COMMAND"),
        ("run", "nonsense", 1, "COURSE_ENV='nonsense' is not known"),
        ("clean", "current", 130, "Interrupted."),
        ("setup COURSE_TORCH_INDEX=URL", "current", 2, "setup has no options"),
    ],
)
def test_what_ends_a_command_is_a_message_not_a_traceback(monkeypatch, capsys, command, chosen, status, said):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setenv("COURSE_ENV", chosen)
    monkeypatch.setattr(clean, "main", interrupted)
    assert cli.main(command.split()) == status
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", [name for name in cli.COMMANDS if name not in ("help", "setup")])
def test_each_command_explains_itself(name, capsys, monkeypatch):
    monkeypatch.setenv("COURSE_ENV", "current")
    with pytest.raises(SystemExit) as ended:
        cli.main(["help", name])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"usage: python -m course {name} ")
    assert importlib.import_module(f"course.{name}").__doc__.strip().splitlines()[0] in printed


def test_each_command_is_a_target_of_make():
    more = {"data": " --fetch all", "lint": " --ruff", "grade": ' "$(SUBMISSIONS)"'}
    rules = [f"{name}:\n\t@$(PYTHON) -m course {name}{more.get(name, '')} $(ARGS)" for name in cli.COMMANDS]
    assert set(rules) <= set((ROOT / "Makefile").read_text(encoding="utf-8").strip().split("\n\n"))


def test_only_what_a_command_does_not_know_goes_to_the_program_that_it_starts(monkeypatch):
    monkeypatch.setattr(lab, "main", lambda args: (args.output, args.extra))
    assert cli.run_command("lab", ["--output", "w", "--port=1", "--out", "x"]) == (
        Path("w"),
        ["--port=1", "--out", "x"],
    )


@pytest.mark.parametrize("can_exec", [True, False], ids=["POSIX", "Windows"])
def test_a_command_is_started_again_in_the_environment(monkeypatch, tmp_path, can_exec):
    python, real = tmp_path / ".venv" / "bin" / "python", subprocess.Popen
    tools, started = [], []

    def ensure(made):
        assert made.index == "http://localhost/cpu"
        tools.append(made.tools)
        return python

    def popen(command):
        started.append(command)
        return real([sys.executable, "-c", "import sys; sys.exit(7)"])

    def execv(path, arguments):
        started.append(arguments)
        sys.exit(7)

    monkeypatch.setattr(environment.Environment, "ensure", ensure)
    monkeypatch.setattr(environment, "is_there", lambda: True)
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    monkeypatch.setattr(environment, "CAN_EXEC", can_exec)
    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setenv("PATH", os.environ["PATH"])
    monkeypatch.delenv("COURSE_ENV", raising=False)
    monkeypatch.setenv("COURSE_TORCH_INDEX", "http://localhost/cpu")
    commands = [["run", "15-01"], ["test"], ["lint"], ["run", "--help"], ["workbook"]]
    for command in commands:
        with pytest.raises(SystemExit, match="7"):
            sys.exit(cli.main(command))
    assert started == [[str(python), "-m", "course", *command] for command in commands]
    assert tools == [True, True, True, False, False], (
        "maintainers' tools are installed to use them, not to ask for help"
    )
    assert os.environ["PATH"].startswith(f"{python.parent}{os.pathsep}")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    assert cli.main(["setup"]) == cli.main(["help", "setup"]) == 0, "in the environment itself nothing is handed over"
    monkeypatch.setattr(environment, "enter", lambda *_: pytest.fail("it has been set up first"))
    monkeypatch.setattr(cli, "run_command", lambda command, arguments: 5)
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: name == "sphinx_book_theme" or None)
    assert [cli.main([command]) for command in ("site", "clean")] == [5, 5]


@pytest.fixture
def opened(monkeypatch, tmp_path):
    """What `lab` does with these arguments: (status, JupyterLab's command lines and environments, addresses opened)."""
    started, addresses = [], []
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    (tmp_path / "runtime").mkdir()
    monkeypatch.setattr(lab, "subprocess_status", lambda command, env: started.append((command, env)) or 0)
    monkeypatch.setattr(lab.webbrowser, "open", addresses.append)
    monkeypatch.setattr(lab.workbook, "make", lambda notebooks, folder: 0)
    monkeypatch.setenv("JUPYTER_CONFIG_PATH", os.pathsep.join(("/a/hub's", "/another")))

    def call(*arguments, folder=tmp_path / "w"):
        return lab.main(argparse.Namespace(output=folder, extra=list(arguments))), started, addresses

    return call


def test_lab_opens_the_workbook_and_passes_options_on(opened, tmp_path):
    status, started, _ = opened("--no-browser")
    command, env = started[0]
    assert status == 0
    assert command[1:3] == ["-m", "jupyterlab"]
    assert command[-1] == "--no-browser"
    assert f"--ServerApp.root_dir={(tmp_path / 'w').resolve()}" in command
    assert "--LabApp.default_url=/lab/tree/00_START_HERE.ipynb" in command
    assert env["JUPYTER_PREFER_ENV_PATH"] == "1"
    assert env["JUPYTERLAB_WORKSPACES_DIR"] == str((tmp_path / "w" / ".jupyterlab").resolve()), (
        "not another folder's tabs"
    )
    ours, *theirs = env["JUPYTER_CONFIG_PATH"].split(os.pathsep)
    assert theirs == ["/a/hub's", "/another"]
    disabled = json.loads(Path(ours, "labconfig", "page_config.json").read_text(encoding="utf-8"))
    assert disabled["disabledExtensions"]["@jupyter/nbgrader"], "students need no instructor's buttons"


def test_lab_opens_the_server_that_has_the_folder_open_already(opened, tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as ended:
        gone = ended.getsockname()[1]

    def serves(port, folder):
        server = {"pid": os.getpid(), "root_dir": str(folder), "url": f"http://127.0.0.1:{port}/", "token": "t"}
        (tmp_path / "runtime" / "jpserver-1.json").write_text(json.dumps({**server, "port": port}))

    with socket.create_server(("127.0.0.1", 0)) as answering:
        port = answering.getsockname()[1]
        for its_port, folder in ((port, tmp_path / "another"), (gone, tmp_path / "w")):
            serves(its_port, folder)
            _, started, addresses = opened()
        assert (len(started), addresses) == (2, [])
        serves(port, tmp_path / "w")
        opened()
        opened("--no-browser")
    address = f"http://127.0.0.1:{port}/lab/tree/00_START_HERE.ipynb?token=t"
    assert (len(started), addresses) == (2, [address])
    said = capsys.readouterr().out.splitlines()[-1]
    assert said == f"JupyterLab is already running in {tmp_path.resolve() / 'w'}: {address}"


def test_where_no_workbook_can_be_is_said(opened, tmp_path, capsys):
    (tmp_path / "w").write_text("mine")
    assert opened()[0] == lab.workbook.main(argparse.Namespace(output=tmp_path / "w", notebooks=[])) == 2
    assert f"can't write in {tmp_path / 'w'}: File exists; name another --output" in capsys.readouterr().err
    assert opened(folder=lab.syllabus.SYLLABUS_FILE.parent)[0] == 2
    assert "holds the notebooks themselves; name another --output" in capsys.readouterr().err


def test_clean_keeps_work_data_and_environment(tmp_path, monkeypatch, capsys):
    made = [
        "executed/.ipynb_checkpoints/a.ipynb",
        "shared/__pycache__/a.pyc",
        ".ruff_cache/x",
        "module/.ipynb_checkpoints/a.ipynb",
    ]
    kept = [
        "workbook/mine.ipynb", "workbook/.ipynb_checkpoints/mine.ipynb", "datasets/full/x.npy", "datasets/sample.npy",
        ".venv/lib/__pycache__/a.pyc", ".git/__pycache__/a", "shared/a.py", ".site/__pycache__/a.pyc",
    ]  # fmt: skip
    for name in made + kept:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    monkeypatch.setattr(clean, "ROOT", tmp_path)
    assert clean.main(argparse.Namespace(all=False)) == 0
    assert capsys.readouterr().out.count("removed ") == 5
    assert not any((tmp_path / name).exists() for name in made)
    assert all((tmp_path / name).exists() for name in kept)
    (tmp_path / ".venv/made-by-course.json").touch()
    assert clean.main(argparse.Namespace(all=True)) == 0
    assert not (tmp_path / ".venv").exists()


@pytest.mark.skipif(os.name != "posix", reason="root is POSIX's")
def test_root_learns_at_once_what_make_lab_needs(monkeypatch, capsys):
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("course.environment.enter", lambda *_: pytest.fail("it was set up first"))
    assert cli.main(["lab"]) == 2
    assert 'make lab ARGS="--allow-root"' in capsys.readouterr().err
