"""What a notebook of the module must look like: one small function a rule.

`lint_notebook` applies them all and gives findings; `course.lint` is the command around it. A rule says what is wrong
and what to do about it. The rules in RELAXED_FOR_DRAFTS are about finished work and are not applied to a template, nor
to a topic whose syllabus row says `status = "draft"`.
"""

from __future__ import annotations

import ast
import html
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from course import exercises
from course.syllabus import Module, Topic

IMPORTABLE = frozenset(sys.stdlib_module_names) | {"torch", "torchvision", "numpy", "matplotlib", "shared"}
IMPORTABLE_IN_WORDS = "torch, torchvision, numpy, matplotlib, shared and the standard library"
TAGS = ("nbval-check-output", "optional")
CELL_METADATA = ("tags", "nbgrader", "jupyter", "editable", "deletable", "slideshow")
GLANCE_ROWS = ("Topic", "Category", "Dataset", "Time", "Prerequisites", "Owns", "Uses")

# id → the H2 heading that its cell starts with; None where another rule looks at the cell
_OPENING = {
    "title": None,
    "glance": None,
    "objectives": "Learning objectives",
    "setup-heading": "Setup",
    "setup": None,
    "device": None,
    "data": None,
}
_CLOSING = {
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
    "TEMPLATE_ALGORITHM.ipynb": _OPENING | _CLOSING,
    "TEMPLATE_CAPSTONE.ipynb": _OPENING | _CAPSTONE | _CLOSING,
}
_CODE_IDS = ("setup", "device", "data")

MAX_LINES = 45
USUAL_LINES = 25
USUAL_SHARE = 0.8
MIN_WORDS, MAX_WORDS = 2000, 4500
MIN_FIGURES = 6
MAX_CHECKED_CHARACTERS = 5000
MAX_BYTES = 3_000_000

_EXERCISE_HEADING = re.compile(r"Exercise (\S+)\.(\d+) — (\S.*) \((\d+) points?, (\d+) minutes?\)")
_MACHINE_PATH = re.compile(
    r"(?<![\w.])/(?:home|Users|root|tmp|var/folders)/[\w.-]*"
    r"|(?<![\w.])/[\w./-]*/site-packages/"
    r"|(?<!\w)[A-Za-z]:\\+Users\\"
)
_MEMORY_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}\b")
_TOPIC_NUMBER = re.compile(r"(?<![\d-])([1-9]\d?-\d\d)(?![\d-])")
# %magic, !command, ?name, name?, and name = %magic or !command
_MAGIC = re.compile(r"^\s*(?:[%!?]|[\w, ]+=\s*[%!])|^[^#]*\?\s*$")

