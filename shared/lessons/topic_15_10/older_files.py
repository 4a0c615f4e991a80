"""Checkpoints in a folder that are from beyond the step at which a run begins."""

from pathlib import Path


def set_aside(folder: Path, step: int) -> None:
    """Give checkpoints another name whose step is larger than `step`; `best.ckpt`, too, if `step` is 0.

    `step-000000018.ckpt` becomes `step-000000018-0.aside`, the next one of this step `step-000000018-1.aside`.
    """
    beyond = [path for path in folder.glob(f"step-{'[0-9]' * 9}.ckpt") if int(path.stem[5:]) > step]
    if step == 0:
        beyond += folder.glob("best.ckpt")
    for path in beyond:
        number = len(list(folder.glob(f"{path.stem}-*.aside")))
        path.replace(folder / f"{path.stem}-{number}.aside")
