"""What 15-06 builds: the small tracer, fusion, quantizers, passes, against PyTorch's own and brute force."""

import contextlib
import copy
import json
import operator
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import torchvision.models
from check_protocol import MODULE
from torch import fx, nn
from torch.fx.experimental.optimization import fuse
from torch.fx.passes.shape_prop import ShapeProp
from torch.utils._python_dispatch import TorchDispatchMode

from course.lesson_code import answers, definitions

CELLS = """
    mini-node mini-recorder mini-proxy mini-operators net is-layer mini-tracer verdict distance verified fold
    fusion-cases fusion-parts fusion-kinds to-grid grids observer fake-quant integer-weight to-integer aten-norm
    fold-exported
"""
NETS = {"googlenet": {"init_weights": False, "aux_logits": False}}


@pytest.fixture(scope="module")
def lesson():
    names = definitions("15-06", *CELLS.split())
    names.update(answers("15-06", given=names))
    parts = {"run-nodes": "run_nodes", "real-tracer": "signature", "swap-function": "swap_function"}
    for cell, name in parts.items():
        names[name] = _one(cell, name, names)
    return SimpleNamespace(**names)


def _one(cell, name, names):
    """One definition of a cell whose other lines need what the notebook has made."""
    import ast

    (path,) = MODULE.glob("15-06_*.ipynb")
    cells = {c["id"]: "".join(c["source"]) for c in json.loads(path.read_text(encoding="utf-8"))["cells"]}
    kinds = ast.FunctionDef | ast.ClassDef
    (node,) = [n for n in ast.parse(cells[cell]).body if isinstance(n, kinds) and n.name == name]
    namespace = dict(names)
    exec(compile(ast.Module([node], []), cell, "exec"), namespace)
    return namespace[name]


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
    def test_it_records_the_steps_of_symbolic_trace(self, lesson):
        for model in (lesson.Net(), nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten())):
            mine = lesson.MiniTracer().trace(model)
            assert lesson.signature(mine) == lesson.signature(fx.symbolic_trace(model).graph.nodes)

    def test_replaying_gives_the_models_outputs(self, lesson):
        model = Forms().eval()
        nodes = lesson.MiniTracer().trace(model)
        x, y = torch.randn(3, 4), torch.randn(6, 2)
        for mine, theirs in zip(lesson.run_nodes(nodes, model, x, y), model(x, y), strict=True):
            assert torch.equal(mine, theirs)
        with torch.no_grad():
            model.scale += 1  # the root's present tensors
        assert torch.equal(lesson.run_nodes(nodes, model, x, y)[0], model(x, y)[0])

    def test_nothing_stays_patched(self, lesson):
        before = nn.Module.__call__
        lesson.MiniTracer().trace(lesson.Net())
        assert nn.Module.__call__ is before

        class Broken(nn.Module):
            def forward(self, x):
                raise KeyError

        with pytest.raises(KeyError):
            lesson.MiniTracer().trace(Broken())
        assert nn.Module.__call__ is before


class TestFusion:
    @pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "densenet121", "googlenet", "shufflenet_v2_x1_0"])
    def test_torchvisions_networks_differ_by_less_than_1e_5(self, lesson, name):
        torch.manual_seed(0)
        model = lesson.randomise(getattr(torchvision.models, name)(weights=None, **NETS.get(name, {})), seed=1)
        before = copy.deepcopy(model.state_dict())
        fused = lesson.fuse_conv_bn(model)
        for size in (64, 48):
            image = torch.randn(2, 3, size, size)
            with torch.no_grad():
                want, got = model(image), fused(image)
            assert (got - want).abs().max() <= 1e-5 * want.abs().max()
        assert len(fused.graph.nodes) == len(fuse(model).graph.nodes)
        assert torch.backends.cudnn.allow_tf32 is False  # else a GPU's convolutions miss the bound
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())

    def test_pytorchs_own_is_wrong_where_the_lesson_says_so(self, lesson):
        torch.manual_seed(0)
        image, wrong = torch.randn(2, 4, 6, 6), []
        orders = ("conv norm other second", "conv norm other norm", "conv norm conv second", "conv norm conv norm")
        for order in (*orders, "conv norm conv"):
            chain = lesson.randomise(lesson.Chain(order))
            with torch.no_grad():
                if not torch.allclose(fuse(chain)(image), chain(image), atol=1e-3):
                    wrong.append(order)
                assert torch.allclose(lesson.fuse_conv_bn(chain)(image), chain(image), atol=1e-5)
        assert wrong == ["conv norm conv second", "conv norm conv norm", "conv norm conv"]

    def test_the_formula(self, lesson):
        conv, norm = nn.Conv2d(3, 5, 3), lesson.randomise(nn.BatchNorm2d(5))
        x = torch.randn(2, 3, 6, 6)
        with torch.no_grad():
            for bias in (conv.bias, None):
                want = norm(F.conv2d(x, conv.weight, bias))
                assert torch.allclose(F.conv2d(x, *lesson.fold(conv.weight, bias, norm)), want, atol=1e-5)


