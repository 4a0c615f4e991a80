"""The suite itself: what one worker runs as a whole, in which order, what a topic's tests are.

And what it runs with: requirements, CI's versions.
"""

import argparse
import ast
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
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from course import environment
from course import test as course_test
from course.environment import ROOT

# stands for tests/test_notebooks.py
STAND_IN = """
from pathlib import Path
import pytest

@pytest.mark.notebook("edition")
@pytest.mark.parametrize("path", sorted(Path("module").resolve().glob("*.ipynb")), ids=lambda path: path.stem)
def test_edition(path):
    assert path.is_file()
"""


@pytest.fixture
def repository(tmp_path):
    """A small one with two notebooks of two cells that only pass in one kernel."""
    for name in ("conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    for folder in ("shared", "tests", "module", "datasets/sample"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "shared" / "helper.py").write_text("x = 1\n")
    (tmp_path / "tests" / "test_notebooks.py").write_text(STAND_IN)
    for name in "ab":
        write(tmp_path / "module" / f"{name}.ipynb", f"{name} = 6", f"print({name} * 7)")
    return tmp_path


def write(path, *sources):
    cells = [new_code_cell(source, id=f"c{index}") for index, source in enumerate(sources)]
    nbformat.write(new_notebook(cells=cells), path)


def executed(repository, *arguments, nbval=("--nbval-lax", "--nbval-current-env")):
    """(exit status, the tests that ran by nodeid, all that pytest said)."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    env |= {} if nbval else {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # plugins take seconds to import
    env.pop("PYTEST_ADDOPTS", None)
    answer = subprocess.run(
        [sys.executable, "-m", "pytest", *nbval, "-rA", "--color=no", *arguments],
        cwd=repository, env=env, timeout=120, check=False, capture_output=True, text=True, encoding="utf-8",
    )  # fmt: skip
    ran = {match[1] for match in re.finditer(r"^(?:PASSED|FAILED) (.+?)(?: - .*)?$", answer.stdout, re.MULTILINE)}
    return answer.returncode, ran, answer.stdout + answer.stderr


def cells(name):
    return {f"module/{name}.ipynb::Cell {number}" for number in (0, 1)}


def edition(name):
    return {f"tests/test_notebooks.py::test_edition[{name}]"}


@pytest.mark.slow
@pytest.mark.notebook
@pytest.mark.skipif(os.name == "nt", reason="no sockets that are files")
def test_nbvals_kernels_have_no_ports_that_something_else_may_take(repository):
    second = "assert connect.get_connection_info(unpack=True)['transport'] == 'ipc'"
    write(repository / "module" / "a.ipynb", "from ipykernel import connect", second)
    status, ran, said = executed(repository, "module/a.ipynb")
    assert (status, ran) == (0, cells("a")), said


HANGS = """
import threading

def test_hangs():
    threading.Event().wait()

def test_after_it():
    pass
"""


@pytest.mark.processes
def test_a_test_that_hangs_fails_and_stops_no_other(repository):
    (repository / "tests" / "test_hangs.py").write_text(HANGS)
    limit = ("-o", "faulthandler_timeout=3")
    status, ran, said = executed(repository, "tests", "-n", "1", "--dist", "loadfile", *limit, "-p", "xdist", nbval=())
    assert (status, ran) == (1, edition("a") | edition("b") | {
        "tests/test_hangs.py::test_hangs", "tests/test_hangs.py::test_after_it",
    }), said  # fmt: skip
    assert "crashed while running" in said
    assert 'test_hangs.py", line 5' in said, "where it hangs"


# --------------------------------------------------------------------------------------------------------------------
# workers


def test_cells_stay_together_and_executions_may_be_apart(pytestconfig):
    unit = next(p for p in pytestconfig.pluginmanager.get_plugins() if hasattr(p, "pytest_xdist_make_scheduler")
                and getattr(p, "__file__", "") == str(ROOT / "conftest.py")).unit  # fmt: skip
    assert unit("module/a.ipynb::Cell 0") == unit("module/a.ipynb::Cell 12") != unit("module/b.ipynb::Cell 0")
    assert unit("tests/test_notebooks.py::test_x[a]") != unit("tests/test_notebooks.py::test_x[b]")
    checks = "tests/test_checks_15_01.py::TestChecks"
    swish, other = unit(f"{checks}::test_x[Swish]"), unit(f"{checks}::test_x[Relu]")
    assert unit(f"{checks}::test_y[Swish-no sigmoid]") == swish != other
    assert unit("tests/test_run.py::test_x") == unit("tests/test_run.py::test_y[b]"), "their fixtures are shared"


@pytest.mark.processes
def test_the_longest_goes_first(repository):
    for name, mark in (("a", "notebook"), ("b", "processes"), ("c", "slow")):
        test = f"import pytest\n\ndef test_first(): pass\n\n@pytest.mark.{mark}\ndef test_second(): pass\n"
        (repository / "tests" / f"test_{name}.py").write_text(test)
    said = executed(repository, "tests", "--collect-only", "-q", nbval=())[2]
    files = list(dict.fromkeys(re.findall(r"^tests/(\S+?)::", said, re.MULTILINE)))
    assert files == ["test_notebooks.py", "test_c.py", "test_b.py", "test_a.py"]


# --------------------------------------------------------------------------------------------------------------------
# the command


@pytest.fixture
def started(monkeypatch):
    """The pytest calls that the command makes instead of starting one; each ends with status 0."""
    calls = []
    monkeypatch.setattr(course_test, "subprocess_status", lambda command, env: calls.append(command[3:]) or 0)
    return calls


@pytest.mark.parametrize("names", [[], ["15-01"]])
def test_what_is_about_no_notebook_is_tested_without_the_plugin_for_them(monkeypatch, names):
    calls = []
    monkeypatch.setattr(course_test, "subprocess_status", lambda command, env: calls.append((command, env)) or 0)
    assert run(*names, "-m", "not notebook") == 0
    ((command, env),) = calls
    with_plugin = "--nbval-lax" in command
    assert with_plugin == any(argument.endswith(".ipynb") for argument in command) == bool(names)
    assert (env.get("PYTEST_DISABLE_PLUGIN_AUTOLOAD") is None) == with_plugin


def run(*arguments):
    return course_test.main(argparse.Namespace(extra=list(arguments)))


@pytest.mark.parametrize("name", ["15-01", "15-1", "15-01_custom_autograd_functions_and_hooks.ipynb"])
def test_a_topic_is_its_notebook_its_executions_and_its_checks(started, name):
    assert run(name, "-x", "-k", "not 15-07") == 0
    (call,) = started
    notebook = "module_15_advanced_pytorch_internals/15-01_custom_autograd_functions_and_hooks.ipynb"
    paths = [argument for argument in call if (ROOT / argument).is_file()]
    assert [Path(path).as_posix() for path in paths] == [
        notebook, "tests/test_notebooks.py", "tests/test_15_01_engine.py", "tests/test_checks_15_01.py", notebook,
    ]  # fmt: skip
    assert call[call.index("--notebook") + 1] == paths[0]
    assert call[-3:] == ["-x", "-k", "not 15-07"]


def test_a_topic_that_is_not_written_fails_and_stops_no_other(started, monkeypatch, capsys):
    chosen = course_test.select(["15-01", "15-07"], course_test.syllabus.load())
    chosen[1] = course_test.Selected("15-07", "Seven", ROOT / "nowhere.ipynb")
    monkeypatch.setattr(course_test, "select", lambda names, _: [chosen[names.index(name)] for name in names])
    assert run("15-01", "15-07") == 1
    printed = capsys.readouterr()
    assert "15-07 is not written yet: python -m course new 15-07" in printed.err
    assert "15-07 not written yet" in printed.out
    assert len(started) == 1
    chosen.reverse()
    assert run("15-07") == 1
    assert len(started) == 1, "nothing to test: without a path pytest would test all"


@pytest.mark.parametrize("name", ["tests/test_nothing.py", "tests/test_nothing.py::test_it"])
def test_a_file_that_does_not_exist_is_named(started, capsys, name):
    assert run(name) == 2
    assert "there is no file tests/test_nothing.py" in capsys.readouterr().err
    assert started == []


def test_a_setting_that_cannot_be_met_is_named_once(started, capsys, monkeypatch):
    monkeypatch.setenv("COURSE_DATA", "ful")
    assert run("15-01") == 2
    assert "COURSE_DATA='ful' is not known" in capsys.readouterr().err
    assert started == []


def test_a_topic_that_does_not_exist_is_named(started, capsys):
    assert run("15-77") == 2
    assert "no topic 15-77" in capsys.readouterr().err
    assert started == []


@pytest.mark.parametrize(
    "option",
    [
        ["-n", "0"],
        ["--maxfail", "2"],
        ["--durations", "10"],
        ["-k", "cancel"],
        ["--ignore=tests/test_run.py"],
        ["-x", "-q"],
    ],
)
def test_the_value_of_an_option_is_no_topic(started, option):
    assert run(*option) == 0
    assert started[0][-len(option) :] == option
    assert "tests" in started[0]


# --------------------------------------------------------------------------------------------------------------------
# CI


@pytest.fixture
def copies(tmp_path):
    """A folder with copies of what .ci/versions changes."""
    for name in ("requirements.txt", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def versions(which, folder):
    subprocess.run(["bash", str(ROOT / ".ci" / "versions"), which, str(folder)], check=True, timeout=30)
    return environment.requirements(folder)


@pytest.mark.skipif(os.name == "nt", reason="a script for CI's shell")
def test_the_scheduled_job_tries_the_newest_torch(copies):
    before = environment.requirements(copies)
    after = versions("newest", copies)
    assert not (copies / "constraints.txt").exists(), "pins would keep it from being the newest"
    changed = {line for line in after if line not in before}
    assert {re.match(r"[a-z]+", line)[0] for line in changed} == {"torch", "torchvision"}
    for line in changed:
        name, lowest = line.split(">=")
        assert SpecifierSet(line.removeprefix(name)).contains("99.0")
        assert any(old.startswith(f"{name}>={lowest},") for old in before), "the lower bound stays"
    assert len(after) == len(before)


@pytest.mark.skipif(os.name == "nt", reason="a script for CI's shell")
def test_another_tries_the_oldest_declared_torch(copies):
    before = environment.requirements(copies)
    pins = (copies / "constraints.txt").read_text().splitlines()
    assert versions("oldest", copies) == before
    after = (copies / "constraints.txt").read_text().splitlines()
    lowest = {re.match(r"(torch\w*)>=([\d.]+)", line).groups() for line in before if line.startswith("torch")}
    ours = re.compile(r"torch(vision)?==")  # torchmetrics is another matter
    assert [line for line in after if ours.match(line)] == [f"{n}=={v}.*" for n, v in sorted(lowest)]
    assert len(lowest) == 2
    others = [line for line in pins if not ours.match(line)]
    assert [line for line in after if not ours.match(line)] == others


def test_what_course_and_shared_import_is_declared():
    lines = environment.requirements(ROOT)
    files = (ROOT / f"requirements-{name}.txt" for name in ("dev", "site"))
    optional = [line for file in files for line in re.findall(r"^[a-z][^#\n]*", file.read_text(), re.MULTILINE)]
    declared = {canonicalize_name(Requirement(line.strip()).name) for line in [*lines, *optional]}
    provided = importlib.metadata.packages_distributions()
    ours = {"course", "shared", *sys.stdlib_module_names}
    undeclared = set()
    for file in (file for folder in ("course", "shared") for file in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            roots = {name.split(".")[0] for name in names} - ours
            undeclared |= {
                (file.name, root)
                for root in roots
                if not declared & {*map(canonicalize_name, provided.get(root, [root]))}
            }
    assert undeclared == set()


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


def test_cells_that_contributing_names_are_there():
    named = re.findall(
        r"course run (15-\d\d) .*--cell ([\w-]+)", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    )
    assert named
    for topic, cell in named:
        (path,) = (ROOT / "module_15_advanced_pytorch_internals").glob(f"{topic}_*.ipynb")
        assert cell in {found.id for found in nbformat.read(path, 4).cells if found.cell_type == "code"}


def test_one_place_says_how_ci_tests():
    (workflow,) = (ROOT / ".github" / "workflows").glob("*.yml")
    calls = re.findall(r"course test(.*)", workflow.read_text(encoding="utf-8"))
    whole = [call.strip() for call in calls if "tests/" not in call]
    assert whole == ["--all"] * 2, "on each system, and with other versions"


def test_the_image_is_made_of_the_one_list_of_packages():
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    (install,) = re.findall(r"pip install (.*?)&&", dockerfile, re.DOTALL)
    assert "-r requirements-dev.txt -c constraints.txt" in install
    names = {Requirement(line).name for line in environment.requirements(ROOT)}
    assert not names & set(re.findall(r"[\w-]+", install)), "a second list"
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text(encoding="utf-8"))
    assert (ROOT / ".devcontainer" / container["build"]["dockerfile"]).resolve() == ROOT / "Dockerfile"
    assert f"WORKDIR {container['workspaceFolder']}" in dockerfile
    assert f"USER {container['remoteUser']}" in dockerfile


# --------------------------------------------------------------------------------------------------------------------
# being asked to end

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
POLITE = "import time; print('up', flush=True); time.sleep(60)"
OURS = """
import sys
from course import processes
processes.PATIENCE = 0.5
processes.subprocess_status(sys.argv[1:], None)
"""


@pytest.mark.skipif(os.name == "nt", reason="signals")
@pytest.mark.parametrize("program", [POLITE, STUBBORN])
def test_a_program_ends_with_us_when_we_are_asked_to(program):
    command = [sys.executable, "-c", OURS, sys.executable, "-c", program]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "up\n"
        process.terminate()
        assert process.wait(30) == 0
        assert process.stdout.read() == "", "the program still has our pipe"
