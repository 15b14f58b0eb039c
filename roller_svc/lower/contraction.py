"""A group seen as C[b, m, n] += A[b, m, k] * B[b, k, n]: what the lowerings for CPUs and GPUs share."""

from __future__ import annotations

from dataclasses import dataclass

from roller_svc.errors import InvariantError
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Expr, Load
from roller_svc.ir.group import AxisRole, Factors, KernelGroup, TileAxis
from roller_svc.ir.rprogram import RProgram
from roller_svc.ir.schedule import Compute, Node, Storage
from roller_svc.lower.rows import RowReads, converted, local_name, register, row_dtype, row_tensors, wrapped


@dataclass(frozen=True, slots=True)
class View:
    group: KernelGroup
    batch: tuple[TileAxis, ...]
    m: TileAxis
    n: TileAxis
    k: TileAxis
    factors: Factors
    dtype: DType  # of staged operands and accumulators

    @classmethod
    def of(cls, group: KernelGroup, program: RProgram) -> View:
        space = program.space
        if group.factors is None:
            raise InvariantError(f"{group.name} has no factors")
        (m,), (n,), (k,) = (space.role(role) for role in (AxisRole.M, AxisRole.N, AxisRole.K))
        return cls(group, space.role(AxisRole.BATCH), m, n, k, group.factors, space.compute_dtype)

    def epilogue(self, sum_: Load, at: dict[str, Expr]) -> tuple[Node, ...]:
        """Stores of one output point: the sum, then the maps over it. `at` says where, for axes not named so."""
        rows = row_tensors(self.group)
        reads = RowReads(rows, (), at)
        storages: list[Storage] = []
        nodes: list[Node] = []
        for position, statement in enumerate(self.group.statements):
            value = converted(sum_ if position == 0 else reads.apply(statement.body), statement)
            if statement.output in rows:
                storages.append(register(local_name(statement.output), row_dtype(statement)))
                nodes.append(Compute(local_name(statement.output), (), value))
                value = Load(local_name(statement.output), (), statement.type.dtype)
            if statement.output not in self.group.locals:
                index = tuple(reads.apply(i) for i in statement.index)
                nodes.append(Compute(statement.output, index, value))
        return wrapped(storages, tuple(nodes))
