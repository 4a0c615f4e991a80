"""Execute notebooks, several at a time, and show a table of how they did.

Without names: every notebook of the syllabus that exists. A name is a topic (15-01, 15-1 or 1), a notebook file or a
folder of notebooks. The executed copies go to executed/, also those that failed; a copy that you have changed is kept
under another name. The sources are changed only by --save, and only their outputs.

--rehearse runs them with a pretended accelerator: everything is computed on the CPU, but a tensor on the wrong device,
float64 on a Mac's GPU and the like fail their cell as they would there. Its copies go to executed/rehearsed/.

The exit status is 0 if all passed, 1 if one failed, 2 for wrong usage and 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import threading
import time
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode
from rich.console import Console
from rich.table import Table
from rich.text import Text

from course import syllabus
from course.environment import ROOT
from course.execution import Failure, NotebookError, Progress, execute, read_notebook, write_notebook
from course.files import NotWritableError, require_writable
from course.processes import asked_to_end, share_of_cores
from course.selection import Selected, SelectionError, select
from course.settings import SettingError, check_settings, positive

STYLES = {"passed": "green", "failed": "bold red", "interrupted": "yellow"}
STAMP = "executed_copy"  # in the metadata of a copy: the digest of what was written
REPORT_SECONDS = 20  # between two lines on a running notebook


@dataclass
class Job:
    """One notebook of a run. `status`: waiting, running, passed, failed, interrupted or not written yet."""

    notebook: Selected
    target: Path
    status: str = "waiting"
    progress: Progress = field(default_factory=Progress)
    notes: list[str] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("notebooks", nargs="*", metavar="TOPIC|FILE", help="default: all that exist")
    parser.add_argument("--jobs", "-j", type=positive(int), default=2, help="notebooks at a time (default 2)")
    parser.add_argument("--save", action="store_true", help="write the outputs into the notebooks that passed")
    parser.add_argument("--cell", action="append", default=[], metavar="ID", help="--save only this one's (repeatable)")
    parser.add_argument("--rehearse", action="store_true", help="pretend an accelerator, to find mistakes with devices")
    parser.add_argument("--output", type=Path, default=ROOT / "executed", help="folder of the executed copies")
    parser.add_argument(
        "--timeout", type=positive(float), default=300.0, metavar="S", help="seconds for a cell (default 300)"
    )


def main(args: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    console = _console()
    try:
        data = check_settings()
        if args.rehearse and args.save:
            raise SelectionError("--save would keep the outputs of a rehearsal; leave out --save or --rehearse.")
        if args.cell and not args.save:
            raise SelectionError("--cell says which outputs are stored; add --save.")
        output = args.output / "rehearsed" if args.rehearse else args.output
        jobs = plan(select(args.notebooks, syllabus.load()), output, rehearse=args.rehearse)
        folders = {output, *(job.notebook.path.parent for job in jobs if args.save and job.notebook.path.is_file())}
        if args.cell:
            _require_cells(jobs, args.cell)
        for folder in sorted(folders):
            require_writable(folder, "" if folder != output else "; name another --output")
    except (SelectionError, syllabus.SyllabusError, SettingError, NotWritableError, NotebookError) as error:
        console.print(f"run: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 2
    start = time.monotonic()
    interrupted = False
    with asked_to_end(), _Display(jobs, console) as display:
        try:
            options = {"timeout": args.timeout, "rehearse": args.rehearse}
            asyncio.run(
                run_all(jobs, display, at_once=args.jobs, data=data, save=args.save, cells=args.cell, **options)
            )
        except KeyboardInterrupt:
            interrupted = True
    for job in jobs:
        if job.status in ("waiting", "running") and interrupted:
            job.status = "interrupted"
    console.print(_summary(jobs))
    _closing_lines(jobs, output, data, time.monotonic() - start, console)
    if interrupted:
        return 130
    if any(job.status == "failed" for job in jobs):
        return 1
    if not any(job.status == "passed" for job in jobs):
        console.print("There was nothing to run.", style="yellow")
        return 1
    return 0


def plan(notebooks: list[Selected], output: Path, *, rehearse: bool = False) -> list[Job]:
    """A job for each notebook, no two writing the same file. SelectionError if a copy would overwrite a source.

    The budgets of the syllabus don't hold for a rehearsal, which takes longer.
    """
    output = output.resolve()
    jobs: list[Job] = []
    taken: set[str] = set()
    for notebook in notebooks:
        name = notebook.path.name
        while name.casefold() in taken:  # two folders can hold notebooks of one name
            name = f"{notebook.path.parent.name}-{name}"
        taken.add(name.casefold())
        if output / name == notebook.path:
            raise SelectionError(f"the copies would overwrite the notebooks in {output}; name another --output.")
        jobs.append(Job(replace(notebook, budget_seconds=None) if rehearse else notebook, output / name))
    return jobs


async def run_all(jobs: list[Job], display: _Display, *, at_once: int, data: str, **options: Any) -> None:
    """Run the jobs in their order, `at_once` at a time; what goes wrong with one is noted in it and stops no other.

    `options` are those of `execute`, timeout and rehearse, and what is stored: save, cells.
    """
    waiting = iter(jobs)
    at_once = min(at_once, sum(job.notebook.path.is_file() for job in jobs)) or 1
    env = {"COURSE_DATA": data, **share_of_cores(at_once)}

    async def work() -> None:
        for job in waiting:
            await _run_one(job, display, env=env, **options)

    await asyncio.gather(*(work() for _ in range(at_once)))


async def _run_one(job: Job, display: _Display, *, save: bool, cells: list[str], **options: Any) -> None:
    path = job.notebook.path
    if not path.is_file():
        job.status = "not written yet"
        return
    job.status = "running"
    display.line(job, "started")
    try:
        notebook, digest = read_notebook(path)
        await execute(notebook, path.parent, job.progress, **options)
        _keep_changed_copy(job)
        copy = deepcopy(notebook)
        copy.metadata[STAMP] = _digest(notebook)
        write_notebook(copy, job.target)
        if save and job.progress.failure is None:
            _save(job, notebook, digest, cells)
    except NotebookError as error:
        job.progress.failure = Failure(str(error))
        _keep_changed_copy(job)
        job.target.unlink(missing_ok=True)  # an older copy would look like this run's
    except asyncio.CancelledError:
        job.status = "interrupted"
        raise
    except Exception as error:  # a fault of this program or the system must not take the other notebooks with it
        job.progress.failure = Failure(f"{type(error).__name__}: {error}")
    job.status = "passed" if job.progress.failure is None else "failed"
    if job.progress.cut:
        job.notes.append(f"cell '{job.progress.cut}' gave too much output; it was cut")
    display.finished(job)


def _digest(notebook: NotebookNode) -> str:
    """Of the sources and outputs."""
    content = [[cell.cell_type, cell.source, cell.get("outputs")] for cell in notebook.cells]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _keep_changed_copy(job: Job) -> None:
    """Move an older copy that isn't as it was written out of the way; somebody may have worked in it."""
    target = job.target
    if not target.exists():
        return
    with contextlib.suppress(NotebookError):
        old, _ = read_notebook(target)
        if old.metadata.get(STAMP) == _digest(old):
            return
    names = ("edited", *(f"edited-{number}" for number in range(2, 1000)))
    kept = next(path for name in names if not (path := target.with_suffix(f".{name}.ipynb")).exists())
    target.rename(kept)
    job.notes.append(f"an older copy had been changed; it is kept as {kept.name}")


