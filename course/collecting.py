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
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, NamedTuple

import yaml

from course.skeleton import editions
from course.submission import Submission, UnreadableError, read_submission, topic_in

FILE_SIZE, ZIP_SIZE = 30_000_000, 1_000_000_000  # bytes of a notebook, and of a zip file in another; no more is read

# in a student's folder; also the start page, and earlier versions of their files; and what begins with a point
IGNORED = {"__MACOSX", "Thumbs.db", "desktop.ini", "00_START_HERE.ipynb", "earlier"}
_METADATA = "submission_metadata.yml"
_MOODLE = re.compile(r"(?P<name>.+?)_(?P<number>\d+)_assignsubmission_[a-z]+(?:_.*)?")
_CANVAS = re.compile(r"(?P<name>[^_]+)(?:_LATE)?_(?P<number>\d+)_\d+_.+")
_GRADESCOPE_EXPORT = re.compile(r"assignment_\d+_export")  # the zip file, and the folder in it
# a zip file may also be encrypted, or packed in a way that Python doesn't know
_DAMAGES = (UnreadableError, zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, ValueError)


class CollectingError(ValueError):
    """There is nothing to collect from; the message says why."""


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
    """A file that was found."""

    parts: tuple[str, ...]  # its path, as if each zip file were a folder; of a folder with "" at the end
    when: tuple[int, ...] = ()  # it was written: year, month, …
    content: bytes | None = None  # if it is to be read
    submission: Submission | None = None  # when it was
    problem: str = ""  # why it can't be


def collect(source: Path) -> dict[str, Student]:
    """All students with what they have handed in, in a folder or a zip file. CollectingError if it is neither."""
    home = source.resolve().name.removesuffix(".zip")
    if source.is_dir():
        inside = [path for path in source.iterdir() if not is_ignored((path.name,))]
        if len(inside) == 1 and inside[0].suffix.lower() == ".zip":  # an export, as it was downloaded
            source = inside[0]
    files = []
    groups: dict[str, list[_Owner]] = {}
    try:
        for file in _in_folder(source) if source.is_dir() else _in_zip(source, (), 0):
            while file.parts and _GRADESCOPE_EXPORT.fullmatch(file.parts[0]):
                file = file._replace(parts=file.parts[1:])
            if file.parts == (_METADATA,):  # not one in a student's folder
                groups |= _submitters(file.content or b"")
            elif file.parts:
                files.append(_read(file))
    except (zipfile.BadZipFile, OSError) as error:
        raise CollectingError(f"{source} is neither a folder nor a zip file that can be read: {error}") from None
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
    names = Counter(owner.name for owner in found)
    students = {
        f"{owner.name} ({owner.number})" if names[owner.name] > 1 and owner.number else owner.name: student
        for owner, student in found.items()
    }
    return dict(sorted(students.items(), key=lambda one: one[0].casefold()))


def _read(file: _File) -> _File:
    """With what is in it, if it is a notebook; or with the reason why that can't be read."""
    if file.content is None or file.parts[-1] == _METADATA:
        return file
    try:
        return file._replace(content=None, submission=read_submission(file.content, file.parts[-1]))
    except UnreadableError as error:
        return file._replace(content=None, problem=str(error))


# ---------------------------------------------------------------- what there is


def _in_folder(folder: Path) -> Iterator[_File]:
    for path in sorted(folder.rglob("*")):
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
    if depth > 2:
        raise UnreadableError("it is a zip file in a zip file in a zip file")
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
    """A file, with its content if that is wanted; in place of a zip file what is in it."""
    *above, name = file.parts
    kind = Path(name).suffix.lower()
    limit = ZIP_SIZE if kind == ".zip" else FILE_SIZE
    try:
        if kind not in (".ipynb", ".zip") and name != _METADATA:
            yield file
        elif size > limit:
            yield file._replace(problem=f"it has more than {limit / 1e6:g} MB")
        elif kind == ".zip":
            yield from _in_zip(io.BytesIO(read()), (*above, name[:-4]), depth + 1)
        else:
            yield file._replace(content=read())
    except _DAMAGES as error:
        yield file._replace(problem=str(error) or "it is damaged")


def _parts(path: str) -> tuple[str, ...]:
    """The names in a path: with umlauts in one form, whichever the system has, and such that they can be written."""
    path = unicodedata.normalize("NFC", path.encode("utf-8", "replace").decode("utf-8"))
    *folders, name = re.split(r"[/\\]", path)  # Windows' PowerShell writes \ into zip files
    return (*(folder for folder in folders if folder not in ("", ".", "..")), name)


def is_ignored(parts: tuple[str, ...]) -> bool:
    """Whether a path leads to what isn't looked at, such as a checkpoint or an earlier version."""
    return any(part.startswith(".") or part in IGNORED for part in parts)


# ---------------------------------------------------------------- whose it is


class _Owner(NamedTuple):
    """Somebody who has handed in; the number or address, if there is one, is shown where a name is there twice."""

    name: str
    number: str = ""


def _owners(file: _File, groups: dict[str, list[_Owner]], home: str) -> list[_Owner]:
    """Who has handed in a file; nobody if it stands beside the students' folders.

    Only the uppermost name counts: those below it are the student's own, who could write another's there.
    """
    first = file.parts[0]
    for pattern in (_MOODLE, _CANVAS):
        if named := pattern.fullmatch(first):
            return [_Owner(named["name"], named["number"])]
    if len(file.parts) > 1:
        return groups.get(first, [_Owner(first)])
    return [_Owner(_named_in(first) or home)] if file.problem or first.lower().endswith(".ipynb") else []


def _named_in(file: str) -> str:
    """What a file's name says besides the topic."""
    rest = Path(file).stem
    for path in editions().values():
        rest = rest.replace(path.stem, "")
    return re.sub(r"(?<!\d)\d\d?-\d\d?(?!\d)|\(\d+\)", "", rest).strip(" _-.,()")


class _Loader(yaml.SafeLoader):
    """Reads what a program in Ruby has written; its types are left out."""


_Loader.add_multi_constructor("!", lambda *_: None)


def _submitters(content: bytes) -> dict[str, list[_Owner]]:
    """Gradescope's students by the submission's name; nobody if that can't be read: then numbers are their names."""
    groups: dict[str, list[_Owner]] = {}
    with contextlib.suppress(yaml.YAMLError, AttributeError, TypeError, KeyError, ValueError):
        for submission, about in yaml.load(content, _Loader).items():
            if people := about.get(":submitters"):
                groups[submission] = [
                    _Owner(str(one[":name"]), str(one.get(":sid") or one.get(":email") or "")) for one in people
                ]
    return groups
