"""Remove what the other commands made: executed/ and caches.

Student work in workbook/ and full data sets are never removed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

from course.environment import ROOT, Environment

CACHES = {"__pycache__", ".pytest_cache", ".ruff_cache", ".ipynb_checkpoints"}
# nothing is looked for in these: git's own, the environments, what students work on, data
LEFT_ALONE = {".git", ".venv", ".site", "workbook", "full"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--all", action="store_true", help="also the environment, .venv (if `course` has made it)")


def main(args: argparse.Namespace) -> int:
    """Run the command; 1 if something can't be removed."""
    found = [ROOT / "executed"] if (ROOT / "executed").is_dir() else []
    for folder, names, _ in os.walk(ROOT):
        found += [Path(folder, name) for name in names if name in CACHES]
        names[:] = [name for name in names if name not in CACHES | LEFT_ALONE]
    try:
        for path in found:
            path.unlink() if path.is_symlink() else shutil.rmtree(path)
            print(f"removed {path.relative_to(ROOT)}")
        if args.all and Environment(ROOT).remove():
            print("removed .venv")
    except OSError as error:
        print(f"clean: {error.filename} can't be removed: {error.strerror}", file=sys.stderr)
        return 1
    return 0
