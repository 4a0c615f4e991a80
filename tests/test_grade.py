"""`course grade` on what students hand in, by mistake or on purpose: everybody gets their own points, or a reason."""

import csv
import io
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections import defaultdict

import pytest
from handed_in import as_file, code, notebook, place, solutions

from course import grade, grade_pages, grading
from course.__main__ import COMMANDS, run_command
from course.collecting import HandedIn
from course.environment import ROOT
from course.grade_pages import Outcome
from course.grading import Graded, GradedExercise, grade_file
from course.skeleton import editions, skeleton
from course.submission import UnreadableError

pytestmark = [pytest.mark.slow, pytest.mark.processes]

TOPIC = "15-07"
CELL, NUMBER = "ex-fixed", "15-07.1"  # what is answered in many ways, for 15 points
WITNESS, WITNESS_NUMBER = "ex-roofline", "15-07.3"  # answered rightly beside it where it might suffer
NAME = editions()[TOPIC].name
RIGHT = solutions(TOPIC)
HEAD = "def fixed_bytes(model, optimizer):\n"


def course_grade(*arguments, timeout=500, **settings):
    command = [sys.executable, "-m", "course", "grade", *map(str, arguments)]
    env = {**os.environ, "COURSE_ENV": "current", "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8", **settings}
    return subprocess.run(
        command, cwd=ROOT, env=env, timeout=timeout, check=False, capture_output=True, text=True, encoding="utf-8"
    )


def rows_of(output):
    """The lines of grades.csv, by student."""
    found = defaultdict(dict)
    with open(output / "grades.csv", encoding="utf-8-sig", newline="") as file:
        for row in csv.DictReader(file):
            found[row["student"]][row["exercise"]] = row
    return found


# --------------------------------------------------------------------------------------------------------------------
# one batch of everything that is known to go wrong


def answering(source, **more):
    """A notebook with one answer."""
    return as_file(notebook(TOPIC, {CELL: source, **more}))


def changed(edit, source=RIGHT[CELL]):
    """A notebook with one answer, and what `edit` makes of its cells."""
    made = notebook(TOPIC, {CELL: source})
    made["cells"] = edit(made["cells"]) or made["cells"]
    return as_file(made)


def without_metadata(cells, *keys):
    for cell in cells:
        cell["metadata"] = {}
        for key in keys:
            del cell[key]


def with_doubled_id(first, second):
    def edit(cells):
        at = place({"cells": cells}, CELL)
        cells[at]["source"] = first
        cells.insert(at + 2, {**cells[at], "source": second})

    return edit


def packed(files):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return content.getvalue()


STUB = next(task.stub for task in skeleton(TOPIC).tasks if task.cell == CELL)
FALSE = HEAD + "    return {'parameters': 1, 'buffers': 2, 'gradients': 3, 'optimizer': 4}\n"
EQUAL = """
class Equal(int):
    __eq__ = __ge__ = __le__ = lambda self, other: True
    __ne__ = lambda self, other: False
    __hash__ = int.__hash__
def fixed_bytes(model, optimizer):
    return {name: Equal(1) for name in ("parameters", "buffers", "gradients", "optimizer")}
"""
# 48 processes and no more, if nobody stops it
BOMB = (
    HEAD
    + """
    import os, time
    for _ in range(48):
        if os.fork() == 0:
            break
    time.sleep(60)
"""
)
ENDLESS = "while True: __import__('time').sleep(0.01)"
DEAF = HEAD + "    import signal, time\n    signal.signal(signal.SIGALRM, signal.SIG_IGN)\n    time.sleep(60)\n"
FORGED = """
import json, os
for number in range(3, 100):
    try:
        text = json.dumps({"stage": "passed", "reason": "", "earned": 15, "demands": []}).encode()
        os.write(number, len(text).to_bytes(4, "big") + text)
    except OSError:
        pass
os._exit(0)
"""
REMOVES = HEAD + "    import os, shutil\n    shutil.rmtree(os.getcwd(), ignore_errors=True)\n"

