"""Whose notebook a file is, on which topic, and what in it is the student's; nothing is executed here."""

import calendar
import io
import os
import sys
import time
import zipfile
from unittest.mock import Mock

import pytest
from handed_in import as_file, code, notebook, place, solutions

from course import collecting, renewing, start_page
from course.collecting import collect
from course.lesson_code import TargetError
from course.skeleton import editions, skeleton
from course.submission import UnreadableError, read_submission

TOPIC, OTHER = "15-07", "15-03"
CELL = "ex-fixed"
NAME = editions()[TOPIC].name
SOLVED = solutions(TOPIC)[CELL]
(TASK,) = [task for task in skeleton(TOPIC).tasks if task.cell == CELL]
ANSWERED = as_file(notebook(TOPIC, {CELL: SOLVED}))


@pytest.mark.parametrize("topic", [OTHER, "15-10"])
def test_a_topic_is_known_by_its_cells_whatever_the_file_is_called(topic):
    found = read_submission(as_file(notebook(topic, solutions(topic))), "hw 14-99.ipynb")
    assert (found.topic, found.answers) == (topic, solutions(topic))
    assert (found.others, found.notes) == ((), ())


def test_without_ids_the_files_name_says_the_topic_and_definitions_which_cell_it_is():
    made = notebook(TOPIC, {CELL: SOLVED})
    judged = "check.fixed_bytes.skip()\nfixed_bytes = check.fixed_bytes(fixed_bytes)"
    made["cells"][place(made, f"{CELL}-check")]["source"] = judged
    made["cells"].append(code("def fixed_bytes_plot(): ..."))  # no answer
    for cell in made["cells"]:
        cell["metadata"] = None
        cell.pop("id", None)
    for name in (NAME, "2026-11-28 Übung 15-7 final(2).ipynb"):
        found = read_submission(as_file(made), name)
        assert found.topic == TOPIC
        assert list(found.answers) == [task.cell for task in skeleton(TOPIC).tasks]
        assert (found.answers[CELL], found.others) == (SOLVED, (judged, "def fixed_bytes_plot(): ..."))
        assert "15-07.1: cell" in found.notes[0]
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
    [
        (TASK.stub, SOLVED, True),
        (SOLVED, TASK.stub + "  \r\n\n", True),
        (SOLVED, "\n# later\n", True),
        ("def fixed_bytes(): 1", SOLVED, True),
        (TASK.stub, SOLVED, False),
    ],
)
def test_of_several_cells_the_last_that_is_no_stub_counts(first, second, is_copy):
    made = notebook(TOPIC, {CELL: first})
    added = {**made["cells"][place(made, CELL)], "source": second} if is_copy else code(second)
    made["cells"].append(added)
    found = read_submission(as_file(made))
    assert found.answers[CELL] == SOLVED
    assert "15-07.1: cell" in found.notes[0]


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


@pytest.mark.parametrize("part", ["cell_type", "metadata", "source"])
def test_a_cell_that_has_lost_something_costs_no_answer(part):
    made = notebook(TOPIC, {CELL: SOLVED})
    del made["cells"][place(made, "setup")][part]
    assert read_submission(as_file(made)).answers[CELL] == SOLVED


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"<<<<<<< HEAD\n" + ANSWERED, r"no notebook .*line 1 column 1"),
        (b"[" * 100_000, "no notebook"),
        (as_file({"cells": [code("print('my own')")]}), "another notebook"),
    ],
)
def test_what_is_no_submission_says_why(content, message):
    with pytest.raises(UnreadableError, match=message):
        read_submission(content, "notes.ipynb")
    with pytest.raises(UnreadableError, match=f"no answer cell of {OTHER}"):
        read_submission(ANSWERED, topic=OTHER)


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


def topics_of(students):
    return {name: sorted(student.submissions) for name, student in students.items()}


def problems_of(students):
    return {one.where: one.problem for student in students.values() for one in student.unreadable}


