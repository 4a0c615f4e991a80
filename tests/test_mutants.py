"""Mutants of answers: which there are, that each is tried safely, and what is kept of it.

That the kept results of a topic are those of its checks is held by check_protocol.py.
"""

import argparse
import json

import pytest

from course import mutate
from course.exercise_form import MarkerError
from course.mutant_trials import Outcome, TargetError, prepare, targets, try_answer
from course.mutants import mutants
from course.mutate import Record, Survivor


def results(code, kind=None):
    """The lines that mutants of the code have in place of the original's, each mutant's joined by " / "."""
    found = mutants(f"### BEGIN SOLUTION\n{code}\n### END SOLUTION")
    assert all(mutant.source != code for mutant in found)
    return [
        " / ".join(line[2:] for line in mutant.change.splitlines() if line.startswith("+"))
        for mutant in found
        if kind in (None, mutant.kind)
    ]


@pytest.mark.parametrize(
    ("code", "kind", "expected"),
    [
        ("y = a + b", "operator", ["y = a - b"]),
        ("y = a - b", "operator", ["y = a + b", "y = b - a"]),
        ("y = a // b", "operator", ["y = a / b", "y = a % b", "y = b // a"]),
        ("y = -a", "operator", ["y = a"]),
        ("y += a", "operator", ["y -= a", "y = a"]),
        ("y = a < b", "comparison", ["y = a <= b", "y = a >= b"]),
        ("y = a == b", "comparison", ["y = a != b"]),
        ("y = a in b", "comparison", ["y = a not in b"]),
        ("y = a is None", "comparison", ["y = a is not None"]),
        ("y = 0 < a <= b", "comparison", ["y = 0 <= a <= b", "y = 0 >= a <= b", "y = 0 < a < b", "y = 0 < a > b"]),
        ("y = a and b", "boolean", ["y = a or b", "y = b", "y = a"]),
        ("y = not a", "condition", ["y = a"]),
        ("y = a if b else c", "condition", ["y = a", "y = c"]),
        ("y = [x for x in a if x]", "condition", ["y = [x for x in a]", "y = [x for x in a if not x]"]),
        ("while a and b:\n    f()", "condition", ["while not (a and b):"]),
        ("y = 3", "constant", ["y = 4", "y = 2", "y = 6", "y = 0"]),
        ("y = 0", "constant", ["y = 1", "y = -1"]),
        ("y = 0.5", "constant", ["y = 1.5", "y = -0.5", "y = 1.0", "y = 0.0"]),
        ("y = True", "constant", ["y = False"]),
        ("y = 'used'", "constant", ["y = '?'"]),
        ("f(a, b, c)", "argument", ["f(b, a, c)", "f(c, b, a)", "f(a, c, b)"]),
        ("f(a, low=b, high=c)", "argument", ["f(a, low=c, high=b)"]),
        ("y = (a, b, c)", "argument", ["y = (b, a, c)", "y = (a, c, b)"]),
        ("y = x[a:b]", "argument", ["y = x[:b]", "y = x[a:]"]),
        ("y = f(x, dim=a, dtype=b)", "keyword", ["y = f(x, dtype=b)", "y = f(x, dim=a)"]),
        ("y = ones(2, 3).detach().clone()", "call", ["y = ones(2, 3).detach()", "y = ones(2, 3).clone()"]),
        ("y = min(x)", "name", ["y = max(x)"]),
        ("with no_grad():\n    f()", "with", ["f()"]),
        ("with a, b:\n    f()", "with", ["with b:", "with a:"]),
        ("try:\n    f()\nfinally:\n    g()", "try", ["f()", "f() / g()"]),
        ("try:\n    f()\nexcept OSError:\n    g()", "try", ["f()"]),
        ("f()\ng()", "statement", ["pass", "pass"]),
        ("for x in a:\n    continue", "statement", ["pass", "break"]),
        ("if a:\n    f()\nelse:\n    g()", "statement", ["pass", "", "pass"]),
        ("raise KeyError(f'no {a + 1}')", None, ["pass"]),  # the wording of an error is nobody's business
        ("def f(x: 'a' = None) -> 2:\n    'Words.'\n    return x", None, ["pass"]),  # nor are types and docstrings
        ("@cached\ndef f():\n    return x", "decorator", [""]),
        ("class A:\n    def f(self):\n        return 2\n\n    def g(self):\n        pass", "statement", ["pass"] * 3),
        ("for n in a:\n    def hook(x, n=n):\n        return n", "argument", ["def hook(x):"]),
    ],
)  # fmt: skip
def test_each_kind_of_change(code, kind, expected):
    assert results(code, kind) == expected


def test_a_name_is_replaced_by_those_of_its_own_scope_that_are_used_alike():
    code = "def f(a: int, b: int, ctx):\n    c = a + b\n    ctx.save(c)\n    return [x * other for x in b]"
    # c and ctx are used in other ways, x is of another scope, `other` of none
    assert results(code, "name") == ["c = b + b", "c = a + a", "return [x * other for x in a]"]


