"""What `course release` hands out: what is in it and what isn't, and that it works where the repository isn't."""

import ast
import csv
import importlib.util
import io
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
import zlib
from base64 import urlsafe_b64encode
from dataclasses import replace
from hashlib import sha256
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import nbformat
import pytest

from course import guard, release, syllabus
from course.edition import solutions, student_edition
from course.environment import ROOT, requirements
from course.execution import read_notebook
from course.exercise_form import BEGIN, END
from course.workbook import finished

try:
    COMMIT = release.read_commit(ROOT)
except release.ReleaseError as error:
    pytest.skip(str(error), allow_module_level=True)

BOOK = syllabus.load()
SECONDS = 240  # the most that a process of these tests may take
# a line of a solution that is also one of the plumbing's, and gives nothing away
COMMON = {("15-10", "buffer = io.BytesIO()")}


@pytest.fixture(scope="module")
def bundle():
    return release.student_bundle(ROOT, COMMIT, BOOK)


@pytest.fixture(scope="module")
def wheel_name(bundle):
    return next(name for name in bundle if name.endswith(".whl"))


@pytest.fixture(scope="module")
def in_wheel(bundle, wheel_name):
    """What is in the wheel, by path."""
    return unzipped(bundle[wheel_name])


@pytest.fixture(scope="module")
def folder(bundle, tmp_path_factory):
    """The students' zip, unpacked."""
    place = tmp_path_factory.mktemp("downloads")
    with zipfile.ZipFile(io.BytesIO(release.bundle_zip("for students", bundle, COMMIT))) as archive:
        archive.extractall(place)
    return place / "for students"


def unzipped(content):
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def cells(content):
    return nbformat.reads(content.decode(), as_version=4).cells


# what is in them ----------------------------------------------------------------------------------------------------


def test_students_get_their_notebooks_and_what_these_need(bundle, wheel_name):
    notebooks = {topic.file for topic in BOOK.topics.values() if not topic.is_draft}
    others = {"00_START_HERE.ipynb", "README.md", "DATA.md", "LICENSE", "requirements.txt", "constraints.txt"}
    assert set(bundle) == notebooks | others | {wheel_name}
    content = release.bundle_zip("module-15-student", bundle, COMMIT)
    assert len(content) < 40_000_000
    assert set(unzipped(content)) == {f"module-15-student/{name}" for name in bundle}
    for name in notebooks:
        assert not any(cell.get("outputs") for cell in cells(bundle[name])), name


def test_instructors_get_all_that_is_committed(tmp_path):
    bundle = release.instructor_bundle(ROOT, COMMIT)
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    ).stdout.splitlines()
    assert sorted(bundle) == sorted(listed)
    found = unzipped(release.bundle_zip("course", bundle, COMMIT))
    for path in ("tests/test_release.py", "course/release.py", "Makefile", next(iter(BOOK.topics.values())).path):
        path = Path(path).relative_to(ROOT).as_posix() if Path(path).is_absolute() else path
        assert found[f"course/{path}"] == (ROOT / path).read_bytes()


