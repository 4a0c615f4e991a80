"""Attributes replaced for a while, and then as they were."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_INHERITED = object()


@contextmanager
def replacing() -> Iterator[Callable[[Any, str, Any], None]]:
    """Yields `replace(owner, name, value)`, which is setattr until the block ends."""
    kept = []

    def replace(owner: Any, name: str, value: Any) -> None:
        before = vars(owner).get(name, _INHERITED)
        setattr(owner, name, value)
        kept.append((owner, name, before))

    try:
        yield replace
    finally:
        for owner, name, value in reversed(kept):
            if value is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
