"""`course grade` on what students hand in, by mistake or on purpose: everybody gets their own points, or a reason."""

import csv
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from dataclasses import replace

import pytest
from handed_in import as_file, code, notebook, place, solutions

from course import grade, grade_pages, grading
from course.__main__ import run_command
from course.collecting import Student, Unreadable
from course.environment import ROOT
from course.grading import Graded, GradedExercise
from course.skeleton import edition, editions, skeleton
from course.submission import read_submission

pytestmark = [pytest.mark.slow, pytest.mark.processes]

TOPIC = "15-07"
CELL, NUMBER = "ex-fixed", "15-07.1"  # what is answered in many ways, for 15 points
WITNESS, WITNESS_NUMBER = "ex-roofline", "15-07.3"  # answered rightly beside it where it might suffer
NAME = editions()[TOPIC].name
RIGHT = solutions(TOPIC)
HEAD = "def fixed_bytes(model, optimizer):\n"


def rows_of(output):
    """The lines of grades.csv, by student and exercise."""
    found = defaultdict(dict)
    with open(output / "grades.csv", encoding="utf-8-sig", newline="") as file:
        for row in csv.DictReader(file):
            found[row["student"]][row["exercise"]] = row
    return found


def answering(source, **more):
    """A notebook with one answer."""
    return as_file(notebook(TOPIC, {CELL: source, **more}))


def changed(edit, source=RIGHT[CELL]):
    """A notebook with one answer, and what `edit` makes of its cells."""
    made = notebook(TOPIC, {CELL: source})
    edit(made)
    return as_file(made)


def graded_exercises(content, **options):
    """The exercises of one file that was graded, by number."""
    graded = grading.grade(read_submission(content, topic=TOPIC), seed=3, **options)
    return {one.number: one for one in graded.exercises}


# --------------------------------------------------------------------------------------------------------------------
# one batch of everything that is known to go wrong

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
BOMB = HEAD + "    import os, time\n    for _ in range(48):\n        if os.fork() == 0: break\n    time.sleep(60)\n"
ENDLESS = "while True: __import__('time').sleep(0.01)"
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
# what one says that has found the key in the frames above it
FOUND_KEY = """
import json, os, sys
frame = sys._getframe()
while not {"job", "link"} <= set(frame.f_locals):
    frame = frame.f_back
said = {"stage": "failed", "reason": "", "earned": 1, "demands": [], "key": frame.f_locals["job"].key, **%s}
frame.f_locals["link"].send_bytes(json.dumps(said).encode())
os._exit(0)
"""
IMPORTED = "import math, shared.checks.topic_15_07 as c\ndef fixed_bytes(*a): return c._fixed_bytes(*a)"
HELPER = code(
    "import math as m\nclass Up:\n    def __init__(self): self.size = 512\n"
    "    def __call__(self, n): return m.ceil(n / self.size) * self.size\nup = Up()"
)
HELPED = RIGHT[CELL].replace("-(-p.nbytes // 512) * 512", "up(p.nbytes)")
NOTEBOOKS_OWN = (
    f"%%time\n{RIGHT[CELL]}\n%timeit fixed_bytes(nn.ReLU(), 'sgd')\ncheck.fixed_bytes(fixed_bytes)\ndisplay(1)"
)

