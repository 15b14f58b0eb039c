"""Kernel groups written by hand, for tests of construction and the performance model."""

from __future__ import annotations

from dataclasses import replace

from roller_svc.ir.affine import Dim
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Const
from roller_svc.ir.group import AxisRole, GroupKind, KernelGroup, TileAccess, TileAxis, TileSpace
from roller_svc.ir.program import Axis, AxisKind, Combine, StatementKind, TensorExpr, TensorType
from roller_svc.perf.cpu_costs import CpuCosts
from roller_svc.perf.model import Model

F32 = DType.FLOAT32
COSTS = CpuCosts()


def with_costs(model: Model, costs: CpuCosts) -> Model:
    """The model of the same group with other constants of CPUs. No prepared fact depends on them."""
    workload = model.workload
    return replace(model, workload=replace(workload, machine=replace(workload.machine, costs=costs)))


def spatial(name: str, extent: int) -> Axis:
    return Axis(name, extent, AxisKind.SPATIAL)


def reduced(name: str, extent: int) -> Axis:
    return Axis(name, extent, AxisKind.REDUCE)


def walk(tensor: str, *dims: tuple[int, dict[str, int]], operand: str = "", is_output: bool = False) -> TileAccess:
    """An access from (size, {axis: coefficient}) for each dimension."""
    return TileAccess(tensor, F32, tuple(Dim(size, tuple(sorted(coeffs.items()))) for size, coeffs in dims), is_output, operand)


def group_of(kind: GroupKind, space: TileSpace) -> KernelGroup:
    """A group around a space; its one statement has the right axes and a body that tests do not look at."""
    axes = tuple(a for axis in space.axes for a in axis.members)
    out = next(a for a in space.accesses if a.is_output)
    type_ = TensorType(out.dtype, tuple(d.size for d in out.dims))
    reduces = any(a.kind is AxisKind.REDUCE for a in axes)
    statement = TensorExpr(
        output=out.tensor,
        name=out.tensor,
        type=type_,
        axes=axes,
        index=(),
        body=Const(1.0, F32),
        kind=StatementKind.REDUCE if reduces else StatementKind.MAP,
        combine=Combine.SUM if reduces else None,
    )
    outer = tuple(a for a in axes if a.kind is AxisKind.SPATIAL)
    return KernelGroup(out.tensor, kind, (statement,), outer, frozenset(), ((out.tensor, statement.type),), (), space)


def matmul(m: int, n: int, k: int, batch: int = 1, dtype: DType = F32) -> KernelGroup:
    """C[b, m, n] += A[b, m, k] * B[b, k, n]."""
    axes = (
        TileAxis("B", AxisRole.BATCH, (spatial("B", batch),)),
        TileAxis("M", AxisRole.M, (spatial("M", m),)),
        TileAxis("N", AxisRole.N, (spatial("N", n),)),
        TileAxis("K", AxisRole.K, (reduced("K", k),)),
    )
    accesses = (
        walk("a", (batch, {"B": 1}), (m, {"M": 1}), (k, {"K": 1}), operand="a"),
        walk("b", (batch, {"B": 1}), (k, {"K": 1}), (n, {"N": 1}), operand="b"),
        walk("c", (batch, {"B": 1}), (m, {"M": 1}), (n, {"N": 1}), is_output=True),
    )
    space = TileSpace(axes, accesses, 2 * batch * m * n * k, dtype, "N", instructions=2 * batch * m * n * k)
    return group_of(GroupKind.CONTRACTION, space)


