"""The suite itself: what `course test` runs, how pytest treats notebooks, and what CI and the image take from it."""

import argparse
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from course import environment
from course import test as course_test
from course.environment import ROOT
from course.selection import Selected

SOCKETS = ["from ipykernel import connect", "assert connect.get_connection_info(unpack=True)['transport'] == 'ipc'"]
HANGS = "import threading\n\ndef test_hangs():\n    threading.Event().wait()\n"


@pytest.mark.processes
@pytest.mark.skipif(os.name == "nt", reason="no sockets that are files")
def test_a_notebook_has_one_kernel_without_ports_and_a_test_that_hangs_ends_the_run(tmp_path):
    shutil.copy(ROOT / "conftest.py", tmp_path)
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    limit = "faulthandler_timeout = "
    (tmp_path / "pyproject.toml").write_text(settings.replace(f"{limit}900", f"{limit}6"), encoding="utf-8")
    cells = [new_code_cell(source, id=f"c{index}") for index, source in enumerate(SOCKETS)]
    nbformat.write(new_notebook(cells=cells), tmp_path / "a.ipynb")
    (tmp_path / "test_hangs.py").write_text(HANGS)
    answer = subprocess.run(
        [sys.executable, "-m", "pytest", *course_test.NBVAL, *course_test.XDIST, "-n1", "test_hangs.py", "a.ipynb"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=120, check=False,
        capture_output=True, text=True, encoding="utf-8",
    )  # fmt: skip
    said = answer.stdout + answer.stderr
    assert "1 failed, 2 passed" in said, "notebooks go first: " + said
    assert "crashed while running 'test_hangs.py::test_hangs'" in said
    assert 'test_hangs.py", line 4' in said, "where it hangs"


@pytest.fixture
def started(monkeypatch):
    """The pytest calls that the command makes instead of starting one; each ends with status 0."""
    calls = []
    monkeypatch.setattr(course_test, "subprocess_status", lambda command, env: calls.append(command[3:]) or 0)
    return calls


def run(*arguments):
    return course_test.main(argparse.Namespace(extra=list(arguments)))


def test_everything_is_tested_unless_a_path_is_named(started):
    run("-k", "cancel")
    run("--all", "-x")
    run("tests/test_cli.py::test_x", "-x")
    usual, everything, narrowed = started
    assert {"--nbval-lax", "-n", "tests"} <= set(usual)
    notebooks = {argument for argument in usual if argument.endswith(".ipynb")}
    assert notebooks == set(map(str, [*ROOT.glob("module_15_*/15-*.ipynb"), *ROOT.glob("templates/*.ipynb")]))
    left_out = {argument.partition("=*")[2] for argument in usual if argument.startswith("--ignore-glob=*")}
    assert {"test_notebooks.py", "test_15_*.py", "test_site.py"} <= left_out, "half an hour, for --all"
    assert all(any((ROOT / "tests").glob(name)) for name in left_out)
    assert usual[-2:] == ["-k", "cancel"]
    assert not any("ignore" in argument for argument in everything)
    assert "--all" not in everything, "pytest doesn't know it"
    assert "tests" not in narrowed
    assert narrowed[-2:] == ["tests/test_cli.py::test_x", "-x"]


def test_a_topic_is_its_notebook_its_executions_and_its_checks(started):
    assert run("15-1", "-x", "-k", "not 15-07") == 0
    (call,) = started
    notebook = "15-01_custom_autograd_functions_and_hooks.ipynb"
    assert [Path(argument).name for argument in call if (ROOT / argument).is_file()] == [
        notebook, "test_notebooks.py", "test_15_01_engine.py", "test_checks_15_01.py", notebook,
    ]  # fmt: skip
    assert Path(call[call.index("--notebook") + 1]).name == notebook
    assert call[-3:] == ["-x", "-k", "not 15-07"]


def test_what_cannot_be_tested_is_named(started, capsys, monkeypatch):
    assert [run("15-77"), run("tests/test_nothing.py::test_it")] == [2, 2]
    draft = Selected("15-11", "A draft", ROOT / "nowhere.ipynb")
    monkeypatch.setattr(course_test, "select", lambda names, book: [draft])
    assert run("15-11") == 2
    said = capsys.readouterr().err
    for phrase in ("15-11 is not written yet", "no topic 15-77", "no file tests/test_nothing.py"):
        assert phrase in said
    assert started == []


@pytest.mark.parametrize(
    ("status", "expected", "data", "used"), [(0, 0, "", "sample"), (5, 5, "full", "full"), (-9, 137, "auto", "auto")]
)
def test_pytest_gets_the_settings_of_tests_and_its_status_is_passed_on(
    monkeypatch, capsys, status, expected, data, used
):
    settings = {}
    monkeypatch.setattr(course_test, "subprocess_status", lambda command, env: settings.update(env) or status)
    monkeypatch.setattr(os, "environ", {"COURSE_DATA": data})
    assert run("tests") == expected
    assert settings.pop("OMP_NUM_THREADS") == str(max(1, os.cpu_count() // 3)), "workers share the cores"
    assert settings.pop("OMP_WAIT_POLICY") == "PASSIVE"
    assert settings == {"COURSE_DATA": used, "COURSE_ENV": "current", "COURSE_TIMING": "rough"}
    outcome = "passed" if status == 0 else f"failed (exit status {expected})"
    assert capsys.readouterr().out.startswith(f"test: {outcome} in")


STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print('up', flush=True)
time.sleep(60)
print('left over')
"""
POLITE = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('in order')))
print('up', flush=True)
time.sleep(60)
"""
OURS = """
import sys
from course import processes
processes.PATIENCE = 2
processes.subprocess_status(sys.argv[1:], None)
"""


@pytest.mark.skipif(os.name == "nt", reason="signals")
@pytest.mark.parametrize(("program", "last_words"), [(POLITE, "in order\n"), (STUBBORN, "")], ids=["polite", "not"])
def test_a_program_ends_with_us_when_we_are_asked_to(program, last_words):
    command = [sys.executable, "-c", OURS, sys.executable, "-c", program]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "up\n"
        process.terminate()
        assert process.wait(30) == 143
        assert process.stdout.read() == last_words, "or the program still has our pipe"


@pytest.mark.skipif(os.name == "nt", reason="a script for CI's shell")
def test_the_scheduled_jobs_try_the_newest_and_the_oldest_declared_torch(tmp_path):
    def versions(which):
        for name in ("requirements.txt", "constraints.txt"):
            shutil.copy(ROOT / name, tmp_path)
        subprocess.run(["bash", str(ROOT / ".ci" / "versions"), which, str(tmp_path)], check=True, timeout=30)
        return set(environment.requirements(tmp_path))

    before = set(environment.requirements(ROOT))
    lowest = {line.split(",")[0] for line in before if re.match("torch(vision)?>", line)}
    assert versions("newest") - before == lowest, "without upper bounds"
    assert not (tmp_path / "constraints.txt").exists(), "pins would keep it from being the newest"
    assert versions("oldest") == before
    ours, theirs = (set((folder / "constraints.txt").read_text().splitlines()) for folder in (tmp_path, ROOT))
    assert ours - theirs == {line.replace(">=", "==") + ".*" for line in lowest}
    assert {line.split("==")[0] for line in theirs - ours} == {"torch", "torchvision"}


def test_each_pinned_version_admits_each_python_that_the_readme_names():
    """Debian 12 has 3.11.2, which a release that wants 3.11.5 shuts out."""
    pins = re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    pinned = {canonicalize_name(pin) for pin in pins}
    shut_out = {
        found.name: wanted
        for found in importlib.metadata.distributions()
        if canonicalize_name(found.name) in pinned and (wanted := found.metadata.get("Requires-Python"))
        if not all(SpecifierSet(wanted).contains(version) for version in ("3.11.0", "3.12.0", "3.13.0"))
    }
    assert shut_out == {}


def test_the_image_is_made_of_the_one_list_of_packages():
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    (install,) = re.findall(r"pip install (.*?)&&", dockerfile, re.DOTALL)
    assert "-r requirements-dev.txt -c constraints.txt" in install
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text(encoding="utf-8"))
    assert (ROOT / ".devcontainer" / container["build"]["dockerfile"]).resolve() == ROOT / "Dockerfile"
    assert f"WORKDIR {container['workspaceFolder']}" in dockerfile
    assert f"USER {container['remoteUser']}" in dockerfile
