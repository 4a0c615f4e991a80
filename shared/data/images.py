"""What the notebooks get: a data set in memory, as items or as tensors.

As many images as the sample has are always taken from it, so that they are the same for everybody and nothing is
fetched. For more COURSE_DATA decides, as datasets/README.md says.
"""

import operator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.utils.data import Dataset

from shared.data.arrays import SPLITS
from shared.data.facts import CIFAR10, FASHION_MNIST, Facts
from shared.data.finding import find


@dataclass(eq=False, repr=False, kw_only=True)
class ImageData(Dataset):
    """One split of an image data set, held in memory."""

    name: str  # of the data set
    split: str  # "train" or "test"
    source: str  # "full" or "sample"
    images: torch.Tensor  # uint8 (N, C, H, W)
    labels: torch.Tensor  # int64 (N,)
    classes: tuple[str, ...]  # in the order of the labels
    mean: torch.Tensor  # float32 (C, 1, 1), of the full train split, of values in [0, 1]; the same for every split
    std: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        """Image and label number `index`: normalised float32 (C, H, W); int."""
        index = operator.index(index)
        return self.normalise(self.images[index]), int(self.labels[index])

    def normalise(self, images: torch.Tensor) -> torch.Tensor:
        """uint8 images (..., C, H, W) as float32 with mean 0 and deviation 1 per channel over the full train split."""
        mean, std = self.mean.to(images.device), self.std.to(images.device)
        return images.to(torch.float32).div_(255).sub_(mean).div_(std)

    def tensors(
        self, device: torch.device | str | None = None, *, normalise: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The whole split on `device` (default: CPU): images float32 (N, C, H, W), labels int64 (N,).

        The images are normalised as by `normalise`, or else have values in [0, 1].
        """
        images = self.images.to(device)  # a byte a value travels to the device, not four
        images = self.normalise(images) if normalise else images.to(torch.float32).div_(255)
        return images, self.labels.to(device, copy=True)

    def subset(self, count: int) -> "ImageData":
        """The first images of each class, as many of each, `count` in all, in the order of this set.

        Raises ValueError if `count` is not a multiple of the number of classes, or there are not as many images.
        """
        kinds = len(self.classes)
        each, rest = divmod(count, kinds)
        most = kinds * int(torch.bincount(self.labels, minlength=kinds).min())
        if rest or not kinds <= count <= most:
            raise ValueError(f"count must be a multiple of {kinds} from {kinds} to {most:,}, not {count}")
        rows = torch.cat([torch.nonzero(self.labels == kind).flatten()[:each] for kind in range(kinds)]).sort().values
        return replace(self, images=self.images[rows], labels=self.labels[rows])

    def __repr__(self) -> str:
        shape = "×".join(str(n) for n in self.images.shape[1:])
        return f"ImageData({self.name} {self.split}, {self.source}: {len(self):,} images {shape})"


def load_fashion_mnist(split: str = "train", *, images: int | None = None) -> ImageData:
    """FashionMNIST: 28×28 grey images of ten kinds of clothes; 60,000 train and 10,000 test (sample: 10,000, 2,000).

    Args:
        split: "train" or "test".
        images: how many are used, the first ones; None for all there are. The sample may have fewer.

    Raises:
        ValueError: unknown split, too many images, COURSE_DATA misspelt, or COURSE_DATA_MIRROR not supported.
        DataError: the bundled sample is damaged, or (COURSE_DATA=full) the full set cannot be had.
    """
    return load(FASHION_MNIST, split, images=images)


def load_cifar10(split: str = "train", *, images: int | None = None) -> ImageData:
    """CIFAR-10: 32×32 colour images of ten classes; 50,000 train and 10,000 test (sample: 6,000 and 1,000).

    Arguments and errors as for `load_fashion_mnist`; images are (3, 32, 32).
    """
    return load(CIFAR10, split, images=images)


def load(facts: Facts, split: str, *, images: int | None = None) -> ImageData:
    """Load one split of the data set that `facts` describe; see `load_fashion_mnist`."""
    if split not in SPLITS:
        raise ValueError(f'split must be "train" or "test", not {split!r}')
    count = facts.full[split].count
    if images is not None and not 1 <= operator.index(images) <= count:
        raise ValueError(f"images must be 1 to {count:,}, which {facts.name} {split} has, not {images:,}")
    arrays, source = find(facts, split, images)
    pixels, labels = arrays.images[:images], arrays.labels[:images]
    pixels = pixels[:, None] if pixels.ndim == 3 else pixels.transpose(0, 3, 1, 2)
    return ImageData(
        name=facts.name, split=split, source=source, classes=tuple(facts.classes),
        images=torch.from_numpy(np.array(pixels, order="C")), labels=torch.from_numpy(labels.astype(np.int64)),
        mean=torch.tensor(facts.mean)[:, None, None], std=torch.tensor(facts.std)[:, None, None],
    )  # fmt: skip
