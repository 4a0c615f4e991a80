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
from argparse import Namespace
from base64 import urlsafe_b64encode
from dataclasses import replace
from datetime import UTC, datetime
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
TOPIC = BOOK.topics["15-03"]
ONE_TOPIC = replace(BOOK, topics={"15-03": TOPIC})  # quicker
SECONDS = 240  # the most that a process of these tests may take
# a line of a solution that is also one of the plumbing's, and gives nothing away
COMMON = {("15-10", "buffer = io.BytesIO()")}


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """What the command has written into a folder, and what it said."""
    folder, said = tmp_path_factory.mktemp("dist"), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(release, "uncommitted", lambda root: [])  # else nobody could test while working on something
        patch.setattr(sys, "stdout", said)
        assert release.main(Namespace(output=folder)) == 0
    return folder, said.getvalue()


@pytest.fixture(scope="module")
def bundle(released):
    """The students' files, by name."""
    found = unzipped((released[0] / "module-15-student.zip").read_bytes())
    return {path.removeprefix("module-15-student/"): content for path, content in found.items()}


@pytest.fixture(scope="module")
def wheel_name(bundle):
    return next(name for name in bundle if name.endswith(".whl"))


@pytest.fixture(scope="module")
def in_wheel(bundle, wheel_name):
    """What is in the wheel, by path."""
    return unzipped(bundle[wheel_name])


def unzipped(content):
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def cells(content):
    return nbformat.reads(content.decode(), as_version=4).cells


def test_students_get_their_notebooks_and_instructors_all_that_is_committed(released, bundle, wheel_name):
    folder, said = released
    notebooks = {topic.file for topic in BOOK.topics.values() if not topic.is_draft}
    others = {"00_START_HERE.ipynb", "README.md", "DATA.md", "LICENSE", "requirements.txt", "constraints.txt"}
    assert set(bundle) == notebooks | others | {wheel_name}
    for name in notebooks:
        assert not any(cell.get("outputs") for cell in cells(bundle[name])), name
    page = nbformat.reads(bundle["00_START_HERE.ipynb"].decode(), as_version=4)
    assert page.metadata.kernelspec.name == "python3", "without it JupyterLab asks for a kernel, at the first step"
    for name, path in (("constraints.txt",) * 2, ("LICENSE",) * 2, ("DATA.md", "datasets/README.md")):
        assert bundle[name] == (ROOT / path).read_bytes()

    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    found = unzipped((folder / "module-15-instructor.zip").read_bytes())
    assert found == {f"module-15-instructor/{path}": (ROOT / path).read_bytes() for path in listed.stdout.splitlines()}

    for kind in ("student", "instructor"):
        path = folder / f"module-15-{kind}.zip"
        assert path.stat().st_size < 40_000_000
        assert str(path) in said
    assert COMMIT.name in said


