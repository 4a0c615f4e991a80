"""How pytest works on this course: notebooks as tests, their marks, their order, and what needn't run again.

An execution of a notebook is a set of tests: its cells under nbval, or one test marked `notebook("edition")` or
`notebook("rehearsal")` with a parameter `path`. Such a set, too, is a file of tests of a notebook's checks or lesson,
or a long one of the tools. When all of a set passed, the hash of what they depend on (course/fingerprint.py) is kept
in pytest's cache. The next run skips them while that hash is the same; --fresh doesn't.
"""

from __future__ import annotations

import gc
import os
import re
import tempfile
import uuid
import warnings
import zlib
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from course.fingerprint import fingerprint, surroundings, tests_fingerprint
from course.kernels import connection

GREEN = "course/green"  # in pytest's cache: "KIND NOTEBOOK" → hash
NOTEBOOKS = "tests/test_notebooks.py"  # executes them
LAUNCHES = "tests/test_launcher.py"  # long, but each worker that takes tests of it starts a server that imports PyTorch
ABOUT_ONE = re.compile(r"test_(?:checks_)?(\d\d)_(\d\d)")  # tests of one notebook's checks and lesson
STARTED_WITH = dict(os.environ)  # an import may set more, in the workers: torch's inductor sets TORCHINDUCTOR_CACHE_DIR
# not short, and about no notebook (they pass when all are empty): not repeated when only notebooks have changed
TOOLS = ("cli", "data", "data_command", "data_decoding", "data_fetching", "environment", "killing", "launcher")
TOOLS += ("confined", "jupyterlab", "mutants", "new", "offline", "plotting", "pretended", "run", "suite")
ABOUT_TOOLS = {f"tests/test_{name}.py" for name in TOOLS}
# the longest first, so that no worker waits at the end; of a kind, what has the most tests
ORDER = ("rehearsal", "nbval", "edition", "slow", "processes")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("course")
    group.addoption("--fresh", action="store_true", help="repeat what passed for an unchanged notebook, too")
    group.addoption("--all-topics", action="store_true", help="grade right answers to all topics, not to three")
    group.addoption("--notebook", action="append", default=[], metavar="FILE", help="only this one (repeatable)")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Green(config))
    config.option.loadscopereorder = False  # xdist would put files with many tests first
    if config.pluginmanager.hasplugin("nbval"):
        import nbval.kernel

        nbval.kernel.KernelManager = _kernel_manager


def _kernel_manager(**settings: Any) -> Any:
    """What nbval makes for a notebook."""
    from jupyter_client import KernelManager

    return KernelManager(**settings, **connection(Path(tempfile.gettempdir(), f"kernel-{uuid.uuid4().hex}.json")))


# --------------------------------------------------------------------------------------------------------------------
# marks, order and workers


def execution(item: pytest.Item) -> tuple[str, Path] | None:
    """(kind, notebook) if a test is part of a notebook's execution; (its file, notebook) or, if it is about none of the
    course's, (its file, itself) where its file needn't be repeated either."""
    if item.path.suffix == ".ipynb":
        return "nbval", item.path
    root = item.config.rootpath
    file = item.path.relative_to(root).as_posix() if item.path.is_relative_to(root) else ""
    if about := ABOUT_ONE.match(item.path.name):
        notebook = next(root.glob("module*/{}-{}_*.ipynb".format(*about.groups())), None)  # executed/ has a copy
        return notebook and (file, notebook)
    if file in ABOUT_TOOLS:
        return file, item.path
    mark = item.get_closest_marker("notebook")
    return (mark.args[0], item.callspec.params["path"]) if mark and mark.args else None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """What `-m "not notebook"` leaves out anyway isn't read: it takes seconds."""
    about_one = collection_path.suffix == ".ipynb" or ABOUT_ONE.match(collection_path.name)
    return True if about_one and config.getoption("markexpr") == "not notebook" else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.suffix == ".ipynb" or ABOUT_ONE.match(item.path.name):
            item.add_marker("notebook")
    units: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        units[unit(item.nodeid)].append(item)
    items[:] = [item for unit in sorted(units.values(), key=lambda unit: (_place(unit), -len(unit))) for item in unit]
    _mark_unchanged(config, items)


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> None:
    """What was there before needn't be looked through by each gc.collect() of a check, which took most of its time."""
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):  # what tests of another file have left
        gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else extension modules report at the end that their objects have leaked


