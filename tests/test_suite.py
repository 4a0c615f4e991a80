"""The suite itself: which executions are left out, what one worker runs as a whole, what a topic's tests are.

And what it runs with: requirements, CI's versions.
"""

import argparse
import ast
import importlib.metadata
import json
import os
import platform
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

from course import environment, fingerprint
from course import test as course_test
from course.environment import ROOT

# stands for tests/test_notebooks.py: "executes" a notebook of which the text matters; an import sets a variable, as
# torch's inductor does (under xdist only in the workers)
STAND_IN = """
import os
from pathlib import Path
import pytest

os.environ["TORCHINDUCTOR_CACHE_DIR"] = "/nowhere"

@pytest.mark.notebook("edition")
@pytest.mark.parametrize("path", sorted(Path("module").resolve().glob("*.ipynb")), ids=lambda path: path.stem)
def test_edition(path):
    assert "wrong" not in path.read_text()
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


def quickly_executed(repository, *arguments):
    """The same on the stand-in alone."""
    return executed(repository, "tests", *arguments, nbval=())[:2]


def cells(name):
    return {f"module/{name}.ipynb::Cell {number}" for number in (0, 1)}


def edition(name):
    return {f"tests/test_notebooks.py::test_edition[{name}]"}


@pytest.mark.slow
@pytest.mark.notebook
def test_an_execution_is_repeated_when_something_it_depends_on_has_changed(repository):
    everything = cells("a") | cells("b") | edition("a") | edition("b")
    status, ran, said = executed(repository, "tests", "module", "-n", "2", "--dist", "loadfile")
    assert (status, ran) == (0, everything), said
    status, ran, said = executed(repository, "tests", "module")
    assert (status, ran) == (0, set()), said
    assert (
        "left out, unchanged since they last passed (--fresh runs them): 4 executions of notebooks or test files"
        in said
    )

    write(repository / "module" / "b.ipynb", "b = 6", "print(b * 8)")
    status, ran, said = executed(repository, "tests", "module", "-m", "not notebook")
    assert (status, ran) == (5, set()), "what executes a notebook is marked"
    status, ran, said = executed(repository, "tests", "module")
    assert (status, ran) == (0, cells("b") | edition("b")), said
    (repository / "shared" / "helper.py").write_text("x = 2\n")
    status, ran, said = executed(repository, "tests", "module")
    assert (status, ran) == (0, everything), said


@pytest.mark.slow
@pytest.mark.notebook
def test_cells_that_did_not_all_pass_are_no_execution_that_passed(repository):
    notebook = repository / "module" / "a.ipynb"
    status, ran, said = executed(repository, "module/a.ipynb", "-k", "not 1")
    assert (status, ran) == (0, {"module/a.ipynb::Cell 0"}), said
    status, ran, said = executed(repository, "module/a.ipynb")
    assert (status, ran) == (0, cells("a")), "the second cell has never been executed"
    write(notebook, "a = 6", "print(b * 7)")
    status, ran, said = executed(repository, "module/a.ipynb")
    assert (status, ran) == (1, cells("a")), said


@pytest.mark.slow
@pytest.mark.notebook
@pytest.mark.skipif(os.name == "nt", reason="no sockets that are files")
def test_nbvals_kernels_have_no_ports_that_something_else_may_take(repository):
    second = "assert connect.get_connection_info(unpack=True)['transport'] == 'ipc'"
    write(repository / "module" / "a.ipynb", "from ipykernel import connect", second)
    status, ran, said = executed(repository, "module/a.ipynb")
    assert (status, ran) == (0, cells("a")), said


@pytest.mark.processes
def test_a_failure_is_never_left_out_and_fresh_leaves_nothing_out(repository):
    good = (repository / "module" / "a.ipynb").read_text()
    assert quickly_executed(repository) == (0, edition("a") | edition("b"))
    assert quickly_executed(repository, "--fresh") == (0, edition("a") | edition("b"))
    (repository / "module" / "a.ipynb").write_text("wrong")
    for _ in range(2):
        assert quickly_executed(repository) == (1, edition("a"))
    # back to the content that passed: that was forgotten when it failed
    (repository / "module" / "a.ipynb").write_text(good)
    assert quickly_executed(repository) == (0, edition("a"))


@pytest.mark.processes
def test_a_file_that_changes_meanwhile_has_not_passed(repository):
    """Nobody knows with which content."""
    changing = 'path.write_text(path.read_text() + " ")\n    assert "wrong"'
    (repository / "tests" / "test_notebooks.py").write_text(STAND_IN.replace('assert "wrong"', changing))
    for _ in range(2):
        assert quickly_executed(repository) == (0, edition("a") | edition("b"))


TESTS = """
import pytest
from pathlib import Path

