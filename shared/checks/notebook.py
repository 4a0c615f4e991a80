"""What a check leaves in the notebook: its report, a record that progress is read from, and a grade for nbgrader."""

import os
import sys
from contextlib import AbstractContextManager, nullcontext, redirect_stderr
from typing import Any

from shared.checks.report import CheckFailed, Result

RECORD = "course"  # key of an output's metadata that holds a result's record
REMEMBERED: dict[str, float] = {}  # number → points, since the kernel was started


def remember(result: Result) -> None:
    """Keep the points of this run in place of an earlier one's."""
    REMEMBERED[result.exercise] = result.earned


def show(text: str, result: Result) -> None:
    """Show a report as the cell's output, together with its record; without IPython, print it."""
    shell = _shell()
    if shell is None:
        print(text)
    else:
        shell.display_pub.publish({"text/plain": text}, metadata={RECORD: result.record()})


def is_graded() -> bool:
    """Whether nbgrader runs the notebook to grade it."""
    return os.environ.get("NBGRADER_EXECUTION") == "autograde"


def no_stderr_if_graded() -> AbstractContextManager:
    """Under nbgrader, print warnings as ordinary output: it gives a check cell with output on stderr no points."""
    return redirect_stderr(sys.stdout) if is_graded() else nullcontext()


def grade(result: Result) -> None:
    """Give nbgrader the points of an answer that didn't pass; nothing happens unless nbgrader runs the notebook.

    nbgrader gives a check cell no points if it raises, those that its value says if that is a number, and else all.

    Raises:
        CheckFailed: nbgrader runs the notebook, and there are no points.
    """
    if not is_graded():
        return
    shell = _shell()
    if shell is None or not result.earned:
        raise CheckFailed(str(result))
    shell.displayhook(result.earned)


def _shell() -> Any:
    """The running IPython shell, or None. IPython is not imported for it."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython else None
