"""Notebooks as students hand them in, made of the course's own."""

import copy
import functools
import json
from typing import Any

from course.exercise_form import student_source
from course.lesson_code import exercises
from course.skeleton import editions


@functools.cache
def _edition(topic: str) -> dict[str, Any]:
    notebook = json.loads(editions()[topic].read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        cell["source"] = "".join(cell["source"])
        if cell["cell_type"] == "code":
            cell.update(outputs=[], execution_count=None)
            if cell["metadata"].get("nbgrader", {}).get("solution"):
                cell["source"] = student_source(cell["source"])
    return notebook


@functools.cache
def solutions(topic: str) -> dict[str, str]:
    """The course's answers by their cells' ids."""
    return {answer.cell: answer.source for answer in exercises(editions()[topic])[1]}


def notebook(topic: str, answers: dict[str, str] | None = None) -> dict[str, Any]:
    """The student edition with these sources in answer cells."""
    made = copy.deepcopy(_edition(topic))
    for cell in made["cells"]:
        cell["source"] = (answers or {}).get(cell["id"], cell["source"])
    return made


def as_file(made: dict[str, Any]) -> bytes:
    """A notebook as Jupyter saves it."""
    return json.dumps(made, indent=1).encode()


def place(made: dict[str, Any], cell_id: str) -> int:
    """The index of a cell."""
    return next(index for index, cell in enumerate(made["cells"]) if cell["id"] == cell_id)


def code(source: str, **more: Any) -> dict[str, Any]:
    """A code cell that a student adds."""
    return {"cell_type": "code", "metadata": {}, "source": source, "outputs": [], "execution_count": None, **more}
