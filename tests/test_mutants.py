"""Mutants of answers: which there are, that each is tried safely, and what is kept of it.

That the kept results of a topic are those of its checks is held by check_protocol.py.
"""

import ast
import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest

from course import mutant_trials, mutate, syllabus
from course.__main__ import COMMANDS
from course.environment import ROOT
from course.exercise_form import MarkerError
from course.mutant_trials import Target, TargetError, needed_for, prepare, targets, try_answer
from course.mutants import mutants
from course.selection import select

TOPICS = [topic for topic in select([], syllabus.load()) if topic.path.is_file()]
TEMPLATE = ROOT / "templates" / "TEMPLATE_ALGORITHM.ipynb"


# ---------------------------------------------------------------- which mutants there are


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
        ("y = a * b", "operator", ["y = a / b"]),
        ("y = a - b", "operator", ["y = a + b", "y = b - a"]),
        ("y = a // b", "operator", ["y = a / b", "y = a % b", "y = b // a"]),
        ("y = (a + b) * c", "operator", ["y = (a + b) / c", "y = (a - b) * c"]),
        ("y = -a", "operator", ["y = a"]),
        ("y = ~a", "operator", ["y = a"]),
        ("y += a", "operator", ["y -= a", "y = a"]),
        ("y = a < b", "comparison", ["y = a <= b", "y = a >= b"]),
        ("y = a >= b", "comparison", ["y = a > b", "y = a < b"]),
        ("y = a == b", "comparison", ["y = a != b"]),
        ("y = a in b", "comparison", ["y = a not in b"]),
        ("y = a is None", "comparison", ["y = a is not None"]),
        ("y = 0 < a <= b", "comparison", ["y = 0 <= a <= b", "y = 0 >= a <= b", "y = 0 < a < b", "y = 0 < a > b"]),
        ("y = a and b", "boolean", ["y = a or b", "y = b", "y = a"]),
        ("y = not a", "condition", ["y = a"]),
        ("y = a if b else c", "condition", ["y = a", "y = c"]),
        ("y = [x for x in a if x]", "condition", ["y = [x for x in a]", "y = [x for x in a if not x]"]),
        ("y = [x for x in a if x > b]", "condition", ["y = [x for x in a]"]),
        ("while a and b:\n    f()", "condition", ["while not (a and b):"]),
        ("y = 3", "constant", ["y = 4", "y = 2", "y = 6", "y = 0"]),
        ("y = 1", "constant", ["y = 2", "y = 0"]),
        ("y = 0", "constant", ["y = 1", "y = -1"]),
        ("y = 0.5", "constant", ["y = 1.5", "y = -0.5", "y = 1.0", "y = 0.0"]),
        ("y = True", "constant", ["y = False"]),
        ("y = 'used'", "constant", ["y = '?'"]),
        ("y = f'{a:.3f} and {2}'", "constant", [f"y = f'{{a:.3f}} and {{{n}}}'" for n in (3, 1, 4, 0)]),
        ("f(a, b, c)", "argument", ["f(b, a, c)", "f(c, b, a)", "f(a, c, b)"]),
        ("f(a, low=b, high=c)", "argument", ["f(a, low=c, high=b)"]),
        ("max(a, b)", "argument", []),
        ("y = (a, b, c)", "argument", ["y = (b, a, c)", "y = (a, c, b)"]),
        ("y = x[a:b]", "argument", ["y = x[:b]", "y = x[a:]"]),
        ("y = f(x, dim=a, dtype=b)", "keyword", ["y = f(x, dtype=b)", "y = f(x, dim=a)"]),
        ("y = ones(2, 3).detach().clone()", "call", ["y = ones(2, 3).detach()", "y = ones(2, 3).clone()"]),
        ("y = torch.sigmoid(x)", "call", ["y = x"]),
        ("x.clamp_(a)", "call", []),  # dropped as a statement
        ("y = min(x)", "name", ["y = max(x)"]),
        ("y = math.floor(x)", "name", ["y = math.ceil(x)"]),
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


