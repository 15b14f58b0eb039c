"""Outputs of a wgmma kernel → how its warps store them; rules, cost and schedule agree on it.

TMA stores 16-bit outputs of one tensor in boxes of 16 rows, if the epilogue needs no row access. Else warps pass rows
of accumulators through shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

from roller_svc.families.common.gpu.matrix.tile import count_operations
from roller_svc.families.common.gpu.warpgroups.k_iteration import KTileOrder
from roller_svc.families.common.gpu.warpgroups.tma_load import TmaLoadPlan, TmaTile, plan_tma_store
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Expr, Load, axes_of, rewrite
from roller_svc.ir.group import AxisRole, KernelGroup, TileAxis, TileSpace
from roller_svc.ir.program import TensorExpr
from roller_svc.ir.tensor_map import Swizzle, TensorMap

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
    """Stores of a group's outputs."""

    group: KernelGroup
    batch: tuple[TileAxis, ...]
    m: TileAxis
    n: TileAxis
    accumulator: DType
    _plans: dict[tuple[bool, bool], TmaLoadPlan | str] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, group: KernelGroup, space: TileSpace) -> ResultStore:
        (m,), (n,) = space.role(AxisRole.M), space.role(AxisRole.N)
        return cls(group, space.role(AxisRole.BATCH), m, n, space.compute_dtype)

    def boxes(self, tile: tuple[int, int], group_columns: int, results: int) -> TmaStoreBoxes | None:
        """Return the boxes that a warp stores by TMA, or None where outputs need rows or form no boxes.

        Args:
            tile: Rows and columns of a block.
            group_columns: Columns of a warpgroup.
            results: Outputs of a thread.
        """
        target, (m, n) = self._target, tile
        columns = next((c for c in CHUNK_COLUMNS if group_columns % c == 0), None)
        if target is None or columns is None or self._operations * results > MAX_OPERATIONS:
            return None
        overhangs = (self.m.extent % m != 0, self.n.extent % n != 0)
        plan = self._plans.get(overhangs)
        if plan is None:
            axes, types = (self.m, self.n), dict(self.group.stored)
            plan = self._plans[overhangs] = plan_tma_store(target, target.dtype, axes, self.batch, types, overhangs)
        boxes = plan if isinstance(plan, str) else plan.tile(EPILOGUE_ROWS, KTileOrder.linear(self.n.extent, columns), columns)
        if isinstance(boxes, str) or boxes.copies != 1:
            return None
        return TmaStoreBoxes(target.tensor, boxes, self._depends_on_position)

    @cached_property
    def _target(self) -> Load | None:
        """The output that TMA may store, as a load; None where it stores none."""
        group = self.group
        stored = [(tensor, type_) for tensor, type_ in group.stored if tensor in self._own]
        if len(stored) != 1 or not self._needs_no_rows:
            return None
        ((tensor, type_),) = stored
        if type_.dtype.bytes != RESULT_BYTES or not type_.dtype.is_float:
            return None
        statement = next(s for s in group.statements if s.output == tensor)
        return Load(tensor, statement.index, type_.dtype)

    @property
    def _maps(self) -> tuple[TensorExpr, ...]:
        """The statements after those that accumulate."""
        return self.group.statements[1 + self.group.is_dual_gemm :]

    @cached_property
    def _own(self) -> frozenset[str]:
        return frozenset(s.output for s in self.group.statements)

    @cached_property
    def _operations(self) -> int:
        return count_operations(self._maps)

    @cached_property
    def _depends_on_position(self) -> bool:
        """Whether an output depends on its position, and not only on values at the same position."""

        def drop_index(node: Expr) -> Expr:
            return replace(node, index=()) if isinstance(node, Load) and node.tensor in self._own else node

        return any(axes_of(rewrite(s.body, drop_index)) for s in self._maps)

    @property
    def _needs_no_rows(self) -> bool:
        """Whether outputs need no row access: other tensors vary along one side only, and pairs stay adjacent."""
        rows = {m.name for m in self.m.members if m.extent > 1}
        columns = {m.name for m in self.n.members if m.extent > 1}
        for statement in self._maps:
            for load in statement.reads:
                axes = {name for i in load.index for name in axes_of(i)}
                if load.tensor not in self._own and ((axes & rows and axes & columns) or any(load.bounds_checked)):
                    return False
        return not (self._depends_on_position and self.n.members[-1].extent % 2)
