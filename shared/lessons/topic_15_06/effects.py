"""What a node of an fx graph does besides giving a value: it may write into a tensor, or draw random numbers.

A node doesn't say so, but PyTorch's names and a module's attributes do. Where they leave a doubt, the answer is the
careful one: a pass then changes less than it could.
"""

import re
from typing import Any

import torch
from torch import fx, nn

_ASSIGNMENTS = re.compile(  # x[i] = y, del x[i], x += y and so on
    "setitem|delitem|i(add|sub|mul|truediv|floordiv|mod|pow|matmul|and|or|xor|lshift|rshift|concat)"
)
_PURE_OPERATORS = {"and_", "or_", "not_", "is_"}  # named so because `and` is a word of Python
_RANDOM = re.compile(
    "rand|drop|bernoulli|nomial|normal|uniform|poisson|exponential|geometric|cauchy|dirichlet"
    "|gamma|gumbel|rrelu|fractional|attention|sdp|lstm|gru|rnn"
)


def effect(gm: fx.GraphModule, node: fx.Node) -> str:
    """What a node does besides giving a value: 'writes', 'random' or 'none'."""
    if _writes(gm, node):
        return "writes"
    return "random" if _draws(gm, node) else "none"


def _name_of(node: fx.Node) -> str:
    """The name of what a node calls, such as 'relu_' or 'batch_norm'."""
    return getattr(node.target, "__name__", str(node.target)).partition(".")[0]


def _writes(gm: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a node writes into something that exists outside of it."""
    if node.op == "call_module":
        return any(map(_module_writes, gm.get_submodule(node.target).modules()))
    return node.op in ("call_function", "call_method") and _function_writes(node)


def _module_writes(module: nn.Module) -> bool:
    """Whether one module, without its children, writes."""
    from_pytorch = type(module).__module__.startswith("torch.nn.modules")
    if not from_pytorch or module._forward_hooks or module._forward_pre_hooks:
        return True
    if isinstance(module, nn.modules.batchnorm._NormBase):
        return module.training
    return bool(getattr(module, "inplace", False) or getattr(module, "max_norm", None))


def _function_writes(node: fx.Node) -> bool:
    """Whether a function or method writes: by where it comes from, its name, its signature and its arguments."""
    name = _name_of(node)
    if not _is_known(node.target) or _ASSIGNMENTS.fullmatch(name.strip("_")):  # methods have names like __setitem__
        return True
    if "batch_norm" in name and "no_training" not in name:
        # torch.batch_norm and aten's take `training` as the sixth argument, F.batch_norm is recorded with its name
        training = node.args[5] if len(node.args) > 5 else node.kwargs.get("training", True)
        return training is not False
    schema = getattr(node.target, "_schema", None)  # the signature of an ATen operator says what it writes
    if schema and schema.is_mutable:
        return True
    options = [node.kwargs.get(option) for option in ("out", "inplace", "max_norm")]
    if any(option not in (None, False) for option in options):
        return True
    return bool(re.search("[^_]_$", name)) and name not in _PURE_OPERATORS


def _is_known(function: Any) -> bool:
    """Whether a function comes from PyTorch or Python; the name of a method counts as PyTorch's."""
    if isinstance(function, torch._ops.HigherOrderOperator):
        return False  # it runs another graph, such as a checkpoint's
    home = getattr(function, "__module__", None) or "torch"
    return home.partition(".")[0] in ("torch", "_operator", "math", "builtins")


def _draws(gm: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a node may draw random numbers."""
    if node.op == "call_module":
        return any(map(_module_draws, gm.get_submodule(node.target).modules()))
    off = node.kwargs.get("training", True) is False
    is_call = node.op in ("call_function", "call_method")
    return is_call and not off and bool(_RANDOM.search(_name_of(node)))


def _module_draws(module: nn.Module) -> bool:
    name = type(module).__name__.lower()
    in_any_mode = "fractional" in name  # this pooling draws its windows, in evaluation mode, too
    return bool(_RANDOM.search(name)) and (module.training or in_any_mode)
