"""Autotuned Triton kernels: products, row-wise programs and attention.

They follow Triton's tutorials 02 (fused softmax), 03 (matrix multiplication), 05 (layer norm) and 06 (fused
attention), with the tiles that these try.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

LOG2_E = 1.4426950408889634


def _product_tiles() -> list[Any]:
    tiles = (
        (128, 256, 64, 3, 8), (256, 128, 64, 3, 8), (128, 128, 64, 4, 8), (128, 128, 64, 4, 4), (64, 256, 32, 4, 4),
        (128, 64, 32, 4, 4), (64, 128, 32, 4, 4), (64, 32, 32, 5, 2), (16, 128, 128, 4, 4), (16, 64, 256, 3, 4),
    )  # fmt: skip
    return [
        triton.Config({"BM": m, "BN": n, "BK": k, "GROUP": 8}, num_stages=stages, num_warps=warps)
        for m, n, k, stages, warps in tiles
    ]


def _attention_tiles() -> list[Any]:
    return [
        triton.Config({"BM": m, "BN": n}, num_stages=stages, num_warps=warps)
        for m, n, stages, warps in ((128, 128, 3, 8), (128, 64, 3, 8), (128, 64, 3, 4), (64, 64, 3, 4), (16, 64, 4, 4))
    ]


@triton.jit
def matmul_kernel(
    a, b, c, M, N, K, a_m, a_k, b_k, b_n, c_m, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr
):
    """C = A B, rasterised in groups of GROUP rows of tiles."""
    tiles_n = tl.cdiv(N, BN)
    band = tl.program_id(0) // (GROUP * tiles_n)
    rows = tl.minimum(tl.cdiv(M, BM) - band * GROUP, GROUP)
    within = tl.program_id(0) % (GROUP * tiles_n)
    m = (band * GROUP + within % rows) * BM + tl.arange(0, BM)
    n = (within // rows) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    a_at = a + (m % M)[:, None].to(tl.int64) * a_m + k[None, :] * a_k
    b_at = b + k[:, None] * b_k + (n % N)[None, :].to(tl.int64) * b_n
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for step in range(tl.cdiv(K, BK)):
        left = K - step * BK
        total = tl.dot(tl.load(a_at, mask=k[None, :] < left, other=0.0), tl.load(b_at, mask=k[:, None] < left, other=0.0), total)
        a_at += BK * a_k
        b_at += BK * b_k
    inside = (m[:, None] < M) & (n[None, :] < N)
    tl.store(c + m[:, None].to(tl.int64) * c_m + n[None, :], total.to(c.dtype.element_ty), mask=inside)


@triton.jit
def softmax_kernel(x, y, columns, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64) * columns
    values = tl.load(x + row + at, mask=at < columns, other=-float("inf")).to(tl.float32)
    powers = tl.exp(values - tl.max(values, axis=0))
    tl.store(y + row + at, (powers / tl.sum(powers, axis=0)).to(y.dtype.element_ty), mask=at < columns)


@triton.jit
def norm_kernel(x, w, b, y, columns, EPSILON: tl.constexpr, CENTRED: tl.constexpr, BLOCK: tl.constexpr):
    """Layer norm; RMS norm if not centred."""
    at = tl.arange(0, BLOCK)
    mask = at < columns
    row = tl.program_id(0).to(tl.int64) * columns
    values = tl.load(x + row + at, mask=mask, other=0.0).to(tl.float32)
    if CENTRED:
        values = tl.where(mask, values - tl.sum(values, axis=0) / columns, 0.0)
    values *= tl.rsqrt(tl.sum(values * values, axis=0) / columns + EPSILON)
    values *= tl.load(w + at, mask=mask, other=0.0).to(tl.float32)
    if CENTRED:
        values += tl.load(b + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + row + at, values.to(y.dtype.element_ty), mask=mask)


@triton.jit
def attention_kernel(
    q,
    k,
    v,
    o,
    scale,
    QUERIES,
    KEYS,
    HEADS,
    SHARING,
    FEATURES: tl.constexpr,
    CAUSAL: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Compute softmax(q k^T) v for one tile of queries of one head; the last query attends to all keys."""
    head = tl.program_id(1)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    at, step = tl.arange(0, FEATURES), tl.arange(0, BN)
    q += head.to(tl.int64) * QUERIES * FEATURES
    o += head.to(tl.int64) * QUERIES * FEATURES
    shared = (head // HEADS * (HEADS // SHARING) + head % HEADS // SHARING).to(tl.int64) * KEYS * FEATURES
    queries = tl.load(q + rows[:, None] * FEATURES + at[None, :], mask=rows[:, None] < QUERIES, other=0.0)
    best = tl.full((BM,), -float("inf"), dtype=tl.float32)
    weight = tl.zeros((BM,), dtype=tl.float32)
    mixed = tl.zeros((BM, FEATURES), dtype=tl.float32)
    later = KEYS - QUERIES
    end = tl.minimum(KEYS, (tl.program_id(0) + 1) * BM + later) if CAUSAL else KEYS
    for start in range(0, end, BN):
        columns = start + step
        inside = columns < KEYS
        keys = tl.load(k + shared + columns[None, :] * FEATURES + at[:, None], mask=inside[None, :], other=0.0)
        scores = tl.dot(queries, keys) * scale
        seen = inside[None, :]
        if CAUSAL:
            seen = seen & (columns[None, :] <= rows[:, None] + later)
        scores = tl.where(seen, scores, -float("inf"))
        higher = tl.maximum(best, tl.max(scores, axis=1))
        powers = tl.exp2(scores - higher[:, None])
        rescale = tl.exp2(best - higher)
        weight = weight * rescale + tl.sum(powers, axis=1)
        values = tl.load(v + shared + columns[:, None] * FEATURES + at[None, :], mask=inside[:, None], other=0.0)
        mixed = tl.dot(powers.to(values.dtype), values, mixed * rescale[:, None])
        best = higher
    mixed /= weight[:, None]
    tl.store(o + rows[:, None] * FEATURES + at[None, :], mixed.to(o.dtype.element_ty), mask=rows[:, None] < QUERIES)


_matmul = triton.autotune(_product_tiles(), key=["M", "N", "K", "a_m", "b_k"])(matmul_kernel)
_attention = triton.autotune(_attention_tiles(), key=["QUERIES", "KEYS", "HEADS", "CAUSAL"])(attention_kernel)


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply two matrices, each row-major or column-major."""
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty((m, n), device=a.device, dtype=a.dtype)

    def grid(tile: dict[str, int]) -> tuple[int]:
        return (triton.cdiv(m, tile["BM"]) * triton.cdiv(n, tile["BN"]),)

    _matmul[grid](a, b, c, m, n, k, *a.stride(), *b.stride(), c.stride(0))
    return c


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Softmax along the last dimension."""
    y, columns = torch.empty_like(x), x.shape[-1]
    softmax_kernel[(x.numel() // columns,)](x, y, columns, BLOCK=triton.next_power_of_2(columns), num_warps=_warps(columns))
    return y


def norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, epsilon: float = 1e-5) -> torch.Tensor:
    """Layer norm along the last dimension, or, without `b`, RMS norm."""
    y, columns = torch.empty_like(x), x.shape[-1]
    norm_kernel[(x.numel() // columns,)](
        x,
        w,
        w if b is None else b,
        y,
        columns,
        EPSILON=epsilon,
        CENTRED=b is not None,
        BLOCK=triton.next_power_of_2(columns),
        num_warps=_warps(columns),
    )
    return y


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
    """q [batch, heads, queries, features], k and v [batch, key heads, keys, features], features a power of two."""
    o = torch.empty_like(q)
    batch, heads, queries, features = q.shape

    def grid(tile: dict[str, int]) -> tuple[int, int]:
        return triton.cdiv(queries, tile["BM"]), batch * heads

    _attention[grid](
        q, k, v, o, features**-0.5 * LOG2_E, queries, k.shape[2], heads, heads // k.shape[1], FEATURES=features, CAUSAL=causal
    )
    return o


def _warps(columns: int) -> int:
    return min(16, max(4, triton.next_power_of_2(columns) // 512))