def test_a_name_of_an_outer_scope_stays_in_it():
    code = "def f(low: int, high: int):\n    def g(x):\n        return x - low\n    return g"
    assert results(code, "name") == ["return x - high"]


def test_only_code_between_the_markers_is_changed():
    source = "LIMIT = 3\n### BEGIN SOLUTION\ny = LIMIT\n### END SOLUTION\nz = 4 + y"
    assert [(m.line, m.change) for m in mutants(source)] == [(3, "- y = LIMIT\n+ pass")]
    with pytest.raises(MarkerError):
        mutants("### BEGIN SOLUTION\ny = 1")


def test_no_two_mutants_do_the_same_and_none_does_what_the_original_does():
    found = results("def f(a):\n    return a * 2 * 2 + 2 * 2", "constant")
    assert sum("return a * 2 * 2 +" in change for change in found) == 4  # 2 * 2 is folded: 3 * 2 is 2 * 3; 1, 4 and 0
    assert len(found) == 12
    assert results("def f():\n    return\n    pass") == []
    assert "return 2 + 2" not in results("def f():\n    return 2 * 2")


SETUP = """
import os
from types import SimpleNamespace
from shared.checks.exercise import exercise

@exercise("15-94.1", "Double", points=10, demands=1)
def double(trial, answer):
    trial.equal("2 doubled", answer(2), 4, hint="twice")

check = SimpleNamespace(double=double)
"""
ANSWER = "def double(x):\n    ### BEGIN SOLUTION\n    return factor() ** x\n    ### END SOLUTION"
CELLS = {
    "setup": SETUP,
    "lesson": "FACTOR = 2\nraise SystemExit('not needed, and not run')",
    "factor": "def factor():\n    '''Two.'''\n    return FACTOR",
    "ex-double": ANSWER,
    "ex-double-check": "twice = check.double(double)",
}


@pytest.fixture
def notebook(tmp_path):
    """Writes a notebook with one exercise; cells are given by their ids."""

    def write(**changes):
        cells = {**CELLS, **{name.replace("_", "-"): source for name, source in changes.items()}}
        path = tmp_path / "15-99_doubling.ipynb"
        document = [
            {
                "id": name,
                "cell_type": "code",
                "source": source.splitlines(keepends=True),
                "metadata": {"nbgrader": {"solution": name == "ex-double"}},
            }
            for name, source in cells.items()
            if source is not None
        ]
        path.write_text(json.dumps({"cells": document}), encoding="utf-8")
        return path

    return write


def test_what_an_answer_needs_is_found_in_the_cells_before_its_check(notebook):
    (target,) = targets(notebook())
    assert (target.number, target.cell, target.check, target.argument) == (1, "ex-double", "check.double", "double")
    assert target.before == SETUP + '\nFACTOR = 2\ndef factor():\n    """Two."""\n    return FACTOR'


def test_the_digest_changes_with_what_decides_and_with_nothing_else(notebook):
    def digest(**changes):
        (target,) = targets(notebook(**changes))
        return target.digest

    first = digest()
    assert first == digest(lesson="FACTOR = 2  # twice\nprint('other words')", another="x = 1")
    assert first == digest(factor="def factor():\n    '''2.'''\n\n    return (FACTOR)")
    for change in (
        {"lesson": "FACTOR = 3"},
        {"ex_double": ANSWER.replace("factor() ** x", "x ** factor()")},
        {"setup": SETUP.replace("answer(2), 4", "answer(3), 8")},
        {"ex_double_check": "check.double(lambda x: double(x))"},
    ):
        assert digest(**change) != first


def test_the_digest_changes_with_the_check_and_with_no_other_of_the_topic(notebook, monkeypatch, tmp_path):
    monkeypatch.setattr("course.mutant_trials.ROOT", tmp_path)
    checks = tmp_path / "shared" / "checks" / "topic.py"
    checks.parent.mkdir(parents=True)
    digests = []
    for wanted, other in ((4, 1), (4, 2), (5, 1)):
        checks.write_text(
            f"WANTED = {wanted}\ndef double(trial, answer):\n    trial.equal('two', answer(2), WANTED)\n"
            f"def other(trial, answer):\n    return {other}\n",
            encoding="utf-8",
        )
        (target,) = targets(notebook(setup="from shared.checks import topic as check"))
        digests.append(target.digest)
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ex_double_check": None}, "cell 'ex-double' has no check cell"),
        ({"ex_double_check": "double(2)"}, "its check cell has no call check.NAME"),
        ({"ex_double": "def double(:"}, "can't be read: SyntaxError"),
    ],
)
def test_a_notebook_that_cannot_be_tried_says_why(notebook, changes, message):
    with pytest.raises(TargetError, match=message):
        targets(notebook(**changes))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("return 2 * x", "passed"),
        ("return 3 * x", "failed"),
        ("raise NotImplementedError", "not attempted"),
        ("os._exit(0)", "died"),
        ("while True: pass", "timed out"),
        ("pass\nundefined", "raised"),
        ("return 2 * x\nimport shared.checks.trial as t\nt.Trial.equal = None", "failed"),
        ("open('made.txt', 'w').write('x'); os.write(1, b'noise'); return 2 * x", "passed"),
        ("return input() or 2 * x", "failed"),
    ],
)
def test_an_answer_is_judged_and_leaves_nothing(notebook, body, status, capfd, tmp_path, monkeypatch):
    (target,) = targets(notebook())
    prepare([target])
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    limit = 1 if status == "timed out" else 60
    outcome = try_answer(target, f"def double(x):\n    {body}", limit)
    assert outcome.status == status, outcome.detail
    assert "noise" not in "".join(capfd.readouterr())
    assert list((tmp_path / "empty").iterdir()) == []


