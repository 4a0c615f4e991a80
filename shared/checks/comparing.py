"""Where a value differs from the one that was expected, in words."""

import math
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch

# (rtol, atol): a few roundings of differently ordered arithmetic, and no more
_TOLERANCES = {
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.float32: (1e-5, 1e-6),
    torch.float64: (1e-9, 1e-10),
}


def difference(
    got: Any, want: Any, *, exact: bool, rtol: float | None = None, atol: float | None = None
) -> tuple[str, str] | None:
    """What was expected and what was got where the two differ; None if they don't."""
    if isinstance(want, torch.Tensor):
        return _tensors_differ(got, want, exact, rtol, atol)
    if isinstance(want, list | tuple | dict):
        if type(got) is not type(want) and not (type(want) is dict and isinstance(got, dict)):
            return f"a {type(want).__name__}", show(got)
        if isinstance(want, dict) and got.keys() != want.keys():
            lacks, has = [key for key in want if key not in got], [key for key in got if key not in want]
            told = [
                f"{word} {', '.join(map(repr, keys[:3]))}{' …' * (len(keys) > 3)}"
                for word, keys in (("without", lacks), ("with", has))
                if keys
            ]
            return f"{len(want)} entries", f"{len(got)} entries, {' and '.join(told)}"
        if len(got) != len(want):
            return show(want), show(got)
        for key in want if isinstance(want, dict) else range(len(want)):
            found = difference(got[key], want[key], exact=exact, rtol=rtol, atol=atol)
            if found is not None:
                return f"{found[0]} in entry {key!r}", f"{found[1]} in entry {key!r}"
        return None
    if isinstance(want, bool | np.bool_):
        same = isinstance(got, bool | np.bool_) and bool(got) == bool(want)
    elif isinstance(want, Integral):
        same = isinstance(got, Integral) and not isinstance(got, bool) and _number(got) == want
    elif isinstance(want, Real):
        same = isinstance(got, Real) and not isinstance(got, bool) and _near(_number(got), want, exact, rtol, atol)
    else:
        same = type(got) is type(want) and bool(got == want)
    if same:
        return None
    return show(want), show(got) + ("" if isinstance(got, type(want)) else f" (a {type(got).__name__})")


def _number(got: Real) -> int | float:
    """A plain number: one of a student's own type could call itself equal to anything."""
    return int(got) if isinstance(got, Integral) else float(got)


def _near(got: Real, want: Real, exact: bool, rtol: float | None, atol: float | None) -> bool:
    if exact or not math.isfinite(want) or not math.isfinite(got):
        return got == want or (math.isnan(got) and math.isnan(want))
    default = _TOLERANCES[torch.float64]
    return abs(got - want) <= (default[1] if atol is None else atol) + (default[0] if rtol is None else rtol) * abs(
        want
    )


def _tensors_differ(
    got: Any, want: torch.Tensor, exact: bool, rtol: float | None, atol: float | None
) -> tuple[str, str] | None:
    if not isinstance(got, torch.Tensor):
        return f"a tensor of shape {tuple(want.shape)}", f"{show(got)} (a {type(got).__name__})"
    with torch._C.DisableTorchFunctionSubclass():
        got = torch.Tensor.detach(got)  # a plain tensor, whatever a student's own type says of itself
    for name, wanted, found in (
        ("shape", tuple(want.shape), tuple(got.shape)),
        ("dtype", want.dtype, got.dtype),
        ("device", want.device, got.device),
    ):
        if wanted != found:
            return f"{name} {wanted}", f"{name} {found}"
    got, want = got.cpu(), want.detach().cpu()  # float64 below, which MPS lacks
    wide = torch.complex128 if want.is_complex() else torch.float64
    error = (got.to(wide) - want.to(wide)).abs().nan_to_num(nan=torch.inf)
    if exact or not (want.is_floating_point() or want.is_complex()):
        same = (got == want) | (got.isnan() & want.isnan())
        if want.is_floating_point():
            same &= (got.signbit() == want.signbit()) | want.isnan()  # -0.0 == 0.0, but not bit for bit
    else:
        default = _TOLERANCES.get(want.dtype, _TOLERANCES[torch.float32])
        rtol, atol = default[0] if rtol is None else rtol, default[1] if atol is None else atol
        same = torch.isclose(got.to(wide), want.to(wide), rtol=rtol, atol=atol, equal_nan=True)
    if bool(same.all()):
        return None
    error[same] = -1.0
    worst = int(error.argmax())
    place = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), error.shape))
    where = f" at index {place}" if place else ""
    values = [value.flatten()[worst].item() for value in (want, got)]
    shown = [f"{value:.6g}" if isinstance(value, float) else str(value) for value in values]
    if shown[0] == shown[1]:  # they differ further behind
        shown = [repr(value) for value in values]
    count = int((~same).sum())
    return f"{shown[0]}{where}", f"{shown[1]}{where}" + (f", the largest of {count} differences" if count > 1 else "")


def show(value: object) -> str:
    if isinstance(value, torch.Tensor):
        numbers = ", ".join(f"{number:.6g}" for number in value.detach().flatten()[:6].tolist())
        return f"[{numbers}{', ...' if value.numel() > 6 else ''}] of shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 200 else text[:197] + "..."
