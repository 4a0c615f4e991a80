"""What is written of a batch of graded submissions: a table, a page for each student, and a summary."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from html import escape
from pathlib import Path
from statistics import mean

from course.collecting import Unreadable
from course.files import write_whole
from course.grading import NOT_HANDED_IN, PASSED, PROBLEMS, UNREADABLE, Graded, GradedExercise

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
th, td { padding: .2rem .8rem .2rem 0; text-align: left; vertical-align: top; overflow-wrap: anywhere; }
.wrong { color: #b04a00; } pre { white-space: pre-wrap; margin: 0 0 0 2rem; }
"""


def write(output: Path, results: dict[str, list[Graded]], unreadable: list[Unreadable], seed: int) -> None:
    """Write it all into a folder, and print where it is and what to look at."""
    write_whole(output / "grades.csv", "\ufeff" + table(results))  # so that Excel sees UTF-8
    write_whole(output / "summary.html", summary(results, unreadable, seed))
    folder = output / "feedback"
    folder.mkdir(exist_ok=True)
    taken: set[str] = set()
    for student, graded in results.items():
        name = re.sub(r'[\x00-\x1f<>:"/\\|?*]', "_", student).strip(" .")[:80] or "student"
        while name.casefold() in taken:
            name += " again"
        taken.add(name.casefold())
        page = feedback(student, graded, [one for one in unreadable if one.student == student])
        write_whole(folder / f"{name}.html", page)
    for student, *rest in to_look_at(results, unreadable):
        print(f"to look at: {student}, {', '.join(rest)}")
    print(f"{output.resolve()} has grades.csv, summary.html, and the reasons in feedback/")


def table(results: dict[str, list[Graded]]) -> str:
    """grades.csv: a line for each student and exercise."""
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


def feedback(student: str, graded: list[Graded], unreadable: list[Unreadable]) -> str:
    """A student's page."""
    parts = []
    for topic in graded:
        parts.append(f"<h2>{topic.topic}: {topic.points:g} of {topic.of} points</h2>")
        parts += [f"<p>{escape(note)}</p>" for note in topic.notes]
        if topic.exercises[0].status in NOT_HANDED_IN:
            first = topic.exercises[0]  # all are alike; why a file can't be read stands below
            why = f": {escape(first.reason)}" if first.reason and first.status != UNREADABLE else ""
            parts.append(f"<p>{first.status}{why}</p>")
        else:
            parts += map(_exercise, topic.exercises)
    parts += [f"<p>{escape(one.where)} could not be read: {escape(one.problem)}.</p>" for one in unreadable]
    return _page(student, parts)


def _exercise(one: GradedExercise) -> str:
    lines = [f"<h3>{one.number} · {escape(one.title)}</h3><p>{one.status}, {one.points:g} of {one.of} points</p>"]
    if one.reason and all(demand["passed"] for demand in one.demands):
        lines.append(f"<p>{escape(one.reason)}</p>")
    for demand in one.demands:
        if demand["passed"]:
            lines.append(f"<p>✓ {escape(demand['name'])}</p>")
        else:
            details = "\n".join(f"{name}: {demand[name]}" for name in ("expected", "got", "hint") if demand[name])
            lines.append(f'<p class="wrong">✗ {escape(demand["name"])}</p><pre>{escape(details)}</pre>')
    return "\n".join(lines)


def summary(results: dict[str, list[Graded]], unreadable: list[Unreadable], seed: int) -> str:
    """The page about all students: how each exercise went, and what somebody should look at."""
    parts = [f"<p>{len(results)} students; the checks' seed was {seed}.</p>"]
    for topics in zip(*results.values(), strict=True):
        handed_in = [graded for graded in topics if graded.exercises[0].status not in NOT_HANDED_IN]
        parts.append(f"<h2>{topics[0].topic}</h2><p>{len(handed_in)} of {len(topics)} students have handed it in.</p>")
        if handed_in:
            average = mean(graded.points for graded in handed_in)
            parts.append(f"<p>They have {average:.1f} of {handed_in[0].of} points on average.</p>")
            rows = map(_row, zip(*(graded.exercises for graded in handed_in), strict=True))
            parts.append(_table(["exercise", "points on average", "of", "passed", "failed most often"], rows))
    if rows := to_look_at(results, unreadable):
        parts.append("<h2>To look at</h2>")
        parts.append("<p>Ask for a file that can't be read once more. Read what was stopped or refused yourself.</p>")
        parts.append(_table(["student", "where", "status", "reason"], rows))
    return _page("Summary", parts)


def _row(column: tuple[GradedExercise, ...]) -> tuple[str, ...]:
    first = column[0]
    failed = Counter(demand["name"] for one in column for demand in one.demands if not demand["passed"])
    often = ", ".join(f"{name} ({count})" for name, count in failed.most_common(3))
    passed = sum(one.status == PASSED for one in column)
    average = mean(one.points for one in column)
    return f"{first.number} {first.title}", f"{average:.1f}", str(first.of), str(passed), often


def to_look_at(results: dict[str, list[Graded]], unreadable: list[Unreadable]) -> list[tuple[str, str, str, str]]:
    """What could not be read or judged, or was not: student, where, status and reason."""
    rows = [
        (student, one.number, one.status, one.reason)
        for student, graded in results.items()
        for topic in graded
        for one in topic.exercises
        if one.status in PROBLEMS
    ]
    return rows + [(one.student, one.where, UNREADABLE, one.problem) for one in unreadable]


def _table(head: list[str], rows: object) -> str:
    lines = ["<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>" for row in rows]
    return "\n".join(["<table><tr>" + "".join(f"<th>{text}</th>" for text in head) + "</tr>", *lines, "</table>"])


def _page(title: str, parts: list[str]) -> str:
    return "\n".join(
        [
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
            f"<style>{STYLE}</style></head>\n<body><h1>{escape(title)}</h1>",
            *parts,
            "</body></html>\n",
        ]
    )
