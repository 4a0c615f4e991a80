"""What is written of a batch of graded submissions: a table, a page for each student, and a summary."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterable
from html import escape
from pathlib import Path
from statistics import mean

from course.collecting import Student, Unreadable
from course.files import write_whole
from course.grading import NOT_HANDED_IN, PASSED, PROBLEMS, UNREADABLE, Graded, GradedExercise

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }}
th, td {{ padding: .2rem .8rem .2rem 0; text-align: left; vertical-align: top; overflow-wrap: anywhere; }}
pre {{ white-space: pre-wrap; margin: 0 0 0 2rem; }}
</style></head>
<body><h1>{title}</h1>
{body}
</body></html>
"""


def write(output: Path, results: dict[str, list[Graded]], students: dict[str, Student], seed: int) -> None:
    """Write it all into a folder, and print where it is and what to look at."""
    write_whole(output / "grades.csv", "\ufeff" + _csv(results))  # so that Excel sees UTF-8
    # what could not be read or judged, or was not: student, where, status and reason
    to_look_at = [
        (student, one.number, one.status, one.reason)
        for student, graded in results.items()
        for topic in graded
        for one in topic.exercises
        if one.status in PROBLEMS
    ]
    for student, own in students.items():
        to_look_at += [(student, one.where, UNREADABLE, one.problem) for one in own.unreadable]
    write_whole(output / "summary.html", _summary(results, to_look_at, seed))
    folder = output / "feedback"
    folder.mkdir(exist_ok=True)
    taken: set[str] = set()
    for student, graded in results.items():
        name = re.sub(r'[\x00-\x1f<>:"/\\|?*]', "_", student).encode()[:160].decode(errors="ignore")
        while name.casefold() in taken:  # nobody's page takes the place of another's
            name += "_"
        taken.add(name.casefold())
        write_whole(folder / f"{name}.html", _feedback(student, graded, students[student].unreadable))
    for row in to_look_at:
        print("to look at:", ", ".join(row))
    print(f"{output.resolve()} has grades.csv, summary.html, and the reasons in feedback/")


def _csv(results: dict[str, list[Graded]]) -> str:
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(["student", "topic", "exercise", "points", "of", "status", "reason"])
    for student, graded in results.items():
        for topic in graded:
            for one in topic.exercises:
                row = [student, topic.topic, one.number, f"{one.points:g}", one.of, one.status, one.reason]
                lines.writerow(map(_cell, row))
    return text.getvalue()


def _cell(value: object) -> str:
    """Text that no spreadsheet takes for a formula, on one line."""
    text = " ".join(str(value).split())
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") else text


def _feedback(student: str, graded: list[Graded], unreadable: list[Unreadable]) -> str:
    parts = []
    for topic in graded:
        parts.append(f"<h2>{topic.topic}: {topic.points:g} of {topic.of} points</h2>")
        parts += [f"<p>{escape(note)}</p>" for note in topic.notes]
        if topic.exercises[0].status in NOT_HANDED_IN:  # all are alike
            parts.append(f"<p>{escape(str(topic.exercises[0]))}</p>")
        else:
            for one in topic.exercises:
                parts.append(f"<h3>{one.number} · {escape(one.title)}: {one.points:g} of {one.of} points</h3>")
                parts.append(f"<pre>{escape(str(one))}</pre>")
    parts += [f"<p>{escape(one.where)} could not be read: {escape(one.problem)}.</p>" for one in unreadable]
    return PAGE.format(title=escape(student), body="\n".join(parts))


def _summary(results: dict[str, list[Graded]], to_look_at: list[tuple[str, ...]], seed: int) -> str:
    parts = [f"<p>{len(results)} students; the checks' seed was {seed}.</p>"]
    for topics in zip(*results.values(), strict=True):
        handed_in = [graded for graded in topics if graded.exercises[0].status not in NOT_HANDED_IN]
        parts.append(f"<h2>{topics[0].topic}</h2><p>{len(handed_in)} of {len(topics)} students have handed it in.</p>")
        if handed_in:
            average = mean(graded.points for graded in handed_in)
            parts.append(f"<p>They have {average:.1f} of {handed_in[0].of} points on average.</p>")
            rows = map(_row, zip(*(graded.exercises for graded in handed_in), strict=True))
            parts.append(_table(("exercise", "points on average", "of", "passed", "failed most often"), rows))
    if to_look_at:
        parts.append("<h2>To look at</h2>")
        parts.append("<p>Ask for a file that can't be read once more. Read what was stopped or refused yourself.</p>")
        parts.append(_table(("student", "where", "status", "reason"), to_look_at))
    return PAGE.format(title="Summary", body="\n".join(parts))


def _row(column: tuple[GradedExercise, ...]) -> tuple[str, ...]:
    failed = Counter(demand["name"] for one in column for demand in one.demands if not demand["passed"])
    often = ", ".join(f"{name} ({count})" for name, count in failed.most_common(3))
    passed = sum(one.status == PASSED for one in column)
    average = mean(one.points for one in column)
    return f"{column[0].number} {column[0].title}", f"{average:.1f}", str(column[0].of), str(passed), often


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = ["<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>" for row in rows]
    return "\n".join(["<table><tr>" + "".join(f"<th>{text}</th>" for text in head) + "</tr>", *lines, "</table>"])
