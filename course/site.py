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
import math
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from urllib.parse import quote

import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_markdown_cell, new_output
from PIL import Image

from course import release, ways
from course.edition import EditionError, student_edition, unlink_missing
from course.environment import ROOT, SITE_ADVICE
from course.execution import NotebookError, read_notebook
from course.exercise_form import BEGIN, END, HEADING
from course.files import NotWritableError, require_writable
from course.start_page import duration, reading_minutes
from course.syllabus import Syllabus, SyllabusError, Topic, direct_needs, load
from course.wheel import zipped
from course.workbook import finished

PARTS = Path(__file__).with_name("site_parts")
SPHINX_SECONDS = 600
MARKER = ".made-by-course-site"  # in the output folder, which is emptied before it is written again
GUIDE = "INSTRUCTOR_GUIDE.md"
SOLUTIONS = """\
One answer to each exercise of {name}. Others are as good: a check judges what an answer does, not how it is written.
If you are stuck, a task's folded hints give less away."""
FOLDED = {"course": "lines that fetch the course where it is missing", "setup": "imports"}  # else drawing code
FLAT_COLOURS = 16  # of a drawing: these few are nearly all of it
PHOTOGRAPH = 0.08  # a picture with more than this share outside of them has photographs in it
ROW = 4.0  # rem: the height of a topic in the map, in course.css as well
MAP_WIDTH = 5.0  # rem


class SiteError(Exception):
    """The site can't be built; the message says why and what to do."""


@dataclass(frozen=True)
class Lesson:
    """A topic, its full notebook, and the edition without solutions."""

    topic: Topic
    full: NotebookNode
    edition: NotebookNode

    @property
    def page(self) -> str:
        return Path(self.topic.file).stem

    @property
    def solutions_page(self) -> str:
        return f"{self.topic.number}_solutions"


def read_lessons(book: Syllabus, executed: Path | None = None) -> list[Lesson]:
    """The notebooks that are no drafts; `executed` is a folder with executed copies, such as `make run` writes.

    Raises SiteError for one that can't be read, has no student edition or no outputs.
    """
    lessons, problems = [], []
    for selected in finished(book):
        topic = book.topics[selected.topic]
        path = executed / topic.file if executed else topic.path
        try:
            full, _ = read_notebook(path)
            if not any(cell.get("outputs") for cell in full.cells):
                raise NotebookError(f"has no outputs: python -m course run {topic.number} --save")
            lessons.append(Lesson(topic, full, student_edition(full)))
        except (NotebookError, EditionError) as error:
            problems.append(f"{path.name}: {error}")
    if problems:
        raise SiteError("\n".join(problems))
    return lessons


# --------------------------------------------------------------------------------------------------------------------
# the page of a notebook


def lesson_page(lesson: Lesson, book: Syllabus, folder: Path, solutions: bool) -> NotebookNode:
    """The student edition with the outputs of the full one; figures go to files below `folder`.

    The checks' outputs are left out: they are about answers that aren't on the page.
    """
    page = student_edition(lesson.full)
    linked = {cell for cell, _ in read_glossary().get(lesson.topic.number, {}).values()}
    cells = []
    for full, cell in zip(lesson.full.cells, page.cells, strict=True):
        cells.append(cell)
        if cell.cell_type == "markdown":
            # the page's contents show a heading, which should be short
            cell.source = HEADING.sub(r"Exercise \1.\2 — \3\n\n*\4 points, \5 minutes*", alone_on_its_line(cell.source))
            if cell.id in linked or HEADING.search(full.source):
                cell.source = f"({_place(lesson, cell.id)})=\n{cell.source}"
        nbgrader = cell.metadata.get("nbgrader", {})
        if cell.id == "setup":
            cell.metadata["tags"] = [*cell.metadata.get("tags", []), "hide-input"]
        if "hide-input" in cell.metadata.get("tags", []):
            # a cell that hides both has two folds, of which {type} says which is which
            what = "{type}" if "hide-output" in cell.metadata.tags else FOLDED.get(cell.id, "drawing code")
            cell.metadata["mystnb"] = {"code_prompt_show": f"Show the {what}", "code_prompt_hide": f"Hide the {what}"}
        if cell.cell_type == "code" and not nbgrader:
            cell.outputs = list(with_picture_files(full.outputs, cell.id, lesson.topic.number, folder))
        if nbgrader.get("grade") and solutions:
            link = f"[The solution](#{_target(lesson, nbgrader.grade_id)}) of this exercise"
            cells.append(new_markdown_cell(link, id=f"{cell.id}-solution"))
    buttons = ways.buttons(book, lesson.topic, lesson.solutions_page if solutions else None)
    cells.insert(1, new_markdown_cell(buttons, id="site-ways"))
    page.cells = cells
    page.metadata.pop("language_info", None)
    return page


