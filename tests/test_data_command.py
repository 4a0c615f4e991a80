"""`python -m course data`."""

import argparse

import pytest
from tiny_data import (
    CIFAR_TAR,
    cifar_tar,
    clear_environment,
    closed_port_url,
    flip_bit,
    gz_files,
    idx_files,
    serving,
    tiny_cifar,
    tiny_fashion,
    truncate,
    write_files,
)

from course import data as command
from shared.data.arrays import SPLITS
from shared.data.decoding import read_split, sample_paths


@pytest.fixture
def sets(tmp_path, monkeypatch):
    """Two tiny sets in place of the real ones, without a mirror that works: {key: (spec, splits)}."""
    clear_environment(monkeypatch)
    dead = closed_port_url()
    fashion, fashion_splits = tiny_fashion(tmp_path, addresses=(dead,))
    cifar, cifar_splits = tiny_cifar(tmp_path, addresses=(dead,), package="")
    monkeypatch.setattr(command, "ALL", {spec.key: spec for spec in (fashion, cifar)})
    return {fashion.key: (fashion, fashion_splits), cifar.key: (cifar, cifar_splits)}


def run(tmp_path, *arguments):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.main(parser.parse_args(["--root", str(tmp_path / "root"), *arguments]))


def test_status_says_what_is_here_damaged_and_where_the_rest_would_come_from(tmp_path, sets, capsys):
    assert run(tmp_path) == 0
    assert not (tmp_path / "root").exists(), "it changes nothing"
    fashion, splits = sets["fashion_mnist"]
    raw = write_files(tmp_path / "root" / "FashionMNIST" / "raw", idx_files(splits))
    (tmp_path / "stick").mkdir(exist_ok=True)
    capsys.readouterr()
    assert run(tmp_path, "--mirror", str(tmp_path / "stick")) == 0
    out = capsys.readouterr().out
    assert out.count("20 images, verified") == 5  # four samples, and the full test split
    assert out.count("40 images, verified") == 1
    assert out.count("not here") == 2
    cifar = sets["cifar10"][0]
    assert f"would be fetched from, in this order:\n  {tmp_path / 'stick'}\n  {cifar.addresses[0]}" in out
    assert f"{fashion.name} would be" not in out
    assert "python -m course data --fetch all (or cifar10)" in out
    flip_bit(raw / "t10k-images-idx3-ubyte")
    assert run(tmp_path) == 1
    assert "t10k-images-idx3-ubyte is damaged: " in capsys.readouterr().out
    truncate(sample_paths(cifar, "test")[0])
    assert run(tmp_path) == 1
    assert "cifar10_test_images.webp is damaged: " in capsys.readouterr().out


def test_fetch_all_from_one_mirror(tmp_path, sets, capsys):
    files = {**gz_files(sets["fashion_mnist"][1]), CIFAR_TAR: cifar_tar(sets["cifar10"][1])}
    with serving(files) as server:
        assert run(tmp_path, "--fetch", "all", "--mirror", server.url) == 0
        asked = len(server.requests)
        assert run(tmp_path, "--fetch", "all", "--mirror", server.url) == 0
        assert len(server.requests) == asked
    out = capsys.readouterr().out
    assert out.count("fetched from") == 2
    assert out.count("already here, verified") == 2
    for spec, splits in sets.values():
        for split in SPLITS:
            assert read_split(spec, tmp_path / "root", split).labels.tolist() == splits[split].labels.tolist()


def test_fetch_from_a_folder_tells_which_set_failed(tmp_path, sets, capsys):
    stick = write_files(tmp_path / "stick", idx_files(sets["fashion_mnist"][1]))
    assert run(tmp_path, "--fetch", "fashion_mnist", "--mirror", str(stick)) == 0
    assert f"FashionMNIST: fetched from {stick} and verified" in capsys.readouterr().out
    assert run(tmp_path, "--fetch", "all", "--mirror", str(stick)) == 1
    said = capsys.readouterr().err
    assert "CIFAR-10 could not be fetched" in said
    assert f"  - {stick}: no CIFAR-10 train files in {stick}" in said
    assert "Connection refused" in said


def test_a_mirror_that_is_none_is_wrong_usage(tmp_path, sets, capsys):
    assert run(tmp_path, "--mirror", "ftp://example.org/") == 2
    assert "ftp://example.org/': neither http(s)://" in capsys.readouterr().err
    assert run(tmp_path, "--mirror", str(tmp_path / "sitck")) == 2
    assert f"there is no folder {tmp_path / 'sitck'}" in capsys.readouterr().err
