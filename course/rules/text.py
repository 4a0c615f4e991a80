"""Rules on prose: what it names and what it links."""

from __future__ import annotations

import re
from collections.abc import Iterator

from course.rules.notebook import Complaint, Notebook, rule

_MACHINE_PATH = re.compile(r"(?<![\w.])/(?:home|Users|tmp)/[\w.-]*|/[\w./-]*/site-packages/|\b[A-Za-z]:\\+Users\\")


@rule("references", drafts=False)
def references(notebook: Notebook) -> Iterator[Complaint]:
    named = set(re.findall(r"(?<![\d-])\d+-\d\d(?![\d-])", "\n".join(cell.source for cell in notebook.markdown)))
    for warning in notebook.topic.warnings:
        for number in warning.references:
            if number not in named:
                yield "-", f"never names {number}; say in a line who teaches what: {warning.text}"


@rule("paths")
def paths(notebook: Notebook) -> Iterator[Complaint]:
    for cell in notebook.cells:
        for where, text in (("source", cell.source), ("output", "\n".join(cell.texts))):
            if found := _MACHINE_PATH.search(text):
                yield cell.id, f"has the path {found[0]!r} of one machine in its {where}; use a relative one"


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
        for target in cell.links:
            file = target.partition("#")[0]
            if file and not re.match(r"[a-z]+:", file) and not (folder / file).exists():
                yield cell.id, f"links to {file}, which isn't there; write it as plain text until it is"
