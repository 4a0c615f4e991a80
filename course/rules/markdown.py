"""Markdown as the rules need it: headings, links, table rows, and the text with or without its code, tags and folds.

markdown-it-py parses it, by CommonMark with tables and formulas, so what looks like a heading or a link in a code
block, in a comment or behind an escape is none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property

from markdown_it import MarkdownIt
from markdown_it.token import Token
from mdit_py_plugins.dollarmath import dollarmath_plugin

_PARSER = MarkdownIt("commonmark").enable(["table", "strikethrough"]).use(dollarmath_plugin, double_inline=True)
_COMMENT, _TAG = re.compile(r"<!--.*?-->", re.DOTALL), re.compile(r"</?[A-Za-z][^>]*>")


class Markdown:
    """A parsed Markdown text."""

    def __init__(self, source: str) -> None:
        self._blocks = _PARSER.parse(source)

    @cached_property
    def headings(self) -> list[tuple[int, str]]:
        """(level, text as typed) of each heading."""
        pairs = zip(self._blocks, self._blocks[1:], strict=False)
        return [(int(block.tag[1]), inner.content) for block, inner in pairs if block.type == "heading_open"]

    @cached_property
    def links(self) -> list[tuple[str, str]]:
        """(text, target) of each link and image."""
        found, open_links = [], []
        for token in self._tokens():
            if token.type == "link_open":
                open_links.append((str(token.attrs["href"]), []))
            elif token.type == "link_close":
                target, words = open_links.pop()
                found.append(("".join(words), target))
            elif token.type == "image":
                found.append((token.content, str(token.attrs["src"])))
            for _, words in open_links:
                words.append(token.content)
        return found

    @cached_property
    def rows(self) -> list[list[str]]:
        """The cells of each row of the tables, as a reader sees them."""
        rows: list[list[str]] = []
        for token, inner in zip(self._blocks, self._blocks[1:], strict=False):
            if token.type == "tr_open":
                rows.append([])
            elif token.type in ("th_open", "td_open"):
                rows[-1].append("".join(part.content for part in _flat([inner])).strip())
        return rows

    @property
    def items(self) -> int:
        """How many items the lists have that are in no other list or quotation."""
        return sum(token.type == "list_item_open" and token.level == 1 for token in self._blocks)

    @property
    def has_paragraph(self) -> bool:
        """Whether there is a paragraph of its own, in no list, quotation or fold."""
        return any(token.type == "paragraph_open" and token.level == 0 for token in self._blocks)

    def text(self, *, tags: bool = False, folded: bool = True) -> str:
        """The words, a block a line: without code, comments and the targets of links.

        Args:
            tags: whether HTML tags stay.
            folded: whether what <details> hides is part of it.
        """
        parts, depth = [], 0
        for token in self._tokens():
            if token.type in ("html_block", "html_inline"):
                html = _COMMENT.sub(" ", token.content)
                for piece in re.split(r"(<details\b|</details>)", html):
                    # the fold counts as open before its tag, and until behind the one that closes it
                    depth += piece == "<details"
                    if folded or not depth:
                        parts.append(piece)
                    depth -= piece == "</details>" and depth > 0
            elif folded or not depth:
                parts.append(_words(token))
        text = "".join(parts)
        return text if tags else _TAG.sub(" ", text)

    def _tokens(self) -> Iterator[Token]:
        return _flat(self._blocks)


def _flat(tokens: list[Token]) -> Iterator[Token]:
    """All tokens in order, those within a line after one another."""
    for token in tokens:
        if token.type == "inline":
            yield from token.children or []
        else:
            yield token


def _words(token: Token) -> str:
    if token.type in ("text", "image"):
        return token.content
    if token.type == "list_item_open":
        return f"{token.info}{token.markup} "
    is_end = token.block or token.type in ("softbreak", "hardbreak")
    return "\n" if is_end else ""