Complaint = tuple[str, str]  # (cell id or "-", message)


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: where (file, cell id or "-"), which rule, and what to do."""

    file: str
    cell: str
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.file}: {self.cell}: {self.rule}: {self.message}"


@dataclass
class Cell:
    """A cell as the rules see it."""

    index: int
    id: str
    kind: str
    source: str
    metadata: dict
    outputs: list[dict]
    execution_count: int | None
    section: str = ""  # the H2 heading it stands under

    @property
    def tags(self) -> list[str]:
        return self.metadata.get("tags", [])

    @cached_property
    def tree(self) -> ast.Module | None:
        """The parsed code; None when it is not Python (the rule "syntax" says so)."""
        try:
            return ast.parse(self.source)
        except (SyntaxError, ValueError):
            return None

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree)) if self.kind == "code" and self.tree else []

    @cached_property
    def calls(self) -> list[str]:
        """Dotted names of everything called: "get_device", "os._exit", "check.swish"."""
        return [ast.unparse(node.func) for node in self.nodes if isinstance(node, ast.Call)]

    @cached_property
    def headings(self) -> list[tuple[int, str]]:
        """(level, text) of each Markdown heading outside fenced code."""
        if self.kind != "markdown":
            return []
        found = re.findall(r"^(#{1,6})[ \t]+(.+?)[ \t]*#*$", _without_fences(self.source), re.MULTILINE)
        return [(len(signs), text) for signs, text in found]

    @cached_property
    def texts(self) -> list[str]:
        """The textual outputs: streams, text/plain, text/html, SVG."""
        texts = []
        for output in self.outputs:
            texts.append(_joined(output.get("text", "")))
            for kind, value in output.get("data", {}).items():
                if kind.startswith("text/") or kind == "image/svg+xml":
                    texts.append(_joined(value))
        return [text for text in texts if text.strip()]


@dataclass
class Page:
    """A notebook together with what the syllabus says about it."""

    path: Path
    size: int
    metadata: dict
    cells: list[Cell]
    topic: Topic
    module: Module
    by_id: dict[str, Cell] = field(init=False)

    def __post_init__(self) -> None:
        self.by_id = {cell.id: cell for cell in self.cells}
        section = ""
        for cell in self.cells:
            section = next((text for level, text in cell.headings if level == 2), section)
            cell.section = section

    @property
    def code(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.kind == "code"]

    @property
    def markdown(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.kind == "markdown"]

    @property
    def headings_2(self) -> list[tuple[Cell, str]]:
        return [(cell, text) for cell in self.cells for level, text in cell.headings if level == 2]


Rule = Callable[[Page], Iterator[Complaint]]


# --- entry points -----------------------------------------------------------------------------------------------------


def lint_notebook(path: Path, topic: Topic, module: Module) -> list[Finding]:
    """Hold one notebook file against its topic. Never raises for what is in the file."""
    try:
        raw = path.read_bytes()
        document = json.loads(raw)
    except OSError as error:
        return [Finding(str(path), "-", "json", f"cannot be read: {error.strerror or error}")]
    except ValueError as error:
        return [Finding(str(path), "-", "json", f"is not a JSON file, so not a notebook: {error}; save it again")]
    return lint_document(document, path, len(raw), topic, module)


def lint_document(document: object, path: Path, size: int, topic: Topic, module: Module) -> list[Finding]:
    """Hold a parsed notebook against its topic; `size` is the file's size in bytes."""
    invalid = list(_invalid(document))
    if invalid:
        # the other rules rely on the format
        return [Finding(str(path), cell, "nbformat", message) for cell, message in invalid]
    cells = [
        Cell(
            index=index,
            id=cell["id"],
            kind=cell["cell_type"],
            source=_joined(cell["source"]),
            metadata=cell["metadata"],
            outputs=cell.get("outputs", []),
            execution_count=cell.get("execution_count"),
        )
        for index, cell in enumerate(document["cells"])
    ]
    page = Page(path, size, document["metadata"], cells, topic, module)
    findings = [
        (Finding(str(path), cell, name, message))
        for name, rule in RULES.items()
        if not (topic.is_draft and name in RELAXED_FOR_DRAFTS)
        for cell, message in rule(page)
    ]
    place = {cell.id: cell.index for cell in cells}
    return sorted(findings, key=lambda finding: place.get(finding.cell, -1))


def named_topics(text: str) -> set[str]:
    """Topic numbers that a text names, ranges such as "15-01 to 15-09" included."""
    numbers = set(_TOPIC_NUMBER.findall(text))
    for first, last in re.findall(r"(\d+-\d\d)\s*(?:to|through|–|—|…)\s*(\d+-\d\d)", text):
        (module, start), (other, stop) = first.split("-"), last.split("-")
        if module == other:
            numbers |= {f"{module}-{topic:02d}" for topic in range(int(start), int(stop) + 1)}
    return numbers


# --- texts ------------------------------------------------------------------------------------------------------------


def _joined(value: str | list[str]) -> str:
    return value if isinstance(value, str) else "".join(value)


def _without_fences(text: str) -> str:
    return re.sub(r"^[ \t]*(```+|~~~+).*?(?:^[ \t]*\1[ \t]*$|\Z)", "", text, flags=re.MULTILINE | re.DOTALL)


def _without_code(text: str, code: str = "") -> str:
    """Markdown without fenced code; inline code becomes `code`."""
    return re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", code, _without_fences(text), flags=re.DOTALL)


def _unfolded(text: str) -> str:
    """Markdown without its <details> parts."""
    return re.sub(r"<details.*?(?:</details>|\Z)", "", text, flags=re.DOTALL)


def _prose(text: str, code: str = "") -> str:
    """Markdown without fenced code, comments, HTML tags, link targets and formulas; inline code becomes `code`."""
    text = _without_code(text, code)
    text = re.sub(r"<!--.*?-->", " ", text, flags=re.DOTALL)
    text = re.sub(r"</?[A-Za-z][^>]*>", " ", text)
    text = re.sub(r"\$\$.+?\$\$|(?<!\\)\$(?!\s)[^$\n]+\$", " formula ", text, flags=re.DOTALL)
    text = re.sub(r"!\[([^\]]*)\]", r"[\1]", text)
    return re.sub(r"\]\([^)]*\)", "]", text)