def test_the_same_commit_gives_the_same_bytes(bundle):
    again = release.student_bundle(ROOT, COMMIT, BOOK)
    assert again == bundle
    first, second = (release.bundle_zip("a", dict(order(made.items())), COMMIT) for order, made in
                     ((list, bundle), (lambda items: reversed(list(items)), again)))  # fmt: skip
    assert first == second
    with zipfile.ZipFile(io.BytesIO(first)) as archive:
        dates = {entry.date_time for entry in archive.infolist()}
        assert archive.namelist() == sorted(archive.namelist())
    *to_the_minute, seconds = COMMIT.moment.timetuple()[:6]
    assert dates == {(*to_the_minute, seconds // 2 * 2)}  # a zip keeps every other second


def test_programs_stay_programs():
    found = release.bundle_zip("a", {".ci/run": b"#!/bin/sh", "Makefile": b""}, COMMIT)
    with zipfile.ZipFile(io.BytesIO(found)) as archive:
        modes = {entry.filename: oct(entry.external_attr >> 16) for entry in archive.infolist()}
    assert modes == {"a/.ci/run": "0o100755", "a/Makefile": "0o100644"}


# no solutions -------------------------------------------------------------------------------------------------------


def solution_lines():
    """The lines of all solutions, of 20 characters or more, that no lesson shows: (topic, line)."""
    found, shown = set(), ""
    for lesson in finished(BOOK):
        notebook = read_notebook(lesson.path)[0]
        shown += "\n".join(cell.source for cell in student_edition(notebook).cells)
        for blocks in solutions(notebook).values():
            found.update((lesson.topic, line.strip()) for block in blocks for line in block.splitlines())
    return {(topic, line) for topic, line in found - COMMON if len(line) >= 20 and line not in shown}


def everything(bundle):
    """All that can be read in a bundle, files in a wheel, too, but for the data."""
    texts = []
    for name, content in bundle.items():
        if name.endswith(".ipynb"):
            texts.append("\n".join(cell.source for cell in cells(content)))
        elif name.endswith(".whl"):
            texts.append(everything(unzipped(content)))
        elif not name.startswith(("shared/data/sample/", "datasets/sample/")):
            texts.append(content.decode(errors="replace"))
    return "\n".join(texts)


def test_no_line_of_a_solution_is_in_the_students_bundle(bundle):
    lines = solution_lines()
    assert {topic for topic, _ in lines} == {lesson.topic for lesson in finished(BOOK)}
    text = everything(bundle)
    assert not {(topic, line) for topic, line in lines if line in text}
    assert BEGIN not in text
    assert END not in text
    # the same search finds all of them where they are, and some in the checks if these aren't packed
    text = everything(release.instructor_bundle(ROOT, COMMIT))
    assert not {(topic, line) for topic, line in lines if line not in text}
    text = everything({path: (ROOT / path).read_bytes() for path in COMMIT.files if path.startswith("shared/")})
    assert {(topic, line) for topic, line in lines if line in text}


def test_no_hidden_test_is_in_the_students_bundle(monkeypatch):
    hidden = 0

    def with_hidden_tests(path):
        nonlocal hidden
        notebook, *rest = read_notebook(path)
        for cell in notebook.cells:
            if cell.metadata.get("nbgrader", {}).get("grade"):
                cell.source += "\n### BEGIN HIDDEN TESTS\nassert answer == 4711\n### END HIDDEN TESTS"
                hidden += 1
        return notebook, *rest

    monkeypatch.setattr(release, "read_notebook", with_hidden_tests)
    text = everything(release.student_bundle(ROOT, COMMIT, BOOK))
    assert hidden >= 40
    assert "HIDDEN TESTS" not in text
    assert "answer == 4711" not in text


def test_the_wheel_has_shared_and_nothing_else(in_wheel):
    tops = {path.split("/")[0] for path in in_wheel}
    (info,) = (top for top in tops if top != "shared")
    assert re.fullmatch(r"advanced_pytorch_internals-1\.0\.0\.post\d{12}\.dist-info", info)
    code = {path.relative_to(ROOT).as_posix() for path in (ROOT / "shared").rglob("*.py")} & set(COMMIT.files)
    topics = {path for path in code if "/checks/topic_" in path}
    assert len(topics) >= 10
    assert {path for path in in_wheel if path.endswith(".py")} == code - topics
    for path in topics:
        assert zlib.decompress(in_wheel[path.replace(".py", ".packed")]) == (ROOT / path).read_bytes()
    for name in (ROOT / "datasets" / "sample").iterdir():
        assert in_wheel[f"shared/data/sample/{name.name}"] == name.read_bytes()
    # provenance and licences travel along
    assert "Zalando" in in_wheel[f"{info}/licenses/datasets/README.md"].decode()
    assert "shared/recordings/LICENSE.transformer" in in_wheel


def test_the_wheels_record_is_right(in_wheel):
    (path,) = (path for path in in_wheel if path.endswith("/RECORD"))
    rows = {name: (digest, size) for name, digest, size in csv.reader(in_wheel[path].decode().splitlines())}
    assert rows.pop(path) == ("", "")
    for name, content in in_wheel.items():
        if name != path:
            digest = urlsafe_b64encode(sha256(content).digest()).decode().rstrip("=")
            assert rows.pop(name) == (f"sha256={digest}", str(len(content)))
    assert not rows


def test_what_shared_imports_is_what_the_students_install(bundle, in_wheel):
    tops = set()
    for name in [name for name in COMMIT.files if name.startswith("shared/") and name.endswith(".py")]:
        for node in ast.walk(ast.parse((ROOT / name).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                tops |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                tops.add(node.module.split(".")[0])
    tops -= set(sys.stdlib_module_names) | {"shared", "torch", "lightning"}  # lightning: an optional section of 15-10
    owners = metadata.packages_distributions()
    small = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])
    assert {owners[top][0].lower() for top in tops} == small
    (path,) = (path for path in in_wheel if path.endswith("/METADATA"))
    asked = re.findall("^Requires-Dist: (.*)$", in_wheel[path].decode(), re.MULTILINE)
    assert {re.match("[a-z]+", line)[0] for line in asked} == small
    assert set(asked) <= set(requirements(ROOT))
    listed = bundle["requirements.txt"].decode()
    assert [re.match("[a-z]+", line)[0] for line in listed.splitlines()[1:-1]] == list(release.FOR_STUDENTS)


def test_every_link_leads_to_a_file_of_the_bundle(bundle):
    texts = {name: content.decode() for name, content in bundle.items() if name in ("README.md",)}
    for name in bundle:
        if name.endswith(".ipynb"):
            texts[name] = "\n".join(cell.source for cell in cells(bundle[name]) if cell.cell_type == "markdown")
    for name, text in texts.items():
        text = re.sub(r"`[^`\n]*`", "", text)  # `self[i](x)` is no link
        for link in re.findall(r"\]\(([^()\s:#]+)(?:#[^()\s]*)?\)", text):
            assert link in bundle, f"{name} links to {link}"


def test_lessons_link_to_all_the_others_that_they_name(bundle):
    """To later ones, too; a link to what the bundle lacks would have become text."""
    link = re.compile(r"\]\(([^()\s:]+\.ipynb)")
    for lesson in finished(BOOK):
        theirs, ours = link.findall(bundle[lesson.path.name].decode()), link.findall(lesson.path.read_text("utf-8"))
        assert theirs == [name for name in ours if name in bundle], lesson.label


# the address --------------------------------------------------------------------------------------------------------


def test_the_address_is_that_of_the_syllabus_or_not_missed(bundle):
    there = replace(BOOK, module=replace(BOOK.module, repository="https://example.org/course"))
    named = release.student_bundle(ROOT, COMMIT, there)
    unnamed = release.student_bundle(ROOT, COMMIT, replace(BOOK, module=replace(BOOK.module, repository="")))
    assert "https://example.org/course" in named["README.md"].decode()
    assert "ask whoever gave you this folder" in unnamed["README.md"].decode()
    for name in (name for name in bundle if name.endswith(".ipynb")):
        (with_address,) = (cell.source for cell in cells(named[name]) if "find_spec" in cell.source[:400])
        assert "(get it from https://example.org/course)" in with_address
        (without,) = (cell.source for cell in cells(unnamed[name]) if "find_spec" in cell.source[:400])
        assert "(get it where you got this notebook)" in without
        assert "make lab" not in without


@pytest.mark.parametrize("address", ["https://example.org/a-b/c_d.git", ""])
def test_an_address_is_taken_from_the_syllabus(address):
    text = re.sub(r'(?m)^repository = ".*?"', f'repository = "{address}"', BOOK.path.read_text(encoding="utf-8"))
    assert syllabus.parse(text, BOOK.path).module.repository == address


@pytest.mark.parametrize("address", ["example.org/course", 'https://x.org/\\" + evil()', "https://x.org/{a}", " "])
def test_what_is_no_address_is_refused(address):
    text = re.sub(r'(?m)^repository = ".*?"', f'repository = "{address}"', BOOK.path.read_text(encoding="utf-8"))
    with pytest.raises(syllabus.SyllabusError, match=r"\[module\]: repository"):
        syllabus.parse(text, BOOK.path)


# where the repository isn't -----------------------------------------------------------------------------------------


def surroundings(**more):
    """The variables of a process that finds no `shared` of ours, and no network."""
    ours = ("PYTHONPATH", "PIP_", "COURSE_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return {
        **kept,
        "PIP_NO_INDEX": "1",
        "PIP_CONFIG_FILE": os.devnull,
        "MPLBACKEND": "agg",
        "COURSE_DATA": "sample",
    } | more


def run(python, code, folder, **more):
    return subprocess.run(
        [python, "-c", code], cwd=folder, env=surroundings(**more), capture_output=True, text=True, timeout=SECONDS,
        check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def other_python(tmp_path_factory):
    """A Python that has all packages of this one but `shared`, and room for it."""
    pytest.importorskip("pip")
    place = tmp_path_factory.mktemp("environment")
    venv.create(place, symlinks=os.name != "nt")
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(place)}))
    homes = {Path(find_spec(name).origin).parents[1] for name in ("torch", "pip")}
    # what such a file names is searched, but no .pth in there: an editable installation isn't found
    (packages / "borrowed.pth").write_text("".join(f"{home}\n" for home in homes))
    python = place / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    answer = run(python, "import importlib.util as u; print(bool(u.find_spec('torch')), u.find_spec('shared'))", place)
    assert answer.stdout == "True None\n", answer.stderr
    return python


