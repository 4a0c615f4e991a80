"""course.environment with a pip that installs nothing: when it is called, what it is told, how failures are mended."""

import os
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from unittest import mock

import pytest

from course import environment
from course.environment import Environment, SetupError, locked, unmet

COUNTED = ["1 of about 145 packages are in place", "2 of about 145 packages are in place"]


class Fakes:
    """Stands for venv, pip and the Python in .venv; records the commands."""

    def __init__(self, fail_pip=None, torch_fails=None):
        self.commands = []
        self.fail_pip, self.torch_fails = fail_pip, torch_fails
        self.answer = None

    def run(self, command):
        self.commands.append(command)
        if "venv" in command:
            python = Path(command[-1]) / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
            python.parent.mkdir(parents=True)
            python.write_text("")
            (Path(command[-1]) / "lib").mkdir()
            return 0
        if isinstance(self.fail_pip, BaseException):
            raise self.fail_pip
        return self.fail_pip or 0

    def probe(self, python, code, timeout=30):
        if "import torch" in code:
            return (1, self.torch_fails) if self.torch_fails else (0, "")
        return self.answer or (0, str(python.parent.parent))

    def installed(self):
        return mock.patch.multiple(environment, run=self.run, probe=self.probe)

    def pip_calls(self):
        return [command for command in self.commands if "pip" in command]

    def venv_calls(self):
        return [command for command in self.commands if "venv" in command]


@pytest.fixture
def root(tmp_path):
    (tmp_path / "requirements.txt").write_text(
        "torch>=2.11,<2.16  # a comment\ntorchvision>=0.26,<0.30\nrich>=13\n-e .\n"
    )
    (tmp_path / "requirements-dev.txt").write_text("-r requirements.txt\nruff\n")
    (tmp_path / "constraints.txt").write_text("torch==2.15.0\n")
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    return tmp_path


def ensure(root, fakes, index=None, tools=False):
    with fakes.installed():
        return Environment(root, index, tools).ensure()


def test_installs_once_and_again_only_when_something_changed(root):
    fakes = Fakes()
    python = ensure(root, fakes)
    assert python.parent.parent == root / ".venv"
    assert len(fakes.venv_calls()) == len(fakes.pip_calls()) == 1
    assert fakes.pip_calls()[0][-4:] == ["-r", "requirements.txt", "-c", "constraints.txt"]
    ensure(root, fakes)
    assert len(fakes.commands) == 2, "nothing changed, so nothing is to be called"
    for name in ("requirements.txt", "constraints.txt", "pyproject.toml"):
        before = len(fakes.pip_calls())
        with open(root / name, "a") as file:
            file.write("# changed\n")
        ensure(root, fakes)
        ensure(root, fakes)
        assert len(fakes.pip_calls()) == before + 1, name
    assert len(fakes.venv_calls()) == 1


def test_maintainers_tools_are_added_when_a_command_needs_them_and_stay(root):
    fakes = Fakes()
    ensure(root, fakes)
    ensure(root, fakes, tools=True)
    assert [call[-3] for call in fakes.pip_calls()] == ["requirements.txt", "requirements-dev.txt"]
    ensure(root, fakes)
    ensure(root, fakes, tools=True)
    assert len(fakes.pip_calls()) == 2, "what is there serves students, too"
    with open(root / "requirements-dev.txt", "a") as file:
        file.write("# changed\n")
    ensure(root, fakes, tools=True)
    assert len(fakes.pip_calls()) == 3
    assert len(fakes.venv_calls()) == 1


def test_a_failed_installation_is_reported_and_repaired(root):
    with pytest.raises(SetupError, match=r"exit status 3(.|\n)*HTTPS_PROXY(.|\n)*disk is full(.|\n)*Call the same"):
        ensure(root, Fakes(fail_pip=3))
    with pytest.raises(KeyboardInterrupt):
        ensure(root, Fakes(fail_pip=KeyboardInterrupt()))
    mended = Fakes()
    ensure(root, mended)
    assert len(mended.venv_calls()) == 1, "pip may have stopped while it copied files"
    ensure(root, mended)
    assert len(mended.commands) == 2


def test_mismatched_torch_and_torchvision_are_named_with_the_fix(root):
    fakes = Fakes(torch_fails="RuntimeError: operator torchvision::nms does not exist\n")
    with pytest.raises(SetupError, match=r"nms does not exist(.|\n)*one index(.|\n)*clean --all"):
        ensure(root, fakes)
    assert not (root / ".venv/course-stamp.json").exists()


