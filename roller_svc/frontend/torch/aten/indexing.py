"""ATen operators with indices from tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

from roller_svc.frontend.graph_builder import Array
from roller_svc.frontend.ops.operator import Operand
from roller_svc.frontend.torch.call import AtenCall, Converter
from roller_svc.frontend.torch.tensors import Empty
from roller_svc.ir.dtype import DType


def _embedding(call: AtenCall) -> Operand:
    for name in ("padding_idx", "scale_grad_by_freq", "sparse"):  # of gradients
        call.value(name)
    return call.run("embedding", call.operand("weight"), call.operand("indices"))


def _gather(call: AtenCall) -> Operand:
    call.value("sparse_grad")
    x, index = call.operand("self"), call.operand("index")
    if x.rank == 0 or index.rank == 0:
        raise call.unsupported("a scalar")
    return call.run("gather_elements", x, index, axis=call.dimension(call.integer("dim"), x.rank))


def _index_select(call: AtenCall) -> Operand:
    x, index = call.operand("self"), call.operand("index")
    if x.rank == 0:
        return x
    return call.run("gather", x, call.reshape(index, (index.type.elements,)),
                    axis=call.dimension(call.integer("dim"), x.rank))  # fmt: skip


def _index(call: AtenCall) -> Operand:
    """Convert `x[i, :, j]`: indexed dimensions become one, of which one gather takes the elements."""
    x, indices = call.operand("self"), _indices(call)
    indexed = [d for d, index in enumerate(indices) if index is not None]
    first, count = indexed[0], len(indexed)
    adjacent = indexed == list(range(first, first + count))
    if not adjacent:  # the indices' dimensions come first then
        order = [*indexed, *(d for d in range(x.rank) if d not in indexed)]
        x, first = call.run("transpose", x, permutation=tuple(order)), 0
    sizes = x.shape[first : first + count]
    place = _linear_index(call, [index for index in indices if index is not None], sizes)
    merged = call.reshape(x, (*x.shape[:first], math.prod(sizes), *x.shape[first + count :]))
    return call.run("gather", merged, place, axis=first)


def _indices(call: AtenCall) -> list[Operand | None]:
    """Return the index of each dimension; None for those that stay whole."""
    indices: list[Operand | None] = []
    for index in call.value("indices"):
        if isinstance(index, Empty):
            raise call.unsupported("an index without elements")
        if isinstance(index, Operand) and index.dtype is DType.BOOL:
            raise call.unsupported("a mask as an index, whose result has a shape that depends on data,")
        indices.append(index)
    if not any(index is not None for index in indices):
        raise call.unsupported("an index without tensors")
    return indices


def _linear_index(call: AtenCall, indices: Sequence[Operand], sizes: Sequence[int]) -> Operand:
    """Return the index into the indexed dimensions as one. Negative indices count from the end."""
    total: Operand | None = None
    for index, size in zip(indices, sizes, strict=True):
        place = _not_negative(call, call.cast(index, DType.INT64), size)
        if total is not None:
            place = call.run("add", call.run("mul", total, call.scalar(size, DType.INT64)), place)
        total = place
    if total is None:
        raise call.unsupported("an index without tensors")
    return total


def _not_negative(call: AtenCall, index: Operand, size: int) -> Operand:
    value: Array | None = call.known(index)
    if value is not None and (value >= 0).all():
        return index
    return call.run("where", call.run("less", index, call.scalar(0, DType.INT64)),
                    call.run("add", index, call.scalar(size, DType.INT64)), index)  # fmt: skip


TABLE: dict[str, Converter] = {
    "aten.embedding.default": _embedding,
    "aten.gather.default": _gather,
    "aten.index_select.default": _index_select,
    "aten.index.Tensor": _index,
}
