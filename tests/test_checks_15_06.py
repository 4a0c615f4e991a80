"""The checks of 15-06 accept right answers, however written, and reject what a student might really write."""
# ruff: noqa: E501 (tables of cases, a case a line)

import copy
import operator
from functools import partial

import torch
import torch.nn.functional as F
from answer_variants import variants
from check_protocol import CheckProtocol, idle
from torch import fx, nn
from torch.fx.passes.shape_prop import ShapeProp
from torch.nn.utils.fusion import fuse_conv_bn_weights

from course.exercise_form import student_source
from course.lesson_code import answers, definitions
from shared.checks import topic_15_06 as check

CELLS = "fusion-kinds to-grid grids observer fake-quant"
GIVEN = definitions("15-06", *CELLS.split())
ANSWERS = answers("15-06", given=GIVEN)
STUBS = answers("15-06", edit=student_source, given=GIVEN)
IDLE = idle("15-06", GIVEN)
NAMES = {
    "replace": "replace_relu",
    "flops": "count_flops",
    "cse": "eliminate_common_subexpressions",
    "fuse": "fuse_conv_bn",
    "insert": "insert_fake_quant",
    "backend": "PassBackend",
}
variant = variants("15-06", NAMES, GIVEN)
RECOMPILE = "    gm.recompile()\n"


class Wrapped(nn.Module):
    """A module around a GraphModule, which is none."""

    def __init__(self, gm):
        super().__init__()
        self.gm = gm


def wrapping(name):
    return lambda *args, **kwargs: Wrapped(ANSWERS[name](*args, **kwargs))


# ---------------------------------------------------------------- replace


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


def replace_in_place(model, new):
    """Rewrites the node itself."""
    gm = fx.symbolic_trace(model)
    for node in gm.graph.nodes:
        kinds = [("call_function", F.relu), ("call_function", torch.relu), ("call_method", "relu")]
        relu = (node.op, node.target) in kinds
        if relu or (node.op == "call_module" and type(gm.get_submodule(node.target)) is nn.ReLU):
            (value,) = node.all_input_nodes
            node.op, node.target, node.args, node.kwargs = "call_function", new, (value,), {}
    gm.delete_all_unused_submodules()
    gm.recompile()
    return gm


replace = partial(variant, "replace")
_IS_RELU = "type(gm.get_submodule(node.target)) is nn.ReLU"
_FUNCTIONS = "node.target in (F.relu, torch.relu)"
_DELETE = "    gm.delete_all_unused_submodules()\n"
WRONG_REPLACE = {
    "a module": (wrapping("replace_relu"), "GraphModule"),
    "modules forgotten": (replace((_IS_RELU, "False")), "place of each ReLU"),
    "F.relu only": (replace((_FUNCTIONS, "node.target is F.relu")), "place of each ReLU"),
    "no method": (replace(('node.target == "relu"', "False")), "place of each ReLU"),
    "not connected": (replace(("with(call)", "with(node.args[0])")), "place of each ReLU"),
    "not recompiled": (replace((RECOMPILE, "")), "code of another graph"),
    "by keyword": (replace(("(new, node.args[:1])", "(new, (), {'x': node.args[0]})")), "only argument"),
    "dead code": (
        replace(("            gm.graph.erase_node(node)\n", "")),
        "everything else stays|no nn.ReLU",
    ),
    "in training mode": (replace(("symbolic_trace(model)", "symbolic_trace(copy.deepcopy(model).train())")), "place of each ReLU"),
    "writes into the model": (replace((_DELETE, _DELETE + "    model.act = nn.ReLU6()\n")), "model stays as it is"),
    "freezes": (replace((_DELETE, _DELETE + "    model.requires_grad_(False)\n")), "model stays as it is"),
    "modules left": (replace((_DELETE, "")), "holds no nn.ReLU"),
    "by name": (replace((_IS_RELU, '"ReLU" in type(gm.get_submodule(node.target)).__name__')), "everything else stays"),
    "modules of that name": (replace((_IS_RELU, _IS_RELU + ' or node.target == "relu"')), "layer that is named relu"),
}  # fmt: skip