def test_the_same_commit_gives_the_same_bytes_and_programs_stay_programs(monkeypatch):
    first, second = (release.student_bundle(ROOT, COMMIT, ONE_TOPIC) for _ in range(2))
    assert first == second
    files = {".ci/run": b"#!/bin/sh", "Makefile": b"#" * 1000}
    content = release.bundle_zip("a", files, COMMIT)
    assert len(content) < 1000
    monkeypatch.setattr(sys, "platform", "win32")
    assert content == release.bundle_zip("a", dict(reversed(files.items())), COMMIT)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        modes = {entry.filename: oct(entry.external_attr >> 16) for entry in archive.infolist()}
        dates = {entry.date_time for entry in archive.infolist()}
    assert modes == {"a/.ci/run": "0o100755", "a/Makefile": "0o100644"}
    *to_the_minute, seconds = COMMIT.moment.timetuple()[:6]
    assert dates == {(*to_the_minute, seconds // 2 * 2)}  # a zip keeps every other second


def read(name, content):
    if name.endswith(".ipynb"):
        return "\n".join(cell.source for cell in cells(content))
    return content.decode(errors="replace")


def test_no_line_of_a_solution_is_in_the_students_bundle(bundle, in_wheel):
    """Of 20 characters or more, and not shown in a lesson."""
    found, shown = set(), ""
    for lesson in finished(BOOK):
        notebook = read_notebook(lesson.path)[0]
        shown += "\n".join(cell.source for cell in student_edition(notebook).cells)
        for blocks in solutions(notebook).values():
            found.update((lesson.topic, line.strip()) for block in blocks for line in block.splitlines())
    lines = {(topic, line) for topic, line in found - COMMON if len(line) >= 20 and line not in shown}
    assert {topic for topic, _ in lines} == {lesson.topic for lesson in finished(BOOK)}
    text = "\n".join(read(name, content) for name, content in {**bundle, **in_wheel}.items() if "/sample/" not in name)
    assert not {(topic, line) for topic, line in lines if line in text}
    assert BEGIN not in text
    assert END not in text
    # the same search finds some in the checks if these aren't packed
    text = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("shared/checks/topic_*.py"))
    assert {(topic, line) for topic, line in lines if line in text}


def test_the_wheel_has_shared_with_its_data_and_nothing_else(in_wheel):
    (info,) = {path.split("/")[0] for path in in_wheel} - {"shared"}
    assert re.fullmatch(r"advanced_pytorch_internals-1\.0\.0\.post\d{12}\.dist-info", info)
    assert f"post{COMMIT.moment:%Y%m%d%H%M}" in info
    code = {path for path in COMMIT.files if path.startswith("shared/") and path.endswith(".py")}
    topics = {path for path in code if "/checks/topic_" in path}
    assert len(topics) >= 10
    assert not topics & set(in_wheel)
    for path in code - topics:
        assert in_wheel[path] == (ROOT / path).read_bytes()
    for path in topics:
        assert zlib.decompress(in_wheel[path.replace(".py", ".packed")]) == (ROOT / path).read_bytes()
    # what pip makes of the repository's address has the same packages
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert {path.rpartition("/")[0].replace("/", ".") for path in code} <= set(packages)
    for path in (ROOT / "datasets" / "sample").iterdir():
        assert in_wheel[f"shared/data/sample/{path.name}"] == path.read_bytes()
    # provenance and licences travel along
    assert "Zalando" in in_wheel[f"{info}/licenses/datasets/README.md"].decode()
    assert "shared/recordings/LICENSE.transformer" in in_wheel

    rows = {name: rest for name, *rest in csv.reader(in_wheel[f"{info}/RECORD"].decode().splitlines())}
    assert rows.pop(f"{info}/RECORD") == ["", ""]
    for name, (digest, size) in rows.items():
        expected = urlsafe_b64encode(sha256(in_wheel[name]).digest()).decode().rstrip("=")
        assert (digest, size) == (f"sha256={expected}", str(len(in_wheel[name])))
    assert len(rows) == len(in_wheel) - 1


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
    (path,) = (path for path in in_wheel if path.endswith("/METADATA"))
    asked = re.findall("^Requires-Dist: (.*)$", in_wheel[path].decode(), re.MULTILINE)
    versions = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert f"\nRequires-Python: {versions}\n" in in_wheel[path].decode()
    assert {re.match("[a-z]+", line)[0] for line in asked} == {owners[top][0].lower() for top in tops}
    assert set(asked) <= set(requirements(ROOT))
    first, *listed, last = bundle["requirements.txt"].decode().splitlines()
    assert [re.match("[a-z]+", line)[0] for line in listed] == list(release.FOR_STUDENTS)
    assert first == "-c constraints.txt"
    assert last.removeprefix("./") in bundle


def test_every_link_leads_to_a_file_of_the_bundle_and_lessons_link_to_all_that_is_there(bundle):
    texts = {"README.md": bundle["README.md"].decode()}
    for name in bundle:
        if name.endswith(".ipynb"):
            texts[name] = "\n".join(cell.source for cell in cells(bundle[name]) if cell.cell_type == "markdown")
    for name, text in texts.items():
        text = re.sub(r"`[^`\n]*`", "", text)  # `self[i](x)` is no link
        for link in re.findall(r"\]\(([^()\s:#]+)(?:#[^()\s]*)?\)", text):
            assert link in bundle, f"{name} links to {link}"
    link = re.compile(r"\]\(([^()\s:]+\.ipynb)")
    for lesson in finished(BOOK):
        ours = [name for name in link.findall(lesson.path.read_text("utf-8")) if name in bundle]
        assert link.findall(bundle[lesson.path.name].decode()) == ours, lesson.label


@pytest.mark.parametrize("address", ["https://example.org/course", ""])
def test_the_address_is_that_of_the_syllabus_or_not_missed(address):
    bundle = release.student_bundle(ROOT, COMMIT, replace(ONE_TOPIC, module=replace(BOOK.module, repository=address)))
    page = bundle["README.md"].decode()
    assert (address or "ask whoever gave you this folder") in page
    assert len(page.splitlines()) <= 70
    assert "{" not in page
    versions = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert f"Python {versions.removeprefix('>=')}," in page
    for name in (TOPIC.file, "00_START_HERE.ipynb"):
        text = "\n".join(cell.source for cell in cells(bundle[name]))
        assert set(re.findall(r"\]\(([^()\s#]+\.ipynb)", text)) <= {TOPIC.file}, "a topic that isn't in the bundle"
        assert "make lab" not in text
        (first,) = (cell.source for cell in cells(bundle[name]) if "find_spec" in cell.source[:400])
        assert f"(get it {f'from {address}' if address else 'where you got this notebook'})" in first


def run(python, code, folder):
    """Run code where neither our `shared` nor a network is found. Returns the lines that were printed, and stderr."""
    ours = ("PYTHONPATH", "PIP_", "COURSE_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    env |= {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "MPLBACKEND": "agg", "COURSE_DATA": "sample"}
    done = subprocess.run(
        [python, "-c", code], cwd=folder, env=env, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    return done.stdout.splitlines(), done.stderr


def new_python(place, borrowed=()):
    """A Python of its own that finds the packages in folders that it borrows, and has room for others."""
    venv.create(place, symlinks=os.name != "nt")
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(place)}))
    # what such a file names is searched, but no .pth in there: an editable installation isn't found
    (packages / "borrowed.pth").write_text("".join(f"{folder}\n" for folder in borrowed))
    return place / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


