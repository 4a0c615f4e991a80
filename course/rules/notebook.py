"""A notebook as the rules see it, and the table that each rule enters itself into."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token
from nbformat import NotebookNode

from course.syllabus import Module, Topic

# so that what looks like a heading or a link in a code block is none
_PARSER = MarkdownIt("commonmark").enable("table")

Complaint = tuple[str, str]  # (cell id or "-", message)
Check = Callable[["Notebook"], Iterator[Complaint]]

RULES: dict[str, Check] = {}
NOT_FOR_DRAFTS: set[str] = set()  # names of the rules that only finished work is held to


def rule(name: str, *, drafts: bool = True) -> Callable[[Check], Check]:
    """Enter a function of a notebook, which yields complaints, into the table; `drafts`: whether it holds for them."""

    def enter(check: Check) -> Check:
        RULES[name] = check
        if not drafts:
            NOT_FOR_DRAFTS.add(name)
        return check

    return enter


class Cell:
    """A cell of a notebook, and what its text or code says."""

    def __init__(self, index: int, node: NotebookNode) -> None:
        self.index = index
        self.id = node.id
        self.kind = node.cell_type
        self.source = node.source
        self.metadata = node.metadata
        self.tags = node.metadata.get("tags", [])
        self.outputs = node.get("outputs", [])
        self.execution_count = node.get("execution_count")

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed code; empty for Markdown, and where it isn't Python (the rule "syntax" says so)."""
        try:
            return ast.parse(self.source if self.kind == "code" else "")
        except SyntaxError:
            return ast.parse("")

    @cached_property
    def blocks(self) -> list[Token]:
        """A Markdown cell, parsed."""
        return _PARSER.parse(self.source if self.kind == "markdown" else "")

    @cached_property
    def headings(self) -> list[tuple[int, str]]:
        """(level, text) of each heading."""
        pairs = zip(self.blocks, self.blocks[1:], strict=False)
        return [(int(block.tag[1]), inner.content) for block, inner in pairs if block.type == "heading_open"]

    @cached_property
    def links(self) -> list[str]:
        """The targets of links and images."""
        parts = [part for block in self.blocks for part in block.children or []]
        return [
            str(part.attrs.get("href") or part.attrs["src"]) for part in parts if part.type in ("link_open", "image")
        ]

    @cached_property
    def prose(self) -> str:
        """The Markdown without its code."""
        lines = self.source.split("\n") if self.kind == "markdown" else []
        for block in self.blocks:
            if block.type in ("fence", "code_block") and block.map:
                first, end = block.map
                lines[first:end] = [""] * (end - first)
        return re.sub(r"(`+).+?\1", "", "\n".join(lines))

    @cached_property
    def texts(self) -> list[str]:
        """The outputs that are text: streams, text/plain, text/html, SVG."""
        texts = []
        for output in self.outputs:
            data = output.get("data", {})
            texts += [output.get("text", "")]
            texts += [data[kind] for kind in data if kind.startswith("text/") or kind == "image/svg+xml"]
        return [text for text in texts if text.strip()]


@dataclass
class Notebook:
    """A notebook together with what the syllabus says about it."""

    path: Path
    document: NotebookNode
    topic: Topic
    module: Module

    @cached_property
    def cells(self) -> list[Cell]:
        return [Cell(index, node) for index, node in enumerate(self.document.cells)]

    @cached_property
    def by_id(self) -> dict[str, Cell]:
        return {cell.id: cell for cell in self.cells}

    @property
    def code(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.kind == "code"]

    @property
    def markdown(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.kind == "markdown"]

    @cached_property
    def exercises(self) -> dict[str, dict[str, Cell]]:
        """Slug → {"task": cell, "answer": cell, "check": cell}, as far as they exist, in the order of the notebook."""
        found: dict[str, dict[str, Cell]] = {}
        for cell in self.cells:
            match = re.fullmatch(r"ex-(.+?)(?:-(task|check))?", cell.id)
            if match:
                found.setdefault(match[1], {})[match[2] or "answer"] = cell
        return found

    def section(self, heading: str) -> str:
        """The prose from this H2 heading to the next."""
        texts, inside = [], False
        for cell in self.markdown:
            for level, text in cell.headings:
                if level == 2:
                    inside = text == heading
            if inside:
                texts.append(cell.prose)
        return "\n".join(texts)


def first_line(text: str, width: int = 90) -> str:
    """The first line of a text, shortened to `width` characters."""
    lines = text.strip().splitlines() or [""]
    return lines[0] if len(lines[0]) <= width else lines[0][:width] + "…"