# name of the student: (what is handed in, points for the exercise, its status, what its reason has in it)
CASES = {
    # what is right, or nothing
    "Jörg von Über": (answering(RIGHT[CELL]), 15, "passed", ""),
    "does nothing": (as_file(notebook(TOPIC)), 0, "not attempted", "the stub"),
    "hands in nothing": (None, 0, "not handed in", ""),
    "hands in a report": ({"report.pdf": b""}, 0, "not handed in", "report.pdf"),
    "deletes all": (changed(lambda cells: [cell for cell in cells if cell["id"] == "ex-plan"]), 0, "missing", ""),
    "empties the cell": (answering("# later\n"), 0, "not attempted", ""),
    "is half right": (answering(RIGHT[CELL].replace('"adam": 2', '"adam": 3')), 12, "failed", "optimizer"),
    "is wrong": (answering(FALSE), 0, "failed", "parameters"),
    # mistakes that end a process, or never end
    "loops at once": (answering(f"{RIGHT[CELL]}\n{ENDLESS}"), 0, "stopped", "the answer cell: it took more"),
    "loops": (answering(f"{HEAD}    {ENDLESS}"), 0, "failed", "comes to an end"),
    "loops and is deaf": (answering(DEAF), 0, "stopped", "check of the answer: it took"),
    "forks": (answering(BOMB, **{WITNESS: RIGHT[WITNESS]}), 0, "stopped", "more than 32 processes"),
    "takes memory": (answering(HEAD + "    return bytearray(20 << 30)"), 0, "failed", "parameters"),
    "exits the process": (answering(HEAD + "    import os; os._exit(0)"), 0, "stopped", "before there was a result"),
    "exits at once": (answering("import os; os._exit(0)"), 0, "stopped", "before there was a result"),
    "exits": (answering("import sys; sys.exit()"), 0, "failed", "SystemExit"),
    "exits later": (answering(HEAD + "    raise SystemExit"), 0, "failed", "runs"),
    "crashes": (answering("import ctypes; ctypes.string_at(0)"), 0, "stopped", "SIGSEGV"),
    "raises": (answering(RIGHT[CELL] + "\n1 / 0"), 0, "failed", "ZeroDivisionError"),
    "imports nowhere": (answering("import nowhere\n" + RIGHT[CELL]), 0, "failed", "No module named 'nowhere'"),
    "can't spell": (answering("def fixed_bytes(:"), 0, "failed", "SyntaxError: invalid syntax (your answer, line 1)"),
    "renames it": (answering(RIGHT[CELL].replace("fixed_bytes", "fixed")), 0, "failed", "'fixed_bytes' is not defined"),
    "writes half a character": (answering(f"x = 'HALF'\n{RIGHT[CELL]}").replace(b"HALF", rb"\ud800"), 15, "passed", ""),
    "writes a null": (answering("\0"), 0, "failed", "null bytes"),
    "prints 50 MB": (answering(RIGHT[CELL] + "\nfor _ in range(500): print('x' * 100_000)"), 15, "passed", ""),
    "removes the folder": (answering(REMOVES + "    return fixed(model, optimizer)\n"
        + RIGHT[CELL].replace("fixed_bytes", "fixed")), 15, "passed", ""),
    # what becomes of a notebook
    "deletes checks": (changed(lambda cells: [c for c in cells if "-check" not in c["id"]]), 15, "passed", ""),
    "edits checks": (
        changed(lambda cells: cells[place({"cells": cells}, f"{CELL}-check")].update(source="print('passed')"), FALSE),
        0, "failed", "parameters"),
    "doubles checks": (changed(lambda cells: cells + [c for c in cells if "-check" in c["id"]]), 15, "passed", ""),
    "turns it around": (changed(lambda cells: cells[::-1]), 15, "passed", ""),
    "loses metadata": (changed(without_metadata), 15, "passed", ""),
    "loses ids": (changed(lambda cells: without_metadata(cells, "id")), 15, "passed", ""),
    "doubles an id": (changed(with_doubled_id(STUB, RIGHT[CELL])), 15, "passed", ""),
    "doubles an id and leaves one": (changed(with_doubled_id(RIGHT[CELL], STUB)), 15, "passed", ""),
    "breaks the JSON": (answering(RIGHT[CELL])[:-50], 0, "unreadable", "isn't JSON"),
    "empties the file": (b"", 0, "unreadable", "empty"),
    "mistakes the file": (as_file({"cells": [code("1")], "nbformat": 4}), 0, "unreadable", "another notebook"),
    "nests": (b"[" * 200_000, 0, "unreadable", "can't be read"),
    "links": ("link", 0, "unreadable", "it is a link"),
    "climbs": ({"my.zip": packed({f"../Jörg von Über/{NAME}": answering(FALSE)})}, 0, "unreadable", "leads out"),
    "explodes": ({"my.zip": packed({NAME: b" " * 200_000_000})}, 0, "unreadable", "more than 30 MB"),
    # what students write around their answers
    "helps": (changed(lambda cells: cells.insert(9, code("import math as m\ndef up(n): return m.ceil(n / 512) * 512")),
        RIGHT[CELL].replace("-(-p.nbytes // 512) * 512", "up(p.nbytes)")), 15, "passed", ""),
    "imports above": (
        changed(lambda cells: cells[place({"cells": cells}, "setup")].update(source="import bisect as b\nmath = 1"),
            "b.bisect\n" + RIGHT[CELL]), 15, "passed", ""),
    "uses magic": (answering(f"%%time\n{RIGHT[CELL]}\n%timeit fixed_bytes(nn.ReLU(), 'sgd')\n!ls"), 15, "passed", ""),
    "checks and shows": (answering(RIGHT[CELL] + "\ncheck.fixed_bytes(fixed_bytes)\ndisplay(1)"), 15, "passed", ""),
    # what is meant to deceive
    "is always equal": (answering(EQUAL), 0, "failed", "parameters"),
    "takes the stand-in": (answering("fixed_bytes = check.fixed_bytes.stand_in()"), 0, "refused", "stand-in"),
    "imports it": (answering("from shared.checks.topic_15_07 import _fixed_bytes as fixed_bytes"), 0, "refused", "it"),
    "fetches it": (answering("import sys; fixed_bytes = sys.modules['shared.checks.topic_15_07']._fixed_bytes"),
        0, "refused", "it is the course's own"),
    "forges a result": (answering(FORGED), 0, "stopped", "no result"),
    "is called =1+1": (answering(HEAD + "    raise ValueError('=1+1<script>')"), 0, "failed", "parameters"),
}  # fmt: skip
PATCHES = {
    "a check": "import sys\nsys.modules['shared.checks.trial'].Trial._hold = lambda *a, **k: None",
    "a comparison": "import sys\nd = sys.modules['shared.checks.comparing'].difference\n"
    "d.__code__ = (lambda got, want, *, exact, rtol=None, atol=None: None).__code__",
    "a tolerance": "import sys, torch\nsys.modules['shared.checks.comparing']._TOLERANCES[torch.float64] = (9, 9)",
    "torch.allclose": "torch.allclose = lambda *a, **k: True",
    "torch.Tensor.__eq__": "torch.Tensor.__eq__ = lambda *a: torch.tensor(True)",
    "builtins.print": "import builtins\nbuiltins.print = lambda *a: None",
    "Exercise.__call__": "import sys\nE = sys.modules['shared.checks.exercise'].Exercise\nE.__call__ = lambda s, a: a",
    "Exercise.run": "import sys\nE = sys.modules['shared.checks.exercise'].Exercise\nE.run = lambda *a, **k: 1",
    "Result.earned": "import sys\nsys.modules['shared.checks.report'].Result.earned = 20",
}
CASES |= {
    f"replaces {name}": (answering(f"{patch}\n{FALSE}", **{WITNESS: RIGHT[WITNESS]}), 0, "refused", "has replaced")
    for name, patch in PATCHES.items()
}
BESIDE = {"forks", *(name for name in CASES if name.startswith("replaces"))}


