"""Grade a folder of submissions, several at a time: a table of points, a page for each student, and a summary.

SUBMISSIONS is a folder or a zip file: a folder for each student, files with names in them, or what Moodle, Canvas or
Gradescope export. Files may have any name: which notebook it is, its answer cells tell. The answers are put into the
course's own notebooks, after the definitions there that they use; nothing else runs. Each exercise is judged in a
process of its own with limits, by the notebook's checks with another seed.

The output folder (default: grades, beside SUBMISSIONS) gets grades.csv, summary.html, feedback/STUDENT.html, and
seed.txt with the seed, which another run uses again. What was graded is kept there: called again, the command grades
only what is new, has changed or was interrupted.

Somebody who sets out to deceive a check can do so, but can't change another student's grade where this system seals
processes. Where it can't, the command says so: then, and for strangers' submissions, grade in a container. The
instructor's guide has the recipe.

The exit status is 0 if the grades are written, whatever they are, 2 if there is nothing to grade or to grade by, and
130 after Ctrl-C. What could not be read or judged is printed at the end, and stands in the summary.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import multiprocessing
import os
import secrets
import sys
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path

from course import grade_pages, gradescope
from course.collecting import Student, UsageError, collect
from course.confined import interrupted
from course.files import NotWritableError, require_writable, write_whole
from course.grading import ABSENT, BROKEN, UNREADABLE, Graded, GradedExercise, absent, grade, prepare
from course.lesson_code import TargetError
from course.processes import asked_to_end, positive
from course.release import ReleaseError
from course.skeleton import edition, editions
from course.submission import Submission
from course.syllabus import SyllabusError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("submissions", nargs="?", default="", metavar="SUBMISSIONS", help="folder or zip file")
    parser.add_argument("--output", type=Path, help="folder (default: grades, beside SUBMISSIONS)")
    parser.add_argument("--seed", type=int, help="of the checks (default: that of the output folder, else random)")
    parser.add_argument("--force", action="store_true", help="grade again what was graded already, too")
    parser.add_argument("--jobs", "-j", type=positive, help="submissions at a time (default: one for each core)")
    seconds = "for an answer, and for its check (default 60 s)"
    parser.add_argument("--timeout", type=positive, default=60, metavar="S", help=seconds)
    parser.add_argument("--dask", metavar="ADDRESS", help="have a Dask cluster grade, such as tcp://10.0.0.1:8786")
    parser.add_argument("--gradescope", metavar="TOPIC", help="only write dist/gradescope-TOPIC.zip, an autograder")


def main(args: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    try:
        if not args.gradescope:
            return _grade(args)
        if args.gradescope not in editions():
            raise UsageError(f"there is no topic {args.gradescope}; there are {', '.join(editions())}")
        print(gradescope.write(args.gradescope, args.output))
        return 0
    except (UsageError, NotWritableError, ReleaseError, TargetError, SyllabusError) as error:
        print(f"grade: {error}", file=sys.stderr)
        return 2


def _grade(args: argparse.Namespace) -> int:
    if not args.submissions:
        raise UsageError("name the folder or the zip file: make grade SUBMISSIONS=folder")
    source = Path(args.submissions).resolve()
    output = args.output or source.parent / "grades"
    if not source.exists():
        raise UsageError(f"{args.submissions} is not there; name the folder or the zip file of the submissions")
    if output.resolve().is_relative_to(source):
        raise UsageError(f"the output folder {output} lies among the submissions; name another --output")
    students = collect(source)
    if not students:
        raise UsageError(f"{source} holds neither notebooks nor folders of students")
    require_writable(output, "; name another --output")
    kept = output / ".graded"
    kept.mkdir(exist_ok=True)
    seed = _seed(args.seed, output / "seed.txt")
    graded: dict[tuple[str, str], Graded] = {}
    waiting: dict[tuple[str, str], tuple[Submission, Path]] = {}
    for student, own in students.items():
        for topic, submission in own.submissions.items():
            # differs if anything does that decides the grade
            key = repr((edition(topic), submission, seed, args.timeout))
            file = kept / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
            if not args.force and (known := _read_kept(file)):
                graded[student, topic] = known
            else:
                waiting[student, topic] = submission, file
    try:
        with asked_to_end(), _executor(args, sorted({topic for _, topic in waiting})) as executor:
            running = {
                executor.submit(grade_there, submission, edition(submission.topic), seed, args.timeout): place
                for place, (submission, _) in waiting.items()
            }
            for done, future in enumerate(as_completed(running), 1):
                student, topic = place = running[future]
                error = future.exception()  # a fault of this program or the system
                one = absent(topic, BROKEN, f"{type(error).__name__}: {error}") if error else future.result()
                graded[place] = one
                if all(exercise.status != BROKEN for exercise in one.exercises):
                    write_whole(waiting[place][1], json.dumps(asdict(one)))
                print(f"{done}/{len(waiting)}  {student}, {topic}  {one.points:g} of {one.of}", flush=True)
    except KeyboardInterrupt:
        done = sum(place in graded for place in waiting)
        print(f"Interrupted; {done} of {len(waiting)} are graded. The same command goes on from here.")
        return 130
    # on each topic that somebody has handed in
    topics = {topic for _, topic in graded}
    topics |= {one.topic for own in students.values() for one in own.unreadable if one.topic}
    results = {
        student: [graded.get((student, topic)) or _nothing(own, topic) for topic in sorted(topics)]
        for student, own in students.items()
    }
    grade_pages.write(output, results, students, seed)
    return 0


def _seed(named: int | None, file: Path) -> int:
    """The seed that was named, else that of an earlier run, else a new one; NumPy takes 32 bits."""
    try:
        if named is None:
            named = int(file.read_text(encoding="utf-8")) if file.exists() else secrets.randbelow(2**32)
    except ValueError:
        raise UsageError(f"{file} holds no seed; delete it, or name one with --seed") from None
    write_whole(file, f"{named % 2**32}\n")
    return named % 2**32


def _read_kept(file: Path) -> Graded | None:
    """What was graded; None if it isn't there, or was damaged, as by a machine that was switched off."""
    with contextlib.suppress(Exception):
        document = json.loads(file.read_text(encoding="utf-8"))
        return Graded(**document | {"exercises": tuple(GradedExercise(**one) for one in document["exercises"])})
    return None


