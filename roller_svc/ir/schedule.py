"""The schedule tree: how a kernel is computed, as loop, storage and compute nodes (Halide's schedule tree).

Loop variables are AxisRefs in the expressions below them. Tensors are named: buffers in memory, or storage nodes above.
Code generation is one depth-first walk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Expr
from roller_svc.ir.program import Combine


class LoopKind(Enum):
    SERIAL = "serial"
    PARALLEL = "parallel"  # CPU: iterations run on any thread
    VECTOR = "vector"  # innermost: iterations are lanes of a vector
    UNROLL = "unroll"
    BLOCK = "block"  # GPU: an iteration is a thread block
    THREAD = "thread"  # GPU: an iteration is a thread; nested ones make up the block, the innermost varies fastest


class Scope(Enum):
    REGISTER = "register"
    STACK = "stack"  # private memory of one thread
    SHARED = "shared"  # of one thread block


@dataclass(frozen=True, slots=True)
class Loop:
    """`var` from 0 to extent - 1; iterations at or beyond `limit` do not run."""

    var: str
    extent: int
    kind: LoopKind
    body: tuple[Node, ...]
    limit: Expr | None = None


@dataclass(frozen=True, slots=True)
class Let:
    """An index computed once."""

    var: str
    value: Expr
    body: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Storage:
    """Room for a tensor while the body runs. Contents are undefined at first. `pad`: elements added to each row."""

    tensor: str
    dtype: DType
    shape: tuple[int, ...]
    scope: Scope
    body: tuple[Node, ...]
    pad: int = 0


@dataclass(frozen=True, slots=True)
class Compute:
    """tensor[index] = value, or, with `combine`, joined to what is there. `atomic`: other threads may write it too.

    `checked[d]`: dimension d comes from data; out of range, nothing is written and the status says so.
    """

    tensor: str
    index: tuple[Expr, ...]
    value: Expr
    combine: Combine | None = None
    atomic: bool = False
    checked: tuple[bool, ...] = ()


@dataclass(frozen=True, slots=True)
class Branch:
    cond: Expr
    then: tuple[Node, ...]
    otherwise: tuple[Node, ...] = ()


@dataclass(frozen=True, slots=True)
class Barrier:
    """All threads of a block meet."""


Node = Loop | Let | Storage | Compute | Branch | Barrier


@dataclass(frozen=True, slots=True)
class ScheduleTree:
    """One kernel launch. `name` is its entry symbol; `zeroed` buffers are zero before it runs."""

    name: str
    body: tuple[Node, ...]
    zeroed: tuple[str, ...] = ()


def bodies(node: Node) -> tuple[tuple[Node, ...], ...]:
    """The child lists of a node."""
    match node:
        case Loop(body=body) | Let(body=body) | Storage(body=body):
            return (body,)
        case Branch(then=then, otherwise=otherwise):
            return (then, otherwise)
        case _:
            return ()


def descend(nodes: tuple[Node, ...]) -> Iterator[Node]:
    """Every node, depth first."""
    for node in nodes:
        yield node
        for body in bodies(node):
            yield from descend(body)


def block_extents(tree: ScheduleTree) -> tuple[int, int]:
    """(number of thread blocks, threads in a block) that the tree's loops ask for."""
    blocks = threads = 1
    nodes = tree.body
    while nodes:
        inside: tuple[Node, ...] = ()
        for node in nodes:
            if isinstance(node, Loop) and node.kind is LoopKind.BLOCK:
                blocks *= node.extent
            if isinstance(node, Loop) and node.kind is LoopKind.THREAD:
                threads *= node.extent
            for body in bodies(node):
                inside += body
        nodes = inside
    return blocks, threads


def render(nodes: tuple[Node, ...], depth: int = 0) -> str:
    """The tree as indented lines, for people and golden tests."""
    pad = "  " * depth
    lines: list[str] = []
    for node in nodes:
        match node:
            case Loop(var=var, extent=extent, kind=kind):
                lines.append(f"{pad}{kind.value} {var} in {extent}")
            case Let(var=var):
                lines.append(f"{pad}let {var}")
            case Storage(tensor=tensor, dtype=dtype, shape=shape, scope=scope):
                lines.append(f"{pad}{scope.value} {tensor}: {dtype.value}{list(shape)}")
            case Compute(tensor=tensor, combine=combine):
                lines.append(f"{pad}{tensor}[...] {combine.value if combine else ''}=")
            case Branch():
                lines.append(f"{pad}branch")
            case Barrier():
                lines.append(f"{pad}barrier")
        lines.extend(render(body, depth + 1) for body in bodies(node) if body)
    return "\n".join(lines)
