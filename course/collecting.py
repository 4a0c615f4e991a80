"""Find students' notebooks in a folder or a zip file, and whose they are.

Understood are a folder for each student, a flat folder of files that carry a name, and what Moodle
("Name_12345_assignsubmission_file_/file.ipynb"), Canvas ("lastnamefirst_12345_67890_file.ipynb") and Gradescope
("submission_123/file.ipynb" with submission_metadata.yml) export, zipped or unpacked; a zip file beside other files is
one student's, and is looked into. Nothing is unpacked onto the disk, and no link is followed. Of several files of a
student on one topic the newest that can be read counts.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import stat
import time
import unicodedata
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from course.skeleton import editions
from course.submission import FILE_SIZE, Submission, UnreadableError, read_submission, topics_in

ZIP_SIZE = 4_000_000_000  # bytes that are unpacked of one zip file at most
INNER_ZIP_SIZE = 100_000_000  # bytes of a zip file in another
ENTRIES = 20_000  # of a zip file

# in a student's folder; also the start page, and earlier versions of their files; and what begins with a point
_IGNORED = {"__MACOSX", "Thumbs.db", "desktop.ini", "00_START_HERE.ipynb", "earlier"}
_METADATA = "submission_metadata.yml"
_MOODLE = re.compile(r"(?P<name>.+?)_(?P<number>\d+)_assignsubmission_[a-z]+(?:_.*)?")
_CANVAS = re.compile(r"(?P<name>[^_]+)(?:_LATE)?_(?P<number>\d+)_\d+_.+")
_GRADESCOPE, _EXPORT = re.compile(r"submission_\d+"), re.compile(r"assignment_\d+_export")


class CollectingError(ValueError):
    """There is nothing to collect from; the message says why."""


@dataclass(frozen=True)
class HandedIn:
    """A notebook that a student has handed in, or a file of theirs that can't be read.

    Attributes:
        student: as the folder or the export calls them.
        where: the file, relative to what was searched.
        submission: what is in it; None if it can't be read.
        topic: the submission's; of an unreadable file what its name says, or "".
        problem: why it can't be read.
        when: when it was written, in seconds since 1970.
        notes: sentences that a reader should see.
    """

    student: str
    where: str
    submission: Submission | None
    topic: str
    problem: str = ""
    when: float = 0
    notes: tuple[str, ...] = ()


@dataclass
class Collection:
    """What was found: all students, sorted; what each handed in on a topic; files that can't be read, or are none."""

    students: list[str]
    handed_in: dict[tuple[str, str], HandedIn]
    unreadable: list[HandedIn]
    others: dict[str, list[str]]


def collect(source: Path) -> Collection:
    """Find all submissions in a folder or a zip file. Raises CollectingError if it is neither."""
    home = source.resolve().name.removesuffix(".zip")
    if source.is_dir() and len(inside := [path for path in source.iterdir() if not _is_ignored(path.name)]) == 1:
        (only,) = inside  # an export, as it was downloaded
        source = only if only.suffix.lower() == ".zip" and only.is_file() and not only.is_symlink() else source
    if source.is_dir():
        entries = list(_in_folder(source, ()))
    elif source.suffix.lower() == ".zip" and source.is_file():
        entries = list(_in_zip(source, (), 0))
    else:
        kind = "neither a folder nor a zip file" if source.exists() else "not there"
        raise CollectingError(f"{source} is {kind}")
    groups = _submitters(entries)
    owners = [(entry, _owners(entry, groups, home)) for entry in entries]
    labels = _labels({owner for _, several in owners for owner in several})
    collection = Collection(sorted(labels.values(), key=str.casefold), {}, [], defaultdict(list))
    found: dict[tuple[str, str], list[HandedIn]] = defaultdict(list)
    for entry, several in owners:
        for student in (labels[owner] for owner in several):
            if entry.kind == "other":
                collection.others[student].append(entry.where)
            elif entry.handed_in is not None:
                one = replace(entry.handed_in, student=student)
                if one.submission is None:
                    collection.unreadable.append(one)
                else:
                    found[student, one.topic].append(one)
    for key, several in found.items():
        several.sort(key=lambda one: (one.when, one.where))
        newest = several[-1]
        if len(several) > 1:
            older = ", ".join(one.where for one in several[:-1])
            newest = replace(newest, notes=(f"{newest.where} is the newest and counts, not {older}.",))
        collection.handed_in[key] = newest
    return collection


