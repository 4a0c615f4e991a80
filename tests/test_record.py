"""`python -m course record` says why it does nothing where there is no GPU."""

import argparse

import pytest
import torch

from course import record


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU to record")
def test_without_a_gpu_nothing_is_written(tmp_path, capsys):
    folder = tmp_path / "recordings"
    assert record.main(argparse.Namespace(folder=folder)) == 1
    assert "no CUDA device" in capsys.readouterr().err
    assert not folder.exists()