def _plain(text: str) -> str:
    """A table cell as a reader sees it: links, emphasis, code marks, escapes and entities resolved."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"\\([^\w\s])", r"\1", text)
    return html.unescape(re.sub(r"\*\*|`", "", text)).strip()


def _first_line(text: str, width: int = 90) -> str:
    lines = text.strip().splitlines() or [""]
    return lines[0] if len(lines[0]) <= width else lines[0][:width] + "…"


def _listed(names: Iterator[str] | list[str] | tuple[str, ...]) -> str:
    return ", ".join(names)


# --- the file ---------------------------------------------------------------------------------------------------------


def _invalid(document: object) -> Iterator[Complaint]:
    """What nbformat's own schema says, plus ids that are there and unique."""
    # here, because it is a third of the command's start-up time, and only this rule needs it
    from nbformat.validator import iter_validate

    if not isinstance(document, dict) or document.get("nbformat") != 4 or document.get("nbformat_minor") != 5:
        yield "-", "is not in notebook format 4.5, which gives cells their ids; convert it with nbformat.convert"
        return
    error = next(iter(iter_validate(document, version=4, version_minor=document["nbformat_minor"])), None)
    if error is not None:
        where = list(error.absolute_path)
        place = "/".join(str(part) for part in where) or "the notebook"
        cell = "-"
        if len(where) > 1 and where[0] == "cells":
            broken = document["cells"][where[1]]
            named = isinstance(broken, dict) and "id" in broken
            cell = str(broken["id"]) if named else f"cell {where[1] + 1}"
        yield cell, f"breaks the notebook schema at {place}: {_first_line(error.message, 160)}"
        return
    seen: dict[str, int] = {}
    for index, cell in enumerate(document["cells"], start=1):
        if cell["id"] in seen:
            yield cell["id"], f"cells {seen[cell['id']]} and {index} have the same id; give one of them another"
        seen[cell["id"]] = index


def file_name(page: Page) -> Iterator[Complaint]:
    if page.path.name != page.topic.file:
        yield "-", f"is called {page.path.name}; syllabus.toml calls it {page.topic.file}: rename one of them"


def size(page: Page) -> Iterator[Complaint]:
    if page.size >= MAX_BYTES:
        yield "-", f"has {page.size / 1e6:.1f} MB, allowed are {MAX_BYTES / 1e6:.0f}; make its figures smaller or fewer"


def kernel(page: Page) -> Iterator[Complaint]:
    name = page.metadata.get("kernelspec", {}).get("name")
    if name != "python3":
        yield "-", f"names the kernel {name!r}; set metadata.kernelspec.name to python3, which every machine has"


def metadata(page: Page) -> Iterator[Complaint]:
    if "widgets" in page.metadata:
        yield "-", "holds widget state; remove metadata.widgets"
    for cell in page.cells:
        unknown = [key for key in cell.metadata if key not in CELL_METADATA]
        if unknown:
            yield cell.id, f"has metadata {_listed(unknown)}; allowed are {_listed(CELL_METADATA)}: remove the others"


def tags(page: Page) -> Iterator[Complaint]:
    for cell in page.cells:
        for tag in cell.tags:
            if tag == "raises-exception":
                yield cell.id, "is tagged raises-exception, which hides that it no longer fails; use expect_error"
            elif tag.startswith("nbval-skip"):
                yield cell.id, f"is tagged {tag}, so nobody would notice when it breaks; remove the tag"
            elif tag not in TAGS:
                yield cell.id, f"has the unknown tag {tag!r}; known are {_listed(TAGS)}"


# --- structure --------------------------------------------------------------------------------------------------------