class TestExported:
    def exported(self, lesson, model, *inputs):
        return torch.export.export(model, inputs).module(check_guards=False)

    def test_folding_its_graph_is_right_and_leaves_the_given_one(self, lesson):
        torch.manual_seed(0)
        for model in (lesson.randomise(lesson.Net()), lesson.randomise(torchvision.models.resnet18(weights=None))):
            image = torch.randn(2, 1 if isinstance(model, lesson.Net) else 3, 64, 64)[..., :28, :28]
            exported = self.exported(lesson, model, image)
            before = str(exported.graph)
            folded = lesson.fold_exported(exported)
            assert str(exported.graph) == before
            assert lesson.verified(folded, model, image) < 1e-5
            assert "batch_norm" not in str(folded.graph)

    def test_shared_and_needed_convolutions(self, lesson):
        for order, left in (("conv norm conv second", 0), ("conv norm conv", 0), ("conv norm +", 1)):
            chain = lesson.randomise(lesson.Chain(order))
            image = torch.randn(2, 4, 6, 6)
            folded = lesson.fold_exported(self.exported(lesson, chain, image))
            assert lesson.verified(folded, chain, image) < 1e-5
            assert sum("batch_norm" in node.name for node in folded.graph.nodes) == left

    def test_effects_of_aten_and_what_cse_merges(self, lesson):
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm = nn.BatchNorm1d(3)

            def forward(self, x):
                return torch.sigmoid(self.norm(x)) + torch.sigmoid(self.norm(x))

        x = torch.randn(4, 3)
        calm = self.exported(lesson, Model().eval(), x)
        assert {lesson.effect(calm, node) for node in calm.graph.nodes} == {"none"}
        merged = lesson.eliminate_common_subexpressions(calm)
        assert lesson.verified(merged, calm, x) == 0.0
        assert len(merged.graph.nodes) == len(calm.graph.nodes) - 2
        training = self.exported(lesson, Model(), x)
        assert "writes" in {lesson.effect(training, node) for node in training.graph.nodes}

    def test_the_other_passes_find_nothing_as_the_lesson_says(self, lesson):
        x = torch.randn(2, 1, 28, 28)
        exported = self.exported(lesson, lesson.randomise(lesson.Net()), x)
        assert not any("fake_quant" in node.name for node in lesson.insert_fake_quant(exported).graph.nodes)
        assert sum(lesson.count_flops(exported, x).values()) == 0
        with pytest.raises(ValueError, match="model"):
            lesson.fuse_conv_bn(exported)


class TestFakeQuant:
    @pytest.mark.parametrize("bits", [8, 4, 2])
    @pytest.mark.parametrize("symmetric", [False, True])
    def test_values_and_gradients_are_pytorchs(self, lesson, bits, symmetric):
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
        assert set(gradients[0].unique().tolist()) <= {0.0, 1.0}

    def test_zero_is_on_the_grid_and_the_range_in_it(self, lesson):
        for values in (torch.tensor([3.0, 5.0]), torch.tensor([-4.0, -1.0]), torch.tensor([-1.0, 7.0])):
            grid = lesson.FakeQuant()
            grid(values)
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

    def test_an_empty_batch_widens_no_range(self, lesson):
        for axis in (None, 1):
            grid = lesson.FakeQuant(axis=axis)
            assert grid(torch.zeros(0, 2)).shape == (0, 2)
            grid(torch.tensor([[3.0, -5.0]]))
            before = grid.grid()
            grid.rounding = True
            assert grid(torch.zeros(0, 2)).shape == (0, 2)
            assert all(map(torch.equal, grid.grid(), before))


