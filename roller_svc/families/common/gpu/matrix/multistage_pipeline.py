"""Multistage pipeline of a contraction or attention: shared memory that is filled some k-tiles ahead.

Stages form a circular buffer, as in CUTLASS's multistage mainloop. Copies say how a k-tile moves, the pipeline says
when. It serves FMA units and matrix units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from roller_svc.families.common.gpu.matrix.tile import StagedTile
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import AxisRef, Const, Expr, Op, OpKind
from roller_svc.ir.index import add, lt, mod, mul, num, sub
from roller_svc.ir.schedule import (
    Barrier,
    Branch,
    CpAsyncCommitGroup,
    CpAsyncWaitGroup,
    Let,
    Loop,
    LoopKind,
    Node,
    Part,
    Scope,
    Storage,
)

STAGE = ".slot"  # of the k-tile that is multiplied
STEP = AxisRef("k.step")
PROLOGUE, MAIN_LOOP, EPILOGUE = Part("prologue"), Part("main loop"), Part("epilogue")


class OperandCopy(Protocol):
    """Copy of one operand's k-tile, number `step`, to a stage of `buffer`."""

    @property
    def buffer(self) -> str: ...
    @property
    def staged(self) -> StagedTile: ...
    @property
    def is_async(self) -> bool: ...
    @property
    def is_prefetched(self) -> bool:
        """Return whether registers hold a k-tile during the work on another one."""

    def allocate_registers(self, body: tuple[Node, ...]) -> tuple[Node, ...]:
        """Allocate the registers of prefetched elements around the nodes that load and store them."""

    def cp_async(self, step: Expr, stage: Expr) -> tuple[Node, ...]:
        """Start asynchronous copies of a k-tile to a stage."""

    def load_to_registers(self, step: Expr) -> tuple[Node, ...]:
        """Load a k-tile to registers."""

    def store_to_shared(self, stage: Expr) -> tuple[Node, ...]:
        """Store the loaded elements to a stage."""

    def copy_through_registers(self, step: Expr, stage: Expr) -> tuple[Node, ...]:
        """Copy a k-tile to a stage at once."""


@dataclass(frozen=True, slots=True)
class KTileRange:
    """The k-tiles of one pass: `count` from `first` on, at most `max_count`.

    With a period of (visited, all) k-tiles, only the first `visited` ones of each are visited.
    """

    first: Expr
    count: Expr
    max_count: int
    period: tuple[Expr, int] | None = None

    @property
    def number(self) -> Expr:
        """Return the number of the current k-tile."""
        return self.at(STEP)

    def at(self, step: Expr) -> Expr:
        """Return the number of the k-tile of a step."""
        if self.period is None:
            return add(self.first, step)
        visited, stride = self.period
        whole = Op(OpKind.FLOORDIV, (step, visited), DType.INT32)
        return add(self.first, add(mul(whole, num(stride)), sub(step, mul(whole, visited))))

    def if_valid(self, step: Expr, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """Execute the nodes if the pass has that k-tile, counted from its first."""
        return (Branch(lt(step, self.count), nodes),) if nodes else ()


@dataclass(frozen=True, slots=True)
class MultistagePipeline:
    """A circular buffer of stages; each holds a k-tile of every operand.

    Copies through registers are `register_stages` k-tiles ahead of the work, or as many as asynchronous ones. With
    `overlays` the memory is that of other buffers in scope, which the nodes do not use.
    """

    stages: int
    copies: Sequence[OperandCopy]
    register_stages: int | None = None
    overlays: tuple[str, ...] = ()

    def allocate(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """Allocate the shared memory around the nodes."""
        for copy in reversed(self.copies):
            tile = copy.staged
            shape = (self.stages, tile.rows, tile.row)
            storage = Storage(copy.buffer, tile.dtype, shape, Scope.SHARED, nodes, tile.pad, tile.swizzled)
            nodes = (replace(storage, overlays=self.overlays),)
        return nodes

    @property
    def prefetch_stages(self) -> int:
        """Return the number of k-tiles in flight ahead of the current one."""
        return self.stages - 1

    def prologue(self, steps: KTileRange) -> tuple[Node, ...]:
        """Fill the first stages before the main loop."""
        nodes: tuple[Node, ...] = ()
        for step in range(self.prefetch_stages):
            fill: tuple[Node, ...] = ()
            for copy in self.copies:
                if step < self._distance(copy):
                    fill += _fill(copy, steps.at(num(step)), num(step))
            nodes += (*steps.if_valid(num(step), fill), *self._committed)
        return nodes

    def mainloop(self, steps: KTileRange, work: tuple[Node, ...]) -> Node:
        """Loop over the k-tiles: wait for the current one, start a later one in the free stage, then work.

        Copies through registers load before the work, if registers suffice, and store after it. One stage is filled
        and read in turns.
        """
        work = (Let(STAGE, mod(STEP, self.stages), work),)
        nodes = self._unpipelined(steps, work) if self.stages == 1 else self._pipelined(steps, work)
        limit = None if isinstance(steps.count, Const) else steps.count
        return Loop(STEP.name, steps.max_count, LoopKind.SERIAL, nodes, limit)

    def _pipelined(self, steps: KTileRange, work: tuple[Node, ...]) -> tuple[Node, ...]:
        begin: tuple[Node, ...] = ()
        end: tuple[Node, ...] = ()
        for distance in dict.fromkeys(map(self._distance, self.copies)):
            later = add(STEP, num(distance))
            source, stage = steps.at(later), mod(later, self.stages)
            before: tuple[Node, ...] = ()
            after: tuple[Node, ...] = ()
            for copy in self.copies:
                if self._distance(copy) != distance:
                    continue
                if copy.is_async:
                    before += copy.cp_async(source, stage)
                elif copy.is_prefetched:
                    before += copy.load_to_registers(source)
                    after += copy.store_to_shared(stage)
                else:
                    after += copy.copy_through_registers(source, stage)
            begin += steps.if_valid(later, before)
            end += steps.if_valid(later, after)
        wait = (CpAsyncWaitGroup(self.prefetch_stages - 1),) if self.is_async else ()
        nodes: tuple[Node, ...] = (*wait, Barrier(), *begin, *self._committed, *work, *end)
        for copy in reversed(self.copies):
            nodes = copy.allocate_registers(nodes)
        return nodes

    def _unpipelined(self, steps: KTileRange, work: tuple[Node, ...]) -> tuple[Node, ...]:
        nodes: tuple[Node, ...] = ()
        for copy in self.copies:
            nodes += _fill(copy, steps.number, num(0))
        wait = (CpAsyncWaitGroup(0),) if self.is_async else ()
        nodes = (*nodes, *self._committed, *wait, Barrier(), *work)
        return (*nodes, Barrier()) if steps.max_count > 1 else nodes

    @property
    def is_async(self) -> bool:
        """Return whether each k-tile has a group of asynchronous copies, possibly empty."""
        return any(copy.is_async for copy in self.copies)

    @property
    def _committed(self) -> tuple[Node, ...]:
        return (CpAsyncCommitGroup(),) if self.is_async else ()

    def _distance(self, copy: OperandCopy) -> int:
        """Return the number of k-tiles that a copy is ahead of the work."""
        return self.prefetch_stages if copy.is_async or self.register_stages is None else self.register_stages


def _fill(copy: OperandCopy, step: Expr, stage: Expr) -> tuple[Node, ...]:
    return copy.cp_async(step, stage) if copy.is_async else copy.copy_through_registers(step, stage)
