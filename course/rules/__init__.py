"""What a notebook of the module must look like: one small function a rule, in the modules of this package.

Here is a notebook as the rules see it, and the table that each rule enters itself into; `course.lint` applies them. A
rule says what is wrong and what to do about it. Those about finished work are not applied to a draft or a template.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token
from nbformat import NotebookNode

from course.syllabus import Module, Topic

# so that what looks like a heading or a link in a code block is none
_PARSER = MarkdownIt("commonmark").enable("table")

Complaint = tuple[str, str]  # (cell id or "-", message)
Check = Callable[["Notebook"], Iterator[Complaint]]  # a rule

RULES: dict[str, Check] = {}
NOT_FOR_DRAFTS: set[str] = set()  # names of the rules that only finished work is held to


def rule(name: str, *, drafts: bool = True) -> Callable[[Check], Check]:
    """Enter a function into the table; `drafts`: whether it holds for them."""

    def enter(check: Check) -> Check:
        RULES[name] = check
        if not drafts:
            NOT_FOR_DRAFTS.add(name)
        return check

    return enter


class Cell:
    """A cell of a notebook, and what its text or code says."""

    def __init__(self, node: NotebookNode) -> None:
        self.id = node.id
        self.source = node.source
        self.metadata = node.metadata
        self.tags = node.metadata.get("tags", [])
        self.outputs = node.get("outputs", [])
        self.execution_count = node.get("execution_count")
        self.is_code = node.cell_type == "code"
        self.blocks: list[Token] = [] if self.is_code else _PARSER.parse(self.source)
        pairs = zip(self.blocks, self.blocks[1:], strict=False)
        # (level, text) of each
        self.headings = [(int(one.tag[1]), inner.content) for one, inner in pairs if one.type == "heading_open"]
        # the Markdown without its code
        self.prose = "" if self.is_code else re.sub(r"(`+).+?\1", "", self.source, flags=re.DOTALL)
        # (kind, what is stored about it) of each picture below the cell
        self.figures: list[tuple[str, dict]] = [
            (kind, output["metadata"].get(kind, {}))
            for output in self.outputs
            for kind in output.get("data", {})
            if kind.startswith("image/")
        ]

    @property
    def tree(self) -> ast.Module:
        """The parsed code; empty where it isn't Python (the rule "syntax" says so)."""
        try:
            return ast.parse(self.source)
        except SyntaxError:
            return ast.parse("")


class Notebook:
    """A notebook together with what the syllabus says about it."""

    def __init__(self, path: Path, document: NotebookNode, topic: Topic, module: Module) -> None:
        self.path, self.document, self.topic, self.module = path, document, topic, module
        self.cells = [Cell(node) for node in document.cells]
        self.by_id = {cell.id: cell for cell in self.cells}
        self.code = [cell for cell in self.cells if cell.is_code]
        self.markdown = [cell for cell in self.cells if not cell.is_code]
        # slug → {"task": cell, "answer": cell, "check": cell}, as far as they exist, in the order of the notebook
        self.exercises: dict[str, dict[str, Cell]] = {}
        for cell in self.cells:
            if match := re.fullmatch(r"ex-(.+?)(?:-(task|check))?", cell.id):
                self.exercises.setdefault(match[1], {})[match[2] or "answer"] = cell

    def section(self, heading: str) -> str:
        """The prose from this H2 heading to the next."""
        prose = "\n".join(cell.prose for cell in self.markdown)
        return "".join(re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", prose, re.DOTALL | re.MULTILINE))


def first_line(text: str, width: int = 90) -> str:
    """The first line of a text, shortened to `width` characters."""
    lines = text.strip().splitlines() or [""]
    return lines[0] if len(lines[0]) <= width else lines[0][:width] + "…"


# at the end, since each of them enters its rules into the table
from course.rules import code, form, outputs, tasks  # noqa: E402, F401
