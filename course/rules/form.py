"""Rules on the file, its metadata and the parts that the template asks for."""

from __future__ import annotations

import re
from collections.abc import Iterator

from course.rules.notebook import Notebook, first_line, named_topics
from course.rules.table import Complaint, rule

TAGS = ("nbval-check-output", "optional", "hide-input", "hide-output")
CELL_METADATA = ("tags", "nbgrader", "jupyter", "editable", "deletable", "slideshow")
GLANCE_ROWS = ("Topic", "Category", "Dataset", "Time", "Prerequisites", "Teaches", "Related")
MAX_BYTES = 3_000_000

# id → the H2 heading that its cell starts with; None where another rule looks at the cell
OPENING = {
    "title": None,
    "glance": None,
    "objectives": "Learning objectives",
    "setup-heading": "Setup",
    "course": None,
    "setup": None,
    "device": None,
    "data": None,
}
CLOSING = {
    "self-assessment": "Self-assessment",
    "takeaways": "Key takeaways",
    "next": "Where this goes next",
    "references": "References",
}
_CAPSTONE = {
    "brief": "The brief",
    "architecture": "Architecture",
    "milestones": "Milestones",
    "integration-test": "Integration test",
    "evaluation": "Evaluation",
}
REQUIRED_IDS = {
    "TEMPLATE_ALGORITHM.ipynb": OPENING | CLOSING,
    "TEMPLATE_CAPSTONE.ipynb": OPENING | _CAPSTONE | CLOSING,
}
_CODE_IDS = ("course", "setup", "device", "data")


@rule("file-name")
def file_name(notebook: Notebook) -> Iterator[Complaint]:
    if notebook.path.name != notebook.topic.file:
        yield "-", f"is called {notebook.path.name}; syllabus.toml calls it {notebook.topic.file}: rename one of them"


@rule("size")
def size(notebook: Notebook) -> Iterator[Complaint]:
    if notebook.size >= MAX_BYTES:
        sizes = f"has {notebook.size / 1e6:.1f} MB, allowed are {MAX_BYTES / 1e6:.0f}"
        yield "-", f"{sizes}; make its figures smaller or fewer"


@rule("kernel")
def kernel(notebook: Notebook) -> Iterator[Complaint]:
    name = notebook.metadata.get("kernelspec", {}).get("name")
    if name != "python3":
        yield "-", f"names the kernel {name!r}; set metadata.kernelspec.name to python3, which every machine has"


@rule("metadata")
def metadata(notebook: Notebook) -> Iterator[Complaint]:
    if "widgets" in notebook.metadata:
        yield "-", "holds widget state; remove metadata.widgets"
    for cell in notebook.cells:
        unknown = [key for key in cell.metadata if key not in CELL_METADATA]
        if unknown:
            yield (
                cell.id,
                f"has metadata {', '.join(unknown)}; only {', '.join(CELL_METADATA)} are allowed",
            )


@rule("tags")
def tags(notebook: Notebook) -> Iterator[Complaint]:
    for cell in notebook.cells:
        for tag in cell.tags:
            if tag == "raises-exception":
                yield cell.id, "is tagged raises-exception, which hides that it no longer fails; use expect_error"
            elif tag.startswith("nbval-skip"):
                yield cell.id, f"is tagged {tag}, so nobody would notice when it breaks; remove the tag"
            elif tag not in TAGS:
                yield cell.id, f"has the unknown tag {tag!r}; known are {', '.join(TAGS)}"


@rule("cell-ids")
def cell_ids(notebook: Notebook) -> Iterator[Complaint]:
    for cell in notebook.cells:
        if not re.fullmatch(r"[a-z0-9]+(?:-[a-z0-9]+)*", cell.id):
            yield cell.id, "has an id that is not made of small letters, digits and single hyphens; choose one by hand"
        elif re.fullmatch(r"(?=[a-f]*\d)[0-9a-f]{8}", cell.id) or re.fullmatch(r"[0-9a-f]{8}-[0-9a-f-]{27}", cell.id):
            what = first_line(cell.source, 40)
            yield cell.id, f"has a random id; choose one that says what it does ({what!r})"

    required = REQUIRED_IDS[notebook.topic.template]
    for id_, heading in required.items():
        kind = "code" if id_ in _CODE_IDS else "markdown"
        cell = notebook.by_id.get(id_)
        if cell is None:
            yield "-", f"lacks the {kind} cell with the id {id_!r}" + (f" (## {heading})" if heading else "")
        elif cell.kind != kind:
            yield id_, f"is a {cell.kind} cell, but must be a {kind} cell"
        elif heading and cell.headings[:1] != [(2, heading)]:
            yield id_, f"must start with the heading ## {heading}"
    present = [cell.id for cell in notebook.cells if cell.id in required]
    expected = [id_ for id_ in required if id_ in present]
    for id_, wanted in zip(present, expected, strict=True):
        if id_ != wanted:
            yield id_, f"stands where {wanted!r} is expected; the order is {', '.join(expected)}"
            break


@rule("empty-cell")
def empty_cell(notebook: Notebook) -> Iterator[Complaint]:
    for cell in notebook.cells:
        if not cell.source.strip():
            yield cell.id, "is empty; remove it"