# ---------------------------------------------------------------- what there is


@dataclass(frozen=True)
class _Entry:
    """A file or folder. `kind`: notebook, folder, metadata or other."""

    parts: tuple[str, ...]
    kind: str
    handed_in: HandedIn | None = None
    metadata: Any = None

    @property
    def where(self) -> str:
        return "/".join(self.parts)


def _in_folder(folder: Path, above: tuple[str, ...]) -> Iterator[_Entry]:
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        parts = (*above, _readable(entry.name))
        if _is_ignored(entry.name):
            continue
        if entry.is_symlink():
            yield _problem(parts, "it is a link, and none is followed")
        elif entry.is_dir():
            yield _Entry(parts, "folder")
            with contextlib.suppress(RecursionError):
                yield from _in_folder(Path(entry.path), parts)
        elif entry.name.lower().endswith(".zip"):
            yield from _in_zip(Path(entry.path), (*above, parts[-1][:-4]), 0)
        elif entry.name.lower().endswith(".ipynb") or entry.name == _METADATA:
            try:
                yield _file(parts, _content(entry), entry.stat().st_mtime)
            except OSError as error:
                yield _problem(parts, f"it can't be read: {error.strerror or error}")
        else:
            yield _Entry(parts, "other")


def _content(entry: os.DirEntry) -> bytes:
    if not stat.S_ISREG(entry.stat(follow_symlinks=False).st_mode):
        raise OSError("it is no ordinary file")
    with open(entry.path, "rb") as file:
        return file.read(FILE_SIZE + 1)


def _in_zip(source: Path | io.BytesIO, above: tuple[str, ...], depth: int) -> Iterator[_Entry]:
    left = ZIP_SIZE
    try:
        with zipfile.ZipFile(source) as archive:
            entries = archive.infolist()
            if len(entries) > ENTRIES:
                raise UnreadableError(f"it has more than {ENTRIES:,} entries")
            for info in entries:
                yield from _in_entry(archive, info, above, depth)
                left -= info.file_size
                if left < 0:
                    raise UnreadableError(f"it unpacks to more than {ZIP_SIZE / 1e9:g} GB; the rest is left out")
    except (zipfile.BadZipFile, OSError, ValueError) as error:
        yield _problem((*above[:-1], f"{above[-1]}.zip") if above else (Path(source).name,), f"{error}")


def _in_entry(archive: zipfile.ZipFile, info: zipfile.ZipInfo, above: tuple[str, ...], depth: int) -> Iterator[_Entry]:
    name = info.filename
    if not info.flag_bits & 0x800:  # macOS writes UTF-8 and doesn't say so
        with contextlib.suppress(UnicodeError):
            name = name.encode("cp437").decode("utf-8")
    # nothing is written, so a name that leads elsewhere does no harm; and it belongs to nobody else's folder
    own = tuple(_readable(part) for part in re.split(r"[/\\]", name) if part not in ("", ".", ".."))
    if not own or any(map(_is_ignored, own)):
        return
    parts = (*above, *own)
    if info.is_dir():
        yield _Entry(parts, "folder")
        return
    is_zip = own[-1].lower().endswith(".zip")
    if not is_zip and not own[-1].lower().endswith(".ipynb") and own[-1] != _METADATA:
        yield _Entry(parts, "other")
        return
    size = INNER_ZIP_SIZE if is_zip else FILE_SIZE
    if stat.S_ISLNK(info.external_attr >> 16):
        yield _problem(parts, "it is a link, and none is followed")
    elif ".." in re.split(r"[/\\]", name) or name.startswith(("/", "\\")):
        yield _problem(parts, f"the zip file calls it {name!r}, which leads out of its folder")
    elif info.file_size > size:
        yield _problem(parts, f"it has more than {size / 1e6:g} MB when it is unpacked")
    elif info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        yield _problem(parts, "it is packed in a way that isn't read here")
    elif is_zip and depth:
        yield _problem(parts, "it is a zip file in a zip file in a zip file")
    else:
        try:
            with archive.open(info) as file:
                content = file.read(size + 1)
        except (zipfile.BadZipFile, RuntimeError, EOFError, OSError, zlib.error) as error:
            yield _problem(parts, f"it can't be unpacked: {error}")
            return
        if is_zip:
            yield from _in_zip(io.BytesIO(content), (*above, *own[:-1], own[-1][:-4]), depth + 1)
        else:
            yield _file(parts, content, _written(info))