def _require_cells(jobs: list[Job], cells: list[str]) -> None:
    """SelectionError if there isn't one notebook, or it lacks a code cell of these ids."""
    if len(jobs) != 1 or not jobs[0].notebook.path.is_file():
        raise SelectionError("--cell needs one notebook, such as 15-03.")
    notebook, _ = read_notebook(jobs[0].notebook.path)
    code = {cell.get("id") for cell in notebook.cells if cell.cell_type == "code"}
    for cell in cells:
        if cell not in code:
            raise SelectionError(f"{jobs[0].notebook.label} has no code cell {cell!r}.")


def _save(job: Job, executed: NotebookNode, digest: str, cells: list[str]) -> None:
    """Put the outputs of `cells`, or of all if there are none, into the source, and nothing else."""
    path = job.notebook.path
    if job.progress.cut:
        job.notes.append("not saved: output was cut")
        return
    if hashlib.sha256(path.read_bytes()).hexdigest() != digest:
        job.notes.append("not saved: the file was changed while it ran")
        return
    source = nbformat.reads(path.read_text(encoding="utf-8"), as_version=nbformat.NO_CONVERT)
    for mine, theirs in zip(source.cells, executed.cells, strict=True):
        if mine.cell_type == "code":
            mine.execution_count = theirs.execution_count
            if not cells or mine.id in cells:
                mine.outputs = theirs.outputs
    write_notebook(source, path)
    job.notes.append("outputs saved")


