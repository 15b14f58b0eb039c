"""Compare a kernel's arrays with the reference's values, within the propagated bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from roller_svc.analysis.wide_values import Array, max_finite, storage_dtype, widen
from roller_svc.errors import ArgumentError
from roller_svc.ir.program import TensorProgram
from roller_svc.semantics.interpreter import Value

# The bounds are first-order, and a device may be slightly less accurate than documented.
SLACK = 2.0


@dataclass(frozen=True, slots=True)
class Agreement:
    """The verdict on all outputs, with the errors of the worst one."""

    ok: bool
    max_abs_error: float
    max_rel_error: float
    output: str  # the worst output: the errors are its errors
    detail: str = ""
    # Elements with an infinite bound, for instance where values that are equal within their errors are compared.
    unchecked: int = 0


def agrees(program: TensorProgram, got: Mapping[str, Array], want: Mapping[str, Value]) -> Agreement:
    """Check that `got` has every output with its type and shape, and each element within its bound.

    `want` comes from `evaluate` or `evaluate_sample`, called with the kernel's `allow_tf32`. Integers must be equal
    unless they derive from rounded floats.
    """
    verdicts = []
    for out in program.outputs:
        type_ = program.types[out.tensor]
        if out.name not in got:
            raise ArgumentError(f"an array for output {out.name} is missing: expected one for every output")
        array = np.asarray(got[out.name])
        if array.dtype != storage_dtype(type_.dtype) or array.shape != type_.shape:
            expected = f"{type_.dtype.value}{list(type_.shape)}"
            detail = f"{out.name} is {array.dtype}{list(array.shape)}, expected {expected}"
            verdicts.append(Agreement(ok=False, max_abs_error=np.inf, max_rel_error=np.inf, output=out.name, detail=detail))
        else:
            verdicts.append(compare(out.name, array, want[out.name]))
    worst = min(verdicts, key=lambda v: (v.ok, -v.max_abs_error))
    return Agreement(
        worst.ok, worst.max_abs_error, worst.max_rel_error, worst.output, worst.detail, sum(v.unchecked for v in verdicts)
    )


def compare(name: str, got: Array, want: Value) -> Agreement:
    """Compare one output's array with its values. Errors are distances to the reference's unrounded values."""
    flat = got.reshape(-1)
    computed = widen(flat if want.indices is None else flat[want.indices], want.dtype)
    wide = want.wide.reshape(-1)
    if want.error is None:
        return _compare_integers(name, computed, wide)
    with np.errstate(over="ignore"):
        error = want.error.reshape(-1) * SLACK
    distance, within = _compare_floats(computed.astype(np.float64), wide.astype(np.float64), error, want)
    unchecked = int(np.count_nonzero(np.isinf(error)))
    if within.all():
        return _agreement(name, distance, wide, unchecked=unchecked)
    first = int(np.argmin(within))
    flat_index = first if want.indices is None else int(want.indices[first])
    index = [int(i) for i in np.unravel_index(flat_index, got.shape)] if got.shape else []
    expected = f"{wide[first]:.9g} within {error[first]:.3g}"
    if np.isfinite(wide[first]) and np.isinf(error[first]):
        expected = f"{np.copysign(np.inf, wide[first])}, as {wide[first]:.9g} is beyond the range of {want.dtype.value}"
    detail = f"{name}{index} is {computed[first]:.9g}, expected {expected}"
    detail += f"; {np.count_nonzero(~within)} of {within.size} elements are wrong"
    return _agreement(name, distance, wide, detail, unchecked)


def _compare_integers(name: str, computed: Array, wide: Array) -> Agreement:
    same = (computed == wide) | (np.isnan(computed.astype(np.float64)) & np.isnan(wide.astype(np.float64)))
    detail = "" if same.all() else f"{np.count_nonzero(~same)} of {same.size} elements differ"
    with np.errstate(invalid="ignore"):  # of equal infinities
        distance = np.where(same, 0.0, np.abs(computed.astype(np.float64) - wide.astype(np.float64)))
    return _agreement(name, distance, wide, detail)


def _compare_floats(computed: Array, wide: Array, error: Array, want: Value) -> tuple[Array, Array]:
    """Return (distance, whether it is allowed) for each element."""
    rounded = want.rounded.reshape(-1).astype(np.float64)
    with np.errstate(invalid="ignore"):
        same = (computed == rounded) | (computed == wide) | (np.isnan(computed) & np.isnan(wide))
        distance = np.where(same, 0.0, np.abs(computed - wide))
        allowed = same | (distance <= error)
    if not want.dtype.is_float:
        return distance, allowed
    limit = max_finite(want.dtype)
    # Both at the edge of the type's range: rounding decides between its largest number and infinity.
    edge = np.isinf(computed) & (np.sign(computed) == np.sign(wide)) & (np.abs(wide) + error >= limit)
    # Too large for the kernel's type but not for float64: the kernel must return infinity, not NaN.
    overflow = np.isfinite(wide) & (np.abs(wide) > limit) & np.isinf(error)
    unbounded = np.isinf(error) & ~overflow
    allowed |= edge | unbounded | (overflow & (np.abs(computed) >= 0.5 * limit))
    return np.where(allowed & ~np.isfinite(distance), 0.0, distance), allowed


def _agreement(name: str, distance: Array, wide: Array, detail: str = "", unchecked: int = 0) -> Agreement:
    """Return the verdict, which is ok if there is no `detail`."""
    size = np.abs(wide.astype(np.float64))
    comparable = np.isfinite(size) & (size > 0) & ~np.isnan(distance)
    relative = np.divide(distance, size, out=np.zeros(distance.shape), where=comparable)
    worst = float(np.max(np.nan_to_num(distance, nan=np.inf), initial=0.0))
    return Agreement(not detail, worst, float(np.max(relative, initial=0.0)), name, detail, unchecked)
