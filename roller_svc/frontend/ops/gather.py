"""Operators with indices from an integer tensor: gather, gather_elements, gather_nd, one_hot, and others."""

from __future__ import annotations

from functools import partial

from roller_svc.errors import ExprTypeError
from roller_svc.frontend.ops.operator import Call, Operand, Operator
from roller_svc.frontend.ops.parameters import dtype, flag, integer, required
from roller_svc.frontend.ops.text import statement


def data_index(call: Call, ids: Operand, axes: tuple[str, ...], size: int) -> str:
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
    index[axis] = data_index(call, ids, places, x.shape[axis])
    return statement(call.output, (*axes[:axis], *places, *axes[axis + 1 :]), "=", x.at(*index))


def _gather_elements(call: Call) -> str:
    x, ids = call.operands
    call.check_rank(ids, x.rank, f"`{x.name}`")
    axis, axes = call.one_axis(x.rank), call.axes(x.rank)
    for d, (extent, size) in enumerate(zip(ids.shape, x.shape, strict=True)):
        if d != axis and extent > size:
            raise call.wrong_shape(f"`{ids.name}` {list(ids.shape)} is larger than `{x.name}` {list(x.shape)}")
    index = [*axes]
    index[axis] = data_index(call, ids, axes, x.shape[axis])
    return statement(call.output, axes, "=", x.at(*index), where=list(zip(axes, ids.shape, strict=True)))


def _gather_nd(call: Call) -> str:
    x, ids, batch = call.x, call.operands[1], call.integer("batch_dims")
    if not batch < min(x.rank, ids.rank) or not 1 <= ids.shape[-1] <= x.rank - batch:
        raise call.wrong_shape(
            f"the last dimension of `{ids.name}` {list(ids.shape)} is the number of indexed dimensions of "
            f"`{x.name}` {list(x.shape)}, of which {batch} are of the batch"
        )
    if x.shape[:batch] != ids.shape[:batch]:
        raise call.wrong_shape(
            f"`{x.name}` {list(x.shape)} and `{ids.name}` {list(ids.shape)} differ in the first {batch} dimensions"
        )
    depth = ids.shape[-1]
    lead = tuple(call.axis(f"b{d}") for d in range(batch))
    places = tuple(call.axis(f"n{d}") for d in range(batch, ids.rank - 1))
    rest = call.axes(x.rank)[batch + depth :]
    index = [data_index(call, ids, (*lead, *places, str(d)), x.shape[batch + d]) for d in range(depth)]
    return statement(call.output, (*lead, *places, *rest), "=", x.at(*lead, *index, *rest))


def _reverse_sequence(call: Call) -> str:
    x, lengths = call.operands
    time, batch = call.one_axis(x.rank, "time_axis"), call.one_axis(x.rank, "batch_axis")
    if time == batch:
        raise call.wrong_parameter(f"time_axis and batch_axis are both {time}")
    call.check_shape(lengths, (x.shape[batch],))
    if lengths.dtype.is_float:
        raise ExprTypeError(f"{call.operator}: `{lengths.name}` is {lengths.dtype.value}; lengths are integers")
    axes = call.axes(x.rank)
    length, place, index = lengths.at(axes[batch]), axes[time], [*axes]
    index[time] = f"where({place} < {length}, {length} - 1 - {place}, {place})"
    return statement(call.output, axes, "=", x.at(*index), where=[(place, x.shape[time])])


def _one_hot(call: Call) -> str:
    ids = call.x
    axis, axes, depth = call.one_axis(ids.rank + 1), call.axes(ids.rank), call.axis("d")
    index, extent = (*axes[:axis], depth, *axes[axis:]), call.integer("depth")
    value = f"{data_index(call, ids, axes, extent)} == {depth}"
    return statement(call.output, index, "=", value, where=[(depth, extent)], dtype=call.dtype())


def _cache_update(call: Call) -> str:
    """Return the cache, read from the update where that is written."""
    cache, update = call.operands[:2]
    starts = call.operand(2)
    axis, axes = call.one_axis(cache.rank), call.axes(cache.rank)
    length, size = update.shape[axis] if update.rank == cache.rank else 0, cache.shape[axis]
    call.check_shape(update, (*cache.shape[:axis], length, *cache.shape[axis + 1 :]))
    if axis == 0 or length > size:
        raise call.wrong_shape(f"axis {axis} must not be the first, and {length} elements not exceed the {size} there")
    place = axes[axis]
    if starts is not None:
        call.check_shape(starts, cache.shape[:1])
        place = f"{place} - {starts.at(axes[0])}.cast(`int32`)"
    if call.flag("circular"):
        place = f"({place} + {size}) % {size}" if starts is not None else place
    index = [*axes]
    index[axis] = f"clip({place}, 0, {length - 1})"
    read = f"{update.at(*index)}"
    value = f"where(({place} >= 0) & ({place} < {length}), {read}, {cache.at(*axes)})"
    return statement(call.output, axes, "=", value, where=list(zip(axes, cache.shape, strict=True)))


NEGATIVE = flag("negative", "negative indices are there, and count from the end")

OPERATORS = (
    Operator(
        "gather",
        "Slices of `x` along an axis, those that `indices` says.",
        ("x", "indices"),
        partial(_gather, embedding=False),
        (integer("axis", 0, "the dimension of `x`"), NEGATIVE),
    ),
    Operator("embedding", "Rows of a table.", ("table", "indices"), partial(_gather, embedding=True), (NEGATIVE,)),
    Operator(
        "gather_elements",
        "One element of `x` for each of `indices`, its index replaced along an axis.",
        ("x", "indices"),
        _gather_elements,
        (integer("axis", 0, "the dimension"), NEGATIVE),
    ),
    Operator(
        "gather_nd",
        "Elements or slices of `x`; the last dimension of `indices` holds their leading indices.",
        ("x", "indices"),
        _gather_nd,
        (integer("batch_dims", 0, "leading dimensions that both have", minimum=0), NEGATIVE),
    ),
    Operator(
        "reverse_sequence",
        "The first elements along an axis in reverse, as many as `lengths` says for each batch.",
        ("x", "lengths"),
        _reverse_sequence,
        (integer("time_axis", 0, "the dimension"), integer("batch_axis", 1, "the dimension of `lengths`")),
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
            NEGATIVE,
        ),
    ),
    Operator(
        "cache_update",
        "`cache` with `update` written along an axis from `starts` on, one start for each index of dimension 0.",
        ("cache", "update", "starts"),
        _cache_update,
        (integer("axis", -2, "the dimension"), flag("circular", "what is beyond the end is written at the beginning")),
        needed=2,
    ),
)
