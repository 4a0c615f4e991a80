"""Find students' notebooks in a folder or a zip file, and whose they are.

Understood are a folder for each student, a flat folder of files that carry a name, and what Moodle
("Name_12345_assignsubmission_file_/file.ipynb"), Canvas ("lastnamefirst_12345_67890_file.ipynb") and Gradescope
("submission_123/file.ipynb" with submission_metadata.yml) export, zipped or unpacked; a zip file beside other files is
one student's, and is looked into. Nothing is unpacked onto the disk, and no link is followed. Of several files of a
student on one topic the newest that can be read counts.
"""

from __future__ import annotations

import contextlib
import functools
import io
import re
import stat
import time
import unicodedata
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
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
    """A notebook that a student has handed in, or a file of theirs that can't be read."""

    student: str  # as the folder or the export calls them
    where: str  # the file, relative to what was searched
    submission: Submission | None  # what is in it; None if it can't be read
    topic: str  # the submission's; of an unreadable file what its name says, or ""
    problem: str = ""  # why it can't be read
    when: float = 0  # when it was written, in seconds since 1970
    notes: tuple[str, ...] = ()  # sentences that a reader should see


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
        entries = list(_looked_into(_in_folder(source)))
    elif source.suffix.lower() == ".zip" and source.is_file():
        entries = list(_looked_into(_in_zip(source, ())))
    else:
        kind = "neither a folder nor a zip file" if source.exists() else "not there"
        raise CollectingError(f"{source} is {kind}")
    tables = [
        entry.groups for entry in entries if len(_below_export(entry.parts)) == 1
    ]  # not one in a student's folder
    groups = {name: people for table in tables for name, people in table.items()}
    owners = [(entry, _owners(entry, groups, home)) for entry in entries]
    labels = _labels({owner for _, several in owners for owner in several})
    collection = Collection(sorted(labels.values(), key=str.casefold), {}, [], defaultdict(list))
    found: dict[tuple[str, str], list[HandedIn]] = defaultdict(list)
    for entry, several in owners:
        for student in (labels[owner] for owner in several):
            if entry.handed_in is None:
                if not entry.is_folder:
                    collection.others[student].append("/".join(entry.parts))
                continue
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

_Owner = tuple[str, str]  # a name, and what tells two of that name apart


@dataclass(frozen=True)
class _Entry:
    """A file or folder, and what was read of it: a notebook, or the people of Gradescope's submissions."""

    parts: tuple[str, ...]
    is_folder: bool = False
    size: int = 0
    when: float = 0
    read: Callable[[], bytes] = bytes
    problem: str = ""
    depth: int = 0  # in how many zip files it lies
    handed_in: HandedIn | None = None
    groups: dict[str, list[_Owner]] = field(default_factory=dict)


def _in_folder(folder: Path) -> Iterator[_Entry]:
    for path in sorted(folder.rglob("*")):
        about = path.lstat()
        problem = ""
        if path.is_symlink():
            problem = "it is a link, and none is followed"
        elif not stat.S_ISREG(about.st_mode) and not path.is_dir():
            problem = "it is no ordinary file"
        parts = path.relative_to(folder).parts
        yield _Entry(parts, path.is_dir(), about.st_size, about.st_mtime, path.read_bytes, problem)


def _in_zip(file: Path | io.BytesIO, above: tuple[str, ...], depth: int = 1) -> Iterator[_Entry]:
    name = (*above[:-1], f"{above[-1]}.zip") if above else (Path(str(file)).name,)
    left = ZIP_SIZE
    try:
        with zipfile.ZipFile(file) as archive:
            for number, info in enumerate(archive.infolist()):
                left -= info.file_size
                if number >= ENTRIES or left < 0:
                    told = f"it has more than {ENTRIES:,} files, or unpacks to more than {ZIP_SIZE / 1e9:g} GB"
                    raise UnreadableError(f"{told}; the rest is left out")
                yield _of_zip(archive, info, above, depth)
    except (zipfile.BadZipFile, OSError, ValueError) as error:
        yield _Entry(name, problem=str(error) or "it is damaged")


def _of_zip(archive: zipfile.ZipFile, info: zipfile.ZipInfo, above: tuple[str, ...], depth: int) -> _Entry:
    name = info.filename
    if not info.flag_bits & 0x800:  # macOS writes UTF-8 and doesn't say so
        with contextlib.suppress(UnicodeError):
            name = name.encode("cp437").decode("utf-8")
    # nothing is written, so a name that leads elsewhere does no harm; and it belongs to nobody else's folder
    pieces = re.split(r"[/\\]", name)
    own = tuple(piece for piece in pieces if piece not in ("", ".", ".."))
    problem = ""
    if stat.S_ISLNK(info.external_attr >> 16):
        problem = "it is a link, and none is followed"
    elif ".." in pieces or name.startswith(("/", "\\")):
        problem = f"the zip file calls it {name!r}, which leads out of its folder"
    elif info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        problem = "it is packed in a way that isn't read here"
    read = functools.partial(archive.read, info)
    return _Entry((*above, *own), info.is_dir(), info.file_size, _written(info), read, problem, depth)


