"""Loading the data sets as the notebooks do: which source is used, what is said, what comes back."""

import os
import pickle
import re
import shutil
import socket
import subprocess
import tempfile
import time
from dataclasses import replace
from multiprocessing.pool import ApplyResult
from pathlib import Path

import numpy as np
import pytest
import torch
from nbformat.v4 import new_code_cell, new_notebook
from tiny_data import (
    CIFAR_FOLDER,
    IDX_GZ,
    batch_files,
    clear_environment,
    closed_port_url,
    flip_bit,
    gz_files,
    idx_files,
    send,
    serving,
    tiny_cifar,
    tiny_fashion,
    truncate,
    write_files,
)

from course.environment import ROOT
from course.execution import execute_blocking
from shared import text
from shared.data import ImageData, fetching, finding, load, load_cifar10, load_fashion_mnist
from shared.data.arrays import SPLITS, DataError
from shared.data.decoding import read_sample, read_split, sample_paths
from shared.data.facts import ALL, CIFAR10, FASHION_MNIST
from shared.data.fetching import data_root
from shared.data.finding import interactive, parse_mode

BOTH = pytest.mark.parametrize("spec", ALL.values(), ids=list(ALL))
FULL_SETS = data_root()  # before the environment is cleared for the tests
LOADERS = {"fashion_mnist": load_fashion_mnist, "cifar10": load_cifar10}


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch):
    clear_environment(monkeypatch)
    monkeypatch.setattr(finding, "_told", set())
    monkeypatch.setattr(finding, "_shell", lambda: None)
    monkeypatch.setattr(text, "WIDTH", 1000)  # the folders of tests have long names


@pytest.fixture
def person(monkeypatch):
    """As in a notebook: IPython runs. Returns the shell; its execution_count goes up with each cell."""

    class Shell:
        execution_count = 1

    shell = Shell()
    monkeypatch.setattr(finding, "_shell", lambda: shell)
    return shell


def one_line(capsys):
    out = capsys.readouterr().out
    assert out.count("\n") == 1, out
    assert out.endswith("\n")
    return out


# the bundled samples ------------------------------------------------------------------------------------------------


