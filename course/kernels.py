"""How a kernel that this project starts is reached: through socket files, not through ports.

Jupyter looks for five free ports, closes them again, and a second later the new kernel opens them. If something else
has taken one meanwhile (a rank of a process group, another kernel), the kernel dies before it has answered.
"""

from __future__ import annotations

import os
from pathlib import Path

PATH_LIMIT = 100  # bytes of a socket file's path: 107 on Linux, 103 on macOS


def connection(file: Path) -> dict[str, str]:
    """Settings for a `jupyter_client.KernelManager`.

    `file` is where the kernel's connection is described, `*.json`, not there yet; its socket files lie beside it, and
    Jupyter removes all of them with the kernel. Where a system has no socket files, or the path is too long for them,
    the kernel has ports.
    """
    settings = {"connection_file": str(file)}
    if os.name != "nt" and len(os.fsencode(file.with_suffix(""))) + len("-ipc-5") <= PATH_LIMIT:
        settings["transport"] = "ipc"
    return settings
