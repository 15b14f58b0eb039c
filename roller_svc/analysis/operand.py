"""Operands of a contraction as matrix units stage them: type, major axis, vector width."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from roller_svc.analysis.linear import is_uniform
from roller_svc.ir.affine import Affine, affine
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Cast, Const, Expr, Load, Op, OpKind, Select, axes_of, loads_of
from roller_svc.ir.group import AxisRole, GroupKind, KernelGroup, TileAxis
from roller_svc.ir.hardware import ComputeUnit, UnitKind
from roller_svc.ir.program import TensorType

STAGED_KINDS = (UnitKind.MMA, UnitKind.MFMA, UnitKind.WGMMA)  # matrix units that are fed from shared memory
MAX_VECTOR_WIDTH = 16  # elements: 16 bytes, the widest copy, of the narrowest type

_FLOAT8 = frozenset({DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2})
_BYTES = frozenset({DType.INT8, DType.UINT8, DType.BOOL})
_SHORT = frozenset({DType.INT16, DType.UINT16})
# type → other types that it can represent exactly (float16 has more digits and exponents than both float8)
_REPRESENTABLE: Mapping[DType, frozenset[DType]] = {
    DType.FLOAT64: frozenset(DType) - {DType.INT64, DType.UINT64},
    DType.FLOAT32: _FLOAT8 | _BYTES | _SHORT | {DType.FLOAT16, DType.BFLOAT16},
    DType.FLOAT16: _FLOAT8 | _BYTES,
    DType.BFLOAT16: _FLOAT8 | _BYTES,
    DType.INT64: _BYTES | _SHORT | {DType.INT32, DType.UINT32},
    DType.INT32: _BYTES | _SHORT,
    DType.UINT32: frozenset({DType.UINT8, DType.UINT16, DType.BOOL}),
    DType.INT16: _BYTES,
    DType.UINT16: frozenset({DType.UINT8, DType.BOOL}),
    DType.UINT8: frozenset({DType.BOOL}),
}


@dataclass(frozen=True, slots=True)
class Operand:
    """An operand of a contraction.

    `dtype` is the narrowest type that can represent every value. Results of arithmetic of type float16 or bfloat16
    count as rounded to it, as casts and outputs are. `vector_width` elements, from a multiple of it on, are contiguous,
    aligned and under one guard, so that one access moves them. It is a power of two; 1 if nothing is known. An operand
    that is gathered, at positions from data, counts as computed, but has a guard and a vector width.
    """

    expr: Expr
    dtype: DType
    source: Load | None  # the operand where `guard` holds, elsewhere it is 0; None: the operand is computed
    guard: Expr | None  # None: always
    memory_dtype: DType  # of the source
    k_major: bool  # contiguous along k, else along m or n
    vector_width: int

    @property
    def gathered(self) -> Load | None:
        """The operand if it is loaded in vectors at positions from data, which are checked."""
        return _guarded_load(self.expr)[0] if self.source is None and self.vector_width > 1 else None

    @property
    def copied(self) -> Load | None:
        """The load that copies of whole vectors take the place of."""
        return self.gathered if self.source is None else self.source


def operands(group: KernelGroup) -> tuple[Operand, Operand]:
    """Return operands A, along M, and B, along N, of a contraction."""
    if group.kind is not GroupKind.CONTRACTION or group.operands is None:
        raise ValueError(f"{group.name} is not a contraction")
    (m,), (n,), (k,) = (group.space.role(role) for role in (AxisRole.M, AxisRole.N, AxisRole.K))
    types, factors = dict(group.inputs), (group.operands.a, group.operands.b)
    a, b = factors[::-1] if group.space.transposed else factors
    return operand_along(a, m, k, types), operand_along(b, n, k, types)


def operand_b2(group: KernelGroup) -> Operand | None:
    """Return B of the second contraction of a dual GEMM, or None."""
    if group.operands is None or group.operands.b2 is None:
        return None
    (n,), (k,) = (group.space.role(role) for role in (AxisRole.N, AxisRole.K))
    return operand_along(group.operands.b2, n, k, dict(group.inputs))


def all_operands(group: KernelGroup) -> tuple[Operand, ...]:
    """Return operands A and B of a contraction, and the second B of a dual GEMM."""
    b2 = operand_b2(group)
    return operands(group) if b2 is None else (*operands(group), b2)


def have_same_layout(one: Operand, other: Operand) -> bool:
    """Return whether tiles of both are staged in the same way."""

    def layout(operand: Operand) -> tuple[object, ...]:
        computed = operand.source is None
        return operand.dtype, operand.memory_dtype, computed, operand.guard, operand.k_major, operand.vector_width

    return layout(one) == layout(other)


def staged_dtype(unit: ComputeUnit, operand: Operand) -> DType:
    """Return the type in which the unit gets the operand. 8-bit types are kept: NVIDIA's instructions take any two."""
    if unit.in_dtype.bits == 8 and unit.kind is not UnitKind.MFMA:
        return DType.UINT8 if operand.dtype is DType.BOOL else operand.dtype
    return unit.in_dtype


