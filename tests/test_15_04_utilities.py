"""What 15-04 builds: losses, metrics and averages, against PyTorch's own and definitions by brute force."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.overrides import TorchFunctionMode
from torchvision.ops import sigmoid_focal_loss

from course.lesson_code import answers, definitions

CELLS = """
    log-probabilities widened focal-loss extremes reliability calibration-error pairwise-loss triplet-costs
    triplet-loss supcon-loss running-mean smoothed confusion-matrix clip-value followed decay shadow
"""


@pytest.fixture(scope="module")
def lesson():
    names = definitions("15-04", "device", "helpers", *CELLS.split())
    names.update(answers("15-04", given=names))
    return SimpleNamespace(**names)


class TestFocal:
    @pytest.mark.parametrize("gamma", [0.0, 1.0, 3.5])
    @pytest.mark.parametrize("alpha", [None, 0.9])
    def test_it_is_torchvisions(self, lesson, gamma, alpha):
        torch.manual_seed(1)
        z = torch.randn(4, 3, 2, dtype=torch.float64, requires_grad=True)
        y = (torch.rand(4, 3, 2) < 0.4).double()
        found = []
        for loss, none in ((lesson.focal_loss, None), (sigmoid_focal_loss, -1)):
            value = loss(z, y, alpha=none if alpha is None else alpha, gamma=gamma)
            found.append((value, torch.autograd.grad(value.sum(), z)[0]))
        assert all(torch.allclose(a, b) for a, b in zip(*found, strict=True))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
    def test_large_logits_give_no_nan(self, lesson, dtype):
        z = torch.tensor([0.0, 20.0, -20.0, 6e4, -6e4], dtype=dtype)
        for gamma, y in itertools.product((0.0, 0.5, 2.0), (torch.zeros_like(z), torch.ones_like(z))):
            assert lesson.count_nans(lambda z, y=y, gamma=gamma: lesson.focal_loss(z, y, gamma=gamma), z) == 0


def test_bins_of_confidence_by_brute_force(lesson):
    torch.manual_seed(2)
    logits, y = 2 * torch.randn(200, 4), torch.randint(4, (200,))
    logits[0, 0] = 100.0  # a confidence of one has a bin, too
    table = lesson.reliability(logits, y, bins=7)
    p, k = logits.softmax(1).max(1)
    error = 0.0
    for b in range(7):
        rows = [i for i in range(200) if min(int(p[i] * 7), 6) == b]
        assert table["images"][b] == len(rows)
        if rows:
            confidence = sum(p[i].item() for i in rows) / len(rows)
            right = sum(float(k[i] == y[i]) for i in rows) / len(rows)
            assert table["confidence"][b].item() == pytest.approx(confidence, rel=1e-5)
            assert table["accuracy"][b].item() == pytest.approx(right, rel=1e-5)
            error += len(rows) / 200 * abs(confidence - right)
    assert lesson.calibration_error(table) == pytest.approx(error, rel=1e-5)


class TestContrastive:
    @pytest.mark.parametrize("kind", ["large", "equal", "half"])
    def test_large_and_equal_embeddings_have_a_gradient(self, lesson, kind):
        torch.manual_seed(0)
        z = torch.ones(8, 64) if kind == "equal" else 1e4 * torch.randn(8, 64).sign()
        z = z.half() if kind == "half" else z.bfloat16() if kind == "large" else z
        y = torch.arange(4).repeat(2)
        losses = [lambda z: lesson.pairwise_loss(*z.chunk(2), y[:4] < 2), lambda z: lesson.supcon_loss(z, y, 0.01)]
        losses += [lambda z, m=m: lesson.triplet_loss(z, y, mining=m) for m in ("all", "semi-hard", "hard")]
        losses += [lambda z: lesson.nt_xent_loss(*z.chunk(2), 0.01)]
        assert [lesson.count_nans(loss, z) for loss in losses] == [0] * 6

    @pytest.mark.parametrize("mining", ["all", "semi-hard", "hard"])
    def test_triplets_by_brute_force(self, lesson, mining):
        torch.manual_seed(0)
        for _ in range(3):
            z, y = torch.randn(9, 3, dtype=torch.float64), torch.randint(3, (9,))
            d = [[math.dist(a, b) for b in z.tolist()] for a in z.tolist()]
            losses = []
            for a in range(9):
                positives = [p for p in range(9) if p != a and y[p] == y[a]]
                negatives = [n for n in range(9) if y[n] != y[a]]
                pairs = list(itertools.product(positives, negatives))
                if mining == "hard":
                    pairs = [max(pairs, key=lambda pn, a=a: d[a][pn[0]] - d[a][pn[1]])] if pairs else []
                for p, n in pairs:
                    gap = d[a][p] - d[a][n] + 0.4
                    if mining != "semi-hard" or 0 < gap < 0.4:
                        losses.append(max(0.0, gap))
            want = sum(losses) / len(losses) if losses else 0.0
            assert lesson.triplet_loss(z, y, 0.4, mining).item() == pytest.approx(want, rel=1e-9)

    def test_one_class_has_no_triplets_single_images_no_positives_and_a_misspelt_mining_no_meaning(self, lesson):
        z = torch.randn(4, 2, requires_grad=True)
        losses = [lesson.supcon_loss(z, torch.arange(4))]
        for mining, labels in itertools.product(("all", "semi-hard", "hard"), (torch.zeros(4), torch.arange(4))):
            losses.append(lesson.triplet_loss(z, labels, mining=mining))
        sum(losses).backward()
        assert [loss.item() for loss in losses] == [0.0] * 7
        assert bool(z.grad.isfinite().all())
        with pytest.raises(ValueError, match="semihard"):
            lesson.triplet_loss(z, torch.zeros(4), mining="semihard")

    def test_supcon_by_brute_force(self, lesson):
        torch.manual_seed(3)
        z, y = torch.randn(8, 4, dtype=torch.float64), torch.tensor([0, 0, 0, 1, 1, 2, 3, 3])
        rows = F.normalize(z, dim=1)
        found = []
        for i in range(8):
            others = [k for k in range(8) if k != i]
            log_p = (rows[others] @ rows[i] / 0.05).log_softmax(0)
            peers = [log_p[others.index(k)] for k in others if y[k] == y[i]]
            if peers:
                found.append(-sum(peers) / len(peers))
        assert torch.allclose(lesson.supcon_loss(z, y, 0.05), sum(found) / len(found))


class TestMetrics:
    @pytest.mark.parametrize("kind", [float, torch.float64, torch.bfloat16])
    def test_a_running_mean_is_weighted(self, lesson, kind):
        mean = lesson.RunningMean()
        assert math.isnan(mean.compute())
        for value, count in ((1.0, 3), (5.0, 1), (-2.0, 4)):
            mean.update(value if kind is float else torch.tensor(value, dtype=kind), count)
        assert float(mean.compute()) == 0.0

    def test_it_keeps_no_graph_but_the_rounding_errors(self, lesson):
        mean = lesson.RunningMean()
        mean.update(torch.tensor(1e8, requires_grad=True))
        for _ in range(1000):
            mean.update(torch.tensor(1.0))
        assert not mean.compute().requires_grad
        assert float(mean.total.double() + mean.errors.double()) == 100_001_000.0
        assert float(mean.compute()) == pytest.approx(100_001_000 / 1001, rel=2e-7)

    def test_smoothing_is_a_weighted_mean(self, lesson):
        smooth, seen = lesson.Smoothed(0.8), []
        for x in (3.0, -1.0, 4.0, 1.5):
            got = smooth.update(x)
            seen.append(x)
            weights = [0.8 ** (len(seen) - 1 - i) for i in range(len(seen))]
            assert got == pytest.approx(sum(w * v for w, v in zip(weights, seen, strict=True)) / sum(weights))

    def test_the_confusion_matrix_counts(self, lesson):
        torch.manual_seed(4)
        parts = [lesson.ConfusionMatrix(5) for _ in range(3)]
        logits, y = torch.randn(90, 5), torch.randint(-1, 6, (90,))
        for i in range(0, 90, 10):
            parts[i % 3].update(logits[i : i + 10], y[i : i + 10])
        for other in parts[1:]:
            parts[0].merge(other)
        want = torch.zeros(5, 5, dtype=torch.int64)
        known = [i for i in range(90) if 0 <= y[i] < 5]
        for i in known:
            want[y[i], logits[i].argmax()] += 1
        assert torch.equal(parts[0].counts, want)
        assert parts[0].accuracy() == pytest.approx(want.diagonal().sum().item() / len(known), rel=1e-6)


class Waits(TorchFunctionMode):
    """Refuses what makes the CPU wait for a GPU: reading a value, a mask as an index, bincount."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        assert name not in ("item", "tolist", "__bool__", "__float__", "__int__", "bincount", "nonzero")
        index = args[1] if name in ("__getitem__", "__setitem__") else None
        indices = index if isinstance(index, tuple) else (index,)
        assert not any(isinstance(i, torch.Tensor) and i.dtype == torch.bool for i in indices)
        return func(*args, **(kwargs or {}))


