"""The recorder of 15-07 says why it does nothing where there is no GPU."""

import os
import subprocess
import sys

import pytest
import torch

from course.environment import ROOT


@pytest.mark.processes
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU to record")
def test_without_a_gpu_nothing_is_written(tmp_path):
    command = [sys.executable, "-m", "module_15_advanced_pytorch_internals.recordings.record"]
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [*command, "--folder", str(tmp_path / "new")], cwd=ROOT, env=env, timeout=120, check=False,
        capture_output=True, text=True, encoding="utf-8",
    )  # fmt: skip
    assert done.returncode == 1
    assert "no CUDA device" in done.stderr
    assert not (tmp_path / "new").exists()
