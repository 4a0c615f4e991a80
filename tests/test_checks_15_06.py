"""The checks of 15-06 accept right answers, however written, and reject what a student might really write."""
# ruff: noqa: E501 (tables of cases, a case a line)

import copy
import operator

import torch
import torch.nn.functional as F
from answer_variants import variants
from check_protocol import CheckProtocol, idle
from torch import fx, nn

from course.answers import answers, definitions
from course.exercise_form import student_source
from shared.checks import topic_15_06 as check

CELLS = "effect module-effect fusion-arguments norm-values conv-values call-again to-grid fake-quant"
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


class Wrapped(nn.Module):
    """A module around a GraphModule, which is none."""

    def __init__(self, gm):
        super().__init__()
        self.gm = gm

    def forward(self, *args):
        return self.gm(*args)


def wrapping(answer):
    return lambda *args, **kwargs: Wrapped(answer(*args, **kwargs))


# ---------------------------------------------------------------- replace


def replace_by_transformer(model, new):
    gm = fx.symbolic_trace(model)

    class Swap(fx.Transformer):
        def call_module(self, target, args, kwargs):
            if type(self.submodules[target]) is nn.ReLU:
                return self.call_function(new, (args or tuple(kwargs.values()))[:1], {})
            return super().call_module(target, args, kwargs)

        def call_function(self, target, args, kwargs):
            if target in {F.relu, torch.relu}:
                return super().call_function(new, (args[0] if args else kwargs["input"],), {})
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
        relu = (node.op, node.target) in (
            ("call_function", F.relu),
            ("call_function", torch.relu),
            ("call_method", "relu"),
        )
        if relu or (node.op == "call_module" and type(gm.get_submodule(node.target)) is nn.ReLU):
            (value,) = node.all_input_nodes
            node.op, node.target, node.args, node.kwargs = "call_function", new, (value,), {}
    gm.delete_all_unused_submodules()
    gm.recompile()
    return gm


def replace_with_log(model, new):
    """One call of new too many, of which nobody uses the result."""
    gm = ANSWERS["replace_relu"](model, new)
    first = next(n for n in gm.graph.nodes if n.op == "placeholder")
    with gm.graph.inserting_after(first):
        gm.graph.call_function(operator.add, (first, 1))
    gm.recompile()
    return gm


def replace_and_write(model, new):
    """Puts the function into the model's own modules."""
    gm = ANSWERS["replace_relu"](model, new)
    for module in model.modules():
        for name, child in module.named_children():
            if type(child) is nn.ReLU:
                setattr(module, name, nn.ReLU6())
    return gm


_IS_RELU = "type(gm.get_submodule(n.target)) is nn.ReLU"
WRONG_REPLACE = {
    "a module": (wrapping(ANSWERS["replace_relu"]), "GraphModule"),
    "args only": (
        variant("replace", ('node.args[0] if node.args else node.kwargs["input"]', "node.args[0]")),
        "IndexError",
    ),
    "modules forgotten": (variant("replace", (_IS_RELU, "False")), "in each place|place of each ReLU"),
    "F.relu only": (variant("replace", ("in (F.relu, torch.relu)", "in (F.relu,)")), "place of each ReLU"),
    "torch.relu only": (variant("replace", ("in (F.relu, torch.relu)", "in (torch.relu,)")), "place of each ReLU"),
    "no method": (variant("replace", ('n.target == "relu"', "False")), "place of each ReLU"),
    "not connected": (variant("replace", ("with(call)", "with(value)")), "place of each ReLU"),
    "not recompiled": (variant("replace", ("    gm.recompile()\n", "")), "code of another graph"),
    "inplace passed on": (
        variant("replace", ("(new, (value,))", "(new, (), {'x': value})")),
        "a call of new",
    ),
    "one call more": (replace_with_log, "all other calls stay"),
    "dead code goes": (
        variant("replace", ("    gm.delete_all", "    gm.graph.eliminate_dead_code()\n    gm.delete_all")),
        "all other calls stay",
    ),
    "writes into the model": (replace_and_write, "model stays as it is"),
    "frozen": (
        variant("replace", ("    gm.recompile()\n", "    gm.recompile()\n    gm.requires_grad_(False)\n")),
        "model stays as it is",
    ),
    "in evaluation mode": (
        variant("replace", ("    gm.recompile()\n", "    gm.recompile()\n    gm.eval()\n")),
        "model stays as it is",
    ),
    "in training mode": (
        variant("replace", ("    gm.recompile()\n", "    gm.recompile()\n    gm.train()\n")),
        "model stays as it is",
    ),
    "a hook is left": (
        variant(
            "replace",
            ("    gm.recompile()\n", "    gm.recompile()\n    model.register_forward_hook(lambda m, a, o: o)\n"),
        ),
        "model stays as it is",
    ),
    "a copy in evaluation mode": (
        variant("replace", ("fx.symbolic_trace(model)", "fx.symbolic_trace(copy.deepcopy(model).eval())")),
        "all other calls stay",
    ),
    "a copy in training mode": (
        variant("replace", ("fx.symbolic_trace(model)", "fx.symbolic_trace(copy.deepcopy(model).train())")),
        "all other calls stay",
    ),
    "a frozen copy": (
        variant(
            "replace", ("fx.symbolic_trace(model)", "fx.symbolic_trace(copy.deepcopy(model).requires_grad_(False))")
        ),
        "all other calls stay",
    ),
    "modules left": (variant("replace", ("    gm.delete_all_unused_submodules()\n", "")), "holds no nn.ReLU"),
    "by name": (
        variant("replace", (_IS_RELU, '"ReLU" in type(gm.get_submodule(n.target)).__name__')),
        "other activations stay",
    ),
    "subclasses": (
        variant("replace", (_IS_RELU, "isinstance(gm.get_submodule(n.target), (nn.ReLU, nn.ReLU6))")),
        "other activations stay",
    ),
    "modules of that name": (
        variant(
            "replace",
            ("}.get(node.op, lambda n: False)(node)", "}.get(node.op, lambda n: False)(node) or node.target == 'relu'"),
        ),
        "other activations stay.*|named relu",
    ),
    "methods by name": (
        variant("replace", ('lambda n: n.target == "relu"', "lambda n: 'relu' in n.target")),
        "the method prelu",
    ),
    "functions by name": (
        variant("replace", ("n.target in (F.relu, torch.relu)", '"relu" in n.target.__name__')),
        "other activations stay",
    ),
}

# ---------------------------------------------------------------- flops