# ---------------------------------------------------------------- flops


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


flops = partial(variant, "flops")
_COUNT = "2 * length * value.numel()"
_LAYER = "length = module.weight[0].numel()"
_FIRST = "length = args[0].shape[-1]"
WRONG_FLOPS = {
    "a list": (lambda *a: list(ANSWERS["count_flops"](*a).items()), "all nodes"),
    "counted nodes only": (
        flops(("            counts[node.name] =", "            if length:\n                counts[node.name] =")),
        "all nodes",
    ),
    "multiply-adds once": (flops((_COUNT, "length * value.numel()")), "linear layers"),
    "with the bias": (flops((_LAYER, _LAYER + " + (module.bias is not None)")), "linear layers"),
    "floats": (flops((_COUNT, "2.0 * length * value.numel()")), "linear layers"),
    "all layers with a weight": (flops(("isinstance(module, layers)", 'hasattr(module, "weight")')), "linear layers"),
    "in_channels": (flops((_LAYER, _LAYER + " * getattr(module, 'groups', 1)")), "linear layers"),
    "size of the input": (
        flops((_LAYER, _LAYER + " * getattr(module, 'stride', (1,))[0]")),
        "linear layers",
    ),
    "last of the result": (flops((_FIRST, "length = value.shape[-1]")), "matrix products"),
    "one spelling": (flops(("(torch.matmul, operator.matmul, ", "(operator.matmul, ")), "matrix products"),
    "no method": (flops((', "matmul")', ")")), "matrix products"),
    "by module": (
        flops(
            ("    counts = {}\n", "    counts = {}\n    seen = []\n"),
            ("if isinstance(module, layers):\n", "if isinstance(module, layers) and module not in seen:\n"
             "                    seen.append(module)\n"),
        ),
        "called twice",
    ),
    "traced anew": (
        flops(("model if isinstance(model, fx.GraphModule) else fx.symbolic_trace(model)", "fx.symbolic_trace(model)")),
        "used as it is",
    ),
    "with gradients": (flops(("with torch.no_grad():", "with torch.enable_grad():")), "no gradients"),
    "left off": (
        flops(("    with torch.no_grad():\n        Counter", "    torch.set_grad_enabled(False)\n    Counter")),
        "no gradients[\\s\\S]*after it",
    ),
    "evaluation mode": (flops(("    with torch.no_grad", "    gm.eval()\n    with torch.no_grad")), "model stays"),
    "training mode": (flops(("    with torch.no_grad", "    gm.train()\n    with torch.no_grad")), "model stays"),
}  # fmt: skip

# ---------------------------------------------------------------- cse


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