@pytest.fixture(scope="module")
def target(folder, wheel_name, other_python, tmp_path_factory):
    """A folder with the wheel installed in it."""
    place = tmp_path_factory.mktemp("target")
    command = [other_python, "-m", "pip", "install", "--quiet", "--no-deps", "--target", place, folder / wheel_name]
    subprocess.run(command, env=surroundings(), timeout=SECONDS, check=True)
    return place


@pytest.mark.slow
@pytest.mark.processes
def test_a_notebook_alone_finds_its_data_with_any_python_that_has_the_wheel(bundle, target, other_python, tmp_path):
    first = {cell.id: cell.source for cell in cells(bundle[BOOK.topics["15-03"].file])}
    code = "\n".join(first[name] for name in ("course", "setup", "device", "data"))
    code += "\nimport shared\nprint(shared.__file__)\nprint(shared.load_cifar10('test').source)"
    code += "\nfrom shared.histories import read_history\nprint(len(read_history('transformer_training')['trace']) > 0)"
    answer = run(other_python, code, tmp_path, PYTHONPATH=str(target))
    assert answer.returncode == 0, answer.stderr
    said = answer.stdout.splitlines()
    assert "FashionMNIST: 10,000 train images of the bundled sample, all that is used here" in said
    assert str(target / "shared" / "__init__.py") in said
    assert said[-2:] == ["sample", "True"]