# name of the student: (what is handed in, points for the exercise, its status, what its reason has in it)
CASES = {
    "Jörg von Über": (answering(RIGHT[CELL]), 15, "passed", ""),
    "does nothing": (as_file(notebook(TOPIC)), 0, "not attempted", "the stub"),
    "hands in nothing": (None, 0, "not handed in", "there is no notebook on 15-07"),
    "hands in a report": ({"report.pdf": b""}, 0, "not handed in", "report.pdf"),
    "breaks the JSON": ({"final.ipynb": answering(RIGHT[CELL])[:-50]}, 0, "unreadable", "no notebook"),
    "deletes the cell": (changed(lambda made: made["cells"].pop(place(made, CELL))), 0, "missing", "answer cell"),
    "is half right": (answering(RIGHT[CELL].replace('"adam": 2', '"adam": 3')), 12, "failed", "optimizer"),
    # mistakes that end a process, or never end
    "loops at once": (answering(f"{RIGHT[CELL]}\n{ENDLESS}"), 0, "stopped", "the answer cell: it took more"),
    "loops": (answering(f"{HEAD}    {ENDLESS}"), 0, "failed", "comes to an end"),
    "forks": (answering(BOMB, **{WITNESS: RIGHT[WITNESS]}), 0, "stopped", "more than 32 processes"),
    "exits the process": (answering(HEAD + "    import os; os._exit(0)"), 0, "stopped", "before there was a result"),
    "exits": (answering("import sys; sys.exit()"), 0, "failed", "SystemExit"),
    "can't spell": (answering("def fixed_bytes(:"), 0, "failed", "SyntaxError: invalid syntax (your answer, line 1)"),
    # what students write around their answers
    "edits the check": (
        changed(lambda made: made["cells"][place(made, f"{CELL}-check")].update(source="print('passed')"), FALSE),
        0, "failed", "parameters"),
    "scribbles": (changed(lambda made: made["cells"].insert(9, code("nonlocal x"))), 15, "passed", ""),
    "helps": (changed(lambda made: made["cells"].insert(9, HELPER), HELPED), 15, "passed", ""),
    "changes the set-up": (
        changed(lambda made: made["cells"][place(made, "setup")].update(source="import bisect as b\nmath = 1"),
            "b.bisect\n" + RIGHT[CELL]), 15, "passed", ""),
    "does as in a notebook": (answering(NOTEBOOKS_OWN), 15, "passed", ""),
    # what is meant to deceive
    "is always equal": (answering(EQUAL), 0, "failed", "parameters"),
    "takes the stand-in": (answering("fixed_bytes = check.fixed_bytes.stand_in()"), 0, "refused", "stand-in"),
    "imports it": (answering(IMPORTED), 0, "refused", "imports"),
    "fetches it": (answering("import sys; fixed_bytes = sys.modules['shared.checks.topic_15_07']._fixed_bytes"),
        0, "refused", "it is the course's own"),
    "forges a result": (answering(FORGED), 0, "stopped", "no result"),
    "earns too much": (answering(FOUND_KEY % {"earned": 1e9}), 15, "failed", ""),
    "demands nonsense": (answering(FOUND_KEY % {"demands": [{}]}), 0, "stopped", "no result"),
    "stays at a stage": (answering(FOUND_KEY % {"stage": "the answer cell"}), 0, "stopped", "no result"),
    "says half a letter": (answering(HEAD + "    raise ValueError('\\ud800')"), 0, "failed", "parameters"),
}  # fmt: skip
PATCHES = {
    "difference": "import sys\nd = sys.modules['shared.checks.comparing'].difference\n"
    "d.__code__ = (lambda got, want, *, exact, rtol=None, atol=None: None).__code__",
    "_TOLERANCES": "import sys, torch\nsys.modules['shared.checks.comparing']._TOLERANCES[torch.float64] = (9, 9)",
    "torch.allclose": "torch.allclose = lambda *a, **k: True",
    "Result.earned": "import sys\nsys.modules['shared.checks.report'].Result.earned = 20",
}
CASES |= {f"replaces {name}": (answering(f"{patch}\n{FALSE}"), 0, "refused", name) for name, patch in PATCHES.items()}


