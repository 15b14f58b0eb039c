"""Compile cases to cubins with Triton, offline: kernels as in its tutorials, one configuration each."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from roller_bench.compile.cases import Case, Epilogue, Kind

EPILOGUES = {epilogue: number for number, epilogue in enumerate(Epilogue)}


@triton.jit
def gemm(
    a,
    b,
    c,
    extra,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    EPILOGUE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    tiles_n = tl.cdiv(N, BN)
    batch = tl.program_id(1).to(tl.int64)
    rows = (tl.program_id(0) // tiles_n) * BM + tl.arange(0, BM)
    columns = (tl.program_id(0) % tiles_n) * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    a_at = a + batch * M * K + rows[:, None] * K + inner[None, :]
    b_at = b + batch * K * N + inner[:, None] * N + columns[None, :]
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, K, BK):
        x = tl.load(a_at + k, mask=(rows[:, None] < M) & (inner[None, :] + k < K), other=0.0)
        y = tl.load(b_at + k * N, mask=(inner[:, None] + k < K) & (columns[None, :] < N), other=0.0)
        total = tl.dot(x, y, total)
    inside = (rows[:, None] < M) & (columns[None, :] < N)
    at = rows[:, None] * N + columns[None, :]
    if EPILOGUE == 3:
        total += tl.load(extra + at, mask=inside, other=0.0)
    elif EPILOGUE > 0:
        total += tl.load(extra + columns, mask=columns < N, other=0.0)[None, :]
        if EPILOGUE == 1:
            total = tl.maximum(total, 0.0)
        else:
            total = 0.5 * total * (1.0 + tl.erf(total * 0.7071067811865476))
    tl.store(c + batch * M * N + at, total.to(tl.float16), mask=inside)


@triton.jit
def conv(
    x,
    w,
    y,
    IMAGES: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    F: tl.constexpr,
    R: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    tiles_n = tl.cdiv(F, BN)
    points = (tl.program_id(0) // tiles_n) * BM + tl.arange(0, BM)
    filters = (tl.program_id(0) % tiles_n) * BN + tl.arange(0, BN)
    image, row, column = points // (H * W), points // W % H, points % W
    inner = tl.arange(0, BK)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for step in range(R * R * C // BK):
        window = step // (C // BK)
        channel = step % (C // BK) * BK + inner
        h, v = row + window // R - R // 2, column + window % R - R // 2
        inside = (points < IMAGES * H * W) & (h >= 0) & (h < H) & (v >= 0) & (v < W)
        a = tl.load(x + ((image * H + h) * W + v)[:, None] * C + channel[None, :], mask=inside[:, None], other=0.0)
        b = tl.load(w + (window * C + channel)[:, None] * F + filters[None, :], mask=filters[None, :] < F, other=0.0)
        total = tl.dot(a, b, total)
    mask = (points[:, None] < IMAGES * H * W) & (filters[None, :] < F)
    tl.store(y + points[:, None] * F + filters[None, :], total.to(tl.float16), mask=mask)


@triton.jit
def add(a, b, c, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < SIZE
    tl.store(c + at, tl.load(a + at, mask=mask) + tl.load(b + at, mask=mask), mask=mask)


@triton.jit
def silu_mul(a, b, c, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < SIZE
    gate = tl.load(a + at, mask=mask).to(tl.float32)
    up = tl.load(b + at, mask=mask).to(tl.float32)
    tl.store(c + at, (gate * tl.sigmoid(gate) * up).to(tl.float16), mask=mask)


@triton.jit
def softmax(x, y, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    row = tl.program_id(0) * COLUMNS
    values = tl.load(x + row + at, mask=at < COLUMNS, other=-float("inf"))
    powers = tl.exp(values - tl.max(values, axis=0))
    tl.store(y + row + at, powers / tl.sum(powers, axis=0), mask=at < COLUMNS)


@triton.jit
def layernorm(x, g, h, y, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    mask = at < COLUMNS
    row = tl.program_id(0) * COLUMNS
    values = tl.load(x + row + at, mask=mask, other=0.0)
    apart = tl.where(mask, values - tl.sum(values, axis=0) / COLUMNS, 0.0)
    scaled = apart * tl.rsqrt(tl.sum(apart * apart, axis=0) / COLUMNS + 1e-5)
    tl.store(y + row + at, scaled * tl.load(g + at, mask=mask) + tl.load(h + at, mask=mask), mask=mask)


@triton.jit
def rmsnorm(x, g, y, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    mask = at < COLUMNS
    row = tl.program_id(0) * COLUMNS
    values = tl.load(x + row + at, mask=mask, other=0.0)
    scaled = values * tl.rsqrt(tl.sum(values * values, axis=0) / COLUMNS + 1e-5)
    tl.store(y + row + at, scaled * tl.load(g + at, mask=mask), mask=mask)


_ROWS = {Kind.SOFTMAX: softmax, Kind.LAYERNORM: layernorm, Kind.RMSNORM: rmsnorm}
_FLAT = {Kind.ADD: (add, "*fp32"), Kind.SILU_MUL: (silu_mul, "*fp16")}
_FLAT_BLOCK = 1024


def compiled(case: Case, arch: int) -> bytes:
    """Return the cubin, compiled without a cache."""
    with tempfile.TemporaryDirectory(prefix="triton-") as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        os.environ["TRITON_ALWAYS_COMPILE"] = "1"
        kernel, pointer, constants = _kernel(case)
        names = kernel.arg_names
        signature = {name: "constexpr" if name in constants else pointer for name in names}
        pointers = [i for i, name in enumerate(names) if name not in constants]
        source = ASTSource(kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in pointers})
        options = {"num_warps": 4, "num_stages": 3}
        binary: bytes = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options).asm["cubin"]
        return binary


def _kernel(case: Case) -> tuple[Any, str, dict[str, int]]:
    match case.kind:
        case Kind.GEMM:
            _, m, n, k = case.sizes
            tile = {"BM": _tile(m), "BN": _tile(n), "BK": 32}
            return gemm, "*fp16", {"M": m, "N": n, "K": k, "EPILOGUE": EPILOGUES[case.epilogue], **tile}
        case Kind.CONV:
            images, h, w, c, f, r = case.sizes
            tile = {"BM": 128, "BN": _tile(f), "BK": 32}
            return conv, "*fp16", {"IMAGES": images, "H": h, "W": w, "C": c, "F": f, "R": r, **tile}
        case Kind.ADD | Kind.SILU_MUL:
            kernel, pointer = _FLAT[case.kind]
            size = 1
            for extent in case.sizes:
                size *= extent
            return kernel, pointer, {"SIZE": size, "BLOCK": _FLAT_BLOCK}
        case _:
            _, columns = case.sizes
            return _ROWS[case.kind], "*fp32", {"COLUMNS": columns, "BLOCK": triton.next_power_of_2(columns)}


def _tile(extent: int) -> int:
    return min(128, max(16, triton.next_power_of_2(extent)))
