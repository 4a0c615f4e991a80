"""Whose notebook a file is, on which topic, and what in it is the student's; nothing is executed here."""

import io
import os
import zipfile
from pathlib import Path

import pytest
from handed_in import as_file, code, notebook, place, solutions

from course import collecting, renewing, start_page
from course.collecting import CollectingError, collect
from course.lesson_code import TargetError
from course.skeleton import editions, skeleton
from course.submission import UnreadableError, read_submission

TOPIC, OTHER = "15-07", "15-03"
CELL = "ex-fixed"
NAME = editions()[TOPIC].name
SOLVED = solutions(TOPIC)[CELL]
STUB = next(task.stub for task in skeleton(TOPIC).tasks if task.cell == CELL)
ANSWERED = as_file(notebook(TOPIC, {CELL: SOLVED}))


# --------------------------------------------------------------------------------------------------------------------
# one file


@pytest.mark.parametrize("topic", [TOPIC, OTHER])
def test_a_topic_is_known_by_its_cells_whatever_the_file_is_called(topic):
    found = read_submission(as_file(notebook(topic, solutions(topic))), "hw 14-99.ipynb")
    assert (found.topic, found.answers) == (topic, solutions(topic))
    assert (found.others, found.notes) == ((), ())


def test_without_ids_the_files_name_says_the_topic_and_definitions_which_cell_it_is():
    made = notebook(TOPIC, {CELL: SOLVED})
    for cell in made["cells"]:
        cell["metadata"] = {}
        del cell["id"]
    for name in (NAME, "Übung 15-7 final(2).ipynb"):
        found = read_submission(as_file(made), name)
        assert found.topic == TOPIC
        assert list(found.answers) == [task.cell for task in skeleton(TOPIC).tasks]
        assert (found.answers[CELL], found.others) == (SOLVED, ())
        assert "has lost its id" in found.notes[0]
    with pytest.raises(UnreadableError, match="another notebook"):
        read_submission(as_file(made), "final.ipynb")


@pytest.mark.parametrize("field", ["grade_id", "colab"])
def test_an_id_that_another_tool_kept_will_do(field):
    made = notebook(TOPIC, {CELL: SOLVED})
    for cell in made["cells"]:
        old = cell.pop("id")
        if field == "colab":
            cell["metadata"] = {"id": old}
    assert read_submission(as_file(made)).answers[CELL] == SOLVED


@pytest.mark.parametrize(
    ("first", "second", "is_copy"),
    [(STUB, SOLVED, True), (SOLVED, STUB, True), ("def fixed_bytes(): 1", SOLVED, True), (STUB, SOLVED, False)],
)
def test_of_several_cells_the_last_that_is_no_stub_counts(first, second, is_copy):
    made = notebook(TOPIC, {CELL: first})
    added = {**made["cells"][place(made, CELL)], "source": second} if is_copy else code(second)
    made["cells"].append(added)
    found = read_submission(as_file(made))
    assert found.answers[CELL] == SOLVED
    assert "2 cells could be the answer" in found.notes[0]


def test_what_became_of_other_cells_leaves_the_answers_as_they_are():
    want = read_submission(ANSWERED)
    made = notebook(TOPIC, {CELL: SOLVED})
    made["cells"] = [cell for cell in made["cells"] if not cell["id"].endswith("-check")][::-1]
    assert read_submission(as_file(made)) == want
    made["cells"].append(code("check.fixed_bytes(fixed_bytes)"))
    made["cells"][place(made, "setup")]["source"] += "\nimport bisect"
    made["cells"].append(code("def helper(): pass", id="abc"))
    found = read_submission(b"\xef\xbb\xbf" + as_file(made))
    assert found.answers == want.answers
    ends = {text.splitlines()[-1] for text in found.others}
    assert ends == {"check.fixed_bytes(fixed_bytes)", "import bisect", "def helper(): pass"}


def test_spaces_and_comments_are_no_attempt():
    (task,) = [task for task in skeleton(TOPIC).tasks if task.cell == CELL]
    assert not task.is_attempted_in(task.stub.replace("\n", "  \r\n") + "\n\n")
    assert not task.is_attempted_in("\n# later\n")
    assert task.is_attempted_in(task.stub + "\n1")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b" \n", "empty"),
        (ANSWERED[:-40], "isn't JSON"),
        (b"<<<<<<< HEAD\n" + ANSWERED, r"isn't JSON .*line 1 column 1"),
        (b"[" * 100_000, "isn't JSON"),
        (b"\xe9{}", "isn't JSON"),
        (b'{"worksheets": []}', "no notebook of format 4"),
        (as_file({"cells": [code("print('my own')")]}), "another notebook"),
        (b'{"cells": [null, {}, {"cell_type": "code", "source": [1], "metadata": 4}]}', "another notebook"),
        (b"x" * 30_000_001, "more than 30 MB"),
    ],
)
def test_what_is_no_submission_says_why(content, message):
    with pytest.raises(UnreadableError, match=message):
        read_submission(content, "notes.ipynb")


