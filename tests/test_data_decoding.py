"""Decoding: every file format against an independent reader, and every kind of damage."""

import gzip
import pickle
import shutil
import struct

import numpy as np
import pytest
from tiny_data import (
    CIFAR_FOLDER,
    CIFAR_PACKAGE,
    CIFAR_TAR,
    batch_files,
    cifar_package,
    cifar_tar,
    flip_bit,
    gz_files,
    idx_files,
    npy_files,
    python2_pickle,
    tar_gz,
    tiny_cifar,
    tiny_fashion,
    truncate,
    write_files,
)

from shared.data import decoding
from shared.data.arrays import SPLITS, DamagedFile, DataError
from shared.data.decoding import read_sample, read_split, sample_paths


def same(found, expected):
    return np.array_equal(found.images, expected.images) and np.array_equal(found.labels, expected.labels)


@pytest.mark.parametrize(
    ("make", "below", "files"),
    [
        (tiny_fashion, "FashionMNIST/raw", idx_files),
        (tiny_fashion, "FashionMNIST/raw", gz_files),
        (tiny_fashion, ".", idx_files),
        (tiny_fashion, ".", gz_files),
        (tiny_cifar, "cifar-10-npy", npy_files),
        (tiny_cifar, CIFAR_FOLDER, batch_files),
        (tiny_cifar, ".", lambda splits: {CIFAR_TAR: cifar_tar(splits)}),
        (tiny_cifar, ".", lambda splits: {CIFAR_PACKAGE: cifar_package(splits)}),
    ],
)
def test_every_format_gives_the_same_arrays_and_its_damage_is_named(tmp_path, make, below, files):
    spec, splits = make(tmp_path)
    root = tmp_path / "a folder called.gz"
    with pytest.raises(FileNotFoundError, match=f"no {spec.name} test files in "):
        read_split(spec, root, "test", archives=True)
    folder, content = write_files(root / below, files(splits)), files(splits)
    for split in SPLITS:
        assert same(read_split(spec, root, split, archives=True), splits[split])
        if len(content) == 1:
            with pytest.raises(FileNotFoundError):
                read_split(spec, root, split)
    for number, damage in ((0, truncate), (0, flip_bit), (1, truncate)):
        write_files(folder, content)
        path = folder / list(content)[number % len(content)]
        damage(path)
        named = folder.name if (below, damage) == (CIFAR_FOLDER, flip_bit) else path.name
        with pytest.raises(DamagedFile, match=f"{named} is damaged: "):
            read_split(spec, root, "train", archives=True)
    assert {path.name for path in folder.iterdir()} == set(content)  # nothing was unpacked to disk


def test_files_are_read_as_torchvision_reads_them(tmp_path):
    import torchvision  # takes seconds

    class TinyCifar(torchvision.datasets.CIFAR10):
        train_list = [[f"data_batch_{number}", None] for number in range(1, 6)]  # noqa: RUF012
        test_list = [["test_batch", None]]  # noqa: RUF012
        _load_meta = dict  # the names of the classes

    fashion, fashion_splits = tiny_fashion(tmp_path)
    cifar, cifar_splits = tiny_cifar(tmp_path)
    write_files(tmp_path / "FashionMNIST" / "raw", idx_files(fashion_splits))
    write_files(tmp_path / CIFAR_FOLDER, batch_files(cifar_splits))
    for spec, reader in ((fashion, torchvision.datasets.FashionMNIST), (cifar, TinyCifar)):
        for split in SPLITS:
            ours, theirs = read_split(spec, tmp_path, split), reader(tmp_path, train=split == "train")
            assert np.array_equal(ours.images, np.asarray(theirs.data))
            assert np.array_equal(ours.labels, np.asarray(theirs.targets))
    assert list(fashion.classes) == torchvision.datasets.FashionMNIST.classes


def test_a_good_gz_stands_in_for_a_damaged_idx_file(tmp_path):
    spec, splits = tiny_fashion(tmp_path)
    folder = write_files(tmp_path / "FashionMNIST" / "raw", {**idx_files(splits), **gz_files(splits)})
    flip_bit(folder / "train-images-idx3-ubyte")
    assert same(read_split(spec, tmp_path, "train"), splits["train"])


class Hostile:
    def __reduce__(self):
        return exec, ("raise SystemExit('a pickle was executed')",)


BATCH = python2_pickle(np.zeros((20, 32, 32, 3), np.uint8), np.zeros(20, np.uint8))
IDX = tiny_fashion, idx_files, "FashionMNIST/raw/t10k-images-idx3-ubyte"
GZ = tiny_fashion, gz_files, "FashionMNIST/raw/t10k-images-idx3-ubyte.gz"
PICKLE = tiny_cifar, batch_files, f"{CIFAR_FOLDER}/test_batch"
TAR = tiny_cifar, batch_files, CIFAR_TAR


@pytest.mark.parametrize(
    ("place", "content", "message"),
    [
        (IDX, b"<!DOCTYPE html><html>login</html>", "not an IDX file"),
        (IDX, struct.pack(">4I", 0x0803, 20, 28, 27) + bytes(20 * 28 * 27), r"holds uint8 \(20, 28, 27\), expected"),
        (GZ, gzip.compress(bytes(50_000_000)), "unpacks to more than the .* bytes expected"),
        (PICKLE, pickle.dumps({"data": Hostile(), "labels": []}, 2), r"asks for \S*builtin\S*\.exec"),
        (PICKLE, BATCH.replace(b"u1", b"O8"), "not a plain array of bytes"),
        (TAR, tar_gz({"readme": b""}, CIFAR_FOLDER), "another archive: lacks test_batch"),
        (TAR, tar_gz({"test_batch": bytes(50_000_000)}, CIFAR_FOLDER), "unpacks to more than"),
    ],
)
def test_other_files_in_the_place_of_the_data_are_refused(tmp_path, place, content, message):
    make, files, name = place
    spec, splits = make(tmp_path)
    path = tmp_path / name
    write_files(path.parent, {**files(splits), path.name: content})
    with pytest.raises(DamagedFile, match=message):
        read_split(spec, tmp_path, "test", archives=True)


@pytest.mark.parametrize("make", [tiny_fashion, tiny_cifar])
def test_a_sample_is_lossless_and_its_damage_is_named_with_the_remedy(tmp_path, monkeypatch, make):
    spec, splits = make(tmp_path)
    for split in SPLITS:
        found = read_sample(spec, split)
        assert np.array_equal(found.images, splits[split].images[:20])
        assert np.array_equal(found.labels, splits[split].labels[:20])
    other, _ = (tiny_cifar if make is tiny_fashion else tiny_fashion)(tmp_path / "other")
    for path, another in zip(sample_paths(spec, "test"), sample_paths(other, "train"), strict=True):
        good = path.read_bytes()
        for damage in (truncate, flip_bit, lambda path, another=another: shutil.copy(another, path)):
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