@BOTH
def test_the_bundled_sample_is_whole_and_balanced(spec, monkeypatch, capsys):
    monkeypatch.setenv("COURSE_DATA", "sample")
    for split in SPLITS:
        found = LOADERS[spec.key](split)
        count = spec.sample[split].count
        channels = 1 if len(spec.image_shape) == 2 else 3
        assert found.images.shape == (count, channels, *spec.image_shape[:2])
        assert found.images.dtype == torch.uint8
        assert found.labels.dtype == torch.int64
        assert torch.bincount(found.labels).tolist() == [count // 10] * 10
        assert (found.name, found.split, found.source) == (spec.name, split, "sample")
        # in mixed order, so that the first batch has every class
        assert found.labels[:100].unique().numel() == 10
    line = one_line(capsys)
    train, test = (f"{spec.sample[split].count:,} {split}" for split in SPLITS)
    assert line.startswith(f"{spec.name}: sample, {train} and {test} images (COURSE_DATA=sample)")
    assert "make data" in line


def test_the_samples_are_small_enough_for_a_repository():
    size = sum(p.stat().st_size for spec in ALL.values() for s in SPLITS for p in sample_paths(spec, s))
    assert size < 17_000_000


@BOTH
def test_the_readme_states_every_checksum(spec):
    text = (spec.sample_folder.parent / "README.md").read_text(encoding="utf-8")
    for part in (*spec.full.values(), *spec.sample.values()):
        assert part.images in text
        assert part.labels in text
    assert all(str(value) in text for value in (*spec.mean, *spec.std))


def full_sets_folder(spec):
    """A folder with the full set, if this machine has one."""
    try:
        read_split(spec, FULL_SETS, "train")
    except FileNotFoundError:
        pytest.skip(f"the full {spec.name} is not on this machine; `make data` fetches it")
    return FULL_SETS


@BOTH
def test_the_sample_is_the_first_images_of_each_class_of_the_full_set(spec):
    folder = full_sets_folder(spec)
    for split in SPLITS:
        full, sample = read_split(spec, folder, split), read_sample(spec, split)
        seen = np.zeros(10, int)
        rows = []
        for row, label in enumerate(full.labels):
            if seen[label] < len(sample.labels) // 10:
                rows.append(row)
            seen[label] += 1
        assert np.array_equal(full.images[rows], sample.images)
        assert np.array_equal(full.labels[rows], sample.labels)


@BOTH
def test_the_normalisation_constants_are_those_of_the_full_train_split(spec):
    images = read_split(spec, full_sets_folder(spec), "train").images
    values = np.arange(256) / 255
    for channel, mean, std in zip(images.reshape(-1, len(spec.mean)).T, spec.mean, spec.std, strict=True):
        share = np.bincount(channel, minlength=256) / len(channel)
        assert mean == pytest.approx(share @ values, abs=1e-12)
        assert std == pytest.approx(np.sqrt(share @ (values - mean) ** 2), abs=1e-12)


def test_the_classes_are_torchvisions():
    import torchvision

    assert list(FASHION_MNIST.classes) == torchvision.datasets.FashionMNIST.classes
    # torchvision reads CIFAR-10's from the archive, so they are checked where that is read (test_data_decoding.py)
    assert len(CIFAR10.classes) == 10


@pytest.mark.parametrize("damage", [truncate, flip_bit])
def test_a_damaged_sample_is_refused_with_the_remedy(tmp_path, monkeypatch, damage):
    monkeypatch.setenv("COURSE_DATA", "sample")
    spec, _ = tiny_cifar(tmp_path)
    damage(sample_paths(spec, "train")[0])
    with pytest.raises(
        DataError, match=r"cifar10_train_images\.webp is damaged: .*\(git -C .*sample checkout -- cifar10"
    ):
        load(spec, "train")


def test_a_damaged_sample_of_a_wheel_comes_back_with_pip(tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_DATA", "sample")
    monkeypatch.setattr("shared.data.decoding.IN_WHEEL", True)
    spec, _ = tiny_cifar(tmp_path)
    truncate(sample_paths(spec, "train")[0])
    with pytest.raises(DataError, match=r"is damaged: .* -m pip install --force-reinstall") as caught:
        load(spec, "train")
    assert "git" not in str(caught.value)


def test_a_missing_sample_is_called_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_DATA", "sample")
    spec, _ = tiny_cifar(tmp_path)
    shutil.rmtree(spec.sample_folder)
    with pytest.raises(DataError, match=f"missing: there is no folder {re.escape(str(spec.sample_folder))}") as caught:
        load(spec, "train")
    assert "damaged" not in str(caught.value)
    assert "git" not in str(caught.value)


def test_where_there_is_no_repository_full_sets_go_to_the_users_cache(tmp_path, monkeypatch):
    assert data_root() == ROOT / "datasets" / "full"
    monkeypatch.setattr("shared.data.fetching.IN_WHEEL", True)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))  # on Windows
    assert data_root() == tmp_path / ".cache" / "advanced-pytorch-internals"


# what comes back ----------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """Train split of a tiny CIFAR-10, and the arrays it was made from."""
    monkeypatch.setenv("COURSE_DATA", "full")
    spec, splits = tiny_cifar(tmp_path)
    write_files(tmp_path / "root" / CIFAR_FOLDER, batch_files(splits))
    return load(spec, "train", root=tmp_path / "root"), splits["train"]


def test_items_are_normalised_images_and_labels(tiny):
    dataset, arrays = tiny
    image, label = dataset[3]
    expected = (arrays.images[3].transpose(2, 0, 1) / 255 - np.reshape(CIFAR10.mean, (3, 1, 1))) / np.reshape(
        CIFAR10.std, (3, 1, 1)
    )
    assert image.dtype == torch.float32
    assert image.numpy() == pytest.approx(expected, abs=1e-5)
    assert type(label) is int
    assert label == arrays.labels[3]
    assert dataset[-1][1] == arrays.labels[-1]
    assert dataset[torch.tensor(3)][1] == label
    assert len(dataset) == 40
    assert len(list(dataset)) == 40  # iterating ends
    with pytest.raises(IndexError):
        dataset[40]
    with pytest.raises(TypeError):
        dataset[1:3]