def test_a_topic_that_is_named_must_exist_and_be_the_notebooks():
    with pytest.raises(TargetError, match="no notebook of topic 15-77"):
        read_submission(ANSWERED, topic="15-77")
    with pytest.raises(UnreadableError, match=f"no answer cell of {OTHER}"):
        read_submission(ANSWERED, topic=OTHER)


# --------------------------------------------------------------------------------------------------------------------
# a folder


def packed(files):
    """A zip file with these files by their paths, a notebook where there is no content."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, ANSWERED if data is None else data)
    return content.getvalue()


def write(folder, files):
    """Files by their paths, a notebook where there is no content."""
    for name, content in files.items():
        path = folder / name
        if name.endswith("/"):
            path.mkdir(parents=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(ANSWERED if content is None else content)


METADATA = """---
submission_11:
  :submitters:
  - :name: Ana Núñez
    :sid: '1'
  - :name: Bo
    :email: bo@school
  :created_at: 2026-01-22 21:14:11.9 Z
  :results: !ruby/object:Result
    a: 1
submission_12:
  :submitters:
  - :name: Bo
    :email: other@school
"""
# what is laid out, who has handed in something, and who nothing
LAYOUTS = {
    "a folder for each student": (
        {f"Jörg Müller/{NAME}": None, "Ada/sub/mine.ipynb": None, "Ben/": b"", "readme.txt": b""},
        ["Ada", "Jörg Müller"],
        ["Ben"],
    ),
    "files": (
        {f"ada_{NAME}": None, "15-07 Ben Ä.ipynb": None, f"{NAME[:-6]}-carla (1).ipynb": None, "report.pdf": b""},
        ["ada", "Ben Ä", "carla"],
        [],
    ),
    "one student's own folder": ({NAME: None, "00_START_HERE.ipynb": b"{}", f"earlier/{NAME}": b""}, ["home"], []),
    "Moodle": (
        {
            f"Ada Lo_11_assignsubmission_file_/{NAME}": None,
            "Ben_12_assignsubmission_file/a/x.ipynb": None,
            f"Ben_13_assignsubmission_file_{NAME}": None,
            "Carl_14_assignsubmission_onlinetext_/onlinetext.html": b"",
        },
        ["Ada Lo", "Ben (12)", "Ben (13)"],
        ["Carl"],
    ),
    "Canvas": (
        {f"adalo_11_12_{NAME}": None, f"benb_LATE_13_14_{NAME[:-6]}-1.ipynb": None},
        ["adalo", "benb"],
        [],
    ),
    "Gradescope": (
        {
            "assignment_7_export/submission_metadata.yml": METADATA.encode(),
            f"assignment_7_export/submission_11/{NAME}": None,
            "assignment_7_export/submission_12/x.ipynb": None,
            "assignment_7_export/submission_13/x.ipynb": None,
            # a student's own table says nothing
            "assignment_7_export/submission_13/submission_metadata.yml": METADATA.replace("_11", "_13").encode(),
        },
        ["Ana Núñez", "Bo (bo@school)", "Bo (other@school)", "submission_13"],
        [],
    ),
    "Gradescope without its table": (
        {"submission_12/x.ipynb": None, "submission_metadata.yml": b"{"},
        ["submission_12"],
        [],
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", ["folder", "zip", "zip in a folder"])
def test_students_are_known_by_how_an_export_is_laid_out(tmp_path, layout, form):
    files, handed_in, others = LAYOUTS[layout]
    source = tmp_path / "home"
    if form == "folder":
        write(source, files)
    elif form == "zip":
        source = tmp_path / "home.zip"
        source.write_bytes(packed(files))
    else:
        write(source, {"home.zip": packed(files), ".hidden/x.ipynb": None})
    found = collect(source)
    assert found.unreadable == []
    assert [student for student, own in found.submissions.items() if set(own) == {TOPIC}] == handed_in
    assert [student for student, own in found.submissions.items() if not own] == others
    if others == ["Carl"]:
        assert found.others["Carl"] == ["Carl_14_assignsubmission_onlinetext_/onlinetext.html"]


def test_a_students_own_zip_file_is_looked_into(tmp_path):
    inner = packed({f"workbook/{NAME}": None, "workbook/00_START_HERE.ipynb": b"{}", "__MACOSX/._x.ipynb": b""})
    by_topic = packed({f"15-07/{NAME}": None, "15-03/b.ipynb": as_file(notebook(OTHER))})
    write(tmp_path, {"Ada/all.zip": inner, "Bo.zip": inner, "carl_1_2_work.zip": packed({"c/a.zip": inner})})
    # nobody hands in for another
    names = ["Ada/a.ipynb", "Ada_11_assignsubmission_file_/a.ipynb", "ada_1_2_a.ipynb", "submission_11/a.ipynb"]
    write(tmp_path, {"Dora.zip": by_topic, "Mallory.zip": packed(dict.fromkeys(names)), f"Eve/{names[1]}": None})
    found = collect(tmp_path)
    topics = {student: sorted(own) for student, own in found.submissions.items()}
    assert topics.pop("Dora") == [OTHER, TOPIC]
    assert topics == {student: [TOPIC] for student in ("Ada", "Bo", "carl", "Eve", "Mallory")}
    assert found.unreadable == []


def test_how_large_a_notebook_may_be_does_not_limit_the_zip_file_around_it(tmp_path, monkeypatch):
    monkeypatch.setattr(collecting, "FILE_SIZE", len(ANSWERED))
    inner = packed({NAME: None, "report.pdf": os.urandom(len(ANSWERED))})
    (tmp_path / "export.zip").write_bytes(packed({"Ada/all.zip": inner}))
    found = collect(tmp_path / "export.zip")
    assert set(found.submissions["Ada"]) == {TOPIC}
    assert found.unreadable == []


def test_several_exports_of_gradescope_lie_side_by_side(tmp_path):
    for number, content in enumerate((ANSWERED, as_file(notebook(OTHER))), 1):
        table = f"submission_1{number}:\n  :submitters:\n  - :name: Ada\n    :sid: '1'\n".encode()
        files = {"submission_metadata.yml": table, f"submission_1{number}/x.ipynb": content}
        files = {f"assignment_{number}_export/{name}": data for name, data in files.items()}
        write(tmp_path / "unpacked", files)
        write(tmp_path / "zipped", {f"assignment_{number}_export.zip": packed(files)})
    for form in ("unpacked", "zipped"):
        found = collect(tmp_path / form)
        assert {student: set(own) for student, own in found.submissions.items()} == {"Ada": {TOPIC, OTHER}}


@pytest.mark.parametrize("name", ["./{}/x.ipynb", "{}\\x.ipynb"])
def test_a_zip_file_may_begin_with_a_point_or_have_the_separators_of_windows(tmp_path, name):
    (tmp_path / "in.zip").write_bytes(packed({name.format(student): None for student in ("Ada", "Bo")}))
    found = collect(tmp_path / "in.zip")
    assert {student: set(own) for student, own in found.submissions.items()} == {"Ada": {TOPIC}, "Bo": {TOPIC}}


def test_a_folder_that_nobody_may_look_into_stops_nobody(tmp_path, monkeypatch):
    write(tmp_path, {"Ada/": b"", "Bo/x.ipynb": None})
    iterdir = Path.iterdir

    def guarded(path):
        if path.name == "Ada":
            raise PermissionError(13, "Permission denied")
        return iterdir(path)

    monkeypatch.setattr(Path, "iterdir", guarded)
    found = collect(tmp_path)
    assert [(one.student, one.problem) for one in found.unreadable] == [("Ada", "Permission denied")]
    assert TOPIC in found.submissions["Bo"]


@pytest.mark.parametrize("is_zip", [False, True])
def test_the_newest_that_can_be_read_counts(tmp_path, is_zip):
    files = {"Ada/b.ipynb": as_file(notebook(TOPIC)), "Ada/a.ipynb": None, f"Ada/c {NAME}": b"{"}
    write(tmp_path, {**files, "Bo/": b""})
    with zipfile.ZipFile(tmp_path / "Cy.zip", "w") as archive:
        for year, (name, content) in enumerate(files.items(), 2001):
            os.utime(tmp_path / name, (1_000_000 * year, 1_000_000 * year))
            info = zipfile.ZipInfo(name.removeprefix("Ada/"), (year, 1, 1, 0, 0, 0))
            archive.writestr(info, ANSWERED if content is None else content)
    found = collect(tmp_path)
    student = "Cy" if is_zip else "Ada"
    one = found.submissions[student][TOPIC]
    assert one.answers[CELL] == SOLVED
    assert one.notes[-1] == f"{student}/a.ipynb is the newest and counts, not {student}/b.ipynb."
    bad = [(one.where, one.topic) for one in found.unreadable if one.student == student]
    assert bad == [(f"{student}/c {NAME}", TOPIC)]


def test_umlauts_are_the_same_in_both_forms_and_whether_a_zip_file_says_so_or_not(tmp_path):
    write(tmp_path, {"Jo\u0308rg/a.ipynb": None, "J\u00f6rg/b.ipynb": as_file(notebook(OTHER))})
    unsaid = packed({"Zoe\u0308 X/a.ipynb": None}).replace("\u0308".encode(), b"\xcc\x88")
    flag = (0x800).to_bytes(2, "little")
    write(tmp_path, {"Zoe.zip": unsaid.replace(b"\x14\x00" + flag, b"\x14\x00\x00\x00")})
    found = collect(tmp_path)
    assert set(found.submissions["J\u00f6rg"]) == {TOPIC, OTHER}
    assert set(found.submissions["Zoe"]) == {TOPIC}
    assert found.unreadable == []


def test_a_zip_file_that_means_harm_is_named_and_does_none(tmp_path, monkeypatch):
    monkeypatch.setattr(collecting, "UNPACKED", 3 * len(ANSWERED))
    link = zipfile.ZipInfo("link.ipynb")
    link.external_attr = 0o120777 << 16
    harm = {
        "climbs": {f"../../Ada/{NAME}": as_file(notebook(TOPIC))},
        "explodes": {"bomb.ipynb": b" " * 40_000_000},
        "goes on": {f"{number}.ipynb": None for number in range(9)},
        "links": {link: "/etc/passwd"},
        "nests": {"deep.zip": packed({"deeper.zip": packed({"x.ipynb": None})})},
    }
    write(tmp_path / "in", {f"{name}.zip": packed(files) for name, files in harm.items()})
    write(tmp_path / "in", {f"Ada/{NAME}": None})
    found = collect(tmp_path / "in")
    assert found.submissions["Ada"][TOPIC].answers[CELL] == SOLVED
    told = {one.student: one.problem for one in found.unreadable}
    assert set(told) == {"explodes", "goes on", "links", "nests"}
    assert "more than 30 MB" in told["explodes"]
    assert "unpacks to more than" in told["goes on"]
    assert "a zip file in a zip file in a zip file" in told["nests"]
    assert {path.name for path in tmp_path.iterdir()} == {"in"}


def test_of_what_is_unpacked_only_what_is_read_just_now_is_on_the_disk(tmp_path, monkeypatch):
    notebooks = packed({f"{number}.ipynb": None for number in range(4)})
    write(tmp_path / "in", {"Ada.zip": packed({f"{number}.zip": notebooks for number in range(3)})})
    on_disk = []

    def read(file):
        scratch = next(path for path in file.path.parents if path.name.startswith("submissions-"))
        on_disk.append(sorted(path.name for path in scratch.rglob("*") if path.is_file()))
        return file

    monkeypatch.setattr(collecting, "_read", read)
    collect(tmp_path / "in")
    assert on_disk == [sorted([f"{inner}.zip", f"{one}.ipynb"]) for inner in range(3) for one in range(4)]


@pytest.mark.parametrize("content", [b"PK\x03\x04 no zip", b"", packed({"a.ipynb": None})[:-30]])
def test_a_damaged_zip_file_is_named_and_stops_nobody(tmp_path, content):
    write(tmp_path, {"Ada.zip": content, "Bo/a.ipynb": None})
    found = collect(tmp_path)
    (bad,) = found.unreadable
    assert (bad.student, bad.where) == ("Ada", "Ada.zip")
    assert bad.problem
    assert TOPIC in found.submissions["Bo"]


def test_a_damaged_file_in_a_zip_file_stops_no_other(tmp_path):
    content = bytearray(packed({"Ada/a.ipynb": None, "Bo/a.ipynb": None}))
    content[200:210] = bytes(10)
    (tmp_path / "in.zip").write_bytes(content)
    found = collect(tmp_path / "in.zip")
    assert [(bad.student, bad.where) for bad in found.unreadable] == [("Ada", "Ada/a.ipynb")]
    assert TOPIC in found.submissions["Bo"]


@pytest.mark.skipif(os.name == "nt", reason="links and pipes")
def test_links_and_pipes_are_not_opened(tmp_path):
    write(tmp_path / "in", {f"Ada/{NAME}": None, "Bo/": b"", "Carl/": b""})
    os.symlink(tmp_path / "in" / "Ada" / NAME, tmp_path / "in" / "Bo" / NAME)
    os.symlink(tmp_path / "in" / "Ada", tmp_path / "in" / "Carl" / "work")
    os.mkfifo(tmp_path / "in" / "Carl" / "x.ipynb")
    found = collect(tmp_path / "in")
    assert [student for student, own in found.submissions.items() if own] == ["Ada"]
    assert [one.where for one in found.unreadable if "link" in one.problem] == [f"Bo/{NAME}", "Carl/work"]


def test_what_is_nothing_to_collect_from_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(CollectingError, match="neither a folder nor a zip"):
        collect(tmp_path / "a.txt")


def test_what_the_workbook_adds_is_no_submission():
    assert {start_page.NAME, renewing.EARLIER} <= collecting.IGNORED
