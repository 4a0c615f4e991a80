"""Loading the data sets as the notebooks do: which source is used, what is said, what comes back."""

import pickle
import socket
import sys
import tempfile
from dataclasses import replace
from multiprocessing.pool import ApplyResult
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_data
import torch
from tiny_data import (
    CIFAR_FOLDER,
    IDX_GZ,
    batch_files,
    clear_environment,
    closed_port_url,
    flip_bit,
    gz_files,
    idx_files,
    serving,
    tiny_cifar,
    tiny_fashion,
    write_files,
)

from course.environment import ROOT
from shared import text
from shared.data import ImageData, fetching, finding, load, load_cifar10, load_fashion_mnist
from shared.data.arrays import SPLITS, DataError
from shared.data.facts import ALL, CIFAR10
from shared.data.fetching import data_root

RAW = Path("FashionMNIST", "raw")
BOTH = pytest.mark.parametrize("spec", ALL.values(), ids=list(ALL))


def forbidden(*_, **__):
    raise AssertionError("network or full set touched")


@pytest.fixture(autouse=True)
def shell(monkeypatch):
    """Nobody's settings, no IPython, and wide lines, since the folders of tests have long names."""
    clear_environment(monkeypatch)
    monkeypatch.setattr(finding, "_told", set())
    shell = SimpleNamespace(get_ipython=lambda: None)
    monkeypatch.setitem(sys.modules, "IPython", shell)
    monkeypatch.setattr(text, "WIDTH", 1000)
    return shell


@pytest.fixture
def person(shell):
    """As in a notebook: IPython runs. Its execution_count goes up with each cell."""
    shell.execution_count = 1
    shell.get_ipython = lambda: shell
    return shell


@pytest.fixture
def fashion(tmp_path):
    """A tiny FashionMNIST, its arrays, and the folder where its full set belongs."""
    return *tiny_fashion(tmp_path), tmp_path / "root"


def one_line(capsys):
    out = capsys.readouterr().out
    assert out.count("\n") == 1, out
    return out


# what comes back ----------------------------------------------------------------------------------------------------


@BOTH
def test_the_bundled_sample_is_whole_and_balanced(spec, monkeypatch, capsys):
    monkeypatch.setenv("COURSE_DATA", "sample")
    monkeypatch.setattr(text, "WIDTH", 96)  # into which what is said fits
    loader = {"fashion_mnist": load_fashion_mnist, "cifar10": load_cifar10}[spec.key]
    for split in SPLITS:
        found = loader(split)
        count = spec.sample[split].count
        channels = 1 if len(spec.image_shape) == 2 else 3
        assert found.images.shape == (count, channels, *spec.image_shape[:2])
        assert (found.images.dtype, found.labels.dtype) == (torch.uint8, torch.int64)
        assert torch.bincount(found.labels).tolist() == [count // 10] * 10
        assert (found.name, found.split, found.source) == (spec.name, split, "sample")
        assert found.labels[:100].unique().numel() == 10  # so that the first batch has every class
    train, test = (f"{spec.sample[split].count:,} {split}" for split in SPLITS)
    line = f"{spec.name}: sample, {train} and {test} images (COURSE_DATA=sample); all: `make data`\n"
    assert one_line(capsys) == line


@BOTH
def test_the_readme_states_every_checksum(spec):
    readme = (spec.sample_folder.parent / "README.md").read_text(encoding="utf-8")
    for part in (*spec.full.values(), *spec.sample.values()):
        assert part.images in readme
        assert part.labels in readme
    assert all(str(value) in readme for value in (*spec.mean, *spec.std))


def test_where_there_is_no_repository_full_sets_go_to_the_users_cache(tmp_path, monkeypatch):
    assert data_root() == ROOT / "datasets" / "full"
    monkeypatch.setattr(fetching, "IN_WHEEL", True)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))  # on Windows
    assert data_root() == tmp_path / ".cache" / "advanced-pytorch-internals"


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """Train split of a tiny CIFAR-10, and the arrays it was made from."""
    monkeypatch.setenv("COURSE_DATA", "full")
    spec, splits = tiny_cifar(tmp_path)
    write_files(tmp_path / "root" / CIFAR_FOLDER, batch_files(splits))
    return load(spec, "train", root=tmp_path / "root"), splits["train"]