def test_tensors_equal_the_items(tiny):
    dataset, arrays = tiny
    x, y = dataset.tensors()
    assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
    assert torch.equal(x, torch.stack([image for image, _ in dataset]))
    assert y.tolist() == [label for _, label in dataset]
    plain, _ = dataset.tensors("cpu", normalise=False)
    assert plain.dtype == torch.float32
    assert plain.permute(0, 2, 3, 1).numpy() == pytest.approx(arrays.images / 255, abs=1e-7)
    x.zero_()
    y.zero_()
    assert torch.equal(dataset.tensors()[1], dataset.labels)  # the data set itself is untouched
    assert dataset.labels.sum() > 0
    assert dataset.images.sum() > 0


def test_it_works_in_a_loader_and_survives_pickling(tiny):
    dataset, _ = tiny
    loader = torch.utils.data.DataLoader(pickle.loads(pickle.dumps(dataset)), batch_size=16)
    batches = list(loader)
    assert [tuple(x.shape) for x, _ in batches] == [(16, 3, 32, 32), (16, 3, 32, 32), (8, 3, 32, 32)]
    assert torch.equal(torch.cat([x for x, _ in batches]), dataset.tensors()[0])


def test_a_subset_is_balanced_and_in_order(tiny):
    dataset, _ = tiny
    subset = dataset.subset(20)
    assert torch.bincount(subset.labels).tolist() == [2] * 10
    rows = [next(r for r in range(40) if torch.equal(dataset.images[r], image)) for image in subset.images]
    assert rows == sorted(rows)
    assert torch.equal(dataset.subset(40).images, dataset.images)
    for count in (0, 15, 50, -10):
        with pytest.raises(ValueError, match=f"multiple of 10 from 10 to 40, not {count}"):
            dataset.subset(count)


def test_it_says_what_it_is(tiny):
    dataset, _ = tiny
    assert repr(dataset) == "ImageData(CIFAR-10 train, full: 40 images 3×32×32)"
    assert isinstance(dataset, torch.utils.data.Dataset)
    assert isinstance(dataset, ImageData)


# which source is used -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["valid", "Train", "", None, 0])
def test_an_unknown_split_is_an_error_that_names_both(split):
    with pytest.raises(ValueError, match='split must be "train" or "test", not'):
        load_fashion_mnist(split)


@pytest.mark.parametrize("value", ["samples", "ful", "none", "1"])
def test_a_misspelt_choice_is_an_error_that_names_the_three(monkeypatch, value):
    monkeypatch.setenv("COURSE_DATA", value)
    with pytest.raises(ValueError, match=f"COURSE_DATA='{value}' is not known: use sample, full or auto"):
        load_cifar10()


@pytest.mark.parametrize(("value", "mode"), [("", "auto"), (" Sample ", "sample"), ("FULL", "full"), (" AUTO", "auto")])
def test_case_and_blanks_do_not_matter(value, mode):
    assert parse_mode(value) == mode


def test_sample_uses_no_network_and_writes_nothing(tmp_path, monkeypatch, capsys, person):
    def forbidden(*_, **__):
        raise AssertionError("network or full set touched")

    spec, splits = tiny_fashion(tmp_path)
    write_files(tmp_path / "root" / "FashionMNIST" / "raw", idx_files(splits))  # there, but not asked for
    monkeypatch.setenv("COURSE_DATA", "sample")
    before = sorted(tmp_path.rglob("*"))
    for module, name in ((socket, "socket"), (finding, "fetch"), (finding, "read_split"), (tempfile, "mkdtemp")):
        monkeypatch.setattr(module, name, forbidden)
    assert load(spec, "test", root=tmp_path / "root").source == "sample"
    assert sorted(tmp_path.rglob("*")) == before
    assert "(COURSE_DATA=sample)" in one_line(capsys)


@pytest.mark.parametrize("mode", ["auto", "full"])
def test_the_full_set_is_used_silently_where_it_is(tmp_path, monkeypatch, capsys, mode):
    spec, splits = tiny_fashion(tmp_path)
    write_files(tmp_path / "root" / "FashionMNIST" / "raw", idx_files(splits))
    monkeypatch.setenv("COURSE_DATA", mode)
    monkeypatch.setenv("COURSE_DATA_DIR", str(tmp_path / "root"))
    found = load(spec, "test")
    assert found.source == "full"
    assert np.array_equal(found.images[:, 0].numpy(), splits["test"].images)
    assert capsys.readouterr() == ("", "")