def flops_by_shapes(model, *inputs):
    """From the shapes that ShapeProp leaves on the nodes."""
    from torch.fx.passes.shape_prop import ShapeProp

    gm = model if isinstance(model, fx.GraphModule) else fx.symbolic_trace(model)
    values = {}

    class Keep(ShapeProp):
        def run_node(self, node):
            values[node] = fx.Interpreter.run_node(self, node)
            return values[node]

    with torch.no_grad():
        Keep(gm).run(*inputs)
    counts = {}
    for node in gm.graph.nodes:
        given = [values[n] for n in node.all_input_nodes]
        n = 0
        if node.op == "call_module":
            layer = gm.get_submodule(node.target)
            if isinstance(layer, nn.Linear):
                n = layer.in_features
            elif isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
                n = layer.in_channels // layer.groups
                for size in layer.kernel_size:
                    n *= size
        elif node.target is F.linear:
            n = given[1].shape[1]
        elif node.target in (F.conv1d, F.conv2d, F.conv3d):
            n = given[1][0].numel()
        elif node.target in (torch.matmul, torch.bmm, operator.matmul, "matmul"):
            n = given[0].shape[-1]
        counts[node.name] = 2 * n * values[node].numel() if n else 0
    return counts


class _ByKind(fx.Interpreter):
    """A count is what the last call of call_module, call_function or call_method found."""

    def run(self, *inputs):
        self.counts = {}
        super().run(*inputs)
        return self.counts

    def run_node(self, node):
        self.last = 0
        value = super().run_node(node)
        self.counts[node.name] = self.last
        return value

    def call_module(self, target, args, kwargs):
        value, layer = super().call_module(target, args, kwargs), self.fetch_attr(target)
        if isinstance(layer, nn.Linear):
            self.last = 2 * value.numel() * layer.in_features
        elif isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            self.last = 2 * value.numel() * layer.weight.numel() // layer.out_channels
        return value

    def call_function(self, target, args, kwargs):
        value = super().call_function(target, args, kwargs)
        first, *rest = [*args, *(kwargs[k] for k in ("input", "weight") if k in kwargs)] or [None]
        if target in {torch.matmul, torch.bmm, operator.matmul}:
            self.last = 2 * value.numel() * first.size(-1)
        elif target in {F.linear, F.conv1d, F.conv2d, F.conv3d}:
            self.last = 2 * value.numel() * rest[0].numel() // rest[0].size(0)
        return value

    def call_method(self, target, args, kwargs):
        value = super().call_method(target, args, kwargs)
        if target == "matmul":
            self.last = 2 * value.numel() * args[0].size(-1)
        return value


@torch.no_grad()
def flops_by_methods(model, *inputs):
    return _ByKind(model if isinstance(model, fx.GraphModule) else fx.symbolic_trace(model)).run(*inputs)


_COUNT = "2 * length * value.numel()"
WRONG_FLOPS = {
    "a list": (lambda *a: list(ANSWERS["count_flops"](*a).items()), "in it, in order"),
    "raises on keywords": (variant("flops", ('(args[1] if len(args) > 1 else kwargs["weight"])', "args[1]")), "IndexError"),
    "counted nodes only": (
        variant("flops", ("            counts[node.name] =", "            if length:\n                counts[node.name] =")),
        "in it, in order",
    ),
    "multiply-adds once": (variant("flops", (_COUNT, "length * value.numel()")), "linear layers"),
    "with the bias": (
        variant("flops", ("length = module.weight[0].numel()", "length = module.weight[0].numel() + (module.bias is not None)")),
        "linear layers",
    ),
    "floats": (variant("flops", (_COUNT, "2.0 * length * value.numel()")), "linear layers"),
    "in_channels": (
        variant(
            "flops",
            (
                "length = module.weight[0].numel()",
                "length = module.weight[0].numel() * getattr(module, 'groups', 1)",
            ),
        ),
        "strides, groups",
    ),
    "size of the input": (
        variant(
            "flops",
            (
                "length = module.weight[0].numel()",
                "length = module.weight[0].numel()\n                if getattr(module, 'stride', [1])[0] == 2:\n"
                "                    length *= 4",
            ),
        ),
        "strides, groups",
    ),
    "last of the second": (
        variant("flops", ("length = first.shape[-1]", "length = value.shape[-1]")),
        "matrix products",
    ),
    "no method": (variant("flops", ('operator.matmul, "matmul"', "operator.matmul")), "matrix products"),
    "batch forgotten": (
        variant("flops", ("length = first.shape[-1]", "length = first.shape[-1] / value[..., 0, 0].numel()")),
        "matrix products",
    ),
    "by module": (
        variant(
            "flops",
            ("    counts = {}\n", "    counts, seen = {}, []\n"),
            (
                "            if isinstance(module, layers):\n",
                "            if isinstance(module, layers) and node.target not in seen:\n"
                "                seen.append(node.target)\n",
            ),
        ),
        "called twice",
    ),
    "each output counts": (
        variant("flops", (" if length else 0", " if length else value.numel() * (node.op == 'call_function' and 'gelu' in str(node.target))")),
        "aren't named",
    ),
    "traced anew": (
        variant("flops", ("model if isinstance(model, fx.GraphModule) else fx.symbolic_trace(model)", "fx.symbolic_trace(model)")),
        "may be given",
    ),
    "runs twice": (variant("flops", ("        Counter(gm).run(*inputs)\n", "        Counter(gm).run(*inputs)\n        Counter(gm).run(*inputs)\n")), "runs once"),
    "with gradients": (variant("flops", ("with torch.no_grad():", "with torch.enable_grad():")), "no gradients"),
    "FlopCounterMode around each node": (check._count_flops, "torch.mm"),
    "all kinds of convolution": (
        variant("flops", ("(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)", "(nn.Linear, nn.modules.conv._ConvNd)")),
        "aren't named",
    ),
    "transposed functions of another kind": (
        variant("flops", ("weighted = (F.linear,", "weighted = (F.conv_transpose2d, F.linear,")),
        "aren't named",
    ),
    "transposed functions": (
        variant("flops", ("weighted = (F.linear,", "weighted = (F.conv_transpose1d, F.linear,")),
        "aren't named",
    ),
    "torch.mm": (variant("flops", ("torch.bmm, operator", "torch.bmm, torch.mm, operator")), "aren't named"),
    "with a functional bias": (
        variant("flops", ('["weight"])[0].numel()', '["weight"])[0].numel() + (len(args) > 2 and args[2] is not None)')),
        "linear layers",
    ),
    "with a functional bias by keyword": (
        variant("flops", ('["weight"])[0].numel()', '["weight"])[0].numel() + (kwargs.get("bias") is not None)')),
        "linear layers",
    ),
    "batches only": (
        variant("flops", ("length = module.weight[0].numel()", "length = module.weight[0].numel() * (module.weight.dim() in (2, value.dim()))")),
        "linear layers",
    ),
    "a Linear's first argument": (
        variant("flops", ("length = module.weight[0].numel()", "length = module.weight[0].numel() + 0 * args[0].dim()")),
        "IndexError",
    ),
    "keywords for bmm only": (
        variant("flops", ('args[0] if args else kwargs["input"]', 'kwargs["input"] if node.target is torch.bmm and not args else args[0]')),
        "IndexError",
    ),
    "training mode": (variant("flops", ("    with torch.no_grad():", "    gm.train()\n    with torch.no_grad():")), "model stays"),
    "freezes": (variant("flops", ("    with torch.no_grad():", "    gm.requires_grad_(False)\n    with torch.no_grad():")), "model stays"),
    "evaluation mode": (variant("flops", ("    with torch.no_grad():", "    gm.eval()\n    with torch.no_grad():")), "model stays"),
    "left off": (variant("flops", ("    with torch.no_grad():\n        Counter(gm).run(*inputs)\n", "    torch.set_grad_enabled(False)\n    Counter(gm).run(*inputs)\n")), "no gradients"),
}  # fmt: skip

