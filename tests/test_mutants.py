"""Mutants of answers: which there are, and what `course mutate` finds and keeps of them; how one answer is graded.

That the kept results of a topic are those of its checks, and as many, is held by check_protocol.py.
"""

import argparse
import json

import pytest

from course import grading, mutate, skeleton
from course.exercise_form import MarkerError
from course.mutants import mutants
from course.submission import Submission


def results(code):
    """What mutants of the code have in place of the original's lines, each mutant's joined by " / "."""
    changes = [mutant.change for mutant in mutants(f"### BEGIN SOLUTION\n{code}\n### END SOLUTION")]
    return [" / ".join(line[2:] for line in change if line.startswith("+ ")) for change in changes]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("y = a - b", ["pass", "y = a + b", "y = b - a"]),
        ("def f(a, b):\n    c = a + b\n    return c", ["pass", "c = a - b", "c = b + b", "c = a + a", "pass"]),
        ("y += a", ["pass", "y -= a", "y = a"]),
        ("y = a < b != c", ["pass", "y = a <= b != c", "y = a >= b != c", "y = a < b == c"]),
        ("y = a if b else c", ["pass", "y = a", "y = c"]),
        ("if a:\n    f()", ["pass", "if not a:", "pass"]),
        ("y = [x for x in a if x]", ["pass", "y = [x for x in a]"]),
        ("y = 0.5", ["pass", "y = 1.0", "y = 0.0"]),
        ("y = 'used'", ["pass", "y = '?'"]),
        ("f(a, b, c)", ["pass", "f(b, a, c)", "f(a, c, b)"]),
        ("f(a, a)", ["pass"]),  # none is like the original
        ("y = x[a:b]", ["pass", "y = x[:b]", "y = x[a:]"]),
        ("y = f(dim=a, dtype=b)", ["pass", "y = f(dtype=b)", "y = f(dim=a)"]),
        ("y = torch.ones(2, n).detach()", ["pass", "y = torch.ones(2, n)", "y = torch.ones(n, 2).detach()",
            "y = torch.zeros(2, n).detach()", "y = torch.ones(3, n).detach()", "y = torch.ones(1, n).detach()"]),
        ("with no_grad():\n    f()", ["pass", "f()", "pass"]),
        # types, docstrings and the wording of an error are nobody's business
        ("def f(x: 'a' = None) -> 2:\n    'Words.'\n    raise KeyError(f'no {x + 1:3}')", ["pass"]),
    ],
)  # fmt: skip
def test_each_kind_of_change(code, expected):
    assert results(code) == expected


def test_only_code_between_the_markers_is_changed():
    source = "LIMIT = 3\n### BEGIN SOLUTION\ny = LIMIT\n### END SOLUTION\nz = 4 + y"
    (mutant,) = mutants(source)
    assert (mutant.line, mutant.change) == (3, ["- y = LIMIT", "+ pass"])
    assert mutant.source == "LIMIT = 3\npass\nz = 4 + y"
    with pytest.raises(MarkerError):
        mutants("### BEGIN SOLUTION\ny = 1")


# ---------------------------------------------------------------- the command

SETUP = """
from types import SimpleNamespace
from shared.checks.exercise import exercise

@exercise("15-01.1", "Double", points=10, demands=1)
def double(trial, answer):
    trial.equal("2 doubled", answer(2), 4, hint="twice")

check = SimpleNamespace(double=double)
"""
ANSWER = "def double(x):\n    ### BEGIN SOLUTION\n    return factor() ** x\n    ### END SOLUTION"
STRICTER = {"setup": SETUP.replace("answer(2), 4", "answer(3), 8")}
CELLS = {
    "setup": SETUP,
    "lesson": "FACTOR = 2\nraise SystemExit('not needed, and not run')",
    "factor": "def factor():\n    '''Two.'''\n    return FACTOR",
    "ex-double": ANSWER,
    "ex-double-check": "twice = check.double(double)",
}


