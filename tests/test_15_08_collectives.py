"""15-08's named definitions, taken out of the notebook: collectives, MiniDDP and sharded training.

What the notebook prints as a checked output isn't tested again: MiniDDP against DDP, tied, frozen and unused
parameters, the bytes that each kind of sharding holds.
"""

import sys
from functools import partial

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from course.lesson_code import definitions
from shared import LaunchError, launch
from shared.lessons.topic_15_08.traffic import recorded

pytestmark = pytest.mark.processes
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest and the notebook

LESSON = definitions(
    "15-08",
    *("flat-collectives", "flat-all-reduce", "all-to-all", "from-exchange", "plain-ring"),
    *("bucket", "into-buckets", "reducer", "agreed-order", "fill-gaps", "miniddp"),
    *("flatten", "flat-gradient", "zero-1", "zero-2", "gather-shards", "sharded-module"),
)
plain_ring, MiniDDP, ShardedModule = LESSON["plain_ring"], LESSON["MiniDDP"], LESSON["ShardedModule"]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64]


# ---------------------------------------------------------------- collectives


def wrong_collectives():
    """The names of those that differ from PyTorch's, on numbers whose sums are exact; what a ring sends for 32 bytes
    a rank."""
    rank, size, found = dist.get_rank(), dist.get_world_size(), []
    for dtype in DTYPES:
        for shape in ((), (size,), (3, size, 2), (7,)):
            x = torch.randint(-8, 9, (size, *shape), generator=torch.Generator().manual_seed(rank)).to(dtype)
            total = x.clone()
            dist.all_reduce(total)
            for name in ("plain_ring", "flat_all_reduce"):
                mine = torch.zeros(size + 2, *shape, dtype=dtype)
                LESSON[name](mine[1:-1].copy_(x))  # a view: what is beside it stays
                found.append((name, torch.equal(mine[1:-1], total) and not mine[0].any() and not mine[-1].any()))
            everybody = [torch.empty_like(x) for _ in range(size)]
            dist.all_gather(everybody, x)
            found.append(("all_gather", torch.equal(torch.stack(LESSON["my_all_gather"](x)), torch.stack(everybody))))
            found.append(("reduce_scatter", torch.equal(LESSON["my_reduce_scatter"]([*x]), total[rank])))
            swapped = torch.stack([other[rank] for other in everybody])
            found.append(("all_to_all", torch.equal(torch.stack(LESSON["exchange_all"]([*x])), swapped)))
            out, root = torch.empty_like(x[0]), size - 1
            LESSON["flat_scatter"]([*x] if rank == root else None, out, root)
            found.append(("scatter", torch.equal(out, everybody[root][rank])))
            gathered = LESSON["flat_gather"](x, root)
            right = gathered is None if rank != root else torch.equal(torch.stack(gathered), torch.stack(everybody))
            found.append(("gather", right))
    with recorded() as calls:
        plain_ring(torch.ones(8 * size))
    return sorted({name for name, right in found if not right}), sum(c.size for c in calls if c.name == "send")


@pytest.mark.parametrize("size", [1, 3])
def test_the_collectives_equal_pytorchs_and_the_ring_sends_what_the_formula_says(size):
    assert launch(wrong_collectives, size, backend="gloo", timeout=60) == [([], 2 * (size - 1) * 32)] * size


# ---------------------------------------------------------------- MiniDDP


def start_and_overlap():
    """The buffers at the start; in the second step the buckets that started within backward, and their order."""
    torch.manual_seed(dist.get_rank())
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    net.register_buffer("noise", torch.randn(2))
    model = MiniDDP(net, bucket_bytes=8 * 9 * 4)
    for _ in range(2):
        with recorded() as calls:
            model(torch.randn(2, 8)).sum().backward()
        started = len(calls)
        model.finish()
    layer_of = {p: number // 2 for number, p in enumerate(net.parameters())}
    return net.noise.tolist(), started, [layer_of[bucket.params[0]] for bucket in model.reducer.buckets]


def test_buffers_begin_equal_and_buckets_start_within_backward_in_the_agreed_order():
    one, two = launch(start_and_overlap, 2, backend="gloo")
    assert one == two
    assert one[1:] == (6, [5, 4, 3, 2, 1, 0])


def use_it_wrongly(how):
    net = nn.Linear(6, 3)
    if how == "unused":
        net.never = nn.Parameter(torch.ones(3))
    model = MiniDDP(net)
    model(torch.randn(2, 6)).sum().backward()
    if how == "unused":
        model.finish()
    model(torch.randn(2, 6))


@pytest.mark.parametrize(("how", "says"), [("unused", "find_unused=True"), ("no finish", "call finish")])
def test_miniddp_says_what_was_forgotten(how, says):
    with pytest.raises(LaunchError, match=says):
        launch(use_it_wrongly, 2, how, backend="gloo")


# ---------------------------------------------------------------- sharding


def sharded(kind):
    """The losses of four steps; the replicas begin with rank 0's weights, only ZeRO-2 asks for that beforehand."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0 if kind == "ZeRO2" else rank)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    if kind == "ZeRO3":
        model = nn.Sequential(*(ShardedModule(m) if isinstance(m, nn.Linear) else m for m in model))
    elif kind != "ZeRO2":
        model = MiniDDP(model)
    make = partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)
    optimizer = LESSON[kind](model.parameters(), make) if kind in ("ZeRO1", "ZeRO2") else make(model.parameters())
    losses = []
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        x = torch.randn(24, 6, dtype=torch.float64, generator=generator)
        y = torch.randint(3, (24,), generator=generator)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[rank::size]), y[rank::size])
        loss.backward()
        if isinstance(model, MiniDDP):
            model.finish()
        optimizer.step()
        mean = loss.detach() / size
        dist.all_reduce(mean)
        losses.append(float(mean))
    return losses


def all_kinds():
    return {kind: sharded(kind) for kind in ("DDP", "ZeRO1", "ZeRO2", "ZeRO3")}


def test_sharded_training_equals_unsharded_with_another_optimizer_and_an_odd_number_of_ranks():
    for found in launch(all_kinds, 3, backend="gloo"):
        for kind, losses in found.items():
            assert losses == pytest.approx(found["DDP"], abs=1e-10), kind