def test_auto_does_not_download_for_a_program(tmp_path, capsys):
    spec, splits = tiny_fashion(tmp_path)
    with serving(gz_files(splits)) as server:
        found = load(replace(spec, addresses=(server.url,)), "train", root=tmp_path / "root")
        assert server.requests == []
    assert found.source == "sample"
    assert "(the full set is not on disk)" in one_line(capsys)
    assert not (tmp_path / "root").exists()


def test_auto_downloads_for_a_person(tmp_path, capsys, person):
    spec, splits = tiny_fashion(tmp_path)
    with serving(gz_files(splits)) as server:
        spec = replace(spec, addresses=(server.url,))
        found = load(spec, "train", root=tmp_path / "root")
        assert found.source == "full"
        offer, *_, done = capsys.readouterr().out.splitlines()
        assert f"fetching the full set, at most 1 MB, from {server.url}. " in offer
        assert "interrupt the kernel or set COURSE_DATA=sample" in offer
        assert f"full set fetched into {tmp_path / 'root'} and verified (from {server.url})" in done
        asked = len(server.requests)
        assert load(spec, "test", root=tmp_path / "root").source == "full"
        assert len(server.requests) == asked
    assert capsys.readouterr().out == ""


def test_auto_without_a_network_gives_the_sample_and_waits_only_once(tmp_path, capsys, person, monkeypatch):
    spec, _ = tiny_fashion(tmp_path, addresses=(closed_port_url(),))
    found = load(spec, "train", root=tmp_path / "root")
    assert found.source == "sample"
    line = capsys.readouterr().out.splitlines()[-1]
    assert "(fetching the full set failed: Connection refused at " in line
    assert line.endswith("); all: `make data`")
    person.execution_count = 2
    monkeypatch.setattr(finding, "fetch", lambda *_, **__: pytest.fail("tried again"))
    assert load(spec, "test", root=tmp_path / "root").source == "sample"
    assert "Connection refused at " in one_line(capsys)


@pytest.mark.parametrize("mode", ["auto", "full"])
def test_loading_starts_no_program(tmp_path, monkeypatch, person, mode):
    """Only `make data` does, which uses `fetch` itself."""
    monkeypatch.setenv("COURSE_DATA", mode)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("started"))
    spec, _ = tiny_cifar(tmp_path)
    if mode == "full":
        with pytest.raises(DataError, match="could not be fetched"):
            load(spec, "train", root=tmp_path / "root")
    else:
        assert load(spec, "train", root=tmp_path / "root").source == "sample"


def test_an_interrupted_download_gives_the_sample_and_is_not_begun_again(tmp_path, capsys, person, monkeypatch):
    spec, splits = tiny_fashion(tmp_path)
    with serving(gz_files(splits)) as server:

        def interrupted(outcome, timeout):
            deadline = time.monotonic() + 10
            while not server.requests and time.monotonic() < deadline:  # it is asked in another thread
                time.sleep(0.01)
            raise KeyboardInterrupt

        spec = replace(spec, addresses=(server.url,))
        with monkeypatch.context() as patch:
            patch.setattr(ApplyResult, "get", interrupted)
            found = load(spec, "train", root=tmp_path / "root")
        assert (found.source, len(found)) == ("sample", 20)
        line = capsys.readouterr().out.splitlines()[-1]
        assert "(fetching the full set was interrupted); all: `make data`" in line
        assert [path.name for path in (tmp_path / "root").iterdir() if path.is_dir()] == []
        asked, person.execution_count = len(server.requests), 2
        assert load(spec, "test", root=tmp_path / "root").source == "sample"
        assert len(server.requests) == asked
        assert "interrupted at " in capsys.readouterr().out


@pytest.mark.parametrize("mode", ["sample", "auto", "full"])
def test_where_the_sample_is_enough_nothing_else_is_looked_at(tmp_path, monkeypatch, capsys, person, mode):
    monkeypatch.setenv("COURSE_DATA", mode)
    spec, splits = tiny_fashion(tmp_path)
    write_files(tmp_path / "root" / "FashionMNIST" / "raw", idx_files(splits))
    for name in ("fetch", "read_split"):
        monkeypatch.setattr(finding, name, lambda *_, **__: pytest.fail("looked"))
    for count in (20, 7):
        found = load(spec, "train", images=count, root=tmp_path / "root")
        assert found.source == "sample"
        assert np.array_equal(found.images[:, 0].numpy(), splits["train"].images[:20][:count])
        assert found.labels.tolist() == splits["train"].labels[:count].tolist()
        assert one_line(capsys) == f"FashionMNIST: {count} train images of the bundled sample, all that is used here\n"


