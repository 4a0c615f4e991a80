"""Errors that a notebook shows on purpose."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

from shared.text import wrapped


@contextmanager
def expect_error(*types: type[BaseException], match: str | None = None, lines: int = 3) -> Iterator[SimpleNamespace]:
    """Run a block that must fail, print what it said, and go on; `error` of what it gives is the exception.

    Args:
        types: the exception types expected; RuntimeError if none is given.
        match: regular expression that the message must contain (`re.search`).
        lines: how many lines of the message are printed, each of 96 characters at most.

    Raises:
        AssertionError: the block raised nothing, or its message does not match.
        Exception: what the block raised, if it is of another type.

    Example:
        >>> with expect_error(ZeroDivisionError, match="division"):
        ...     1 / 0
        ZeroDivisionError: division by zero
    """
    types = types or (RuntimeError,)
    expected = " or ".join(kind.__name__ for kind in types)
    caught = SimpleNamespace(error=None)
    try:
        yield caught
    except types as error:
        message = str(error)
        if match is not None and not re.search(match, message):
            raise AssertionError(
                f"expected {expected} with a message matching {match!r}, got {type(error).__name__}: {message}"
            ) from error
        # Without its traceback the error does not keep the block's tensors alive.
        caught.error = error.with_traceback(None)
        print(wrapped(f"{type(error).__name__}: {message.strip()}", lines=lines))
    else:
        raise AssertionError(f"expected {expected}, but nothing was raised")
