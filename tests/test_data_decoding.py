"""Decoding: every file format against an independent reader, and every kind of damage."""

import gzip
import io
import pickle
import struct
import tarfile
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from tiny_data import (
    CIFAR_FOLDER,
    CIFAR_META,
    CIFAR_PACKAGE,
    CIFAR_TAR,
    batch_files,
    cifar_package,
    cifar_tar,
    flip_bit,
    gz_files,
    idx_files,
    md5s,
    npy_files,
    package_files,
    python2_pickle,
    tar_gz,
    tiny_cifar,
    tiny_fashion,
    truncate,
    write_files,
)

from shared.data.arrays import SPLITS, DamagedFile, DataError, blaming
from shared.data.decoding import decode_batch, read_members, read_sample, read_split, sample_paths

DAMAGE = pytest.mark.parametrize("damage", [truncate, flip_bit])


def same(found, expected):
    return np.array_equal(found.images, expected.images) and np.array_equal(found.labels, expected.labels)


@pytest.mark.parametrize("files", [idx_files, gz_files])
@pytest.mark.parametrize("below", ["FashionMNIST/raw", "."])
def test_idx_files_are_read_plain_and_gzipped(tmp_path, files, below):
    spec, splits = tiny_fashion(tmp_path)
    root = tmp_path / "a folder called.gz"
    write_files(root / below, files(splits))
    for split in SPLITS:
        assert same(read_split(spec, root, split), splits[split])


def test_idx_files_are_read_as_torchvision_reads_them(tmp_path):
    import torchvision  # takes seconds, and only two tests want it

    spec, splits = tiny_fashion(tmp_path)
    write_files(tmp_path / "FashionMNIST" / "raw", idx_files(splits))
    for split in SPLITS:
        theirs = torchvision.datasets.FashionMNIST(tmp_path, train=split == "train")
        ours = read_split(spec, tmp_path, split)
        assert np.array_equal(ours.images, theirs.data.numpy())
        assert np.array_equal(ours.labels, theirs.targets.numpy())


def test_batches_are_read_as_torchvision_reads_them(tmp_path):
    import torchvision  # takes seconds, and only two tests want it

    spec, splits = tiny_cifar(tmp_path)
    files = batch_files(splits)
    write_files(tmp_path / CIFAR_FOLDER, files)
    sums = md5s(files)

    class Tiny(torchvision.datasets.CIFAR10):
        train_list = [[f"data_batch_{i}", sums[f"data_batch_{i}"]] for i in range(1, 6)]  # noqa: RUF012
        test_list = [["test_batch", sums["test_batch"]]]  # noqa: RUF012
        meta = {"filename": CIFAR_META, "key": "label_names", "md5": sums[CIFAR_META]}  # noqa: RUF012

    for split in SPLITS:
        theirs = Tiny(tmp_path, train=split == "train")
        ours = read_split(spec, tmp_path, split)
        assert np.array_equal(ours.images, theirs.data)
        assert ours.labels.tolist() == theirs.targets
        assert list(spec.classes) == theirs.classes


@pytest.mark.parametrize(("name", "archive"), [(CIFAR_TAR, cifar_tar), (CIFAR_PACKAGE, cifar_package)])
def test_archives_of_cifar_give_the_same_arrays(tmp_path, name, archive):
    spec, splits = tiny_cifar(tmp_path)
    folder = write_files(tmp_path / "archive", {name: archive(splits)})
    for split in SPLITS:
        assert same(read_split(spec, folder, split, archives=True), splits[split])
        with pytest.raises(FileNotFoundError):
            read_split(spec, folder, split)
    assert sorted(p.name for p in folder.iterdir()) == [name]  # nothing was unpacked to disk


