"""Schedule tree of a nest on a CPU → the same with results stored past the caches, and no prefetches of their lines."""

from __future__ import annotations

from dataclasses import replace

from roller_svc.ir.expr import loads_of
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.schedule import Branch, Compute, Let, Loop, LoopKind, Node, Prefetch, ScheduleTree, Storage, descend


def past_caches(tree: ScheduleTree, group: KernelGroup) -> ScheduleTree:
    """For results that nobody reads soon: those of the group that no node reads, be it what waits there of a row."""
    read = {t for s in group.statements for t in s.reads_tensors}
    read |= {x.tensor for n in descend(tree.body) if isinstance(n, Compute) for x in loads_of(n.value)}
    results = frozenset(name for name, _ in group.stored) - read
    return replace(tree, body=_streamed(tree.body, results))


def _streamed(nodes: tuple[Node, ...], results: frozenset[str]) -> tuple[Node, ...]:
    found: list[Node] = []
    for node in nodes:
        match node:
            case Loop(kind=LoopKind.VECTOR, body=body):
                found.append(replace(node, body=tuple(_stored(n, results) for n in body)))
            case Loop(body=body) | Let(body=body) | Storage(body=body):
                found.append(replace(node, body=_streamed(body, results)))
            case Branch(then=then, otherwise=otherwise):
                found.append(replace(node, then=_streamed(then, results), otherwise=_streamed(otherwise, results)))
            case Prefetch(tensor=tensor, for_write=True) if tensor in results:
                pass
            case _:
                found.append(node)
    return tuple(found)


def _stored(node: Node, results: frozenset[str]) -> Node:
    is_result = isinstance(node, Compute) and node.tensor in results and node.combine is None
    return replace(node, streamed=True) if is_result and isinstance(node, Compute) else node
