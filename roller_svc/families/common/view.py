"""GEMM view of a contraction group: C[b, m, n] += A[b, m, k] * B[b, k, n].

CPU and GPU schedules share this view. A position on a fused tile axis maps to the values of its member axes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from roller_svc.analysis.fused_axis import member_values
from roller_svc.errors import InvariantError
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import AxisRef, Expr, Load
from roller_svc.ir.group import AxisRole, ContractionOperands, KernelGroup, TileAxis, TileSpace
from roller_svc.ir.program import StatementKind
from roller_svc.ir.schedule import Branch, Compute, Let, Loop, Node, Storage
from roller_svc.schedule.nest_statements import RowReads, row_storages, row_tensors, wrap_in_storages


@dataclass(frozen=True, slots=True)
class GemmView:
    """A contraction group with its GEMM axes and operands."""

    group: KernelGroup
    batch: tuple[TileAxis, ...]
    m: TileAxis
    n: TileAxis
    k: TileAxis
    operands: ContractionOperands
    dtype: DType  # of staged operands and accumulators

    @classmethod
    def of(cls, group: KernelGroup, space: TileSpace) -> GemmView:
        if group.operands is None:
            raise InvariantError(f"expected a contraction, got {group.name}")
        (m,), (n,), (k,) = (space.role(role) for role in (AxisRole.M, AxisRole.N, AxisRole.K))
        operands = group.operands
        if space.transposed:
            operands = replace(operands, a=operands.b, b=operands.a)
        return cls(group, space.role(AxisRole.BATCH), m, n, k, operands, space.compute_dtype)

    @classmethod
    def of_attention(cls, group: KernelGroup) -> GemmView:
        """Return attention's product of probabilities and V."""
        if group.attention is None:
            raise InvariantError(f"expected attention, got {group.name}")
        space, operands = group.space, ContractionOperands(group.attention.q, group.attention.v)
        (m,), (n,), (keys,) = (space.role(role) for role in (AxisRole.M, AxisRole.N, AxisRole.K))
        return cls(group, space.role(AxisRole.BATCH), m, n, keys, operands, space.compute_dtype)

    def with_second_result(self, result: Load) -> GemmView:
        """Return the view with the second accumulator of a dual GEMM replaced by `result`.

        The second reduction becomes a map that reads `result`. Views with one accumulator stay as they are.
        """
        if not self.group.is_dual_gemm:
            return self
        first, second, *rest = self.group.statements
        read = replace(second, kind=StatementKind.MAP, axes=second.spatial, body=result, combine=None)
        return replace(self, group=replace(self.group, statements=(first, read, *rest)))

    def epilogue(self, accumulator: Load, at: dict[str, Expr]) -> tuple[Node, ...]:
        """Return the stores of one output point: the accumulator, then the maps over it.

        `at` gives the values of axes that have no variable of their own name.
        """
        storages, nodes = self._epilogue(accumulator, at, ())
        return wrap_in_storages(storages, self._where_written(nodes))

    def vector_epilogue(self, accumulator: Load, lanes: Loop, at: dict[str, Expr]) -> tuple[Node, ...]:
        """Return the epilogue of adjacent points, one for each lane of the loop `lanes`, which has no body yet."""
        storages, nodes = self._epilogue(accumulator, at, (lanes,))
        return wrap_in_storages(storages, self._where_written((replace(lanes, body=nodes),)))

    def _where_written(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """Execute the epilogue where its scatter writes: a condition of rows."""
        predicate = self.group.statements[-1].predicate
        return nodes if predicate is None else (Branch(predicate, nodes),)

    def epilogue_values(self, accumulator: Load) -> tuple[list[Storage], tuple[Node, ...]]:
        """Return register buffers and the nodes that compute the epilogue's values of one point, without stores."""
        storages, nodes = self._epilogue(accumulator, {}, ())
        buffered = {storage.tensor for storage in storages}
        return storages, tuple(node for node in nodes if isinstance(node, Compute) and node.tensor in buffered)

    def _epilogue(self, accumulator: Load, at: dict[str, Expr], lanes: tuple[Loop, ...]) -> tuple[list[Storage], tuple[Node, ...]]:
        """Return buffers for values that are read again, one element for each lane, and the nodes that write."""
        rows = row_tensors(self.group)
        index = tuple(AxisRef(loop.var) for loop in lanes)
        extents = tuple(loop.extent for loop in lanes)
        reads = RowReads(rows, index, at)
        nodes: list[Node] = []
        for position, statement in enumerate(self.group.statements):
            if statement is not self.group.row_reduction:
                value = accumulator if position == 0 else reads.apply(statement.body)
                nodes += reads.store(self.group, statement, value)
        return row_storages(self.group.statements, rows, *extents), tuple(nodes)


def bind_members(axis: TileAxis, position: Expr, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """Bind each member axis to its value at `position` of the fused axis around the nodes."""
    for name, value in member_values(axis, position).items():
        nodes = (Let(name, value, nodes),)
    return nodes
