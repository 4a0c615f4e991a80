"""What several commands take as an option's value."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """The `type` of an argument that must be a whole number above zero."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text} is not a positive whole number")
    return int(text)
