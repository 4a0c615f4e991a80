"""What 15-06 builds: the small tracer, grids, integers, effects, passes, against PyTorch's own and brute force."""

import contextlib
import copy
import itertools
import operator
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from course.lesson_code import answers, definitions

CELLS = """
    mini-node mini-recorder mini-proxy mini-operators net is-layer mini-tracer run-nodes verdict distance verified
    swap-function fold fusion-cases fusion-parts fusion-kinds to-grid grids observer fake-quant integer-weight
    to-integer aten-norm fold-exported
"""


@pytest.fixture(scope="module")
def lesson():
    names = definitions("15-06", *CELLS.split())
    names.update(answers("15-06", given=names))
    return SimpleNamespace(**names)


class Forms(nn.Module):
    """Calls in all forms that the small tracer knows."""

    def __init__(self):
        super().__init__()
        self.fc, self.norm = nn.Linear(4, 6), nn.Sequential(nn.LayerNorm(6), nn.Tanh())
        self.scale = nn.Parameter(torch.rand(6))
        self.register_buffer("shift", torch.rand(6))

    def forward(self, x, y):
        z = self.norm(self.fc(x)) * self.scale + self.shift
        z = torch.cat([z, F.relu(z)], dim=1)[:, 2:8] @ y
        return (-z).softmax(dim=-1), z.sum() / 3


class TestMiniTracer:
    def test_replaying_gives_the_models_outputs_with_its_present_weights(self, lesson):
        model = Forms().eval()
        nodes = lesson.MiniTracer().trace(model)
        with torch.no_grad():
            model.scale += 1
        x, y = torch.randn(3, 4), torch.randn(6, 2)
        for mine, theirs in zip(lesson.run_nodes(nodes, model, x, y), model(x, y), strict=True):
            assert torch.equal(mine, theirs)

    def test_nothing_stays_patched(self, lesson):
        def broken(x):
            raise KeyError

        before = nn.Module.__call__
        with pytest.raises(KeyError):
            lesson.MiniTracer().trace(lesson.Case(broken))
        assert nn.Module.__call__ is before


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


class TestFakeQuant:
    @pytest.mark.parametrize(("bits", "symmetric"), [(8, True), (4, False), (2, True)])
    def test_values_and_gradients_are_pytorchs(self, lesson, bits, symmetric):
        torch.manual_seed(0)
        x = torch.randn(5, 64, dtype=torch.float64, requires_grad=True)
        grid = lesson.FakeQuant(bits, symmetric=symmetric).double()
        grid(x[:, :20])
        grid.observing, grid.rounding = False, True
        step, zero = (value.item() for value in grid.grid())
        mine = grid(x)
        theirs = torch.fake_quantize_per_tensor_affine(x.float(), step, int(zero), grid.low, grid.high)
        agree = (mine - theirs).abs() < 1e-4  # ties may go to either side
        assert agree.double().mean() > 0.97
        gradients = [torch.autograd.grad(y.sum(), x)[0] for y in (mine, theirs)]
        assert (gradients[0] == gradients[1]).double().mean() > 0.97

    def test_zero_is_on_the_grid_and_the_range_in_it(self, lesson):
        for values, symmetric in itertools.product(([3.0, 5.0], [-4.0, -1.0], [-1.0, 7.0]), (False, True)):
            values, grid = torch.tensor(values), lesson.FakeQuant(symmetric=symmetric)
            grid(values)
            grid(torch.zeros(0, 2))  # an empty batch widens no range
            grid.rounding = True
            assert grid(torch.zeros(1)).item() == 0.0
            assert torch.allclose(grid(values), values, atol=grid.grid()[0].item() * 0.51)

    def test_a_grid_a_channel_is_one_each(self, lesson):
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


