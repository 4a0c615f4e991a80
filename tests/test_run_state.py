"""States that a checkpoint can hold; samplers and generators, found and told where to begin."""

import pickle
from collections import Counter, OrderedDict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from shared.lessons.topic_15_10.run_state import begin_sampler, loader_generators, plain, random_module, sampler_of


def test_a_state_is_made_plain_or_refused_with_the_place():
    state = {"a": [np.float64(0.5), (np.int64(2), torch.ones(2))], "b": OrderedDict(x=np.float32(1.0))}
    found = plain(state)
    assert [type(found["a"][0]), type(found["a"][1][0]), type(found["b"])] == [float, int, OrderedDict]
    assert torch.equal(found["a"][1][1], torch.ones(2))
    with pytest.raises(pickle.UnpicklingError, match=r"state\['c'\]\[1\] is a numpy.ndarray"):
        plain({"c": [1, np.ones(2)]})
    tensor = torch.ones(2)
    tensor.owner = pickle.Unpickler  # torch.save writes it, too
    with pytest.raises(pickle.UnpicklingError, match=r"state\['d'\] is a torch.Tensor"):
        plain({"d": tensor})


def test_a_schedulers_state_goes_on_as_it_was():
    """Its milestones are a Counter, whose update() adds."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 1.0)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4, 4], gamma=0.1)
    found = plain(scheduler.state_dict())
    assert found["milestones"] == Counter({2: 1, 4: 2})
    assert type(found["milestones"]) is Counter
    assert found == scheduler.state_dict()


def test_samplers_and_generators_are_found():
    data, mine, other = TensorDataset(torch.ones(8)), torch.Generator(), torch.Generator()
    sampler = RandomSampler(data, generator=mine)
    both = DataLoader(data, 2, sampler=sampler, generator=other)
    batched = DataLoader(data, batch_sampler=BatchSampler(sampler, 2, False))
    assert sampler_of(both) is sampler_of(batched) is sampler
    assert loader_generators([both, None, [1, 2]]) == [other, mine]

    class Late:
        start = epoch = 0

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            return iter(range(self.start, 8))

        def __len__(self):
            return 8

    late = Late()
    assert begin_sampler(DataLoader(data, 2, sampler=late), 3, 2) == 0
    assert (late.start, late.epoch) == (4, 3)
    assert begin_sampler(DataLoader(data, 2, sampler=late, num_workers=1), 4, 2) == 2
    assert begin_sampler(batched, 1, 3) == begin_sampler([1, 2], 1, 3) == 3


def test_a_loader_in_a_wrapper_keeps_its_sampler_and_its_generators():
    class Wrapper:
        def __init__(self, *inside):
            self.name, self.seen, self.inside = "mine", [], inside[0]
            self.more = inside[1:]
            self.other = inside[1] if inside[1:] else None

        def __iter__(self):
            return iter(self.inside)

    class Epochs(RandomSampler):
        epoch = start = 0

        def set_epoch(self, epoch):
            self.epoch = epoch

    data, mine, other = TensorDataset(torch.ones(8)), torch.Generator(), torch.Generator()
    first, second = Epochs(data, generator=mine), Epochs(data)
    loaders = DataLoader(data, 2, sampler=first, generator=other), DataLoader(data, 2, sampler=second)
    wrapped = Wrapper(Wrapper(loaders[0]), loaders[1])
    assert sampler_of(wrapped) is first
    assert loader_generators([wrapped, None]) == [other, mine]
    assert begin_sampler(wrapped, 5, 3) == 3
    assert (first.epoch, second.epoch, first.start) == (5, 5, 0)
    assert sampler_of(SimpleNamespace(inside=loaders[0])) is None, "no loader: nothing to iterate over"
    assert sampler_of(batch for batch in loaders[0]) is sampler_of(nn.Linear(1, 1)) is sampler_of(None) is None


def test_the_generator_is_that_of_the_device(monkeypatch):
    assert random_module(torch.device("cpu")) is None
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    assert random_module(torch.device("cuda:1")) is torch.cuda
    assert random_module(torch.device("cpu")) is None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda: torch.ones(1))
    assert random_module(torch.device("mps")).get_rng_state(torch.device("mps")) == 1
