"""Compile cases to cubins with TileLang and nvcc: kernels as in its examples, one configuration each."""

# No `from __future__ import annotations`: TileLang reads the types of a kernel's parameters when it traces it.

import math
from typing import Any

import tilelang.language as T  # noqa: N812 - its own convention
from tilelang.contrib import nvcc
from tilelang.engine import lower
from tilelang.env import CUTLASS_INCLUDE_DIR, TILELANG_TEMPLATE_PATH
from tvm.target import Target

from roller_bench.compile.cases import Case, Epilogue, Kind

HALF, FLOAT = "float16", "float32"
THREADS = 128
STAGES = 3
_FLAT_BLOCK = 1024


def compiled(case: Case, arch: int) -> bytes:
    """Return the cubin. `lower` and `compile_cuda` have no cache."""
    target = Target({"kind": "cuda", "arch": f"sm_{arch}"})
    with target:
        text = lower(_kernel(case), target=target).kernel_source
    options = ["-std=c++20", f"-I{TILELANG_TEMPLATE_PATH}", f"-I{CUTLASS_INCLUDE_DIR}"]
    return bytes(nvcc.compile_cuda(text, "cubin", [f"-arch=sm_{arch}"], options=options))


def _kernel(case: Case) -> Any:
    match case.kind:
        case Kind.GEMM:
            return gemm(*case.sizes, epilogue=case.epilogue)
        case Kind.CONV:
            return conv(*case.sizes)
        case Kind.ADD | Kind.SILU_MUL:
            return elementwise(math.prod(case.sizes), gated=case.kind is Kind.SILU_MUL)
        case Kind.SOFTMAX:
            return softmax(*case.sizes)
        case _:
            return normalised(*case.sizes, centred=case.kind is Kind.LAYERNORM)


def gemm(b: int, m: int, n: int, k: int, *, epilogue: Epilogue) -> Any:
    bm, bn, bk = _tile(m), _tile(n), 32
    residual = epilogue is Epilogue.RESIDUAL
    relu = epilogue is Epilogue.BIAS_RELU
    gelu = epilogue is Epilogue.BIAS_GELU
    extra = (m, n) if residual else (n,)

    @T.prim_func
    def kernel(
        A: T.Tensor((b, m, k), HALF),
        B: T.Tensor((b, k, n), HALF),
        R: T.Tensor(extra, HALF),
        C: T.Tensor((b, m, n), HALF),
    ):
        with T.Kernel(T.ceildiv(n, bn), T.ceildiv(m, bm), b, threads=THREADS) as (bx, by, bz):
            a_tile = T.alloc_shared((bm, bk), HALF)
            b_tile = T.alloc_shared((bk, bn), HALF)
            total = T.alloc_fragment((bm, bn), FLOAT)
            T.clear(total)
            for step in T.Pipelined(T.ceildiv(k, bk), num_stages=STAGES):
                T.copy(A[bz, by * bm, step * bk], a_tile)
                T.copy(B[bz, step * bk, bx * bn], b_tile)
                T.gemm(a_tile, b_tile, total)
            if residual:
                for i, j in T.Parallel(bm, bn):
                    total[i, j] = total[i, j] + R[by * bm + i, bx * bn + j]
            if relu:
                for i, j in T.Parallel(bm, bn):
                    total[i, j] = T.max(total[i, j] + R[bx * bn + j], 0)
            if gelu:
                for i, j in T.Parallel(bm, bn):
                    total[i, j] = total[i, j] + R[bx * bn + j]
                for i, j in T.Parallel(bm, bn):
                    total[i, j] = 0.5 * total[i, j] * (1.0 + T.erf(total[i, j] * 0.7071067811865476))
            T.copy(total, C[bz, by * bm, bx * bn])

    return kernel


