"""The checks of 15-06 accept right answers, however written, and reject what a student might really write."""

import copy
import operator
from typing import ClassVar

import torch
import torch.nn.functional as F
from check_protocol import CheckProtocol
from torch import fx, nn
from torch.fx.passes.shape_prop import ShapeProp
from torch.nn.utils.fusion import fuse_conv_bn_weights

from course.lesson_code import definitions
from shared.checks import topic_15_06 as check

GIVEN = definitions("15-06", "fusion-kinds", "to-grid", "grids", "observer", "fake-quant")

# ---------------------------------------------------------------- right answers


def replace_by_transformer(model, new):
    gm = fx.symbolic_trace(model)

    class Swap(fx.Transformer):
        def call_module(self, target, args, kwargs):
            if type(self.submodules[target]) is nn.ReLU:
                return self.call_function(new, args[:1], {})
            return super().call_module(target, args, kwargs)

        def call_function(self, target, args, kwargs):
            if target in {F.relu, torch.relu}:
                return super().call_function(new, args[:1], {})
            return super().call_function(target, args, kwargs)

        def call_method(self, target, args, kwargs):
            if target == "relu":
                return super().call_function(new, args[:1], {})
            return super().call_method(target, args, kwargs)

    return Swap(gm).transform()


def flops_by_shapes(model, *inputs):
    """From the shapes that ShapeProp leaves on the nodes."""
    gm = model if isinstance(model, fx.GraphModule) else fx.symbolic_trace(model)
    with torch.no_grad():
        ShapeProp(gm).propagate(*inputs)
    counts = {}
    for node in gm.graph.nodes:
        length = 0
        if node.op == "call_module":
            layer = gm.get_submodule(node.target)
            if isinstance(layer, nn.Linear):
                length = layer.in_features
            elif isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
                length = layer.in_channels // layer.groups * torch.Size(layer.kernel_size).numel()
        elif node.target in (torch.matmul, operator.matmul, "matmul"):
            length = node.args[0].meta["tensor_meta"].shape[-1]
        counts[node.name] = 2 * length * node.meta["tensor_meta"].shape.numel() if length else 0
    return counts


def cse_by_building(gm):
    """Copies node by node into a new graph."""
    graph, env, seen = fx.Graph(), {}, {}
    effects = {node: GIVEN["effect"](gm, node) for node in gm.graph.nodes}
    for node in gm.graph.nodes:
        merges = "writes" not in effects.values() and effects[node] != "random"
        if node.op in ("placeholder", "output") or not merges:
            env[node] = graph.node_copy(node, env.__getitem__)
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
        key = f"{node.op} {id(node.target) if callable(node.target) else node.target} {args!r} {kwargs!r}"
        if key not in seen:
            seen[key] = graph.node_copy(node, env.__getitem__)
        env[node] = seen[key]
    return fx.GraphModule(gm, graph)


def fuse_by_torch(model):
    """PyTorch's own formula for the numbers, a walk of one's own for the graph."""
    for path, module in model.named_modules():
        if module.training and (path == "" or isinstance(module, GIVEN["NORMS"])):
            raise ValueError(f"{path or 'model'} is training")
    gm = fx.symbolic_trace(model)
    modules = {n: gm.get_submodule(n.target) for n in gm.graph.nodes if n.op == "call_module"}
    for node, norm in modules.items():
        source = node.args[0]
        conv = modules.get(source)
        kinds = isinstance(norm, GIVEN["NORMS"]) and isinstance(conv, GIVEN["CONVOLUTIONS"])
        if not kinds or norm.running_mean is None or set(source.users) != {node}:
            continue
        new = copy.deepcopy(conv)
        weight = conv.weight.detach().double()
        if conv.transposed:  # (in, out/g, ...) → (out, in/g, ...), and back
            weight = weight.unflatten(0, (conv.groups, -1)).transpose(1, 2).flatten(0, 1)
        wide = copy.deepcopy(norm).double()
        bias = conv.bias if conv.bias is None else conv.bias.double()
        numbers = (wide.running_mean, wide.running_var, norm.eps, wide.weight, wide.bias)
        weight, bias = fuse_conv_bn_weights(weight, bias, *numbers)
        if conv.transposed:
            weight = weight.unflatten(0, (conv.groups, -1)).transpose(1, 2).flatten(0, 1)
        new.weight = nn.Parameter(weight.detach().to(conv.weight.dtype))
        new.bias = nn.Parameter(bias.detach().to(conv.weight.dtype))
        gm.add_submodule(f"new_{node.name}", new)
        node.target, node.args = f"new_{node.name}", source.args
        gm.graph.erase_node(source)
    gm.delete_all_unused_submodules()
    gm.recompile()
    return gm