cse = partial(variant, "cse")
_END = "            first[key] = node\n    return fx.GraphModule(gm, graph)"
_INPUTS = 'node.op in ("placeholder", "output")'
_PURE = '    if "writes" in effects:'
_ARGS = "repr(node.args), repr(node.kwargs)"
_AS_FLOATS = "fx.node.map_aggregate({}, lambda a: float(a) if isinstance(a, (int, float)) else a)"
WRONG_CSE = {
    "a module": (wrapping("eliminate_common_subexpressions"), "GraphModule"),
    "hashes the arguments": (cse((_ARGS, "node.args, tuple(node.kwargs.items())")), "unhashable|differ|constants"),
    "constants by equality": (
        cse((_ARGS, f"repr({_AS_FLOATS.format('node.args')}), repr({_AS_FLOATS.format('dict(node.kwargs)')})")),
        "constants differ",
    ),
    "in place": (cse(("copy.deepcopy(gm.graph)", "gm.graph")), "gm stays as it is"),
    "in evaluation mode": (cse((_END, _END + ".eval()")), "gm stays as it is"),
    "merges nothing": (cse(("if key in first:", "if False:")), "compute the same are one"),
    "not in turn": (
        cse(("if key in first:", "if key in first and not any(n.op.startswith('call') for n in node.all_input_nodes):")),
        "compute the same are one",
    ),
    "neighbours only": (cse(("first[key] = node", "first = {key: node}")), "compute the same are one"),
    "get_attr left": (cse((_INPUTS, _INPUTS.replace(")", ', "get_attr")'))), "compute the same are one"),
    "keywords forgotten": (cse((", repr(node.kwargs)", "")), "are one"),
    "targets by name": (cse(("node.target,", "getattr(node.target, '__name__', node.target),")), "are one"),
    "operands sorted": (cse(("repr(node.args)", "str(sorted(map(repr, node.args)))")), "are one"),
    "random ones merged": (cse((' or does == "random"', "")), "random nodes are kept"),
    "random: nothing merged": (cse((_PURE, '    if {"writes", "random"} & set(effects):')), "random nodes are kept"),
    "writes ignored": (cse((_PURE, "    if False:")), "keeps all of its nodes"),
    "writing nodes kept only": (cse((_PURE, "    if False:"), ('== "random"', '!= "none"')), "keeps all of its nodes"),
    "not recompiled": (
        cse(("    graph = copy.deepcopy(gm.graph)\n", "    result = copy.deepcopy(gm)\n    graph = result.graph\n"),
            ("    return fx.GraphModule(gm, graph)\n    ###", "    return result\n    ###")),
        "code of another graph",
    ),
}  # fmt: skip

# ---------------------------------------------------------------- fuse


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


def fuse_on_a_copy(model):
    return ANSWERS["fuse_conv_bn"](copy.deepcopy(model))


fusing = partial(variant, "fuse")
_USERS = "if type(conv) not in CONVOLUTIONS or len(source.users) > 1:"
_PATH = '        source.target = f"folded_{source.name}"\n'
_KINDS = "(module is model or isinstance(module, NORMS))"
_WIDE = "wide = torch.promote_types(dtype, torch.float32)"
_TURNED = "weight = (by_group * scale.reshape(conv.groups, 1, -1, *ones)).flatten(0, 1)"
WRONG_FUSE = {
    "a module": (wrapping("fuse_conv_bn"), "GraphModule"),
    "eps forgotten": (fusing(("norm.running_var.to(wide) + norm.eps", "norm.running_var.to(wide)")), "every kind"),
    "bias not scaled": (fusing(("    bias = bias * scale\n", "")), "every kind"),
    "affine forgotten": (fusing(("if norm.weight is not None:", "if False:")), "every kind"),
    "affine needed": (fusing(("    if norm.weight is not None:\n    ", "")), "TypeError"),
    "groups forgotten": (fusing((_TURNED, "weight = weight * scale[: weight.shape[1]].reshape(1, -1, *ones)")), "every kind"),
    "not transposed": (
        fusing((_TURNED, "weight = weight * scale.mean()")),
        "every kind",
    ),
    "2d only": (fusing((_USERS, _USERS.replace("CONVOLUTIONS", "(nn.Conv2d, nn.ConvTranspose2d)"))), "every kind"),
    "writes over": (
        fusing((_PATH, ""), ("gm.add_submodule(", "gm.set_submodule(")),
        "called several times",
    ),
    "shared ones left": (
        fusing((_USERS, _USERS[:-1] + " or sum(n.target == source.target for n in gm.graph.nodes) > 1:")),
        "called several times",
    ),
    "names by module": (
        fusing(('f"folded_{source.name}"', 'f"folded_{source.target}".replace(".", "_")')),
        "called several times",
    ),
    "users ignored": (fusing((" or len(source.users) > 1", "")), "left alone"),
    "statistics needed": (fusing((" or norm.running_mean is None", "")), "AttributeError|NoneType"),
    "folded in bfloat16": (fusing((_WIDE, "wide = dtype")), "float32 at least"),
    "in float32 always": (fusing((_WIDE, "wide = torch.float32")), "float32 at least"),
    "the norm's dtype": (fusing(("weight.to(dtype), bias.to(dtype)", "weight.to(norm.running_var.dtype), bias.to(norm.running_var.dtype)")),
                         "float32 at least|RuntimeError"),
    "model changed": (fusing((_DELETE, _DELETE + "    model.spare = nn.Identity()\n")), "stay as they are"),
    "modules left": (fusing((_DELETE, "")), "nobody calls"),
    "not recompiled": (fusing((RECOMPILE, "")), "code of another graph"),
    "switches to eval": (fusing((f"module.training and {_KINDS}", "False")), "training mode raises"),
    "no module may be training": (fusing((f"module.training and {_KINDS}", "module.training")), "stay as they are"),
    "the model's mode only": (fusing((_KINDS, "module is model")), "training mode raises"),
    "in evaluation mode": (fusing(("symbolic_trace(model)", "symbolic_trace(model.eval())")), "stay as they are"),
    "RuntimeError": (fusing(("raise ValueError(", "raise RuntimeError(")), "training mode raises"),
    "no name": (fusing(("{name or 'model'} is", "something is")), "training mode raises"),
}  # fmt: skip