@pytest.fixture(scope="module")
def batch(tmp_path_factory):
    """All cases, graded at once: what the command said, and where."""
    folder = tmp_path_factory.mktemp("batch")
    submissions, output = folder / "in", folder / "out"
    outside = (
        f"{HEAD}    from pathlib import Path\n"
        f"    for path in Path({str(folder)!r}).rglob('*'):\n"
        "        if path.is_file(): path.write_text('{}')\n"
    )
    for student, (content, *_) in {**CASES, "~ writes outside": (answering(outside),)}.items():
        home = submissions / student
        home.mkdir(parents=True)
        for name, data in (content if isinstance(content, dict) else {NAME: content}).items():
            if data is not None:
                (home / name).write_bytes(data)
    command = [sys.executable, "-m", "course", "grade", submissions, "--output", output]
    env = {**os.environ, "COURSE_ENV": "current", "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
    said = subprocess.run(
        [*command, "--timeout", "10", "--seed", "7", "--jobs", "2"],
        cwd=ROOT, env=env, timeout=500, check=False, capture_output=True, text=True, encoding="utf-8",
    )  # fmt: skip
    assert (said.returncode, said.stderr) == (0, "")
    return said.stdout, output


@pytest.mark.parametrize("student", CASES)
def test_whatever_is_handed_in_has_its_grade_or_a_reason(batch, student):
    _, points, status, reason = CASES[student]
    row = rows_of(batch[1])[student][NUMBER]
    assert (row["status"], float(row["points"])) == (status, points), row
    assert reason in row["reason"]


def test_a_batch_ends_in_a_table_and_pages_and_says_what_to_look_at(batch):
    said, output = batch
    assert "Jörg von Über, 15-07  15 of 100" in said
    assert "to look at: forks, 15-07.1, stopped, the check of the answer: it had started more than 32" in said
    rows = rows_of(output)
    assert rows["forks"][WITNESS_NUMBER]["points"] == "15", "what stands beside it"
    assert {path.stem for path in (output / "feedback").iterdir()} == {*CASES, "~ writes outside"}
    assert rows["~ writes outside"][NUMBER]["points"] == "0"
    page = (output / "feedback" / "~ writes outside.html").read_text(encoding="utf-8")
    assert ("can't be sealed here" in said) != ("Read-only file system" in page)


def hand_in(folder, **answers):
    for student, source in answers.items():
        (folder / student).mkdir(parents=True, exist_ok=True)
        (folder / student / NAME).write_bytes(answering(source))


@pytest.fixture
def here(capsys):
    """Runs the command in this process: the exit status, and what it printed."""

    def run(*arguments):
        status = run_command("grade", list(map(str, arguments)))
        said = capsys.readouterr()
        return status, said.out + said.err

    return run


def test_right_answers_get_all_points_and_none_get_none(tmp_path, request, here):
    topics = list(editions()) if request.config.getoption("--all-topics") else ["15-03"]
    for topic in topics:
        for student, answers in (("right", solutions(topic)), ("untouched", {})):
            (tmp_path / "in" / student).mkdir(parents=True, exist_ok=True)
            (tmp_path / "in" / student / editions()[topic].name).write_bytes(as_file(notebook(topic, answers)))
    status, said = here(tmp_path / "in", "--output", tmp_path / "out", "--jobs", 2, "--timeout", 120)
    assert status == 0, said
    rows = rows_of(tmp_path / "out")
    assert [row for row in rows["right"].values() if row["points"] != row["of"]] == []
    assert len(rows["right"]) == len(rows["untouched"]) == sum(len(skeleton(topic).tasks) for topic in topics)
    assert {row["status"] for row in rows["untouched"].values()} == {"not attempted"}


def test_what_was_graded_is_kept_and_what_has_changed_is_graded_anew(tmp_path, here, monkeypatch):
    threads = set()

    def fake(submission, **options):
        threads.add(threading.get_ident())
        time.sleep(0.05)
        answer = submission.answers[CELL]
        if "a fault" in answer:
            raise RuntimeError("of the grader")
        first, *rest = grading.absent(TOPIC, "failed", "").exercises
        status = "check broken" if "hard" in answer else "failed"
        return Graded(TOPIC, (replace(first, points=15 * ("right" in answer), status=status), *rest))

    monkeypatch.setattr(grade, "grade", fake)
    source, output = tmp_path / "in", tmp_path / "grades"
    hand_in(source, ada="right", bo="wrong", cy="hard", dora="a fault")
    (source / "eva").mkdir()
    (source / "eva" / "15-03 mine.ipynb").write_text("{")
    assert here(source)[0] == 0
    seed = (output / "seed.txt").read_text()
    rows = rows_of(output)
    found = [f"{student} {row[NUMBER]['points']} {row[NUMBER]['status']}" for student, row in rows.items()]
    broken = ["cy 0 check broken", "dora 0 check broken"]
    assert found == ["ada 15 failed", "bo 0 failed", *broken, "eva 0 not handed in"]
    assert rows["dora"][NUMBER]["reason"] == "RuntimeError: of the grader"
    assert [rows[student]["15-03.1"]["status"] for student in ("ada", "eva")] == ["not handed in", "unreadable"]
    again = re.findall(r"^\d/2  (\w+)", here(source)[1], re.MULTILINE)
    assert sorted(again) == ["cy", "dora"], "what was no verdict"
    assert rows_of(output) == rows, "with what was kept"
    assert (output / "seed.txt").read_text() == seed
    next((output / ".graded").iterdir()).write_text("")  # by a machine that was switched off
    assert "3/3" in here(source)[1]
    hand_in(source, bo="right, mended")
    assert "3/3" in here(source)[1]
    assert rows_of(output)["bo"][NUMBER]["points"] == "15"
    monkeypatch.setattr(grade, "edition", lambda topic: "mended")
    for options in ([], ["--force"], ["--seed", "5"], ["--timeout", "90"]):
        assert "4/4" in here(source, *options)[1]
    threads.clear()
    here(source, "--output", tmp_path / "other", "--jobs", 1)
    assert len(threads) == 1
    assert (tmp_path / "other" / "seed.txt").read_text() != seed


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_an_interrupted_batch_goes_on_where_it_was(tmp_path, here, monkeypatch):
    source, kept, begun = tmp_path / "in", tmp_path / "grades" / ".graded", []
    monkeypatch.setattr(grade, "grade", lambda one, **options: begun.append(one) or grading.grade(one, **options))
    hand_in(source, ada=RIGHT[CELL], bo="import time\ntime.sleep(50)\n" + FALSE, cy="1 +")

    def ask_to_end():
        while not list(kept.glob("*.json")):
            time.sleep(0.05)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=ask_to_end, daemon=True).start()
    start = time.monotonic()
    status, said = here(source, "--jobs", 1)
    assert time.monotonic() - start < 45, "nobody waits for the answer"
    assert (status, len(begun)) == (130, 2)
    assert said.splitlines()[-1].startswith("Interrupted; 1 of 3 are graded.")
    assert not (tmp_path / "grades" / "grades.csv").exists()
    grade.interrupted.clear()
    hand_in(source, bo="1 +")
    assert "2/2" in here(source)[1]


