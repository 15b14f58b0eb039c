"""A group seen as C[b, m, n] += A[b, m, k] * B[b, k, n]: what the lowerings for CPUs and GPUs share.

Positions on a fused tile axis → values of its member axes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from roller_svc.errors import InvariantError
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import AxisRef, Expr, Load
from roller_svc.ir.group import AxisRole, ContractionOperands, KernelGroup, TileAxis
from roller_svc.ir.index import div, mod
from roller_svc.ir.program import StatementKind
from roller_svc.ir.rprogram import RProgram
from roller_svc.ir.schedule import Compute, Let, Loop, Node, Storage
from roller_svc.schedule.nest_statements import (
    RowReads,
    converted,
    local_name,
    register,
    row_dtype,
    row_tensors,
    wrapped,
)


@dataclass(frozen=True, slots=True)
class View:
    group: KernelGroup
    batch: tuple[TileAxis, ...]
    m: TileAxis
    n: TileAxis
    k: TileAxis
    factors: ContractionOperands
    dtype: DType  # of staged operands and accumulators

    @classmethod
    def of(cls, group: KernelGroup, program: RProgram) -> View:
        space = program.space
        if group.operands is None:
            raise InvariantError(f"{group.name} has no factors")
        (m,), (n,), (k,) = (space.role(role) for role in (AxisRole.M, AxisRole.N, AxisRole.K))
        return cls(group, space.role(AxisRole.BATCH), m, n, k, group.operands, space.compute_dtype)

    def with_second(self, found: Load) -> View:
        """Where there are two sums at a point, the second as a map to what is `found` there."""
        if not self.group.is_dual_gemm:
            return self
        sum_, second, *rest = self.group.statements
        read = replace(second, kind=StatementKind.MAP, axes=second.spatial, body=found, combine=None)
        return replace(self, group=replace(self.group, statements=(sum_, read, *rest)))

    def epilogue(self, sum_: Load, at: dict[str, Expr]) -> tuple[Node, ...]:
        """Stores of one output point: the sum, then the maps over it. `at` says where, for axes not named so."""
        return wrapped(*self._epilogue(sum_, at, ()))

    def epilogue_over(self, sum_: Load, lanes: Loop, at: dict[str, Expr]) -> tuple[Node, ...]:
        """The same for neighbouring points, one for each lane of a loop that has no body yet."""
        storages, nodes = self._epilogue(sum_, at, (lanes,))
        return wrapped(storages, (replace(lanes, body=nodes),))

    def results(self, sum_: Load) -> tuple[list[Storage], tuple[Node, ...]]:
        """The epilogue's values at one output point in rooms of their own, nothing stored."""
        storages, nodes = self._epilogue(sum_, {}, ())
        kept = {storage.tensor for storage in storages}
        return storages, tuple(node for node in nodes if isinstance(node, Compute) and node.tensor in kept)

    def _epilogue(
        self, sum_: Load, at: dict[str, Expr], lanes: tuple[Loop, ...]
    ) -> tuple[list[Storage], tuple[Node, ...]]:
        """Rooms for values that are read again, one element a lane, and the writes."""
        rows = row_tensors(self.group)
        index = tuple(AxisRef(loop.var) for loop in lanes)
        extents = tuple(loop.extent for loop in lanes)
        reads = RowReads(rows, index, at)
        storages: list[Storage] = []
        nodes: list[Node] = []
        for position, statement in enumerate(self.group.statements):
            if statement is self.group.row_reduction:
                continue
            value = converted(sum_ if position == 0 else reads.apply(statement.body), statement)
            if statement.output in rows:
                storages.append(register(local_name(statement.output), row_dtype(statement), *extents))
                nodes.append(Compute(local_name(statement.output), index, value))
                value = Load(local_name(statement.output), index, statement.type.dtype)
            if statement.output not in self.group.register_tensors:
                place = tuple(reads.apply(i) for i in statement.index)
                nodes.append(Compute(statement.output, place, value))
        return storages, tuple(nodes)


def decoded(axis: TileAxis, position: Expr, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """The nodes, with every member axis named as its value at that position of the fused axis."""
    stride = 1
    for member in reversed(axis.members):
        value = div(position, stride)
        stride *= member.extent
        if stride < axis.extent:
            value = mod(value, member.extent)
        nodes = (Let(member.name, value, nodes),)
    return nodes


def member_values(axis: TileAxis, position: Expr) -> dict[str, Expr]:
    """The same as expressions, to be put in place of the axes."""
    values: dict[str, Expr] = {}
    stride = 1
    for member in reversed(axis.members):
        value = div(position, stride)
        stride *= member.extent
        values[member.name] = value if stride >= axis.extent else mod(value, member.extent)
    return values
