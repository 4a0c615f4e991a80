"""What the notebooks import: plumbing only, never the concept that a notebook teaches."""

from shared.data import load_cifar10, load_fashion_mnist
from shared.device import get_device
from shared.errors import expect_error
from shared.launcher import LaunchError, launch, prepare_launch
from shared.quiet import quiet
from shared.seeding import make_generator, seed_everything
from shared.timing import compare, measure, pretty_seconds, stopwatch

__all__ = [
    "LaunchError",
    "compare",
    "expect_error",
    "get_device",
    "launch",
    "load_cifar10",
    "load_fashion_mnist",
    "make_generator",
    "measure",
    "prepare_launch",
    "pretty_seconds",
    "quiet",
    "seed_everything",
    "stopwatch",
]