def _written(info: zipfile.ZipInfo) -> float:
    try:
        return time.mktime((*info.date_time, 0, 0, -1))
    except (ValueError, OverflowError):
        return 0.0


def _is_ignored(name: str) -> bool:
    return name.startswith(".") or name in _IGNORED


def _readable(name: str) -> str:
    """A file's name as text, umlauts in one form, whichever the system has."""
    return unicodedata.normalize("NFC", name.encode("utf-8", "replace").decode("utf-8"))


def _file(parts: tuple[str, ...], content: bytes, when: float) -> _Entry:
    if parts[-1] == _METADATA:
        return _Entry(parts, "metadata", metadata=_read_metadata(content))
    try:
        submission = read_submission(content, parts[-1])
    except UnreadableError as error:
        return _problem(parts, str(error), when)
    return _Entry(parts, "notebook", HandedIn("", "/".join(parts), submission, submission.topic, when=when))


def _problem(parts: tuple[str, ...], problem: str, when: float = 0) -> _Entry:
    topic = next((one for one in topics_in(parts[-1]) if one in editions()), "")
    return _Entry(parts, "notebook", HandedIn("", "/".join(parts), None, topic, problem, when))


# ---------------------------------------------------------------- whose it is

_Owner = tuple[str, str]  # a name, and what tells two of that name apart


def _owners(entry: _Entry, groups: dict[str, list[_Owner]], home: str) -> list[_Owner]:
    """Who has handed in an entry; nobody if it stands beside the students' folders.

    Only the uppermost name counts: those below it are the student's own, who could write another's there.
    """
    parts = list(entry.parts)
    while parts and _EXPORT.fullmatch(parts[0]):
        del parts[0]
    if not parts or entry.kind == "metadata":
        return []
    if _GRADESCOPE.fullmatch(parts[0]):
        return groups.get(parts[0], [(parts[0], "")])
    for pattern in (_MOODLE, _CANVAS):
        if named := pattern.fullmatch(parts[0]):
            return [(named["name"], named["number"])]
    if len(parts) > 1 or entry.kind == "folder":
        return [(parts[0], "")]
    return [(_named_in(parts[0]) or home, "")] if entry.kind == "notebook" else []


def _named_in(file: str) -> str:
    """What a file's name says besides the topic."""
    rest = Path(file).stem
    for path in editions().values():
        rest = rest.replace(path.stem, "")
    rest = re.sub(r"(?<!\d)\d\d?-\d\d?(?!\d)|\(\d+\)", "", rest)
    return rest.strip(" _-.,()")


def _labels(owners: set[_Owner]) -> dict[_Owner, str]:
    """What to call each: the name, and what tells them apart if another has the same."""
    names = [name for name, _ in owners]
    return {(name, more): name if names.count(name) == 1 or not more else f"{name} ({more})" for name, more in owners}


def _submitters(entries: list[_Entry]) -> dict[str, list[_Owner]]:
    """Gradescope's students by the submission's name."""
    groups: dict[str, list[_Owner]] = {}
    for entry in entries:
        for submission, about in (entry.metadata or {}).items():
            people = about.get(":submitters") if isinstance(about, dict) else None
            found = [
                (str(one[":name"]), str(one.get(":sid") or one.get(":email"))) for one in people or () if ":name" in one
            ]
            if found:
                groups[str(submission)] = found
    return groups


def _read_metadata(content: bytes) -> dict:
    """Gradescope's file; nothing if it can't be read: then its submissions' numbers are their names."""
    import yaml

    class Loader(yaml.SafeLoader):
        """Reads what a program in Ruby has written; its types are left out."""

    Loader.add_multi_constructor("!", lambda *_: None)
    try:
        document = yaml.load(content, Loader)
    except yaml.YAMLError:
        return {}
    return document if isinstance(document, dict) else {}