def cell_ids(page: Page) -> Iterator[Complaint]:
    for cell in page.cells:
        if not re.fullmatch(r"[a-z0-9]+(?:-[a-z0-9]+)*", cell.id):
            yield cell.id, "has an id that is not made of small letters, digits and single hyphens; choose one by hand"
        elif re.fullmatch(r"(?=[a-f]*\d)[0-9a-f]{8}", cell.id) or re.fullmatch(r"[0-9a-f]{8}-[0-9a-f-]{27}", cell.id):
            what = _first_line(cell.source, 40)
            yield cell.id, f"has a random id; choose one that says what it does ({what!r})"

    required = REQUIRED_IDS[page.topic.template]
    for id_, heading in required.items():
        kind = "code" if id_ in _CODE_IDS else "markdown"
        cell = page.by_id.get(id_)
        if cell is None:
            yield "-", f"lacks the {kind} cell with the id {id_!r}" + (f" (## {heading})" if heading else "")
        elif cell.kind != kind:
            yield id_, f"is a {cell.kind} cell, but must be a {kind} cell"
        elif heading and cell.headings[:1] != [(2, heading)]:
            yield id_, f"must start with the heading ## {heading}"
    present = [cell.id for cell in page.cells if cell.id in required]
    expected = [id_ for id_ in required if id_ in present]
    for id_, wanted in zip(present, expected, strict=True):
        if id_ != wanted:
            yield id_, f"stands where {wanted!r} is expected; the order is {_listed(expected)}"
            break


def empty_cell(page: Page) -> Iterator[Complaint]:
    for cell in page.cells:
        if not cell.source.strip():
            yield cell.id, "is empty; remove it"


def title(page: Page) -> Iterator[Complaint]:
    wanted = f"{page.topic.number}: {page.topic.title}"
    for cell in page.cells:
        for level, text in cell.headings:
            if level == 1 and cell.id != "title":
                yield cell.id, f"has a second H1, {text!r}; a notebook has one, in the cell 'title': use ## or ###"
    cell = page.by_id.get("title")
    if cell is None:
        return  # the rule "cell-ids" says so
    if cell.index != 0:
        yield "title", "must be the first cell"
    found = [text for level, text in cell.headings if level == 1]
    if found != [wanted]:
        yield "title", f"must have the one H1 '# {wanted}', as in syllabus.toml; found {found or 'none'}"
    if not re.sub(r"^#.*$", "", cell.source, flags=re.MULTILINE).strip():
        yield "title", "lacks the opening paragraph: which question does the notebook answer, and why does it matter"


def glance(page: Page) -> Iterator[Complaint]:
    cell = page.by_id.get("glance")
    if cell is None:
        return  # the rule "cell-ids" says so
    rows: dict[str, str] = {}
    for line in cell.source.splitlines():
        columns = [_plain(part) for part in re.split(r"(?<!\\)\|", line.strip())[1:-1]]
        if len(columns) == 2:
            rows[columns[0]] = columns[1]
    missing = [name for name in GLANCE_ROWS if not rows.get(name)]
    if missing:
        yield "glance", f"lacks the row {_listed(missing)}, or it is empty; rows are {_listed(GLANCE_ROWS)}"
    found = [name for name in rows if name in GLANCE_ROWS]
    if found != [name for name in GLANCE_ROWS if name in found]:
        yield "glance", f"has its rows in another order; the order is {_listed(GLANCE_ROWS)}"
    topic = page.topic
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
            yield "glance", f"row Prerequisites does not name {_listed(lacking)}, which syllabus.toml requires"


def headings(page: Page) -> Iterator[Complaint]:
    capstone = page.topic.template == "TEMPLATE_CAPSTONE.ipynb"
    fixed = [heading for heading in REQUIRED_IDS[page.topic.template].values() if heading]
    concepts = "" if capstone else " and numbered sections (1. Title, 2. Title, …) between Setup and Self-assessment"
    order = f"the H2 headings are {_listed(fixed)}{concepts}"

    last_fixed, last_number = -1, 0
    for cell, text in page.headings_2:
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
    present = {text for _, text in page.headings_2}
    for heading in fixed:
        if heading not in present:
            yield "-", f"lacks the heading ## {heading}: {order}"
    if not capstone and last_number == 0:
        yield "-", f"has no concept section: {order}"


def objectives(page: Page) -> Iterator[Complaint]:
    text = "\n".join(cell.source for cell in page.markdown if cell.section == "Learning objectives")
    count = len(re.findall(r"^(?:[-*+]|\d+[.)])\s+\S", text, re.MULTILINE))
    if not 4 <= count <= 6:
        yield "objectives", f"lists {count} learning objectives; give 4 to 6, one list item each"