@pytest.mark.parametrize("word", ["wrong", "false"])
def test_text(word):
    assert word not in next(Path("module").glob("15-0{}_*.ipynb")).read_text()

@pytest.mark.skip(reason="no GPU")
def test_gpu():
    pass
"""


@pytest.mark.processes
def test_tests_about_one_notebook_are_repeated_when_something_they_depend_on_has_changed(repository):
    notebooks = {number: repository / "module" / f"15-0{number}_x.ipynb" for number in (1, 2)}
    files = {number: repository / "tests" / f"test_checks_15_0{number}.py" for number in (1, 2)}
    for number in (1, 2):
        notebooks[number].write_text("{}")
        files[number].write_text(TESTS.format(number))
        for copies in ("executed", "workbook"):  # of which nothing depends
            (repository / copies).mkdir(exist_ok=True)
            (repository / copies / notebooks[number].name).write_text("{}")
    (repository / "tests" / "test_notebooks.py").unlink()
    tests = {n: {f"tests/{files[n].name}::test_text[{word}]" for word in ("wrong", "false")} for n in (1, 2)}
    one_test = f"tests/{files[1].name}::test_text[wrong]"

    assert quickly_executed(repository, "-k", "wrong") == (
        0,
        {test for n in (1, 2) for test in tests[n] if "wr" in test},
    )
    assert quickly_executed(repository) == (0, tests[1] | tests[2]), "a part that passed is no whole"
    assert quickly_executed(repository) == (0, set())
    assert quickly_executed(repository, "-k", "wrong and 01") == (0, {one_test}), "what is asked for runs"
    assert executed(repository, one_test, nbval=())[:2] == (0, {one_test})
    assert quickly_executed(repository) == (0, set()), "and what passed is still known"

    notebooks[2].write_text("false")
    for _ in range(2):
        assert quickly_executed(repository) == (1, tests[2])
    notebooks[2].write_text("{} ")
    assert quickly_executed(repository, "--lf") == (0, {f"tests/{files[2].name}::test_text[false]"})
    assert quickly_executed(repository) == (0, tests[2]), "what had failed is no whole"
    files[1].write_text(TESTS.format(1) + "\n")
    assert quickly_executed(repository) == (0, tests[1])
    (repository / "tests" / "mutants").mkdir()
    (repository / "tests" / "mutants" / f"{notebooks[1].stem.split('_')[0]}.json").write_text("{}")
    assert quickly_executed(repository) == (0, tests[1])
    for helper in ("tests/protocol.py", "course/answers.py", "shared/helper.py", "module/syllabus.toml"):
        (repository / helper).parent.mkdir(exist_ok=True)
        (repository / helper).write_text("x = 3\n")
        assert quickly_executed(repository) == (0, tests[1] | tests[2]), helper


@pytest.mark.processes
def test_tests_of_the_tools_are_repeated_when_the_tools_change_or_what_notebooks_there_are(repository):
    (repository / "tests" / "test_run.py").write_text("def test_run():\n    pass\n")
    (repository / "tests" / "test_notebooks.py").unlink()
    ran = {"tests/test_run.py::test_run"}
    assert quickly_executed(repository) == (0, ran)
    write(repository / "module" / "a.ipynb", "changed")
    assert quickly_executed(repository) == (0, set())
    write(repository / "module" / "c.ipynb", "new")
    assert quickly_executed(repository) == (0, ran)
    for file in (
        "shared/helper.py",
        "course/run.py",
        "templates/a.ipynb",
        "README.md",
        "tests/tiny.py",
        "tests/test_run.py",
    ):
        (repository / file).parent.mkdir(exist_ok=True)
        (repository / file).write_text("def test_run():\n    assert 1\n")
        assert quickly_executed(repository) == (0, ran), file


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
# the hash


@pytest.fixture
def few_packages(monkeypatch):
    """Reading what is installed takes a tenth of a second each time."""
    few = list(importlib.metadata.distributions())[:3]
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: few)


def hashes(root, options="o"):
    around = fingerprint.surroundings(root, root / "tests" / "test_notebooks.py", options, os.environ)
    return {name: fingerprint.fingerprint(root / "module" / f"{name}.ipynb", "nbval", around) for name in "ab"}


@pytest.mark.usefixtures("few_packages")
def test_the_hash_of_an_unchanged_repository_stays(repository):
    before = hashes(repository)
    assert before["a"] != before["b"]
    (repository / "shared" / "__pycache__").mkdir()
    (repository / "shared" / "__pycache__" / "helper.pyc").write_bytes(b"made")
    (repository / "README.md").write_text("no notebook reads it")
    assert hashes(repository) == before


@pytest.mark.usefixtures("few_packages")
@pytest.mark.parametrize(
    "file",
    [
        "shared/helper.py", "shared/checks/new.py", "shared/style.mplstyle", "constraints.txt", "requirements.txt",
        "datasets/sample/part.webp", "module/recordings/trace.json", "tests/test_notebooks.py", "conftest.py",
    ],
)  # fmt: skip
def test_a_changed_file_changes_all_hashes(repository, file):
    before = hashes(repository)
    path = repository / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text((path.read_text() if path.exists() else "") + "\n# changed\n")
    after = hashes(repository)
    assert all(after[name] != before[name] for name in "ab")


@pytest.mark.usefixtures("few_packages")
def test_what_executes_a_notebook_counts_wherever_it_is_imported(repository):
    """Through another module, in a function, as a module or by a name of it; what isn't imported does not."""
    course = repository / "course"
    course.mkdir()
    (repository / "tests" / "test_notebooks.py").write_text("from course import one\n")
    (course / "one.py").write_text("def f():\n    from course.two import g\n")
    (course / "two.py").write_text("import course.three as other\n")
    for name in ("three", "four"):
        (course / f"{name}.py").write_text("")
    before = hashes(repository)
    for name, counts in (("one", True), ("two", True), ("three", True), ("four", False)):
        path = course / f"{name}.py"
        text = path.read_text()
        path.write_text(text + "# changed\n")
        assert (hashes(repository) != before) == counts, name
        path.write_text(text)
    assert hashes(repository) == before


