"""Rules on code: plain Python that runs everywhere, in lines that a reader can take in."""

from __future__ import annotations

import ast
import sys
import textwrap
from collections.abc import Iterator

from course.guard import GUARD
from course.rules.notebook import Notebook
from course.rules.table import Complaint, rule

IMPORTABLE = frozenset(sys.stdlib_module_names) | {"torch", "torchvision", "numpy", "matplotlib", "shared"}
IMPORTABLE_IN_WORDS = "torch, torchvision, numpy, matplotlib, shared and the standard library"

MAX_COLUMNS = 100
FOLDED = '{"jupyter": {"source_hidden": true}, "tags": ["hide-input"]}'


@rule("syntax")
def syntax(notebook: Notebook) -> Iterator[Complaint]:
    for cell in notebook.code:
        try:
            ast.parse(cell.source)
        except (SyntaxError, ValueError) as error:
            yield cell.id, f"is not plain Python, without magics and !, which runs everywhere: {error}"


@rule("device-cell")
def device_cell(notebook: Notebook) -> Iterator[Complaint]:
    callers = [cell.id for cell in notebook.code for name in cell.calls if name.split(".")[-1] == "get_device"]
    if notebook.module.gpu_required and not callers:
        yield "device", "never calls get_device(); write: device = get_device()"
    for id_ in callers:
        if id_ != "device" or callers.count("device") > 1:
            yield id_, "calls get_device(); only the cell 'device' does, once, others use the variable device"


@rule("imports")
def imports(notebook: Notebook) -> Iterator[Complaint]:
    for cell in notebook.code:
        guarded = {id(node) for attempt in cell.nodes if _catches_import_error(attempt) for node in ast.walk(attempt)}
        for node in cell.nodes:
            for name in _imported(node):
                allowed = name.split(".")[0] in IMPORTABLE
                if "optional" in cell.tags:
                    if not allowed and id(node) not in guarded:
                        yield cell.id, f"imports {name} outside try … except ImportError, so the notebook needs it"
                elif cell.id not in ("course", "setup"):
                    yield cell.id, f"imports {name}; only the cell 'setup' imports: move it there"
                elif not allowed:
                    yield cell.id, f"imports {name}; allowed are {IMPORTABLE_IN_WORDS}"


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return ["." * node.level + (node.module or "")] if isinstance(node, ast.ImportFrom) else []


def _catches_import_error(node: ast.AST) -> bool:
    return isinstance(node, ast.Try) and any("ImportError" in ast.unparse(one).split("\n")[0] for one in node.handlers)


@rule("guard")
def guard(notebook: Notebook) -> Iterator[Complaint]:
    cell = notebook.by_id.get("course")
    if cell is None:
        return  # the rule "cell-ids" says so
    if cell.source != GUARD:
        lines = textwrap.indent(GUARD, "    ")
        yield "course", f"must be these lines, for a reader who has the notebook alone:\n{lines}"
    if not cell.is_folded:
        yield "course", f"must be folded, since it teaches nothing: {FOLDED}"


@rule("line-length")
def line_length(notebook: Notebook) -> Iterator[Complaint]:
    for cell in notebook.code:
        for place, line in enumerate(cell.source.splitlines(), start=1):
            if len(line) > MAX_COLUMNS:
                yield cell.id, f"line {place} has {len(line)} characters, the most is {MAX_COLUMNS}; break it"


@rule("folding")
def folding(notebook: Notebook) -> Iterator[Complaint]:
    for cell in notebook.code:
        if cell.is_folded != ("hide-input" in cell.tags) or cell.metadata.get("jupyter", {}).keys() - {"source_hidden"}:
            yield cell.id, f"is half folded; a folded cell has the metadata {FOLDED}"
