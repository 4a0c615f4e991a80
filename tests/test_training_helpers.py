"""What 15-10 trains with: networks, costs of a step, a line that changes in place, log files, where a run goes on."""

import json
import math
import pickle
import sys
from collections import Counter, OrderedDict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from shared.lessons.topic_15_10.host_reads import Reads
from shared.lessons.topic_15_10.live_line import LiveLine
from shared.lessons.topic_15_10.log_files import LogFiles, row_lines
from shared.lessons.topic_15_10.nets import conv_net, same_bits
from shared.lessons.topic_15_10.ranks import from_all
from shared.lessons.topic_15_10.run_state import begin_sampler, loader_generators, plain, random_module, sampler_of
from shared.lessons.topic_15_10.step_costs import CLOCK, fitted, own_costs, step_costs


def test_reads_are_counted():
    x = torch.arange(3.0)
    with Reads() as reads:
        y = (x + 1).sum()
        assert reads.count == 0
        y.item(), x.tolist(), float(y), bool(y > 0)
    assert reads.count == 4


def test_a_net_flips_in_training_only():
    net, x = conv_net(4, flips=True), torch.randn(6, 1, 28, 28)
    assert torch.equal(net[0].eval()(x), x)
    flipped = net[0].train()(x)
    assert all(torch.equal(a, b) or torch.equal(a, b.flip(2)) for a, b in zip(flipped, x, strict=True))
    assert net(x).shape == (6, 10)
    assert not same_bits(conv_net(4), conv_net(4, seed=1))
    assert from_all("mine", 1) == ["mine"]


