"""Operators that write where an integer tensor says: scatter_elements, scatter_nd."""

from __future__ import annotations

from roller_svc.frontend.ops.gather import NEGATIVE, data_index
from roller_svc.frontend.ops.operator import Call, Operator
from roller_svc.frontend.ops.parameters import choice, integer, integers
from roller_svc.frontend.ops.text import join_statements, statement

_SIGNS = {"none": "=", "add": "+=.", "mul": "*=.", "max": ">=.", "min": "<=."}
_REDUCTION = choice("reduction", "none", tuple(_SIGNS), "how an update joins the element that is there")


def _scatter_elements(call: Call) -> str:
    x, ids, updates = call.operands
    call.check_rank(ids, x.rank, f"`{x.name}`")
    call.check_shape(updates, ids.shape)
    axis, axes = call.one_axis(x.rank), call.axes(x.rank)
    for d, (extent, size) in enumerate(zip(ids.shape, x.shape, strict=True)):
        if d != axis and extent > size:
            raise call.wrong_shape(f"`{ids.name}` {list(ids.shape)} is larger than `{x.name}` {list(x.shape)}")
    index = [*axes]
    index[axis] = data_index(call, ids, axes, x.shape[axis])
    return _scatter(call, axes, index, updates.at(*axes), list(zip(axes, ids.shape, strict=True)))


def _scatter_nd(call: Call) -> str:
    x, ids, updates = call.operands
    if not ids.rank or not 1 <= ids.shape[-1] <= x.rank:
        raise call.wrong_shape(
            f"the last dimension of `{ids.name}` {list(ids.shape)} is the number of indexed dimensions of `{x.name}`: 1 to {x.rank}"
        )
    depth = ids.shape[-1]
    indexed = [call.dimension(d, x.rank, "axes") for d in call.integers("axes")] if call.has("axes") else list(range(depth))
    if len(indexed) != depth or len(set(indexed)) < depth:
        raise call.wrong_parameter(f"axes must be {depth} different dimensions, as many as `{ids.name}` has indices of")
    rest = [d for d in range(x.rank) if d not in indexed]
    call.check_shape(updates, (*ids.shape[:-1], *(x.shape[d] for d in rest)))
    places = tuple(call.axis(f"n{d}") for d in range(ids.rank - 1))
    axes = call.axes(x.rank)
    index = [*axes]
    for number, d in enumerate(indexed):
        index[d] = data_index(call, ids, (*places, str(number)), x.shape[d])
    return _scatter(call, axes, index, updates.at(*places, *(axes[d] for d in rest)))


def _scatter(call: Call, axes: tuple[str, ...], index: list[str], value: str, where: list[tuple[str, int]] | None = None) -> str:
    """Return the statements of a copy of the first operand, and of the updates of it."""
    return join_statements(
        statement(call.output, axes, "=", call.x.at(*axes)),
        statement(call.output, index, _SIGNS[call.text("reduction")], value, where=where or ()),
    )


OPERATORS = (
    Operator(
        "scatter_elements",
        "`x` with one element replaced for each of `updates`, at its own index but for one along an axis.",
        ("x", "indices", "updates"),
        _scatter_elements,
        (integer("axis", 0, "the dimension"), _REDUCTION, NEGATIVE),
    ),
    Operator(
        "scatter_nd",
        "`x` with elements or slices replaced by `updates`; the last dimension of `indices` holds their indices.",
        ("x", "indices", "updates"),
        _scatter_nd,
        (integers("axes", None, "the dimensions that are indexed; the first ones by default"), _REDUCTION, NEGATIVE),
    ),
)
