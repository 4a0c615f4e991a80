"""FashionMNIST and CIFAR-10 as tensors: the full sets, or the samples that come with the course.

One file a job: `facts` (what the two sets are), `arrays` (the canonical arrays and their checksums), `decoding` (the
files they come in), `fetching` (the full sets), `finding` (which is used), `images` (what the notebooks get).
"""

from shared.data.arrays import DataError
from shared.data.images import ImageData, load, load_cifar10, load_fashion_mnist

__all__ = ["DataError", "ImageData", "load", "load_cifar10", "load_fashion_mnist"]
