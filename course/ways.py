"""The ways to a notebook from elsewhere: a download, Colab, Kaggle, Binder.

Students' notebooks and the wheel are on the branch STUDENT_BRANCH of the repository, where CI puts them: the notebooks
beside the code hold the solutions.
"""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from course.guard import for_students
from course.syllabus import Syllabus, Topic

STUDENT_BRANCH = "student"
BUNDLE = """\
**<a href="{file}" download>The students' bundle</a>** ({megabytes:.0f} MB) has all notebooks, what they import, and the
data samples. You need Python 3.11, 3.12 or 3.13. Unpack it, and follow the three lines in its `README.md`: they install
PyTorch and JupyterLab, 1.5 GB of disk without CUDA and 6 GB with it, and open the first page. Each notebook's page
has a button that downloads it alone; to run, it needs what the bundle installs."""
_GITHUB = re.compile(r"https://github\.com/([\w.-]+/[\w.-]+?)(?:\.git)?/?")


def zip_of(topic: Topic) -> str:
    """The file that a page offers: of a site that was opened as a file, a browser would show a notebook as text."""
    return Path(topic.file).with_suffix(".zip").name


def buttons(book: Syllabus, topic: Topic, solutions: str | None) -> str:
    """The row of buttons below a page's title, as HTML; Colab, Kaggle and Binder if the course is on GitHub."""
    about = "How to run it says what else a notebook needs: the students' bundle."
    made = ['<a href="index.html#begin">How to run it</a>']
    made += [f'<a href="notebooks/{zip_of(topic)}" title="{about}" download>Download the notebook (zip)</a>']
    if found := _GITHUB.fullmatch(book.module.repository):
        at = f"{found[1]}/blob/{STUDENT_BRANCH}/{topic.file}"
        binder = f"https://mybinder.org/v2/gh/{found[1]}/HEAD?urlpath=lab/tree/workbook/{topic.file}"
        made += [f'<a href="https://colab.research.google.com/github/{at}">Open in Colab</a>']
        made += [f'<a href="https://kaggle.com/kernels/welcome?src=https://github.com/{at}">Open in Kaggle</a>']
        made += [f'<a href="{binder}">Open in Binder</a>']
    made += [f'<a href="{solutions}.html">Solutions</a>'] if solutions else []
    return "\n".join(['<div class="ways">', *made, "</div>"])


def how_to_begin(book: Syllabus, bundle: str = "", megabytes: float = 0) -> str:
    """The front page's lines on how to get to work, as Markdown; `bundle` is the students' zip, if the site has it."""
    offered = BUNDLE.format(file=bundle, megabytes=megabytes) if bundle else ""
    address = book.module.repository
    if address:
        return (
            "In a browser, each notebook's page opens it in Colab, Kaggle or Binder. On your own machine:\n\n"
            f"    git clone {address} module-15\n    cd module-15\n    make lab\n\n{offered}\n"
        )
    return (
        f"{offered}\n\n"
        "If you have the course's folder, this opens the student edition in JupyterLab "
        "(Linux or macOS, in the course's folder; on Windows `py -m course lab`):\n\n    make lab\n"
    )


def as_file(notebook: NotebookNode, book: Syllabus) -> bytes:
    """The file of a student's notebook, whose first lines fetch the course, or say how to get it."""
    for cell in notebook.cells:
        cell.source = for_students(cell.source, book.module.repository)
    return nbformat.writes(notebook, version=nbformat.NO_CONVERT).rstrip("\n").encode() + b"\n"
