"""ATen operators with indices from tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from roller_svc.frontend.graph_builder import Array
from roller_svc.frontend.ops.operator import Operand
from roller_svc.frontend.top_k import add_top_k
from roller_svc.frontend.torch.aten.shapes import concat
from roller_svc.frontend.torch.call import AtenCall, Converter
from roller_svc.frontend.torch.tensors import Empty
from roller_svc.ir.dtype import DType


def _embedding(call: AtenCall) -> Operand:
    return call.run("embedding", call.operand("weight"), call.operand("indices"))


def _gather(call: AtenCall) -> Operand:
    x, index = call.operand("self"), call.operand("index")
    if x.rank == 0 or index.rank == 0:
        raise call.unsupported("a scalar")
    return call.run("gather_elements", x, index, axis=call.axis("dim", x.rank))


def _index_select(call: AtenCall) -> Operand:
    x, index = call.operand("self"), call.operand("index")
    if x.rank == 0:
        return x
    return call.run("gather", x, call.reshape(index, (index.type.elements,)), axis=call.axis("dim", x.rank))


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
    return call.run(
        "where", call.run("less", index, call.scalar(0, DType.INT64)), call.run("add", index, call.scalar(size, DType.INT64)), index
    )


def _scatter(call: AtenCall, reduction: str) -> Operand:
    """Convert `scatter` and its reductions. Updates beyond the indices' extents are not read."""
    x, index = call.operand("self"), call.operand("index")
    name = "src" if "src" in call.arguments else "value"
    updates = call.cast(call.operand(name))
    if x.rank == 0 or index.rank == 0:
        raise call.unsupported("a scalar")
    if updates.rank == 0:
        updates = call.expand(updates, index.shape)
    for axis, extent in enumerate(index.shape):
        updates = call.slice(updates, axis, 0, extent)
    return call.run("scatter_elements", x, index, updates, axis=call.axis("dim", x.rank), reduction=reduction)


_REDUCTIONS = {"sum": "add", "add": "add", "prod": "mul", "multiply": "mul", "amax": "max", "amin": "min"}


def _scatter_reduce(call: AtenCall) -> Operand:
    kind = call.text("reduce")
    if kind not in _REDUCTIONS:
        raise call.unsupported(f"reduce={kind!r}")
    if "include_self" in call.arguments and not call.flag("include_self"):
        raise call.unsupported("include_self=False")
    return _scatter(call, _REDUCTIONS[kind])


def _index_put(call: AtenCall) -> Operand:
    """Convert `x[i, :, j] = values`: indexed dimensions come first, then elements are replaced or added to."""
    x, values = call.operand("self"), call.cast(call.operand("values"))
    given = call.value("indices")
    if isinstance(given[0], Operand) and given[0].dtype is DType.BOOL and not any(given[1:]):
        return _masked_put(call, x, given[0], values)
    indices = _indices(call)
    indexed = [d for d, index in enumerate(indices) if index is not None]
    rest = [d for d in range(x.rank) if d not in indexed]
    places = [call.cast(index, DType.INT64) for index in indices if index is not None]
    shape = np.broadcast_shapes(*(place.shape for place in places))
    first = indexed[0] if indexed == list(range(indexed[0], indexed[0] + len(indexed))) else 0
    before = [x.shape[d] for d in rest[:first]]
    values = call.expand(values, (*before, *shape, *(x.shape[d] for d in rest[first:])))
    if before:  # the dimensions of the indices come first
        inner = range(len(before), len(before) + len(shape))
        values = call.run(
            "transpose", values, permutation=(*inner, *range(len(before)), *range(len(before) + len(shape), values.rank))
        )
    expanded = [call.run("unsqueeze", call.expand(place, shape), axis=(len(shape),)) for place in places]
    return call.run(
        "scatter_nd",
        x,
        concat(call, expanded, len(shape)),
        values,
        axes=indexed,
        negative=True,
        reduction="add" if call.flag("accumulate") else "none",
    )


def _masked_put(call: AtenCall, x: Operand, mask: Operand, values: Operand) -> Operand:
    """Convert `x[mask] = number`."""
    if values.type.elements != 1:
        raise call.unsupported("a mask as an index, with several values,")
    value = call.reshape(values, ())
    if call.flag("accumulate"):
        value = call.run("add", x, value)
    return call.run("where", call.reshape(mask, (*mask.shape, *(1,) * (x.rank - mask.rank))), value, x)


def _top_k(call: AtenCall) -> list[Operand]:
    """Convert `topk`, whose results may be in any order where sorted=False."""
    x = call.operand("self")
    axis = call.axis("dim", x.rank)
    return list(add_top_k(x, call.integer("k"), axis, call.builder, largest=call.flag("largest")))


def _sort(call: AtenCall) -> list[Operand]:
    """Sort by taking all elements in order. Equal elements keep their order."""
    x = call.operand("self")
    if x.rank == 0:
        return [x, call.scalar(0, DType.INT64)]
    axis = call.axis("dim", x.rank)
    return list(add_top_k(x, x.shape[axis], axis, call.builder, largest=call.flag("descending")))


TABLE: dict[str, Converter] = {
    "aten.embedding.default": _embedding,
    "aten.gather.default": _gather,
    "aten.index_select.default": _index_select,
    "aten.index.Tensor": _index,
    "aten.index_put.default": _index_put,
    "aten.scatter.src": partial(_scatter, reduction="none"),
    "aten.scatter.value": partial(_scatter, reduction="none"),
    "aten.scatter_add.default": partial(_scatter, reduction="add"),
    "aten.scatter.reduce": _scatter_reduce,
    "aten.scatter.value_reduce": _scatter_reduce,
    "aten.scatter_reduce.two": _scatter_reduce,
    "aten.topk.default": _top_k,
    "aten.sort.default": _sort,
    "aten.sort.stable": _sort,
}
