"""Random sums of squares of differences have the values of their expansion: integers exactly, floats as in float64."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from roller_svc.frontend.parse import parse
from roller_svc.fusion.linear_sums import split_linear_sums
from roller_svc.ir.dtype import DType
from roller_svc.ir.program import TensorProgram, TensorType
from roller_svc.semantics.inputs import random_inputs
from roller_svc.semantics.interpreter import evaluate

NUM_PROGRAMS = 60
SHAPES = {"a": (17, 33), "b": (18, 33), "c": (17, 33), "d": (18, 33), "w": (33,), "u": (17,), "v": (18,)}


def random_body(dice: random.Random, cast: str, numbers: tuple[str, str]) -> str:
    """Return a square of a sum of two parts, with factors, signs, conditions and other terms around it."""
    zero, factor = numbers

    def part(tensor: str, offset: str) -> str:
        text = f"{tensor}{cast}"
        for _ in range(dice.randrange(3)):
            text = dice.choice((
                f"({text} + w[k]{cast})", f"({text} - {offset}{cast})", f"({text} * w[k]{cast})", f"({text} * {factor})",
                f"(-{text})", f"where(k < {dice.randrange(1, 33)}, {text}, {zero})",
            ))  # fmt: skip
        return text

    base = f"({part('a[m, k]', 'u[m]')} {dice.choice('+-')} {part('b[n, k]', 'v[n]')})"
    base = dice.choice((base, base, f"({base} * w[k]{cast})", f"(-{base})"))
    square = dice.choice((f"square({base})", f"({base} * {base})", f"({base} ** 2)", f"square(abs({base}))"))
    return dice.choice((
        square, f"(-{square})", f"w[k]{cast} * {square}", f"{square} * u[m]{cast}", f"where(n <= m, {square}, {zero})",
        f"{square} + square(c[m, k]{cast} - d[n, k]{cast})", f"{square} - a[m, k]{cast}",
        f"{square} + a[m, k]{cast} * b[n, k]{cast}",
    ))  # fmt: skip


def random_program(dice: random.Random) -> TensorProgram:
    is_float = dice.random() < 0.6
    dtype = dice.choice((DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32) if is_float else (DType.INT8, DType.UINT8))
    cast, numbers = (".cast(float32)", ("0.0", "0.5")) if is_float else (".cast(int32)", ("0", "3"))
    body = random_body(dice, cast, numbers)
    types = {name: TensorType(dtype, shape) for name, shape in SHAPES.items() if f"{name}[" in body}
    return parse(f"y[m, n] +=! {body}", types)


@pytest.mark.slow
def test_expanded_squares_have_the_values_of_the_spelling() -> None:
    expanded = 0
    for seed in range(NUM_PROGRAMS):
        compute = random_program(random.Random(seed))
        statements = split_linear_sums(compute.statements, compute.types, allow_expanded_squares=True)
        if statements == compute.statements:
            continue
        expanded += 1
        inputs = random_inputs(compute, seed)
        got, want = (evaluate(each, inputs)["y"].wide for each in (replace(compute, statements=statements), compute))
        tolerance = 1e-9 * (1.0 + np.abs(want).max()) if want.dtype.kind == "f" else 0
        np.testing.assert_allclose(got, want, rtol=0, atol=tolerance, err_msg=f"seed {seed}")
    assert expanded > NUM_PROGRAMS // 3
