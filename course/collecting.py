"""Find students' notebooks in a folder or a zip file, and whose they are.

Understood are a folder for each student, a flat folder of files that carry a name, and what Moodle
("Name_12345_assignsubmission_file_/file.ipynb"), Canvas ("lastnamefirst_12345_67890_file.ipynb") and Gradescope
("submission_123/file.ipynb" with submission_metadata.yml) export, zipped or unpacked; a zip file beside other files is
one student's, and is looked into. No link is followed. Of several files of a student on one topic the newest that can
be read counts.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import time
import unicodedata
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from course.skeleton import editions
from course.submission import FILE_SIZE, Submission, UnreadableError, read_submission, topic_in

UNPACKED = 4_000_000_000  # bytes that are unpacked of one zip file at most

# in a student's folder; also the start page, and earlier versions of their files; and what begins with a point
IGNORED = {"__MACOSX", "Thumbs.db", "desktop.ini", "00_START_HERE.ipynb", "earlier"}
_METADATA = "submission_metadata.yml"
_MOODLE = re.compile(r"(?P<name>.+?)_(?P<number>\d+)_assignsubmission_[a-z]+(?:_.*)?")
_CANVAS = re.compile(r"(?P<name>[^_]+)(?:_LATE)?_(?P<number>\d+)_\d+_.+")
_GRADESCOPE, _EXPORT = re.compile(r"submission_\d+"), re.compile(r"assignment_\d+_export")


class CollectingError(ValueError):
    """There is nothing to collect from; the message says why."""


class Unreadable(NamedTuple):
    """A student's file that can't be read."""

    student: str
    topic: str  # what its name says, or ""
    where: str  # relative to what was searched
    problem: str


@dataclass(frozen=True)
class Collection:
    """What was found."""

    submissions: dict[str, dict[str, Submission]]  # of each student, in order, by topic; also of those with none
    unreadable: list[Unreadable]
    others: dict[str, list[str]]  # the files of each student that are no notebooks


def collect(source: Path) -> Collection:
    """Find all submissions in a folder or a zip file. Raises CollectingError if it is neither."""
    home = source.resolve().name.removesuffix(".zip")
    if source.is_dir() and len(inside := [path for path in source.iterdir() if not _is_ignored(path.name)]) == 1:
        source = inside[0] if _is_zip(inside[0]) else source  # an export, as it was downloaded
    if not source.is_dir() and not _is_zip(source):
        raise CollectingError(f"{source} is neither a folder nor a zip file")
    files: list[_File] = []
    groups: dict[str, list[_Owner]] = {}
    with tempfile.TemporaryDirectory(prefix="submissions-") as folder:
        scratch = Path(folder)
        if source.is_dir():
            found = (file for path in sorted(source.iterdir()) for file in _found(path, (path.name,), scratch, 0))
        else:
            found = _in_zip(source, (), scratch)
        for file in found:  # read at once: what was unpacked is removed before the next one is
            parts = _below_export(file.parts)
            if parts == (_METADATA,) and not file.problem:  # not one in a student's folder
                groups |= _submitters(file.path.read_bytes())
            elif parts:
                files.append(_read(file._replace(parts=parts)))
        return _sorted_out(files, groups, home)


def _sorted_out(files: list[_File], groups: dict[str, list[_Owner]], home: str) -> Collection:
    owned = [(file, owner) for file in files for owner in _owners(file, groups, home)]
    labels = _labels({owner for _, owner in owned})
    collection = Collection({name: {} for name in sorted(labels.values(), key=str.casefold)}, [], defaultdict(list))
    found: dict[tuple[str, str], list[tuple[float, str, Submission]]] = defaultdict(list)
    for file, owner in owned:
        student, where = labels[owner], "/".join(file.parts)
        if file.is_folder:
            continue
        if file.submission is not None:
            found[student, file.submission.topic].append((file.when, where, file.submission))
        elif file.problem:
            collection.unreadable.append(Unreadable(student, topic_in(file.parts[-1]), where, file.problem))
        else:
            collection.others[student].append(where)
    for (student, topic), several in found.items():
        *older, (_, where, newest) = sorted(several, key=lambda one: one[:2])
        if older:
            names = ", ".join(name for _, name, _ in older)
            newest = replace(newest, notes=(*newest.notes, f"{where} is the newest and counts, not {names}."))
        collection.submissions[student][topic] = newest
    return collection


def _read(file: _File) -> _File:
    """With what is in it, if it is a notebook; or with the reason why that can't be read."""
    if file.problem or file.is_folder or file.path.suffix.lower() != ".ipynb":
        return file
    try:
        with file.path.open("rb") as opened:
            submission = read_submission(opened.read(FILE_SIZE + 1), file.parts[-1])
        return file._replace(submission=submission, when=file.path.stat().st_mtime)
    except (UnreadableError, OSError) as error:
        return file._replace(problem=str(error))


# ---------------------------------------------------------------- what there is


class _File(NamedTuple):
    """A file or folder, and what was read of it."""

    parts: tuple[str, ...]  # where it was found, as if each zip file were a folder
    path: Path  # where it is
    problem: str = ""  # why it isn't read
    submission: Submission | None = None
    when: float = 0  # when the submission was written, in seconds since 1970

    @property
    def is_folder(self) -> bool:
        return not self.problem and self.path.is_dir()


