"""Build the site from the notebooks' stored outputs. Nothing is executed, and nothing needs a network.

A page for each notebook, as students get it but with outputs; pages with the solutions, the instructor's guide, a
glossary, search; and the students' bundle, where there is a commit to make it of. --no-solutions leaves out what
students shouldn't see: the solutions and the guide.
"""

from __future__ import annotations

import argparse
import base64
import importlib.util
import io
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from datetime import UTC, datetime
from html import escape
from pathlib import Path

import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_markdown_cell, new_output
from PIL import Image

from course import instructor_guide, release, ways
from course.edition import EditionError, student_edition, unlink_missing
from course.environment import ROOT, SITE_ADVICE
from course.execution import NotebookError, read_notebook
from course.exercise_form import BEGIN, END, HEADING
from course.files import NotWritableError, require_writable
from course.syllabus import Syllabus, SyllabusError, Topic, direct_needs, load
from course.wheel import zipped
from course.workbook import finished

PARTS = Path(__file__).with_name("site_parts")
SPHINX_SECONDS = 600
MARKER = ".made-by-course-site"  # in the output folder, which is emptied before it is written again
SOLUTIONS = """\
One answer to each exercise of {name}. Others are as good: a check judges what an answer does, not how it is written.
If you are stuck, a task's folded hints give less away."""
FLAT_COLOURS = 16  # of a drawing: these few are nearly all of it
PHOTOGRAPH = 0.08  # a picture with more than this share outside of them has photographs in it
ROW = 4.0  # rem: the height of a topic in the map, in course.css as well
MAP_WIDTH = 5.0  # rem
DEFINED = re.compile(r"^(?:def|class) (\w+)", re.MULTILINE)
PROMPTS = "show", "hide"  # of folded code
# topic's number → term → the cell that explains it, and what it means
GLOSSARY = tomllib.loads((PARTS / "glossary.toml").read_text(encoding="utf-8"))


class SiteError(Exception):
    """The site can't be built; the message says why and what to do."""


def read_lessons(book: Syllabus) -> dict[str, NotebookNode]:
    """The notebooks that are no drafts, by topic, without links to those that are.

    Raises SiteError for one that can't be read, has no student edition or no outputs.
    """
    lessons = {}
    for selected in finished(book):
        try:
            lesson, _ = read_notebook(selected.path)
            if not any(cell.get("outputs") for cell in lesson.cells):
                raise NotebookError(f"has no outputs: python -m course run {selected.topic} --save")
            student_edition(lesson)
        except (NotebookError, EditionError) as error:
            raise SiteError(f"{selected.path.name}: {error}") from None
        lessons[selected.topic] = lesson
    for lesson in lessons.values():
        unlink_missing(lesson, {book.topics[number].file for number in lessons})
    return lessons


# --------------------------------------------------------------------------------------------------------------------
# the page of a notebook


def lesson_page(book: Syllabus, topic: Topic, lesson: NotebookNode, folder: Path, solutions: bool) -> NotebookNode:
    """The student edition with the outputs of the full one; figures go to files below `folder`.

    The checks' outputs are left out: they are about answers that aren't on the page.
    """
    page = student_edition(lesson)
    explaining = {cell for cell, _ in GLOSSARY.get(topic.number, {}).values()}
    cells = []
    for full, cell in zip(lesson.cells, page.cells, strict=True):
        cells.append(cell)
        if cell.cell_type == "markdown":
            # the page's contents show a heading, which should be short
            cell.source = HEADING.sub(r"Exercise \1.\2 — \3\n\n*\4 points, \5 minutes*", cell.source)
            if cell.id in explaining or HEADING.search(full.source):
                cell.source = f"({_place(topic, cell.id)})=\n{cell.source}"
            continue
        nbgrader = cell.metadata.get("nbgrader", {})
        if cell.id == "setup":
            cell.metadata["tags"] = ["hide-input"]
        if names := ", ".join(DEFINED.findall(cell.source)) if not full.outputs else "":
            # of two folded cells below each other one has no output that says what it is
            cell.metadata["mystnb"] = {f"code_prompt_{do}": f"{do.title()} the code of {names}" for do in PROMPTS}
        if not nbgrader:
            cell.outputs = list(with_picture_files(full.outputs, cell.id, topic.number, folder))
        if nbgrader.get("grade") and solutions:
            link = f"[The solution](#{_target(topic, nbgrader.grade_id)}) of this exercise"
            cells.append(new_markdown_cell(link, id=f"{cell.id}-solution"))
    buttons = ways.buttons(book, topic, _solutions(topic) if solutions else None)
    cells.insert(1, new_markdown_cell(buttons, id="site-ways"))
    page.cells = cells
    return page