def conv(images: int, h: int, w: int, c: int, f: int, r: int) -> Any:
    """Implicit GEMM over (images, height, width) x filters x (window, channels); stride 1, padded to the same size."""
    bm, bn, bk = 128, _tile(f), 32
    points = images * h * w

    @T.prim_func
    def kernel(X: T.Tensor((images, h, w, c), HALF), W: T.Tensor((r * r * c, f), HALF), Y: T.Tensor((points, f), HALF)):
        with T.Kernel(T.ceildiv(f, bn), T.ceildiv(points, bm), threads=THREADS) as (bx, by):
            x_tile = T.alloc_shared((bm, bk), HALF)
            w_tile = T.alloc_shared((bk, bn), HALF)
            total = T.alloc_fragment((bm, bn), FLOAT)
            T.clear(total)
            for step in T.Pipelined(r * r * c // bk, num_stages=STAGES):
                for i, j in T.Parallel(bm, bk):
                    point = by * bm + i
                    inner = step * bk + j
                    row = point // w % h + inner // (r * c) - r // 2
                    column = point % w + inner // c % r - r // 2
                    inside = (row >= 0) and (column >= 0) and (row < h) and (column < w) and (point < points)
                    x_tile[i, j] = T.if_then_else(inside, X[point // (h * w), row, column, inner % c], 0)
                T.copy(W[step * bk, bx * bn], w_tile)
                T.gemm(x_tile, w_tile, total)
            T.copy(total, Y[by * bm, bx * bn])

    return kernel


def elementwise(size: int, *, gated: bool) -> Any:
    dtype = HALF if gated else FLOAT

    @T.prim_func
    def kernel(A: T.Tensor((size,), dtype), B: T.Tensor((size,), dtype), C: T.Tensor((size,), dtype)):
        with T.Kernel(T.ceildiv(size, _FLAT_BLOCK), threads=THREADS) as bx:
            if gated:
                for i in T.Parallel(_FLAT_BLOCK):
                    C[bx * _FLAT_BLOCK + i] = (
                        A[bx * _FLAT_BLOCK + i] * T.sigmoid(A[bx * _FLAT_BLOCK + i]) * (B[bx * _FLAT_BLOCK + i])
                    )
            else:
                for i in T.Parallel(_FLAT_BLOCK):
                    C[bx * _FLAT_BLOCK + i] = A[bx * _FLAT_BLOCK + i] + B[bx * _FLAT_BLOCK + i]

    return kernel


def softmax(rows: int, columns: int) -> Any:
    @T.prim_func
    def kernel(X: T.Tensor((rows, columns), FLOAT), Y: T.Tensor((rows, columns), FLOAT)):
        with T.Kernel(rows, threads=THREADS) as bx:
            row = T.alloc_fragment((1, columns), FLOAT)
            best = T.alloc_fragment((1,), FLOAT)
            total = T.alloc_fragment((1,), FLOAT)
            T.copy(X[bx, 0], row)
            T.reduce_max(row, best, dim=1)
            for i, j in T.Parallel(1, columns):
                row[i, j] = T.exp(row[i, j] - best[i])
            T.reduce_sum(row, total, dim=1)
            for i, j in T.Parallel(1, columns):
                row[i, j] = row[i, j] / total[i]
            T.copy(row, Y[bx, 0])

    return kernel


def normalised(rows: int, columns: int, *, centred: bool) -> Any:
    """Layer norm, or, not centred, RMS norm."""

    @T.prim_func
    def kernel(
        X: T.Tensor((rows, columns), FLOAT),
        G: T.Tensor((columns,), FLOAT),
        H: T.Tensor((columns,), FLOAT),
        Y: T.Tensor((rows, columns), FLOAT),
    ):
        with T.Kernel(rows, threads=THREADS) as bx:
            row = T.alloc_fragment((1, columns), FLOAT)
            square = T.alloc_fragment((1, columns), FLOAT)
            total = T.alloc_fragment((1,), FLOAT)
            T.copy(X[bx, 0], row)
            if centred:
                T.reduce_sum(row, total, dim=1)
                for i, j in T.Parallel(1, columns):
                    row[i, j] = row[i, j] - total[i] / columns
            for i, j in T.Parallel(1, columns):
                square[i, j] = row[i, j] * row[i, j]
            T.reduce_sum(square, total, dim=1)
            for i, j in T.Parallel(1, columns):
                row[i, j] = row[i, j] * T.rsqrt(total[i] / columns + 1e-5) * G[j]
            if centred:
                for i, j in T.Parallel(1, columns):
                    row[i, j] = row[i, j] + H[j]
            T.copy(row, Y[bx, 0])

    return kernel


def _tile(extent: int) -> int:
    return min(128, max(16, 1 << (extent - 1).bit_length()))
