"""Writing a file so that nobody ever meets a part of it. Standard library only: `environment` needs it, too."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path


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
