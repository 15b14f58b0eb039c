"""Rows of matrices that data selects: the grouped GEMM, its meaning, its kernels, when it pays."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from sampling import every, slow

import roller_svc
from roller_svc import hardware
from roller_svc.compiler.partition_cache import Partition, PartitionCache
from roller_svc.compiler.plans import rank_best_partition
from roller_svc.frontend.parse import parse
from roller_svc.fusion.grouped_gemm import group_rows
from roller_svc.fusion.partition import stored_types
from roller_svc.ir.dtype import DType
from roller_svc.ir.group import GroupKind
from roller_svc.ir.program import StatementKind, TensorExpr, TensorProgram, TensorType
from roller_svc.semantics.compare import agrees
from roller_svc.semantics.inputs import random_inputs
from roller_svc.semantics.interpreter import Value, evaluate

Types = dict[str, tuple[str, tuple[int, ...]]]
HALF = "float16"
CASES: dict[str, tuple[str, Types]] = {
    "rows": ("y[t, n]: float32 +=! x[t, k] * w[e[t], n, k]",
             {"x": (HALF, (37, 64)), "w": (HALF, (5, 40, 64)), "e": ("int32", (37,))}),
    "several chunks and blocks": ("y[t, n] +=! x[t, k] * w[e[t], k, n]",
                                  {"x": (HALF, (300, 32)), "w": (HALF, (3, 32, 24)), "e": ("int64", (300,))}),
    "two matrices of a row": ("y[t, j, n] +=! x[t, k] * w[e[t, j], n, k]",
                              {"x": (HALF, (20, 32)), "w": (HALF, (4, 24, 32)), "e": ("int32", (20, 2))}),
    "their weighted sum": ("y[t, n] +=! p[t, j] * x[t, j, k] * w[e[t, j], n, k]",
                           {"p": ("float32", (20, 2)), "x": (HALF, (20, 2, 32)), "w": (HALF, (4, 24, 32)),
                            "e": ("int32", (20, 2))}),
    "scales and maps": (
        "y[t, n]: float32 +=! x[t, k] * (w[e[t], n, k].cast(`float16`) * s[e[t], n]);"
        " h[t, n] = y[t, n] * 0.5; z[n, t] = relu(h[t, n] + b[n] + r[t, n])",
        {"x": (HALF, (50, 32)), "w": ("int8", (7, 24, 32)), "s": (HALF, (7, 24)), "e": ("int32", (50,)), "b": ("float32", (24,)),
         "r": ("float32", (50, 24))},
    ),
    "indices in range": ("y[t, n] +=! x[t, k] * w[min(max(e[t], 0), 3), n, k]",
                         {"x": (HALF, (21, 32)), "w": (HALF, (4, 24, 32)), "e": ("int32", (21,))}),
    "products that one map reads": (
        "g[t, n] +=! x[t, k] * v[e[t], k, n]; u[i, j] +=! x[i, k] * w[e[i], k, j]; h[t, n] = silu(g[t, n]) * u[t, n];"
        " z[t, n] = h[t, n] + u[t, n]",
        {"x": (HALF, (37, 32)), "v": (HALF, (5, 32, 24)), "w": (HALF, (5, 32, 24)), "e": ("int32", (37,))},
    ),
    "a product of a product": (
        "g[t, n]: float32 +=! x[t, k] * v[e[t], k, n]; h[t, n] = relu(g[t, n]).cast(`float16`);"
        " y[i, j]: float32 +=! h[i, k] * w[e[i], k, j]; z[i, j] = y[i, j] * p[i]",
        {"x": (HALF, (37, 32)), "v": (HALF, (5, 32, 24)), "w": (HALF, (5, 24, 40)), "e": ("int32", (37,)),
         "p": ("float32", (37,))},
    ),
    "scales in float32": (
        "y[t, n] +=! x[t, k].cast(`float32`) * (w[e[t], k, n].cast(`float32`) * s[e[t], n] * r[e[t]]);"
        " z[t, n] = relu(y[t, n] * p[t])",
        {"x": (HALF, (50, 64)), "w": ("float8_e4m3fn", (7, 64, 32)), "s": ("float32", (7, 32)), "r": ("float32", (7,)),
         "p": ("float32", (50,)), "e": ("int32", (50,))},
    ),
    "scales of a weighted sum": (
        "y[t, n] +=! p[t, j] * x[t, j, k] * (w[e[t, j], n, k].cast(`float32`) * s[e[t, j], n])",
        {"p": ("float32", (20, 2)), "x": (HALF, (20, 2, 32)), "w": ("int8", (4, 24, 32)), "s": ("float32", (4, 24)),
         "e": ("int32", (20, 2))},
    ),
    "scales of blocks": (
        "y[t, n] +=! x[t, k].cast(`float32`) * (w[e[t], n, k].cast(`float32`) * s[e[t], n // 16, k // 32])",
        {"x": (HALF, (50, 64)), "w": ("float8_e4m3fn", (7, 32, 64)), "s": ("float32", (7, 2, 2)), "e": ("int32", (50,))},
    ),
    "int4 with scales of groups": (
        "y[t, n] +=! x[t, k].cast(`float32`) * ((bitwise_and(w[e[t], k // 8, n] >> k % 8 * 4, 15) - 8).cast(`float32`)"
        " * s[e[t], k // 32, n]) where k in 64",
        {"x": (HALF, (50, 64)), "w": ("int32", (7, 8, 32)), "s": ("float32", (7, 2, 32)), "e": ("int32", (50,))},
    ),
    "few rows": ("y[t, n] +=! x[t, k] * w[e[t], n, k]",
                {"x": (HALF, (9, 32)), "w": (HALF, (4, 24, 32)), "e": ("int32", (9,))}),
}  # fmt: skip


def program(name: str) -> TensorProgram:
    text, types = CASES[name]
    return parse(text, {tensor: TensorType(DType(dtype), shape) for tensor, (dtype, shape) in types.items()})


def arrays_of(compute: TensorProgram, *, matrices: int) -> dict[str, np.ndarray]:
    arrays = dict(random_inputs(compute, seed=3))
    arrays["e"] = np.random.default_rng(3).integers(0, matrices, arrays["e"].shape).astype(arrays["e"].dtype)
    return arrays


def rewritten(compute: TensorProgram, *, scale_sums: bool = False) -> tuple[TensorExpr, ...]:
    return group_rows(compute.statements, stored_types(compute), {o.tensor for o in compute.outputs}, scale_sums=scale_sums)


def evaluate_grouped(compute: TensorProgram, arrays: dict[str, np.ndarray], *, scale_sums: bool = False) -> dict[str, Value]:
    """Evaluate the grouped GEMM. Scatters, which have no target, get one that is filled as kernels fill it."""
    statements = rewritten(compute, scale_sums=scale_sums)
    assert len(statements) > len(compute.statements)
    scatters = [s for s in statements if s.kind is StatementKind.SCATTER]
    fills = {s.output: np.full(s.type.shape, np.iinfo(np.int32).min if s.combine else 7, s.type.dtype.value) for s in scatters}
    statements = tuple(replace(s, target=f"{s.output}.fill") if s in scatters else s for s in statements)
    inputs = (*compute.inputs, *((f"{s.output}.fill", s.type) for s in scatters))
    filled = arrays | {f"{name}.fill": fill for name, fill in fills.items()}
    return evaluate(replace(compute, statements=statements, inputs=inputs), filled)


def is_grouped(groups: Partition) -> bool:
    return any(name.endswith(".slot") for group in groups for name, _ in group.stored)


@pytest.mark.parametrize("name", CASES)
def test_the_result_is_the_same(name: str) -> None:
    compute = program(name)
    arrays = arrays_of(compute, matrices=CASES[name][1]["w"][1][0])
    for scale_sums in (False, True):
        found = evaluate_grouped(compute, arrays, scale_sums=scale_sums)
        for output, value in evaluate(compute, arrays).items():
            np.testing.assert_allclose(found[output].wide, value.wide, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["products that one map reads", "a product of a product"])
def test_products_of_the_same_selection_share_their_sort(name: str) -> None:
    outputs = [statement.output for statement in rewritten(program(name))]
    assert [output for output in outputs if output.endswith(".slot")] == ["g.slot"]
    assert len([output for output in outputs if output.endswith(".grouped")]) == 2


@pytest.mark.parametrize("selected", [[0] * 300, [2] * 300, [0] * 299 + [2], list(range(3)) * 100])
def test_any_selection_has_enough_blocks(selected: list[int]) -> None:
    compute = program("several chunks and blocks")
    arrays = arrays_of(compute, matrices=3) | {"e": np.array(selected, np.int64)}
    expected, found = evaluate(compute, arrays), evaluate_grouped(compute, arrays)
    np.testing.assert_allclose(found["y"].wide, expected["y"].wide, rtol=1e-5, atol=1e-5)


def test_maps_and_scatter_are_the_epilogue() -> None:
    partitions = PartitionCache(program("scales and maps")).partitions(hardware.load("nvidia-h200-sxm"))
    *_, last = next(filter(is_grouped, partitions))
    assert last.kind is GroupKind.CONTRACTION
    assert [s.kind for s in last.statements] == [StatementKind.REDUCE, StatementKind.SCATTER]
    assert [name for name, _ in last.stored] == ["z"]


@pytest.mark.parametrize(
    ("operand", "is_scaled_after"),
    [("float16", True), ("float8_e4m3fn", True), ("bfloat16", False), ("float32", False)],  # False: sums may exceed float32
)
def test_scales_of_matrices_are_factors_of_sums_that_stay_in_range(operand: str, is_scaled_after: bool) -> None:
    text, types = CASES["scales in float32"]
    inputs = {name: TensorType(DType(dtype), shape) for name, (dtype, shape) in types.items()}
    compute = parse(text, inputs | {"x": TensorType(DType(operand), types["x"][1])})
    (product,) = (each for each in rewritten(compute, scale_sums=True) if {"x", "w"} <= set(each.reads_tensors))
    assert ({"s", "r"}.isdisjoint(product.reads_tensors)) is is_scaled_after


@pytest.mark.parametrize(
    "text",
    [
        "y[t, n] +=! x[t, k] * w[0, n, k]",  # one matrix
        "y[t, n] >=! x[t, k] * w[e[t], n, k]",  # no sum
        "y[t, n] +=! x[t, k] * w[e[t], n, k] * v[t, n]",  # a factor of both
        "y[t, n] +=! x[t, z] * w[e[t], n, z + e[t] * 0]",  # rows select more than the matrix
        "y[t, k] +=! w[e[t], n, k]",  # no rows
    ],
)
def test_others_stay(text: str) -> None:
    types = {"x": (20, 32), "w": (4, 32, 32), "v": (20, 32)}
    inputs = {name: TensorType(DType.FLOAT16, shape) for name, shape in types.items()} | {"e": TensorType(DType.INT32, (20,))}
    compute = parse(text, {name: type_ for name, type_ in inputs.items() if f"{name}[" in text})
    assert rewritten(compute) == compute.statements


@pytest.mark.slow
@pytest.mark.emulator
@pytest.mark.parametrize("target", every(2, ["nvidia-h200-sxm", "nvidia-a100-sxm-80gb", "amd-mi250x"]))
@pytest.mark.parametrize("name", [slow(name) if number else name for number, name in enumerate(CASES)])
def test_kernels_have_the_values_of_the_statement(name: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    partitions = PartitionCache.partitions
    monkeypatch.setattr(PartitionCache, "partitions", lambda *args: tuple(filter(is_grouped, found := partitions(*args))) or found)
    text, types = CASES[name]
    kernel = roller_svc.compile(text, inputs=types, target=target, select="model", top_k=1, runtime="emulator")
    compute = program(name)
    arrays = arrays_of(compute, matrices=types["w"][1][0])
    assert agrees(compute, kernel.run(arrays), evaluate(compute, arrays)).ok


@pytest.mark.emulator
def test_an_index_out_of_range_reads_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    partitions = PartitionCache.partitions
    monkeypatch.setattr(PartitionCache, "partitions", lambda *args: tuple(filter(is_grouped, found := partitions(*args))) or found)
    text, types = CASES["rows"]
    kernel = roller_svc.compile(text, inputs=types, target="nvidia-a100-sxm-80gb", select="model", top_k=1, runtime="emulator")
    arrays = arrays_of(program("rows"), matrices=5)
    arrays["e"][[3, 30]] = (-1, 5)
    y = kernel.run(arrays)["y"]
    valid = np.delete(np.arange(37), [3, 30])
    expected = np.einsum("tk,tnk->tn", arrays["x"][valid].astype(np.float64), arrays["w"][arrays["e"][valid]].astype(np.float64))
    np.testing.assert_array_equal(y[[3, 30]], 0)
    np.testing.assert_allclose(y[valid], expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("operand", "is_narrow"), [("float16", True), ("bfloat16", False)])  # False: as scales of float8
def test_int4_in_float32_is_multiplied_as_halves(operand: str, is_narrow: bool) -> None:
    text = CASES["int4 with scales of groups"][0].replace("// 32", "// 128").replace("64", "1024")
    shapes = {"x": (operand, (1024, 1024)), "w": ("int32", (16, 128, 512)), "s": ("float32", (16, 8, 512)), "e": ("int32", (1024,))}
    inputs = {name: TensorType(DType(dtype), shape) for name, (dtype, shape) in shapes.items()}
    best = rank_best_partition(parse(text, inputs), hardware.load("nvidia-h200-sxm"), 1)
    units = [candidates[0].program.unit for candidates in best.candidates]
    assert is_grouped(best.groups)
    assert any(unit.is_matrix for unit in units) is is_narrow


@pytest.mark.parametrize(("rows", "pays"), [(1024, True), (8, False)])
def test_the_model_chooses(rows: int, pays: bool) -> None:
    types = {"x": (rows, 1024), "w": (16, 512, 1024)}
    inputs = {name: TensorType(DType.BFLOAT16, shape) for name, shape in types.items()} | {"e": TensorType(DType.INT32, (rows,))}
    best = rank_best_partition(parse("y[t, n]: float32 +=! x[t, k] * w[e[t], n, k]", inputs), hardware.load("nvidia-h200-sxm"), 1)
    assert is_grouped(best.groups) is pays
