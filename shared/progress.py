"""How far the exercises in a folder of notebooks are, from the outputs of their checks that were saved."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shared.text import WIDTH, wrapped

# the first line that a check prints: shared/checks/feedback.py
PASSED = re.compile(r"^Exercise \S+ · .*: passed$", re.MULTILINE)
# a newer edition of a lesson, beside a file that could not be renewed
UPDATED = re.compile(r"\.updated(-\d+)?$")


@dataclass(frozen=True)
class Progress:
    """How far one notebook is.

    Attributes:
        title: its first heading.
        exercises, points: how many there are.
        done, earned: how many were passed when the notebook was last saved.
    """

    title: str
    exercises: int
    points: int
    done: int
    earned: int


def show_progress(folder: Path | str = ".") -> None:
    """Print a line for each notebook with exercises in `folder`, and the sum."""
    found, unreadable = read_progress(Path(folder))
    for name in unreadable:
        print(wrapped(f"{name} cannot be read as a notebook and is not counted.", indent="  "))
    if not found:
        print("There is no notebook with exercises here.")
        return
    total = Progress(
        "All", *(sum(getattr(one, key) for one in found) for key in ("exercises", "points", "done", "earned"))
    )
    width = min(max(len(one.title) for one in found), WIDTH - 45)
    for one in [*found, total]:
        title = one.title if len(one.title) <= width else one.title[: width - 3] + "..."
        done = f"{one.done} of {one.exercises} exercises"
        print(f"{title:<{width}}  {done:>18}  {one.earned:>4} of {one.points} points")


def read_progress(folder: Path) -> tuple[list[Progress], list[str]]:
    """The progress of each notebook with exercises in `folder`, and the names of those that cannot be read.

    Of several editions of one lesson the one with the most points counts.
    """
    best: dict[str, Progress] = {}
    unreadable = []
    for path in sorted(folder.glob("*.ipynb")):
        try:
            progress = _progress_of(json.loads(path.read_text(encoding="utf-8")), path.stem)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            unreadable.append(path.name)
            continue
        lesson = UPDATED.sub("", path.stem)
        if progress.exercises and (lesson not in best or progress.earned > best[lesson].earned):
            best[lesson] = progress
    return list(best.values()), unreadable


def _progress_of(notebook: dict, name: str) -> Progress:
    points: dict[str, int] = {}  # of each check, by its id: a copy of the cell counts once
    passed = set()
    title = None
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if title is None and cell["cell_type"] == "markdown" and source.startswith("# "):
            title = source.splitlines()[0][2:].strip()
        check = cell["metadata"].get("nbgrader") or {}
        if cell["cell_type"] == "code" and check.get("grade"):
            points[check["grade_id"]] = int(check.get("points") or 0)
            if any(PASSED.search(text) for text in _printed(cell)):
                passed.add(check["grade_id"])
    return Progress(title or name, len(points), sum(points.values()), len(passed), sum(points[one] for one in passed))


def _printed(cell: dict) -> Iterator[str]:
    for output in cell.get("outputs", []):
        if output.get("output_type") == "stream" and output.get("name") == "stdout":
            yield "".join(output["text"])