def _found(path: Path, parts: tuple[str, ...], scratch: Path, depth: int) -> Iterator[_File]:
    """A file, or a folder or zip file with what is in it; nothing of what isn't looked at."""
    # umlauts in one form, whichever the system has; what is no UTF-8 could not be written
    name = unicodedata.normalize("NFC", os.fsencode(parts[-1]).decode("utf-8", "replace"))
    above, parts = parts[:-1], (*parts[:-1], name)
    if _is_ignored(name):
        return
    try:
        if path.is_symlink():
            yield _File(parts, path, "it is a link, and none is followed")
        elif _is_zip(path):
            yield from _in_zip(path, (*above, name[:-4]), scratch, depth)
        elif path.is_dir():
            yield _File(parts, path)
            for inside in sorted(path.iterdir()):
                yield from _found(inside, (*parts, inside.name), scratch, depth)
        elif path.is_file():
            yield _File(parts, path)
    except OSError as error:  # nobody may look into the folder
        yield _File(parts, path, error.strerror or str(error))


def _in_zip(file: Path, above: tuple[str, ...], scratch: Path, depth: int = 0) -> Iterator[_File]:
    """What is in a zip file. Its notebooks and zip files are unpacked; names that lead elsewhere are made harmless."""
    named = (*above[:-1], f"{above[-1]}.zip") if above else (file.name,)
    folder = Path(tempfile.mkdtemp(dir=scratch))
    left = UNPACKED
    try:
        if depth > 1:
            raise UnreadableError("it is a zip file in a zip file in a zip file")
        with _opened(file) as archive:
            for info in archive.infolist():
                pieces = re.split(r"[/\\]", unicodedata.normalize("NFC", info.filename))  # Windows' PowerShell writes \
                parts = (*above, *(piece for piece in pieces if piece not in ("", ".", "..")))
                if parts == above or any(map(_is_ignored, parts)):
                    continue
                path = folder / parts[-1]
                is_wanted = parts[-1].lower().endswith((".ipynb", ".zip", _METADATA))
                if not is_wanted or info.is_dir():
                    yield _File(parts, folder if info.is_dir() else path)
                elif info.file_size > FILE_SIZE and not parts[-1].lower().endswith(".zip"):
                    yield _File(parts, path, f"it has more than {FILE_SIZE / 1e6:g} MB when it is unpacked")
                elif (left := left - info.file_size) < 0:
                    raise UnreadableError(f"it unpacks to more than {UNPACKED / 1e9:g} GB; the rest is left out")
                else:
                    try:
                        path = Path(archive.extract(info, folder))
                        written = time.mktime((*info.date_time, 0, 0, -1))
                        os.utime(path, (written, written))
                    except _DAMAGES as error:
                        yield _File(parts, path, str(error) or "it is damaged")
                    else:
                        yield from _found(path, parts, scratch, depth + 1)
                        path.unlink()
    except _DAMAGES as error:
        yield _File(named, file, str(error) or "it is damaged")


# also: encrypted, or packed in a way that Python doesn't know
_DAMAGES = (UnreadableError, zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, ValueError, OverflowError)


def _opened(file: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(file, metadata_encoding="utf-8")  # macOS writes UTF-8 and doesn't say so
    except UnicodeDecodeError:
        return zipfile.ZipFile(file)


def _is_zip(path: Path) -> bool:
    return path.suffix.lower() == ".zip" and path.is_file() and not path.is_symlink()


def _is_ignored(name: str) -> bool:
    return name.startswith(".") or name in IGNORED


# ---------------------------------------------------------------- whose it is

_Owner = tuple[str, str]  # a name, and what tells two of that name apart


def _owners(file: _File, groups: dict[str, list[_Owner]], home: str) -> list[_Owner]:
    """Who has handed in a file; nobody if it stands beside the students' folders.

    Only the uppermost name counts: those below it are the student's own, who could write another's there.
    """
    first = file.parts[0]
    if _GRADESCOPE.fullmatch(first):
        return groups.get(first, [(first, "")])
    for pattern in (_MOODLE, _CANVAS):
        if named := pattern.fullmatch(first):
            return [(named["name"], named["number"])]
    if len(file.parts) > 1 or file.is_folder:
        return [(first, "")]
    return [(_named_in(first) or home, "")] if file.problem or first.lower().endswith(".ipynb") else []


def _below_export(parts: tuple[str, ...]) -> tuple[str, ...]:
    while parts and _EXPORT.fullmatch(parts[0]):  # the zip file, and the folder in it
        parts = parts[1:]
    return parts


def _named_in(file: str) -> str:
    """What a file's name says besides the topic."""
    rest = Path(file).stem
    for path in editions().values():
        rest = rest.replace(path.stem, "")
    return re.sub(r"(?<!\d)\d\d?-\d\d?(?!\d)|\(\d+\)", "", rest).strip(" _-.,()")


def _labels(owners: set[_Owner]) -> dict[_Owner, str]:
    """What to call each: the name, and what tells them apart if another has the same."""
    names = [name for name, _ in owners]
    return {(name, more): name if names.count(name) == 1 or not more else f"{name} ({more})" for name, more in owners}


def _submitters(content: bytes) -> dict[str, list[_Owner]]:
    """Gradescope's students by the submission's name; nobody if that can't be read: then numbers are their names."""
    import yaml

    class Loader(yaml.SafeLoader):
        """Reads what a program in Ruby has written; its types are left out."""

    Loader.add_multi_constructor("!", lambda *_: None)
    groups: dict[str, list[_Owner]] = {}
    with contextlib.suppress(yaml.YAMLError, AttributeError, TypeError):
        for submission, about in yaml.load(content, Loader).items():
            people = about.get(":submitters") or []
            groups[submission] = [(str(one[":name"]), str(one.get(":sid") or one.get(":email"))) for one in people]
    return {name: people for name, people in groups.items() if people}
