"""Rules on prose: what it names and what it links."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import unquote

from course.rules.notebook import Notebook, named_topics
from course.rules.table import Complaint, rule

_MACHINE_PATH = re.compile(
    r"(?<![\w.])/(?:home|Users|root|tmp|var/folders)/[\w.-]*"
    r"|(?<![\w.])/[\w./-]*/site-packages/"
    r"|(?<!\w)[A-Za-z]:\\+Users\\"
)


@rule("references", not_for=("draft",))
def references(notebook: Notebook) -> Iterator[Complaint]:
    named = named_topics("\n".join(cell.source for cell in notebook.markdown))
    for warning in notebook.topic.warnings:
        for number in warning.references:
            if number not in named:
                yield "-", f"never names {number}; say in a line who teaches what: {warning.text}"


@rule("paths")
def paths(notebook: Notebook) -> Iterator[Complaint]:
    for cell in notebook.cells:
        for where, texts in (("source", [cell.source]), ("output", cell.texts)):
            found = next((match for match in map(_MACHINE_PATH.search, texts) if match), None)
            if found:
                yield cell.id, f"has the path {found[0]!r} of one machine in its {where}; use a relative one"


@rule("placeholders", not_for=("draft",))
def placeholders(notebook: Notebook) -> Iterator[Complaint]:
    for cell in notebook.cells:
        found = re.search(r"\bTODO\b", cell.source)
        if cell.kind == "markdown":
            found = re.search(r"What belongs here|\{\{\w+\}\}", cell.text.text()) or found
        if found:
            yield cell.id, f"still holds {found[0]!r}; fill the place in, or remove it"


@rule("links")
def links(notebook: Notebook) -> Iterator[Complaint]:
    folder = notebook.root / notebook.module.folder
    for cell in notebook.markdown:
        for text, target in cell.text.links:
            file = target.partition("#")[0]
            if not file or re.match(r"[a-z][a-z+.-]*:", file) or (folder / unquote(file)).exists():
                continue
            yield cell.id, f"links {text!r} to {file}, which isn't there; write it as plain text until it is"
