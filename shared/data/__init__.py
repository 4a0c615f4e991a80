"""FashionMNIST and CIFAR-10 as tensors: the full sets, or the samples that come with the course.

    train = load_fashion_mnist("train", images=10_000)
    image, label = train[0]           # float32 (1, 28, 28), normalised; int
    x, y = train.tensors(device)      # all of them at once

One file a job: `facts` (what the two sets are), `arrays` (the canonical arrays and their checksums), `decoding` (the
files they come in), `samples` (the bundled ones), `fetching` (the full ones), `finding` (which of them is used),
`images` (what the notebooks get).
"""

from shared.data.arrays import DataError
from shared.data.images import ImageData, load, load_cifar10, load_fashion_mnist

__all__ = ["DataError", "ImageData", "load", "load_cifar10", "load_fashion_mnist"]
