"""The compiled programs: GEMMs, elementwise and row-wise operators, convolutions."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

Types = dict[str, tuple[str, tuple[int, ...]]]

HALF, FLOAT = "float16", "float32"


class Kind(Enum):
    GEMM = "gemm"  # sizes b (batch), m, n, k
    ADD = "add"  # elements
    SILU_MUL = "silu_mul"  # rows, columns
    SOFTMAX = "softmax"
    LAYERNORM = "layernorm"
    RMSNORM = "rmsnorm"
    CONV = "conv2d"  # images, height, width, channels, filters, window; stride 1, padded to the same size


class Epilogue(Enum):
    NONE = "none"
    BIAS_RELU = "bias_relu"
    BIAS_GELU = "bias_gelu"
    RESIDUAL = "residual"


@dataclass(frozen=True, slots=True)
class Case:
    id: str
    kind: Kind
    sizes: tuple[int, ...]
    expression: str
    inputs: Types
    epilogue: Epilogue = Epilogue.NONE


_EPILOGUES = {
    Epilogue.NONE: "",
    Epilogue.BIAS_RELU: "\nD[m, n] = relu(C[m, n] + V[n])",
    Epilogue.BIAS_GELU: "\nD[m, n] = gelu(C[m, n] + V[n])",
    Epilogue.RESIDUAL: "\nD[m, n] = C[m, n] + R[m, n]",
}


def gemm(m: int, n: int, k: int, epilogue: Epilogue = Epilogue.NONE) -> Case:
    inputs: Types = {"A": (HALF, (m, k)), "B": (HALF, (k, n))}
    if epilogue in (Epilogue.BIAS_RELU, Epilogue.BIAS_GELU):
        inputs["V"] = (HALF, (n,))
    if epilogue is Epilogue.RESIDUAL:
        inputs["R"] = (HALF, (m, n))
    text = f"C[m, n] +=! A[m, k] * B[k, n]{_EPILOGUES[epilogue]}"
    name = f"gemm_{m}x{n}x{k}" + ("" if epilogue is Epilogue.NONE else f"_{epilogue.value}")
    return Case(name, Kind.GEMM, (1, m, n, k), text, inputs, epilogue)


def batched(b: int, m: int, n: int, k: int) -> Case:
    inputs: Types = {"A": (HALF, (b, m, k)), "B": (HALF, (b, k, n))}
    return Case(f"batched_{b}x{m}x{n}x{k}", Kind.GEMM, (b, m, n, k), "C[b, m, n] +=! A[b, m, k] * B[b, k, n]", inputs)


def conv(images: int, size: int, channels: int, filters: int, window: int) -> Case:
    pad = window // 2
    h, w = (f"{at} + {r} - {pad}" for at, r in (("ho", "r"), ("wo", "s")))
    inside = f"[{h} >= 0, {h} < {size}, {w} >= 0, {w} < {size}]"
    text = f"Y[n, ho, wo, f] +=! X[n, {h}, {w}, c].when({inside}, 0.0) * W[r, s, c, f] where ho in {size}, wo in {size}"
    shapes: Types = {
        "X": (HALF, (images, size, size, channels)),
        "W": (HALF, (window, window, channels, filters)),
    }
    sizes = (images, size, size, channels, filters, window)
    return Case(f"conv_{images}x{size}x{size}x{channels}_{filters}x{window}x{window}", Kind.CONV, sizes, text, shapes)


def add(elements: int) -> Case:
    inputs: Types = {"A": (FLOAT, (elements,)), "B": (FLOAT, (elements,))}
    return Case(f"add_{elements}", Kind.ADD, (elements,), "C[i] = A[i] + B[i]", inputs)


def silu_mul(rows: int, columns: int) -> Case:
    inputs: Types = {"G": (HALF, (rows, columns)), "U": (HALF, (rows, columns))}
    text = "Y[i, j] = silu(G[i, j]) * U[i, j]"
    return Case(f"silu_mul_{rows}x{columns}", Kind.SILU_MUL, (rows, columns), text, inputs)


def softmax(rows: int, columns: int) -> Case:
    inputs: Types = {"X": (FLOAT, (rows, columns))}
    text = "M[i] >=! X[i, j]\nE[i, j] = exp(X[i, j] - M[i])\nS[i] +=! E[i, j]\nY[i, j] = E[i, j] / S[i]"
    return Case(f"softmax_{rows}x{columns}", Kind.SOFTMAX, (rows, columns), text, inputs)


def layernorm(rows: int, columns: int) -> Case:
    inputs: Types = {"X": (FLOAT, (rows, columns)), "G": (FLOAT, (columns,)), "H": (FLOAT, (columns,))}
    text = (
        f"S[i] +=! X[i, j]\nM[i] = S[i] / {columns}.0\nQ[i] +=! (X[i, j] - M[i]) * (X[i, j] - M[i])\n"
        f"Y[i, j] = (X[i, j] - M[i]) * rsqrt(Q[i] / {columns}.0 + 1e-5) * G[j] + H[j]"
    )
    return Case(f"layernorm_{rows}x{columns}", Kind.LAYERNORM, (rows, columns), text, inputs)


def rmsnorm(rows: int, columns: int) -> Case:
    inputs: Types = {"X": (FLOAT, (rows, columns)), "G": (FLOAT, (columns,))}
    text = f"Q[i] +=! X[i, j] * X[i, j]\nY[i, j] = X[i, j] * rsqrt(Q[i] / {columns}.0 + 1e-5) * G[j]"
    return Case(f"rmsnorm_{rows}x{columns}", Kind.RMSNORM, (rows, columns), text, inputs)


CASES = (
    gemm(512, 512, 512),
    gemm(1024, 1024, 1024),
    gemm(4096, 4096, 4096),
    gemm(8192, 1024, 4096),
    gemm(1000, 1000, 1000),
    gemm(16, 4096, 4096),
    batched(16, 512, 512, 64),
    batched(96, 128, 128, 64),
    gemm(2048, 2048, 2048, Epilogue.BIAS_RELU),
    gemm(4096, 4096, 1024, Epilogue.BIAS_GELU),
    gemm(2048, 4096, 4096, Epilogue.RESIDUAL),
    add(1 << 24),
    silu_mul(4096, 11008),
    softmax(4096, 1024),
    softmax(256, 8192),
    layernorm(8192, 1024),
    rmsnorm(4096, 4096),
    layernorm(512, 8192),
    conv(32, 56, 64, 64, 3),
    conv(32, 28, 128, 256, 1),
)
