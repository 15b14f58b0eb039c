"""Launches that may start before those before them end, by programmatic edges of a CUDA graph (CUDA programming guide).

Each thread waits for the launches before (`griddepcontrol.wait`) ahead of its first access of memory that they may write
or read. Only constants, which no launch of a call writes, are read before that: the first pages of a matrix, for example.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import fields

from roller_svc.errors import InvariantError
from roller_svc.ir.expr import loads_of
from roller_svc.ir.schedule import Compute, Let, Loop, LoopKind, Node, Storage, expressions, iter_nodes
from roller_svc.ir.schedule_hopper import HopperNode

_OF_EVERY_THREAD = (LoopKind.BLOCK, LoopKind.THREAD)
_OTHER_WORDS = ("name", "var")  # fields of parts, routines, loops: users may call a tensor the same


def find_first_access(nodes: Sequence[Node], memory: Collection[str]) -> Node:
    """Return the node of a launch before which each thread has to wait. Every thread comes to it, once.

    Args:
        nodes: the launch's.
        memory: tensors that other launches may write or read.
    """
    for node in nodes:
        if not any(_accesses(each, memory) for each in iter_nodes((node,))):
            continue
        if _accesses(node, memory):
            return node
        match node:
            case Let(body=body) | Storage(body=body):
                return find_first_access(body, memory)
            case Loop(kind=kind, body=body) if kind in _OF_EVERY_THREAD:
                return find_first_access(body, memory)
            case _:
                return node
    raise InvariantError("a launch accesses no memory")


def find_read_tensors(nodes: tuple[Node, ...], memory: Collection[str]) -> frozenset[str]:
    """Return the tensors in memory that a launch reads."""
    read: set[str] = set()
    for node in iter_nodes(nodes):
        read.update(_loads(node))
        if not isinstance(node, Compute) or node.combine is not None:
            read.update(_names(node))
    return frozenset(read.intersection(memory))


def _accesses(node: Node, memory: Collection[str]) -> bool:
    """Return whether a node itself, without its children, may access memory. Tensor maps may be of any tensor."""
    return isinstance(node, HopperNode) or any(name in memory for name in (*_loads(node), *_names(node)))


def _loads(node: Node) -> Iterator[str]:
    """Yield the tensors that the expressions of a node load."""
    return (load.tensor for expr in expressions(node) for load in loads_of(expr))


def _names(node: Node) -> Iterator[str]:
    """Yield the tensors and barriers that a node names, also by fields that are unknown here."""
    named = (field.name for field in fields(node) if field.name not in _OTHER_WORDS)
    return (value for name in named if isinstance(value := getattr(node, name), str))
