"""Execute one notebook in a kernel of its own, watch it, and end everything that it started.

nbclient runs the cells; what is added is what a batch of notebooks needs: the kernel is always the running Python's
(whatever kernel specifications a user has installed), its memory is measured with that of its children, a cell that
hangs is interrupted to learn where, output without end is cut, and no process is left over.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import re
import signal
import sys
import tempfile
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import psutil
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError
from nbformat import NotebookNode

from course.files import write_whole
from course.kernels import connection

START_LIMIT = 120  # seconds for a kernel to answer for the first time
INTERRUPT_LIMIT = 5  # seconds to wait for the traceback of an interrupted cell
END_LIMIT = 10  # seconds for a kernel to end in order before it is killed
OUTPUT_LIMIT = 5_000_000  # characters of output that are kept of one cell (a figure has about 100,000)
SAMPLE_SECONDS = 0.2  # between two measurements of memory, at least
SAMPLE_SHARE = 0.05  # of the time they may take at most
# shared.get_device pretends an accelerator; and how long something takes on it says nothing
REHEARSAL = {"COURSE_DEVICE": "pretended", "COURSE_TIMING": "rough"}
TOKEN = "COURSE_KERNEL"  # environment variable by which everything that a kernel started is recognised

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class NotebookError(ValueError):
    """A file that isn't a notebook; the message says what is wrong with it."""


@dataclass(frozen=True)
class Failure:
    """Why a notebook stopped. All but `reason` are empty if no cell is to blame."""

    reason: str
    cell_id: str = ""
    cell_number: int = 0  # counted over the code cells, from 1
    source: str = ""
    line: int | None = None  # of the source, from 1
    traceback: str = ""  # with ANSI colours


@dataclass
class Progress:
    """What is known about a notebook while it runs, and at the end. Written by `execute`, read by whoever shows it."""

    cells: int = 0  # code cells
    cell: int = 0  # the one that runs or ran last, from 1
    started: float | None = None
    seconds: float | None = None  # wall time from starting the kernel to the end of the last cell
    memory: int = 0  # bytes now: the kernel and its children (PSS on Linux, RSS elsewhere)
    peak: int = 0
    device: str = ""
    cut: str = ""  # id of a cell whose output was cut
    failure: Failure | None = None

    @property
    def elapsed(self) -> float:
        """Seconds so far."""
        if self.seconds is not None:
            return self.seconds
        return 0.0 if self.started is None else time.monotonic() - self.started


def read_notebook(path: Path) -> tuple[NotebookNode, str]:
    """Read and validate a notebook (format 4). Returns it and the SHA-256 of the file. Raises NotebookError."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise NotebookError(f"can't be read: {error.strerror or error}") from error
    if not content.strip():
        raise NotebookError("the file is empty")
    try:
        text = content.decode("utf-8")
        notebook = nbformat.reads(text, as_version=nbformat.NO_CONVERT)
        if notebook.get("nbformat") != 4:
            raise NotebookError(f"notebook format {notebook.get('nbformat')}, not 4: open and save it in JupyterLab")
        nbformat.validate(notebook)
    except UnicodeDecodeError as error:
        raise NotebookError(f"not UTF-8 text (byte {error.start})") from error
    except nbformat.reader.NotJSONError as error:
        reason = error.__cause__ or error.__context__
        where = f" (line {reason.lineno}, column {reason.colno}: {reason.msg})" if hasattr(reason, "lineno") else ""
        raise NotebookError(f"not JSON, so not a notebook{where}") from error
    except nbformat.ValidationError as error:
        raise NotebookError(f"not a valid notebook: {str(error).strip().splitlines()[0]}") from error
    except (AttributeError, TypeError, KeyError) as error:
        raise NotebookError("JSON, but not a notebook") from error
    return notebook, hashlib.sha256(content).hexdigest()


def write_notebook(notebook: NotebookNode, path: Path) -> None:
    """Write a notebook, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, nbformat.writes(notebook, version=nbformat.NO_CONVERT).rstrip("\n") + "\n")


def plain(text: str) -> str:
    """Text without ANSI colours."""
    return _ANSI.sub("", text)