def self_assessment(page: Page) -> Iterator[Complaint]:
    text = "\n".join(_without_code(cell.source) for cell in page.markdown if cell.section == "Self-assessment")
    questions = re.findall(r"^(?:#{3,6}\s+)?(?:\*\*)?(?:Q|Question\s+)?\d+[.):]", _unfolded(text), re.MULTILINE)
    answers = re.findall(r"<details\b", text)
    if not 5 <= len(questions) <= 8:
        yield "self-assessment", f"has {len(questions)} questions; number 5 to 8 of them: 1., 2., …"
    if len(answers) != len(questions):
        yield (
            "self-assessment",
            f"has {len(questions)} numbered questions but {len(answers)} folded answers; follow each question with "
            "<details><summary>Answer</summary> … </details>",
        )


def folds(page: Page) -> Iterator[Complaint]:
    for cell in page.markdown:
        text = _without_code(cell.source)
        opened, closed = len(re.findall(r"<details\b", text)), text.count("</details>")
        if opened != closed or opened > text.count("<summary>"):
            yield cell.id, f"opens {opened} <details> and closes {closed}; each needs a <summary> and a </details>"
        elif re.search(r"</summary>[ \t]*\n(?!\s*\n)[ \t]*\S", text):
            yield cell.id, "needs an empty line after </summary>, or the Markdown below it is shown as typed"


# --- prose ------------------------------------------------------------------------------------------------------------


def words(page: Page) -> Iterator[Complaint]:
    count = sum(len(re.findall(r"\w[\w'’-]*", _prose(cell.source, code=" code "))) for cell in page.markdown)
    if not MIN_WORDS <= count <= MAX_WORDS:
        yield "-", f"has {count:,} words of prose; the standard asks for {MIN_WORDS:,} to {MAX_WORDS:,}"


def prose(page: Page) -> Iterator[Complaint]:
    for cell in page.markdown:
        text = _prose(cell.source)
        shout = re.search(r"[^\n]{0,30}!", text)
        if shout:
            yield cell.id, f"has an exclamation mark in {shout[0].strip()!r}; end the sentence with a full stop"
        filler = re.search(r"[^\n]{0,20}\bsimply\b[^\n]{0,20}", text, re.IGNORECASE)
        if filler:
            yield cell.id, f"says 'simply' in {filler[0].strip()!r}; leave the word out"


def references(page: Page) -> Iterator[Complaint]:
    named = named_topics("\n".join(cell.source for cell in page.markdown))
    for warning in page.topic.warnings:
        for number in warning.references:
            if number not in named:
                yield "-", f"never names {number}; say in a line who teaches what: {warning.text}"


def figures(page: Page) -> Iterator[Complaint]:
    count = sum(
        bool({"image/png", "image/svg+xml"} & set(output.get("data", {})))
        for cell in page.code
        for output in cell.outputs
    )
    if count < MIN_FIGURES:
        yield "-", f"shows {count} figures; the standard asks for at least {MIN_FIGURES}"


def paths(page: Page) -> Iterator[Complaint]:
    for cell in page.cells:
        for where, texts in (("source", [cell.source]), ("output", cell.texts)):
            found = next((match for match in map(_MACHINE_PATH.search, texts) if match), None)
            if found:
                yield cell.id, f"has the path {found[0]!r} of one machine in its {where}; use a relative one"


# --- code -------------------------------------------------------------------------------------------------------------


def syntax(page: Page) -> Iterator[Complaint]:
    for cell in page.code:
        try:
            ast.parse(cell.source)
        except (SyntaxError, ValueError) as error:
            line = getattr(error, "lineno", None) or 1
            lines = cell.source.splitlines()
            text = lines[line - 1].strip() if line <= len(lines) else ""
            text = lines[0] if cell.source.startswith("%%") else text
            if _MAGIC.search(text):
                yield cell.id, f"uses IPython syntax, {text!r}; write plain Python, which runs everywhere"
            else:
                yield cell.id, f"is not valid Python: line {line}: {getattr(error, 'msg', error)}: {text!r}"
        if "get_ipython" in {node.id for node in cell.nodes if isinstance(node, ast.Name)}:
            yield cell.id, "uses get_ipython, which is a magic by another name; write plain Python"


def leaving_early(page: Page) -> Iterator[Complaint]:
    for cell in page.code:
        for name in cell.calls:
            if name in ("exit", "quit", "sys.exit", "os._exit", "os.abort"):
                yield cell.id, f"calls {name}(), after which the notebook counts as passed; raise an exception instead"