def operands_unsupported_reason(
    unit: ComputeUnit, accumulator: DType, factors: tuple[Operand, Operand], *, allow_tf32: bool
) -> str:
    """Return why the unit cannot compute a contraction of these operands with this accumulator, or ""."""
    first, second = factors
    return dtypes_unsupported_reason(unit, accumulator, (first.dtype, second.dtype), allow_tf32=allow_tf32)


def dtypes_unsupported_reason(unit: ComputeUnit, accumulator: DType, factors: tuple[DType, DType], *, allow_tf32: bool) -> str:
    """Return why the unit cannot sum products of two types with this accumulator, or ""."""
    if unit.kind not in STAGED_KINDS:
        return f"no rules for units of kind {unit.kind.value}"
    if accumulator is not unit.acc_dtype:
        return f"sums in {accumulator.value}, the unit in {unit.acc_dtype.value}"
    for name, dtype in zip("ab", factors, strict=True):
        if not _supports(unit, dtype):
            return f"operand {name} is {dtype.value}, the unit takes {unit.in_dtype.value}"
        if dtype is unit.in_dtype is DType.FLOAT32 and unit.kind is not UnitKind.MFMA and not allow_tf32:
            return f"operand {name} is float32, and tf32 is not allowed"
    return ""


def can_represent_all(dtype: DType, other: DType) -> bool:
    """Return whether a type can represent every value of the other."""
    return other is dtype or other in _REPRESENTABLE.get(dtype, frozenset())


def _supports(unit: ComputeUnit, operand: DType) -> bool:
    """Return whether the unit takes operands of a type. MFMA takes signed bytes; truth values fit any byte."""
    supported = unit.in_dtype
    if supported in (DType.INT8, DType.UINT8):
        return operand in (_BYTES - {DType.UINT8} if unit.kind is UnitKind.MFMA else _BYTES)
    if supported in _FLOAT8:
        return operand in _FLOAT8
    return operand is supported or operand in _REPRESENTABLE.get(supported, frozenset())


def operand_along(factor: Expr, axis: TileAxis, k: TileAxis, types: Mapping[str, TensorType]) -> Operand:
    dtype = value_dtype(factor) or factor.dtype
    source, guard = _guarded_load(factor)
    k_major = _is_k_major(factor if source is None else source, axis, k, types)
    if source is None:
        return Operand(factor, dtype, None, None, dtype, k_major, 1)
    type_ = types[source.tensor]
    if any(source.bounds_checked):
        width = _gathered_width(source, guard, k if k_major else axis, type_)
        return Operand(factor, dtype, None, guard if width > 1 else None, dtype, k_major, width)
    width = aligned_vector_width(source, guard, k if k_major else axis, type_)
    return Operand(factor, dtype, source, guard, type_.dtype, k_major, width)


def value_dtype(expr: Expr) -> DType | None:
    """Return the narrowest type that can represent the expression; None for 0, which every type can."""
    match expr:
        case Const(value=0):
            return None
        case Select(then=then, otherwise=otherwise, dtype=dtype):
            a, b = value_dtype(then), value_dtype(otherwise)
            if a is None or b is None or a is b:
                return a or b
            return dtype
        case Cast(arg=arg, dtype=dtype):
            inner = value_dtype(arg)
            return inner if inner is None or inner is dtype or inner in _REPRESENTABLE.get(dtype, ()) else dtype
        case Op(dtype=dtype):
            return dtype.compute if dtype in _FLOAT8 else dtype  # rounding results to float8 would lose too much
        case _:
            return expr.dtype


