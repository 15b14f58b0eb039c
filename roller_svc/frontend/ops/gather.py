"""Operators with indices from an integer tensor: gather, gather_elements, embedding, one_hot."""

from __future__ import annotations

from functools import partial

from roller_svc.errors import ExprTypeError
from roller_svc.frontend.ops.operator import Call, Operand, Operator
from roller_svc.frontend.ops.parameters import dtype, flag, integer, required
from roller_svc.frontend.ops.text import statement


def _index(call: Call, ids: Operand, axes: tuple[str, ...], size: int) -> str:
    """Return the load of an index. Negative ones, if allowed, count from the end."""
    if ids.dtype.is_float:
        raise ExprTypeError(f"{call.operator}: `{ids.name}` is {ids.dtype.value}; indices are integers")
    read = ids.at(*axes)
    return f"where({read} < 0, {read} + {size}, {read})" if call.flag("negative") else read


def _gather(call: Call, *, embedding: bool) -> str:
    x, ids = call.operands
    axis = 0 if embedding else call.one_axis(x.rank)
    axes = call.axes(x.rank)
    places = tuple(call.axis("n" if ids.rank == 1 else f"n{d}") for d in range(ids.rank))
    index = [*axes]
    index[axis] = _index(call, ids, places, x.shape[axis])
    return statement(call.output, (*axes[:axis], *places, *axes[axis + 1 :]), "=", x.at(*index))


def _gather_elements(call: Call) -> str:
    x, ids = call.operands
    call.check_rank(ids, x.rank, f"`{x.name}`")
    axis, axes = call.one_axis(x.rank), call.axes(x.rank)
    for d, (extent, size) in enumerate(zip(ids.shape, x.shape, strict=True)):
        if d != axis and extent > size:
            raise call.wrong_shape(f"`{ids.name}` {list(ids.shape)} is larger than `{x.name}` {list(x.shape)}")
    index = [*axes]
    index[axis] = _index(call, ids, axes, x.shape[axis])
    return statement(call.output, axes, "=", x.at(*index), where=list(zip(axes, ids.shape, strict=True)))


def _one_hot(call: Call) -> str:
    ids = call.x
    if ids.dtype.is_float:
        raise ExprTypeError(f"{call.operator}: `{ids.name}` is {ids.dtype.value}; indices are integers")
    axis, axes, depth = call.one_axis(ids.rank + 1), call.axes(ids.rank), call.axis("d")
    index = (*axes[:axis], depth, *axes[axis:])
    return statement(
        call.output, index, "=", f"{ids.at(*axes)} == {depth}", where=[(depth, call.integer("depth"))],
        dtype=call.dtype(),
    )  # fmt: skip


_NEGATIVE = flag("negative", "negative indices are there, and count from the end")

OPERATORS = (
    Operator(
        "gather",
        "Slices of `x` along an axis, those that `indices` says.",
        ("x", "indices"),
        partial(_gather, embedding=False),
        (integer("axis", 0, "the dimension of `x`"), _NEGATIVE),
    ),
    Operator("embedding", "Rows of a table.", ("table", "indices"), partial(_gather, embedding=True), (_NEGATIVE,)),
    Operator(
        "gather_elements",
        "One element of `x` for each of `indices`, its index replaced along an axis.",
        ("x", "indices"),
        _gather_elements,
        (integer("axis", 0, "the dimension"), _NEGATIVE),
    ),
    Operator(
        "one_hot",
        "1 at the place that an index says, along a new axis; 0 elsewhere.",
        ("indices",),
        _one_hot,
        (
            required(integer("depth", None, "the extent of the new axis", minimum=1)),
            integer("axis", -1, "where the new axis is in the result"),
            dtype("dtype", "float32", "type of the result"),
        ),
    ),
)
