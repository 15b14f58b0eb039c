"""Vector loops: widths and covers of their vectors, and strip mining."""

from __future__ import annotations

from dataclasses import replace

from roller_svc.analysis.lookup_tables import find_byte_index
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import AxisRef, Expr, Load, axes_of, children, loads_of, rewrite, substitute
from roller_svc.ir.index import add, mul, num, ref
from roller_svc.ir.schedule import Compute, Loop, LoopKind, Node, Scope, Storage, iter_nodes

# A row of more vectors is strip-mined: a statement for each of them costs the compiler more than it saves.
MAX_UNROLLED_VECTORS = 32
VECTORS_PER_ITERATION = 4
# Strided elements that a row of fewer vectors loads one by one: beyond it the row is strip-mined, too.
MAX_UNROLLED_ELEMENTS = 256


def expand_scalar(loop: Loop) -> Storage | None:
    """Expand a scalar that is allocated in each iteration to a row outside of the loop; None for other loops."""
    if len(loop.body) != 1 or not isinstance(storage := loop.body[0], Storage) or storage.shape or loop.stop:
        return None
    lane = AxisRef(loop.var)

    def indexed(expr: Expr) -> Expr:
        if isinstance(expr, Load) and expr.tensor == storage.tensor:
            return replace(expr, index=(lane,))
        return expr

    def moved(node: Node) -> Node | None:
        match node:
            case Compute(tensor=tensor, index=index, value=value):
                place = (lane,) if tensor == storage.tensor else tuple(rewrite(i, indexed) for i in index)
                return replace(node, index=place, value=rewrite(value, indexed))
            case Storage(body=body):
                inner = tuple(m for n in body if (m := moved(n)) is not None)
                return replace(node, body=inner) if len(inner) == len(body) else None
            case _:
                return None

    body = tuple(m for n in storage.body if (m := moved(n)) is not None)
    if len(body) != len(storage.body):
        return None
    return replace(storage, shape=(loop.extent,), scope=Scope.REGISTER, body=(replace(loop, body=body),))


def strip_mine(loop: Loop, lanes: int, vectors: int) -> tuple[Loop, ...]:
    """Strip-mine a vector loop into a serial loop over a number of whole vectors and a remainder.

    The remainder starts early enough for its last vector to overlap the one before.
    """
    step = vectors * lanes
    iterations = loop.extent // step - (loop.extent % step != 0)
    var = f"{loop.var}.iteration"

    def part(first: Expr, extent: int) -> Loop:
        values = {loop.var: add(first, ref(loop.var))}

        def moved(node: Node) -> Node:
            if not isinstance(node, Compute):
                return node
            index = tuple(substitute(i, values) for i in node.index)
            return replace(node, index=index, value=substitute(node.value, values))

        return replace(loop, extent=extent, body=tuple(moved(node) for node in loop.body))

    main = Loop(var, iterations, LoopKind.SERIAL, (part(mul(ref(var), num(step)), step),))
    remainder = loop.extent - iterations * step
    return (main, part(num(iterations * step), remainder)) if remainder else (main,)


def widest_bytes(node: Compute, var: str, dtype: DType) -> int:
    """Return the bytes of the widest element of a statement's vectors; `dtype` is that of its tensor."""
    plain_copy = isinstance(node.value, Load) and node.value.dtype is dtype and find_byte_index(node.value) is None
    widest = dtype.bytes
    stack: list[Expr] = [] if plain_copy else [node.value]
    while stack:
        expr = stack.pop()
        if var in axes_of(expr):
            widest = max(widest, expr.dtype.compute.bytes)
            if not isinstance(expr, Load):
                stack.extend(children(expr))
            elif (index := find_byte_index(expr)) is not None:
                stack.append(index)
    return widest


def vector_cover(extent: int, lanes: int, min_lanes: int, *, overlapping: bool) -> tuple[tuple[int, int], ...]:
    """Return (first, lanes) of vectors that cover a loop, with `min_lanes` to `lanes` lanes, or one in the remainder.

    `overlapping`: iterations may run twice, so the last vector may overlap the previous one.
    """
    cover, first = [], 0
    while first < extent:
        remaining = extent - first
        size = min(lanes, 1 << (remaining.bit_length() - 1))
        while overlapping and size < lanes and (size < remaining or size < min_lanes) and 2 * size <= extent:
            size *= 2
        if size < min_lanes:
            size = 1
        first = min(first, extent - size)
        cover.append((first, size))
        first += size
    return tuple(cover)


def vector_loops(storage: Storage) -> list[Loop]:
    """Return the vector loops that access the storage."""
    return [
        n
        for n in iter_nodes(storage.body)
        if isinstance(n, Loop)
        and n.kind is LoopKind.VECTOR
        and any(storage.tensor in (x.tensor, *read_tensors(x)) for x in n.body if isinstance(x, Compute))
    ]


def written_tensors(loop: Loop) -> set[str]:
    """Return the tensors that the loop writes."""
    return {n.tensor for n in iter_nodes(loop.body) if isinstance(n, Compute)}


def accessed_tensors(node: Node) -> set[str]:
    """Return the tensors that a statement accesses; none for other nodes."""
    return {node.tensor, *read_tensors(node)} if isinstance(node, Compute) else set()


def read_tensors(node: Node) -> set[str]:
    """Return the tensors that a statement reads; none for other nodes."""
    if not isinstance(node, Compute):
        return set()
    return {load.tensor for expr in (node.value, *node.index) for load in loads_of(expr)}