def _nothing(own: Student, topic: str) -> Graded:
    """What a student has got who has handed in nothing on a topic that can be read."""
    bad = [f"{one.where}: {one.problem}" for one in own.unreadable if one.topic in ("", topic)]
    if bad:
        return absent(topic, UNREADABLE, "; ".join(bad))
    others = f", but {', '.join(own.others)}" if own.others else ""
    return absent(topic, ABSENT, f"there is no notebook on {topic}{others}")


@contextlib.contextmanager
def _executor(args: argparse.Namespace, topics: list[str]) -> Iterator[Executor]:
    """Threads, each of which watches over one process at a time; or a Dask cluster."""
    if args.dask:
        with _dask_client(args.dask) as client:
            yield client.get_executor()
        return
    if topics and (reason := prepare(topics)):
        print(
            f"Processes can't be sealed here ({reason}): answers can use the network, and change what you can.\n"
            "`python -m course help grade` says what that means."
        )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = ThreadPoolExecutor(args.jobs or cores)
    try:
        yield threads
    except KeyboardInterrupt:
        interrupted.set()
        raise
    finally:
        threads.shutdown(cancel_futures=True)


def _dask_client(address: str) -> contextlib.AbstractContextManager:
    try:
        from distributed import Client

        return Client(address)
    except ImportError:
        raise UsageError("--dask needs a package that isn't here: pip install distributed") from None
    except (OSError, ValueError) as error:
        raise UsageError(
            f"no Dask scheduler answers at {address} ({error}); start one with `dask scheduler`, and workers that have "
            "the course with `dask worker ADDRESS`"
        ) from None


def grade_there(submission: Submission, edition_here: str, seed: int, seconds: float) -> Graded:
    """Grade, perhaps in a Dask worker. Raises UsageError if that has another edition of the course."""
    if edition(submission.topic) != edition_here:
        raise UsageError("this Dask worker has another edition of the course, or another PyTorch; give it the same one")
    multiprocessing.current_process()._config["daemon"] = False  # Dask's workers may have no children otherwise
    return grade(submission, seed=seed, seconds=seconds)
