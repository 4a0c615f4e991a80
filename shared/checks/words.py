"""The words that checks are written in. With a trial's own (`equal`, `close`, `group`, …) a check reads as its task:

    samples, script     the same random input, or the same random events, go to the answer and to a reference
    gradients           what autograd makes of a result
    unchanged           what must stay as it was
    raises, outcome     how a call ends
    derived             which class of the lesson the answer builds on

All randomness comes from the generators that the check has seeded.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shared.checks.traces import describe, is_stub
from shared.checks.trial import Trial


class Sample:
    """One call, and what is told of it: Sample("7 numbers", torch.randn(7), reduction="sum")."""

    def __init__(self, text: str, *arguments: Any, **options: Any) -> None:
        self.text = text
        self.arguments = arguments
        self.options = options


def samples(
    trial: Trial,
    answer: Callable[..., Any],
    reference: Callable[..., Any],
    cases: Iterable[Sample],
    *,
    look: Callable[..., Any] | None = None,
    **room: float,
) -> None:
    """Call the answer and a reference with the same arguments, of which each gets its own copy. Results must agree in
    value (but for `room`, rtol and atol), shape and dtype, and the arguments must stay as they were; with `look`, a
    function of the result and of the arguments as they are afterwards, only what it returns must agree.

        with trial.group("the mean of the absolute errors", see=1):
            samples(trial, answer, F.l1_loss, [Sample(f"{n} numbers", torch.randn(n), torch.randn(n)) for n in (1, 7)])
            samples(trial, answer, F.l1_loss, [Sample("float64", x, y)], look=lambda result, x, y: result.dtype)
    """
    for sample in cases:
        mine = copy.deepcopy(sample.arguments)
        theirs = copy.deepcopy(sample.arguments)
        got = trial.call(sample.text, partial(answer, *mine, **sample.options))
        wanted = reference(*theirs, **sample.options)
        if isinstance(wanted, Tensor):  # else None may be meant
            trial.returned(sample.text, got, "a tensor")
        if look is None:
            trial.close(sample.text, got, wanted, **room)
            trial.close(f"the arguments afterwards, {sample.text}", snapshot(mine), snapshot(theirs), **room)
            continue
        try:
            found = look(got, *mine)
        except Exception as error:  # the result is of another form
            found = f"a {type(got).__name__} ({error})"
        trial.close(sample.text, found, look(wanted, *theirs), **room)


def gradients(result: Tensor, *arguments: Any) -> list[Tensor] | str:
    """A look for `samples`: what a gradient of the result gives for each argument that requires one.

    samples(trial, answer, F.l1_loss, [Sample("7 numbers", x.requires_grad_(), y)], look=gradients)
    """
    if not result.requires_grad:
        return "a result without a graph"
    leaves = [argument for argument in arguments if isinstance(argument, Tensor) and argument.requires_grad]
    sent = torch.linspace(-1.0, 2.0, result.numel()).reshape(result.shape).to(result)
    return list(torch.autograd.grad(result, leaves, sent, materialize_grads=True))


def script(
    trial: Trial,
    answer: Any,
    reference: Any,
    events: Iterable[tuple[str, Callable[[Any], object]]],
    look: Callable[[Any], Mapping[str, Any]],
) -> None:
    """Do the same things with two objects, one after the other. After each event whatever `look` shows of them, by
    name, must agree, and so must the way in which it ended. The report names the last events before the difference.

    with trial.group("counts what it was given"):
        events = [(f"add({n})", lambda it, n=n: it.add(n)) for n in random.choices(range(9), k=20)]
        script(trial, answer(), Counter(), events, look=lambda it: {"total": it.total})
    """
    told: list[str] = []
    for text, action in events:
        told.append(text)
        case = ", then ".join(told[-8:])
        (mine, got), (right, expected) = (_end(partial(action, it)) for it in (answer, reference))
        trial.that(case, type(mine).__name__ == type(right).__name__, expected=expected, got=got)
        wanted = look(reference)
        for name, found in look(answer).items():
            trial.equal(f"{name}, after {case}", found, wanted[name])


@contextmanager
def unchanged(trial: Trial, case: str, *things: Any) -> Iterator[None]:
    """What is given must be the same at the end of the block: tensors, lists, dictionaries, and of modules all tensors,
    gradients, modes, hooks and attributes, and which parameters learn.

        with trial.group("the model stays as it is"), unchanged(trial, "a model in training", model):
            answer(model)
    """
    before = [snapshot(thing) for thing in things]
    yield
    for thing, earlier in zip(things, before, strict=True):
        name = "the model" if isinstance(thing, nn.Module) else f"a {type(thing).__name__}"
        trial.equal(f"{name} afterwards, {case}", snapshot(thing), earlier)


def snapshot(thing: Any) -> Any:
    """A copy of what `unchanged` compares, in lists, dictionaries and tensors: before = snapshot(model)."""
    if isinstance(thing, Tensor):
        return [thing.detach().clone(), thing.requires_grad]
    if isinstance(thing, nn.Module):
        return {path or "the model itself": _module(module) for path, module in thing.named_modules()}
    if isinstance(thing, Mapping):
        return {key: snapshot(value) for key, value in thing.items()}
    if isinstance(thing, list | tuple):
        return [type(thing).__name__, *(snapshot(value) for value in thing)]
    return copy.copy(thing)


def outcome(action: Callable[[], object]) -> str:
    """How a call ends: the name of the exception's class, or "no exception".

    trial.equal("update() after loading", outcome(ema.update), "RuntimeError")
    """
    error, _ = _end(action)
    return type(error).__name__ if error else "no exception"


def raises(trial: Trial, case: str, action: Callable[[], object], kind: type[Exception], *words: str) -> None:
    """A call must raise an exception of this kind, with one of the words in its message if there are any.

    raises(trial, "a layer that isn't there", lambda: answer(model, ["nowhere"]), ValueError, "nowhere")
    """
    error, got = _end(action)
    message = str(error).replace("\\", "")  # a name may be quoted as a regular expression
    right = isinstance(error, kind) and (not words or any(word in message for word in words))
    expected = kind.__name__ + (f" naming {words[0]!r}" if words else "")
    trial.that(case, right, expected=expected, got=got)


def derived(trial: Trial, answer: Any, base: str) -> type:
    """The class of this name that the answer is derived from; an answer that isn't ends the check.

    enhance = derived(trial, answer, "Enhance")
    """
    found = [kind for kind in getattr(answer, "__mro__", ())[1:] if kind.__name__ == base]
    trial.needs(f"is derived from {base}", bool(found), expected=base, got=repr(answer), hint="which class is to be?")
    return found[0]


def _end(action: Callable[[], object]) -> tuple[Exception | None, str]:
    """What a call raises, if anything, and how that is told; an unfinished answer's NotImplementedError goes on."""
    try:
        action()
    except Exception as error:
        if is_stub(error):
            raise
        return error, describe(error)
    return None, "no exception"


def _module(module: nn.Module) -> dict[str, Any]:
    """What one module holds itself: tensors, gradients, mode, hooks, and the names of its attributes."""
    return {
        "tensors": snapshot({**module._parameters, **module._buffers}),
        "gradients": snapshot({name: getattr(p, "grad", None) for name, p in module._parameters.items()}),
        "training": module.training,
        "hooks": {name: list(value) for name, value in vars(module).items() if name.endswith("_hooks") and value},
        "attributes": sorted(vars(module)),
    }
