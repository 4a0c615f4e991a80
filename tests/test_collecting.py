"""Whose notebook a file is, on which topic, and what in it is the student's; nothing is executed here."""

import io
import os
import zipfile

import handed_in
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
ANSWERED = as_file(notebook(TOPIC, {CELL: SOLVED}))


def answer_of(content, cell=CELL, topic=TOPIC):
    """The answer that would be graded; None if there is none."""
    found = read_submission(content, topic=topic)
    return found.answers.get(cell)


# --------------------------------------------------------------------------------------------------------------------
# one file


@pytest.mark.parametrize("topic", list(editions()))
def test_a_topic_is_known_by_its_cells_whatever_the_file_is_called(topic):
    found = read_submission(as_file(notebook(topic, solutions(topic))), "hw 14-99.ipynb")
    assert found.topic == topic
    assert found.answers == solutions(topic)
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
    with pytest.raises(UnreadableError, match="another notebook"):
        read_submission(as_file(made), "final.ipynb")


@pytest.mark.parametrize("field", ["grade_id", "colab"])
def test_an_id_that_another_tool_kept_will_do(field):
    made = notebook(TOPIC, {CELL: SOLVED})
    for cell in made["cells"]:
        old = cell.pop("id")
        if field == "colab":
            cell["metadata"] = {"id": old}
    assert answer_of(as_file(made)) == SOLVED


def test_of_several_cells_the_last_that_is_no_stub_counts():
    stub = next(task.stub for task in skeleton(TOPIC).tasks if task.cell == CELL)
    for first, second in ((stub, SOLVED), (SOLVED, stub), ("def fixed_bytes(): 1", SOLVED)):
        made = notebook(TOPIC, {CELL: first})
        made["cells"].append({**made["cells"][place(made, CELL)], "source": second})
        assert answer_of(as_file(made)) == SOLVED
        assert "2 cells could be the answer" in read_submission(as_file(made)).notes[0]
    made = notebook(TOPIC)
    made["cells"].append(code(SOLVED))  # beside the untouched answer cell
    assert answer_of(as_file(made)) == SOLVED


def test_what_became_of_other_cells_leaves_the_answers_as_they_are():
    want = read_submission(ANSWERED)
    made = notebook(TOPIC, {CELL: SOLVED})
    made["cells"] = [cell for cell in made["cells"] if not cell["id"].endswith("-check")]
    assert read_submission(as_file(made)) == want
    made["cells"].reverse()
    assert read_submission(as_file(made)) == want
    made = notebook(TOPIC, {CELL: SOLVED})
    made["cells"] += [code("check.fixed_bytes(fixed_bytes)"), made["cells"][place(made, f"{CELL}-check")]]
    assert read_submission(as_file(made)).answers == want.answers


def test_added_and_changed_cells_are_told_from_the_lessons():
    made = notebook(TOPIC, {CELL: SOLVED})
    made["cells"][place(made, "setup")]["source"] += "\nimport bisect"
    made["cells"].insert(place(made, CELL), code("def helper(): pass", id="abc"))
    for cell in made["cells"]:
        if "-check" in cell.get("id", "") or cell.get("id") == "device":
            del cell["id"]
    changed, added = read_submission(as_file(made)).others
    assert changed.endswith("import bisect")
    assert added == "def helper(): pass"


def test_spaces_at_ends_of_lines_are_no_attempt():
    (task,) = [task for task in skeleton(TOPIC).tasks if task.cell == CELL]
    assert not task.is_attempted_in(task.stub.replace("\n", "  \r\n") + "\n\n")
    assert not task.is_attempted_in("\n# later\n")
    assert task.is_attempted_in(task.stub + "\n1")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b" \n", "empty"),
        (ANSWERED[:-40], "isn't JSON"),
        (b"<<<<<<< HEAD\n" + ANSWERED, r"isn't JSON \(line 1, column 1"),
        (b"[" * 100_000, "can't be read"),
        (b"\xff\xfe{}", "UTF-8"),
        (b"[1]", "no notebook"),
        (b'{"cells": 3}', "no notebook"),
        (b'{"worksheets": []}', "format 3"),
        (b'{"cells": [], "x": ' + b"1" * 10_000 + b"}", "can't be read"),
        (as_file({"cells": [code("print('my own')")]}), "another notebook"),
        (
            b'{"cells": [null, 3, {}, {"cell_type": "code"}, {"cell_type": "code", "source": [1], "metadata": 4}]}',
            "ano",
        ),
        (b" " * 30_000_001, "empty"),
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


def test_half_a_character_and_a_byte_order_mark_do_no_harm():
    made = as_file(notebook(TOPIC, {CELL: "x = 'HALF'"})).replace(b"HALF", rb"\ud800")
    assert answer_of(b"\xef\xbb\xbf" + made) == "x = '?'"


# --------------------------------------------------------------------------------------------------------------------
# a folder