def alone_on_its_line(source: str) -> str:
    """Markdown in which <details> and its end stand between blank lines, so that what is folded is Markdown, too."""
    source = re.sub(r"(</summary>)[ \t]*\n(?!\n)", r"\1\n\n", source)
    return re.sub(r"(?<!\n)\n(</details>)", r"\n\n\1", source)


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
            f'<a href="{quote(name)}"><img class="figure {kind}" src="{quote(name)}" '
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


def solutions_page(lesson: Lesson) -> str:
    """The answers to a notebook's exercises, as Markdown."""
    topic = lesson.topic
    lines = [f"# Solutions of {topic.number}", "", SOLUTIONS.format(name=f"[{topic.number}]({topic.file})"), ""]
    heading = task = ""
    for cell in lesson.full.cells:
        if cell.cell_type == "markdown" and (found := HEADING.search(cell.source)):
            heading = f"Exercise {found[1]}.{found[2]}: {found[3]}"
            task = f"[The task](#{_place(lesson, cell.id)})"
        elif cell.cell_type == "code" and BEGIN in cell.source:
            code = [line for line in cell.source.split("\n") if line.strip() not in (BEGIN, END)]
            target = _target(lesson, cell.metadata.nbgrader.grade_id)
            lines += [f"({target})=", f"## {heading}", "", task, "", "````python", *code, "````", ""]
    return "\n".join(lines)


def _target(lesson: Lesson, grade_id: str) -> str:
    """What a link to a solution names, from the answer cell's or the check cell's id."""
    return f"solution-{lesson.topic.number}-{grade_id.removesuffix('-check')}"


def _place(lesson: Lesson, cell: str) -> str:
    """What a link to a cell of the lesson's page names."""
    return f"at-{lesson.topic.number}-{cell}"


def front_page(lessons: Sequence[Lesson], book: Syllabus, solutions: bool, bundle: bytes = b"") -> str:
    """The first page: what the module is, its map, how to begin; and the contents, which the side bar shows."""
    rows = ["| Topic | Reading | Exercises |", "| --- | --- | --- |"]
    total = 0.0
    for lesson in lessons:
        tasks = [task for cell in lesson.edition.cells for task in HEADING.findall(cell.source)]
        minutes = sum(int(task[4]) for task in tasks)
        reading = reading_minutes(lesson.edition)
        total += minutes + reading
        name = f"[{lesson.topic.number} {lesson.topic.title}]({lesson.topic.file})"
        rows.append(f"| {name} | {duration(reading)} | {len(tasks)} in {duration(minutes)} |")
    contents = [f"{lesson.topic.number} {lesson.topic.title} <{lesson.page}>" for lesson in lessons]
    more = ["glossary"]
    if solutions:
        answers = [f"{lesson.topic.number} <{lesson.solutions_page}>" for lesson in lessons]
        more += [f"Instructor's guide <{GUIDE.removesuffix('.md')}>"]
    text = (PARTS / "index.md").read_text(encoding="utf-8")
    text = text.format(
        title=f"Module {book.module.number}: {book.module.title}",
        hours=math.ceil(total / 60),
        map=topic_map([lesson.topic for lesson in lessons], book),
        check=(PARTS / "check.md").read_text(encoding="utf-8"),
        table="\n".join(rows),
        begin=ways.how_to_begin(book, bundle_name(book) if bundle else "", len(bundle) / 1e6),
    )
    text += toctree("Topics", contents)
    if solutions:
        text += toctree("Solutions", answers)
    return text + toctree("More", more)


