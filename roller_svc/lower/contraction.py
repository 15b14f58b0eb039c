"""A group seen as C[b, m, n] += A[b, m, k] * B[b, k, n]: what the lowerings for CPUs and GPUs share."""

from __future__ import annotations

from dataclasses import dataclass

from roller_svc.errors import InvariantError
from roller_svc.ir.build import ref
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Expr, Load
from roller_svc.ir.group import AxisRole, Factors, KernelGroup, TileAxis
from roller_svc.ir.rprogram import RProgram
from roller_svc.ir.schedule import Compute, Loop, LoopKind, Node, Storage
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
        storages, nodes = self._statements(sum_, RowReads(row_tensors(self.group), (), at), ())
        return wrapped(storages, nodes)

    def wide_epilogue(self, sum_: Load, at: dict[str, Expr], lane: str, width: int) -> tuple[Node, ...]:
        """The same for `width` neighbours; `sum_` and `at` are of the one that the variable `lane` counts."""
        reads = RowReads(row_tensors(self.group), (ref(lane),), at)
        storages, nodes = self._statements(sum_, reads, (width,))
        return wrapped(storages, (Loop(lane, width, LoopKind.VECTOR, nodes),))

    def _statements(
        self, sum_: Load, reads: RowReads, shape: tuple[int, ...]
    ) -> tuple[list[Storage], tuple[Node, ...]]:
        """Rooms for values that later statements read, and what is computed."""
        storages: list[Storage] = []
        nodes: list[Node] = []
        for position, statement in enumerate(self.group.statements):
            value = converted(sum_ if position == 0 else reads.apply(statement.body), statement)
            if statement.output in reads.rows:
                name = local_name(statement.output)
                storages.append(register(name, row_dtype(statement), *shape))
                nodes.append(Compute(name, reads.index, value))
                value = Load(name, reads.index, statement.type.dtype)
            if statement.output not in self.group.locals:
                index = tuple(reads.apply(i) for i in statement.index)
                nodes.append(Compute(statement.output, index, value))
        return storages, tuple(nodes)
