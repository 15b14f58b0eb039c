"""Schedule tree → what it makes of constants, in launches that need to run but once, and the rest.

A private room that is filled from constants alone, packed weights for instance, moves to memory: a launch of its own
fills one part of a workspace for every value of the loops that the contents depend on, and the tree reads it there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from roller_svc.ir.expr import Expr, Load, axes_of, loads_of
from roller_svc.ir.index import num, ref
from roller_svc.ir.program import TensorType
from roller_svc.ir.schedule import (
    Compute,
    HorizontalReduce,
    Let,
    Loop,
    LoopKind,
    Node,
    Prefetch,
    ScheduleTree,
    Scope,
    Storage,
    Transpose,
    expressions,
    iter_nodes,
)

Nodes = tuple[Node, ...]
Wrapper = Loop | Let | Storage


@dataclass(frozen=True, slots=True)
class Prepared:
    """`launches` fill `workspaces` from constants; `tree` is what is left to do in every call."""

    tree: ScheduleTree
    launches: tuple[ScheduleTree, ...] = ()
    workspaces: tuple[tuple[str, TensorType], ...] = ()


def prepared(tree: ScheduleTree, constants: frozenset[str]) -> Prepared:
    """The tree without what depends on the tensors `constants` alone; as it is where nothing does. A room inside of
    one that is prepared may be filled from that."""
    found = Prepared(tree)
    for node in iter_nodes(tree.body):
        if isinstance(node, Storage) and node.scope is Scope.STACK and node.shape:
            before, found = found, _moved(found, node, constants)
            if found is not before:
                constants |= {node.tensor}
    return found


def _moved(found: Prepared, storage: Storage, constants: frozenset[str]) -> Prepared:
    """With the contents of one more room prepared, if it can be."""
    site = _site(found.tree.body, storage.tensor, constants)
    if site is None:
        return found
    kept = _kept(site)
    loops = tuple(wrapper for wrapper in kept if isinstance(wrapper, Loop))
    name = f"{found.tree.name}_prepare{len(found.launches)}"
    room = f"{name}.room"
    place: tuple[Expr, ...] = (*(ref(loop.var) for loop in loops), *(num(0) for _ in storage.shape))
    window = replace(storage, subview_of=Load(room, place, storage.dtype))

    filling: Nodes = (replace(window, body=site.filling),)
    for wrapper in reversed(kept):
        filling = (replace(wrapper, body=filling),)
    rest: Nodes = (replace(window, body=site.rest),)
    for siblings, wrapper in reversed(site.path):
        inside = rest if isinstance(wrapper, Storage) and wrapper.tensor == storage.tensor else None
        rest = inside or (replace(wrapper, body=rest),)
        rest = tuple(n for sibling in siblings for n in (rest if sibling is wrapper else (sibling,)))
    type_ = TensorType(storage.dtype, (*(loop.extent for loop in loops), *storage.shape))
    return Prepared(
        replace(found.tree, body=rest),
        (*found.launches, ScheduleTree(name, _shared_out(filling))),
        (*found.workspaces, (room, type_)),
    )


@dataclass(frozen=True, slots=True)
class _Site:
    """Where a room is filled: `path`, from the outside in, of nodes among their siblings; below it one list of nodes,
    of which `filling` put something there, and `rest` do not."""

    path: tuple[tuple[Nodes, Wrapper], ...]
    filling: Nodes
    rest: Nodes


def _site(nodes: Nodes, room: str, constants: frozenset[str]) -> _Site | None:
    """None unless one place fills the room, from constants alone, and nobody reads it before or outside of that."""
    writers = tuple(node for node in nodes if room in _written((node,)))
    if all(_is_filled_from(constants, node, room) for node in writers) and _read(writers) & constants:
        last = max(i for i, node in enumerate(nodes) if node in writers)
        before = tuple(node for node in nodes[:last] if node not in writers)
        if room in _read(before):
            return None
        return _Site((), writers, tuple(node for node in nodes if node not in writers))
    wrapper = writers[0] if len(writers) == 1 else None
    if not isinstance(wrapper, Loop | Let | Storage):
        return None
    below = _site(wrapper.body, room, constants)
    others = tuple(node for node in nodes if node is not wrapper)
    if below is None or room in _read(others) or any(_fetches(node, room) for node in iter_nodes(others)):
        return None
    return replace(below, path=((nodes, wrapper), *below.path))


def _is_filled_from(constants: frozenset[str], node: Node, room: str) -> bool:
    """A sum that grows in the room is none: what it was before may be another iteration's."""
    inside = _rooms((node,))
    return _written((node,)) <= inside | {room} and _read((node,)) <= inside | constants


def _kept(site: _Site) -> tuple[Wrapper, ...]:
    """Loops and lets of the path on which the filling depends, and rooms prepared before that it reads."""
    needed = _names(site.filling) | _read(site.filling)
    kept: list[Wrapper] = []
    for _, wrapper in reversed(site.path):
        if (wrapper.tensor if isinstance(wrapper, Storage) else wrapper.var) not in needed:
            continue
        kept.append(wrapper)
        needed |= {name for expr in expressions(wrapper) for name in axes_of(expr)}
    return tuple(reversed(kept))


def _shared_out(nodes: Nodes) -> Nodes:
    """With the outermost loop parallel: each of its iterations fills a part of its own."""
    (node,) = nodes
    match node:
        case Let(body=body):
            return (replace(node, body=_shared_out(body)),)
        case Loop(stop=None):
            return (replace(node, kind=LoopKind.PARALLEL),)
        case _:
            return nodes


# what nodes touch -----------------------------------------------------------------------------------------------------
def _rooms(nodes: Nodes) -> set[str]:
    return {node.tensor for node in iter_nodes(nodes) if isinstance(node, Storage)}


def _written(nodes: Nodes) -> set[str]:
    return {node.tensor for node in iter_nodes(nodes) if isinstance(node, Compute | Transpose | HorizontalReduce)}


def _read(nodes: Nodes) -> set[str]:
    joined = {node.tensor for node in iter_nodes(nodes) if isinstance(node, Compute) and node.combine is not None}
    return joined | {load.tensor for expr in _all_expressions(nodes) for load in loads_of(expr)}


def _names(nodes: Nodes) -> set[str]:
    return {name for expr in _all_expressions(nodes) for name in axes_of(expr)}


def _all_expressions(nodes: Nodes) -> Iterator[Expr]:
    return (expr for node in iter_nodes(nodes) for expr in expressions(node))


def _fetches(node: Node, room: str) -> bool:
    return isinstance(node, Prefetch) and node.tensor == room