INSERTED = (  # calls with keyword arguments
    "(F.linear, (x, weight, bias))",
    '(F.linear, (), {"input": x, "weight": weight, "bias": bias})',
    "options = (layer.stride, layer.padding, layer.dilation, layer.groups)",
    'options = {name: getattr(layer, name) for name in ("stride", "padding", "dilation", "groups")}',
    "(x, weight, bias, *options)",
    '(), {"input": x, "weight": weight, "bias": bias, **options}',
)


class BackendByFunctions:
    """Keeps the random state by hand, and compares in one list."""

    def __init__(self, passes):
        self.passes, self.log = tuple(passes), []

    def left(self, gm, example_inputs):
        state = torch.get_rng_state()
        numbers = [t.node.hint if isinstance(t, torch.SymInt) else t for t in example_inputs]
        inputs = copy.deepcopy([t.detach() if hasattr(t, "detach") else t for t in numbers])
        trial = copy.deepcopy(gm)
        try:
            torch.manual_seed(99)
            outputs = trial(*inputs)
        finally:
            torch.set_rng_state(state)
        old, new = gm.state_dict(), trial.state_dict()
        return [outputs, inputs, {name: t for name, t in new.items() if (t != old[name]).any()}]

    def __call__(self, gm, example_inputs):
        self.log.append([])
        for one in self.passes:
            try:
                new = one(copy.deepcopy(gm))
                new.graph.lint()
                torch.testing.assert_close(self.left(new, example_inputs), self.left(gm, example_inputs))
            except Exception:
                new = None
            gm = new or gm
            self.log[-1].append((one.__name__, len(gm.graph.nodes), new is not None))
        return gm


class BackendWithAClosure(BackendByFunctions):
    def __call__(self, gm, example_inputs):
        graph_module = super().__call__(gm, example_inputs)
        return lambda *args: graph_module(*args)


# ---------------------------------------------------------------- wrong answers

RECOMPILE, CLEAN = "gm.recompile()", "gm.delete_all_unused_submodules()"
IS_RELU = "type(gm.get_submodule(node.target)) is nn.ReLU"
REPLACE = {
    "None": ("GraphModule", "return gm", "return None"),
    "not recompiled": ("code of another graph", RECOMPILE, "pass"),
    "F.relu only": ("place of each ReLU", "node.target in (F.relu, torch.relu)", "node.target is F.relu"),
    "in training mode": ("place of each ReLU", "trace(model)", "trace(copy.deepcopy(model).train())"),
    "by keyword": ("only argument", "(new, node.args[:1])", "(new, (), {'x': node.args[0]})"),
    "freezes": ("model stays as it is", CLEAN, f"{CLEAN}\nmodel.requires_grad_(False)"),
    "modules left": ("holds no nn.ReLU", CLEAN, ""),
    "by name": ("everything else stays", IS_RELU, '"ReLU" in type(gm.get_submodule(node.target)).__name__'),
    "modules of that name": ("layer that is named relu", IS_RELU, f'{IS_RELU} or node.target == "relu"'),
}

