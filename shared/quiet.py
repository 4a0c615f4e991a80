"""Warnings and log lines that a lesson speaks about in its own words, kept out of the output."""

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr


@contextmanager
def quiet() -> Iterator[list[warnings.WarningMessage]]:
    """Collect warnings, and keep back what is logged or written to sys.stderr, until the block ends.

    Exceptions go through. Log lines are lost up to the level ERROR; CRITICAL ones are not.
    """
    level = logging.root.manager.disable
    logging.disable(max(level, logging.ERROR))
    try:
        with warnings.catch_warnings(record=True) as caught, redirect_stderr(io.StringIO()):
            warnings.simplefilter("always")
            yield caught
    finally:
        logging.disable(level)