async def execute(
    notebook: NotebookNode,
    folder: Path,
    progress: Progress,
    *,
    timeout: float = 300,
    env: dict[str, str] | None = None,
    rehearse: bool = False,
    kernel: list[str] | None = None,
) -> None:
    """Run all code cells in place, until one fails; `progress` is filled in while they run.

    Args:
        notebook: is changed: outputs and execution counts (also of the cell that failed), language_info.
        folder: the kernel's working directory.
        timeout: seconds for one cell.
        env: environment variables on top of the present ones.
        rehearse: pretend an accelerator (shared/pretended.py), so that a tensor on the wrong device fails its cell. A
            notebook that never calls get_device fails, too: nothing was rehearsed. Ranks that it launches are
            processes of their own and see the CPU.
        kernel: the command that starts a kernel, for tests; default: this Python's ipykernel.

    Cancelling the task ends the kernel and its children first.
    """
    env = {**(env or {}), **(REHEARSAL if rehearse else {})}
    code_cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for cell in code_cells:
        cell.outputs, cell.execution_count = [], None
    progress.cells, progress.started = len(code_cells), time.monotonic()
    number = {id(cell): index for index, cell in enumerate(code_cells, start=1)}
    with tempfile.TemporaryDirectory(prefix="course-kernel-", ignore_cleanup_errors=True) as scratch:
        running = _Kernel(notebook, folder, Path(scratch), progress, timeout, env, kernel)
        cell, index, finished = None, 0, False
        try:
            await running.start()
            for index, cell in enumerate(notebook.cells):
                progress.cell = number.get(id(cell), progress.cell)
                await running.run_cell(cell, index)
            finished = True
        except CellExecutionError as error:
            progress.failure = _failure(cell, progress.cell, f"{error.ename}: {plain(error.evalue)}".strip())
        except TimeoutError:
            reason = f"the cell did not finish within {timeout:g} s (time-out)"
            progress.failure = _failure(cell, progress.cell, reason)
        except DeadKernelError:
            progress.failure = _failure(cell, progress.cell, running.how_it_died())
        except _Stopped as error:
            progress.failure = _failure(cell, progress.cell, str(error))
        except _NoKernel as error:
            progress.failure = Failure(str(error))
        finally:
            progress.seconds = time.monotonic() - progress.started
            await asyncio.shield(running.end(in_order=finished))
            if running.client.cut_cell is not None:
                progress.cut = notebook.cells[running.client.cut_cell].get("id", "")
            progress.device = _device(notebook)
            if rehearse and finished and "pretended" not in progress.device:
                progress.failure = Failure("nothing was rehearsed: no cell shows a device of get_device()")


class _NoKernel(Exception):
    """The kernel didn't start."""


class _Stopped(Exception):
    """A cell ended the kernel in order: the cells below it would be skipped without a word."""


class _Client(NotebookClient):
    """Joins what a cell prints in pieces, and stops keeping what it prints without end."""

    kept = 0
    cell_kept = -1
    cut_cell: int | None = None

    def output(
        self, outs: list[NotebookNode], msg: dict, display_id: str | None, cell_index: int
    ) -> NotebookNode | None:
        if cell_index != self.cell_kept:
            self.cell_kept, self.kept = cell_index, 0
        content = msg["content"]
        room = OUTPUT_LIMIT - self.kept
        self.kept += len(content.get("text", "")) + sum(map(len, map(str, content.get("data", {}).values())))
        if self.kept > OUTPUT_LIMIT and msg["msg_type"] != "error":
            if self.cut_cell != cell_index:
                self.cut_cell = cell_index
                if room > 0 and msg["msg_type"] == "stream":
                    outs.append(nbformat.v4.new_output("stream", name=content["name"], text=content["text"][:room]))
                text = f"\n[output cut here: the cell gave more than {OUTPUT_LIMIT:,} characters]\n"
                outs.append(nbformat.v4.new_output("stream", name="stderr", text=text))
            return None
        out = super().output(outs, msg, display_id, cell_index)
        joins = out is not None and out.output_type == "stream" and len(outs) > 1
        if joins and outs[-2].output_type == "stream" and outs[-2].name == out.name:
            outs.pop()
            outs[-1].text += out.text
        return out


