"""Scales of a contraction's sums over runs of k: packed next to panels, and applied as sums are stored.

A buffer has the product of a row's or column's scales for each run of a block of k. The micro-kernel adds the products of
one run, and multiplies each sum by the scales of its row and its column.
"""

from __future__ import annotations

from dataclasses import dataclass

from roller_svc.analysis.sum_of_products import product_of
from roller_svc.families.common.view import GemmView
from roller_svc.families.cpu.contraction.packing import Panels, RunPacking
from roller_svc.families.cpu.contraction.workload import COMPUTED
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Cast, Expr, Load, Op, OpKind, axes_of
from roller_svc.ir.index import num, ref
from roller_svc.ir.schedule import Node

ROW_SCALES, COLUMN_SCALES = ".row_scales", ".column_scales"
RUN = "k.run"  # number of a run in its block of k


@dataclass(frozen=True, slots=True)
class BlockScales:
    """The scales of one task. A block of k has `runs` of `run` packed words, each of `group` points."""

    view: GemmView
    lanes: int
    run: int
    runs: int
    group: int

    def buffers(self, rows: Panels, columns: Panels) -> list[tuple[str, DType, tuple[int, ...]]]:
        """Return the names, types and shapes of the buffers that are used."""
        used = ((ROW_SCALES, rows, self._of_rows), (COLUMN_SCALES, columns, self._of_columns))
        return [(name, DType.FLOAT32, (panels.count, self.runs, panels.size)) for name, panels, scales in used if scales]

    def pack_rows(self, rows: Panels) -> tuple[Node, ...]:
        """Pack the scales of a block of rows."""
        return self._pack(ROW_SCALES, self._of_rows, rows)

    def pack_columns(self, columns: Panels) -> tuple[Node, ...]:
        """Pack the scales of a task's columns."""
        return self._pack(COLUMN_SCALES, self._of_columns, columns)

    def scaled(self, total: Expr, row: Expr, column: Expr) -> Expr:
        """Return the sum of the current run at a place of a register tile, times its scales."""
        value = total if total.dtype is DType.FLOAT32 else Cast(total, DType.FLOAT32, implicit=True)
        run = num(0) if self.runs == 1 else ref(RUN)
        places = ((ROW_SCALES, "m.panel", row, self._of_rows), (COLUMN_SCALES, "n.panel", column, self._of_columns))
        loads = [Load(name, (ref(panel), run, place), DType.FLOAT32) for name, panel, place, scales in places if scales]
        return Op(OpKind.MUL, (value, product_of(list[Expr](loads))), DType.FLOAT32)

    @property
    def _of_columns(self) -> tuple[Expr, ...]:
        columns = {axis.name for axis in self.view.n.members}
        return tuple(scale for scale in self.view.operands.scales if not axes_of(scale).isdisjoint(columns))

    @property
    def _of_rows(self) -> tuple[Expr, ...]:
        """Return the scales of rows, and those of k alone."""
        return tuple(scale for scale in self.view.operands.scales if scale not in self._of_columns)

    def _pack(self, buffer: str, scales: tuple[Expr, ...], panels: Panels) -> tuple[Node, ...]:
        if not scales:
            return ()
        factors = [s if s.dtype is DType.FLOAT32 else Cast(s, DType.FLOAT32, implicit=True) for s in scales]
        k, dtype = self.view.k, DType.FLOAT32
        packing = RunPacking(buffer, product_of(factors), COMPUTED, k, self.runs, self.lanes, dtype, self.run, self.group)
        return packing.nodes(panels)
