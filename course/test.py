"""Run the tests: each notebook as it is (nbval), and those of the helpers and tools. In ten minutes on two cores.

--all adds what is about one notebook: the tests of its checks and lesson, and its student edition, unsolved and solved,
on a pretended accelerator; and what is about other places: nbgrader, Gradescope, clusters, the site, JupyterLab in a
browser, a machine without a network. In half an hour; CI runs it.

A topic (15-01 or 15-1) or a notebook file means all that is about that notebook: its two executions and its checks'
tests. All other options and paths go to pytest; with a path only that is tested, e.g.
`python -m course test tests/test_run.py -k cancel` or `python -m course test -m "not notebook" -n 0 -x`. A path or a
topic that is an option's value stands behind a =, as in --ignore=tests/test_run.py.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time

from course import syllabus
from course.environment import ROOT
from course.processes import share_of_cores, subprocess_status
from course.selection import SelectionError, select

TAKES_EXTRA_ARGUMENTS = True
ALL = "--all"
ONLY_ALL = ("notebooks", "15_*", "checks_15_*", "nbgrader", "grade_elsewhere", "jupyterlab", "offline", "site")
WORKERS = 3  # on two cores: tests of processes wait more than they compute
WORKERS_FOR_ALL = 2  # editions on the pretended accelerator only compute
NBVAL = ["--nbval-lax", "--nbval-current-env", "--nbval-cell-timeout=300", "--nbval-kernel-startup-timeout=120"]
# loadfile: a notebook's cells must stay together, in one kernel. A test that hangs ends its worker (pyproject.toml):
# without another one the run ends, and names it
XDIST = ["-p", "xdist", "--dist=loadfile", "--no-loadscope-reorder", "--max-worker-restart=0"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """There are no options of its own."""


def main(args: argparse.Namespace) -> int:
    """Run pytest; returns its exit status (5, no tests found, is a failure like any other), 2 for wrong usage."""
    start = time.monotonic()
    try:
        arguments = pytest_arguments(args.extra)
    except (SelectionError, syllabus.SyllabusError) as error:
        print(f"test: {error}", file=sys.stderr)
        return 2
    # tests that call `python -m course` are in the environment already and must install nothing
    env = {**os.environ, **share_of_cores(WORKERS), "COURSE_ENV": "current"}
    env["COURSE_DATA"] = os.environ.get("COURSE_DATA") or "sample"
    env.setdefault("COURSE_TIMING", "rough")  # nobody reads the times
    status = subprocess_status([sys.executable, "-m", "pytest", *arguments], env)
    # a signal that ended pytest is a negative number here
    status = 128 - status if status < 0 else status
    outcome = "passed" if status == 0 else f"failed (exit status {status})"
    print(f"test: {outcome} in {time.monotonic() - start:.0f} s", flush=True)
    return status


def pytest_arguments(given: list[str]) -> list[str]:
    """What pytest gets: the options of this project, what to test, and what is given beside notebooks.

    To be tested is what is about the notebooks that are named; without any the paths that are given, and if there is no
    path all there is. Raises SelectionError.
    """
    names = [argument for argument in given if re.fullmatch(r"\d+-\d+|[^-].*\.ipynb", argument)]
    extra = [argument for argument in given if argument not in (*names, ALL)]
    for argument in extra:
        if re.fullmatch(r"[^-].*\.py(::.*)?", argument) and not _is_path(argument):
            raise SelectionError(f"there is no file {argument.split('::')[0]}.")  # pytest's workers don't name it
    arguments = [*NBVAL, "-n", str(WORKERS_FOR_ALL if ALL in given else WORKERS), *XDIST]
    for notebook in select(names, syllabus.load()) if names else []:
        if not notebook.path.is_file():
            raise SelectionError(f"{notebook.label} is not written yet: python -m course new {notebook.label}")
        number = (notebook.topic or "none").replace("-", "_")
        tests = [*ROOT.glob(f"tests/test_checks_{number}*.py"), *ROOT.glob(f"tests/test_{number}_*.py")]
        paths = [notebook.path, ROOT / "tests" / "test_notebooks.py", *sorted(tests)]
        arguments += [*map(str, paths), "--notebook", str(notebook.path)]
    if not names and not any(map(_is_path, extra)):
        everything = [selected.path for selected in select([], syllabus.load()) if selected.path.is_file()]
        everything += sorted((ROOT / "templates").glob("*.ipynb"))
        left_out = [] if ALL in given else [f"--ignore-glob=*test_{name}.py" for name in ONLY_ALL]
        arguments += ["tests", *left_out, *map(str, everything)]
    return [*arguments, *extra]


def _is_path(argument: str) -> bool:
    """Whether an argument for pytest names something to test."""
    return not argument.startswith("-") and (ROOT / argument.split("::")[0]).exists()
