"""An extreme and where it is, in one pass over a row: what lanes keep, and how they are put together."""

from __future__ import annotations

from dataclasses import dataclass

from roller_svc.analysis.online_reduction import Joint, JointKind, joints
from roller_svc.ir.affine import affine
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import AxisRef, Cast, Expr, Load, Op, OpKind, Select
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.index import add, given, num
from roller_svc.ir.program import COMBINE_OPS, Axis, Combine, identity
from roller_svc.ir.schedule import Compute, HorizontalReduce, Loop, LoopKind, Node
from roller_svc.schedule.nest_statements import acc_name

Index = tuple[Expr, ...]


def placed_joints(group: KernelGroup) -> dict[str, Joint]:
    """Pairs of an extreme and its place, by the outputs of both."""
    found = [j for j in joints(group.statements) if j.kind is JointKind.PLACE]
    return {s.output: j for j in found for s in (j.first, j.second)}


@dataclass(frozen=True, slots=True)
class Placing:
    """The pass of one joint. Lanes keep the extreme in the accumulator of the first reduction and its place in that of
    the second, as an int32: what a narrow place is converted to does not change which one is best."""

    joint: Joint

    @property
    def dtype(self) -> DType:
        """Of the place while it is looked for."""
        return self.place.dtype

    @property
    def place(self) -> Expr:
        return _narrow(given(self.joint.place, "place of the joint"))

    @property
    def idle(self) -> Expr:
        idle = _narrow(given(self.joint.idle, "idle of the joint"))
        return idle if idle.dtype is self.dtype else Cast(idle, self.dtype, implicit=True)

    @property
    def _extreme(self) -> tuple[str, DType, Combine]:
        first = self.joint.first
        return acc_name(first.output), first.accumulator, first.combine or Combine.MAX

    @property
    def _found(self) -> tuple[str, Combine]:
        return acc_name(self.joint.second.output), self.joint.second.combine or Combine.MIN

    def start(self, index: Index) -> tuple[Node, ...]:
        extreme, dtype, combine = self._extreme
        found, _ = self._found
        return (Compute(extreme, index, identity(combine, dtype)), Compute(found, index, self.idle))

    def update(
        self, index: Index, value: Expr, place: Expr, part: str = "", *, in_order: bool = False
    ) -> tuple[Node, ...]:
        """One more value: its place is better than an earlier one's where the value is, or is the same and the later
        place is wanted. `part`: of the accumulators' names, where the pair of the whole row is meant."""
        name, dtype, combine = self._extreme
        found, join = self._found
        old = Load(name + part, index, dtype)
        kept: Expr = Load(found + part, index, self.dtype)
        if value.dtype is not dtype:
            value = Cast(value, dtype, implicit=True)
        better = Op(OpKind.GT if combine is Combine.MAX else OpKind.LT, (value, old), DType.INT8)
        if not (in_order and join is Combine.MIN):
            kept = Select(_equal(value, old), Op(COMBINE_OPS[join], (kept, place), self.dtype), kept, self.dtype)
        chosen = Select(better, place, kept, self.dtype)
        return (Compute(found + part, index, chosen), Compute(name + part, index, value, combine))

    def fold(self, row: Index, lane: AxisRef, lanes: int, native: int) -> list[Node]:
        """Vectors onto each other until one is left, then its lanes: the place is one of those with the extreme."""
        name, dtype, combine = self._extreme
        found, join = self._found
        nodes: list[Node] = []
        while lanes > native:
            lanes //= 2
            there = (*row, add(lane, num(lanes)))
            body = self.update((*row, lane), Load(name, there, dtype), Load(found, there, self.dtype))
            nodes.append(Loop(lane.name, lanes, LoopKind.VECTOR, body))
        nodes.append(HorizontalReduce(f"{name}.total", row, Load(name, (*row, num(0)), dtype), lanes, combine))
        is_it = _equal(Load(name, (*row, lane), dtype), Load(f"{name}.total", row, dtype))
        here = Select(is_it, Load(found, (*row, lane), self.dtype), self.idle, self.dtype)
        nodes.append(Loop(lane.name, lanes, LoopKind.VECTOR, (Compute(found, (*row, lane), here),)))
        nodes.append(HorizontalReduce(f"{found}.total", row, Load(found, (*row, num(0)), self.dtype), lanes, join))
        return nodes

    def end(self, index: Index) -> tuple[Node, ...]:
        """NaN, once it has come, is the extreme, and equal to nothing: it has no place."""
        name, dtype, _ = self._extreme
        found = f"{self._found[0]}.total"
        whole = Load(f"{name}.total", index, dtype)
        here = Select(_equal(whole, whole), Load(found, index, self.dtype), self.idle, self.dtype)
        return (Compute(found, index, here),) if dtype.is_float else ()

    def is_in_order(self, inner: tuple[Axis, ...]) -> bool:
        """Whether places grow on the way through a row."""
        walk = affine(self.place)
        wide = [a.name for a in inner if a.extent > 1]
        return walk is not None and len(wide) == 1 and dict(walk.coeffs).get(wide[0], 0) > 0


def _equal(a: Expr, b: Expr) -> Expr:
    return Op(OpKind.EQ, (a, b), DType.INT8)


def _narrow(expr: Expr) -> Expr:
    """Without conversions to wider integers."""
    while isinstance(expr, Cast) and not expr.dtype.is_float and expr.arg.dtype is not DType.BOOL:
        if expr.arg.dtype.is_float or expr.arg.dtype.bits > expr.dtype.bits:
            break
        expr = expr.arg
    return expr
