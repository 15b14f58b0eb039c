"""Loop nest → product of few rows with a matrix that is contiguous along k, as a matrix unit multiplies it.

The matrix has float16 or bfloat16, or values that these types hold exactly: float8, small integers, fields of words.
Factors that are equal along a step of k multiply the sums of the step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from roller_svc.analysis.operand import aligned_vector_width
from roller_svc.analysis.packed_sums import packed_sum, product_factors
from roller_svc.fusion.space import nest_space
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import AxisRef, Cast, Const, Expr, Load, Op, OpKind, Select, axes_of, loads_of
from roller_svc.ir.group import AxisRole, GroupKind, KernelGroup, TileAxis
from roller_svc.ir.program import Axis, Combine, StatementKind, TensorExpr, TensorType

MAX_PRODUCTS = 2  # of one x: a lane of mma.sync has a row of each
MAX_ROWS = 8  # columns of a fragment of mma.sync, which the rows of the product are
LANES_OF_ROW = 4  # of a fragment's row, each with a chunk (PTX ISA, "Matrix Fragments for mma.m16n8k16")
CHUNKS = (32, 16, 8)  # elements
CHUNK_BYTES = 16  # the widest load
COPY_BYTES = 16  # the widest cp.async
HALVES = (DType.FLOAT16, DType.BFLOAT16)


@dataclass(frozen=True, slots=True)
class StreamedProduct:
    """y[m, n] += x[m, k] * weight[n, k] * scales, whose matrix is streamed, perhaps beside that of a second product.

    `chunk` elements of the matrix's row follow each other in a lane. A step of k has the chunks of the lanes of a row.
    """

    n: Axis
    m: tuple[Axis, ...]
    k: Axis
    dtype: DType  # of both operands in registers
    x: Expr
    weight: Expr
    streamed: Load  # the elements in memory that hold the weights
    chunk: int
    x_loads: float  # instructions that load a lane's chunk of x
    per_element: int  # weights of an element in memory
    slots: float  # instructions that unpack one weight
    scales: tuple[Expr, ...]  # equal along a step
    row_scales: tuple[Expr, ...]  # equal along k
    second: StreamedProduct | None = None  # of the same x by another matrix of the same kind

    @property
    def all(self) -> tuple[StreamedProduct, ...]:
        """The product, and the second one."""
        return (self,) if self.second is None else (self, self.second)

    @property
    def rows(self) -> int:
        """Rows of x."""
        return math.prod(axis.extent for axis in self.m)

    @property
    def step(self) -> int:
        """Points of k that the lanes of a row have together."""
        return self.chunk * LANES_OF_ROW

    @property
    def chunk_bytes(self) -> int:
        """Bytes in memory of a lane's chunk."""
        return self.chunk // self.per_element * self.streamed.dtype.bytes


def find_streamed_product(group: KernelGroup) -> StreamedProduct | None:
    """Return the product of few rows that a nest, or a contraction seen as one, computes before maps; None for others."""
    if group.kind not in (GroupKind.NEST, GroupKind.CONTRACTION):
        return None
    sums, others = order_statements(group)
    names, (inner, *more) = {a.name for a in group.outer}, group.space.role(AxisRole.INNER) or (None,)
    if inner is None or more or len(inner.members) != 1 or any(a.name not in names for s in others for a in s.axes):
        return None
    is_first = group.statements[0].kind is StatementKind.REDUCE
    if not is_first or len(sums) > MAX_PRODUCTS or any(s.kind is not StatementKind.MAP for s in others):
        return None
    if any(s.combine is not Combine.SUM or s.accumulator is not DType.FLOAT32 for s in sums):
        return None
    (k,), types = inner.members, dict(group.inputs)
    found = (_products(sums, k, group.outer, types, chunk) for chunk in CHUNKS if k.extent % (chunk * LANES_OF_ROW) == 0)
    return next((product for product in found if product is not None), None)


