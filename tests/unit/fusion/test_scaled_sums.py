"""Sums of blocks of k that are scaled: which statements are one, their values, estimates and kernels."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from sampling import slow

import roller_svc
from roller_svc import hardware
from roller_svc.compiler.partition_cache import PartitionCache
from roller_svc.compiler.plans import estimate_program
from roller_svc.frontend.parse import parse
from roller_svc.fusion.contraction import as_contraction, as_scaled_contraction
from roller_svc.fusion.scaled_sums import has_scaled_sum, merge_scaled_sums
from roller_svc.ir.constraints import ScheduleConstraints
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Cast, Load, Op, OpKind
from roller_svc.ir.program import TensorProgram, TensorType
from roller_svc.ir.report import Plan
from roller_svc.semantics.inputs import random_inputs
from roller_svc.semantics.interpreter import evaluate

H200, A100, MI250X = "nvidia-h200-sxm", "nvidia-a100-sxm-80gb", "amd-mi250x"
TF32 = ScheduleConstraints(allow_tf32=True)
A, B = "a[m, g * {r} + i]", "b[n, g * {r} + i]"
SPELLINGS = {  # of one sum over blocks of {r} points
    "nested statements": f"p[m, n, g]: float32 +=! {A} * {B} where g in {{g}}, i in {{r}};"
    " y[m, n] +=! p[m, n, g] * sa[m, g] * sb[n // 128, g]",
    "scaled operands": "y[m, n]: float32 +=! a[m, k].cast(float32) * sa[m, k // {r}]"
    " * (b[n, k].cast(float32) * sb[n // 128, k // {r}])",
    "scaled halves": "y[m, n]: float32 +=! (a[m, k].cast(float16) * sa[m, k // {r}])"
    " * (b[n, k].cast(float16) * sb[n // 128, k // {r}])",
    "nested axes": f"y[m, n]: float32 +=! sa[m, g] * sb[n // 128, g] * {A} * {B} where g in {{g}}, i in {{r}}",
    "inner axis first": f"y[m, n]: float32 +=! {A} * {B} * sa[m, g] * sb[n // 128, g] where i in {{r}}, g in {{g}}",
}
BYTES = (  # W8A8: partial sums in int32, scales of rows and of columns
    "p[m, n, g] +=! a[m, g * {r} + i].cast(int32) * b[n, g * {r} + i].cast(int32) where g in {g}, i in {r};"
    " y[m, n] +=! p[m, n, g].cast(float32) * sa[m, g] * sc[n, g]"
)
ROWS_AND_COLUMNS = "y[m, n]: float32 +=! a[m, k].cast(float32) * sa[m, 0] * (b[n, k].cast(float32) * sc[n, 0])"
PLAIN = "y[m, n]: float32 +=! a[m, k] * b[n, k]"


def program(text: str, m: int, n: int, k: int, block: int, dtype: DType = DType.FLOAT8_E4M3FN) -> TensorProgram:
    blocks = -(-k // block)
    shapes = {"a": (m, k), "b": (n, k), "sa": (m, blocks), "sb": (-(-n // 128), blocks), "sc": (n, blocks), "s": (blocks,)}
    types = {
        name: TensorType(dtype if name in "ab" else DType.FLOAT32, shape) for name, shape in shapes.items() if f"{name}[" in text
    }
    return parse(text.format(g=blocks, r=block), types)


def plan(compute: TensorProgram, target: str, constraints: ScheduleConstraints = TF32) -> Plan:
    return estimate_program(PartitionCache(compute), hardware.load(target), constraints=constraints).plans[0]


# form -----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings_become_one_sum_with_the_values_of_the_statements(name: str) -> None:
    compute = program(SPELLINGS[name], 5, 7, 96, 32)
    (merged,) = merge_scaled_sums(compute.statements, {"y"})
    found = as_scaled_contraction(merged)
    assert found is not None
    assert len(found.scales) == 2
    assert len(found.k) == 1
    inputs = random_inputs(compute, 7)
    ours, theirs = (evaluate(each, inputs)["y"].wide for each in (replace(compute, statements=(merged,)), compute))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_integers_are_added_before_they_are_scaled() -> None:
    compute = program(BYTES, 5, 7, 96, 32, DType.INT8)
    (merged,) = merge_scaled_sums(compute.statements, {"y"})
    assert as_scaled_contraction(merged) is not None
    inputs = random_inputs(compute, 7)
    ours, theirs = (evaluate(each, inputs)["y"].wide for each in (replace(compute, statements=(merged,)), compute))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        (SPELLINGS["scaled operands"], DType.FLOAT32),  # products may exceed the range of their sums
        (SPELLINGS["scaled operands"], DType.BFLOAT16),
        (SPELLINGS["nested axes"], DType.FLOAT64),
        (PLAIN, DType.FLOAT16),
        ("y[m, n]: float32 +=! a[m, k] * b[n, k] * s[(k + 1) // {r}] where k in 95", DType.FLOAT16),  # runs of one point
        ("y[m, n]: float32 +=! a[m, k] * b[n, k] * sa[m, (k + n) // {r} % 3]", DType.FLOAT16),  # along m and n
    ],
)
def test_other_sums_stay_as_they_are(text: str, dtype: DType) -> None:
    compute = program(text, 32, 64, 96, 32, dtype)
    assert merge_scaled_sums(compute.statements, {"y"}) == compute.statements
    assert not has_scaled_sum(compute.statements, {"y"})


def test_partial_sums_that_others_read_are_stored() -> None:
    compute = program(SPELLINGS["nested statements"], 5, 7, 96, 32)
    assert merge_scaled_sums(compute.statements, {"p", "y"}) == compute.statements
    both = program(SPELLINGS["nested statements"] + "; z[m, n] >=! p[m, n, g]", 5, 7, 96, 32)
    assert merge_scaled_sums(both.statements, {"y", "z"}) == both.statements


@pytest.mark.parametrize("dtype", [DType.FLOAT8_E5M2, DType.FLOAT16, DType.INT8])
def test_scales_that_do_not_vary_along_a_sum_are_applied_after_it(dtype: DType) -> None:
    compute = program(ROWS_AND_COLUMNS, 5, 7, 96, 96, dtype)
    sums, scaled = merge_scaled_sums(compute.statements, {"y"})
    assert sums.type.dtype is (DType.INT32 if dtype is DType.INT8 else DType.FLOAT32)
    inputs = random_inputs(compute, 7)
    ours, theirs = (evaluate(each, inputs)["y"].wide for each in (replace(compute, statements=(sums, scaled)), compute))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-4)


DIVIDED = "y[m, n]: float32 +=! a[m, k].cast(float32) / sa[m, 0] * (b[n, k].cast(float32) / sc[n, 0] / 0.7) * s[0]"


@pytest.mark.parametrize("dtype", [DType.FLOAT8_E4M3FN, DType.FLOAT16, DType.INT8])
def test_divisors_that_do_not_vary_along_a_sum_divide_it(dtype: DType) -> None:
    compute = program(DIVIDED, 5, 7, 96, 96, dtype)
    sums, divided = merge_scaled_sums(compute.statements, {"y"})
    found = as_contraction(sums)
    assert found is not None
    assert all(isinstance(each.arg if isinstance(each, Cast) else each, Load) for each in (found.a, found.b))
    inputs = random_inputs(compute, 7)
    ours, theirs = (evaluate(each, inputs)["y"].wide for each in (replace(compute, statements=(sums, divided)), compute))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-4)


GUARDED = "a[m, k].when([k != m], 0.0).cast(float32) / sa[m, 0] * b[n, k].cast(float32)"
CAST = "(a[m, k] - a[m, 0]).cast(float16).cast(float32) / sa[m, 0] * b[n, k].cast(float32)"  # the program rounds


@pytest.mark.parametrize("body", [GUARDED, CAST])
def test_what_has_the_range_of_its_type_is_divided_after_the_sum(body: str) -> None:
    compute = program(f"y[m, n]: float32 +=! {body}", 5, 7, 96, 96, DType.FLOAT16)
    assert len(merge_scaled_sums(compute.statements, {"y"})) == 2


@pytest.mark.emulator
@pytest.mark.parametrize("scaled", ["/ sa[m, 0]", "* sa[m, 0]"])
def test_differences_beyond_the_range_of_halves_are_scaled_in_the_sum(scaled: str) -> None:
    text = f"y[m, n]: float32 +=! (a[m, k] - a[m, 0]).cast(float32) {scaled} * b[n, k].cast(float32)"
    arrays = {"a": np.full((16, 32), -60000, np.float16), "b": np.ones((16, 32), np.float16)}
    arrays |= {"sa": np.full((16, 1), 4.0 if scaled[0] == "/" else 0.25, np.float32)}
    arrays["a"][:, 0] = 60000
    inputs = {name: (str(each.dtype), each.shape) for name, each in arrays.items()}
    kernel = roller_svc.compile(text, inputs, target=A100, select="model", top_k=1, runtime="emulator")
    np.testing.assert_array_equal(kernel.run(arrays)["y"], np.full((16, 16), -30000.0 * 31))


def test_an_inverse_that_is_stated_multiplies_the_sum() -> None:
    compute = program("y[m, n]: float32 +=! a[m, k] * (1.0 / sa[m, 0]) * b[n, k]", 5, 7, 96, 96, DType.FLOAT16)
    _, scaled = merge_scaled_sums(compute.statements, {"y"})
    assert isinstance(scaled.body, Op)
    assert scaled.body.kind is OpKind.MUL


@pytest.mark.parametrize("scale", [np.inf, -np.inf, np.nan, 0.0, -0.0])
def test_what_divides_a_sum_of_one_sign_divides_its_terms(scale: float) -> None:
    compute = program(DIVIDED, 3, 3, 32, 32, DType.FLOAT16)
    inputs = dict(random_inputs(compute, 7)) | {name: np.ones((3, 32), np.float16) for name in "ab"}
    inputs["sa"] = np.full_like(inputs["sa"], scale)
    statements = merge_scaled_sums(compute.statements, {"y"})
    ours, theirs = (evaluate(each, inputs)["y"].wide for each in (replace(compute, statements=statements), compute))
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        (DIVIDED, DType.FLOAT32),
        (DIVIDED, DType.BFLOAT16),
        ("y[m, n]: float32 +=! (a[m, k] / a[m, 0]).cast(float32) * b[n, k].cast(float32)", DType.FLOAT16),  # rounded
        ("y[m, n]: float32 +=! (a[m, k] - a[m, 0]).cast(float32) / sa[m, 0] * b[n, k]", DType.FLOAT16),  # may exceed float16
        ("y[m, n]: float32 +=! (a[m, k] - a[m, 0]).cast(float32) * sa[m, 0] * b[n, k]", DType.FLOAT16),
        ("y[m, n]: float32 +=! a[m, k].cast(float32) / s[k // 96] * b[n, k].cast(float32)", DType.FLOAT16),
    ],
)
def test_other_quotients_stay_in_the_sum(text: str, dtype: DType) -> None:
    compute = program(text, 5, 7, 192, 96, dtype)
    assert merge_scaled_sums(compute.statements, {"y"}) == compute.statements


FACTORS = ("a[m, k] * b[n, k] * 0.3", "0.3 * a[m, k] * (b[n, k] * a[m, 0])", "a[m, k] * b[n, 0] * 0.3 * b[n, k] * a[m, 1]")


@pytest.mark.parametrize("body", FACTORS)
def test_numbers_and_factors_of_halves_are_applied_after_the_sum(body: str) -> None:
    compute = program(f"y[m, n]: float32 +=! {body}", 5, 7, 96, 96, DType.FLOAT16)
    sums, scaled = merge_scaled_sums(compute.statements, {"y"})
    found = as_contraction(sums)
    assert found is not None
    assert isinstance(found.a, Load)
    assert isinstance(found.b, Load)
    inputs = random_inputs(compute, 7)
    ours, theirs = (evaluate(each, inputs)["y"].wide for each in (replace(compute, statements=(sums, scaled)), compute))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-4)


def test_a_sum_to_one_number_may_have_one_axis() -> None:
    """Its rows and columns have no axes, as in a model whose product has one element."""
    types = {name: TensorType(DType.INT8, (64,)) for name in "ab"} | {name: TensorType(DType.FLOAT32, (2,)) for name in "st"}
    compute = parse("y[]: float32 +=! a[k].cast(float32) * s[k // 32] * (b[k].cast(float32) * t[k // 32])", types)
    assert [len(each.axes) for each in compute.statements] == [1]
    assert merge_scaled_sums(compute.statements, {"y"}, is_thin=True) == compute.statements
    assert has_scaled_sum(compute.statements, {"y"}, is_cpu=True), "bytes"


def test_a_sum_of_one_value_stays_as_it_is() -> None:
    compute = program("y[m, n]: float32 +=! a[m, 0] * b[n, 0] * 0.5 where k in 96", 5, 7, 96, 96, DType.FLOAT16)
    assert merge_scaled_sums(compute.statements, {"y"}) == compute.statements


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
def test_scales_that_keep_products_in_range_stay_in_the_sum(dtype: DType) -> None:
    compute = program(ROWS_AND_COLUMNS, 5, 7, 96, 96, dtype)
    assert merge_scaled_sums(compute.statements, {"y"}) == compute.statements


def test_integer_sums_that_may_wrap_stay_as_they_are() -> None:
    compute = program(BYTES, 4, 4, 1 << 17, 1 << 16, DType.INT8)
    assert merge_scaled_sums(compute.statements, {"y"}) == compute.statements


# estimates ------------------------------------------------------------------------------------------------------------
def test_block_scaled_float8_takes_the_time_of_plain_float8() -> None:
    size = (4096, 4096, 7168, 128)
    plain = plan(program(PLAIN, *size), H200).estimate.seconds
    for text in SPELLINGS.values():
        scaled = plan(program(text, *size), H200)
        assert [choice.program.unit.name for choice in scaled.choices] == ["wgmma_e4m3"]
        assert scaled.estimate.seconds < 1.15 * plain


@pytest.mark.parametrize("target", [H200, A100, MI250X])
@pytest.mark.parametrize("dtype", [DType.FLOAT8_E4M3FN, DType.FLOAT16, DType.INT8])
def test_scaled_rows_and_columns_take_the_time_of_the_plain_product(dtype: DType, target: str) -> None:
    plain = "y[m, n] +=! a[m, k].cast(int32) * b[n, k].cast(int32)" if dtype is DType.INT8 else PLAIN
    scaled, product = (plan(program(text, *[2048] * 4, dtype), target) for text in (ROWS_AND_COLUMNS, plain))
    assert scaled.estimate.seconds < 1.15 * product.estimate.seconds


@pytest.mark.parametrize("target", [H200, A100, MI250X])
def test_bytes_scaled_in_blocks_use_units_of_bytes(target: str) -> None:
    scaled = plan(program(BYTES, 1024, 2048, 1024, 128, DType.INT8), target)
    (unit,) = (choice.program.unit for choice in scaled.choices)
    assert unit.is_matrix
    assert unit.acc_dtype is DType.INT32


def test_blocks_that_are_no_whole_steps_are_not_scaled_in_registers() -> None:
    chosen = plan(program(SPELLINGS["scaled operands"], 256, 256, 1000, 100), H200).choices[-1]
    assert chosen.program.space.scale_runs is None


# kernels --------------------------------------------------------------------------------------------------------------
HALF, BYTE = np.dtype(np.float16), np.dtype(np.int8)
E4M3, E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)


def assert_right(text: str, dtype: np.dtype, m: int, n: int, k: int, block: int, target: str, **options: object) -> None:
    compute = program(text, m, n, k, block, DType(dtype.name))
    rng = np.random.default_rng(3)
    inputs = {name: {"dtype": t.dtype.value, "shape": list(t.shape)} for name, t in compute.inputs}
    blocks = -(-k // block)
    kernel = roller_svc.compile(
        text.format(g=blocks, r=block), inputs, target=target, select="model", top_k=1, runtime="emulator", **options
    )
    assert "step_sums" in kernel.source
    arrays = {}
    for name, type_ in compute.inputs:
        values = rng.integers(-128, 128, type_.shape) if dtype == BYTE and name in "ab" else rng.standard_normal(type_.shape)
        arrays[name] = values.astype(dtype if name in "ab" else np.float32)
    a, b = (np.float64(arrays[name]) for name in "ab")
    ones = np.ones((m, blocks)), np.ones((n, blocks))
    rows = np.float64(arrays.get("sa", ones[0])) * np.float64(arrays.get("s", np.ones(blocks)))
    columns = np.float64(arrays.get("sc", ones[1]))
    if "sb" in arrays:
        columns = columns * np.repeat(np.float64(arrays["sb"]), 128, axis=0)[:n]
    wide = [np.repeat(scale, block, axis=1)[:, :k] for scale in (rows, columns)]
    right = (a * wide[0]) @ (b * wide[1]).T
    size = np.abs(a * wide[0]) @ np.abs(b * wide[1]).T
    unit = 2.0**-11 if options.get("allow_tf32") and target == H200 else 2.0**-20
    assert (np.abs(np.float64(kernel.run(arrays)["y"]) - right) <= unit * size).all()


COLUMNS = "y[m, n]: float32 +=! a[m, k].cast(float32) * b[n, k].cast(float32) * sa[m, k // {r}] * sc[n, k // {r}]"
BLOCKS_ALONE = "y[m, n]: float32 +=! a[m, k].cast(float32) * b[n, k].cast(float32) * s[k // {r}]"


@pytest.mark.parametrize("target", [H200, A100, MI250X])
def test_a_product_of_halves_with_a_number_takes_the_time_of_the_plain_one(target: str) -> None:
    plain = plan(program(PLAIN, 1024, 1024, 1024, 1024, DType.FLOAT16), target).estimate.seconds
    scaled = program(f"y[m, n]: float32 +=! {FACTORS[0]}", 1024, 1024, 1024, 1024, DType.FLOAT16)
    assert plan(scaled, target).estimate.seconds < 1.05 * plain


def test_divided_rows_and_columns_take_little_more_than_the_plain_product() -> None:
    plain, divided = (plan(program(text, 4096, 4096, 4096, 4096), H200) for text in (PLAIN, DIVIDED))
    assert len(divided.choices) == 1
    assert divided.estimate.seconds < 1.5 * plain.estimate.seconds  # three quotients for each result


@pytest.mark.parametrize("target", [A100, slow(H200), slow(MI250X), slow("local")])
def test_a_divided_product_is_right(target: str) -> None:
    compute = program(DIVIDED, 24, 40, 70, 70, DType.FLOAT16)
    arrays = {
        name: np.abs(each) + each.dtype.type(0.5) if name.startswith("s") else each
        for name, each in random_inputs(compute, 7).items()
    }
    inputs = {name: (type_.dtype.value, type_.shape) for name, type_ in compute.inputs}
    runtime = "auto" if target == "local" else "emulator"
    kernel = roller_svc.compile(DIVIDED, inputs, target=target, select="model", top_k=1, runtime=runtime)
    right = roller_svc.reference(DIVIDED, inputs, arrays)["y"]
    np.testing.assert_allclose(kernel.run(arrays)["y"], right, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("target", [H200, A100, MI250X])
@pytest.mark.parametrize("body", FACTORS)
def test_a_scaled_product_of_halves_is_right(body: str, target: str) -> None:
    compute = program(f"y[m, n]: float32 +=! {body}", 24, 40, 70, 70, DType.FLOAT16)
    arrays = random_inputs(compute, 7)
    inputs = {name: ("float16", type_.shape) for name, type_ in compute.inputs}
    text = f"y[m, n]: float32 +=! {body}"
    kernel = roller_svc.compile(text, inputs, target=target, select="model", top_k=1, runtime="emulator")
    right = roller_svc.reference(text, inputs, arrays)["y"]
    np.testing.assert_allclose(kernel.run(arrays)["y"], right, rtol=1e-3, atol=1e-3)


def test_a_small_kernel_is_right() -> None:
    assert_right(SPELLINGS["nested statements"], HALF, 24, 40, 192, 64, A100)


@pytest.mark.slow
@pytest.mark.parametrize("target", [H200, A100, MI250X])
@pytest.mark.parametrize(
    ("text", "dtype", "size", "options"),
    [
        (SPELLINGS["nested statements"], E4M3, (136, 200, 512, 128), {}),
        (SPELLINGS["scaled operands"], E4M3, (136, 200, 500, 128), {"allow_tf32": True}),  # the last block is shorter
        (SPELLINGS["nested axes"], E5M2, (17, 264, 768, 256), {"allow_tf32": True}),
        (COLUMNS, HALF, (70, 72, 500, 64), {}),
        (COLUMNS, HALF, (24, 136, 2000, 256), {"tiles": {"split_k": 3}}),  # several k-tiles of a block
        (COLUMNS, HALF, (64, 72, 1100, 256), {"tiles": {"stream_k": 5}}),
        (BLOCKS_ALONE, HALF, (72, 72, 320, 32), {}),
        (BYTES, BYTE, (70, 136, 512, 64), {}),
        (BYTES, BYTE, (136, 72, 768, 256), {}),
    ],
)
def test_kernels_are_right(
    text: str, dtype: np.dtype, size: tuple[int, int, int, int], options: dict[str, object], target: str
) -> None:
    assert_right(text, dtype, *size, target, **options)


@pytest.mark.slow
def test_batches_and_three_dimensions_are_right() -> None:
    text = "y[e, m, n] +=! a[e, m, g, i] * b[e, n, g, i] * sa[e, m, g] * sc[e, n, g]"
    shapes = {"a": (3, 20, 4, 64), "b": (3, 72, 4, 64), "sa": (3, 20, 4), "sc": (3, 72, 4)}
    rng = np.random.default_rng(3)
    arrays = {name: rng.standard_normal(shape).astype(np.float16 if name in "ab" else np.float32) for name, shape in shapes.items()}
    inputs = {name: {"dtype": str(each.dtype), "shape": list(each.shape)} for name, each in arrays.items()}
    right = np.einsum("emgi,engi,emg,eng->emn", *(np.float64(each) for each in arrays.values()))
    for target in (H200, A100):
        kernel = roller_svc.compile(text, inputs, target=target, select="model", top_k=1, runtime="emulator")
        assert "step_sums" in kernel.source
        np.testing.assert_allclose(kernel.run(arrays)["y"], right, rtol=1e-4, atol=1e-3)
