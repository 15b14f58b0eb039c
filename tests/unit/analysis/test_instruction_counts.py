"""Instruction counts of operators: the table is what the compiler makes of them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from roller_svc.analysis.instruction_counts import INSTRUCTIONS, count_instructions, instructions_of
from roller_svc.frontend.parse import parse
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import OpKind
from roller_svc.ir.program import TensorType

ROOT = Path(__file__).resolve().parents[3]
SOME = (OpKind.ADD, OpKind.MAX, OpKind.DIV, OpKind.EXP, OpKind.TANH, OpKind.GELU, OpKind.SIGMOID)


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT16], ids=lambda d: d.value)
def test_table_has_the_counts_of_the_machine_code(dtype: DType) -> None:
    spec = importlib.util.spec_from_file_location("counter", ROOT / "tools" / "count_instructions.py")
    assert spec is not None
    assert spec.loader is not None
    counter = sys.modules["counter"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(counter)
    assert counter.counts(SOME, dtype) == {kind: instructions_of(kind, dtype) for kind in SOME}


def test_16_bit_functions_cost_less_and_never_more() -> None:
    halves = INSTRUCTIONS[DType.FLOAT16]
    assert all(count < INSTRUCTIONS[DType.FLOAT32][kind] for kind, count in halves.items())
    assert instructions_of(OpKind.GELU, DType.BFLOAT16) == halves[OpKind.GELU] > 10


def test_statements_count_their_functions_once_for_each_point() -> None:
    program = parse("y[i] = gelu(x[i] + 1.0)", {"x": TensorType(DType.FLOAT16, (100,))})
    assert program.flops == 200
    assert count_instructions(program.statements) == 100 * (1 + instructions_of(OpKind.GELU, DType.FLOAT16))


def test_division_by_a_sum_is_a_product() -> None:
    inputs = {"x": TensorType(DType.FLOAT32, (4, 8)), "d": TensorType(DType.FLOAT32, (4,))}
    by_sum = parse("s[i] +=! x[i,j]; y[i,j] = x[i,j] / s[i]", inputs)
    by_input = parse("y[i,j] = x[i,j] / d[i]", inputs)
    assert count_instructions(by_sum.statements) == 2 * 32
    assert count_instructions(by_input.statements) == 32 * instructions_of(OpKind.DIV, DType.FLOAT32)


def test_operators_of_an_index_count_if_it_is_data() -> None:
    inputs = {"t": TensorType(DType.FLOAT32, (16,)), "q": TensorType(DType.INT32, (8, 32))}
    looked_up = parse("y[i,j] = t[bitwise_and(q[i, j % 4], 7) + 8] * 2.0 where j in 32", inputs)
    assert looked_up.flops == count_instructions(looked_up.statements) == 3 * 8 * 32
