"""A line of text that changes in place: in a notebook, in a terminal; in a file only its last state is written."""

import sys
import time
from collections.abc import Callable
from typing import Any

SECONDS = 0.2  # between two states of a line that changes often
WIDTH = 78  # characters that are overwritten in a terminal


class LiveLine:
    """One line.

    line = LiveLine()
    line.show("step 10")        # replaces what it showed before
    line.end("epoch 1 done")    # the last state; the next `show` begins a new line

    In a notebook a display is updated in place, so that a stored output holds the last state only.
    """

    def __init__(self) -> None:
        ipython = sys.modules.get("IPython")
        self._display: Any = ipython.display if ipython and ipython.get_ipython() else None
        self._handle: Any = None
        self._shown = time.perf_counter()

    def sometimes(self, text: Callable[[], str]) -> None:
        """Show what `text()` says, five times a second at most; it is not called in between."""
        if time.perf_counter() - self._shown > SECONDS:
            self.show(text())
            self._shown = time.perf_counter()

    def show(self, text: str) -> None:
        """Show a state that will change; nothing in a file."""
        if self._display is not None:
            self._in_notebook(text)
        elif sys.stdout.isatty():
            print(f"\r{text:<{WIDTH}}", end="", flush=True)

    def end(self, text: str) -> None:
        """Show the last state."""
        if self._display is not None:
            self._in_notebook(text)
            self._handle = None
        elif sys.stdout.isatty():
            print(f"\r{text:<{WIDTH}}", flush=True)
        else:
            print(text, flush=True)

    def _in_notebook(self, text: str) -> None:
        if self._handle is None:
            self._handle = self._display.display({"text/plain": text}, raw=True, display_id=True)
        else:
            self._handle.update({"text/plain": text}, raw=True)