def with_picture_files(outputs: list, cell: str, number: str, folder: Path) -> Iterator[NotebookNode]:
    """The outputs, with a figure as an element of HTML that names its file, its size and its text."""
    for place, output in enumerate(outputs):
        data = output.get("data", {})
        if "image/png" not in data or "text/html" in data:
            yield output
            continue
        content = base64.b64decode(data["image/png"])
        name = f"figures/{number}_{cell}_{place}.png"
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
        about = output.metadata.get("image/png", {})
        with Image.open(io.BytesIO(content)) as picture:
            width = about.get("width", picture.width)
            height = round(picture.height * width / picture.width)
            kind = "photograph" if has_photographs(picture) else "drawing"
        html = (
            f'<a href="{name}"><img class="figure {kind}" src="{name}" '
            f'alt="{escape(about.get("alt", ""))}" width="{width}" height="{height}" loading="lazy"></a>'
        )
        yield new_output("display_data", {"text/html": html})


def has_photographs(picture: Image.Image) -> bool:
    """Whether a figure holds photographs, which must not be turned inside out in dark mode."""
    colours = picture.convert("RGB").getcolors(picture.width * picture.height)
    counts = sorted((count for count, _ in colours), reverse=True)
    return sum(counts[FLAT_COLOURS:]) > PHOTOGRAPH * sum(counts)


# --------------------------------------------------------------------------------------------------------------------
# the other pages


def solutions_page(topic: Topic, lesson: NotebookNode) -> str:
    """The answers to a notebook's exercises, as Markdown."""
    lines = [f"# Solutions of {topic.number}", "", SOLUTIONS.format(name=f"[{topic.number}]({topic.file})"), ""]
    heading = task = ""
    for cell in lesson.cells:
        if cell.cell_type == "markdown" and (found := HEADING.search(cell.source)):
            heading = f"Exercise {found[1]}.{found[2]}: {found[3]}"
            task = f"[The task](#{_place(topic, cell.id)})"
        elif cell.cell_type == "code" and BEGIN in cell.source:
            code = [line for line in cell.source.split("\n") if line.strip() not in (BEGIN, END)]
            target = _target(topic, cell.metadata.nbgrader.grade_id)
            lines += [f"({target})=", f"## {heading}", "", task, "", "````python", *code, "````", ""]
    return "\n".join(lines)


def _solutions(topic: Topic) -> str:
    return f"{topic.number}_solutions"


def _target(topic: Topic, grade_id: str) -> str:
    """What a link to a solution names, from the answer cell's or the check cell's id."""
    return f"solution-{topic.number}-{grade_id.removesuffix('-check')}"


def _place(topic: Topic, cell: str) -> str:
    """What a link to a cell of the lesson's page names."""
    return f"at-{topic.number}-{cell}"


def front_page(book: Syllabus, topics: list[Topic], solutions: bool, bundle: bytes) -> str:
    """The first page: what the module is, its map, how to begin; and the contents, which the side bar shows."""
    hours = instructor_guide.render(book)["hours"]
    for topic in topics:
        name = f"{topic.number} {topic.title}"
        hours = hours.replace(name, f"[{name}]({topic.file})")
    text = (PARTS / "index.md").read_text(encoding="utf-8")
    text = text.format(
        title=f"Module {book.module.number}: {book.module.title}",
        map=topic_map(topics, book),
        check=(PARTS / "check.md").read_text(encoding="utf-8"),
        table=hours,
        begin=ways.how_to_begin(book, bundle_name(book) if bundle else "", len(bundle) / 1e6),
    )
    text += toctree("Topics", [f"{topic.number} {topic.title} <{topic.file}>" for topic in topics])
    more = ["glossary"]
    if solutions:
        text += toctree("Solutions", [f"{topic.number} <{_solutions(topic)}>" for topic in topics])
        more.append(f"Instructor's guide <{instructor_guide.NAME}>")
    return text + toctree("More", more)