def test_costs_of_a_step_are_what_is_added_to_it():
    def plain_way(model, optimizer, loss_fn, batches):
        model.train()
        assert next(model.parameters()).device.type == "cpu"
        for x, y in batches:
            loss = loss_fn(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def slower_by(once, each):
        def work(seconds):
            end = CLOCK() + seconds
            while CLOCK() < end:
                pass

        def way(model, optimizer, loss_fn, batches):
            work(once)  # doesn't count
            for x, y in batches:
                work(each)
                plain_way(model, optimizer, loss_fn, [(x, y)])

        return way

    ways = {"plain": plain_way, "slow": slower_by(0.002, 0.0005)}
    costs = step_costs(ways, rounds=3)
    assert 300 < costs["slow"] - costs["plain"] < 5000
    assert same_bits(fitted(ways["plain"]), fitted(ways["slow"]))
    costs = own_costs({"plain": plain_way, "slow": slower_by(0, 0.00005)}, rounds=5)
    assert 0 < costs["plain"] < 10, "model, loss and optimizer do nothing"
    assert 45 < costs["slow"] - costs["plain"] < 500


# ---------------------------------------------------------------- a line that changes in place


def test_a_live_line_in_a_file_is_its_last_state_and_in_a_terminal_writes_over_itself(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "IPython", None)
    for terminal in (False, True):
        monkeypatch.setattr(sys.stdout, "isatty", lambda terminal=terminal: terminal, raising=False)
        line = LiveLine()
        line.show("a long text")
        line.end("short")
    in_file, *parts = capsys.readouterr().out.split("\r")
    assert in_file == "short\n"
    assert [part.rstrip() for part in parts] == ["a long text", "short"]
    assert parts[1].endswith("\n")
    assert len(parts[0]) == len(parts[1].rstrip("\n")) == 78


def test_a_live_line_in_a_notebook_updates_one_display(monkeypatch):
    seen = []

    class Handle:
        def update(self, content, raw):
            seen.append(("update", content["text/plain"]))

    def display(content, raw, display_id):
        seen.append(("display", content["text/plain"]))
        return Handle()

    ipython = SimpleNamespace(get_ipython=lambda: object(), display=SimpleNamespace(display=display))
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    line = LiveLine()
    line.show("1")
    line.show("2")
    line.end("done")
    line.end("next")
    assert seen == [("display", "1"), ("update", "2"), ("update", "done"), ("display", "next")]


def test_a_line_that_changes_often_is_asked_for_five_times_a_second(monkeypatch):
    clock, asked = [0.0], []
    monkeypatch.setattr("shared.lessons.topic_15_10.live_line.time.perf_counter", lambda: clock[0])
    line = LiveLine()
    for tenth in range(20):
        clock[0] = tenth / 10
        line.sometimes(lambda: asked.append(clock[0]) or "text")
    assert 5 <= len(asked) <= 10


# ---------------------------------------------------------------- log files


def test_log_files_are_begun_continued_and_cut_back(tmp_path):
    folder, names = tmp_path / "a" / "b", {"x": "head\n", "y": ""}

    def continued(sizes, name, text):
        logs = LogFiles(folder, names)
        logs.cut(sizes)
        logs.write(name, text)
        logs.close()
        return [(folder / name).read_text(encoding="utf-8") for name in names]

    logs = LogFiles(folder, names)
    assert logs.sizes() == {}
    assert not folder.exists()
    logs.write("x", "one\n")
    sizes = logs.sizes()
    assert sizes == {"x": 9, "y": 0}
    logs.write("x", "zwölf\n")
    logs.write("y", "lost\n")
    logs.close()
    assert continued(sizes, "x", "two\n") == ["head\none\ntwo\n", ""]
    assert continued({}, "y", "new\n") == ["head\n", "new\n"], "nothing had been written when the checkpoint was"


def test_files_that_are_too_short_or_missing_are_named_before_any_is_cut(tmp_path):
    (tmp_path / "x").write_text("12345")
    logs = LogFiles(tmp_path, {"x": "", "y": ""})
    with pytest.raises(FileNotFoundError, match="y"):
        logs.cut({"x": 2, "y": 3})
    assert logs.files == {}, "no other stays open"
    (tmp_path / "y").touch()
    with pytest.raises(ValueError, match="y has 0 bytes, but had 3"):
        logs.cut({"x": 2, "y": 3})
    logs.write("x", "6")  # goes behind what is there
    logs.close()
    assert (tmp_path / "x").read_text() == "123456"


def test_a_row_is_json_and_csv_whatever_its_numbers():
    line, cells = row_lines({"step": 3, "loss": math.nan, "lr": 0.1, "x": -math.inf}, ("step", "absent", "x"))
    assert json.loads(line) == {"step": 3, "loss": "nan", "lr": 0.1, "x": "-inf"}
    assert cells == '3,,"-inf"\n'


# ---------------------------------------------------------------- what a checkpoint holds, and where a run goes on


def test_a_state_is_made_plain_or_refused_with_the_place():
    state = {"a": [np.float64(0.5), (np.int64(2), torch.ones(2))], "b": OrderedDict(x=np.float32(1.0))}
    found = plain(state)
    assert [type(found["a"][0]), type(found["a"][1][0]), type(found["b"])] == [float, int, OrderedDict]
    assert torch.equal(found["a"][1][1], torch.ones(2))
    milestones = plain({"milestones": Counter({2: 1, 4: 2})})["milestones"]  # MultiStepLR's; its update() adds
    assert (type(milestones), milestones) == (Counter, {2: 1, 4: 2})
    with pytest.raises(pickle.UnpicklingError, match=r"state\['c'\]\[1\] is a numpy.ndarray"):
        plain({"c": [1, np.ones(2)]})
    tensor = torch.ones(2)
    tensor.owner = pickle.Unpickler  # torch.save writes it, too
    with pytest.raises(pickle.UnpicklingError, match=r"state\['d'\] is a torch.Tensor"):
        plain({"d": tensor})


class Epochs(RandomSampler):
    start = epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch


def test_samplers_and_generators_are_found_and_told_where_to_begin():
    data, mine, other = TensorDataset(torch.ones(8)), torch.Generator(), torch.Generator()
    sampler = Epochs(data, generator=mine)
    both = DataLoader(data, 2, sampler=sampler, generator=other)
    batched = DataLoader(data, batch_sampler=BatchSampler(sampler, 2, False))
    assert sampler_of(both) is sampler_of(batched) is sampler
    assert loader_generators([both, None, [1, 2]]) == [other, mine]
    assert begin_sampler(both, 3, 2) == 0
    assert (sampler.start, sampler.epoch) == (4, 3)
    assert begin_sampler(DataLoader(data, 2, sampler=sampler, num_workers=1), 4, 2) == 2
    assert begin_sampler(batched, 1, 3) == begin_sampler([1, 2], 1, 3) == 3


def test_a_loader_in_a_wrapper_keeps_its_sampler_and_its_generators():
    class Wrapper:
        def __init__(self, *inside):
            self.name, self.seen, self.inside = "mine", [], inside[0]
            self.other = inside[1] if inside[1:] else None

        def __iter__(self):
            return iter(self.inside)

    data, mine, other = TensorDataset(torch.ones(8)), torch.Generator(), torch.Generator()
    first, second = Epochs(data, generator=mine), Epochs(data)
    loaders = DataLoader(data, 2, sampler=first, generator=other), DataLoader(data, 2, sampler=second)
    wrapped = Wrapper(Wrapper(loaders[0]), loaders[1])
    assert sampler_of(wrapped) is first
    assert loader_generators([wrapped, None]) == [other, mine]
    assert begin_sampler(wrapped, 5, 3) == 3
    assert (first.epoch, second.epoch, first.start) == (5, 5, 0)
    assert sampler_of(batch for batch in loaders[0]) is sampler_of(nn.Linear(1, 1)) is None


def test_the_generator_is_that_of_the_device(monkeypatch):
    assert random_module(torch.device("cpu")) is None
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    assert random_module(torch.device("cuda:1")) is torch.cuda
    assert random_module(torch.device("cpu")) is None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda: torch.ones(1))
    assert random_module(torch.device("mps")).get_rng_state(torch.device("mps")) == 1
