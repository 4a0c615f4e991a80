"""Execute one notebook in a kernel of its own, watch it, and end what it started.

nbclient runs the cells; what is added is what a batch of notebooks needs: the kernel is always the running Python's
(whatever kernel specifications a user has installed), its memory is measured with that of its children, output without
end fails the notebook, and no process is left over that has inherited the kernel's environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import psutil
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpecManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode

from course.files import write_whole

OUTPUT_LIMIT = 5_000_000  # characters of a notebook (lint allows 3 MB); more would fill the memory
SAMPLE_SECONDS = 0.5  # between two measurements of memory, which take 20 ms for a process with PyTorch
# shared.get_device pretends an accelerator; and how long something takes on it says nothing
REHEARSAL = {"COURSE_DEVICE": "pretended", "COURSE_TIMING": "rough"}
TOKEN = "COURSE_KERNEL"  # environment variable by which everything that a kernel started is recognised


class NotebookError(ValueError):
    """A file that isn't a notebook; the message says what is wrong with it."""


@dataclass
class Progress:
    """What is known about a notebook while it runs, and at the end."""

    cell: NotebookNode | None = None  # the code cell that runs or ran last
    seconds: float = 0.0
    peak: int = 0  # bytes: the largest sum over the kernel and its children, of what each has for itself
    failure: str | None = None  # why the notebook stopped
    stop: bool = False  # set it from another thread, and the kernel is killed


def read_notebook(path: Path) -> tuple[NotebookNode, str]:
    """Read and validate a notebook (format 4). Returns it and the SHA-256 of the file. Raises NotebookError."""
    try:
        content = path.read_bytes()
        if not content.strip():
            raise NotebookError("the file is empty")
        notebook = nbformat.reads(content.decode("utf-8"), as_version=nbformat.NO_CONVERT)
        if notebook.get("nbformat") != 4:
            raise NotebookError(f"notebook format {notebook.get('nbformat')}, not 4: open and save it in JupyterLab")
        nbformat.validate(notebook)
    except NotebookError:
        raise
    except OSError as error:
        raise NotebookError(f"can't be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise NotebookError(f"not UTF-8 text (byte {error.start})") from error
    except nbformat.reader.NotJSONError as error:
        raise NotebookError(f"not JSON, so not a notebook ({error.__cause__})") from error
    except Exception as error:  # nbformat raises what it likes on JSON that is something else
        why = str(error).strip().partition("\n")[0]
        raise NotebookError(f"not a valid notebook ({type(error).__name__}: {why})") from error
    return notebook, hashlib.sha256(content).hexdigest()


def write_notebook(notebook: NotebookNode, path: Path) -> None:
    """Write a notebook, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, nbformat.writes(notebook, version=nbformat.NO_CONVERT) + "\n")


def connection(file: Path) -> dict[str, str]:
    """Settings for a `jupyter_client.KernelManager`; `file` is where it describes the connection, `*.json`.

    The kernel is reached through socket files beside it, where a system has them. Jupyter looks for five free ports and
    closes them again, and a second later the new kernel opens them: if something else has taken one meanwhile (a rank
    of a process group, another kernel), the kernel dies before it has answered.
    """
    return {"connection_file": str(file), "transport": "tcp" if os.name == "nt" else "ipc"}


def execute_blocking(
    notebook: NotebookNode,
    folder: Path,
    progress: Progress | None = None,
    *,
    timeout: int = 300,
    env: dict[str, str] | None = None,
    rehearse: bool = False,
) -> Progress:
    """Run all code cells in place, until one fails. Returns `progress`, which is filled in while they run.

    `folder` is the kernel's working directory; `env` comes on top of the present environment. A cell that takes longer
    than `timeout` seconds is interrupted, so that its outputs show where it was. `rehearse` pretends an accelerator
    (shared/pretended.py); ranks that a notebook launches are processes of their own and see the CPU.
    """
    progress = progress or Progress()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None

    def note(cell: NotebookNode, **_: Any) -> None:
        progress.cell = cell

    logging.getLogger("traitlets").setLevel(logging.CRITICAL)  # nbclient's messages are in `progress`, too
    start, token = time.monotonic(), uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="course-kernel-", ignore_cleanup_errors=True) as scratch:
        manager = AsyncKernelManager(
            kernel_spec_manager=KernelSpecManager(kernel_dirs=[]),  # knows the running Python's kernel alone
            **connection(Path(scratch, "connection.json")),  # not in a home that may be read-only
        )
        late = {"ename": "TimeoutError", "evalue": f"the cell did not finish within {timeout} s", "traceback": []}
        client = _Client(
            notebook, km=manager, startup_timeout=120, timeout=timeout, interrupt_on_timeout=True,
            error_on_timeout=late, iopub_timeout=10, record_timing=False, coalesce_streams=True, on_cell_execute=note,
        )  # fmt: skip
        environment = {
            **os.environ,
            "IPYTHONDIR": scratch,  # no start-up files of the user's
            "MPLBACKEND": "module://matplotlib_inline.backend_inline",
            **(env or {}),
            **(REHEARSAL if rehearse else {}),
            TOKEN: token,
        }
        log = Path(scratch, "kernel.log")  # tracebacks of a crash, messages of C libraries
        try:
            with open(log, "wb") as file:
                asyncio.run(_execute(client, progress, cwd=str(folder), env=environment, stdout=file, stderr=file))
        except CellExecutionError as error:
            progress.failure = f"{error.ename}: {error.evalue}"
        except RuntimeError as error:  # the kernel died, perhaps before it was ready
            status = manager.provisioner.process.poll()
            lack = ", killed, perhaps for lack of memory" if status == -9 else ""
            said = "\n".join(log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-20:])
            progress.failure = f"{error} (exit status {status}{lack}); it said:\n{said}"
        finally:
            _kill(token)
    progress.seconds = time.monotonic() - start
    return progress


async def _execute(client: NotebookClient, progress: Progress, **kernel: Any) -> None:
    """Execute a notebook; meanwhile measure its memory, and kill its kernel when `progress` says so."""
    running = asyncio.create_task(client.async_execute(cleanup_kc=True, **kernel))
    while not (await asyncio.wait({running}, timeout=SAMPLE_SECONDS))[0]:
        if pid := getattr(client.km.provisioner, "pid", None):
            progress.peak = max(progress.peak, _memory(pid))
        if progress.stop:
            _kill(kernel["env"][TOKEN])
    running.result()


class _Client(NotebookClient):
    """Fails a notebook that gives output without end."""

    characters = 0

    def output(self, outs: list[NotebookNode], msg: dict, display_id: str | None, cell_index: int) -> Any:
        self.characters += len(str(msg["content"]))
        if self.characters > OUTPUT_LIMIT:
            raise CellExecutionError("", "Output", f"the notebook gave more than {OUTPUT_LIMIT:,} characters")
        return super().output(outs, msg, display_id, cell_index)


def _memory(pid: int) -> int:
    """Bytes that a process and all that it has started don't share with others."""
    total = 0
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            total += process.memory_full_info().uss
    return total


def _kill(token: str) -> None:
    """Kill all that has this token: the kernel and what it has started, daemons and orphans, too."""
    left = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(TOKEN) == token:
                process.kill()
                left.append(process)
    psutil.wait_procs(left, timeout=5)
