"""What 15-04 builds beside its exercises: losses, metrics and averages, against definitions by brute force.

What the notebook prints as a checked output isn't tested again: focal loss against torchvision, clipping by value,
averages against AveragedModel, which tensors an average follows.
"""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from course.lesson_code import definitions

CELLS = """
    log-probabilities widened focal-loss extremes reliability calibration-error pairwise-loss triplet-costs
    triplet-loss supcon-loss running-mean smoothed confusion-matrix
"""


@pytest.fixture(scope="module")
def lesson():
    return SimpleNamespace(**definitions("15-04", "device", *CELLS.split()))


def test_large_logits_give_focal_loss_no_nan(lesson):
    z = torch.tensor([0.0, 20.0, -20.0, 6e4, -6e4], dtype=torch.float16)
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


@pytest.mark.parametrize("mining", ["all", "semi-hard", "hard"])
def test_triplets_by_brute_force(lesson, mining):
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


def test_supcon_by_brute_force(lesson):
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


def test_batches_without_pairs_and_extreme_embeddings_have_a_loss_and_a_gradient(lesson):
    z = torch.randn(4, 2, requires_grad=True)
    losses = [lesson.supcon_loss(z, torch.arange(4))]
    for mining, labels in itertools.product(("all", "semi-hard", "hard"), (torch.zeros(4), torch.arange(4))):
        losses.append(lesson.triplet_loss(z, labels, mining=mining))
    sum(losses).backward()
    assert [loss.item() for loss in losses] == [0.0] * 7
    assert bool(z.grad.isfinite().all())
    with pytest.raises(ValueError, match="semihard"):
        lesson.triplet_loss(z, torch.zeros(4), mining="semihard")

    y = torch.arange(4).repeat(2)
    losses = [lambda z: lesson.pairwise_loss(*z.chunk(2), y[:4] < 2), lambda z: lesson.supcon_loss(z, y, 0.01)]
    losses += [lambda z, m=m: lesson.triplet_loss(z, y, mining=m) for m in ("all", "semi-hard", "hard")]
    for extreme in (torch.ones(8, 64), 1e4 * torch.randn(8, 64).sign().half()):
        assert [lesson.count_nans(loss, extreme) for loss in losses] == [0] * 5


def test_a_running_mean_is_weighted_and_keeps_rounding_errors_and_no_graph(lesson):
    mean = lesson.RunningMean()
    assert math.isnan(mean.compute())
    for value, count in ((1.0, 3), (torch.tensor(5.0, dtype=torch.bfloat16), 1), (torch.tensor(-2.0), 4)):
        mean.update(value, count)
    assert float(mean.compute()) == 0.0
    mean = lesson.RunningMean()
    mean.update(torch.tensor(1e8, requires_grad=True))
    for _ in range(1000):
        mean.update(torch.tensor(1.0))
    assert not mean.compute().requires_grad
    assert float(mean.compute()) == pytest.approx(100_001_000 / 1001, rel=2e-7)


def test_smoothing_is_a_weighted_mean(lesson):
    smooth, seen = lesson.Smoothed(0.8), []
    for x in (3.0, -1.0, 4.0, 1.5):
        got = smooth.update(x)
        seen.append(x)
        weights = [0.8 ** (len(seen) - 1 - i) for i in range(len(seen))]
        assert got == pytest.approx(sum(w * v for w, v in zip(weights, seen, strict=True)) / sum(weights))


class Waits(TorchFunctionMode):
    """Refuses what makes the CPU wait for a GPU: reading a value, a mask as an index, bincount."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        assert name not in ("item", "tolist", "__bool__", "__float__", "__int__", "bincount", "nonzero")
        index = args[1] if name in ("__getitem__", "__setitem__") else None
        assert not (isinstance(index, torch.Tensor) and index.dtype == torch.bool)
        return func(*args, **(kwargs or {}))


def test_the_confusion_matrix_counts_and_no_update_waits_for_a_device(lesson):
    torch.manual_seed(4)
    parts, mean = [lesson.ConfusionMatrix(5) for _ in range(3)], lesson.RunningMean()
    logits, y = torch.randn(90, 5), torch.randint(-1, 6, (90,))
    with Waits():
        for i in range(0, 90, 10):
            parts[i % 3].update(logits[i : i + 10], y[i : i + 10])
            mean.update(logits[i, 0], 3)
    for other in parts[1:]:
        parts[0].merge(other)
    want = torch.zeros(5, 5, dtype=torch.int64)
    known = [i for i in range(90) if 0 <= y[i] < 5]
    for i in known:
        want[y[i], logits[i].argmax()] += 1
    assert torch.equal(parts[0].counts, want)
    assert parts[0].accuracy() == pytest.approx(want.diagonal().sum().item() / len(known), rel=1e-6)
