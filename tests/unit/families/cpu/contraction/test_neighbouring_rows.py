"""Tiles that construction finds for other numbers of rows are no cheaper by the model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from roller_svc.compiler.partition_cache import partition
from roller_svc.compiler.rank import construct
from roller_svc.families import prepare
from roller_svc.frontend.lang import parse
from roller_svc.hardware.catalog import load
from roller_svc.ir.dtype import DType
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.program import TensorType

HW = load("cpu-x86-avx512")
UNIT = HW.unit_for(DType.FLOAT32)
SIZE = 2048


def product(rows: int, constants: tuple[str, ...]) -> KernelGroup:
    types = {"A": TensorType(DType.FLOAT32, (rows, SIZE)), "B": TensorType(DType.FLOAT32, (SIZE, SIZE))}
    program = replace(parse("C[m, n] +=! A[m, k] * B[k, n]", types), constants=constants)
    (group,) = partition(program, HW)
    return group


@pytest.mark.parametrize("constants", [(), ("B",)], ids=["packed", "prepacked"])
@pytest.mark.parametrize("rows", [16, 33, 129])
def test_tiles_of_neighbours_are_not_cheaper(rows: int, constants: tuple[str, ...]) -> None:
    """A last block of few rows was priced by its rows, although prepacked B arrives whole for it, too."""
    group = product(rows, constants)
    family, workload = prepare(group, HW, UNIT)
    model = family.model(workload)
    own = min(model.timed(program).seconds for program in construct(group, HW, UNIT).programs)
    for near in (rows * 3 // 4, rows - 2, rows + 1, rows * 5 // 4):
        for program in construct(product(near, constants), HW, UNIT).programs:
            assert model.timed(replace(program, space=workload.space)).seconds > 0.97 * own, program.tile_text
