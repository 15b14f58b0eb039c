"""Sums of as many columns as a vector has: one task, whose reduction is split."""

from __future__ import annotations

import pytest

from roller_svc import hardware
from roller_svc.compiler.partition_cache import PartitionCache
from roller_svc.compiler.plans import rank_partitions
from roller_svc.frontend.lang import parse
from roller_svc.ir.dtype import DType
from roller_svc.ir.program import TensorType

STATISTICS = "s[j] +=! x[i, j]; q[j] +=! x[i, j] * x[i, j]"


@pytest.mark.parametrize("expression", ["s[j] +=! x[i, j]", STATISTICS], ids=["sum", "statistics"])
@pytest.mark.parametrize("columns", [16, 15, 9])
def test_sums_of_a_vector_of_columns_are_split(columns: int, expression: str) -> None:
    program = parse(expression, {"x": TensorType(DType.FLOAT32, (200003, columns))})
    best = rank_partitions(PartitionCache(program), hardware.load("cpu-x86-avx512"), 1)[0]
    assert all(candidates[0].program.split_k > 1 for candidates in best.candidates)
