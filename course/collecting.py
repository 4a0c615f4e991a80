"""Find students' notebooks in a folder or a zip file, and whose they are.

Understood are a folder for each student, a flat folder of files that carry a name, and what Moodle
("Name_12345_assignsubmission_file_/file.ipynb"), Canvas ("lastnamefirst_12345_67890_file.ipynb") and Gradescope
("submission_123/file.ipynb" with submission_metadata.yml) export, zipped or unpacked; a zip file beside other files is
one student's, and is looked into. A number or address that these add to the name tells two of one name apart. No link
is followed, and nothing is unpacked to the disk. Of several files on one topic the newest that can be read counts.
"""

from __future__ import annotations

import contextlib
import functools
import io
import re
import time
import unicodedata
import zipfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, NamedTuple

import yaml

from course.lesson_code import TargetError
from course.skeleton import editions
from course.submission import Submission, read_submission, topic_in

FILE_SIZE, ZIP_SIZE = 30_000_000, 1_000_000_000  # bytes of a notebook, and of a zip file in another; no more is read

# in a student's folder; also the start page, and earlier versions of their files; and what begins with a point
IGNORED = {"__MACOSX", "desktop.ini", "00_START_HERE.ipynb", "earlier"}
_METADATA = "submission_metadata.yml"
_MOODLE = re.compile(r"(.+?)_(\d+)_assignsubmission_[a-z]+(?:_.*)?")
_CANVAS = re.compile(r"([^_]+)(?:_LATE)?_(\d+)_\d+_.+")
_GRADESCOPE_EXPORT = re.compile(r"assignment_\d+_export")  # the zip file, and the folder in it

_Owner = tuple[str, str]  # a name; and a number or address, or "", which is shown where a name is there twice


class UsageError(ValueError):
    """The command can't be run as it was called; the message says why."""


class Unreadable(NamedTuple):
    """A student's file that can't be read."""

    where: str  # relative to what was searched
    topic: str  # what its name says, or ""
    problem: str


@dataclass(frozen=True)
class Student:
    """What somebody has handed in."""

    submissions: dict[str, Submission] = field(default_factory=dict)  # by topic
    unreadable: list[Unreadable] = field(default_factory=list)
    others: list[str] = field(default_factory=list)  # files that are no notebooks


class _File(NamedTuple):
    parts: tuple[str, ...]  # its path, as if each zip file were a folder; of a folder with "" at the end
    when: tuple[int, ...] = ()  # it was written: year, month, …
    submission: Submission | None = None  # if it is one
    problem: str = ""  # why it can't be read
    read_table: Callable[[], bytes] = bytes  # if it may be Gradescope's table of the students


def collect(source: Path) -> dict[str, Student]:
    """All students with what they have handed in, in a folder or a zip file. UsageError if it is neither."""
    home = source.resolve().name.removesuffix(".zip")
    if source.is_dir():
        inside = [path for path in source.iterdir() if not is_ignored((path.name,))]
        if len(inside) == 1 and inside[0].suffix.lower() == ".zip":  # an export, as it was downloaded
            source = inside[0]
    files = []
    groups: dict[str, list[_Owner]] = {}
    try:
        for file in _in_folder(source) if source.is_dir() else _in_zip(source, (), 0):
            while _GRADESCOPE_EXPORT.fullmatch(file.parts[0]):
                file = file._replace(parts=file.parts[1:])
            if file.parts == (_METADATA,):  # not one in a student's folder
                groups |= _submitters(file.read_table)
            else:
                files.append(file)
    except (zipfile.BadZipFile, OSError) as error:
        raise UsageError(f"{source} is neither a folder nor a zip file that can be read: {error}") from None
    found: dict[_Owner, Student] = defaultdict(Student)
    for file in sorted(files, key=lambda one: (one.when, one.parts)):
        where = "/".join(file.parts)
        for owner in _owners(file, groups, home):
            student, submission = found[owner], file.submission
            if submission:
                if submission.topic in student.submissions:
                    note = f"{where} is the newest file on {submission.topic}, and counts."
                    submission = replace(submission, notes=(*submission.notes, note))
                student.submissions[submission.topic] = submission
            elif file.problem:
                student.unreadable.append(Unreadable(where, topic_in(file.parts[-1]), file.problem))
            elif file.parts[-1]:
                student.others.append(where)
    names = Counter(name for name, _ in found)
    students = {
        f"{name} ({number})" if number and names[name] > 1 else name: student
        for (name, number), student in found.items()
    }
    return dict(sorted(students.items(), key=lambda one: one[0].casefold()))


