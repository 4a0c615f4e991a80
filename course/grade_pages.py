"""What is written of a batch of graded submissions: a table, a page for each student, and a summary."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from statistics import mean, median

from course.collecting import HandedIn
from course.grading import NOT_HANDED_IN, PASSED, PROBLEMS, UNREADABLE, Graded, GradedExercise

BINS = 10

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; } th, td { padding: .2rem .8rem .2rem 0; text-align: left; vertical-align: top; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
h3 { margin-bottom: 0; } .note { opacity: .75; margin: .2rem 0; } ul { list-style: none; padding-left: 0; }
li { margin: .4rem 0; } .wrong { border-left: .25rem solid #d55e00; padding-left: .8rem; }
dl { display: grid; grid-template-columns: 6rem 1fr; margin: 0; } dd { margin: 0; white-space: pre-wrap; }
dd, td { overflow-wrap: anywhere; } td.status { overflow-wrap: normal; }
.bars { display: flex; align-items: flex-end; gap: 2px; height: 2.4rem; }
.bars i { width: .9rem; background: #0072b2; min-height: 1px; }
@media (prefers-color-scheme: dark) { body { background: #111; color: #eee; } }
"""


@dataclass(frozen=True)
class Outcome:
    """What a student has got on a topic; `notes` are sentences on how their file was found and read."""

    student: str
    graded: Graded
    notes: tuple[str, ...] = ()


def table(outcomes: list[Outcome], unread: list[HandedIn]) -> str:
    """grades.csv: a line for each student and exercise; an unread file that is about no topic has a line, too."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(["student", "topic", "exercise", "points", "of", "status", "reason"])
    for outcome in outcomes:
        for one in outcome.graded.exercises:
            row = [outcome.student, outcome.graded.topic, one.number, f"{one.points:g}", one.of, one.status, one.reason]
            lines.writerow(map(_cell, row))
    for one in _untold(unread, outcomes):
        row = [one.student, one.topic, "", 0, 0, "unreadable", f"{one.where}: {one.problem}"]
        lines.writerow(map(_cell, row))
    return text.getvalue()


def _cell(value: object) -> str:
    """Text that no spreadsheet takes for a formula, on one line."""
    text = " ".join(str(value).split())
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") else text


# ---------------------------------------------------------------- for a student


def feedback(student: str, outcomes: list[Outcome], unread: list[HandedIn]) -> str:
    """A student's page."""
    parts = []
    for outcome in outcomes:
        graded = outcome.graded
        parts.append(f"<h2>{escape(graded.topic)}: {graded.points:g} of {graded.of} points</h2>")
        parts += [f'<p class="note">{escape(note)}</p>' for note in outcome.notes]
        if len({(one.status, one.reason) for one in graded.exercises}) == 1 and not graded.points:
            one = graded.exercises[0]  # nothing handed in, say
            parts.append(f"<p>{escape(one.status)}{escape(f': {one.reason}' if one.reason else '')}</p>")
        else:
            parts += map(_exercise, graded.exercises)
    for one in _untold(unread, outcomes):
        parts.append(f"<p>{escape(one.where)} could not be read: {escape(one.problem)}.</p>")
    return _page(student, "\n".join(parts))


def _untold(unread: Iterable[HandedIn], outcomes: Iterable[Outcome]) -> list[HandedIn]:
    """The unreadable files that are no outcome's reason."""
    told = {(outcome.student, one.reason) for outcome in outcomes for one in outcome.graded.exercises}
    return [one for one in unread if (one.student, f"{one.where}: {one.problem}") not in told]