def test_items_and_tensors_are_normalised_images_and_labels(tiny):
    dataset, arrays = tiny
    mean, std = (np.reshape(values, (3, 1, 1)) for values in (CIFAR10.mean, CIFAR10.std))
    expected = (arrays.images.transpose(0, 3, 1, 2) / 255 - mean) / std
    image, label = dataset[3]
    assert image.dtype == torch.float32
    assert np.allclose(image, expected[3], atol=1e-5)
    assert (type(label), label) == (int, arrays.labels[3])
    assert dataset[-1][1] == arrays.labels[-1]
    with pytest.raises(IndexError):
        dataset[40]
    loader = torch.utils.data.DataLoader(pickle.loads(pickle.dumps(dataset)), batch_size=16)
    assert [len(x) for x, _ in loader] == [16, 16, 8]
    x, y = dataset.tensors()
    assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
    assert np.allclose(x, expected, atol=1e-5)
    assert torch.equal(x, torch.cat([batch for batch, _ in loader]))
    assert y.tolist() == arrays.labels.tolist()
    y.zero_()
    assert dataset.labels.sum() > 0, "the data set itself is untouched"
    plain, _ = dataset.tensors("cpu", normalise=False)
    assert np.allclose(plain.permute(0, 2, 3, 1), arrays.images / 255, atol=1e-7)
    assert repr(dataset) == "ImageData(CIFAR-10 train, full: 40 images 3×32×32)"
    assert isinstance(dataset, ImageData)


def test_a_subset_is_balanced_and_in_order(tiny):
    dataset, _ = tiny
    subset = dataset.subset(20)
    assert torch.bincount(subset.labels).tolist() == [2] * 10
    rows = [next(r for r in range(40) if torch.equal(dataset.images[r], image)) for image in subset.images]
    firsts = [int(row) for kind in range(10) for row in torch.nonzero(dataset.labels == kind)[:2]]
    assert rows == sorted(firsts)
    assert torch.equal(dataset.subset(40).images, dataset.images)
    for count in (0, 15, 50):
        with pytest.raises(ValueError, match=f"multiple of 10 from 10 to 40, not {count}"):
            dataset.subset(count)


# which source is used -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("split", "images", "setting", "message"),
    [
        ("Train", None, {}, r'split must be "train" or "test", not'),
        ("train", 0, {}, "images must be 1 to 60,000, which FashionMNIST train has, not 0"),
        ("train", 60_001, {}, "images must be 1 to 60,000, which FashionMNIST train has, not 60,001"),
        ("train", None, {"COURSE_DATA": "ful"}, "COURSE_DATA='ful' is not known: use sample, full or auto"),
        ("train", None, {"COURSE_DATA_MIRROR": "ftp://example.org/"}, "ftp://example.org/': neither http"),
    ],
)
def test_a_mistake_is_an_error_that_says_what_can_be(tmp_path, monkeypatch, person, split, images, setting, message):
    for name, value in setting.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        load_fashion_mnist(split, images=images, root=tmp_path / "root")


def test_sample_uses_no_network_and_writes_nothing(fashion, tmp_path, monkeypatch, capsys, person):
    spec, splits, root = fashion
    write_files(root / RAW, idx_files(splits))  # there, but not asked for
    monkeypatch.setenv("COURSE_DATA", " Sample ")
    before = sorted(tmp_path.rglob("*"))
    for module, name in ((socket, "socket"), (finding, "fetch"), (finding, "read_split"), (tempfile, "mkdtemp")):
        monkeypatch.setattr(module, name, forbidden)
    for cell in (1, 2):
        person.execution_count = cell
        for split in SPLITS:
            assert load(spec, split, root=root).source == "sample"
        assert "(COURSE_DATA=sample)" in one_line(capsys)  # once a cell
    assert len(load(spec, "train", images=21, root=root)) == 20
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("mode", ["auto", "full"])
def test_the_full_set_is_used_silently_where_it_is_needed(fashion, monkeypatch, capsys, person, mode):
    spec, splits, root = fashion
    write_files(root / RAW, idx_files(splits))
    monkeypatch.setenv("COURSE_DATA", mode)
    monkeypatch.setenv("COURSE_DATA_DIR", str(root))
    monkeypatch.setattr(finding, "fetch", forbidden)  # which writes
    for count in (None, 21):
        found = load(spec, "train", images=count)
        assert found.source == "full"
        assert np.array_equal(found.images[:, 0].numpy(), splits["train"].images[:count])
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(finding, "read_split", forbidden)
    for count in (20, 7):
        found = load(spec, "train", images=count)
        assert found.source == "sample"
        assert np.array_equal(found.images[:, 0].numpy(), splits["train"].images[:count])
        assert found.labels.tolist() == splits["train"].labels[:count].tolist()
        assert one_line(capsys) == f"FashionMNIST: {count} train images of the bundled sample, all that is used here\n"


