"""A file is written whole or not at all."""

import os
import stat

import pytest

from course import files
from course.files import NotWritableError, require_writable, write_whole


def test_a_file_is_replaced_as_a_whole_and_keeps_its_permissions(tmp_path, monkeypatch):
    path = tmp_path / "a"
    path.write_text("old")
    path.chmod(0o640)
    for content, written in (("é\r\nx\n", "é\r\nx\n".encode()), (b"\x00\xff\r\n", b"\x00\xff\r\n")):
        write_whole(path, content)
        assert path.read_bytes() == written
    assert os.name == "nt" or stat.S_IMODE(path.stat().st_mode) == 0o640

    def interrupted(source, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(files.os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, "new")
    assert path.read_bytes() == b"\x00\xff\r\n"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_is_made_and_tried_before_any_work(tmp_path, monkeypatch):
    require_writable(tmp_path / "new" / "deep")
    assert list((tmp_path / "new" / "deep").iterdir()) == []
    (tmp_path / "a").write_text("")
    with pytest.raises(NotWritableError, match=r"can't write in .*a: File exists; name another\.$"):
        require_writable(tmp_path / "a", "; name another")

    def full(**_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.tempfile, "TemporaryFile", full)
    with pytest.raises(NotWritableError, match="No space left"):
        require_writable(tmp_path)
