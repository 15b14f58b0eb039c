"""The order that effects demand: a node that writes a resource comes after all earlier uses, and before all later ones.

States need no such order: they are values (ADR 0095). Resources are what functions of Python say that they use.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from roller_svc.errors import InvariantError
from roller_svc.ir.graph import ANYTHING, Effects, HostNode, Node


def order_effects(nodes: Sequence[Node]) -> dict[str, tuple[str, ...]]:
    """Return the names of the nodes that each node has to come after because of effects. The nodes are in program order.

    An edge that other edges imply is left out.
    """
    edges: dict[str, tuple[str, ...]] = {}
    earlier: list[HostNode] = []
    ancestors: dict[str, set[str]] = {}
    for node in nodes:
        if not isinstance(node, HostNode) or node.effects == Effects():
            continue
        after: list[str] = []
        implied: set[str] = set()
        for other in reversed(earlier):
            if other.name not in implied and conflict(other.effects, node.effects):
                after.append(other.name)
                implied |= {other.name, *ancestors[other.name]}
        ancestors[node.name] = implied
        if after:
            edges[node.name] = tuple(reversed(after))
        earlier.append(node)
    return edges


def conflict(first: Effects, second: Effects) -> bool:
    """Return whether the order of two nodes matters: one of them writes what the other one uses."""
    return _meet(first.writes, second.writes | second.reads) or _meet(second.writes, first.reads)


def _meet(first: Collection[str], second: Collection[str]) -> bool:
    return bool(first and second) and (ANYTHING in first or ANYTHING in second or not set(first).isdisjoint(second))


def check_order(nodes: Sequence[Node], before: Mapping[str, Collection[str]]) -> None:
    """Raise InvariantError if two nodes whose order matters may run in any order, or in the wrong one.

    Args:
        nodes: the nodes in program order.
        before: the nodes that have to finish before each node starts, by name. Edges that these imply count too.
    """
    ancestors = _find_ancestors([node.name for node in nodes], before)
    producers = {tensor: node.name for node in nodes for tensor in node.outputs}
    users: list[HostNode] = []
    for node in nodes:
        for writer in (producers[tensor] for tensor in node.inputs if tensor in producers):
            if writer not in ancestors[node.name]:
                raise InvariantError(f"nothing orders {writer} before {node.name}, which reads its result")
        if isinstance(node, HostNode):
            for other in users:
                if conflict(other.effects, node.effects) and other.name not in ancestors[node.name]:
                    raise InvariantError(f"nothing orders {other.name} before {node.name}, and both use a resource")
            users.append(node)


def _find_ancestors(names: Sequence[str], before: Mapping[str, Collection[str]]) -> dict[str, set[str]]:
    """Return all nodes that come before each node. Raises InvariantError for nodes that wait for each other."""
    waiting = {name: set(before.get(name, ())) for name in names}
    readers: dict[str, list[str]] = {}
    for name, earlier in waiting.items():
        for each in earlier:
            readers.setdefault(each, []).append(name)
    ancestors: dict[str, set[str]] = {name: set() for name in names}
    ready = [name for name in names if not waiting[name]]
    for name in ready:
        for reader in readers.get(name, ()):
            ancestors[reader] |= {name, *ancestors[name]}
            waiting[reader].discard(name)
            if not waiting[reader]:
                ready.append(reader)
    if len(ready) < len(names):
        left = [name for name in names if waiting[name]]
        raise InvariantError(f"nodes {' and '.join(left[:2])} wait for each other")
    return ancestors
