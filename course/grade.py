"""Grade a folder of submissions, several at a time: a table of points, a page for each student, and a summary.

SUBMISSIONS is a folder or a zip file: a folder for each student, files with names in them, or what Moodle, Canvas or
Gradescope export. Files may have any name: which notebook it is, its answer cells tell. The answers are taken out of
the students' notebooks and put into the course's own, after the definitions there that they use; nothing else runs.
Each exercise is judged in a process of its own with limits, by the notebook's checks with another seed.

The output folder (default: grades, beside SUBMISSIONS) gets grades.csv, summary.html, feedback/STUDENT.html, and
seed.txt with the seed, which another run uses again. What was graded is kept there: called again, the command grades
only what is new, has changed or was interrupted.

With --dask the work is done by the workers of a running Dask cluster, whose machines have the course. With --gradescope
nothing is graded: it writes the zip of an autograder for one topic.

A check runs in one process with the answer that it judges. Mistakes stay in there; somebody who sets out to deceive a
check can do so, but can't change another student's grade where this system seals processes. Where it can't, the command
says so: then, and for strangers' submissions, grade in a container. The instructor's guide has the recipe.

The exit status is 0 if the grades are written, whatever they are, 1 if the course's own files are at fault, 2 for wrong
usage and 130 after Ctrl-C. What could not be read or judged is in the table's column "to look at".
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import multiprocessing
import os
import re
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from course import grade_pages, gradescope
from course.collecting import CollectingError, Collection, HandedIn, collect
from course.files import NotWritableError, require_writable, write_whole
from course.grade_pages import Outcome
from course.grading import ABSENT, NOT_HANDED_IN, PROBLEMS, UNREADABLE, Graded, GradingLimits, absent, grade, prepare
from course.judging import BROKEN
from course.lesson_code import TargetError
from course.processes import asked_to_end
from course.settings import positive
from course.submission import Submission
from course.syllabus import SyllabusError

KEPT = ".graded"  # folder for what was graded, by digest
SEED = "seed.txt"
DASK_SECONDS = 15  # for a scheduler to answer


class UsageError(ValueError):
    """The command can't be run as it was called; the message says why."""


@dataclass
class Job:
    """A submission to grade: under which name its result is kept, and whose it is."""

    key: str
    handed_in: list[HandedIn]
    graded: Graded | None = None

    @property
    def label(self) -> str:
        """Who, and what."""
        first, *more = self.handed_in
        return f"{first.student}{f' and {len(more)} more' if more else ''}, {first.topic}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("submissions", nargs="?", default="", metavar="SUBMISSIONS", help="folder or zip file")
    parser.add_argument("--output", type=Path, help="folder (default: grades, beside SUBMISSIONS)")
    parser.add_argument("--seed", type=int, help="of the checks (default: that of the output folder, else random)")
    parser.add_argument("--force", action="store_true", help="grade again what was graded already, too")
    parser.add_argument("--jobs", "-j", type=positive(int), help="submissions at a time (default: one for each core)")
    parser.add_argument(
        "--timeout",
        type=positive(float),
        default=60.0,
        metavar="S",
        help="seconds for an answer, and for its check (default 60)",
    )
    parser.add_argument("--dask", metavar="ADDRESS", help="have a Dask cluster grade, such as tcp://10.0.0.1:8786")
    parser.add_argument("--gradescope", metavar="TOPIC", help="only write dist/gradescope-TOPIC.zip, an autograder")


