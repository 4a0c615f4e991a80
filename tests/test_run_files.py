"""Log files that can be cut back, the line that follows a run, processes that are killed."""

import json
import math
import pickle
import sys
import time
from collections import OrderedDict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from shared.blame import LaunchError
from shared.gathering import from_all
from shared.killing import kill_here, launch_killed, launch_until_done
from shared.live_line import LiveLine
from shared.log_files import LogFiles, row_lines
from shared.nets import conv_net, same_bits
from shared.reads import Reads
from shared.run_state import begin_sampler, loader_generators, plain, random_module, sampler_of
from shared.step_costs import fitted, step_costs


def test_log_files_are_begun_continued_and_cut_back(tmp_path):
    folder, names = tmp_path / "a" / "b", {"x": "head\n", "y": ""}
    logs = LogFiles(folder, names)
    assert logs.sizes() == {}
    assert not folder.exists()
    logs.write("x", "one\n")
    sizes = logs.sizes()
    assert sizes == {"x": 9, "y": 0}
    logs.write("x", "zwölf\n")
    logs.write("y", "lost\n")
    logs.close()
    logs = LogFiles(folder, names)
    logs.cut(sizes)
    logs.write("x", "two\n")
    logs.close()
    assert [(folder / name).read_text() for name in names] == ["head\none\ntwo\n", ""]
    logs = LogFiles(folder, names)
    logs.cut({})  # nothing had been written when the checkpoint was
    logs.write("y", "new\n")
    logs.close()
    assert [(folder / name).read_text() for name in names] == ["head\n", "new\n"]


def test_a_file_that_is_too_short_is_refused_before_any_is_cut(tmp_path):
    logs = LogFiles(tmp_path, {"x": "", "y": ""})
    logs.write("x", "12345")
    logs.close()
    logs = LogFiles(tmp_path, {"x": "", "y": ""})
    with pytest.raises(ValueError, match="y has 0 bytes, but had 3"):
        logs.cut({"x": 2, "y": 3})
    logs.close()
    assert (tmp_path / "x").read_text() == "12345"
    with pytest.raises(FileNotFoundError):
        LogFiles(tmp_path, {"z": ""}).cut({"z": 1})


def test_a_row_is_json_and_csv_whatever_its_numbers():
    line, cells = row_lines({"step": 3, "loss": math.nan, "lr": 0.1, "x": -math.inf}, ("step", "absent", "x"))
    assert json.loads(line) == {"step": 3, "loss": "nan", "lr": 0.1, "x": "-inf"}
    assert cells == '3,,"-inf"\n'


def test_a_line_that_changes_often_is_asked_for_five_times_a_second(monkeypatch):
    clock, asked = [0.0], []
    monkeypatch.setattr("shared.live_line.time.perf_counter", lambda: clock[0])
    line = LiveLine()
    for tenth in range(20):
        clock[0] = tenth / 10
        line.sometimes(lambda: asked.append(clock[0]) or "text")
    assert 5 <= len(asked) <= 10


def test_reads_are_counted():
    x = torch.arange(3.0)
    with Reads() as reads:
        y = (x + 1).sum()
        assert reads.count == 0
        y.item(), x.tolist(), float(y), bool(y > 0)
    assert reads.count >= 4


def test_a_state_is_made_plain_or_refused_with_the_place():
    state = {"a": [np.float64(0.5), (np.int64(2), torch.ones(2))], "b": OrderedDict(x=np.float32(1.0))}
    found = plain(state)
    assert [type(found["a"][0]), type(found["a"][1][0]), type(found["b"])] == [float, int, OrderedDict]
    assert torch.equal(found["a"][1][1], torch.ones(2))
    with pytest.raises(pickle.UnpicklingError, match=r"state\['c'\]\[1\] is a numpy.ndarray"):
        plain({"c": [1, np.ones(2)]})


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


def test_the_generator_is_that_of_the_device(monkeypatch):
    assert random_module(torch.device("cpu")) is None
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    assert random_module(torch.device("cuda:1")) is torch.cuda
    assert random_module(torch.device("cpu")) is None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda: torch.ones(1))
    assert random_module(torch.device("mps")).get_rng_state(torch.device("mps")) == 1


def test_a_step_costs_what_is_added_to_it():
    def plain_way(model, optimizer, loss_fn, batches):
        for x, y in batches:
            loss_fn(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    def slow(model, optimizer, loss_fn, batches):
        time.sleep(0.002)  # once: doesn't count
        for x, y in batches:
            time.sleep(0.0005)
            plain_way(model, optimizer, loss_fn, [(x, y)])

    costs = step_costs({"plain": plain_way, "slow": slow}, rounds=3)
    assert 300 < costs["slow"] - costs["plain"] < 5000
    assert same_bits(fitted(plain_way), fitted(slow))


def test_what_is_killed_again_and_again_is_done_at_last(tmp_path):
    seen = []
    assert launch_until_done(slow_square, [0.2], 3, between=seen.append) == 9
    assert seen in ([0.2], [])


def slow_square(x):
    time.sleep(1.0)
    return x * x


slow_square.__module__ = "__main__"


def test_a_net_flips_in_training_only():
    net, x = conv_net(4, flips=True), torch.randn(6, 1, 28, 28)
    assert torch.equal(net[0].eval()(x), x)
    flipped = net[0].train()(x)
    assert all(torch.equal(a, b) or torch.equal(a, b.flip(2)) for a, b in zip(flipped, x, strict=True))
    assert net(x).shape == (6, 10)
    assert not same_bits(conv_net(4), conv_net(4, seed=1))
    assert from_all("mine", 1) == ["mine"]


def test_a_live_line_in_a_file_is_its_last_state(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "IPython", None)
    line = LiveLine()
    line.show("step 1")
    line.end("epoch 1")
    assert capsys.readouterr().out == "epoch 1\n"


def test_a_live_line_in_a_terminal_writes_over_itself(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "IPython", None)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    line = LiveLine()
    line.show("a long text")
    line.end("short")
    parts = capsys.readouterr().out.split("\r")
    assert [part.rstrip() for part in parts] == ["", "a long text", "short"]
    assert parts[2].endswith("\n")
    assert len(parts[1]) == len(parts[2].rstrip("\n")) == 78


def test_a_live_line_in_a_notebook_updates_one_display(monkeypatch):
    seen = []

    class Handle:
        def update(self, content, raw):
            seen.append(("update", content["text/plain"], raw))

    def display(content, raw, display_id):
        seen.append(("display", content["text/plain"], raw and display_id))
        return Handle()

    ipython = SimpleNamespace(get_ipython=lambda: object(), display=SimpleNamespace(display=display))
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    line = LiveLine()
    line.show("1")
    line.show("2")
    line.end("done")
    line.end("next")
    assert seen == [("display", "1", True), ("update", "2", True), ("update", "done", True), ("display", "next", True)]


def _quick(x):
    return x + 1


def _dies():
    kill_here()
    return "alive"


def _raises():
    raise ValueError("mine")


def _waits(path):
    path.write_text("begun")
    while True:
        pass


for function in (_quick, _dies, _raises, _waits):
    function.__module__ = "__main__"  # so they travel by value


def test_a_process_is_killed_or_was_quicker(tmp_path):
    assert launch_killed(_quick, 20.0, 1) == 2
    assert launch_killed(_dies, 20.0) is None
    assert launch_killed(_waits, 0.3, tmp_path / "it") is None
    assert (tmp_path / "it").read_text() == "begun"
    with pytest.raises(LaunchError, match="mine"):
        launch_killed(_raises, 20.0)