class _ThisPython(KernelSpecManager):
    """Knows one kernel under every name: the one of the running Python."""

    command: list[str] | None = None

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        command = self.command or [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=command, display_name="Python 3 (ipykernel)", language="python", name="python3")


class _Kernel:
    """One kernel process with its client, its log, and the watch over its memory and children."""

    def __init__(
        self, notebook: NotebookNode, folder: Path, scratch: Path, progress: Progress, timeout: float,
        env: dict[str, str], command: list[str] | None,
    ) -> None:  # fmt: skip
        logging.getLogger("traitlets").setLevel(logging.CRITICAL)  # nbclient's messages are in `progress`, too
        specs = _ThisPython()
        specs.command = command
        place = connection(scratch / "connection.json")  # not in a home that may be read-only
        self.manager = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=specs, **place)
        self.client = _Client(
            notebook, km=self.manager, timeout=None, startup_timeout=START_LIMIT, record_timing=False,
            iopub_timeout=30, allow_errors=False, on_cell_executed=_no_exit,
        )  # fmt: skip
        self.folder, self.progress, self.timeout = folder, progress, timeout
        self.log = scratch / "kernel.log"
        self.token = uuid.uuid4().hex
        self.env = {
            **os.environ,
            "IPYTHONDIR": str(scratch / "ipython"),  # no start-up files of the user's, no shared history
            "MPLBACKEND": "module://matplotlib_inline.backend_inline",
            **env,
            TOKEN: self.token,
        }
        self.watch: _Watch | None = None

    async def start(self) -> None:
        """Start the process and wait until it answers. Raises _NoKernel."""
        # the kernel's own stdout and stderr: tracebacks of a crash, messages of C libraries
        with open(self.log, "wb") as log:
            try:
                await self.manager.start_kernel(
                    extra_arguments=["--log-level=40", "--HistoryManager.hist_file=:memory:"],
                    cwd=str(self.folder), env=self.env, stdout=log, stderr=log,
                )  # fmt: skip
            except OSError as error:
                raise _NoKernel(f"the kernel could not be started: {error}") from error
        self.watch = _Watch(self.manager.provisioner.pid, self.progress)
        self.client.kc = self.manager.client()
        self.client.kc.start_channels()
        try:
            await self.client.kc.wait_for_ready(timeout=START_LIMIT)
        except RuntimeError as error:
            said = self._log_tail()
            raise _NoKernel(f"the kernel did not start ({error})" + (f"; it said:\n{said}" if said else "")) from error
        self.client.kc.allow_stdin = False
        self.client.reset_execution_trackers()
        info = self.client.kc.kernel_info()
        reply = await self.client.async_wait_for_reply(info)
        self.client.nb.metadata["language_info"] = reply["content"]["language_info"]

    async def run_cell(self, cell: NotebookNode, index: int) -> None:
        """Run one cell. Raises TimeoutError, or what nbclient raises.

        A cell that takes too long is interrupted, so that its outputs end in a traceback that shows where it was.
        """
        running = asyncio.ensure_future(self.client.async_execute_cell(cell, index))
        try:
            done, _ = await asyncio.wait({running}, timeout=self.timeout)
            if done:
                running.result()
                return
            await self.manager.interrupt_kernel()
            await asyncio.wait({running}, timeout=INTERRUPT_LIMIT)
            raise TimeoutError
        finally:
            if not running.done():
                running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    def how_it_died(self) -> str:
        """One or more lines on a process that is gone."""
        status = self.manager.provisioner.process.poll() if self.manager.provisioner else None
        if status is not None and status < 0:
            how = f"ended by {signal.Signals(-status).name}" + (", perhaps for lack of memory" if status == -9 else "")
        else:
            how = f"ended with exit status {status}"
        said = self._log_tail()
        return f"the kernel died ({how})" + (f"; it said:\n{said}" if said else "")

    def _log_tail(self) -> str:
        with contextlib.suppress(OSError):
            return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-20:])
        return ""

    async def end(self, *, in_order: bool) -> None:
        """End the kernel (in order: it may run its exit handlers) and whatever it has started."""
        if self.watch is not None:
            self.watch.stop()
        if self.client.kc is not None:
            self.client.kc.stop_channels()
        if self.manager.has_kernel:
            with contextlib.suppress(Exception):
                self.manager.shutdown_wait_time = END_LIMIT
                await asyncio.wait_for(self.manager.shutdown_kernel(now=not in_order), 2 * END_LIMIT)
        with contextlib.suppress(Exception):
            await self.manager.cleanup_resources()
        if self.watch is not None:
            await asyncio.to_thread(_kill, self.watch.seen, self.token)