@rule("title")
def title(notebook: Notebook) -> Iterator[Complaint]:
    wanted = f"{notebook.topic.number}: {notebook.topic.title}"
    for cell in notebook.cells:
        for level, text in cell.headings:
            if level == 1 and cell.id != "title":
                yield cell.id, f"has a second H1, {text!r}; a notebook has one, in the cell 'title': use ## or ###"
    cell = notebook.by_id.get("title")
    if cell is None:
        return  # the rule "cell-ids" says so
    if cell.index != 0:
        yield "title", "must be the first cell"
    found = [text for level, text in cell.headings if level == 1]
    if found != [wanted]:
        yield "title", f"must have the one H1 '# {wanted}', as in syllabus.toml; found {found or 'none'}"
    if not cell.text.has_paragraph:
        yield "title", "lacks the opening paragraph: which question does the notebook answer, and why does it matter"


@rule("glance")
def glance(notebook: Notebook) -> Iterator[Complaint]:
    cell = notebook.by_id.get("glance")
    if cell is None or cell.kind != "markdown":
        return  # the rule "cell-ids" says so
    rows = {columns[0]: columns[1] for columns in cell.text.rows if len(columns) == 2}
    missing = [name for name in GLANCE_ROWS if not rows.get(name)]
    if missing:
        yield "glance", f"lacks the row {', '.join(missing)}, or it is empty; rows are {', '.join(GLANCE_ROWS)}"
    found = [name for name in rows if name in GLANCE_ROWS]
    if found != [name for name in GLANCE_ROWS if name in found]:
        yield "glance", f"has its rows in another order; the order is {', '.join(GLANCE_ROWS)}"
    topic = notebook.topic
    for name, wanted in (("Topic", topic.title), ("Category", topic.category), ("Dataset", topic.dataset)):
        if name in rows and wanted not in rows[name]:
            yield "glance", f"row {name} says {rows[name]!r}; syllabus.toml says {wanted!r}"
    # "~15 min" contains "5 min", so this one is compared as a whole word
    if "Time" in rows and not re.search(rf"(?<!\S){re.escape(topic.time)}(?!\w)", rows["Time"]):
        yield "glance", f"row Time says {rows['Time']!r}; syllabus.toml says {topic.time!r}"
    if "Prerequisites" in rows:
        named = named_topics(rows["Prerequisites"])
        named |= set(rows["Prerequisites"].split())  # a template's placeholder
        lacking = [need for need in topic.prerequisites if need not in named]
        if lacking:
            yield "glance", f"row Prerequisites does not name {', '.join(lacking)}, which syllabus.toml requires"


@rule("headings")
def headings(notebook: Notebook) -> Iterator[Complaint]:
    capstone = notebook.topic.template == "TEMPLATE_CAPSTONE.ipynb"
    fixed = [heading for heading in REQUIRED_IDS[notebook.topic.template].values() if heading]
    concepts = "" if capstone else " and numbered sections (1. Title, 2. Title, …) between Setup and Self-assessment"
    order = f"the H2 headings are {', '.join(fixed)}{concepts}"

    last_fixed, last_number = -1, 0
    for cell, text in notebook.headings_2:
        number = re.match(r"(\d+)\. \S", text)
        if text in fixed:
            place = fixed.index(text)
            if place <= last_fixed:
                yield cell.id, f"## {text} stands in the wrong place or twice: {order}"
            last_fixed = max(last_fixed, place)
        elif number is None or capstone:
            yield cell.id, f"## {text} is not a heading of the template: {order}; use ### within a section"
        elif last_fixed != fixed.index("Setup"):
            yield cell.id, f"## {text} stands outside the concept sections: {order}"
        else:
            if int(number[1]) != last_number + 1:
                yield cell.id, f"## {text} should have the number {last_number + 1}"
            last_number = int(number[1])
    present = {text for _, text in notebook.headings_2}
    for heading in fixed:
        if heading not in present:
            yield "-", f"lacks the heading ## {heading}: {order}"
    if not capstone and last_number == 0:
        yield "-", f"has no concept section: {order}"


@rule("objectives", not_for=("draft",))
def objectives(notebook: Notebook) -> Iterator[Complaint]:
    count = sum(cell.text.items for cell in notebook.markdown if cell.section == "Learning objectives")
    if not 4 <= count <= 6:
        yield "objectives", f"lists {count} learning objectives; give 4 to 6, one list item each"


@rule("self-assessment", not_for=("draft",))
def self_assessment(notebook: Notebook) -> Iterator[Complaint]:
    texts = [cell.text for cell in notebook.markdown if cell.section == "Self-assessment"]
    unfolded = "\n".join(text.text(folded=False) for text in texts)
    questions = re.findall(r"^(?:Q|Question\s+)?\d+[.):]", unfolded, re.MULTILINE)
    answers = re.findall(r"<details\b", "\n".join(text.text(tags=True) for text in texts))
    if not 5 <= len(questions) <= 8:
        yield "self-assessment", f"has {len(questions)} questions; number 5 to 8 of them: 1., 2., …"
    if len(answers) != len(questions):
        yield (
            "self-assessment",
            f"has {len(questions)} numbered questions but {len(answers)} folded answers; follow each question with "
            "<details><summary>Answer</summary> … </details>",
        )


@rule("folds")
def folds(notebook: Notebook) -> Iterator[Complaint]:
    for cell in notebook.markdown:
        text = cell.text.text(tags=True)
        opened, closed = len(re.findall(r"<details\b", text)), text.count("</details>")
        if opened != closed or opened > text.count("<summary>"):
            yield cell.id, f"opens {opened} <details> and closes {closed}; each needs a <summary> and a </details>"
        elif re.search(r"</summary>[ \t]*\n(?!\s*\n)[ \t]*\S", text):
            yield cell.id, "needs an empty line after </summary>, or the Markdown below it is shown as typed"
