"""Statements as sums of products."""

from __future__ import annotations

import pytest

from roller_svc.analysis.sum_of_products import SumOfProducts, is_window, product_of, sum_of_products
from roller_svc.errors import require
from roller_svc.frontend.parse import parse
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Const, Expr, Op, axes_of, loads_of
from roller_svc.ir.index import add, ref
from roller_svc.ir.program import TensorType


def form_of(text: str, dtype: DType = DType.FLOAT32) -> SumOfProducts | None:
    program = parse(text, {name: TensorType(dtype, (8, 8)) for name in "ab"} | {"d": TensorType(dtype, (8,))})
    return sum_of_products(program.statements[-1])


def tensors(factors: tuple[Expr, ...]) -> list[set[str]]:
    return [{load.tensor for load in loads_of(factor)} for factor in factors]


@pytest.mark.parametrize("text", ["c[i] +=! a[i, k] * d[k]", "c[i] +=! d[k] * a[i, k]", "c[i] +=! a[i, k] * 2 * d[k]"])
def test_factors_are_in_order(text: str) -> None:
    form = require(form_of(text), "sum")
    found = [names for names in tensors(form.factors) if names]
    assert found == ([{"a"}, {"d"}] if text.index("a[") < text.index("d[") else [{"d"}, {"a"}])
    assert [a.name for a in form.results] == ["i"]
    assert [a.name for a in form.reduced] == ["k"]


def test_a_quotient_divides_the_factor_with_the_divisors_axes() -> None:
    form = require(form_of("c[i, j] +=! a[i, k] * b[k, j] / d[j]"), "sum")
    assert tensors(form.factors) == [{"a"}, {"b", "d"}]
    varying, others = form.split("j")
    assert tensors(tuple(varying)) == [{"b", "d"}]
    assert tensors(tuple(others)) == [{"a"}]
    assert axes_of(product_of(form.factors)) == {"i", "j", "k"}


def test_a_quotient_has_the_wider_type() -> None:
    form = require(form_of("c[i, j] +=! a[i, k].cast(float16) * b[k, j].cast(float16) / d[i]"), "sum")
    assert [factor.dtype for factor in form.factors] == [DType.FLOAT32, DType.FLOAT16]


def test_a_quotient_divides_the_factor_with_the_fewest_elements() -> None:
    for text in ("a[i, k] * b[k, j] * d[k] / 3.0", "d[k] * b[k, j] * a[i, k] / 3.0"):
        form = require(form_of(f"c[i, j] +=! {text}"), "sum")
        (divided,) = [f for f in form.factors if isinstance(f, Op)]
        assert tensors((divided,)) == [{"d"}]


def test_a_division_by_a_power_of_two_is_a_factor() -> None:
    form = require(form_of("c[i, j] +=! a[i, k] * b[k, j] / 64.0"), "sum")
    assert form.factors[-1] == Const(1 / 64, DType.FLOAT32)
    narrow = require(form_of("c[i, j] +=! a[i, k] * b[k, j] / 32768.0", DType.FLOAT16), "sum")
    assert len(narrow.factors) == 2  # 2^-15 is no normal float16


def test_a_narrow_integer_product_is_one_factor() -> None:
    assert len(require(form_of("c[i, j] +=! (a[i, k] * b[k, j]).cast(int32)", DType.INT8), "sum").factors) == 1


def test_conditions_are_found_in_products_and_casts() -> None:
    text = "c[i, j] +=! (a[i, k] * where(k < j, b[k, j], 0.0)).cast(float64)"
    (select,) = require(form_of(text), "sum").selects
    assert axes_of(select.cond) == {"k", "j"}
    assert require(form_of("c[i, j] +=! a[i, k] + where(k < j, b[k, j], 0.0)"), "sum").selects == ()


@pytest.mark.parametrize("text", ["c[i] >=! a[i, k]", "c[i, k] = a[i, k] * b[i, k]"])
def test_only_sums_over_axes_have_the_form(text: str) -> None:
    assert form_of(text) is None


def test_an_index_of_reduced_and_other_axes_is_a_window() -> None:
    assert is_window(add(ref("h"), ref("r")), {"r"})
    assert not is_window(ref("r"), {"r"})
    assert not is_window(ref("h"), {"r"})
