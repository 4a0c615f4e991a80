"""The generated parts of INSTRUCTOR_GUIDE.md: the hours of each topic, three schedules, and each topic's pace.

All times are counted as the workbook's start page counts them: reading from words and lines of code, exercises from
their headings. `python -m course lint --write-readme` writes them; the rest of the guide is written by hand.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterable
from contextlib import suppress
from dataclasses import dataclass

from nbformat import NotebookNode

from course.execution import NotebookError, read_notebook
from course.exercise_form import HEADING
from course.module_readme import table
from course.start_page import duration, reading_minutes
from course.syllabus import Syllabus, direct_needs

NAME = "INSTRUCTOR_GUIDE.md"
SOURCE = "the notebooks"

BEGINNING = "Title, objectives, set-up"
END = "Self-assessment and end"
# what stands before the first section of each notebook, and behind the last one: heading → part
OUTSIDE = {
    **dict.fromkeys(("Learning objectives", "Setup"), BEGINNING),
    **dict.fromkeys(("Self-assessment", "Key takeaways", "Where this goes next", "References"), END),
}
TIMES = ("Reading", "Exercises", "Together")

_PART = re.compile(r"^(?:## (?!Milestones$)|### (?=Milestone ))(.*)", re.MULTILINE)
_STOP = re.compile(r"\bstop\b[^.\n]*\btoday\b", re.IGNORECASE)

# day → its topics, and which of their exercises it has time for; a notebook goes on where an exercise was left out
A_WEEK = {
    "Monday": (("15-01", "15-02"), ("15-01.1", "15-01.2", "15-01.4", "15-02.1", "15-02.4", "15-02.5")),
    "Tuesday": (("15-03", "15-04"), ("15-03.2", "15-03.4", "15-04.1", "15-04.4")),
    "Wednesday": (("15-05", "15-06"), ("15-05.1", "15-05.4", "15-06.1", "15-06.3")),
    "Thursday": (("15-07", "15-08"), ("15-07.1", "15-07.2", "15-07.4", "15-08.1", "15-08.4")),
    "Friday": (("15-09", "15-10"), ("15-09.1", "15-09.3", "15-09.4", "15-10.1", "15-10.4")),
}
A_TERM = {str(week): (f"15-{week:02d}",) for week in range(1, 10)} | {"10 and 11": ("15-10",)}
PICKS = {
    "Write your own gradients and layers": ("15-01", "15-03"),
    "Feed, train and measure a model well": ("15-02", "15-04"),
    "Get a model out of Python, or make it faster": ("15-03", "15-05", "15-06"),
    "Find out what is wrong, and where the memory went": ("15-07", "15-09"),
    "Get ready for Module 16": ("15-07", "15-08"),
}


@dataclass(frozen=True)
class Part:
    """A stretch of a lesson, from one heading to the next."""

    heading: str  # without its #
    reading: float  # minutes
    exercises: dict[str, int]  # number → minutes of those in it
    stops: bool  # True if the lesson says in it where to stop for the day


def render(syllabus: Syllabus) -> dict[str, str]:
    """The Markdown of every generated part, by name. Drafts, and notebooks that can't be read, are left out."""
    topics = {number: topic for number, topic in syllabus.topics.items() if not topic.is_draft}
    lessons = {}
    for number, topic in topics.items():
        with suppress(NotebookError):
            lessons[number] = parts(read_notebook(topic.path)[0])

    def times(numbers: Iterable[str], chosen: Container[str] | None = None) -> tuple[str, str, str]:
        """Reading, exercises (of these the chosen ones, if given) and both, of these topics.

        What is read of a topic counts to the next five minutes, so that sums are right.
        """
        those = [lessons[number] for number in numbers if number in lessons]
        tasks = [task for lesson in those for part in lesson for task in part.exercises.items()]
        doing = sum(minutes for number, minutes in tasks if chosen is None or number in chosen)
        # rounded: a float that is a little above a multiple of five is that multiple
        reading = sum(5 * math.ceil(round(sum(part.reading for part in lesson) / 5, 9)) for lesson in those)
        return duration(reading), duration(doing), duration(reading + doing)

    hours = [
        (f"{number} {topics[number].title}", ", ".join(direct_needs(topics[number], topics)) or "–", *times([number]))
        for number in lessons
    ]
    week = [(day, ", ".join(those), ", ".join(done), *times(those, done)) for day, (those, done) in A_WEEK.items()]
    term = [(weeks, ", ".join(those), *times(those)) for weeks, those in A_TERM.items()]
    picks = [(aim, ", ".join(those), *times(those)) for aim, those in PICKS.items()]
    rendered = {
        "hours": table(("Topic", "Builds on", *TIMES), [*hours, ("all", "", *times(lessons))]),
        "a week": table(("Day", "Topics", "Exercises done", *TIMES), week),
        "a term": table(("Week", "Topics", *TIMES), term),
        "picked topics": table(("Aim", "Topics", *TIMES), picks),
    }
    return rendered | {f"pace of {number}": _pace(lesson) for number, lesson in lessons.items()}


def parts(notebook: NotebookNode) -> list[Part]:
    """A lesson's stretches in order, each from the cell that has its heading; what stands before the first section is
    one of them, what ends it another.
    """
    cells: dict[str, list[NotebookNode]] = {}
    heading = BEGINNING
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and (found := _PART.search(cell.source)):
            heading = OUTSIDE.get(found[1], found[1])
        cells.setdefault(heading, []).append(cell)
    found = []
    for heading, stretch in cells.items():
        text = "\n".join(cell.source for cell in stretch if cell.cell_type == "markdown")
        exercises = {f"{task[0]}.{task[1]}": int(task[4]) for task in HEADING.findall(text)}
        found.append(Part(heading, reading_minutes(NotebookNode(cells=stretch)), exercises, bool(_STOP.search(text))))
    return found


def _pace(lesson: list[Part]) -> str:
    rows = []
    for part in lesson:
        tasks = ", ".join(f"{number}: {time} min" for number, time in part.exercises.items())
        rows.append((part.heading, f"{round(part.reading)} min", tasks))
        if part.stops:
            rows.append(("_a place to stop for the day_", "", ""))
    return table(("Part", "Reading", "Exercises"), rows)
