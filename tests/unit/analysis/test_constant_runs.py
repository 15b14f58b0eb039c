"""Runs of a fused axis along which an expression has one value."""

from __future__ import annotations

import pytest

from roller_svc.analysis.constant_runs import constant_run
from roller_svc.frontend.parse import parse
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import loads_of
from roller_svc.ir.program import TensorType

TYPES = {"s": TensorType(DType.INT32, (3, 800)), "t": TensorType(DType.INT32, (4, 96))}


@pytest.mark.parametrize(
    ("index", "run"),
    [
        ("g", 96),
        ("r", 1),
        ("g * 96 + r", 1),
        ("(g * 96 + r) // 32", 32),
        ("(g * 96 + r) // 100", 100),
        ("(g * 96 + r + 48) // 96", 48),
        ("(g * 96 + r + 1) // 32", 1),
        ("(g * 96 + r + m * 64) // 128", 64),
        ("r // 32", 32),
        ("r // 36", 12),  # runs of r begin anew with each g
        ("g // 2", 192),
        ("g * 2 + r // 48", 48),
        ("r % 32", 1),
        ("m", 384),
    ],
)
def test_runs_of_two_axes(index: str, run: int) -> None:
    (sum_,) = parse(f"y[m] +=! s[m, {index}] * t[g, r] where m in 3, g in 4, r in 96", TYPES).statements
    load = next(load for load in loads_of(sum_.body) if load.tensor == "s")
    axes = sorted(sum_.reduced, key=lambda axis: axis.name)
    assert constant_run(load, axes) == run