class TestQuantizedNet:
    def test_integers_compute_what_fake_quantization_does(self, lesson):
        torch.manual_seed(0)
        net = lesson.randomise(lesson.Net())
        for bits in (8, 3):
            model = lesson.insert_fake_quant(lesson.fuse_conv_bn(net), bits, True)
            x = torch.randn(16, 1, 28, 28)
            assert lesson.verified(model, net, x) < 1e-5
            for module in model.modules():
                if isinstance(module, lesson.FakeQuant):
                    module.observing, module.rounding = False, True
                    module.observing = True
            model(x)
            for module in model.modules():
                if isinstance(module, lesson.FakeQuant):
                    module.observing = False
            integer = lesson.to_integer(model)
            assert lesson.verified(integer, model, x) < 1e-5
            stored = {key: value.dtype for key, value in integer.state_dict().items()}
            assert sum(dtype == torch.int8 for dtype in stored.values()) == 3
            assert not any(key.endswith("weight") for key in stored)

    def rounding(self, lesson, model, *inputs):
        """Calibrated on the inputs, and rounding."""
        model = lesson.insert_fake_quant(model)
        model(*inputs)
        for module in model.modules():
            if isinstance(module, lesson.FakeQuant):
                module.observing, module.rounding = False, True
        return model

    def test_a_parameter_that_is_a_layers_input_stays_a_float(self, lesson):
        class Query(nn.Module):
            def __init__(self):
                super().__init__()
                self.fc, self.query = nn.Linear(4, 3), nn.Parameter(torch.rand(2, 4) + 3)

            def forward(self, x):
                return self.fc(self.query) + self.fc(x)

        x = torch.randn(2, 4)
        model = self.rounding(lesson, Query(), x)
        integer = lesson.to_integer(model)
        assert lesson.verified(integer, model, x) < 1e-5
        assert integer.query.dtype == torch.float32
        assert not hasattr(integer.fc, "weight")

    def test_a_weight_that_is_read_elsewhere_stays_beside_its_integers(self, lesson):
        class Tied(nn.Module):
            def __init__(self):
                super().__init__()
                self.fc = nn.Linear(4, 4)

            def forward(self, x):
                return self.fc(x) + F.linear(x, self.fc.weight)

        x = torch.randn(2, 4)
        model = self.rounding(lesson, Tied(), x)
        integer = lesson.to_integer(model)
        assert lesson.verified(integer, model, x) < 1e-5
        assert integer.fc.weight is not None

    def test_a_module_on_a_parameter_is_left_alone(self, lesson):
        class Scaled(nn.Module):
            def __init__(self):
                super().__init__()
                self.fc, self.scale, self.act = nn.Linear(4, 4), nn.Parameter(torch.randn(4)), nn.Tanh()

            def forward(self, x):
                return self.fc(x) * self.act(self.scale)

        x = torch.randn(2, 4)
        model = self.rounding(lesson, Scaled(), x)
        assert lesson.verified(lesson.to_integer(model), model, x) < 1e-5


