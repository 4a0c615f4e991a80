"""What 15-06 builds beside its exercises: grids, integers, effects, folding, against PyTorch and brute force.

What the notebook prints as a checked output isn't tested again: the small tracer against fx, fake quantization
against PyTorch's values and gradients.
"""

import itertools
import operator
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from course.lesson_code import definitions

CELLS = """
    verdict distance verified fold fusion-cases fusion-parts fusion-kinds to-grid grids observer fake-quant ex-insert
    integer-weight to-integer aten-norm fold-exported
"""


@pytest.fixture(scope="module")
def lesson():
    return SimpleNamespace(**definitions("15-06", *CELLS.split()))


def test_verified_tells_of_nan_and_compares_in_full_precision(lesson):
    gm = fx.symbolic_trace(lesson.Case(lambda x: (x, x * float("nan"))))
    difference = lesson.verified(gm, lesson.Case(lambda x: (x, x)), torch.ones(2))
    assert difference != difference
    assert torch.backends.cudnn.allow_tf32 is False  # else an NVIDIA GPU's convolutions miss the lesson's bounds


def test_folding_an_exported_graph_is_right_and_leaves_the_given_one(lesson):
    torch.manual_seed(0)
    orders = {"conv norm other second": 0, "conv norm conv second": 0, "conv norm conv": 0, "conv norm +": 1}
    for order, left in orders.items():
        chain, image = lesson.randomise(lesson.Chain(order)), torch.randn(2, 4, 6, 6)
        exported = torch.export.export(chain, (image,)).module(check_guards=False)
        before = str(exported.graph)
        folded = lesson.fold_exported(exported)
        assert str(exported.graph) == before
        assert lesson.verified(folded, chain, image) < 1e-5
        assert sum("batch_norm" in node.name for node in folded.graph.nodes) == left


# ---------------------------------------------------------------- quantization


def test_zero_is_on_the_grid_and_the_range_in_it(lesson):
    for values, symmetric in itertools.product(([3.0, 5.0], [-4.0, -1.0], [-1.0, 7.0]), (False, True)):
        values, grid = torch.tensor(values), lesson.FakeQuant(symmetric=symmetric)
        grid(values)
        grid(torch.zeros(0, 2))  # an empty batch widens no range
        grid.rounding = True
        assert grid(torch.zeros(1)).item() == 0.0
        assert torch.allclose(grid(values), values, atol=grid.grid()[0].item() * 0.51)


def test_a_grid_a_channel_is_one_each(lesson):
    weight = torch.randn(4, 3, 3, 3) * torch.tensor([0.1, 1.0, 10.0, 100.0]).reshape(-1, 1, 1, 1)
    whole = lesson.FakeQuant(4, axis=0, symmetric=True)
    whole.rounding = True
    for channel, row in zip(whole(weight), weight, strict=True):
        own = lesson.FakeQuant(4, symmetric=True)
        own.rounding = True
        assert torch.equal(channel, own(row))


def test_integers_compute_what_fake_quantization_does_and_what_is_no_layers_weight_stays_a_float(lesson):
    class Net(nn.Module):
        """Beside a plain layer: a parameter as a layer's input, one behind a module, a weight that is read twice."""

        def __init__(self):
            super().__init__()
            self.fc, self.tied, self.act = nn.Linear(4, 4), nn.Linear(4, 4), nn.Tanh()
            self.query, self.scale = nn.Parameter(torch.rand(2, 4) + 3), nn.Parameter(torch.randn(4))

        def forward(self, x):
            x = self.fc(self.query) + self.fc(x) * self.act(self.scale)
            return self.tied(x) + F.linear(x, self.tied.weight)

    torch.manual_seed(0)
    x = torch.randn(2, 4)
    for bits in (8, 3):
        model = lesson.insert_fake_quant(Net(), bits, True)
        model(x)
        for module in model.modules():
            if isinstance(module, lesson.FakeQuant):
                module.observing, module.rounding = False, True
        integer = lesson.to_integer(model)
        assert lesson.verified(integer, model, x) < 1e-5
        state = integer.state_dict()
        assert sum(tensor.dtype == torch.int8 for tensor in state.values()) == 2
        assert {"query", "scale", "tied.weight"} <= set(state)
        assert "fc.weight" not in state


# ---------------------------------------------------------------- effects


class Outside(fx.Tracer):
    def is_leaf_module(self, module, path):
        return path != ""


class Modules(nn.Module):
    """What each module does is the first part of its path."""

    def __init__(self, own):
        super().__init__()
        self.writes = nn.ModuleDict({"norm": nn.BatchNorm1d(3), "relu": nn.ReLU(inplace=True), "own": own})
        self.writes["embedding"] = nn.Embedding(3, 3, max_norm=1.0)
        self.writes["hooked"], self.writes["hooked before"] = nn.Linear(3, 3), nn.Linear(3, 3)
        self.writes["hooked"].register_forward_hook(lambda m, a, o: o * 2)
        self.writes["hooked before"].register_forward_pre_hook(lambda m, a: None)
        self.random = nn.ModuleDict({"dropout": nn.Dropout(), "attention": nn.MultiheadAttention(3, 1, dropout=0.5)})
        self.random["pool"] = nn.FractionalMaxPool2d(2, output_size=2).eval()  # draws in evaluation, too
        off = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(3)).eval()
        self.none = nn.ModuleDict({"off": off, "tanh": nn.Tanh()})

    def forward(self, x):
        return [module(x) for part in (self.writes, self.random, self.none) for module in part.values()]


def test_what_calls_do_besides_giving_a_value(lesson):
    model = Modules(lesson.Case(torch.sin))
    gm = fx.GraphModule(model, Outside().trace(model))
    for node in gm.graph.find_nodes(op="call_module"):
        assert lesson.effect(gm, node) == node.target.partition(".")[0], node.target

    functions = {
        "writes": lambda x: (
            x.mul_(2),
            x.__setitem__(0, 1),
            F.relu(x, inplace=True),
            torch.add(x, 1, out=x),
            torch.ops.aten.add_.Tensor(x, 1),
            F.batch_norm(x, x, x, None, None, True),
            torch.batch_norm(x, None, None, x, x, True, 0.1, 1e-5, False),
        ),
        "random": lambda x: (
            torch.rand_like(x),
            torch.ops.aten.rand_like.default(x),
            F.dropout(x),
            F.gumbel_softmax(x),
            torch.multinomial(x, 2),
            x.bernoulli(),
            F.scaled_dot_product_attention(x, x, x),
        ),
        "none": lambda x: (
            x.clone(),
            x & x,
            F.dropout(x, training=False),
            F.batch_norm(x, x, x, None, None, False),
            torch.batch_norm(x, None, None, x, x, False, 0.1, 1e-5, False),
            torch.ops.aten.add.Tensor(x, 1),
        ),
    }
    for expected, function in functions.items():
        gm = fx.symbolic_trace(lesson.Case(function))
        for node in gm.graph.nodes:
            if node.op.startswith("call"):
                assert lesson.effect(gm, node) == expected, node.name

    # torch.compile's graphs hold assignments as functions of this module
    graph = fx.Graph()
    for name in ("setitem", "delitem", "iadd", "imatmul", "iconcat", "add", "and_", "getitem"):
        node = graph.call_function(getattr(operator, name), (1, 2))
        assert lesson.effect(None, node) == ("none" if name in ("add", "and_", "getitem") else "writes"), name
