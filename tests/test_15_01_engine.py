"""The engine that 15-01 writes by hand, against torch.autograd.grad on random graphs."""

import random
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

from course.lesson_code import definitions

CELLS = "square edges-into cube filled-with-zeros run-node deliver engine"
lesson = SimpleNamespace(**definitions("15-01", *CELLS.split()))
SHAPES = ((), (1,), (3,), (1, 3), (4, 1), (4, 3), (2, 1, 3), (2, 4, 3))  # all of them broadcast with each other


class Parts(Function):
    """Two tensors and a number in, two tensors out; the last output is seldom used."""

    @staticmethod
    def forward(ctx, x, by, y):
        ctx.save_for_backward(x, y)
        ctx.by = by
        return x * y, by * x

    @staticmethod
    def backward(ctx, g, h):
        x, y = ctx.saved_tensors
        return g * y + ctx.by * h, None, (g * x).sum_to_size(y.shape)


def _in_place(x: Tensor) -> Tensor:
    x = 1 * x
    x.select(0, 0).mul_(2) if x.dim() else x.mul_(2)
    return x


def random_loss() -> tuple[Tensor, list[Tensor]]:
    """A scalar made of 3 to 12 operations on leaves of many shapes, some of which need no gradient."""
    leaves = [
        torch.randn(random.choice(SHAPES), dtype=torch.float64, requires_grad=random.random() < 0.8) for _ in range(4)
    ]
    leaves[0].requires_grad_()
    made = list(leaves)
    for _ in range(random.randint(3, 12)):
        a, b = random.choice(made), random.choice(made)
        operations = [
            lambda a, b: [a + b],
            lambda a, b: [a - b],
            lambda a, b: [torch.sin(a) * b],
            lambda a, b: [a / (1 + b * b)],
            lambda a, b: [a.mean(0, keepdim=True) if a.dim() else a],
            lambda a, b: [a.sum() * b],
            lambda a, b: [a.softmax(-1) if a.dim() else torch.sigmoid(a)],
            lambda a, b: [torch.where(a > 0, a, b)],
            lambda a, b: [lesson.Square.apply(a)],
            lambda a, b: [lesson.Cube.apply(torch.tanh(a + b))],
            lambda a, b: (a + b).expand(2, 4, 3).unbind()[:1],
            lambda a, b: [_in_place(a)],
            lambda a, b: Parts.apply(*torch.broadcast_tensors(a, b)[:1], 0.5, b) if a.dim() >= b.dim() else [a * b],
            lambda a, b: [torch.utils.checkpoint.checkpoint(lambda c: torch.tanh(c) * c, a, use_reentrant=False)],
        ]
        made += random.choice(operations)(a, b)
    return sum(t.sin().sum() for t in (leaves[0], *made[-3:])), [leaf for leaf in leaves if leaf.requires_grad]


@pytest.mark.parametrize("seed", range(50))
def test_gradients_equal_pytorchs_on_a_random_graph_with_broadcasting(seed):
    random.seed(seed)
    torch.manual_seed(seed)
    loss, leaves = random_loss()
    got, order = lesson.backward_by_hand(loss)
    want = torch.autograd.grad(loss, leaves, allow_unused=True)
    for leaf, grad in zip(leaves, want, strict=True):
        assert (leaf in got) == (grad is not None)
        if grad is not None:
            torch.testing.assert_close(got[leaf], grad, rtol=1e-9, atol=1e-11)
            assert not got[leaf].requires_grad
    assert len(order) == len(set(order)) == len(lesson.edges_into(loss))
