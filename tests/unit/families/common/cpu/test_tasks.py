"""Number of tasks of a CPU kernel's launch."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from roller_svc.compiler.partition_cache import partition
from roller_svc.compiler.rank import rank
from roller_svc.frontend.lang.parser import parse
from roller_svc.hardware import load
from roller_svc.ir.dtype import DType
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.program import AxisKind, TensorType


def on(cores: int) -> HardwareSpec:
    return replace(load("cpu-x86-avx512"), num_cores=cores)


def tasks(text: str, hw: HardwareSpec, **shapes: tuple[int, ...]) -> int:
    """Of the best plan."""
    program = parse(text, {name: TensorType(DType.FLOAT32, shape) for name, shape in shapes.items()})
    (group,) = partition(program, hw)
    (best, *_), _ = rank(group, hw, hw.unit_for(DType.FLOAT32), 20)
    spatial = [axis for axis in group.space.axes if axis.kind is AxisKind.SPATIAL]
    return math.prod(-(-axis.extent // best.program.block[axis.name]) for axis in spatial)


WORK_OF_MANY_MICROSECONDS = (
    ("y[i, k, j] = x[k, j, i]", {"x": (3, 331, 331)}),
    ("y[i, k] +=! x[i, j, k]", {"x": (32, 64, 128)}),
    ("y[i, j] = x[i, j] + 1", {"x": (512, 512)}),
)


@pytest.mark.parametrize(("text", "shapes"), WORK_OF_MANY_MICROSECONDS)
def test_both_cores_work_where_one_needs_many_microseconds(text: str, shapes: dict[str, tuple[int, ...]]) -> None:
    """Their floor is a few microseconds: what they take is several times as much."""
    assert tasks(text, on(2), **shapes) >= 2
    assert tasks(text, on(1), **shapes) == 1


def test_less_work_than_a_launch_costs_is_one_task() -> None:
    assert tasks("y[i, j] = x[i, j] + 1", on(2), x=(16, 64)) == 1
