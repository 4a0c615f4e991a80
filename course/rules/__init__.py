"""What a notebook of the module must look like: one small function a rule, in the modules of this package.

`lint_notebook` applies them all and gives findings; `course.lint` is the command around it. A rule says what is wrong
and what to do about it. Those about finished work are not applied to a draft or a template.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

from nbformat.warnings import DuplicateCellId, MissingIDFieldWarning

from course.execution import NotebookError, read_notebook

# imported for the rules that they enter into RULES
from course.rules import code, form, outputs, tasks, text  # noqa: F401
from course.rules.notebook import NOT_FOR_DRAFTS, RULES, Notebook, first_line
from course.syllabus import Module, Topic


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: where (file, cell id or "-"), which rule, and what to do."""

    file: str
    cell: str
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.file}: {self.cell}: {self.rule}: {self.message}"


def lint_notebook(path: Path, topic: Topic, module: Module) -> list[Finding]:
    """Hold one notebook file against its topic. Never raises for what is in the file."""
    try:
        with warnings.catch_warnings():
            for repaired in (DuplicateCellId, MissingIDFieldWarning):  # with ids of its own, by nbformat
                warnings.simplefilter("error", repaired)
            document, _ = read_notebook(path)
    except (NotebookError, DuplicateCellId, MissingIDFieldWarning) as error:
        return [Finding(str(path), "-", "nbformat", first_line(str(error), 200))]
    notebook = Notebook(path, document, topic, module)
    findings = [
        Finding(str(path), cell, name, message)
        for name, check in RULES.items()
        if not (topic.is_draft and name in NOT_FOR_DRAFTS)
        for cell, message in check(notebook)
    ]
    place = {cell.id: cell.index for cell in notebook.cells}
    return sorted(findings, key=lambda finding: place.get(finding.cell, -1))