INSPECT = """
import inspect, pickle
import shared
from shared.checks import topic_15_03 as check
from shared.histories import read_history

print(shared.__file__, shared.load_cifar10('test').source, len(read_history('transformer_training')['trace']) > 0)
source = inspect.getsource(check)
functions = [f for f in vars(check).values() if inspect.isfunction(f) and f.__module__ == check.__name__]
print(len(functions) > 0, all(inspect.getsource(f) in source for f in functions))
print(all(pickle.loads(pickle.dumps(f)) is f for f in functions))
import shared.checks.nothing
"""


@pytest.mark.slow
@pytest.mark.processes
def test_a_notebook_and_the_wheel_are_enough_where_torch_is(bundle, wheel_name, tmp_path):
    """The first lines name what is missing, or install the wheel once; then data and checks are there."""
    pytest.importorskip("pip")
    first = {cell.id: cell.source for cell in cells(bundle[TOPIC.file])}
    python = new_python(tmp_path / "with torch", {Path(find_spec(name).origin).parents[1] for name in ("torch", "pip")})
    folder = tmp_path / "course"
    folder.mkdir()

    _, error = run(python, first["course"], folder)
    said = error.splitlines()[-1]
    assert said.startswith(f"ImportError: The kernel's Python, {python}, lacks torch or `shared`.")
    assert "VS Code: Select Kernel" in said
    assert "`%pip install -r requirements.txt`" in said

    (folder / wheel_name).write_bytes(bundle[wheel_name])
    (folder / wheel_name.replace(".post2", ".post1")).write_bytes(b"an older one")
    lines, error = run(new_python(tmp_path / "bare"), first["course"], folder)
    assert "lacks torch or `shared`" in error.splitlines()[-1]
    assert lines == [], "without torch nothing is installed"

    show = "\nprint(find_spec('shared').origin)"
    lines, error = run(python, first["course"] + show, folder)
    assert lines[:1] == [f"Installing {wheel_name}, which came with this notebook"], error
    assert Path(lines[1]).is_relative_to(tmp_path / "with torch")
    (folder / wheel_name).unlink()  # now it isn't needed any more
    code = "\n".join(first[name] for name in ("course", "setup", "device", "data"))
    said, error = run(python, code + INSPECT, folder)
    assert error.splitlines()[-1] == "ModuleNotFoundError: No module named 'shared.checks.nothing'"
    assert "FashionMNIST: 10,000 train images of the bundled sample, all that is used here" in said
    assert said[-3:] == [f"{lines[1]} sample True", "True True", "True"]


