"""15-08's named definitions, taken out of the notebook: the ring, the tree, MiniDDP and sharded training."""

import random
import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from course.lesson_code import definitions
from shared import LaunchError, launch
from shared.lessons.topic_15_08.traffic import recorded

pytestmark = pytest.mark.processes
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest and the notebook

LESSON = definitions(
    "15-08",
    *("flat-collectives", "flat-all-reduce", "all-to-all", "from-exchange", "plain-ring", "ex-tree", "ex-two-ways"),
    *("bucket", "into-buckets", "reducer", "agreed-order", "fill-gaps", "miniddp"),
    *("flatten", "flat-gradient", "zero-1", "zero-2", "gather-shards", "sharded-module"),
)
plain_ring, tree_broadcast, MiniDDP = LESSON["plain_ring"], LESSON["tree_broadcast"], LESSON["MiniDDP"]
ZeRO1, ZeRO2, ShardedModule = LESSON["ZeRO1"], LESSON["ZeRO2"], LESSON["ShardedModule"]

# ---------------------------------------------------------------- ring all-reduce

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64]
CASES_A_WORLD = 25  # for N = 1 to 8: 200 in all


def random_cases(size):
    """(elements, dtype): fewer than ranks, awkward remainders, up to a million."""
    rng = random.Random(size)
    fixed = [1, size - 1 or 1, size, size + 1, 1_000_000 - rng.randrange(8), rng.randrange(200_000, 1_000_000)]
    sizes = fixed + [int(10 ** rng.uniform(0, 5)) for _ in range(CASES_A_WORLD - len(fixed))]
    return [(count, rng.choice(DTYPES)) for count in sizes]


def run_cases(cases):
    """For each case: bytes sent, and whether the result equals dist.all_reduce's."""
    rank, found = dist.get_rank(), []
    generator = torch.Generator().manual_seed(rank)
    for count, dtype in cases:
        x = torch.randint(-8, 9, (count,), generator=generator).to(dtype)  # exact in bfloat16, in any order
        expected = x.clone()
        steps = []
        with recorded() as calls:
            plain_ring(x, watch=lambda now, steps=steps: steps.append(1))
        dist.all_reduce(expected)
        sent = sum(call.size for call in calls if call.name == "send")
        found.append((sent, torch.equal(x, expected) and len(steps) == 2 * (dist.get_world_size() - 1)))
    return found


@pytest.mark.parametrize("size", range(1, 9))
def test_ring_equals_all_reduce_on_25_random_cases(size):
    cases = random_cases(size)
    by_rank = launch(run_cases, size, cases, backend="gloo", timeout=120)
    for i, (count, dtype) in enumerate(cases):
        assert all(found[i][1] for found in by_rank), f"N={size}, {count} x {dtype}"
        sent = [found[i][0] for found in by_rank]
        assert sum(sent) == 2 * (size - 1) * count * dtype.itemsize
        if count % size == 0:
            assert set(sent) == {2 * (size - 1) * count // size * dtype.itemsize}  # 2(N-1)/N · S, exactly


def ring_corner_cases():
    rank = dist.get_rank()
    whole = torch.zeros(30)
    plain_ring(whole[10:20].fill_(1.0))
    matrix = torch.full((5, 3), rank)
    plain_ring(matrix)
    return whole.tolist() == [0.0] * 10 + [3.0] * 10 + [0.0] * 10, matrix.tolist() == [[3] * 3] * 5


def test_ring_in_views_and_matrices():
    assert launch(ring_corner_cases, 3, backend="gloo") == [(True, True)] * 3


def simple_collectives():
    """Each of the short collectives beside PyTorch's, on numbers whose sums are exact."""
    rank, size, found = dist.get_rank(), dist.get_world_size(), []
    for dtype in DTYPES:
        for shape in ((), (size,), (3, size, 2), (7,)):
            x = torch.randint(-8, 9, (size, *shape), generator=torch.Generator().manual_seed(rank)).to(dtype)
            total = x.clone()
            dist.all_reduce(total)
            for name in ("plain_ring", "flat_all_reduce", "two_way_ring"):
                mine = x.clone()
                LESSON[name](mine)
                found.append((name, torch.equal(mine, total)))
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
    return sorted({name for name, right in found if not right})


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_short_collectives_equal_pytorchs(size):
    assert launch(simple_collectives, size, backend="gloo", timeout=60) == [[]] * size


# ---------------------------------------------------------------- tree


def every_root():
    size, rank, found = dist.get_world_size(), dist.get_rank(), []
    for src in range(size):
        x = torch.full((5,), rank)
        sent = tree_broadcast(x, src)
        found.append((x.tolist(), sent))
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8])
def test_tree_reaches_everybody_from_every_root(size):
    by_rank = launch(every_root, size, backend="gloo")
    for src in range(size):
        assert all(found[src][0] == [src] * 5 for found in by_rank)
        sent = [found[src][1] for found in by_rank]
        assert sum(sent) == size - 1
        assert max(sent) <= (size - 1).bit_length()


