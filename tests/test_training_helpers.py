"""What 15-10 trains with: networks, a line that changes in place, a device's generator."""

import sys
from types import SimpleNamespace

import torch

from shared.lessons.topic_15_10.host_reads import Reads
from shared.lessons.topic_15_10.live_line import LiveLine
from shared.lessons.topic_15_10.nets import conv_net, same_bits
from shared.lessons.topic_15_10.run_state import random_module


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


def test_a_live_line_in_a_file_is_its_last_state_and_in_a_terminal_writes_over_itself(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "IPython", None)
    for terminal in (False, True):
        monkeypatch.setattr(sys.stdout, "isatty", lambda terminal=terminal: terminal, raising=False)
        line = LiveLine()
        line.show("a long text")
        line.end("short")
    assert capsys.readouterr().out == f"short\n\r{'a long text':<78}\r{'short':<78}\n"


def test_a_live_line_in_a_notebook_updates_one_display(monkeypatch):
    seen = []
    handle = SimpleNamespace(update=lambda content, raw: seen.append(("update", content["text/plain"])))

    def display(content, raw, display_id):
        seen.append(("display", content["text/plain"]))
        return handle

    ipython = SimpleNamespace(get_ipython=lambda: object(), display=SimpleNamespace(display=display))
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    line = LiveLine()
    line.show("1")
    line.end("done")
    line.end("next")
    assert seen == [("display", "1"), ("update", "done"), ("display", "next")]


def test_the_generator_is_that_of_the_device(monkeypatch):
    assert random_module(torch.device("cpu")) is None
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    assert random_module(torch.device("cuda:1")) is torch.cuda
    assert random_module(torch.device("cpu")) is None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda: torch.ones(1))
    assert random_module(torch.device("mps")).get_rng_state(torch.device("mps")) == 1
