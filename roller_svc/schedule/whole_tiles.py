"""Guards of tails → one test around a tile in registers, and a copy of the tile without guards where it holds. CPUs only.

A vector whose lanes are guarded one by one is a loop, whose tile cannot be in registers. Most tiles have no tail.
Guards are comparisons of sums of loop variables: one that holds at the worst ends of the loops in the tile holds in all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from roller_svc.ir.affine import slack
from roller_svc.ir.expr import Expr, Load, Op, OpKind, rewrite, substitute
from roller_svc.ir.index import add, le, logical_and, mul, num, ref, sub
from roller_svc.ir.schedule import (
    Branch,
    Compute,
    HorizontalReduce,
    Let,
    Loop,
    LoopKind,
    Node,
    ScheduleTree,
    Scope,
    Storage,
    iter_nodes,
)


def separate_whole_tiles(tree: ScheduleTree) -> ScheduleTree:
    """Return the tree, with a copy without guards of each tile in registers that is computed by vectors."""
    return replace(tree, body=tuple(map(_separated, tree.body)))


def _separated(node: Node) -> Node:
    match node:
        case Storage(scope=Scope.REGISTER) if _has_vectors(node):
            holding: dict[Expr, None] = {}
            whole = replace(node, body=_unguarded(node.body, {}, {}, holding))
            condition: Expr | None = None
            for each in holding:
                condition = logical_and(condition, each)
            return node if condition is None else Branch(condition, (whole,), (_tail(node),))
        case Storage() | Loop() | Let():
            return replace(node, body=tuple(map(_separated, node.body)))
        case Branch():
            return replace(node, then=tuple(map(_separated, node.then)), otherwise=tuple(map(_separated, node.otherwise)))
        case _:
            return node


def _tail(tile: Storage) -> Storage:
    """Return the tile with guards, under a name of its own. It is on the stack if loops go through lanes of its vectors."""
    loops = [node for node in iter_nodes(tile.body) if isinstance(node, Loop)]
    lanes = {loop.var for loop in loops if loop.kind is LoopKind.VECTOR}
    on_stack = any(loop.kind is LoopKind.SERIAL and loop.var in lanes for loop in loops)
    name = f"{tile.tensor}.tail"
    body = _renamed(tile.body, tile.tensor, name)
    return replace(tile, tensor=name, scope=Scope.STACK if on_stack else tile.scope, body=body)


def _renamed(nodes: tuple[Node, ...], tensor: str, name: str) -> tuple[Node, ...]:
    def renamed(expr: Expr) -> Expr:
        return rewrite(expr, lambda e: replace(e, tensor=name) if isinstance(e, Load) and e.tensor == tensor else e)

    changed: list[Node] = []
    for node in nodes:
        match node:
            case Compute():
                target = name if node.tensor == tensor else node.tensor
                changed.append(replace(node, tensor=target, index=tuple(map(renamed, node.index)), value=renamed(node.value)))
            case HorizontalReduce():
                target = name if node.tensor == tensor else node.tensor
                first = replace(node.first, tensor=name) if node.first.tensor == tensor else node.first
                changed.append(replace(node, tensor=target, first=first))
            case Branch():
                then, otherwise = (_renamed(each, tensor, name) for each in (node.then, node.otherwise))
                changed.append(replace(node, cond=renamed(node.cond), then=then, otherwise=otherwise))
            case Loop() | Let() | Storage():
                changed.append(replace(node, body=_renamed(node.body, tensor, name)))
            case _:
                changed.append(node)
    return tuple(changed)


def _has_vectors(tile: Storage) -> bool:
    return any(isinstance(node, Loop) and node.kind is LoopKind.VECTOR for node in iter_nodes(tile.body))


def _unguarded(
    nodes: tuple[Node, ...], inner: Mapping[str, int], lets: Mapping[str, Expr], holding: dict[Expr, None]
) -> tuple[Node, ...]:
    """Return the nodes without the guards that a condition outside of the tile decides, and add these conditions.

    Args:
        nodes: a part of the tile.
        inner: the extents of the tile's loops around it.
        lets: the values of the tile's variables, over its loops and what is outside.
        holding: the conditions under which the result does what the nodes do.
    """
    unguarded: list[Node] = []
    for node in nodes:
        match node:
            case Loop():
                stop = node.stop
                if stop is not None and (holds := _outside(_full_extent(stop, node.extent), inner, lets)) is not None:
                    holding[holds] = stop = None
                body = _unguarded(node.body, {**inner, node.var: node.extent}, lets, holding)
                unguarded.append(replace(node, stop=stop, body=body))
            case Let():
                value = substitute(node.value, lets)
                unguarded.append(replace(node, body=_unguarded(node.body, inner, {**lets, node.var: value}, holding)))
            case Storage():
                unguarded.append(replace(node, body=_unguarded(node.body, inner, lets, holding)))
            case Branch():
                then = _unguarded(node.then, inner, lets, holding)
                if (holds := _outside(_parts(node.cond), inner, lets)) is not None:
                    holding[holds] = None
                    unguarded += then
                else:
                    unguarded.append(replace(node, then=then, otherwise=_unguarded(node.otherwise, inner, lets, holding)))
            case _:
                unguarded.append(node)
    return tuple(unguarded)


def _parts(condition: Expr) -> tuple[Expr, ...]:
    match condition:
        case Op(kind=OpKind.LAND, args=(a, b)):
            return (*_parts(a), *_parts(b))
        case _:
            return (condition,)


def _full_extent(stop: Expr, extent: int) -> tuple[Expr, ...]:
    """Return the conditions under which a loop runs to its extent."""
    match stop:
        case Op(kind=OpKind.MIN, args=(a, b)):
            return (*_full_extent(a, extent), *_full_extent(b, extent))
        case _:
            return (le(num(extent), stop),)


def _outside(conditions: tuple[Expr, ...], inner: Mapping[str, int], lets: Mapping[str, Expr]) -> Expr | None:
    """Return a condition on what is outside of a tile under which all of these hold in it; None if none is known."""
    whole: Expr | None = None
    for condition in conditions:
        form = slack(substitute(condition, lets))
        if form is None:
            return None
        worst = form.offset
        outer: Expr = num(0)
        for name, step in form.coeffs:
            if name in inner:
                worst += min(0, step * (inner[name] - 1))
            else:
                outer = add(outer, mul(ref(name), num(step)))
        if outer == num(0) and worst < 0:
            return None
        whole = logical_and(whole, le(sub(num(0), outer), num(worst)))
    return whole