@pytest.mark.parametrize("make", [tiny_fashion, tiny_cifar])
def test_a_folder_without_the_set_holds_none_nor_does_a_file(tmp_path, make):
    spec, _ = make(tmp_path)
    (tmp_path / "file").touch()
    for place in (tmp_path, tmp_path / "nothing", tmp_path / "file"):
        with pytest.raises(FileNotFoundError, match=f"no {spec.name} test files in "):
            read_split(spec, place, "test", archives=True)


@DAMAGE
@pytest.mark.parametrize("files", [idx_files, gz_files])
@pytest.mark.parametrize("number", [0, 1])
def test_a_damaged_idx_file_is_named(tmp_path, damage, files, number):
    spec, splits = tiny_fashion(tmp_path)
    folder = write_files(tmp_path / "FashionMNIST" / "raw", files(splits))
    path = folder / list(files(splits))[number]
    damage(path)
    with pytest.raises(DamagedFile, match=path.name) as caught:
        read_split(spec, tmp_path, "train")
    assert caught.value.path == path
    assert same(read_split(spec, tmp_path, "test"), splits["test"])  # the other split is as good as before


def test_a_good_gz_stands_in_for_a_damaged_idx_file(tmp_path):
    spec, splits = tiny_fashion(tmp_path)
    folder = write_files(tmp_path / "FashionMNIST" / "raw", {**idx_files(splits), **gz_files(splits)})
    flip_bit(folder / "train-images-idx3-ubyte")
    assert same(read_split(spec, tmp_path, "train"), splits["train"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not an IDX file"),
        (b"<!DOCTYPE html><html>login</html>", "not an IDX file"),
        (struct.pack(">IIII", 0x0803, 40, 28, 27) + bytes(40 * 28 * 27), r"holds uint8 \(40, 28, 27\), expected"),
        (struct.pack(">IIII", 0x0803, 40, 28, 28) + bytes(40 * 28 * 28 + 1), "cannot reshape array"),
        (bytes(50_000_000), "more than the .* bytes expected"),
    ],
    ids=["empty", "web page", "other shape", "too long", "far too long"],
)
def test_other_files_in_place_of_an_idx_file_are_refused(tmp_path, content, message):
    spec, splits = tiny_fashion(tmp_path)
    folder = write_files(tmp_path / "FashionMNIST" / "raw", idx_files(splits))
    (folder / "train-images-idx3-ubyte").write_bytes(content)
    with pytest.raises(DamagedFile, match=message):
        read_split(spec, tmp_path, "train")


@pytest.mark.parametrize(
    ("content", "message"),
    [(gzip.compress(bytes(50_000_000)), "unpacks to more than"), (b"\x1f\x8bnot gzip at all", "is damaged")],
    ids=["bomb", "bad gzip"],
)
def test_other_files_in_place_of_a_gz_are_refused(tmp_path, content, message):
    spec, splits = tiny_fashion(tmp_path)
    folder = write_files(tmp_path / "FashionMNIST" / "raw", gz_files(splits))
    (folder / "train-images-idx3-ubyte.gz").write_bytes(content)
    with pytest.raises(DamagedFile, match=message):
        read_split(spec, tmp_path, "train")


def test_a_folder_in_place_of_a_file_is_refused(tmp_path):
    spec, splits = tiny_fashion(tmp_path)
    folder = write_files(tmp_path / "FashionMNIST" / "raw", idx_files(splits))
    (folder / "train-images-idx3-ubyte").unlink()
    (folder / "train-images-idx3-ubyte").mkdir()
    with pytest.raises(DamagedFile, match="train-images-idx3-ubyte is damaged"):
        read_split(spec, tmp_path, "train")


@DAMAGE
@pytest.mark.parametrize(("name", "archive"), [(CIFAR_TAR, cifar_tar), (CIFAR_PACKAGE, cifar_package)])
def test_a_damaged_archive_is_named(tmp_path, damage, name, archive):
    spec, splits = tiny_cifar(tmp_path)
    path = write_files(tmp_path / "archive", {name: archive(splits)}) / name
    damage(path)
    with pytest.raises(DamagedFile, match=name):
        [read_split(spec, path.parent, split, archives=True) for split in SPLITS]


