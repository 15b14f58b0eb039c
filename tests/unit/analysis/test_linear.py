"""Linear forms: divisions, and conditions that are equal for all elements of a vector."""

from __future__ import annotations

import pytest

from roller_svc.analysis.index_map import IndexMap
from roller_svc.analysis.linear import is_uniform
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Const, Expr, Load, Op, OpKind
from roller_svc.ir.index import add, div, logical_and, lt, mod, mul, num, ref

CHUNK, ELEMENT = ref("chunk"), ref("element")
VECTOR = add(mul(CHUNK, num(8)), ELEMENT)


def test_divisions_visible_in_the_operand() -> None:
    index_map = IndexMap({"k": 64, "j": 8}, {"k": add(mul(ref("o"), num(8)), num(3)), "j": add(ref("o"), num(3))}, {})
    assert index_map.apply(div(ref("k"), 8)) == ref("o")
    assert index_map.apply(mod(ref("k"), 8)) == num(3)
    assert index_map.apply(div(ref("k"), 16)) == div(ref("o"), 2)
    assert index_map.apply(div(ref("j"), 8)) == div(add(ref("o"), num(3)), 8)


@pytest.mark.parametrize("dtype", [DType.INT32, DType.INT64])
def test_divisions_of_data_and_of_what_wraps_stay(dtype: DType) -> None:
    index_map = IndexMap({"k": 64}, {"k": mul(ref("o"), num(8))}, {})
    data = Op(OpKind.FLOORDIV, (Load("x", (num(0),), dtype), Const(3, dtype)), dtype)
    assert index_map.apply(data) == data
    wrapping = div(mul(ref("k"), num(1 << 30)), 8)
    assert index_map.apply(wrapping) == div(mul(mul(ref("o"), num(8)), num(1 << 30)), 8)


def test_quotients_of_variables_are_low_terms_too() -> None:
    rows = add(mul(ref("o"), num(112)), add(mul(ref("b"), num(16)), ref("j")))
    index_map = IndexMap({"i": 35}, {"i": rows}, {"o": 5, "b": 7, "j": 16})
    assert index_map.apply(mod(div(ref("i"), 8), 14)) == add(mul(ref("b"), num(2)), div(ref("j"), 8))
    too_far = IndexMap({"i": 40}, {"i": rows}, {"o": 5, "b": 8, "j": 16})
    assert isinstance(too_far.apply(mod(div(ref("i"), 8), 14)), Op)
    unknown = IndexMap({"i": 35}, {"i": rows}, {"o": 5, "b": 7})
    assert unknown.apply(mod(ref("i"), 112)) != add(mul(ref("b"), num(16)), ref("j"))


def test_all_elements_of_a_vector_have_one_quotient() -> None:
    index_map = IndexMap({"k": 512}, {"k": VECTOR}, {"element": 8})
    assert index_map.apply(div(ref("k"), 8)) == CHUNK
    assert index_map.apply(div(ref("k"), 16)) == div(CHUNK, 2)
    assert index_map.apply(mod(ref("k"), 8)) == ELEMENT
    assert index_map.apply(div(ref("k"), 4)) == add(mul(CHUNK, num(2)), div(ELEMENT, 4))


@pytest.mark.parametrize(
    ("condition", "uniform"),
    [
        (lt(VECTOR, num(96)), True),
        (lt(VECTOR, num(100)), False),
        (lt(VECTOR, mul(div(ref("row"), 3), num(8))), True),
        (lt(add(VECTOR, div(ref("row"), 3)), num(96)), False),
        (lt(div(VECTOR, 3), num(96)), False),
        (lt(ref("row"), num(5)), True),
        (logical_and(lt(ref("row"), num(5)), lt(num(7), VECTOR)), True),
        (logical_and(lt(VECTOR, num(96)), lt(num(8), VECTOR)), False),
    ],
)
def test_conditions_that_change_only_between_vectors(condition: Expr, uniform: bool) -> None:
    assert is_uniform(condition, "element", 8) is uniform
