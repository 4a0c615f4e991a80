"""Text files of a run that can be killed: begun anew, continued, cut back to where a checkpoint was written; rows."""

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any


def row_lines(row: Mapping[str, Any], columns: Sequence[str]) -> tuple[str, str]:
    """A row of numbers as a line of JSON, and some of its columns as one of CSV; a missing column is empty.

    Infinity and NaN, which JSON doesn't know, become strings.
    """
    cells = {name: str(value) if value - value == 0 else f'"{value}"' for name, value in row.items()}
    line = ", ".join([f'"{name}": {cell}' for name, cell in cells.items()])
    return f"{{{line}}}\n", ",".join([cells.get(name, "") for name in columns]) + "\n"


class LogFiles:
    """Text files in one folder, begun anew at the first `write` or gone on with after a `cut`.

    Args:
        folder: made if it isn't there.
        headers: the files' names, each with the text that a new file begins with.
    """

    def __init__(self, folder: Path | str, headers: Mapping[str, str]) -> None:
        self.folder, self.headers = Path(folder), dict(headers)
        self.files: dict[str, IO[str]] = {}

    def _open(self, mode: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            for name in self.headers:
                self.files[name] = open(self.folder / name, mode, encoding="utf-8", newline="")  # noqa: SIM115
                self.files[name].seek(0, os.SEEK_END)  # whoever writes after a cut was refused must not write over it
        except OSError:
            self.close()
            raise

    def write(self, name: str, text: str) -> None:
        """Append to one of the files; the first call empties all of them and writes their headers."""
        if not self.files:
            self._open("w")
            for other, header in self.headers.items():
                self.files[other].write(header)
        self.files[name].write(text)

    def sizes(self) -> dict[str, int]:
        """Bytes in each file, all of them on the disk; empty if nothing was written yet."""
        for file in self.files.values():
            file.flush()
            os.fsync(file.fileno())
        return {name: os.fstat(file.fileno()).st_size for name, file in self.files.items()}

    def cut(self, sizes: Mapping[str, int]) -> None:
        """Go on with the files that are there, cut back to what `sizes` gave; without sizes begin anew.

        Raises:
            FileNotFoundError: a file to go on with is missing.
            ValueError: a file is shorter; nothing is cut then.
        """
        if not sizes:
            return
        self._open("r+")
        for name, size in self.sizes().items():
            if size < sizes[name]:
                raise ValueError(f"{name} has {size} bytes, but had {sizes[name]} when the checkpoint was written")
        for name, file in self.files.items():
            file.seek(sizes[name])
            file.truncate()

    def close(self) -> None:
        """Close all files, also if one of them raises (a full disk)."""
        with ExitStack() as stack:
            for file in self.files.values():
                stack.callback(file.close)
            self.files = {}