# --------------------------------------------------------------------------------------------------------------------
# what the user sees


def _console() -> Console:
    console = Console(highlight=False)
    # a log has no width: 80 columns would break the table
    return console if console.is_terminal else Console(highlight=False, width=140)


class _Display:
    """Tells of the jobs in lines while they run: when one starts and ends, and every REPORT_SECONDS where it is."""

    def __init__(self, jobs: list[Job], console: Console) -> None:
        self.jobs, self.console = jobs, console
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._report, daemon=True)

    def __enter__(self) -> _Display:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join(timeout=5)

    def line(self, job: Job, text: str) -> None:
        self.console.print(Text(f"{job.notebook.label}  {text}"), soft_wrap=True)

    def finished(self, job: Job) -> None:
        self.line(job, f"{job.status}  {job.progress.elapsed:.1f} s  {_size(job.progress.peak)}")
        if job.progress.failure is not None:
            self.console.print(_explain(job), soft_wrap=True)

    def _report(self) -> None:
        while not self._done.wait(REPORT_SECONDS):
            for job in self.jobs:
                if job.status == "running":
                    at = job.progress
                    self.line(job, f"cell {at.cell}/{at.cells}  {at.elapsed:.0f} s  {_size(at.memory)}")


def _size(number: int) -> str:
    return f"{number / 1e9:.2f} GB" if number else ""


def _explain(job: Job) -> Text:
    """A failure in full: where, the cell's source with a mark at the line, the traceback."""
    failure = job.progress.failure
    path = job.notebook.path
    name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    told = Text().append(f"\nFAILED  {name}\n", "bold red")
    if failure.cell_number:
        told.append(f"code cell {failure.cell_number} of {job.progress.cells}, id '{failure.cell_id}'\n", "bold")
    told.append(f"{failure.reason}\n\n")
    for number, line in enumerate(failure.source.splitlines(), start=1):
        marked = number == failure.line
        told.append(f"{'>' if marked else ' '} {number:3} | {line}\n", "bold" if marked else "dim")
    told.append("\n")
    return told.append(Text.from_ansi(failure.traceback))


def _summary(jobs: list[Job]) -> Table:
    table = Table(header_style="bold")
    for name in ("topic", "title", "status"):
        table.add_column(name, no_wrap=name != "title")
    table.add_column("seconds / budget", justify="right", no_wrap=True)
    table.add_column("peak memory", justify="right", no_wrap=True)
    table.add_column("device", no_wrap=True)
    for job in jobs:
        progress, budget = job.progress, job.notebook.budget_seconds
        status = Text(job.status, STYLES.get(job.status, "dim"))
        if job.status == "failed" and progress.failure.cell_id:
            status.append(f" ({progress.failure.cell_id})")
        seconds = Text()
        if progress.seconds is not None:
            over = budget is not None and progress.seconds > budget
            seconds.append(f"{progress.seconds:.1f}" + ("" if budget is None else f" / {budget:g}"))
            if over:
                seconds.append(" over budget")
                seconds.stylize("yellow")
        for note in job.notes:
            status.append(f"\n{note}", "default")
        table.add_row(
            job.notebook.topic or "", job.notebook.title, status, seconds, _size(progress.peak), progress.device
        )
    return table


def _closing_lines(jobs: list[Job], output: Path, data: str, seconds: float, console: Console) -> None:
    states = [job.status for job in jobs]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    console.print(Text(f"{counts}; {seconds:.0f} s in all, COURSE_DATA={data}."), soft_wrap=True)
    console.print(
        Text("Peak memory is the largest sum over a kernel and its child processes; shared pages count once on Linux."),
        style="dim",
        soft_wrap=True,
    )
    if any(job.target.is_file() for job in jobs if job.status in ("passed", "failed")):
        console.print(Text(f"The executed copies are in {output.resolve()}"), soft_wrap=True)
