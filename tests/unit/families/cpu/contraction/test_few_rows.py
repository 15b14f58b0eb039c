"""Products of few rows with a constant matrix: packed once, streamed by the only panel of A."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cases_cpu import AVX2, hinting, skip_where_features_lack

import roller_svc
from roller_svc import hardware
from roller_svc.compiler.lower_and_emit import lower
from roller_svc.compiler.partition_cache import Partition, PartitionCache
from roller_svc.compiler.plans import RankedPartition, rank_partitions
from roller_svc.frontend.lang import parse
from roller_svc.ir.dtype import DType
from roller_svc.ir.group import GroupKind
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.program import TensorProgram, TensorType
from roller_svc.ir.schedule import Prefetch, iter_nodes

AVX512, H200 = (hardware.load(name) for name in ("cpu-x86-avx512", "nvidia-h200-sxm"))
LAYOUTS = {"rows": "w[n, k]", "columns": "w[k, n]"}


def text(layout: str) -> str:
    """A product with bias and relu."""
    return f"t[m, n] +=! x[m, k] * {LAYOUTS[layout]}; y[m, n] = max(t[m, n] + b[n], 0)"


def shapes(rows: int, columns: int, depth: int, layout: str) -> dict[str, tuple[int, ...]]:
    return {"x": (rows, depth), "w": (columns, depth) if layout == "rows" else (depth, columns), "b": (columns,)}


def product(rows: int, columns: int, depth: int, layout: str = "columns", constants: tuple[str, ...] = ("w",)) -> TensorProgram:
    types = {name: TensorType(DType.FLOAT32, shape) for name, shape in shapes(rows, columns, depth, layout).items()}
    return replace(parse(text(layout), types), constants=constants)


def kinds(program: TensorProgram, hw: HardwareSpec) -> list[list[GroupKind]]:
    found: tuple[Partition, ...] = PartitionCache(program).partitions(hw)
    return [[group.kind for group in groups] for groups in found]


def packed(program: TensorProgram, hw: HardwareSpec) -> RankedPartition:
    """The partition whose product is a contraction."""
    ranked = rank_partitions(PartitionCache(program), hw, 1)
    return next(each for each in ranked if each.groups[0].kind is GroupKind.CONTRACTION)


def seconds(program: TensorProgram, hw: HardwareSpec) -> float:
    return packed(program, hw).candidates[0][0].ranking_seconds


def prefetch_distances(program: TensorProgram, hw: HardwareSpec) -> set[int]:
    """The distances of prefetches of packed columns."""
    ranked = packed(program, hw)
    (tree,) = lower(ranked.groups[0], ranked.candidates[0][0].program, hw)
    return {n.distance for n in iter_nodes(tree.body) if isinstance(n, Prefetch) and n.tensor == ".b_packed"}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_constant_matrix_may_be_packed(rows: int, layout: str) -> None:
    assert kinds(product(rows, 64, 32, layout), AVX512) == [[GroupKind.CONTRACTION], [GroupKind.NEST]]


def test_other_products_keep_one_partition() -> None:
    assert kinds(product(1, 64, 32, constants=()), AVX512) == [[GroupKind.NEST]]
    assert kinds(product(1, 64, 32, constants=("x", "b")), AVX512) == [[GroupKind.NEST]]
    assert kinds(product(1, 4, 32), AVX512) == [[GroupKind.NEST]], "few columns fill no vector"
    assert kinds(product(8, 64, 32), AVX512) == [[GroupKind.CONTRACTION]]
    assert len(kinds(product(1, 64, 32), H200)) == 1


@pytest.mark.parametrize("target", [AVX2, AVX512], ids=lambda hw: hw.id)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(1, 256, 300), (2, 100, 77), (3, 9, 1500)], ids=str)
def test_results(shape: tuple[int, int, int], layout: str, target: HardwareSpec) -> None:
    skip_where_features_lack(target)
    rows, columns, depth = shape
    random = np.random.default_rng(0)
    x = random.standard_normal((rows, depth), dtype=np.float32)
    w = random.standard_normal((depth, columns), dtype=np.float32)
    b = random.standard_normal(columns, dtype=np.float32)
    inputs = {name: ("float32", extents) for name, extents in shapes(rows, columns, depth, layout).items()}
    kernel = roller_svc.compile(text(layout), inputs, target=target.id, select="model", constants=("w",))
    ready = kernel.prepare(w=np.ascontiguousarray(w.T) if layout == "rows" else w)
    want = np.maximum(x.astype(np.float64) @ w + b, 0)
    for _ in range(2):
        np.testing.assert_allclose(ready(x=x, b=b)["y"], want, rtol=0, atol=1e-5 * depth)
    is_packed = kernel.candidates[0].program.family == "cpu/contraction"
    assert any(launch.is_prepack for launch in kernel.launches) == is_packed


def test_rows_up_to_a_panel_take_as_long_as_the_matrix_takes_to_arrive() -> None:
    """4 MiB come from L3, whatever the rows; four rows of A take more arithmetic, not more bytes."""
    hw = replace(AVX512, num_cores=1)
    one, three = (seconds(product(rows, 1024, 1024), hw) for rows in (1, 3))
    least = (4 << 20) / hw.level("l3").bandwidth_bytes_per_s
    assert least < one <= three < 1.1 * one
    assert one < 1.3 * least


def test_packed_columns_are_prefetched_where_l2_cannot_hold_them() -> None:
    hw = hinting(AVX512)
    assert prefetch_distances(product(1, 1024, 1024), hw) == {512}, "2 KiB"
    assert prefetch_distances(product(1, 256, 1024), hw) == set(), "1 MiB is in L2"
    assert prefetch_distances(product(1, 1024, 1024), hinting(AVX512, 0.8)) == set()


@pytest.mark.parametrize(("dtype", "wide"), [("float32", "float64"), ("int32", "int64")])
def test_casts_that_change_nothing_are_packed_on_first_use(dtype: str, wide: str) -> None:
    kernel = roller_svc.compile(
        f"C[m, n] +=! A[m, k] * B[k, n].cast(`{wide}`).cast(`{dtype}`)",
        {"A": (dtype, (8, 600)), "B": (dtype, (600, 512))},
        target="local",
        select="model",
    )
    a, b = (np.arange(rows * columns).reshape(rows, columns) % 7 for rows, columns in ((8, 600), (600, 512)))
    np.testing.assert_array_equal(kernel(A=a.astype(dtype), B=b.astype(dtype))["C"], a @ b)
