"""Vectors of which weights of chained products read an element once for each row or key."""

from __future__ import annotations

from dataclasses import dataclass

from roller_svc.analysis.index_ranges import exists
from roller_svc.families.common.gpu.matrix.tile import Fragment
from roller_svc.ir.attention import Attention
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Expr, Load, Op, OpKind, axes_of, loads_of, rewrite
from roller_svc.ir.group import AxisRole, KernelGroup


@dataclass(frozen=True, slots=True)
class WeightVectors:
    """Tensors of which weights read an element of each row, or of each key, whatever their conditions are."""

    rows: tuple[Load, ...] = ()
    keys: tuple[Load, ...] = ()

    def registers(self, fragment: Fragment, row_fragments: int, kv_fragments: int) -> int:
        """Return the registers of a lane that hold these elements."""
        rows = row_fragments * fragment.halves * len(self.rows)
        return rows + kv_fragments * fragment.half_sums * len(self.keys)


def weight_vectors(group: KernelGroup, attention: Attention) -> WeightVectors:
    """Return the vectors of weights whose elements exist at all rows and keys, so that no condition guards them."""
    axes = {member.name: member for axis in group.space.axes for member in axis.members}
    ranges = {name: (0, axis.extent - 1) for name, axis in axes.items()}
    (keys,), (rows,) = (
        [{member.name for member in axis.members} for axis in group.space.role(role)] for role in (AxisRole.K, AxisRole.M)
    )
    products = {load.tensor for load in attention.products}
    loads = [x for x in dict.fromkeys(loads_of(attention.score)) if x.tensor not in products]
    loads = [x for x in loads if exists(x, dict(group.inputs)[x.tensor].shape, ranges)]
    of_rows = tuple(x for x in loads if axes_of(x).isdisjoint(keys))
    return WeightVectors(of_rows, tuple(x for x in loads if x not in of_rows and axes_of(x).isdisjoint(rows)))


def approximate_exponentials(score: Expr, dtype: DType) -> Expr:
    """Return weights whose exponentials are as exact as values of a type of 16 bits, to which the weights are rounded."""

    def change(node: Expr) -> Expr:
        is_exact = isinstance(node, Op) and node.kind is OpKind.EXP and node.dtype is DType.FLOAT32
        return Op(OpKind.EXP, node.args, dtype) if isinstance(node, Op) and is_exact else node

    return rewrite(score, change)
