"""Prepacking: computations on constants move to launches that run once.

A private buffer that is filled from constants alone, such as packed weights, moves to memory. A separate launch fills
one part of a workspace for every iteration of the loops that the contents depend on, and the tree reads the workspace.
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
class Prepacked:
    """A tree with its prepacking launches."""

    tree: ScheduleTree  # runs in every call
    launches: tuple[ScheduleTree, ...] = ()  # fill `workspaces` from constants
    workspaces: tuple[tuple[str, TensorType], ...] = ()


def prepack(tree: ScheduleTree, constants: frozenset[str]) -> Prepacked:
    """Move every buffer that depends on `constants` alone to a prepacking launch.

    A buffer that is prepacked counts as a constant for the buffers inside it.
    """
    prepacked = Prepacked(tree)
    for node in iter_nodes(tree.body):
        if isinstance(node, Storage) and node.scope is Scope.STACK and node.shape:
            before, prepacked = prepacked, _hoist_buffer(prepacked, node, constants)
            if prepacked is not before:
                constants |= {node.tensor}
    return prepacked


def _hoist_buffer(prepacked: Prepacked, storage: Storage, constants: frozenset[str]) -> Prepacked:
    """Prepack one more buffer, if possible."""
    site = _site(prepacked.tree.body, storage.tensor, constants)
    if site is None:
        return prepacked
    wrappers = _needed_wrappers(site)
    loops = tuple(wrapper for wrapper in wrappers if isinstance(wrapper, Loop))
    name = f"{prepacked.tree.name}_prepare{len(prepacked.launches)}"
    workspace = f"{name}.room"
    index: tuple[Expr, ...] = (*(ref(loop.var) for loop in loops), *(num(0) for _ in storage.shape))
    subview = replace(storage, subview_of=Load(workspace, index, storage.dtype))

    fill: Nodes = (replace(subview, body=site.filling),)
    for wrapper in reversed(wrappers):
        fill = (replace(wrapper, body=fill),)
    remaining: Nodes = (replace(subview, body=site.rest),)
    for siblings, wrapper in reversed(site.path):
        inside = remaining if isinstance(wrapper, Storage) and wrapper.tensor == storage.tensor else None
        remaining = inside or (replace(wrapper, body=remaining),)
        remaining = tuple(n for sibling in siblings for n in (remaining if sibling is wrapper else (sibling,)))
    type_ = TensorType(storage.dtype, (*(loop.extent for loop in loops), *storage.shape))
    return Prepacked(
        replace(prepacked.tree, body=remaining),
        (*prepacked.launches, ScheduleTree(name, _parallelize(fill))),
        (*prepacked.workspaces, (workspace, type_)),
    )


@dataclass(frozen=True, slots=True)
class _Site:
    """The list of nodes that fills a buffer."""

    path: tuple[tuple[Nodes, Wrapper], ...]  # enclosing nodes, outermost first, each with its siblings
    filling: Nodes  # nodes of the list that write the buffer
    rest: Nodes  # the other nodes of the list


def _site(nodes: Nodes, buffer: str, constants: frozenset[str]) -> _Site | None:
    """Return the site that fills the buffer from constants alone, or None if it is read before or outside of it."""
    writers = tuple(node for node in nodes if buffer in _written((node,)))
    if all(_is_filled_from(constants, node, buffer) for node in writers) and _read(writers) & constants:
        last = max(i for i, node in enumerate(nodes) if node in writers)
        before = tuple(node for node in nodes[:last] if node not in writers)
        if buffer in _read(before):
            return None
        return _Site((), writers, tuple(node for node in nodes if node not in writers))
    wrapper = writers[0] if len(writers) == 1 else None
    if not isinstance(wrapper, Loop | Let | Storage):
        return None
    below = _site(wrapper.body, buffer, constants)
    others = tuple(node for node in nodes if node is not wrapper)
    if below is None or buffer in _read(others) or any(_prefetches(node, buffer) for node in iter_nodes(others)):
        return None
    return replace(below, path=((nodes, wrapper), *below.path))


def _is_filled_from(constants: frozenset[str], node: Node, buffer: str) -> bool:
    """Return whether the node writes only the buffer and reads only constants. An accumulation reads the buffer."""
    inside = _storages((node,))
    return _written((node,)) <= inside | {buffer} and _read((node,)) <= inside | constants


def _needed_wrappers(site: _Site) -> tuple[Wrapper, ...]:
    """Return the loops and lets of the path that the filling depends on, and the prepacked buffers that it reads."""
    needed = _names(site.filling) | _read(site.filling)
    wrappers: list[Wrapper] = []
    for _, wrapper in reversed(site.path):
        if (wrapper.tensor if isinstance(wrapper, Storage) else wrapper.var) not in needed:
            continue
        wrappers.append(wrapper)
        needed |= {name for expr in expressions(wrapper) for name in axes_of(expr)}
    return tuple(reversed(wrappers))


def _parallelize(nodes: Nodes) -> Nodes:
    """Make the outermost loop parallel: each iteration fills a part of its own."""
    (node,) = nodes
    match node:
        case Let(body=body):
            return (replace(node, body=_parallelize(body)),)
        case Loop(stop=None):
            return (replace(node, kind=LoopKind.PARALLEL),)
        case _:
            return nodes


# accesses of nodes ----------------------------------------------------------------------------------------------------
def _storages(nodes: Nodes) -> set[str]:
    return {node.tensor for node in iter_nodes(nodes) if isinstance(node, Storage)}


def _written(nodes: Nodes) -> set[str]:
    return {node.tensor for node in iter_nodes(nodes) if isinstance(node, Compute | Transpose | HorizontalReduce)}


def _read(nodes: Nodes) -> set[str]:
    accumulated = {node.tensor for node in iter_nodes(nodes) if isinstance(node, Compute) and node.combine is not None}
    return accumulated | {load.tensor for expr in _all_expressions(nodes) for load in loads_of(expr)}


def _names(nodes: Nodes) -> set[str]:
    return {name for expr in _all_expressions(nodes) for name in axes_of(expr)}


def _all_expressions(nodes: Nodes) -> Iterator[Expr]:
    return (expr for node in iter_nodes(nodes) for expr in expressions(node))


def _prefetches(node: Node, buffer: str) -> bool:
    return isinstance(node, Prefetch) and node.tensor == buffer
