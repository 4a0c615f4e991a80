"""Rules on the file, its metadata and the parts that the template asks for."""

from __future__ import annotations

import re
from collections.abc import Iterator

from course.rules.notebook import Notebook, first_line, named_topics
from course.rules.table import Complaint, rule

TAGS = ("nbval-check-output", "optional", "hide-input", "hide-output")
CELL_METADATA = ("tags", "nbgrader", "jupyter", "editable", "deletable", "slideshow")
TAKEAWAYS = "Key takeaways"
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
    "takeaways": TAKEAWAYS,
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
            yield cell.id, f"has metadata {', '.join(unknown)}; only {', '.join(CELL_METADATA)} are allowed"


@rule("tags")
def tags(notebook: Notebook) -> Iterator[Complaint]:
    for cell in notebook.cells:
        for tag in cell.tags:
            if tag not in TAGS:
                yield (
                    cell.id,
                    f"has the tag {tag!r}; allowed are {', '.join(TAGS)} (a failure on purpose: expect_error)",
                )


@rule("cell-ids")
def cell_ids(notebook: Notebook) -> Iterator[Complaint]:
    for cell in notebook.cells:
        is_random = re.fullmatch(r"(?=[a-f]*\d)[0-9a-f]{8}|[0-9a-f]{8}-[0-9a-f-]{27}", cell.id)
        if is_random or not re.fullmatch(r"[a-z0-9]+(?:-[a-z0-9]+)*", cell.id):
            what = first_line(cell.source, 40)
            yield cell.id, f"needs an id of small letters, digits and hyphens that says what it does ({what!r})"

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
    if [name for name in rows if name in GLANCE_ROWS and rows[name]] != list(GLANCE_ROWS):
        yield "glance", f"must have the rows {', '.join(GLANCE_ROWS)}, in this order, none of them empty"
    topic = notebook.topic
    said = [("Topic", topic.title), ("Category", topic.category), ("Dataset", topic.dataset), ("Time", topic.time)]
    for name, wanted in [*said, *(("Prerequisites", number) for number in topic.prerequisites)]:
        # as whole words: "~15 min" contains "5 min"
        if (
            name in rows
            and not re.search(rf"(?<!\w){re.escape(wanted)}(?!\w)", rows[name])
            and (wanted not in named_topics(rows[name]))
        ):
            yield "glance", f"row {name} says {rows[name]!r}; syllabus.toml says {wanted!r}"


@rule("headings")
def headings(notebook: Notebook) -> Iterator[Complaint]:
    capstone = notebook.topic.template == "TEMPLATE_CAPSTONE.ipynb"
    fixed = [heading for heading in REQUIRED_IDS[notebook.topic.template].values() if heading]
    between = [] if capstone else ["numbered sections (1. Title, 2. Title, …)"]
    place = fixed.index("Setup") + 1
    order = f"the H2 headings are {', '.join([*fixed[:place], *between, *fixed[place:]])}"
    order += ", and after the takeaways Appendix: Title"
    found = [text for _, text in notebook.headings_2]
    end = found.index(TAKEAWAYS) if TAKEAWAYS in found else len(found)
    appendices = [text for text in found[end:] if text.startswith("Appendix: ")]
    numbered = [] if capstone else [text for text in found if re.match(r"\d+\. \S", text)]
    for cell, text in notebook.headings_2:
        if text in numbered:
            right = text.startswith(f"{numbered.index(text) + 1}. ") and found.index(text) == place + numbered.index(
                text
            )
        else:
            right = (text in fixed or text in appendices) and found.count(text) == 1
        if not right:
            yield cell.id, f"## {text} is no heading of the template, or not in its place: {order}"
    if not capstone and not numbered:
        yield "-", f"has no numbered section: {order}"


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