def test_every_mutant_compiles_and_no_two_do_the_same():
    source = "### BEGIN SOLUTION\ndef f(a):\n    return a * 2 * 2 + 2 * 2\n### END SOLUTION"
    found = mutants(source)
    codes = [compile(m.source, "x", "exec").co_consts[0].co_code for m in found]
    assert len({ast.dump(ast.parse(m.source)) for m in found}) == len(found) == len(codes)
    constants = [m.change for m in found if m.kind == "constant"]
    # 2 * 2 is folded: 3 * 2 and 2 * 3 are one mutant, and so on for 1, 4 and 0; a * 2 * 2 isn't
    assert sum("+ return a * 2 * 2 +" in change for change in constants) == 4
    assert len(constants) == 12


def test_a_mutant_that_does_what_the_original_does_is_none():
    assert results("def f():\n    return\n    pass") == []
    assert "return 2 + 2" not in results("def f():\n    return 2 * 2")


# ---------------------------------------------------------------- what a notebook needs

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


@pytest.fixture
def notebook(tmp_path):
    """Writes a notebook with one exercise; cells are given by their ids."""

    def write(**changes):
        cells = {
            "setup": SETUP,
            "lesson": "FACTOR = 2\nraise SystemExit('not needed, and not run')",
            "factor": "def factor():\n    '''Two.'''\n    return FACTOR",
            "ex-double": ANSWER,
            "ex-double-check": "twice = check.double(double)",
            **{name.replace("_", "-"): source for name, source in changes.items()},
        }
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


@pytest.mark.processes
def test_what_an_answer_needs_is_found_in_the_cells_before_its_check(notebook):
    (target,) = targets(notebook())
    assert (target.number, target.cell, target.check, target.argument) == (1, "ex-double", "check.double", "double")
    assert "FACTOR = 2" in target.before
    assert "def factor()" in target.before
    assert "SystemExit" not in target.before
    assert try_answer(target, target.answer).status == "passed"


def test_statements_that_change_what_a_name_means_are_needed_too():
    statements = ast.parse(
        "import a.b as c\nclass A: x = c\nA.free = d = 3\nA.y['k'] = 4\ndef g(A): A.z = 5\n"
        "if d:\n    e = A\nf = [A for A in ()]\nh = e"
    ).body
    texts = [ast.unparse(statement).splitlines()[0] for statement in needed_for({"h"}, statements)]
    assert texts == [
        "import a.b as c", "class A:", "A.free = d = 3", "A.y['k'] = 4", "if d:", "h = e"
    ]  # fmt: skip


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


def test_the_digest_of_a_topic_holds_its_check_alone(monkeypatch):
    modules, original = [], mutant_trials._module
    monkeypatch.setattr(mutant_trials, "_module", lambda name: modules.append(name) or original(name))
    first = [target.digest for target in targets(TEMPLATE)]
    (check,) = set(modules)

    def with_a_changed_check(name):
        tree = original(name)
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.decorator_list]
        functions[0].body.append(ast.Pass())
        return tree

    monkeypatch.setattr(mutant_trials, "_module", with_a_changed_check)
    changed = [target.digest for target in targets(TEMPLATE)]
    assert check.startswith("shared.checks.")
    assert [a == b for a, b in zip(first, changed, strict=True)].count(False) == 1


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
def test_a_lesson_that_fails_is_no_verdict_on_an_answer(notebook):
    (target,) = targets(notebook(lesson="FACTOR = 1 / 0"))
    with pytest.raises(TargetError, match=r"'ex-double': what comes before it fails[\s\S]*ZeroDivisionError"):
        try_answer(target, target.answer)


# ---------------------------------------------------------------- trying


@pytest.fixture(scope="module", autouse=True)
def prepared():
    """PyTorch is imported once for all processes of this module."""
    prepare([target_of()])


