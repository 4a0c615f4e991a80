"""Execute notebooks, several at a time, and show a table of how they did.

Without names: every notebook of the syllabus that exists. A name is a topic (15-01, 15-1 or 1), a notebook file or a
folder of notebooks. The executed copies go to executed/, also those that failed, and replace those of the last run. The
sources are changed only by --save, and only their outputs.

--rehearse runs them with a pretended accelerator: everything is computed on the CPU, but a tensor on the wrong device,
float64 on a Mac's GPU and the like fail their cell as they would there. Its copies go to executed/rehearsed/.

The exit status is 0 if all passed, 1 if one failed, 2 for wrong usage and 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from nbformat import NotebookNode
from rich.console import Console
from rich.table import Table
from rich.text import Text

from course import syllabus
from course.environment import ROOT
from course.execution import NotebookError, Progress, execute_blocking, read_notebook, write_notebook
from course.files import NotWritableError, require_writable
from course.processes import asked_to_end, positive, share_of_cores
from course.selection import Selected, SelectionError, select

STYLES = {"passed": "green", "failed": "bold red", "interrupted": "yellow"}
COPIES = ROOT / "executed"


@dataclass
class Job:
    """One notebook of a run. `status`: passed, failed or, until then, interrupted."""

    notebook: Selected
    target: Path
    status: str = "interrupted"
    progress: Progress = field(default_factory=Progress)
    notes: list[str] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("notebooks", nargs="*", metavar="TOPIC|FILE", help="default: all that exist")
    parser.add_argument("--jobs", "-j", type=positive, default=2, help="notebooks at a time (default 2)")
    parser.add_argument("--save", action="store_true", help="write the outputs into the notebooks that passed")
    parser.add_argument("--cell", action="append", default=[], metavar="ID", help="--save only this one's (repeatable)")
    parser.add_argument("--rehearse", action="store_true", help="pretend an accelerator, to find mistakes with devices")
    parser.add_argument("--output", type=Path, default=COPIES, help="folder of the executed copies")
    parser.add_argument("--timeout", type=positive, default=300, metavar="S", help="seconds for a cell (default 300)")


def main(args: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    # a log has no width: 80 columns would break the table
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 140)
    try:
        if args.rehearse and args.save:
            raise SelectionError("--save would keep the outputs of a rehearsal; leave out --save or --rehearse.")
        if args.cell and not args.save:
            raise SelectionError("--cell says which outputs are stored; add --save.")
        output = (args.output / "rehearsed" if args.rehearse else args.output).resolve()
        # a topic of the syllabus that isn't written yet is left out, unless it is named
        chosen = [one for one in select(args.notebooks, syllabus.load()) if args.notebooks or one.path.is_file()]
        jobs = [Job(notebook, output / notebook.path.name) for notebook in chosen]
        # only copies that were made here before are replaced
        if any(job.target == job.notebook.path or (args.output != COPIES and job.target.exists()) for job in jobs):
            raise SelectionError(f"the copies would overwrite notebooks in {output}; name another --output.")
        if len({job.target for job in jobs}) < len(jobs):
            raise SelectionError("two of the notebooks have the same name, and so would their copies; run them apart.")
        if args.cell:
            _require_cells(jobs, args.cell)
        require_writable(output, "; name another --output")
    except (SelectionError, syllabus.SyllabusError, NotWritableError, NotebookError) as error:
        console.print(f"run: {error}", style="red", soft_wrap=True)
        return 2
    data = os.environ.get("COURSE_DATA") or "sample"
    start = time.monotonic()
    _run_all(jobs, args, data, console)
    console.print(_summary(jobs))
    states = [job.status for job in jobs]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    console.print(f"{counts}; {time.monotonic() - start:.0f} s in all, COURSE_DATA={data}.", soft_wrap=True)
    console.print(f"The executed copies are in {output}", soft_wrap=True)
    if "interrupted" in states:
        return 130
    return 0 if "passed" in states and "failed" not in states else 1


def _require_cells(jobs: list[Job], cells: list[str]) -> None:
    """SelectionError if there isn't one notebook, or it lacks a cell of these ids."""
    if len(jobs) != 1:
        raise SelectionError("--cell needs one notebook, such as 15-03.")
    notebook, _ = read_notebook(jobs[0].notebook.path)
    if unknown := set(cells) - {cell.get("id") for cell in notebook.cells}:
        raise SelectionError(f"{jobs[0].notebook.label} has no cell {', '.join(sorted(unknown))}.")


