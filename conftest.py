"""How pytest works on this course: notebooks as tests, their marks, and their order."""

from __future__ import annotations

import gc
import re
import tempfile
import uuid
import warnings
from pathlib import Path
from typing import Any

import pytest

ABOUT_ONE = re.compile(r"test_(?:checks_)?(\d\d)_(\d\d)")  # tests of one notebook's checks and lesson


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("course")
    group.addoption("--all-topics", action="store_true", help="grade right answers to all topics, not to one")
    group.addoption("--notebook", action="append", default=[], metavar="FILE", help="only this one (repeatable)")


def pytest_configure(config: pytest.Config) -> None:
    if config.pluginmanager.hasplugin("nbval"):
        import nbval.kernel

        nbval.kernel.KernelManager = _kernel_manager


def _kernel_manager(**settings: Any) -> Any:
    """What nbval makes for a notebook."""
    from jupyter_client import KernelManager

    from course.execution import connection

    return KernelManager(**settings, **connection(Path(tempfile.gettempdir(), f"kernel-{uuid.uuid4().hex}.json")))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.suffix == ".ipynb" or ABOUT_ONE.match(item.path.name):
            item.add_marker("notebook")
    # the longest files first, so that no worker waits at the end
    slow = {item.path for item in items if item.get_closest_marker("slow") or item.get_closest_marker("processes")}
    items.sort(
        key=lambda item: (item.path.name != "test_notebooks.py", item.path.suffix != ".ipynb", item.path not in slow)
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`--dist loadfile`, but each execution of an edition by itself: one takes a minute, and there are twenty."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Files(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return nodeid if "test_notebooks.py" in nodeid else super()._split_scope(nodeid)

    return Files(config, log)


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> None:
    """What was there before needn't be looked through by each gc.collect() of a check, which took most of its time."""
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):  # what tests of another file have left
        gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else extension modules report at the end that their objects have leaked