def write(folder, files):
    """Files by their paths, a notebook where there is no content; or a zip file's content if there is no folder."""
    packed = io.BytesIO()
    archive = None if folder else zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED)
    for name, content in files.items():
        content = ANSWERED if content is None else content
        if archive:
            archive.writestr(name, content)
        elif name.endswith("/"):
            (folder / name).mkdir(parents=True)
        else:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
    if archive:
        archive.close()
    return packed.getvalue()


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
LAYOUTS = {
    "a folder for each student": (
        {f"Jörg Müller/{NAME}": None, "Ada/sub/mine.ipynb": None, "Ben/": b""},
        ["Ada", "Ben", "Jörg Müller"],
    ),
    "files": (
        {f"ada_{NAME}": None, "15-07 Ben Ä.ipynb": None, f"{NAME[:-6]}-carla (1).ipynb": None, "report.pdf": b""},
        ["ada", "Ben Ä", "carla"],
    ),
    "one student's own folder": ({NAME: None, "00_START_HERE.ipynb": b"{}", f"earlier/{NAME}": b""}, ["home"]),
    "Moodle": (
        {
            f"Ada Lo_11_assignsubmission_file_/{NAME}": None,
            "Ben_12_assignsubmission_file/a/x.ipynb": None,
            f"Ben_13_assignsubmission_file_{NAME}": None,
            "Carl_14_assignsubmission_onlinetext_/onlinetext.html": b"",
        },
        ["Ada Lo", "Ben (12)", "Ben (13)", "Carl"],
    ),
    "Canvas": (
        {f"adalo_11_12_{NAME}": None, f"benb_LATE_13_14_{NAME[:-6]}-1.ipynb": None},
        ["adalo", "benb"],
    ),
    "Gradescope": (
        {
            "assignment_7_export/submission_metadata.yml": METADATA.encode(),
            f"assignment_7_export/submission_11/{NAME}": None,
            "assignment_7_export/submission_12/x.ipynb": None,
            "assignment_7_export/submission_13/x.ipynb": None,
        },
        ["Ana Núñez", "Bo (bo@school)", "Bo (other@school)", "submission_13"],
    ),
    "Gradescope without its table": (
        {"submission_12/x.ipynb": None, "submission_metadata.yml": b"{"},
        ["submission_12"],
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("packed", ["folder", "zip", "zip in a folder"])
def test_students_are_known_by_how_an_export_is_laid_out(tmp_path, layout, packed):
    files, students = LAYOUTS[layout]
    source = tmp_path / "home"
    if packed == "folder":
        write(source, files)
    elif packed == "zip":
        source = tmp_path / "home.zip"
        source.write_bytes(write(None, files))
    else:
        write(source, {"home.zip": write(None, files), ".hidden/x.ipynb": None})
    found = collect(source)
    assert found.students == students
    assert found.unreadable == []
    have = {student for student, topic in found.handed_in if topic == TOPIC}
    assert set(students) - have <= {"Ben", "Carl"}


def test_a_students_own_zip_file_is_looked_into(tmp_path):
    inner = write(None, {f"workbook/{NAME}": None, "workbook/00_START_HERE.ipynb": b"{}", "__MACOSX/._x.ipynb": b""})
    by_topic = write(None, {f"15-07/{NAME}": None, "15-03/b.ipynb": as_file(notebook(OTHER))})
    files = {"Ada/all.zip": inner, "Bo.zip": inner, "carl_1_2_work.zip": write(None, {"c/a.zip": inner})}
    write(tmp_path, {**files, "Dora.zip": by_topic})
    found = collect(tmp_path)
    topics = [("Ada", TOPIC), ("Bo", TOPIC), ("carl", TOPIC), ("Dora", TOPIC), ("Dora", OTHER)]
    assert sorted(found.handed_in) == sorted(topics)
    assert found.unreadable == []


def test_nobody_hands_in_for_another(tmp_path):
    names = ["Ada/a.ipynb", "Ada_11_assignsubmission_file_/a.ipynb", "ada_1_2_a.ipynb", "submission_11/a.ipynb"]
    write(tmp_path, {"Ada/a.ipynb": None, "Mallory.zip": write(None, dict.fromkeys(names)), f"Eve/{names[1]}": None})
    assert {student for student, _ in collect(tmp_path).handed_in} == {"Ada", "Mallory", "Eve"}


def test_only_the_exports_own_table_says_whose_a_submission_is(tmp_path):
    files = {"submission_11/submission_metadata.yml": METADATA.encode(), "submission_11/a.ipynb": None}
    write(tmp_path, {**files, "submission_12/a.ipynb": None})
    assert collect(tmp_path).students == ["submission_11", "submission_12"]


def test_the_newest_that_can_be_read_counts(tmp_path):
    files = {"Ada/a.ipynb": None, "Ada/b.ipynb": as_file(notebook(TOPIC)), f"Ada/c {NAME}": b"{"}
    write(tmp_path, files)
    for age, name in enumerate(["Ada/b.ipynb", "Ada/a.ipynb", f"Ada/c {NAME}"]):
        os.utime(tmp_path / name, (1_000_000 + age, 1_000_000 + age))
    found = collect(tmp_path)
    one = found.handed_in["Ada", TOPIC]
    assert (one.where, one.notes) == ("Ada/a.ipynb", ("Ada/a.ipynb is the newest and counts, not Ada/b.ipynb.",))
    assert [(bad.where, bad.topic) for bad in found.unreadable] == [(f"Ada/c {NAME}", TOPIC)]


def test_umlauts_are_the_same_in_both_forms(tmp_path):
    write(tmp_path, {"Jo\u0308rg/a.ipynb": None, "J\u00f6rg/b.ipynb": as_file(notebook(OTHER))})
    assert set(collect(tmp_path).handed_in) == {("J\u00f6rg", TOPIC), ("J\u00f6rg", OTHER)}


def test_a_zip_file_that_means_harm_is_named_and_does_none(tmp_path):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"../../Ada/{NAME}", ANSWERED)
        archive.writestr("/etc/x.ipynb", ANSWERED)
        archive.writestr("..\\x.ipynb", ANSWERED)
        archive.writestr("bomb.ipynb", b" " * 40_000_000)
        link = zipfile.ZipInfo("link.ipynb")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, "/etc/passwd")
        archive.writestr("deep.zip", write(None, {"deeper.zip": write(None, {"x.ipynb": None})}))
    write(tmp_path / "in", {"Mallory.zip": packed.getvalue(), f"Ada/{NAME}": None})
    found = collect(tmp_path / "in")
    assert set(found.handed_in) == {("Ada", TOPIC)}
    assert {one.student for one in found.unreadable} == {"Mallory"}
    told = "\n".join(one.problem for one in found.unreadable)
    assert told.count("leads out of its folder") == 3
    assert "more than 30 MB" in told
    assert "it is a link" in told
    assert "a zip file in a zip file in a zip file" in told
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_zip_file_that_unpacks_to_too_much_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(collecting, "ZIP_SIZE", 3 * len(ANSWERED))
    write(tmp_path, {"Ada.zip": write(None, {f"{number}.ipynb": None for number in range(9)}), "Bo/": b""})
    found = collect(tmp_path)
    assert "unpacks to more than" in found.unreadable[0].problem
    assert ("Ada", TOPIC) in found.handed_in


