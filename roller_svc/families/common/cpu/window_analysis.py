"""Statements of a group as reductions over sliding windows: which axes slide, and which expressions are planes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from roller_svc.families.common.cpu.window_reduction import Plane, PlaneWindowDim, WindowedSum
from roller_svc.ir.affine import Affine, affine
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import (
    AxisRef,
    Cast,
    Const,
    Expr,
    Load,
    Op,
    OpKind,
    Select,
    axes_of,
    children,
    iter_subexpressions,
    rewrite,
    with_children,
)
from roller_svc.ir.group import GroupKind, KernelGroup
from roller_svc.ir.index import add, mul, num, ref
from roller_svc.ir.program import Axis, StatementKind, TensorExpr

MAX_STRIDE = 64  # a staged plane has separate code for each phase of its stride


@dataclass(frozen=True, slots=True)
class Windows:
    """The windowed reductions of a group: for each its sliding windows by outer axis."""

    first: int  # the first outer axis along which a window slides
    statements: tuple[tuple[TensorExpr, dict[str, PlaneWindowDim]], ...]

    def slides(self, axis: Axis) -> bool:
        """Return whether a window slides along the axis."""
        return any(axis.name in found for _, found in self.statements)

    def reductions(self, axes: tuple[Axis, ...]) -> tuple[WindowedSum, ...] | None:
        """Return the reductions over planes along these axes; None if one is of another kind."""
        sums = [
            _windowed_sum(n, s, tuple(found.get(a.name, PlaneWindowDim(a.name, a.extent)) for a in axes))
            for n, (s, found) in enumerate(self.statements)
        ]
        known = tuple(s for s in sums if s is not None)
        return known if len(known) == len(sums) else None


def find_windows(group: KernelGroup) -> Windows | None:
    """Return the windows of a group of windowed reductions and elementwise statements; None for others."""
    if group.kind is not GroupKind.NEST or not group.outer:
        return None
    outer = {a.name: a.extent for a in group.outer}
    written = {s.output for s in group.statements}
    last = AxisRef(group.outer[-1].name)
    pairs: list[tuple[TensorExpr, dict[str, PlaneWindowDim]]] = []
    for statement in group.statements:
        is_sum = statement.kind is StatementKind.REDUCE
        inner = {a.name: a.extent for a in statement.axes if a.name not in outer}
        wild = any(any(load.bounds_checked) for load in statement.reads) or (is_sum and written & set(statement.reads_tensors))
        if is_sum != bool(inner) or wild or not statement.index or statement.index[-1] != last:
            return None
        if is_sum:
            found = _slides(statement, outer, inner)
            if found is None:
                return None
            pairs.append((statement, found))
    first = min((i for i, a in enumerate(group.outer) for _, found in pairs if a.name in found), default=None)
    return None if first is None else Windows(first, tuple(pairs))


def _slides(statement: TensorExpr, outer: Mapping[str, int], inner: Mapping[str, int]) -> dict[str, PlaneWindowDim] | None:
    """Return outer axis → its sliding window, for all inner axes; None where they slide otherwise."""
    found: dict[str, PlaneWindowDim] = {}
    for known in _sums_of_axes(statement.body):
        along = [(name, c) for name, c in known.coeffs if name in outer]
        under = [(name, c) for name, c in known.coeffs if name in inner]
        if not along or not under:
            continue
        if len(along) > 1 or len(under) > 1:
            return None
        (axis, step), (tap, spacing) = along[0], under[0]
        unit = math.gcd(step, spacing) * (1 if step > 0 else -1)
        slide = PlaneWindowDim(axis, outer[axis], tap, inner[tap], step // unit, spacing // unit)
        if slide.stride > MAX_STRIDE:
            return None
        if found.setdefault(axis, slide) != slide:
            return None
    taps = [s.inner for s in found.values()]
    return found if sorted(inner) == sorted(t for t in taps if t is not None) else None


def _sums_of_axes(expr: Expr) -> Iterator[Affine]:
    """Yield the largest affine subexpressions."""
    if not isinstance(expr, Load) and (known := affine(expr)) is not None:
        yield known
        return
    for child in children(expr):
        yield from _sums_of_axes(child)


def _windowed_sum(number: int, statement: TensorExpr, slides: tuple[PlaneWindowDim, ...]) -> WindowedSum | None:
    planes: dict[Expr, Plane] = {}
    moving = {s.axis for s in slides} | {s.inner for s in slides if s.inner is not None}

    def staged(expr: Expr) -> Expr:
        if not axes_of(expr) & moving:
            return expr
        value = _placed(expr, slides)
        if value is not None:
            name = f".plane{number}_{len(planes)}"
            plane = planes.setdefault(expr, _plane(name, value, slides))
            return Load(plane.name, (), plane.dtype)
        if isinstance(expr, Load | Select) or (isinstance(expr, Op) and expr.kind in (OpKind.LAND, OpKind.LOR)):
            return expr
        return with_children(expr, tuple(staged(child) for child in children(expr)))

    body = staged(statement.body)
    still = {s.axis for s in slides} & axes_of(body)
    if still or not planes or any(p.dtype.is_float and p.dtype.bits > DType.FLOAT64.bits for p in planes.values()):
        return None
    return WindowedSum(statement, slides, tuple(planes.values()), body)


def _placed(expr: Expr, slides: tuple[PlaneWindowDim, ...]) -> Expr | None:
    """Return the expression over input positions; None where it depends on outputs or taps otherwise."""
    known = None if isinstance(expr, Load) else affine(expr)
    if known is not None:
        return _placed_sum(expr, known, slides)
    parts = [_placed(child, slides) for child in children(expr)]
    whole = tuple(p for p in parts if p is not None)
    if len(whole) != len(parts):
        return None
    return with_children(expr, whole) if whole else expr


def _placed_sum(expr: Expr, known: Affine, slides: tuple[PlaneWindowDim, ...]) -> Expr | None:
    rest = dict(known.coeffs)
    moved: Expr = num(0)
    offset = known.offset
    for slide in slides:
        step = rest.pop(slide.axis, 0)
        spacing = rest.pop(slide.inner, 0) if slide.inner is not None else 0
        times, left = divmod(step, slide.stride)
        if left or spacing != times * slide.dilation:
            return None
        moved = add(moved, mul(ref(slide.position_name), num(times)))
        offset -= times * slide.offset
    if moved == num(0):
        return expr
    for name, c in rest.items():
        moved = add(moved, mul(ref(name), num(c)))
    moved = add(moved, num(offset))
    return moved if expr.dtype is DType.INT32 else Cast(moved, expr.dtype)


def _plane(name: str, value: Expr, slides: tuple[PlaneWindowDim, ...]) -> Plane:
    """Return the plane with a box-shaped guard replaced by the box that it admits."""
    dtype = value.dtype.compute
    whole = tuple((0, s.input_extent(s.extent)) for s in slides)
    zero = Const(0.0 if dtype.is_float else 0, dtype)
    conds = {node.cond for node in iter_subexpressions(value) if isinstance(node, Select)}
    if len(conds) == 1:
        box = _box(conds.pop(), {s.position_name: i for i, s in enumerate(slides)}, whole)
        margin = _constant(rewrite(value, lambda e: e.otherwise if isinstance(e, Select) else e), dtype)
        if box is not None and margin is not None:
            inside = rewrite(value, lambda e: e.then if isinstance(e, Select) else e)
            return Plane(name, dtype, inside, margin, box)
    return Plane(name, dtype, value, zero, whole)


def _constant(expr: Expr, dtype: DType) -> Const | None:
    """Return a margin that is a constant, or zero divided or multiplied by one; None for any other."""
    match expr:
        case Const(value=value):
            return Const(float(value) if dtype.is_float else int(value), dtype)
        case Cast(arg=Const(value=value)) if value == 0:
            return _constant(expr.arg, dtype)
        case Cast(arg=arg, dtype=target) if target.is_float and arg.dtype.is_float:
            return _constant(arg, dtype)
        case Op(kind=OpKind.DIV, args=(Const(value=a), Const(value=b))) if a == 0 and b > 0:
            return _constant(expr.args[0], dtype)
        case Op(kind=OpKind.MUL, args=(Const(value=a), Const(value=b))) if a == 0 and b > 0 and math.isfinite(b):
            return _constant(expr.args[0], dtype)
        case _:
            return None


Box = tuple[tuple[int, int], ...]


def _box(cond: Expr, dims: Mapping[str, int], whole: Box) -> Box | None:
    """Return the box in which bounds on single places all hold; None for another condition."""
    match cond:
        case Op(kind=OpKind.LAND, args=(a, b)):
            one, other = _box(a, dims, whole), _box(b, dims, whole)
            if one is None or other is None:
                return None
            both = [(max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(one, other, strict=True)]
            return tuple((low, max(low, high)) for low, high in both)
        case Op(kind=OpKind.GT, args=(a, b)):
            return _below(b, a, 0, dims, whole)
        case Op(kind=OpKind.GE, args=(a, b)):
            return _below(b, a, 1, dims, whole)
        case Op(kind=OpKind.LT, args=(a, b)):
            return _below(a, b, 0, dims, whole)
        case Op(kind=OpKind.LE, args=(a, b)):
            return _below(a, b, 1, dims, whole)
        case _:
            return None


def _below(a: Expr, b: Expr, more: int, dims: Mapping[str, int], whole: Box) -> Box | None:
    """Return the box in which a < b + more."""
    left, right = affine(a), affine(b)
    if left is None or right is None or a.dtype.is_float:
        return None
    coeffs = dict(right.coeffs)
    for name, c in left.coeffs:
        coeffs[name] = coeffs.get(name, 0) - c
    known = [(name, c) for name, c in coeffs.items() if c]
    slack = right.offset - left.offset + more  # sum of the terms + slack > 0
    if len(known) != 1 or known[0][0] not in dims:
        return None
    (name, c), box = known[0], list(whole)
    low, high = box[dims[name]]
    if c > 0:  # place > -slack / c
        low = max(low, -slack // c + 1)
    else:  # place < slack / -c
        high = min(high, -(-slack // -c))
    box[dims[name]] = (low, max(low, high))
    return tuple(box)