def order_statements(group: KernelGroup) -> tuple[tuple[TensorExpr, ...], tuple[TensorExpr, ...]]:
    """Return the sums of a group, and its other statements. A second sum reads no result, so it may come before these."""
    sums = tuple(statement for statement in group.statements if statement.kind is StatementKind.REDUCE)
    return sums, tuple(statement for statement in group.statements if statement.kind is not StatementKind.REDUCE)


def _products(
    sums: Sequence[TensorExpr], k: Axis, outer: tuple[Axis, ...], types: dict[str, TensorType], chunk: int
) -> StreamedProduct | None:
    """Return the product of a sum with chunks of that size, and the one of a second sum; None if they do not fit."""
    first, *more = (_product(statement, k, outer, types, chunk) for statement in sums)
    if first is None or not more:
        return first
    (second,) = more
    if second is None or _kind_of(second) != _kind_of(first):
        return None
    reads_results = any(load.tensor not in types for statement in sums for load in loads_of(statement.body))
    return None if reads_results else replace(first, second=second)


def _kind_of(product: StreamedProduct) -> tuple[object, ...]:
    """Return what two products whose rows share pages have in common."""
    layout = product.streamed.dtype, product.chunk, product.per_element, product.slots
    return (*layout, len(product.scales), product.n, product.m, product.k, product.dtype, product.x)


def streamed_view(group: KernelGroup) -> KernelGroup | None:
    """Return a contraction of few rows as a nest whose matrix streams; None for other contractions."""
    if group.kind is not GroupKind.CONTRACTION or min(_extent(group, AxisRole.M), _extent(group, AxisRole.N)) > MAX_ROWS:
        return None
    types = dict(group.inputs) | dict(group.stored)
    view = replace(group, space=nest_space(group.statements, group.outer, types))
    return view if find_streamed_product(view) is not None else None


def _extent(group: KernelGroup, role: AxisRole) -> int:
    return math.prod(axis.extent for axis in group.space.role(role))


def _product(
    statement: TensorExpr, k: Axis, outer: tuple[Axis, ...], types: dict[str, TensorType], chunk: int
) -> StreamedProduct | None:
    """Return the product with chunks of that size, or None."""
    packed, step = packed_sum(statement, k.name, chunk), chunk * LANES_OF_ROW
    if packed is None:
        return _plain_product(statement, k, outer, types, chunk)
    shared = packed.shared_factors(k.name, step)
    others = [factor for factor in packed.factors if factor not in shared]
    if len(others) != 1:
        return None
    x = _without_widening(others[0])
    if x.dtype not in packed.exact_dtypes:
        return None
    scales = tuple(f for f in shared if k.name in axes_of(f))
    row_scales = tuple(f for f in shared if k.name not in axes_of(f))
    weight = _without_widening(packed.weight)
    weight = weight if weight.dtype is x.dtype else Cast(weight, x.dtype, implicit=True)
    return _checked(x, weight, chunk, k, outer, types, (packed.slots + packed.zero_slots, scales, row_scales))


def _plain_product(
    statement: TensorExpr, k: Axis, outer: tuple[Axis, ...], types: dict[str, TensorType], chunk: int
) -> StreamedProduct | None:
    factors = [_without_widening(factor) for factor in product_factors(statement.body)]
    if len(factors) != 2 or factors[0].dtype is not factors[1].dtype or factors[0].dtype not in HALVES:
        return None
    for x, weight in (factors, factors[::-1]):
        if isinstance(weight, Load) and axes_of(x) < axes_of(weight) | {a.name for a in outer}:
            found = _checked(x, weight, chunk, k, outer, types, (0.0, (), ()))
            if found is not None:
                return found
    return None


