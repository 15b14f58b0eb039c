"""Two reductions of a row that share a pass → the same of pieces of the row, and the pieces' pairs joined.

Each piece has its own first value and a second value that goes by it; joining corrects the second values for what the
first is of the whole row (analysis/online_reduction.py). All pieces have the same length, so that none is guarded.
"""

from __future__ import annotations

import math
from dataclasses import replace

from roller_svc.analysis.online_reduction import Joint, JointKind, joints
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import AxisRef, Const, Expr, Load, Op, OpKind, Select, rewrite, substitute
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.index import given
from roller_svc.ir.program import Axis, AxisKind, StatementKind, TensorExpr, TensorType

EVEN_PIECES = 32  # a row that can be cut into so many equal pieces keeps a device busy
RUN = 4  # points of the least piece: neighbours that move together


def joint_of(group: KernelGroup) -> Joint | None:
    """The pair of reductions that a group is about, where all else are maps of their rows' values."""
    outer = {a.name for a in group.outer}
    reductions = [s for s in group.statements if s.kind is StatementKind.REDUCE]
    others = [s for s in group.statements if s.kind is not StatementKind.REDUCE]
    rows = all(s.kind is StatementKind.MAP and {a.name for a in s.axes} == outer for s in others)
    if len(reductions) != 2 or not rows:
        return None
    return next(iter(joints(group.statements)), None)


def cuts_evenly(statement: TensorExpr) -> bool:
    """Whether its row can be cut into as many equal pieces as a device may want."""
    return math.prod(a.extent for a in statement.reduced) % (EVEN_PIECES * RUN) == 0


def even_pieces(extent: int, wanted: int) -> int:
    """The most equal pieces, no more than wanted, a power of two, that an axis is cut into."""
    return math.gcd(extent // RUN, wanted) if extent % RUN == 0 else 1


def partial_pair(joint: Joint, names: tuple[str, str], cut: Axis, place: Expr, piece: Axis) -> tuple[TensorExpr, ...]:
    """Both reductions over one piece. `cut`: the axis within a piece, `place`: where it stands in the row."""
    whole = {cut.name: place}
    first = _of_piece(joint.first, names[0], cut, piece, substitute(joint.first.body, whole))
    mine = Load(names[0], first.index, first.type.dtype, (False,) * len(first.index))
    if joint.kind is JointKind.SQUARES:
        points = math.prod(a.extent for a in first.reduced)
        mean = Op(OpKind.DIV, (mine, Const(float(points), mine.dtype)), mine.dtype)
        away = Op(OpKind.SUB, (substitute(joint.value, whole), mean), mine.dtype)
        body: Expr = Op(OpKind.MUL, (away, away), mine.dtype)
    else:
        body = rewrite(
            substitute(joint.second.body, whole),
            lambda node: mine if isinstance(node, Load) and node.tensor == joint.first.output else node,
        )
    return first, _of_piece(joint.second, names[1], cut, piece, body)


def joined_pair(
    joint: Joint, names: tuple[str, str], piece: Axis, points: int, statements: tuple[TensorExpr, ...]
) -> tuple[TensorExpr, ...]:
    """The group's statements, the two reductions over pieces of `points` points each."""
    axis = replace(piece, kind=AxisKind.REDUCE)
    loads = [
        Load(name, (AxisRef(piece.name), *s.index), s.accumulator, (False,) * (len(s.index) + 1))
        for name, s in zip(names, (joint.first, joint.second), strict=True)
    ]
    bodies = {joint.first.output: loads[0], joint.second.output: _corrected(joint, loads[0], loads[1], points)}
    return tuple(
        replace(s, axes=(*s.spatial, axis), body=bodies[s.output]) if s.output in bodies else s for s in statements
    )


def _of_piece(statement: TensorExpr, name: str, cut: Axis, piece: Axis, body: Expr) -> TensorExpr:
    axes = (piece, *(cut if a.name == cut.name else a for a in statement.axes))
    type_ = TensorType(statement.accumulator, (piece.extent, *statement.type.shape))
    return replace(
        statement, output=name, name=name, type=type_, axes=axes, index=(AxisRef(piece.name), *statement.index),
        body=body,
    )  # fmt: skip


def _corrected(joint: Joint, first: Load, second: Load, points: int) -> Expr:
    """A piece's second value as it is of the whole row."""
    whole = Load(joint.first.output, joint.first.index, joint.first.type.dtype, (False,) * len(joint.first.index))
    same = Op(OpKind.EQ, (first, whole), DType.INT8)
    dtype = second.dtype
    match joint.kind:
        case JointKind.PLACE:
            return Select(same, second, given(joint.idle, "idle of the joint"), dtype)
        case JointKind.EXPONENTIALS:
            empty = Op(OpKind.EQ, (first, Const(-math.inf, first.dtype)), DType.INT8)
            shrunk = Op(OpKind.EXP, (Op(OpKind.SUB, (first, whole), dtype),), dtype)
            rest = Select(empty, Const(0.0, dtype), Op(OpKind.MUL, (second, shrunk), dtype), dtype)
            return Select(same, second, rest, dtype)
        case JointKind.SQUARES:
            count = Const(float(points), dtype)
            mean = Op(OpKind.DIV, (first, count), dtype)
            away = Op(OpKind.SUB, (mean, given(joint.centre, "centre of the joint")), dtype)
            extra = Op(OpKind.MUL, (count, Op(OpKind.MUL, (away, away), dtype)), dtype)
            return Op(OpKind.ADD, (second, extra), dtype)
