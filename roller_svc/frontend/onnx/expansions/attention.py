"""Attention as a call of `attention`. The function body of the operator expands what is refused here."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from roller_svc.frontend.graph_builder import GraphBuilder
from roller_svc.frontend.onnx.expansions.expansion import Expansion
from roller_svc.frontend.onnx.table import DATA_TYPES
from roller_svc.frontend.onnx.tensors import Tensor
from roller_svc.frontend.onnx.use import Node
from roller_svc.frontend.ops.operator import Operand
from roller_svc.ir.dtype import DType

_MASK, _PAST_KEY, _PAST_VALUE, _LENGTHS = 3, 4, 5, 6


def _attention(node: Node, builder: GraphBuilder) -> Sequence[Tensor]:
    if any(node.results[3:]) or node.number("softcap", 0.0):
        raise node.unsupported("a result after the third, or a soft cap")
    node.integer("qk_matmul_output_mode", 0)
    q, k, v = (node.operand(position) for position in range(3))
    if node.attribute("softmax_precision") is not None:
        precision = DATA_TYPES.get(node.integer("softmax_precision", 1))
        if precision is None or precision.compute is not q.dtype.compute:
            raise node.unsupported("a precision of the softmax other than that of the sums")
    is_flat = q.rank == 3
    if is_flat:
        heads = node.integer("q_num_heads", 0), *[node.integer("kv_num_heads", 0)] * 2
        q, k, v = (split_heads(node, builder, x, count) for x, count in zip((q, k, v), heads, strict=True))
    if any(x.rank != 4 for x in (q, k, v)):
        raise node.invalid(f"queries have {q.rank} dimensions, keys {k.rank}, values {v.rank}; all have 3 or 4")
    past = 0
    # A cache without elements, as before the first token, holds no key.
    node.read.update((_PAST_KEY, _PAST_VALUE))
    if all(node.operands[position : position + 1] not in ((), (None,)) for position in (_PAST_KEY, _PAST_VALUE)):
        past_key, past_value = node.operand(_PAST_KEY, rank=4), node.operand(_PAST_VALUE, rank=4)
        past = past_key.shape[2]
        k = builder.call("concat", [past_key, k], axis=2)
        v = builder.call("concat", [past_value, v], axis=2)
    result = _attend(node, builder, (q, k, v), past)
    if is_flat:
        result = join_heads(builder, result)
    return [Tensor(result), Tensor(k), Tensor(v), Tensor()][: len(node.results)]


def split_heads(node: Node, builder: GraphBuilder, x: Operand, heads: int) -> Operand:
    """Return [batch, heads, length, features] of [batch, length, heads * features]."""
    if x.rank != 3 or heads < 1 or x.shape[2] % heads:
        raise node.invalid(f"a tensor {list(x.shape)} does not divide into {heads} heads")
    split = builder.call("reshape", [x], shape=(*x.shape[:2], heads, x.shape[2] // heads))
    return builder.call("transpose", [split], permutation=(0, 2, 1, 3))


def join_heads(builder: GraphBuilder, x: Operand) -> Operand:
    """Return [batch, length, heads * features] of [batch, heads, length, features]."""
    batch, heads, length, features = x.shape
    moved = builder.call("transpose", [x], permutation=(0, 2, 1, 3))
    return builder.call("reshape", [moved], shape=(batch, length, heads * features))


def _attend(node: Node, builder: GraphBuilder, operands: tuple[Operand, Operand, Operand], past: int) -> Operand:
    """Return the attention of heads. A query without a key has the result 0."""
    q, k, _ = operands
    parameters: dict[str, object] = {}
    if node.attribute("scale") is not None:
        parameters["scale"] = node.number("scale", 1.0)
    causal = bool(node.integer("is_causal", 0))
    windows = [node.integer(f"{side}_window_size", -1) for side in ("left", "right")]
    is_plain = not node.has(_MASK) and not node.has(_LENGTHS) and windows == [-1, -1]
    if causal and is_plain and past + q.shape[2] == k.shape[2]:
        return builder.call("attention", operands, causal=True, **parameters)
    stated = _given_mask(node, builder, q, k), _places(node, builder, q, k, past)
    masks = [mask for mask in stated if mask is not None]
    if not masks:
        return builder.call("attention", operands, **parameters)
    mask = builder.join("add", masks)
    greatest = builder.call("reduce_max", [mask], axis=-1, keepdims=True)
    infinite = builder.call("isinf", [greatest], positive=False)
    result = builder.call("attention", [*operands, mask], **parameters)
    known = builder.value(infinite)
    if known is not None and not known.any():
        return result
    return builder.call("where", [infinite, builder.fill(0, q.dtype), result])


def _given_mask(node: Node, builder: GraphBuilder, q: Operand, k: Operand) -> Operand | None:
    """Return the mask as a summand of the scores. Keys that it lacks are masked."""
    if not node.has(_MASK):
        return None
    mask = node.operand(_MASK)
    if mask.dtype is DType.BOOL:
        mask = _summand(mask, q.dtype, builder)
    missing = k.shape[2] - mask.shape[-1] if mask.rank else 0
    if missing < 0 or (missing and mask.shape[-1] == 1):
        raise node.unsupported(f"a mask {list(mask.shape)} of {k.shape[2]} keys")
    if missing:
        mask = builder.call("pad", [mask], pads=[0] * (2 * mask.rank - 1) + [missing], value=-np.inf)
    return builder.cast(mask, q.dtype)


def _places(node: Node, builder: GraphBuilder, q: Operand, k: Operand, past: int) -> Operand | None:
    """Return the mask of keys that are later, outside of the window, or after the length; None if all are used."""
    causal = bool(node.integer("is_causal", 0))
    left, right = (node.integer(f"{side}_window_size", -1) for side in ("left", "right"))
    keys, rows = builder.count(k.shape[2]), builder.call("unsqueeze", [builder.count(q.shape[2])], axis=(1,))
    if past:
        rows = builder.call("add", [rows, builder.fill(past, DType.INT64)])
    used = []
    if node.has(_LENGTHS):
        lengths = node.operand(_LENGTHS)
        if past or lengths.shape != q.shape[:1]:
            raise node.invalid(f"lengths are {list(lengths.shape)}, with {past} past keys and {q.shape[0]} batches")
        lengths = builder.call("reshape", [builder.cast(lengths, DType.INT64)], shape=(-1, 1, 1, 1))
        used.append(builder.call("less", [keys, lengths]))
        first = builder.call("sub", [lengths, builder.fill(q.shape[2], DType.INT64)])
        rows = builder.call("add", [rows, first])
    distance = builder.call("sub", [rows, keys])
    if causal:
        used.append(builder.call("greater_equal", [distance, builder.fill(0, DType.INT64)]))
    if left >= 0:
        used.append(builder.call("less_equal", [distance, builder.fill(left, DType.INT64)]))
    if right >= 0:
        used.append(builder.call("greater_equal", [distance, builder.fill(-right, DType.INT64)]))
    if not used:
        return None
    return _summand(builder.join("logical_and", used), q.dtype, builder)


def _summand(condition: Operand, dtype: DType, builder: GraphBuilder) -> Operand:
    """Return 0 where a key is used, and -inf elsewhere."""
    return builder.call("where", [condition, builder.fill(0, dtype), builder.fill(-np.inf, dtype)])


ATTENTION: dict[str, Expansion] = {"Attention": _attention}
