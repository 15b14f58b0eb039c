"""Stagings of a block → slots that are filled in turns, some steps ahead of the work on them."""

from __future__ import annotations

from dataclasses import dataclass

from roller_svc.ir.build import add, less, mod, num
from roller_svc.ir.expr import AxisRef, Const, Expr
from roller_svc.ir.schedule import (
    AwaitCopies,
    Barrier,
    Branch,
    CommitCopies,
    Let,
    Loop,
    LoopKind,
    Node,
    Scope,
    Storage,
)
from roller_svc.lower.mma_fragments import SLOT
from roller_svc.lower.staging import Staging

STEP = AxisRef("k.step")


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps that one pass takes: `count` of them from `first` on, never more than `most`."""

    first: Expr
    count: Expr
    most: int

    @property
    def number(self) -> Expr:
        """Of the step that is worked on."""
        return add(self.first, STEP)


@dataclass(frozen=True, slots=True)
class Ring:
    """Each slot has a step's tile of every staging."""

    stages: int
    stagings: tuple[Staging, ...]

    def rooms(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """Shared memory around the nodes."""
        for staging in reversed(self.stagings):
            room = staging.staged
            shape = (self.stages, room.rows, room.row)
            nodes = (Storage(staging.room, room.dtype, shape, Scope.SHARED, nodes, room.pad, room.swizzled),)
        return nodes

    @property
    def ahead(self) -> int:
        """Steps that are requested before they are used."""
        return self.stages - 1

    def begun(self, steps: Steps) -> tuple[Node, ...]:
        """The first slots, before the steps begin."""
        nodes: tuple[Node, ...] = ()
        for step in range(self.ahead):
            fill: tuple[Node, ...] = ()
            for staging in self.stagings:
                source, slot = add(steps.first, num(step)), num(step)
                fill += staging.copies(source, slot) if staging.is_async else staging.moves(source, slot)
            nodes += (*_if_any(num(step), steps, fill), *self._committed)
        return nodes

    def stepped(self, steps: Steps, work: tuple[Node, ...]) -> Node:
        """The work on every step: waits for its own tiles, begins those of a later step in the slot that the step
        before has left, works.

        What goes through registers is loaded before the work, if there is room for it, and stored behind.
        """
        later = add(STEP, num(self.ahead))
        source, slot = add(steps.first, later), mod(later, self.stages)
        begin: tuple[Node, ...] = ()
        end: tuple[Node, ...] = ()
        for staging in self.stagings:
            if staging.is_async:
                begin += staging.copies(source, slot)
            elif staging.is_prefetched:
                begin += staging.fetches(source)
                end += staging.stores(slot)
            else:
                end += staging.moves(source, slot)
        wait = (AwaitCopies(self.ahead - 1),) if self._committed else ()
        nodes: tuple[Node, ...] = (*wait, Barrier(), *_if_any(later, steps, begin), *self._committed,
                                   Let(SLOT, mod(STEP, self.stages), work), *_if_any(later, steps, end))  # fmt: skip
        for staging in reversed(self.stagings):
            nodes = staging.registers(nodes)
        limit = None if isinstance(steps.count, Const) else steps.count
        return Loop(STEP.name, steps.most, LoopKind.SERIAL, nodes, limit)

    @property
    def is_async(self) -> bool:
        """Whether each step has a group of copies, perhaps an empty one."""
        return any(staging.is_async for staging in self.stagings)

    @property
    def _committed(self) -> tuple[Node, ...]:
        return (CommitCopies(),) if self.is_async else ()


def _if_any(step: Expr, steps: Steps, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """The nodes where there is such a step, counted from the first."""
    return (Branch(less(step, steps.count), nodes),) if nodes else ()
