"""A kernel's arrays against the reference's values: whether they agree within the propagated bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from roller_svc.errors import ArgumentError
from roller_svc.ir.program import TensorProgram
from roller_svc.reference.interpreter import Value
from roller_svc.reference.values import Array, greatest, storage_dtype, widen

# The bounds are to first order, and a device may be worse than it promises by a little.
SLACK = 2.0


@dataclass(frozen=True, slots=True)
class Agreement:
    """The verdict on all outputs, and the figures of `output`: the worst one.

    `unjudged` counts elements on which the bound says nothing: those decided by a comparison of rounded values that
    are equal within their errors, for instance.
    """

    ok: bool
    max_abs_error: float
    max_rel_error: float
    output: str
    detail: str = ""
    unjudged: int = 0


def agrees(program: TensorProgram, got: Mapping[str, Array], want: Mapping[str, Value]) -> Agreement:
    """Whether the arrays `got` are right: every output there, of its type and shape, each element within its bound.

    `want` is from `evaluate` or `sampled`, with `allow_tf32` given there where the kernel has it. Integers must be
    equal but where they derive from rounded floats.
    """
    verdicts = []
    for out in program.outputs:
        type_ = program.types[out.tensor]
        if out.name not in got:
            raise ArgumentError(f"no output {out.name} to compare")
        array = np.asarray(got[out.name])
        if array.dtype != storage_dtype(type_.dtype) or array.shape != type_.shape:
            expected = f"{type_.dtype.value}{list(type_.shape)}"
            detail = f"{out.name} is {array.dtype}{list(array.shape)}, expected {expected}"
            verdicts.append(
                Agreement(ok=False, max_abs_error=np.inf, max_rel_error=np.inf, output=out.name, detail=detail)
            )
        else:
            verdicts.append(compare(out.name, array, want[out.name]))
    worst = min(verdicts, key=lambda v: (v.ok, -v.max_abs_error))
    return Agreement(worst.ok, worst.max_abs_error, worst.max_rel_error, worst.output, worst.detail,
                     sum(v.unjudged for v in verdicts))  # fmt: skip


def compare(name: str, got: Array, want: Value) -> Agreement:
    """One output's array against its values. The errors are distances to the reference's unrounded values."""
    flat = got.reshape(-1)
    given = widen(flat if want.at is None else flat[want.at], want.dtype)
    wide = want.wide.reshape(-1)
    if want.error is None:
        return _exact(name, given, wide)
    with np.errstate(over="ignore"):
        error = want.error.reshape(-1) * SLACK
    distance, right = _judge(given.astype(np.float64), wide.astype(np.float64), error, want)
    unjudged = int(np.count_nonzero(np.isinf(error)))
    if right.all():
        return _figures(name, distance, wide, unjudged=unjudged)
    first = int(np.argmin(right))
    place = first if want.at is None else int(want.at[first])
    where = [int(i) for i in np.unravel_index(place, got.shape)] if got.shape else []
    detail = f"{name}{where} is {given[first]:.9g}, expected {wide[first]:.9g} within {error[first]:.3g}"
    detail += f"; {np.count_nonzero(~right)} of {right.size} elements are wrong"
    return _figures(name, distance, wide, detail, unjudged)


def _exact(name: str, given: Array, wide: Array) -> Agreement:
    same = (given == wide) | (np.isnan(given.astype(np.float64)) & np.isnan(wide.astype(np.float64)))
    detail = "" if same.all() else f"{np.count_nonzero(~same)} of {same.size} elements differ"
    with np.errstate(invalid="ignore"):  # of equal infinities
        distance = np.where(same, 0.0, np.abs(given.astype(np.float64) - wide.astype(np.float64)))
    return _figures(name, distance, wide, detail)


def _judge(given: Array, wide: Array, error: Array, want: Value) -> tuple[Array, Array]:
    """(distance, whether it is allowed) for each element."""
    rounded = want.rounded.reshape(-1).astype(np.float64)
    with np.errstate(invalid="ignore"):
        same = (given == rounded) | (given == wide) | (np.isnan(given) & np.isnan(wide))
        distance = np.where(same, 0.0, np.abs(given - wide))
        allowed = same | (distance <= error)
    if not want.dtype.is_float:
        return distance, allowed
    most = greatest(want.dtype)
    # Both at the edge of the type's range: rounding decides between its greatest number and infinity.
    edge = np.isinf(given) & (np.sign(given) == np.sign(wide)) & (np.abs(wide) + error >= most)
    # Too large for the kernel's type though not for float64: infinity is what it must give, NaN it must not.
    overflow = np.isfinite(wide) & (np.abs(wide) > most) & np.isinf(error)
    nothing_known = np.isinf(error) & ~overflow
    allowed |= edge | nothing_known | (overflow & (np.abs(given) >= 0.5 * most))
    return np.where(allowed & ~np.isfinite(distance), 0.0, distance), allowed


def _figures(name: str, distance: Array, wide: Array, detail: str = "", unjudged: int = 0) -> Agreement:
    """The verdict; there is a detail exactly where something is wrong."""
    size = np.abs(wide.astype(np.float64))
    usual = np.isfinite(size) & (size > 0) & ~np.isnan(distance)
    relative = np.divide(distance, size, out=np.zeros(distance.shape), where=usual)
    worst = float(np.max(np.nan_to_num(distance, nan=np.inf), initial=0.0))
    return Agreement(not detail, worst, float(np.max(relative, initial=0.0)), name, detail, unjudged)
