"""Every operator against numpy through the interpreter, some through a compiler; rejected arguments."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from cases_ops import (
    Case,
    attended,
    attended_pages,
    convolved,
    gelu,
    normed,
    overlapped,
    pooled,
    put,
    recurrence,
    rotated,
    sigmoid,
    softmax,
    spread,
)
from cases_sampling import QUANTIZED, RESAMPLED

import roller_svc
from roller_svc.errors import InputError, ShapeError, UnknownOpError
from roller_svc.frontend.ops import OPS, expression

IDS = np.array([2, 0, 1, 2, 2], np.int64)
INTS = np.array([[-7, 6, 5], [4, -3, 2]], np.int32)
MORE = np.array([2, -4, 3], np.int32)
BOOLS = np.array([[True], [False]])
INFINITE = np.array([[-np.inf, -np.inf], [-np.inf, 2], [np.inf, 3], [1, 2]], np.float32)
BLOCKS = np.random.default_rng(5).integers(-20, 20, (2, 517)).astype(np.float32)
BLOCKS[0, [5, 512]] = np.nan
BLOCKS[1, 3] = -np.inf
TIES = np.array([[3, 9, 9, 1], [0, 0, -1, -1]], np.float32)
PAGES = np.array([[6, 0, 3], [1, 1, 0], [2, 5, 4]])
ERF = np.vectorize(math.erf)


def on_last(pad: int) -> tuple[tuple[int, int], ...]:
    return ((pad, pad), (pad, pad))


PRODUCTS = [
    Case("matmul", ((5, 4), (4, 3)), np.matmul),
    Case("grouped_matmul", ((5, 4), (3, 4, 2), np.array([2, 0, 1, 1, 2])), lambda x, w, i:
         np.einsum("mk,mkn->mn", x, w[i])),
    Case("matmul", ((4,), (4,)), np.matmul),
    Case("matmul", ((5, 4), (4,)), np.matmul),
    Case("matmul", ((4,), (2, 4, 3)), np.matmul),
    Case("matmul", ((2, 1, 5, 4), (7, 4, 3)), np.matmul),
    Case("matmul", ((4, 5), (3, 4)), lambda a, b: a.T @ b.T, {"transpose_a": True, "transpose_b": True}),
    Case("matmul", ((5, 4), (4, 3)), lambda a, b: np.maximum(a @ b, 0), {"activation": "relu"}),
    Case("matmul", ((5, 4), (4, 3)), lambda a, b: (a @ b).astype(np.float64), {"dtype": "float64"}),
    Case("linear", ((5, 4), (3, 4), (3,)), lambda x, w, b: gelu(x @ w.T + b), {"activation": "gelu"}),
    Case("linear", ((2, 5, 4), (3, 4)), lambda x, w: x @ w.T),
    Case("gemm", ((4, 5), (4, 3), (3,)), lambda a, b, c: 0.5 * a.T @ b + 2 * c,
         {"alpha": 0.5, "beta": 2, "transpose_a": True}),
    Case("gemm", ((5, 4), (3, 4)), lambda a, b: a @ b.T, {"transpose_b": True}),
]  # fmt: skip

CONVOLUTIONS = [
    Case("conv2d", ((2, 3, 7, 6), (4, 3, 3, 3)), lambda x, w: convolved(x, w, (2, 2), on_last(1), (1, 1)),
         {"stride": 2, "padding": 1}),
    Case("conv2d", ((2, 3, 5, 6), (4, 3, 1, 1)), lambda x, w: convolved(x, w, (1, 1), on_last(0), (1, 1))),
    Case("conv2d", ((1, 4, 7, 6), (6, 2, 3, 2), (6,)),
         lambda x, w, b: np.maximum(
             convolved(x, w, (1, 1), ((2, 2), (1, 1)), (2, 2), 2) + b[:, None, None], 0),
         {"groups": 2, "dilation": 2, "padding": "same", "activation": "relu"}),
    Case("conv2d", ((1, 2, 5, 4), (3, 2, 2, 2)), lambda x, w: convolved(x, w, (2, 1), ((0, 1), (2, 0)), (1, 1)),
         {"stride": [2, 1], "padding": [0, 2, 1, 0]}),
    Case("conv2d", ((1, 5, 4, 2), (3, 3, 2, 3)),
         lambda x, w: convolved(x.transpose(0, 3, 1, 2), w.transpose(3, 2, 0, 1), (1, 1), on_last(1), (1, 1)
                                ).transpose(0, 2, 3, 1),
         {"padding": 1, "layout": "NHWC", "weight_layout": "HWIO"}),
    Case("conv1d", ((2, 3, 9), (4, 3, 3)), lambda x, w: convolved(x, w, (2,), ((1, 2),), (1,)),
         {"stride": 2, "padding": [1, 2]}),
    Case("conv3d", ((1, 2, 4, 3, 5), (2, 2, 2, 2, 2)),
         lambda x, w: convolved(x, w, (1, 1, 1), ((1, 1),) * 3, (1, 1, 1)), {"padding": 1}),
    Case("depthwise_conv2d", ((1, 3, 5, 4), (6, 1, 3, 3)),
         lambda x, w: convolved(x, w, (1, 1), on_last(1), (1, 1), 3), {"padding": 1}),
    Case("conv_transpose2d", ((2, 4, 3, 4), (4, 3, 3, 3)), lambda x, w: spread(x, w, 2, 1, 1),
         {"stride": 2, "padding": 1, "output_padding": 1}),
    Case("conv_transpose2d", ((1, 4, 3, 2), (4, 2, 2, 3), (4,)),
         lambda x, w, b: spread(x, w, 1, 0, 0, 2, 2) + b[:, None, None], {"groups": 2, "dilation": 2}),
    Case("conv_transpose1d", ((1, 2, 5), (2, 3, 4)),
         lambda x, w: spread(x[:, :, None], w[:, :, None], 3, 0, 0)[:, :, 0], {"stride": 3}),
    Case("conv_transpose3d", ((1, 2, 1, 3, 4), (2, 3, 1, 2, 3)),
         lambda x, w: spread(x[:, :, 0], w[:, :, 0], 1, 0, 0)[:, :, None]),
]  # fmt: skip

POOLS = [
    Case("max_pool2d", ((1, 2, 7, 6),), lambda x: pooled(x, (3, 3), (2, 2), 1, (4, 3)),
         {"kernel": 3, "stride": 2, "padding": 1}),
    Case("max_pool2d", ((1, 2, 7, 6),), lambda x: pooled(x, (2, 2), (1, 1), 1, (7, 6), dilation=2),
         {"kernel": 2, "stride": 1, "padding": 1, "dilation": 2}),
    Case("max_pool1d", (np.array([[[-np.inf, -np.inf, 1]]], np.float32),), lambda x: np.array([[[-np.inf, 1]]]),
         {"kernel": 2, "padding": [1, 0]}),
    Case("max_pool1d", ((1, 2, 7),), lambda x: pooled(x[:, :, None], (1, 2), (1, 2), 0, (1, 3))[:, :, 0],
         {"kernel": 2}),
    Case("max_pool3d", ((1, 2, 2, 4, 6),), lambda x: x.reshape(1, 2, 1, 2, 2, 2, 3, 2).max((3, 5, 7)), {"kernel": 2}),
    Case("avg_pool2d", ((1, 2, 7, 6),), lambda x: pooled(x, (3, 2), (3, 2), 0, (2, 3), mean=True), {"kernel": [3, 2]}),
    Case("avg_pool2d", ((1, 2, 7, 6),), lambda x: pooled(x, (3, 3), (2, 2), 1, (4, 3), mean=True),
         {"kernel": 3, "stride": 2, "padding": 1}),
    Case("avg_pool2d", ((1, 2, 7, 6),), lambda x: pooled(x, (3, 3), (2, 2), 1, (4, 3), mean=True, include_pad=False),
         {"kernel": 3, "stride": 2, "padding": 1, "count_include_pad": False}),
    Case("max_pool2d", ((1, 2, 1, 3),), lambda x: pooled(x, (3, 2), (3, 2), 0, (1, 2)),
         {"kernel": [3, 2], "stride": [3, 2], "ceil_mode": True}),
    Case("avg_pool2d", ((1, 2, 7, 6),), lambda x: pooled(x, (3, 3), (2, 2), 0, (3, 3), mean=True),
         {"kernel": 3, "stride": 2, "ceil_mode": True}),
    Case("avg_pool1d", ((1, 2, 6),), lambda x: x.reshape(1, 2, 3, 2).mean(-1), {"kernel": 2}),
    Case("avg_pool3d", ((1, 2, 2, 4, 6),), lambda x: x.reshape(1, 2, 1, 2, 2, 2, 3, 2).mean((3, 5, 7)), {"kernel": 2}),
    Case("avg_pool2d", ((1, 2, 9, 8),), lambda x: pooled(x, (3, 2), (2, 1), 1, (4, 8), mean=True, include_pad=False,
                                                         dilation=2),
         {"kernel": [3, 2], "stride": [2, 1], "padding": 1, "dilation": 2, "count_include_pad": False}),
    Case("avg_pool2d", ((1, 2, 9, 8),), lambda x: pooled(x, (3, 2), (2, 1), 1, (4, 8), mean=True, dilation=2),
         {"kernel": [3, 2], "stride": [2, 1], "padding": 1, "dilation": 2}),
    *(
        Case(f"max_pool_indices{rank}d", (TIES.reshape(2, 1, *(1,) * (rank - 1), 4),),
             lambda x: np.where(x[..., :-1] >= x[..., 1:], 0, 1) + np.arange(3) + np.arange(0, 8, 4).reshape(
                 (2, *(1,) * (x.ndim - 1))),
             {"kernel": [*(1,) * (rank - 1), 2], "stride": 1})
        for rank in (1, 2, 3)
    ),
    Case("max_pool_indices2d", ((2, 2, 3, 4),), lambda x: np.stack([np.stack([
             [[h + 3 * w + 12 * (2 * n + c) for h, w in [divmod(x[n, c].argmax(), 4)]]] for c in range(2)])
             for n in range(2)]), {"kernel": [3, 4], "column_major": True}),
    Case("max_pool_indices2d", (np.full((1, 1, 2, 3), -np.inf, np.float32),), lambda x: np.array([[[[0, 0, 1, 2]]]]),
         {"kernel": [2, 2], "stride": 1, "padding": [0, 1]}),
    Case("max_pool_indices1d", (np.array([[[1, np.nan, 2, np.nan]]], np.float32),), lambda x: np.array([[[1]]]),
         {"kernel": 4, "dtype": "int32"}),
    *(
        Case(f"lp_pool{rank}d", ((*(1, 2, 2, 4)[: rank + 1], 6),),
             lambda x: sum(np.abs(x[..., d : d + 4]) ** 3 for d in (0, 2)) ** (1 / 3),
             {"kernel": [*(1,) * (rank - 1), 2], "stride": 1, "dilation": [*(1,) * (rank - 1), 2], "p": 3})
        for rank in (1, 2, 3)
    ),
    Case("lp_pool1d", ((1, 2, 3),), lambda x: np.sqrt(np.square(np.pad(x, ((0, 0), (0, 0), (1, 0)))).reshape(
        1, 2, 2, 2).sum(-1)), {"kernel": 2, "padding": [1, 0]}),
    Case("lp_pool1d", (INTS.reshape(1, 1, 6),), lambda x: np.abs(x).reshape(1, 1, 3, 2).sum(-1), {"kernel": 2, "p": 1}),
    *(
        Case(f"global_lp_pool{rank}d", ((2, 3, 4, 5, 6)[: rank + 2],),
             lambda x: np.sqrt((x * x).sum(tuple(range(2, x.ndim)), keepdims=True)))
        for rank in (1, 2, 3)
    ),
    *(
        Case(f"global_{name}_pool{rank}d", ((2, 3, 4, 5, 6)[: rank + 2],),
             lambda x, f=reduce: f(x, axis=tuple(range(2, x.ndim)), keepdims=True))
        for name, reduce in (("avg", np.mean), ("max", np.max)) for rank in (1, 2, 3)
    ),
    Case("global_avg_pool2d", ((2, 4, 5, 3),), lambda x: x.mean((1, 2), keepdims=True), {"layout": "NHWC"}),
]  # fmt: skip

NORMS = [
    Case("softmax", ((3, 5),), softmax),
    Case("softmax", ((3, 5, 2),), lambda x: softmax(x, 1), {"axis": 1}),
    Case("softmax", (TIES * 100,), softmax),
    Case("log_softmax", ((3, 5),), lambda x: np.log(softmax(x))),
    Case("layer_norm", ((3, 5), (5,), (5,)), lambda x, w, b: normed(x, (1,)) * w + b),
    Case("layer_norm", ((3, 5, 2),), lambda x: normed(x, (1, 2), 0.1), {"axis": 1, "epsilon": 0.1}),
    Case("lp_norm", ((3, 5),), lambda x: x / np.sqrt((x * x).sum(1, keepdims=True))),
    Case("lp_norm", (TIES * [[0], [1]],), lambda x: x / np.maximum(np.abs(x).sum(1, keepdims=True), 1), {"p": 1}),
    Case("lp_norm", ((3, 5),), lambda x: x / (np.abs(x) ** 1.5).sum(0) ** (1 / 1.5), {"axis": 0, "p": 1.5}),
    Case("rms_norm", ((3, 5), (5,)), lambda x, w: x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-5) * w),
    Case("batch_norm", ((2, 3, 4), (3,), (3,), (3,), (3,)),
         lambda x, s, b, m, v: (x - m[:, None]) / np.sqrt(v[:, None] + 1e-5) * s[:, None] + b[:, None], low=0.1),
    Case("group_norm", ((2, 6, 3, 2), (6,), (6,)),
         lambda x, w, b: normed(x.reshape(2, 3, 2, 3, 2), (2, 3, 4)).reshape(x.shape) * w[:, None, None]
         + b[:, None, None], {"groups": 3}),
    Case("group_norm", ((2, 3, 4),), lambda x: normed(x, (2,)), {"groups": 3}),
    Case("attention", ((2, 4, 5, 8), (2, 2, 6, 8), (2, 2, 6, 3)), lambda q, k, v: attended(q, k, v, causal=True),
         {"causal": True}),
    Case("attention", ((5, 8), (6, 8), (6, 3), (5, 6)), attended),
    Case("attention", ((4, 5, 8), (1, 6, 8), (1, 6, 3), (1, 6)), attended),
    Case("attention", ((2, 2, 3, 4, 2), (2, 2, 3, 4, 2), (2, 2, 3, 4, 2)),
         lambda q, k, v: attended(q * math.sqrt(2), k, v), {"scale": 1}),
    Case("paged_attention", ((3, 4, 8), (7, 2, 2, 8), (7, 2, 2, 5), PAGES, np.array([5, 0, 6])), lambda q, *rest:
         attended_pages(q[:, None], *rest, scale=8**-0.5)[:, 0]),
    Case("paged_attention", ((3, 3, 4, 8), (7, 2, 2, 8), (7, 2, 2, 5), PAGES, np.array([5, 1, 9]), (4,)), lambda *given:
         attended_pages(*given, scale=2.0, window=2, soft_cap=1.5), {"scale": 2, "window": 2, "soft_cap": 1.5}),
    Case("paged_attention", ((3, 4, 8), (7, 2, 2, 8), (7, 2, 2, 5), PAGES, np.array([5, 0, 6]),
                             np.array([-np.inf, 0.5, -np.inf, -9], np.float32)), lambda q, *rest:
         attended_pages(q[:, None], *rest, scale=8**-0.5)[:, 0]),
    *(Case("paged_attention", ((3, 3, 4, 8), (7, 2, 2, 8), (7, 2, 2, 5), PAGES, np.array([0, 1, 6], kind)), lambda *given:
           attended_pages(*given, scale=8**-0.5, window=150), {"window": 150}) for kind in ("int8", "uint8", "uint64")),
    Case("paged_attention", ((3, 1, 2, 4), (9, 2, 1, 4), (9, 2, 1, 3), PAGES, np.array([1, 2, 3]), (2,)),
         lambda q, k, v, *rest: attended_pages(q, k.swapaxes(1, 2), v.swapaxes(1, 2), *rest, scale=0.5), {"layout": "HND"}),
    Case("rope", ((2, 5, 3, 8), (7, 4), (7, 4), np.array([6, 0, 3, 3, 1])), lambda x, c, s, p:
         rotated(x, c[p][:, None], s[p][:, None])),
    Case("rope", ((2, 3, 5, 7), (2, 5, 2), (2, 5, 2)), lambda x, c, s: rotated(x, c[:, None], s[:, None], interleaved=True),
         {"interleaved": True, "layout": "HND"}),
    Case("rope", ((5, 3, 3), (5, 1), (5, 1)), lambda x, c, s: rotated(x, c[:, None], s[:, None])),
    Case("rope", ((2, 1, 3, 2), (4, 1), (4, 1), np.array([[3], [1]])), lambda x, c, s, p:
         rotated(x, c[p][:, :, None], s[p][:, :, None]), {"interleaved": True}),
]  # fmt: skip

REDUCTIONS = [
    Case("reduce_sum", ((3, 4, 2),), lambda x: x.sum((0, 2)), {"axis": [0, -1]}),
    Case("reduce_sum", ((3, 4),), lambda x: x.sum()),
    Case("reduce_sum", ((3, 4),), lambda x: x, {"axis": []}),
    Case("reduce_sum", (INTS,), lambda x: x.sum(1, np.int64), {"axis": 1, "dtype": "int64"}),
    Case("reduce_prod", ((3, 4),), lambda x: x.prod(1, keepdims=True), {"axis": 1, "keepdims": True}),
    Case("reduce_max", ((3, 4),), lambda x: x.max(0), {"axis": 0}),
    Case("reduce_min", (INTS,), lambda x: x.min(0), {"axis": 0}),
    Case("reduce_mean", ((3, 4),), lambda x: x.mean()),
    Case("reduce_mean", (INTS,), lambda x: x.mean(1), {"axis": 1}),
    Case("reduce_all", (INTS,), lambda x: x.all(1), {"axis": 1}),
    Case("reduce_any", (INTS * 0,), lambda x: x.any(1), {"axis": 1}),
    Case("reduce_l1", ((3, 4),), lambda x: np.abs(x).sum(1), {"axis": 1}),
    Case("reduce_l2", ((3, 4),), lambda x: np.sqrt((x * x).sum(1)), {"axis": 1}),
    Case("reduce_sum_square", ((3, 4),), lambda x: (x * x).sum(1), {"axis": 1}),
    Case("reduce_log_sum", ((3, 4),), lambda x: np.log(x.sum(1)), {"axis": 1}, low=0.1),
    Case("reduce_log_sum_exp", ((3, 4),), lambda x: np.log(np.exp(x).sum(1)), {"axis": 1}),
    Case("reduce_log_sum_exp", (INFINITE,), lambda x: np.logaddexp.reduce(x, 1), {"axis": 1}),
    *(
        Case(f"cum{name}", ((2, 7, 3),), lambda x, f=function: f(x, 1), {"axis": 1})
        for name, function in (
            ("sum", np.cumsum),
            ("prod", np.cumprod),
            ("max", np.maximum.accumulate),
            ("min", np.minimum.accumulate),
        )
    ),
    Case(
        "cumsum",
        (INTS,),
        lambda x: np.cumsum(x[:, ::-1], 1)[:, ::-1].astype(np.int64),
        {"reverse": True, "dtype": "int64"},
    ),
    *(
        Case(
            "cummax",
            (np.arange(-3, 4).astype(d),),
            lambda x: np.maximum.accumulate(np.append(x.dtype.type(np.iinfo(x.dtype).min), x[:-1])),
            {"exclusive": True},
        )
        for d in ("int8", "uint16", "int64")
    ),
    Case(
        "cummin", (np.arange(9, dtype=np.uint64),), lambda x: np.append(x[1:], ~np.uint64(0)), {"exclusive": True, "reverse": True}
    ),
    Case("cumprod", ((5,),), lambda x: np.cumprod([1, *x[:-1]]), {"exclusive": True}),
    Case("cumsum", ((5,),), lambda x: np.cumsum([0, *x[:0:-1]])[::-1], {"exclusive": True, "reverse": True}),
    Case("linear_recurrence", ((7, 3), (2, 7, 3)), lambda a, x: recurrence(a, x, 1), {"axis": 1}),
    Case(
        "linear_recurrence",
        ((2, 1), (2, 5), (2,)),
        lambda a, x, h: recurrence(a, x[:, ::-1], 1, h)[:, ::-1],
        {"reverse": True},
    ),
    Case("linear_recurrence", ((3, 2), (3, 2), (1,)), lambda a, x, h: recurrence(a, x, 0, h), {"axis": 0}),
    Case("segmented_cumsum", ((3, 5), np.array([0, 0, 1, 0, 1])), lambda x, s: recurrence(1 - s, x, 1)),
    Case("cumsum", ((2, 600),), lambda x: np.cumsum(x, 1)),
    Case("cumsum", ((130, 127),), lambda x: np.cumsum(x, 0), {"axis": 0}),
    Case(
        "cumsum",
        (np.arange(1201, dtype=np.int32),),
        lambda x: np.cumsum(x[::-1])[::-1] - x,
        {"exclusive": True, "reverse": True},
    ),
    Case(
        "cumprod",
        (np.linspace(0.99, 1.01, 700, dtype=np.float32).reshape(700, 1),),
        lambda x: np.cumprod(x, 0),
        {"axis": 0},
    ),
    Case("top_k_indices", (TIES,), lambda x: np.argsort(-x, 1, kind="stable")[:, :3], {"k": 3}),
    Case("top_k_values", (TIES,), lambda x: -np.sort(-x, 1)[:, :3], {"k": 3}),
    Case(
        "top_k_values",
        (np.array([[2, np.nan, np.inf], [np.nan, -np.inf, np.nan]], np.float32),),
        lambda x: np.sort(x, 1),  # NaN is last, behind infinity
        {"k": 3, "largest": False},
    ),
    Case("top_k_values", (np.array([2, np.nan, np.inf], np.float32),), lambda x: x[[1, 2]], {"k": 2}),
    Case("top_k_indices", (TIES,), lambda x: np.argsort(x, 1, kind="stable"), {"k": 4, "largest": False}),
    # found in blocks, of which the last is short: it begins with NaN, and has fewer elements than are chosen
    Case("top_k_indices", (BLOCKS,), lambda x: np.argsort(-np.nan_to_num(x, nan=np.inf), 1, kind="stable")[:, :9], {"k": 9}),
    Case(
        "top_k_indices",
        (BLOCKS.T,),
        lambda x: np.argsort(np.nan_to_num(x, nan=np.inf), 0, kind="stable")[:3],
        {"k": 3, "axis": 0, "largest": False},
    ),
    Case(
        "top_k_indices",
        (np.arange(2048, dtype=np.int8)[None],),
        lambda x: np.argsort(-x.astype(int), 1, kind="stable")[:, :7],
        {"k": 7},
    ),
    Case("top_k_indices", ((6, 2),), lambda x: np.argsort(-x, 0)[:2], {"k": 2, "axis": 0, "dtype": "int32"}),
    Case(
        "top_k_indices",
        (np.array([2, np.nan, np.inf, -np.inf, np.nan, 3], np.float32),),
        lambda x: np.array([1, 4, 2, 5, 0, 3]),
        {"k": 6},
    ),
    Case(
        "top_k_indices",
        (np.array([2, np.nan, np.inf, -np.inf, np.nan, 3], np.float32),),
        lambda x: np.array([3, 0, 5, 2, 1, 4]),
        {"k": 6, "largest": False},
    ),
    Case("top_k_indices", (np.array([2**63 + 1, 2**63, 7], np.uint64),), lambda x: np.array([0, 1]), {"k": 2}),
    Case("argmax", (TIES,), lambda x: x.argmax(1)),
    Case("argmax", (TIES,), lambda x: 3 - x[:, ::-1].argmax(1), {"last": True}),
    Case("argmin", (TIES,), lambda x: x.argmin(0, keepdims=True), {"axis": 0, "keepdims": True}),
    Case("argmax", (np.where(TIES == 1, np.nan, TIES),), lambda x: x.argmax(1), {"dtype": "int32"}),
]

LAYOUTS = [
    Case("transpose", ((3, 4, 2),), np.transpose),
    Case("transpose", ((3, 4, 2),), lambda x: x.transpose(1, 2, 0), {"permutation": [1, -1, 0]}),
    Case("reshape", ((6, 4),), lambda x: x.reshape(3, 2, 4), {"shape": [3, -1, 4]}),
    Case("reshape", ((6, 4),), lambda x: x.reshape(8, 3), {"shape": [8, 3]}),
    Case("reshape", ((2, 3, 1, 4),), lambda x: x.reshape(1, 6, 2, 2, 1), {"shape": [1, 6, 2, 2, 1]}),
    Case("reshape", ((4, 3, 5),), lambda x: x.reshape(6, 10), {"shape": [6, 10]}),
    Case("reshape", ((1, 1),), lambda x: x.reshape(()), {"shape": []}),
    Case("squeeze", ((1, 3, 1),), lambda x: x[0, :, 0], {"axis": [0, -1]}),
    Case("unsqueeze", ((3, 2),), lambda x: x[None, :, :, None], {"axis": [0, -1]}),
    Case("broadcast_to", ((3, 1),), lambda x: np.broadcast_to(x, (2, 3, 4)), {"shape": [2, 3, 4]}),
    Case("concat", ((3, 5), (3, 2), (3, 1)), lambda *t: np.concatenate(t, 1), {"axis": -1}),
    Case("concat", ((3, 5),), lambda x: x),
    Case("concat", tuple((3, 1 + i % 3) for i in range(40)), lambda *t: np.concatenate(t, 1), {"axis": 1}),
    Case("concat", ((2, 1, 2),) * 130, lambda *t: np.concatenate(t, 1), {"axis": 1}),
    Case("pad", ((3, 5),), lambda x: np.pad(x, ((0, 1), (2, 0)), constant_values=0.5),
         {"pads": [0, 2, 1, 0], "value": 0.5}),
    Case("pad", ((3, 5),), lambda x: x[1:, :-2], {"pads": [-1, 0, 0, -2]}),
    *(
        Case("pad", ((3, 5),), lambda x, m=mode: np.pad(x, ((2, 1), (3, 4)), mode=m),
             {"pads": [2, 3, 1, 4], "mode": mode})
        for mode in ("edge", "reflect", "wrap")
    ),
    Case("pad", ((3, 7),), lambda x: np.pad(x[:, 2:], ((1, 1), (0, 4)), mode="reflect"),
         {"pads": [1, -2, 1, 4], "mode": "reflect"}),
    Case("pad", ((3, 7),), lambda x: np.pad(x[:, :-3], ((0, 0), (3, 0)), mode="reflect"),
         {"pads": [0, 3, 0, -3], "mode": "reflect"}),
    Case("pad", ((3, 7),), lambda x: np.pad(x[:, 2:], ((0, 0), (0, 6)), mode="wrap"),
         {"pads": [0, -2, 0, 6], "mode": "wrap"}),
    Case("pad", ((3, 7),), lambda x: np.pad(x[:, :-3], ((1, 0), (6, 0)), mode="wrap"),
         {"pads": [1, 6, 0, -3], "mode": "wrap"}),
    Case("slice", ((3, 9),), lambda x: x[1:, -1:-8:-3],
         {"starts": [1, -1], "stops": [99, -8], "axes": [0, 1], "steps": [1, -3]}),
    Case("slice", ((3, 9),), lambda x: x[:2], {"starts": 0, "stops": 2}),
    Case("flip", ((3, 4),), lambda x: x[::-1, ::-1]),
    Case("flip", ((3, 4),), lambda x: x[:, ::-1], {"axis": 1}),
    Case("pad", ((3, 5),), lambda x: np.pad(x, 1, constant_values=-np.inf), {"pads": 1, "value": -math.inf}),
    Case("trilu", ((2, 3, 5),), lambda x: np.tril(x, -1), {"diagonal": -1}),
    Case("trilu", (INTS,), lambda x: np.triu(x, 1), {"diagonal": 1, "upper": True}),
    Case("tile", ((2, 1, 3),), lambda x: np.tile(x, (1, 4, 2)), {"repeats": [1, 4, 2]}),
    Case("depth_to_space", ((2, 12, 2, 3),),
         lambda x: x.reshape(2, 2, 2, 3, 2, 3).transpose(0, 3, 4, 1, 5, 2).reshape(2, 3, 4, 6), {"block": 2}),
    Case("depth_to_space", ((2, 12, 2, 3),),
         lambda x: x.reshape(2, 3, 2, 2, 2, 3).transpose(0, 1, 4, 2, 5, 3).reshape(2, 3, 4, 6),
         {"block": 2, "order": "channels_first"}),
    Case("space_to_depth", ((2, 3, 4, 6),),
         lambda x: x.reshape(2, 3, 2, 2, 3, 2).transpose(0, 3, 5, 1, 2, 4).reshape(2, 12, 2, 3), {"block": 2}),
    Case("col2im", ((1, 8, 4),), lambda x: overlapped(x, (4, 5), (2, 2), (1, 2), (0, 0), (2, 1)),
         {"image": [4, 5], "kernel": [2, 2], "stride": [1, 2], "dilation": [2, 1], "padding": [0, 0]}),
    Case("col2im", ((2, 6, 10),), lambda x: overlapped(x, (3, 5), (3, 1), (2, 1), (1, 0), (1, 1)),
         {"image": [3, 5], "kernel": [3, 1], "stride": [2, 1], "padding": [1, 0, 1, 0]}),
    Case("gather", ((2, 3, 4), IDS), lambda x, i: x[:, i], {"axis": 1}),
    Case("gather", ((3, 4), -IDS.reshape(1, 5)), lambda x, i: x[i], {"negative": True}),
    Case("embedding", ((3, 4), IDS), lambda x, i: x[i]),
    Case("gather_elements", ((3, 4), IDS[:4].reshape(2, 2)), lambda x, i: np.take_along_axis(x[:, :2], i, 0)),
    Case("gather_nd", ((3, 4, 2), np.stack([IDS, IDS - 1], 1)), lambda x, i: x[i[:, 0], i[:, 1]], {"negative": True}),
    Case("gather_nd", ((5, 3, 2), IDS.reshape(5, 1)), lambda x, i: x[np.arange(5), i[:, 0]], {"batch_dims": 1}),
    Case("reverse_sequence", ((4, 3), IDS[:3]), lambda x, n: np.stack(
        [np.concatenate([x[: n[j], j][::-1], x[n[j] :, j]]) for j in range(3)], 1)),
    Case("reverse_sequence", ((3, 4, 2), IDS[:3] + 1), lambda x, n: np.stack(
        [np.concatenate([x[j, : n[j]][::-1], x[j, n[j] :]]) for j in range(3)]), {"time_axis": 1, "batch_axis": 0}),
    Case("scatter_elements", ((3, 4), IDS[:4].reshape(1, 4), (1, 4)), lambda x, i, u: put(x, (i, np.arange(4)), u)),
    *(
        Case("scatter_elements", ((4, 3), -IDS[:4].reshape(4, 1), (4, 1)),
             lambda x, i, u, f=function: put(x, (np.arange(4)[:, None], i), u, f),
             {"axis": 1, "negative": True, "reduction": name})
        for name, function in (("add", np.add), ("max", np.maximum), ("min", np.minimum))
    ),
    Case("scatter_nd", ((3, 4), IDS[:3].reshape(3, 1), (3, 4)), lambda x, i, u: put(x, (i[:, 0],), u)),
    Case("scatter_nd", ((2, 3, 4), IDS[:3].reshape(3, 1), (3, 2, 4)),
         lambda x, i, u: put(x.transpose(1, 0, 2), (i[:, 0],), u).transpose(1, 0, 2), {"axes": 1}),
    Case("scatter_nd", ((3, 2, 4), np.stack([IDS, IDS - 2], 1)[:2], (2, 2)),
         lambda x, i, u: put(x.transpose(2, 0, 1), (i[:, 0], i[:, 1]), u).transpose(1, 2, 0),
         {"axes": (-1, 0), "negative": True}),
    Case("scatter_nd", ((3, 4), np.stack([IDS, IDS - 1], 1), (5,)),
         lambda x, i, u: put(x, (i[:, 0], i[:, 1]), u, np.add), {"reduction": "add", "negative": True}),
    Case("one_hot", (IDS - 1,), lambda i: np.eye(3, dtype=np.float32)[i], {"depth": 3, "negative": True}),
    Case("one_hot", (IDS,), lambda i: np.eye(3, dtype=np.float32)[i], {"depth": 3}),
    Case("one_hot", (IDS,), lambda i: np.eye(4, dtype=np.int8)[i].T, {"depth": 4, "axis": 0, "dtype": "int8"}),
]  # fmt: skip

FUNCTIONS: dict[str, Any] = {
    "exp": np.exp, "exp2": np.exp2, "expm1": np.expm1, "log": np.log, "log2": np.log2, "log10": np.log10,
    "log1p": np.log1p, "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "reciprocal": lambda x: 1 / x,
    "square": np.square, "abs": np.abs, "sign": np.sign, "sin": np.sin, "cos": np.cos, "tan": np.tan,
    "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan, "sinh": np.sinh, "cosh": np.cosh, "tanh": np.tanh,
    "asinh": np.arcsinh, "atanh": np.arctanh, "erf": ERF,
    "normcdf": lambda x: 0.5 * (1 + ERF(x / math.sqrt(2))), "sigmoid": sigmoid, "silu": lambda x: x * sigmoid(x),
    "relu": lambda x: np.maximum(x, 0), "softplus": lambda x: np.log1p(np.exp(x)), "round": np.round,
    "trunc": np.trunc, "isnan": np.isnan,
    "shrink": lambda x: np.where(x < -0.5, x, np.where(x > 0.5, x, 0)), "identity": lambda x: x, "neg": np.negative,
    "floor": np.floor, "ceil": np.ceil, "softsign": lambda x: x / (1 + np.abs(x)),
    "mish": lambda x: x * np.tanh(np.log1p(np.exp(x))), "hard_swish": lambda x: x * np.clip(x / 6 + 0.5, 0, 1),
    "leaky_relu": lambda x: np.where(x >= 0, x, 0.01 * x), "elu": lambda x: np.where(x >= 0, x, np.expm1(x)),
    "celu": lambda x: np.where(x >= 0, x, np.expm1(x)), "gelu": gelu,
    "selu": lambda x: 1.0507009873554805 * np.where(x >= 0, x, 1.6732632423543772 * np.expm1(x)),
    "hard_sigmoid": lambda x: np.clip(0.2 * x + 0.5, 0, 1), "thresholded_relu": lambda x: np.where(x > 1, x, 0),
}  # fmt: skip
POSITIVE = {"log", "log2", "log10", "sqrt", "rsqrt", "reciprocal", "pow"}
BROADCAST: dict[str, Any] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "pow": np.power, "fmod": np.fmod,
    "mod": np.mod, "max": np.maximum, "min": np.minimum, "atan2": np.arctan2, "hypot": np.hypot,
    "remainder": np.vectorize(math.remainder), "equal": np.equal, "not_equal": np.not_equal, "less": np.less,
    "less_equal": np.less_equal, "greater": np.greater, "greater_equal": np.greater_equal,
    "logical_and": np.logical_and, "logical_or": np.logical_or, "logical_xor": np.logical_xor,
    "prelu": lambda x, y: np.where(x >= 0, x, x * y), "silu_mul": lambda x, y: x * sigmoid(x) * y,
    "gelu_mul": lambda x, y: gelu(x) * y, "mean": lambda x, y: (x + y) / 2,
}  # fmt: skip

ELEMENTS = [
    *(
        Case(name, ((2, 3),), function, {}, 0.1 if name in POSITIVE else -1.0)
        for name, function in FUNCTIONS.items()
    ),
    *(Case(name, ((2, 1), (3, 1, 4)), function, {}, 0.1 if name in POSITIVE else -1.0)
      for name, function in BROADCAST.items()),
    Case("acosh", (np.array([1, 1.5, 7], np.float32),), np.arccosh),
    Case("add", ((2, 1), (4,), ()), lambda x, y, z: x + y + z),
    Case("max", ((2, 1), (4,), ()), lambda x, y, z: np.maximum(np.maximum(x, y), z)),
    Case("mod", (INTS, MORE), np.mod),
    Case("fmod", (INTS, MORE), np.fmod),
    Case("div", (INTS, MORE), lambda x, y: (x / y).astype(np.float32)),
    Case("div", (INTS, MORE), np.floor_divide, {"rounding": "floor"}),
    Case("div", (INTS, MORE), lambda x, y: np.trunc(x / y), {"rounding": "trunc"}),
    Case("div", ((2, 3), (3,)), lambda x, y: np.floor(x / y), {"rounding": "floor"}),
    Case("shift_left", (np.abs(INTS), np.abs(MORE)), np.left_shift),
    Case("shift_right", (INTS, np.abs(MORE)), np.right_shift),
    Case("bitwise_and", (INTS, MORE), np.bitwise_and),
    Case("bitwise_or", (INTS, MORE), np.bitwise_or),
    Case("bitwise_xor", (INTS, MORE), np.bitwise_xor),
    Case("bitwise_not", (INTS,), np.bitwise_not),
    Case("logical_not", (BOOLS,), np.logical_not),
    Case("logical_and", (BOOLS, INTS), np.logical_and),
    Case("where", (BOOLS, (2, 3), (3,)), np.where),
    Case("where", (INTS, (2, 3), (3,)), np.where),
    Case("clip", ((2, 3),), lambda x: np.clip(x, -0.5, 0.25), {"least": -0.5, "most": 0.25}),
    Case("clip", (INTS,), lambda x: np.maximum(x, 3), {"least": 3}),
    *(
        Case("isinf", (np.array([1, np.inf, -np.inf, np.nan], np.float32),), lambda x, s=signs: np.isin(x, s),
             {"negative": -np.inf in signs, "positive": np.inf in signs})
        for signs in ([np.inf, -np.inf], [np.inf], [-np.inf], [])
    ),
    Case("clip", ((2, 3),), lambda x: np.minimum(x, 0.25), {"least": -math.inf, "most": 0.25}),
    Case("cast", ((2, 3),), lambda x: (x * 1).astype(np.int32), {"dtype": "int32"}),
    Case("cast", (INTS - 4,), lambda x: x.astype(bool), {"dtype": "bool"}),
    Case("cast", (INTS,), lambda x: x.astype(np.float16), {"dtype": "half"}),
    Case("gelu", ((2, 3),), lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
         {"approximate": "tanh"}),
    Case("leaky_relu", ((2, 3),), lambda x: np.where(x >= 0, x, 0.5 * x), {"alpha": 0.5}),
]  # fmt: skip

CASES = [*PRODUCTS, *CONVOLUTIONS, *POOLS, *NORMS, *REDUCTIONS, *LAYOUTS, *ELEMENTS, *RESAMPLED, *QUANTIZED]
# Those whose statements are of another kind than the others': scatters, counted ranks, blocks, infinities.
INDEXED = ("cumsum", "gather_nd", "linear_recurrence", "segmented_cumsum", "max_pool_indices2d", "reverse_sequence",
           "scatter_elements", "scatter_nd", "top_k_indices", "col2im", "space_to_depth", "paged_attention",
           "rope")  # fmt: skip
COMPILED = [*(next(case for case in reversed(CASES) if case.operator == name) for name in INDEXED),
            next(case for case in CASES if case.parameters.get("value") == -math.inf),
            PRODUCTS[4], PRODUCTS[8], CONVOLUTIONS[2], CONVOLUTIONS[8], POOLS[6], NORMS[4], NORMS[10], REDUCTIONS[16],
            LAYOUTS[5], LAYOUTS[10], *RESAMPLED[:6], *RESAMPLED[9:24:7], *RESAMPLED[26:34], *QUANTIZED]  # fmt: skip


def types(arrays: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (array.dtype.name, array.shape) for name, array in arrays.items()}


def check(case: Case, got: Any) -> None:
    arrays = case.arrays()
    wide = [array.astype(np.float64) if array.dtype.kind == "f" else array for array in arrays.values()]
    with np.errstate(all="ignore"):
        expected = case.expected(*wide)
    assert got.shape == np.shape(expected)
    if got.dtype == bool:
        assert np.asarray(expected).dtype == bool
    np.testing.assert_allclose(got.astype(np.float64), np.asarray(expected, np.float64), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_an_operator_is_numpys(case: Case) -> None:
    arrays = case.arrays()
    text = expression(case.operator, types(arrays), **case.parameters)
    check(case, roller_svc.reference(text, types(arrays), arrays)["output0"])


def test_every_operator_is_tried() -> None:
    assert sorted(set(OPS) - {case.operator for case in CASES}) == []


@pytest.mark.parametrize("case", COMPILED, ids=lambda case: case.id)
def test_kernels_of_operators(case: Case) -> None:
    arrays = case.arrays()
    text = expression(case.operator, types(arrays), **case.parameters)
    kernel = roller_svc.compile(text, types(arrays), select="model", top_k=1)
    check(case, kernel(**arrays)["output0"])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "float8_e4m3fn", "int8", "uint8", "int64", "bool"])
def test_padding_is_less_than_anything(dtype: str) -> None:
    text = expression("max_pool1d", {"x": (dtype, (1, 1, 4))}, kernel=3, stride=1, padding=1)
    import ml_dtypes

    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    x = np.array([[[0, 1, 0, 0]]]).astype(kind)
    assert roller_svc.reference(text, {"x": (dtype, (1, 1, 4))}, {"x": x})["output0"].tolist() == [[[1, 1, 1, 0]]]


def test_names_stay_apart() -> None:
    """Tensors are named like axes and intermediate results."""
    given = {"i": ("float32", (2, 3)), "output0": ("float32", (3,)), "output1_sum": ("float32", (3,))}
    text = expression("layer_norm", given)
    assert "output1_sum_[i_] +=! i[i_, j]" in text
    arrays = {name: np.ones(shape, np.float32) for name, (_, shape) in given.items()}
    assert roller_svc.reference(text, given, arrays)["output1"].tolist() == [[1, 1, 1]] * 2


@pytest.mark.parametrize(
    ("operator", "shapes", "parameters", "code"),
    [
        ("matmul", [(2, 3), (4, 5)], {}, "operand-shape"),
        ("matmul", [(2, 3), ()], {}, "operand-shape"),
        ("matmul", [(2, 3)], {}, "wrong-arguments"),
        ("matmul", [(2, 3)] * 3, {}, "wrong-arguments"),
        ("conv2d", [(1, 3, 8, 8), (4, 2, 3, 3)], {}, "operand-shape"),
        ("conv2d", [(1, 3, 8, 8), (4, 1, 3, 3)], {"groups": 2}, "operand-shape"),
        ("conv2d", [(1, 3, 2, 2), (4, 3, 3, 3)], {}, "operand-shape"),
        ("conv2d", [(1, 3, 8), (4, 3, 3)], {}, "operand-shape"),
        ("conv2d", [(1, 3, 8, 8), (4, 3, 3, 3), (5,)], {}, "operand-shape"),
        ("conv2d", [(1, 3, 8, 8), (4, 3, 3, 3)], {"stride": 0}, "invalid-parameter"),
        ("conv2d", [(1, 3, 8, 8), (4, 3, 3, 3)], {"stride": [1, 2, 3]}, "invalid-parameter"),
        ("conv2d", [(1, 3, 8, 8), (4, 3, 3, 3)], {"padding": "sme"}, "invalid-parameter"),
        ("conv2d", [(1, 3, 8, 8), (4, 3, 3, 3)], {"padding": [1, 2, 3]}, "invalid-parameter"),
        ("conv2d", [(1, 3, 8, 8), (4, 3, 3, 3)], {"padding": True}, "invalid-parameter"),
        ("conv2d", [(1, 3, 8, 8), (4, 3, 3, 3)], {"strides": 1}, "unknown-parameter"),
        ("conv2d", [(1, 3, 8, 8), (4, 3, 3, 3)], {"dtype": "float33"}, "invalid-parameter"),
        ("conv_transpose2d", [(1, 3, 1, 1), (3, 4, 1, 1)], {"padding": 1}, "operand-shape"),
        ("max_pool2d", [(1, 3, 8, 8)], {}, "missing-parameter"),
        ("softmax", [(2, 3)], {"axis": 2}, "operand-shape"),
        ("softmax", [()], {}, "operand-shape"),
        ("add", [(2, 3), (4,)], {}, "operand-shape"),
        ("reshape", [(2, 3)], {"shape": [4, -1]}, "operand-shape"),
        ("reshape", [(2, 3)], {"shape": [-1, -1]}, "operand-shape"),
        ("concat", [(2, 3), (3, 3)], {"axis": 1}, "operand-shape"),
        ("pad", [(2, 3)], {"pads": [0, 3, 0, 0], "mode": "reflect"}, "operand-shape"),
        ("pad", [(2, 3)], {"pads": [0, -3, 0, 0]}, "operand-shape"),
        ("slice", [(2, 3)], {"starts": [2], "stops": [1]}, "operand-shape"),
        ("slice", [(2, 3)], {"starts": [0], "stops": [1], "steps": [0]}, "operand-shape"),
        ("gather", [(2, 3), (4,)], {}, "type-error"),
        ("gather_nd", [(2, 3), (4, 3)], {}, "operand-shape"),
        ("gather_nd", [(2, 3), (4, 1)], {"batch_dims": 1}, "operand-shape"),
        ("scatter_nd", [(2, 3), (4, 3), (4,)], {}, "operand-shape"),
        ("scatter_nd", [(2, 3), (4, 1), (4,)], {}, "operand-shape"),
        ("scatter_nd", [(2, 3), (4, 1), (4, 3)], {"axes": 1}, "operand-shape"),
        ("scatter_nd", [(2, 3), (4, 2), (4,)], {"axes": (1, 1)}, "invalid-parameter"),
        ("scatter_nd", [(2, 3), (4, 2), (4,)], {"axes": 1}, "invalid-parameter"),
        ("scatter_elements", [(2, 3), (2, 4), (2, 4)], {}, "operand-shape"),
        ("scatter_elements", [(2, 3), (2, 3), (2, 2)], {}, "operand-shape"),
        ("scatter_elements", [(2, 3), (2, 3), (2, 3)], {"reduction": "xor"}, "invalid-parameter"),
        ("reverse_sequence", [(2, 3), (2,)], {}, "operand-shape"),
        ("reverse_sequence", [(2, 3), (3,)], {"batch_axis": 0}, "invalid-parameter"),
        ("top_k_indices", [(2, 3)], {"k": 4}, "invalid-parameter"),
        ("top_k_indices", [(1 << 21,)], {"k": 9}, "operand-shape"),
        ("top_k_values", [(1 << 21,)], {"k": 9}, "operand-shape"),
        ("top_k_values", [(2, 3)], {"k": 4}, "invalid-parameter"),
        ("trilu", [(4,)], {}, "operand-shape"),
        ("tile", [(4,)], {"repeats": [1, 2]}, "invalid-parameter"),
        ("depth_to_space", [(1, 6, 2, 2)], {"block": 2}, "operand-shape"),
        ("space_to_depth", [(1, 6, 2, 3)], {"block": 2}, "operand-shape"),
        ("col2im", [(1, 8, 5)], {"image": [4, 5], "kernel": [2, 2]}, "operand-shape"),
        ("lp_norm", [(2, 3)], {"p": 0}, "invalid-parameter"),
        ("pad", [(2, 3)], {"pads": 1, "value": math.nan}, "invalid-parameter"),
        ("attention", [(4, 5, 8), (3, 6, 8), (3, 6, 3)], {}, "operand-shape"),
        ("attention", [(7, 8), (6, 8), (6, 3)], {"causal": True}, "operand-shape"),
        ("paged_attention", [(3, 4, 8), (7, 2, 3, 8), (7, 2, 3, 5), (3, 2), (3,)], {}, "operand-shape"),
        ("paged_attention", [(3, 4, 8), (7, 2, 2, 8), (7, 2, 1, 8), (3, 2), (3,)], {}, "operand-shape"),
        ("paged_attention", [(3, 4, 8), (7, 2, 2, 8), (7, 2, 2, 8), (2, 2), (3,)], {}, "operand-shape"),
        ("paged_attention", [(3, 4, 8), (7, 2, 2, 8), (7, 2, 2, 8), (3, 2), (3,)], {"soft_cap": 0}, "invalid-parameter"),
        ("paged_attention", [(3, 4, 8), (7, 2, 2, 8), (7, 2, 2, 8), (3, 2), (3,)], {"window": 0}, "invalid-parameter"),
        ("rope", [(5, 3, 8), (7, 5), (7, 5), (5,)], {}, "operand-shape"),
        ("rope", [(5, 3, 8), (7, 4), (7, 4)], {}, "operand-shape"),
        ("rope", [(5, 3, 8), (7, 4), (7, 4), (3,)], {}, "operand-shape"),
        ("rope", [(5, 8), (5, 4), (5, 4)], {}, "operand-shape"),
        ("transpose", [(2, 3)], {"permutation": [0, 0]}, "invalid-parameter"),
        ("clip", [(2, 3)], {"least": math.nan}, "invalid-parameter"),
        ("group_norm", [(2, 6)], {"groups": 4}, "operand-shape"),
        ("reduce_sum", [(2, 6)], {"axis": [0, -2]}, "invalid-parameter"),
        (
            "resample_nearest",
            [(4,)],
            {"axes": [0, 0], "extents": [1, 1], "numerators": [1, 1], "offsets": [0, 0], "denominators": [1, 1]},
            "invalid-parameter",
        ),
        (
            "resample_nearest",
            [(4,)],
            {"axes": [0], "extents": [], "numerators": [1], "offsets": [0], "denominators": [1]},
            "invalid-parameter",
        ),
        ("resample", [(4,), (3,)], {}, "operand-shape"),
        ("resample", [(4,), (2, 3), (4,)], {}, "operand-shape"),
        ("grid_sample", [(1, 2, 3, 4), (1, 3, 4, 3)], {}, "operand-shape"),
        ("roi_align", [(1, 2, 3, 4), (5, 3), (5,)], {}, "operand-shape"),
        ("deform_conv2d", [(1, 2, 5, 6), (3, 2, 2, 2), (1, 7, 4, 5)], {}, "operand-shape"),
        ("deform_conv2d", [(1, 2, 5, 6), (3, 1, 2, 2), (1, 8, 4, 5)], {}, "operand-shape"),
        ("cache_update", [(2, 3, 4), (2, 4, 4)], {}, "operand-shape"),
        ("cache_update", [(2, 3, 4), (2, 2, 3)], {}, "operand-shape"),
        ("determinant", [(7, 7)], {}, "operand-shape"),
        ("determinant", [(2, 3)], {}, "operand-shape"),
        ("quantize_linear", [(2, 3), (2,)], {}, "operand-shape"),
        ("quantize_linear", [(2, 3), ()], {"dtype": "int32"}, "type-error"),
        ("quantize_linear", [(2, 3), (), ()], {}, "type-error"),
        ("dequantize_linear", [(2, 3), (2, 3)], {"block": 2}, "operand-shape"),
    ],
)
def test_invalid_arguments_are_rejected(operator: str, shapes: list[Any], parameters: dict[str, Any], code: str) -> None:
    inputs = {name: ("float32", shape) for name, shape in zip("abcdef", shapes, strict=False)}
    with pytest.raises(InputError) as refused:
        expression(operator, inputs, **parameters)
    assert refused.value.code == code


def test_the_nearest_operator_is_offered() -> None:
    with pytest.raises(UnknownOpError, match="cov2d") as unknown:
        expression("cov2d", {})
    assert (unknown.value.code, unknown.value.hint) == ("unknown-op", "did you mean `conv2d`?")


def test_inputs_are_checked() -> None:
    with pytest.raises(ShapeError):
        expression("relu", {"x": ("float32", (-1,))})