@pytest.fixture(scope="module")
def batch(tmp_path_factory):
    """All cases, graded at once: what the command said, and where."""
    folder = tmp_path_factory.mktemp("batch")
    submissions, output = folder / "in", folder / "out"
    for student, (content, *_) in CASES.items():
        home = submissions / student
        home.mkdir(parents=True)
        if content == "link":
            os.symlink(submissions / "Jörg von Über" / NAME, home / NAME)
        elif content is not None:
            for name, data in (content if isinstance(content, dict) else {NAME: content}).items():
                (home / name).write_bytes(data)
    outside = HEAD + (
        "    from pathlib import Path\n"
        f"    folder = Path({str(folder)!r})\n"
        "    for path in [*folder.rglob('*')]:\n"
        "        if path.is_file(): path.write_text('{}')\n"
        "    (folder / 'mine').write_text('x')\n"
    )
    (submissions / "~ writes outside").mkdir()
    (submissions / "~ writes outside" / NAME).write_bytes(answering(outside))
    start = time.monotonic()
    said = course_grade(submissions, "--output", output, "--timeout", 15, "--seed", 7, "--jobs", 2)
    print(f"{len(CASES)} submissions in {time.monotonic() - start:.0f} s")
    assert said.returncode == 0, said.stdout + said.stderr
    return said, output