class _Watch:
    """Measures a process and its children several times a second in a thread, and remembers who they were."""

    def __init__(self, pid: int, progress: Progress) -> None:
        self.progress = progress
        self.seen: set[psutil.Process] = set()
        self._done = threading.Event()
        with contextlib.suppress(psutil.Error):
            self._root = psutil.Process(pid)
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    def _run(self) -> None:
        pause = SAMPLE_SECONDS
        while not self._done.wait(pause):
            start = time.monotonic()
            if not self._sample():
                return
            # a PSS takes 20 ms for a process with PyTorch: what measures must not slow down what is measured
            pause = max(SAMPLE_SECONDS, (time.monotonic() - start) / SAMPLE_SHARE)

    def _sample(self) -> bool:
        try:
            processes = [self._root, *self._root.children(recursive=True)]
        except psutil.Error:
            return False
        self.seen.update(processes)
        total = 0
        for process in processes:
            with contextlib.suppress(psutil.Error):
                total += _memory_of(process)
        self.progress.memory = total
        self.progress.peak = max(self.progress.peak, total)
        return True

    def stop(self) -> None:
        """Measure once more and stop."""
        self._done.set()
        if hasattr(self, "_thread"):
            self._thread.join(timeout=5)
            self._sample()


def _memory_of(process: psutil.Process) -> int:
    """Bytes of memory that this process accounts for: its PSS where the system tells it (Linux), else its RSS.

    In PSS a page that several processes share counts once, spread over them; in a sum of RSS it counts for each, so
    that four ranks forked from one server seem to hold PyTorch four times.
    """
    with contextlib.suppress(psutil.AccessDenied, AttributeError):
        return process.memory_full_info().pss
    return process.memory_info().rss


def _no_exit(cell: NotebookNode, cell_index: int, execute_reply: dict[str, Any]) -> None:
    if any(payload.get("source") == "ask_exit" for payload in execute_reply["content"].get("payload", [])):
        raise _Stopped("the cell calls exit() or quit(), which would end the notebook here")


def _kill(seen: set[psutil.Process], token: str) -> None:
    """Kill what is left of a kernel: the processes seen, and any that carries its token (a daemon, an orphan)."""
    left = set(seen)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(TOKEN) == token:
                left.add(process)
    for process in left:
        with contextlib.suppress(psutil.Error):
            if process.is_running():
                process.kill()
    psutil.wait_procs(left, timeout=5)


def _failure(cell: NotebookNode | None, number: int, reason: str) -> Failure:
    """The failure of a cell, with the line that its traceback names."""
    if cell is None:
        return Failure(reason)
    errors = [output for output in cell.outputs if output.output_type == "error"]
    traceback = "\n".join(errors[-1].traceback) if errors else ""
    count = cell.get("execution_count")
    name = re.escape(str(count)) if count else r"\d+"
    found = re.search(rf"Cell In\s?\[{name}\], line (\d+)", plain(traceback))
    return Failure(reason, cell.get("id", ""), number, cell.source, int(found[1]) if found else None, traceback)


def _device(notebook: NotebookNode) -> str:
    """The device that the notebook's device cell printed (a line 'device   cpu'), or ''."""
    for cell in notebook.cells:
        if cell.cell_type != "code" or not (cell.get("id") == "device" or "get_device(" in cell.source):
            continue
        for output in cell.outputs:
            text = output.get("text") or output.get("data", {}).get("text/plain", "")
            found = re.search(r"^\W*device\b\W*\s(\S+( \(pretended\))?)", plain(text), re.MULTILINE | re.IGNORECASE)
            if found:
                return found[1]
    return ""


def execute_blocking(notebook: NotebookNode, folder: Path, **options: Any) -> Progress:
    """`execute` for callers without an event loop; `options` are its keyword arguments."""
    progress = Progress()
    asyncio.run(execute(notebook, folder, progress, **options))
    return progress
