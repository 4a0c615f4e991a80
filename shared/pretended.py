"""An accelerator that isn't there: mistakes with devices, found on a machine that has only a CPU.

    with pretended_accelerator() as device:         # torch.device("mps")
        torch.ones(3, device=device) + torch.ones(3)    # RuntimeError: Expected all tensors to be on the same device

Inside, everything is computed on the CPU, but each storage knows whether it is meant to be on the accelerator, and what
PyTorch would refuse on a Mac's GPU is refused with PyTorch's message: operations on tensors of both sides, `numpy()` of
a tensor of the accelerator, an index or a generator from the wrong side, float64. Three things do it: replaced members
of torch.Tensor (`device`, `to`, `numpy`, ...), wrapped factories (`torch.zeros(..., device=...)`), and a dispatch mode
that sees every operation, those of a backward pass included.

Where nobody can know the side of a tensor (a factory called by PyTorch's C++, sparse tensors), none is held against it:
a mistake may be missed there, but right code passes. Threads pretend, too; processes that are started inside don't.
Fake tensors stay on the CPU, torch.compile runs functions as they are (so that fullgraph=True fails), and what
torch.jit.trace records is not watched.

`get_device` begins it when COURSE_DEVICE=pretended, which `python -m course run --rehearse` sets.
"""

import contextlib
import functools
import inspect
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch._dynamo
from torch import Tensor
from torch._C._dynamo.eval_frame import set_eval_frame
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import UninitializedTensorMixin
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext, _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

DEVICE = torch.device("mps")  # what notebooks get; a tensor's own device has a number, as on a Mac
_HOST, _ACCELERATOR, _UNKNOWN = "cpu", "mps:0", "unknown"  # the sides
_BASE = torch._C.TensorBase
_parse_to = torch._C._nn._parse_to

# operations whose tensors may be on different sides in PyTorch, too
_MIXED = {"aten::copy_", "aten::_foreach_copy_", "aten::_to_copy", "aten::_pack_padded_sequence"}
_JOINING = {"aten::cat", "aten::stack"}  # here a number on the CPU counts, too
# what indexing becomes, and where its indices are: they may be on the CPU; `x[index] = 0` becomes index_fill_
_INDEXING = dict.fromkeys(("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"), 1)
_INDEXING |= {"aten::_unsafe_index": 1, "aten::index_fill_": 2}

# --------------------------------------------------------------------------------------------------------------------
# which side a tensor is on: an attribute of its storage, so that views agree


def _memory(tensor: Tensor) -> torch.UntypedStorage | None:
    """The storage, wherever it is, or None: fake and sparse tensors and proxies of torch.fx have none."""
    if isinstance(tensor, FakeTensor) or not isinstance(tensor, Tensor):
        return None
    with torch._C.DisableTorchFunction():
        while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            tensor = torch._C._functorch.get_unwrapped(tensor)
        try:
            return _BASE.untyped_storage(tensor)
        except (NotImplementedError, RuntimeError):
            return None


def _storage(tensor: Tensor) -> torch.UntypedStorage | None:
    """The storage in the CPU's memory, or None: fake, meta and sparse tensors are not ours."""
    storage = _memory(tensor)
    return storage if storage is not None and storage.device.type == "cpu" else None


def _fake_mode() -> bool:
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def _side(tensor: Tensor) -> str:
    storage = _memory(tensor)
    if storage is None:
        return _UNKNOWN
    # asked for each tensor of each operation, so the usual answer comes first
    side = getattr(storage, "pretended", None)
    return side or (_HOST if storage.device.type == "cpu" else _UNKNOWN)


def _put(tensor: Tensor, side: str) -> None:
    """Say that a tensor with memory of its own is on this side."""
    storage = _storage(tensor)
    if storage is not None:
        if side == _ACCELERATOR:
            if tensor.dtype in (torch.float64, torch.complex128):
                message = "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64."
                raise TypeError(message + " Please use float32 instead.")
            if _active and os.getpid() != _active[-1]:
                message = "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must"
                raise RuntimeError(message + " use the 'spawn' start method")
        storage.pretended = side


