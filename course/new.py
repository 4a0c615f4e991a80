"""`python -m course new 15-11 "Title" --template algorithm`: make a notebook from a template.

The notebook gets the texts of its row in syllabus.toml; a topic without one gets a row, appended to the file, with the
status "draft" and TODO where no option gave a text. The notebook is executed, so that a template that no longer runs is
noticed before anything is written. A number whose row is there already needs no title and no template. No file is ever
overwritten.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import sys
import unicodedata
from dataclasses import dataclass, replace
from pathlib import Path

from course import lint
from course.environment import ROOT
from course.files import NotWritableError, require_writable, write_whole
from course.rules import lint_document
from course.syllabus import SYLLABUS_FILE, Syllabus, SyllabusError, Topic, load, parse

TEMPLATE_OF = {"algorithm": "TEMPLATE_ALGORITHM.ipynb", "capstone": "TEMPLATE_CAPSTONE.ipynb"}
CATEGORY_OF = {"algorithm": "A — Algorithm", "capstone": "E — Capstone/Integration"}
LOADER_OF = {"FashionMNIST": "load_fashion_mnist", "CIFAR-10": "load_cifar10"}

CELL_SECONDS = 120
BUDGET_SECONDS = 60


class NewError(ValueError):
    """The notebook cannot be made; the message says why and what to do. Nothing was written."""


@dataclass(frozen=True)
class Wish:
    """What the command line asks for; None where it says nothing."""

    number: str
    title: str | None = None
    template: str | None = None
    dataset: str | None = None
    minutes: int | None = None
    requires: tuple[str, ...] | None = None
    key_content: str | None = None
    owns: str | None = None
    description: str | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m course new`."""
    parser.add_argument("number", help="number of the topic, e.g. 15-11")
    parser.add_argument("title", nargs="?", help="title of the topic; not needed if syllabus.toml has it")
    parser.add_argument("--template", help=f"{' or '.join(TEMPLATE_OF)}; not needed if syllabus.toml has it")
    parser.add_argument("--dataset", help=f"{' or '.join(LOADER_OF)} (default: FashionMNIST)")
    parser.add_argument("--minutes", type=int, help="minutes on a GPU with the full data set (default: 5)")
    parser.add_argument("--requires", nargs="+", metavar="NUMBER", help="topics to know before, e.g. 5-07 15-03")
    parser.add_argument("--key-content", help="what it covers, in one line")
    parser.add_argument("--owns", help="the concept that it teaches and no other topic does")
    parser.add_argument("--description", help="what students do and understand, in one paragraph")
    parser.add_argument("--no-run", action="store_true", help="do not execute it, so that it has no outputs yet")


def main(args: argparse.Namespace) -> int:
    """Run the command; 0 when the notebook was made, 1 with a message when not."""
    wish = Wish(
        number=args.number,
        title=args.title,
        template=args.template,
        dataset=args.dataset,
        minutes=args.minutes,
        requires=tuple(args.requires) if args.requires else None,
        key_content=args.key_content,
        owns=args.owns,
        description=args.description,
    )
    try:
        topic = create(wish, run=not args.no_run)
    except (NewError, SyllabusError) as error:
        print(f"new: {error}", file=sys.stderr)
        return 1
    print(f"made {topic.path}")
    open_keys = [key for key in ("key_content", "owns", "description") if "TODO" in getattr(topic, key)]
    if open_keys:
        print(f"Fill in {', '.join(open_keys)} in its row of syllabus.toml.")
    print("CONTRIBUTING.md says what a notebook should be, and how an exercise is added.")
    print(
        'While its row says status = "draft", what is unfinished is no finding and no failure; remove that in the end.'
    )
    return 0


