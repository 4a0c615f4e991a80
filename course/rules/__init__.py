"""What a notebook of the module must look like: one small function a rule, in the modules of this package.

`lint_notebook` applies them all and gives findings; `course.lint` is the command around it. A rule says what is wrong
and what to do about it. Those about finished work are not applied to a draft or a template.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# imported for the rules that they enter into RULES
from course.rules import code, form, outputs, tasks, text  # noqa: F401
from course.rules.notebook import Cell, Notebook, first_line, joined
from course.rules.table import RULES, Complaint
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


def relaxed_for(status: str) -> list[str]:
    """Names of the rules that are not applied to a topic with this status in syllabus.toml."""
    return sorted(name for name, rule in RULES.items() if status in rule.not_for)


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
            source=joined(cell["source"]),
            metadata=cell["metadata"],
            outputs=cell.get("outputs", []),
            execution_count=cell.get("execution_count"),
        )
        for index, cell in enumerate(document["cells"])
    ]
    notebook = Notebook(path, size, document["metadata"], cells, topic, module)
    findings = [
        Finding(str(path), cell, name, message)
        for name, rule in RULES.items()
        if topic.status not in rule.not_for
        for cell, message in rule.check(notebook)
    ]
    place = {cell.id: cell.index for cell in cells}
    return sorted(findings, key=lambda finding: place.get(finding.cell, -1))


def _invalid(document: object) -> Iterator[Complaint]:
    """What nbformat's own schema says, plus ids that are there and unique."""
    # here, because it is a third of the command's start-up time, and only this rule needs it
    from nbformat.validator import iter_validate

    if not isinstance(document, dict) or document.get("nbformat") != 4 or document.get("nbformat_minor") != 5:
        yield "-", "is not in notebook format 4.5, which gives cells their ids; convert it with nbformat.convert"
        return
    error = next(iter(iter_validate(document, version=4, version_minor=5)), None)
    if error is not None:
        place = "/".join(map(str, error.absolute_path)) or "the notebook"
        yield "-", f"breaks the notebook schema at {place}: {first_line(error.message, 160)}"
        return
    ids = [cell["id"] for cell in document["cells"]]
    for id_ in {id_ for id_ in ids if ids.count(id_) > 1}:
        yield id_, "is the id of two cells; give one of them another"