def _run_all(jobs: list[Job], args: argparse.Namespace, data: str, console: Console) -> None:
    """Run the jobs in their order, some at a time, until all have ended or the user interrupts them."""
    at_once = min(args.jobs, len(jobs)) or 1
    env = {"COURSE_DATA": data, **share_of_cores(at_once)}
    with asked_to_end(), ThreadPoolExecutor(at_once) as pool:
        try:
            running = [pool.submit(_run, job, args, env, console) for job in jobs]
            while wait(running, 0.5).not_done:  # Windows hears Ctrl-C between two waits only
                pass
        except KeyboardInterrupt:
            for job in jobs:
                job.progress.stop = True


def _run(job: Job, args: argparse.Namespace, env: dict[str, str], console: Console) -> None:
    """Run one notebook; what goes wrong is noted in the job and stops no other."""
    path, progress = job.notebook.path, job.progress
    if progress.stop:
        return
    console.print(f"{job.notebook.label}  started", soft_wrap=True)
    try:
        job.target.unlink(missing_ok=True)
        notebook, digest = read_notebook(path)
        execute_blocking(notebook, path.parent, progress, timeout=args.timeout, env=env, rehearse=args.rehearse)
        if progress.stop:
            return
        write_notebook(notebook, job.target)
        if args.save and progress.failure is None:
            _save(job, notebook, digest, args.cell)
    except Exception as error:  # one that is no notebook, or a fault of the system, must not take the others with it
        progress.failure, progress.cell = f"{type(error).__name__}: {error}", None
    job.status = "passed" if progress.failure is None else "failed"
    console.print(f"{job.notebook.label}  {job.status}  {progress.seconds:.1f} s", soft_wrap=True)
    if progress.failure is not None:
        console.print(_explain(job), soft_wrap=True)


def _save(job: Job, executed: NotebookNode, digest: str, cells: list[str]) -> None:
    """Put the outputs of `cells`, or of all if there are none, into the source, and nothing else."""
    source, now = read_notebook(job.notebook.path)
    if now != digest:
        job.notes.append("not saved: the file was changed while it ran")
        return
    for mine, theirs in zip(source.cells, executed.cells, strict=True):
        if mine.cell_type == "code":
            mine.execution_count = theirs.execution_count
            if not cells or mine.id in cells:
                mine.outputs = theirs.outputs
    write_notebook(source, job.notebook.path)
    job.notes.append("outputs saved")


def _explain(job: Job) -> Text:
    """A failure in full: where, why, and the traceback or the cell."""
    heading = Text(f"\nFAILED  {job.notebook.path}\n", "bold red")
    cell = job.progress.cell
    if cell is None:
        return heading + Text(job.progress.failure)
    tracebacks = ["\n".join(output.traceback) for output in cell.outputs if output.output_type == "error"]
    details = Text.from_ansi(tracebacks[-1] if tracebacks else cell.source)
    return Text.assemble(heading, (f"cell {cell.get('id')!r}\n", "bold"), f"{job.progress.failure}\n\n", details)


def _summary(jobs: list[Job]) -> Table:
    table = Table(header_style="bold")
    for name in ("topic", "title", "status", "seconds / budget", "peak memory"):
        table.add_column(name, no_wrap=name != "title")
    for job in jobs:
        budget = f" / {job.notebook.budget_seconds:g}" if job.notebook.budget_seconds else ""
        table.add_row(
            job.notebook.topic,
            job.notebook.title,
            "\n".join([job.status, *job.notes]),
            f"{job.progress.seconds:.1f}{budget}",
            f"{job.progress.peak / 1e9:.2f} GB",
            style=STYLES[job.status],
        )
    return table
