"""What 15-10 trains with and measures by: networks, reads of the device, costs of a step, what all ranks know."""

import torch

from shared.lessons.topic_15_10.host_reads import Reads
from shared.lessons.topic_15_10.nets import conv_net, same_bits
from shared.lessons.topic_15_10.ranks import from_all
from shared.lessons.topic_15_10.step_costs import CLOCK, fitted, own_costs, step_costs


def test_reads_are_counted():
    x = torch.arange(3.0)
    with Reads() as reads:
        y = (x + 1).sum()
        assert reads.count == 0
        y.item(), x.tolist(), float(y), bool(y > 0)
    assert reads.count == 4


def test_a_step_costs_what_is_added_to_it():
    def plain_way(model, optimizer, loss_fn, batches):
        for x, y in batches:
            loss_fn(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    def work(seconds):
        end = CLOCK() + seconds
        while CLOCK() < end:
            pass

    def slow(model, optimizer, loss_fn, batches):
        work(0.002)  # once: doesn't count
        for x, y in batches:
            work(0.0005)
            plain_way(model, optimizer, loss_fn, [(x, y)])

    costs = step_costs({"plain": plain_way, "slow": slow}, rounds=3)
    assert 300 < costs["slow"] - costs["plain"] < 5000
    assert same_bits(fitted(plain_way), fitted(slow))


def test_a_net_flips_in_training_only():
    net, x = conv_net(4, flips=True), torch.randn(6, 1, 28, 28)
    assert torch.equal(net[0].eval()(x), x)
    flipped = net[0].train()(x)
    assert all(torch.equal(a, b) or torch.equal(a, b.flip(2)) for a, b in zip(flipped, x, strict=True))
    assert net(x).shape == (6, 10)
    assert not same_bits(conv_net(4), conv_net(4, seed=1))
    assert from_all("mine", 1) == ["mine"]


def test_a_loops_own_work_is_what_it_does_besides_model_loss_and_optimizer():
    def plain_way(model, optimizer, loss_fn, batches):
        model.train()
        assert next(model.parameters()).device.type == "cpu"
        for x, y in batches:
            loss = loss_fn(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def slow(model, optimizer, loss_fn, batches):
        for x, y in batches:
            end = CLOCK() + 0.00005
            while CLOCK() < end:
                pass
            plain_way(model, optimizer, loss_fn, [(x, y)])

    costs = own_costs({"plain": plain_way, "slow": slow}, rounds=5)
    assert 0 < costs["plain"] < 10
    assert 45 < costs["slow"] - costs["plain"] < 500
