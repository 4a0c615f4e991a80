"""course.environment with a pip that installs nothing: when it is called, what it is told, how failures are mended."""

import os
import sys
from importlib import metadata
from pathlib import Path
from unittest import mock

import pytest

from course import environment
from course.environment import Environment, SetupError, locked, unmet


class Fakes:
    """Stands for venv, pip and the Python in .venv; records the commands."""

    def __init__(self, fail_pip=0, torch_fails="", answer=None):
        self.fail_pip, self.torch_fails, self.answer = fail_pip, torch_fails, answer
        self.venvs, self.pips, self.told = 0, [], []

    def run(self, command, log, progress):
        if "venv" in command:
            self.venvs += 1
            python = Path(command[-1]) / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
            python.parent.mkdir(parents=True)
            python.write_text("")
            log.write_text("")
            return 0
        self.pips.append(command)
        if isinstance(self.fail_pip, BaseException):
            raise self.fail_pip
        places = ("Lib/site-packages", "lib/python3.12/site-packages", "lib/python3.12/site-packages")
        log.write_text("  Downloading torch-2.whl (1 MB)\n")
        self.told.append(progress())
        log.write_text("  Downloading torch-2.whl (1 MB)\nInstalling collected packages: rich, numpy, torch\n")
        for place, name in zip(places, ("rich-13", "torch-2", f"numpy-{len(self.pips)}"), strict=True):
            self.told.append(progress())
            (log.parent / place / f"{name}.dist-info").mkdir(parents=True, exist_ok=True)
        return self.fail_pip

    def probe(self, python, code, timeout=30):
        if "import torch" in code:
            return (1, self.torch_fails) if self.torch_fails else (0, "")
        if not python.exists():
            return 1, "no such file"
        return self.answer or (0, str(python.parent.parent))

    def ensure(self, root, index=None, tools=False):
        with mock.patch.multiple(environment, run=self.run, probe=self.probe):
            return Environment(root, index, tools).ensure()


@pytest.fixture
def root(tmp_path):
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
    assert fakes.told[:4] == ["Downloading torch-2.whl (1 MB)", *(f"{n} of 3 packages are in place" for n in range(3))]
    for name in ("requirements.txt", "constraints.txt", "pyproject.toml"):
        before = len(fakes.pips)
        with open(root / name, "a") as file:
            file.write("# changed\n")
        fakes.ensure(root)
        fakes.ensure(root)
        assert len(fakes.pips) == before + 1, name
    assert fakes.told[-1] == "0 of 3 packages are in place", "those that are renewed, too"
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


def test_a_failed_installation_is_reported_and_repaired(root):
    with pytest.raises(SetupError, match=r"rich, numpy(.|\n)*status 1(.|\n)*pip\.log(.|\n)*HTTPS_PROXY(.|\n)*again"):
        Fakes(fail_pip=1).ensure(root)
    with pytest.raises(KeyboardInterrupt):
        Fakes(fail_pip=KeyboardInterrupt()).ensure(root, index="http://localhost/cpu")
    mended = Fakes()
    mended.ensure(root)
    mended.ensure(root)
    assert mended.venvs == 1, "pip may have stopped while it copied files"
    assert "http://localhost/cpu" in mended.pips[0], "what was begun goes on"
    with pytest.raises(SetupError, match=r"nms does not exist(.|\n)*one index(.|\n)*clean --all"):
        Fakes(torch_fails="RuntimeError: operator torchvision::nms does not exist\n").ensure(root, index="")
    assert not Environment(root).ready()


def test_torch_from_another_index(root):
    fakes = Fakes()
    fakes.ensure(root, index="http://localhost/cpu")
    torch, rest = fakes.pips
    assert torch[-4:-2] == ["torch>=2.11,<2.16", "torchvision>=0.26,<0.30"]
    assert torch[torch.index("--index-url") + 1] == "http://localhost/cpu"
    assert "constraints.txt" in torch
    assert "--index-url" not in rest
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
    for answer in ((1, "ModuleNotFoundError: No module named 'pip'"), (1, ""), (0, "/usr")):  # the last: another Python
        fakes.answer = answer
        for _ in range(2):  # the rebuilt one is the same again here, and is begun again, not taken for what it isn't
            with pytest.raises(SetupError, match="python3-venv"):
                fakes.ensure(root)
        fakes.answer = None
        fakes.ensure(root)
    assert (fakes.venvs, len(fakes.pips)) == (12, 6)


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