# ---------------------------------------------------------------- cse


def _same(a, b):
    """Equal, of one type, at any depth; signs of zeros too."""
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, slice):
        return _same((a.start, a.stop, a.step), (b.start, b.stop, b.step))
    return a is b if isinstance(a, fx.Node) else a == b and str(a) == str(b)


def cse_by_comparison(gm):
    graph = copy.deepcopy(gm.graph)
    old = list(gm.graph.nodes)
    if any(GIVEN["effect"](gm, n) == "writes" for n in old):
        return fx.GraphModule(gm, graph)
    kept = []
    for new, before in zip(list(graph.nodes), old, strict=True):
        if new.op in ("placeholder", "output") or GIVEN["effect"](gm, before) == "random":
            continue
        for node in kept:
            if (
                node.op == new.op
                and node.target == new.target
                and _same(node.args, new.args)
                and _same(dict(node.kwargs), dict(new.kwargs))
            ):
                new.replace_all_uses_with(node)
                graph.erase_node(new)
                break
        else:
            kept.append(new)
    return fx.GraphModule(gm, graph)  # fmt: skip


def cse_by_building(gm):
    """Copies node by node into a new graph."""
    graph, env, seen = fx.Graph(), {}, {}
    pure = all(GIVEN["effect"](gm, n) != "writes" for n in gm.graph.nodes)
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "output") or not pure or GIVEN["effect"](gm, node) == "random":
            env[node] = graph.node_copy(node, env.__getitem__)
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
        key = (
            f"{node.op}|{id(node.target) if callable(node.target) else node.target}|{args!r}|{sorted(kwargs.items())!r}"
        )
        if key not in seen:
            seen[key] = graph.node_copy(node, env.__getitem__)
        env[node] = seen[key]
    return fx.GraphModule(gm, graph)


_KEY = "repr(node.args), repr(sorted(node.kwargs.items()))"
_PURE = '    if "writes" not in effects:'
WRONG_CSE = {
    "a module": (wrapping(ANSWERS["eliminate_common_subexpressions"]), "GraphModule"),
    "hashes the arguments": (variant("cse", (_KEY, "node.args, tuple(sorted(node.kwargs.items()))")), "unhashable|differ|constants"),
    "lists refused": (variant("cse", (_KEY, "hash(tuple(node.args)), repr(sorted(node.kwargs.items()))")), "takes any GraphModule"),
    "frozen": (variant("cse", ("fx.GraphModule(gm, graph)", "fx.GraphModule(gm, graph).requires_grad_(False)")), "gm stays as it is"),
    "in evaluation mode": (variant("cse", ("fx.GraphModule(gm, graph)", "fx.GraphModule(gm, graph).eval()")), "gm stays as it is"),
    "in training mode": (variant("cse", ("fx.GraphModule(gm, graph)", "fx.GraphModule(gm, graph).train()")), "gm stays as it is"),
    "a copy in evaluation mode": (variant("cse", ("fx.GraphModule(gm, graph)", "fx.GraphModule(copy.deepcopy(gm).eval(), graph)")), "outputs stay"),
    "a frozen copy": (variant("cse", ("fx.GraphModule(gm, graph)", "fx.GraphModule(copy.deepcopy(gm).requires_grad_(False), graph)")), "outputs stay"),
    "some operators write": (
        variant(
            "cse",
            (
                "effects = [effect(gm, node) for node in gm.graph.nodes]",
                "some = (operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.setitem)\n"
                '    effects = ["none" if n.target not in some and type(n.target) is type(operator.add) and\n'
                '               n.target.__module__ == "_operator" else effect(gm, n) for n in gm.graph.nodes]',
            ),
        ),
        "operator.ifloordiv",
    ),
    "in place": (variant("cse", ("copy.deepcopy(gm.graph)", "gm.graph")), "gm stays as it is"),
    "merges nothing": (variant("cse", ("if key in first:", "if False:")), "compute the same are one"),
    "not in turn": (
        variant("cse", ("            key = (", "            originals = dict(zip(graph.nodes, gm.graph.nodes))\n            key = (") , ("if key in first:", "if key in first and not any(n.op.startswith('call') for n in node.all_input_nodes):")),
        "compute the same are one",
    ),
    "neighbours only": (
        variant("cse", ("                first[key] = node\n", "                first = {key: node}\n")),
        "compute the same are one",
    ),
    "get_attr left": (
        variant("cse", ('("placeholder", "output")', '("placeholder", "output", "get_attr")')),
        "compute the same are one",
    ),
    "keywords in their order": (variant("cse", ("repr(sorted(node.kwargs.items()))", "repr(node.kwargs)")), "any order"),
    "keywords forgotten": (variant("cse", (", repr(sorted(node.kwargs.items()))", "")), "any order|outputs stay|are one"),
    "constants by equality": (
        variant(
            "cse",
            (
                "repr(node.args)",
                "repr(fx.node.map_aggregate(node.args, lambda a: float(a) + 0.0 if isinstance(a, (int, float)) else a))",
            ),
        ),
        "constants differ",
    ),
    "zeros": (
        variant(
            "cse",
            ("repr(node.args)", "repr(fx.node.map_aggregate(node.args, lambda a: 0.0 if type(a) is float and a == 0 else a))"),
        ),
        "constants differ",
    ),
    "targets by name": (
        variant("cse", ("(node.op, node.target,", "(node.op, getattr(node.target, '__name__', node.target),")),
        "are one|outputs",
    ),
    "random ones merged": (variant("cse", (' or does == "random"', "")), "random nodes are kept"),
    "random: nothing merged": (variant("cse", (_PURE, '    if {"writes", "random"}.isdisjoint(effects):')), "random nodes are kept"),
    "writes ignored": (variant("cse", (_PURE, "    if True:")), "keeps all of its nodes"),
    "writing nodes kept only": (
        variant("cse", (_PURE, "    if True:"), ('does == "random"', 'does != "none"')),
        "keeps all of its nodes",
    ),
    "placeholders merged": (
        variant(
            "cse",
            ('node.op in ("placeholder", "output")', 'node.op == "output"'),
            ("(node.op, node.target,", "(node.op, node.op if node.op == 'placeholder' else node.target,"),
        ),
        "placeholders|are one|outputs",
    ),
    "placeholders with a default merged": (
        variant(
            "cse",
            ('node.op in ("placeholder", "output")', '(node.op == "placeholder" and not node.args) or node.op == "output"'),
            ("(node.op, node.target,", "(node.op, node.op if node.op == 'placeholder' else node.target,"),
        ),
        "placeholders",
    ),
    "exchanged operands": (
        variant("cse", ("repr(node.args)", "repr(sorted(map(repr, node.args)) if node.target is operator.add else node.args)")),
        "operands exchanged",
    ),
    "types at the top alone": (
        variant("cse", ("repr(node.args)", "repr([(type(a), a if not isinstance(a, (tuple, list)) else fx.node.map_aggregate(a, lambda v: v + 0.0 if isinstance(v, (bool, int, float)) else v)) for a in node.args])")),
        "constants differ",
    ),
    "zeros in keywords": (
        variant("cse", ("repr(sorted(node.kwargs.items()))", "repr(sorted((k, v + 0.0 if type(v) is float else v) for k, v in node.kwargs.items()))")),
        "constants differ",
    ),
    "unused nodes go": (
        variant("cse", ("    return fx.GraphModule(gm, graph)", "    [graph.erase_node(n) for n in reversed(graph.nodes) if not n.users and n.op.startswith('call')]\n    return fx.GraphModule(gm, graph)")),
        "nobody uses",
    ),
    "not recompiled": (
        variant("cse", ("graph, first = copy.deepcopy(gm.graph), {}", "result, first = copy.deepcopy(gm), {}\n    graph = result.graph"), ("    return fx.GraphModule(gm, graph)", "    return result")),
        "code of another graph",
    ),
    "wrong outputs": (None, ""),
}  # fmt: skip


