"""The recorder of 15-07 says why it does nothing where there is no GPU."""

import pytest
import torch

from module_15_advanced_pytorch_internals.recordings import record


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU to record")
def test_without_a_gpu_nothing_is_written(tmp_path, capsys):
    assert record.main(["--folder", str(tmp_path / "new")]) == 1
    assert "no CUDA device" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
