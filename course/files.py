"""Writing files: whether it is possible, and so that nobody ever meets a part of one.

Standard library only: `environment` needs it, too.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from pathlib import Path


class NotWritableError(OSError):
    """Nothing can or may be written in a folder; the message names it and says why."""


def require_writable(folder: Path, advice: str = "") -> None:
    """Make the folder if need be, and raise NotWritableError, before any work, if no file can be made there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise NotWritableError(f"can't write in {folder}: {error.strerror or error}{advice}.") from None


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file in one step: whoever reads it, even after a crash, sees the old content or the new one.

    A text is written as UTF-8 with its line ends as they are. The file keeps its permissions. The folder must exist.
    """
    new = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.new")
    try:
        new.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
        if path.exists():
            shutil.copymode(path, new)
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)
