"""The form of an exercise: its cells' ids and nbgrader metadata, the solution markers, and what a student gets instead.

The only place where these are written; lint, `new` and the student edition use it.
"""

from __future__ import annotations

BEGIN = "### BEGIN SOLUTION"
END = "### END SOLUTION"
STUB = ("# YOUR CODE HERE", "raise NotImplementedError")


class MarkerError(ValueError):
    """The solution markers of a cell do not pair up; the message gives the line."""


def answer_metadata(grade_id: str) -> dict:
    """nbgrader's schema-3 metadata of an answer cell with this id ("ex-swish")."""
    return {
        "grade": False,
        "grade_id": grade_id,
        "locked": False,
        "schema_version": 3,
        "solution": True,
        "task": False,
    }


def check_metadata(grade_id: str, points: int) -> dict:
    """nbgrader's schema-3 metadata of a check cell with this id ("ex-swish-check") and these points."""
    return {
        "grade": True,
        "grade_id": grade_id,
        "locked": True,
        "points": points,
        "schema_version": 3,
        "solution": False,
        "task": False,
    }


def student_source(source: str) -> str:
    """The cell as a student gets it: each BEGIN to END block becomes a stub, indented like the BEGIN line.

    Raises MarkerError when a BEGIN or END has no partner.
    """
    lines: list[str] = []
    opened_at = 0
    for number, line in enumerate(source.split("\n"), start=1):
        marker = line.strip()
        if marker == BEGIN:
            if opened_at:
                raise MarkerError(f"line {number}: {BEGIN} inside the block that line {opened_at} began")
            opened_at = number
            indent = line[: len(line) - len(line.lstrip())]
            lines += [indent + stub for stub in STUB]
        elif marker == END:
            if not opened_at:
                raise MarkerError(f"line {number}: {END} without a {BEGIN} before it")
            opened_at = 0
        elif not opened_at:
            lines.append(line)
    if opened_at:
        raise MarkerError(f"line {opened_at}: {BEGIN} without an {END} after it")
    return "\n".join(lines)
