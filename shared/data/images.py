"""What the notebooks get: a data set in memory, as items or as tensors.

`images` says how many a topic uses. As many as the sample has are always taken from it, so that they are the same for
everybody and nothing is fetched. For more, or without a number, COURSE_DATA decides: `sample` (no network, nothing
written), `full` (downloaded if need be, an error if that is impossible) or `auto` (the default: the full set if it is
on disk; else, where a person is waiting, an attempt to download it, announced with its size and how to decline; else
the sample). No program is started for it; only `make data` does that.
"""

import operator
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from shared.data.arrays import SPLITS
from shared.data.facts import CIFAR10, FASHION_MNIST, Facts
from shared.data.finding import find


class ImageData(Dataset):
    """One split of an image data set, held in memory.

    Attributes:
        name: of the data set.
        split: "train" or "test".
        source: "full" or "sample".
        images: uint8 (N, C, H, W).
        labels: int64 (N,).
        classes: their names, in the order of the labels.
        mean, std: of the full train split for each channel, of values in [0, 1]. The same for every split and sample.
        transform: called with a uint8 (C, H, W) image instead of normalising it; None to normalise.
    """

    def __init__(
        self,
        *,
        name: str,
        split: str,
        source: str,
        images: torch.Tensor,
        labels: torch.Tensor,
        classes: tuple[str, ...],
        mean: tuple[float, ...],
        std: tuple[float, ...],
        transform: Callable[[torch.Tensor], Any] | None = None,
    ) -> None:
        if transform is not None and not callable(transform):
            raise TypeError(f"transform must be a function of a uint8 (C, H, W) image, not {transform!r}")
        self.name = name
        self.split = split
        self.source = source
        self.images = images
        self.labels = labels
        self.classes = classes
        self.mean = mean
        self.std = std
        self.transform = transform
        # made once: making them for every item would take as long as normalising it
        self._mean = torch.tensor(mean)[:, None, None]
        self._std = torch.tensor(std)[:, None, None]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        """Image and label number `index`: normalised float32 (C, H, W), or what `transform` makes of it; int."""
        index = operator.index(index)
        image = self.images[index]
        image = self.normalise(image) if self.transform is None else self.transform(image)
        return image, int(self.labels[index])

    def normalise(self, images: torch.Tensor) -> torch.Tensor:
        """uint8 images (..., C, H, W) as float32 with mean 0 and deviation 1 per channel over the full train split."""
        mean, std = self._mean.to(images.device), self._std.to(images.device)
        return images.to(torch.float32).div_(255).sub_(mean).div_(std)

    def tensors(
        self,
        device: torch.device | str | None = None,
        *,
        normalise: bool = True,
        dtype: torch.dtype = torch.float32,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The whole split: images `dtype` (N, C, H, W) and labels int64 (N,), on `device` (default: CPU).

        Args:
            normalise: as `normalise` does; False leaves values in [0, 1].
            dtype: a floating point type. `transform` is not applied.
        """
        if not dtype.is_floating_point:
            raise ValueError(f"dtype must be a floating point type, not {dtype}; `images` holds the uint8 values")
        images = self.images.to(device)  # a byte a value travels to the device, not four
        images = self.normalise(images) if normalise else images.to(torch.float32).div_(255)
        return images.to(dtype), self.labels.to(device, copy=True)

    def subset(self, count: int) -> "ImageData":
        """The first images of each class, as many of each, `count` in all, in the order of this set.

        Raises:
            ValueError: `count` is not a multiple of the number of classes, or there are not as many images.
        """
        each, rest = divmod(count, len(self.classes))
        available = int(torch.bincount(self.labels, minlength=len(self.classes)).min())
        if rest or not 1 <= each <= available:
            raise ValueError(
                f"count must be a multiple of {len(self.classes)} from {len(self.classes)} to "
                f"{available * len(self.classes):,}, not {count}"
            )
        per_class = [torch.nonzero(self.labels == c).flatten()[:each] for c in range(len(self.classes))]
        rows = torch.cat(per_class).sort().values
        return ImageData(
            name=self.name,
            split=self.split,
            source=self.source,
            images=self.images[rows],
            labels=self.labels[rows],
            classes=self.classes,
            mean=self.mean,
            std=self.std,
            transform=self.transform,
        )

    def __repr__(self) -> str:
        shape = "×".join(str(n) for n in self.images.shape[1:])
        return f"ImageData({self.name} {self.split}, {self.source}: {len(self):,} images {shape})"


def load_fashion_mnist(
    split: str = "train",
    *,
    images: int | None = None,
    root: str | os.PathLike | None = None,
    transform: Callable[[torch.Tensor], Any] | None = None,
) -> ImageData:
    """FashionMNIST: 28×28 grey images of ten kinds of clothes; 60,000 train and 10,000 test (sample: 10,000, 2,000).

    Args:
        split: "train" or "test".
        images: how many are used, the first ones; None for all there are. The sample may have fewer.
        root: folder of the full sets; default COURSE_DATA_DIR, else datasets/full.
        transform: called with a uint8 (1, 28, 28) image instead of normalising it.

    Raises:
        ValueError: unknown split, too many images, COURSE_DATA misspelt, or COURSE_DATA_MIRROR not supported.
        DataError: the bundled sample is damaged, or (COURSE_DATA=full) the full set cannot be had.
    """
    return load(FASHION_MNIST, split, images=images, root=root, transform=transform)


def load_cifar10(
    split: str = "train",
    *,
    images: int | None = None,
    root: str | os.PathLike | None = None,
    transform: Callable[[torch.Tensor], Any] | None = None,
) -> ImageData:
    """CIFAR-10: 32×32 colour images of ten classes; 50,000 train and 10,000 test (sample: 6,000 and 1,000).

    Arguments and errors as for `load_fashion_mnist`; images are (3, 32, 32).
    """
    return load(CIFAR10, split, images=images, root=root, transform=transform)


def load(
    facts: Facts,
    split: str,
    *,
    images: int | None = None,
    root: str | os.PathLike | None = None,
    transform: Callable[[torch.Tensor], Any] | None = None,
) -> ImageData:
    """Load one split of the data set that `facts` describe; see `load_fashion_mnist`."""
    if split not in SPLITS:
        raise ValueError(f'split must be "train" or "test", not {split!r}')
    count = facts.full[split].count
    if images is not None and not 1 <= operator.index(images) <= count:
        raise ValueError(f"images must be 1 to {count:,}, which {facts.name} {split} has, not {images:,}")
    arrays, source = find(facts, split, images, root)
    pixels, labels = arrays.images[:images], arrays.labels[:images]
    pixels = pixels[:, None] if pixels.ndim == 3 else pixels.transpose(0, 3, 1, 2)
    return ImageData(
        name=facts.name,
        split=split,
        source=source,
        images=torch.from_numpy(np.array(pixels, order="C")),
        labels=torch.from_numpy(labels.astype(np.int64)),
        classes=facts.classes,
        mean=facts.mean,
        std=facts.std,
        transform=transform,
    )
