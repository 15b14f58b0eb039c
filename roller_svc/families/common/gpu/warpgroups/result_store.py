"""Outputs of a wgmma kernel → how its warps store them; rules, cost and schedule agree on it.

TMA stores 16-bit outputs of one tensor in boxes of 16 rows, if the epilogue needs no row access. Else warps pass rows
of accumulators through shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from roller_svc.families.common.gpu.matrix.epilogue import EpilogueStore
from roller_svc.families.common.gpu.matrix.mainloop import ACC
from roller_svc.families.common.gpu.warpgroups.k_iteration import KTileOrder
from roller_svc.families.common.gpu.warpgroups.tma_load import TmaLoadPlan, TmaTile, plan_tma_store
from roller_svc.families.common.view import GemmView
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Load, axes_of
from roller_svc.ir.tensor_map import Swizzle, TensorMap
from roller_svc.schedule.nest_statements import RowReads, row_tensors

EPILOGUE_ROWS = 16  # of the outputs that a warp stores at once
RESULTS_MAP = ".results_map"
RESULT_BYTES = 2  # element size; stmatrix moves pairs
CHUNK_COLUMNS = (32, 16)  # two buffers of 16 rows of 64 bytes match the buffer of 32 columns of accumulators
# Maximal unrolled operations on all of a thread's results; more cost compile time.
MAX_OPERATIONS = 1024


@dataclass(frozen=True, slots=True)
class TmaStoreBoxes:
    """Boxes of outputs that warps store by TMA."""

    tensor: str
    boxes: TmaTile
    depends_on_position: bool  # whether an output depends on its position

    @property
    def dtype(self) -> DType:
        return self.boxes.dtype

    @property
    def columns(self) -> int:
        return self.boxes.panel

    @property
    def tensor_map(self) -> TensorMap:
        return self.boxes.tensor_map(RESULTS_MAP, self.tensor, Swizzle(self.columns * RESULT_BYTES))


@dataclass(frozen=True)
class ResultStore:
    """Stores of a group's outputs. `view`: its second accumulator is a placeholder, since its register varies."""

    view: GemmView
    _plans: dict[tuple[bool, bool], TmaLoadPlan | str] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, view: GemmView) -> ResultStore:
        return cls(view.with_second_result(Load(ACC, (), view.dtype)))

    def boxes(self, tile: tuple[int, int], group_columns: int, results: int) -> TmaStoreBoxes | None:
        """Return the boxes that a warp stores by TMA, or None where outputs need rows or form no boxes.

        Args:
            tile: Rows and columns of a block.
            group_columns: Columns of a warpgroup.
            results: Outputs of a thread.
        """
        target, view, (m, n) = self._target, self.view, tile
        columns = next((c for c in CHUNK_COLUMNS if group_columns % c == 0), None)
        if target is None or columns is None or self._operations * results > MAX_OPERATIONS:
            return None
        overhangs = (view.m.extent % m != 0, view.n.extent % n != 0)
        plan = self._plans.get(overhangs)
        if plan is None:
            axes, types = (view.m, view.n), dict(view.group.stored)
            plan = self._plans[overhangs] = plan_tma_store(target, target.dtype, axes, view.batch, types, overhangs)
        boxes = plan if isinstance(plan, str) else plan.tile(EPILOGUE_ROWS, KTileOrder.linear(view.n.extent, columns), columns)
        if isinstance(boxes, str) or boxes.copies != 1:
            return None
        return TmaStoreBoxes(target.tensor, boxes, self._depends_on_position)

    @cached_property
    def _target(self) -> Load | None:
        """The output that TMA may store, as a load; None where it stores none."""
        group = self.view.group
        if len(group.stored) != 1 or not self._needs_no_rows:
            return None
        ((tensor, type_),) = group.stored
        if type_.dtype.bytes != RESULT_BYTES or not type_.dtype.is_float:
            return None
        statement = next(s for s in group.statements if s.output == tensor)
        return Load(tensor, statement.index, type_.dtype)

    @cached_property
    def _operations(self) -> int:
        return EpilogueStore(self.view, 1, 1).operations

    @cached_property
    def _depends_on_position(self) -> bool:
        reads = RowReads(row_tensors(self.view.group), (), {})
        return any(axes_of(reads.apply(s.body)) for s in self.view.group.statements[1:])

    @property
    def _needs_no_rows(self) -> bool:
        """Whether outputs need no row access: other tensors vary along one side only, and pairs stay adjacent."""
        view = self.view
        rows = {m.name for m in view.m.members if m.extent > 1}
        columns = {m.name for m in view.n.members if m.extent > 1}
        own = {s.output for s in view.group.statements}
        for statement in view.group.statements[1:]:
            for load in statement.reads:
                axes = {name for i in load.index for name in axes_of(i)}
                if load.tensor not in own and ((axes & rows and axes & columns) or any(load.bounds_checked)):
                    return False
        return not (self._depends_on_position and view.n.members[-1].extent % 2)
