"""When cores share a reduction."""

from __future__ import annotations

import pytest

from roller_svc.compiler.partition_cache import partition
from roller_svc.compiler.rank import rank
from roller_svc.frontend.lang import parse
from roller_svc.hardware import load
from roller_svc.ir.dtype import DType
from roller_svc.ir.program import TensorType

AVX2 = load("cpu-x86-avx2")


@pytest.mark.parametrize(
    ("shape", "is_shared"),
    [
        ((1, 1 << 20), True),  # one row for two cores
        ((1, 1 << 10), False),  # a core has added them before another one has begun
    ],
)
def test_two_cores_share_a_sum_that_is_worth_it(shape: tuple[int, int], is_shared: bool) -> None:
    (group,) = partition(parse("s[i] +=! x[i, k]", {"x": TensorType(DType.FLOAT32, shape)}), AVX2)
    _, construction = rank(group, AVX2, AVX2.unit_for(DType.FLOAT32), 1)
    assert (max(program.split_k for program in construction.programs) > 1) is is_shared