def main(args: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    console = Console(highlight=False)
    console = console if console.is_terminal else Console(highlight=False, width=140)
    try:
        if args.gradescope:
            return _write_autograder(args, console)
        source, output, seed, limits = _settings(args)
        with console.status("reading the submissions"):
            collection = collect(source)
            if not collection.students:
                raise CollectingError(f"{source} holds neither notebooks nor folders of students")
            jobs = _jobs(collection, seed, limits)
        if not args.force:
            for job in jobs:
                job.graded = _read_kept(output / KEPT / f"{job.key}.json")
        waiting = [job for job in jobs if job.graded is None]
        stop = threading.Event()
        pool = _pool(args, waiting, console, functools.partial(grade, seed=seed, limits=limits), stop)
    except (UsageError, CollectingError, NotWritableError) as error:
        console.print(f"grade: {error}", style="red", markup=False, soft_wrap=True)
        return 2
    except (TargetError, SyllabusError) as error:
        console.print(f"grade: the course's own files can't be used: {error}", style="red", markup=False)
        return 1
    write_whole(output / SEED, f"{seed}\n")
    (output / KEPT).mkdir(exist_ok=True)
    try:
        with asked_to_end():
            _grade_all(waiting, output / KEPT, pool, console)
    except KeyboardInterrupt:
        done = sum(job.graded is not None for job in jobs)
        console.print(f"Interrupted; {done} of {len(jobs)} are graded. The same command goes on from here.")
        return 130
    finally:
        stop.set()
        pool.close()
        # an answer in a process that isn't sealed may have changed a file; what is in memory it can't
        for job in jobs:
            _keep(job, output / KEPT)
    outcomes = _outcomes(jobs, collection)
    _write(output, outcomes, collection.unreadable, seed)
    console.print(_table(outcomes, collection.unreadable))
    written = f"{output.resolve()} has grades.csv, summary.html, and the reasons in feedback/"
    console.print(Text(written), soft_wrap=True)
    return 0


def _write_autograder(args: argparse.Namespace, console: Console) -> int:
    from course.release import ReleaseError  # imports much that grading doesn't need

    try:
        console.print(gradescope.write(args.gradescope, args.output), soft_wrap=True)
    except ReleaseError as error:
        raise UsageError(str(error)) from None
    return 0


def _settings(args: argparse.Namespace) -> tuple[Path, Path, int, GradingLimits]:
    """The submissions, the output folder, the seed and the limits."""
    if not args.submissions:
        raise UsageError("name the folder or the zip file: make grade SUBMISSIONS=folder")
    source = Path(args.submissions).resolve()
    output = args.output or source.parent / "grades"
    if output.resolve().is_relative_to(source):
        raise UsageError(f"the output folder {output} lies among the submissions; name another --output")
    if not source.exists():
        raise UsageError(f"{args.submissions} is not there; name the folder or the zip file of the submissions")
    require_writable(output, "; name another --output")
    seed = args.seed if args.seed is not None else _seed(output / SEED)
    if not 0 <= seed < 2**32:
        raise UsageError(f"--seed must be from 0 to 2**32 - 1, not {seed}")
    return source, output, seed, GradingLimits(cell=args.timeout, total=15 * args.timeout)


def _seed(file: Path) -> int:
    if not file.exists():
        return secrets.randbelow(2**32)
    try:
        return int(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise UsageError(f"{file} holds no seed; delete it, or name one with --seed") from None


def _jobs(collection: Collection, seed: int, limits: GradingLimits) -> list[Job]:
    """What is to be graded; the same answers are graded once."""
    jobs: dict[str, Job] = {}
    for handed_in in collection.handed_in.values():
        decides = [handed_in.submission.digest(), seed, asdict(limits)]
        key = hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:32]
        jobs.setdefault(key, Job(key, [])).handed_in.append(handed_in)
    return list(jobs.values())


# ---------------------------------------------------------------- grading


@dataclass(frozen=True)
class Pool:
    """Who grades: `submit` gives a future for a submission, `close` ends what is left."""

    submit: Callable[[Submission], Future[Graded]]
    close: Callable[[], None]


def _pool(
    args: argparse.Namespace,
    waiting: list[Job],
    console: Console,
    grade_one: Callable[..., Graded],
    stop: threading.Event,
) -> Pool:
    """Threads, each of which watches over one process at a time; or a Dask cluster."""
    if args.dask:
        return _dask_pool(args.dask, grade_one)
    if waiting and (reason := prepare(sorted({job.handed_in[0].topic for job in waiting}))):
        text = f"Processes can't be sealed here ({reason}): answers can use the network, and change what you can."
        console.print(f"{text} `python -m course help grade` says what that means.", style="yellow", markup=False)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads: Executor = ThreadPoolExecutor(args.jobs or cores or 1)
    close = functools.partial(threads.shutdown, cancel_futures=True)
    return Pool(functools.partial(threads.submit, grade_one, stop=stop), close)


def _dask_pool(address: str, grade_one: Callable[..., Graded]) -> Pool:
    try:
        from distributed import Client
    except ImportError:
        raise UsageError("--dask needs a package that isn't here: pip install distributed") from None
    try:
        client = Client(address, timeout=DASK_SECONDS, set_as_default=False)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"no Dask scheduler answers at {address} ({error}); start one with `dask scheduler`, and workers that have "
            "the course with `dask worker ADDRESS`"
        ) from None
    executor = client.get_executor(pure=False, retries=3)

    def submit(submission: Submission) -> Future[Graded]:
        return executor.submit(grade_there, grade_one, submission, submission.digest())

    return Pool(submit, client.close)


def grade_there(grade_one: Callable[..., Graded], submission: Submission, digest: str) -> Graded:
    """Grade in a worker. Raises UsageError if it has another edition of the course."""
    if submission.digest() != digest:
        raise UsageError("this Dask worker has another edition of the course, or another PyTorch; give it the same one")
    multiprocessing.current_process()._config["daemon"] = False  # Dask's workers may have no children otherwise
    return grade_one(submission)


