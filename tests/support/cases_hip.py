"""Kernels for AMD's devices: what the tests of HIP share."""

from __future__ import annotations

import pytest

from roller_svc import hardware, toolchain
from roller_svc.compiler.pipeline import build_kernel
from roller_svc.compiler.request import build_request
from roller_svc.ir.kernel import KernelSource
from roller_svc.ir.report import BuildReport

Types = dict[str, tuple[str, tuple[int, ...]]]
MI50, MI250X, MI300X = (hardware.load(f"amd-{name}") for name in ("mi50", "mi250x", "mi300x"))
_FOUND = toolchain.availability(MI250X)
needs_hipcc = pytest.mark.skipif(not _FOUND.ok, reason=f"HIP is not compiled here: {_FOUND.reason}")

# one program of every family of kernels
MATMUL = "C[m, n] +=! A[m, k] * B[k, n]"
SOFTMAX = "M[r] >=! X[r, c]; S[r] +=! exp(X[r, c] - M[r]); Y[r, c] = exp(X[r, c] - M[r]) / S[r]"
FAMILIES: dict[str, tuple[str, Types]] = {
    "map": ("Y[n, m] = gelu(X[n, m])", {"X": ("float16", (64, 96))}),
    "float8": ("Y[n, m] = (X[n, m] * 2.0).cast(`float8_e4m3`)", {"X": ("bfloat16", (64, 96))}),
    "transposition": ("Y[m, n] = X[n, m]", {"X": ("float16", (70, 96))}),
    "contraction": (MATMUL, {"A": ("float32", (70, 40)), "B": ("float32", (40, 90))}),
    "contraction of doubles": (MATMUL, {"A": ("float64", (70, 40)), "B": ("float64", (40, 90))}),
    "window": ("Y[n, h, w] >=! X[n, h * 2 + i, w * 2 + j] where i in 3, j in 3, h in 15, w in 15",
               {"X": ("float32", (4, 32, 32))}),
    "short rows": ("Y[r] +=! X[r, c]", {"X": ("float32", (130, 48))}),
    "long rows": ("Y[r] +=! X[r, c]", {"X": ("float32", (6, 8192))}),
    "columns": ("Y[c] +=! X[r, c]", {"X": ("float32", (300, 96))}),
    "softmax": (SOFTMAX, {"X": ("float16", (64, 1000))}),
    "places": ("M[r] >=! X[r, c]; Y[r] <=! c.when([M[r] == X[r, c]], 256).cast(`int64`)",
               {"X": ("float32", (64, 256))}),
    "scatter": ("D[I[n], d] +=. X[n, d]",
                {"D": ("float32", (50, 16)), "I": ("int32", (40,)), "X": ("float32", (40, 16))}),
    "gather": ("Y[n, d] = X[I[n], d]", {"I": ("int32", (40,)), "X": ("bfloat16", (50, 16))}),
}  # fmt: skip


def built(expression: str, types: Types, target: str, **options: object) -> BuildReport:
    """The model's choice, compiled; with runtime="emulator" only its text."""
    return build_kernel(build_request(expression, types, target=target, select="model", top_k=1, **options))


def text_of(expression: str, types: Types, target: str) -> KernelSource:
    return built(expression, types, target, runtime="emulator").winner.source
