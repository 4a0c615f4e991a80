"""Remove what the other commands made: executed/ and caches.

Student work in workbook/ and full data sets are never removed.
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

from course.environment import ROOT, Environment

CACHES = {"__pycache__", ".pytest_cache", ".ruff_cache", ".ipynb_checkpoints"}
# nothing is looked for in these: git's own, the environments, what students work on
LEFT_ALONE = {".git", ".venv", ".site", "workbook"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--all", action="store_true", help="also the environment, .venv (if `course` has made it)")


def main(args: argparse.Namespace) -> int:
    """Run the command. OSError, which names the file, if something can't be removed."""
    found = [ROOT / "executed"] if (ROOT / "executed").is_dir() else []
    for folder, names, _ in os.walk(ROOT):
        found += [Path(folder, name) for name in names if name in CACHES]
        names[:] = [name for name in names if name not in LEFT_ALONE]
    for path in sorted(found, reverse=True):  # what is in a folder goes before it
        shutil.rmtree(path)
        print(f"removed {path.relative_to(ROOT)}")
    if args.all and Environment(ROOT).remove():
        print("removed .venv")
    return 0
