"""Greatest elements of an axis as calls of operators, for every importer of models."""

from __future__ import annotations

import numpy as np

from roller_svc.frontend.graph_builder import GraphBuilder
from roller_svc.frontend.ops.operator import Operand
from roller_svc.frontend.ops.ordering import MAX_ROUNDS, selects
from roller_svc.ir.dtype import DType

# A block has at least this many elements. All elements of a block are compared with each other.
MIN_BLOCK = 1024


def add_top_k(x: Operand, k: int, axis: int, builder: GraphBuilder, *, largest: bool) -> tuple[Operand, Operand]:
    """Return the greatest elements and their indices. Those of a long axis are among the greatest of its blocks."""
    extent, size = x.shape[axis], max(MIN_BLOCK, 2 * k)
    if extent <= 2 * size or k <= MAX_ROUNDS or selects(x.dtype, extent, k):
        indices = builder.call("top_k_indices", [x], k=k, axis=axis, largest=largest)
        return builder.call("gather_elements", [x, indices], axis=axis), indices
    count = extent // size
    parts = [_of_blocks(x, (count, size, k), axis, builder, largest=largest)]
    if rest := extent - count * size:
        tail = builder.call("slice", [x], starts=(count * size,), stops=(extent,), axes=(axis,))
        values, indices = add_top_k(tail, min(k, rest), axis, builder, largest=largest)
        first = builder.fill(count * size, DType.INT64)
        parts.append((values, builder.call("add", [indices, first])))
    # Candidates are in the order of their blocks, so equal ones stay in the order of their indices.
    values, indices = (builder.call("concat", listed, axis=axis) for listed in zip(*parts, strict=True))
    values, places = add_top_k(values, k, axis, builder, largest=largest)
    return values, builder.call("gather_elements", [indices, places], axis=axis)


def _of_blocks(
    x: Operand, blocks: tuple[int, int, int], axis: int, builder: GraphBuilder, *, largest: bool
) -> tuple[Operand, Operand]:
    """Return the `k` greatest elements of each of `count` blocks of `size`, and their indices in the whole axis."""
    count, size, k = blocks
    lead, tail = x.shape[:axis], x.shape[axis + 1 :]
    whole = builder.call("slice", [x], starts=(0,), stops=(count * size,), axes=(axis,))
    split = builder.call("reshape", [whole], shape=(*lead, count, size, *tail))
    values, indices = add_top_k(split, k, axis + 1, builder, largest=largest)
    starts = np.arange(0, count * size, size).reshape(count, *(1,) * (len(tail) + 1))
    indices = builder.call("add", [indices, builder.add_constant(starts, DType.INT64)])
    joined = (*lead, count * k, *tail)
    return builder.call("reshape", [values], shape=joined), builder.call("reshape", [indices], shape=joined)
