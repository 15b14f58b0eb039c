"""Statements as contractions of two operands."""

from __future__ import annotations

import itertools

import pytest

from roller_svc.errors import require
from roller_svc.frontend.parse import parse
from roller_svc.fusion.contraction import Contraction, as_contraction
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Const, Expr, iter_subexpressions, loads_of
from roller_svc.ir.program import TensorType

SHAPES = {"a": (8, 32), "b": (32, 64), "u": (8,), "v": (64,), "w": (32,)}


def contraction_of(body: str) -> Contraction:
    types = {name: TensorType(DType.FLOAT32, shape) for name, shape in SHAPES.items() if f"{name}[" in body}
    return require(as_contraction(parse(f"c[m, n] +=! {body}", types).statements[0]), "contraction")


def tensors(operand: Expr) -> set[str]:
    return {load.tensor for load in loads_of(operand)}


@pytest.mark.parametrize("factors", list(itertools.permutations(("a[m, k]", "b[k, n]", "w[k]", "v[n]", "u[m]"))))
def test_operands_do_not_depend_on_the_order_of_factors(factors: tuple[str, ...]) -> None:
    found = contraction_of(" * ".join(factors))
    assert tensors(found.a) == {"a", "u", "w"}  # w joins the smaller operand
    assert tensors(found.b) == {"b", "v"}
    assert [axis.name for axis in (*found.m, *found.n, *found.k)] == ["m", "n", "k"]


@pytest.mark.parametrize("factors", list(itertools.permutations(("a[m, k]", "b[k, n]", "2.0"))))
def test_a_number_joins_the_smaller_operand(factors: tuple[str, ...]) -> None:
    found = contraction_of(" * ".join(factors))
    assert Const(2.0, DType.FLOAT32) in iter_subexpressions(found.a)
    assert found.b == contraction_of("a[m, k] * b[k, n]").b


def test_as_many_factors_as_there_are_make_two_operands() -> None:
    found = contraction_of("a[m, k] * b[k, n] * w[k] * v[n] * u[m] * 0.5 * w[k] * 3.0")
    assert tensors(found.a) == {"a", "u", "w"}
