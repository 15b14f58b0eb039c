"""Random inputs keep to the domains and ranges of the program."""

from __future__ import annotations

from typing import Any

import numpy as np

from roller_svc.analysis.wide_values import storage_dtype
from roller_svc.frontend.lang import parse
from roller_svc.ir.dtype import DType
from roller_svc.ir.program import TensorType
from roller_svc.semantics.inputs import random_inputs
from roller_svc.semantics.interpreter import reference

F32, I32, U8 = DType.FLOAT32, DType.INT32, DType.UINT8


def drawn(expression: str, seed: int = 0, hints: Any = None, **types: tuple[DType, tuple[int, ...]]) -> Any:
    program = parse(expression, {k: TensorType(d, s) for k, (d, s) in types.items()})
    arrays = random_inputs(program, seed, hints)
    for name, (dtype, shape) in types.items():
        assert (arrays[name].dtype, arrays[name].shape) == (storage_dtype(dtype), shape)
    reference(program, arrays)
    return arrays


def test_floats_are_between_minus_one_and_one() -> None:
    x = drawn("y[n] = x[n] * 2", x=(F32, (1000,)))["x"]
    assert -1 <= x.min() < -0.9
    assert 0.9 < x.max() <= 1


def test_the_same_seed_gives_the_same_arrays() -> None:
    first, again, other = (drawn("y[n] = x[n]", seed, x=(F32, (8,)))["x"] for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_positive_under_logarithms_and_roots_through_statements() -> None:
    arrays = drawn("s[n] +=! x[n, k]; y[n] = log(s[n] + 1.0) + sqrt(z[n])", x=(F32, (9, 9)), z=(F32, (9,)))
    assert (arrays["x"] > 0).all()
    assert (arrays["z"] > 0).all()


def test_fractional_powers_and_acosh() -> None:
    assert (drawn("y[n] = x[n] ** 0.5", x=(F32, (50,)))["x"] > 0).all()
    assert (drawn("y[n] = x[n] ** 2", x=(F32, (50,)))["x"] < 0).any()
    assert (drawn("y[n] = acosh(x[n])", x=(F32, (50,)))["x"] > 1).all()


def test_divisors_and_shift_counts() -> None:
    assert (drawn("y[n] = x[n] // z[n]", x=(I32, (99,)), z=(I32, (99,)))["z"] > 0).all()
    counts = drawn("y[n] = x[n] >> z[n]", x=(U8, (99,)), z=(U8, (99,)))["z"]
    assert counts.max() < 8


def test_indices_are_in_range_and_distinct_for_a_scatter() -> None:
    ids = drawn("y[n, c] = t[ids[n], c]", t=(F32, (5, 3)), ids=(I32, (99,)))["ids"]
    assert (ids.min(), ids.max()) == (0, 4)
    places = drawn("d[p[n]] =. x[n]", d=(F32, (9,)), p=(I32, (9,)), x=(F32, (9,)))["p"]
    assert sorted(places) == list(range(9))


def test_hints_override() -> None:
    hints = {"x": {"range": [5, 6]}, "p": {"values": [2, 1]}}
    arrays = drawn("y[n] = x[n] + p[n]", 0, hints, x=(F32, (2,)), p=(I32, (2,)))
    assert ((arrays["x"] >= 5) & (arrays["x"] < 6)).all()
    assert arrays["p"].tolist() == [2, 1]


def test_an_index_type_smaller_than_the_dimension() -> None:
    arrays = drawn("y[n] = x[i[n]]", x=(F32, (200,)), i=(DType.INT8, (500,)))
    assert arrays["i"].min() >= 0
    assert arrays["i"].max() > 100


def test_few_distinct_values_are_repeated_except_scatter_indices() -> None:
    types = {"x": TensorType(F32, (60,)), "p": TensorType(I32, (60,)), "d": TensorType(F32, (60,))}
    arrays = random_inputs(parse("d[p[n]] =. x[n]", types), 1, distinct=7)
    assert (arrays["x"] == np.resize(arrays["x"][:7], 60)).all()
    assert len(set(arrays["x"])) == 7
    assert sorted(arrays["p"]) == list(range(60))
