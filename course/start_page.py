"""The workbook's first page: an exercise of two minutes, the topics in order, what each takes, and a cell that says how
far the exercises are.
"""

from __future__ import annotations

import math

from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from course.exercise_form import HEADING, STUB
from course.guard import GUARD
from course.module_readme import table
from course.syllabus import Syllabus, Topic, direct_needs

NO_BREAK = "\N{NO-BREAK SPACE}"
NAME = "00_START_HERE.ipynb"
WORDS_A_MINUTE = 200
CODE_LINES_A_MINUTE = 20

INTRODUCTION = """\
# Module {number}: {title}

**Are you new here?** Begin with the warm-up: two minutes that show how an answer is checked. Otherwise go to the
[topics](#Topics) below it.\
"""
WARM_UP = """\
## Warm-up
This exercise counts for nothing. Somewhere in a model there is `y = x ** 3`. Backward arrives with `upstream`, the
gradient of the loss with respect to `y`. Write what it hands on: the gradient of the loss with respect to `x`.

Run the three cells below as they are (Shift+Enter), then with a wrong answer, then with the right one.

<details><summary>Hint 1: the slope</summary>

The derivative of $x^3$ is $3x^2$.

</details>
<details><summary>Hint 2: what comes from above</summary>

The chain rule: the gradient of the loss with respect to $y$, times the derivative of $y$ with respect to $x$.

</details>\
"""
ANSWER = f"""\
def cube_backward(x, upstream):
    {STUB[0]}
    {STUB[1]}\
"""
CHECK = """\
from shared.checks import warm_up as check

cube_backward = check.cube_backward(cube_backward)\
"""
USE = """\
import torch

x, upstream = torch.tensor([1.0, 2.0, -3.0], requires_grad=True), torch.tensor([1.0, 10.0, 0.1])
(x**3).backward(upstream)
print("PyTorch's:      ", x.grad)
print("cube_backward's:", cube_backward(x.detach(), upstream))\
"""
TOPICS = """\
## Topics
Choose one (15-01 if no line of the table calls you), and run its cells from top to bottom with Shift+Enter. Write your
answers where the exercises ask for them. The check below an answer says what is right, what is wrong and where to look.

{table}

**Exercises.** Each demand that you meet has its share of the points. An exercise that you leave out stops nothing. If
you are stuck with a wrong answer, the last line of the check names one line of code: put it above the check's call, and
the cells below use the course's answer.

**Coming back** on another day, or after a restart of the kernel: click the cell where you stopped, and choose
*Run → Run All Above Selected Cell*. Without that, a check says `NameError: name 'check' is not defined`. Your answers
stay in the notebook. A check whose answer is still wrong stops the run; that one line of code lets it pass.

A topic that builds on another one says so; the others can be taken in any order. The first exercise of a topic comes
after 20 to 40 minutes of reading; reading is counted at {words} words or {lines} lines of code a minute. {renewing}

**Numbers such as 5-07 or 16-03** in a lesson are topics of other modules of the same curriculum. They aren't part of
this course, and you can go on without them.

**What you have done**: run the cell below to see it. It reads the notebooks in this folder as they were last saved
(Ctrl+S, or Cmd+S), and counts what the checks have shown there. If you clear a notebook's outputs, its points are gone
from the count until you run the checks again; your answers stay.\
"""
RENEWING = """\
`make lab`, given again, brings new editions of the lessons and takes your answers and your own cells over into them;
your files as they were are kept in the folder `earlier`.\
"""


def start_page(syllabus: Syllabus, notebooks: dict[str, NotebookNode], renewing: str = RENEWING) -> NotebookNode:
    """The page as a notebook, with links to `notebooks`, by topic; `renewing` says how new lessons reach the reader."""
    rows = [_row(topic, syllabus, notebooks.get(number)) for number, topic in syllabus.topics.items()]
    introduction = INTRODUCTION.format(number=syllabus.module.number, title=syllabus.module.title)
    topics = TOPICS.format(
        table=table(("Topic", "Builds on", "Reading", "Exercises"), rows),
        words=WORDS_A_MINUTE,
        lines=CODE_LINES_A_MINUTE,
        renewing=renewing,
    )
    return new_notebook(
        cells=[
            new_markdown_cell(introduction, id="start"),
            new_code_cell(GUARD, id="setup", metadata={"jupyter": {"source_hidden": True}}),
            new_markdown_cell(WARM_UP, id="warm-up-task"),
            new_code_cell(ANSWER, id="warm-up"),  # without nbgrader's metadata: it is neither counted nor graded
            new_code_cell(CHECK, id="warm-up-check"),
            new_code_cell(USE, id="warm-up-use"),
            new_markdown_cell(topics, id="topics"),
            new_code_cell("from shared.progress import show_progress\n\nshow_progress()", id="progress"),
        ],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
    )


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
