"""Nodes with several results: MaxPool, LayerNormalization, Dropout, TopK, Unique."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from roller_svc.frontend.graph_builder import GraphBuilder
from roller_svc.frontend.onnx.expansions.expansion import Expansion, add_use
from roller_svc.frontend.onnx.table import NODES, stash_dtype
from roller_svc.frontend.onnx.tensors import Tensor, constant_of
from roller_svc.frontend.onnx.use import Node
from roller_svc.frontend.top_k import add_top_k
from roller_svc.ir.dtype import DType


def _has(node: Node, result: int) -> bool:
    return any(node.results[result : result + 1])


def _max_pool(node: Node, builder: GraphBuilder) -> Sequence[Tensor]:
    use = NODES["MaxPool"](node)
    results = [Tensor(add_use(use, builder))]
    column_major = bool(node.integer("storage_order", 0))
    if _has(node, 1):
        indices = use.operator.replace("max_pool", "max_pool_indices")
        results.append(Tensor(builder.call(indices, use.operands, column_major=column_major, **use.parameters)))
    return results


def _layer_norm(node: Node, builder: GraphBuilder) -> Sequence[Tensor]:
    use = NODES["LayerNormalization"](node)
    results = [Tensor(add_use(use, builder))]
    if not _has(node, 1) and not _has(node, 2):
        return results
    stashed, x = stash_dtype(node), node.operand(0)
    axis = node.integer("axis", -1) % x.rank
    where = {"axis": tuple(range(axis, x.rank)), "keepdims": True}
    wide = builder.cast(x, x.dtype.compute)
    mean = builder.call("reduce_mean", [wide], **where)
    centred = builder.call("sub", [wide, mean])
    variance = builder.call("reduce_mean", [builder.call("square", [centred])], **where)
    epsilon = builder.fill(node.number("epsilon", 1e-5), wide.dtype)
    deviation = builder.call("rsqrt", [builder.call("add", [variance, epsilon])])
    return [*results, Tensor(builder.cast(mean, stashed)), Tensor(builder.cast(deviation, stashed))]


def _dropout(node: Node, builder: GraphBuilder) -> Sequence[Tensor]:
    """Return the tensor itself, and a mask that drops nothing."""
    (x,) = NODES["Dropout"](node).operands
    if not _has(node, 1):
        return [Tensor(x)]
    true = builder.add_constant(np.ones((), np.bool_), DType.BOOL)
    mask = builder.call("broadcast_to", [true], shape=x.shape)
    return [Tensor(x), Tensor(mask if node.opset >= 10 else builder.cast(mask, x.dtype))]


def _top_k(node: Node, builder: GraphBuilder) -> Sequence[Tensor]:
    x, count, axis = node.operand(0), node.setting("k", 1), node.integer("axis", -1)
    if count is None or len(count) != 1 or not count[0] >= 0:
        raise node.invalid(f"k is {count}; one number is expected")
    node.integer("sorted", 1)  # any order is right where it is 0
    if not count[0]:
        shape = [0 if d == axis % x.rank else n for d, n in enumerate(x.shape)]
        return [Tensor(value=np.empty(shape, x.dtype.value)), Tensor(value=np.empty(shape, np.int64))]
    if not -x.rank <= axis < x.rank:
        raise node.invalid(f"axis is {axis}, the tensor has {x.rank} dimensions")
    largest = bool(node.integer("largest", 1))
    return [Tensor(operand) for operand in add_top_k(x, count[0], axis % x.rank, builder, largest=largest)]


def _unique(node: Node, builder: GraphBuilder) -> Sequence[Tensor]:
    """Return the distinct elements of a constant, where they are, and how often."""
    node.read.add(0)
    x: Any = node.constants[0]
    if x is None:
        raise node.unsupported("a tensor that is not constant", "the result's shape depends on data")
    axis = node.attribute("axis")
    along = None if axis is None else node.integer("axis", 0)
    if along is not None and not -x.ndim <= along < x.ndim:
        raise node.invalid(f"axis {along} is not one of {x.ndim} dimensions")
    values, first, inverse, counts = np.unique(x, return_index=True, return_inverse=True, return_counts=True, axis=along)
    if not node.integer("sorted", 1):
        order = np.argsort(first)
        values = np.take(values, order, axis=0 if along is None else along)
        first, counts, inverse = first[order], counts[order], np.argsort(order)[inverse]
    listed = [first, inverse.reshape(-1), counts]
    return [
        constant_of(values, node.dtype_of(values), builder),
        *(constant_of(array.astype(np.int64), DType.INT64, builder) for array in listed),
    ]


RESULTS: dict[str, Expansion] = {
    "Dropout": _dropout,
    "LayerNormalization": _layer_norm,
    "MaxPool": _max_pool,
    "TopK": _top_k,
    "Unique": _unique,
}
