"""Grading where another program has the say: a Dask cluster whose worker dies, and Gradescope's container."""

import csv
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile

import pytest
from handed_in import as_file, notebook, solutions

from course import gradescope
from course.__main__ import run_command
from course.grade import UsageError, grade_there
from course.grading import Graded
from course.skeleton import editions, skeleton
from course.submission import Submission

pytestmark = [pytest.mark.slow, pytest.mark.processes]

TOPIC, CELL, NUMBER = "15-07", "ex-fixed", "15-07.1"
NAME = editions()[TOPIC].name
RIGHT = solutions(TOPIC)[CELL]


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_a_dask_worker_that_is_killed_loses_no_grade_and_gives_none_twice(tmp_path, capsys):
    distributed = pytest.importorskip("distributed", reason="Dask isn't installed (requirements-dev.txt)")
    students = [f"student {number}" for number in range(4)]
    for number, student in enumerate(students):
        (tmp_path / "in" / student).mkdir(parents=True)
        wrong = "" if number % 2 else "\nfixed_bytes = lambda model, optimizer: None"
        answer = f"{RIGHT}{wrong}\nimport time\ntime.sleep(1 + {number} / 100)"
        (tmp_path / "in" / student / NAME).write_bytes(as_file(notebook(TOPIC, {CELL: answer})))

    def kill_one():
        while not list(tmp_path.glob("grades/.graded/*.json")):
            time.sleep(0.05)
        os.kill(next(iter(cluster.workers.values())).process.process.pid, signal.SIGKILL)

    watch = threading.Thread(target=kill_one, daemon=True)
    watch.start()
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address=None, silence_logs=50
    ) as cluster:
        status = run_command("grade", [str(tmp_path / "in"), "--dask", cluster.scheduler_address, "--seed", "5"])
        watch.join(60)
    said = capsys.readouterr().out
    assert status == 0, said
    assert not watch.is_alive()
    assert all(said.count(f"{student}, {TOPIC}") == 1 for student in students)
    with open(tmp_path / "grades" / "grades.csv", encoding="utf-8-sig", newline="") as file:
        points = [(row["student"], row["points"]) for row in csv.DictReader(file) if row["exercise"] == NUMBER]
    assert points == [(student, "15" if number % 2 else "0") for number, student in enumerate(students)]


def test_a_dask_worker_with_another_edition_does_not_grade():
    with pytest.raises(UsageError, match="another edition of the course"):
        grade_there(Submission(TOPIC, {}), "another", 5, 60)


def test_a_dask_scheduler_that_does_not_answer_is_named(tmp_path, capsys):
    dask = pytest.importorskip("dask", reason="Dask isn't installed (requirements-dev.txt)")
    (tmp_path / "in" / "Ada").mkdir(parents=True)
    with dask.config.set({"distributed.comm.timeouts.connect": "1s"}):
        assert run_command("grade", [str(tmp_path / "in"), "--dask", "tcp://127.0.0.1:9"]) == 2
    assert "no Dask scheduler answers at tcp://127.0.0.1:9" in capsys.readouterr().err


@pytest.mark.skipif(os.name == "nt", reason="Gradescope's containers are Linux")
def test_the_autograder_grades_as_gradescope_runs_it(tmp_path):
    assert "Upload it at Gradescope" in gradescope.write(TOPIC, tmp_path / "dist")
    root = tmp_path / "autograder"
    with zipfile.ZipFile(tmp_path / "dist" / f"gradescope-{TOPIC}.zip") as archive:
        archive.extractall(root / "source")
    assert [path.name for path in root.glob("source/module*/*.ipynb")] == [NAME]
    for needed in ("course/grading.py", "shared/checks/topic_15_07.py", "datasets/sample", "constraints.txt"):
        assert (root / "source" / needed).exists(), "what runs here could be this machine's own"
    (root / "submission").mkdir()
    (root / "submission" / "my own name.ipynb").write_bytes(as_file(notebook(TOPIC, {CELL: RIGHT})))
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "COURSE_TORCH_INDEX")}
    env |= {"AUTOGRADER_ROOT": str(root), "COURSE_PYTHON": sys.executable, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    (tmp_path / "python3.13").write_text('#!/bin/sh\necho "$PWD $COURSE_TORCH_INDEX $*"')
    (tmp_path / "python3.13").chmod(0o755)
    setup = ["bash", root / "source" / "setup.sh"]
    said = subprocess.run(setup, env=env, timeout=60, check=True, capture_output=True, text=True).stdout.split()
    assert (said[0], said[1][-4:], said[2:]) == (f"{root}/source", "/cpu", ["-m", "course", "setup"])
    run = ["bash", root / "source" / "run_autograder"]
    said = subprocess.run(run, cwd="/", env=env, timeout=300, check=False, capture_output=True, text=True)
    assert said.returncode == 0, said.stdout + said.stderr
    document = json.loads((root / "results" / "results.json").read_text(encoding="utf-8"))
    assert document["score"] == 15
    assert [test["number"] for test in document["tests"]] == [task.number for task in skeleton(TOPIC).tasks]
    for test in document["tests"]:
        is_right = test["number"] == NUMBER
        assert (test["score"], test["status"]) == ((15, "passed") if is_right else (0, "failed"))
        assert test["output"].startswith("passed\nok     " if is_right else "not attempted: ")
    assert sum(test["max_score"] for test in document["tests"]) == 100


def test_the_newest_of_several_notebooks_is_graded_in_time_and_what_is_wrong_with_the_files_is_said(
    tmp_path, monkeypatch
):
    (tmp_path / "c.ipynb").write_text("{")
    found = gradescope.results(tmp_path, TOPIC)
    assert found["score"] == 0
    assert "c.ipynb: it is no notebook" in found["output"]
    assert f"There is no notebook of {TOPIC}" in found["output"]
    given = {}
    graded = Graded(TOPIC, (), ("of how it was read",))
    monkeypatch.setattr(gradescope, "grade", lambda one, **options: given.update(options) or graded)
    if os.name != "nt":
        (tmp_path / "link.ipynb").symlink_to(editions()[TOPIC])  # the newest, with all solutions
    for folder in (".ipynb_checkpoints", "folder.ipynb"):
        (tmp_path / folder).mkdir()
    for age, name in enumerate(["b.ipynb", "a.ipynb", "c.ipynb", ".ipynb_checkpoints/a-checkpoint.ipynb"]):
        if name != "c.ipynb":
            (tmp_path / name).write_bytes(as_file(notebook(TOPIC)))
        os.utime(tmp_path / name, (1_000_000 + age, 1_000_000 + age))
    said = gradescope.results(tmp_path, TOPIC)["output"]
    assert said.startswith("Graded is a.ipynb.\nof how it was read\nc.ipynb: it is no notebook")
    # for each an answer and its check; after ten minutes Gradescope ends it without any points
    assert 200 < 2.25 * given["seconds"] * len(skeleton(TOPIC).tasks) < 560


def test_a_topic_that_is_not_there_is_named(tmp_path, capsys):
    assert run_command("grade", ["--gradescope", "15-77", "--output", str(tmp_path)]) == 2
    assert "there is no topic 15-77; there are 15-01, " in capsys.readouterr().err
