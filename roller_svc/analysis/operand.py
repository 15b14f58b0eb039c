"""Factor of a contraction → how a matrix unit's tiles of it can be filled: type, direction, what moves as one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from roller_svc.ir.affine import Affine, affine
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Cast, Const, Expr, Load, Op, OpKind, Select, axes_of, loads_of
from roller_svc.ir.group import AxisRole, GroupKind, KernelGroup, TileAxis
from roller_svc.ir.hardware import ComputeUnit, UnitKind
from roller_svc.ir.program import TensorType

STAGED_KINDS = (UnitKind.MMA, UnitKind.MFMA, UnitKind.WGMMA)  # matrix units that are fed from shared memory
MAX_VECTOR_WIDTH = 16  # elements: 16 bytes of the narrowest type, the widest copy there is

_FLOAT8 = frozenset({DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2})
_BYTES = frozenset({DType.INT8, DType.UINT8, DType.BOOL})
_SHORT = frozenset({DType.INT16, DType.UINT16})
# type → the other types all of whose values it has (both float8 have fewer digits and exponents than float16)
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
    """`dtype`: the narrowest type that has every value of the factor; results of arithmetic that the program gives
    type float16 or bfloat16 count as rounded to it, as casts and outputs are.

    `source`: where `guard` holds (None: always) the factor is this load, elsewhere 0; None: it must be computed.
    `stored`: the source's type in memory. `along_k`: neighbours in memory are neighbours along k, not along m or n.
    `run`: that many neighbours, from a multiple of it on, always lie side by side in memory, their first aligned to
    their size, under one guard: they can move as one. A power of two; 1 where nothing is known.
    """

    expr: Expr
    dtype: DType
    source: Load | None
    guard: Expr | None
    memory_dtype: DType
    k_major: bool
    vector_width: int


def operands(group: KernelGroup) -> tuple[Operand, Operand]:
    """Those of a contraction, a and b."""
    if group.kind is not GroupKind.CONTRACTION or group.operands is None:
        raise ValueError(f"{group.name} is no contraction")
    (m,), (n,), (k,) = (group.space.role(role) for role in (AxisRole.M, AxisRole.N, AxisRole.K))
    types = dict(group.inputs)
    return operand_along(group.operands.a, m, k, types), operand_along(group.operands.b, n, k, types)


def operand_b2(group: KernelGroup) -> Operand | None:
    """What stands for b in a contraction's second sum; None where it has one."""
    if group.operands is None or group.operands.b2 is None:
        return None
    (n,), (k,) = (group.space.role(role) for role in (AxisRole.N, AxisRole.K))
    return operand_along(group.operands.b2, n, k, dict(group.inputs))


def all_operands(group: KernelGroup) -> tuple[Operand, ...]:
    """Those of a contraction, a and b, and what stands for b in its second sum where there are two."""
    b2 = operand_b2(group)
    return operands(group) if b2 is None else (*operands(group), b2)


def have_same_layout(one: Operand, other: Operand) -> bool:
    """Whether tiles of both are filled in the same way."""

    def layout(operand: Operand) -> tuple[object, ...]:
        computed = operand.source is None
        return operand.dtype, operand.memory_dtype, computed, operand.guard, operand.k_major, operand.vector_width

    return layout(one) == layout(other)


def staged_dtype(unit: ComputeUnit, operand: Operand) -> DType:
    """The type in which the unit is given the operand: bytes keep theirs, for NVIDIA's instructions take any two of a
    kind."""
    if unit.in_dtype.bits == 8 and unit.kind is not UnitKind.MFMA:
        return DType.UINT8 if operand.dtype is DType.BOOL else operand.dtype
    return unit.in_dtype


def contraction_unsupported_reason(unit: ComputeUnit, group: KernelGroup, *, allow_tf32: bool) -> str:
    """Why the matrix unit cannot compute the contraction; '' where it can."""
    if group.kind is not GroupKind.CONTRACTION:
        return "no contraction"
    return operands_unsupported_reason(unit, group.space.compute_dtype, operands(group), allow_tf32=allow_tf32)


def operands_unsupported_reason(
    unit: ComputeUnit, accumulator: DType, factors: tuple[Operand, Operand], *, allow_tf32: bool
) -> str:
    """The same for a contraction of those factors whose sums are of that type."""
    if unit.kind not in STAGED_KINDS:
        return f"no rules for units of kind {unit.kind.value}"
    if accumulator is not unit.acc_dtype:
        return f"sums in {accumulator.value}, the unit in {unit.acc_dtype.value}"
    for name, operand in zip("ab", factors, strict=True):
        if not _supports(unit, operand.dtype):
            return f"operand {name} is {operand.dtype.value}, the unit takes {unit.in_dtype.value}"
        if operand.dtype is DType.FLOAT32 and unit.kind is not UnitKind.MFMA and not allow_tf32:
            return f"operand {name} is float32, and tf32 is not allowed"
    return ""


def can_represent_all(dtype: DType, other: DType) -> bool:
    """Whether a type has every value of the other."""
    return other is dtype or other in _REPRESENTABLE.get(dtype, frozenset())


def _supports(unit: ComputeUnit, operand: DType) -> bool:
    """Bytes are signed for MFMA; a truth value, 0 or 1, is either."""
    supported = unit.in_dtype
    if supported in (DType.INT8, DType.UINT8):
        return operand in (_BYTES - {DType.UINT8} if unit.kind is UnitKind.MFMA else _BYTES)
    if supported in _FLOAT8:
        return operand in _FLOAT8
    return operand is supported or operand in _REPRESENTABLE.get(supported, frozenset())