def create(
    wish: Wish, syllabus_file: Path = SYLLABUS_FILE, templates: Path = ROOT / "templates", *, run: bool
) -> Topic:
    """Make the notebook, its row and the module page's table; returns the topic as it is now.

    run: execute the notebook, so that it holds its outputs.
    Raises NewError or SyllabusError before anything is written.
    """
    syllabus = load(syllabus_file)
    after = _with_draft_row(syllabus_file.read_bytes().decode("utf-8"), wish, syllabus)
    topic = parse(after, syllabus.path).topics[wish.number]
    if topic.path.exists():
        raise NewError(f"{topic.path} is there already; it was not changed")

    document = fill(_read_template(templates / topic.template), topic)
    try:
        require_writable(topic.path.parent)  # before the notebook is executed
    except NotWritableError as error:
        raise NewError(str(error)) from None
    if run:
        print(f"executing {topic.file} …", flush=True)
        document = execute(document, syllabus_file.parent)
    text = json.dumps(document, indent=1, ensure_ascii=False) + "\n"
    findings = lint_document(document, topic.path, len(text), topic, syllabus.module)
    if findings:
        raise NewError("the notebook would not pass lint:\n" + "\n".join(f"  {finding}" for finding in findings))

    try:
        with topic.path.open("x", encoding="utf-8", newline="\n") as file:
            file.write(text)
    except FileExistsError:  # somebody made it in the meantime
        raise NewError(f"{topic.path} is there already; it was not changed") from None
    try:
        write_whole(syllabus_file, after)
    except OSError as error:
        topic.path.unlink()
        raise NewError(f"{syllabus_file} cannot be written: {error}") from None
    lint.write_readme(load(syllabus_file))
    return topic


# --- the row ----------------------------------------------------------------------------------------------------------


def _with_draft_row(text: str, wish: Wish, syllabus: Syllabus) -> str:
    """The syllabus's text with a draft row for the wish; everything else in it stays byte for byte."""
    module = syllabus.module.number
    if not re.fullmatch(rf"{module}-\d\d", wish.number) or wish.number.endswith("-00"):
        raise NewError(f"{wish.number!r} is not a number of this module; it must look like {module}-11")
    if wish.template is not None and wish.template not in TEMPLATE_OF:
        raise NewError(f"there is no template {wish.template!r}; there are {', '.join(TEMPLATE_OF)}")
    if wish.dataset is not None and wish.dataset not in LOADER_OF:
        raise NewError(f"there is no data set {wish.dataset!r}; there are {', '.join(LOADER_OF)}")
    if wish.number in syllabus.topics:
        topic = syllabus.topics[wish.number]
        _refuse_contradiction(wish, topic)
        return text if topic.is_draft else _marked_as_draft(text, topic, syllabus)
    return _appended(text, wish)


def _refuse_contradiction(wish: Wish, topic: Topic) -> None:
    if wish.title is not None and wish.title != topic.title:
        raise NewError(f"{topic.number} is taken: it is called {topic.title!r} in syllabus.toml; choose another number")
    if wish.template is not None and TEMPLATE_OF[wish.template] != topic.template:
        raise NewError(f"{topic.number} has the template {topic.template} in syllabus.toml")
    asked = {
        "dataset": (wish.dataset, topic.dataset),
        "minutes": (wish.minutes, topic.minutes),
        "requires": (wish.requires, topic.prerequisites),
        "key-content": (wish.key_content, topic.key_content),
        "owns": (wish.owns, topic.owns),
        "description": (wish.description, topic.description),
    }
    for option, (wanted, found) in asked.items():
        if wanted is not None and wanted != found:
            raise NewError(
                f"{topic.number} has a row in syllabus.toml that says otherwise than --{option}; change it there"
            )


def _marked_as_draft(text: str, topic: Topic, syllabus: Syllabus) -> str:
    header = re.compile(rf'^\[topics\."{topic.number}"\][ \t]*(\r?\n)', re.MULTILINE)
    marked = header.sub(lambda match: match[0] + 'status = "draft"' + match[1], text)
    expected = syllabus.topics | {topic.number: replace(topic, status="draft")}
    if parse(marked, syllabus.path).topics != expected:
        raise NewError(
            f'add status = "draft" to the row of {topic.number} in syllabus.toml by hand, then call this again'
        )
    return marked


