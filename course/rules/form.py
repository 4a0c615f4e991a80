"""Rules on the file, its metadata and the parts that the template asks for."""

from __future__ import annotations

import re
from collections.abc import Iterator

from course.rules.notebook import Complaint, Notebook, first_line, rule

TAGS = ("nbval-check-output", "optional", "hide-input", "hide-output")
CELL_METADATA = ("tags", "nbgrader", "jupyter", "editable", "deletable", "slideshow")
GLANCE_ROWS = ("Topic", "Category", "Dataset", "Time", "Prerequisites", "Teaches", "Related")
MAX_BYTES = 3_000_000

CAPSTONE = "TEMPLATE_CAPSTONE.ipynb"
OPENING_IDS = ("title", "glance", "objectives", "setup-heading", "course", "setup", "device", "data")
CAPSTONE_IDS = ("brief", "architecture", "milestones", "integration-test", "evaluation")
CLOSING_IDS = ("self-assessment", "takeaways", "next", "references")
OPENING = ("Learning objectives", "Setup")
CAPSTONE_SECTIONS = ("The brief", "Architecture", "Milestones", "Integration test", "Evaluation")
CLOSING = ("Self-assessment", "Key takeaways", "Where this goes next", "References")


@rule("size")
def size(notebook: Notebook) -> Iterator[Complaint]:
    size = notebook.path.stat().st_size
    if size >= MAX_BYTES:
        yield "-", f"has {size / 1e6:.1f} MB, allowed are {MAX_BYTES / 1e6:.0f}; make its figures smaller or fewer"


@rule("metadata")
def metadata(notebook: Notebook) -> Iterator[Complaint]:
    name = notebook.document.metadata.get("kernelspec", {}).get("name")
    if name != "python3":
        yield "-", f"names the kernel {name!r}; set metadata.kernelspec.name to python3, which every machine has"
    if "widgets" in notebook.document.metadata:
        yield "-", "holds widget state; remove metadata.widgets"
    for cell in notebook.cells:
        if unknown := [key for key in cell.metadata if key not in CELL_METADATA]:
            yield cell.id, f"has metadata {', '.join(unknown)}; only {', '.join(CELL_METADATA)} are allowed"
        for tag in cell.tags:
            if tag not in TAGS:
                allowed = f"{', '.join(TAGS)} (a failure on purpose: expect_error)"
                yield cell.id, f"has the tag {tag!r}; allowed are {allowed}"


@rule("cell-ids")
def cell_ids(notebook: Notebook) -> Iterator[Complaint]:
    for cell in notebook.cells:
        is_random = re.fullmatch(r"(?=[a-f]*\d)[0-9a-f]{8}|[0-9a-f]{8}-[0-9a-f-]{27}", cell.id)
        if is_random or not re.fullmatch(r"[a-z0-9]+(?:-[a-z0-9]+)*", cell.id):
            what = first_line(cell.source, 40)
            yield cell.id, f"needs an id of small letters, digits and hyphens that says what it does ({what!r})"
    required = [*OPENING_IDS, *(CAPSTONE_IDS if notebook.topic.template == CAPSTONE else ()), *CLOSING_IDS]
    for id_ in required:
        if id_ not in notebook.by_id:
            yield "-", f"lacks the cell with the id {id_!r}"
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
        found = [text for level, text in cell.headings if level == 1]
        if cell.id == "title" and found != [wanted]:
            yield "title", f"must have the one H1 '# {wanted}', as in syllabus.toml; found {found or 'none'}"
        elif cell.id != "title" and found:
            yield cell.id, f"has a second H1, {found[0]!r}; a notebook has one, in the cell 'title': use ## or ###"


