"""course.environment with a pip that installs nothing: when it is called, what it is told, how failures are mended."""

import os
import sys
import time
from importlib import metadata
from pathlib import Path
from unittest import mock

import pytest

from course import environment
from course.environment import Environment, SetupError, locked, unmet


class Fakes:
    """Stands for venv, pip and the Python in .venv; records the commands."""

    def __init__(self, fail_pip=0, python_fails=0):
        self.fail_pip, self.python_fails = fail_pip, python_fails
        self.venvs, self.pips = 0, []

    def call(self, command, *, timeout, cwd=None, stdout=None, stderr=None):
        if "-c" in command and "import" in command[3]:
            if not command[0].exists():
                raise FileNotFoundError
            return self.python_fails
        assert "-I" in command
        if "venv" in command:
            assert command[0] == sys._base_executable, "which is not in .venv: that is emptied"
            self.venvs += 1
            python = Path(command[-1]) / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
            python.parent.mkdir(parents=True)
            python.write_text("")
            return 0
        assert cwd == Path(command[0]).parents[2], "where requirements.txt is"
        assert "--no-user" in command
        self.pips.append(command)
        stdout.write(b"Collecting torch\n  Downloading torch.whl (900 MB)\nno route to host\n")
        stdout.flush()
        time.sleep(5 * environment.TELL_EVERY)
        if isinstance(self.fail_pip, BaseException):
            raise self.fail_pip
        return self.fail_pip

    def ensure(self, root, index=None, tools=False):
        with mock.patch.object(environment.subprocess, "call", self.call):
            return Environment(root, index, tools).ensure()


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "TELL_EVERY", 0.01)
    (tmp_path / "requirements.txt").write_text(
        "torch>=2.11,<2.16  # a comment\ntorchvision>=0.26,<0.30\nrich>=13\n-e .\n"
    )
    (tmp_path / "requirements-dev.txt").write_text("-r requirements.txt\nruff\n")
    (tmp_path / "constraints.txt").write_text("torch==2.15.0\n")
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    return tmp_path


def test_installs_once_and_again_only_when_something_changed(root):
    fakes = Fakes()
    assert fakes.ensure(root).parent.parent == root / ".venv"
    fakes.ensure(root)
    assert [call[-4:] for call in fakes.pips] == [["-r", "requirements.txt", "-c", "constraints.txt"]]
    for name in ("requirements.txt", "constraints.txt", "pyproject.toml"):
        before = len(fakes.pips)
        with open(root / name, "a") as file:
            file.write("# changed\n")
        fakes.ensure(root)
        fakes.ensure(root)
        assert len(fakes.pips) == before + 1, name
    before = len(fakes.pips)
    for tools in (True, False, True):
        fakes.ensure(root, tools=tools)
    assert [call[-3] for call in fakes.pips[before:]] == ["requirements-dev.txt"], "they serve students, too"
    assert fakes.venvs == 1
    (root / "constraints.txt").unlink()
    fakes.ensure(root)
    assert fakes.pips[-1][-2:] == ["-r", "requirements.txt"], "for CI's job with the newest of all"
    fakes.ensure(root, tools=True)
    (root / "requirements-dev.txt").write_text("# changed\n")
    fakes.ensure(root)
    fakes.ensure(root, tools=True)
    assert [call[-1] for call in fakes.pips[-2:]] == ["requirements.txt", "requirements-dev.txt"]


def test_a_failed_installation_is_reported_and_repaired(root, capsys):
    with pytest.raises(SetupError, match=r"HTTPS_PROXY(.|\n)*again"):
        Fakes(fail_pip=1).ensure(root)
    told = capsys.readouterr()
    assert told.err.count("  Downloading torch.whl (900 MB)\n") == 2, "while it runs, and the end of what it said"
    assert ("no route to host" in told.err, told.out) == (True, ""), "stdout belongs to the command"
    with pytest.raises(KeyboardInterrupt):
        Fakes(fail_pip=KeyboardInterrupt()).ensure(root, index="http://localhost/cpu")
    mended = Fakes()
    mended.ensure(root)
    mended.ensure(root)
    assert mended.venvs == 1, "pip may have stopped while it copied files"
    assert "http://localhost/cpu" in mended.pips[0], "what was begun goes on"


def test_torch_from_another_index(root):
    fakes = Fakes()
    fakes.ensure(root, index="http://localhost/cpu")
    torch, rest = fakes.pips
    assert torch[-4:-2] == ["torch>=2.11,<2.16", "torchvision>=0.26,<0.30"]
    assert torch[torch.index("--index-url") + 1] == "http://localhost/cpu"
    assert "constraints.txt" in torch
    assert "--no-deps" in torch, "that index has no others"
    assert not {"--index-url", "--no-deps"} & set(rest)
    fakes.ensure(root)
    assert len(fakes.pips) == 2, "a later call without the variable keeps what the environment was made with"
    fakes.ensure(root, index="http://localhost/cu130")
    assert fakes.venvs == 2, "pip takes a torch of the same version for good, so all is made anew"


def test_broken_environments_are_rebuilt(root):
    fakes = Fakes()
    fakes.ensure(root).unlink()
    fakes.ensure(root)
    assert fakes.venvs == 2, "its Python was gone"
    (root / ".venv/course-stamp.json").write_text("{broken")
    fakes.ensure(root)
    assert fakes.venvs == 3
    fakes.python_fails = 1  # another prefix, no pip
    for _ in range(2):  # the rebuilt one is the same again here, and is begun again, not taken for what it isn't
        with pytest.raises(SetupError, match="python3-venv"):
            fakes.ensure(root)
    fakes.python_fails = 0
    fakes.ensure(root)
    assert (fakes.venvs, len(fakes.pips)) == (6, 4)