def toctree(caption: str, entries: list[str]) -> str:
    """A part of the side bar."""
    return "\n".join(["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *entries, "```", ""])


def topic_map(topics: list[Topic], book: Syllabus) -> str:
    """The map as HTML: a row for each topic, and an arc to it from each one that it builds on."""
    numbers = [topic.number for topic in topics]
    arcs, rows = [], []
    for place, topic in enumerate(topics):
        needs = [number for number in direct_needs(topic, book.topics) if number in numbers]
        for number in needs:
            start = numbers.index(number)
            reach = (MAP_WIDTH - 0.9) * (1 - 0.8 ** (place - start))  # further for a longer one, within the width
            x, top, bottom = MAP_WIDTH - 0.5, (start + 0.5) * ROW, (place + 0.5) * ROW
            bend = x - reach * 1.33
            curve = f"M {x:.2f} {top:.2f} C {bend:.2f} {top:.2f} {bend:.2f} {bottom:.2f} {x:.2f} {bottom:.2f}"
            arcs.append(f'<path data-to="{topic.number}" d="{curve}" marker-end="url(#tip)"/>')
        arcs.append(f'<circle cx="{MAP_WIDTH - 0.4:.2f}" cy="{(place + 0.5) * ROW:.2f}" r="0.16"/>')
        about = f"Builds on {', '.join(needs)}" if needs else ""  # shown on a phone, which has no arcs
        page = Path(topic.file).with_suffix(".html")
        rows.append(
            f'<div class="stop" data-topic="{topic.number}" title="{about}">'
            f'<a href="{page}">{topic.number} {escape(topic.title)}</a>'
            f'<span>{escape(topic.helps_when)}</span><span class="needs">{about}</span></div>'
        )
    height = len(topics) * ROW
    return "\n".join(
        [
            '<div class="map">',
            f'<svg viewBox="0 0 {MAP_WIDTH} {height}" style="height:{height}rem" aria-hidden="true" fill="none" '
            'stroke="currentColor" stroke-width="0.09">',
            '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="6" markerHeight="6" '
            'orient="auto"><path d="M 0 0 L 10 5 L 0 10 z" fill="currentColor" stroke="none"/></marker></defs>',
            *arcs,
            "</svg>",
            '<div class="stops">',
            *rows,
            "</div>",
            "</div>",
        ]
    )


def glossary_page(topics: list[Topic]) -> str:
    """Every term with the place that explains it, in the order of the alphabet."""
    entries = {
        term: f"{meaning} [{topic.number}](#{_place(topic, cell)})"
        for topic in topics
        for term, (cell, meaning) in GLOSSARY.get(topic.number, {}).items()
    }
    lines = ["# Glossary", "", "Each term with a link to the place that explains it.", "", "```{glossary}"]
    for term in sorted(entries, key=str.lower):
        lines += [term, f"  {entries[term]}", ""]
    return "\n".join([*lines, "```", ""])


# --------------------------------------------------------------------------------------------------------------------
# building


def bundle_name(book: Syllabus) -> str:
    """The students' zip."""
    return f"module-{book.module.number}-student.zip"


def student_bundle(book: Syllabus) -> bytes:
    """The zip of what `course release` gives to students, from the files that git knows, as they are now.

    Raises ReleaseError where there is no commit, as in a copy without a history.
    """
    commit = release.read_commit(ROOT)
    return release.bundle_zip(Path(bundle_name(book)).stem, release.student_bundle(ROOT, commit, book), commit)


def write_pages(
    book: Syllabus, lessons: dict[str, NotebookNode], source: Path, extra: Path, solutions: bool, bundle: bytes = b""
) -> None:
    """Sphinx's source, and beside it the files that are copied as they are."""
    topics = [book.topics[number] for number in lessons]
    pages = {"index.md": front_page(book, topics, solutions, bundle), "glossary.md": glossary_page(topics)}
    if solutions:
        guide = book.path.with_name(instructor_guide.NAME).read_text(encoding="utf-8")
        # links to files, which the site lacks, are plain text
        pages[instructor_guide.NAME] = re.sub(r"\[([^\]]*)\]\([^)#:\s]+\)", r"\1", guide)
    (extra / "notebooks").mkdir(parents=True)
    for topic, lesson in zip(topics, lessons.values(), strict=True):
        nbformat.write(lesson_page(book, topic, lesson, extra, solutions), source / topic.file)
        if solutions:
            pages[f"{_solutions(topic)}.md"] = solutions_page(topic, lesson)
        notebook = zipped({topic.file: ways.as_file(student_edition(lesson), book)}, datetime.now(UTC))
        (extra / "notebooks" / ways.zip_of(topic)).write_bytes(notebook)
    if bundle:
        (extra / bundle_name(book)).write_bytes(bundle)
    for name, text in pages.items():
        (source / name).write_text(text, encoding="utf-8")


def build(book: Syllabus, lessons: dict[str, NotebookNode], output: Path, solutions: bool, bundle: bytes) -> None:
    """Write the site into `output`, which holds nothing else afterwards. Raises SiteError, for any warning as well."""
    if any(output.iterdir()) and not (output / MARKER).is_file():
        raise SiteError(f"{output} holds something else than a site; name another --output.")
    print("Building the pages; it takes about half a minute.", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        source, extra, made = (Path(folder, name) for name in ("source", "extra", "made"))
        source.mkdir()
        write_pages(book, lessons, source, extra, solutions, bundle)
        mathjax = Path(importlib.util.find_spec("mathjax").origin).parent / "static" / "mathjax"
        (extra / "_static" / "mathjax").mkdir(parents=True)
        for name in ("es5/tex-svg.js", "LICENSE"):
            shutil.copy(mathjax / name, extra / "_static" / "mathjax")
        command = [sys.executable, "-m", "sphinx", "-b", "html", "-q", "-j", "auto", "-W", "--keep-going",
                   "-c", PARTS, "-d", f"{folder}/read", "-D", f"html_extra_path={extra}", source, made]  # fmt: skip
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=SPHINX_SECONDS, check=False
        )
        if done.returncode:
            raise SiteError(f"Sphinx said:\n{done.stderr.strip()}")
        shutil.rmtree(output)
        shutil.copytree(made, output)
        (output / MARKER).touch()
        (output / ".nojekyll").touch()  # GitHub's pages would leave out what begins with _


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m course site`."""
    parser.add_argument("--output", type=Path, default=ROOT / "site", help="folder (default: site)")
    parser.add_argument("--no-solutions", action="store_true", help="leave out solutions and instructor's guide")


def main(args: argparse.Namespace) -> int:
    """Run the command; 1 if the site couldn't be built, 2 for wrong usage."""
    try:
        if importlib.util.find_spec("sphinx_book_theme") is None:
            raise SiteError(SITE_ADVICE)
        book = load()
        require_writable(args.output, "; name another --output")
        lessons = read_lessons(book)
        try:
            bundle = student_bundle(book)
        except (release.ReleaseError, OSError) as error:
            bundle = b""
            print(f"The site won't have the students' bundle: {error}")
        build(book, lessons, args.output, not args.no_solutions, bundle)
    except (SyllabusError, NotWritableError) as error:
        print(f"site: {error}", file=sys.stderr)
        return 2
    except SiteError as error:
        print(f"site: {error}", file=sys.stderr)
        return 1
    print(f"Built. Open {args.output / 'index.html'} in a browser.")
    return 0