@pytest.mark.parametrize("student", CASES)
def test_whatever_is_handed_in_has_its_grade_or_a_reason(batch, student):
    _, points, status, reason = CASES[student]
    row = rows_of(batch[1])[student][NUMBER]
    assert (row["status"], float(row["points"])) == (status, points), row
    assert reason in row["reason"]
    if student in BESIDE:
        beside = rows_of(batch[1])[student][WITNESS_NUMBER]
        assert (beside["status"], beside["points"]) == ("passed", "15")


def test_a_batch_ends_in_a_table_and_pages_and_says_what_to_look_at(batch):
    said, output = batch
    assert said.stderr == ""
    assert re.search(r"Jörg von Über +│ +15 / 100", said.stdout)
    pages = {path.stem for path in (output / "feedback").iterdir()}
    assert {"Jörg von Über", "hands in nothing", "explodes"} <= pages
    assert len(pages) == len(CASES) + 1
    summary = (output / "summary.html").read_text(encoding="utf-8")
    assert f"{len(CASES) + 1} students" in summary
    for text in ("more than 32 processes", "it has replaced torch.allclose", "isn&#x27;t JSON"):
        assert text in summary


def test_an_answer_writes_nothing_outside_of_its_folder(batch):
    said, output = batch
    rows = rows_of(output)
    assert rows["~ writes outside"][NUMBER]["points"] == "0"
    if grading.prepare([TOPIC]):
        assert "can't be sealed here" in said.stdout
        return
    assert "Read-only file system" in (output / "feedback" / "~ writes outside.html").read_text(encoding="utf-8")
    assert not (output.parent / "mine").exists()


def test_no_cell_is_a_formula_and_no_text_is_markup(batch):
    output = batch[1]
    rows = rows_of(output)
    assert all(
        cell[:1] not in "=+-@" for student in rows.values() for row in student.values() for cell in row.values() if cell
    )
    page = (output / "feedback" / "is called =1+1.html").read_text(encoding="utf-8")
    assert "<script>" not in page
    assert "=1+1&lt;script&gt;" in page
    assert "http" not in page.replace("http-equiv", ""), "self-contained"


# --------------------------------------------------------------------------------------------------------------------
# right answers, again, and interrupted


def hand_in(folder, **answers):
    for student, source in answers.items():
        (folder / student).mkdir(parents=True, exist_ok=True)
        (folder / student / NAME).write_bytes(source if isinstance(source, bytes) else answering(source))


@pytest.fixture
def here(capsys):
    """Runs the command in this process: the exit status, and what it printed."""

    def run(*arguments):
        status = run_command("grade", list(map(str, arguments)))
        return status, capsys.readouterr().out

    return run


def test_right_answers_get_all_points_and_none_get_none(tmp_path, request, here):
    topics = list(editions()) if request.config.getoption("--all-topics") else ["15-03", "15-07", "15-09"]
    for topic in topics:
        for student, answers in (("right", solutions(topic)), ("untouched", {})):
            (tmp_path / "in" / student).mkdir(parents=True, exist_ok=True)
            (tmp_path / "in" / student / editions()[topic].name).write_bytes(as_file(notebook(topic, answers)))
    status, said = here(tmp_path / "in", "--output", tmp_path / "out", "--jobs", 2, "--timeout", 120)
    assert status == 0, said
    rows = rows_of(tmp_path / "out")
    wrong = [row for row in rows["right"].values() if row["points"] != row["of"]]
    assert wrong == []
    assert len(rows["right"]) == len(rows["untouched"]) == sum(len(skeleton(topic).tasks) for topic in topics)
    assert {row["status"] for row in rows["untouched"].values()} == {"not attempted"}