def _exercise(one: GradedExercise) -> str:
    lines = [f"<h3>{escape(one.number)} · {escape(one.title)}</h3>"]
    lines.append(f'<p class="note">{escape(one.status)}, {one.points:g} of {one.of} points</p>')
    if one.reason and all(demand["passed"] for demand in one.demands):
        lines.append(f"<p>{escape(one.reason)}</p>")
    lines.append("<ul>")
    for demand in one.demands:
        name = escape(demand["name"])
        if demand["passed"]:
            lines.append(f"<li>✓ {name}</li>")
        else:
            details = {label: demand[label] for label in ("expected", "got", "hint") if demand[label]}
            shown = "".join(f"<dt>{label}</dt><dd>{escape(text)}</dd>" for label, text in details.items())
            lines.append(f'<li class="wrong">✗ {name}<dl>{shown}</dl></li>')
    return "\n".join([*lines, "</ul>"])


# ---------------------------------------------------------------- for the instructor


def summary(outcomes: list[Outcome], unread: list[HandedIn], seed: int) -> str:
    """The page about all students: how each exercise went, and what somebody should look at."""
    students = {outcome.student for outcome in outcomes} | {one.student for one in unread}
    parts = [f"<p>{len(students)} students; the checks' seed was {seed}.</p>"]
    for topic in sorted({outcome.graded.topic for outcome in outcomes}):
        here = [outcome.graded for outcome in outcomes if outcome.graded.topic == topic]
        handed_in = [graded for graded in here if graded.exercises[0].status not in NOT_HANDED_IN]
        parts.append(f"<h2>{escape(topic)}</h2>")
        if not handed_in:
            parts.append("<p>Nobody has handed in anything that can be read.</p>")
            continue
        points = [graded.points for graded in handed_in]
        parts.append(
            f"<p>{len(handed_in)} of {len(here)} students have handed it in; of {handed_in[0].of} points they have "
            f"{mean(points):.1f} on average, and half of them {median(points):g} or more.</p>"
        )
        parts.append('<table><tr><th>exercise<th class="n">mean<th class="n">of<th class="n">passed<th>0 … 100 %')
        parts.append("<th>failed most often</tr>")
        columns = zip(*(graded.exercises for graded in handed_in), strict=True)
        parts += [_row(column) for column in columns]
        parts.append("</table>")
    parts += _to_look_at(outcomes, unread)
    return _page("Summary", "\n".join(parts))


def _row(column: tuple[GradedExercise, ...]) -> str:
    first = column[0]
    counts = Counter(min(int(BINS * one.points / first.of), BINS - 1) for one in column)
    most = max(counts.values())
    bars = "".join(
        f'<i style="height:{100 * counts[index] / most:.0f}%" title="{counts[index]}"></i>' for index in range(BINS)
    )
    failed = Counter(demand["name"] for one in column for demand in one.demands if not demand["passed"])
    often = "<br>".join(f"{escape(name)} ({count})" for name, count in failed.most_common(3))
    passed = sum(one.status == PASSED for one in column)
    return (
        f'<tr><td>{escape(first.number)} {escape(first.title)}<td class="n">{mean(one.points for one in column):.1f}'
        f'<td class="n">{first.of}<td class="n">{passed}<td><div class="bars">{bars}</div><td>{often}</tr>'
    )


def _to_look_at(outcomes: list[Outcome], unread: list[HandedIn]) -> list[str]:
    rows = [
        (outcome.student, one.number, one.status, one.reason)
        for outcome in outcomes
        for one in outcome.graded.exercises
        if one.status in PROBLEMS - {UNREADABLE}
    ]
    rows += [(one.student, one.where, "unreadable", one.problem) for one in unread]
    if not rows:
        return []
    lines = [
        f'<tr><td>{escape(student)}<td>{escape(where)}<td class="status">{escape(status)}<td>{escape(reason)}</tr>'
        for student, where, status, reason in rows
    ]
    advice = "Ask for a file that can't be read once more. Read what was stopped or refused yourself."
    return [
        "<h2>To look at</h2>",
        f"<p>{advice}</p>",
        "<table><tr><th>student<th>where<th>status<th>reason</tr>",
        *lines,
        "</table>",
    ]


def _page(title: str, body: str) -> str:
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>\n{body}\n</body></html>\n"
    )
