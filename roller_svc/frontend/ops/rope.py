"""Rotary position embedding (Su et al., 2021): pairs of features are rotated by an angle of their position."""

from __future__ import annotations

from roller_svc.frontend.ops.operator import Call, Operand, Operator
from roller_svc.frontend.ops.parameters import choice, flag
from roller_svc.frontend.ops.text import broadcast_index, broadcast_shape, guard, statement
from roller_svc.ir.dtype import DType

LAYOUTS = ("NHD", "HND")  # whether positions or heads come first


def _rope(call: Call) -> str:
    x, cos, sin = call.operands[:3]
    if x.rank < 3 or not all(operand.dtype.is_float for operand in (x, cos, sin)):
        raise call.wrong_shape(f"`{x.name}` must have positions, heads and features, and it and the tables must be floats")
    pairs = cos.shape[-1] if cos.rank else 0
    if not 0 < 2 * pairs <= x.shape[-1]:
        raise call.wrong_shape(f"`{cos.name}` {list(cos.shape)} must end in at most half of the {x.shape[-1]} features")
    call.check_shape(sin, cos.shape)
    heads = x.rank - (2 if call.text("layout") == "NHD" else 3)
    lead = [call.axis(f"b{d}") for d in range(x.rank - 3)] + [call.axis("t")]
    row = _row(call, cos, lead, x.shape[:heads] + x.shape[heads + 1 : -1])
    d = call.axis("d")
    index = (*lead[:heads], call.axis("h"), *lead[heads:])
    if call.flag("interleaved"):
        pair, partner, is_first = f"{d} // 2", f"{d} + 1 - {d} % 2 * 2", f"{d} % 2 == 0"
    else:
        pair, partner, is_first = f"{d} % {pairs}", f"({d} + {pairs}) % {2 * pairs}", f"{d} < {pairs}"
    is_rotated = [] if 2 * pairs == x.shape[-1] else [f"{d} < {2 * pairs}"]
    sine = sin.at(*row, pair)
    own = f"{_widened(x, *index, d)} * {guard(cos.at(*row, pair), is_rotated, '1.0')}"
    other = f"{_widened(x, *index, partner)} * where({is_first}, -{sine}, {sine})"
    value = f"{own} + {guard(f'({other})', is_rotated, '0.0') if is_rotated else other}"
    is_plain = all(operand.dtype is x.dtype and not _is_narrow(operand) for operand in (x, cos, sin))
    return statement(call.output, (*index, d), "=", value if is_plain else f"({value}).cast(`{x.dtype.value}`)")


def _row(call: Call, table: Operand, lead: list[str], shape: tuple[int, ...]) -> list[str]:
    """Return the leading indices of the tables: the position, or the axes that they share with `x`."""
    positions = call.operand(3)
    shared = table.shape[:-1] if positions is None else positions.shape
    if positions is not None:
        call.check_rank(table, 2, "[positions, pairs of features]")
    if broadcast_shape(call, (shared, shape)) != shape:
        raise call.wrong_shape(f"positions {list(shared)} do not broadcast to the {list(shape)} of `{call.x.name}`")
    index = broadcast_index(shared, lead, shape)
    return index if positions is None else [positions.at(*index)]


def _is_narrow(operand: Operand) -> bool:
    return operand.dtype.bytes < DType.FLOAT32.bytes


def _widened(operand: Operand, *index: str) -> str:
    return operand.at(*index) + (".cast(`float32`)" if _is_narrow(operand) else "")


OPERATORS = (
    Operator(
        "rope",
        "Rotary embedding: pairs of features of `x` [..., positions, heads, features] are rotated by the angles whose `cos` "
        "and `sin` [rows, pairs] are in the row that `positions` [..., positions] selects. Without `positions` the tables "
        "are [..., positions, pairs]. Features after the pairs stay as they are.",
        ("x", "cos", "sin", "positions"),
        _rope,
        (
            flag("interleaved", "a pair is two adjacent features, else one of each half"),
            choice("layout", "NHD", LAYOUTS, "`HND` for `x` [..., heads, positions, features]"),
        ),
        needed=3,
    ),
)
