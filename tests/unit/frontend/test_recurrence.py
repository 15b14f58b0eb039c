"""Maps that read their own result: spellings of linear recurrences, their types, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from roller_svc.analysis.scans import match_scan
from roller_svc.errors import InputError
from roller_svc.frontend.parse import parse
from roller_svc.ir.dtype import DType
from roller_svc.ir.printer import text
from roller_svc.ir.program import Combine, StatementKind, TensorProgram, TensorType
from roller_svc.semantics.interpreter import reference

T, D = 11, 3
TYPES = {
    "a": ("float32", (T, D)), "x": ("float32", (T, D)), "h0": ("float32", (D,)), "f": ("int32", (T,)), "z": ("float16", (T, D)),
    "u": ("int64", (T,)), "b": ("uint32", (T,)),
}  # fmt: skip


def program(statement: str) -> TensorProgram:
    return parse(statement, {n: TensorType(DType(d), s) for n, (d, s) in TYPES.items() if f"{n}[" in statement})


def arrays_of(checked: TensorProgram) -> dict[str, Any]:
    rng = np.random.default_rng(3)
    floats = {n: rng.normal(size=s).astype(d) for n, (d, s) in TYPES.items() if d.startswith("float")}
    arrays = {**floats, "f": np.array([1, 1, 1, 2, 2, 0, 0, 0, 0, 5, 5], np.int32)}
    return {name: arrays[name] for name, _ in checked.inputs}


def stepped(a: Any, x: Any, h: Any) -> Any:
    states = []
    for gate, value in zip(np.broadcast_to(a, x.shape), x, strict=True):
        h = gate * h + value
        states.append(h)
    return np.stack(states)


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("h[t, d] = a[t, d] * h[t - 1, d].when([t > 0], 0.0) + x[t, d]", lambda a, x: stepped(a, x, 0)),
        ("h[t, d] = x[t, d] + where(t >= 1, h[t - 1, d], h0[d]) * a[t, d]", lambda a, x, h0: stepped(a, x, h0)),
        ("h[t, d] = fma(a[t, d], h[t - 1, d].when([t != 0], h0[d]), x[t, d])", lambda a, x, h0: stepped(a, x, h0)),
        ("h[t, d] = x[t, d] - h[t - 1, d].when([0 < t], 0.0)", lambda x: stepped(-1, x, 0)),
        ("h[t, d] = (h[t - 1, d].when([t > 0], 1.0) + x[t, d]) / 2.0", lambda x: stepped(0.5, x / 2, 1)),
        ("h[t, d] = where(t == 0, x[t, d], h[t - 1, d] + 0.25 * (x[t, d] - h[t - 1, d]))",
         lambda x: stepped(0.75, x * np.r_[4, np.ones(T - 1)][:, None] / 4, 0)),
        ("h[t, d] = x[t, d] + (a[t, d] * h[t - 1, d]).when([t > 0], 0.0)", lambda a, x: stepped(a, x, 0)),
        ("h[t, d] = a[t, d] * h[t + 1, d].when([t < 10], h0[d]) + (1 - a[t, d]) * x[t, d]",
         lambda a, x, h0: stepped(a[::-1], ((1 - a) * x)[::-1], h0)[::-1]),
        ("h[t, d] = x[t, d] + h[t - 1, d].when([t > 0, f[t] == f[max(t - 1, 0)]], 0.0)",
         lambda x, f: stepped((np.diff(f, prepend=0) == 0)[:, None], x, 0)),
        ("h[d, t] = a[t, d] * h[d - 1, t].when([d > 0], x[t, 0]) + 1.0",
         lambda a, x: stepped(a.T, np.ones((D, T)), x[:, 0])),
    ],
)  # fmt: skip
def test_spellings_of_recurrences_are_scans_of_steps(statement: str, expected: Any) -> None:
    checked = program(statement)
    (scan,) = checked.statements
    assert match_scan(scan) is not None
    arrays = arrays_of(checked)
    wide = {name: array.astype(np.float64) for name, array in arrays.items()}
    wanted = expected(*(wide[n] for n in expected.__code__.co_varnames))
    np.testing.assert_allclose(reference(checked, arrays)["h"], wanted, rtol=1e-5, atol=1e-6)
    assert parse(text(checked), dict(checked.inputs)) == checked


@pytest.mark.parametrize(
    ("statement", "dtype", "is_scan"),
    [
        ("h[t, d] = z[t, d] * h[t - 1, d].when([t > 0], 0.0) + z[t, d]", "float16", True),
        ("h[t, d]: float32 = z[t, d] * h[t - 1, d].when([t > 0], 0.0) + z[t, d]", "float32", True),
        ("h[t, d] = z[t, d] * h[t - 1, d].when([t > 0], 0.0) + x[t, d]", "float32", True),
        ("h[t] = 5 * h[t - 1].when([t > 0], 1) + f[t]", "int32", True),
        ("h[t]: float64 = 0.5 * h[t - 1].when([t > 0], 1.0) + f[t].cast(`float64`)", "float64", True),
        ("h[t] = 0.5 * h[t - 1].when([t > 0], 1.0) + 1.0 where t in 1", "float32", False),
    ],
)
def test_the_state_has_the_type_of_its_operands(statement: str, dtype: str, is_scan: bool) -> None:
    checked = program(statement)
    (made,) = checked.statements
    assert made.type.dtype is DType(dtype)
    assert (made.combine is Combine.RECURRENCE) is is_scan
    assert (made.kind is StatementKind.REDUCE) is is_scan
    assert parse(text(checked), dict(checked.inputs)) == checked


def test_states_are_not_rounded_between_steps() -> None:
    checked = program("h[t, d] = h[t - 1, d].when([t > 0], 2048.0) + z[t, d]")
    found = reference(checked, {"z": np.full((T, D), 0.5, np.float16)})["h"]
    assert found[-1, 0] == np.float16(2048 + 0.5 * T)  # float16 has no 2048.5


def test_integers_wrap_in_each_step() -> None:
    checked = program("h[t] = 1103515245 * h[t - 1].when([t > 0], 1) + f[t]")
    arrays, state = arrays_of(checked), 1
    for t, found in enumerate(reference(checked, arrays)["h"]):
        state = 1103515245 * state + int(arrays["f"][t])
        assert (int(found) - state) % 2**32 == 0


@pytest.mark.parametrize(
    ("statement", "step"),
    [
        ("h[t] = 5000000000 * (5000000000 * h[t - 1].when([t > 0], 1)) + u[t]", lambda h, u: 25 * 10**18 * h + u),
        ("h[t] = 70000 * (70000 * (h[t - 1].when([t > 0], 1) + 7)) + f[t]", lambda h, f: 70000**2 * (h + 7) + f),
        ("h[t] = b[t] - h[t - 1].when([t > 0], 1)", lambda h, b: b - h),
        ("h[t] = b[t] - 5 * h[t - 1].when([t > 0], 1)", lambda h, b: b - 5 * h),
    ],
)
def test_constants_of_integers_wrap(statement: str, step: Any) -> None:
    checked = program(statement)
    ((name, type_),) = checked.inputs
    state, values = 1, np.arange(T, dtype=type_.dtype.value)
    for value, found in zip(values, reference(checked, {name: values})["h"], strict=True):
        state = step(state, int(value))
        assert (int(found) - state) % 2**type_.dtype.bits == 0
    assert parse(text(checked), dict(checked.inputs)) == checked


def test_factors_that_overflow_together_stay_apart() -> None:
    checked = program("h[t, d] = 1e30 * (1e30 * h[t - 1, d].when([t > 0], 1.0)) + x[t, d]")
    assert np.isinf(reference(checked, arrays_of(checked))["h"]).all()
    assert parse(text(checked), dict(checked.inputs)) == checked


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("h[t, d] = a[t, d] * h[max(t - 1, 0), d].when([t > 0], 0.0) + x[t, d]", "the element before"),
        ("h[t, d] = a[t, d] * h[t - 2, d].when([t > 1], 0.0) + x[t, d]", "the element before"),
        ("h[t, d] = h[t - 1, d].when([t > 0], 0.0) + h[t, d - 1].when([d > 0], 0.0) + x[t, d]", "the element before"),
        ("h[t, d] = h[t, d] + x[t, d]", "read before it is written"),
        ("h[t, d] = tanh(h[t - 1, d].when([t > 0], 0.0)) + x[t, d]", "`tanh`"),
        ("h[t, d] = square(h[t - 1, d].when([t > 0], 0.0)) + x[t, d]", "`square`"),
        ("h[t, d] = h[t - 1, d].when([t > 0], 0.0) * h[t - 1, d].when([t > 0], 0.0) + x[t, d]", "by itself"),
        ("h[t, d] = x[t, d] / h[t - 1, d].when([t > 0], 1.0)", "divisor"),
        ("h[t, d] = where(h[t - 1, d].when([t > 0], 0.0) > 0, x[t, d], 0.0)", "condition"),
        ("h[t, d] = h[t - 1, d].when([t > 0], 0.0) + h[t - 1, d].when([t > 0], 1.0) + x[t, d]", "two initial states"),
        ("h[t, d] = (a[t, d] * h[t - 1, d].when([t > 0], 0.0)).cast(`float16`) + x[t, d]", "rounded"),
        ("h[t, d] = a[t, d] * h[t - 1, d] + x[t, d]", "leaves dimension 0"),
        ("h[t, d] +=! h[t - 1, d].when([t > 0], 0.0) + x[t, d]", "read before it is written"),
        ("h[t]: bool = h[t - 1].when([t > 0], 0) + f[t]", "not bool"),
        ("y[t, d] = h[t, d]; h[t, d] = x[t, d]", "read before it is written"),
    ],
)
def test_what_is_no_linear_recurrence_is_refused(statement: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        program(statement)
