"""Operators over the order of elements: top_k_indices, running sums, products and extrema, linear recurrences."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from roller_svc.frontend.ops.operator import Call, Operator
from roller_svc.frontend.ops.parameters import dtype, flag, integer, required
from roller_svc.frontend.ops.selection import MAX_SELECTED_FROM, count_comparisons, may_select, select_in_order
from roller_svc.frontend.ops.text import affine, broadcast, broadcast_shape, guard, join_statements, number, statement, zero
from roller_svc.ir.dtype import DType

# Every pair of elements along the axis is compared, or of a block of it.
MAX_RANKED = 1 << 14
UNORDERED = (DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2, DType.BOOL)  # types without extrema
MAX_ROUNDS = 8  # elements that are found one after the other, each in a pass over what is on chip
MIN_SAVED = 4  # comparisons of all pairs for each one of blocks, from which blocks pay


def _count_and_axis(call: Call) -> tuple[int, int]:
    """Return how many elements are found, and along which dimension."""
    axis, count = call.one_axis(call.x.rank), call.integer("k")
    if count > (extent := call.x.shape[axis]):
        raise call.wrong_parameter(f"k is {count}, but dimension {axis} has {extent} elements")
    return count, axis


def _top_k_values(call: Call) -> str:
    """Return the statements that find one element after the other, or gather those that top_k_indices finds."""
    count, axis = _count_and_axis(call)
    if _is_found_in_rounds(call.x.dtype, count):
        return _top_k_in_rounds(call, axis, count, values=True)
    return _gather(call, axis, count, _top_k_indices(_call_for_places(call)))


def _other_top_k_values(call: Call) -> str | None:
    count, axis = _count_and_axis(call)
    found = _other_top_k_indices(_call_for_places(call))
    return None if found is None else _gather(call, axis, count, found)


def _call_for_places(call: Call) -> Call:
    """Return the call of top_k_indices that finds the places of the values."""
    parameters = {**call.parameters, "dtype": DType.INT32.value}
    return replace(call, output=call.intermediate("places"), parameters=parameters)


def _gather(call: Call, axis: int, count: int, found: str) -> str:
    """Return the statements that find places, with the one that gathers the elements there."""
    x, axes = call.x, call.axes(call.x.rank)
    shape = (*x.shape[:axis], count, *x.shape[axis + 1 :])
    element = x.at(*axes[:axis], f"{call.intermediate('places')}[{', '.join(axes)}]", *axes[axis + 1 :])
    return join_statements(found, statement(call.output, axes, "=", element, where=list(zip(axes, shape, strict=True))))


def _is_found_in_rounds(dtype: DType, count: int) -> bool:
    return count <= MAX_ROUNDS and dtype not in UNORDERED


def _top_k_indices(call: Call) -> str:
    """Return the statements that find one element after the other, or select them, or count those before each one."""
    count, axis = _count_and_axis(call)
    if _is_found_in_rounds(call.x.dtype, count):
        return _top_k_in_rounds(call, axis, count, values=False)
    if selects(call.x.dtype, call.x.shape[axis], count):
        return select_in_order(call, axis, count)
    if call.x.shape[axis] > MAX_RANKED:
        raise call.wrong_shape(_explain_limit(call, axis, count))
    return _rank_elements(call, axis, count)


def _other_top_k_indices(call: Call) -> str | None:
    """Return the statements that rank what would be selected: fewer launches, and more comparisons."""
    count, axis = _count_and_axis(call)
    extent = call.x.shape[axis]
    is_selected = not _is_found_in_rounds(call.x.dtype, count) and selects(call.x.dtype, extent, count)
    return _rank_elements(call, axis, count) if is_selected and extent <= MAX_RANKED else None


def _rank_elements(call: Call, axis: int, count: int) -> str:
    """Return the statements that count the elements before each one, within blocks first where that pays."""
    x = call.x
    if (size := _block_size(x.shape[axis], count)) < x.shape[axis]:
        return _top_k_of_blocks(call, axis, size)
    axes, other, place = call.axes(x.rank), call.axis("other"), call.axis("place")
    here = axes[axis]
    a, b = x.at(*axes[:axis], other, *axes[axis + 1 :]), x.at(*axes)
    rank = call.intermediate("rank")
    chosen = f"{rank}[{', '.join(axes)}] == {place}"
    return join_statements(
        statement(rank, axes, "+=!", _is_before(call, a, b, f"{other} < {here}"), dtype=DType.INT32),
        statement(
            call.output,
            (*axes[:axis], place, *axes[axis + 1 :]),
            "+=!",
            guard(here, [chosen], "0"),
            where=[(place, count)],
            dtype=call.dtype(),
        ),
    )


def _top_k_in_rounds(call: Call, axis: int, count: int, *, values: bool) -> str:
    """Return the statements that find the first element, then the first one after it, and so on.

    A round is a maximum and the least position that has it, over the elements after the one found before. The results
    are positions, or `values`.
    """
    x, axes = call.x, call.axes(call.x.rank)
    here, rows, element = axes[axis], (*axes[:axis], *axes[axis + 1 :]), x.at(*axes)
    largest, extent = call.flag("largest"), x.shape[axis]
    is_nan = [f"isnan({element})"] if x.dtype.is_float else []
    sign, before = (">", "<") if largest else ("<", ">")
    keyed, position, end, statements, results = element, here, extent, list[str](), list[str]()
    if is_nan and not largest:  # NaN is last: as infinity, behind all positions of numbers
        keyed = f"where({is_nan[0]}, {number(math.inf, x.dtype)}, {element})"
        position, end = f"where({is_nan[0]}, {here} + {extent}, {here})", 2 * extent
    after: list[str] = []
    for rank in range(count):
        best, place = (f"{call.intermediate(f'{role}{rank}')}[{', '.join(rows)}]" for role in ("best", "place"))
        same = " | ".join([f"({element} == {best})", *is_nan]) if largest else f"{keyed} == {best}"
        statements += [
            statement(best.partition("[")[0], rows, f"{sign}=!", guard(keyed, after, _neutral(sign, x.dtype))),
            statement(place.partition("[")[0], rows, "<=!", guard(position, [same, *after], str(end)), dtype=DType.INT32),
        ]
        found = f"{place} % {extent}" if position != here else place
        if values:  # the difference of infinities is NaN
            found = best if position == here else f"where({place} < {extent}, {best}, {best} - {best})"
        results.append(found)
        later = f"({keyed} {before} {best}) | ({keyed} == {best}) & ({position} > {place})"
        if is_nan and largest:
            later += f" | isnan({best}) & (~isnan({element}) | ({here} > {place}))"
        after = [later]
    result_axis = call.axis("place")
    found = results[0]
    for rank, other in enumerate(results[1:], start=1):
        found = f"where({result_axis} == {rank}, {other}, {found})"
    result = (*axes[:axis], result_axis, *axes[axis + 1 :])
    if values and position == here:
        del statements[-1]  # no value needs the last position
    dtype = x.dtype if values else call.dtype()
    return join_statements(*statements, statement(call.output, result, "=", found, where=[(result_axis, count)], dtype=dtype))


def _explain_limit(call: Call, axis: int, count: int) -> str:
    """Return why elements are neither ranked nor selected."""
    extent, dtype = call.x.shape[axis], call.x.dtype
    if may_select(dtype, extent):
        return f"k is {count}; of an axis of more than {MAX_RANKED} elements, at most {MAX_RANKED} are found"
    limit = MAX_SELECTED_FROM if may_select(dtype, MAX_SELECTED_FROM) else MAX_RANKED
    return f"dimension {axis} of {dtype.value} has {extent} elements, which is more than {limit}"


def selects(dtype: DType, extent: int, count: int) -> bool:
    """Return whether elements may be found by selection, with fewer comparisons than ranks of all.

    Those that are found are ranked by pairs.
    """
    if not may_select(dtype, extent) or count > MAX_RANKED:
        return False
    return extent > MAX_RANKED or count_comparisons(dtype, extent, count) < extent * extent


def _block_size(extent: int, count: int) -> int:
    """Return the elements of a block of which the first `count` are found first: those of the fewest comparisons.

    The whole axis where blocks do not save most of the comparisons, since they take more launches.
    """

    def comparisons(size: int) -> int:
        blocks = -(-extent // size)
        found = blocks * min(count, size)
        return blocks * size * size + found * found

    size = min((1 << bit for bit in range(3, extent.bit_length())), key=comparisons, default=extent)
    return size if comparisons(size) * MIN_SAVED <= extent * extent else extent


def _top_k_of_blocks(call: Call, axis: int, size: int) -> str:
    """Return the statements that find the first elements of each block, then the first ones among these.

    Places that a short last block lacks have position 0; positions count from 1.
    """
    x, axes, extent, count = call.x, call.axes(call.x.rank), call.x.shape[axis], call.integer("k")
    lead, tail = axes[:axis], axes[axis + 1 :]
    block, here, place = call.axis("block"), call.axis("here"), call.axis("place")
    other, last, result = call.axis("other"), call.axis("last"), call.axis("result")
    rank, first, value, final = (call.intermediate(name) for name in ("rank", "first", "value", "final"))
    blocks, places = -(-extent // size), min(count, size)

    def at(tensor: str, *middle: str) -> str:
        return f"{tensor}[{', '.join((*lead, *middle, *tail))}]"

    own, others = affine([(block, size), (here, 1)]), affine([(block, size), (other, 1)])
    ends = [f"{own} < {extent}"] if blocks * size > extent else []
    other_ends = [f"{others} < {extent}", *ends] if ends else []
    joined = _is_before(call, x.at(*lead, others, *tail), x.at(*lead, own, *tail), f"{other} < {here}")
    is_chosen = [f"{at(rank, block, here)} == {place}", *ends]
    earlier = f"{at(first, last, other)} < {at(first, block, place)}"
    precedes = _is_before(call, at(value, last, other), at(value, block, place), earlier)
    found = [f"{at(first, last, other)} > 0"] if ends else []
    is_result = [f"{at(final, block, place)} == {result}", *([f"{at(first, block, place)} > 0"] if ends else [])]
    inside, candidates = [(block, blocks), (here, size)], [(block, blocks), (place, places)]
    return join_statements(
        statement(rank, (*lead, block, here, *tail), "+=!", guard(f"({joined})", other_ends, "0"),
                  where=[*inside, (other, size)], dtype=DType.INT32),
        statement(first, (*lead, block, place, *tail), "+=!", guard(f"({own} + 1)", is_chosen, "0"),
                  where=[*candidates, (here, size)], dtype=DType.INT32),
        statement(value, (*lead, block, place, *tail), "+=!",
                  guard(x.at(*lead, own, *tail), is_chosen, number(0, x.dtype)),
                  where=[*candidates, (here, size)], dtype=x.dtype),
        statement(final, (*lead, block, place, *tail), "+=!", guard(f"({precedes})", found, "0"),
                  where=[*candidates, (last, blocks), (other, places)], dtype=DType.INT32),
        statement(call.output, (*lead, result, *tail), "+=!", guard(f"({at(first, block, place)} - 1)", is_result, "0"),
                  where=[*candidates, (result, count)], dtype=call.dtype()),
    )  # fmt: skip


def _is_before(call: Call, a: str, b: str, is_earlier: str) -> str:
    """Return the condition that an element comes before another one."""
    largest = call.flag("largest")
    first = f"({a} {'>' if largest else '<'} {b})"
    same = f"({a} == {b})"
    if call.x.dtype.is_float:
        first += f" | isnan({a if largest else b}) & ~isnan({b if largest else a})"
        same = f"({same} | isnan({a}) & isnan({b}))"
    return f"{first} | {same} & ({is_earlier})"


def _cumulate(call: Call, *, sign: str) -> str:
    """Return the reduction of all elements up to each one, which a kernel computes in one pass."""
    x = call.x
    axis, axes = call.one_axis(x.rank), call.axes(x.rank)
    extent, other, here = x.shape[axis], call.axis("other"), axes[axis]
    is_joined = f"{other} {'>' if call.flag('reverse') else '<'}{'' if call.flag('exclusive') else '='} {here}"
    dtype, element = call.dtype() or x.dtype, x.at(*axes[:axis], other, *axes[axis + 1 :])
    if dtype in (DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2) and sign in "<>":
        raise call.wrong_shape(f"extrema of {dtype.value} have no type with infinities; cast the tensor to float16 first")
    joined = element if dtype is x.dtype else f"({element}).cast(`{dtype.value}`)"
    value = guard(joined, [is_joined], _neutral(sign, dtype))
    return statement(call.output, axes, f"{sign}=!", value, where=[(here, extent)], dtype=dtype)


def _neutral(sign: str, dtype: DType) -> str:
    """Return the literal that changes no value that it is joined with."""
    if sign in ("+", "*"):
        return number(0 if sign == "+" else 1, dtype)
    if dtype.is_float:
        return number(-math.inf if sign == ">" else math.inf, dtype)
    return number(dtype.integer_range[0 if sign == ">" else 1], dtype)


def _linear_recurrence(call: Call) -> str:
    """Return the map that reads its own result before each element."""
    gate, x = call.operands[:2]
    shape = broadcast_shape(call, (gate.shape, x.shape))
    axis, axes = call.one_axis(len(shape)), call.axes(len(shape))
    rows = (*shape[:axis], *shape[axis + 1 :])
    initial = call.operand(2)
    if initial is not None and broadcast_shape(call, (initial.shape, rows)) != rows:
        raise call.wrong_shape(f"`{initial.name}` {list(initial.shape)} does not broadcast to {list(rows)}")
    at_rows = (*axes[:axis], *axes[axis + 1 :])
    start = zero(x.dtype) if initial is None else broadcast(initial, at_rows, rows)
    state = _state_before(call, axes, axis, shape[axis], start)
    step = f"{broadcast(gate, axes, shape)} * {state} + {broadcast(x, axes, shape)}"
    return statement(call.output, axes, "=", step, where=list(zip(axes, shape, strict=True)))


def _segmented_cumsum(call: Call) -> str:
    """Return the recurrence whose gate is zero where a segment begins."""
    x, starts = call.operands
    axis, axes = call.one_axis(x.rank), call.axes(x.rank)
    if broadcast_shape(call, (starts.shape, x.shape)) != x.shape:
        raise call.wrong_shape(f"`{starts.name}` {list(starts.shape)} does not broadcast to {list(x.shape)}")
    begins = f"{broadcast(starts, axes, x.shape)} != 0"
    state = _state_before(call, axes, axis, x.shape[axis], zero(x.dtype))
    return statement(call.output, axes, "=", f"where({begins}, {zero(x.dtype)}, {state}) + {x.at(*axes)}", dtype=x.dtype)


def _state_before(call: Call, axes: tuple[str, ...], axis: int, extent: int, start: str) -> str:
    """Return the result before an element, or behind it, or the start before the first one."""
    here, is_reversed = axes[axis], call.flag("reverse")
    neighbour = f"{here} {'+' if is_reversed else '-'} 1"
    is_later = f"{here} < {extent - 1}" if is_reversed else f"{here} > 0"
    state = f"{call.output}[{', '.join((*axes[:axis], neighbour, *axes[axis + 1 :]))}]"
    return guard(state, [is_later], start)


_CUMULATED = (
    integer("axis", -1, "the dimension"),
    flag("exclusive", "without the element itself"),
    flag("reverse", "from the last element"),
    dtype("dtype", None, "type in which they are joined, and of the result"),
)

OPERATORS = (
    Operator(
        "top_k_indices",
        f"Where along an axis the `k` greatest elements are, in order. Equal ones keep their order; NaN counts as "
        f"greatest. If `k` is greater than {MAX_ROUNDS}, an axis has at most {MAX_SELECTED_FROM} elements; of 64-bit "
        f"types and float8, or if `k` is greater than {MAX_RANKED}, at most {MAX_RANKED}.",
        ("x",),
        _top_k_indices,
        (
            required(integer("k", None, "how many", minimum=1)),
            integer("axis", -1, "the dimension"),
            flag("largest", "the greatest ones first, else the least", default=True),
            dtype("dtype", "int64", "type of the result"),
        ),
        write_other=_other_top_k_indices,
    ),
    Operator(
        "top_k_values",
        "The `k` greatest elements along an axis, in the order of top_k_indices, which has the limits.",
        ("x",),
        _top_k_values,
        (
            required(integer("k", None, "how many", minimum=1)),
            integer("axis", -1, "the dimension"),
            flag("largest", "the greatest ones first, else the least", default=True),
        ),
        write_other=_other_top_k_values,
    ),
    Operator("cumsum", "Sum of the elements up to each one along an axis.", ("x",), partial(_cumulate, sign="+"),
             _CUMULATED),
    Operator("cumprod", "Product of the elements up to each one along an axis.", ("x",), partial(_cumulate, sign="*"),
             _CUMULATED),
    Operator("cummax", "Greatest of the elements up to each one along an axis.", ("x",), partial(_cumulate, sign=">"),
             _CUMULATED),
    Operator(
        "linear_recurrence",
        "`h[t] = gate[t] * h[t - 1] + x[t]` along an axis, from `initial` or 0 on.",
        ("gate", "x", "initial"),
        _linear_recurrence,
        (integer("axis", -1, "the dimension"), flag("reverse", "from the last element")),
        needed=2,
    ),
    Operator(
        "segmented_cumsum",
        "Sum of the elements of the same segment up to each one; a segment begins where `starts` is not 0.",
        ("x", "starts"),
        _segmented_cumsum,
        (integer("axis", -1, "the dimension"), flag("reverse", "from the last element")),
    ),
    Operator("cummin", "Least of the elements up to each one along an axis.", ("x",), partial(_cumulate, sign="<"),
             _CUMULATED),
)  # fmt: skip
