"""Rules on code: plain Python that runs everywhere. Ruff looks at its lines."""

from __future__ import annotations

import ast
import sys
import textwrap
from collections.abc import Iterator

from course.guard import GUARD
from course.rules import Complaint, Notebook, rule

IMPORTABLE = frozenset(sys.stdlib_module_names) | {"torch", "torchvision", "numpy", "matplotlib", "shared"}
ALLOWED = (
    "allowed are torch, torchvision, numpy, matplotlib, shared and the standard library, "
    "and anything within `try … except ImportError` in a cell with the tag `optional`"
)


@rule("syntax")
def syntax(notebook: Notebook) -> Iterator[Complaint]:
    for cell in notebook.code:
        try:
            ast.parse(cell.source)
        except SyntaxError as error:
            yield cell.id, f"is not plain Python, without magics and !, which runs everywhere: {error}"


@rule("imports")
def imports(notebook: Notebook) -> Iterator[Complaint]:
    for cell in notebook.code:
        optional = "optional" in cell.tags
        # what such a cell imports within `try` may be missing
        for node in cell.tree.body if optional else ast.walk(cell.tree):
            for name in _imported(node):
                if not optional and cell.id not in ("course", "setup"):
                    yield cell.id, f"imports {name}; only the cell 'setup' imports: move it there"
                elif name.split(".")[0] not in IMPORTABLE:
                    yield cell.id, f"imports {name}, which readers may not have; {ALLOWED}"


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or "."] if isinstance(node, ast.ImportFrom) else []


@rule("guard")
def guard(notebook: Notebook) -> Iterator[Complaint]:
    if "course" in notebook.by_id and notebook.by_id["course"].source != GUARD:
        lines = textwrap.indent(GUARD, "    ")
        yield "course", f"must be these lines, for a reader who has the notebook alone:\n{lines}"