def test_what_was_graded_is_kept_and_what_has_changed_is_graded_anew(tmp_path, here):
    source, output = tmp_path / "in", tmp_path / "grades"
    hand_in(source, ada=RIGHT[CELL], bo=FALSE, carl=FALSE)
    status, said = here(source)
    assert status == 0, said
    assert "2/2" in said, "what two hand in alike is graded once"
    seed = (output / "seed.txt").read_text()
    assert not re.search(r"^\d+/\d+ ", here(source)[1], re.MULTILINE), "nothing is graded again"
    assert (output / "seed.txt").read_text() == seed
    assert rows_of(output)["carl"][NUMBER]["status"] == "failed"
    hand_in(source, bo=RIGHT[CELL] + "\n# mended")
    sorted((output / ".graded").iterdir())[0].write_text("{")
    status, said = here(source)
    assert status == 0
    assert "2/2" in said, "the new one, and the one whose result was damaged"
    points = {student: rows[NUMBER]["points"] for student, rows in rows_of(output).items()}
    assert points == {"ada": "15", "bo": "15", "carl": "0"}
    assert "3/3" in here(source, "--force")[1]


def test_a_fault_of_the_grader_stops_no_other(tmp_path, here, monkeypatch):
    hand_in(tmp_path / "in", ada=FALSE, bo=RIGHT[CELL])

    def faulty(submission, **options):
        if FALSE in submission.answers.values():
            raise RuntimeError("of the grader")
        return grading.grade(submission, **options)

    monkeypatch.setattr(grade, "grade", faulty)
    status, said = here(tmp_path / "in")
    assert (status, "ada, 15-07  0 of 100" in said) == (0, True)
    rows = rows_of(tmp_path / "grades")
    assert rows["bo"][NUMBER]["points"] == "15"
    assert rows["ada"][NUMBER]["reason"] == "RuntimeError: of the grader"
    monkeypatch.undo()
    assert "1/1  ada" in here(tmp_path / "in")[1], "what was no verdict isn't kept"


def test_what_is_kept_is_what_was_judged_whatever_an_answer_has_written_there(tmp_path, here, monkeypatch):
    """It can where its process isn't sealed."""
    kept = tmp_path / "grades" / ".graded"
    hand_in(tmp_path / "in", ada=FALSE, bo=RIGHT[CELL])

    def meddling(submission, **options):
        if FALSE in submission.answers.values():
            return Graded(TOPIC, (GradedExercise(NUMBER, "ada's", 15, status="failed"),))
        while not (results := list(kept.glob("*.json"))):
            time.sleep(0.01)
        results[0].write_text(results[0].read_text().replace('"points": 0', '"points": 15'))
        return Graded(TOPIC, (GradedExercise(NUMBER, "bo's", 15, 15),))

    monkeypatch.setattr(grade, "grade", meddling)
    here(tmp_path / "in", "--jobs", 2)
    here(tmp_path / "in")
    points = {student: rows[NUMBER]["points"] for student, rows in rows_of(tmp_path / "grades").items()}
    assert points == {"ada": "0", "bo": "15"}


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_an_interrupted_batch_goes_on_where_it_was(tmp_path, here):
    source, kept = tmp_path / "in", tmp_path / "grades" / ".graded"
    hand_in(source, ada=RIGHT[CELL], bo="import time\ntime.sleep(30)\n" + FALSE)

    def ask_to_end():
        while not list(kept.glob("*.json")):
            time.sleep(0.05)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    watch = threading.Thread(target=ask_to_end, daemon=True)
    watch.start()
    status, said = here(source, "--jobs", 1)
    watch.join(60)
    assert status == 130
    assert said.splitlines()[-1].startswith("Interrupted; 1 of 2 are graded.")
    assert not (tmp_path / "grades" / "grades.csv").exists()
    hand_in(source, bo=FALSE)
    assert "1/1  bo" in here(source)[1]


# --------------------------------------------------------------------------------------------------------------------
# one file