def _in_folder(folder: Path) -> Iterator[_File]:
    for path in folder.rglob("*"):
        parts = _parts(path.relative_to(folder).as_posix())
        if is_ignored(parts):
            continue
        if path.is_symlink():
            yield _File(parts, problem="it is a link, and none is followed")
        elif path.is_dir():
            yield _File((*parts, ""))
        elif path.is_file():
            about = path.stat()
            when = time.localtime(about.st_mtime)[:6]
            yield from _looked_into(_File(parts, when), about.st_size, path.read_bytes, 0)


def _in_zip(file: Path | IO[bytes], above: tuple[str, ...], depth: int) -> Iterator[_File]:
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            name = info.filename
            with contextlib.suppress(UnicodeError):  # macOS writes UTF-8 and doesn't say so
                name = name.encode("cp437").decode("utf-8")
            parts = (*above, *_parts(name))
            if not is_ignored(parts):
                read = functools.partial(archive.read, info)
                yield from _looked_into(_File(parts, info.date_time), info.file_size, read, depth)


def _looked_into(file: _File, size: int, read: Callable[[], bytes], depth: int) -> Iterator[_File]:
    """A file, read if it is a notebook; in place of a zip file what is in it."""
    *above, name = file.parts
    kind = Path(name).suffix.lower()
    limit = ZIP_SIZE if kind == ".zip" else FILE_SIZE
    try:
        if name == _METADATA:
            yield file._replace(read_table=read)
        elif kind not in (".ipynb", ".zip"):
            yield file
        elif size > limit:
            yield file._replace(problem=f"it has more than {limit / 1e6:g} MB")
        elif kind == ".ipynb":
            yield file._replace(submission=read_submission(read(), name))
        elif depth > 1:
            yield file._replace(problem="it is a zip file in a zip file in a zip file")
        else:
            yield from _in_zip(io.BytesIO(read()), (*above, name[:-4]), depth + 1)
    except TargetError:  # the course's own fault
        raise
    except Exception as error:  # what is damaged or encrypted may raise anything
        yield file._replace(problem=str(error))


def _parts(path: str) -> tuple[str, ...]:
    """The names in a path: with umlauts in one form, whichever the system has, and such that they can be written."""
    path = unicodedata.normalize("NFC", path.encode("utf-8", "replace").decode("utf-8"))
    *folders, name = re.split(r"[/\\]", path)  # Windows' PowerShell writes \ into zip files
    return (*(folder for folder in folders if folder not in ("", ".")), name)


def is_ignored(parts: tuple[str, ...]) -> bool:
    """Whether a path leads to what isn't looked at, such as a checkpoint or an earlier version."""
    return any(part.startswith(".") or part in IGNORED for part in parts)


def _owners(file: _File, groups: dict[str, list[_Owner]], home: str) -> list[_Owner]:
    """Who has handed in a file; nobody if it stands beside the students' folders.

    Only the uppermost name counts: those below it are the student's own, who could write another's there.
    """
    first = file.parts[0]
    for pattern in (_MOODLE, _CANVAS):
        if named := pattern.fullmatch(first):
            return [named.groups()]
    if len(file.parts) > 1:
        return groups.get(first) or [(first, "")]
    return [(_named_in(first) or home, "")] if file.problem or first.lower().endswith(".ipynb") else []


def _named_in(file: str) -> str:
    """What a file's name says besides the topic."""
    rest = Path(file).stem
    for path in editions().values():
        rest = rest.replace(path.stem, "")
    return re.sub(r"(?<!\d)\d\d?-\d\d?(?!\d)|\(\d+\)", "", rest).strip(" _-.,()")


def _submitters(read: Callable[[], bytes]) -> dict[str, list[_Owner]]:
    """Gradescope's students by the submission's name; nobody if that can't be read: then numbers are their names."""
    groups = {}
    with contextlib.suppress(Exception):
        for submission, about in yaml.safe_load(re.sub(rb"!ruby\S*", b"", read())).items():
            people = about[":submitters"]
            groups[submission] = [
                (str(one[":name"]), str(one.get(":sid") or one.get(":email") or "")) for one in people
            ]
    return groups
