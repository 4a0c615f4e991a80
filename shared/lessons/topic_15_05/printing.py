"""How 15-05 prints what it found: a tape, a table of verdicts, a list of times."""

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from shared.timing import Timing


def as_lines(steps: Iterable[tuple], names: Mapping[Tensor, str]) -> list[str]:
    """The steps of a tape as text; results are called t1, t2 and so on.

    Args:
        steps: (operator, arguments, keyword arguments, result) for each step.
        names: the names of tensors that no step has computed.
    """
    known = dict(names)
    lines = []

    def shown(value: object) -> str:
        return known[value] if isinstance(value, Tensor) and value in known else str(value)

    for operator, args, _, result in steps:
        given = ", ".join(shown(value) for value in args)
        if isinstance(result, Tensor):
            known[result] = f"t{len(known) - len(names) + 1}"
        lines.append(f"{operator}({given}) -> {shown(result)}")
    return lines


def print_scores(found: Mapping[str, Sequence[str]], probes: Iterable[str]) -> None:
    """A table of verdicts: a line for each model, a column for each probe."""
    print(" " * 11, *(f"{probe:15}" for probe in probes))
    for name, verdicts in found.items():
        print(f"{name:11}", *(f"{verdict:15}" for verdict in verdicts))


def print_latencies(found: Mapping[str, Timing]) -> None:
    """The median of a call with its quartiles, and in comparison with eager."""
    for name, t in found.items():
        middle, low, high = (1000 * seconds for seconds in (t.median, t.low, t.high))
        share = t.median / found["eager"].median
        print(f"  {name:14}{middle:7.3f} ms ({low:.3f} to {high:.3f}) {share:6.0%} of eager")
