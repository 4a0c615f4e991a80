"""Rules on code: plain Python that runs everywhere, in lines that a reader can take in."""

from __future__ import annotations

import ast
import sys
import textwrap
from collections.abc import Iterator

from course.guard import GUARD
from course.rules.notebook import Complaint, Notebook, rule

IMPORTABLE = frozenset(sys.stdlib_module_names) | {"torch", "torchvision", "numpy", "matplotlib", "shared"}

MAX_COLUMNS = 100
FOLDED = '{"jupyter": {"source_hidden": true}, "tags": ["hide-input"]}'


@rule("syntax")
def syntax(notebook: Notebook) -> Iterator[Complaint]:
    for cell in notebook.code:
        try:
            ast.parse(cell.source)
        except SyntaxError as error:
            yield cell.id, f"is not plain Python, without magics and !, which runs everywhere: {error}"


@rule("device-cell")
def device_cell(notebook: Notebook) -> Iterator[Complaint]:
    callers = [
        cell.id
        for cell in notebook.code
        for node in ast.walk(cell.tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "get_device"
    ]
    if "device" not in callers:
        yield "device", "never calls get_device(); write: device = get_device()"
    for id_ in callers:
        if id_ != "device":
            yield id_, "calls get_device(); only the cell 'device' does, others use the variable device"


@rule("imports")
def imports(notebook: Notebook) -> Iterator[Complaint]:
    for cell in notebook.code:
        optional = "optional" in cell.tags
        # what such a cell imports within `try` may be missing
        for node in cell.tree.body if optional else ast.walk(cell.tree):
            for name in _imported(node):
                allowed = name.split(".")[0] in IMPORTABLE
                if optional and not allowed:
                    yield cell.id, f"imports {name} outside try … except ImportError, so the notebook needs it"
                elif not optional and cell.id not in ("course", "setup"):
                    yield cell.id, f"imports {name}; only the cell 'setup' imports: move it there"
                elif not allowed:
                    known = "torch, torchvision, numpy, matplotlib, shared and the standard library"
                    yield cell.id, f"imports {name}; allowed are {known}"


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or "."] if isinstance(node, ast.ImportFrom) else []


@rule("guard")
def guard(notebook: Notebook) -> Iterator[Complaint]:
    cell = notebook.by_id.get("course")
    if cell and cell.source != GUARD:
        lines = textwrap.indent(GUARD, "    ")
        yield "course", f"must be these lines, for a reader who has the notebook alone:\n{lines}"


@rule("line-length")
def line_length(notebook: Notebook) -> Iterator[Complaint]:
    for cell in notebook.code:
        for place, line in enumerate(cell.source.splitlines(), start=1):
            if len(line) > MAX_COLUMNS:
                yield cell.id, f"line {place} has {len(line)} characters, the most is {MAX_COLUMNS}; break it"


@rule("folding")
def folding(notebook: Notebook) -> Iterator[Complaint]:
    for cell in notebook.code:
        if cell.is_folded != ("hide-input" in cell.tags):
            yield cell.id, f"is half folded; a folded cell has the metadata {FOLDED}"