def test_torch_from_another_index(root):
    fakes = Fakes()
    ensure(root, fakes, index="http://localhost/cpu")
    torch, rest = fakes.pip_calls()
    assert torch[-4:-2] == ["torch>=2.11,<2.16", "torchvision>=0.26,<0.30"]
    assert torch[torch.index("--index-url") + 1] == "http://localhost/cpu"
    assert "constraints.txt" in torch
    assert "--index-url" not in rest
    # a later call without the variable keeps what the environment was made with
    ensure(root, fakes)
    assert len(fakes.commands) == 3
    ensure(root, fakes, index="http://localhost/cu130")
    assert len(fakes.venv_calls()) == 2, "pip takes a torch of the same version for good, so all is made anew"
    with pytest.raises(SetupError):
        ensure(root, Fakes(fail_pip=1), index="http://localhost/nowhere")
    mended = Fakes()
    ensure(root, mended)
    assert "http://localhost/cu130" in mended.pip_calls()[0], "the one that worked, not the one that didn't"


def test_broken_environments_are_rebuilt(root):
    fakes = Fakes()
    python = ensure(root, fakes)
    python.unlink()
    ensure(root, fakes)
    assert len(fakes.venv_calls()) == 2, "its Python was gone"
    for answer in ((1, "ModuleNotFoundError: No module named 'pip'"), (1, ""), (0, "/usr")):  # the last: another Python
        fakes.answer = answer
        with pytest.raises(SetupError, match="python3-venv"):
            ensure(root, fakes)  # the rebuilt one is the same again here
        with pytest.raises(SetupError, match="python3-venv"):
            ensure(root, fakes)  # and is begun again, not taken for what it isn't
        fakes.answer = None
        ensure(root, fakes)
    (root / ".venv/course-stamp.json").write_text("{broken")
    calls = len(fakes.pip_calls())
    ensure(root, fakes)
    assert len(fakes.pip_calls()) == calls + 1, "a damaged stamp is no stamp"


def test_a_moved_repository_is_noticed(root, tmp_path_factory):
    fakes = Fakes()
    ensure(root, fakes)
    there = tmp_path_factory.mktemp("moved") / "clone"
    root.rename(there)
    assert "moved" in Environment(there).broken()
    ensure(there, fakes)
    assert len(fakes.venv_calls()) == 2


def test_an_environment_of_the_users_is_used_and_never_emptied(root, capsys):
    fakes = Fakes()
    fakes.run([sys.executable, "-m", "venv", str(root / ".venv")])
    (root / ".venv/lib/mine.py").write_text("mine")
    python = ensure(root, fakes, index="http://localhost/cpu")
    assert "not made by this tool" in capsys.readouterr().err
    before = len(fakes.commands)
    with pytest.raises(SetupError, match="left alone"):
        ensure(root, fakes, index="http://localhost/cu130")
    assert len(fakes.commands) == before, "nothing was installed over it"
    python.unlink()
    with pytest.raises(SetupError, match="left alone"):
        ensure(root, fakes)
    with pytest.raises(SetupError, match="left alone"):
        Environment(root).remove()
    assert (root / ".venv/lib/mine.py").read_text() == "mine"


def test_pip_and_venv_are_not_led_elsewhere(monkeypatch, capfd):
    for name in ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET"):
        monkeypatch.setenv(name, "/elsewhere")
    monkeypatch.setenv("PIP_USER", "1")
    monkeypatch.setenv("HTTPS_PROXY", "http://localhost:1")
    names = ["PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_USER", "HTTPS_PROXY"]
    code = f"import os, sys; print([os.environ.get(name) for name in {names}]); sys.exit(3)"
    assert environment.run([sys.executable, "-c", code]) == 3
    shown = capfd.readouterr()
    assert shown.err == "[None, None, None, '0', 'http://localhost:1']\n"
    assert shown.out == "", "that belongs to the command"


def test_what_pip_unpacks_in_silence_is_counted(root, monkeypatch, capsys):
    monkeypatch.setattr(environment, "TELL_EVERY", 0.05)
    places = iter(("lib/python3.12/site-packages/torch-2.dist-info", "Lib/site-packages/rich-13.dist-info"))

    def slow_pip(command, run=Fakes.run):
        for place in places if "pip" in command else ():
            (root / ".venv" / place).mkdir(parents=True)
            time.sleep(0.5)
        return run(fakes, command)

    fakes = Fakes()
    fakes.run = slow_pip
    ensure(root, fakes)
    told = [line for line in capsys.readouterr().err.splitlines() if "in place" in line]
    assert told in (COUNTED, COUNTED[1:]), "and nothing twice"