def operand_along(factor: Expr, axis: TileAxis, k: TileAxis, types: Mapping[str, TensorType]) -> Operand:
    dtype = value_dtype(factor) or factor.dtype
    source, guard = _guarded_load(factor)
    if source is None or any(source.bounds_checked):
        return Operand(factor, dtype, None, None, dtype, _is_k_major(factor, axis, k), 1)
    type_ = types[source.tensor]
    k_major = _is_k_major(source, axis, k)
    width = aligned_vector_width(source, guard, k if k_major else axis, type_)
    return Operand(factor, dtype, source, guard, type_.dtype, k_major, width)


def value_dtype(expr: Expr) -> DType | None:
    """Narrowest type with all of the expression's values; None for 0, which every type has."""
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
            return dtype.compute if dtype in _FLOAT8 else dtype  # rounding a result to float8 would lose too much
        case _:
            return expr.dtype


def _guarded_load(expr: Expr) -> tuple[Load | None, Expr | None]:
    """(load, guard) where the expression is that load wherever the guard holds, and 0 elsewhere."""
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


def _is_k_major(factor: Expr, axis: TileAxis, k: TileAxis) -> bool:
    """Whether memory is contiguous along k rather than along the other axis."""
    k_member, member = k.members[-1].name, axis.members[-1].name
    for load in loads_of(factor):
        for index in reversed(load.index):  # dimensions of one element have no axis
            along_k, along = _index_stride(index, k_member), _index_stride(index, member)
            if along_k or along:
                return along == 0 or (along_k != 0 and along_k < along)
    return False


def _index_stride(index: Expr, member: str) -> int:
    """How fast an index moves with an axis; 1 where it is no sum (packed words: `k // 8`), 0 where it does not."""
    form = affine(index)
    return abs(form.coeff(member)) if form is not None else int(member in axes_of(index))


def aligned_vector_width(load: Load, guard: Expr | None, lead: TileAxis, type_: TensorType) -> int:
    """How many neighbours along the axis lie side by side under one guard, from an aligned one on; a power of two."""
    address = _address(load.index, type_.shape)
    if address is None:
        return 1
    extent, merged = _contiguous_members(address, guard, lead)
    invariant = [c for name, c in address.coeffs if name not in merged] + [address.offset]
    width = MAX_VECTOR_WIDTH if merged else 1
    while width > 1:
        aligned = extent % width == 0 and not any(c % width for c in invariant)
        if aligned and (guard is None or _is_uniform(guard, lead.members[-1].name, width)):
            return width
        width //= 2
    return 1


def _address(index: tuple[Expr, ...], shape: tuple[int, ...]) -> Affine | None:
    """Offset in elements; an index that is no sum stands for each of its axes as something apart. None where such an
    axis also is an ordinary one."""
    coeffs: dict[str, int] = {}
    offset = 0
    for d, place in enumerate(index):
        stride = math.prod(shape[d + 1 :])
        known = affine(place)
        if known is None:
            coeffs |= {f"{name} in {d}": stride for name in axes_of(place)}
            continue
        offset += known.offset * stride
        for name, c in known.coeffs:
            coeffs[name] = coeffs.get(name, 0) + c * stride
    opaque = {name.split(" in ")[0] for name in coeffs if " in " in name}
    return None if opaque & coeffs.keys() else Affine(tuple(coeffs.items()), offset)


def _contiguous_members(address: Affine, guard: Expr | None, lead: TileAxis) -> tuple[int, frozenset[str]]:
    """The innermost members that walk memory as one axis: (its extent, their names)."""
    extent, merged = 1, frozenset[str]()
    for member in reversed(lead.members):
        if address.coeff(member.name) != extent or (merged and guard is not None and member.name in axes_of(guard)):
            break
        extent, merged = extent * member.extent, merged | {member.name}
        if guard is not None and member.name in axes_of(guard):
            break  # the guard may change where this member wraps
    return extent, merged


def _is_uniform(cond: Expr, varying: str, width: int) -> bool:
    """Whether the condition is the same for `run` values of `moving` from a multiple of `run` on."""
    if varying not in axes_of(cond):
        return True
    match cond:
        case Op(kind=OpKind.LAND | OpKind.LOR, args=args):
            return all(_is_uniform(arg, varying, width) for arg in args)
        case Op(kind=OpKind.LT | OpKind.GE, args=(a, b)):  # a - b < 0; b - a - 1 >= 0
            return _is_multiple(a, b, 0, varying, width) or _is_multiple(b, a, -1, varying, width)
        case Op(kind=OpKind.LE | OpKind.GT, args=(a, b)):  # a - b - 1 < 0; b - a >= 0
            return _is_multiple(a, b, -1, varying, width) or _is_multiple(b, a, 0, varying, width)
        case _:
            return False


def _is_multiple(a: Expr, b: Expr, offset: int, varying: str, width: int) -> bool:
    """Whether a - b + offset grows by one with `moving` and is a multiple of `run` wherever `moving` is: then its sign
    changes at such a place only."""
    left, right = affine(a), affine(b)
    if left is None or right is None:
        return False
    coeffs = dict(left.coeffs)
    for name, c in right.coeffs:
        coeffs[name] = coeffs.get(name, 0) - c
    total = Affine(tuple(coeffs.items()), left.offset - right.offset + offset)
    return total.coeff(varying) == 1 and not any(c % width for c in _invariant_terms(total, varying))


def _invariant_terms(form: Affine, varying: str) -> Iterable[int]:
    return (*(c for name, c in form.coeffs if name != varying), form.offset)
