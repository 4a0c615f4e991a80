"""The workbook's first page: an exercise of two minutes, the topics in order, what each takes, and a cell that says how
far the exercises are. Its text is in start_page.ipynb.
"""

from __future__ import annotations

import math
from pathlib import Path

from nbformat import NotebookNode

from course.execution import read_notebook
from course.exercise_form import HEADING
from course.guard import GUARD
from course.module_readme import table
from course.syllabus import Syllabus, Topic, direct_needs

NO_BREAK = "\N{NO-BREAK SPACE}"
NAME = "00_START_HERE.ipynb"
PAGE = Path(__file__).with_suffix(".ipynb")  # with {{placeholders}}
WORDS_A_MINUTE = 200
CODE_LINES_A_MINUTE = 20

RENEWING = """\
`make lab`, given again, brings new editions of the lessons and takes your answers and your own cells over into them;
your files as they were are kept in the folder `earlier`.\
"""


def start_page(syllabus: Syllabus, notebooks: dict[str, NotebookNode], renewing: str = RENEWING) -> NotebookNode:
    """The page as a notebook, with links to `notebooks`, by topic; `renewing` says how new lessons reach the reader."""
    rows = [_row(topic, syllabus, notebooks.get(number)) for number, topic in syllabus.topics.items()]
    texts = {
        "number": syllabus.module.number,
        "title": syllabus.module.title,
        "table": table(("Topic", "Builds on", "Reading", "Exercises"), rows),
        "words": WORDS_A_MINUTE,
        "lines": CODE_LINES_A_MINUTE,
        "renewing": renewing,
    }
    page, _ = read_notebook(PAGE)
    for cell in page.cells:
        if cell.id == "setup":
            cell.source = GUARD
        for name, text in texts.items():
            cell.source = cell.source.replace("{{" + name + "}}", str(text))
    return page


def _row(topic: Topic, syllabus: Syllabus, notebook: NotebookNode | None) -> tuple[str, ...]:
    name, builds_on = f"{topic.number} {topic.title}", ", ".join(direct_needs(topic, syllabus.topics))
    if notebook is None:
        return f"{name}<br>{topic.helps_when}", builds_on, "not written yet", ""
    tasks = [task for cell in notebook.cells for task in HEADING.findall(cell.source)]
    points, minutes = (sum(int(task[i]) for task in tasks) for i in (3, 4))
    exercises = f"{len(tasks)} for {points} points, {duration(minutes)}"
    linked = f"[{name}]({topic.file})<br>{topic.helps_when}"
    return linked, builds_on, duration(reading_minutes(notebook)), exercises


def reading_minutes(notebook: NotebookNode) -> float:
    """How long text and code take to read; answer and check cells not counted."""
    words = lines = 0
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            words += len(cell.source.split())
        elif "nbgrader" not in cell.metadata:
            lines += len(cell.source.splitlines())
    return words / WORDS_A_MINUTE + lines / CODE_LINES_A_MINUTE


def duration(minutes: float) -> str:
    """To the next five minutes: 50 min, 1 h 20 min."""
    hours, rest = divmod(5 * math.ceil(minutes / 5), 60)
    parts = (f"{hours} h" if hours else "", f"{rest} min" if rest or not hours else "")
    return " ".join(filter(None, parts)).replace(" ", NO_BREAK)