def _cse_swaps(gm):
    """The right number of nodes; a difference with its sides exchanged."""
    result = ANSWERS["eliminate_common_subexpressions"](gm)
    for node in result.graph.nodes:
        if node.target is operator.sub:
            node.args = node.args[::-1]
    result.recompile()
    return result


WRONG_CSE["wrong outputs"] = (_cse_swaps, "outputs stay")

# ---------------------------------------------------------------- fuse


def fuse_by_torch(model):
    """PyTorch's own formula for the numbers, a walk of one's own for the graph."""
    from torch.nn.utils.fusion import fuse_conv_bn_weights

    for path, module in [("model", model), *model.named_modules()]:
        if module.training and (path == "model" or isinstance(module, GIVEN["NORMS"])):
            raise ValueError(f"{path} is training")
    gm = fx.symbolic_trace(model)
    for node in list(gm.graph.nodes):
        norm = GIVEN["norm_values"](gm, node)
        if norm is None:
            continue
        source = GIVEN["named"](node)["input"]
        conv = GIVEN["conv_values"](gm, source)
        if conv is None or set(source.users) != {node}:
            continue

        def wide(value):
            return value.detach().double() if isinstance(value, torch.Tensor) else value

        statistics = [wide(norm[key]) for key in ("running_mean", "running_var", "eps", "weight", "bias")]
        weight, groups, dtype = wide(conv["weight"]), conv["groups"], conv["weight"].dtype
        conv["bias"] = wide(conv["bias"])
        if conv["transposed"]:  # (in, out/g, ...) → (out, in/g, ...), fold, and back
            turned = weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)
            folded, bias = fuse_conv_bn_weights(turned, conv["bias"], *statistics)
            folded = folded.detach().unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)
        else:
            folded, bias = fuse_conv_bn_weights(weight, conv["bias"], *statistics)
        with gm.graph.inserting_after(source):
            before = source
            with gm.graph.inserting_before(before):
                new = GIVEN["call_again"](gm, before, folded.detach().to(dtype), bias.detach().to(dtype))
        node.replace_all_uses_with(new)
        gm.graph.erase_node(node)
        gm.graph.erase_node(source)
    gm.delete_all_unused_submodules()
    gm.recompile()
    return gm


def fuse_on_a_copy(model):
    return ANSWERS["fuse_conv_bn"](copy.deepcopy(model))


def fuse_and_leave(model):
    """Leaves something in the model."""
    gm = ANSWERS["fuse_conv_bn"](model)
    model.add_module("fused", nn.Identity())
    return gm


