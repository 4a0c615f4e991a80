"""Printed text that fits into a notebook's column."""

import textwrap

WIDTH = 96  # characters that JupyterLab shows beside its side bar on a screen of 1280 pixels


def wrapped(text: str, *, indent: str = "", lines: int | None = None) -> str:
    """`text` with its lines broken at WIDTH characters at most.

    Args:
        text: one line or several; each is broken by itself.
        indent: what the second and later pieces of a line begin with.
        lines: how many are kept; " ..." stands for the rest. None: all.
    """
    pieces = []
    for line in text.splitlines():
        pieces += textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_on_hyphens=False) or [""]
    if lines is None or len(pieces) <= lines:
        return "\n".join(pieces)
    *kept, last = pieces[:lines]
    # room for the dots, though it costs a word
    return "\n".join([*kept, textwrap.wrap(last, WIDTH - 4)[0] + " ..." if last else "..."])
