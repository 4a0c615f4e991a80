"""The device cell: the best device by default, COURSE_DEVICE on request, a clear error for an impossible one."""

import pytest
import torch

from module_15_advanced_pytorch_internals.recordings import record
from shared import get_device, stopwatch
from shared.device import pick_device


@pytest.fixture
def machine(monkeypatch):
    """Pretend to be a machine with so many CUDA devices, with or without MPS."""

    def pretend(cuda: int, mps: bool = False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)

    return pretend


@pytest.mark.parametrize(
    ("cuda", "mps", "request_", "device"),
    [
        (2, True, None, "cuda"),
        (0, True, "", "mps"),
        (0, False, None, "cpu"),
        (2, True, " CUDA:1 ", "cuda:1"),
    ],
)
def test_the_best_device_or_the_one_that_is_asked_for(machine, cuda, mps, request_, device):
    machine(cuda, mps)
    assert pick_device(request_) == torch.device(device)


@pytest.mark.parametrize("request_", ["gpu", "cuda:7", "mps"])
def test_an_impossible_request_names_what_there_is(machine, request_, monkeypatch):
    machine(cuda=1)
    monkeypatch.setenv("COURSE_DEVICE", request_)
    with pytest.raises(ValueError, match=f"COURSE_DEVICE='{request_}' .* Available: cuda, cuda:0, cpu"):
        get_device()


def test_the_table_says_what_runs_here(machine, monkeypatch, capsys):
    machine(cuda=0)
    monkeypatch.delenv("COURSE_DEVICE", raising=False)
    assert get_device() == torch.device("cpu")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["device", "name", "memory", "torch", "threads"]
    assert lines[0].split() == ["device", "cpu"]
    assert torch.__version__ in lines[3]


def test_a_numbered_device_is_made_current_and_timing_waits_for_it(machine, monkeypatch, capsys):
    machine(cuda=2)
    calls = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(torch.device(device)))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU at {device}")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * 2**30, (4 + device.index) * 2**30))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *device: calls.append(("synchronised", *device)))
    monkeypatch.setenv("COURSE_DEVICE", "cuda:1")
    assert get_device() == torch.device("cuda:1")
    said = capsys.readouterr().out
    assert "GPU at cuda:1" in said
    assert "3.0 GiB free of 5.0 GiB on the device" in said
    with stopwatch():
        calls.append("work")
    # without a device, so the current one, which get_device has set
    assert calls == [torch.device("cuda:1"), ("synchronised",), "work", ("synchronised",)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU to record")
def test_without_a_gpu_nothing_is_recorded(tmp_path, capsys):
    assert record.main(["--folder", str(tmp_path / "new")]) == 1
    assert "no CUDA device" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
