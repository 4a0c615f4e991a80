"""Rules on what is stored below the cells."""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Iterator
from functools import cache

from course.environment import ROOT
from course.rules.notebook import Complaint, Notebook, first_line, rule

MIN_FIGURES = 6


def _figures(notebook: Notebook) -> Iterator[tuple[str, str, dict]]:
    """(cell's id, kind, what is stored about it) of each picture."""
    for cell in notebook.code:
        for output in cell.outputs:
            for kind in output.get("data", {}):
                if kind.startswith("image/"):
                    yield cell.id, kind, output["metadata"].get(kind, {})


@rule("figures", drafts=False)
def figures(notebook: Notebook) -> Iterator[Complaint]:
    count = len(list(_figures(notebook)))
    if count < MIN_FIGURES:
        yield "-", f"shows {count} figures; CONTRIBUTING.md asks for at least {MIN_FIGURES}"


@rule("executed", drafts=False)
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
                text = first_line(output["text"])
                yield cell.id, f"wrote to stderr: {text!r}; use the current API, or catch and explain the warning"


@rule("checked-output")
def checked_output(notebook: Notebook) -> Iterator[Complaint]:
    for cell in notebook.code:
        if "nbval-check-output" in cell.tags and cell.execution_count and not cell.texts:
            yield cell.id, "is tagged nbval-check-output but has no stored text, so nothing is compared; print a result"


@rule("alt")
def alternative_text(notebook: Notebook) -> Iterator[Complaint]:
    for cell, _, stored in _figures(notebook):
        if not stored.get("alt", "").strip():
            yield cell, 'stores a figure without a text for those who don\'t see it; end with show(alt="…")'


@cache
def current_palette() -> str:
    """PALETTE of shared/plotting.py, which takes seconds to import."""
    source = (ROOT / "shared" / "plotting.py").read_text(encoding="utf-8")
    colours = ast.literal_eval(re.search(r"^COLOURS\b.*?= (\{.*?\})$", source, re.DOTALL | re.MULTILINE)[1])
    return hashlib.sha256(json.dumps(colours).encode()).hexdigest()[:8]


@rule("palette", drafts=False)
def palette(notebook: Notebook) -> Iterator[Complaint]:
    for cell, kind, stored in _figures(notebook):
        # by show(), which writes both
        if kind == "image/png" and "alt" in stored and stored.get("palette") != current_palette():
            redraw = f"python -m course run {notebook.topic.number} --save draws it anew"
            yield cell, f"stores a figure in other colours than those of shared/plotting.py; {redraw}"