def _appended(text: str, wish: Wish) -> str:
    if wish.title is None or wish.template is None:
        raise NewError(
            f'{wish.number} has no row in syllabus.toml, so give "Title" and --template algorithm or capstone'
        )
    title = wish.title.strip()
    if not title.isprintable() or not slug(title):
        raise NewError(f"{wish.title!r} cannot be a title: it needs letters or digits, and no control characters")
    if wish.minutes is not None and wish.minutes < 1:
        raise NewError(f"--minutes must be at least 1, not {wish.minutes}")
    minutes = wish.minutes or 5
    row = {
        "status": "draft",
        "title": title,
        "file": f"{wish.number}_{slug(title)}.ipynb",
        "key_content": wish.key_content or "TODO: what the notebook covers, in one line, parts separated by semicolons",
        "dataset": wish.dataset or "FashionMNIST",
        "time": f"~{minutes} min",
        "minutes": minutes,
        "budget_seconds": BUDGET_SECONDS,
        "category": CATEGORY_OF[wish.template],
        "template": TEMPLATE_OF[wish.template],
        "prerequisites": list(wish.requires or ()),
        "owns": wish.owns or f"TODO: the concept that {wish.number} teaches and no other topic does",
        "description": wish.description or "TODO: what students do and understand, in one paragraph",
    }
    # JSON's texts, numbers and lists are TOML's as well
    lines = [f'[topics."{wish.number}"]', *(f"{key} = {json.dumps(row[key], ensure_ascii=False)}" for key in row)]
    newline = "\r\n" if "\r\n" in text else "\n"
    gap = newline if text.endswith("\n") else newline * 2
    return text + gap + newline.join(lines) + newline


def slug(title: str) -> str:
    """The title as part of a file name: "torch.fx & Graphs" becomes "torch_fx_and_graphs"."""
    plain = unicodedata.normalize("NFKD", title.replace("&", " and ")).encode("ascii", "ignore").decode()
    return re.sub(r"[^a-z0-9]+", "_", plain.lower()).strip("_")


# --- the notebook -----------------------------------------------------------------------------------------------------


def _read_template(path: Path) -> dict:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise NewError(f"the template {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise NewError(f"the template {path} is not a notebook: {error}") from None


def fill(template: dict, topic: Topic) -> dict:
    """A copy of the template without outputs: the topic's texts for {{placeholders}}, its data set's loader."""
    uses = " ".join(warning.text for warning in topic.warnings)
    texts = {
        "number": topic.number,
        "title": topic.title,
        "category": topic.category,
        "dataset": topic.dataset,
        "time": topic.time,
        "prerequisites": ", ".join(topic.prerequisites) or "none yet",
        "owns": topic.owns,
        "uses": uses or "nothing yet: name what other topics own, with their numbers",
    }
    document = copy.deepcopy(template)
    for cell in document["cells"]:
        source = cell["source"] if isinstance(cell["source"], str) else "".join(cell["source"])
        if cell["cell_type"] == "code":
            source = source.replace(LOADER_OF["FashionMNIST"], LOADER_OF[topic.dataset])
            cell |= {"outputs": [], "execution_count": None}
        else:
            in_table = cell["id"] == "glance"
            for name, text in texts.items():
                source = source.replace("{{" + name + "}}", text.replace("|", "\\|") if in_table else text)
        cell["source"] = source.splitlines(keepends=True)
    return document


def execute(document: dict, folder: Path) -> dict:
    """Run all cells in a fresh kernel in `folder`, with the bundled sample; returns the notebook with its outputs.

    Raises NewError when a cell fails or takes longer than CELL_SECONDS, or the kernel dies.
    """
    # here, because these take a second, and most mistakes are found before
    import nbformat

    from course.execution import execute_blocking

    notebook = nbformat.reads(json.dumps(document), as_version=4)
    failure = execute_blocking(notebook, folder, timeout=CELL_SECONDS, env={"COURSE_DATA": "sample"}).failure
    if failure is not None:
        where = f"cell '{failure.cell_id}': " if failure.cell_id else ""
        raise NewError(f"the notebook does not run: {where}{failure.reason}")
    return json.loads(nbformat.writes(notebook, version=nbformat.NO_CONVERT))
