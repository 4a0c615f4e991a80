"""A file is written whole or not at all."""

import os
import stat

import pytest

from course import files
from course.files import NotWritableError, require_writable, write_whole


def test_text_and_bytes_arrive_as_they_are(tmp_path):
    for content in ("é\r\nx\n", b"\x00\xff\r\n"):
        write_whole(tmp_path / "a", content)
        assert (tmp_path / "a").read_bytes() == (content if isinstance(content, bytes) else content.encode())
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such permissions")
def test_permissions_are_kept(tmp_path):
    path = tmp_path / "a"
    path.write_text("old")
    path.chmod(0o640)
    write_whole(path, "new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_folder_is_made_or_said_to_be_impossible(tmp_path):
    require_writable(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotWritableError, match=r"can't write in .*file: File exists; name another\.$"):
        require_writable(tmp_path / "file", "; name another")


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_what_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, error):
    path = tmp_path / "a"
    path.write_text("old")

    def fail(source, target):
        raise error

    monkeypatch.setattr(files.os, "replace", fail)
    with pytest.raises(type(error)):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
