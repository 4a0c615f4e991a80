"""Seeds for every generator a notebook uses."""

import random

import numpy as np
import torch


def seed_everything(seed: int = 0) -> None:
    """Seed Python's, NumPy's and PyTorch's global generators, on every device.

    Raises:
        ValueError: NumPy takes seeds from 0 to 2**32 - 1 only.
    """
    np.random.seed(seed)
    random.seed(seed)
    torch.manual_seed(seed)  # also seeds every CUDA device and MPS


def make_generator(seed: int = 0) -> torch.Generator:
    """A generator of its own for a DataLoader or a sampler, so that it does not depend on what ran before."""
    return torch.Generator().manual_seed(seed)
