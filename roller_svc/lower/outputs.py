"""Neighbouring sums of a matrix contraction → what its epilogue makes of them, stored in wide pieces."""

from __future__ import annotations

from dataclasses import dataclass

from roller_svc.ir.build import add, both, less, num, ref
from roller_svc.ir.expr import COMPARISONS, Expr, Load, Op, OpKind, axes_of, walk
from roller_svc.ir.group import TileAxis
from roller_svc.ir.operand import contiguous_run
from roller_svc.ir.schedule import Branch, Loop, LoopKind, Node
from roller_svc.lower.contraction import View
from roller_svc.lower.fused_axis import decoded
from roller_svc.lower.rows import RowReads, row_tensors
from roller_svc.perf.mma_tile import CHUNK_BYTES

# Operations that unrolled rounds may come to: their loads are under way together, but compilers take time over them.
UNROLLED_OPERATIONS = 256
FUNCTION_OPERATIONS = 16  # of a function such as erf, once it is written out
_PLAIN = frozenset({OpKind.ADD, OpKind.SUB, OpKind.MUL, OpKind.NEG, OpKind.MAX, OpKind.MIN, OpKind.RELU}) | COMPARISONS


@dataclass(frozen=True, slots=True)
class Outputs:
    """`m` and `n`: places come in whole multiples of these along both axes, beyond the end too."""

    view: View
    m: int
    n: int

    def nodes(self, total: Load, width: int) -> tuple[Node, ...]:
        """The epilogue's statements at m.place and `width` places from n.place on, where they are inside.

        `total` is the sum at the one that `.lane` counts.
        """
        view = self.view
        lead = view.n.members[-1].name
        lanes = Loop(".lane", width, LoopKind.VECTOR, ())
        nodes = view.epilogue_over(total, lanes, {lead: add(ref(lead), ref(".lane"))})
        nodes = decoded(view.m, ref("m.place"), decoded(view.n, ref("n.place"), nodes))
        inside = both(inside_axis(view.m, self.m, "m.place"), inside_axis(view.n, self.n, "n.place"))
        return (Branch(inside, nodes),) if inside is not None else nodes

    def width(self, columns: int) -> int:
        """Neighbours along n, a divisor of `columns`, that every store of the epilogue can take at once, up to 16 bytes
        of the widest.

        Beyond the innermost axis only the address of a store is sure to count on: what else is read at a place is not.
        """
        group, lead = self.view.group, self.view.n.members[-1]
        types = dict(group.stored)
        width = CHUNK_BYTES
        for statement in group.statements:
            if statement.output in types and statement is not group.row_reduction:
                type_ = types[statement.output]
                store = Load(statement.output, statement.index, type_.dtype)
                width = min(width, contiguous_run(store, None, self.view.n, type_), CHUNK_BYTES // type_.dtype.bytes)
        reads = RowReads(row_tensors(group), (), {})
        moves = any(lead.name in axes_of(reads.apply(statement.body)) for statement in group.statements[1:])
        while columns % width or (moves and lead.extent % width):
            width //= 2
        return width

    @property
    def operations(self) -> int:
        """Of one output point, its store counted as one."""
        parts = (part for s in self.view.group.statements[1:] for part in walk(s.body))
        return 1 + sum(1 if p.kind in _PLAIN else FUNCTION_OPERATIONS for p in parts if isinstance(p, Op))


def inside_axis(axis: TileAxis, tile: int, place: str) -> Expr | None:
    """Whether the place is on the axis; None where tiles end with it."""
    return less(ref(place), num(axis.extent)) if axis.extent % tile else None
