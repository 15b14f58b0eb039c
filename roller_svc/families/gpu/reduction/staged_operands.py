"""Operands of peeled rows in shared memory, where their vectors are aligned like those of the rows.

A weight of a norm or a mask has a row of its own, which begins at another alignment than the rows that share it. A
block whose rows have one alignment copies it once, from the first aligned vector of its rows on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from roller_svc.analysis.unconditional import unconditional_loads
from roller_svc.families.common.gpu.row_space import row_periods, staged_axes
from roller_svc.families.gpu.reduction.thread_mapping import (
    HEAD,
    LANE,
    POINT,
    VECTOR_ELEMENT,
    VECTORS,
    RowPart,
    RowTiling,
    ThreadRows,
    index_map,
)
from roller_svc.ir.expr import Expr, Load, substitute
from roller_svc.ir.group import AxisRole, KernelGroup
from roller_svc.ir.index import add, ceil_div, lt, mul, num, ref
from roller_svc.ir.schedule import Barrier, Branch, Compute, Let, Loop, LoopKind, Node, Scope, Storage
from roller_svc.schedule.nest_statements import wrap_in_storages

STAGED_ELEMENT, STAGED_ROUND, STAGED_STEP = ".staged", ".staged_round", ".staged_step"
IN_FLIGHT = 8  # elements of a thread that are loaded before the first is stored


@dataclass(frozen=True, slots=True)
class StagedOperand:
    """A load of a peeled row's vectors, and the shared memory that has its elements."""

    name: str
    load: Load  # of the element STAGED_ELEMENT after the head
    tiling: RowTiling

    @property
    def elements(self) -> int:
        """Return the elements of the vectors of a row, at most."""
        return self.tiling.chunks * self.tiling.vector_elems


@dataclass(frozen=True, slots=True)
class StagedOperands:
    """The operands of a kernel that its blocks copy to shared memory."""

    buffers: dict[Load, StagedOperand] = field(default_factory=dict[Load, StagedOperand])  # by load of a vector

    @classmethod
    def of(cls, group: KernelGroup, rows: ThreadRows, tilings: dict[str, RowTiling | None]) -> StagedOperands:
        """Return the operands of which a block has one row, while all of its own rows have one alignment."""
        buffers: dict[Load, StagedOperand] = {}
        for statement in group.statements:
            tiling = tilings[statement.output]
            if tiling is None or tiling.part is not RowPart.VECTORS:
                continue
            names = _staged_tensors(rows, tiling.vector_elems)
            last = tiling.axes[-1].name
            outer = index_map(statement, rows, None, rows.read_at)
            for load in dict.fromkeys(unconditional_loads(statement.body)):
                if load.tensor not in names or any(load.bounds_checked):
                    continue
                key = index_map(statement, rows, tiling, rows.read_at).apply(load)
                element = substitute(load, {last: add(ref(HEAD), ref(STAGED_ELEMENT))})
                if isinstance(key, Load) and isinstance(element, Load) and key not in buffers:
                    copied = outer.apply(element)
                    name = f"{load.tensor}.staged{len(buffers)}"
                    if isinstance(copied, Load):
                        buffers[key] = StagedOperand(name, copied, tiling)
        return cls(buffers)

    def load(self, load: Load) -> Load:
        """Return the load of a vector's element from shared memory."""
        staged = self.buffers[load]
        chunk = staged.tiling.vector_chunk
        return Load(staged.name, (add(mul(chunk, num(staged.tiling.vector_elems)), ref(VECTOR_ELEMENT)),), load.dtype)

    def wrap(self, nodes: tuple[Node, ...], rows: ThreadRows, *, has_barrier: bool) -> tuple[Node, ...]:
        """Copy the operands before the nodes.

        Args:
            nodes: the statements of all rows of a thread.
            rows: the mapping of rows to threads.
            has_barrier: whether the nodes have a barrier before they read an operand.
        """
        if not self.buffers:
            return nodes
        storages: list[Storage] = []
        copies: list[Node] = []
        for staged in self.buffers.values():
            storages.append(Storage(staged.name, staged.load.dtype, (staged.elements,), Scope.SHARED, ()))
            copies += self._copy(staged, rows)
        barrier = () if has_barrier else (Barrier(),)
        return wrap_in_storages(storages, (*copies, *barrier, *nodes))

    def _copy(self, staged: StagedOperand, rows: ThreadRows) -> tuple[Node, ...]:
        """Copy an operand by all threads of a block, a group of elements in flight; only the last may be absent."""
        threads, vector_elems = rows.program.threads, staged.tiling.vector_elems
        thread = add(mul(ref(POINT), num(rows.lanes)), ref(LANE))
        copy = Compute(staged.name, (ref(STAGED_ELEMENT),), staged.load)
        is_there = lt(ref(STAGED_ELEMENT), mul(ref(VECTORS), num(vector_elems)))

        def unrolled(first: Expr, count: int, *, guarded: bool = False) -> Node:
            element = add(mul(add(first, ref(STAGED_ROUND)), num(threads)), thread)
            body: Node = Branch(is_there, (copy,)) if guarded else copy
            return Loop(STAGED_ROUND, count, LoopKind.UNROLL, (Let(STAGED_ELEMENT, element, (body,)),))

        full = staged.tiling.min_chunks * vector_elems // threads
        steps = full // IN_FLIGHT
        nodes: list[Node] = []
        if steps:
            first = mul(ref(STAGED_STEP), num(IN_FLIGHT))
            nodes.append(Loop(STAGED_STEP, steps, LoopKind.SERIAL, (unrolled(first, IN_FLIGHT),)))
        if full > steps * IN_FLIGHT:
            nodes.append(unrolled(num(steps * IN_FLIGHT), full - steps * IN_FLIGHT))
        rest = ceil_div(staged.elements, threads) - full
        if rest:
            nodes.append(unrolled(num(full), rest, guarded=True))
        return tuple(nodes)


def _staged_tensors(rows: ThreadRows, vector_elems: int) -> frozenset[str]:
    """Return the tensors whose row a block copies: those that `RowSpace.is_staged` names."""
    program, space = rows.program, rows.program.space
    periods = row_periods(space, vector_elems)
    outer = [axis.name for axis in space.axes if axis.role is not AxisRole.INNER]
    wide = frozenset([name for name in outer if program.block[name] > 1])
    if not rows.serial_axes or any(program.thread[name] == 1 and periods.get(name, 1) > 1 for name in wide):
        return frozenset()
    axes = {access.tensor: staged_axes(space, access, vector_elems) for access in space.accesses}
    return frozenset([tensor for tensor, names in axes.items() if names is not None and not names & wide])