class TestEffects:
    def test_what_pytorchs_calls_do_besides_giving_a_value(self, lesson):
        """Each call has a name that says what is expected."""

        class Outside(fx.Tracer):
            def is_leaf_module(self, module, path):
                return path != ""

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.writes = nn.ModuleDict({"norm": nn.BatchNorm1d(3), "relu": nn.ReLU(inplace=True)})
                self.writes["embedding"] = nn.Embedding(3, 3, max_norm=1.0)
                self.writes["parametrized"] = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))
                self.writes["hooked"] = nn.Linear(3, 3)
                self.writes["hooked"].register_forward_hook(lambda m, a, o: o * 2)
                self.writes["own"] = lesson.Case(torch.sin)
                self.random = nn.ModuleDict({"dropout": nn.Dropout(), "alpha": nn.AlphaDropout(), "rrelu": nn.RReLU()})
                self.random["attention"] = nn.MultiheadAttention(3, 1, dropout=0.5)
                self.random["lstm"] = nn.LSTM(3, 3, 2, dropout=0.5)
                self.random["pool"] = nn.FractionalMaxPool2d(2, output_size=2).eval()  # draws in evaluation, too
                off = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(3)).eval()
                self.none = nn.ModuleDict({"off": off, "tanh": nn.Tanh()})

            def forward(self, x):
                return [module(x) for part in (self.writes, self.random, self.none) for module in part.values()]

        model = Model()
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
                F.alpha_dropout(x, training=True),
                F.rrelu(x, training=True),
                F.gumbel_softmax(x),
                torch.poisson(x),
                torch.multinomial(x, 2),
                x.bernoulli(),
                F.scaled_dot_product_attention(x, x, x),
                F.normalize(x),  # in doubt
            ),
            "none": lambda x: (
                x.clone(),
                x.__abs__(),
                x & x,
                F.dropout(x, 0.5, False),
                F.dropout(x, training=False),
                F.batch_norm(x, x, x, None, None, False),
                torch.batch_norm(x, None, None, x, x, False, 0.1, 1e-5, False),
                F.instance_norm(x),
                torch.ops.aten.add.Tensor(x, 1),
            ),
        }
        for expected, function in functions.items():
            gm = fx.symbolic_trace(lesson.Case(function))
            for node in gm.graph.nodes:
                if node.op.startswith("call"):
                    assert lesson.effect(gm, node) == expected, node.name

    def test_operators_that_change_their_first_operand_write(self, lesson):
        """As graphs of torch.compile hold them; a symbolic trace has none."""
        others = {"setitem": (0, 7), "iconcat": ([7],), "delitem": (0,)}
        writing, changed = set(), set()
        for name, function in vars(operator).items():
            if type(function) is not type(operator.add) or name.startswith("_"):
                continue
            graph = fx.Graph()
            node = graph.call_function(function, (graph.placeholder("x"), 2))
            kind = lesson.effect(None, node)
            assert kind in ("writes", "none")
            writing |= {name} if kind == "writes" else set()
            for first in (torch.tensor([3, 4]), torch.tensor([3.0, 4.0]), [3, 4]):
                before = list(copy.deepcopy(first))
                with contextlib.suppress(Exception):
                    function(first, *others.get(name, (2,)))
                changed |= {name} if list(first) != before else set()
        assert writing == changed | {"imatmul"}  # tensors of PyTorch have no @= of their own, those of others may


def test_torch_compile_takes_the_backend_with_a_graph_break_gradients_and_new_sizes(lesson):
    def wrong(gm):
        return lesson.swap_function(gm, torch.relu, F.gelu)

    def function(x, y):
        rows, columns = x.shape
        z = torch.relu(x * 2) + torch.relu(x * 2)
        if z.sum() > 1e9:  # a graph break
            return z
        return z.reshape(rows * columns) * y

    backend = lesson.PassBackend([wrong, lesson.eliminate_common_subexpressions])
    torch.compiler.reset()
    try:
        compiled = torch.compile(function, backend=backend)
        for rows in (3, 4, 5):  # from the second one on, a symbol
            x, y = torch.randn(rows, 2, requires_grad=True), torch.randn(rows * 2)
            mine, theirs = compiled(x, y), function(x, y)
            assert torch.allclose(mine, theirs)
            gradients = [torch.autograd.grad(result.sum(), x)[0] for result in (mine, theirs)]
            assert torch.allclose(*gradients)
    finally:
        torch.compiler.reset()
    kept = [[kept for _, _, kept in entries] for entries in backend.log]
    assert kept[0] == [False, True]
    assert all(second for _, second in kept)
    assert len(kept) == 4