# ---------------------------------------------------------------- insert


def insert_in_place(model, bits=8, per_channel=True):
    """Turns the layer's node into a call of the function, with keyword arguments."""
    gm = fx.symbolic_trace(copy.deepcopy(model))
    graph, taken = gm.graph, {}

    def behind(key, source, *options):
        if key not in taken:
            gm.add_submodule(f"quantizer_{len(taken)}", GIVEN["FakeQuant"](*options).to(layer.weight.device))
            taken[key] = graph.call_module(f"quantizer_{len(taken)}", (source,))
        return taken[key]

    for node in list(graph.nodes):
        layer = GIVEN["module_of"](gm, node)
        if type(layer) not in (nn.Conv2d, nn.Linear) or getattr(layer, "padding_mode", "zeros") != "zeros":
            continue
        with graph.inserting_before(node):
            weight = graph.get_attr(f"{node.target}.weight")
            options = {"input": behind(node.args[0], node.args[0])}
            options["weight"] = behind(node.target, weight, bits, 0 if per_channel else None, True)
            if layer.bias is not None:
                options["bias"] = graph.get_attr(f"{node.target}.bias")
        if type(layer) is nn.Conv2d:
            options |= {k: getattr(layer, k) for k in ("stride", "padding", "dilation", "groups")}
        node.op, node.target = "call_function", F.conv2d if type(layer) is nn.Conv2d else F.linear
        node.args, node.kwargs = (), options
    graph.eliminate_dead_code()
    gm.recompile()
    return gm


def insert_for_all_users(model, bits=8, per_channel=True):
    gm = ANSWERS["insert_fake_quant"](model, bits, per_channel)
    for node in gm.graph.nodes:
        if node.op == "call_module" and "fake_quant" in node.target:
            for user in list(node.args[0].users):
                if user > node:
                    user.replace_input_with(node.args[0], node)
    gm.recompile()
    return gm