def _checked(
    x: Expr,
    weight: Expr,
    chunk: int,
    k: Axis,
    outer: tuple[Axis, ...],
    types: dict[str, TensorType],
    rest: tuple[float, tuple[Expr, ...], tuple[Expr, ...]],
) -> StreamedProduct | None:
    """Return the product if the matrix has one axis that x lacks, whole aligned rows, and x has few rows."""
    loads = [load for load in dict.fromkeys(loads_of(weight)) if load.tensor in types]
    streamed = max(loads, key=lambda load: types[load.tensor].bytes, default=None)
    if streamed is None or any(streamed.bounds_checked) or _is_gathered(streamed):
        return None
    if x.dtype not in HALVES or _is_computed(x):
        return None
    n_axes = [axis for axis in outer if axis.name in axes_of(weight)]
    m_axes = tuple(axis for axis in outer if axis.name not in axes_of(weight))
    slots, scales, row_scales = rest
    per_element = _weights_of_element(streamed, k)
    is_row = per_element is not None and k.name not in {name for i in streamed.index[:-1] for name in axes_of(i)}
    if len(n_axes) != 1 or not is_row or per_element is None or n_axes[0].name in axes_of(x) or k.name not in axes_of(x):
        return None
    x_loads = _count_loads(x, None, TileAxis(k.name, AxisRole.INNER, (k,)), chunk, types)
    product = StreamedProduct(
        n_axes[0], m_axes, k, x.dtype, x, weight, streamed, chunk, x_loads, per_element, slots, scales, row_scales
    )
    row_bytes = types[streamed.tensor].shape[-1] * streamed.dtype.bytes
    is_aligned = row_bytes % COPY_BYTES == 0 and (k.extent // per_element * streamed.dtype.bytes) % COPY_BYTES == 0
    is_chunk = chunk % per_element == 0 and 4 <= product.chunk_bytes <= CHUNK_BYTES
    return product if is_aligned and is_chunk and product.rows <= MAX_ROWS else None


def _is_computed(value: Expr) -> bool:
    """Return whether arithmetic makes a value of x: its result is float32, which 16 bits would round."""
    match value:
        case Cast(arg=arg):
            return _is_computed(arg)
        case Select(then=then, otherwise=otherwise):
            return _is_computed(then) or _is_computed(otherwise)
        case _:
            return isinstance(value, Op)


def _count_loads(value: Expr, guard: Expr | None, k: TileAxis, chunk: int, types: dict[str, TensorType]) -> float:
    """Return the instructions that load a chunk of x: fewer, the more elements are contiguous, aligned and under one guard."""
    match value:
        case Cast(arg=arg):
            return _count_loads(arg, guard, k, chunk, types)
        case Select(cond=cond, then=then, otherwise=otherwise):
            guard = cond if guard is None else Op(OpKind.LAND, (cond, guard), DType.INT8)
            return sum(_count_loads(arm, guard, k, chunk, types) for arm in (then, otherwise))
        case Load(index=index, dtype=dtype):
            if k.members[0].name not in axes_of(value):
                return 0.0
            width = aligned_vector_width(value, guard, k, types[value.tensor])
            inner = sum(_count_loads(load, guard, k, chunk, types) for place in index for load in loads_of(place))
            return chunk / min(width, chunk, COPY_BYTES // dtype.bytes) + inner
        case _:
            return 0.0


def _is_gathered(load: Load) -> bool:
    """Return whether data choose the element."""
    return any(map(loads_of, load.index))


def _weights_of_element(load: Load, k: Axis) -> int | None:
    """Return the weights in an element of memory, where its row begins with the first point of k; None elsewhere."""
    match load.index[-1] if load.index else None:
        case AxisRef(name=name) if name == k.name:
            return 1
        case Op(kind=OpKind.FLOORDIV, args=(AxisRef(name=name), Const(value=int(by)))) if name == k.name and by > 0:
            return by
        case _:
            return None


def _without_widening(factor: Expr) -> Expr:
    """Return the 16-bit float, float8 or integer of which a factor is a conversion."""
    while isinstance(factor, Cast) and factor.dtype.is_float and factor.dtype not in HALVES:
        factor = factor.arg
    return factor
