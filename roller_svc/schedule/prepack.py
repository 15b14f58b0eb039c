"""Prepacking: computations on constants move to launches that run once.

A private buffer that is filled from constants alone, such as packed weights, moves to memory. A separate launch fills
one part of a workspace for every iteration of the loops that the contents depend on, and the tree reads the workspace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from roller_svc.ir.expr import Expr, Load, axes_of, loads_of
from roller_svc.ir.index import num, ref
from roller_svc.ir.program import TensorType
from roller_svc.ir.schedule import (
    Branch,
    Compute,
    HorizontalReduce,
    Let,
    Loop,
    LoopKind,
    Node,
    Prefetch,
    Routine,
    ScheduleTree,
    Scope,
    Storage,
    Transpose,
    child_lists,
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
    prepacked, table = Prepacked(tree), _AccessTable()
    for node in iter_nodes(tree.body):
        if isinstance(node, Storage) and node.scope is Scope.STACK and node.shape:
            before, prepacked = prepacked, _hoist_buffer(prepacked, node, constants, table)
            if prepacked is not before:
                constants |= {node.tensor}
    return prepacked


def _hoist_buffer(prepacked: Prepacked, storage: Storage, constants: frozenset[str], table: _AccessTable) -> Prepacked:
    """Prepack one more buffer, if possible."""
    site = _site(prepacked.tree.body, storage.tensor, constants, table)
    if site is None:
        return prepacked
    accesses = table.of(site.filling)
    site = replace(site, filling=_drop_prefetches(site.filling, accesses.written | accesses.read))
    wrappers = _needed_wrappers(site, table)
    loops = tuple(wrapper for wrapper in wrappers if isinstance(wrapper, Loop))
    name = f"{prepacked.tree.name}_prepare{len(prepacked.launches)}"
    workspace = f"{name}.workspace"
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


def _site(nodes: Nodes, buffer: str, constants: frozenset[str], table: _AccessTable) -> _Site | None:
    """Return the site that fills the buffer from constants alone, or None if it is read before or outside of it."""
    writers = tuple(node for node in nodes if buffer in table.of((node,)).written)
    filled = all(_is_filled_from(constants, table.of((node,)), buffer) for node in writers)
    if filled and table.of(writers).read & constants:
        last = max(i for i, node in enumerate(nodes) if node in writers)
        before = tuple(node for node in nodes[:last] if node not in writers)
        if buffer in table.of(before).read:
            return None
        return _Site((), writers, tuple(node for node in nodes if node not in writers))
    wrapper = writers[0] if len(writers) == 1 else None
    if not isinstance(wrapper, Loop | Let | Storage):
        return None
    below = _site(wrapper.body, buffer, constants, table)
    others = tuple(node for node in nodes if node is not wrapper)
    if below is None or buffer in table.of(others).read or any(_prefetches(n, buffer) for n in iter_nodes(others)):
        return None
    return replace(below, path=((nodes, wrapper), *below.path))


def _is_filled_from(constants: frozenset[str], accesses: _Accesses, buffer: str) -> bool:
    """Return whether a node writes only the buffer and reads only constants. An accumulation reads the buffer."""
    return accesses.written <= accesses.storages | {buffer} and accesses.read <= accesses.storages | constants


def _needed_wrappers(site: _Site, table: _AccessTable) -> tuple[Wrapper, ...]:
    """Return the loops and lets of the path that the filling depends on, and the prepacked buffers that it reads."""
    needed = _names(site.filling) | table.of(site.filling).read
    wrappers: list[Wrapper] = []
    for _, wrapper in reversed(site.path):
        if (wrapper.tensor if isinstance(wrapper, Storage) else wrapper.var) not in needed:
            continue
        wrappers.append(wrapper)
        needed |= {name for expr in expressions(wrapper) for name in axes_of(expr)}
    return tuple(reversed(wrappers))


def _drop_prefetches(nodes: Nodes, accessed: frozenset[str]) -> Nodes:
    """Remove prefetches of tensors that the nodes do not access, such as results, and the nodes that become empty."""
    remaining = (_drop_prefetches_in(node, accessed) for node in nodes)
    return tuple(node for node in remaining if node is not None)


def _drop_prefetches_in(node: Node, accessed: frozenset[str]) -> Node | None:
    match node:
        case Prefetch(tensor=tensor):
            return node if tensor in accessed else None
        case Branch(then=then, otherwise=otherwise):
            then, otherwise = _drop_prefetches(then, accessed), _drop_prefetches(otherwise, accessed)
            return replace(node, then=then, otherwise=otherwise) if then or otherwise else None
        case Loop(body=body) | Let(body=body) | Storage(body=body) | Routine(body=body):
            body = _drop_prefetches(body, accessed)
            return replace(node, body=body) if body else None
        case _:
            return node


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
@dataclass(frozen=True, slots=True)
class _Accesses:
    """Tensors that a node and those below it allocate, write and read. An accumulation reads its tensor."""

    storages: frozenset[str]
    written: frozenset[str]
    read: frozenset[str]


_NONE = _Accesses(frozenset(), frozenset(), frozenset())


@dataclass(slots=True)
class _AccessTable:
    """Accesses of nodes, computed once: a hoisted buffer leaves most of a tree as it was."""

    known: dict[int, tuple[Node, _Accesses]] = field(default_factory=dict)  # by id of the node, which it keeps alive

    def of(self, nodes: Nodes) -> _Accesses:
        """Return the accesses of several nodes."""
        return _union([self._of_node(node) for node in nodes])

    def _of_node(self, node: Node) -> _Accesses:
        entry = self.known.get(id(node))
        if entry is None:
            below = [self._of_node(child) for body in child_lists(node) for child in body]
            entry = self.known[id(node)] = node, _union([_own_accesses(node), *below])
        return entry[1]


def _own_accesses(node: Node) -> _Accesses:
    storages = frozenset((node.tensor,)) if isinstance(node, Storage) else frozenset()
    written = frozenset((node.tensor,)) if isinstance(node, Compute | Transpose | HorizontalReduce) else frozenset()
    read = {load.tensor for expr in expressions(node) for load in loads_of(expr)}
    if isinstance(node, Compute) and node.combine is not None:
        read.add(node.tensor)
    return _Accesses(storages, written, frozenset(read))


def _union(parts: Sequence[_Accesses]) -> _Accesses:
    if len(parts) == 1:
        return parts[0]
    return _Accesses(
        _NONE.storages.union(*(part.storages for part in parts)),
        _NONE.written.union(*(part.written for part in parts)),
        _NONE.read.union(*(part.read for part in parts)),
    )


def _names(nodes: Nodes) -> set[str]:
    return {name for node in iter_nodes(nodes) for expr in expressions(node) for name in axes_of(expr)}


def _prefetches(node: Node, buffer: str) -> bool:
    return isinstance(node, Prefetch) and node.tensor == buffer
