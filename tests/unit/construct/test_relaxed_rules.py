"""Problems whose tiles have no number of tasks that a CPU's rules prefer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from roller_svc.compiler.partition_cache import PartitionCache
from roller_svc.compiler.plans import rank_best_partition, rank_partitions
from roller_svc.frontend.parse import parse
from roller_svc.hardware import load
from roller_svc.ir.dtype import DType
from roller_svc.ir.program import TensorType

Shapes = dict[str, tuple[int, ...]]
AVX2 = load("cpu-x86-avx2")


@pytest.mark.parametrize(
    ("expression", "shapes", "cores"),
    [
        ("y = softmax(x, axis=1)", {"x": (17, 1025)}, 48),  # fewer rows than cores, in one partial wave
        ("y = layer_norm(x, w, b)", {"x": (2049, 13), "w": (13,), "b": (13,)}, 64),
        ("y = reduce_max(x, axis=[1, 2, 3])", {"x": (3, 17, 2, 2049)}, 48),
        ("y = cumsum(x, axis=1)", {"x": (31, 60)}, 48),
        ("y = transpose(x, permutation=[0, 2, 1])", {"x": (63, 63, 37)}, 48),
        ("y = transpose(x, permutation=[3, 0, 2, 1])", {"x": (15, 37, 21, 31)}, 12),  # 88, 44, 16 or 11 tasks, not 12
        ("y = depthwise_conv2d(x, w, layout=NHWC, stride=3)", {"x": (1, 30, 30, 33), "w": (33, 1, 3, 3)}, 96),
    ],
)
def test_any_number_of_cores_has_a_tile(expression: str, shapes: Shapes, cores: int) -> None:
    hw = replace(AVX2, num_cores=cores)
    program = parse(expression, {name: TensorType(DType.FLOAT32, shape) for name, shape in shapes.items()})
    for partition in rank_partitions(PartitionCache(program), hw, 1):
        for candidates in partition.candidates:
            assert candidates


def test_partial_wave_keeps_wide_register_tiles() -> None:
    hw = replace(load("cpu-x86-avx512"), num_cores=48)
    types = {"A": TensorType(DType.FLOAT32, (100, 200)), "B": TensorType(DType.FLOAT32, (200, 128))}
    best = rank_best_partition(parse("C[m, n] +=! A[m, k] * B[k, n]", types), hw, 1).candidates[0][0].program
    rows, columns, _ = (extent for _, extent in best.thread.extents)
    assert rows * columns >= 64, best
