"""The device cell: the best device by default, COURSE_DEVICE on request, a clear error for an impossible one."""

import pytest
import torch

from shared import get_device, measure, stopwatch
from shared.device import DeviceError, available_devices, pick_device


@pytest.fixture
def machine(monkeypatch):
    """Pretend to be a machine with so many CUDA devices, with or without MPS."""

    def pretend(cuda: int, mps: bool = False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)

    return pretend


def test_cuda_then_mps_then_cpu(machine):
    machine(cuda=2, mps=True)
    assert pick_device() == torch.device("cuda")
    assert available_devices() == ["cuda", "cuda:0", "cuda:1", "mps", "cpu"]
    machine(cuda=0, mps=True)
    assert pick_device() == torch.device("mps")
    machine(cuda=0)
    assert pick_device() == torch.device("cpu")


@pytest.mark.parametrize(("request_", "device"), [("cpu", "cpu"), (" CUDA:1 ", "cuda:1"), ("mps", "mps"), ("", "cuda")])
def test_a_request_is_honoured(machine, request_, device):
    machine(cuda=2, mps=True)
    assert pick_device(request_) == torch.device(device)


@pytest.mark.parametrize("request_", ["gpu", "cuda:7", "mps", "cdua", "cuda:x"])
def test_an_impossible_request_names_what_there_is(machine, request_, monkeypatch):
    machine(cuda=1)
    monkeypatch.setenv("COURSE_DEVICE", request_)
    with pytest.raises(DeviceError, match="Available: cuda, cuda:0, cpu") as error:
        get_device()
    assert repr(request_) in str(error.value)


def test_the_table_says_what_runs_here(machine, monkeypatch, capsys):
    machine(cuda=0)
    monkeypatch.delenv("COURSE_DEVICE", raising=False)
    assert get_device() == torch.device("cpu")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:5]] == ["device", "name", "memory", "torch", "threads"]
    assert lines[0].split() == ["device", "cpu"]
    assert torch.__version__ in lines[3]
    assert len(lines) == 5, "and promises nothing"


@pytest.fixture
def two_gpus(machine, monkeypatch):
    """A machine with two CUDA devices; returns the calls that would reach them."""
    machine(cuda=2)
    calls = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(("current", torch.device(device))))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU at {device}")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * 2**30, (4 + device.index) * 2**30))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *device: calls.append(("synchronised", *device)))
    return calls


def test_a_numbered_device_is_made_current_and_timing_waits_for_it(two_gpus, monkeypatch, capsys):
    monkeypatch.setenv("COURSE_DEVICE", "cuda:1")
    assert get_device() == torch.device("cuda:1")
    assert two_gpus == [("current", torch.device("cuda:1"))]
    said = capsys.readouterr().out
    assert "GPU at cuda:1" in said
    assert "3.0 GiB free of 5.0 GiB on the device" in said
    two_gpus.clear()
    with stopwatch():
        two_gpus.append("work")
    # without a device, so the current one, which get_device has set
    assert two_gpus == [("synchronised",), "work", ("synchronised",)]
    two_gpus.clear()
    measure(lambda: None, seconds=1e-6, blocks=1)
    assert ("synchronised",) in two_gpus


def test_a_device_that_cannot_be_used_is_a_clear_error(two_gpus, monkeypatch):
    def busy(device):
        raise RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable")

    monkeypatch.setattr(torch.cuda, "set_device", busy)
    monkeypatch.setenv("COURSE_DEVICE", "cuda:1")
    with pytest.raises(DeviceError, match=r"COURSE_DEVICE=cuda:1 is there but can't be used: .*busy"):
        get_device()
