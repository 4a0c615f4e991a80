"""An autograder for Gradescope: a zip with setup.sh, run_autograder, the grader and one topic's notebook.

Gradescope unpacks it into /autograder/source, runs setup.sh once, and run_autograder for each submission, which it puts
into /autograder/submission; the grade is read from /autograder/results/results.json. run_autograder calls

    python -m course.gradescope /autograder 15-03
"""

from __future__ import annotations

import json
import secrets
import sys
from pathlib import Path
from typing import Any

from course.collecting import is_ignored
from course.environment import ROOT
from course.files import require_writable, write_whole
from course.grading import PASSED, grade
from course.release import read_commit
from course.skeleton import editions, skeleton
from course.submission import UnreadableError, read_submission
from course.wheel import zipped

NEEDED = ("course/", "shared/", "datasets/sample/", "module_")  # and the files beside them
SECONDS = 540  # for a submission: Gradescope's own limit is ten minutes

SETUP = """\
#!/usr/bin/env bash
# Gradescope runs this once, as root on Ubuntu: it makes the environment, with PyTorch for CPUs.
set -euo pipefail
cd "${AUTOGRADER_ROOT:-/autograder}/source"
python=$(command -v python3.13 || command -v python3.12 || command -v python3.11 || true)
if [ -z "$python" ]; then
    apt-get update
    apt-get install -y python3.11 python3.11-venv
    python=python3.11
fi
COURSE_TORCH_INDEX=${COURSE_TORCH_INDEX:-https://download.pytorch.org/whl/cpu} "$python" -m course setup
"""
RUN = """\
#!/usr/bin/env bash
# Gradescope runs this for each submission.
root=${{AUTOGRADER_ROOT:-/autograder}}
cd "$root/source" || exit 1
exec "${{COURSE_PYTHON:-.venv/bin/python}}" -m course.gradescope "$root" {topic}
"""


def write(topic: str, folder: Path | None = None) -> str:
    """Write the zip; returns what to do with it. Raises ReleaseError or NotWritableError."""
    notebook = editions()[topic].relative_to(ROOT).as_posix()
    folder = folder or ROOT / "dist"
    require_writable(folder, "; name another --output")
    commit = read_commit(ROOT)
    chosen = [path for path in commit.files if "/" not in path or path.startswith(NEEDED)]
    files = {path: (ROOT / path).read_bytes() for path in chosen if path == notebook or not path.endswith(".ipynb")}
    files |= {"setup.sh": SETUP.encode(), "run_autograder": RUN.format(topic=topic).encode()}
    path = folder / f"gradescope-{topic}.zip"
    write_whole(path, zipped(files, commit.moment))
    return (
        f"{path}  {path.stat().st_size / 1e6:.1f} MB\n"
        "    Upload it at Gradescope: assignment, Configure Autograder, with Ubuntu 22.04 or newer as the base image\n"
        "    and 4 GB of memory or more. The assignment is worth 100 points. The zip holds the solutions."
    )


def results(submission: Path, topic: str) -> dict[str, Any]:
    """What results.json says of a folder with a submission. The newest notebook on the topic counts."""
    problems = []
    seconds = SECONDS / (2.5 * len(skeleton(topic).tasks))  # of an answer, and of its check
    paths = [path for path in submission.rglob("*.ipynb") if path.is_file() and not path.is_symlink()]
    paths = [path for path in paths if not is_ignored(path.relative_to(submission).parts)]
    for path in sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True):
        try:
            found = read_submission(path.read_bytes(), path.name, topic)
        except UnreadableError as error:
            problems.append(f"{path.name}: {error}.")
            continue
        graded = grade(found, seed=secrets.randbelow(2**32), seconds=seconds)
        tests = [
            {
                "number": one.number,
                "name": one.title,
                "score": one.points,
                "max_score": one.of,
                "status": "passed" if one.status == PASSED else "failed",
                "output": str(one),
            }
            for one in graded.exercises
        ]
        notes = [f"Graded is {path.name}.", *graded.notes, *problems]
        return {"score": graded.points, "output": "\n".join(notes), "tests": tests}
    advice = f"There is no notebook of {topic} in what you have handed in, a file that ends in .ipynb."
    return {"score": 0, "output": "\n".join([*problems, advice])}


if __name__ == "__main__":
    root = Path(sys.argv[1])
    document = results(root / "submission", sys.argv[2])
    (root / "results").mkdir(exist_ok=True)
    # only now, when nothing of the student's runs any more
    write_whole(root / "results" / "results.json", json.dumps(document, indent=1))
