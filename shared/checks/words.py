"""The words that checks are written in. With a trial's own (`equal`, `close`, `group`, …) a check reads as its task:

    samples, script     the same random input, or the same random events, go to the answer and to a reference
    unchanged           what must stay as it was
    raises, outcome     how a call ends
    judge_table         one line a demand

All randomness comes from the generators that the check has seeded.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shared.checks.traces import describe, is_stub
from shared.checks.trial import Trial

Sample = tuple[str, tuple[Any, ...]]  # what is told of it, and the arguments
Event = tuple[str, Callable[[Any], object]]  # what is told of it, and what is done with the object


def samples(
    trial: Trial,
    answer: Callable[..., Any],
    reference: Callable[..., Any],
    cases: Iterable[Sample],
    *,
    gradient: bool = False,
    rtol: float | None = None,
    atol: float | None = None,
) -> None:
    """Give the same arguments to the answer and to a reference. Value, shape and dtype of the results must agree, and
    the answer must leave its arguments as they were.

        with trial.group("the mean of the absolute errors", see=1):
            samples(trial, answer, F.l1_loss, ((f"{n} numbers", (torch.randn(n), torch.randn(n))) for n in (1, 2, 7)))

    Args:
        answer, reference: functions of a case's arguments; each gets a copy of its own.
        cases: (text, arguments) one after the other; a generator may draw them.
        gradient: compare, too, what a random gradient of the result gives for the floating-point arguments.
        rtol, atol: how far values may be apart (None: by the dtype, see `comparing`).
    """
    for case, arguments in cases:
        mine = [_copy(argument, gradient) for argument in arguments]
        theirs = [_copy(argument, gradient) for argument in arguments]
        got = answer(*mine)
        want = reference(*theirs)
        trial.close(case, _detached(got), _detached(want), rtol=rtol, atol=atol)
        trial.equal(f"the arguments afterwards, {case}", _detached(mine), _detached(list(arguments)))
        if gradient:
            sent = torch.randn_like(want)
            pairs = zip(_gradients(got, mine, sent), _gradients(want, theirs, sent), strict=True)
            for place, (ours, right) in enumerate(pairs):
                trial.close(f"gradient of argument {place}, {case}", ours, right, rtol=rtol, atol=atol)


def script(
    trial: Trial,
    answer: Any,
    reference: Any,
    events: Iterable[Event],
    look: Callable[[Any], Mapping[str, Any]],
) -> None:
    """Do the same things with two objects, one after the other. After each event what can be seen of them must agree,
    and so must the way in which it ended. The report names all events up to the first difference.

        with trial.group("counts what it was given"):
            events = [(f"add({n})", lambda it, n=n: it.add(n)) for n in random.choices(range(9), k=20)]
            script(trial, answer(), Counter(), events, look=lambda it: {"total": it.total})

    Args:
        answer, reference: the two objects.
        events: (text, action); the action is called with the object.
        look: what is compared, by name.
    """
    told: list[str] = []
    for text, action in events:
        told.append(text)
        ends = [outcome(lambda it=it, action=action: action(it)) for it in (answer, reference)]
        case = f"after {', '.join(told[-8:])}"
        trial.equal(f"how it ends, {case}", *ends)
        right = look(reference)
        for name, got in look(answer).items():
            trial.equal(f"{name}, {case}", got, right[name])


@contextmanager
def unchanged(trial: Trial, case: str, *things: Any) -> Iterator[None]:
    """What is given must be the same at the end of the block: tensors, lists, dictionaries, and of modules all tensors,
    modes, hooks and attributes, and which parameters learn.

        with trial.group("the model stays as it is"), unchanged(trial, "a model in training", model):
            answer(model)
    """
    before = [snapshot(thing) for thing in things]
    yield
    for thing, earlier in zip(things, before, strict=True):
        trial.equal(f"{type(thing).__name__} afterwards, {case}", snapshot(thing), earlier)


def snapshot(thing: Any) -> Any:
    """A copy of what `unchanged` compares, in lists, dictionaries and tensors."""
    if isinstance(thing, Tensor):
        return [thing.detach().clone(), thing.requires_grad]
    if isinstance(thing, nn.Module):
        return {path: _module(module) for path, module in thing.named_modules()}
    if isinstance(thing, Mapping):
        return {key: snapshot(value) for key, value in thing.items()}
    if isinstance(thing, list | tuple):
        return [type(thing).__name__, *(snapshot(value) for value in thing)]
    return copy.copy(thing)


def outcome(action: Callable[[], object]) -> str:
    """How a call ends, in a word that two answers can be compared by: the name of the exception, or "no exception".

        trial.equal("reduction='average'", outcome(lambda: answer(x, y, reduction="average")), "ValueError")

    An unfinished answer's NotImplementedError goes on.
    """
    try:
        action()
    except Exception as error:
        if is_stub(error):
            raise
        return type(error).__name__
    return "no exception"


def raises(trial: Trial, case: str, action: Callable[[], object], kind: type[Exception], *words: str) -> None:
    """A call must raise an exception of this kind, with one of the words in its message if there are any.

    with trial.group("an unknown layer raises ValueError with its name", see=3):
        raises(trial, "a layer that isn't there", lambda: answer(model, ["nowhere"]), ValueError, "nowhere")
    """
    expected = kind.__name__ + (f" naming {words[0]!r}" if words else "")
    try:
        action()
    except Exception as error:
        if is_stub(error):
            raise
        named = not words or any(word in str(error) for word in words)
        trial.that(case, isinstance(error, kind) and named, expected=expected, got=describe(error))
    else:
        trial.that(case, False, expected=expected, got="no exception")


def judge_table(trial: Trial, table: Iterable[tuple[str, str, int | None, Callable[[], None]]]) -> None:
    """Judge demands that each stand in a line: what is demanded, where to look, the folded hint, and a function that
    goes through the demand's cases.

        judge_table(trial, [
            ("halves even numbers", "which operator?", 1, lambda: trial.equal("4", answer(4), 2)),
            ("refuses odd ones", "who raises?", None, lambda: raises(trial, "3", lambda: answer(3), ValueError)),
        ])
    """
    for demand, hint, see, judge in table:
        with trial.group(demand, hint=hint, see=see):
            judge()


def _copy(argument: Any, gradient: bool) -> Any:
    if isinstance(argument, Tensor):
        made = argument.detach().clone(memory_format=torch.preserve_format)
        return made.requires_grad_(argument.requires_grad or (gradient and argument.is_floating_point()))
    return copy.deepcopy(argument)


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(_detached(entry) for entry in value)
    return value


def _gradients(result: Tensor, arguments: list[Any], sent: Tensor) -> list[Tensor]:
    """What `sent` gives for each argument that takes a gradient; zeros where nothing arrives."""
    leaves = [argument for argument in arguments if isinstance(argument, Tensor) and argument.requires_grad]
    if not (isinstance(result, Tensor) and result.requires_grad):
        return [torch.zeros_like(leaf) for leaf in leaves]
    found = torch.autograd.grad(result, leaves, sent, allow_unused=True)
    return [torch.zeros_like(leaf) if one is None else one for leaf, one in zip(leaves, found, strict=True)]


def _module(module: nn.Module) -> dict[str, Any]:
    """What one module holds itself: tensors with their grad, mode, hooks, and the names of its attributes."""
    held = {**module._parameters, **module._buffers}
    return {
        "tensors": {name: snapshot(tensor) for name, tensor in held.items()},
        "training": module.training,
        "hooks": {name: list(value) for name, value in vars(module).items() if name.endswith("_hooks") and value},
        "attributes": sorted(vars(module)),
    }
