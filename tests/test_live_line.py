"""A line that changes in place: in a file, in a terminal, in a notebook."""

import sys
from types import SimpleNamespace

from shared.lessons.topic_15_10.live_line import LiveLine


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


def test_a_line_that_changes_often_is_asked_for_five_times_a_second(monkeypatch):
    clock, asked = [0.0], []
    monkeypatch.setattr("shared.lessons.topic_15_10.live_line.time.perf_counter", lambda: clock[0])
    line = LiveLine()
    for tenth in range(20):
        clock[0] = tenth / 10
        line.sometimes(lambda: asked.append(clock[0]) or "text")
    assert 5 <= len(asked) <= 10
