"""The canonical expression: its form, and that it parses to the same program."""

from __future__ import annotations

import pytest

from roller_svc.frontend.lang import parse
from roller_svc.ir.dtype import DType
from roller_svc.ir.printer import text
from roller_svc.ir.program import TensorType

INPUTS = {
    "A": TensorType(DType.FLOAT32, (4, 8)),
    "B": TensorType(DType.FLOAT32, (8, 6)),
    "h": TensorType(DType.FLOAT16, (4, 8)),
    "x": TensorType(DType.FLOAT32, (8,)),
    "i": TensorType(DType.INT32, (8,)),
    "u": TensorType(DType.UINT8, (8,)),
    "s": TensorType(DType.FLOAT32, ()),
}

# (as written, as printed)
LOOKS = [
    ("C[m,n]+=!A[m,k]*B[k,n]", "C[m, n] +=! A[m, k] * B[k, n] where m in 4, n in 6, k in 8"),
    ("y[n] = x[n] * (x[n] + 1) - -2", "y[n] = x[n] * (x[n] + 1.0) - -2.0 where n in 8"),
    ("y[n] = (x[n] - 1) - (x[n] - 2)", "y[n] = x[n] - 1.0 - (x[n] - 2.0) where n in 8"),
    ("y[n] = x[n].when([n < 4], 0) where n in 8", "y[n] = x[n].when([n < 4], 0.0) where n in 8"),
    ("y[n] = x[n].call(`max`, [0])", "y[n] = max(x[n], 0.0) where n in 8"),
    ("y[n] = x[n].cast(`half`)", "y[n] = x[n].cast(`float16`) where n in 8"),
    ("y[n] = x[i[n]]", "y[n] = x[i[n]] where n in 8"),
    ("y[n] = i[n] * 2 / 3", "y[n] = i[n] * 2 // 3 where n in 8"),
    ("y[n] = i[n] * 0.5", "y[n] = i[n] * 0.5 where n in 8"),
    ("y[] +=! x[n]", "y[] +=! x[n] where n in 8"),
    ("y[n]: float16 = x[n]", "y[n]: float16 = x[n] where n in 8"),
    ("x[i[n]] +=. x[n] * 2", "x[i[n]] +=. x[n] * 2.0 where n in 8"),
    ("y[n] = where(x[n] > 0, x[n], const(`-inf`))", "y[n] = x[n].when([x[n] > 0.0], const(`-inf`)) where n in 8"),
    ("x[i[n]] =. s[].when([i[n] < 8, i[n] >= 0])", "x[i[n]] =. s[].when([i[n] < 8, i[n] >= 0]) where n in 8"),
]

# What need not look like anything in particular.
ROUND_TRIPS = [
    "y[n] = ~(x[n] > 0) & (i[n] == 3) | (u[n] != 0)",
    "y[n] = (x[n] > 0) & ((i[n] == 3) & (u[n] != 0))",
    "y[n] = -(x[n] + 1) ** 2",
    "y[n] = (-x[n]) ** 0.5",
    "y[n] = (i[n] << 2) + (i[n] >> 1) % 3",
    "y[n] = i[n] << (2 + u[n])",
    "y[n] = const(1.5, `float16`) * x[n]",
    "y[n] = const(`inf`, `float16`) * x[n] - -const(`-inf`) ** 2",
    "y[n] = const(`inf`).when([x[n] == const(`inf`)], x[n])",
    "y[n]: float16 = const(`-inf`) where n in 5",
    "y[n] = const(3, dtype=h.dtype()) + x[n]",
    "y[n] = x[n].like(2) + extent(n)",
    "y[n] = (n + 1).cast(`float32`) / 2 + x[n]",
    "y[n] = x[n].when([n < 4, x[n] > 0], x[n].when([n > 6], -1.0), merge_op=`any`)",
    "y[n] = where(i[n], x[n], 0)",
    "y[n] = max(x[n], i[n], 3)",
    "y[n] = clip(i[n], 0, 3) + fma(i[n], u[n], 1)",
    "y[n] = remainder(x[n]) + remainder(x[n], 2.0) + x[n] % 3",
    "y[n] = exp(i[n]) + floor(x[n]) + isnan(x[n])",
    "y[m, k] = h[m, k] * A[m, k] + h[m, k]",
    "y[n] = 1 where n in 5",
    "y[n] = 1.5 where n in 5",
    "y[n]: float16 = 1 where n in 5",
    "y[n]: int8 +=! A[k, n]",
    "y[n] = const(1) + 2.5 + x[n]",
    "y[n] = x[n - 1].when([n >= 1], 0.0) where n in 8",
    "y[n] = x[n // 2] + x[(n * 3) % 8] where n in 8",
    "y[n] = x[floor(n * 0.5)] where n in 8",
    "t[n] = x[n] * 2; x[i[n]] =. t[n]; z[n] = x[n] + t[n]",
    "y[n] = u[n] < i[n]",
    "y[n] = bitwise_not(u[n]) + bitwise_xor(i[n], 1)",
    "y[n] = x[n] / 1e-30 + 3e38",
    "y[0, n] = x[n]",
]


@pytest.mark.parametrize(("written", "printed"), LOOKS)
def test_looks(written: str, printed: str) -> None:
    assert text(parse(written, INPUTS)) == printed


@pytest.mark.parametrize("written", [w for w, _ in LOOKS] + ROUND_TRIPS)
def test_parses_to_the_same_program(written: str) -> None:
    program = parse(written, INPUTS)
    printed = text(program)
    assert parse(printed, INPUTS, [o.name for o in program.outputs]) == program
    assert text(parse(printed, INPUTS)) == printed