@pytest.fixture
def notebook(tmp_path, monkeypatch):
    """Writes the notebook of topic 15-01, with one exercise; cells are given by their ids."""
    paths = []

    def write(**changes):
        cells = {**CELLS, **{name.replace("_", "-"): source for name, source in changes.items()}}
        task = {"id": "ex-double-task", "cell_type": "markdown", "metadata": {}}
        document = [task | {"source": "### Exercise 15-01.1 — Double (10 points, 10 minutes)"}]
        for name, source in cells.items():
            metadata = {"nbgrader": {"solution": name == "ex-double"}}
            document.append({"id": name, "cell_type": "code", "source": source, "metadata": metadata})
        paths.append(tmp_path / f"{len(paths)}.ipynb")
        paths[-1].write_text(json.dumps({"cells": document}), encoding="utf-8")
        skeleton.skeleton.cache_clear()

    for module in (skeleton, mutate):
        monkeypatch.setattr(module, "editions", lambda: {"15-01": paths[-1]})
    monkeypatch.setattr(mutate, "KEPT", tmp_path)
    write()
    yield write
    skeleton.skeleton.cache_clear()


def test_the_digest_changes_with_what_decides_and_with_nothing_else(notebook):
    def digest(**changes):
        notebook(**changes)
        return mutate.digest("15-01", *skeleton.skeleton("15-01").tasks)

    first = digest()
    assert first == digest(lesson="FACTOR = 2  # twice\nprint('other words')", another="x = 1")
    assert first == digest(factor="def factor():\n    '''2.'''\n\n    return (FACTOR)")
    for change in (
        {"lesson": "FACTOR = 3"},
        {"ex_double": ANSWER.replace("factor() ** x", "x ** factor()")},
        STRICTER,
        {"ex_double_check": "check.double(lambda x: double(x))"},
    ):
        assert digest(**change) != first


@pytest.fixture
def command(notebook, capsys):
    """Runs `mutate` on the notebook of one exercise, with results kept in a folder of the test."""
    parser = argparse.ArgumentParser()
    mutate.add_arguments(parser)

    def run(*arguments, **changes):
        notebook(**changes)
        status = mutate.main(parser.parse_args([*arguments]))
        return status, "".join(capsys.readouterr())

    return run


def give_reasons(*cells):
    """Write into what is kept of the exercise that its survivors are right, and keep the same of other cells."""
    document = json.loads(mutate.kept_file("15-01").read_text(encoding="utf-8"))
    for survivor in document["ex-double"]["survivors"]:
        survivor["reason"] = "the same"
    text = json.dumps(document | dict.fromkeys(cells, document["ex-double"]))
    mutate.kept_file("15-01").write_text(text, encoding="utf-8")


@pytest.mark.slow
@pytest.mark.processes
def test_results_are_kept_with_their_reasons_until_something_changes(command, monkeypatch):
    status, said = command()
    assert status == 1  # 2 * 2 is 4 too, and so is 2 ** 2 the other way round
    assert "15-01.1 (ex-double): 3 mutants, 1 caught, 0 explained, 2 not" in said
    for line in (
        "line 3: the check accepts",
        "- return factor() ** x",
        "+ return factor() * x",
        "+ return x ** factor()",
    ):
        assert line in said
    with monkeypatch.context() as patched:
        patched.setattr(mutate, "run", lambda *_: pytest.fail("tried again"))
        status, said = command()
        assert (status, "unchanged" in said) == (1, True)  # and still without a reason
        give_reasons("ex-gone")
        status, said = command("15-01.1")
        assert (status, "1 caught, 2 explained, 0 not; unchanged" in said) == (0, True)
    status, said = command("15-01.1", "--fresh")
    assert (status, "unchanged" in said) == (0, False)
    assert list(mutate.load("15-01")) == ["ex-double"]
    status, said = command(lesson="FACTOR = 1 + 1")  # tried again, the same survivors
    assert (status, "do its reasons still hold?" in said) == (0, True)
    status, _ = command(ex_double=ANSWER.replace("factor() ** x", "x ** factor()"))
    assert status == 1  # another change, another mutant
    status, said = command(**STRICTER)
    assert (status, "3 mutants, 3 caught, 0 explained, 0 not" in said) == (0, True)
    before = mutate.kept_file("15-01").read_bytes()
    for changes, message in (
        ({"lesson": "FACTOR = 3"}, "(ex-double): its own answer: failed"),
        ({"lesson": "FACTOR = 1 / 0"}, "check broken: the lesson's own code fails: ZeroDivisionError"),
        ({"ex_double_check": "double(2)"}, "call check.NAME"),
        ({"ex_double": "def double(:"}, "can't be read: SyntaxError"),
    ):
        status, said = command(**changes)
        assert (status, message in said) == (1, True), said
    assert mutate.kept_file("15-01").read_bytes() == before


