"""Attention of com.microsoft, as calls of `attention` with masks that are added to the scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from roller_svc.frontend.graph_builder import GraphBuilder
from roller_svc.frontend.onnx.expansions.attention import join_heads, split_heads
from roller_svc.frontend.onnx.expansions.expansion import Expansion
from roller_svc.frontend.onnx.tensors import Tensor
from roller_svc.frontend.onnx.use import Node
from roller_svc.frontend.ops.operator import Operand
from roller_svc.ir.dtype import DType

MASKED = -10000.0  # what masked scores get by default


def _slice(builder: GraphBuilder, x: Operand, axis: int, start: int, stop: int) -> Operand:
    if (start, stop) == (0, x.shape[axis]):
        return x
    return builder.call("slice", [x], starts=(start,), stops=(stop,), axes=(axis,))


def _summand(builder: GraphBuilder, condition: Operand, value: float, dtype: DType) -> Operand:
    """Return 0 where a key is used, and a value elsewhere."""
    return builder.call("where", [condition, builder.fill(0, dtype), builder.fill(value, dtype)])


def _padding(node: Node, builder: GraphBuilder, mask: Operand, q: Operand, keys: int, *, may_be_starts: bool) -> Operand:
    """Return a mask of keys as a summand of the scores.

    It is the number of keys of each sequence, [batch], with the first key behind it, [2 * batch]; or what is not 0
    for keys that are used: [batch, keys], [batch, queries, keys], [batch, 1, size, size].
    """
    batch, _, queries, _ = q.shape
    value = node.number("mask_filter_value", MASKED)
    if mask.rank == 1 and mask.shape[0] in (batch, 2 * batch if may_be_starts else batch):
        places = builder.call("cast", [builder.count(keys)], dtype=mask.dtype.value)
        ends = builder.call("reshape", [_slice(builder, mask, 0, 0, batch)], shape=(batch, 1, 1, 1))
        used = builder.call("less", [places, ends])
        if mask.shape[0] > batch:
            starts = builder.call("reshape", [_slice(builder, mask, 0, batch, 2 * batch)], shape=(batch, 1, 1, 1))
            used = builder.call("logical_and", [used, builder.call("greater_equal", [places, starts])])
        return _summand(builder, used, value, q.dtype)
    if mask.rank == 4 and mask.shape[:2] == (batch, 1) and mask.shape[3] >= keys and mask.shape[2] >= keys:
        mask = _slice(builder, _slice(builder, mask, 3, 0, keys), 2, keys - queries, keys)
    elif mask.shape == (batch, keys):
        mask = builder.call("reshape", [mask], shape=(batch, 1, 1, keys))
    elif mask.shape == (batch, queries, keys):
        mask = builder.call("reshape", [mask], shape=(batch, 1, queries, keys))
    else:
        raise node.unsupported(f"a mask {list(mask.shape)} of {batch} sequences of {keys} keys")
    return _summand(builder, builder.call("greater", [mask, builder.fill(0, mask.dtype)]), value, q.dtype)


def _attend(
    node: Node, builder: GraphBuilder, operands: tuple[Operand, Operand, Operand], masks: Sequence[Operand | None]
) -> Operand:
    """Return the attention of heads, with these summands of the scores."""
    q, k, _ = operands
    scale, present = node.number("scale", 0.0), [builder.cast(mask, q.dtype) for mask in masks if mask is not None]
    parameters: dict[str, object] = {"scale": scale} if scale else {}
    if node.integer("unidirectional", 0):
        if q.shape[2] > k.shape[2]:
            raise node.invalid(f"{q.shape[2]} queries have {k.shape[2]} keys")
        parameters["causal"] = True
    if not present:
        return builder.call("attention", operands, **parameters)
    return builder.call("attention", [*operands, builder.join("add", present)], **parameters)


def _extended(builder: GraphBuilder, past: Operand | None, x: Operand) -> Operand:
    """Return keys or values after those of the cache, which may be omitted or without elements."""
    return x if past is None else builder.call("concat", [past, x], axis=2)


def _cache(node: Node, position: int, rank: int = 4) -> Operand | None:
    """Return the cache at a position; None if it is omitted or has no elements."""
    node.read.add(position)
    is_omitted = position >= len(node.operands) or node.operands[position] is None
    return None if is_omitted else node.operand(position, rank=rank)


def _attention(node: Node, builder: GraphBuilder) -> Sequence[Tensor]:
    """Return the attention of a tensor that is projected to queries, keys and values by one matrix."""
    for name in ("do_rotary", "past_present_share_buffer", "rotary_embedding_dim"):
        node.check_default(name, 0)
    x, weight, bias = node.operand(0, rank=3), node.operand(1, rank=2), node.optional(2, rank=1)
    heads = node.integer("num_heads", 0)
    sizes = node.integers("qkv_hidden_sizes") or (weight.shape[1] // 3,) * 3
    if len(sizes) != 3 or min(sizes) < 1 or sum(sizes) != weight.shape[1]:
        raise node.invalid(f"weights {list(weight.shape)} do not divide into {list(sizes)}")
    projected = builder.call("matmul", [x, weight])
    projected = projected if bias is None else builder.call("add", [projected, bias])
    bounds = (0, sizes[0], sizes[0] + sizes[1], sum(sizes))
    parts = (_slice(builder, projected, 2, start, stop) for start, stop in pairwise(bounds))
    q, k, v = (split_heads(node, builder, part, heads) for part in parts)
    past = _cache(node, 4, rank=5)
    if past is not None:
        if past.shape[0] != 2:
            raise node.invalid(f"a cache {list(past.shape)} is not the keys and the values")
        pieces = (builder.call("squeeze", [_slice(builder, past, 0, i, i + 1)], axis=(0,)) for i in range(2))
        k, v = (_extended(builder, piece, new) for piece, new in zip(pieces, (k, v), strict=True))
    mask = node.optional(3)
    padding = None if mask is None else _padding(node, builder, mask, q, k.shape[2], may_be_starts=True)
    results = [Tensor(join_heads(builder, _attend(node, builder, (q, k, v), [padding, node.optional(5)])))]
    if len(node.results) > 1:
        both = [builder.call("unsqueeze", [each], axis=(0,)) for each in (k, v)]
        results.append(Tensor(builder.call("concat", both, axis=0)) if node.results[1] else Tensor())
    return results


def _qattention(node: Node, builder: GraphBuilder) -> Sequence[Tensor]:
    """Return the attention of a quantized tensor and quantized weights."""
    x, weight = (
        builder.call(
            "dequantize_linear",
            [part for part in (node.operand(at), node.operand(scale), node.optional(zero)) if part is not None],
            axis=1,
        )
        for at, scale, zero in ((0, 3, 6), (1, 4, 7))
    )
    node.read.update((2, 5, 8))
    rest = [node.operands[position] if position < len(node.operands) else None for position in (2, 5, 8)]
    known = [node.constants[position] if position < len(node.constants) else None for position in (2, 5, 8)]
    plain = replace(node, operands=(x, weight, *rest), constants=(None, None, *known), read=set())
    return _attention(plain, builder)


def _multi_head_attention(node: Node, builder: GraphBuilder) -> Sequence[Tensor]:
    """Return the attention of queries, keys and values, which may be packed in one tensor."""
    heads = node.integer("num_heads", 0)
    if any(node.results[3:]):
        raise node.unsupported("the products as a result")
    q, k, v = node.operand(0, rank=(3, 4, 5)), node.optional(1, rank=(3, 4, 5)), node.optional(2, rank=(3, 4))
    bias = node.optional(3)
    biases: list[Operand | None] = [None, None, None]
    if q.rank == 5:
        q, k, v = _unpacked(node, builder, q, 3)
    elif k is not None and k.rank == 5:
        k, v = _unpacked(node, builder, k, 2)
    if k is None or v is None:
        raise node.invalid("keys or values are missing")
    widths = [x.shape[2] if x.rank == 3 else x.shape[1] * x.shape[3] for x in (q, k, v)]
    if bias is not None:
        if bias.shape != (sum(widths),):
            raise node.invalid(f"the bias is {list(bias.shape)}, expected [{sum(widths)}]")
        bounds = (0, widths[0], sum(widths[:2]), sum(widths))
        biases = [_slice(builder, bias, 0, start, stop) for start, stop in pairwise(bounds)]
    split = []
    for x, added in zip((q, k, v), biases, strict=True):
        if x.rank == 4:  # keys of another sequence, in heads, without a bias
            split.append(x)
            continue
        total = x if added is None else builder.call("add", [x, added])
        split.append(split_heads(node, builder, total, heads))
    q, k, v = split
    k, v = _extended(builder, _cache(node, 6), k), _extended(builder, _cache(node, 7), v)
    mask = node.optional(4)
    padding = None if mask is None else _padding(node, builder, mask, q, k.shape[2], may_be_starts=False)
    result = join_heads(builder, _attend(node, builder, (q, k, v), [padding, node.optional(5)]))
    return [Tensor(result), Tensor(k), Tensor(v), Tensor()][: len(node.results)]


def _unpacked(node: Node, builder: GraphBuilder, x: Operand, count: int) -> list[Operand]:
    """Return the parts [batch, length, heads * features] of [batch, length, heads, count, features]."""
    batch, length, heads, packed, features = x.shape
    if packed != count:
        raise node.invalid(f"a tensor {list(x.shape)} has {packed} parts in dimension 3, expected {count}")
    pieces = (_slice(builder, x, 3, i, i + 1) for i in range(count))
    return [builder.call("reshape", [piece], shape=(batch, length, heads * features)) for piece in pieces]


def _rotated(
    node: Node, builder: GraphBuilder, x: Operand, tables: tuple[Operand, Operand], places: Operand, *, interleaved: bool
) -> Operand:
    """Return [batch, heads, length, features] with pairs of features rotated. Tables: cosines and sines [rows, pairs]."""
    pairs = [table.shape[1] for table in tables]
    if tables[0].shape != tables[1].shape or 2 * pairs[0] > x.shape[3]:
        raise node.invalid(f"angles of {pairs[0]} cosines and {pairs[1]} sines do not fit {x.shape[3]} features")
    return builder.call("rope", [x, *tables, places], interleaved=interleaved, layout="HND")


def _rotary_embedding(node: Node, builder: GraphBuilder) -> Sequence[Tensor]:
    x, places = node.operand(0, rank=(3, 4)), node.operand(1, rank=(1, 2))
    cosine, sine = node.operand(2, rank=2), node.operand(3, rank=2)
    node.check_default("is_packed_batching", 0)
    heads, rotary = node.integer("num_heads", 0), node.integer("rotary_embedding_dim", 0)
    node.number("scale", 1.0)  # onnxruntime does not use it
    if x.rank == 3:
        heads = heads or (x.shape[2] // (2 * cosine.shape[1]) if not rotary else 0)
        split = split_heads(node, builder, x, heads)
    else:
        split = x
    if rotary and rotary != 2 * cosine.shape[1]:
        raise node.invalid(f"rotary_embedding_dim is {rotary}, the tables have {cosine.shape[1]} angles")
    if places.shape == (1,):
        steps = builder.call("cast", [builder.count(split.shape[2])], dtype=places.dtype.value)
        places = builder.call("unsqueeze", [builder.call("add", [steps, places])], axis=(0,))
    elif places.shape != (split.shape[0], split.shape[2]):
        raise node.invalid(f"places {list(places.shape)} are neither [1] nor one for each of {list(split.shape)}")
    rotated = _rotated(node, builder, split, (cosine, sine), places, interleaved=bool(node.integer("interleaved", 0)))
    return [Tensor(join_heads(builder, rotated) if x.rank == 3 else rotated)]


def _group_query_attention(node: Node, builder: GraphBuilder) -> Sequence[Tensor]:
    """Return causal attention with a cache of which each sequence fills its own length."""
    for name in ("smooth_softmax", "qk_output", "sliding_window_cache", "kv_cache_bit_width"):
        node.check_default(name, 0)
    node.check_default("causal", 1)
    if node.number("softcap", 0.0) or any(node.has(position) for position in range(11, 17)) or any(node.results[3:]):
        raise node.unsupported("a soft cap, a sink, a quantized cache, norms of queries and keys, or a fourth result")
    heads, shared = node.integer("num_heads", 0), node.integer("kv_num_heads", 0)
    q, k, v = _packed_parts(node, builder, heads, shared)
    q, k, v = (split_heads(node, builder, x, count) for x, count in ((q, heads), (k, shared), (v, shared)))
    batch, length = q.shape[0], q.shape[2]
    totals = node.constant(6, "total_sequence_length") or ()
    if len(totals) != 1 or totals[0] < length:
        raise node.invalid(f"total_sequence_length is {list(totals)[:4]}, expected one number from {length} on")
    (total,) = totals
    caches = _cache(node, 3), _cache(node, 4)
    stored = 0 if caches[0] is None else caches[0].shape[2]
    size = max(total, stored)
    # Lengths of the sequences with the new tokens. A prompt begins at 0, and may be padded behind its end.
    ends = builder.call("add", [builder.call("reshape", [node.operand(5)], shape=(batch,)), builder.fill(1, node.operand(5).dtype)])
    starts = builder.fill(0, ends.dtype, (batch,))
    if total != length:
        starts = builder.call("sub", [ends, builder.fill(length, ends.dtype)])
    column = builder.call("reshape", [starts], shape=(batch, 1))
    steps = builder.call("cast", [builder.count(length)], dtype=ends.dtype.value)
    rows = builder.call("add", [column, steps])  # [batch, length], the place of each query
    if node.integer("do_rotary", 0):
        given = node.optional(9, rank=2)
        tables, places = (node.operand(7, rank=2), node.operand(8, rank=2)), rows if given is None else given
        is_interleaved = bool(node.integer("rotary_interleaved", 0))
        q, k = (_rotated(node, builder, x, tables, places, interleaved=is_interleaved) for x in (q, k))
    node.read.update((7, 8, 9))
    k, v = (
        _updated(builder, cache, new, starts, size, is_prompt=total == length) for cache, new in zip(caches, (k, v), strict=True)
    )
    places = builder.call("cast", [builder.count(size)], dtype=ends.dtype.value)
    distance = builder.call("sub", [builder.call("reshape", [rows], shape=(batch, 1, length, 1)), places])
    used = [builder.call("greater_equal", [distance, builder.fill(0, ends.dtype)])]
    window = node.integer("local_window_size", -1)
    if window > 0:
        used.append(builder.call("less", [distance, builder.fill(window, ends.dtype)]))
    seen = builder.join("logical_and", used)
    lowest = -np.inf if q.dtype.bits >= 32 else -65504.0
    masks = [_summand(builder, seen, lowest, q.dtype), _fitted(node, builder, size)]
    return [Tensor(join_heads(builder, _attend(node, builder, (q, k, v), masks))), Tensor(k), Tensor(v), Tensor()][
        : len(node.results)
    ]


def _packed_parts(node: Node, builder: GraphBuilder, heads: int, shared: int) -> tuple[Operand, Operand, Operand]:
    """Return queries, keys and values, which may be packed along the last dimension."""
    x, k, v = node.operand(0), node.optional(1), node.optional(2)
    if k is not None and v is not None:
        return x, k, v
    if heads < 1 or shared < 1 or x.rank != 3 or x.shape[2] % (heads + 2 * shared):
        raise node.invalid(f"a tensor {list(x.shape)} is not {heads} heads of queries and {shared} of keys and values")
    features = x.shape[2] // (heads + 2 * shared)
    bounds = (0, heads * features, (heads + shared) * features, x.shape[2])
    q, k, v = (_slice(builder, x, 2, start, stop) for start, stop in pairwise(bounds))
    return q, k, v


def _updated(builder: GraphBuilder, cache: Operand | None, new: Operand, starts: Operand, size: int, *, is_prompt: bool) -> Operand:
    """Return a cache of a size with the new keys or values from the start of each sequence on."""
    if is_prompt and size == new.shape[2]:
        return new
    if cache is None:
        cache = builder.fill(0, new.dtype, (*new.shape[:2], size, new.shape[3]))
    elif size > cache.shape[2]:
        cache = builder.call("pad", [cache], pads=[0] * 6 + [size - cache.shape[2], 0])
    return builder.call("cache_update", [cache, new, builder.cast(starts, DType.INT64)], axis=2)


def _fitted(node: Node, builder: GraphBuilder, keys: int) -> Operand | None:
    """Return the summand of the scores, without keys beyond the cache."""
    bias = node.optional(10, rank=4)
    return None if bias is None else _slice(builder, bias, 3, 0, keys)


ATTENTION: dict[str, Expansion] = {
    "Attention": _attention,
    "GroupQueryAttention": _group_query_attention,
    "MultiHeadAttention": _multi_head_attention,
    "QAttention": _qattention,
    "RotaryEmbedding": _rotary_embedding,
}
