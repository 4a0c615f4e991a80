"""What the record of messages sees of a run: calls of every kind, runs that hang, the rounds of a broadcast."""

import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from shared import launch
from shared.lessons.topic_15_08.traffic import Call, observe, recorded, rounds

pytestmark = pytest.mark.processes
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest


def all_kinds_of_calls():
    world, x = dist.group.WORLD, torch.ones(4)
    with recorded() as calls:
        dist.all_reduce(x)
        dist.barrier()
        dist.monitored_barrier()
        functional.wait_tensor(functional.all_reduce(functional.all_reduce(x, "sum", world), "sum", world))
        dist.all_gather_into_tensor(torch.zeros(8), x)
        dist.all_gather_object([None, None], "word")
        dist.gather(x, [torch.zeros(4) for _ in range(2)] if dist.get_rank() == 0 else None)
        dist.nn.functional.all_reduce(x)
    names = {name: vars(dist.ProcessGroup).get(name) for name in dir(dist.ProcessGroup)}
    return [(call.name, call.size, call.ring_bytes) for call in calls], str(names["allreduce"])


def test_collectives_of_every_kind_are_seen():
    for calls, method in launch(all_kinds_of_calls, 2, backend="gloo"):
        assert calls[0] == ("allreduce", 16, 16.0)  # 2(N-1)/N · S
        names = [name for name, *_ in calls]
        assert names[1:5] == ["barrier", "monitored_barrier", "all_reduce", "all_reduce"]
        assert calls[5][1:] == (32, 16.0)
        assert [size for _, size, _ in calls[8:]] == [16, 16]
        assert len(calls) == 10  # all_gather_object: sizes, then bytes
        assert "recorded" not in method  # put back


def meets_nobody(x):
    dist.send(x, 1) if dist.get_rank() == 0 else dist.send(x, 0)


def test_what_was_sent_is_known_of_a_run_that_hangs_too():
    calls, failure = observe(meets_nobody, 2, torch.ones(3), timeout=1)
    assert calls == [[Call("send", (0, 1), 12, 1)], [Call("send", (0, 1), 12, 0)]]
    assert "all wait" in failure
    assert observe(dist.barrier, 2) == ([[Call("barrier", (0, 1), 0)]] * 2, "")


def test_rounds_of_a_broadcast():
    def sends(*peers):
        return [Call("send", (0, 1, 2, 3), 4, peer) for peer in peers]

    tree = [sends(3), [], sends(0, 1), []]
    assert sorted(rounds(tree, root=2)) == [(0, 2, 0), (1, 0, 3), (1, 2, 1)]
    assert rounds([sends(1), [], [], sends(2)], root=0) == [(0, 0, 1), (-1, 3, 2)]  # rank 3 has nothing to send
    assert rounds([[]], root=0) == []