INSPECT = """
import inspect, pickle, traceback
from shared.checks import topic_15_03 as check

source = inspect.getsource(check)
functions = [f for f in vars(check).values() if inspect.isfunction(f) and f.__module__ == check.__name__]
print(len(functions) > 0, all(inspect.getsource(f) in source for f in functions))
print(all(pickle.loads(pickle.dumps(f)) is f for f in functions))
shown = []
for function in functions:
    try:
        function(*[object()] * function.__code__.co_argcount)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        shown += [frame.line for frame in frames if frame.filename == check.__file__]
print(len(shown) > 0, all(line and line in source for line in shown))
print(check.__file__.endswith("topic_15_03.py"))
import shared.checks.nothing
"""


@pytest.mark.slow
@pytest.mark.processes
def test_packed_checks_are_modules_like_others(target, other_python, tmp_path):
    answer = run(other_python, INSPECT, tmp_path, PYTHONPATH=str(target))
    assert answer.stdout.split() == ["True"] * 6, answer.stdout + answer.stderr
    assert answer.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'shared.checks.nothing'"


def first_lines(bundle):
    """The guard as students get it."""
    return next(cell.source for cell in cells(bundle[BOOK.topics["15-03"].file]) if cell.id == "course")


def test_without_the_wheel_the_first_lines_name_kernel_and_cure(bundle, other_python, tmp_path):
    answer = run(other_python, first_lines(bundle), tmp_path)
    said = answer.stderr.splitlines()[-1]
    assert said.startswith(f"ImportError: The kernel's Python, {other_python}, lacks torch or `shared`.")
    assert "VS Code: Select Kernel" in said
    assert "`%pip install -r requirements.txt`" in said


def test_without_torch_nothing_is_installed(bundle, folder, tmp_path):
    venv.create(tmp_path / "bare", symlinks=os.name != "nt")
    python = tmp_path / "bare" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    answer = run(python, first_lines(bundle), folder)
    assert "lacks torch or `shared`" in answer.stderr.splitlines()[-1]
    assert "pip" not in answer.stdout


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("below", ["", "my own"])
def test_the_wheel_beside_a_notebook_is_installed_once(bundle, folder, wheel_name, other_python, tmp_path, below):
    (tmp_path / below).mkdir(exist_ok=True)
    (tmp_path / wheel_name).write_bytes((folder / wheel_name).read_bytes())
    (tmp_path / wheel_name.replace(".post2", ".post1")).write_bytes(b"an older one")
    code = first_lines(bundle) + "\nprint(find_spec('shared').origin)"
    try:
        answer = run(other_python, code, tmp_path / below)
        assert answer.returncode == 0, answer.stdout + answer.stderr
        said, where = answer.stdout.splitlines()
        assert said == f"Installing {Path('..' if below else '', wheel_name)}, which came with this notebook"
        assert Path(where).is_relative_to(other_python.parents[1])
        (tmp_path / wheel_name).unlink()  # now it isn't needed any more
        assert run(other_python, code, tmp_path / below).stdout.splitlines() == [where]
    finally:
        command = [other_python, "-m", "pip", "uninstall", "--quiet", "--yes", "advanced-pytorch-internals"]
        subprocess.run(command, env=surroundings(), timeout=SECONDS, check=True)


