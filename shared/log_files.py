"""Text files of a run that can be killed: begun anew, continued, cut back to where a checkpoint was written."""

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path


class LogFiles:
    """Text files in one folder.

    Args:
        folder: made if it isn't there.
        names: the files' names.
        resumed: go on behind what is there; else begin with empty files.

    Raises:
        FileNotFoundError: a file to go on with is missing.
    """

    def __init__(self, folder: Path | str, names: Sequence[str], *, resumed: bool) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        mode = "r+" if resumed else "w"
        self.files = {name: open(folder / name, mode, encoding="utf-8", newline="") for name in names}  # noqa: SIM115
        for file in self.files.values():
            file.seek(0, os.SEEK_END)

    def write(self, name: str, text: str) -> None:
        """Append to one of the files."""
        self.files[name].write(text)

    def sizes(self) -> dict[str, int]:
        """Bytes in each file, all of them on the disk."""
        for file in self.files.values():
            file.flush()
            os.fsync(file.fileno())
        return {name: os.fstat(file.fileno()).st_size for name, file in self.files.items()}

    def cut(self, sizes: Mapping[str, int]) -> None:
        """Cut each file back to a size that `sizes` gave.

        Raises:
            ValueError: a file is shorter; nothing is cut then.
        """
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