# ---------------------------------------------------------------- MiniDDP


def small_net():
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def train(kind, cap, optimizer="SGD"):
    """Five steps on this rank's share of a global batch of 24; losses and parameters."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    net = small_net()
    model = MiniDDP(net, cap) if kind == "mini" else DistributedDataParallel(net, bucket_cap_mb=cap / 2**20)
    step = getattr(torch.optim, optimizer)(net.parameters(), lr=0.1)
    generator, losses = torch.Generator().manual_seed(0), []
    for _ in range(5):
        x = torch.randn(24, 6, generator=generator, dtype=torch.float64)
        y = torch.randint(3, (24,), generator=generator)
        step.zero_grad()
        loss = F.cross_entropy(model(x[rank::size]), y[rank::size])
        loss.backward()
        if kind == "mini":
            model.finish()
        step.step()
        mean = loss.detach() / size
        dist.all_reduce(mean)
        losses.append(float(mean))
    return losses, torch.cat([p.detach().flatten() for p in net.parameters()])


def train_each():
    return {(kind, cap): train(kind, cap) for kind in ("mini", "ddp") for cap in (1, 1000, 2**20)}


def test_miniddp_equals_ddp_exactly_and_one_process_closely():
    runs = {size: launch(train_each, size, backend="gloo") for size in (1, 2, 4)}
    alone = runs[1][0]["mini", 1]
    for ranks in runs.values():
        for found in ranks:
            for cap in (1, 1000, 2**20):
                assert torch.equal(found["mini", cap][1], found["ddp", cap][1])
                assert found["mini", cap][0] == found["ddp", cap][0]
                assert found["mini", cap][0] == pytest.approx(alone[0], abs=1e-10)
                assert torch.equal(found["mini", cap][1], ranks[0]["mini", cap][1])


class Tricky(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))
        self.b.weight = self.a.weight  # tied
        self.c.requires_grad_(False)  # frozen
        self.never = nn.Parameter(torch.ones(3))
        self.register_buffer("noise", torch.randn(2))

    def forward(self, x):
        x = self.c(self.b(self.a(x)))
        return self.d(x) if dist.get_rank() % 2 else x  # used on odd ranks


def tricky(kind):
    torch.manual_seed(dist.get_rank())
    net = Tricky()
    model = MiniDDP(net, 64, find_unused=True) if kind == "mini" else None
    model = model or DistributedDataParallel(net, find_unused_parameters=True)
    grads = []
    for _ in range(3):
        net.zero_grad()
        with model.no_sync():
            model(torch.randn(3, 4)).square().mean().backward()
        local = net.a.weight.grad.clone()
        model(torch.randn(3, 4)).square().mean().backward()
        if kind == "mini":
            model.finish()
        grads.append({name: p.grad for name, p in net.named_parameters()} | {"local": local})
    return grads, net.noise


def tricky_both():
    return tricky("mini"), tricky("ddp")


def test_miniddp_with_tied_frozen_and_unused_parameters_and_no_sync():
    by_rank = launch(tricky_both, 2, backend="gloo")
    for (mini, noise), (ddp, _) in by_rank:
        assert torch.equal(noise, by_rank[0][0][1])  # buffers of rank 0
        for own, reference in zip(mini, ddp, strict=True):
            for name, grad in reference.items():
                assert (own[name] is None) == (grad is None), name
                assert grad is None or torch.equal(own[name], grad), name
            assert own["never"] is None
    assert not torch.equal(by_rank[0][0][0][0]["local"], by_rank[1][0][0][0]["local"])  # no_sync did not average


def use_it_wrongly(how):
    model = MiniDDP(Tricky() if how == "unused" else small_net().float())
    x = torch.randn(2, 4 if how == "unused" else 6)
    losses = [model(x).sum() for _ in range(2 if how == "two backwards" else 1)]
    for loss in losses:
        loss.backward()
    if how == "unused":
        model.finish()
    model(x)


@pytest.mark.parametrize(
    ("how", "says"),
    [("unused", "find_unused=True"), ("no finish", "call finish"), ("two backwards", "second backward before finish")],
)
def test_miniddp_says_what_was_forgotten(how, says):
    with pytest.raises(LaunchError, match=says):
        launch(use_it_wrongly, 2, how, backend="gloo")


def overlap():
    """Buckets that had started before backward returned, in the second step."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    model = MiniDDP(net, bucket_bytes=8 * 9 * 4)
    for _ in range(2):
        with recorded() as calls:
            model(torch.randn(2, 8)).sum().backward()
        before = len(calls)
        model.finish()
    layer_of = {p: number // 2 for number, p in enumerate(net.parameters())}
    order = [layer_of[bucket.params[0]] for bucket in model.reducer.buckets]
    return before, order


def test_buckets_start_during_backward_in_the_agreed_order():
    assert launch(overlap, 2, backend="gloo") == [(6, [5, 4, 3, 2, 1, 0])] * 2


# ---------------------------------------------------------------- sharding

MAKERS = {
    "Adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
}


def sharded(kind, make):
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = small_net()
    model = nn.Sequential(*(ShardedModule(m) if isinstance(m, nn.Linear) else m for m in net)) if kind == 3 else net
    params = list(model.parameters())
    ddp = MiniDDP(net) if kind in (0, 1) else None
    optimizer = {1: ZeRO1, 2: ZeRO2}[kind](params, make) if kind in (1, 2) else make(params)
    losses = []
    for _ in range(4):
        x, y = torch.randn(24, 6, dtype=torch.float64), torch.randint(3, (24,))
        optimizer.zero_grad()
        loss = F.cross_entropy((ddp or model)(x[rank::size]), y[rank::size])
        loss.backward()
        if ddp:
            ddp.finish()
        optimizer.step()
        mean = loss.detach() / size
        dist.all_reduce(mean)
        losses.append(float(mean))
    inner = getattr(optimizer, "optimizer", optimizer)
    state = sum(t.nbytes for s in inner.state.values() for t in s.values() if torch.is_tensor(t) and t.dim())
    return losses, state, sum(p.nbytes for p in params)


def all_kinds():
    return {(kind, name): sharded(kind, make) for kind in range(4) for name, make in MAKERS.items()}


@pytest.mark.parametrize("size", [1, 3, 4])
def test_sharded_training_equals_unsharded_with_a_share_of_the_memory(size):
    for found in launch(all_kinds, size, backend="gloo"):
        for name in MAKERS:
            reference, state, params = found[0, name]
            for kind in (1, 2, 3):
                losses, own_state, own_params = found[kind, name]
                assert losses == pytest.approx(reference, abs=1e-10), (kind, name)
                assert own_state <= state / size + 2 * 3 * 8 * size  # padding: below `size` elements a unit and state
                if kind == 3:
                    assert own_params <= params / size + 3 * 8 * size


def parameters_stay_parameters():
    torch.manual_seed(dist.get_rank())
    net = small_net()
    before = [p.detach().clone() for p in net.parameters()]
    optimizer = ZeRO1(net.parameters(), MAKERS["SGD"])
    kept = all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    net(torch.ones(1, 6).double()).sum().backward()
    optimizer.zero_grad()
    optimizer.step()  # no gradient at all counts as zero
    return kept, all(p.grad is None for p in net.parameters())


def test_sharded_optimizer_keeps_values_and_drops_gradients():
    assert launch(parameters_stay_parameters, 2, backend="gloo") == [(True, True)] * 2