def test_a_moved_repository_is_noticed(root, tmp_path_factory, capsys):
    fakes = Fakes()
    fakes.ensure(root)
    there = tmp_path_factory.mktemp("moved") / "clone"
    root.rename(there)
    fakes.ensure(there)
    assert fakes.venvs == 2
    assert "moved" in capsys.readouterr().err


def test_an_environment_of_the_users_is_left_alone(root):
    (root / ".venv/lib").mkdir(parents=True)
    (root / ".venv/lib/mine.py").write_text("mine")
    fakes = Fakes()
    for call in (lambda: fakes.ensure(root), Environment(root).remove):
        with pytest.raises(SetupError, match=r"left alone(.|\n)*COURSE_ENV=current"):
            call()
    assert (fakes.venvs, fakes.pips) == (0, [])
    assert [path.name for path in (root / ".venv").iterdir()] == ["lib"], "nor is a lock left in it"
    assert (root / ".venv/lib/mine.py").read_text() == "mine"


@pytest.mark.skipif(os.name == "nt", reason="a link needs rights there")
def test_what_a_link_leads_to_is_left_alone(root, tmp_path_factory):
    """As people make for a second working tree of git."""
    another = tmp_path_factory.mktemp("another")
    for name in ("requirements.txt", "pyproject.toml"):
        (another / name).write_text((root / name).read_text())
    python = Fakes().ensure(another)
    (root / ".venv").symlink_to(another / ".venv")
    for call in (lambda: Fakes().ensure(root), Environment(root).remove):
        with pytest.raises(SetupError, match="left alone"):
            call()
    assert python.exists()


@pytest.mark.parametrize(("index", "told"), [(None, 1), ("http://localhost/cpu", 0)])
def test_the_smaller_torch_is_named_before_the_larger_one_comes(root, capsys, index, told):
    for _ in range(2):
        Fakes().ensure(root, index)
    assert capsys.readouterr().err.count(environment.SIZE) == told


def test_clean_all_removes_the_environment_and_follows_no_link(root, tmp_path_factory):
    """On Linux venv makes a link, lib64."""
    assert not Environment(root).remove()
    Fakes().ensure(root)
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    if os.name != "nt":
        (root / ".venv/lib64").symlink_to(elsewhere)
    ended = mock.patch.object(environment.shutil, "rmtree", side_effect=[None, KeyboardInterrupt])
    with ended, pytest.raises(KeyboardInterrupt):
        Environment(root).remove()
    assert (root / ".venv/course.lock").exists(), "Windows removes no file that is open"
    assert Environment(root).remove(), "what is left is still known as ours"
    assert not (root / ".venv").exists()
    assert elsewhere.exists()


def test_while_another_process_installs_nothing_is_touched(root):
    Fakes().ensure(root)
    with locked(root / ".venv/course.lock"):
        assert not list((root / ".venv").glob("course.lock-*")), "which `clean` couldn't remove on Windows"
        for call in (lambda: Fakes().ensure(root, tools=True), Environment(root).remove):
            with pytest.raises(SetupError, match="another process"):
                call()
        assert Fakes().ensure(root).exists(), "what is ready can be used"
    assert Environment(root).remove()


def test_a_real_venv_is_made_and_recognised(root, monkeypatch):
    """What Python makes is what `broken` expects, and it says so where pip is missing."""
    real = environment.subprocess.call

    def without_pip(command, **others):  # with it, it takes seconds
        return real([*command, "--without-pip"] if "venv" in command else command, **others)

    monkeypatch.setattr(environment.subprocess, "call", without_pip)
    made = Environment(root)
    with pytest.raises(SetupError, match="python3-venv"):
        made.ensure()
    (packages,) = {
        path for place in ("lib/python3.*/site-packages", "Lib/site-packages") for path in made.folder.glob(place)
    }
    (packages / "pip.py").touch()
    assert made.broken() is None
    if os.name == "posix":
        (made.folder / "pyvenv.cfg").unlink()
        assert "its Python" in made.broken(), "it is the system's"


def test_an_unwritable_repository_is_explained(root):
    (root / ".venv").write_text("a file is in the way")
    with pytest.raises(SetupError, match=r"Can't write the environment(.|\n)*COURSE_ENV=current"):
        Fakes().ensure(root)


def test_current_python_lacking_something(root, monkeypatch):
    versions = {"torch": "2.10.1+cu130", "torchvision": "0.29.2+cpu"}

    def installed(name):
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", installed)
    lacks_torch, lacks_rich = unmet(root)
    assert lacks_torch.startswith("torch 2.10.1+cu130 is not supported (torch")
    assert lacks_rich == "rich is missing (rich>=13)"
    monkeypatch.setattr(environment, "ROOT", root)
    monkeypatch.setenv("COURSE_ENV", "current")
    with pytest.raises(SetupError, match=r"can't run `lab`(.|\n)*rich is missing(.|\n)*pip install -r"):
        environment.enter("lab", [])
    versions |= {"torch": "2.15.0a0+git123", "rich": "15.0"}
    monkeypatch.setenv("PYTHONPATH", "/mine")
    assert environment.enter("lab", []) is None
    assert os.environ["PYTHONPATH"].split(os.pathsep) == [str(root), "/mine"], "where kernels find the course"
