"""Contractions in another spelling: signs, sums, conditions, casts and zero points around products."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sampling import every

import roller_svc
from roller_svc import hardware
from roller_svc.analysis.operand import value_dtype
from roller_svc.compiler.backends import load_emulated
from roller_svc.compiler.lower_and_emit import emit_plan
from roller_svc.compiler.partition_cache import PartitionCache
from roller_svc.compiler.plans import best_plans, estimate_program, rank_best_partition
from roller_svc.errors import require
from roller_svc.frontend.parse import parse
from roller_svc.fusion.contraction import as_contraction
from roller_svc.fusion.linear_sums import split_linear_sums
from roller_svc.ir.constraints import OpClass, ScheduleConstraints
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Op, OpKind, iter_subexpressions
from roller_svc.ir.kernel import CompiledKernel
from roller_svc.ir.program import TensorProgram, TensorType
from roller_svc.semantics.inputs import random_inputs
from roller_svc.semantics.interpreter import evaluate

GPUS = ("nvidia-h200-sxm", "nvidia-a100-sxm-80gb", "amd-mi300x")
HALF = "a[m, k] * b[k, n]"
HALVES = {
    "negative": ("-(a[m, k] * b[k, n])", 1),
    "negative factor": ("(-a[m, k]) * b[k, n]", 1),
    "widened": ("(a[m, k] * b[k, n]).cast(float32)", 1),
    "sum": ("a[m, k] * b[k, n] + c[m, k] * d[k, n]", 2),
    "difference": ("a[m, k] * b[k, n] - c[m, k] * d[k, n]", 2),
    "scaled": ("-(u[n] * a[m, k] * b[k, n])", 1),
    "masked": ("where(k <= m, a[m, k] * b[k, n], 0.0)", 1),
    "result in part": ("where(n <= m, a[m, k] * b[k, n], 0.0)", 1),
    "row in part": ("where(u[m] > 0.0, a[m, k] * b[k, n], 0.0)", 1),
    "difference in part": ("where(n <= m, a[m, k] * b[k, n] - c[m, k] * d[k, n], 0.0)", 2),
    "masked sum": ("where(k <= m, a[m, k] * b[k, n] - c[m, k] * d[k, n], 0.0)", 2),
}
BYTES = {
    "constant": "(p[m, k].cast(int32) - 128) * q[k, n].cast(int32)",
    "row": "(p[m, k].cast(int32) - zp[m].cast(int32)) * q[k, n].cast(int32)",
    "both": "(p[m, k].cast(int32) - zp[m].cast(int32)) * (q[k, n].cast(int32) - zq[n].cast(int32))",
}
UNSIGNED = {
    **BYTES,
    "plain": "p[m, k].cast(int32) * q[k, n].cast(int32)",
    "both unsigned": "(p[m, k].cast(int32) - 128) * (p[n, k].cast(int32) - zp[n].cast(int32))",
    "two offsets": "(p[m, k].cast(int32) - zp[m].cast(int32) - 7) * q[k, n].cast(int32)",
    "masked": "where(k <= m, p[m, k].cast(int32), 0) * q[k, n].cast(int32)",
    "negative": "(5 - p[m, k].cast(int32)) * q[k, n].cast(int32)",
    "result in part": "where(n <= m, (p[m, k].cast(int32) - zp[m].cast(int32)) * q[k, n].cast(int32), 0)",
}


def program(body: str, size: int, stated: str = "") -> TensorProgram:
    shapes = {"a": (size, size), "b": (size, size), "c": (size, size), "d": (size, size), "u": (size,)}
    types = {name: TensorType(DType.FLOAT16, shape) for name, shape in shapes.items() if f"{name}[" in body}
    for name, dtype, shape in (
        ("p", DType.UINT8, (size, size)), ("q", DType.INT8, (size, size)), ("zp", DType.UINT8, (size,)), ("zq", DType.INT8, (size,))
    ):  # fmt: skip
        if f"{name}[" in body:
            types[name] = TensorType(dtype, shape)
    return parse(f"y[m, n]{stated} +=! {body}", types)


def seconds(compute: TensorProgram, target: str) -> float:
    return estimate_program(PartitionCache(compute), hardware.load(target)).plans[0].estimate.seconds


SPELLED = {
    "-(-(a[m, k] * b[k, n]))": 1,
    "(-a[m, k]) * (-b[k, n])": 1,
    "a[m, k] * (-b[k, n]) / (-2.0)": 2,
    "(a[m, k] + (-u[k])) * b[k, n]": 1,
    "where(k <= m, -a[m, k], 0.0) * b[k, n]": 2,
    "(-p[m, k].cast(int32)) * (-q[k, n].cast(int32))": 1,
    "p[m, k].cast(int32) * (3 * q[k, n].cast(int32)) * zp[m].cast(int32)": 2,
}


@pytest.mark.parametrize("body", SPELLED)
def test_operands_of_any_spelling_are_tensors_with_conditions(body: str) -> None:
    compute = program(body, 17)
    split = replace(compute, statements=split_linear_sums(compute.statements, compute.types))
    assert len(split.statements) == SPELLED[body]
    found = require(as_contraction(split.statements[0]), "contraction")
    assert not any(isinstance(node, Op) and node.kind is OpKind.NEG for node in iter_subexpressions(found.a))
    assert not any(isinstance(node, Op) and node.kind is OpKind.NEG for node in iter_subexpressions(found.b))
    inputs = random_inputs(compute, 7)
    ours, theirs = (np.asarray(evaluate(each, inputs)["y"].wide, np.float64) for each in (split, compute))
    tolerance = 1e-2 if "a[" in body else 0.0
    np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)


def test_a_load_that_its_condition_keeps_in_bounds_stays_under_it() -> None:
    types = {"a": TensorType(DType.FLOAT32, (17, 40)), "b": TensorType(DType.FLOAT32, (20, 17))}
    compute = parse("y[m, n] +=! a[m, k] * (-where(k < 20, -b[k, n], 0.0)) where k in 40", types)
    split = replace(compute, statements=split_linear_sums(compute.statements, types))
    inputs = random_inputs(compute, 7)
    ours, theirs = (np.asarray(evaluate(each, inputs)["y"].wide, np.float64) for each in (split, compute))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [*HALVES, *BYTES])
def test_split_sums_have_the_values_of_the_statement(name: str) -> None:
    body = HALVES[name][0] if name in HALVES else BYTES[name]
    compute = program(body, 17)
    split = replace(compute, statements=split_linear_sums(compute.statements, compute.types))
    assert (len(split.statements) > 1) is (name != "widened")
    inputs = random_inputs(compute, 7)
    ours, theirs = (np.asarray(evaluate(each, inputs)["y"].wide, np.float64) for each in (split, compute))
    np.testing.assert_allclose(ours, theirs, rtol=0 if name in BYTES else 1e-2, atol=0 if name in BYTES else 1e-2)


@pytest.mark.parametrize("target", [*GPUS, "cpu-x86-avx512"])
@pytest.mark.parametrize("name", HALVES)
def test_every_spelling_takes_the_time_of_its_products(name: str, target: str) -> None:
    body, products = HALVES[name]
    limit = 1.8 if "masked" in name else 1.3
    assert seconds(program(body, 2048), target) < limit * products * seconds(program(HALF, 2048), target)


@pytest.mark.parametrize("target", GPUS)
@pytest.mark.parametrize("name", BYTES)
def test_zero_points_leave_the_product_to_the_matrix_unit(name: str, target: str) -> None:
    plain = program("q[m, k].cast(int32) * q[k, n].cast(int32)", 4096)
    assert seconds(program(BYTES[name], 4096), target) < 1.3 * seconds(plain, target)


CONVERTED = (
    "p[m, k].cast(int32) * q[k, n].cast(int32)",
    "(p[m, k].cast(int32) * q[k, n].cast(int32)).cast(float32)",
    "where(n <= m, q[m, k].cast(int32) * q[k, n].cast(int32), 0).cast(float32)",
)


@pytest.mark.parametrize("target", [*GPUS, "cpu-x86-avx512"])
@pytest.mark.parametrize("body", CONVERTED[:2])
def test_products_of_bytes_that_are_added_as_floats_are_contractions(body: str, target: str) -> None:
    plain = min(
        seconds(program("p[m, k].cast(int32) * q[k, n].cast(int32)", 1024), target),
        seconds(program("p[m, k].cast(float32) * q[k, n].cast(float32)", 1024), target),
    )
    assert seconds(program(body, 1024, ": float32"), target) < 1.05 * plain


@pytest.mark.parametrize("target", ["local", "nvidia-h200-sxm", "nvidia-a100-sxm-80gb", "amd-mi250x"])
@pytest.mark.parametrize("body", CONVERTED)
def test_kernels_of_bytes_that_are_added_as_floats_are_right(body: str, target: str) -> None:
    compute = program(body, 33, ": float32")
    inputs = all_bytes(compute)
    types = {name: (type_.dtype.value, type_.shape) for name, type_ in compute.inputs}
    runtime = "auto" if target == "local" else "emulator"
    kernel = roller_svc.compile(f"y[m, n]: float32 +=! {body}", types, target=target, top_k=1, select="model", runtime=runtime)
    right = np.float64(inputs["p" if "p" in inputs else "q"]) @ np.float64(inputs["q"])
    right = np.tril(right) if "where" in body else right
    np.testing.assert_array_equal(kernel.run(inputs)["y"], right)  # every sum is below 2^24


@pytest.mark.parametrize(
    "body",
    [
        "a[m, k] * b[k, n].when([k < length[m]], 0.0)",
        "where(k <= m, b[k, n], 0.0) * a[m, k]",
        "-(a[m, k].when([k < 20], 0.0)) * b[k, n]",
        "a[m, k].when([m < 20], 0.0) * b[k, n]",
        "where(m < 20, 2.0 * a[m, k], 0.0) * b[k, n]",
        "a[m, k] * c[k, n] / s[m].when([m < 20], 0.0)",
        "where(k < 20, a[m, k], 0.0) / b[k, n]",
    ],
)
def test_a_condition_around_a_factor_keeps_no_other_nan_out(body: str) -> None:
    rng = np.random.default_rng(3)
    b = rng.random((24, 40), np.float32) + 1
    b[20:] = np.nan
    length = rng.integers(1, 20, 32).astype(np.int32)
    arrays = {"a": rng.random((32, 24), np.float32), "b": b, "s": rng.random(32, np.float32) + 1, "length": length}
    arrays["c"] = np.ones((24, 40), np.float32)
    inputs = {name: array for name, array in arrays.items() if f"{name}[" in body}
    kernel = roller_svc.compile(f"y[m, n] +=! {body}", inputs, select="model", top_k=1)
    right = roller_svc.reference(f"y[m, n] +=! {body}", inputs, inputs)["y"]
    np.testing.assert_allclose(kernel(**inputs)["y"], right, rtol=1e-4)


def test_factors_that_are_stated_in_float32_are_multiplied_in_it() -> None:
    factors = ("a[m, k].cast(float32)", "u[k].cast(float32)", "b[k, n].cast(float32)")
    for body in (" * ".join(factors), f"-({factors[0]} * {factors[1]}) * {factors[2]}"):
        compute = program(body, 32)
        statement = split_linear_sums(compute.statements, compute.types)[0]
        found = require(as_contraction(statement), "contraction")
        assert {found.a.dtype, found.b.dtype} == {DType.FLOAT32, DType.FLOAT16}


@pytest.mark.slow
@pytest.mark.parametrize("target", ["local", "nvidia-h200-sxm", "nvidia-a100-sxm-80gb", "amd-mi250x"])
@pytest.mark.parametrize("name", ["result in part", "row in part", "difference in part", "masked"])
def test_kernels_of_products_in_part_are_right(name: str, target: str) -> None:
    text = f"y[m, n]: float32 +=! {HALVES[name][0]}"
    compute = program(HALVES[name][0], 37, ": float32")
    inputs = random_inputs(compute, 7)
    types = {each: (type_.dtype.value, type_.shape) for each, type_ in compute.inputs}
    runtime = "auto" if target == "local" else "emulator"
    kernel = roller_svc.compile(text, types, target=target, top_k=1, select="model", runtime=runtime)
    right = roller_svc.reference(text, types, inputs)["y"]
    np.testing.assert_allclose(kernel.run(inputs)["y"], right, rtol=1e-3, atol=1e-3)


def test_where_a_condition_on_results_fails_infinite_products_do_not_count() -> None:
    compute = program("where(n < m, a[m, k] * b[k, n], 0.0)", 17)
    split = replace(compute, statements=split_linear_sums(compute.statements, compute.types))
    inputs = random_inputs(compute, 7)
    inputs["b"][3, 16] = np.inf
    assert np.isfinite(np.asarray(evaluate(split, inputs)["y"].wide, np.float64)).all()


def all_bytes(compute: TensorProgram) -> dict[str, NDArray[Any]]:
    """Inputs of the whole ranges of their types."""
    rng = np.random.default_rng(11)
    return {
        name: rng.integers(*type_.dtype.integer_range, type_.shape, type_.dtype.value, endpoint=True)
        for name, type_ in compute.inputs
    }


@pytest.mark.parametrize("name", UNSIGNED)
def test_unsigned_bytes_are_signed_ones_and_an_offset(name: str) -> None:
    compute = program(UNSIGNED[name], 17)
    split = split_linear_sums(compute.statements, compute.types, has_signed_bytes_only=True)
    products = [c for c in map(as_contraction, split) if c is not None]
    assert [{value_dtype(c.a), value_dtype(c.b)} for c in products] == [{DType.INT8}]
    inputs = all_bytes(compute)
    ours, theirs = (evaluate(each, inputs)["y"].wide for each in (replace(compute, statements=split), compute))
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.emulator
@pytest.mark.parametrize("target", ["amd-mi250x", "amd-mi300x"])
@pytest.mark.parametrize("name", every(4, UNSIGNED))
def test_unsigned_bytes_are_multiplied_by_mfma(name: str, target: str) -> None:
    compute = program(UNSIGNED[name], 76)
    hw = hardware.load(target)
    groups, ranked, _ = rank_best_partition(compute, hw, 1, ScheduleConstraints(op_class=OpClass.MMA))
    source = emit_plan(best_plans(ranked, 1)[0], compute, groups, hw)
    assert "mfma_16x16x" in source.text
    inputs = all_bytes(compute)
    got = load_emulated(CompiledKernel(source, b"", "", ()), 1, races=True).run(inputs)["y"]
    np.testing.assert_array_equal(got, evaluate(compute, inputs)["y"].wide)


def test_small_products_of_unsigned_bytes_stay_one_launch_where_that_is_faster() -> None:
    cache = PartitionCache(program(UNSIGNED["plain"], 32))
    assert sorted(map(len, cache.partitions(hardware.load("amd-mi300x")))) == [1, 2]


def test_products_that_wrap_before_they_are_added_are_not_split() -> None:
    compute = parse(
        "y[m, n]: int64 +=! (p[m, k] - 3) * q[k, n]",
        {"p": TensorType(DType.INT32, (16, 16)), "q": TensorType(DType.INT32, (16, 16))},
    )
    assert split_linear_sums(compute.statements, compute.types) == compute.statements


def test_a_condition_that_makes_a_load_legal_stays_around_it() -> None:
    half = {"a": TensorType(DType.FLOAT16, (16, 20)), "b": TensorType(DType.FLOAT16, (16, 16)), "i": TensorType(DType.INT32, (20,))}
    for text in (
        "y[m, n] +=! where(k <= m, a[m, k] * b[k, n], 0.0) where k in 20, m in 16",
        "y[m, n] +=! where(k <= m, a[m, k] * b[i[k], n], 0.0)",
    ):
        compute = parse(text, {name: each for name, each in half.items() if f"{name}[" in text})
        assert split_linear_sums(compute.statements, compute.types) == compute.statements


def test_long_products_of_sums_are_not_expanded() -> None:
    text = " * ".join(["(p[m, k].cast(int32) + q[k, n].cast(int32))"] * 40)
    assert len(split_linear_sums(program(text, 16).statements, program(text, 16).types)) == 1


def test_a_factor_that_keeps_products_in_range_stays_in_the_sum() -> None:
    body = "-(u[n] * a[m, k] * b[k, n])"
    types = {name: TensorType(DType.FLOAT32, (16, 16) if name != "u" else (16,)) for name in "abu"}
    compute = parse(f"y[m, n] +=! {body}", types)
    split = replace(compute, statements=split_linear_sums(compute.statements, types))
    big = np.full((16, 16), 1e25, np.float32)
    values = evaluate(split, {"a": big, "b": big, "u": np.full(16, 1e-30, np.float32)})["y"].wide
    np.testing.assert_allclose(values, -1.6e21, rtol=1e-5)


@pytest.mark.parametrize(("k", "count"), [(8, 1), (16, 3)])
def test_short_sums_of_several_products_stay_together(k: int, count: int) -> None:
    types = {name: TensorType(DType.FLOAT32, (64, k) if name in "ac" else (k, 64)) for name in "abcd"}
    compute = parse("y[m, n] +=! a[m, k] * b[k, n] - c[m, k] * d[k, n]", types)
    assert len(split_linear_sums(compute.statements, types)) == count


@pytest.mark.parametrize("body", ["a[m, k] * b[k, n]", "a[m, k] + a[m, k]", "(a[m, k] - u[k]) * b[k, n]"])
def test_other_sums_stay_as_they_are(body: str) -> None:
    compute = program(body, 16) if "n]" in body else parse(f"y[m] +=! {body}", {"a": TensorType(DType.FLOAT16, (16, 16))})
    assert split_linear_sums(compute.statements, compute.types) == compute.statements