def _guarded_load(expr: Expr) -> tuple[Load | None, Expr | None]:
    """Return (load, guard) if the expression is the load where the guard holds and 0 elsewhere."""
    match expr:
        case Load():
            return expr, None
        case Cast(arg=arg, dtype=dtype):
            value = value_dtype(arg)
            exact = value is None or value is dtype or value in _REPRESENTABLE.get(dtype, ())
            return _guarded_load(arg) if exact else (None, None)
        case Select(cond=cond, then=then, otherwise=otherwise):
            load, guard = _guarded_load(then)
            if load is None or value_dtype(otherwise) is not None or loads_of(cond):
                return None, None
            return load, cond if guard is None else Op(OpKind.LAND, (cond, guard), DType.INT8)
        case _:
            return None, None


def _is_k_major(factor: Expr, axis: TileAxis, k: TileAxis, types: Mapping[str, TensorType]) -> bool:
    """Return whether memory is contiguous along k rather than along the other axis: that of the largest tensor.

    An index that data decides along both axes, as of a table, says nothing. The loads inside it have an order.
    """
    k_member, member = k.members[-1].name, axis.members[-1].name
    for load in sorted(loads_of(factor), key=lambda load: -types[load.tensor].bytes):
        for index in reversed(load.index):  # dimensions of one element have no axis
            along_k, along = _index_strides(index, k_member, member)
            if along_k and along and loads_of(index):
                continue
            if along_k or along:
                return along == 0 or (along_k != 0 and along_k < along)
    return False


def _index_strides(index: Expr, *members: str) -> tuple[int, ...]:
    """Return the strides of an index along axes; 1 if it is not affine (packed words: `k // 8`)."""
    form = affine(index)
    if form is None:
        names = axes_of(index)
        return tuple([int(member in names) for member in members])
    return tuple([abs(form.coeff(member)) for member in members])


def aligned_vector_width(load: Load, guard: Expr | None, lead: TileAxis, type_: TensorType) -> int:
    """Return the contiguous, aligned elements along the axis under one guard, a power of two."""
    address = _address(load.index, type_.shape)
    if address is None:
        return 1
    extent, merged = _contiguous_members(address, guard, lead)
    invariant = [c for name, c in address.coeffs if name not in merged] + [address.offset]
    width = MAX_VECTOR_WIDTH if merged else 1
    while width > 1:
        aligned = extent % width == 0 and not any(c % width for c in invariant)
        if aligned and (guard is None or is_uniform(guard, lead.members[-1].name, width)):
            return width
        width //= 2
    return 1


def _gathered_width(load: Load, guard: Expr | None, lead: TileAxis, type_: TensorType) -> int:
    """Return the contiguous, aligned elements of a gather: rows at positions from data; 1 if the row is gathered."""
    member = lead.members[-1].name
    checked = (index for index, is_checked in zip(load.index, load.bounds_checked, strict=True) if is_checked)
    return 1 if any(member in axes_of(index) for index in checked) else aligned_vector_width(load, guard, lead, type_)


def _address(index: tuple[Expr, ...], shape: tuple[int, ...]) -> Affine | None:
    """Return the offset in elements. A non-affine index counts as a separate term for each of its axes.

    None if such an axis also has an affine term.
    """
    coeffs: dict[str, int] = {}
    offset = 0
    for d, place in enumerate(index):
        stride = math.prod(shape[d + 1 :])
        known = affine(place)
        if known is None:
            coeffs |= {f"{name} in {d}": stride for name in sorted(axes_of(place))}
            continue
        offset += known.offset * stride
        for name, c in known.coeffs:
            coeffs[name] = coeffs.get(name, 0) + c * stride
    opaque = {name.split(" in ")[0] for name in coeffs if " in " in name}
    return None if opaque & coeffs.keys() else Affine(tuple(coeffs.items()), offset)


def _contiguous_members(address: Affine, guard: Expr | None, lead: TileAxis) -> tuple[int, frozenset[str]]:
    """Return (extent, names) of the innermost members that are contiguous as one axis."""
    extent, merged = 1, frozenset[str]()
    for member in reversed(lead.members):
        if address.coeff(member.name) != extent or (merged and guard is not None and member.name in axes_of(guard)):
            break
        extent, merged = extent * member.extent, merged | {member.name}
        if guard is not None and member.name in axes_of(guard):
            break  # the guard may change where this member wraps
    return extent, merged
