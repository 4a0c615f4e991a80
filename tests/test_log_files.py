"""Log files that are begun, continued and cut back, and their rows."""

import json
import math

import pytest

from shared.lessons.topic_15_10.log_files import LogFiles, row_lines


def test_log_files_are_begun_continued_and_cut_back(tmp_path):
    folder, names = tmp_path / "a" / "b", {"x": "head\n", "y": ""}
    logs = LogFiles(folder, names)
    assert logs.sizes() == {}
    assert not folder.exists()
    logs.write("x", "one\n")
    sizes = logs.sizes()
    assert sizes == {"x": 9, "y": 0}
    logs.write("x", "zwölf\n")
    logs.write("y", "lost\n")
    logs.close()
    logs = LogFiles(folder, names)
    logs.cut(sizes)
    logs.write("x", "two\n")
    logs.close()
    assert [(folder / name).read_text() for name in names] == ["head\none\ntwo\n", ""]
    logs = LogFiles(folder, names)
    logs.cut({})  # nothing had been written when the checkpoint was
    logs.write("y", "new\n")
    logs.close()
    assert [(folder / name).read_text() for name in names] == ["head\n", "new\n"]


def test_a_file_that_is_too_short_is_refused_before_any_is_cut(tmp_path):
    logs = LogFiles(tmp_path, {"x": "", "y": ""})
    logs.write("x", "12345")
    logs.close()
    logs = LogFiles(tmp_path, {"x": "", "y": ""})
    with pytest.raises(ValueError, match="y has 0 bytes, but had 3"):
        logs.cut({"x": 2, "y": 3})
    logs.write("x", "6")  # goes behind what is there
    logs.close()
    assert (tmp_path / "x").read_text() == "123456"


def test_a_missing_file_is_named_and_no_other_stays_open(tmp_path):
    (tmp_path / "x").write_text("12345")
    logs = LogFiles(tmp_path, {"x": "", "z": ""})
    with pytest.raises(FileNotFoundError, match="z"):
        logs.cut({"x": 2, "z": 1})
    assert logs.files == {}
    assert (tmp_path / "x").read_text() == "12345"


def test_a_row_is_json_and_csv_whatever_its_numbers():
    line, cells = row_lines({"step": 3, "loss": math.nan, "lr": 0.1, "x": -math.inf}, ("step", "absent", "x"))
    assert json.loads(line) == {"step": 3, "loss": "nan", "lr": 0.1, "x": "-inf"}
    assert cells == '3,,"-inf"\n'
