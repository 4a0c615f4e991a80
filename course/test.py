"""Run the tests: nbval on every notebook, and tests/.

Options and paths that aren't listed here go to pytest; with a path only that is tested, e.g.
`python -m course test tests/test_run.py -k cancel` or `python -m course test -n 0 -x`.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from pathlib import Path

from course import syllabus
from course.environment import ROOT
from course.execution import share_of_cores
from course.lab import subprocess_status
from course.selection import select

TAKES_EXTRA_ARGUMENTS = True
WORKERS = 2
NBVAL = ["--nbval-lax", "--nbval-current-env", "--nbval-cell-timeout=300", "--nbval-kernel-startup-timeout=120"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`python -m course test` has no options of its own."""


def main(args: argparse.Namespace) -> int:
    """Run pytest; returns its exit status (5, no tests found, is a failure like any other)."""
    start = time.monotonic()
    try:
        arguments = pytest_arguments(args.extra)
    except syllabus.SyllabusError as error:
        print(f"test: {error}", file=sys.stderr)
        return 2
    # tests that call `python -m course` are in the environment already and must install nothing
    data = os.environ.get("COURSE_DATA") or "sample"
    env = {**os.environ, **share_of_cores(WORKERS), "COURSE_DATA": data, "COURSE_ENV": "current"}
    status = subprocess_status([sys.executable, "-m", "pytest", *arguments], env)
    # a signal that ended pytest is a negative number here
    status = 128 - status if status < 0 else status
    outcome = "passed" if status == 0 else f"failed (exit status {status})"
    print(f"test: {outcome} in {time.monotonic() - start:.0f} s", flush=True)
    return status


def pytest_arguments(extra: list[str]) -> list[str]:
    """What pytest gets: the options of this project, then `extra`, and everything there is if `extra` names no path."""
    arguments = list(NBVAL)
    if importlib.util.find_spec("xdist"):
        # loadfile: a notebook's cells must stay together, in one kernel
        arguments += ["-n", str(WORKERS), "--dist", "loadfile"]
    if not any(_is_path(argument, before) for before, argument in zip(["", *extra], extra, strict=False)):
        notebooks = [selected.path for selected in select([], syllabus.load()) if selected.path.is_file()]
        notebooks += sorted((ROOT / "templates").glob("*.ipynb"))
        arguments += ["tests", *(str(path.relative_to(ROOT)) for path in notebooks)]
    return [*arguments, *extra]


def _is_path(argument: str, before: str) -> bool:
    """Whether an argument for pytest names something to test and isn't the value of the option before it."""
    if argument.startswith("-") or before in ("-k", "-m", "-p", "-n", "-c", "-o", "-W", "--ignore", "--deselect"):
        return False
    path = Path(argument.split("::")[0])
    return path.exists() or (ROOT / path).exists()
