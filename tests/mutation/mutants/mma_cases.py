"""Contractions on matrix units, of every type of operand and every way in which operands come."""

from __future__ import annotations

from roller_svc.ir.constraints import OpClass
from tests.mutation.mutants.mutation import RTX5090, T4, Case, Tiles

MMA = OpClass.MMA
FLOAT_PRODUCT = "C[m, n] +=! A[m, k].cast(`float32`) * B[k, n].cast(`float32`)"
INT_PRODUCT = "C[m, n] +=! A[m, k].cast(`int32`) * B[n, k].cast(`int32`)"

ASYNC = Case(
    "mma async",
    "mma",
    FLOAT_PRODUCT,
    (("A", "float16", (72, 200)), ("B", "float16", (200, 72))),
    Tiles((64, 64, 32), (32, 32, 1), lanes=32, stages=3),
    unit=MMA,
)
VECTOR = Case(
    "mma vector",
    "mma",
    "C[m, n] +=! A[m, k] * B[k, n]",
    (("A", "float16", (72, 104)), ("B", "float16", (104, 72))),
    Tiles((64, 64, 32), (32, 32, 1), lanes=32, stages=2),
    target=T4,
    unit=MMA,
)
ELEMENT = Case(
    "mma element",
    "mma",
    "C[m, n] +=! A[m, k] * B[k, n]",
    (("A", "float16", (67, 99)), ("B", "float16", (99, 75))),
    Tiles((64, 64, 32), (32, 32, 1), lanes=32, stages=2),
    unit=MMA,
)
TURNED = Case(
    "mma turned",
    "mma",
    "C[m, n] +=! A[k, m].cast(`float32`) * B[n, k].cast(`float32`)",
    (("A", "bfloat16", (104, 72)), ("B", "bfloat16", (72, 104))),
    Tiles((64, 64, 32), (32, 32, 1), lanes=32, stages=3),
    unit=MMA,
)
TF32 = Case(
    "mma tf32",
    "mma",
    "C[m, n] +=! A[m, k] * B[k, n]",
    (("A", "float32", (72, 100)), ("B", "float32", (100, 72))),
    Tiles((64, 64, 16), (32, 32, 1), lanes=32, stages=3),
    unit=MMA,
    allow_tf32=True,
)
INT8 = Case(
    "mma int8",
    "mma",
    INT_PRODUCT,
    (("A", "int8", (72, 144)), ("B", "int8", (72, 144))),
    Tiles((64, 64, 64), (32, 32, 1), lanes=32, stages=3),
    unit=MMA,
)
INT8_T4 = Case(
    "mma int8 t4",
    "mma",
    "C[m, n] +=! A[m, k].cast(`int32`) * B[k, n].cast(`int32`)",
    (("A", "uint8", (72, 144)), ("B", "int8", (144, 72))),
    Tiles((64, 64, 64), (32, 32, 1), lanes=32, stages=2),
    target=T4,
    unit=MMA,
    ranges=(("A", 0, 256),),
)
FLOAT8 = Case(
    "mma float8",
    "mma",
    "C[m, n] +=! A[m, k].cast(`float32`) * B[n, k].cast(`float32`)",
    (("A", "float8_e4m3fn", (72, 144)), ("B", "float8_e5m2", (72, 144))),
    Tiles((64, 64, 64), (32, 32, 1), lanes=32, stages=3),
    target=RTX5090,
    unit=MMA,
)
SPLIT = Case(
    "mma split-k",
    "mma split-k",
    FLOAT_PRODUCT,
    (("A", "float16", (40, 520)), ("B", "float16", (520, 40))),
    Tiles((32, 32, 32), (16, 16, 1), lanes=32, split_k=4, stages=3),
    unit=MMA,
)
STREAM = Case(
    "mma stream-k",
    "mma stream-k",
    f"{FLOAT_PRODUCT}; Y[m, n] = max(C[m, n] + D[n], 0.0)",
    (("A", "float16", (72, 200)), ("B", "float16", (200, 72)), ("D", "float32", (72,))),
    Tiles((64, 64, 32), (32, 32, 1), lanes=32, stages=3, stream_k=3),
    unit=MMA,
)
SHARES = Case(  # several blocks share each tile
    "mma stream-k shares",
    "mma stream-k",
    FLOAT_PRODUCT,
    (("A", "float16", (40, 328)), ("B", "float16", (328, 72))),
    Tiles((64, 64, 32), (32, 32, 1), lanes=32, stages=3, stream_k=7),
    unit=MMA,
)
BIAS = Case(
    "mma bias",
    "mma",
    f"{FLOAT_PRODUCT}; Y[m, n] = max(C[m, n] + D[n], 0.0) * E[m]",
    (("A", "float16", (72, 72)), ("B", "float16", (72, 72)), ("D", "float32", (72,)), ("E", "float32", (72,))),
    Tiles((64, 64, 32), (32, 32, 1), lanes=32, stages=2),
    unit=MMA,
)
ROWS = Case(
    "mma rows",
    "mma row reduction",
    "C[m, n] +=! A[m, k].cast(`float32`) * B[n, k].cast(`float32`);Y[m] >=! 0.0 - C[m, n] * C[m, n] - 50.0",
    (("A", "float16", (72, 104)), ("B", "float16", (56, 104))),
    Tiles((64, 64, 32), (32, 32, 1), lanes=32, stages=3),
    unit=MMA,
)
CONV = Case(
    "mma conv",
    "mma convolution",
    "C[n, f, o, p] +=! X[n, c, o + r - 1, p + s - 1].when([o + r >= 1, o + r < 11, p + s >= 1, p + s < 11], 0.0)"
    ".cast(`float32`) * W[f, c, r, s].cast(`float32`) where o in 10, p in 10",
    (("X", "float16", (2, 8, 10, 10)), ("W", "float16", (24, 8, 3, 3))),
    Tiles((64, 32, 32), (32, 16, 1), lanes=32, stages=2),
    unit=MMA,
)
