"""`python -m course new 15-11 "Title" --template algorithm`: make a notebook from a template.

The notebook gets the texts of its row in syllabus.toml; a topic without one gets a row, appended to the file, with the
status "draft" and TODO where a text is open. Write the row first to have another data set; then the number is enough.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from nbformat import NotebookNode

from course import lint
from course.execution import NotebookError, read_notebook, write_notebook
from course.files import write_whole
from course.syllabus import SYLLABUS_FILE, SyllabusError, Topic, load, parse

# name → file and category
TEMPLATES = {
    "algorithm": ("TEMPLATE_ALGORITHM.ipynb", "A — Algorithm"),
    "capstone": ("TEMPLATE_CAPSTONE.ipynb", "E — Capstone/Integration"),
}
ROW = """
[topics."{number}"]
status = "draft"
title = {title}
file = "{number}_{slug}.ipynb"
key_content = "TODO: what the notebook covers, in one line, parts separated by semicolons"
dataset = "FashionMNIST"
time = "~5 min"
budget_seconds = 60
category = "{category}"
template = "{file}"
prerequisites = []
owns = "TODO: the concept that {number} teaches and no other topic does"
description = "TODO: what students do and understand, in one paragraph"
"""
LOADER_OF = {"FashionMNIST": "load_fashion_mnist", "CIFAR-10": "load_cifar10"}


class NewError(ValueError):
    """The notebook cannot be made; the message says why and what to do. Nothing was written."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("number", help="number of the topic, e.g. 15-11")
    parser.add_argument("title", nargs="?", help="title of the topic; not needed if syllabus.toml has it")
    parser.add_argument("--template", choices=TEMPLATES, help="not needed if syllabus.toml has it")


def main(args: argparse.Namespace) -> int:
    """Run the command; 0 when the notebook was made, 1 with a message when not."""
    try:
        topic = create(args.number, args.title, args.template)
    except (NewError, SyllabusError, NotebookError) as error:
        print(f"new: {error}", file=sys.stderr)
        return 1
    print(f"made {topic.path}; execute it: python -m course run {topic.number} --save")
    keys = ("key_content", "helps_when", "owns", "description")
    open_keys = [key for key in keys if "TODO" in (getattr(topic, key) or "TODO")]
    if open_keys:
        print(f"Fill in {', '.join(open_keys)} in its row of syllabus.toml.")
    print("A draft may be unfinished: remove status in the end. CONTRIBUTING.md says what a notebook should be.")
    return 0


def create(
    number: str, title: str | None = None, template: str | None = None, syllabus_file: Path = SYLLABUS_FILE
) -> Topic:
    """Make the notebook, its row and the module page's table; returns the topic as it is now.

    Raises NewError, SyllabusError or NotebookError before anything is written.
    """
    syllabus = load(syllabus_file)
    text = _with_draft_row(syllabus_file.read_text(encoding="utf-8"), number, title, template, syllabus.topics)
    topic = parse(text, syllabus.path).topics[number]
    if topic.path.exists():
        raise NewError(f"{topic.path} is there already; it was not changed")
    notebook = fill(read_notebook(syllabus_file.parents[1] / "templates" / topic.template)[0], topic)
    write_notebook(notebook, topic.path)
    write_whole(syllabus_file, text)
    lint.lint_pages(load(syllabus_file), write=True)
    return topic


def _with_draft_row(text: str, number: str, title: str | None, template: str | None, topics: dict[str, Topic]) -> str:
    """The syllabus's text with a draft row for the topic; everything else in it stays byte for byte."""
    file, category = TEMPLATES.get(template, (None, None))
    if number in topics:
        topic = topics[number]
        if title not in (None, topic.title) or file not in (None, topic.template):
            raise NewError(f"{number} is taken: syllabus.toml has {topic.title!r} with {topic.template}")
        table = f'[topics."{number}"]\n'
        return text if topic.is_draft else text.replace(table, f'{table}status = "draft"\n')
    if title is None or template is None:
        raise NewError(f'{number} has no row in syllabus.toml, so give "Title" and --template algorithm or capstone')
    quoted = json.dumps(title, ensure_ascii=False)  # as in TOML
    row = ROW.format(number=number, title=quoted, slug=slug(title), file=file, category=category)
    return text.rstrip() + "\n" + row


def slug(title: str) -> str:
    """The title as part of a file name: "torch.fx & Graphs" becomes "torch_fx_and_graphs"."""
    return re.sub(r"[^a-z0-9]+", "_", title.lower().replace("&", "and")).strip("_")


def fill(notebook: NotebookNode, topic: Topic) -> NotebookNode:
    """Put the topic's texts into a template for its {{placeholders}}, and its data set's loader; returns it."""
    texts = {
        "prerequisites": ", ".join(topic.prerequisites) or "none yet",
        "uses": " ".join(warning.text for warning in topic.warnings)
        or "nothing yet: name what other topics own, with their numbers",
        **{key: getattr(topic, key) for key in ("number", "title", "category", "dataset", "time", "owns")},
    }
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.source = cell.source.replace(LOADER_OF["FashionMNIST"], LOADER_OF[topic.dataset])
            continue
        for name, text in texts.items():
            cell.source = cell.source.replace("{{" + name + "}}", text)
    return notebook
