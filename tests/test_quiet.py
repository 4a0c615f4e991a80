"""What `quiet` keeps back, and that nothing of it stays."""

import logging
import sys
import warnings

import pytest

from shared import quiet


def test_it_collects_warnings_and_keeps_back_lines(capsys):
    with quiet() as caught:
        warnings.warn("old", FutureWarning, stacklevel=1)
        warnings.warn("old", FutureWarning, stacklevel=1)  # repeated ones count, too
        logging.getLogger("some").error("a line")
        print("another line", file=sys.stderr)
    assert [(w.category, str(w.message)) for w in caught] == [(FutureWarning, "old")] * 2
    assert capsys.readouterr().err == ""


def test_afterwards_all_is_as_it_was(capsys):
    stream, filters, level = sys.stderr, list(warnings.filters), logging.root.manager.disable
    with pytest.raises(KeyError), quiet():
        raise KeyError("goes through")
    assert (sys.stderr, list(warnings.filters), logging.root.manager.disable) == (stream, filters, level)
    with pytest.warns(FutureWarning):
        warnings.warn("heard", FutureWarning, stacklevel=1)


def test_a_stricter_level_stays():
    logging.disable(logging.CRITICAL)
    try:
        with quiet():
            assert logging.root.manager.disable == logging.CRITICAL
        assert logging.root.manager.disable == logging.CRITICAL
    finally:
        logging.disable(logging.NOTSET)