def test_grading_is_a_function_of_a_file(tmp_path):
    file = tmp_path / "x.ipynb"
    file.write_bytes(answering(RIGHT[CELL].replace('"adam": 2', '"adam": 3')))
    graded = grade_file(file, seed=3)
    assert (graded.topic, graded.points, graded.of, graded.is_judged) == (TOPIC, 12, 100, True)
    (one,) = [exercise for exercise in graded.exercises if exercise.number == NUMBER]
    (failed,) = [demand for demand in one.demands if not demand["passed"]]
    assert failed["name"] == "optimizer"
    assert "Open Hint 1 of the task" in failed["hint"]
    assert pickle.loads(pickle.dumps(graded)) == graded
    assert Graded.from_json(json.loads(json.dumps(graded.to_json()))) == graded
    with pytest.raises(UnreadableError, match="No such file"):
        grade_file(tmp_path / "y.ipynb", seed=3)
    with pytest.raises(UnreadableError, match="no answer cell of 15-03"):
        grade_file(file, "15-03", seed=3)


def test_where_nothing_is_sealed_an_answer_still_ends_with_all_it_started(tmp_path, monkeypatch):
    grading.prepare([TOPIC])
    monkeypatch.setattr(grading, "prepare", lambda topics: "a test")
    file = tmp_path / "x.ipynb"
    limits = grading.GradingLimits(cell=8)
    for source, points, reason in ((RIGHT[CELL], 15, ""), (BOMB, 0, "processes"), (HEAD + "    1 / 0", 0, "param")):
        file.write_bytes(answering(source))
        (one,) = [found for found in grade_file(file, seed=3, limits=limits).exercises if found.number == NUMBER]
        assert one.points == points
        assert reason in one.reason


def test_a_lesson_that_fails_is_no_students_fault(tmp_path, monkeypatch):
    lesson = notebook(TOPIC, RIGHT)
    lesson["cells"][place(lesson, "setup")]["source"] = "from shared.checks import topic_15_07 as check\n1 / 0"
    (tmp_path / "lesson.ipynb").write_bytes(as_file(lesson))
    monkeypatch.setattr("course.skeleton.editions", lambda: {TOPIC: tmp_path / "lesson.ipynb"})
    (tmp_path / "x.ipynb").write_bytes(answering(RIGHT[CELL]))
    graded = grade_file(tmp_path / "x.ipynb", TOPIC, seed=3)
    (one,) = [exercise for exercise in graded.exercises if exercise.number == NUMBER]
    assert (one.status, graded.is_judged) == ("check broken", False)
    assert "the setup cell fails: ZeroDivisionError" in one.reason


HIDDEN = "### BEGIN HIDDEN TESTS\nassert counted(nn.Linear(3, 3), 'sgd')['secret']\n### END HIDDEN TESTS"


def test_a_hidden_test_that_fails_takes_the_points_and_gives_nothing_away(tmp_path, monkeypatch):
    lesson = notebook(TOPIC, RIGHT)
    source = f"counted = check.fixed_bytes(fixed_bytes)\n{HIDDEN}"
    lesson["cells"][place(lesson, f"{CELL}-check")]["source"] = source
    (tmp_path / "lesson.ipynb").write_bytes(as_file(lesson))
    monkeypatch.setattr("course.skeleton.editions", lambda: {TOPIC: tmp_path / "lesson.ipynb"})
    (tmp_path / "x.ipynb").write_bytes(answering(RIGHT[CELL], **{WITNESS: RIGHT[WITNESS]}))
    graded = grade_file(tmp_path / "x.ipynb", TOPIC, seed=3)
    found = {one.number: one for one in graded.exercises}
    assert (found[NUMBER].status, found[NUMBER].points) == ("failed", 0)
    assert found[NUMBER].reason == "a hidden test fails"
    assert found[NUMBER].demands[-1]["got"] == "KeyError"
    assert "secret" not in str(graded)
    assert found[WITNESS_NUMBER].points == 15
    lesson["cells"][place(lesson, f"{CELL}-check")]["source"] = source.replace("secret", "parameters")
    (tmp_path / "lesson.ipynb").write_bytes(as_file(lesson))
    assert grade_file(tmp_path / "x.ipynb", TOPIC, seed=3).points == 30


