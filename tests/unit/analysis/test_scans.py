"""Which reductions are scans: guards in every spelling, and what only looks like one."""

from __future__ import annotations

import pytest

from roller_svc.analysis.scans import match_scan
from roller_svc.frontend.parse import parse
from roller_svc.ir.dtype import DType
from roller_svc.ir.program import TensorProgram, TensorType

N = "where j in 12"


def program(expression: str, dtype: str = "float32") -> TensorProgram:
    return parse(expression, {"x": TensorType(DType(dtype), (4, 12))})


@pytest.mark.parametrize(
    ("body", "order"),
    [
        ("x[i, o].when([o <= j], 0.0)", ""),
        ("x[i, o].when([j >= o], 0.0)", ""),
        ("where(o > j, 0.0, x[i, o])", ""),
        ("x[i, o].when([o < j + 1], 0.0)", ""),
        ("x[i, o].when([o < j], 0.0)", "exclusive"),
        ("x[i, o].when([o <= j - 1], 0.0)", "exclusive"),
        ("x[i, o].when([j <= o], 0.0)", "reversed"),
        ("x[i, o].when([o > j], 0.0)", "exclusive reversed"),
        ("(x[i, o] * x[i, o]).when([o > 2, o <= j, i < 3], 0.0)", ""),
        ("x[i, o].when([o <= j], 0.0).cast(`float64`)", ""),
    ],
)
def test_a_guard_states_the_order(body: str, order: str) -> None:
    (statement,) = program(f"y[i, j] +=! {body} {N}").statements
    scan = match_scan(statement)
    assert scan is not None
    assert scan.is_exclusive is ("exclusive" in order)
    assert scan.is_reversed is ("reversed" in order)
    assert scan.axis.name == "j"


@pytest.mark.parametrize(
    "statement",
    [
        f"y[i, j] +=! x[i, o].when([o <= j], 1.0) {N}",  # not neutral
        f"y[i, j] *=! x[i, o].when([o <= j], 0.0) {N}",
        f"y[i, j] +=! (x[i, o] * j).when([o <= j], 0.0) {N}",  # each result weighs the elements
        f"y[i, j] +=! x[i, o].when([o <= j + 1], 0.0) {N}",
        f"y[i, j] +=! x[i, o].when([o <= j, j < 5], 0.0) {N}",
        f"y[i, j] +=! x[i, o].when([o <= 2 * j], 0.0) {N}",
        f"y[i, j] +=! x[i, o].when([(o <= j) | (i < 2)], 0.0) {N}",
        "y[i, j] +=! x[i, o].when([o <= j], 0.0) where j in 9",  # another length
        "y[i] +=! x[i, o].when([o <= i], 0.0)",
    ],
)
def test_other_reductions_are_not_scans(statement: str) -> None:
    assert match_scan(program(statement).statements[0]) is None


def test_the_operators_are_scans() -> None:
    for name in ("cumsum", "cumprod", "cummax", "cummin"):
        for dtype in ("float16", "int8", "uint64"):
            (statement,) = program(f"y = {name}(x, axis=1, reverse=true)", dtype).statements
            assert match_scan(statement) is not None, (name, dtype)