def test_what_executes_the_real_notebooks_counts():
    names = {path.name for path in fingerprint._program(ROOT / "tests" / "test_notebooks.py", ROOT)}
    assert {"test_notebooks.py", "execution.py", "workbook.py", "exercise_form.py"} <= names
    assert "lint.py" not in names


CHANGES = {
    "a variable of the course": lambda patch: patch.setenv("COURSE_DATA", "elsewhere"),
    "threads": lambda patch: patch.setenv("OMP_NUM_THREADS", "77"),
    "another Python": lambda patch: patch.setattr(sys, "version", "3.99"),
    "another machine": lambda patch: patch.setattr(platform, "uname", lambda: ("other",)),
    "a package more": lambda patch: patch.setattr(importlib.metadata, "distributions", lambda: iter(())),
}


@pytest.mark.usefixtures("few_packages")
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_changed_environment_changes_the_hash(repository, monkeypatch, change):
    before = hashes(repository)
    change(monkeypatch)
    assert hashes(repository) != before


@pytest.mark.usefixtures("few_packages")
def test_how_it_is_executed_changes_the_hash(repository):
    assert hashes(repository, "other options") != hashes(repository)
    path = repository / "module" / "a.ipynb"
    assert fingerprint.fingerprint(path, "nbval", "x") != fingerprint.fingerprint(path, "rehearsal", "x")


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


@pytest.mark.parametrize("name", ["15-01", "15-1", "1", "15-01_custom_autograd_functions_and_hooks.ipynb"])
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
    "option", [["-n", "0"], ["--maxfail", "2"], ["--durations", "10"], ["-k", "15-01"], ["-x", "-q"]]
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
    optional = re.findall(r"^[a-z][^#\n]*", (ROOT / "requirements-dev.txt").read_text(), re.MULTILINE)
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
                (file.name, root) for root in roots if not declared & {*map(canonicalize_name, provided.get(root, []))}
            }
    assert undeclared == set()


def test_ci_takes_nothing_for_passed():
    assert "--fresh" in (ROOT / ".ci" / "run").read_text()
    (workflow,) = (ROOT / ".github" / "workflows").glob("*.yml")
    calls = re.findall(r"course test (.*)", workflow.read_text(encoding="utf-8"))
    assert [call for call in calls if "tests/" not in call] == ["--fresh"] * 2, (
        "on each system, and with other versions"
    )


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
