"""Loading the data sets as the notebooks do: which source is used, what is said, what comes back."""

import socket
import sys
from dataclasses import replace
from multiprocessing.pool import ApplyResult
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_data import (
    CIFAR_FOLDER,
    batch_files,
    closed_port_url,
    flip_bit,
    gz_files,
    idx_files,
    own_settings,
    serving,
    tiny,
    write_files,
)

from course.environment import ROOT
from shared import text
from shared.data import fetching, finding, load, load_cifar10, load_fashion_mnist
from shared.data.arrays import SPLITS, DataError
from shared.data.facts import ALL, CIFAR10, FASHION_MNIST
from shared.data.fetching import data_root


def forbidden(*_, **__):
    raise AssertionError("network or full set touched")


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    """The folder of the full sets. No IPython, and wide lines, since the folders of tests have long names."""
    monkeypatch.setattr(finding, "_told", set())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    monkeypatch.setattr(text, "WIDTH", 1000)
    return own_settings(monkeypatch, tmp_path / "root")


@pytest.fixture
def person(monkeypatch):
    """As in a notebook: IPython runs. Its execution_count goes up with each cell."""
    person = SimpleNamespace(execution_count=1, get_ipython=lambda: person)
    monkeypatch.setitem(sys.modules, "IPython", person)
    return person


def one_line(capsys):
    out = capsys.readouterr().out
    assert out.count("\n") == 1, out
    return out