def device_cell(page: Page) -> Iterator[Complaint]:
    callers = [cell.id for cell in page.code for name in cell.calls if name.split(".")[-1] == "get_device"]
    if page.module.gpu_required and not callers:
        place = "device" if "device" in page.by_id else "-"
        yield place, "never calls get_device(); the cell 'device' must: device = get_device()"
    for id_ in callers:
        if id_ != "device":
            yield id_, "calls get_device(); only the cell 'device' does, others use the variable device"
    if callers.count("device") > 1:
        yield "device", "calls get_device() more than once; call it once: device = get_device()"


def imports(page: Page) -> Iterator[Complaint]:
    for cell in page.code:
        guarded = {id(node) for attempt in cell.nodes if _catches_import_error(attempt) for node in _inside(attempt)}
        for node in cell.nodes:
            for name in _imported(node):
                allowed = name.split(".")[0] in IMPORTABLE
                if "optional" in cell.tags:
                    if not allowed and id(node) not in guarded:
                        yield cell.id, f"imports {name} outside try … except ImportError, so the notebook needs it"
                elif cell.id != "setup":
                    yield cell.id, f"imports {name}; only the cell 'setup' imports: move it there"
                elif not allowed:
                    yield cell.id, f"imports {name}; allowed are {IMPORTABLE_IN_WORDS}"


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return ["." * node.level + (node.module or "")]
    if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("__import__", "import_module"):
        first = node.args[0] if node.args else None
        return [first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else "something"]
    return []


def _catches_import_error(node: ast.AST) -> bool:
    if not isinstance(node, ast.Try):
        return False
    types = [handler.type for handler in node.handlers if handler.type]
    caught = {name.id for type_ in types for name in ast.walk(type_) if isinstance(name, ast.Name)}
    return bool(caught & {"ImportError", "ModuleNotFoundError"})


def _inside(attempt: ast.Try) -> Iterator[ast.AST]:
    for statement in attempt.body:
        yield from ast.walk(statement)


def cell_length(page: Page) -> Iterator[Complaint]:
    lengths = {cell.id: len(cell.source.strip().splitlines()) for cell in page.code}
    for id_, length in lengths.items():
        if length > MAX_LINES:
            yield id_, f"has {length} lines, the most is {MAX_LINES}; split it: one idea a cell"
    long = [id_ for id_, length in lengths.items() if length > USUAL_LINES]
    if len(long) > (1 - USUAL_SHARE) * len(lengths):
        share = f"{len(long)} of {len(lengths)} code cells have more than {USUAL_LINES} lines"
        yield "-", f"{share}; at most {1 - USUAL_SHARE:.0%} may: shorten some of {_listed(long)}"


# --- outputs ----------------------------------------------------------------------------------------------------------


def executed(page: Page) -> Iterator[Complaint]:
    for place, cell in enumerate(page.code, start=1):
        if cell.execution_count != place:
            ran = "has not been run" if cell.execution_count is None else f"was run as number {cell.execution_count}"
            yield cell.id, f"{ran}, but is code cell {place}; restart the kernel, run all cells and save"
            return


def outputs(page: Page) -> Iterator[Complaint]:
    for cell in page.code:
        for output in cell.outputs:
            if output["output_type"] == "error":
                what = f"{output['ename']}: {_first_line(output['evalue'])}"
                yield cell.id, f"has stored an error, {what}; mend it and run all cells"
            elif output.get("name") == "stderr":
                text = _first_line(_joined(output["text"]))
                yield cell.id, f"wrote to stderr: {text!r}; use the current API, or catch and explain the warning"


def checked_output(page: Page) -> Iterator[Complaint]:
    for cell in page.cells:
        if "nbval-check-output" not in cell.tags:
            continue
        if cell.kind != "code":
            yield cell.id, "is tagged nbval-check-output but is not a code cell; remove the tag"
            continue
        if cell.execution_count is None:
            continue  # the rule "executed" says so
        text = "\n".join(cell.texts)
        if not text:
            yield cell.id, "is tagged nbval-check-output but has no stored text, so nothing is compared; print a result"
        elif len(text) > MAX_CHECKED_CHARACTERS:
            most = f"{MAX_CHECKED_CHARACTERS:,}"
            yield cell.id, f"has {len(text):,} characters of checked output, the most is {most}; print less"
        elif _MEMORY_ADDRESS.search(text):
            yield cell.id, f"prints a memory address, {_MEMORY_ADDRESS.search(text)[0]}, which differs in every run"


