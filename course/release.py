"""Write what is handed out into dist/, from what is committed.

module-15-student.zip has the notebooks without solutions, `shared` as a wheel that carries the data samples, the list
of what to install, and a README of one page. module-15-instructor.zip has all that is committed, with solutions and
tests. The same commit gives the same bytes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from packaging.requirements import Requirement

from course import start_page, syllabus
from course.edition import EditionError, student_edition, unlink_missing
from course.environment import ROOT, requirements
from course.execution import NotebookError, read_notebook
from course.files import NotWritableError, require_writable, write_whole
from course.syllabus import Syllabus
from course.ways import as_file
from course.wheel import student_wheel, zipped
from course.workbook import finished

README = Path(__file__).with_name("STUDENT_README.md")
FOR_STUDENTS = ("torch", "torchvision", "jupyter", "ipykernel")  # of requirements.txt; the wheel asks for the rest
RENEWING = "A newer edition comes as another zip: unpack it beside this folder, not over it."

USES = {
    "student": "for students; unpack it once yourself and follow its README.md, then put it where they download",
    "instructor": "for instructors, all that is committed, with solutions and tests",
}


class ReleaseError(Exception):
    """There is nothing that could be released; the message says why and what to do."""


@dataclass(frozen=True)
class Commit:
    """What is committed: the commit's short name, its time in UTC, and its files."""

    name: str
    moment: datetime
    files: tuple[str, ...]


def read_commit(root: Path) -> Commit:
    """The commit that is checked out in `root`. Raises ReleaseError where there is none."""
    name, seconds = _git(root, "log", "-1", "--format=%h %ct").split()
    files = _git(root, "ls-files", "-z").split("\0")[:-1]
    return Commit(name, datetime.fromtimestamp(int(seconds), UTC), tuple(files))


def uncommitted(root: Path) -> list[str]:
    """Files that git knows and that differ from the commit."""
    return [line[3:] for line in _git(root, "status", "--porcelain", "--untracked-files=no").splitlines()]


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    try:
        return subprocess.run(command, capture_output=True, encoding="utf-8", timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:  # no git, no repository
        raise ReleaseError(
            f"a release takes what is committed, and git says: {getattr(error, 'stderr', None) or error}\n"
            "In a copy without a history:  git init && git add --all && git commit -m Course"
        ) from None


def student_bundle(root: Path, commit: Commit, book: Syllabus) -> dict[str, bytes]:
    """What students get. Raises ReleaseError for a notebook that isn't committed or has no student edition."""
    notebooks = {}
    for lesson in finished(book):
        if lesson.path.relative_to(root).as_posix() not in commit.files:
            raise ReleaseError(f"{lesson.path.name}: isn't committed")
        try:
            notebooks[lesson.path.name] = student_edition(read_notebook(lesson.path)[0])
        except (NotebookError, EditionError) as error:
            raise ReleaseError(f"{lesson.path.name}: {error}") from None
    there = {number: notebooks[topic.file] for number, topic in book.topics.items() if topic.file in notebooks}
    page = start_page.start_page(book, there, RENEWING)
    for notebook in notebooks.values():
        unlink_missing(notebook, notebooks)
    bundle = {name: as_file(notebook, book) for name, notebook in {**notebooks, start_page.NAME: page}.items()}

    wheel, content = student_wheel(root, commit.files, commit.moment)
    bundle[wheel] = content
    needed = [line for line in requirements(root) if Requirement(line).name in FOR_STUDENTS]
    bundle["requirements.txt"] = "\n".join(["-c constraints.txt", *needed, f"./{wheel}", ""]).encode()
    for path in ("constraints.txt", "LICENSE"):
        bundle[path] = (root / path).read_bytes()
    bundle["DATA.md"] = (root / "datasets" / "README.md").read_bytes()
    address = book.module.repository
    readme = README.read_text(encoding="utf-8").format(
        title=f"Module {book.module.number}: {book.module.title}",
        count=len(notebooks),
        date=f"{commit.moment:%Y-%m-%d}",
        commit=commit.name,
        ask=f"ask your instructor, or look at {address}." if address else "ask whoever gave you this folder.",
    )
    bundle["README.md"] = readme.encode()
    return bundle


def bundle_zip(folder: str, bundle: Mapping[str, bytes], commit: Commit) -> bytes:
    """The zip of a bundle, which is unpacked into `folder`."""
    return zipped({f"{folder}/{path}": content for path, content in bundle.items()}, commit.moment)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="folder (default: dist)")


def main(args: argparse.Namespace) -> int:
    """Run the command; 1 if nothing could be released."""
    try:
        book = syllabus.load()
        require_writable(args.output, "; name another --output")
        if changed := uncommitted(ROOT):
            advice = "commit these first, so that the release can be made again from its commit:"
            raise ReleaseError("\n  ".join([advice, *changed]))
        commit = read_commit(ROOT)
        student = student_bundle(ROOT, commit, book)
    except (ReleaseError, syllabus.SyllabusError, NotWritableError) as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    instructor = {path: (ROOT / path).read_bytes() for path in commit.files}
    for kind, bundle in (("student", student), ("instructor", instructor)):
        name = f"module-{book.module.number}-{kind}"
        path = args.output / f"{name}.zip"
        write_whole(path, bundle_zip(name, bundle, commit))
        print(f"{path}: {USES[kind]}.")
    print(f"Both are of commit {commit.name} ({commit.moment:%Y-%m-%d}); the same commit gives the same bytes.")
    return 0