def test_auto_downloads_for_a_person_and_not_for_a_program(fashion, capsys, person, monkeypatch):
    spec, splits, root = fashion
    with serving(gz_files(splits)) as server:
        spec = replace(spec, addresses=(server.url,))
        for cell, (ci, nobody) in enumerate((("true", person), ("", None))):
            person.execution_count = cell
            monkeypatch.setenv("CI", ci)
            monkeypatch.setattr(person, "get_ipython", lambda nobody=nobody: nobody)
            assert load(spec, "train", root=root).source == "sample"
            assert "(the full set is not on disk)" in one_line(capsys)
        assert server.requests == []
        assert not root.exists()
        monkeypatch.setenv("CI", "false")
        monkeypatch.setattr(person, "get_ipython", lambda: person)
        assert load(spec, "train", root=root).source == "full"
        offer, *bars, done = capsys.readouterr().out.splitlines()
        assert f"fetching the full set, at most 1 MB, from {server.url}. " in offer
        assert "interrupt the kernel or set COURSE_DATA=sample" in offer
        assert any("train-images-idx3-ubyte.gz: 100%" in bar for bar in bars), "text, and no widget"
        assert f"full set fetched into {root} and verified (from {server.url})" in done
        asked = len(server.requests)
        assert load(spec, "test", root=root).source == "full"
        assert len(server.requests) == asked
    assert capsys.readouterr().out == ""


def unknown(*_, **__):
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def interrupted(outcome, timeout):
    raise KeyboardInterrupt


@pytest.mark.parametrize("why", ["host not found (is there a network?)", "too slow", "interrupted"])
def test_auto_without_a_network_gives_the_sample_and_waits_only_once(fashion, capsys, person, monkeypatch, why):
    spec, splits, root = fashion
    monkeypatch.setattr(fetching, "JUDGED_AFTER", 0.5)
    monkeypatch.setattr(finding, "QUICK", 6)  # seconds, in which the server doesn't send a quarter of the set
    with serving({**gz_files(splits), IDX_GZ[0]: tiny_data.trickles}) as server, monkeypatch.context() as patch:
        if why == "interrupted":
            patch.setattr(ApplyResult, "get", interrupted)
        if "host" in why:
            patch.setattr(socket, "getaddrinfo", unknown)
        url = closed_port_url() if why == "interrupted" else server.url
        found = load(replace(spec, addresses=(url,)), "train", root=root)
    assert (found.source, len(found)) == ("sample", 20)
    line = next(line for line in capsys.readouterr().out.splitlines() if line.endswith("); all: `make data`"))
    assert "sample, 20 train and 20 test images (fetching the full set " in line
    assert why in line
    assert not [path for path in root.iterdir() if path.is_dir()]
    person.execution_count = 2
    monkeypatch.setattr(finding, "fetch", forbidden)
    assert load(spec, "test", root=root).source == "sample"
    assert "not tried again for 6 hours" in one_line(capsys)


def test_full_is_an_error_where_it_cannot_be_had_and_starts_no_program(tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_DATA", "full")
    monkeypatch.setattr("subprocess.Popen", forbidden)  # only `make data` starts npm, by `fetch` itself
    url = closed_port_url()
    spec, _ = tiny_cifar(tmp_path, addresses=(url,))
    with pytest.raises(DataError) as caught:
        load(spec, "train", root=tmp_path / "root")
    assert str(caught.value).splitlines()[1].startswith(f"  - {url}: Connection refused")


@pytest.mark.parametrize("mode", ["auto", "full"])
def test_a_damaged_full_set_is_never_used(fashion, monkeypatch, capsys, mode):
    monkeypatch.setenv("COURSE_DATA", mode)
    spec, splits, root = fashion
    flip_bit(write_files(root / RAW, idx_files(splits)) / "train-images-idx3-ubyte")
    with serving(gz_files(splits)) as server:
        found = load(replace(spec, addresses=(server.url,)), "train", root=root)
    assert "train-images-idx3-ubyte is damaged: SHA-256 of its contents" in capsys.readouterr().out
    assert found.source == ("full" if mode == "full" else "sample")  # for a program nothing is fetched
    assert np.array_equal(found.images[:, 0].numpy(), splits["train"].images[: len(found)])
