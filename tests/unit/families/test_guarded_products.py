"""Products whose guard masks whole k-tiles: kernels of every unit visit the others only, and have the right values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import roller_svc
from roller_svc import hardware
from roller_svc.compiler.backends import load_emulated
from roller_svc.compiler.lower_and_emit import emit_plan
from roller_svc.compiler.partition_cache import PartitionCache
from roller_svc.compiler.plans import estimate_program, rank_partitions
from roller_svc.compiler.rank import rank_units
from roller_svc.compiler.serialize import interpret_space
from roller_svc.families.common.gpu.matrix.guarded_k_tiles import COUNT
from roller_svc.families.matching import unbounded_view
from roller_svc.frontend.parse import parse
from roller_svc.ir.constraints import NO_CONSTRAINTS, OpClass, ScheduleConstraints
from roller_svc.ir.dtype import DType
from roller_svc.ir.group import GroupKind, KernelGroup
from roller_svc.ir.kernel import CompiledKernel
from roller_svc.ir.printer import text
from roller_svc.ir.program import TensorProgram, TensorType
from roller_svc.ir.report import Plan
from roller_svc.semantics.inputs import random_inputs
from roller_svc.semantics.interpreter import evaluate

M, N, K = 104, 72, 200
GUARDS = {
    "causal": "k <= m",
    "upper": "m <= k",
    "band": "k <= m + 9 and m - k < 20",
    "columns": "n + 3 < k",
    "rows without products": "k + 90 < m",
}
TARGETS = {
    "wgmma": ("nvidia-h200-sxm", DType.FLOAT16, OpClass.WGMMA),
    "mma.sync": ("nvidia-a100-sxm-80gb", DType.FLOAT16, OpClass.MMA),
    "mma.sync of bytes": ("nvidia-a100-sxm-80gb", DType.INT8, OpClass.MMA),
    "mfma": ("amd-mi250x", DType.BFLOAT16, OpClass.MMA),
    "fma": ("nvidia-a100-sxm-80gb", DType.FLOAT32, OpClass.SIMT),
}


def guarded(guard: str, dtype: DType, size: tuple[int, int, int] = (M, N, K), stated: str = "") -> TensorProgram:
    m, n, k = size
    product, zero = "a[m, k] * b[k, n]", "0.0"
    if not dtype.is_float:
        product, zero = "a[m, k].cast(int32) * b[k, n].cast(int32)", "0"
    for part in guard.split(" and "):
        product = f"where({part}, {product}, {zero})"
    return parse(f"y[m, n]{stated} +=! {product}", {"a": TensorType(dtype, (m, k)), "b": TensorType(dtype, (k, n))})


def small_integers(compute: TensorProgram) -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(5)
    return {name: rng.integers(-4, 5, each.shape).astype(random_inputs(compute, 1)[name].dtype) for name, each in compute.inputs}


def right(compute: TensorProgram) -> NDArray[Any]:
    return np.asarray(evaluate(compute, small_integers(compute))["y"].wide, np.float64)


def best_plan(groups: tuple[KernelGroup, ...], target: str, op: OpClass | None, split_k: int) -> Plan:
    hw, wanted = hardware.load(target), ScheduleConstraints(op_class=op, tiles=(("split_k", split_k),))
    ranked = (rank_units(g, hw, 1, wanted if g.kind is GroupKind.CONTRACTION else NO_CONSTRAINTS)[0] for g in groups)
    return Plan(tuple(candidates[0] for candidates in ranked))


def run_emulated(
    compute: TensorProgram,
    target: str,
    op: OpClass | None,
    inputs: dict[str, NDArray[Any]],
    *,
    is_copied: bool = False,
    split_k: int = 1,
) -> tuple[str, NDArray[Any]]:
    """Return the text and the result of the best plan, with or without a copy of the operand under the guard."""
    cache, hw = PartitionCache(compute), hardware.load(target)
    groups = next(iter(cache.partitions(hw)))
    if is_copied:
        groups = next(iter(cache.with_operand_copies(groups, hw, NO_CONSTRAINTS)))
    source = emit_plan(best_plan(groups, target, op, split_k), compute, groups, hw)
    module = load_emulated(CompiledKernel(source, b"", "", ()), 1, races=True)
    return source.text, np.asarray(module.run(inputs)["y"], np.float64)


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("unit", "guard"),
    [
        ("wgmma", "causal"),
        ("wgmma", "columns"),
        ("mma.sync", "band"),
        ("mma.sync", "rows without products"),
        ("mma.sync of bytes", "upper"),
        ("mfma", "causal"),
        ("fma", "columns"),
    ],
)
def test_kernels_of_guarded_products_are_right(unit: str, guard: str) -> None:
    target, dtype, op = TARGETS[unit]
    compute = guarded(GUARDS[guard], dtype, stated=": float32" if dtype.is_float else "")
    source, result = run_emulated(compute, target, op, small_integers(compute))
    assert COUNT.removeprefix(".") in source
    np.testing.assert_array_equal(result, right(compute))


@pytest.mark.emulator
def test_parts_of_a_split_k_have_their_own_bounds() -> None:
    compute = guarded(GUARDS["band"], DType.FLOAT16, stated=": float32")
    source, result = run_emulated(compute, "nvidia-a100-sxm-80gb", OpClass.MMA, small_integers(compute), split_k=2)
    assert "k_piece_ * -" in source
    np.testing.assert_array_equal(result, right(compute))


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("unit", "tiles", "launches"),
    [
        ("wgmma", {"cluster_k": 2}, 1),
        pytest.param("wgmma", {"blocks": 2}, 1, marks=pytest.mark.slow),
        pytest.param("wgmma", {"split_k": 2, "blocks": 2}, 2, marks=pytest.mark.slow),
        ("mma.sync", {"stream_k": 3}, 2),
    ],
)
def test_kernels_of_all_k_tiles_share_them_evenly(unit: str, tiles: dict[str, int], launches: int) -> None:
    target, dtype, op = TARGETS[unit]
    compute, hw = guarded("k <= m", dtype, (72, 40, 136), ": float32"), hardware.load(target)
    (group,) = next(iter(PartitionCache(compute).partitions(hw)))
    wanted = ScheduleConstraints(op_class=op, tiles=tuple(tiles.items()))
    (best, *_), _ = rank_units(unbounded_view(group), hw, 1, wanted)
    source = emit_plan(Plan((best,)), compute, (group,), hw)
    assert COUNT.removeprefix(".") not in source.text
    assert len(source.launches) == launches
    result = load_emulated(CompiledKernel(source, b"", "", ()), 1, races=True).run(small_integers(compute))["y"]
    np.testing.assert_array_equal(np.asarray(result, np.float64), right(compute))


def test_a_demand_that_bounds_exclude_is_met_without_them() -> None:
    compute, hw = guarded("k <= m", DType.FLOAT16), hardware.load("nvidia-a100-sxm-80gb")
    (group,) = next(iter(PartitionCache(compute).partitions(hw)))
    (best, *_), _ = rank_units(group, hw, 1, ScheduleConstraints(op_class=OpClass.MMA, tiles=(("stream_k", 2),)))
    assert best.program.space == unbounded_view(group).space != group.space
    (found,) = PartitionCache(compute).partition_of_plan(Plan((best,)), hw)
    assert found.space == group.space
    assert interpret_space(found, best.program.space) == "contraction of all k-tiles"


@pytest.mark.emulator
def test_a_copied_operand_under_a_guard_is_loaded_by_tma_in_part() -> None:
    compute = guarded(GUARDS["causal"], DType.FLOAT16, (256, 256, 320), ": float32")
    source, result = run_emulated(compute, "nvidia-h200-sxm", OpClass.WGMMA, small_integers(compute), is_copied=True)
    assert COUNT.removeprefix(".") in source
    np.testing.assert_array_equal(result, right(compute))


@pytest.mark.parametrize(
    ("dtype", "constants", "guard"),
    [
        ("float32", (), "band"),
        ("float32", (), "rows without products"),
        ("float64", ("b",), "columns"),
        ("float32", ("a",), "causal"),
        ("int8", (), "upper"),
    ],
)
def test_cpu_kernels_of_guarded_products_are_right(dtype: str, constants: tuple[str, ...], guard: str) -> None:
    compute = guarded(GUARDS[guard], DType(dtype), (M, N, 700))
    inputs = small_integers(compute)
    kernel = roller_svc.compile(text(compute), inputs, target="cpu-x86-avx2", select="model", top_k=1, constants=constants)
    np.testing.assert_array_equal(np.asarray(kernel(**inputs)["y"], np.float64), right(compute))


@pytest.mark.emulator
def test_values_that_only_left_out_tiles_multiply_do_not_count() -> None:
    compute = guarded(GUARDS["causal"], DType.FLOAT32)
    inputs = small_integers(compute)
    inputs["b"][M:] = np.nan  # no row of results has these points
    _, result = run_emulated(compute, "nvidia-a100-sxm-80gb", OpClass.SIMT, inputs)
    # the last tile of some rows reaches beyond M: there NaN is multiplied by zero
    np.testing.assert_array_equal(result[:64], right(compute)[:64])


@pytest.mark.parametrize("target", ["nvidia-h200-sxm", "nvidia-a100-sxm-80gb", "amd-mi300x", "cpu-x86-avx512"])
def test_estimates_of_guarded_products_follow_their_points(target: str) -> None:
    size = (4096,) * 3 if target != "cpu-x86-avx512" else (1024,) * 3
    dtype = DType.FLOAT16 if target != "cpu-x86-avx512" else DType.FLOAT32

    def seconds(guard: str) -> float:
        return estimate_program(PartitionCache(guarded(guard, dtype, size)), hardware.load(target)).plans[0].estimate.seconds

    plain, band = seconds("k >= 0"), seconds("k <= m and m - k < 256")
    triangular = [seconds(guard) for guard in ("k <= m", "k >= m", "n <= k", "k <= n")]
    assert max(triangular) < 0.85 * plain
    assert seconds(f"k < {size[0] - 100}") <= 1.001 * plain
    assert max(triangular) < 1.1 * min(triangular)
    assert band < 0.4 * plain


def test_bounded_products_on_warpgroups_have_neither_persistent_blocks_nor_clusters_nor_stream_k() -> None:
    (ranked, *_) = rank_partitions(
        PartitionCache(guarded("k <= m", DType.FLOAT16, (4096, 4096, 4096))), hardware.load("nvidia-h200-sxm"), 8
    )
    programs = [candidate.program for candidates in ranked.candidates for candidate in candidates]
    pipelines = [program.pipeline for program in programs if program.space.k_bounds is not None]
    assert pipelines
    assert {(p.persistent_blocks, p.cluster, p.cluster_k, p.stream_k_blocks, p.pingpong) for p in pipelines} == {
        (0, (1, 1), 1, 0, False)
    }
