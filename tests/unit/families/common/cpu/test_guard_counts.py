"""Guards of vector loops are priced by the share of vectors that they split, and gathers by their number."""

from __future__ import annotations

import pytest

import roller_svc
from roller_svc.families.common.cpu.guard_counts import count_guard_operations, masked_share
from roller_svc.frontend.lang import parse
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Expr, Select, iter_subexpressions
from roller_svc.ir.program import TensorExpr, TensorType

LANES = 16


def statement(text: str, size: int = 4096) -> TensorExpr:
    types = {name: TensorType(DType("float32"), (size,)) for name in "xw"}
    used = {name: type_ for name, type_ in types.items() if f"{name}[" in text}
    (only,) = parse(text, used, ("y",)).statements
    return only


def share(guard: str, where: str) -> float:
    one = statement(f"y[i, j] = x[j].when([{guard}], 0.0) where {where}")
    conds: list[Expr] = [part.cond for part in iter_subexpressions(one.body) if isinstance(part, Select)]
    return masked_share(conds[0], {a.name: a.extent for a in one.axes}, {"j"}, LANES)


@pytest.mark.parametrize(
    ("guard", "exact"),
    [
        ("j < 64", 0.0),  # all
        ("j < 0", 1.0),  # none
        ("j < 32", 0.5),
        ("j >= 1", 0.25),  # the first vector of four
        ("j >= 1, j < 63", 0.5),
        ("i <= j", 0.61),  # 1 + 17 + 33 + 49 of 256 pass
        ("i < 48", 0.25),
        ("j % 2 < 1", 1.0),  # not convex
        ("(j < 3) | (j > 40)", 1.0),
    ],
)
def test_share_of_vectors_that_a_guard_splits(guard: str, exact: float) -> None:
    assert share(guard, "i in 64, j in 64") == pytest.approx(exact, abs=0.1)


def test_a_vector_ends_with_its_axis() -> None:
    assert share("j < 20", "i in 4, j in 20") == 0.0
    assert share("j < 19", "i in 4, j in 20") > 0.0


def test_only_guards_on_indices_along_a_vector_count() -> None:
    text = "y[i, j] = x[j].when([{}], 0.0) where i in 64, j in 64"
    assert count_guard_operations(statement(text.format("i < 32")), {"j"}, LANES) == 0.0
    assert count_guard_operations(statement(text.format("x[j] > 0.5")), {"j"}, LANES) == 0.0
    both = count_guard_operations(statement(text.format("j < 32, i < 40")), {"j"}, LANES)
    assert both > count_guard_operations(statement(text.format("j < 32")), {"j"}, LANES) > 0.0


def seconds(text: str, **inputs: tuple[str, tuple[int, ...]]) -> float:
    return roller_svc.estimate(text, inputs, targets=["cpu-x86-avx512"])["cpu-x86-avx512"][0].seconds


def test_a_guard_that_splits_vectors_costs_more_than_one_that_does_not() -> None:
    text = "y[i, j] +=! abs(x[i, o].when([{}], 0.0)) where j in 96, o in 96"
    x = ("float32", (4096, 96))
    assert seconds(text.format("o <= j"), x=x) > 1.2 * seconds(text.format("o <= j + 95"), x=x)


def test_each_gather_of_a_point_is_priced() -> None:
    inputs = {"x": ("float32", (1 << 20,)), "k": ("int32", (1 << 20,)), "q": ("int32", (1 << 20,))}
    once = seconds("y[n] = x[bitwise_and(k[n], 4095)] + q[n].cast(`float32`)", **inputs)
    twice = seconds("y[n] = x[bitwise_and(k[n], 4095)] + x[bitwise_and(q[n], 4095)]", **inputs)
    assert twice > 1.4 * once


def test_a_gather_is_priced_alike_with_and_without_a_check_of_its_indices() -> None:
    inputs = {"x": ("float32", (4096,)), "k": ("int32", (1 << 20,))}
    checked = seconds("y[n] = x[k[n]]", **inputs)
    assert checked == pytest.approx(seconds("y[n] = x[bitwise_and(k[n], 4095)]", **inputs), rel=0.3)