@pytest.mark.parametrize("beside", ["", "advanced_pytorch_internals-15.0.0-py3-none-any.whl"])
def test_with_an_address_the_first_lines_fetch_the_course_once(monkeypatch, tmp_path, capsys, beside):
    lines = guard.for_students(guard.GUARD, "https://example.org/course")
    installed, found = [], importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: found(name) if name != "shared" else installed or None
    )
    monkeypatch.setattr(subprocess, "run", lambda command, **_: installed.append(command[-1]))
    monkeypatch.chdir(tmp_path)
    if beside:
        Path(beside).touch()
    for _ in range(2):
        exec(lines, {})
    assert installed == [beside or "git+https://example.org/course"]
    assert (
        capsys.readouterr().out == f"Installing {installed[0]}: the helpers, checks and data samples of this notebook\n"
    )


def test_where_it_is_installed_the_first_lines_do_nothing(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "run", None)
    exec(guard.GUARD, {})
    exec(guard.GUARD, {})


# the command --------------------------------------------------------------------------------------------------------


def git(folder, *arguments):
    settings = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *settings, *arguments], cwd=folder, timeout=60, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path):
    """A small repository with one commit."""
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init")
    (folder / "a file.py").write_text("1")
    git(folder, "add", ".")
    git(folder, "commit", "-m", "first")
    return folder


def test_only_what_is_committed_is_released(repository):
    (repository / "not added.txt").write_text("2")
    assert release.read_commit(repository).files == ("a file.py",)
    assert release.uncommitted(repository) == []
    (repository / "a file.py").write_text("3")
    assert release.uncommitted(repository) == ['"a file.py"']


def test_uncommitted_changes_are_refused(monkeypatch, repository, tmp_path, capsys):
    (repository / "a file.py").write_text("3")
    monkeypatch.setattr(release, "ROOT", repository)
    args = release.argparse.Namespace(output=tmp_path / "dist")
    assert release.main(args) == 1
    assert capsys.readouterr().err == (
        'release: commit these first, so that the release can be made again from its commit:\n  "a file.py"\n'
    )


def test_a_folder_without_a_history_is_named(tmp_path):
    (tmp_path / ".git").mkdir()  # so that no repository around it is found
    with pytest.raises(release.ReleaseError, match="git init && git add --all"):
        release.read_commit(tmp_path)


def test_a_notebook_that_is_not_committed_is_named():
    lesson = finished(BOOK)[0].path
    files = tuple(path for path in COMMIT.files if not path.endswith(lesson.name))
    with pytest.raises(release.ReleaseError, match=f"{re.escape(lesson.name)}: isn't committed"):
        release.student_bundle(ROOT, replace(COMMIT, files=files), BOOK)


@pytest.mark.parametrize("address", ["", "https://example.org/course"])
def test_the_command_says_what_it_wrote(monkeypatch, tmp_path, capsys, address):
    book = replace(BOOK, module=replace(BOOK.module, repository=address))
    monkeypatch.setattr(release.syllabus, "load", lambda: book)
    monkeypatch.setattr(release, "uncommitted", lambda root: [])
    assert release.main(release.argparse.Namespace(output=tmp_path / "dist")) == 0
    said = capsys.readouterr().out
    for kind in ("student", "instructor"):
        path = tmp_path / "dist" / f"module-15-{kind}.zip"
        assert f"{path}  {path.stat().st_size / 1e6:.1f} MB" in said
    assert COMMIT.name in said
    assert "no lock" in " ".join(said.split())
    assert ("`repository` in" in said) == (not address)


def test_the_page_that_students_get_is_one_page(bundle):
    text = bundle["README.md"].decode()
    assert len(text.splitlines()) <= 70
    assert "{" not in text
    versions = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert f"Python {versions.removeprefix('>=')}," in text