@rule("glance")
def glance(notebook: Notebook) -> Iterator[Complaint]:
    cell = notebook.by_id.get("glance")
    if cell is None:
        return  # the rule "cell-ids" says so
    table = re.findall(r"^\|\W*(\w+)\W*\| *(\S.*)\|", cell.source.replace("\\|", "|"), re.MULTILINE)
    if [name for name, _ in table if name in GLANCE_ROWS] != list(GLANCE_ROWS):
        yield "glance", f"must have the rows {', '.join(GLANCE_ROWS)}, in this order, none of them empty"
    topic, rows = notebook.topic, dict(table)
    said = [("Topic", topic.title), ("Category", topic.category), ("Dataset", topic.dataset), ("Time", topic.time)]
    for name, wanted in [*said, *(("Prerequisites", number) for number in topic.prerequisites)]:
        # as whole words: "~15 min" contains "5 min"
        if name in rows and not re.search(rf"(?<!\w){re.escape(wanted)}(?!\w)", rows[name]):
            yield "glance", f"row {name} says {rows[name].strip()!r}; syllabus.toml says {wanted!r}"


@rule("headings")
def headings(notebook: Notebook) -> Iterator[Complaint]:
    found = [(cell.id, text) for cell in notebook.cells for level, text in cell.headings if level == 2]
    texts = [text for _, text in found]
    end = texts.index("Key takeaways") if "Key takeaways" in texts else len(found)
    found = [(cell, text) for place, (cell, text) in enumerate(found) if place < end or text[:10] != "Appendix: "]
    numbered = [text for _, text in found if re.match(r"\d+\. \S", text)]
    middle = [f"{place}. {text.partition('. ')[2]}" for place, text in enumerate(numbered, start=1)]
    between = "numbered sections (1. Title, 2. Title, …)"
    if notebook.topic.template == CAPSTONE:
        middle, between = list(CAPSTONE_SECTIONS), ", ".join(CAPSTONE_SECTIONS)
    elif not numbered:
        yield "-", f"has no {between}"
    order = ", ".join([*OPENING, between, *CLOSING])
    expected = [*OPENING, *middle, *CLOSING]
    for place, wanted in enumerate(expected):
        cell, text = found[place] if place < len(found) else ("-", "nothing")
        if text != wanted:
            yield (
                cell,
                f"## {text} stands where ## {wanted} is expected; the H2 headings are {order}, and Appendix: Title",
            )
            return
    for cell, text in found[len(expected) :]:
        yield cell, f"## {text} is no heading of the template; the H2 headings are {order}, and Appendix: Title"


@rule("objectives", drafts=False)
def objectives(notebook: Notebook) -> Iterator[Complaint]:
    count = len(re.findall(r"^(?:[-*]|\d+\.) ", notebook.section("Learning objectives"), re.MULTILINE))
    if not 4 <= count <= 6:
        yield "objectives", f"lists {count} learning objectives; give 4 to 6, one list item each"


@rule("self-assessment", drafts=False)
def self_assessment(notebook: Notebook) -> Iterator[Complaint]:
    section = notebook.section("Self-assessment")
    open_text = re.sub(r"<details>.*?</details>", "", section, flags=re.DOTALL)
    questions = len(re.findall(r"^[#* ]*\d+[.)]", open_text, re.MULTILINE))
    answers = section.count("<details>")
    if not 5 <= questions <= 8:
        yield "self-assessment", f"has {questions} questions; number 5 to 8 of them: 1., 2., …"
    if answers != questions:
        form = "<details><summary>Answer</summary> … </details>"
        yield "self-assessment", f"folds {answers} answers of {questions} questions; follow each with {form}"


@rule("folds")
def folds(notebook: Notebook) -> Iterator[Complaint]:
    for cell in notebook.markdown:
        opened, closed = cell.prose.count("<details>"), cell.prose.count("</details>")
        if not opened == closed == cell.prose.count("<summary>"):
            yield cell.id, f"opens {opened} <details> and closes {closed}; each needs a <summary> and a </details>"
        elif re.search(r"</summary>[ \t]*\n[ \t]*\S", cell.prose):
            yield cell.id, "needs an empty line after </summary>, or the Markdown below it is shown as typed"