insert = partial(variant, "insert")
_PLACED = "gm.add_submodule(path, quantizer)"
_BIAS = 'None if layer.bias is None else graph.get_attr(f"{node.target}.bias")'
_WEIGHT = 'through(f"{node.target}.weight", grid)'
WRONG_INSERT = {
    "a module": (wrapping("insert_fake_quant"), "GraphModule"),
    "padding lost": (insert(("layer.stride, layer.padding,", "layer.stride, 0,")), "outputs equal"),
    "groups lost": (insert(("layer.dilation, layer.groups)", "layer.dilation)")), "outputs equal|RuntimeError"),
    "bias lost": (insert((_BIAS, "None")), "outputs equal"),
    "doesn't observe": (insert((_PLACED, _PLACED + "\n            quantizer.observing = False")), "passes one[\\s\\S]*observing"),
    "rounds at once": (insert((_PLACED, _PLACED + "\n            quantizer.rounding = True")), "outputs equal"),
    "any padding mode": (insert(('!= "zeros"', '== "?"')), "outputs equal"),
    "one for each layer": (
        insert(("if source not in quantized:", "if isinstance(source, fx.Node) or source not in quantized:"),
               ("len(quantized)", "len(list(gm.children()))")),
        "a value passes one",
    ),
    "asked bits for values": (insert(("FakeQuant().to", "FakeQuant(bits).to")), "a value passes one"),
    "symmetric values": (insert(("FakeQuant().to", "FakeQuant(symmetric=True).to")), "a value passes one"),
    "one for each call": (
        insert(("if source not in quantized:", "if isinstance(source, str) or source not in quantized:"),
               ("len(quantized)", "len(list(gm.children()))")),
        "a weight passes one",
    ),
    "channels last": (insert(("0 if per_channel", "1 if per_channel")), "a weight passes one"),
    "always per channel": (insert(("0 if per_channel else None", "0")), "a weight passes one"),
    "asymmetric weights": (insert(("symmetric=True", "symmetric=False")), "a weight passes one"),
    "weights not rounded": (insert((_WEIGHT, _WEIGHT + '\n            weight = graph.get_attr(f"{node.target}.weight")')), "nothing else"),
    "old calls left": (insert(("        graph.erase_node(node)\n", "")), "nothing else"),
    "all users": (insert_for_all_users, "nothing else"),
    "not a copy": (insert(("copy.deepcopy(model)", "model")), "also when the copy is trained"),
    "on the CPU": (insert((".to(place)", "")), "weight's device"),
    "not recompiled": (insert((RECOMPILE, "")), "code of another graph"),
}  # fmt: skip

# ---------------------------------------------------------------- backend


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


backend = partial(variant, "backend")
_CLOSE = """                left = trial_run(new, example_inputs)
                torch.testing.assert_close(left, trial_run(gm, example_inputs))
"""
_LINT = "                new.graph.lint()\n"
_PASS = "                new = one(copy.deepcopy(gm))\n"
_TRY = "            try:\n"
_COPIED = "one(copy.deepcopy(gm))"
_CHANGED = "return outputs, inputs, changed"
_SEED = "    with torch.random.fork_rng(), torch.no_grad():\n        torch.manual_seed(0)\n"
_START = ("        entries = []\n", "        entries = []\n        start = gm\n")
_COMPARED = "trial_run(gm, example_inputs))"
_LATER = """            if kept:
                left = trial_run(new, example_inputs)
                try:
                    torch.testing.assert_close(left, trial_run(gm, example_inputs))
                    gm = new
                except AssertionError:
                    kept = False
            entries"""