def test_more_than_the_sample_has_comes_from_the_full_set(tmp_path, monkeypatch, capsys):
    spec, splits = tiny_fashion(tmp_path)
    assert len(load(spec, "train", images=21, root=tmp_path / "root")) == 20
    assert "(the full set is not on disk)" in one_line(capsys)
    write_files(tmp_path / "root" / "FashionMNIST" / "raw", idx_files(splits))
    found = load(spec, "train", images=21, root=tmp_path / "root")
    assert (found.source, len(found)) == ("full", 21)
    assert np.array_equal(found.images[:, 0].numpy(), splits["train"].images[:21])
    monkeypatch.setenv("COURSE_DATA", "sample")
    assert len(load(spec, "train", images=21, root=tmp_path / "root")) == 20


@pytest.mark.parametrize("count", [0, -1, 60_001])
def test_a_number_of_images_that_cannot_be_had_is_an_error(count):
    with pytest.raises(ValueError, match=r"images must be 1 to 60,000, which FashionMNIST train has, not"):
        load_fashion_mnist("train", images=count)


@pytest.mark.processes
@pytest.mark.notebook
def test_a_download_leaves_lines_of_text_and_no_widget(tmp_path):
    """In a real kernel, where tqdm would choose a widget if it were left to it."""
    _, splits = tiny_fashion(tmp_path / "tiny")
    files = gz_files(splits)

    def slow(handler):  # long enough for some progress to be shown
        send(handler, b"", length=len(files[IDX_GZ[0]]))
        for start in range(0, len(files[IDX_GZ[0]]), 8192):
            handler.server.closing.wait(0.1)
            handler.wfile.write(files[IDX_GZ[0]][start : start + 8192])

    with serving({**files, IDX_GZ[0]: slow}) as server:
        source = f"""
import os, pathlib, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
os.environ.update(COURSE_DATA="auto", NO_PROXY="127.0.0.1", no_proxy="127.0.0.1", CI="")
from tiny_data import tiny_fashion
from shared.data import load
folder = pathlib.Path({str(tmp_path)!r})
spec, _ = tiny_fashion(folder / "own", addresses=({server.url!r},))
print(load(spec, "train", root=folder / "root").source)
"""
        notebook = new_notebook(cells=[new_code_cell(source)])
        assert execute_blocking(notebook, tmp_path, timeout=120).failure is None
    outputs = notebook.cells[0].outputs
    assert {(output.output_type, output.get("name")) for output in outputs} == {("stream", "stdout")}
    assert "widgets" not in notebook.metadata
    printed = "".join(output.text for output in outputs)
    assert "train-images-idx3-ubyte.gz: 100%" in printed
    assert printed.endswith("\nfull\n")


def test_what_is_said_fits_into_the_column(monkeypatch, capsys):
    monkeypatch.setattr(text, "WIDTH", 96)
    monkeypatch.setenv("COURSE_DATA", "sample")
    for loader in LOADERS.values():
        loader("train")
        assert len(one_line(capsys)) <= 97


def test_auto_gives_up_on_a_source_that_is_too_slow(tmp_path, capsys, person, monkeypatch):
    import tiny_data

    monkeypatch.setattr(fetching, "JUDGED_AFTER", 0.5)
    monkeypatch.setattr(finding, "QUICK", 6)  # seconds, in which the server doesn't send a quarter of the set
    spec, splits = tiny_fashion(tmp_path)
    with serving({**gz_files(splits), IDX_GZ[0]: tiny_data.trickles}) as server:
        found = load(replace(spec, addresses=(server.url,)), "train", root=tmp_path / "root")
    assert found.source == "sample"
    assert "too slow" in capsys.readouterr().out.splitlines()[-1]


def test_one_line_a_cell(tmp_path, capsys, person, monkeypatch):
    monkeypatch.setenv("COURSE_DATA", "sample")
    spec, _ = tiny_fashion(tmp_path)
    for cell in (1, 2):
        person.execution_count = cell
        load(spec, "train")
        load(spec, "test")
        one_line(capsys)


