"""A notebook as the rules see it."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from course.rules.markdown import Markdown
from course.syllabus import Module, Topic

_TOPIC_NUMBER = re.compile(r"(?<![\d-])([1-9]\d?-\d\d)(?![\d-])")


@dataclass
class Cell:
    """A cell as the rules see it."""

    index: int
    id: str
    kind: str
    source: str
    metadata: dict
    outputs: list[dict]
    execution_count: int | None
    section: str = ""  # the H2 heading it stands under

    @property
    def tags(self) -> list[str]:
        return self.metadata.get("tags", [])

    @property
    def is_folded(self) -> bool:
        """Whether JupyterLab shows the outputs without the code."""
        return bool(self.metadata.get("jupyter", {}).get("source_hidden"))

    @cached_property
    def tree(self) -> ast.Module | None:
        """The parsed code; None when it is not Python (the rule "syntax" says so)."""
        try:
            return ast.parse(self.source)
        except (SyntaxError, ValueError):
            return None

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree)) if self.kind == "code" and self.tree else []

    @cached_property
    def calls(self) -> list[str]:
        """Dotted names of everything called: "get_device", "os._exit", "check.swish"."""
        return [ast.unparse(node.func) for node in self.nodes if isinstance(node, ast.Call)]

    @cached_property
    def text(self) -> Markdown:
        """What a Markdown cell says; empty for a code cell."""
        return Markdown(self.source if self.kind == "markdown" else "")

    @property
    def headings(self) -> list[tuple[int, str]]:
        """(level, text) of each heading of a Markdown cell."""
        return self.text.headings

    @cached_property
    def texts(self) -> list[str]:
        """The textual outputs: streams, text/plain, text/html, SVG."""
        texts = []
        for output in self.outputs:
            texts.append(joined(output.get("text", "")))
            for kind, value in output.get("data", {}).items():
                if kind.startswith("text/") or kind == "image/svg+xml":
                    texts.append(joined(value))
        return [text for text in texts if text.strip()]


@dataclass
class Notebook:
    """A notebook together with what the syllabus says about it."""

    path: Path
    size: int
    metadata: dict
    cells: list[Cell]
    topic: Topic
    module: Module
    by_id: dict[str, Cell] = field(init=False)

    def __post_init__(self) -> None:
        self.by_id = {cell.id: cell for cell in self.cells}
        section = ""
        for cell in self.cells:
            section = next((text for level, text in cell.headings if level == 2), section)
            cell.section = section

    @property
    def root(self) -> Path:
        """The folder of the repository that the topic belongs to."""
        return self.topic.path.parent.parent

    @property
    def code(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.kind == "code"]

    @property
    def markdown(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.kind == "markdown"]

    @property
    def headings_2(self) -> list[tuple[Cell, str]]:
        return [(cell, text) for cell in self.cells for level, text in cell.headings if level == 2]

    @cached_property
    def exercises(self) -> dict[str, dict[str, Cell]]:
        """Slug → {"task": cell, "answer": cell, "check": cell}, as far as they exist, in the order of the notebook."""
        found: dict[str, dict[str, Cell]] = {}
        for cell in self.cells:
            match = re.fullmatch(r"ex-(.+?)(-task|-check)?", cell.id)
            if match:
                found.setdefault(match[1], {})[(match[2] or "-answer")[1:]] = cell
        return found


def named_topics(text: str) -> set[str]:
    """Topic numbers that a text names."""
    return set(_TOPIC_NUMBER.findall(text))


def joined(value: str | list[str]) -> str:
    """A text that a notebook file may hold as a list of lines."""
    return value if isinstance(value, str) else "".join(value)


def first_line(text: str, width: int = 90) -> str:
    """The first line of a text, shortened to `width` characters."""
    lines = text.strip().splitlines() or [""]
    return lines[0] if len(lines[0]) <= width else lines[0][:width] + "…"