def _side_of_device(device: Any) -> str | None:
    """The side that a `device=` names, or None for none and for devices that nobody pretends."""
    kind = None if device is None or isinstance(device, int) else torch.device(device).type
    return {"cpu": _HOST, "mps": _ACCELERATOR}.get(kind)


# --------------------------------------------------------------------------------------------------------------------
# members of torch.Tensor


class _Move(torch.autograd.Function):
    """A copy on the other side. Its gradient moves back."""

    @staticmethod
    def forward(x: Tensor, side: str) -> Tensor:
        moved = x.clone()
        _put(moved, side)
        return moved

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
        ctx.back = _side(inputs[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Move.apply(grad, ctx.back), None


def _to(original: Callable, self: Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
    """Tensor.to in its forms: (device, dtype, ...), (dtype, ...), (other, ...), and keywords."""
    device, dtype, _, memory_format = _to_of_modules(_parse_to, *args, **kwargs)
    side = _side_of_device(device)
    if side is None:
        return original(self, *args, copy=copy, **kwargs)
    dtype = dtype or self.dtype
    plain = {"memory_format": memory_format} if memory_format else {}
    now = _side(self)
    if _storage(self) is None:
        return original(self, _HOST, dtype, copy=copy, **plain)
    if now == side or (now == _UNKNOWN and side == _HOST):
        return original(self, dtype, copy=copy, **plain)
    if isinstance(self, UninitializedTensorMixin):  # a lazy module's parameter: it has no values that could be copied
        moved = original(self, dtype, copy=True)
        _put(moved, side)
        return moved
    if side == _ACCELERATOR:
        return _Move.apply(original(self, dtype, **plain), side)
    return original(_Move.apply(self, side), dtype, **plain)


def _to_of_modules(original: Callable, *args: Any, **kwargs: Any) -> tuple:
    """What `module.to(...)` makes of its arguments: `module.to(x)` goes where x is."""
    device, *rest = original(*args, **kwargs)
    like = args[0] if args else kwargs.get("tensor")
    return (like.device if isinstance(like, Tensor) else device, *rest)


def _numpy(original: Callable, self: Tensor, *, force: bool = False) -> Any:
    if _side(self) == _ACCELERATOR:
        if not force:
            message = f"can't convert {_ACCELERATOR} device type tensor to numpy."
            raise TypeError(message + " Use Tensor.cpu() to copy the tensor to host memory first.")
        self = self.detach().cpu()
    return original(self, force=force)


def _get_device(self: Tensor) -> torch.device:
    return torch.device(_ACCELERATOR) if _side(self) == _ACCELERATOR else _BASE.device.__get__(self)


def _set_grad(self: Tensor, grad: Tensor | None) -> None:
    if grad is not None and {_side(self), _side(grad)} == {_HOST, _ACCELERATOR}:
        raise RuntimeError("assigned grad has data located on a different device")
    _BASE.grad.__set__(self, grad)


def _members() -> dict[str, Any]:
    """What replaces members of torch.Tensor."""
    return {
        "device": property(_get_device),
        "grad": property(_BASE.grad.__get__, _set_grad, lambda self: _set_grad(self, None)),
        "to": _wrapped(Tensor.to, _to),
        "cpu": lambda self, memory_format=torch.preserve_format: self.to("cpu", memory_format=memory_format),
        "numpy": _wrapped(Tensor.numpy, _numpy),
    }


# --------------------------------------------------------------------------------------------------------------------
# factories and generators

_LIKE = ("empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like")
_NEW = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")
_generators: "weakref.WeakSet[torch.Generator]" = weakref.WeakSet()


def _wrapped(original: Callable, around: Callable) -> Callable:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    return wrapper


def _default_device() -> torch.device:
    """Of `with torch.device(...)` and torch.set_default_device."""
    modes = reversed(_get_current_function_mode_stack())
    return next((mode.device for mode in modes if isinstance(mode, DeviceContext)), torch.device(_HOST))


def _factory(original: Callable, *args: Any, **kwargs: Any) -> Any:
    """A function that makes tensors: on the side that `device` or the default device names."""
    device = kwargs.get("device")
    takes_a_tensor = bool(args) and isinstance(args[0], Tensor)  # without a device the result is where that is
    if device is None and not takes_a_tensor:
        device = kwargs["device"] = _default_device()
    side = _side_of_device(device)
    if "generator" in kwargs:
        _refuse_generator(kwargs["generator"], side, "Expected a '{}' generator device but found '{}'")
    if side is None:
        made = original(*args, **kwargs)
        if original.__name__ == "new_tensor":
            _put(made, _side(args[0]))
        return made
    made = original(*args, **kwargs | {"device": _HOST})
    if original.__name__ in ("as_tensor", "asarray"):  # they may share memory with what they are given
        return made.to(side)
    if not _fake_mode():
        _put(made, side)
    return made


def _new_fake(original: Callable, cls: type, mode: Any, elem: Tensor, device: Any, *args: Any, **kwargs: Any) -> Any:
    """Fake tensors (torch.export's, torch.compile's) stay on the CPU: what traces with them asks for the driver."""
    return original(cls, mode, elem, torch.device(_HOST) if device.type == "mps" else device, *args, **kwargs)


class _Kind(type(torch.Generator)):
    def __instancecheck__(cls, thing: Any) -> bool:
        return isinstance(thing, torch._C.Generator)


class _Generator(torch.Generator, metaclass=_Kind):
    """torch.Generator, on either side."""

    def __new__(cls, device: Any = _HOST) -> torch.Generator:
        if _side_of_device(device) != _ACCELERATOR:
            return torch._C.Generator(device)
        made = super().__new__(cls)
        _generators.add(made)
        return made

    device = property(lambda self: torch.device(_ACCELERATOR))


def _refuse_generator(generator: Any, side: str | None, message: str) -> None:
    """Raise if a generator is on the wrong side. PyTorch hands on a new object for the same C++ generator."""
    if generator is not None and side in (_HOST, _ACCELERATOR):
        found = _ACCELERATOR if any(own._cdata == generator._cdata for own in _generators) else _HOST
        if found != side:
            raise RuntimeError(message.format(side, found))


# --------------------------------------------------------------------------------------------------------------------
# every operation


def _tensors(values: Any) -> list[Tensor]:
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value)
    return found


def _is_one_of(tensor: Tensor, others: list[Tensor]) -> bool:
    return any(tensor is other for other in others)


class _Facts(NamedTuple):
    """What the schema of an operation says."""

    name: str
    written: list[tuple[int, str]]  # positions and names of the arguments that it writes into
    generator: bool


@functools.cache
def _facts(function: Any) -> _Facts:
    schema = getattr(function, "_schema", None)  # higher-order operators have none
    name = schema.name if schema else ""
    arguments = schema.arguments if schema else ()
    written = [(i, a.name) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]
    return _Facts(name, written, any(a.name == "generator" for a in arguments))


class _Watch(TorchDispatchMode):
    """Refuses operations on tensors of both sides, and says on which side results are."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Watch one operation, and let torch.compile look away meanwhile."""
        compiling = set_eval_frame(None)
        # a torch.cond in a branch of another compiles itself; up to torch 2.12 that fails in here
        nested = compiling is not None and isinstance(function, torch._ops.HigherOrderOperator)
        try:
            with torch.compiler.set_stance("force_eager") if nested else contextlib.nullcontext():
                return self._watch(function, types, args, kwargs or {})
        finally:
            set_eval_frame(compiling)

    def _watch(self, function: Any, types: Any, args: tuple, kwargs: dict) -> Any:
        if _fake_mode() or (types and any(issubclass(kind, FakeTensor) for kind in types)):
            return function(*args, **kwargs)  # fake tensors stay on the CPU
        if types and any(kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl for kind in types):
            return NotImplemented  # what such a tensor is made of comes by later
        facts = _facts(function)
        index = _INDEXING.get(facts.name, len(args))  # position
        indices = _tensors(args[index : index + 1])
        read = [*_tensors(args[:index]), *_tensors(args[index + 1 :]), *_tensors(kwargs.values())]
        written = _tensors(args[i] if i < len(args) else kwargs.get(name) for i, name in facts.written)
        side = self._side_of_result(function, facts.name, read, written)
        if side == _HOST and any(_side(index) == _ACCELERATOR for index in indices):
            raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
        if facts.generator:
            generator = next((v for v in (*args, *kwargs.values()) if isinstance(v, torch._C.Generator)), None)
            _refuse_generator(generator, side, "Expected a '{}' device type for generator but found '{}'")
        if _side_of_device(kwargs.get("device")) == _ACCELERATOR:
            kwargs, side = kwargs | {"device": torch.device(_HOST)}, _ACCELERATOR
        result = function(*args, **kwargs)
        if facts.name == "aten::_pack_padded_sequence":
            _put(result[0], side)  # and the batch sizes stay on the CPU
        elif side != _HOST:
            for tensor in _tensors(result if isinstance(result, list | tuple) else (result,)):
                if not _is_one_of(tensor, read):
                    _put(tensor, side)
        if side != _UNKNOWN:
            for tensor in written:
                if _side(tensor) == _UNKNOWN:
                    _put(tensor, side)
        return result

    def _side_of_result(self, function: Any, name: str, read: list[Tensor], written: list[Tensor]) -> str:
        """The side that the tensors agree on. Raises RuntimeError if they don't."""
        if name in _MIXED:
            sides = [_side(tensor) for tensor in read]
            known = [side for side in sides if side != _UNKNOWN]
            if not sides:  # a number that torch.func.vmap makes a tensor of
                return _UNKNOWN
            return sides[0] if name != "aten::copy_" else known[0] if known else _UNKNOWN
        seen, numbers = set(), []
        for tensor in read:
            side = _side(tensor)
            if side == _HOST and tensor.dim() == 0 and name not in _JOINING and not _is_one_of(tensor, written):
                numbers.append(tensor)  # a number on the CPU may meet any tensor
            else:
                seen.add(side)
        if {_HOST, _ACCELERATOR} <= seen:
            message = f"Expected all tensors to be on the same device, but found at least two devices, {_ACCELERATOR}"
            raise RuntimeError(f"{message} and {_HOST}! (in {function})")
        for number in numbers if _ACCELERATOR in seen else ():
            if number.requires_grad and not hasattr(number, "pretended"):  # the engine moves its gradient back
                number.pretended = number.register_hook(Tensor.cpu)
        return _ACCELERATOR if _ACCELERATOR in seen else _HOST if _HOST in seen or numbers else _UNKNOWN


# PyTorch puts a wrapper around it that does the same for three times the price of all else that is done here
_Watch.__torch_dispatch__ = torch._dynamo.decorators.skip(inspect.unwrap(_Watch.__torch_dispatch__))


# --------------------------------------------------------------------------------------------------------------------
# what C++ checks without an operation: gradients of custom functions, storages from files


def _apply_function(original: Any, cls: type, *args: Any, **kwargs: Any) -> Any:
    """Function.apply, remembering where the inputs are."""
    sides = [_side(value) if isinstance(value, Tensor) else None for value in args]
    result = original.__get__(None, cls)(*args, **kwargs)
    for tensor in _tensors(result if isinstance(result, list | tuple) else (result,)):
        if isinstance(tensor.grad_fn, cls._backward_cls):
            tensor.grad_fn.pretended = sides
    return result


def _apply_backward(original: Callable, self: Any, *grads: Any) -> Any:
    """A custom backward; the engine refuses gradients that are elsewhere than the inputs."""
    result = original(self, *grads)
    given = result if isinstance(result, tuple) else (result,)
    for i, (grad, side) in enumerate(zip(given, getattr(self, "pretended", ()), strict=False)):
        if isinstance(grad, Tensor) and {side, _side(grad)} == {_HOST, _ACCELERATOR}:
            message = f"Function {type(self).__name__} returned an invalid gradient at index {i}"
            raise RuntimeError(f"{message} - expected device {side} but got {_side(grad)}")
    return result


def _location(storage: torch.UntypedStorage) -> str | None:
    return "mps" if getattr(storage, "pretended", _HOST) == _ACCELERATOR else None


def _restored(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage | None:
    if not location.startswith("mps"):
        return None
    storage.pretended = _ACCELERATOR
    return storage


# --------------------------------------------------------------------------------------------------------------------
# beginning and ending

_active: list[int] = []  # the process that pretends; a child that it forks does, too, but must not use the device
_begun = contextlib.ExitStack()


def begin() -> torch.device:
    """Pretend from now on, in this thread and those that it starts; a second call changes nothing."""
    if not _active:
        _begun.enter_context(pretended_accelerator())
    return DEVICE


@contextlib.contextmanager
def pretended_accelerator() -> Iterator[torch.device]:
    """Pretend within a block; tensors that outlive it are on the CPU again."""
    factories = {function.__name__: torch for function in _device_constructors()}
    factories |= dict.fromkeys(("normal", *_LIKE), torch) | dict.fromkeys(_NEW, Tensor)
    function = torch.autograd.Function
    registered = []
    _active.append(os.getpid())
    torch.serialization.register_package(-1, _location, _restored)
    try:
        with contextlib.ExitStack() as replaced:

            def replace(owner: Any, name: str, value: Any) -> None:
                replaced.enter_context(mock.patch.object(owner, name, value))

            for name, member in _members().items():
                replace(Tensor, name, member)
            # a lazy module's parameters allow only functions that they know, and these compare by identity
            lazy = UninitializedTensorMixin._allowed_methods
            replace(UninitializedTensorMixin, "_allowed_methods", [*lazy, Tensor.to, Tensor.cpu])
            for name, owner in factories.items():
                if hasattr(owner, name):
                    original = getattr(owner, name)
                    operator = torch.jit._builtins._find_builtin(original)
                    replace(owner, name, _wrapped(original, _factory))
                    if operator is not None:  # TorchScript knows functions by their id
                        registered.append(getattr(owner, name))
                        torch.jit._builtins._register_builtin(registered[-1], operator)
            replace(torch._C._nn, "_parse_to", _wrapped(_parse_to, _to_of_modules))
            replace(torch, "Generator", _Generator)
            replace(FakeTensor, "__new__", staticmethod(_wrapped(FakeTensor.__new__, _new_fake)))
            replace(function, "apply", classmethod(functools.partial(_apply_function, vars(function)["apply"])))
            backward = torch.autograd.function.BackwardCFunction
            replace(backward, "apply", _wrapped(backward.apply, _apply_backward))
            replace(threading.Thread, "start", _wrapped(threading.Thread.start, _start_thread))
            replace(torch.jit, "trace", _wrapped(torch.jit.trace, _unwatched))
            with _Watch():
                yield DEVICE
    finally:
        for wrapped in registered:  # when it is gone, another function may get its id
            del torch.jit._builtins._get_builtin_table()[id(wrapped)]
        torch.serialization._package_registry.remove((-1, _location, _restored))
        _active.pop()


def _unwatched(original: Callable, *args: Any, **kwargs: Any) -> Any:
    """torch.jit.trace records nothing of operations that a dispatch mode has seen first."""
    with _disable_current_modes():
        return original(*args, **kwargs)


def _start_thread(original: Callable, self: threading.Thread) -> None:
    run = self.run

    def watched() -> None:
        with _Watch():
            run()

    self.run = watched
    original(self)
