"""Serial sums over the lanes of a tile → sums of halves, and one over the lanes of a vector. CPUs only.

What `rfactor` leaves: `C.update` reduces the lanes that `C.part` has filled. In a loop over lanes each element waits for
the one before, and its index keeps the tile out of vector registers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from roller_svc.ir.expr import Expr, Load, axes_of
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.index import add, num, ref
from roller_svc.ir.program import Combine
from roller_svc.ir.schedule import Branch, Compute, HorizontalReduce, Let, Loop, LoopKind, Node, ScheduleTree, Scope, Storage

_COMBINED = (Combine.SUM, Combine.MAX, Combine.MIN)


def combine_lanes(tree: ScheduleTree, hw: HardwareSpec) -> ScheduleTree:
    """Return the tree, with shuffles in place of serial loops over the lanes of a tile of whole vectors."""
    return replace(tree, body=_rewrite(tree.body, {}, hw.vector_bytes))


def _rewrite(nodes: tuple[Node, ...], tiles: Mapping[str, Storage], vector_bytes: int) -> tuple[Node, ...]:
    rewritten: list[Node] = []
    for node in nodes:
        match node:
            case Storage():
                inside = _rewrite(node.body, {**tiles, node.tensor: node}, vector_bytes)
                rewritten.append(replace(node, body=inside))
            case Loop():
                combined = _combined(node, tiles, vector_bytes)
                rewritten.append(combined or replace(node, body=_rewrite(node.body, tiles, vector_bytes)))
            case Let():
                rewritten.append(replace(node, body=_rewrite(node.body, tiles, vector_bytes)))
            case Branch():
                then, otherwise = (_rewrite(each, tiles, vector_bytes) for each in (node.then, node.otherwise))
                rewritten.append(replace(node, then=then, otherwise=otherwise))
            case _:
                rewritten.append(node)
    return tuple(rewritten)


def _combined(loop: Loop, tiles: Mapping[str, Storage], vector_bytes: int) -> Node | None:
    """Return what combines the lanes of a loop, or None if it is another loop."""
    match loop.body:
        case (Compute(value=Load() as load, combine=combine) as update,) if combine in _COMBINED:
            pass
        case _:
            return None
    tile = tiles.get(load.tensor)
    if loop.kind not in (LoopKind.SERIAL, LoopKind.UNROLL) or loop.stop is not None or combine is None:
        return None
    if tile is None or tile.scope is Scope.SHARED or load.tensor == update.tensor or load.index[-1:] != (ref(loop.var),):
        return None
    if any(loop.var in axes_of(index) for index in (*load.index[:-1], *update.index)):
        return None
    native = vector_bytes // tile.dtype.bytes
    halvings = (loop.extent // native).bit_length() - 1 if native > 1 else -1
    if halvings < 0 or loop.extent != native << halvings or tile.shape[-1] != loop.extent:
        return None
    row, total = load.index[:-1], f"{load.tensor}.total"
    if halvings == 0:
        return _total(update, load, row, total, native, combine)
    half = f"{load.tensor}.lanes"
    lanes = loop.extent // 2
    nodes: list[Node] = [
        _lane_loop(loop, lanes, half, Load(load.tensor, (*row, ref(loop.var)), tile.dtype), None),
        _lane_loop(loop, lanes, half, Load(load.tensor, (*row, add(ref(loop.var), num(lanes))), tile.dtype), combine),
    ]
    while lanes > native:
        lanes //= 2
        nodes.append(_lane_loop(loop, lanes, half, Load(half, (add(ref(loop.var), num(lanes)),), tile.dtype), combine))
    nodes.append(_total(update, Load(half, (num(0),), tile.dtype), (), total, native, combine))
    return Storage(half, tile.dtype, (loop.extent // 2,), Scope.REGISTER, tuple(nodes))


def _lane_loop(loop: Loop, lanes: int, half: str, value: Load, combine: Combine | None) -> Loop:
    return Loop(loop.var, lanes, LoopKind.VECTOR, (Compute(half, (ref(loop.var),), value, combine),))


def _total(update: Compute, load: Load, row: tuple[Expr, ...], total: str, lanes: int, combine: Combine) -> Storage:
    """Return the sum over the lanes of a vector, which joins the element that the loop updated."""
    sum_ = HorizontalReduce(total, (), Load(load.tensor, (*row, num(0)), load.dtype), lanes, combine)
    return Storage(total, load.dtype, (), Scope.REGISTER, (sum_, replace(update, value=Load(total, (), load.dtype))))
