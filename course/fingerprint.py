"""What an execution of a notebook, or a test file about one, depends on, as one hash: the same hash, the same result.

conftest.py keeps the hashes of what passed, so that it isn't repeated for an unchanged notebook.
"""

from __future__ import annotations

import ast
import glob
import hashlib
import os
import platform
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path

# what a user may set that reaches a kernel; how the command itself was started does not
VARIABLES = ("COURSE_", "CUDA_", "MKL_", "MPL", "OMP_", "PYTORCH_", "TORCH")
# relative to the repository: a file, or a folder with all that is in it
EVERY_NOTEBOOKS = (
    "shared", "datasets/sample", "requirements.txt", "requirements-dev.txt", "constraints.txt", "pyproject.toml",
    "conftest.py",
)  # fmt: skip
# what tests of the tools read, too
TOOLS_DATA = (".ci", ".github", "templates", "Makefile", "README.md", "datasets/README.md")
MADE = {"__pycache__", ".ipynb_checkpoints"}


def surroundings(root: Path, program: Path, options: object, environment: Mapping[str, str]) -> str:
    """A hash of everything that all notebooks' executions depend on.

    Args:
        root: the repository.
        program: the Python file that executes notebooks; it counts with all of `course` that it imports.
        options: how notebooks are executed; anything with a `repr` that says it all.
        environment: the variables that the command was started with.
    """
    digest = hashlib.sha256()
    files = [file for name in EVERY_NOTEBOOKS for file in _files(root / name)]
    for file in [*files, *_program(program, root)]:
        _add_file(digest, file, root)
    for distribution in sorted(f"{d.name} {d.version}" for d in metadata.distributions()):
        digest.update(f"{distribution}\n".encode())
    variables = sorted(
        (name, value) for name, value in environment.items() if name.startswith(VARIABLES) and name != "COURSE_ENV"
    )
    machine = (sys.version, tuple(platform.uname()), os.cpu_count(), sorted(glob.glob("/dev/nvidia*")))
    digest.update(repr((variables, machine, options)).encode())
    return digest.hexdigest()


def fingerprint(notebook: Path, kind: str, around: str) -> str:
    """A hash of what one execution depends on.

    Args:
        notebook: counts with what lies in folders beside it, such as recordings.
        kind: how it is executed ("nbval", "edition", "rehearsal").
        around: the `surroundings`.
    """
    digest = hashlib.sha256(f"{kind}\n{around}\n".encode())
    beside = (file for folder in sorted(notebook.parent.iterdir()) if folder.is_dir() for file in _files(folder))
    for file in [notebook, *beside]:
        _add_file(digest, file, notebook.parent)
    return digest.hexdigest()


def tests_fingerprint(tests: Path, notebook: Path | None, around: str, root: Path) -> str:
    """A hash of what a file of tests depends on: all code but other test files, and the notebook it is about.

    Args:
        tests: the test file.
        notebook: what it is about; None if it reads none of the course's notebooks, only which there are.
        around: the `surroundings`.
        root: the repository.
    """
    about = fingerprint(notebook, "tests", around) if notebook else around
    digest = hashlib.sha256(about.encode())
    files = [*_files(root / "course"), *sorted(root.glob("module*/syllabus.toml")), tests]
    files += (file for file in _files(root / "tests") if file.suffix == ".py" and not file.name.startswith("test_"))
    if notebook:
        files += sorted((root / "tests" / "mutants").glob(f"{notebook.stem.partition('_')[0]}.json"))
    else:
        files += (file for name in TOOLS_DATA for file in _files(root / name))
        digest.update(repr(sorted(path.name for path in root.glob("module*/*.ipynb"))).encode())
    for file in files:
        _add_file(digest, file, root)
    return digest.hexdigest()


def _add_file(digest: hashlib._Hash, file: Path, root: Path) -> None:
    content = file.read_bytes()
    name = file.relative_to(root) if file.is_relative_to(root) else file
    digest.update(f"{name.as_posix()}\n{len(content)}\n".encode() + content)


def _files(path: Path) -> Iterable[Path]:
    """`path` itself, or the files below it, in one order; nothing if it doesn't exist."""
    if path.is_file():
        return [path]
    return sorted(file for file in path.rglob("*") if file.is_file() and not MADE & set(file.parts))


def _program(start: Path, root: Path) -> list[Path]:
    """`start` and the files of `course` that it imports, directly or through another."""
    found: list[Path] = []
    waiting = [start]
    while waiting:
        file = waiting.pop()
        if file in found or not file.is_file():
            continue
        found.append(file)
        for name in _imported(file):
            waiting += [root / f"{name.replace('.', '/')}{end}" for end in (".py", "/__init__.py")]
    return sorted(found)


def _imported(file: Path) -> Iterable[str]:
    """Dotted names below `course` that a file imports; also of functions and classes, which are no files."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "course")
