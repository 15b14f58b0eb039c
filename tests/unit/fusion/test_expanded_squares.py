"""Squares of differences as products: with permission, or where all sums are exact."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import roller_svc
from roller_svc import hardware
from roller_svc.compiler.estimates.batch import Item, estimate_item
from roller_svc.compiler.partition_cache import PartitionCache
from roller_svc.compiler.plans import estimate_program
from roller_svc.errors import ArgumentError
from roller_svc.frontend.parse import parse
from roller_svc.fusion.inline import inline_elementwise
from roller_svc.fusion.linear_sums import split_linear_sums
from roller_svc.ir.constraints import ScheduleConstraints
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import OpKind, iter_subexpressions
from roller_svc.ir.program import TensorExpr, TensorProgram, TensorType
from roller_svc.semantics.inputs import random_inputs
from roller_svc.semantics.interpreter import evaluate
from roller_svc.verify.expanded_squares import expand_squares
from roller_svc.verify.run_and_verify import verify_results

H200, CPU = "nvidia-h200-sxm", "cpu-x86-avx512"
GPUS = (H200, "nvidia-a100-sxm-80gb", "amd-mi250x")
A, B = "a[m, k].cast(float32)", "b[n, k].cast(float32)"
DISTANCES = f"square({A} - {B})"
# spelling: the sums and the map that it becomes, and the sign that results cannot have
FORMS = {
    DISTANCES: (4, OpKind.MAX),
    f"({A} - {B}) * ({A} - {B})": (4, OpKind.MAX),
    f"({A} - {B}) ** 2": (4, OpKind.MAX),
    f"square(abs({A} + {B}))": (4, OpKind.MAX),
    "square(a[m, k] - b[n, k])": (4, OpKind.MAX),
    f"-0.5 * {DISTANCES}": (4, OpKind.MIN),
    f"w[k] * {DISTANCES}": (4, None),
    f"square(w[k]) * {DISTANCES}": (4, OpKind.MAX),
    f"{DISTANCES} / v[k]": (4, None),
    f"square(({A} - {B}) / v[k])": (4, OpKind.MAX),
    f"square(({A} - w[k]) - ({B} - w[k]))": (4, OpKind.MAX),
    "square(where(k < 20, a[m, k] - b[n, k], 0.0) - 1.0)": (4, OpKind.MAX),
    f"where(n <= m, {DISTANCES}, 0.0)": (4, OpKind.MAX),
    f"{DISTANCES} + square(c[m, k].cast(float32) - d[n, k].cast(float32))": (5, OpKind.MAX),
    f"{DISTANCES} - {A}": (4, None),
}
REFUSED = (
    f"square({A} - u[m]) * b[n, k]",  # a row has all axes
    f"square(({A} - {B}).cast(float16))",  # differences are rounded
    f"where(k <= m, {DISTANCES}, 0.0)",  # the condition belongs to both factors
    f"square({A} - {B} - x[m, n])",  # three parts
)


def program(body: str, size: int = 33, stated: str = ": float32", dtype: DType = DType.FLOAT16) -> TensorProgram:
    shapes = dict.fromkeys("abcdx", (size, size)) | dict.fromkeys("uvw", (size,))
    types = {name: TensorType(dtype, shape) for name, shape in shapes.items() if f"{name}[" in body}
    return parse(f"y[m, n]{stated} +=! {body}", types)


def split(compute: TensorProgram, *, allow: bool = True) -> tuple[TensorExpr, ...]:
    return split_linear_sums(inline_elementwise(compute), compute.types, allow_expanded_squares=allow)


def values(compute: TensorProgram, inputs: dict[str, NDArray[Any]]) -> NDArray[np.float64]:
    return np.asarray(evaluate(compute, inputs)["y"].wide, np.float64)


@pytest.mark.parametrize("body", FORMS)
def test_squares_of_differences_are_products_with_permission(body: str) -> None:
    compute, (count, clamp) = program(body), FORMS[body]
    statements = split(compute)
    assert len(statements) == count
    kinds = {getattr(node, "kind", None) for node in iter_subexpressions(statements[-1].body)}
    assert kinds & {OpKind.MAX, OpKind.MIN} == ({clamp} if clamp else set())
    assert len(split(compute, allow=False)) == 1
    inputs = random_inputs(compute, 7)
    if "v" in inputs:
        inputs["v"] = np.abs(inputs["v"]) + np.float16(1)
    np.testing.assert_allclose(values(expand_squares(compute), inputs), values(compute, inputs), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("body", REFUSED)
def test_other_squares_stay(body: str) -> None:
    assert len(split(program(body))) == 1


def test_differences_that_are_named_are_expanded() -> None:
    text = "d[m, n, k] = a[m, k] - b[n, k]; y[m, n] +=! d[m, n, k] * d[m, n, k]"
    half = TensorType(DType.FLOAT16, (32, 32))
    assert len(split(parse(text, {"a": half, "b": half}))) == 4


def test_short_sums_stay_together() -> None:
    short = TensorType(DType.FLOAT32, (64, 8))
    assert len(split(parse("y[m, n] +=! square(a[m, k] - b[n, k])", {"a": short, "b": short}))) == 1


@pytest.mark.parametrize(
    ("dtype", "k", "count"),
    [(DType.UINT8, 129, 4), (DType.UINT8, 130, 1), (DType.INT8, 512, 4), (DType.INT8, 513, 1), (DType.FLOAT16, 16, 1)],
)
def test_sums_of_bytes_are_expanded_as_far_as_float32_is_exact(dtype: DType, k: int, count: int) -> None:
    rows = TensorType(dtype, (9, k))
    compute = parse(f"y[m, n] +=! {DISTANCES}", {"a": rows, "b": rows})
    statements = split(compute, allow=False)
    assert len(statements) == count
    if count > 1:
        low, high = dtype.integer_range
        inputs = {"a": np.full((9, k), low, dtype.value), "b": np.full((9, k), high, dtype.value)}
        inputs["b"][0] = low
        exact = np.float64(low - high) ** 2 * k
        for each in (compute, replace(compute, statements=statements)):
            assert set(values(each, inputs)[0]) == {0.0, exact}


@pytest.mark.parametrize(
    ("dtype", "accumulator"),
    [(DType.INT8, DType.INT32), (DType.UINT8, DType.INT32), (DType.INT8, DType.INT64), (DType.UINT8, DType.UINT32)],
)
def test_squares_of_integers_are_exact_products(dtype: DType, accumulator: DType) -> None:
    rows = TensorType(dtype, (17, 40))
    cast = f".cast({accumulator.value})"
    compute = parse(f"y[m, n] +=! square(a[m, k]{cast} - b[n, k]{cast}) - 70000000 * a[m, k]{cast}", {"a": rows, "b": rows})
    statements = split(compute, allow=False)
    assert len(statements) == 4
    rng = np.random.default_rng(5)
    inputs = {name: rng.integers(*dtype.integer_range, rows.shape, dtype.value, endpoint=True) for name in "ab"}
    want, got = (evaluate(each, inputs)["y"].wide for each in (compute, replace(compute, statements=statements)))
    np.testing.assert_array_equal(got, want)  # modulo a power of two


@pytest.mark.parametrize("dtype", [DType.INT8, DType.INT16, DType.INT32])
def test_squares_of_integers_that_wrap_or_are_wide_stay(dtype: DType) -> None:
    rows = TensorType(dtype, (17, 40))
    body = "square(a[m, k] - b[n, k])" if dtype is DType.INT8 else "square(a[m, k].cast(int64) - b[n, k].cast(int64))"
    compute = parse(f"y[m, n]: int64 +=! {body}", {"a": rows, "b": rows})
    assert split(compute) == compute.statements


def neighbours(k: int = 64) -> dict[str, NDArray[Any]]:
    """Rows of large norms, of which some are equal and the others near each other."""
    rng = np.random.default_rng(2)
    centre = rng.uniform(900, 1000, k)
    a, b = (np.float16(centre + rng.uniform(-2, 2, (40, k))) for _ in range(2))
    b[:20] = a[:20]
    return {"a": a, "b": b}


@pytest.mark.parametrize("target", ["local", *(pytest.param(each, marks=pytest.mark.slow) for each in GPUS)])
def test_kernels_stay_in_their_bound_and_are_never_negative(target: str) -> None:
    inputs, text = neighbours(), f"y[m, n]: float32 +=! {DISTANCES}; z[m] <=! y[m, n]"
    types = {name: TensorType(DType.FLOAT16, array.shape) for name, array in inputs.items()}
    runtime = "auto" if target == "local" else "emulator"
    options: dict[str, Any] = {"select": "model", "top_k": 1, "runtime": runtime, "allow_expanded_squares": True}
    kernel = roller_svc.compile(text, inputs, target=target, outputs=["y", "z"], **options)
    result, compute = kernel.run(inputs), parse(text, types, ("y", "z"))
    nearest = roller_svc.compile(text, inputs, target=target, **options).run(inputs)  # stores no distances
    np.testing.assert_allclose(nearest["z"], result["z"], atol=2.0**-17 * 64e6)
    assert all((each >= 0).all() for each in (result["y"], nearest["z"]))
    assert verify_results(compute, inputs, result, allow_tf32=False, allow_expanded_squares=True).ok
    norms = np.sum(np.float64(inputs["a"]) ** 2, -1)[:, None] + np.sum(np.float64(inputs["b"]) ** 2, -1)
    right = np.sum((np.float64(inputs["a"])[:, None] - np.float64(inputs["b"])) ** 2, -1)
    assert (np.abs(result["y"] - right) <= 2 * (64 + 2) * 2.0**-24 * norms).all()  # as docs/api.md says


def test_the_bound_of_expanded_squares_is_relative_to_the_norms() -> None:
    inputs = neighbours()
    compute = parse(f"y[m, n]: float32 +=! {DISTANCES}", {n: TensorType(DType.FLOAT16, x.shape) for n, x in inputs.items()})
    right = np.sum((np.float64(inputs["a"])[:, None] - np.float64(inputs["b"])) ** 2, -1)
    norm = np.sum(np.float64(inputs["a"]) ** 2)
    for share, plain, expanded in ((0.0, True, True), (2.0**-26, False, True), (2.0**-12, False, False)):
        shifted = {"y": np.float32(right + share * norm)}
        assert verify_results(compute, inputs, shifted, allow_tf32=False).ok is plain
        assert verify_results(compute, inputs, shifted, allow_tf32=False, allow_expanded_squares=True).ok is expanded


def test_infinite_norms_have_no_bound_and_others_keep_theirs() -> None:
    inputs, text = neighbours(), f"y[m, n]: float32 +=! {DISTANCES}"
    inputs["a"][3, 5] = np.inf
    inputs["b"][7, 1] = np.nan
    kernel = roller_svc.compile(text, inputs, top_k=1, select="model", allow_expanded_squares=True)
    result = kernel.run(inputs)
    assert not np.isfinite(result["y"][3]).any()
    assert np.isnan(result["y"][:, 7]).all()
    types = {name: TensorType(DType.FLOAT16, array.shape) for name, array in inputs.items()}
    assert verify_results(parse(text, types), inputs, result, allow_tf32=False, allow_expanded_squares=True).ok
    result["y"][4, 4] = np.nan
    assert not verify_results(parse(text, types), inputs, result, allow_tf32=False, allow_expanded_squares=True).ok


ROWS = {"a": ("float16", (2048, 256)), "b": ("float16", (2048, 256))}
PRODUCT = f"y[m, n]: float32 +=! {A} * {B}"
READERS = {
    "alone": "",
    "root": "; z[m, n] = sqrt(y[m, n])",
    "kernel": "; z[m, n] = exp(-0.1 * y[m, n])",
    "nearest": "; z[m] <=! y[m, n]",
}


@pytest.mark.parametrize("target", [H200, "nvidia-a100-sxm-80gb", "amd-mi300x", CPU])
def test_distances_take_the_time_of_a_product(target: str) -> None:
    product = estimate_item(Item(PRODUCT, ROWS), [target], 1)[0].plans[0].estimate.seconds
    launches_s = 3 * hardware.load(target).limits.launch_overhead_s
    for more in READERS.values():
        item = Item(f"y[m, n]: float32 +=! {DISTANCES}{more}", ROWS, options={"allow_expanded_squares": True})
        assert estimate_item(item, [target], 1)[0].plans[0].estimate.seconds < 1.7 * product + launches_s


def test_attention_by_distances_is_one_kernel_on_matrix_units() -> None:
    text = """
    s[h, m, n]: float32 +=! square(q[h, m, d] - k[h, n, d]); g[h, m, n] = -0.1 * s[h, m, n]; x[h, m] >=! g[h, m, n];
    e[h, m, n] = exp(g[h, m, n] - x[h, m]); z[h, m] +=! e[h, m, n];
    y[h, m, d]: float32 +=! e[h, m, n].cast(`bfloat16`) * v[h, n, d]; o[h, m, d] = y[h, m, d] / z[h, m]
    """
    heads = TensorType(DType.BFLOAT16, (8, 1024, 64))
    compute = parse(text, dict.fromkeys("qkv", heads), ("o",))
    allowing = ScheduleConstraints(allow_expanded_squares=True)
    (plan,) = estimate_program(PartitionCache(compute), hardware.load(H200), 1, allowing).plans
    assert [each.program.family for each in plan.choices][-1] == "gpu/wgmma_attention"
    assert len(plan.choices) == 3


def test_without_permission_the_gain_is_named() -> None:
    item = Item(f"y[m, n]: float32 +=! {DISTANCES}", ROWS)
    for target in (H200, CPU):
        (slow,) = estimate_item(item, [target], 1)
        (fast,) = estimate_item(replace(item, options={"allow_expanded_squares": True}), [target], 1)
        (note,) = slow.notes
        assert note.startswith("y: squares of differences are not expanded; allow_expanded_squares: ")
        gain = slow.plans[0].estimate.seconds / fast.plans[0].estimate.seconds
        assert float(note.split("squares: ")[1].split()[0]) == pytest.approx(gain, abs=0.06)
        assert fast.notes == ()


def test_squares_that_only_few_elements_have_get_no_note() -> None:
    near = {"a": ("float32", (64, 3)), "b": ("float32", (64, 3))}
    assert estimate_item(Item("y[m, n] +=! square(a[m, k] - b[n, k])", near), [H200], 1)[0].notes == ()


def test_the_option_is_a_flag() -> None:
    wrong: Any = "yes"
    with pytest.raises(ArgumentError, match="allow_expanded_squares must be true or false"):
        roller_svc.estimate(PRODUCT, ROWS, [H200], allow_expanded_squares=wrong)