def test_an_answer_builds_on_an_earlier_one_if_that_passed_and_else_on_the_courses(tmp_path):
    marked = "\nfixed_bytes.__name__ = 'mine'\n"
    for earlier, mine in ((RIGHT[CELL], True), (FALSE, False)):
        later = f"{RIGHT['ex-post-mortem']}\nassert (fixed_by_hand.__name__ == 'mine') == {mine}"
        made = notebook(TOPIC, {CELL: earlier + marked, "ex-post-mortem": later})
        (tmp_path / "x.ipynb").write_bytes(as_file(made))
        found = {one.number: one for one in grade_file(tmp_path / "x.ipynb", seed=3).exercises}
        assert found["15-07.2"].status == "passed", found["15-07.2"].reason


# --------------------------------------------------------------------------------------------------------------------
# the command and its pages


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "make grade SUBMISSIONS=folder"),
        ([""], "make grade SUBMISSIONS=folder"),
        (["nowhere"], "nowhere is not there"),
        (["in", "--output", "in/grades"], "lies among the submissions"),
        (["in", "--jobs", "0"], "0 is not a positive whole number"),
        (["in", "--seed", "-1"], "from 0"),
        (["in", "--timeout", "0"], "positive"),
        (["empty"], "neither notebooks nor folders"),
    ],
)
def test_wrong_usage_says_so(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in" / "ada").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    try:
        status = run_command("grade", arguments)
    except SystemExit as error:
        status = error.code
    assert status == 2
    said = capsys.readouterr()
    assert message in " ".join((said.out + said.err).split())
    assert "grade" in COMMANDS


def exercise(points, status, *demands, **more):
    return GradedExercise("15-99.1", "A & B", 10, points, status, demands=demands, **more)


def demand(name, passed, **texts):
    return {"name": name, "passed": passed, "expected": "", "got": "", "hint": "", **texts}


def test_a_page_shows_what_passed_what_did_not_and_where_to_look():
    wrong = demand("is <small>", False, expected="below 3", got="4\nmore", hint="look & see")
    graded = Graded("15-99", (exercise(5, "failed", demand("runs", True), wrong, reason="is <small>"),))
    unread = HandedIn("<Ada>", "a", None, "", "no <b>")
    page = grade_pages.feedback("<Ada>", [Outcome("<Ada>", graded, ("the newest & only",))], [unread])
    for text in (
        "&lt;Ada&gt;",
        "✓ runs",
        "✗ is &lt;small&gt;",
        "below 3",
        "look &amp; see",
        "newest &amp; only",
        "no &lt;b&gt;",
    ):
        assert text in page
    assert page.count("is &lt;small&gt;") == 1
    assert "A &amp; B" in page
    assert "15-99: 5 of 10 points" in page


def test_the_summary_counts_those_who_handed_in():
    outcomes = [
        Outcome(student, Graded("15-99", (exercise(points, status),)))
        for student, points, status in (("a", 10, "passed"), ("b", 4, "failed"), ("c", 0, "not handed in"))
    ]
    page = grade_pages.summary(outcomes, [], 5)
    assert "3 students; the checks&#x27; seed was 5" in page or "3 students; the checks' seed was 5" in page
    assert "2 of 3 students have handed it in; of 10 points they have 7.0 on average" in page
    assert len(re.findall(r'title="1"', page)) == 2
    assert "To look at" not in page


def test_a_table_has_one_line_for_each_exercise():
    graded = Graded("15-99", (exercise(2.5, "failed", reason="a\nb"),))
    text = grade_pages.table([Outcome("-Ada", graded)], [HandedIn("Bo", "x.ipynb", None, "", "it, is")])
    assert text.splitlines()[1:] == [
        "'-Ada,15-99,15-99.1,2.5,10,failed,a b",
        'Bo,,,0,0,unreadable,"x.ipynb: it, is"',
    ]


def test_readme_and_guide_say_how_and_where_an_answer_can_still_deceive():
    assert "make grade SUBMISSIONS=" in (ROOT / "README.md").read_text(encoding="utf-8")
    guide = next(ROOT.glob("module*/INSTRUCTOR_GUIDE.md")).read_text(encoding="utf-8")
    assert "docker run" in guide
