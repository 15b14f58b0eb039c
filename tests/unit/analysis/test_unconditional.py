"""Parts of an expression that are evaluated whatever its conditions are."""

from __future__ import annotations

import pytest
from schedule_support import program

from roller_svc.analysis.unconditional import unconditional_loads, unconditional_parts

INPUTS = {"a": "float32 8", "b": "float32 8", "c": "float32 8", "t": "int32 8"}


@pytest.mark.parametrize(
    ("value", "tensors"),
    [
        ("a[i] + b[i]", ["a", "b"]),
        ("a[i] + b[i].when([i < 4], 0.0)", ["a"]),
        ("b[i].when([a[i] > 0.0], c[i])", ["a"]),
        ("b[i].when([a[i] > 0.0, c[i] > 0.0], 0.0)", ["a"]),
        ("a[t[i]]", ["a"]),
    ],
)
def test_loads_under_a_condition_are_left_out(value: str, tensors: list[str]) -> None:
    used = {name: said for name, said in INPUTS.items() if f"{name}[" in value}
    (statement,) = program(f"y[i] = {value}", **used).statements
    assert [load.tensor for load in unconditional_loads(statement.body)] == tensors
    assert all(part in list(unconditional_parts(statement.body)) for part in unconditional_loads(statement.body))


def test_loads_in_indices_are_parts_if_asked_for() -> None:
    (statement,) = program("y[i] = a[t[i]]", a=INPUTS["a"], t=INPUTS["t"]).statements
    assert [load.tensor for load in unconditional_loads(statement.body, in_indices=True)] == ["a", "t"]
