"""Which reductions are scans: guards in every spelling, and what only looks like one."""

from __future__ import annotations

import math

import pytest

from roller_svc.analysis.constant_folding import fold_casts
from roller_svc.analysis.scans import match_scan
from roller_svc.frontend.parse import parse
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Cast, Const
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
        f"y[i, j] +=! x[i, o].when([o <= j], const(1, `float32`)) {N}",
        f"y[i, j] >=! x[i, o].when([o <= j], const(-16777217, `int32`).cast(`float32`)) {N}",
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


@pytest.mark.parametrize(
    ("sign", "dtype", "neutral"),
    [
        ("+", "int64", "const(0, `int64`)"),
        ("+", "float32", "const(0, `float64`).cast(`float32`)"),
        ("*", "float16", "const(1, `float16`)"),
        (">", "int64", f"const({-(2**63)}, `int64`)"),
        ("<", "float32", "const(`inf`, `float32`)"),
    ],
)
@pytest.mark.parametrize("is_first", [False, True])
def test_a_neutral_value_may_be_cast(sign: str, dtype: str, neutral: str, is_first: bool) -> None:
    guarded = f"where(o > j, {neutral}, x[i, o])" if is_first else f"x[i, o].when([o <= j], {neutral})"
    (statement,) = program(f"y[i, j] {sign}=! {guarded} {N}", dtype).statements
    assert match_scan(statement) is not None


@pytest.mark.parametrize(
    ("value", "source", "target", "result"),
    [
        (0, DType.INT32, DType.INT64, 0),
        (2**24, DType.INT32, DType.FLOAT32, 2.0**24),
        (2**24 + 1, DType.INT32, DType.FLOAT32, None),
        (3.0, DType.FLOAT32, DType.INT8, 3),
        (0.5, DType.FLOAT32, DType.INT8, None),
        (200, DType.INT32, DType.INT8, None),
        (-math.inf, DType.FLOAT64, DType.BFLOAT16, -math.inf),
        (-math.inf, DType.FLOAT32, DType.INT32, None),
        (math.inf, DType.FLOAT32, DType.FLOAT8_E5M2, None),
        (math.nan, DType.FLOAT32, DType.FLOAT64, None),
        (9, DType.INT32, DType.FLOAT8_E5M2, None),
    ],
)
def test_a_cast_of_a_number_is_folded_if_it_keeps_the_value(
    value: float, source: DType, target: DType, result: float | None
) -> None:
    cast = Cast(Const(value, source), target)
    assert fold_casts(cast) == (cast if result is None else Const(result, target))


def test_the_operators_are_scans() -> None:
    for name in ("cumsum", "cumprod", "cummax", "cummin"):
        for dtype in ("float16", "int8", "uint64"):
            (statement,) = program(f"y = {name}(x, axis=1, reverse=true)", dtype).statements
            assert match_scan(statement) is not None, (name, dtype)