def _grade_all(jobs: list[Job], kept: Path, pool: Pool, console: Console) -> None:
    """Grade the jobs; what goes wrong with one stops no other. KeyboardInterrupt leaves what is done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("submissions", total=len(jobs))
        running = {pool.submit(job.handed_in[0].submission): job for job in jobs}
        done = 0
        while running:
            for future in wait(running, return_when=FIRST_COMPLETED)[0]:
                job = running.pop(future)
                if error := future.exception():  # a fault of this program or the system
                    job.graded = absent(job.handed_in[0].topic, BROKEN, f"{type(error).__name__}: {error}")
                else:
                    job.graded = future.result()
                _keep(job, kept)
                done += 1
                progress.advance(bar)
                line = f"{done}/{len(jobs)}  {job.label}  {job.graded.points:g} of {job.graded.of}"
                console.print(Text(line), soft_wrap=True)


def _keep(job: Job, kept: Path) -> None:
    """Write down what was judged, for another run."""
    if job.graded is not None and job.graded.is_judged:
        write_whole(kept / f"{job.key}.json", json.dumps(job.graded.to_json(), indent=1, ensure_ascii=False))


def _read_kept(file: Path) -> Graded | None:
    try:
        return Graded.from_json(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError):
        return None


# ---------------------------------------------------------------- what comes of it


def _outcomes(jobs: list[Job], collection: Collection) -> list[Outcome]:
    """What each student has got on each topic that somebody handed in."""
    found: dict[tuple[str, str], Outcome] = {}
    for job in jobs:
        for handed_in in job.handed_in:
            notes = (*handed_in.notes, *handed_in.submission.notes)
            found[handed_in.student, handed_in.topic] = Outcome(handed_in.student, job.graded, notes)
    topics = {topic for _, topic in found} | {one.topic for one in collection.unreadable if one.topic}
    for one in collection.unreadable:
        # where there is one topic only, a file that doesn't tell is about that one
        topic = one.topic or (next(iter(topics)) if len(topics) == 1 else "")
        if topic and (earlier := found.get((one.student, topic))):
            note = f"It could not be read: {one.where}: {one.problem}."
            found[one.student, topic] = replace(earlier, notes=(*earlier.notes, note))
        elif topic:
            graded = absent(topic, UNREADABLE, f"{one.where}: {one.problem}")
            found[one.student, topic] = Outcome(one.student, graded)
    for student in collection.students:
        for topic in topics:
            others = ", ".join(collection.others.get(student, ()))
            reason = f"there is no notebook, but {others}" if others else ""
            found.setdefault((student, topic), Outcome(student, absent(topic, ABSENT, reason)))
    rank = {student: place for place, student in enumerate(collection.students)}
    return sorted(found.values(), key=lambda outcome: (rank[outcome.student], outcome.graded.topic))


def _write(output: Path, outcomes: list[Outcome], unread: list[HandedIn], seed: int) -> None:
    _write_text(output / "grades.csv", "\ufeff" + grade_pages.table(outcomes, unread))  # so that Excel sees UTF-8
    _write_text(output / "summary.html", grade_pages.summary(outcomes, unread, seed))
    folder = output / "feedback"
    folder.mkdir(exist_ok=True)
    taken: set[str] = set()
    for student in dict.fromkeys([*(outcome.student for outcome in outcomes), *(one.student for one in unread)]):
        name = stem = re.sub(r'[\x00-\x1f<>:"/\\|?*]', "_", student).strip(" .")[:80] or "student"
        number = 1
        while name.casefold() in taken:
            number += 1
            name = f"{stem} {number}"
        taken.add(name.casefold())
        own = [outcome for outcome in outcomes if outcome.student == student]
        page = grade_pages.feedback(student, own, [one for one in unread if one.student == student])
        _write_text(folder / f"{name}.html", page)


def _write_text(file: Path, text: str) -> None:
    write_whole(file, text.encode("utf-8", "replace"))


def _table(outcomes: list[Outcome], unread: list[HandedIn]) -> Table:
    topics = sorted({outcome.graded.topic for outcome in outcomes})
    table = Table(header_style="bold")
    table.add_column("student")
    for topic in topics:
        table.add_column(topic, justify="right", no_wrap=True)
    table.add_column("to look at")
    for student in dict.fromkeys([*(outcome.student for outcome in outcomes), *(one.student for one in unread)]):
        own = {outcome.graded.topic: outcome.graded for outcome in outcomes if outcome.student == student}
        points = [_points(own[topic]) for topic in topics]
        notes = [f"{one.where} {UNREADABLE}" for one in unread if one.student == student]
        for graded in own.values():
            notes += [f"{one.number} {one.status}" for one in graded.exercises if one.status in PROBLEMS - {UNREADABLE}]
        table.add_row(Text(student), *points, Text("\n".join(notes), "yellow"))
    return table


def _points(graded: Graded) -> Text:
    status = graded.exercises[0].status
    return Text("–", "dim") if status in NOT_HANDED_IN else Text(f"{graded.points:g} / {graded.of}")
