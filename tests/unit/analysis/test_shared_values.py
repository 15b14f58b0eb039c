"""Values of several loads that statements share."""

from __future__ import annotations

from roller_svc.analysis.shared_values import replace_all, shared_values
from roller_svc.frontend.lang import parse
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Const, Expr, Load, loads_of
from roller_svc.ir.program import TensorType


def bodies(text: str) -> tuple[Expr, ...]:
    types = {name: TensorType(DType.FLOAT32, (8, 8)) for name in ("x", "w", "g") if f"{name}[" in text}
    return tuple(s.body for s in parse(text, types).statements)


def may_share(load: Load) -> bool:
    return load.tensor in ("x", "w", "g")


def tensors(values: tuple[Expr, ...]) -> list[list[str]]:
    return [[load.tensor for load in loads_of(value)] for value in values]


def test_a_sum_of_operands_is_shared_by_a_norm_and_its_squares() -> None:
    text = "q[i] +=! (x[i, j] + w[i, j]) * (x[i, j] + w[i, j]); y[i, j] = (x[i, j] + w[i, j]) * q[i] * g[i, j]"
    values = shared_values(bodies(text), may_share)
    assert tensors(values) == [["x", "w"]]
    (value,) = values
    left = [load.tensor for body in bodies(text) for load in loads_of(replace_all(body, {value: Const(0.0, value.dtype)}))]
    assert left == ["q", "g"]


def test_the_largest_value_is_shared() -> None:
    text = "q[i] +=! (x[i, j] + w[i, j]) * g[i, j]; y[i, j] = (x[i, j] + w[i, j]) * g[i, j] - q[i]"
    assert tensors(shared_values(bodies(text), may_share)) == [["x", "w", "g"]]


def test_single_loads_values_of_rows_and_conditional_values_are_not_shared() -> None:
    assert not shared_values(bodies("q[i] +=! x[i, j] * 2.0; y[i, j] = x[i, j] * 2.0 - q[i]"), may_share)
    assert not shared_values(bodies("q[i] +=! x[i, j] + w[i, j]; y[i, j] = x[i, j] - w[i, j] + q[i]"), may_share)
    text = (
        "q[i] +=! (x[i, j] + w[i, j]).when([j < 4], 0.0) where i in 8, j in 8;"
        " y[i, j] = (x[i, j] + w[i, j]).when([j < 4], 0.0) - q[i]"
    )
    assert not shared_values(bodies(text), may_share)
