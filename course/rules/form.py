"""Rules on the file, its metadata, the parts that the template asks for, and what the text names and links."""

from __future__ import annotations

import re
from collections.abc import Iterator

from course.rules import Complaint, Notebook, first_line, rule

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

_MACHINE_PATH = re.compile(r"(?<![\w.])/(?:home|Users|tmp)/[\w.-]*|/[\w./-]*/site-packages/|\b[A-Za-z]:\\+Users\\")


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
        if unknown := cell.metadata.keys() - set(CELL_METADATA):
            yield cell.id, f"has metadata {', '.join(unknown)}; only {', '.join(CELL_METADATA)} are allowed"
        if unknown := set(cell.tags) - set(TAGS):
            allowed = f"{', '.join(TAGS)} (a failure on purpose: expect_error)"
            yield cell.id, f"has the tag {', '.join(unknown)}; allowed are {allowed}"


@rule("cell-ids")
def cell_ids(notebook: Notebook) -> Iterator[Complaint]:
    for cell in notebook.cells:
        is_random = re.fullmatch(r"[0-9a-f]{8}|[0-9a-f]{8}-[0-9a-f-]{27}", cell.id)
        if is_random or not re.fullmatch(r"[a-z0-9]+(?:-[a-z0-9]+)*", cell.id):
            what = first_line(cell.source, 40)
            yield cell.id, f"needs an id of small letters, digits and hyphens that says what it does ({what!r})"
    for id_ in [*OPENING_IDS, *(CAPSTONE_IDS if notebook.topic.template == CAPSTONE else ()), *CLOSING_IDS]:
        if id_ not in notebook.by_id:
            yield "-", f"lacks the cell with the id {id_!r}"


@rule("title")
def title(notebook: Notebook) -> Iterator[Complaint]:
    wanted = f"{notebook.topic.number}: {notebook.topic.title}"
    found = [(cell.id, text) for cell in notebook.cells for level, text in cell.headings if level == 1]
    if found[:1] != [("title", wanted)]:
        yield "title", f"must begin with the H1 '# {wanted}', as in syllabus.toml"
    for cell, text in found[1:]:
        yield cell, f"has a second H1, {text!r}; a notebook has one, in the cell 'title': use ## or ###"


@rule("glance")
def glance(notebook: Notebook) -> Iterator[Complaint]:
    if "glance" not in notebook.by_id:
        return  # the rule "cell-ids" says so
    source = notebook.by_id["glance"].source.replace("\\|", "|")
    table = re.findall(r"^\|\W*(\w+)\W*\| *(\S.*)\|", source, re.MULTILINE)
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
    all_h2 = [(cell.id, text) for cell in notebook.cells for level, text in cell.headings if level == 2]
    found = [(cell, text) for cell, text in all_h2 if not text.startswith("Appendix: ")]
    if notebook.topic.template == CAPSTONE:
        middle, between = list(CAPSTONE_SECTIONS), ", ".join(CAPSTONE_SECTIONS)
    else:
        titles = [text.partition(". ")[2] for _, text in found if re.match(r"\d+\. \S", text)]
        middle = [f"{place}. {title}" for place, title in enumerate(titles or ["Title"], start=1)]
        between = "numbered sections (1. Title, 2. Title, …)"
    order = ", ".join([*OPENING, between, *CLOSING])
    expected = [*OPENING, *middle, *CLOSING, "nothing"]
    for (cell, text), wanted in zip([*found, ("-", "nothing")], expected, strict=False):
        if text != wanted:
            yield cell, f"## {text} stands where ## {wanted} is expected; the H2 are {order}, and Appendix: Title"
            return


@rule("counts", drafts=False)
def counts(notebook: Notebook) -> Iterator[Complaint]:
    objectives = re.findall(r"^(?:[-*]|\d+\.) ", notebook.section("Learning objectives"), re.MULTILINE)
    section = notebook.section("Self-assessment")
    unfolded = re.sub(r"<details>.*?</details>", "", section, flags=re.DOTALL)
    questions = len(re.findall(r"^[#* ]*\d+[.)]", unfolded, re.MULTILINE))
    figures = sum(len(cell.figures) for cell in notebook.code)
    for cell, found, wanted, what in (
        ("objectives", len(objectives), range(4, 7), "4 to 6 learning objectives, one list item each"),
        ("self-assessment", questions, range(5, 9), "5 to 8 numbered questions: 1., 2., …"),
        ("self-assessment", section.count("<details>"), [questions], f"{questions} <details>, one for each question"),
        ("-", len(notebook.exercises), range(4, 7), "4 to 6 exercises"),
        ("-", figures, range(6, 1000), "6 figures or more"),
    ):
        if found not in wanted:
            yield cell, f"has {found}, but is to have {what}"


@rule("folds")
def folds(notebook: Notebook) -> Iterator[Complaint]:
    for cell in notebook.markdown:
        opened, closed = cell.prose.count("<details>"), cell.prose.count("</details>")
        if not opened == closed == cell.prose.count("<summary>"):
            yield cell.id, f"opens {opened} <details> and closes {closed}; each needs a <summary> and a </details>"
        elif re.search(r"</summary>[ \t]*\n[ \t]*\S", cell.prose):
            yield cell.id, "needs an empty line after </summary>, or the Markdown below it is shown as typed"


@rule("references", drafts=False)
def references(notebook: Notebook) -> Iterator[Complaint]:
    named = set(re.findall(r"(?<![\d-])\d+-\d\d(?![\d-])", "\n".join(cell.source for cell in notebook.markdown)))
    for warning in notebook.topic.warnings:
        for number in set(warning.references) - named:
            yield "-", f"never names {number}; say in a line who teaches what: {warning.text}"


@rule("paths")
def paths(notebook: Notebook) -> Iterator[Complaint]:
    for cell in notebook.cells:
        shown = [cell.source]
        for output in cell.outputs:
            shown += [output.get("text", ""), output.get("data", {}).get("text/plain", "")]
        if found := _MACHINE_PATH.search("\n".join(shown)):
            yield cell.id, f"has the path {found[0]!r} of one machine in its source or output; use a relative one"


@rule("placeholders", drafts=False)
def placeholders(notebook: Notebook) -> Iterator[Complaint]:
    for cell in notebook.cells:
        template = re.search(r"What belongs here|\{\{[a-z]{2,}\}\}", cell.prose)
        if found := template or re.search(r"\bTODO\b", cell.source):
            yield cell.id, f"still holds {found[0]!r}; fill the place in, or remove it"


@rule("links")
def links(notebook: Notebook) -> Iterator[Complaint]:
    folder = notebook.topic.path.parent.parent / notebook.module.folder  # a template lies beside it
    for cell in notebook.markdown:
        parts = [part for block in cell.blocks for part in block.children or []]
        for part in parts:
            file = str(part.attrs.get("href") or part.attrs.get("src", "")).partition("#")[0]
            if file and not re.match(r"[a-z]+:", file) and not (folder / file).exists():
                yield cell.id, f"links to {file}, which isn't there; write it as plain text until it is"