_USERS = "if conv is None or len(source.users) > 1:"
_MODE = "if module.training and (module is model or isinstance(module, NORMS)):"
_WIDE = "wide = torch.promote_types(dtype, torch.float32)"
_NEW = "            node.replace_all_uses_with(call_again(gm, source, *fold_any(conv, norm)))"
_NEWER = "            new = call_again(gm, source, *fold_any(conv, norm))\n            node.replace_all_uses_with(new)"
_INSERT = "        with gm.graph.inserting_before(source):\n"
WRONG_FUSE = {
    "in evaluation mode": (
        variant("fuse", ("    gm = fx.symbolic_trace(model)\n", "    gm = fx.symbolic_trace(model.eval())\n")),
        "model and its tensors stay",
    ),
    "freezes": (
        variant("fuse", ("    gm = fx.symbolic_trace(model)\n", "    gm = fx.symbolic_trace(model.requires_grad_(False))\n")),
        "model and its tensors stay",
    ),
    "a module": (wrapping(ANSWERS["fuse_conv_bn"]), "GraphModule"),
    "weights needed": (variant("fuse", ("(1.0 if gamma is None else gamma)", "gamma")), "unsupported operand"),
    "eps forgotten": (variant("fuse", ('(var + norm["eps"])', "var")), "every kind of convolution and"),
    "eps fixed": (variant("fuse", ('norm["eps"]', "1e-5")), "every kind of convolution and"),
    "bias not scaled": (
        variant("fuse", ("((0.0 if start is None else start) - mean) * scale", "(0.0 if start is None else start) - mean * scale")),
        "every kind of convolution and",
    ),
    "beta forgotten": (variant("fuse", (" + (0.0 if beta is None else beta)", "")), "every kind of convolution and"),
    "groups forgotten": (
        variant(
            "fuse",
            (
                "kernel = (by_group * scale.reshape(groups, 1, -1, *ones)).flatten(0, 1)",
                "kernel = (by_group * scale.reshape(groups, -1)[0].repeat(1).reshape(1, 1, -1, *ones)).flatten(0, 1)",
            ),
        ),
        "every kind",
    ),
    "as if not transposed": (
        variant("fuse", ('if conv["transposed"]:', "if False:"), ("kernel = kernel * scale.reshape(-1, 1, *ones)", "kernel = kernel * (scale.reshape(-1, 1, *ones) if len(scale) == len(kernel) else scale.mean())")),
        "every kind",
    ),
    "modules only": (
        variant("fuse", ("if conv is None or", 'if conv is None or node.op != "call_module" or source.op != "call_module" or')),
        "every kind",
    ),
    "functions of one form only": (variant("fuse", ("if conv is None or", "if conv is None or node.op != source.op or")), "every kind"),
    "writes over": (
        variant(
            "fuse",
            (
                "            node.replace_all_uses_with(call_again(gm, source, *fold_any(conv, norm)))\n",
                "            if source.op == 'call_module':\n"
                "                new = copy.deepcopy(gm.get_submodule(source.target))\n"
                "                new.weight, new.bias = map(nn.Parameter, fold_any(conv, norm))\n"
                "                gm.set_submodule(source.target, new)\n"
                "                node.replace_all_uses_with(source)\n"
                "                gm.graph.erase_node(node)\n"
                "                continue\n"
                "            node.replace_all_uses_with(call_again(gm, source, *fold_any(conv, norm)))\n",
            ),
        ),
        "called several times",
    ),
    "shared ones left": (
        variant("fuse", ("if conv is None or", "if conv is None or sum(n.target == source.target for n in gm.graph.nodes) > 1 or")),
        "called several times|every kind",
    ),
    "shared modules left": (
        variant(
            "fuse",
            (
                "if conv is None or",
                "if conv is None or (source.op == 'call_module' and sum(n.target == source.target for n in gm.graph.nodes) > 1) or",
            ),
        ),
        "called several times",
    ),
    "at the place of the norm": (variant("fuse", (_INSERT, "        with gm.graph.inserting_before(node):\n")), "calls that write"),
    "dead code goes": (
        variant("fuse", ("    gm.delete_all_unused_submodules()\n", "    gm.graph.eliminate_dead_code()\n    gm.delete_all_unused_submodules()\n")),
        "calls that write",
    ),
    "users ignored": (variant("fuse", (_USERS, "if conv is None:"), ("        gm.graph.erase_node(source)\n", "        gm.graph.erase_node(source) if not source.users else None\n")), "left alone"),
    "folded in bfloat16": (variant("fuse", (_WIDE, "wide = dtype")), "rounded once"),
    "in float32 always": (variant("fuse", (_WIDE, "wide = torch.float32")), "rounded once"),
    "scale rounded": (
        variant("fuse", ("    bias = ((0.0 if", "    scale = scale.to(dtype).to(wide)\n    bias = ((0.0 if")),
        "rounded once",
    ),
    "float32 result": (variant("fuse", ("return kernel.to(dtype), bias.to(dtype)", "return kernel.float().to(dtype).to(torch.float64 if dtype == torch.bfloat16 else dtype), bias.to(dtype)")), "dtype|rounded once"),
    "model changed": (fuse_and_leave, "stay as they are"),
    "switches to eval": (variant("fuse", (_MODE, "if False:"), ("    gm = fx.symbolic", "    model.eval()\n    gm = fx.symbolic")), "training mode raises"),
    "only the model's mode": (variant("fuse", ("(module is model or isinstance(module, NORMS))", "module is model")), "training mode raises"),
    "norms only": (variant("fuse", ("(module is model or isinstance(module, NORMS))", "isinstance(module, NORMS)")), "training mode raises"),
    "2d norms only": (variant("fuse", ("isinstance(module, NORMS)", "isinstance(module, nn.BatchNorm2d)")), "training mode raises"),
    "norms of torch only": (variant("fuse", ("isinstance(module, NORMS)", "type(module) in NORMS")), "training mode raises"),
    "norms with statistics only": (
        variant("fuse", ("isinstance(module, NORMS)", "isinstance(module, NORMS) and module.running_mean is not None")),
        "training mode raises",
    ),
    "all names": (variant("fuse", ("{name or 'model'} is", "model {[n for n, _ in model.named_modules()]} is")), "training mode raises"),
    "output padding lost": (
        variant("fuse", (_NEW, _NEWER + "\n            if new.op == 'call_module' and conv['transposed']:\n                m = gm.get_submodule(new.target)\n                m.output_padding = (0,) * len(m.output_padding)")),
        "every kind",
    ),
    "dilation of transposed ones lost": (
        variant("fuse", (_NEW, _NEWER + "\n            if new.op == 'call_module' and conv['transposed']:\n                m = gm.get_submodule(new.target)\n                m.dilation = (1,) * len(m.dilation)")),
        "every kind",
    ),
    "output size lost": (
        variant("fuse", (_NEW, _NEWER + "\n            if new.op == 'call_module':\n                new.args, new.kwargs = (named(source)['input'],), {}")),
        "every kind",
    ),
    "bias in bfloat16": (
        variant("fuse", ("return kernel.to(dtype), bias.to(dtype)", "b0 = (0.0 if start is None else start) - mean\n    return kernel.to(dtype), (b0.to(dtype) * scale.to(dtype) + (0.0 if beta is None else beta.to(dtype))).to(dtype)")),
        "rounded once",
    ),
    "wide only if the norm is": (
        variant("fuse", (_WIDE, 'wide = torch.promote_types(dtype, norm["running_var"].dtype)')),
        "rounded once",
    ),
    "weight and bias go together": (
        variant("fuse", ("(1.0 if gamma is None else gamma)", "(1.0 if gamma is None or beta is None else gamma)")),
        "every kind",
    ),
    "bias only with a weight": (
        variant("fuse", ("(0.0 if beta is None else beta)", "(0.0 if gamma is None or beta is None else beta)")),
        "every kind",
    ),
    "frozen": (
        variant("fuse", (_NEW, _NEWER + "\n            [p.requires_grad_(False) for n, p in gm.named_parameters() if n.startswith('folded')]")),
        "that learn",
    ),
    "modules left": (variant("fuse", ("    gm.delete_all_unused_submodules()\n", "")), "nobody calls"),
    "not recompiled": (variant("fuse", ("    gm.recompile()\n", "")), "code of another graph"),
    "copied into leaves": (
        variant("fuse", (_NEW, _NEWER + "\n            if new.op == 'call_module':\n                gm.get_submodule(new.target).weight.copy_(fold_any(conv, norm)[0])")),
        "in-place|leaf",
    ),
    "any module": (variant("fuse", ("(module is model or isinstance(module, NORMS))", "True")), "training mode raises"),
    "RuntimeError": (variant("fuse", ("raise ValueError(", "raise RuntimeError(")), "training mode raises"),
    "no name": (variant("fuse", ("{name or 'model'} is", "something is")), "training mode raises"),
}  # fmt: skip

