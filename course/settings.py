"""What several commands take as an option's value."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable


def positive(kind: type[int] | type[float]) -> Callable[[str], float]:
    """The `type` of an argument that must be above zero."""

    def read(text: str) -> float:
        with contextlib.suppress(ValueError):
            if 0 < (value := kind(text)) < float("inf"):
                return value
        raise argparse.ArgumentTypeError(f"{text} is not a positive {'whole ' if kind is int else ''}number")

    return read