METADATA = """---
submission_11:
  :submitters:
  - :name: Ana Núñez
  - :name: Bo
    :sid: '2'
  :created_at: 2026-01-22 21:14:11.9 Z
  :results: !ruby/object:Result
    a: 1
submission_12:
  :submitters:
  - :name: Bo
    :email: other@school
"""
# what is laid out, who has handed in something, and who nothing but these
LAYOUTS = {
    "a folder for each student": (
        {f"Jörg Müller/{NAME}": None, "Ada/sub/mine.ipynb": None, "Ben/": b"", "readme.txt": b"", "__MACOSX/": b""},
        ["Ada", "Jörg Müller"],
        {"Ben": []},
    ),
    "files": (
        {f"ada_{NAME}": None, "15-07 Ben Ä.ipynb": None, f"{NAME[:-6]}-carla (1).ipynb": None, "report.pdf": b""},
        ["ada", "Ben Ä", "carla"],
        {},
    ),
    "one student's own folder": ({NAME: None, "00_START_HERE.ipynb": b"{}", f"earlier/{NAME}": b""}, ["home"], {}),
    "Moodle": (
        {
            f"Ada Lo_11_assignsubmission_file_/{NAME}": None,
            "Ben_12_assignsubmission_file/a/x.ipynb": None,
            f"Ben_13_assignsubmission_file_{NAME}": None,
            "Carl_14_assignsubmission_onlinetext_/onlinetext.html": b"",
        },
        ["Ada Lo", "Ben (12)", "Ben (13)"],
        {"Carl": ["Carl_14_assignsubmission_onlinetext_/onlinetext.html"]},
    ),
    "Canvas": ({f"adalo_11_12_{NAME}": None, "benb_LATE_13_14_mine-1.ipynb": None}, ["adalo", "benb"], {}),
    "Gradescope": (
        {
            "assignment_7_export/submission_metadata.yml": METADATA.encode(),
            f"assignment_7_export/submission_11/{NAME}": None,
            "assignment_7_export/submission_12/x.ipynb": None,
            "assignment_7_export/submission_13/x.ipynb": None,
            # a student's own table says nothing
            "assignment_7_export/submission_13/submission_metadata.yml": METADATA.replace("_11", "_13").encode(),
        },
        ["Ana Núñez", "Bo (2)", "Bo (other@school)", "submission_13"],
        {},
    ),
    "Gradescope without its table": ({"sub_12/x.ipynb": None, "submission_metadata.yml": b"{"}, ["sub_12"], {}),
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
        write(source, {"home.zip": packed(files), ".hidden/x.ipynb": None, "desktop.ini": b""})
    found = collect(source)
    assert problems_of(found) == {}
    assert [name for name, topics in topics_of(found).items() if topics == [TOPIC]] == handed_in
    assert {name: student.others for name, student in found.items() if not student.submissions} == others


def test_a_students_own_zip_file_is_looked_into(tmp_path, monkeypatch):
    monkeypatch.setattr(collecting, "FILE_SIZE", len(ANSWERED))  # which doesn't limit the zip file around it
    inner = packed({f"workbook/{NAME}": None, "workbook/00_START_HERE.ipynb": b"{}", "__MACOSX/._x.ipynb": b""})
    large = packed({NAME: None, "report.pdf": os.urandom(len(ANSWERED))})
    write(tmp_path, {"Ada/all.zip": inner, "Bo.zip": large, "carl_1_2_work.zip": packed({"c/a.zip": inner})})
    # nobody hands in for another
    names = ["Ada/a.ipynb", "Ada_11_assignsubmission_file_/a.ipynb", "ada_1_2_a.ipynb", "submission_11/a.ipynb"]
    write(tmp_path, {"Mallory.zip": packed(dict.fromkeys(names)), f"Eve/{names[1]}": None})
    found = collect(tmp_path)
    assert topics_of(found) == {name: [TOPIC] for name in ("Ada", "Bo", "carl", "Eve", "Mallory")}
    assert problems_of(found) == {}


def test_several_exports_of_gradescope_lie_side_by_side(tmp_path):
    for number, content in enumerate((ANSWERED, as_file(notebook(OTHER))), 1):
        table = f"submission_1{number}:\n  :submitters:\n  - :name: Ada\n    :sid: '1'\n".encode()
        files = {"submission_metadata.yml": table, f"submission_1{number}/x.ipynb": content}
        files = {f"assignment_{number}_export/{name}": data for name, data in files.items()}
        write(tmp_path / "unpacked", files)
        write(tmp_path / "zipped", {f"assignment_{number}_export.zip": packed(files)})
    for form in ("unpacked", "zipped"):
        assert topics_of(collect(tmp_path / form)) == {"Ada": [OTHER, TOPIC]}


@pytest.mark.parametrize("is_zip", [False, True])
def test_the_newest_that_can_be_read_counts(tmp_path, is_zip):
    files = {"Ada/b.ipynb": as_file(notebook(TOPIC)), "Ada/a.ipynb": None, f"Ada/c {NAME}": b"{"}
    write(tmp_path, {**files, "Bo/": b""})
    with zipfile.ZipFile(tmp_path / "Cy.zip", "w") as archive:
        for year, (name, content) in enumerate(files.items(), 2001):
            os.utime(tmp_path / name, (1_000_000 * year, 1_000_000 * year))
            info = zipfile.ZipInfo(name.removeprefix("Ada/"), (year, 1, 1, 0, 0, 0))
            archive.writestr(info, ANSWERED if content is None else content)
    name = "Cy" if is_zip else "Ada"
    student = collect(tmp_path)[name]
    assert student.submissions[TOPIC].answers[CELL] == SOLVED
    assert student.submissions[TOPIC].notes[-1] == f"{name}/a.ipynb is the newest file on {TOPIC}, and counts."
    assert [(one.where, one.topic) for one in student.unreadable] == [(f"{name}/c {NAME}", TOPIC)]


def test_files_are_dated_by_the_clock_of_zips_which_is_the_local_one(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "localtime", lambda seconds: time.gmtime(seconds + 9 * 3600))  # as in Tokyo
    write(tmp_path, {"Ada/new.ipynb": None})
    os.utime(tmp_path / "Ada/new.ipynb", (calendar.timegm((2026, 6, 1, 4, 0, 0)),) * 2)  # 13:00 there
    with zipfile.ZipFile(tmp_path / "Ada" / "old.zip", "w") as archive:
        archive.writestr(zipfile.ZipInfo("old.ipynb", (2026, 6, 1, 12, 0, 0)), ANSWERED)
    assert collect(tmp_path)["Ada"].submissions[TOPIC].notes[-1].startswith("Ada/new.ipynb is the newest")


def test_a_fault_of_the_course_is_no_students(tmp_path, monkeypatch):
    write(tmp_path, {"Ada/a.ipynb": None})
    monkeypatch.setattr(collecting, "read_submission", Mock(side_effect=TargetError))
    with pytest.raises(TargetError):
        collect(tmp_path)


def test_names_in_a_zip_file_are_the_same_in_all_their_forms(tmp_path):
    """Umlauts of macOS, and whether it says so or not; what begins with a point; the separators of Windows."""
    unsaid = packed({"Zoe\u0308 X/a.ipynb": None, "./J\u00f6rg/b.ipynb": None, "Bo\\x.ipynb": None})
    unsaid = unsaid.replace(b"\x14\x00" + (0x800).to_bytes(2, "little"), b"\x14\x00\x00\x00")
    (tmp_path / "in.zip").write_bytes(unsaid)
    assert topics_of(collect(tmp_path / "in.zip")) == {name: [TOPIC] for name in ("Bo", "J\u00f6rg", "Zo\u00eb X")}


def test_what_is_damaged_or_means_harm_is_named_and_stops_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr(collecting, "ZIP_SIZE", 35_000_000)
    link = zipfile.ZipInfo("link.ipynb")
    link.external_attr = 0o120777 << 16
    harm = {
        "climbs": {f"../../Ada/{NAME}": as_file(notebook(TOPIC))},
        "explodes": {"bomb.ipynb": b" " * 40_000_000, "bomb.zip": b" " * 40_000_000},
        "links": {link: "/etc/passwd"},
        "nests": {"deep.zip": packed({"deeper.zip": packed({"x.ipynb": None})})},
        "half": {f"{NAME}": None, "b.ipynb": as_file(notebook(OTHER))},
    }
    write(tmp_path / "in", {f"{name}.zip": packed(files) for name, files in harm.items()})
    half = bytearray((tmp_path / "in" / "half.zip").read_bytes())
    half[200:210] = bytes(10)
    cut = packed({"a.ipynb": None})[:-9]
    write(tmp_path / "in", {"half.zip": half, "no.zip": b"PK\x03\x04 no", "cut.zip": cut, f"Ada/{NAME}": None})
    found = collect(tmp_path / "in")
    assert found["Ada"].submissions[TOPIC].answers[CELL] == SOLVED
    assert list(found["half"].submissions) == [OTHER]
    told = problems_of(found)
    assert told.keys() - {"explodes/bomb.ipynb", "explodes/bomb.zip"} == {
        "links/link.ipynb", "nests/deep/deeper.zip", f"half/{NAME}", "no.zip", "cut.zip"
    }  # fmt: skip
    assert "more than 30 MB" in told["explodes/bomb.ipynb"]
    assert "more than 35 MB" in told["explodes/bomb.zip"]
    assert "a zip file in a zip file in a zip file" in told["nests/deep/deeper.zip"]
    assert all(told.values())
    assert {path.name for path in tmp_path.iterdir()} == {"in"}


@pytest.mark.skipif(sys.platform != "linux", reason="links, pipes, and a name that is no UTF-8")
def test_links_and_pipes_are_not_opened_and_names_can_be_written(tmp_path):
    write(tmp_path / "in", {f"Ada/{NAME}": None, "Bo/": b"", "Carl/": b""})
    os.mkdir(os.fsencode(tmp_path / "in") + b"/J\xf6rg")
    os.symlink(tmp_path / "in" / "Ada" / NAME, tmp_path / "in" / "Bo" / NAME)
    os.symlink(tmp_path / "in" / "Ada", tmp_path / "in" / "Carl" / "work")
    os.mkfifo(tmp_path / "in" / "Carl" / "x.ipynb")
    found = collect(tmp_path / "in")
    assert topics_of(found) == {"Ada": [TOPIC], "Bo": [], "Carl": [], "J?rg": []}
    assert [where for where, problem in problems_of(found).items() if "link" in problem] == [f"Bo/{NAME}", "Carl/work"]


def test_what_the_workbook_adds_is_no_submission():
    assert {start_page.NAME, renewing.EARLIER} <= collecting.IGNORED