# ---------------------------------------------------------------- insert


def insert_in_two_walks(model, bits=8, per_channel=True):
    """First the values, then the weights, each with a dictionary of its own."""
    gm = fx.symbolic_trace(copy.deepcopy(model))
    graph, fake = gm.graph, GIVEN["FakeQuant"]
    layers = {n: gm.get_submodule(n.target) for n in graph.nodes if n.op == "call_module"}
    layers = {n: m for n, m in layers.items() if type(m) in (nn.Conv2d, nn.Linear)}
    taken, count = {}, iter(range(10**6))

    def add(node, like, *options):
        name = next(f"quantizer{i}" for i in count if not hasattr(gm, f"quantizer{i}"))
        gm.add_submodule(name, fake(*options).to(like.device))
        return graph.call_module(name, (node,))

    for node, layer in layers.items():
        source = node.all_input_nodes[0]
        if getattr(layer, "padding_mode", "zeros") != "zeros":
            continue
        if source not in taken:
            with graph.inserting_after(source):
                taken[source] = add(source, layer.weight, 8, None, False)
        node.args, node.kwargs = (taken[source],), {}
    for node, layer in layers.items():
        if getattr(layer, "padding_mode", "zeros") != "zeros":
            continue
        with graph.inserting_before(node):
            if node.target not in taken:
                weight = graph.get_attr(f"{node.target}.weight")
                taken[node.target] = add(weight, layer.weight, bits, 0 if per_channel else None, True)
            options = {"input": node.args[0], "weight": taken[node.target]}
            if layer.bias is not None:
                options["bias"] = graph.get_attr(f"{node.target}.bias")
            if type(layer) is nn.Conv2d:
                options |= {k: getattr(layer, k) for k in ("stride", "padding", "dilation", "groups")}
            new = graph.call_function(F.conv2d if type(layer) is nn.Conv2d else F.linear, kwargs=options)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
    gm.recompile()
    return gm


def insert_and_share_buffers(model, bits=8, per_channel=True):
    """Running statistics of the result are the model's own."""
    gm = ANSWERS["insert_fake_quant"](model, bits, per_channel)
    for name, buffer in model.named_buffers():
        owner, _, key = name.rpartition(".")
        gm.get_submodule(owner)._buffers[key] = buffer
    return gm


_WEIGHT = "weight = quantized.get(name) or through("
_VALUE = "x = quantized.get(value) or through(value, value, layer.weight)"
WRONG_INSERT = {
    "a module": (wrapping(ANSWERS["insert_fake_quant"]), "GraphModule"),
    "args only": (variant("insert", ('named(node)["input"]', "node.args[0]")), "IndexError"),
    "padding lost": (variant("insert", ("layer.stride, layer.padding,", "layer.stride, 0,")), "outputs equal"),
    "groups lost": (
        variant("insert", ("layer.dilation, layer.groups)", "1, layer.groups)")),
        "outputs equal",
    ),
    "bias lost": (variant("insert", ("None if layer.bias is None else graph", "None if True else graph")), "outputs equal"),
    "doesn't observe": (
        variant(
            "insert",
            ("        quantized[key] = graph", "        gm.get_submodule(path).observing = False\n        quantized[key] = graph"),
        ),
        "outputs equal",
    ),
    "rounds at once": (
        variant("insert", ("        quantized[key] = graph", "        gm.get_submodule(path).rounding = True\n        quantized[key] = graph")),
        "outputs equal",
    ),
    "clean names": (
        variant(
            "insert",
            (
                "    gm.recompile()\n",
                "    for node in graph.nodes:\n"
                "        if node.op == 'get_attr' and node.target.endswith('bias'):\n"
                "            new = node.target.replace('.', '_')\n"
                "            gm.register_parameter(new, gm.get_parameter(node.target))\n"
                "            node.target = new\n"
                "    gm.delete_all_unused_submodules()\n"
                "    for m in list(gm.modules()):\n"
                "        if type(m) in (nn.Conv2d, nn.Linear) and getattr(m, 'padding_mode', 'zeros') == 'zeros':\n"
                "            m.bias = None\n"
                "    gm.recompile()\n",
            ),
        ),
        "keep their names",
    ),
    "one for each layer": (variant("insert", (_VALUE, "x = through(node, value, layer.weight)")), "a value passes one"),
    "asked bits for values": (variant("insert", ("through(value, value, layer.weight)", "through(value, value, layer.weight, bits=bits)")), "a value passes one"),
    "symmetric values": (
        variant("insert", ("through(value, value, layer.weight)", "through(value, value, layer.weight, symmetric=True)")),
        "a value passes one",
    ),
    "one for each call": (variant("insert", (_WEIGHT, "weight = through(")), "a weight passes one"),
    "one for each call, keyed": (variant("insert", ("name, graph.get_attr(name)", "node, graph.get_attr(name)")), "a weight passes one"),
    "channels last": (variant("insert", ("0 if per_channel", "1 if per_channel")), "a weight passes one"),
    "always per channel": (variant("insert", ("0 if per_channel else None", "0")), "a weight passes one"),
    "asymmetric weights": (variant("insert", ("symmetric=True", "symmetric=False")), "a weight passes one"),
    "eight bits always": (variant("insert", ("bits=bits", "bits=8")), "a weight passes one"),
    "square strides": (variant("insert", ("(layer.stride,", "(layer.stride[0],")), "outputs equal|rounded"),
    "square dilation": (variant("insert", ("layer.dilation,", "layer.dilation[0],")), "outputs equal"),
    "padding by number": (
        variant("insert", ("layer.padding, layer", "layer.padding if isinstance(layer.padding, tuple) else 0, layer")),
        "outputs equal",
    ),
    "any padding mode": (variant("insert", ('!= "zeros"', '== "?"')), "outputs equal"),
    "buffers shared": (insert_and_share_buffers, "also when the copy is trained"),
    "thaws": (variant("insert", ("    gm.recompile()\n", "    gm.recompile()\n    gm.requires_grad_(True)\n")), "also when the copy is trained"),
    "freezes": (variant("insert", ("    gm.recompile()\n", "    gm.recompile()\n    gm.requires_grad_(False)\n")), "also when the copy is trained"),
    "freezes the model": (variant("insert", ("copy.deepcopy(model)", "copy.deepcopy(model.requires_grad_(False))")), "also when the copy is trained"),
    "the model in evaluation mode": (
        variant("insert", ("copy.deepcopy(model))", "copy.deepcopy(model))\n    model.eval()")),
        "also when the copy is trained",
    ),
    "the model in training mode": (
        variant("insert", ("copy.deepcopy(model))", "copy.deepcopy(model))\n    model.train()")),
        "also when the copy is trained",
    ),
    "a copy in evaluation mode": (variant("insert", ("copy.deepcopy(model)", "copy.deepcopy(model).eval()")), "layers became"),
    "a copy in training mode": (variant("insert", ("    gm.recompile()\n", "    gm.recompile()\n    gm.train()\n")), "layers became"),
    "not recompiled": (variant("insert", ("    gm.recompile()\n", "")), "code of another graph"),
    "arguments exchanged": (variant("insert", ("F.linear, (x, weight, bias)", "F.linear, (weight, x, bias)")), "outputs equal"),
    "modules stay": (
        variant("insert", ("(nn.Conv2d, nn.Linear)", "(nn.Conv2d, nn.Linear, nn.SiLU)"), ("            if type(layer) is nn.Linear:", "            if type(layer) is nn.SiLU:\n                call = node\n            elif type(layer) is nn.Linear:")),
        "AttributeError|layers became|takes any",
    ),
    "dead code goes": (
        variant("insert", ("    gm.recompile()\n", "    graph.eliminate_dead_code()\n    gm.recompile()\n")),
        "layers became",
    ),
    "a call more": (
        variant("insert", ("        node.replace_all_uses_with(call)\n", "        with graph.inserting_after(call):\n            graph.call_method('detach', (call,))\n        node.replace_all_uses_with(call)\n")),
        "layers became",
    ),
    "all users": (
        variant(
            "insert",
            (
                "        node.replace_all_uses_with(call)\n",
                "        for user in list(value.users):\n"
                "            if user is not x and user is not node:\n"
                "                user.replace_input_with(value, x) if user.op != 'placeholder' else None\n"
                "        node.replace_all_uses_with(call)\n",
            ),
        ),
        "nothing else|lint|a value passes",
    ),
    "output too": (
        variant(
            "insert",
            (
                "    gm.recompile()\n",
                "    out = next(n for n in graph.nodes if n.op == 'output')\n"
                "    for value, x in quantized.items():\n"
                "        if isinstance(value, fx.Node):\n"
                "            out.replace_input_with(value, x)\n"
                "    gm.recompile()\n",
            ),
        ),
        "nothing else",
    ),
    "not a copy": (variant("insert", ("copy.deepcopy(model)", "model")), "also when the copy is trained"),
    "on the CPU": (variant("insert", (".to(like.device)", "")), "weight's device"),
    "names reused": (variant("insert", ("        while hasattr(gm, path):\n            path += \"_\"\n", "")), "outputs equal|lint|keep their names"),
}  # fmt: skip

