"""How far the exercises in a folder of notebooks are, from the records that their checks left when they were saved."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shared.text import WIDTH, wrapped

RECORD = "course"  # key of the metadata of a check's output: shared/checks/notebook.py


@dataclass(frozen=True)
class Progress:
    """How far one notebook is.

    Attributes:
        title: its first heading.
        exercises, points: how many there are.
        done: how many had passed when the notebook was last saved.
        earned: the points, those of answers that are partly right among them.
    """

    title: str
    exercises: int
    points: int
    done: int
    earned: float


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
        print(f"{title:<{width}}  {done:>18}  {one.earned:>5g} of {one.points} points")


def read_progress(folder: Path) -> tuple[list[Progress], list[str]]:
    """The progress of each notebook with exercises in `folder`, and the names of those that cannot be read."""
    found, unreadable = [], []
    for path in sorted(folder.glob("*.ipynb")):
        try:
            found.append(_progress_of(json.loads(path.read_text(encoding="utf-8")), path.stem))
        except (OSError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError):
            unreadable.append(path.name)
    return [one for one in found if one.exercises], unreadable


def _progress_of(notebook: dict, file: str) -> Progress:
    points: dict[str, int] = {}  # of each check, by its id: a copy of the cell counts once
    earned: dict[str, float] = {}
    passed = set()
    title = None
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if title is None and cell["cell_type"] == "markdown" and source.startswith("# "):
            title = source.splitlines()[0][2:].strip()
        check = cell["metadata"].get("nbgrader") or {}
        if cell["cell_type"] == "code" and check.get("grade"):
            name = check["grade_id"]
            points[name] = int(check.get("points") or 0)
            for record in _records(cell):
                share = float(record["points"]) / record["of"]  # this edition may give other points
                earned[name] = max(earned.get(name, 0), round(share * points[name], 1))
                if record["status"] == "passed":
                    passed.add(name)
    return Progress(title or file, len(points), sum(points.values()), len(passed), sum(earned.values()))


def _records(cell: dict) -> Iterator[dict]:
    for output in cell.get("outputs", []):
        if record := output.get("metadata", {}).get(RECORD):
            yield record
