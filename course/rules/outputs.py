"""Rules on what is stored below the cells."""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Iterator
from functools import cache

from course.environment import ROOT
from course.rules import Complaint, Notebook, first_line, rule


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


@rule("alt")
def alternative_text(notebook: Notebook) -> Iterator[Complaint]:
    for cell in notebook.code:
        if any(not stored.get("alt", "").strip() for _, stored in cell.figures):
            yield cell.id, 'stores a figure without a text for those who don\'t see it; end with show(alt="…")'


@cache
def current_palette() -> str:
    """PALETTE of shared/plotting.py, which takes seconds to import."""
    source = (ROOT / "shared" / "plotting.py").read_text(encoding="utf-8")
    colours = ast.literal_eval(re.search(r"^COLOURS\b.*?= (\{.*?\})$", source, re.DOTALL | re.MULTILINE)[1])
    return hashlib.sha256(json.dumps(colours).encode()).hexdigest()[:8]


@rule("palette", drafts=False)
def palette(notebook: Notebook) -> Iterator[Complaint]:
    for cell in notebook.code:
        # by show(), which writes both
        drawn = [stored for kind, stored in cell.figures if kind == "image/png" and "alt" in stored]
        if any(stored.get("palette") != current_palette() for stored in drawn):
            redraw = f"python -m course run {notebook.topic.number} --save draws it anew"
            yield cell.id, f"stores a figure in other colours than those of shared/plotting.py; {redraw}"