# --- exercises --------------------------------------------------------------------------------------------------------


def _exercises(page: Page) -> dict[str, dict[str, Cell]]:
    """Slug → {"task": cell, "answer": cell, "check": cell}, as far as they exist, in the order of the page."""
    found: dict[str, dict[str, Cell]] = {}
    for cell in page.cells:
        match = re.fullmatch(r"ex-(.+?)(-task|-check)?", cell.id)
        if match:
            found.setdefault(match[1], {})[(match[2] or "-answer")[1:]] = cell
    return found


def exercise_cells(page: Page) -> Iterator[Complaint]:
    for slug, cells in _exercises(page).items():
        wanted = {"task": f"ex-{slug}-task", "answer": f"ex-{slug}", "check": f"ex-{slug}-check"}
        lacking = [wanted[part] for part in wanted if part not in cells]
        if lacking:
            some = next(iter(cells.values()))
            yield some.id, f"has no partner {_listed(lacking)}; an exercise is a task, an answer and a check cell"
            continue
        for part, kind in (("task", "markdown"), ("answer", "code"), ("check", "code")):
            if cells[part].kind != kind:
                yield cells[part].id, f"is a {cells[part].kind} cell, but must be a {kind} cell"
        start = cells["task"].index
        if [cells["answer"].index, cells["check"].index] != [start + 1, start + 2]:
            yield wanted["task"], f"must be followed directly by {wanted['answer']} and {wanted['check']}"
        if cells["task"].section in (*_OPENING.values(), *_CLOSING.values()):
            yield wanted["task"], f"stands under ## {cells['task'].section}; put it in the section that it practises"
    for cell in page.markdown:
        for _, text in cell.headings:
            if text.startswith("Exercise ") and not re.fullmatch(r"ex-.+-task", cell.id):
                yield cell.id, f"has the heading {text!r}; an exercise's cell has an id like ex-swish-task"


def exercise_headings(page: Page) -> Iterator[Complaint]:
    number = page.topic.number
    for place, cells in enumerate(_exercises(page).values(), start=1):
        task = cells.get("task")
        if task is None:
            continue
        form = f"### Exercise {number}.{place} — Title (10 points, 20 minutes)"
        level, text = task.headings[0] if task.headings else (0, "")
        match = _EXERCISE_HEADING.fullmatch(text)
        if level != 3 or match is None or not task.source.startswith("### "):
            yield task.id, f"must start with a heading of the form '{form}'"
            continue
        if (match[1], int(match[2])) != (number, place):
            yield task.id, f"is numbered {match[1]}.{match[2]}, but is exercise {number}.{place}"
        if not 10 <= int(match[5]) <= 60:
            yield task.id, f"is to take {match[5]} minutes; an exercise takes 10 to 60"
        check = cells.get("check")
        points = check.metadata.get("nbgrader", {}).get("points") if check else None
        if points is not None and points != int(match[4]):
            yield task.id, f"promises {match[4]} points, but the metadata of {check.id} gives {points}"


def exercise_hints(page: Page) -> Iterator[Complaint]:
    for cells in _exercises(page).values():
        task = cells.get("task")
        if task is None:
            continue
        text = _without_code(task.source)
        if "<details" not in text:
            yield task.id, "has no folded hint; add <details><summary>Hint</summary> … </details>"
        elif re.search(r"^\W*hints?\b", _unfolded(text), re.IGNORECASE | re.MULTILINE):
            yield task.id, "has a hint in the open; put it inside <details>"


def exercise_metadata(page: Page) -> Iterator[Complaint]:
    parts = {cell.id: part for cells in _exercises(page).values() for part, cell in cells.items()}
    for cell in page.cells:
        part = parts.get(cell.id, "")
        found = cell.metadata.get("nbgrader")
        if part == "answer":
            wanted = exercises.answer_metadata(cell.id)
        elif part == "check":
            points = found.get("points") if isinstance(found, dict) else None
            whole = isinstance(points, int) and not isinstance(points, bool) and points > 0
            wanted = exercises.check_metadata(cell.id, points if whole else 10)
        else:
            if found is not None:
                yield cell.id, "has nbgrader metadata, but is no answer or check cell; remove it"
            continue
        if json.dumps(found, sort_keys=True) != json.dumps(wanted, sort_keys=True):
            yield cell.id, f"needs the nbgrader metadata {json.dumps(wanted)}; it has {json.dumps(found)}"