class TestPasses:
    def test_effects_of_pytorchs_calls(self, lesson):
        class Calls(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm, self.drop, self.relu = nn.BatchNorm1d(3), nn.Dropout(), nn.ReLU(inplace=True)
                self.pool = nn.FractionalMaxPool2d(2, output_size=2).eval()  # draws in evaluation, too
                self.quiet = nn.BatchNorm1d(3).eval()

            def forward(self, x):
                y = x.clone()
                self.norm(x), self.drop(x), self.relu(y), self.quiet(x), torch.rand_like(x), y.mul_(2), F.dropout(x)
                self.pool(x), y.__setitem__(0, 1)
                F.batch_norm(x, x, x, None, None, False), F.dropout(x, 0.5, False)
                return F.relu(y, inplace=True), y.__abs__()

        gm = fx.symbolic_trace(Calls())
        found = {node.name: lesson.effect(gm, node) for node in gm.graph.nodes}
        want = dict.fromkeys(found, "none") | dict.fromkeys(["norm", "relu", "mul_", "relu_1", "setitem"], "writes")
        assert found == want | dict.fromkeys(["drop", "rand_like", "dropout", "pool"], "random")

    def test_random_calls_are_known_and_what_is_unknown_counts_as_writing(self, lesson):
        def forward(m, x):
            y = x.abs()
            (
                F.dropout2d(x),
                F.alpha_dropout(x, training=True),
                F.rrelu(x, training=True),
                F.gumbel_softmax(x),
                torch.normal(x, y),
            )
            torch.poisson(y), torch.multinomial(y, 2), y.bernoulli(), F.scaled_dot_product_attention(x, x, x)
            m.alpha(x), m.rrelu(x), m.attention(x, x, x), m.encoder(x), m.lstm(x)
            torch.ops.aten.rand_like.default(x)
            x.normal_(), torch.ops.aten.add_.Tensor(x, 1), F.dropout(x, inplace=True), m.embed(x), m.parametrized(x)
            torch.batch_norm(x, None, None, m.p, m.p, True, 0.1, 1e-5, False), m.hooked(x), m.own(x)
            F.normalize(x), F.dropout(x, training=False), F.instance_norm(x), F.layer_norm(x, (3,)), m.plain(x)
            torch.ops.aten.add.Tensor(x, 1), m.silent(x), x.shape, x.to(torch.float64), x.__abs__()
            return x

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.alpha, self.rrelu, self.own = nn.AlphaDropout(), nn.RReLU(), lesson.Case(torch.sin)
                self.attention = nn.MultiheadAttention(3, 1, dropout=0.5)
                self.encoder = nn.TransformerEncoderLayer(3, 1, 4)
                self.lstm, self.plain = nn.LSTM(3, 3, 2, dropout=0.5), nn.Tanh()
                self.embed, self.hooked = nn.Embedding(3, 3, max_norm=1.0), nn.Linear(3, 3)
                self.silent = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(3)).eval()
                self.parametrized = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))
                self.hooked.register_forward_hook(lambda m, a, o: o * 2)
                self.p = nn.Parameter(torch.ones(3))

            def forward(self, x):
                return forward(self, x)

        class Outside(fx.Tracer):
            def is_leaf_module(self, module, path):
                return path != ""

        model = Model()
        gm = fx.GraphModule(model, Outside().trace(model))
        found = {node.name: lesson.effect(gm, node) for node in gm.graph.nodes}
        random = """dropout2d alpha_dropout rrelu gumbel_softmax normal poisson multinomial bernoulli alpha rrelu_1
            scaled_dot_product_attention attention encoder lstm rand_like_default normalize"""  # in doubt, random
        writes = "normal_ add__tensor dropout embed parametrized batch_norm hooked own"
        assert [name for name, kind in found.items() if kind == "writes"] == writes.split()
        assert {name for name, kind in found.items() if kind == "random"} == set(random.split())

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
        assert {"iadd", "ifloordiv", "ipow", "imod", "iand", "ilshift", "setitem", "iconcat"} <= changed

    def test_verified_tells_of_nan(self, lesson):
        gm = fx.symbolic_trace(lesson.Case(lambda x: (x, x * float("nan"))))
        difference = lesson.verified(gm, lesson.Case(lambda x: (x, x)), torch.ones(2))
        assert difference != difference

    def test_passes_keep_the_torchvision_networks(self, lesson):
        torch.manual_seed(0)
        model = lesson.randomise(torchvision.models.shufflenet_v2_x1_0(weights=None))
        image = torch.randn(1, 3, 64, 64)
        for module in model.modules():
            if isinstance(module, nn.ReLU):
                module.inplace = False
        merged = lesson.eliminate_common_subexpressions(fx.symbolic_trace(model))
        assert lesson.verified(merged, model, image) == 0.0
        clamped = lesson.replace_relu(model, lambda x: x.clamp(min=0))
        assert lesson.verified(clamped, model, image) == 0.0
        assert not any(isinstance(module, nn.ReLU) for module in clamped.modules())

    def test_shapes_are_those_of_shape_prop(self, lesson):
        gm = fx.symbolic_trace(lesson.Net().eval())
        ShapeProp(gm).propagate(torch.randn(2, 1, 28, 28))
        flops = lesson.count_flops(gm, torch.randn(2, 1, 28, 28))
        conv = next(node for node in gm.graph.nodes if node.name == "conv2")
        assert flops["conv2"] == 2 * 9 * 16 * conv.meta["tensor_meta"].shape.numel()


