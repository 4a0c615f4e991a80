"""The form of an exercise: heading, ids, nbgrader metadata, solution markers, and what a student gets instead.

The only place where these are written: lint, the start page and the student edition use it.
"""

from __future__ import annotations

import ast
import re

BEGIN = "### BEGIN SOLUTION"
END = "### END SOLUTION"
BEGIN_HIDDEN = "### BEGIN HIDDEN TESTS"
END_HIDDEN = "### END HIDDEN TESTS"
STUB = ("# YOUR CODE HERE", "raise NotImplementedError")

# of a task, without its ###: topic, place, title, points, minutes
HEADING = re.compile(r"Exercise (\S+)\.(\d+) — (\S.*) \((\d+) points?, (\d+) minutes?\)")


class MarkerError(ValueError):
    """A cell has no student's form; the message says what is wrong with its markers, and where."""


def answer_metadata(grade_id: str) -> dict:
    """nbgrader's schema-3 metadata of an answer cell with this id ("ex-swish")."""
    return {"grade_id": grade_id, "schema_version": 3, "grade": False, "locked": False, "solution": True, "task": False}


def check_metadata(grade_id: str, points: int) -> dict:
    """nbgrader's schema-3 metadata of a check cell with this id ("ex-swish-check") and these points."""
    return {**answer_metadata(grade_id), "grade": True, "locked": True, "solution": False, "points": points}


def solution_blocks(source: str, begin: str = BEGIN, end: str = END) -> list[tuple[int, int]]:
    """Where the solutions, or what is between other markers, are: indices of the lines with the markers, in order.

    MarkerError if a marker has no partner or is misspelt (which would leave the solution in).
    """
    words = begin.removeprefix("### BEGIN ").rstrip("S").replace(" ", r"\W*")
    found: list[int] = []
    for index, line in enumerate(source.split("\n")):
        if re.search(rf"#\W*(begin|end)\W*{words}", line, re.IGNORECASE):
            wanted = end if len(found) % 2 else begin
            if line.strip() != wanted:
                raise MarkerError(f"line {index + 1}: '{line.strip()}' must be '{wanted}', alone on its line")
            found.append(index)
    if len(found) % 2:
        raise MarkerError(f"line {found[-1] + 1}: {begin} without {end}")
    return list(zip(found[::2], found[1::2], strict=True))


def without_hidden_tests(source: str) -> str:
    """A check cell without its hidden tests and their markers. Raises MarkerError.

    Graders run the tests after the check of an answer that passed, and an exception in one means no points.
    """
    lines = source.split("\n")
    for begin, end in reversed(solution_blocks(source, BEGIN_HIDDEN, END_HIDDEN)):
        del lines[begin : end + 1]
    return "\n".join(lines)


def student_source(source: str) -> str:
    """The cell as a student gets it: each BEGIN to END block becomes a stub, indented like the BEGIN line.

    MarkerError as `solution_blocks`, if what is left is not Python, or if a stub would raise as soon as the cell runs,
    since it is in no function.
    """
    lines = source.split("\n")
    for begin, end in reversed(solution_blocks(source)):
        indent = lines[begin].removesuffix(lines[begin].lstrip())
        lines[begin : end + 1] = [indent + line for line in STUB]
    try:
        tree = ast.parse("\n".join(lines))
    except SyntaxError as error:
        raise MarkerError(
            f"without its solution the cell isn't valid Python: line {error.lineno}: {error.msg}"
        ) from None
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    inside = {node for function in functions for node in ast.walk(function)}
    stubs = [node for node in ast.walk(tree) if isinstance(node, ast.Raise) and ast.unparse(node) == STUB[1]]
    if not inside.issuperset(stubs):
        raise MarkerError("a solution outside a function: its stub would raise as soon as the cell runs")
    return "\n".join(lines)
