"""Index width: whether all indices, loop bounds and compared values of a schedule tree fit in 32 bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from roller_svc.analysis.index_ranges import COMPARED, INDEXED, Range, may_exceed_int32, range_of
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import COMPARISONS, Expr, Op, iter_subexpressions, loads_of
from roller_svc.ir.schedule import AnyThread, Branch, BulkCopy, Compute, CpAsync, Let, Loop, Node, child_lists, expressions

MAX_INT32 = DType.INT32.integer_range[1]

Shapes = Mapping[str, tuple[int, ...]]


def needs_wide_index(nodes: tuple[Node, ...], shapes: Shapes, ranges: Mapping[str, Range] | None = None) -> bool:
    """Return whether a value may not fit. `shapes`: of the tensors in memory. `ranges`: of the variables in scope."""
    known = ranges or {}
    for node in nodes:
        if isinstance(node, Loop) and node.extent > MAX_INT32:
            return True
        if any(may_exceed_int32(place, known, INDEXED) for place in _exact_indices(node)):
            return True
        if any(may_exceed_int32(side, known, COMPARED) for side in _compared(node)):
            return True
        inside = _ranges_inside(node, shapes, known)
        if any(needs_wide_index(body, shapes, inside) for body in child_lists(node)):
            return True
    return False


def _ranges_inside(node: Node, shapes: Shapes, ranges: Mapping[str, Range]) -> Mapping[str, Range]:
    """Return the ranges of the variables in the node's bodies."""
    match node:
        case Loop(var=var, extent=extent):
            return {**ranges, var: (0, extent - 1)}
        case AnyThread(var=var):
            return {**ranges, var: (0, 1)}
        case Let(var=var, bounds_check=(tensor, d)) if tensor in shapes:
            return {**ranges, var: (0, shapes[tensor][d] - 1)}
        case Let(var=var, value=value):
            interval = range_of(value, ranges)
            outside = {name: known for name, known in ranges.items() if name != var}
            return outside if interval is None else {**outside, var: interval}
        case _:
            return ranges


def _exact_indices(node: Node) -> Iterator[Expr]:
    """Yield the expressions whose intermediate values must be exact: indices and loop bounds."""
    match node:
        case Compute(index=index, value=value):
            yield from index
            values: tuple[Expr, ...] = (value,)
        case CpAsync(index=index, source=source, guard=guard):
            yield from index
            values = (source,) if guard is None else (source, guard)
        case BulkCopy(index=index, source=source, elements=elements):
            yield from (*index, elements)
            values = (source,)
        case Branch(cond=cond) | AnyThread(cond=cond):
            values = (cond,)
        case _:
            values = expressions(node)
            yield from values
    for value in values:
        for load in loads_of(value):
            yield from load.index


def _compared(node: Node) -> Iterator[Expr]:
    """Yield both sides of every comparison in the node's own expressions."""
    for expr in expressions(node):
        for part in iter_subexpressions(expr):
            if isinstance(part, Op) and part.kind in COMPARISONS:
                yield from part.args