@pytest.fixture
def command(tmp_path, monkeypatch, notebook, capsys):
    """Runs `mutate` on the notebook of one exercise, with results kept in a folder of the test."""
    monkeypatch.setattr(mutate, "KEPT", tmp_path / "kept")
    monkeypatch.setattr(mutate, "LEAST_SECONDS", 60.0)
    mutate.KEPT.mkdir()
    parser = argparse.ArgumentParser()
    mutate.add_arguments(parser)

    def run(*names, **changes):
        path = notebook(**changes)
        status = mutate.main(parser.parse_args([*(names or [str(path)]), "--jobs", "1"]))
        return status, capsys.readouterr().out

    run.path = str(notebook())
    return run


def kept(**survivors):
    """What is kept of the exercise, whose survivors get other values."""
    path = mutate.kept_file("15-99_doubling")
    document = json.loads(path.read_text(encoding="utf-8"))
    for survivor in document["ex-double"]["survivors"]:
        survivor.update(survivors)
    path.write_text(json.dumps(document), encoding="utf-8")
    return document["ex-double"]


@pytest.mark.processes
def test_results_are_kept_with_their_reasons_until_something_changes(command, monkeypatch):
    status, out = command()
    assert status == 1  # 2 * 2 is 4 too, and so is 2 ** 2 the other way round
    assert "15-99_doubling.1, line 3 of 'ex-double': the check accepts" in out
    for line in ("- return factor() ** x", "+ return factor() * x", "+ return x ** factor()", "33 %"):
        assert line in out
    assert [survivor["reason"] for survivor in kept()["survivors"]] == ["", ""]
    with monkeypatch.context() as patched:
        patched.setattr(mutate, "run", lambda *_: pytest.fail("tried again"))
        status, out = command()
        assert (status, "unchanged" in out) == (1, True)  # and still without a reason
        kept(reason="the same")
        status, out = command()
        assert (status, "100 %" in out) == (0, True)
    (record,) = mutate.load("15-99_doubling").values()
    mutate.save("15-99_doubling", {"ex-gone": record, "ex-double": record})
    status, out = command(f"{command.path}.1", "--fresh")
    assert (status, "unchanged" in out) == (0, False)
    assert list(mutate.load("15-99_doubling")) == ["ex-double"]
    status, out = command(lesson="FACTOR = 1 + 1")  # tried again, the same survivors
    assert (status, "do its reasons still hold?" in out) == (0, True)
    status, _ = command(ex_double=ANSWER.replace("factor() ** x", "x ** factor()"))
    assert status == 1  # another change, another mutant
    status, _ = command(setup=SETUP.replace("answer(2), 4", "answer(3), 8"))
    assert (status, kept()["survivors"]) == (0, [])  # a stricter check
    assert kept()["caught"] == kept()["mutants"] > 0


@pytest.mark.parametrize(("seconds", "limit"), [(1, 10), (4, 20)])
def test_a_mutant_has_five_times_the_seconds_of_the_answer_and_ten_at_least(notebook, monkeypatch, seconds, limit):
    limits = []

    def tried(_target, _answer, limit=None):
        limits.append(limit)
        return Outcome("passed", "", seconds)

    monkeypatch.setattr(mutate, "try_answer", tried)
    (target,) = targets(notebook())
    mutate.run(target)
    assert set(limits) == {None, limit}


def test_a_reason_is_that_of_the_same_line_first():
    def record(**reasons):
        survivors = [Survivor(int(line[1:]), ["- a", "+ b"], reason) for line, reason in reasons.items()]
        return Record("digest", 3, 0, 1, survivors=survivors)

    new = record(_3="", _4="", _9="")
    mutate.keep_reasons(new, record(_3="three", _9="nine"))
    assert [survivor.reason for survivor in new.survivors] == ["three", "", "nine"]


@pytest.mark.processes
def test_what_cannot_be_tried_is_named(command):
    for changes, message in (
        ({"lesson": "FACTOR = 3"}, "its own answer: failed"),
        ({"lesson": "FACTOR = 1 / 0"}, "ZeroDivisionError"),
    ):
        status, out = command(**changes)
        assert (status, message in out) == (1, True), out
    assert not mutate.kept_file("15-99_doubling").exists()
    assert command("15-77")[0] == 2
    status, out = command(f"{command.path}.7")
    assert (status, "there is no exercise" in out) == (1, True)
    mutate.kept_file("15-99_doubling").write_text("<<<<<<< HEAD", encoding="utf-8")
    status, out = command()
    assert (status, "Mend it or delete it" in out) == (1, True)
