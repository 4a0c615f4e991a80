"""Write an edition into the workbook, in place of an older one, without losing anything that a student wrote there.

What the student wrote is taken over (course/merging.py), and the file as it was goes to workbook/earlier/. To know what
the student wrote, the editions of each file are on record in workbook/.editions/: the fingerprints of their cells.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from itertools import count
from pathlib import Path

from nbformat import NotebookNode

from course.execution import NotebookError, read_notebook, write_notebook
from course.files import require_writable, write_whole
from course.merging import Merged, MergeError, fingerprint, fingerprints, merge

EARLIER = "earlier"  # folder for the students' files as they were
RECORDS = ".editions"  # folder with a record for each file: digest of an edition -> its fingerprints, newest last
EDITIONS_KEPT = 20  # so many on each record
OLD_RECORD = ".made.json"  # until 2026-11, of all files: name -> SHA-256 of each edition's file, or of the only one


@dataclass(frozen=True)
class Written:
    """What became of one edition."""

    path: Path  # where the edition is
    what: str  # "written" where no file was, "renewed" in place of an older edition, or "up to date": nothing was done
    merged: Merged | None = None  # the renewed file, and what was taken over into it
    earlier: Path | None = None  # the student's file as it was, if the student had written anything
    # the files that could not be renewed, each with the reason. The edition is beside them
    refused: tuple[tuple[Path, str], ...] = ()


def write_edition(edition: NotebookNode, folder: Path, name: str) -> Written:
    """Write an edition as `name` into `folder`, with what the student wrote into an older one there.

    A file that is broken, or whose cells can't be recognised, is left alone: the edition goes beside it, as
    NAME.updated.ipynb (-2, -3 …), and is renewed there from then on. NotWritableError if nothing can be written.
    """
    require_writable(folder)
    refused: list[tuple[Path, str]] = []
    for path in _places(folder, Path(name).stem):
        try:
            return _write_at(path, edition, tuple(refused))
        except (NotebookError, MergeError) as error:
            refused.append((path, str(error)))


def _places(folder: Path, stem: str) -> Iterator[Path]:
    yield folder / f"{stem}.ipynb"
    yield folder / f"{stem}.updated.ipynb"
    for number in count(2):
        yield folder / f"{stem}.updated-{number}.ipynb"


def _write_at(path: Path, edition: NotebookNode, refused: tuple[tuple[Path, str], ...]) -> Written:
    """Write the edition to `path`, or renew what is there. NotebookError or MergeError, before anything is done, if
    that can't be renewed.
    """
    digest = hashlib.sha256(json.dumps(edition.cells, sort_keys=True).encode()).hexdigest()
    if not path.exists():
        _record(path, digest, edition)
        write_notebook(edition, path)
        return Written(path, "written", refused=refused)

    students, content = _read_students(path)
    base, handed_out = _handed_out(path, students, content)
    if base == digest:
        return Written(path, "up to date", refused=refused)
    merged = merge(edition, students, handed_out)
    earlier = _keep(path) if merged.has_work else None
    if _sha(path) != content:
        return _write_at(path, edition, refused)  # the student has just saved it
    # The record first: ended in between, the new cells aren't taken for the student's. But a file of which nothing is
    # known would then be taken for this edition.
    if handed_out:
        _record(path, digest, edition)
    write_notebook(merged.notebook, path)
    if not handed_out:
        _record(path, digest, edition)
    return Written(path, "renewed", merged, earlier, refused)


def _read_students(path: Path) -> tuple[NotebookNode, str]:
    """A student's notebook, and the SHA-256 of the file. Raises NotebookError; MergeError if two cells have one id."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # where an id is missing or there twice, nbformat warns and makes one up
        notebook, content = read_notebook(path)
    ids = [cell.get("id") for cell in json.loads(path.read_bytes())["cells"]]
    for cell_id in ids:
        if cell_id is not None and ids.count(cell_id) > 1:
            raise MergeError(f"two of its cells have the id '{cell_id}'")
    return notebook, content


def _keep(path: Path) -> Path:
    """Copy a file into EARLIER, under its name, the date and a number that is free. Returns where it is."""
    folder = path.parent / EARLIER
    require_writable(folder)
    for number in count(1):
        earlier = folder / f"{path.stem}.{date.today()}-{number}.ipynb"
        try:
            earlier.touch(exist_ok=False)  # from now on nobody else takes this name
        except FileExistsError:
            continue
        write_whole(earlier, path.read_bytes())
        return earlier


# --------------------------------------------------------------------------------------------------------------------
# what was handed out


def _handed_out(path: Path, students: NotebookNode, content: str) -> tuple[str, dict[str, str]]:
    """The edition that a student's file was made from: its digest and fingerprints; ("", {}) if none is known.

    It is the one on record with the fewest cells that differ. That needn't be the newest: JupyterLab's "Overwrite" puts
    an older one back.
    """
    if content in _old_record(path):
        return "", fingerprints(students)  # nobody has changed it
    present = {fingerprint(cell) for cell in students.cells}

    def differences(edition: tuple[str, dict[str, str]]) -> int:
        return len(present.symmetric_difference(edition[1].values()))

    newest_first = reversed(_recorded(path).items())
    return min(newest_first, key=differences, default=("", {}))


def _record(path: Path, digest: str, edition: NotebookNode) -> None:
    """Put an edition on the file's record, as its newest."""
    editions = _recorded(path)
    editions.pop(digest, None)
    editions[digest] = fingerprints(edition)
    newest = dict(list(editions.items())[-EDITIONS_KEPT:])
    record = _record_of(path)
    record.parent.mkdir(exist_ok=True)
    write_whole(record, json.dumps(newest, indent=1) + "\n")


def _recorded(path: Path) -> dict[str, dict[str, str]]:
    """The editions on record; none if the record is missing or damaged. Then all counts as the student's."""
    try:
        record = json.loads(_record_of(path).read_text(encoding="utf-8"))
        return {digest: dict(cells) for digest, cells in record.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _record_of(path: Path) -> Path:
    return path.parent / RECORDS / f"{path.stem}.json"


def _old_record(path: Path) -> list[str]:
    try:
        made = json.loads((path.parent / OLD_RECORD).read_text(encoding="utf-8"))[path.name]
        return [made] if isinstance(made, str) else list(made)
    except (OSError, ValueError, LookupError, TypeError):
        return []


def _sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