def _written(info: zipfile.ZipInfo) -> float:
    try:
        return time.mktime((*info.date_time, 0, 0, -1))
    except (ValueError, OverflowError):
        return 0.0


def _looked_into(entries: Iterable[_Entry]) -> Iterator[_Entry]:
    """The entries with what could be read of them, and those of the zip files among them."""
    for entry in entries:
        # umlauts in one form, whichever the system has
        parts = [unicodedata.normalize("NFC", part.encode("utf-8", "replace").decode()) for part in entry.parts]
        entry = replace(entry, parts=tuple(parts))
        if not parts or any(map(_is_ignored, parts)):
            continue
        is_zip = parts[-1].lower().endswith(".zip")
        wanted = is_zip or parts[-1].lower().endswith(".ipynb") or parts[-1] == _METADATA
        limit = INNER_ZIP_SIZE if is_zip else FILE_SIZE
        if entry.problem:
            yield _problem(entry, entry.problem)
        elif entry.is_folder or not wanted:
            yield entry
        elif entry.size > limit and (entry.depth or not is_zip):
            yield _problem(entry, f"it has more than {limit / 1e6:g} MB{' when it is unpacked' * bool(entry.depth)}")
        elif is_zip and entry.depth > 1:
            yield _problem(entry, "it is a zip file in a zip file in a zip file")
        else:
            try:
                content = entry.read()
                if is_zip:
                    above = (*parts[:-1], parts[-1][:-4])
                    yield from _looked_into(_in_zip(io.BytesIO(content), above, entry.depth + 1))
                elif parts[-1] == _METADATA:
                    yield replace(entry, groups=_submitters(content))
                else:
                    submission = read_submission(content, parts[-1])
                    where = "/".join(parts)
                    yield replace(entry, handed_in=HandedIn("", where, submission, submission.topic, when=entry.when))
            except (zipfile.BadZipFile, RuntimeError, EOFError, OSError, zlib.error, UnreadableError) as error:
                yield _problem(entry, str(error) or "it can't be read")


def _is_ignored(name: str) -> bool:
    return name.startswith(".") or name in _IGNORED


def _problem(entry: _Entry, problem: str) -> _Entry:
    topic = next((one for one in topics_in(entry.parts[-1]) if one in editions()), "")
    return replace(entry, handed_in=HandedIn("", "/".join(entry.parts), None, topic, problem, entry.when))


# ---------------------------------------------------------------- whose it is


def _owners(entry: _Entry, groups: dict[str, list[_Owner]], home: str) -> list[_Owner]:
    """Who has handed in an entry; nobody if it stands beside the students' folders.

    Only the uppermost name counts: those below it are the student's own, who could write another's there.
    """
    parts = _below_export(entry.parts)
    if not parts or parts[-1] == _METADATA:
        return []
    if _GRADESCOPE.fullmatch(parts[0]):
        return groups.get(parts[0], [(parts[0], "")])
    for pattern in (_MOODLE, _CANVAS):
        if named := pattern.fullmatch(parts[0]):
            return [(named["name"], named["number"])]
    if len(parts) > 1 or entry.is_folder:
        return [(parts[0], "")]
    return [(_named_in(parts[0]) or home, "")] if entry.handed_in else []


def _below_export(parts: tuple[str, ...]) -> tuple[str, ...]:
    while parts and _EXPORT.fullmatch(parts[0]):
        parts = parts[1:]
    return parts


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


def _submitters(content: bytes) -> dict[str, list[_Owner]]:
    """Gradescope's students by the submission's name; nobody if that can't be read: then numbers are their names."""
    import yaml

    class Loader(yaml.SafeLoader):
        """Reads what a program in Ruby has written; its types are left out."""

    Loader.add_multi_constructor("!", lambda *_: None)
    groups: dict[str, list[_Owner]] = {}
    with contextlib.suppress(yaml.YAMLError, AttributeError, TypeError):
        for submission, about in yaml.load(content, Loader).items():
            people: list[dict[str, Any]] = about.get(":submitters", [])
            groups[submission] = [(str(one[":name"]), str(one.get(":sid") or one.get(":email"))) for one in people]
    return {name: people for name, people in groups.items() if people}