@pytest.mark.parametrize(("driver", "told"), [(None, 1), ("/usr/bin/nvidia-smi", 0)])
def test_where_no_gpu_is_the_smaller_torch_is_named_before_the_larger_one_comes(
    root, monkeypatch, capsys, driver, told
):
    monkeypatch.setattr(environment.sys, "platform", "linux")
    monkeypatch.setattr(environment.shutil, "which", lambda name: driver)
    ensure(root, Fakes())
    assert capsys.readouterr().err.count(environment.NO_GPU) == told


def test_clean_all_removes_the_environment_and_follows_no_link(root, tmp_path_factory):
    """On Linux venv makes a link, lib64."""
    assert not Environment(root).remove()
    ensure(root, Fakes())
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "kept"
    elsewhere.touch()
    if os.name != "nt":
        (root / ".venv/lib64").symlink_to(elsewhere.parent)
    assert Environment(root).remove()
    assert not (root / ".venv").exists()
    assert elsewhere.exists()


def test_two_at_once_install_once(root):
    fakes = Fakes()

    def slow(command):
        time.sleep(0.3)
        return Fakes.run(fakes, command)

    fakes.run = slow
    with fakes.installed(), ThreadPoolExecutor(3) as pool:
        pythons = [future.result(30) for future in [pool.submit(Environment(root).ensure) for _ in range(3)]]
    assert len(set(pythons)) == 1
    assert len(fakes.venv_calls()) == len(fakes.pip_calls()) == 1


def test_lock_times_out_while_held_and_is_free_after_a_kill(tmp_path, capsys):
    path = tmp_path / "lock"
    code = """
        import sys, time
        from pathlib import Path
        from course.environment import locked
        with locked(Path(sys.argv[1]), 5):
            print("held", flush=True)
            time.sleep(60)
    """
    holder = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), str(path)], stdout=subprocess.PIPE, cwd=environment.ROOT
    )
    try:
        assert holder.stdout.readline().strip() == b"held"
        with pytest.raises(SetupError, match="Another process"), locked(path, 0.3):
            pass
        assert capsys.readouterr().err.count("\n") == 1
    finally:
        holder.kill()
        holder.wait(timeout=30)
        holder.stdout.close()
    with locked(path, 10):
        pass


def test_a_real_venv_is_made_and_recognised(root, monkeypatch):
    """What Python makes is what `broken` expects, and it says so where pip is missing."""
    real = environment.run
    without_pip = ["--without-pip"]  # with it, it takes seconds
    monkeypatch.setattr(environment, "run", lambda command: real([*command, *without_pip]) if "venv" in command else 0)
    made = Environment(root)
    with pytest.raises(SetupError, match="python3-venv"):
        made.ensure()
    assert not made.python.exists(), "so that the next call begins again"
    real([sys.executable, "-m", "venv", str(made.folder), *without_pip])
    assert "No module named 'pip'" in made.broken()
    (packages,) = {
        path for place in ("lib/python3.*/site-packages", "Lib/site-packages") for path in made.folder.glob(place)
    }
    (packages / "pip.py").touch()
    assert made.broken() is None


def test_an_unwritable_repository_is_explained(root):
    (root / ".venv").write_text("a file is in the way")
    with pytest.raises(SetupError, match=r"Can't write the environment(.|\n)*COURSE_ENV=current"):
        ensure(root, Fakes())


def test_current_python_lacking_something(root, monkeypatch):
    versions = {"torch": "2.10.1+cu130", "torchvision": "0.29.2+cpu"}

    def installed(name):
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", installed)
    assert unmet(root, "run") == [
        "torch 2.10.1+cu130 is not supported (torch>=2.11,<2.16)",
        "rich is missing (rich>=13)",
    ]
    versions |= {"torch": "2.15.0a0+git123", "rich": "15.0"}
    assert unmet(root, "run") == []


def test_unknown_course_env_is_refused(monkeypatch):
    monkeypatch.setenv("COURSE_ENV", "curent")
    with pytest.raises(SetupError, match="curent"):
        environment.enter("run", [])