def test_a_verdict_is_kept_only_while_nothing_that_decides_it_changes(tmp_path, monkeypatch):
    monkeypatch.setattr("course.skeleton.ROOT", tmp_path)
    monkeypatch.setattr("course.skeleton.editions", lambda: {TOPIC: tmp_path / "lesson.ipynb"})
    monkeypatch.setattr("course.skeleton.metadata.version", lambda package: (tmp_path / package).read_text())
    (tmp_path / "torch").touch()
    seen = [""]
    for name in ("lesson.ipynb", "shared/text.py", "shared/checks/a_topic.py", "course/grading.py", "torch"):
        for content in ("", "mended"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(content)
        seen.append(edition.__wrapped__(TOPIC))
        assert seen[-1] != seen[-2], f"{name} has changed"


def test_a_lesson_of_ones_own_may_fail_and_has_hidden_tests(tmp_path, monkeypatch, here):
    """A lesson that fails is no student's fault; a hidden test that fails takes the points and gives nothing away."""
    lesson = notebook(TOPIC, RIGHT)
    hidden = "\n### BEGIN HIDDEN TESTS\nassert {}\n### END HIDDEN TESTS"
    fails = "counted = check.fixed_bytes(fixed_bytes)" + hidden.format("counted(nn.ReLU(), 'sgd')['secret']")
    lesson["cells"][place(lesson, f"{CELL}-check")]["source"] = fails
    lesson["cells"][place(lesson, f"{WITNESS}-check")]["source"] += hidden.format("segment_size(1)")
    (tmp_path / "lesson.ipynb").write_bytes(as_file(lesson))
    content = answering(RIGHT[CELL], **{WITNESS: RIGHT[WITNESS]})
    monkeypatch.setattr("course.skeleton.editions", lambda: {**editions(), TOPIC: tmp_path / "lesson.ipynb"})
    skeleton.cache_clear()
    try:
        found = graded_exercises(content)
        lesson["cells"][place(lesson, "setup")]["source"] = "from shared.checks import topic_15_07 as check\n1 / 0"
        (tmp_path / "lesson.ipynb").write_bytes(as_file(lesson))
        skeleton.cache_clear()
        broken = graded_exercises(content)[NUMBER]
        lesson["cells"].pop(place(lesson, f"{CELL}-check"))
        (tmp_path / "lesson.ipynb").write_bytes(as_file(lesson))
        skeleton.cache_clear()
        hand_in(tmp_path / "in", ada=RIGHT[CELL])
        status, said = here(tmp_path / "in")
    finally:
        skeleton.cache_clear()
    one = found[NUMBER]
    assert (one.status, one.points, one.reason) == ("failed", 0, "a hidden test fails")
    assert "secret" not in str(one)
    assert found[WITNESS_NUMBER].points == 15
    assert broken.status == "check broken"
    assert "the setup cell fails: ZeroDivisionError" in broken.reason
    assert status == 2
    assert "cell 'ex-fixed' needs a check cell" in said


def test_an_answer_builds_on_an_earlier_one_if_that_passed_and_else_on_the_courses():
    marked = "\nfixed_bytes.__name__ = 'mine'\n"
    for earlier, mine in ((RIGHT[CELL], True), (FALSE, False)):
        later = f"{RIGHT['ex-post-mortem']}\nassert (fixed_by_hand.__name__ == 'mine') == {mine}"
        found = graded_exercises(answering(earlier + marked, **{"ex-post-mortem": later}))
        assert found["15-07.2"].status == "passed", found["15-07.2"].reason
        assert (found[NUMBER].status == "passed") == mine


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([""], "make grade SUBMISSIONS=folder"),
        (["nowhere"], "nowhere is not there"),
        (["in", "--output", "in/grades"], "lies among the submissions"),
        (["empty"], "neither notebooks nor folders"),
        (["file.txt"], "neither a folder nor a zip file"),
        (["in", "--output", "old"], "seed.txt holds no seed"),
        (["in", "--output", "file.txt"], "can't write in file.txt: File exists; name another --output"),
        (["in", "--dask", "x:1"], "pip install distributed"),
    ],
)
def test_wrong_usage_says_so(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "distributed", None)
    (tmp_path / "in" / "ada").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.txt").write_text("x")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "seed.txt").write_text("")
    assert run_command("grade", arguments) == 2
    assert message in capsys.readouterr().err