# ---------------------------------------------------------------- backend


class BackendByFunctions:
    """Keeps the state of the generator by hand, and compares what a run leaves, tensor by tensor."""

    def __init__(self, passes):
        self.passes, self.log = tuple(passes), []

    def _try(self, gm, example_inputs):
        state = torch.get_rng_state()
        inputs = [t.node.hint if isinstance(t, torch.SymInt) else t for t in example_inputs]
        inputs = copy.deepcopy([t.detach() if hasattr(t, "detach") else t for t in inputs])
        gm = copy.deepcopy(gm)
        old = {name: tensor.clone() for name, tensor in gm.state_dict().items()}
        try:
            torch.manual_seed(99)
            with torch.no_grad():
                outputs = gm(*inputs)
        finally:
            torch.set_rng_state(state)
        left = {name: t for name, t in gm.state_dict().items() if (t != old[name]).any()}
        return [outputs, {i: t for i, t in enumerate(inputs) if hasattr(t, "detach")}, left]

    def holds(self, new, gm, example_inputs):
        new.graph.lint()
        torch.testing.assert_close(self._try(new, example_inputs), self._try(gm, example_inputs))

    def __call__(self, gm, example_inputs):
        log = []
        for one in self.passes:
            trial = copy.deepcopy(gm)
            try:
                trial = one(trial)
                self.holds(trial, gm, example_inputs)
            except Exception:
                log.append((one.__name__, len(gm.graph.nodes), False))
            else:
                gm = trial
                log.append((one.__name__, len(gm.graph.nodes), True))
        self.log.append(log)
        return gm


class BackendWithRecursion:
    def __init__(self, passes):
        self.passes, self.log = list(passes), []

    def __call__(self, gm, example_inputs):
        helper = BackendByFunctions([])
        entries = []
        for one in self.passes:
            try:
                new = one(copy.deepcopy(gm))
                helper.holds(new, gm, example_inputs)
            except Exception:
                new = None
            gm = gm if new is None else new
            entries += [(one.__name__, len(gm.graph.nodes), new is not None)]
        self.log += [entries]
        return lambda *args: gm(*args)


class BackendThatComparesAll:
    """Compares all inputs after the trial, numbers among them, and what of the state was written."""

    def __init__(self, passes):
        self.passes, self.log = passes, []

    def trial(self, gm, example_inputs):
        gm = copy.deepcopy(gm)
        before = copy.deepcopy(gm.state_dict())
        inputs = []
        for value in example_inputs:
            if isinstance(value, torch.SymInt):
                inputs.append(value.node.hint)
            else:
                inputs.append(value.detach().clone() if isinstance(value, torch.Tensor) else value)
        with torch.random.fork_rng(), torch.no_grad():
            outputs = gm(*inputs)
        written = {k: v for k, v in gm.state_dict().items() if not torch.equal(v, before[k])}
        return outputs, inputs, written

    def __call__(self, gm, example_inputs):
        self.log.append([])
        for one in self.passes:
            new, kept = None, True
            try:
                new = one(copy.deepcopy(gm))
                new.graph.lint()
                torch.testing.assert_close(self.trial(new, example_inputs), self.trial(gm, example_inputs))
            except Exception:
                kept = False
            gm = new if kept else gm
            self.log[-1].append((one.__name__, len(gm.graph.nodes), kept))
        return gm


