"""Hold the checks against mutants: the answers with one small change each, which a check must not accept.

Without names: every topic that has a notebook. A name is a topic (15-01, 15-1 or 1) or one exercise of it (15-01.3).
What was found is kept in tests/mutants/TOPIC.json; an exercise is tried again when its answer, its check or what they
use has changed. A mutant that a check accepts is a hole in the check, or does the same as the answer: then write why
into the file, as its "reason". The exit status is 0 if each has one, 1 if one has none or an exercise cannot be tried,
2 for wrong usage and 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from course import grading, mutants, syllabus
from course.environment import ROOT
from course.files import write_whole
from course.lesson_code import CHECK, TargetError
from course.needs import needed_for
from course.selection import SelectionError, select
from course.skeleton import Task, editions, skeleton
from course.submission import Submission

KEPT = ROOT / "tests" / "mutants"
WORKERS = 2  # mutants at a time
LEAST_SECONDS = 10.0  # before a mutant counts as hanging, or
TIMES_REFERENCE = 5  # so many times what the reference answer takes


@dataclass
class Record:
    """What is kept of an exercise."""

    digest: str  # of everything that decides the outcome
    mutants: int  # how many there are
    # those that the check accepts: "line", "change" (lines), and "reason", why that is right (empty: not explained)
    survivors: list[dict]

    @property
    def unexplained(self) -> list[dict]:
        """Survivors without a reason."""
        return [survivor for survivor in self.survivors if not survivor["reason"].strip()]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("topics", nargs="*", metavar="TOPIC[.EXERCISE]", help="default: all that exist")
    parser.add_argument("--fresh", action="store_true", help="try again what has not changed, too")


def main(args: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    try:
        book = syllabus.load()
        names = [name.partition(".") for name in args.topics or editions()]
        chosen = [(found.label, place) for topic, _, place in names for found in select([topic], book)]
    except (SelectionError, syllabus.SyllabusError) as error:
        print(f"mutate: {error}", file=sys.stderr)
        return 2
    work: list[tuple[str, Task]] = []
    failed = False
    for topic, place in chosen:
        try:
            tasks = skeleton(topic).tasks
            wanted = [task for task in tasks if place in ("", task.number.rpartition(".")[2])]
            if not wanted:
                raise TargetError(f"there is no exercise {topic}.{place}; {topic} has {len(tasks)}.")
            work += [(topic, task) for task in wanted]
        except TargetError as error:
            print(f"mutate: {error}")
            failed = True
    grading.prepare({topic for topic, _ in work})
    for topic, task in work:
        print(f"{task.number} ({task.cell}): ", end="", flush=True)  # what comes may take minutes
        try:
            record, note = up_to_date(topic, task, args)
        except TargetError as error:
            print(error)
            failed = True
            continue
        caught, explained = record.mutants - len(record.survivors), len(record.survivors) - len(record.unexplained)
        unexplained = f"{len(record.unexplained)} not"
        print(f"{record.mutants} mutants, {caught} caught, {explained} explained, {unexplained}{note}")
        for survivor in record.unexplained:
            print(f"  line {survivor['line']}: the check accepts", *survivor["change"], sep="\n      ")
        if record.unexplained:
            print(f"Make the check stricter, or write a reason into {kept_file(topic)}.")
            failed = True
    return int(failed)


def up_to_date(topic: str, task: Task, args: argparse.Namespace) -> tuple[Record, str]:
    """The kept results of an exercise, renewed where something has changed, and a note on that. Raises TargetError."""
    kept = load(topic)
    earlier = kept.get(task.cell)
    if earlier and earlier.digest == digest(topic, task) and not args.fresh:
        return earlier, "; unchanged"
    record = run(topic, task)
    if earlier:
        keep_reasons(record, earlier)
    kept[task.cell] = record
    cells = [task.cell for task in skeleton(topic).tasks]
    document = {cell: asdict(kept[cell]) for cell in cells if cell in kept}
    write_whole(kept_file(topic), json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    changed = earlier and earlier.digest != record.digest and any(one["reason"] for one in record.survivors)
    return record, "; changed: do its reasons still hold?" if changed else ""


def run(topic: str, task: Task) -> Record:
    """Try every mutant of an exercise. TargetError if the check rejects the answer itself, or it can't be run.

    Each is graded as a student's answer is, in a process of its own, so that nothing it does reaches the next.
    """
    from shared.checks.exercise import SEED  # which imports PyTorch

    def graded(source: str, seconds: float) -> grading.GradedExercise:
        found = grading.grade(Submission(topic, {task.cell: source}), seed=SEED, seconds=seconds)
        return next(one for one in found.exercises if one.number == task.number)

    answer = skeleton(topic).code[task.cell]
    start = time.monotonic()
    reference = graded(answer, seconds=600)
    if reference.status != grading.PASSED:
        raise TargetError(f"its own answer: {reference.status}: {reference.reason}")
    limit = max(LEAST_SECONDS, TIMES_REFERENCE * (time.monotonic() - start))
    changed = mutants.mutants(answer)
    with ThreadPoolExecutor(WORKERS) as pool:  # threads only wait for processes
        outcomes = list(pool.map(lambda mutant: graded(mutant.source, limit), changed))
    survivors = [
        {"line": mutant.line, "change": mutant.change, "reason": ""}
        for mutant, outcome in zip(changed, outcomes, strict=True)
        if outcome.status == grading.PASSED
    ]
    return Record(digest(topic, task), len(changed), survivors)


def keep_reasons(record: Record, earlier: Record) -> None:
    """Give survivors the reasons that the same changes had."""
    reasons = {tuple(old["change"]): old["reason"] for old in earlier.survivors}
    for survivor in record.survivors:
        survivor["reason"] = reasons.get(tuple(survivor["change"]), "")


def kept_file(topic: str) -> Path:
    """Where the results of a topic are."""
    return KEPT / f"{topic}.json"


def load(topic: str) -> dict[str, Record]:
    """The kept results of a topic: id of the answer cell → record; empty if there are none. Raises TargetError."""
    path = kept_file(topic)
    try:
        document = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return {cell: Record(**record) for cell, record in document.items()}
    except (ValueError, TypeError, AttributeError) as error:  # such as a conflict of git's, or a comma that is missing
        raise TargetError(f"{path} can't be read: {error}. Mend it or delete it.") from None


def digest(topic: str, task: Task) -> str:
    """A hash of what decides: the answer, the check, what of the lesson and the topic's checks these use, the mutator.

    The same whatever the layout, comments and docstrings, and for every version of Python.
    """
    lesson = skeleton(topic)
    answer, setup = lesson.code[task.cell], lesson.code["setup"]
    above = [statement for source in (setup, *lesson.before(task).values()) for statement in ast.parse(source).body]
    checks = re.search(rf"^from shared\.checks import (\w+) as {CHECK}$", setup, re.MULTILINE)
    module = _statements(ROOT / "shared" / "checks" / f"{checks[1]}.py") if checks else []
    check = needed_for({task.check.removeprefix(f"{CHECK}.")}, module)
    code = [
        *ast.parse(f"{answer}\n{task.check}({task.argument})").body,
        *needed_for(set(task.uses), above),
        # not the words that all checks are written in: a change of these would have all topics tried again
        *[statement for statement in check if not isinstance(statement, ast.Import | ast.ImportFrom)],
        *_statements(Path(mutants.__file__)),
    ]
    return hashlib.sha256(repr(_shape(code)).encode()).hexdigest()[:16]


def _statements(path: Path) -> list[ast.stmt]:
    return ast.parse(path.read_text(encoding="utf-8")).body


def _shape(node: object) -> object:
    """Code as lists and texts."""
    if isinstance(node, list):
        return [
            _shape(item) for item in node if not (isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant))
        ]
    if isinstance(node, ast.AST):
        fields = [(name, _shape(value)) for name, value in ast.iter_fields(node) if value not in (None, [])]
        return [type(node).__name__, *(field for field in fields if field[0] not in ("ctx", "kind"))]
    return repr(node)