def toctree(caption: str, entries: list[str]) -> str:
    """A part of the side bar."""
    return "\n".join(["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *entries, "```", ""])


def topic_map(topics: Sequence[Topic], book: Syllabus) -> str:
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
            f'<span>{escape(topic.helps_when or topic.owns)}</span><span class="needs">{about}</span></div>'
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


def read_glossary() -> dict[str, dict[str, tuple[str, str]]]:
    """Topic's number → term → the cell that explains it, and what it means."""
    read = tomllib.loads((PARTS / "glossary.toml").read_text(encoding="utf-8"))
    return {number: {term: tuple(entry) for term, entry in terms.items()} for number, terms in read.items()}


def glossary_page(lessons: Sequence[Lesson]) -> str:
    """Every term with the place that explains it, in the order of the alphabet."""
    terms = read_glossary()
    entries = {
        term: f"{meaning} [{lesson.topic.number}](#{_place(lesson, cell)})"
        for lesson in lessons
        for term, (cell, meaning) in terms.get(lesson.topic.number, {}).items()
    }
    lines = ["# Glossary", "", "Each term with a link to the place that explains it.", "", "```{glossary}"]
    for term in sorted(entries, key=str.lower):
        lines += [term, f"  {entries[term]}", ""]
    return "\n".join([*lines, "```", ""])


def guide_page(book: Syllabus, pages: Path) -> str:
    """The instructor's guide; links to files that the site lacks lead to the repository, or are plain text."""
    path = book.path.with_name(GUIDE)

    def mended(link: re.Match) -> str:
        text, target = link.groups()
        if target == "README.md":
            return f"[{text}](index.md)"
        if (pages / target).is_file():
            return link[0]
        place = (path.parent / target).resolve().relative_to(ROOT).as_posix()
        return f"[{text}]({book.module.repository}/blob/HEAD/{place})" if book.module.repository else text

    return re.sub(r"\[([^\]]*)\]\(([^)#:\s]+)\)", mended, path.read_text(encoding="utf-8"))


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
    book: Syllabus, lessons: Sequence[Lesson], source: Path, extra: Path, solutions: bool, bundle: bytes = b""
) -> None:
    """Sphinx's source, and beside it the files that are copied as they are."""
    for lesson in lessons:
        (source / lesson.topic.file).touch()
    for lesson in lessons:
        page = lesson_page(lesson, book, extra, solutions)
        unlink_missing(page, {lesson.topic.file for lesson in lessons})
        nbformat.write(page, source / lesson.topic.file)
        if solutions:
            (source / f"{lesson.solutions_page}.md").write_text(solutions_page(lesson), encoding="utf-8")
        unlink_missing(lesson.edition, {lesson.topic.file for lesson in lessons})
        (extra / "notebooks").mkdir(parents=True, exist_ok=True)
        notebook = zipped({lesson.topic.file: ways.as_file(lesson.edition, book)}, datetime.now(UTC))
        (extra / "notebooks" / ways.zip_of(lesson.topic)).write_bytes(notebook)
    if bundle:
        (extra / bundle_name(book)).write_bytes(bundle)
    (source / "index.md").write_text(front_page(lessons, book, solutions, bundle), encoding="utf-8")
    (source / "glossary.md").write_text(glossary_page(lessons), encoding="utf-8")
    if solutions:
        (source / GUIDE).write_text(guide_page(book, source), encoding="utf-8")


def build(book: Syllabus, lessons: Sequence[Lesson], output: Path, solutions: bool = True, bundle: bytes = b"") -> None:
    """Write the site into `output`, which holds nothing else afterwards. Raises SiteError, for any warning as well."""
    if any(output.iterdir()) and not (output / MARKER).is_file():
        raise SiteError(f"{output} holds something else than a site; name another --output.")
    print("Building the pages; it takes about half a minute.", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        source, extra, made = (Path(folder, name) for name in ("source", "extra", "made"))
        source.mkdir()
        extra.mkdir()
        write_pages(book, lessons, source, extra, solutions, bundle)
        mathjax = Path(importlib.util.find_spec("mathjax").origin).parent / "static" / "mathjax"
        (extra / "_static" / "mathjax").mkdir(parents=True)
        for name in ("es5/tex-svg.js", "LICENSE"):
            shutil.copy(mathjax / name, extra / "_static" / "mathjax")
        command = [sys.executable, "-m", "sphinx", "-b", "html", "-q", "-j", "auto", "-W", "--keep-going",
                   "-c", str(PARTS), "-D", f"html_extra_path={extra}", str(source), str(made)]  # fmt: skip
        try:
            done = subprocess.run(
                command, capture_output=True, encoding="utf-8", errors="replace", timeout=SPHINX_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            raise SiteError(f"Sphinx took more than {SPHINX_SECONDS} s and was ended.") from None
        if done.returncode or done.stderr.strip():
            raise SiteError(f"Sphinx said:\n{done.stderr.strip().replace(folder, '')}")
        for name in (".doctrees", "_sources"):
            shutil.rmtree(made / name, ignore_errors=True)
        shutil.rmtree(output)
        shutil.copytree(made, output)
        (output / MARKER).touch()
        (output / ".nojekyll").touch()  # GitHub's pages would leave out what begins with _


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m course site`."""
    parser.add_argument("--output", type=Path, default=ROOT / "site", help="folder (default: site)")
    parser.add_argument("--no-solutions", action="store_true", help="leave out solutions and instructor's guide")
    parser.add_argument(
        "--executed", type=Path, metavar="FOLDER", help="take outputs from there, e.g. executed (default: as committed)"
    )


def main(args: argparse.Namespace) -> int:
    """Run the command; 1 if the site couldn't be built, 2 for wrong usage."""
    start = time.monotonic()
    try:
        if importlib.util.find_spec("sphinx_book_theme") is None:
            raise SiteError(SITE_ADVICE)
        book = load()
        require_writable(args.output, "; name another --output")
        lessons = read_lessons(book, args.executed)
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
    size = sum(path.stat().st_size for path in args.output.rglob("*") if path.is_file()) / 1e6
    seconds = time.monotonic() - start
    print(f"{args.output / 'index.html'}: built in {seconds:.0f} s, {size:.0f} MB. Open it in a browser.")
    return 0
