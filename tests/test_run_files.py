"""Log files that can be cut back, the line that follows a run, processes that are killed."""

import sys
from types import SimpleNamespace

import pytest

from shared.blame import LaunchError
from shared.killing import kill_here, launch_killed
from shared.live_line import LiveLine
from shared.log_files import LogFiles


def test_log_files_are_begun_continued_and_cut_back(tmp_path):
    folder = tmp_path / "a" / "b"
    logs = LogFiles(folder, ["x", "y"], resumed=False)
    logs.write("x", "one\n")
    sizes = logs.sizes()
    assert sizes == {"x": 4, "y": 0}
    logs.write("x", "zwölf\n")
    logs.write("y", "lost\n")
    logs.close()
    logs = LogFiles(folder, ["x", "y"], resumed=True)
    assert logs.sizes() == {"x": 11, "y": 5}
    logs.cut(sizes)
    logs.write("x", "two\n")
    logs.close()
    assert [(folder / name).read_text() for name in ("x", "y")] == ["one\ntwo\n", ""]
    LogFiles(folder, ["x"], resumed=False).close()
    assert (folder / "x").read_text() == ""


def test_a_file_that_is_too_short_is_refused_before_any_is_cut(tmp_path):
    logs = LogFiles(tmp_path, ["x", "y"], resumed=False)
    logs.write("x", "12345")
    with pytest.raises(ValueError, match="y has 0 bytes, but had 3"):
        logs.cut({"x": 2, "y": 3})
    logs.close()
    assert (tmp_path / "x").read_text() == "12345"
    with pytest.raises(FileNotFoundError):
        LogFiles(tmp_path, ["z"], resumed=True)


def test_a_live_line_in_a_file_is_its_last_state(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "IPython", None)
    line = LiveLine()
    line.show("step 1")
    line.end("epoch 1")
    assert capsys.readouterr().out == "epoch 1\n"


def test_a_live_line_in_a_terminal_writes_over_itself(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "IPython", None)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    line = LiveLine()
    line.show("a long text")
    line.end("short")
    parts = capsys.readouterr().out.split("\r")
    assert [part.rstrip() for part in parts] == ["", "a long text", "short"]
    assert parts[2].endswith("\n")
    assert len(parts[1]) == len(parts[2].rstrip("\n")) == 78


def test_a_live_line_in_a_notebook_updates_one_display(monkeypatch):
    seen = []

    class Handle:
        def update(self, content, raw):
            seen.append(("update", content["text/plain"], raw))

    def display(content, raw, display_id):
        seen.append(("display", content["text/plain"], raw and display_id))
        return Handle()

    ipython = SimpleNamespace(get_ipython=lambda: object(), display=SimpleNamespace(display=display))
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    line = LiveLine()
    line.show("1")
    line.show("2")
    line.end("done")
    line.end("next")
    assert seen == [("display", "1", True), ("update", "2", True), ("update", "done", True), ("display", "next", True)]


def _quick(x):
    return x + 1


def _dies():
    kill_here()
    return "alive"


def _raises():
    raise ValueError("mine")


def _waits(path):
    path.write_text("begun")
    while True:
        pass


for function in (_quick, _dies, _raises, _waits):
    function.__module__ = "__main__"  # so they travel by value


def test_a_process_is_killed_or_was_quicker(tmp_path):
    assert launch_killed(_quick, 20.0, 1) == 2
    assert launch_killed(_dies, 20.0) is None
    assert launch_killed(_waits, 0.3, tmp_path / "it") is None
    assert (tmp_path / "it").read_text() == "begun"
    with pytest.raises(LaunchError, match="mine"):
        launch_killed(_raises, 20.0)