def target_of(answer=ANSWER, setup=SETUP):
    return Target(1, "ex-double", answer, setup + "\ndef factor():\n    return 2\n", "check.double", "double", "0")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("return 2 * x", "passed"),
        ("return 3 * x", "failed"),
        ("raise NotImplementedError", "not attempted"),
        ("return undefined", "failed"),
        ("os._exit(0)", "died"),
        ("os.kill(os.getpid(), 9)", "died"),
        ("raise KeyboardInterrupt", "raised"),
        ("print('noise', flush=True); os.write(1, b'noise'); os.write(2, b'noise'); return 2 * x", "passed"),
        ("open('made.txt', 'w').write('x'); return 2 * x", "passed"),
        ("return input()", "failed"),
    ],
)
def test_an_answer_is_judged_and_leaves_nothing(body, status, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outcome = try_answer(target_of(), f"def double(x):\n    {body}", limit=60)
    assert outcome.status == status, outcome.detail
    assert "noise" not in "".join(capfd.readouterr())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.processes
def test_an_answer_that_fails_when_it_is_defined_is_caught():
    outcome = try_answer(target_of(), "def double(x): return x * 2\nundefined", limit=60)
    assert (outcome.status, outcome.detail) == ("raised", "NameError: name 'undefined' is not defined")


@pytest.mark.processes
def test_nothing_passes_from_one_answer_to_the_next():
    spoils = "import shared.checks.trial as t\nt.Trial.equal = None\ndef double(x): return 2 * x"
    assert try_answer(target_of(), spoils, limit=60).status == "failed"
    assert try_answer(target_of(), ANSWER, limit=60).status == "passed"


@pytest.mark.processes
def test_an_answer_that_hangs_is_ended():
    answer = "def double(x):\n    while True: pass"
    start = time.monotonic()
    assert try_answer(target_of(), answer, limit=1).status == "timed out"
    assert time.monotonic() - start < 60


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere ranks are not forked from the trial")
def test_ranks_end_with_a_trial_that_is_killed(tmp_path):
    answer = f"""
import os, signal, time
from pathlib import Path
from shared import launch

def rank():
    Path({str(tmp_path)!r}, f"{{os.environ['RANK']}}.tmp").write_text(str(os.getpid()))
    os.rename(f"{tmp_path}/{{os.environ['RANK']}}.tmp", f"{tmp_path}/{{os.environ['RANK']}}")
    if os.environ["RANK"] == "1":
        while not os.path.exists({str(tmp_path / "0")!r}):
            time.sleep(0.01)
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)

def double(x):
    launch(rank, 2, backend="gloo", timeout=300)
"""
    assert try_answer(target_of(), answer, limit=60).status == "died"
    pids = [int((tmp_path / name).read_text()) for name in "01"]
    deadline = time.monotonic() + 10
    while (left := [pid for pid in pids if psutil.pid_exists(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


# ---------------------------------------------------------------- the command


@pytest.fixture
def command(tmp_path, monkeypatch, notebook, capsys):
    """Runs `mutate` on the notebook of one exercise, with results kept in a folder of the test."""
    monkeypatch.setattr(mutate, "KEPT", tmp_path / "kept")
    monkeypatch.setattr(mutate, "LEAST_SECONDS", 60.0)

    def run(*names, fresh=False, **changes):
        path = notebook(**changes)
        args = SimpleNamespace(topics=list(names) or [str(path)], fresh=fresh, jobs=1)
        status = mutate.main(args)
        return status, capsys.readouterr().out

    return run


def kept(change=None):
    path = mutate.kept_file("15-99_doubling")
    document = json.loads(path.read_text(encoding="utf-8"))
    if change:
        change(document["ex-double"])
        path.write_text(json.dumps(document), encoding="utf-8")
    return document["ex-double"]


@pytest.mark.processes
def test_results_are_kept_and_what_has_not_changed_is_not_tried_again(command, monkeypatch):
    status, out = command()
    assert status == 1  # 2 * 2 is 4 too, and so is 2 ** 2 the other way round
    assert "15-99_doubling.1, line 3 of 'ex-double': the check accepts" in out
    for line in ("- return factor() ** x", "+ return factor() * x", "+ return x ** factor()", "33 %"):
        assert line in out
    assert [survivor["reason"] for survivor in kept()["survivors"]] == ["", ""]
    runs = []
    monkeypatch.setattr(mutate, "run", lambda *args, **kwargs: runs.append(args) or pytest.fail("tried again"))
    status, out = command()
    assert (status, runs) == (1, [])  # unchanged, and still without a reason
    assert "unchanged" in out
    kept(lambda record: [survivor.update(reason="the same") for survivor in record["survivors"]])
    status, out = command()
    assert (status, runs) == (0, [])
    assert "100 %" in out


@pytest.mark.processes
def test_a_reason_stays_with_its_mutant_and_is_shown_when_the_answer_changed(command):
    command()
    kept(lambda record: [survivor.update(reason="the same") for survivor in record["survivors"]])
    assert command(fresh=True)[0] == 0
    status, out = command(lesson="FACTOR = 1 + 1")  # tried again, the same survivors
    assert status == 0
    assert "do its reasons still hold?" in out
    status, out = command(ex_double=ANSWER.replace("factor() ** x", "x ** factor()"))
    assert status == 1  # another change, another mutant


@pytest.mark.processes
def test_a_stricter_check_catches_what_survived(command):
    command()
    strict = SETUP.replace('answer(2), 4, hint="twice")', 'answer(3), 8, hint="twice")')
    status, _ = command(setup=strict)
    assert (status, kept()["survivors"]) == (0, [])
    assert kept()["caught"] == kept()["mutants"] > 0


@pytest.mark.processes
def test_an_answer_that_its_own_check_rejects_is_no_basis(command):
    status, out = command(lesson="FACTOR = 3")
    assert status == 1
    assert "its own answer: failed" in out
    assert not mutate.kept_file("15-99_doubling").exists()


@pytest.mark.processes
def test_bad_names_and_damaged_results_are_named(command, notebook):
    assert command("15-77")[0] == 2
    path = notebook()
    status, out = command(f"{path}.7")
    assert (status, "has no exercise 7; it has 1" in out) == (1, True)
    mutate.KEPT.mkdir(exist_ok=True)
    mutate.kept_file("15-99_doubling").write_text("{", encoding="utf-8")
    status, out = command()
    assert status == 1
    assert "Mend it or delete it" in " ".join(out.split())


def test_a_folder_that_cannot_be_written_is_named_before_any_mutant_is_tried(command, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("x")
    monkeypatch.setattr(mutate, "KEPT", tmp_path / "file")
    monkeypatch.setattr(mutate, "run", lambda *args, **kwargs: pytest.fail("tried"))
    status, out = command()
    assert status == 2
    assert "can't write in" in out


@pytest.mark.processes
def test_an_import_that_fails_leaves_no_traceback(tmp_path):
    (tmp_path / "broken_module.py").write_text("1 / 0\n")
    setup = SETUP + "import broken_module\n"
    program = (
        "import sys; sys.path.insert(0, '.')\n"
        "from course.mutant_trials import Target, TargetError, prepare, try_answer\n"
        f"target = Target(1, 'ex-double', '', {setup!r}, 'check.double', 'double', '0')\n"
        "prepare([target])\n"
        "try: try_answer(target, '')\n"
        "except TargetError as error: print(error)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    said = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=env, timeout=300, check=True, capture_output=True, text=True
    )
    assert "cell 'ex-double'" in said.stdout
    assert "ZeroDivisionError" in said.stdout + said.stderr


def test_one_exercise_can_be_chosen():
    topic = TOPICS[0].label
    ((selected, numbers),) = mutate.choose([f"{topic}.2", f"{topic}.3"])
    assert (selected.label, numbers) == (topic, {2, 3})
    assert len(mutate.choose([])) == len(TOPICS)
    assert "mutate" in COMMANDS