@DAMAGE
def test_a_damaged_npy_file_is_named(tmp_path, damage):
    spec, splits = tiny_cifar(tmp_path)
    folder = write_files(tmp_path / "cifar-10-npy", npy_files(splits))
    assert same(read_split(spec, tmp_path, "train"), splits["train"])
    damage(folder / "train_images.npy")
    with pytest.raises(DamagedFile, match="train_images"):
        read_split(spec, tmp_path, "train")


def test_the_same_bytes_as_another_type_or_shape_are_refused(tmp_path):
    """The checksum is of the bytes alone."""
    spec, splits = tiny_cifar(tmp_path)
    images, _ = splits["train"]
    folder = write_files(tmp_path / "cifar-10-npy", npy_files(splits))
    others = images.view(np.int8), images.view(bool), images.reshape(-1, 32, 96)
    for other in others:
        assert other.tobytes() == images.tobytes()
        np.save(folder / "train_images.npy", other)
        with pytest.raises(DamagedFile, match=r"expected uint8 \(40, 32, 32, 3\)"):
            read_split(spec, tmp_path, "train")


@pytest.mark.parametrize("change", ["wide", "high"])
def test_a_picture_of_another_size_is_refused_before_it_is_decoded(tmp_path, monkeypatch, change):
    spec, splits = tiny_cifar(tmp_path)
    files = package_files(splits)
    rows = np.asarray(Image.open(io.BytesIO(files["test_batch.png"])))
    # twice as wide: the same bytes in the same order; too high: more rows than the split has images
    other = rows.reshape(len(rows) // 2, -1, 3) if change == "wide" else np.concatenate([rows] * 3)
    buffer = io.BytesIO()
    Image.fromarray(other).save(buffer, "PNG")
    files["test_batch.png"] = buffer.getvalue()
    folder = write_files(tmp_path / "archive", {CIFAR_PACKAGE: tar_gz(files, "package")})
    decoded = []
    real = Image.Image.convert
    monkeypatch.setattr(Image.Image, "convert", lambda self, *a, **k: decoded.append(self.size) or real(self, *a, **k))
    with pytest.raises(DamagedFile, match=r"a picture of .* pixels does not hold 20 images"):
        read_split(spec, folder, "test", archives=True)
    assert (other.shape[1], other.shape[0]) not in decoded


@DAMAGE
def test_the_damaged_one_of_five_batches_is_named(tmp_path, damage):
    spec, splits = tiny_cifar(tmp_path)
    files = batch_files(splits)
    folder = write_files(tmp_path / CIFAR_FOLDER, files)
    damage(folder / "data_batch_4")
    with pytest.raises(DamagedFile) as caught:
        read_split(replace(spec, batch_md5=md5s(files)), tmp_path, "train")
    assert caught.value.path == folder / "data_batch_4"


class Hostile:
    def __reduce__(self):
        return exec, ("raise SystemExit('a pickle was executed')",)


def test_a_pickle_can_execute_nothing(tmp_path):
    for payload in (Hostile(), {"data": Hostile(), "labels": []}):
        with pytest.raises(DamagedFile, match=r"asks for \S*builtin\S*\.exec"), blaming(tmp_path / "data_batch_1"):
            decode_batch(pickle.dumps(payload, protocol=2))


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.replace(b"u1", b"O8"),
        lambda data: data.replace(b"M\x00\x0c", b"M\xff\xff"),  # a shape that its bytes do not fill
        lambda data: data.replace(b"cnumpy\ndtype\n", b"cnumpy\nmemmap\n"),
        lambda data: data.replace(b"labels](", b"labels](N"),
        lambda data: data[: len(data) // 2],
        lambda data: b"",
        lambda data: b"\x80\x02N.",
        lambda data: b"\x80\x02J\xff\xff\xff\x7f" + b"(" * 1000 + b".",
    ],
)
def test_odd_pickles_are_refused(tmp_path, change):
    good = python2_pickle(np.zeros((2, 32, 32, 3), np.uint8), np.zeros(2, np.uint8))
    assert decode_batch(good).images.shape == (2, 32, 32, 3)
    with pytest.raises(DamagedFile, match="not a CIFAR-10 batch"), blaming(tmp_path / "b"):
        decode_batch(change(good))


