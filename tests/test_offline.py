"""README's recipe for a machine without a network, with an index of a few kilobytes in place of the real one."""

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from course.environment import ROOT, Environment

pytestmark = pytest.mark.skipif(os.name == "nt", reason="the recipe is for a POSIX shell")


def recipe() -> tuple[list[str], dict[str, str]]:
    """The commands that fill the folder, and the environment variables of the set-up, as README states them."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text[text.index("**No network.**") : text.index("**CIFAR-10")]
    *commands, setup = re.findall(r"^    (\S.*)$", section, re.MULTILINE)
    variables = dict(re.findall(r'(PIP_\w+)="?([^" ]+)"?', setup))
    assert setup.endswith(" make lab")
    return commands, variables


def tiny_wheel(folder: Path, name: str) -> None:
    """A distribution of one empty module."""
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", "")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def setuptools_wheel(folder: Path) -> None:
    """The installed setuptools, packed again."""
    found = metadata.distribution("setuptools")
    with zipfile.ZipFile(folder / f"setuptools-{found.version}-py3-none-any.whl", "w") as wheel:
        for file in found.files:
            if ".." not in file.parts and file.suffix != ".pyc" and found.locate_file(file).is_file():
                wheel.write(found.locate_file(file), str(file))


@pytest.fixture
def repository(tmp_path):
    """A course with a tiny distribution in place of torch."""
    root = tmp_path / "my course"
    root.mkdir()
    (root / "requirements.txt").write_text("# a comment\ntinycourseneed>=1.0  # why\n-e .\n")
    (root / "constraints.txt").write_text("tinycourseneed==1.0\n")
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (root / "pyproject.toml").write_text(re.sub(r"(?m)^dependencies = .*", "dependencies = []", pyproject))
    (root / "LICENSE").write_bytes((ROOT / "LICENSE").read_bytes())
    (root / "README.md").write_text("# A course\n")
    setuptools = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    for package in setuptools["packages"]:
        folder = root / setuptools["package-dir"].get(package, package.replace(".", "/"))
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("")
    (root / "datasets" / "README.md").write_text("# The data\n")
    return root


@pytest.mark.slow
@pytest.mark.processes
def test_the_recipe_fills_a_folder_from_which_everything_is_installed(tmp_path, repository, monkeypatch):
    version = metadata.version("setuptools")
    if int(version.split(".")[0]) < 77:
        pytest.skip(f"setuptools {version} cannot build the project")
    index = tmp_path / "index"
    index.mkdir()
    tiny_wheel(index, "tinycourseneed")
    setuptools_wheel(index)

    commands, variables = recipe()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").symlink_to(sys.executable)
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    env = {key: value for key, value in os.environ.items() if not key.startswith("PIP_") and key != "PYTHONPATH"}
    online = {**env, "PATH": path, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": index.as_uri(), "PIP_CONFIG_FILE": os.devnull}
    # the symbolic link alone would not find what is installed beside the real Python
    online["PYTHONPATH"] = str(Path(metadata.distribution("pip").locate_file("")))
    for command in commands:
        answer = subprocess.run(
            ["bash", "-ec", command], cwd=repository, env=online, timeout=120, check=False,
            capture_output=True, text=True,
        )  # fmt: skip
        assert answer.returncode == 0, f"{command}\n{answer.stdout}{answer.stderr}"
    fetched = sorted(path.name.split("-")[0] for path in (repository / "wheels").iterdir())
    assert fetched == ["setuptools", "tinycourseneed"], "and not the repository itself"

    assert set(variables) == {"PIP_NO_INDEX", "PIP_FIND_LINKS"}
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_COMPILE", "1")  # seconds
    index.rename(tmp_path / "gone")
    python = Environment(repository).ensure()
    answer = subprocess.run(
        [python, "-c", "import tinycourseneed, course, shared; print(shared.__file__)"],
        cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert answer.stdout.strip() == str(repository / "shared" / "__init__.py"), answer.stderr
