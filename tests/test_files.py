"""A file is written whole or not at all."""

import os
import stat

import pytest

from course import files
from course.files import NotWritableError, require_writable, write_whole


@pytest.mark.parametrize("content", ["é\r\nx\n", b"\x00\xff\r\n"])
def test_a_file_is_replaced_as_a_whole_and_keeps_its_permissions(tmp_path, monkeypatch, content):
    path = tmp_path / "a"
    path.write_text("old")
    path.chmod(0o640)
    write_whole(path, content)
    assert path.read_bytes() == (content if isinstance(content, bytes) else content.encode())
    assert os.name == "nt" or stat.S_IMODE(path.stat().st_mode) == 0o640

    def interrupted(source, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(files.os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, "new")
    assert path.read_bytes() != b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_is_made_or_said_to_be_impossible(tmp_path):
    require_writable(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotWritableError, match=r"can't write in .*file: File exists; name another\.$"):
        require_writable(tmp_path / "file", "; name another")
