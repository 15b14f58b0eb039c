"""Layout operators: transpose, reshape, broadcast_to, concat, pad, slice, flip."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import accumulate

from roller_svc.errors import ArgumentError
from roller_svc.frontend.ops.operator import Call, Operator
from roller_svc.frontend.ops.parameters import choice, flag, integer, integers, required, unbounded
from roller_svc.frontend.ops.text import affine, broadcast, broadcast_shape, guard, join_statements, statement, zero
from roller_svc.frontend.ops.text import number as literal


def _transpose(call: Call) -> str:
    x = call.x
    permutation = call.integers("permutation") if call.has("permutation") else tuple(reversed(range(x.rank)))
    order = [call.dimension(d, x.rank, "permutation") for d in permutation]
    if sorted(order) != list(range(x.rank)):
        raise call.wrong_parameter(f"permutation must name each of {x.rank} dimensions once")
    axes = call.axes(x.rank)
    return statement(call.output, [axes[d] for d in order], "=", x.at(*axes))


def _reshape(call: Call) -> str:
    x = call.x
    shape = _infer_shape(call, call.integers("shape"))
    axes = call.axes(len(shape))
    index: list[str] = []
    for inner, outer in _groups(x.shape, shape):
        index += _split([x.shape[d] for d in inner], [(axes[d], shape[d]) for d in outer])
    return statement(call.output, axes, "=", x.at(*index), where=list(zip(axes, shape, strict=True)))


def _infer_shape(call: Call, requested: Sequence[int]) -> tuple[int, ...]:
    """Replace -1 in the requested shape."""
    elements = call.x.type.elements
    known_elements = math.prod(extent for extent in requested if extent != -1)
    holes = sum(extent == -1 for extent in requested)
    good = all(extent > 0 or extent == -1 for extent in requested) and holes <= 1
    if not good or (elements % known_elements if holes else elements != known_elements):
        raise call.wrong_shape(f"`{call.x.name}` {list(call.x.shape)} has {elements} elements, not {list(requested)}")
    return tuple(elements // known_elements if extent == -1 else extent for extent in requested)


def _groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Return minimal groups of old and new dimensions with equal numbers of elements."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        inner, outer = [i] if i < len(old) else [], [j] if j < len(new) else []
        i, j = i + len(inner), j + len(outer)
        while (left := math.prod(old[d] for d in inner)) != (right := math.prod(new[d] for d in outer)):
            if left < right:
                inner.append(i)
                i += 1
            else:
                outer.append(j)
                j += 1
        groups.append((inner, outer))
    return groups


def _split(old: Sequence[int], new: Sequence[tuple[str, int]]) -> list[str]:
    """Return the indices of a group of old dimensions in terms of the new axes."""
    terms, stride = list[tuple[str, int]](), 1
    for axis, extent in reversed(new):
        if extent > 1:
            terms.insert(0, (axis, stride))
        stride *= extent
    whole = affine(terms)
    if [extent for extent in old if extent > 1] == [extent for _, extent in new if extent > 1]:
        names = iter(axis for axis, _ in terms)
        return [next(names) if extent > 1 else "0" for extent in old]
    inner = whole if len(terms) == 1 and terms[0][1] == 1 else f"({whole})"
    index, behind, first = list[str](), math.prod(old), True
    for extent in old:
        behind //= extent
        part = whole if behind == 1 else f"{inner} // {behind}"
        if not first and extent > 1:
            part = f"{inner if behind == 1 else part} % {extent}"
        index.append(part if extent > 1 else "0")
        first = first and extent == 1
    return index


def _broadcast_to(call: Call) -> str:
    x, requested = call.x, call.integers("shape")
    shape = broadcast_shape(call, (x.shape, requested))
    axes = call.axes(len(shape))
    return statement(call.output, axes, "=", broadcast(x, axes, shape), where=list(zip(axes, shape, strict=True)))


MAX_TESTS = 16  # of the operands of a concatenation, one after another
MAX_JOINED = 64  # operands that one statement concatenates


def _concat(call: Call) -> str:
    x = call.x
    axis, axes = call.one_axis(x.rank), call.axes(x.rank)
    for operand in call.operands:
        call.check_rank(operand, x.rank, "the first")
        call.check_shape(operand, (*x.shape[:axis], operand.shape[axis], *x.shape[axis + 1 :]))
    parts = [(operand.name, operand.shape[axis]) for operand in call.operands]
    statements: list[str] = []
    while len(parts) > MAX_JOINED:
        joined = []
        for first in range(0, len(parts), MAX_JOINED):
            name = call.intermediate(f"joined{len(statements)}")
            statements.append(_join(name, parts[first : first + MAX_JOINED], axes, axis))
            joined.append((name, sum(extent for _, extent in parts[first : first + MAX_JOINED])))
        parts = joined
    return join_statements(*statements, _join(call.output, parts, axes, axis))


def _join(output: str, parts: Sequence[tuple[str, int]], axes: Sequence[str], axis: int) -> str:
    """Return the statement that joins tensors along an axis. `parts`: name and extent of each."""
    starts = list(accumulate((extent for _, extent in parts), initial=0))
    place = axes[axis]
    reads = [
        f"{name}[{', '.join((*axes[:axis], affine([(place, 1)], -start), *axes[axis + 1 :]))}]"
        for (name, _), start in zip(parts, starts, strict=False)
    ]
    return statement(output, axes, "=", _choose_operand(place, starts, reads), where=[(place, starts[-1])])


def _choose_operand(place: str, starts: Sequence[int], reads: Sequence[str]) -> str:
    """Return the operand at a place: one test after another of few, a binary search among many."""
    if len(reads) == 1:
        return reads[0]
    first = 1 if len(reads) <= MAX_TESTS else len(reads) // 2
    earlier, later = (_choose_operand(place, starts[part], reads[part]) for part in (slice(first), slice(first, None)))
    return guard(earlier, [f"{place} < {starts[first]}"], later)


def _pad(call: Call) -> str:
    x, mode = call.x, call.text("mode")
    before, after = _pads(call, call.integers("pads"))
    axes = call.axes(x.rank)
    index, guards, where = [], list[str](), list[tuple[str, int]]()
    for axis, size, low, high in zip(axes, x.shape, before, after, strict=True):
        if low == high == 0:
            index.append(axis)
            continue
        if size + low + high < 1:
            raise call.wrong_shape(f"pads {low} and {high} leave none of {size} elements")
        if mode == "wrap" and size + min(low, 0) + min(high, 0) < 1:
            raise call.wrong_shape(f"pads {low} and {high} leave none of {size} elements to repeat")
        if mode == "reflect" and max(low, high) >= size:
            raise call.wrong_shape(f"pads {low} and {high} reflect more than {size} elements")
        at = affine([(axis, 1)], -low)
        where.append((axis, size + low + high))
        index.append(_pad_index(at, size, low, high, mode))
        if mode == "constant":
            guards += [f"{at} >= 0"] if low > 0 else []
            guards += [f"{at} < {size}"] if high > 0 else []
    value = guard(x.at(*index), guards, literal(call.number("value"), x.dtype))
    return statement(call.output, axes, "=", value, where=where)


def _pad_index(at: str, size: int, low: int, high: int, mode: str) -> str:
    """Return the index of the element that a padded one copies."""
    if mode == "edge":
        at = f"max({at}, 0)" if low > 0 else at
        return f"min({at}, {size - 1})" if high > 0 else at
    if mode == "reflect":
        at = f"abs({at})" if low > 0 else at
        return f"{size - 1} - abs({size - 1} - ({at}))" if high > 0 else at
    if mode == "wrap":
        first, length = max(-low, 0), size + min(low, 0) + min(high, 0)  # negative pads crop what others repeat
        return affine([(f"({affine([(at, 1)], -first)}) % {length}", 1)], first)
    return at


def _pads(call: Call, pads: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    rank = call.x.rank
    if len(pads) == 1:
        return pads * rank, pads * rank
    if len(pads) == 2 * rank:
        return pads[:rank], pads[rank:]
    raise call.wrong_parameter(f"pads must be 1 number or {2 * rank}: before each dimension, then after each")


def _slice(call: Call) -> str:
    x, starts, stops = call.x, call.integers("starts"), call.integers("stops")
    dims = call.integers("axes") if call.has("axes") else tuple(range(len(starts)))
    steps = call.integers("steps") if call.has("steps") else (1,) * len(starts)
    if not len(starts) == len(stops) == len(dims) == len(steps):
        raise call.wrong_parameter("starts, stops, axes and steps must be of one length")
    axes = call.axes(x.rank)
    index, where = list(axes), list[tuple[str, int]]()
    for start, stop, dim, step in zip(starts, stops, dims, steps, strict=True):
        d = call.dimension(dim, x.rank, "axes")
        chosen = range(x.shape[d])[start:stop:step] if step else range(0)
        if not chosen:
            raise call.wrong_shape(f"nothing is left of dimension {d}, which has {x.shape[d]} elements")
        index[d] = _slice_index(axes[d], chosen)
        where.append((axes[d], len(chosen)))
    return statement(call.output, axes, "=", x.at(*index), where=where)


def _slice_index(axis: str, chosen: range) -> str:
    if chosen.step > 0:
        return affine([(axis, chosen.step)], chosen.start)
    return f"{chosen.start} - {affine([(axis, -chosen.step)])}"


def _flip(call: Call) -> str:
    x = call.x
    dims = range(x.rank) if not call.has("axis") else [call.dimension(d, x.rank, "axis") for d in call.integers("axis")]
    axes = call.axes(x.rank)
    index = [f"{x.shape[d] - 1} - {axis}" if d in dims else axis for d, axis in enumerate(axes)]
    return statement(call.output, axes, "=", x.at(*index), where=[(axes[d], x.shape[d]) for d in dims])


def _trilu(call: Call) -> str:
    x = call.x
    if x.rank < 2:
        raise call.wrong_shape(f"`{x.name}` {list(x.shape)} must have 2 dimensions or more")
    axes = call.axes(x.rank)
    row, column = axes[-2:]
    condition = f"{column} {'>=' if call.flag('upper') else '<='} {affine([(row, 1)], call.integer('diagonal'))}"
    return statement(call.output, axes, "=", guard(x.at(*axes), [condition], zero(x.dtype)))


def _squeeze(call: Call, *, add: bool) -> str:
    """Remove or insert dimensions of extent 1."""
    x, axis = call.x, call.integers("axis")
    rank = x.rank + len(axis) if add else x.rank
    dims = {call.dimension(d, rank, "axis") for d in axis}
    if len(dims) < len(axis):
        raise ArgumentError(f"{call.operator}: axis names a dimension twice", code="invalid-parameter")
    axes = call.axes(rank - len(dims))
    remaining = iter(axes)
    full = ["0" if d in dims else next(remaining) for d in range(rank)]
    if not add and any(x.shape[d] != 1 for d in dims):
        raise call.wrong_shape(f"`{x.name}` {list(x.shape)} has more than one element along {sorted(dims)}")
    return statement(call.output, full if add else axes, "=", x.at(*(axes if add else full)))


_SHAPE = required(integers("shape", None, "the extents", minimum=-1))

OPERATORS = (
    Operator(
        "transpose",
        "Dimensions in another order.",
        ("x",),
        _transpose,
        (integers("permutation", None, "the dimensions in their new order; reversed by default"),),
    ),
    Operator("reshape", "The same elements, in order, in another shape; one -1 stands for the rest.", ("x",), _reshape,
             (_SHAPE,)),
    Operator("squeeze", "Without dimensions of extent 1.", ("x",), partial(_squeeze, add=False),
             (required(integers("axis", None, "the dimensions")),)),
    Operator("unsqueeze", "With more dimensions, of extent 1.", ("x",), partial(_squeeze, add=True),
             (required(integers("axis", None, "where they are in the result")),)),
    Operator("broadcast_to", "Extents of 1 stretched, by numpy's rules.", ("x",), _broadcast_to,
             (required(integers("shape", None, "the extents", minimum=1)),)),
    Operator("concat", "Tensors one after the other along an axis.", ("x", "y"), _concat,
             (integer("axis", 0, "the dimension"),), needed=1, more=True),
    Operator(
        "pad",
        "More elements around, or fewer where a pad is negative.",
        ("x",),
        _pad,
        (
            required(integers("pads", None, "one number, or those before each dimension, then those after each")),
            choice("mode", "constant", ("constant", "edge", "reflect", "wrap"), "what stands there"),
            unbounded("value", 0.0, "the constant, also `inf` or `-inf` in quotes"),
        ),
    ),
    Operator(
        "slice",
        "Every so many elements of a part of some dimensions, as Python slices.",
        ("x",),
        _slice,
        (
            required(integers("starts", None, "where each part begins")),
            required(integers("stops", None, "where it has ended")),
            integers("axes", None, "the dimensions; the first ones by default"),
            integers("steps", None, "steps, which may be negative; 1 by default"),
        ),
    ),
    Operator("trilu", "The lower or upper triangle of the last two dimensions; 0 elsewhere.", ("x",), _trilu,
             (flag("upper", "the upper one"), integer("diagonal", 0, "the last one that stays, from the main one"))),
    Operator("flip", "Dimensions from the last element to the first.", ("x",), _flip,
             (integers("axis", None, "the dimensions; all by default"),)),
)  # fmt: skip