def conv(n: int, c: int, hw: int, f: int, kernel: int, stride: int = 1) -> KernelGroup:
    """Y[f, (n ho wo)] += W[f, (c kh kw)] * X[n, c, ho*s+kh, wo*s+kw], without padding."""
    out = (hw - kernel) // stride + 1
    pixels = (spatial("N", n), spatial("HO", out), spatial("WO", out))
    window = (reduced("C", c), reduced("KH", kernel), reduced("KW", kernel))
    axes = (
        TileAxis("F", AxisRole.M, (spatial("F", f),)),
        TileAxis("N_HO_WO", AxisRole.N, pixels),
        TileAxis("C_KH_KW", AxisRole.K, window),
    )
    accesses = (
        walk("w", (f, {"F": 1}), (c, {"C": 1}), (kernel, {"KH": 1}), (kernel, {"KW": 1}), operand="a"),
        walk(
            "x", (n, {"N": 1}), (c, {"C": 1}), (hw, {"HO": stride, "KH": 1}), (hw, {"WO": stride, "KW": 1}), operand="b"
        ),
        walk("y", (n, {"N": 1}), (f, {"F": 1}), (out, {"HO": 1}), (out, {"WO": 1}), is_output=True),
    )  # fmt: skip
    flops = 2 * f * n * out**2 * c * kernel**2
    return group_of(GroupKind.CONTRACTION, TileSpace(axes, accesses, flops, F32, "N_HO_WO", instructions=flops))


def relu(*extents: int) -> KernelGroup:
    """One map over axes A0, A1, ..."""
    axes = tuple(TileAxis(f"A{i}", AxisRole.OUTER, (spatial(f"A{i}", e),)) for i, e in enumerate(extents))
    dims = tuple((e, {f"A{i}": 1}) for i, e in enumerate(extents))
    points = 1
    for e in extents:
        points *= e
    accesses = (walk("x", *dims), walk("y", *dims, is_output=True))
    along = axes[-1].name if axes else ""
    return group_of(GroupKind.NEST, TileSpace(axes, accesses, points, F32, along, instructions=points))


def row_sum(rows: int, columns: int) -> KernelGroup:
    """y[r] += x[r, c]."""
    axes = (
        TileAxis("R", AxisRole.OUTER, (spatial("R", rows),)),
        TileAxis("C", AxisRole.INNER, (reduced("C", columns),)),
    )
    accesses = (walk("x", (rows, {"R": 1}), (columns, {"C": 1})), walk("y", (rows, {"R": 1}), is_output=True))
    return group_of(GroupKind.NEST, TileSpace(axes, accesses, rows * columns, F32, "C", instructions=rows * columns))


def column_sum(rows: int, columns: int) -> KernelGroup:
    """y[c] += x[r, c]."""
    axes = (
        TileAxis("C", AxisRole.OUTER, (spatial("C", columns),)),
        TileAxis("R", AxisRole.INNER, (reduced("R", rows),)),
    )
    accesses = (walk("x", (rows, {"R": 1}), (columns, {"C": 1})), walk("y", (columns, {"C": 1}), is_output=True))
    return group_of(GroupKind.NEST, TileSpace(axes, accesses, rows * columns, F32, "C", instructions=rows * columns))


def depthwise(n: int, c: int, hw: int, kernel: int, stride: int = 1) -> KernelGroup:
    """Y[n, c, ho, wo] += X[n, c, ho*s+kh, wo*s+kw] * W[c, kh, kw]."""
    out = (hw - kernel) // stride + 1
    sizes = {"N": n, "C": c, "HO": out, "WO": out}
    axes = (
        *(TileAxis(name, AxisRole.OUTER, (spatial(name, e),)) for name, e in sizes.items()),
        TileAxis("KH_KW", AxisRole.INNER, (reduced("KH", kernel), reduced("KW", kernel))),
    )
    accesses = (
        walk("x", (n, {"N": 1}), (c, {"C": 1}), (hw, {"HO": stride, "KH": 1}), (hw, {"WO": stride, "KW": 1})),
        walk("w", (c, {"C": 1}), (kernel, {"KH": 1}), (kernel, {"KW": 1})),
        walk("y", *((e, {name: 1}) for name, e in sizes.items()), is_output=True),
    )
    flops = 2 * n * c * out**2 * kernel**2
    return group_of(GroupKind.NEST, TileSpace(axes, accesses, flops, F32, "WO", instructions=flops))


def scatter(points: int, size: int) -> KernelGroup:
    """y[i[p]] = x[p]: a place that comes from data."""
    axes = (TileAxis("P", AxisRole.OUTER, (spatial("P", points),)),)
    target = TileAccess("y", F32, (Dim(size, (("P", 1),), is_affine=False),), is_output=True)
    space = TileSpace(axes, (walk("x", (points, {"P": 1})), walk("i", (points, {"P": 1})), target), 0, F32, "P")
    return group_of(GroupKind.SCATTER, space)