LAYER, COUNTED, RUN = "module.weight[0].numel()", "if isinstance(module, layers):", "with torch.no_grad():\n    Counter"
FLOPS = {
    "counted nodes only": ("all nodes", "counts[node.name] =", "if length:\n    counts[node.name] ="),
    "with the bias": ("linear layers", LAYER, f"{LAYER} + (module.bias is not None)"),
    "in_channels": ("linear layers", LAYER, f"{LAYER} * getattr(module, 'groups', 1)"),
    "all layers with a weight": ("linear layers", COUNTED, 'if hasattr(module, "weight"):'),
    "by module": (
        "called twice",
        "counts = {}",
        "counts, seen = {}, []",
        COUNTED,
        "if isinstance(module, layers) and module not in seen:\n    seen.append(module)",
    ),
    "last of the result": ("matrix products", "args[0].shape[-1]", "value.shape[-1]"),
    "no method": ("matrix products", ', "matmul")', ")"),
    "traced anew": ("used as it is", "model if isinstance(model, fx.GraphModule) else ", ""),
    "with gradients": ("no gradients", "torch.no_grad()", "torch.enable_grad()"),
    "left off": ("no gradients[\\s\\S]*after it", RUN, "torch.set_grad_enabled(False)\nCounter"),
    "evaluation mode": ("model stays", RUN, f"gm.eval()\n{RUN}"),
}

ARGUMENTS, PURE = "repr(node.args), repr(node.kwargs)", 'if "writes" in effects:'
AS_FLOATS = "repr(fx.node.map_aggregate({}, lambda a: float(a) if isinstance(a, (int, float)) else a))"
CSE = {
    "hashes the arguments": ("unhashable|differ|constants", ARGUMENTS, "node.args, tuple(node.kwargs.items())"),
    "constants by equality": (
        "constants differ",
        ARGUMENTS,
        f"{AS_FLOATS.format('node.args')}, {AS_FLOATS.format('dict(node.kwargs)')}",
    ),
    "in place": ("gm stays as it is", "copy.deepcopy(gm.graph)", "gm.graph"),
    "neighbours only": ("compute the same are one", "first[key] = node", "first = {key: node}"),
    "get_attr left": ("compute the same are one", '("placeholder", "output")', '("placeholder", "output", "get_attr")'),
    "keywords forgotten": ("are one", ", repr(node.kwargs)", ""),
    "operands sorted": ("are one", "repr(node.args)", "str(sorted(map(repr, node.args)))"),
    "random ones merged": ("random nodes are kept", ' or does == "random"', ""),
    "writes ignored": ("keeps all of its nodes", PURE, "if False:"),
}

FUSE = {
    "eps forgotten": ("every kind", " + norm.eps", ""),
    "2d only": ("every kind", "type(conv) not in CONVOLUTIONS", "type(conv) not in (nn.Conv2d, nn.ConvTranspose2d)"),
    "writes over": (
        "called several times",
        'source.target = f"folded_{source.name}"',
        "",
        "gm.add_submodule(",
        "gm.set_submodule(",
    ),
    "users ignored": ("left alone", " or len(source.users) > 1", ""),
    "folded in bfloat16": ("float32 at least", "wide = torch.promote_types(dtype, torch.float32)", "wide = dtype"),
    "in evaluation mode": ("stay as they are", "symbolic_trace(model)", "symbolic_trace(model.eval())"),
    "modules left": ("nobody calls", CLEAN, ""),
    "the model's mode only": (
        "training mode raises",
        "(module is model or isinstance(module, NORMS))",
        "module is model",
    ),
    "no name": ("training mode raises", "{name or 'model'} is", "something is"),
}


def insert_for_all_users(model, bits=8, per_channel=True):
    gm = TestChecks.ANSWERS["insert_fake_quant"](model, bits, per_channel)
    for node in gm.graph.nodes:
        if node.op == "call_module" and "fake_quant" in node.target:
            for user in list(node.args[0].users):
                if user > node:
                    user.replace_input_with(node.args[0], node)
    gm.recompile()
    return gm


WEIGHT, TAKEN = 'weight = through(f"{node.target}.weight", grid)', "if source not in quantized:"
INSERT = {
    "padding lost": ("outputs equal", "layer.stride, layer.padding,", "layer.stride, 0,"),
    "any padding mode": ("outputs equal", '!= "zeros"', '== "?"'),
    "one for each layer": (
        "a value passes one",
        TAKEN,
        "if isinstance(source, fx.Node) or source not in quantized:",
        "len(quantized)",
        "len(list(gm.children()))",
    ),
    "asked bits for values": ("a value passes one", "FakeQuant().to", "FakeQuant(bits).to"),
    "always per channel": ("a weight passes one", "0 if per_channel else None", "0"),
    "asymmetric weights": ("a weight passes one", "symmetric=True", "symmetric=False"),
    "weights not rounded": ("nothing else", WEIGHT, f'{WEIGHT}\nweight = graph.get_attr(f"{{node.target}}.weight")'),
    "all users": ("nothing else", insert_for_all_users),
    "not a copy": ("also when the copy is trained", "copy.deepcopy(model)", "model"),
    "on the CPU": ("weight's device", ".to(place)", ""),
}