class TestBackend:
    def test_torch_compile_takes_it(self, lesson):
        def wrong(gm):
            return lesson.swap_function(gm, torch.relu, F.gelu)

        def function(x, y):
            z = torch.relu(x * 2) + torch.relu(x * 2)
            if z.sum() > 1e9:  # a graph break
                return z
            return z * y

        backend = lesson.PassBackend([wrong, lesson.eliminate_common_subexpressions])
        torch.compiler.reset()
        try:
            compiled = torch.compile(function, backend=backend)
            for size in (3, 5):
                x, y = torch.randn(size, requires_grad=True), torch.randn(size)
                assert torch.allclose(compiled(x, y), function(x, y))
                (mine,) = torch.autograd.grad(compiled(x, y).sum(), x)
                (theirs,) = torch.autograd.grad(function(x, y).sum(), x)
                assert torch.allclose(mine, theirs)
        finally:
            torch.compiler.reset()
        assert [entry[2] for entry in backend.log[0]] == [False, True]

    def test_a_batch_size_that_became_symbolic_keeps_the_pass(self, lesson):
        def function(x):
            rows, columns = x.shape
            return torch.sigmoid(x).reshape(rows * columns) + torch.sigmoid(x).reshape(rows * columns)

        backend = lesson.PassBackend([lesson.eliminate_common_subexpressions])
        torch.compiler.reset()
        try:
            compiled = torch.compile(function, backend=backend)
            for rows in (3, 4, 5, 6):
                x = torch.randn(rows, 2)
                assert torch.equal(compiled(x), function(x))
        finally:
            torch.compiler.reset()
        assert [[kept for _, _, kept in entries] for entries in backend.log] == [[True], [True]]


def test_tf32_is_off_before_the_first_bound_is_printed():
    """Simulated: with convolutions rounded to TF32's 10 bits the lesson's bounds would not hold."""
    (path,) = MODULE.glob("15-06_*.ipynb")
    cells = [
        "".join(c["source"]) for c in json.loads(path.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == "code"
    ]
    switched = [i for i, source in enumerate(cells) if source.startswith("torch.backends.cudnn.allow_tf32 = False")]
    compared = [i for i, source in enumerate(cells) if "verified(" in source or "1e-5" in source]
    assert switched == compared[:1]


class Tf32(TorchDispatchMode):
    """Rounds what convolutions read to TF32's ten bits, as an NVIDIA GPU does while cuDNN is allowed to."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.convolution.default and torch.backends.cudnn.allow_tf32:
            rounded = [((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32) for x in args[:2]]
            args = (*rounded, *args[2:])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("allowed", [False, True])
def test_bounds_of_the_comparisons_hold_because_tf32_is_off(lesson, monkeypatch, allowed):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", allowed)
    torch.manual_seed(0)
    model = lesson.randomise(torchvision.models.resnet18(weights=None))
    with torch.no_grad(), Tf32():
        difference = lesson.verified(lesson.fuse_conv_bn(model), model, torch.randn(2, 3, 64, 64))
    assert (difference > 1e-5) is allowed


def test_no_stored_output_speaks_of_deprecation():
    (path,) = MODULE.glob("15-06_*.ipynb")
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    outputs = [json.dumps(output) for cell in cells for output in cell.get("outputs", [])]
    assert outputs
    told = [text[:300] for text in outputs if "eprecat" in text or "Warning" in text or '"stderr"' in text]
    assert not told
