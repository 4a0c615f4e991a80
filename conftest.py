"""How pytest works on this course: notebooks as tests, their marks, their order, and what one worker runs as a whole.

An execution of a notebook is a set of tests: its cells under nbval, or one test marked `notebook("edition")` with a
parameter `path`.
"""

from __future__ import annotations

import gc
import re
import tempfile
import uuid
import warnings
import zlib
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from course.kernels import connection

NOTEBOOKS = "tests/test_notebooks.py"  # executes them
LAUNCHES = "tests/test_launcher.py"  # long, but each worker that takes tests of it starts a server that imports PyTorch
ABOUT_ONE = re.compile(r"test_(?:checks_)?(\d\d)_(\d\d)")  # tests of one notebook's checks and lesson
# the longest first, so that no worker waits at the end; of a kind, what has the most tests
ORDER = ("edition", "nbval", "slow", "processes")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("course")
    group.addoption("--all-topics", action="store_true", help="grade right answers to all topics, not to one")
    group.addoption("--notebook", action="append", default=[], metavar="FILE", help="only this one (repeatable)")


def pytest_configure(config: pytest.Config) -> None:
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
    kinds = {"nbval" for item in items if item.path.suffix == ".ipynb"}
    for mark in (mark for item in items for mark in item.iter_markers()):
        kinds |= {mark.name, *mark.args[:1]} if mark.name == "notebook" else {mark.name}
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