CALLED = """
import os, sys, time
print([os.environ.get(name) for name in ("PIP_USER", "PIP_TARGET", "HTTPS_PROXY")], flush=True)
time.sleep(1)
print("on stderr", file=sys.stderr)
sys.exit(3)
"""


def test_what_pip_says_is_in_a_file_and_how_far_it_is_on_stderr(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("PIP_USER", "1")
    monkeypatch.setenv("PIP_TARGET", "/elsewhere")
    monkeypatch.setenv("HTTPS_PROXY", "http://localhost:1")
    monkeypatch.setattr(environment, "TELL_EVERY", 0.05)
    log = tmp_path / "pip.log"
    assert environment.run([sys.executable, "-c", CALLED], log, lambda: "half of it") == 3
    assert log.read_text().splitlines() == ["['0', '', 'http://localhost:1']", "on stderr"]
    shown = capfd.readouterr()
    assert shown.err == "half of it\n", "and nothing twice"
    assert shown.out == "", "that belongs to the command"

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        environment.run([sys.executable, "-c", CALLED], log, interrupted)
    assert "on stderr" not in log.read_text(), "it has been ended"


@pytest.mark.parametrize(("driver", "told"), [(None, 1), ("/usr/bin/nvidia-smi", 0)])
def test_where_no_gpu_is_the_smaller_torch_is_named_before_the_larger_one_comes(
    root, monkeypatch, capsys, driver, told
):
    monkeypatch.setattr(environment.sys, "platform", "linux")
    monkeypatch.setattr(environment.shutil, "which", lambda name: driver)
    Fakes().ensure(root)
    assert capsys.readouterr().err.count(environment.NO_GPU) == told


def test_clean_all_removes_the_environment_and_follows_no_link(root, tmp_path_factory):
    """On Linux venv makes a link, lib64."""
    assert not Environment(root).remove()
    Fakes().ensure(root)
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    if os.name != "nt":
        (root / ".venv/lib64").symlink_to(elsewhere)
    assert Environment(root).remove()
    assert not (root / ".venv").exists()
    assert elsewhere.exists()


def test_while_another_process_installs_nothing_is_touched(root):
    Fakes().ensure(root)
    with locked(root / ".venv/course.lock"):
        for call in (lambda: Fakes().ensure(root, tools=True), Environment(root).remove):
            with pytest.raises(SetupError, match="another process"):
                call()
        assert Fakes().ensure(root).exists(), "what is ready can be used"
    (root / ".venv/course.lock").write_text("something else" * 99)
    with pytest.raises(SetupError, match="not a database"):
        Environment(root).remove()
    (root / ".venv/course.lock").unlink()
    (root / ".venv/course.lock").mkdir()
    with pytest.raises(SetupError, match="unable to open"):
        Environment(root).remove()
    (root / ".venv/course.lock").rmdir()
    assert Environment(root).remove()


def test_a_real_venv_is_made_and_recognised(root, monkeypatch):
    """What Python makes is what `broken` expects, and it says so where pip is missing."""
    real = environment.run

    def without_pip(command, *others):  # with it, it takes seconds
        return real([*command, "--without-pip"], *others)

    monkeypatch.setattr(environment, "run", without_pip)
    made = Environment(root)
    with pytest.raises(SetupError, match="python3-venv"):
        made.ensure()
    assert "No module named 'pip'" in made.broken()
    (packages,) = {
        path for place in ("lib/python3.*/site-packages", "Lib/site-packages") for path in made.folder.glob(place)
    }
    (packages / "pip.py").touch()
    assert made.broken() is None


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