FIRST, FORWARD = ("entries = []", "entries = []\nstart = gm"), "return gm.forward"
CLOSE, PASS = "torch.testing.assert_close(left, trial_run(gm, example_inputs)", "one(copy.deepcopy(gm))"
CHANGED = "return outputs, inputs, changed"
BACKEND = {
    "runs the old graph": ("in order", *FIRST, FORWARD, "return start.forward"),
    "one log": ("in order", "self.log.append(entries)", "self.log = [entries]"),
    "loosely": ("other outputs[\\s\\S]*roughly", CLOSE, f"{CLOSE}, rtol=0.01, atol=0.01"),
    "any dtype": ("other outputs[\\s\\S]*float64", CLOSE, f"{CLOSE}, check_dtype=False"),
    "shares tensors with the pass": ("other outputs", PASS, "one(fx.GraphModule(gm, copy.deepcopy(gm.graph)))"),
    "a run that raises ends it": (
        "what raises",
        "left = trial_run(new, example_inputs)",
        "try:\n    left = trial_run(new, example_inputs)\nexcept RuntimeError:\n    break",
    ),
    "no lint": ("lint is asked", "new.graph.lint()", ""),
    "inputs not copied": ("trying runs on copies", "value = value.clone()", "pass"),
    "random state moved": ("trying runs on copies", "torch.random.fork_rng(), ", ""),
    "other numbers": (
        "same numbers",
        "with torch.random.fork_rng(), torch.no_grad():\n    torch.manual_seed(0)",
        "with torch.no_grad():",
        "entries = []",
        "entries = []\nstate = torch.get_rng_state()",
        FORWARD,
        f"torch.set_rng_state(state)\n{FORWARD}",
    ),
    "outputs alone": ("same is written", CHANGED, "return outputs"),
    "outputs and inputs": ("same is written", CHANGED, "return outputs, inputs"),
    "the whole state dict": ("nothing is written", CHANGED, "return outputs, inputs, trial.state_dict()"),
    "sizes as they are": ("symbolic sizes", "value = value.node.hint", "pass"),
    "sizes by int()": ("symbolic sizes[\\s\\S]*size afterwards", "value.node.hint", "int(value)"),
}


def on_a_copy(name):
    return lambda model, *arguments: TestChecks.ANSWERS[name](copy.deepcopy(model), *arguments)


class TestChecks(CheckProtocol, topic="15-06", given=GIVEN):
    CHECKS: ClassVar = {
        "replace_relu": check.replace_relu,
        "count_flops": check.count_flops,
        "eliminate_common_subexpressions": check.eliminate_common_subexpressions,
        "fuse_conv_bn": check.fuse_conv_bn,
        "insert_fake_quant": check.insert_fake_quant,
        "PassBackend": check.pass_backend,
    }
    RIGHT: ClassVar = {
        "replace_relu": [replace_by_transformer, on_a_copy("replace_relu")],
        "count_flops": [flops_by_shapes, on_a_copy("count_flops")],
        "eliminate_common_subexpressions": [cse_by_building, on_a_copy("eliminate_common_subexpressions")],
        "fuse_conv_bn": [fuse_by_torch, on_a_copy("fuse_conv_bn")],
        "insert_fake_quant": [
            INSERTED,
            lambda *a: TestChecks.ANSWERS["insert_fake_quant"](fx.symbolic_trace(a[0]), *a[1:]),
        ],
        "PassBackend": [BackendByFunctions, BackendWithAClosure],
    }
    WRONG: ClassVar = {
        "replace_relu": REPLACE,
        "count_flops": FLOPS,
        "eliminate_common_subexpressions": CSE,
        "fuse_conv_bn": FUSE,
        "insert_fake_quant": INSERT,
        "PassBackend": BACKEND,
    }