def test_what_cannot_be_tried_is_named(command):
    for name, status, message in (
        ("15-77", 2, "there is no topic 15-77"),
        ("15-01.7", 1, "there is no exercise 15-01.7"),
    ):
        found, said = command(name)
        assert (found, message in said) == (status, True)
    mutate.kept_file("15-01").write_text("<<<<<<< HEAD", encoding="utf-8")
    status, said = command()
    assert (status, "Mend it or delete it" in said) == (1, True)


# ---------------------------------------------------------------- one answer, graded

JUDGED = SETUP.replace("demands=1", "demands=4").replace(
    '    trial.equal("2 doubled", answer(2), 4, hint="twice")',
    """
    import torch
    trial.needs("is a function", callable(answer), expected="", got="")
    trial.equal("has the seed", torch.initial_seed(), 7)
    trial.that("is short", len(answer(3)) < 9, expected="8 letters", got=answer(3), hint="cut", see=2)
    trial.needs("goes on", False, expected="", got="")
""",
)
HIDDEN = "check.double(double)\n### BEGIN HIDDEN TESTS\n1 / 0\n### END HIDDEN TESTS"
PICKLED = "import pickle\nclass Own: pass\npickle.dumps(Own())\ndouble = lambda x: long(x)"


@pytest.mark.processes
def test_a_half_right_answer_has_its_part_and_is_told_what_and_where_to_look(notebook):
    notebook(setup=JUDGED, ex_double_check=HIDDEN)
    answers = {"ex-double": PICKLED, "ex-gone": "def long(x): return 'x' * 3000"}
    graded = grading.grade(Submission("15-01", answers, ("no python = [",), ("a note",)), seed=7)
    (one,) = graded.exercises
    assert (graded.notes, one.status, one.points) == (("a note",), "failed", 2.5)
    assert one.reason == "is short; goes on; 2 more could not be judged"
    told = [(demand["name"], demand["hint"], len(demand["got"])) for demand in one.demands]
    assert told == [("has the seed", "", 0), ("is short", "cut; open Hint 2 of the task", 2000), ("goes on", "", 0)]


REPLACING = """
import builtins, functools, math, torch
for owner, name in (
    (builtins, "abs"), (math, "isclose"), (torch.Tensor, "equal"),
    (torch.nn.functional, "relu"), (torch.testing, "assert_close"),
):
    setattr(owner, name, functools.partial(getattr(owner, name)))
double = lambda x: 2 * x
"""
REPLACED = "builtins.abs, math.isclose, torch.Tensor.equal, torch.nn.functional.relu, torch.testing.assert_close"
BROKEN = SETUP.replace("double=double", "double=exercise('1', 'A', points=9, demands=1, stand_in=int)(exercise)")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("setup", "answer", "status", "reason"),
    [
        (SETUP, "double = lambda x: sum(range(10**13))", "stopped", "the check of the answer: it took more"),
        (SETUP, REPLACING, "refused", f"it has replaced {REPLACED}"),
        (SETUP, "double = lambda x: helper(x)", "refused", "it imports the course's checks"),
        (BROKEN, "double = 1", "check broken", "the check itself failed, which says nothing about your answer"),
    ],
)
def test_what_is_no_verdict_has_a_reason(notebook, setup, answer, status, reason):
    notebook(setup=setup)
    helper = "from shared.checks import words\ndef helper(x): return words"
    (one,) = grading.grade(Submission("15-01", {"ex-double": answer}, (helper,)), seed=7, seconds=3).exercises
    assert (one.status, one.points, one.reason[: len(reason)]) == (status, 0, reason)
