"""Which contractions of a build belong on tensor cores."""

from __future__ import annotations

import pytest

from roller_svc import hardware
from roller_svc.compiler.partition_cache import partition
from roller_svc.frontend.parse import parse
from roller_svc.ir.dtype import DType
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.program import TensorType
from roller_svc.verify.lint_reports import half_contractions

MATMUL = "C[m, n] +=! A[m, k] * B[k, n]"
LINEAR = "C[m, n] +=! A[m, k] * B[n, k]\nE[m, o] +=! A[m, n] * B[o, n] * 2"


def groups_of(expression: str, dtype: DType, **shapes: tuple[int, ...]) -> tuple[KernelGroup, ...]:
    program = parse(expression, {name: TensorType(dtype, shape) for name, shape in shapes.items()}, None)
    return partition(program, hardware.load("nvidia-l40s"))


@pytest.mark.parametrize(
    ("dtype", "m", "n", "k", "expected"),
    [
        (DType.FLOAT16, 64, 64, 32, True),
        (DType.BFLOAT16, 256, 128, 64, True),
        (DType.FLOAT16, 63, 64, 32, False),
        (DType.FLOAT16, 64, 63, 32, False),
        (DType.FLOAT16, 64, 64, 31, False),
        (DType.FLOAT32, 64, 64, 32, False),
        (DType.INT8, 64, 64, 32, False),
    ],
)
def test_which_contractions_belong_on_tensor_cores(dtype: DType, m: int, n: int, k: int, expected: bool) -> None:
    assert bool(half_contractions(groups_of(MATMUL, dtype, A=(m, k), B=(k, n)))) is expected


def test_every_contraction_of_a_program_counts() -> None:
    assert len(half_contractions(groups_of(LINEAR, DType.FLOAT16, A=(128, 64), B=(64, 64)))) == 2