@pytest.mark.parametrize("mode", ["auto", "full"])
def test_a_damaged_full_set_is_never_used(tmp_path, monkeypatch, capsys, mode):
    monkeypatch.setenv("COURSE_DATA", mode)
    spec, splits = tiny_fashion(tmp_path)
    raw = write_files(tmp_path / "root" / "FashionMNIST" / "raw", idx_files(splits))
    flip_bit(raw / "train-images-idx3-ubyte")
    with serving(gz_files(splits)) as server:
        found = load(replace(spec, addresses=(server.url,)), "train", root=tmp_path / "root")
    out = capsys.readouterr().out
    assert "train-images-idx3-ubyte is damaged: SHA-256 of its contents" in out
    if mode == "auto":  # a program: nothing is moved or fetched
        assert found.source == "sample"
        assert out.count("\n") == 1
        assert sorted(p.name for p in raw.iterdir()) == sorted(idx_files(splits))
    else:
        assert np.array_equal(found.images[:, 0].numpy(), splits["train"].images)
        assert sorted(p.name for p in raw.iterdir()) == sorted(idx_files(splits)), "others' files are left alone"


def test_full_is_an_error_where_it_cannot_be_had(tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_DATA", "full")
    url = closed_port_url()
    spec, _ = tiny_fashion(tmp_path, addresses=(url,))
    with pytest.raises(DataError) as caught:
        load(spec, "train", root=tmp_path / "root")
    assert f"  - {url}: Connection refused" in str(caught.value).splitlines()


@pytest.mark.parametrize("mode", ["auto", "full"])
def test_a_folder_that_cannot_be_written_to(tmp_path, monkeypatch, capsys, person, mode):
    monkeypatch.setenv("COURSE_DATA", mode)
    (tmp_path / "root").write_text("a file where the folder should be")
    spec, splits = tiny_fashion(tmp_path)
    with serving(gz_files(splits)) as server:
        spec = replace(spec, addresses=(server.url,))
        if mode == "full":
            with pytest.raises(DataError, match=r"cannot write to .* Name a folder that can be"):
                load(spec, "train", root=tmp_path / "root")
        else:
            assert load(spec, "train", root=tmp_path / "root").source == "sample"
            assert "cannot write to" in one_line(capsys)
        assert server.requests == []


def test_a_read_only_folder_that_has_the_set_is_used(tmp_path, monkeypatch, capsys, person):
    def denied(*_, **__):
        raise PermissionError("read-only")

    spec, splits = tiny_fashion(tmp_path)
    write_files(tmp_path / "root" / "FashionMNIST" / "raw", gz_files(splits))
    for module, name in ((os, "rename"), (os, "mkdir"), (tempfile, "mkdtemp"), (np, "save")):
        monkeypatch.setattr(module, name, denied)
    assert load(spec, "train", root=tmp_path / "root").source == "full"
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("mode", ["auto", "full"])
def test_a_path_that_cannot_be_looked_at(tmp_path, monkeypatch, capsys, person, mode):
    monkeypatch.setenv("COURSE_DATA", mode)
    root = tmp_path / ("x" * 300)  # longer than a file name may be; asking whether it exists is an error
    spec, _ = tiny_cifar(tmp_path)
    if mode == "full":
        with pytest.raises(DataError, match="cannot write to"):
            load(spec, "train", root=root)
    else:
        assert load(spec, "train", root=root).source == "sample"
        assert "cannot write to" in one_line(capsys)


def test_a_mirror_of_an_unknown_kind_is_an_error(tmp_path, monkeypatch, person):
    monkeypatch.setenv("COURSE_DATA_MIRROR", "ftp://example.org/")
    spec, _ = tiny_fashion(tmp_path)
    with pytest.raises(ValueError, match=r"ftp://example.org/': neither http\(s\)://"):
        load(spec, "train", root=tmp_path / "root")


def test_who_is_a_person(monkeypatch, person):
    assert interactive()
    monkeypatch.setenv("CI", "true")
    assert not interactive()
    monkeypatch.setenv("CI", "false")
    assert interactive()
    monkeypatch.setattr(finding, "_shell", lambda: None)
    assert not interactive()