_COMMON = """                got, want = trial_run(new, example_inputs), trial_run(gm, example_inputs)
                torch.testing.assert_close(got[:2], want[:2])
                for key in got[2].keys() & want[2].keys():
                    torch.testing.assert_close(got[2][key], want[2][key])
"""
WRONG_BACKEND = {
    "returns the code": (backend(("return gm.forward", "return gm.code")), "in order"),
    "each on the first": (backend(_START, (_COPIED, "one(copy.deepcopy(start))")), "in order|aren't kept"),
    "one log": (backend(("self.log.append(entries)", "self.log = [entries]")), "in order"),
    "nodes before": (
        backend((_TRY, "            nodes = len(gm.graph.nodes)\n" + _TRY), ("len(gm.graph.nodes), kept", "nodes, kept")),
        "in order",
    ),
    "runs the old graph": (backend(_START, ("return gm.forward", "return start.forward")), "in order"),
    "doesn't compare": (backend((_CLOSE, "                trial_run(new, example_inputs)\n")), "other outputs"),
    "loosely": (backend((_COMPARED, _COMPARED[:-1] + ", rtol=0.01, atol=0.01)")), "other outputs[\\s\\S]*roughly"),
    "any dtype": (backend((_COMPARED, _COMPARED[:-1] + ", check_dtype=False)")), "other outputs[\\s\\S]*float64"),
    "shares tensors with the pass": (
        backend((_COPIED, "one(fx.GraphModule(gm, copy.deepcopy(gm.graph)))")),
        "other outputs",
    ),
    "no copy for the pass": (backend((_COPIED, "one(gm)")), "other outputs|in order|raises"),
    "passes may not raise": (backend((_TRY + _PASS, _PASS[4:] + _TRY)), "what raises"),
    "no lint": (backend((_LINT, "")), "lint is asked"),
    "results may not raise": (
        backend((_CLOSE, ""), ("                gm = new\n", ""), ("            entries", _LATER)),
        "what raises",
    ),
    "inputs not copied": (backend(("value = value.clone()", "pass")), "trying runs on copies"),
    "graph not copied": (
        backend(("trial = copy.deepcopy(gm)", "trial = gm"), ("    before = gm.state_dict()\n", ""),
                ("    inputs = []\n", "    inputs = []\n    before = copy.deepcopy(gm.state_dict())\n")),
        "trying runs on copies",
    ),
    "random state moved": (backend(("torch.random.fork_rng(), ", "")), "trying runs on copies"),
    "other numbers": (
        backend((_SEED, "    with torch.no_grad():\n"), (_START[0], _START[0] + "        state = torch.get_rng_state()\n"),
                ("        return gm.forward", "        torch.set_rng_state(state)\n        return gm.forward")),
        "same numbers",
    ),
    "outputs alone": (backend((_CHANGED, "return outputs")), "same is written"),
    "outputs and inputs": (backend((_CHANGED, "return outputs, inputs")), "same is written"),
    "outputs and tensors": (backend((_CHANGED, "return outputs, changed")), "same is written"),
    "the whole state dict": (
        backend((_CHANGED, "return outputs, inputs, trial.state_dict()")),
        "nothing is written",
    ),
    "tensors that both have": (
        backend((_CHANGED, "return outputs, inputs, trial.state_dict()"), (_CLOSE, _COMMON)),
        "same is written",
    ),
    "sizes as they are": (backend(("value = value.node.hint", "pass")), "symbolic sizes"),
    "sizes by int()": (backend(("value.node.hint", "int(value)")), "symbolic sizes[\\s\\S]*size afterwards"),
}  # fmt: skip

# ---------------------------------------------------------------- all


CHECKS = {
    "replace_relu": check.replace_relu,
    "count_flops": check.count_flops,
    "eliminate_common_subexpressions": check.eliminate_common_subexpressions,
    "fuse_conv_bn": check.fuse_conv_bn,
    "insert_fake_quant": check.insert_fake_quant,
    "PassBackend": check.pass_backend,
}
RIGHT = {
    "replace_relu": [replace_by_transformer, replace_in_place],
    "count_flops": [flops_by_shapes, lambda model, *x: ANSWERS["count_flops"](copy.deepcopy(model), *x)],
    "eliminate_common_subexpressions": [
        cse_by_building,
        lambda gm: ANSWERS["eliminate_common_subexpressions"](copy.deepcopy(gm)),
    ],
    "fuse_conv_bn": [fuse_by_torch, fuse_on_a_copy],
    "insert_fake_quant": [
        insert_in_place,
        lambda *a: ANSWERS["insert_fake_quant"](fx.symbolic_trace(a[0]), *a[1:]),
    ],
    "PassBackend": [BackendByFunctions, BackendWithAClosure],
}
WRONG = {
    "replace_relu": WRONG_REPLACE,
    "count_flops": WRONG_FLOPS,
    "eliminate_common_subexpressions": WRONG_CSE,
    "fuse_conv_bn": WRONG_FUSE,
    "insert_fake_quant": WRONG_INSERT,
    "PassBackend": WRONG_BACKEND,
}


class TestChecks(CheckProtocol):
    TOPIC = "15-06"
    ANSWERS, STUBS, IDLE = ANSWERS, STUBS, IDLE
    CHECKS, RIGHT, WRONG = CHECKS, RIGHT, WRONG
