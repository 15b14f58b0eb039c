"""Weights of a Winograd convolution, transformed once: U = G g G^T in float64, rounded to float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from roller_svc.analysis.winograd import Row
from roller_svc.errors import InvariantError
from roller_svc.families.common.view import bind_members
from roller_svc.families.cpu.winograd.workload import WinogradTask
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Cast, Const, Expr, Load, Op, OpKind, substitute
from roller_svc.ir.index import add, lt, mul, num, ref
from roller_svc.ir.program import Combine, identity
from roller_svc.ir.schedule import Branch, Compute, Loop, LoopKind, Node, Scope, Storage

WEIGHTS, HALF = ".weights", ".weights.half"


@dataclass(frozen=True, slots=True)
class TransformedWeights:
    """Panels of `wide` filters: U[panel][position][channel][filter], 0 beyond the last filter."""

    task: WinogradTask
    source: Expr

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.task.panels, self.task.space.positions, self.task.space.image.depth, self.task.wide

    def element(self, position: Expr, channel: Expr, filter_: Expr) -> Load:
        """Return an element of panel `.filters.panel`."""
        dtype = self.task.space.image.space.compute_dtype
        return Load(WEIGHTS, (ref(".filters.panel"), position, channel, filter_), dtype)

    def fill(self) -> tuple[Node, ...]:
        """Transform the weights of the task's filters."""
        image, wide = self.task.space.image, self.task.wide
        if image.channels is None:
            raise InvariantError("a Winograd convolution has channels")
        place = add(add(ref(".filters.first"), mul(ref(".filters.panel"), num(wide))), ref(".filter"))
        nodes = bind_members(image.filters, place, bind_members(image.channels, ref(".channel"), self._transform()))
        if image.filters.extent % wide:
            nodes = (Branch(lt(place, num(image.filters.extent)), nodes, self._zeros()),)
        nodes = (Loop(".filter", wide, LoopKind.SERIAL, nodes),)
        nodes = (Loop(".channel", image.depth, LoopKind.SERIAL, nodes),)
        limit = ref(".filters.panels") if -(-image.filters.extent // wide) % self.task.panels else None
        return (Loop(".filters.panel", self.task.panels, LoopKind.SERIAL, nodes, limit),)

    def _transform(self) -> tuple[Node, ...]:
        """Transform the taps of one filter and channel."""
        matrices = self.task.space.transforms
        rows, columns = self.task.space.image.window_dims[-2:]
        if rows.tap is None or columns.tap is None:
            raise InvariantError("a Winograd convolution has two dimensions with taps")
        nodes: list[Node] = []
        for a, row in enumerate(matrices.filters):
            for j in range(len(row)):
                taps = [
                    substitute(self.source, {rows.tap.name: num(i), columns.tap.name: num(j)}) for i in range(len(row))
                ]
                wide = [Cast(tap, DType.FLOAT64, implicit=True) for tap in taps]
                nodes.append(Compute(HALF, (num(a), num(j)), _dot(row, wide)))
        for a in range(matrices.size):
            for b, row in enumerate(matrices.filters):
                half: list[Expr] = [Load(HALF, (num(a), num(j)), DType.FLOAT64) for j in range(len(row))]
                value = Cast(_dot(row, half), self.task.space.image.space.compute_dtype, implicit=True)
                nodes.append(self._store(a * matrices.size + b, value))
        shape = (matrices.size, len(matrices.filters[0]))
        return (Storage(HALF, DType.FLOAT64, shape, Scope.REGISTER, tuple(nodes)),)

    def _zeros(self) -> tuple[Node, ...]:
        zero = identity(Combine.SUM, self.task.space.image.space.compute_dtype)
        return tuple(self._store(position, zero) for position in range(self.task.space.positions))

    def _store(self, position: int, value: Expr) -> Compute:
        target = self.element(num(position), ref(".channel"), ref(".filter"))
        return Compute(target.tensor, target.index, value)


def _dot(row: Row, values: Sequence[Expr]) -> Expr:
    """Return the sum of the row's terms in float64."""
    total: Expr | None = None
    for c, value in zip(row, values, strict=True):
        if c:
            term = Op(OpKind.MUL, (Const(float(c), DType.FLOAT64), value), DType.FLOAT64)
            total = term if total is None else Op(OpKind.ADD, (total, term), DType.FLOAT64)
    return Const(0.0, DType.FLOAT64) if total is None else total
