"""Rules on what is stored below the cells."""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Iterator
from functools import cache

from course.environment import ROOT
from course.rules.notebook import Notebook, first_line, joined
from course.rules.table import Complaint, rule

MIN_FIGURES = 6
IMAGES = ("image/png", "image/svg+xml", "image/jpeg", "image/gif", "image/webp")

_MEMORY_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}\b")


@rule("figures", not_for=("draft",))
def figures(notebook: Notebook) -> Iterator[Complaint]:
    count = sum(
        bool({"image/png", "image/svg+xml"} & set(output.get("data", {})))
        for cell in notebook.code
        for output in cell.outputs
    )
    if count < MIN_FIGURES:
        yield "-", f"shows {count} figures; CONTRIBUTING.md asks for at least {MIN_FIGURES}"


@rule("executed", not_for=("draft",))
def executed(notebook: Notebook) -> Iterator[Complaint]:
    for place, cell in enumerate(notebook.code, start=1):
        if cell.execution_count != place:
            ran = "has not been run" if cell.execution_count is None else f"was run as number {cell.execution_count}"
            yield cell.id, f"{ran}, but is code cell {place}; restart the kernel, run all cells and save"
            return


@rule("outputs")
def outputs(notebook: Notebook) -> Iterator[Complaint]:
    for cell in notebook.code:
        for output in cell.outputs:
            if output["output_type"] == "error":
                what = f"{output['ename']}: {first_line(output['evalue'])}"
                yield cell.id, f"has stored an error, {what}; mend it and run all cells"
            elif output.get("name") == "stderr":
                text = first_line(joined(output["text"]))
                yield cell.id, f"wrote to stderr: {text!r}; use the current API, or catch and explain the warning"


@rule("checked-output")
def checked_output(notebook: Notebook) -> Iterator[Complaint]:
    for cell in notebook.cells:
        if "nbval-check-output" not in cell.tags or (cell.kind == "code" and cell.execution_count is None):
            continue  # the rule "executed" says so
        text = "\n".join(cell.texts)
        if not text:
            yield cell.id, "is tagged nbval-check-output but has no stored text, so nothing is compared; print a result"
        elif address := _MEMORY_ADDRESS.search(text):
            yield cell.id, f"prints a memory address, {address[0]}, which differs in every run"


@rule("alt")
def alternative_text(notebook: Notebook) -> Iterator[Complaint]:
    for cell in notebook.code:
        for output in cell.outputs:
            for kind in set(IMAGES) & set(output.get("data", {})):
                described = output.get("metadata", {}).get(kind, {})
                alt = described.get("alt") if isinstance(described, dict) else None
                if not isinstance(alt, str) or not alt.strip():
                    yield cell.id, 'stores a figure without a text for those who don\'t see it; end with show(alt="…")'


@cache
def current_palette() -> str:
    """PALETTE of shared/plotting.py, which takes seconds to import."""
    tree = ast.parse((ROOT / "shared" / "plotting.py").read_text(encoding="utf-8"))
    (colours,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["COLOURS"]
    )
    return hashlib.sha256(json.dumps(ast.literal_eval(colours)).encode()).hexdigest()[:8]


@rule("palette", not_for=("draft",))
def palette(notebook: Notebook) -> Iterator[Complaint]:
    for cell in notebook.code:
        for output in cell.outputs:
            described = output.get("metadata", {}).get("image/png", {})
            drawn = "image/png" in output.get("data", {}) and "alt" in described  # by show(), which writes both
            if drawn and described.get("palette") != current_palette():
                yield (
                    cell.id,
                    (
                        "stores a figure in other colours than those of shared/plotting.py; "
                        f"python -m course run {notebook.topic.number} --save draws it anew"
                    ),
                )