_CLOSE = "                torch.testing.assert_close(results(changed), results(gm))\n"
_PAIRS = (
    "                got, want = results(changed), results(gm)\n"
    "                torch.testing.assert_close(got[1:], want[1:])\n"
    "                pairs = list(zip(got[0], want[0], strict=False))\n"
)
_CHANGED = "changed = one(copy.deepcopy(gm))"
_TRIAL = "trial, before = copy.deepcopy(graph_module), graph_module.state_dict()"
_SEEDED = "            with torch.random.fork_rng(), torch.no_grad():\n                torch.manual_seed(0)\n"
WRONG_BACKEND = {
    "tuples only": (
        variant("backend", ("        entries = []", "        assert isinstance(example_inputs, tuple)\n        entries = []")),
        "AssertionError",
    ),
    "returns the code": (variant("backend", ("return gm.forward", "return gm.code")), "in order"),
    "each on the first": (
        variant("backend", ("gm = changed if kept else gm", "last = changed if kept else gm"), ("len(gm.graph", "len(last.graph"), ("return gm.forward", "return last.forward")),
        "in order",
    ),
    "one log": (variant("backend", ("        self.log.append(entries)", "        self.log = [entries]")), "in order"),
    "nodes before": (
        variant("backend", ("            gm = changed if kept else gm\n", "            nodes = len(gm.graph.nodes)\n            gm = changed if kept else gm\n"), ("len(gm.graph.nodes), kept)", "nodes, kept)")),
        "in order",
    ),
    "runs the old graph": (
        variant("backend", ("        entries = []", "        original = gm\n        entries = []"), ("return gm.forward", "return original.forward")),
        "in order",
    ),
    "doesn't compare": (variant("backend", (_CLOSE, "                results(changed)\n")), "other outputs"),
    "loosely": (variant("backend", ("results(gm))", "results(gm), rtol=0.01, atol=0.01)")), "other outputs"),
    "any dtype": (variant("backend", ("results(gm))", "results(gm), check_dtype=False)")), "other outputs"),
    "no copy for the pass": (variant("backend", (_CHANGED, "changed = one(gm)")), "other outputs|in order|raises"),
    "passes may not raise": (
        variant("backend", ("            try:\n                " + _CHANGED + "\n                changed.graph.lint()\n", "            " + _CHANGED + "\n            try:\n                changed.graph.lint()\n")),
        "a pass that raises",
    ),
    "no lint": (variant("backend", ("                changed.graph.lint()\n", "")), "lint is asked"),
    "comparison errors only": (
        variant("backend", (_CLOSE, "                got = results(changed)\n" + _CLOSE.replace("results(changed)", "got")), ("except Exception:", "except (AssertionError, ValueError, KeyError):"), ("                " + _CHANGED + "\n                changed.graph.lint()\n", "                try:\n                    " + _CHANGED + "\n                    changed.graph.lint()\n                except Exception as error:\n                    raise ValueError from error\n")),
        "a result that raises",
    ),
    "inputs not copied": (variant("backend", ("v.detach().clone() if", "v.detach() if")), "trying runs on copies"),
    "graph not copied": (variant("backend", (_TRIAL, "trial, before = graph_module, copy.deepcopy(graph_module.state_dict())")), "trying runs on copies"),
    "generator moved": (variant("backend", ("with torch.random.fork_rng(), torch.no_grad():", "with torch.no_grad():")), "trying runs on copies"),
    "other numbers": (
        variant(
            "backend",
            (_SEEDED, "            with torch.no_grad():\n"),
            ("        entries = []", "        entries, state = [], torch.get_rng_state()"),
            ("        return gm.forward", "        torch.set_rng_state(state)\n        return gm.forward"),
        ),
        "same numbers",
    ),
    "what is there of both": (
        variant("backend", (_CLOSE, _PAIRS + "                assert all(torch.allclose(a, b) and a.dtype == b.dtype for a, b in pairs)\n")),
        "other outputs",
    ),
    "shapes broadcast": (
        variant("backend", (_CLOSE, _PAIRS.replace("False", "True") + "                assert all(torch.allclose(a, b) and a.dtype == b.dtype for a, b in pairs)\n")),
        "other outputs",
    ),
    "shares tensors with the pass": (
        variant("backend", ("one(copy.deepcopy(gm))", "one(fx.GraphModule(gm, copy.deepcopy(gm.graph)))")),
        "other outputs",
    ),
    "nothing returned": (
        variant("backend", ("except Exception:", "except (RuntimeError, AssertionError, ValueError, TypeError, KeyError):")),
        "a pass that raises",
    ),
    "outputs alone": (variant("backend", ("return outputs, [v for v in inputs if isinstance(v, Tensor)], changed", "return outputs")), "same is written"),
    "outputs and inputs": (variant("backend", ("isinstance(v, Tensor)], changed", "isinstance(v, Tensor)]")), "same is written"),
    "outputs and tensors": (variant("backend", ("return outputs, [v for v in inputs if isinstance(v, Tensor)], changed", "return outputs, changed")), "same is written"),
    "tensors that both have": (
        variant(
            "backend",
            ("            changed = {key: value for key, value in after if not torch.equal(value, before[key])}\n", ""),
            ("isinstance(v, Tensor)], changed", "isinstance(v, Tensor)], dict(after)"),
            (_CLOSE, "                got, want = results(changed), results(gm)\n                torch.testing.assert_close(got[:2], want[:2])\n                for key in got[2].keys() & want[2].keys():\n                    torch.testing.assert_close(got[2][key], want[2][key])\n"),
        ),
        "same is written[\\s\\S]*_dead_code_and_modules",
    ),
    "no gradients": (variant("backend", ("return gm.forward", "return torch.no_grad()(gm.forward)")), "gradients flow"),
    "a copy with detached inputs": (
        variant("backend", ("return gm.forward", "return lambda *a: gm(*[t.detach() if isinstance(t, Tensor) else t for t in a])")),
        "gradients flow",
    ),
    "tensors only": (variant("backend", (" if isinstance(v, Tensor) else v for v", " for v")), "no tensors"),
    "symbolic sizes as they are": (variant("backend", ("v.node.hint if isinstance(v, torch.SymInt) else v", "v")), "no tensors[\\s\\S]*log for a symbolic size"),
    "sizes by int()": (variant("backend", ("v.node.hint if", "int(v) if")), "no tensors[\\s\\S]*size afterwards"),
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
    "count_flops": [flops_by_shapes, flops_by_methods],
    "eliminate_common_subexpressions": [cse_by_comparison, cse_by_building],
    "fuse_conv_bn": [fuse_by_torch, fuse_on_a_copy],
    "insert_fake_quant": [
        insert_in_two_walks,
        lambda *a: ANSWERS["insert_fake_quant"](fx.symbolic_trace(a[0]), *a[1:]),
    ],
    "PassBackend": [BackendByFunctions, BackendWithRecursion, BackendThatComparesAll],
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
    IDLE = IDLE
    CHECKS, ANSWERS, STUBS = CHECKS, ANSWERS, STUBS
    RIGHT, WRONG = RIGHT, WRONG
