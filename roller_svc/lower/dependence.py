"""Parallel loops → whether their iterations stay out of each other's way: each writes elements of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from roller_svc.errors import ScheduleError
from roller_svc.ir.expr import Expr, Op, OpKind
from roller_svc.ir.schedule import Loop, LoopKind, Scope
from roller_svc.lower.disjoint import Position, Variables, are_apart, are_disjoint

# How many loops stand around a tensor's storage node, and its scope; (0, None) of a tensor in memory.
Room = tuple[int, Scope | None]

_PARALLEL = (LoopKind.PARALLEL, LoopKind.VECTOR, LoopKind.BLOCK, LoopKind.THREAD)


@dataclass(slots=True)
class _Accesses:
    """What the iterations of one parallel loop write and read of tensors that live outside of it."""

    writes: dict[str, list[Position]] = field(default_factory=dict)
    reads: dict[str, list[Position]] = field(default_factory=dict)
    inner: dict[str, int] = field(default_factory=dict)  # loops inside of it and their extents


@dataclass(slots=True)
class Dependence:
    """The loops and branches around a node, and what each loop's iterations write and read."""

    variables: Variables = field(default_factory=Variables)
    loops: list[Loop] = field(default_factory=list)
    branches: list[tuple[int, Expr]] = field(default_factory=list)  # (loops around it, condition)
    accesses: list[_Accesses] = field(default_factory=list)  # of each of the loops

    @contextmanager
    def inside(self, loop: Loop) -> Iterator[None]:
        """The loop's body; raises ScheduleError (schedule-dependence) where iterations meet in what it does."""
        for accesses in self.accesses:
            accesses.inner[loop.var] = loop.extent
        self.loops.append(loop)
        self.accesses.append(_Accesses())
        yield
        self.loops.pop()
        self._settle(loop, self.accesses.pop())

    def record(self, tensor: str, index: tuple[Expr, ...], room: Room, *, is_write: bool) -> None:
        """Note an access for every parallel loop around it whose iterations share the tensor."""
        depth, scope = room
        position: Position | None = None
        for level, loop in enumerate(self.loops):
            shared = level >= depth or (scope is Scope.SHARED and loop.kind is LoopKind.THREAD)
            if not shared or loop.kind not in _PARALLEL or loop.extent == 1:
                continue
            if position is None:
                position = tuple(self.variables.value(i) for i in index)
            accesses = self.accesses[level]
            (accesses.writes if is_write else accesses.reads).setdefault(tensor, []).append(position)
            if is_write:
                self._own_element(tensor, position, level)

    def _own_element(self, tensor: str, position: Position, level: int) -> None:
        loop = self.loops[level]
        inner = {x.var: x.extent for x in self.loops[level + 1 :]}
        if any(loop.var in value.loops for value in position):
            # threads of a block share work in ways that need barriers, not arithmetic, to be right
            if loop.kind is LoopKind.THREAD or are_disjoint(position, loop.var, loop.extent, inner):
                return
        elif any(depth > level and _pins(cond, loop.var, self.variables) for depth, cond in self.branches):
            return
        raise ScheduleError(
            f"iterations of {loop.kind.value} loop {loop.var} write the same elements of {tensor}",
            code="schedule-dependence",
        )

    def _settle(self, loop: Loop, accesses: _Accesses) -> None:
        """An iteration may read of what the loop writes only its own elements."""
        if loop.kind is LoopKind.THREAD:
            return
        moving = {loop.var: loop.extent, **accesses.inner}
        for tensor in accesses.writes.keys() & accesses.reads.keys():
            writes = accesses.writes[tensor]
            for read in accesses.reads[tensor]:
                if any(_same_slice(write, read, loop.var) for write in writes):
                    continue
                if not all(are_apart(write, read, moving) for write in writes):
                    raise ScheduleError(
                        f"iterations of {loop.kind.value} loop {loop.var} read each other's elements of {tensor}",
                        code="schedule-dependence",
                    )


def _same_slice(write: Position, read: Position, var: str) -> bool:
    return any(a == b and var in a.loops for a, b in zip(write, read, strict=True))


def _pins(cond: Expr, var: str, variables: Variables) -> bool:
    """Whether the condition lets one iteration through: an equality with the variable somewhere in an `and`."""
    match cond:
        case Op(kind=OpKind.LAND, args=args):
            return any(_pins(arg, var, variables) for arg in args)
        case Op(kind=OpKind.EQ, args=(a, b)):
            return var in variables.value(a).loops or var in variables.value(b).loops
        case _:
            return False
