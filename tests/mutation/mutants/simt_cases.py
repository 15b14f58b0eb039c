"""Contractions on scalar lanes, and what can be wrong in them."""

from __future__ import annotations

from roller_svc.ir.constraints import OpClass
from tests.mutation.mutants.mutation import T4, Case, Tiles

SIMT = OpClass.SIMT
PRODUCT = "C[m, n] +=! A[m, k] * B[k, n]"

COPIES = Case(
    "simt copies",
    "simt",
    PRODUCT,
    (("A", "float32", (72, 100)), ("B", "float32", (100, 72))),
    Tiles((64, 64, 16), (4, 8, 1), stages=3),
    unit=SIMT,
)
REGISTERS = Case(
    "simt registers",
    "simt",
    PRODUCT,
    (("A", "float32", (67, 99)), ("B", "float32", (99, 75))),
    Tiles((64, 64, 16), (8, 4, 1), stages=2),
    target=T4,
    unit=SIMT,
)
BIAS = Case(
    "simt bias",
    "simt",
    f"{PRODUCT}; Y[m, n] = max(C[m, n] + D[n], 0.0)",
    (("A", "float32", (72, 40)), ("B", "float32", (40, 72)), ("D", "float32", (72,))),
    Tiles((64, 64, 8), (4, 4, 1), stages=2),
    unit=SIMT,
)
DOUBLE = Case(
    "simt float64",
    "simt",
    PRODUCT,
    (("A", "float64", (40, 40)), ("B", "float64", (40, 40))),
    Tiles((32, 32, 8), (2, 2, 1), stages=2),
    unit=SIMT,
)
SPLIT = Case(
    "simt split-k",
    "simt split-k",
    PRODUCT,
    (("A", "float32", (24, 520)), ("B", "float32", (520, 24))),
    Tiles((32, 32, 16), (2, 2, 1), split_k=4, stages=2),
    target=T4,
    unit=SIMT,
)
CONV = Case(
    "simt conv",
    "simt convolution",
    "C[n, f, o, p] +=! X[n, c, o + r - 1, p + s - 1].when([o + r >= 1, o + r < 11, p + s >= 1, p + s < 11], 0.0)"
    " * W[f, c, r, s] where o in 10, p in 10",
    (("X", "float32", (2, 4, 10, 10)), ("W", "float32", (24, 4, 3, 3))),
    Tiles((32, 64, 8), (4, 4, 1), stages=2),
    unit=SIMT,
)