def unit(nodeid: str) -> str:
    """What one worker runs as a whole: a file, half of one, one notebook's execution, one exercise's check."""
    file, _, test = nodeid.partition("::")
    if file == NOTEBOOKS:
        return nodeid
    if file == LAUNCHES:
        return f"{file} {zlib.crc32(test.encode()) % 2}"
    exercise = re.search(r"\[(\w+)", test) if file.startswith("tests/test_checks_") else None
    return f"{file} {exercise[1]}" if exercise else file


def _place(items: list[pytest.Item]) -> int:
    kinds = {mark.name for item in items for mark in item.iter_markers()}
    kinds |= {found[0] for item in items if (found := execution(item))}
    return next((place for place, kind in enumerate(ORDER) if kind in kinds), len(ORDER))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`--dist loadfile`, but in finer units."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Units(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit(nodeid)

        def remove_node(self, node: Any) -> str | None:
            """The test during which a worker died; what was left of its units goes to the others.

            xdist's own runs that test again, and waits for ever once it has handed out a unit with nothing left.
            """
            units = self.assigned_work.pop(node).items()
            left = {name: [test for test, done in tests.items() if not done] for name, tests in units}
            died = next((tests.pop(0) for tests in left.values() if tests), None)
            self.workqueue.update({name: dict.fromkeys(tests, False) for name, tests in left.items() if tests})
            for other in self.assigned_work:
                self._reschedule(other)
            return died

    return Units(config, log)


# --------------------------------------------------------------------------------------------------------------------
# what is unchanged


def _around(config: pytest.Config) -> str:
    options = sorted((name, value) for name, value in vars(config.option).items() if name.startswith("nbval"))
    return surroundings(config.rootpath, config.rootpath / NOTEBOOKS, options, STARTED_WITH)


def _digest(kind: str, path: Path, around: str, root: Path) -> str:
    if kind.endswith(".py"):
        return tests_fingerprint(root / kind, path if path.suffix == ".ipynb" else None, around, root)
    return fingerprint(path, kind, around)


def _mark_unchanged(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tell the tests of an execution how many they are and its hash, and whether it has passed with it before.

    `user_properties` come back with the reports, from another process, too.
    """
    cache = getattr(config, "cache", None)
    green = {} if cache is None or config.getoption("--fresh") else cache.get(GREEN, {})
    around, known = None, {}
    tests = Counter(item.path for item in items)
    # a test that somebody asks for runs, and how many a file has can be counted only if all were collected
    asked_for = any("::" in argument for argument in config.args) or config.option.keyword
    asked_for = asked_for or getattr(config.option, "lf", False)
    for item in items:
        if (found := execution(item)) is None or (asked_for and found[0].endswith(".py")):
            continue
        if found not in known:
            kind, path = found
            around = around or _around(config)
            known[found] = f"{kind} {path}", _digest(kind, path, around, config.rootpath)
        key, digest = known[found]
        if found[0] == "nbval":
            count = sum(cell.cell_type == "code" for cell in item.parent.nb.cells)
        else:
            count = tests[item.path] if found[0].endswith(".py") else 1
        unchanged = green.get(key) == digest
        item.user_properties.append(("unchanged", key) if unchanged else ("execution", (key, digest, count)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if "unchanged" in dict(item.user_properties):
        pytest.skip("unchanged since it last passed")


class _Green:
    """Follows the reports, and at the end keeps what passed. Not in xdist's workers."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.passed: dict[tuple[str, str, int], set[str]] = defaultdict(set)
        self.unchanged: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        properties = dict(report.user_properties)
        self.unchanged |= {properties["unchanged"]} if "unchanged" in properties else set()
        if "execution" in properties:
            passed = self.passed[tuple(properties["execution"])]
            # a test without a GPU, say, may skip itself; a cell may not
            skipped = report.outcome == "skipped" and properties["execution"][0].partition(" ")[0].endswith(".py")
            if (report.when == "call" and report.outcome == "passed") or skipped:
                passed.add(report.nodeid)
            elif report.outcome == "failed":  # in setting up or tearing down
                passed.discard(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        cache = getattr(self.config, "cache", None)
        if cache is None or not self.passed:
            return
        around, root = _around(self.config), self.config.rootpath
        green = cache.get(GREEN, {})
        for (key, digest, count), passed in self.passed.items():
            kind, _, path = key.partition(" ")
            green.pop(key, None)
            # a file that was changed meanwhile: nobody knows which content passed
            if len(passed) == count and Path(path).is_file() and _digest(kind, Path(path), around, root) == digest:
                green[key] = digest
        cache.set(GREEN, green)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.unchanged:
            terminalreporter.write_line(
                f"left out, unchanged since they last passed (--fresh runs them): {len(self.unchanged)} "
                "executions of notebooks or test files"
            )