WHEEL = "advanced_pytorch_internals-15.0.0-py3-none-any.whl"


@pytest.mark.parametrize(
    ("address", "beside", "expected"),
    [("https://example.org/course", "", "git+https://example.org/course"), ("https://example.org/course", WHEEL, WHEEL)]
    + [("", place + WHEEL, place + WHEEL) for place in ("", "../")],
)
def test_the_first_lines_install_the_course_once(monkeypatch, tmp_path, capsys, address, beside, expected):
    """The wheel in the notebook's folder or above, else what is at the address."""
    lines = guard.for_students(guard.GUARD, address)
    installed, found = [], importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: found(name) if name != "shared" else installed or None
    )
    monkeypatch.setattr(subprocess, "run", lambda command, **_: installed.append(command[-1]))
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    if beside:
        Path(beside).touch()
        Path(beside.replace("15.0.0", "14.0.0")).touch()  # an older one
    for _ in range(2):
        exec(lines, {})
    assert installed == [expected]
    assert capsys.readouterr().out.startswith(f"Installing {expected}")


def git(folder, *arguments):
    settings = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    dates = {"GIT_AUTHOR_DATE": "2026-01-01T12:00:00+0000", "GIT_COMMITTER_DATE": "2026-02-02T23:30:00-0100"}
    command = ["git", *settings, *arguments]
    subprocess.run(command, cwd=folder, env={**os.environ, **dates}, timeout=60, check=True, capture_output=True)


def test_only_what_is_committed_is_released(monkeypatch, tmp_path, capsys):
    repository = tmp_path / "repository"
    (repository / ".git").mkdir(parents=True)  # so that no repository around it is found
    with pytest.raises(release.ReleaseError, match="git init && git add --all"):
        release.read_commit(repository)
    (repository / ".git").rmdir()
    git(repository, "init")
    (repository / "a file.py").write_text("1")
    (repository / "Übung.py").touch()
    git(repository, "add", ".")
    git(repository, "commit", "-m", "first")
    (repository / "not added.txt").write_text("2")
    commit = release.read_commit(repository)
    assert commit.files == ("a file.py", "Übung.py")
    assert commit.moment == datetime(2026, 2, 3, 0, 30, tzinfo=UTC)
    assert release.uncommitted(repository) == []

    (repository / "a file.py").write_text("3")
    monkeypatch.setattr(release, "ROOT", repository)
    assert release.main(Namespace(output=tmp_path / "dist")) == 1
    assert capsys.readouterr().err == (
        'release: commit these first, so that the release can be made again from its commit:\n  "a file.py"\n'
    )
    assert list((tmp_path / "dist").iterdir()) == []
    git(repository, "add", "--update")
    assert len(release.uncommitted(repository)) == 1, "what is staged isn't committed"
    monkeypatch.setenv("PATH", "")
    with pytest.raises(release.ReleaseError, match="git"):
        release.read_commit(repository)


def test_a_notebook_that_cannot_be_released_is_named(monkeypatch):
    files = tuple(path for path in COMMIT.files if not path.endswith(TOPIC.file))
    with pytest.raises(release.ReleaseError, match=f"{re.escape(TOPIC.file)}: isn't committed"):
        release.student_bundle(ROOT, replace(COMMIT, files=files), ONE_TOPIC)
    notebook, digest = read_notebook(TOPIC.path)
    notebook.cells[0].source = BEGIN
    monkeypatch.setattr(release, "read_notebook", lambda path: (notebook, digest))
    with pytest.raises(release.ReleaseError, match=f"{re.escape(TOPIC.file)}: cell '{notebook.cells[0].id}'"):
        release.student_bundle(ROOT, COMMIT, ONE_TOPIC)
    monkeypatch.setattr(release, "read_notebook", lambda path: read_notebook(ROOT / "LICENSE"))
    with pytest.raises(release.ReleaseError, match=f"{re.escape(TOPIC.file)}: not JSON"):
        release.student_bundle(ROOT, COMMIT, ONE_TOPIC)
