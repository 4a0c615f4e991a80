"""How far the exercises in a folder of notebooks are, from the records that their checks left when they were saved."""

import json
from pathlib import Path
from typing import NamedTuple

from shared.text import WIDTH, wrapped

RECORD = "course"  # key of the metadata of a check's output: shared/checks/notebook.py


class _Progress(NamedTuple):
    """How far one notebook is: exercises that had passed when it was saved, and points, partly right answers' too."""

    title: str
    done: int
    exercises: int
    earned: float
    points: int


def show_progress(folder: Path | str = ".") -> None:
    """Print a line for each notebook with exercises in `folder`, and the sum."""
    found = []
    for path in sorted(Path(folder).glob("*.ipynb")):
        try:
            found.append(_progress_of(json.loads(path.read_text(encoding="utf-8")), path.stem))
        except (OSError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError):
            print(wrapped(f"{path.name} cannot be read as a notebook and is not counted.", indent="  "))
    found = [one for one in found if one.exercises]
    if not found:
        print("There is no notebook with exercises here.")
        return
    _, *counts = zip(*found, strict=True)
    width = min(max(len(one.title) for one in found), WIDTH - 45)
    for title, done, exercises, earned, points in [*found, ("All", *map(sum, counts))]:
        short = title if len(title) <= width else title[: width - 3] + "..."
        print(f"{short:<{width}}  {f'{done} of {exercises} exercises':>18}  {earned:>5g} of {points} points")


def _progress_of(notebook: dict, file: str) -> _Progress:
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
            for output in cell.get("outputs", []):
                if record := output.get("metadata", {}).get(RECORD):
                    share = float(record["points"]) / record["of"]  # this edition may give other points
                    earned[name] = max(earned.get(name, 0), round(share * points[name], 1))
                    if record["status"] == "passed":
                        passed.add(name)
    return _Progress(title or file, len(passed), len(points), sum(earned.values()), sum(points.values()))