@pytest.mark.parametrize(("spec", "loader"), [(FASHION_MNIST, load_fashion_mnist), (CIFAR10, load_cifar10)])
def test_the_bundled_sample_is_whole_and_balanced(spec, loader, monkeypatch, capsys):
    monkeypatch.setenv("COURSE_DATA", "sample")
    monkeypatch.setattr(text, "WIDTH", 96)  # into which what is said fits
    for split in SPLITS:
        found, count = loader(split), spec.sample[split].count
        assert found.images.shape == (count, 1 if spec is FASHION_MNIST else 3, *spec.image_shape[:2])
        assert found.images.is_contiguous()
        assert (found.images.dtype, found.labels.dtype) == (torch.uint8, torch.int64)
        assert torch.bincount(found.labels).tolist() == [count // 10] * 10
        assert (found.name, found.split, found.source) == (spec.name, split, "sample")
        assert found.labels[:100].unique().numel() == 10  # so that the first batch has every class
    train, test = (f"{spec.sample[split].count:,} {split}" for split in SPLITS)
    line = f"{spec.name}: sample, {train} and {test} images (COURSE_DATA=sample); all: `make data`\n"
    assert one_line(capsys) == line


def test_the_readme_states_every_checksum():
    readme = (ROOT / "datasets" / "README.md").read_text(encoding="utf-8")
    for spec in ALL.values():
        for part in (*spec.full.values(), *spec.sample.values()):
            assert part.images in readme
            assert part.labels in readme
        assert all(str(value) in readme for value in (*spec.mean, *spec.std))


def test_where_there_is_no_repository_full_sets_go_to_the_users_cache(tmp_path, monkeypatch):
    monkeypatch.delenv("COURSE_DATA_DIR")
    assert data_root() == ROOT / "datasets" / "full"
    monkeypatch.setattr(fetching, "IN_WHEEL", True)
    for name in ("HOME", "USERPROFILE"):  # the second on Windows
        monkeypatch.setenv(name, str(tmp_path))
    assert data_root() == tmp_path / ".cache" / "advanced-pytorch-internals"


@pytest.fixture
def cifar(tmp_path, root, monkeypatch):
    """Train split of a tiny CIFAR-10, and the arrays it was made from."""
    monkeypatch.setenv("COURSE_DATA", "full")
    spec, splits = tiny(CIFAR10, tmp_path)
    write_files(root / CIFAR_FOLDER, batch_files(splits))
    return load(spec, "train"), splits["train"]


def test_items_and_tensors_are_normalised_images_and_labels(cifar):
    dataset, arrays = cifar
    mean, std = (np.reshape(values, (3, 1, 1)) for values in (CIFAR10.mean, CIFAR10.std))
    expected = (arrays.images.transpose(0, 3, 1, 2) / 255 - mean) / std
    image, label = dataset[3]
    assert image.dtype == torch.float32
    assert np.allclose(image, expected[3], atol=1e-5)
    assert (type(label), label, len(dataset)) == (int, arrays.labels[3], 40)
    x, y = dataset.tensors()
    assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
    assert np.allclose(x, expected, atol=1e-5)
    assert y.tolist() == arrays.labels.tolist()
    y.zero_()
    assert dataset.labels.sum() > 0, "the data set itself is untouched"
    plain, _ = dataset.tensors("cpu", normalise=False)
    assert np.allclose(plain.permute(0, 2, 3, 1), arrays.images / 255, atol=1e-7)
    assert repr(dataset) == "ImageData(CIFAR-10 train, full: 40 images 3×32×32)"


def test_a_subset_is_balanced_and_in_order(cifar):
    dataset, _ = cifar
    subset = dataset.subset(20)
    rows = [next(r for r in range(40) if torch.equal(dataset.images[r], image)) for image in subset.images]
    firsts = [int(row) for kind in range(10) for row in torch.nonzero(dataset.labels == kind)[:2]]
    assert rows == sorted(firsts)
    assert subset.labels.tolist() == dataset.labels[rows].tolist()
    assert torch.equal(dataset.subset(40).images, dataset.images)
    for count in (0, 15, 50):
        with pytest.raises(ValueError, match=f"multiple of 10 from 10 to 40, not {count}"):
            dataset.subset(count)


@pytest.mark.parametrize(
    ("split", "images", "setting", "message"),
    [
        ("Train", None, {}, r'split must be "train" or "test", not'),
        ("train", 0, {}, "images must be 1 to 60,000"),
        ("train", 60_001, {}, "images must be 1 to 60,000, which FashionMNIST train has, not 60,001"),
        ("train", None, {"COURSE_DATA": "ful"}, "COURSE_DATA='ful' is not known: use sample, full or auto"),
        ("train", None, {"COURSE_DATA_MIRROR": "ftp://example.org/"}, "ftp://example.org/' is neither an address"),
    ],
)
def test_a_mistake_is_an_error_that_says_what_can_be(monkeypatch, person, split, images, setting, message):
    for name, value in setting.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        load_fashion_mnist(split, images=images)


def test_sample_uses_no_network_and_writes_nothing(tmp_path, root, monkeypatch, capsys, person):
    spec, splits = tiny(FASHION_MNIST, tmp_path)
    write_files(root, idx_files(splits))  # there, but not asked for
    monkeypatch.setenv("COURSE_DATA", " Sample ")
    before = sorted(tmp_path.rglob("*"))
    for module, name in ((socket, "socket"), (finding, "fetch"), (finding, "read_split")):
        monkeypatch.setattr(module, name, forbidden)
    for cell in (1, 2):
        person.execution_count = cell
        for split in SPLITS:
            assert load(spec, split).source == "sample"
        assert "(COURSE_DATA=sample)" in one_line(capsys)  # once a cell
    assert len(load(spec, "train", images=21)) == 20
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("mode", ["auto", "full"])
def test_the_full_set_is_used_silently_where_it_is_needed(tmp_path, root, monkeypatch, capsys, person, mode):
    spec, splits = tiny(FASHION_MNIST, tmp_path)
    write_files(root, idx_files(splits))
    monkeypatch.setenv("COURSE_DATA", mode)
    monkeypatch.setattr(finding, "fetch", forbidden)  # which writes
    for count, source in ((None, "full"), (21, "full"), (20, "sample"), (7, "sample")):
        found = load(spec, "train", images=count)
        assert found.source == source
        assert np.array_equal(found.images[:, 0].numpy(), splits["train"].images[:count])
        assert found.labels.tolist() == splits["train"].labels[:count].tolist()
        said = f"FashionMNIST: {count} train images of the bundled sample, all that is used here\n"
        assert capsys.readouterr().out == (said if source == "sample" else "")


def test_auto_downloads_for_a_person_and_not_for_a_program(tmp_path, root, capsys, person, monkeypatch):
    spec, splits = tiny(FASHION_MNIST, tmp_path)
    with serving(gz_files(splits)) as server:
        spec = replace(spec, addresses=(server.url,))
        for cell, (ci, nobody) in enumerate((("true", person), ("", None))):
            person.execution_count = cell
            monkeypatch.setenv("CI", ci)
            monkeypatch.setattr(person, "get_ipython", lambda nobody=nobody: nobody)
            assert load(spec, "train").source == "sample"
            assert "(the full set is not on disk)" in one_line(capsys)
        assert server.requests == []
        assert not root.exists()
        monkeypatch.setattr(person, "get_ipython", lambda: person)
        assert load(spec, "train").source == "full"
        offer, *bars, done = capsys.readouterr().out.splitlines()
        assert f"fetching the full set, at most 1 MB, from {server.url}. " in offer
        assert "interrupt the kernel or set COURSE_DATA=sample" in offer
        assert any("train-images-idx3-ubyte.gz: 100%" in bar for bar in bars), "text, and no widget"
        assert f"full set fetched into {root} and verified (from {server.url})" in done
        asked = len(server.requests)
        assert load(spec, "test").source == "full"
        assert len(server.requests) == asked
    assert capsys.readouterr().out == ""


def unknown(*_, **__):
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def interrupted(outcome, timeout):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("place", "name", "happens", "why"),
    [
        (socket, "getaddrinfo", unknown, "failed: host not found (is there a network?)"),
        (ApplyResult, "get", interrupted, "was interrupted"),
    ],
)
def test_auto_without_a_network_gives_the_sample_and_waits_only_once(
    tmp_path, root, capsys, person, monkeypatch, place, name, happens, why
):
    spec, _ = tiny(FASHION_MNIST, tmp_path, closed_port_url())
    with monkeypatch.context() as patch:
        patch.setattr(place, name, happens)
        found = load(spec, "train")
    assert (found.source, len(found)) == ("sample", 20)
    line = next(line for line in capsys.readouterr().out.splitlines() if line.endswith("); all: `make data`"))
    assert f"sample, 20 train and 20 test images (fetching the full set {why}" in line
    assert not [path for path in root.iterdir() if path.is_dir()]
    person.execution_count = 2
    monkeypatch.setattr(finding, "fetch", forbidden)
    assert load(spec, "test").source == "sample"
    assert "not tried again for 6 hours" in capsys.readouterr().out


def test_full_is_an_error_where_it_cannot_be_had_and_starts_no_program(tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_DATA", "full")
    monkeypatch.setattr("subprocess.Popen", forbidden)  # only `make data` starts npm
    url = closed_port_url()
    with pytest.raises(DataError, match=rf"Tried:\n  - {url}: Connection refused"):
        load(tiny(CIFAR10, tmp_path, url)[0], "train")


@pytest.mark.parametrize(("mode", "source"), [("auto", "sample"), ("full", "full")])
def test_a_damaged_full_set_is_never_used(tmp_path, root, monkeypatch, capsys, mode, source):
    monkeypatch.setenv("COURSE_DATA", mode)
    spec, splits = tiny(FASHION_MNIST, tmp_path)
    flip_bit(write_files(root, idx_files(splits)) / "train-images-idx3-ubyte")
    with serving(gz_files(splits)) as server:
        found = load(replace(spec, addresses=(server.url,)), "train")
    assert "train-images-idx3-ubyte is damaged: SHA-256 of its contents" in capsys.readouterr().out
    assert found.source == source  # for a program nothing is fetched
    assert np.array_equal(found.images[:, 0].numpy(), splits["train"].images[: len(found)])