def test_pages_show_what_passed_what_did_not_and_where_to_look(tmp_path):
    ok = {"name": "runs", "passed": True, "expected": "", "got": "", "hint": ""}
    wrong = {"name": "is <small>", "passed": False, "expected": "below 3", "got": "4\nmore", "hint": "look & see"}
    failed = GradedExercise("15-99.1", "A & B", 10, 2.5, "failed", "is\n<small>", (ok, wrong))
    nothing = replace(failed, points=0, status="not handed in", reason="but <a.pdf>", demands=())
    results = {
        "-Ada/<B": [Graded("15-99", (failed,), ("the newest & only",))],
        "=bo": [Graded("15-99", (replace(failed, points=10, status="passed", reason="", demands=()),))],
        "+cy": [Graded("15-99", (nothing,))],
        "-ada:_b": [Graded("15-99", (nothing,))],
        "@" + "\N{CJK UNIFIED IDEOGRAPH-4E2D}" * 90: [Graded("15-99", (nothing,))],
    }
    students = dict.fromkeys(results, Student()) | {"-Ada/<B": Student({}, [Unreadable("x.ipynb", "", "no <b>")])}
    grade_pages.write(tmp_path, results, students, 5)
    assert (tmp_path / "grades.csv").read_bytes().startswith(b"\xef\xbb\xbf"), "Excel sees UTF-8"
    lines = (tmp_path / "grades.csv").read_text(encoding="utf-8-sig").splitlines()
    assert lines[0] == "student,topic,exercise,points,of,status,reason"
    assert lines[1] == "'-Ada/<B,15-99,15-99.1,2.5,10,failed,is <small>"
    assert [line[:2] for line in lines[2:]] == ["'=", "'+", "'-", "'@"]
    told = {
        "feedback/-Ada__B.html": "<h1>-Ada/&lt;B</h1>|15-99: 2.5 of 10 points|the newest &amp; only|A &amp; B|"
        "ok     runs|WRONG  is &lt;small&gt;|expected: below 3|look &amp; see|x.ipynb could not be read: no &lt;b&gt;",
        "feedback/+cy.html": "not handed in: but &lt;a.pdf&gt;",
        "feedback/-ada__b_.html": "<h1>-ada:_b</h1>",
        "summary.html": "5 students; the checks' seed was 5|2 of 5 students have handed it in|"
        "6.2 of 10 points on average|<td>1</td><td>is &lt;small&gt; (1)</td>|<td>x.ipynb</td><td>unreadable</td>",
    }
    for name, texts in told.items():
        page = (tmp_path / name).read_text(encoding="utf-8")
        assert [text for text in texts.split("|") if text not in page] == []
    assert len(list((tmp_path / "feedback").iterdir())) == len(results), "a page for each student"
