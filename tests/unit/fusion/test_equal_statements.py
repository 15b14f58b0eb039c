"""Statements that compute the same are computed once; outputs, scatters and other values stay."""

from __future__ import annotations

import numpy as np
import pytest

from roller_svc.frontend.parse import parse
from roller_svc.fusion.equal_statements import merge_equal_statements
from roller_svc.ir.dtype import DType
from roller_svc.ir.program import TensorProgram, TensorType
from roller_svc.semantics.interpreter import reference


def program(expression: str, outputs: list[str] | None = None) -> TensorProgram:
    types = {"x": TensorType(DType.FLOAT32, (4, 8)), "w": TensorType(DType.FLOAT32, (4, 8))}
    return parse(expression, {n: t for n, t in types.items() if f"{n}[" in expression or f"({n}" in expression}, outputs=outputs)


@pytest.mark.parametrize(
    ("expression", "outputs", "kept"),
    [
        ("a[i] +=! x[i, j]; b[m] +=! x[m, n]; y[i] = a[i] * b[i]", None, ["a", "y"]),
        ("a[i, j] = exp(x[i, j]); b[i, j] = exp(x[i, j]); s[i] +=! a[i, j]; t[i] +=! b[i, j]; y[i] = s[i] - t[i]", None,
         ["a", "s", "y"]),
        ("a[i] +=! x[i, j]; b[i] +=! x[i, j]", None, ["a", "b"]),  # results
        ("a[i] +=! x[i, j]; b[i] +=! w[i, j]; y[i] = a[i] * b[i]", None, ["a", "b", "y"]),
        ("a[i] +=! x[i, j]; b[j] +=! x[i, j]; y[i, j] = a[i] * b[j]", None, ["a", "b", "y"]),
        ("a[i] +=! x[i, j]; b[i] >=! x[i, j]; y[i] = a[i] * b[i]", None, ["a", "b", "y"]),
        ("a[i] +=! x[i, j]; b[i]: float64 +=! x[i, j]; y[i] = a[i] * b[i]", None, ["a", "b", "y"]),
        ("a[i, j] = where(x[i, j] < 0.0, x[i, j], 0.0); b[i, j] = where(x[i, j] < 0.0, x[i, j], -0.0); "
         "y[i, j] = 1.0 / a[i, j]; z[i, j] = 1.0 / b[i, j]", None, ["a", "b", "y", "z"]),
        ("a[i] +=! x[i, j]; b[i] +=! x[i, j]; w[i, 0] +=. b[i]; y[i] = a[i] * w[i, 1]", None, ["a", "w__1", "y"]),
    ],
)  # fmt: skip
def test_later_statements_of_the_same_value_are_dropped(expression: str, outputs: list[str] | None, kept: list[str]) -> None:
    written = program(expression, outputs)
    merged = merge_equal_statements(written)
    assert [s.output for s in merged.statements] == kept
    arrays = {n: np.random.default_rng(1).normal(size=t.shape).astype(np.float32) for n, t in written.inputs}
    for name, found in reference(merged, arrays).items():
        np.testing.assert_array_equal(found, reference(written, arrays)[name])


def test_positions_and_values_share_their_rounds() -> None:
    both = program("I = top_k_indices(x, k=4); V = top_k_values(x, k=4)")
    assert len(merge_equal_statements(both).statements) == 2 * 4 + 2
