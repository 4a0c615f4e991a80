"""`python -m course lint`: hold the notebooks, the templates and the module's pages against syllabus.toml.

Prints one line a finding, `file: cell-id: rule: message`, and ends with 1 if there is any.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

from course import instructor_guide, module_readme
from course.environment import ROOT
from course.execution import NotebookError, read_notebook
from course.files import write_whole
from course.rules import NOT_FOR_DRAFTS, RULES, Notebook, first_line
from course.selection import SelectionError, select
from course.syllabus import TEMPLATES, Module, Syllabus, SyllabusError, Topic, load


class Finding(NamedTuple):
    """One thing that is wrong: where (file, cell id or "-"), which rule, and what to do."""

    file: str
    cell: str
    rule: str
    message: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "notebooks", nargs="*", metavar="TOPIC|FILE", help="default: all that exist, the templates, the module's page"
    )
    parser.add_argument("--ruff", action="store_true", help="also run ruff check and ruff format --check")
    parser.add_argument(
        "--write-readme",
        action="store_true",
        help="first refresh the generated tables of the module's README.md and of its INSTRUCTOR_GUIDE.md",
    )


def main(args: argparse.Namespace) -> int:
    """Run the command; 0 when nothing is wrong, 1 for a finding, 2 for wrong usage."""
    try:
        syllabus = load()
        paths = [selected.path for selected in select(args.notebooks, syllabus)]
    except (SyllabusError, SelectionError) as error:
        print(f"lint: {error}", file=sys.stderr)
        return 2
    if args.write_readme:
        lint_pages(syllabus, write=True)
    findings = lint_files(paths, syllabus) if args.notebooks else lint_repository(ROOT, syllabus)
    for finding in findings:
        print(": ".join(finding).removeprefix(f"{ROOT}{os.sep}"))
    for topic in syllabus.topics.values():
        if topic.is_draft and topic.path in paths and topic.path.is_file():
            print(f"note: {topic.number} is a draft, so not held against {', '.join(sorted(NOT_FOR_DRAFTS))}")
    print(f"lint: findings: {len(findings)}" if findings else "lint: nothing to complain about", flush=True)
    is_clean = not args.ruff or run_ruff(ROOT)
    return 0 if is_clean and not findings else 1


def lint_repository(root: Path, syllabus: Syllabus) -> list[Finding]:
    """Everything: all notebooks in the module's folder, both templates, the module's pages."""
    notebooks = sorted(syllabus.path.parent.glob("*.ipynb"))
    templates = [root / "templates" / name for name in TEMPLATES]
    return [*lint_files([*notebooks, *templates], syllabus), *lint_pages(syllabus)]


def lint_files(files: list[Path], syllabus: Syllabus) -> list[Finding]:
    """Hold each file against the topic that its name says, a template against its own placeholders."""
    topics = {topic.file: topic for topic in syllabus.topics.values()}
    findings = []
    for path in files:
        topic = template_topic(path) if path.name in TEMPLATES else topics.get(path.name)
        if topic is None:
            cure = "add one with python -m course new, give the file the name that it has there, or move it away"
            findings.append(Finding(str(path), "-", "file", f"belongs to no topic of syllabus.toml; {cure}"))
        else:
            findings += lint_notebook(path, topic, syllabus.module)
    return findings


def template_topic(path: Path) -> Topic:
    """The topic that a template is held against: a draft whose texts are the placeholders that `new` fills in."""
    texts = {key: "{{" + key + "}}" for key in ("number", "title", "dataset", "time", "category", "owns")}
    nothing = {"key_content": "", "description": "", "budget_seconds": 0, "status": "draft"}
    needs = ("{{prerequisites}}",)
    return Topic(file=path.name, path=path.resolve(), template=path.name, prerequisites=needs, **texts, **nothing)


def lint_notebook(path: Path, topic: Topic, module: Module) -> list[Finding]:
    """Hold one notebook file against its topic; one that is no notebook is a finding, too."""
    try:
        with warnings.catch_warnings(action="error", category=FutureWarning):  # of ids that nbformat would make up
            document, _ = read_notebook(path)
    except NotebookError as error:
        return [Finding(str(path), "-", "nbformat", first_line(str(error), 200))]
    notebook = Notebook(path, document, topic, module)
    findings = [
        Finding(str(path), cell, name, message)
        for name, check in RULES.items()
        if not (topic.is_draft and name in NOT_FOR_DRAFTS)
        for cell, message in check(notebook)
    ]
    places = {cell.id: place for place, cell in enumerate(notebook.cells)}
    return sorted(findings, key=lambda finding: places.get(finding.cell, -1))


def lint_pages(syllabus: Syllabus, write: bool = False) -> list[Finding]:
    """Hold the generated parts of the module's page and of the instructor's guide against what they are made of.

    `write` refreshes them first.
    """
    findings = []
    for name, module in (("README.md", module_readme), (instructor_guide.NAME, instructor_guide)):
        page = syllabus.path.parent / name
        if not page.is_file():
            continue
        text = page.read_text(encoding="utf-8")
        problem = "is older than syllabus.toml or the notebooks; refresh it: python -m course lint --write-readme"
        try:
            fresh = module_readme.refresh(text, module.render(syllabus), module.SOURCE)
        except module_readme.ReadmeError as error:
            fresh, problem = "", str(error)
        if write and fresh:
            write_whole(page, fresh)
        elif fresh != text:
            findings.append(Finding(str(page), "-", "module-page", problem))
    return findings


def run_ruff(root: Path) -> bool:
    """Run `ruff check` and `ruff format --check` on the repository; True if both are content."""
    statuses = [
        subprocess.run([sys.executable, "-m", "ruff", *command, "."], cwd=root, timeout=120, check=False).returncode
        for command in (["check"], ["format", "--check"])
    ]
    return statuses == [0, 0]