def test_only_a_zip_file_in_another_has_a_limit_of_its_own(tmp_path, monkeypatch):
    """A whole workbook may be large; what is unpacked into memory must not be."""
    monkeypatch.setattr(collecting, "INNER_ZIP_SIZE", 10)
    packed = write(None, {NAME: None})
    write(tmp_path, {"Ada.zip": packed, "Bo.zip": write(None, {"all.zip": packed})})
    found = collect(tmp_path)
    assert set(found.handed_in) == {("Ada", TOPIC)}
    assert [(bad.student, "more than" in bad.problem) for bad in found.unreadable] == [("Bo", True)]


@pytest.mark.parametrize("content", [b"PK\x03\x04 no zip", b"", write(None, {"a.ipynb": None})[:-30]])
def test_a_damaged_zip_file_is_named(tmp_path, content):
    write(tmp_path, {"Ada.zip": content, "Bo/": b""})
    (bad,) = collect(tmp_path).unreadable
    assert (bad.student, bad.where) == ("Ada", "Ada.zip")
    assert bad.problem


@pytest.mark.skipif(os.name == "nt", reason="links and pipes")
def test_links_and_pipes_are_not_opened(tmp_path):
    write(tmp_path / "in", {f"Ada/{NAME}": None, "Bo/": b"", "Carl/": b""})
    os.symlink(tmp_path / "in" / "Ada" / NAME, tmp_path / "in" / "Bo" / NAME)
    os.symlink(tmp_path / "in" / "Ada", tmp_path / "in" / "Carl" / "work")
    os.mkfifo(tmp_path / "in" / "Carl" / "x.ipynb")
    found = collect(tmp_path / "in")
    assert set(found.handed_in) == {("Ada", TOPIC)}
    told = {one.where: one.problem for one in found.unreadable}
    assert "link" in told[f"Bo/{NAME}"]
    assert "link" in told["Carl/work"]
    assert "no ordinary file" in told["Carl/x.ipynb"]


def test_other_files_are_mentioned(tmp_path):
    write(tmp_path, {"Ada/report.pdf": b"", "readme.txt": b""})
    found = collect(tmp_path)
    assert (found.students, dict(found.others)) == (["Ada"], {"Ada": ["Ada/report.pdf"]})


def test_what_is_nothing_to_collect_from_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(CollectingError, match="neither a folder nor a zip"):
        collect(tmp_path / "a.txt")
    with pytest.raises(CollectingError, match="not there"):
        collect(tmp_path / "b")


def test_what_the_workbook_adds_is_no_submission():
    assert {start_page.NAME, renewing.EARLIER} <= collecting._IGNORED
    assert handed_in.place(notebook(TOPIC), "setup")