def test_updates_wait_for_no_device(lesson):
    mean, matrix, variance = lesson.RunningMean(), lesson.ConfusionMatrix(4), lesson.RunningVariance()
    with Waits():
        for _ in range(2):
            mean.update(torch.tensor(2.0), 3)
            matrix.update(torch.randn(6, 4), torch.tensor([0, 1, 2, 3, -100, 4]))
            variance.update(torch.randn(5))
    assert matrix.counts.sum() == 8


def test_clip_by_value(lesson):
    ours = [nn.Parameter(torch.zeros(n)) for n in (3, 1, 5)]
    lesson.clip_grad_value(ours, 0.1)  # no gradient yet
    for p in ours[:2]:
        p.grad = torch.randn(len(p))
    want = [p.grad.clamp(-0.3, 0.3) for p in ours[:2]]
    lesson.clip_grad_value((p for p in ours), 0.3)
    assert all(torch.equal(p.grad, w) for p, w in zip(ours[:2], want, strict=True))


class TestShadow:
    @pytest.mark.parametrize(("decay", "warmup"), [(0.5, True), (0.99, True), (0.99, False)])
    def test_it_is_averaged_model(self, lesson, decay, warmup):
        torch.manual_seed(5)
        net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
        net[2].weight = net[0].weight
        ours = lesson.EMA(net, decay, warmup)

        def average(mine, theirs, seen):
            if mine[0].is_floating_point():
                early = (1 + int(seen)) / (10 + int(seen)) if warmup else 1.0
                get_ema_multi_avg_fn(min(decay, early))(mine, theirs, seen)

        theirs = AveragedModel(net, multi_avg_fn=average, use_buffers=True)
        for _ in range(12):
            with torch.no_grad():
                for p in net.parameters():
                    p.add_(torch.randn_like(p))
            net(torch.randn(7, 3))
            ours.update()
            theirs.update_parameters(net)
        state = theirs.module.state_dict()
        for name, mine in ours.shadow.items():
            want = net.state_dict()[name] if "num_batches" in name else state[name]
            assert torch.equal(mine, want), name

    def test_the_first_update_forgets_the_start_and_a_frozen_net_has_no_average(self, lesson):
        net = nn.Linear(2, 2)
        with torch.no_grad():
            net.weight.fill_(float("nan"))
        average = lesson.EMA(net, 0.9)
        nn.init.ones_(net.weight)
        average.update()
        assert torch.equal(average.shadow["weight"], torch.ones(2, 2))
        frozen = lesson.EMA(net.requires_grad_(False))
        frozen.update()
        assert (frozen.shadow, frozen.updates) == ({}, 1)
