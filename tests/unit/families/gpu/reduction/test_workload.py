"""Thread mapping of rows by their number, length and contiguous axis."""

from __future__ import annotations

import pytest

from roller_svc import hardware
from roller_svc.compiler.partition_cache import partition
from roller_svc.compiler.rank import rank
from roller_svc.families import prepare
from roller_svc.families.common.gpu.row_space import RowSpace
from roller_svc.frontend.lang import parse
from roller_svc.ir.dtype import DType
from roller_svc.ir.estimate import Candidate
from roller_svc.ir.group import GroupKind, KernelGroup
from roller_svc.ir.program import TensorType

A100 = "nvidia-a100-sxm-80gb"
SOFTMAX = "m[r] >=! x[r, c]; s[r] +=! exp(x[r, c] - m[r]); y[r, c] = exp(x[r, c] - m[r]) / s[r]"
Shapes = dict[str, tuple[DType, tuple[int, ...]]]


def group_of(expression: str, shapes: Shapes, target: str = A100) -> KernelGroup:
    program = parse(expression, {name: TensorType(dtype, shape) for name, (dtype, shape) in shapes.items()})
    (group,) = partition(program, hardware.load(target))
    return group


def best(expression: str, **shapes: tuple[int, ...]) -> Candidate:
    group = group_of(expression, {name: (DType.FLOAT32, shape) for name, shape in shapes.items()})
    hw = hardware.load(A100)
    (found,), _ = rank(group, hw, hw.unit_for(DType.FLOAT32), 1)
    return found


def rows_of(expression: str, shapes: Shapes) -> RowSpace:
    group, hw = group_of(expression, shapes), hardware.load(A100)
    _, workload = prepare(group, hw, hw.unit_for(DType.FLOAT32))
    assert isinstance(workload.facts, RowSpace)
    return workload.facts


def test_the_longer_a_row_the_more_threads_share_it() -> None:
    programs = [best("y[r] +=! x[r, c]", x=(1 << 22 >> k, 1 << k)).program for k in (3, 8, 14, 20)]
    lanes = [program.reduce_threads * program.split_k for program in programs]
    assert lanes == sorted(lanes)
    assert lanes[0] <= 2
    assert lanes[-1] >= 128


def test_one_long_row_is_split_over_the_grid_and_many_are_not() -> None:
    assert best("y[] +=! x[c]", x=(1 << 26,)).program.split_k >= 64
    assert best("y[r] +=! x[r, c]", x=(8192, 8192)).program.split_k == 1


def test_columns_stand_side_by_side_and_lanes_apart() -> None:
    program = best("y[c] +=! x[r, c]", x=(4096, 4096)).program
    assert program.thread["c"] == 4
    assert program.reduce_threads > 1


@pytest.mark.parametrize(("columns", "whole"), [(1024, True), (16384, True), (1 << 18, False)])
def test_a_row_stays_in_registers_where_it_fits(columns: int, whole: bool) -> None:
    program = best(SOFTMAX, x=(4096, columns)).program
    assert (program.block["c"] >= columns) is whole


def test_columns_of_a_matrix_share_the_vector() -> None:
    program = best("y[n] +=! x[k] * w[n, k]", x=(8192,), w=(8192, 8192)).program
    assert program.thread["n"] > 1
    assert program.thread["k"] == 4


@pytest.mark.parametrize(("m", "kind"), [(1, GroupKind.NEST), (7, GroupKind.NEST), (8, GroupKind.CONTRACTION)])
def test_thin_products_are_streamed_on_gpus(m: int, kind: GroupKind) -> None:
    shapes: Shapes = {"x": (DType.FLOAT16, (m, 512)), "w": (DType.FLOAT16, (256, 512))}
    assert group_of("y[m, n] +=! x[m, k] * w[n, k]", shapes).kind is kind


def test_runs_are_sixteen_bytes_also_of_packed_words() -> None:
    assert rows_of("y[r] +=! x[r, c]", {"x": (DType.FLOAT16, (64, 4096))}).vector_elems == 8
    assert rows_of("y[r] +=! x[r, c]", {"x": (DType.FLOAT32, (64, 4098))}).vector_elems == 2
    packed = "y[n] +=! x[k] * (q[n, k / 8] >> (k % 8 * 4)).call(`bitwise_and`, [15]) where k in 4096"
    shapes: Shapes = {"x": (DType.FLOAT32, (4096,)), "q": (DType.INT32, (64, 512))}
    assert rows_of(packed, shapes).vector_elems == 32


def test_passes_count_what_one_pass_cannot_do() -> None:
    streamed = rows_of(SOFTMAX, {"x": (DType.FLOAT32, (4096, 1 << 18))})
    assert [access.num_passes for access in streamed.read] == [2]  # maximum with sum, then quotients
    assert streamed.num_reductions == 1
