"""Hold the checks against mutants: the answers with one small change each, which a check must not accept.

Without names: every notebook of the syllabus that exists. A name is a topic (15-01, 15-1 or 1), one exercise of it
(15-01.3) or a notebook file. What was found is kept in tests/mutants/TOPIC.json; an exercise is tried again when its
answer, its check or what they use has changed. A mutant that a check accepts is a hole in the check, or does the same
as the answer: then write why into the file, as its "reason". The exit status is 0 if each has one, 1 if one has none
or an exercise cannot be tried, 2 for wrong usage and 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from course import syllabus
from course.environment import ROOT
from course.files import write_whole
from course.mutant_trials import Target, TargetError, prepare, targets, try_answer
from course.mutants import mutants
from course.selection import SelectionError, select
from course.settings import positive

KEPT = ROOT / "tests" / "mutants"
WORKERS = 2
LEAST_SECONDS = 10.0  # before a mutant counts as hanging, or
TIMES_REFERENCE = 5  # so many times what the reference answer takes


@dataclass
class Survivor:
    """A mutant that the check accepts: where, what differs, and why that is right (empty: not explained)."""

    line: int
    change: list[str]
    reason: str = ""


@dataclass
class Record:
    """What is kept of an exercise."""

    digest: str  # of everything that decides the outcome
    mutants: int  # how many there are, and how many the check rejects
    caught: int
    seconds: int  # how long that took
    timed_out: int = 0  # how many of the caught had not ended in time
    survivors: list[Survivor] = field(default_factory=list)  # the others

    @property
    def unexplained(self) -> list[Survivor]:
        """Survivors without a reason."""
        return [survivor for survivor in self.survivors if not survivor.reason.strip()]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("topics", nargs="*", metavar="TOPIC[.EXERCISE]", help="default: all that exist")
    parser.add_argument("--fresh", action="store_true", help="try again what has not changed, too")
    parser.add_argument(
        "--jobs", "-j", type=positive(int), default=WORKERS, help=f"mutants at a time (default {WORKERS})"
    )


def main(args: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 120
    table = Table("exercise", "", *("mutants", "caught", "equivalent", "score", "seconds", ""), box=None)
    for column in table.columns[2:7]:
        column.justify = "right"
    failed = False
    work: list[tuple[str, list[str], Target]] = []  # the topic, ids of its answer cells, an exercise
    try:
        book = syllabus.load()
        for name in args.topics or [number for number, topic in book.topics.items() if topic.path.is_file()]:
            part = re.fullmatch(r"(.+)\.(\d+)", name)
            for selected in select([part[1] if part else name], book):
                try:
                    found = targets(selected.path)
                    wanted = [target for target in found if not part or target.number == int(part[2])]
                    if not wanted:
                        raise TargetError(f"there is no exercise {name}; {selected.label} has {len(found)}.")
                    work += [(selected.label, [each.cell for each in found], target) for target in wanted]
                except TargetError as error:
                    console.print(f"mutate: {error}")
                    failed = True
    except (SelectionError, syllabus.SyllabusError) as error:
        console.print(f"mutate: {error}")
        return 2
    prepare(target for *_, target in work)
    for label, cells, target in work:
        name = f"{label}.{target.number}"
        try:
            with console.status(f"{name}: trying mutants"):
                record, note = up_to_date(label, cells, target, args)
        except TargetError as error:
            console.print(f"{name}: {error}")
            failed = True
            continue
        for survivor in record.unexplained:
            console.print(f"{name}, line {survivor.line} of '{target.cell}': the check accepts")
            console.print("    " + "\n    ".join(survivor.change))
        if record.unexplained:
            console.print(f"Make the check stricter, or write a reason into {kept_file(label)}.")
            failed = True
        explained = len(record.survivors) - len(record.unexplained)
        score = f"{100 * record.caught // max(1, record.mutants - explained)} %"  # 100 only for all
        counts = (record.mutants, record.caught, explained, score, record.seconds)
        table.add_row(name, target.cell, *map(str, counts), note)
    console.print(table)
    return int(failed)


def up_to_date(label: str, cells: list[str], target: Target, args: argparse.Namespace) -> tuple[Record, str]:
    """The kept results of an exercise, renewed where something has changed, and a note on that. Raises TargetError."""
    kept = load(label)
    earlier = kept.get(target.cell)
    if earlier and earlier.digest == target.digest and not args.fresh:
        return earlier, "unchanged"
    record, note = run(target, args.jobs), ""
    if earlier and keep_reasons(record, earlier) and earlier.digest != target.digest:
        note = "changed: do its reasons still hold?"
    kept[target.cell] = record
    save(label, {cell: kept[cell] for cell in cells if cell in kept})
    return record, note


def run(target: Target, workers: int = WORKERS) -> Record:
    """Try every mutant of an exercise. TargetError if the check rejects the answer itself, or it can't be run."""
    start = time.monotonic()
    reference = try_answer(target, target.answer)
    if reference.status != "passed":
        raise TargetError(f"cell '{target.cell}': its own answer: {reference.status}\n{reference.detail}")
    limit = max(LEAST_SECONDS, TIMES_REFERENCE * reference.seconds)
    changed = mutants(target.answer)
    with ThreadPoolExecutor(workers) as pool:  # threads only wait for processes
        try:
            outcomes = list(pool.map(lambda mutant: try_answer(target, mutant.source, limit), changed))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    survivors = [
        Survivor(mutant.line, mutant.change.splitlines())
        for mutant, outcome in zip(changed, outcomes, strict=True)
        if outcome.status == "passed"
    ]
    return Record(
        digest=target.digest,
        mutants=len(changed),
        caught=len(changed) - len(survivors),
        timed_out=sum(outcome.status == "timed out" for outcome in outcomes),
        seconds=round(time.monotonic() - start),
        survivors=survivors,
    )


def keep_reasons(record: Record, earlier: Record) -> int:
    """Give survivors the reasons that the same changes had; returns how many got one."""
    left = [survivor for survivor in earlier.survivors if survivor.reason.strip()]
    for same_line in (True, False):
        for survivor in record.unexplained:
            for old in left:
                if old.change == survivor.change and (old.line == survivor.line or not same_line):
                    survivor.reason = old.reason
                    left.remove(old)
                    break
    return len(record.survivors) - len(record.unexplained)


def kept_file(label: str) -> Path:
    """Where the results of a topic are."""
    return KEPT / f"{label}.json"


def load(label: str) -> dict[str, Record]:
    """The kept results of a topic: id of the answer cell → record; empty if there are none. Raises TargetError."""
    path = kept_file(label)
    if not path.exists():
        return {}
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        return {
            cell: Record(**{**record, "survivors": [Survivor(**survivor) for survivor in record["survivors"]]})
            for cell, record in document.items()
        }
    except (ValueError, TypeError, KeyError) as error:  # such as a conflict of git's, or a comma that is missing
        raise TargetError(f"{path} can't be read: {error}. Mend it or delete it.") from None


def save(label: str, records: dict[str, Record]) -> None:
    """Write the results of a topic."""
    document = {cell: asdict(record) for cell, record in records.items()}
    write_whole(kept_file(label), json.dumps(document, indent=1, ensure_ascii=False) + "\n")
