"""How pytest works on this course: notebooks as tests, their marks, their order, and what needn't run again.

An execution of a notebook is a set of tests: its cells under nbval, or one test marked `notebook("edition")` or
`notebook("rehearsal")` with a parameter `path`. When all of them passed, the hash of what they depend on
(course/fingerprint.py) is kept in pytest's cache. The next run skips them while that hash is the same; --fresh doesn't.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from course.fingerprint import fingerprint, surroundings

GREEN = "course/green"  # in pytest's cache: execution → hash
NOTEBOOKS = "tests/test_notebooks.py"  # executes them
ONE_BY_ONE = (NOTEBOOKS, "tests/test_launcher.py")  # long, so any worker takes the next test of them
ABOUT_ONE = re.compile(r"test_(checks_)?\d\d_\d\d")  # tests of one notebook's checks and lesson
ORDER = ("rehearsal", "nbval", "edition", "slow", "processes")  # the longest first, so that no worker waits at the end


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("course")
    group.addoption("--fresh", action="store_true", help="execute notebooks that are unchanged since they passed, too")
    group.addoption("--notebook", action="append", default=[], metavar="FILE", help="only this one (repeatable)")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Green(config))
    config.option.loadscopereorder = False  # xdist would put files with many tests first


# --------------------------------------------------------------------------------------------------------------------
# marks, order and workers


def execution(item: pytest.Item) -> tuple[str, Path] | None:
    """(kind, notebook) if a test is part of a notebook's execution."""
    if item.path.suffix == ".ipynb":
        return "nbval", item.path
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
    items[:] = [item for unit in sorted(units.values(), key=_place) for item in unit]
    _mark_unchanged(config, items)


def unit(nodeid: str) -> str:
    """What one worker runs as a whole: a file, a test of the longest files, or all tests of one exercise's check."""
    file, _, test = nodeid.partition("::")
    exercise = re.search(r"\[(\w+)", test) if file.startswith("tests/test_checks_") else None
    return nodeid if file in ONE_BY_ONE else f"{file} {exercise[1]}" if exercise else file


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

    return Units(config, log)


# --------------------------------------------------------------------------------------------------------------------
# what is unchanged


def _around(config: pytest.Config) -> str:
    options = sorted((name, value) for name, value in vars(config.option).items() if name.startswith("nbval"))
    return surroundings(config.rootpath, config.rootpath / NOTEBOOKS, options)


def _mark_unchanged(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tell the tests of an execution how many they are and its hash, and whether it has passed with it before.

    `user_properties` come back with the reports, from another process, too.
    """
    cache = getattr(config, "cache", None)
    green = {} if cache is None or config.getoption("--fresh") else cache.get(GREEN, {})
    around, known = None, {}
    for item in items:
        if (found := execution(item)) is None:
            continue
        if found not in known:
            kind, path = found
            around = around or _around(config)
            key = f"{kind} {path}"
            known[found] = key, fingerprint(path, kind, around)
        key, digest = known[found]
        count = sum(cell.cell_type == "code" for cell in item.parent.nb.cells) if found[0] == "nbval" else 1
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
            if report.when == "call" and report.outcome == "passed":
                passed.add(report.nodeid)
            elif report.outcome == "failed":  # in setting up or tearing down
                passed.discard(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        cache = getattr(self.config, "cache", None)
        if cache is None or not self.passed:
            return
        around = _around(self.config)
        green = cache.get(GREEN, {})
        for (key, digest, count), passed in self.passed.items():
            kind, _, path = key.partition(" ")
            green.pop(key, None)
            # a file that was changed meanwhile: nobody knows which content passed
            if len(passed) == count and Path(path).is_file() and fingerprint(Path(path), kind, around) == digest:
                green[key] = digest
        cache.set(GREEN, green)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.unchanged:
            notebooks = {key.partition(" ")[2] for key in self.unchanged}
            terminalreporter.write_line(
                f"{len(notebooks)} notebook{'s' * (len(notebooks) != 1)} unchanged since the last run that passed, "
                f"{len(self.unchanged)} executions left out; --fresh executes them"
            )