def exercise_markers(page: Page) -> Iterator[Complaint]:
    answers = {cells["answer"].id for cells in _exercises(page).values() if "answer" in cells}
    for cell in page.code:
        marked = [line for line in cell.source.splitlines() if re.search(r"(BEGIN|END) SOLUTION", line)]
        if cell.id not in answers:
            if marked:
                yield cell.id, "has solution markers, but is no answer cell; remove them"
            continue
        crooked = [line for line in marked if line.strip() not in (exercises.BEGIN, exercises.END)]
        if crooked:
            exact = f"{exercises.BEGIN} or {exercises.END}"
            yield cell.id, f"has a marker {crooked[0].strip()!r}; it must be exactly {exact}"
        elif not marked:
            yield cell.id, f"has no {exercises.BEGIN} … {exercises.END}, so the student edition would hold the solution"
        else:
            yield from _student_form(cell)


def _student_form(cell: Cell) -> Iterator[Complaint]:
    """The stub that a student gets must be Python that fails only when it is called, and must say what to return."""
    try:
        tree = ast.parse(exercises.student_source(cell.source))
    except exercises.MarkerError as error:
        yield cell.id, f"{error}; pair the markers"
        return
    except SyntaxError as error:
        yield cell.id, f"is not valid Python without its solution: line {error.lineno}: {error.msg}; move the markers"
        return
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    deferred = {id(node) for function in functions for node in ast.walk(function)}
    stubs = [node for node in ast.walk(tree) if isinstance(node, ast.Raise)]
    if any(id(node) not in deferred for node in stubs if "NotImplementedError" in ast.unparse(node)):
        yield cell.id, "has a solution outside a function, so the student edition would fail there; indent the markers"
    definitions = [*functions, *(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))]
    if not any(ast.get_docstring(node) for node in definitions):
        yield cell.id, "has no docstring outside the markers; the stub must say what to take and what to return"


def exercise_checks(page: Page) -> Iterator[Complaint]:
    for cells in _exercises(page).values():
        check = cells.get("check")
        if check is not None and check.tree and not any(name.startswith("check.") for name in check.calls):
            yield check.id, "does not call check.something(…), so it checks nothing"


def exercise_import(page: Page) -> Iterator[Complaint]:
    wanted = f"topic_{page.topic.number.replace('-', '_')}"
    setup = page.by_id.get("setup")
    if setup is None or not _exercises(page):
        return
    froms = [node for node in setup.nodes if isinstance(node, ast.ImportFrom) and node.module == "shared.checks"]
    if (wanted, "check") not in [(alias.name, alias.asname) for node in froms for alias in node.names]:
        yield "setup", f"must have the line: from shared.checks import {wanted} as check"


def exercise_count(page: Page) -> Iterator[Complaint]:
    count = len(_exercises(page))
    if not 4 <= count <= 6:
        yield "-", f"has {count} exercises; the standard asks for 4 to 6"


RULES: dict[str, Rule] = {
    "file-name": file_name,
    "size": size,
    "kernel": kernel,
    "metadata": metadata,
    "tags": tags,
    "cell-ids": cell_ids,
    "empty-cell": empty_cell,
    "title": title,
    "glance": glance,
    "headings": headings,
    "objectives": objectives,
    "self-assessment": self_assessment,
    "folds": folds,
    "words": words,
    "prose": prose,
    "references": references,
    "figures": figures,
    "paths": paths,
    "syntax": syntax,
    "exit": leaving_early,
    "device-cell": device_cell,
    "imports": imports,
    "cell-length": cell_length,
    "executed": executed,
    "outputs": outputs,
    "checked-output": checked_output,
    "exercise-cells": exercise_cells,
    "exercise-headings": exercise_headings,
    "exercise-hints": exercise_hints,
    "exercise-metadata": exercise_metadata,
    "exercise-markers": exercise_markers,
    "exercise-checks": exercise_checks,
    "exercise-import": exercise_import,
    "exercise-count": exercise_count,
}

RELAXED_FOR_DRAFTS = frozenset(
    {"objectives", "self-assessment", "words", "figures", "references", "exercise-count", "exercise-import"}
)
