"""Seeds for every generator a notebook uses."""

import random

import numpy as np
import torch


def seed_everything(seed: int = 0) -> None:
    """Seed Python's, NumPy's and PyTorch's global generators, on every device.

    Args:
        seed: any integer from 0 to 2**32 - 1 (NumPy's limit).

    Raises:
        ValueError: the seed is outside that range.
    """
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed must be from 0 to 2**32 - 1, got {seed}")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)  # also seeds every CUDA device and MPS


def make_generator(seed: int = 0, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator of its own for a DataLoader or a sampler, so that it does not depend on what ran before."""
    return torch.Generator(device=device).manual_seed(seed)