def test_an_archive_that_unpacks_to_too_much_is_refused(tmp_path):
    path = tmp_path / "bomb.tgz"
    path.write_bytes(tar_gz({"filler": bytes(3_000_000), "wanted": b"x"}, "folder"))
    with pytest.raises(DamagedFile, match="unpacks to more than the 1,000,000 bytes"):
        read_members(path, ["wanted"], limit=1_000_000)
    assert read_members(path, ["wanted"], limit=4_000_000) == [b"x"]


def test_a_sparse_member_of_any_size_is_no_file(tmp_path):
    """A header of a few bytes may claim to be terabytes of zeros."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", format=tarfile.PAX_FORMAT) as tar:
        member = tarfile.TarInfo("folder/wanted")
        sparse = {"major": "1", "minor": "0", "realsize": str(10**13), "name": "folder/wanted"}
        member.pax_headers = {f"GNU.sparse.{key}": value for key, value in sparse.items()}
        member.size = 512
        tar.addfile(member, io.BytesIO(b"1\n0\n0\n".ljust(512, b"\0")))
    path = write_files(tmp_path, {"x.tgz": buffer.getvalue()}) / "x.tgz"
    with tarfile.open(path) as tar:
        assert [member.size for member in tar] == [10**13]
    with pytest.raises(DamagedFile, match="lacks wanted"):
        read_members(path, ["wanted"], limit=1_000_000)


def test_links_and_foreign_paths_in_an_archive_do_nothing(tmp_path):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        link = tarfile.TarInfo("wanted")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
        member = tarfile.TarInfo("../../wanted")
        member.size = 2
        tar.addfile(member, io.BytesIO(b"ok"))
    path = write_files(tmp_path / "a" / "b", {"x.tgz": buffer.getvalue()}) / "x.tgz"
    assert read_members(path, ["wanted"], limit=1_000_000) == [b"ok"]
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == ["x.tgz"]


@pytest.mark.parametrize("make", [tiny_fashion, tiny_cifar])
def test_a_sample_is_lossless_and_in_its_own_order(tmp_path, make):
    spec, splits = make(tmp_path)
    for split in SPLITS:
        found = read_sample(spec, split)
        assert np.array_equal(found.images, splits[split].images[:20])
        assert np.array_equal(found.labels, splits[split].labels[:20])


@DAMAGE
@pytest.mark.parametrize("make", [tiny_fashion, tiny_cifar])
@pytest.mark.parametrize("number", [0, 1])
def test_a_damaged_sample_is_named(tmp_path, make, damage, number):
    spec, _ = make(tmp_path)
    path = sample_paths(spec, "test")[number]
    damage(path)
    with pytest.raises(DamagedFile, match=path.name):
        read_sample(spec, "test")


def test_a_sample_of_another_size_or_kind_is_refused(tmp_path):
    spec, _ = tiny_cifar(tmp_path)
    picture, _ = sample_paths(spec, "test")
    good = picture.read_bytes()
    other, _ = tiny_fashion(tmp_path / "other")
    picture.write_bytes(sample_paths(other, "test")[0].read_bytes())
    with pytest.raises(DamagedFile, match="does not hold 20 images"):
        read_sample(spec, "test")
    picture.write_bytes(b"<html>" + good)
    with pytest.raises(DamagedFile, match=picture.name):
        read_sample(spec, "test")
    picture.unlink()
    with pytest.raises(DataError, match=rf"{picture.name} is missing\. It belongs to the course"):
        read_sample(spec, "test")
