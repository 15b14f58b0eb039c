"""Which contractions a CPU's dot-product instructions compute, and what these are given.

One instruction adds to each lane's sum the products of a few neighbours along k, which lie side by side in 32 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from roller_svc.analysis.operand import has_all_values, value_dtype
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Cast, Const, Expr, Load, Op, Select
from roller_svc.ir.group import GroupKind, KernelGroup
from roller_svc.ir.hardware import ComputeUnit, UnitKind
from roller_svc.ir.program import TensorType

WORD = DType.INT32  # what so many elements are packed as
_BYTES = (DType.INT8, DType.UINT8)
_SIGN_BITS = 0x80808080  # of a word of bytes


@dataclass(frozen=True, slots=True)
class DotOperands:
    """Types of the elements that are packed, `group` of them in a word."""

    group: int
    a: DType
    b: DType

    @property
    def flips_a(self) -> bool:
        """Whether the sign bits of A are flipped: instructions take unsigned bytes times signed ones. Flipped, a signed
        byte is an unsigned one, 128 more, and an unsigned one a signed one, 128 less."""
        return self.a is not DType.BFLOAT16 and self.a.is_signed == self.b.is_signed

    @property
    def flip(self) -> int:
        """What a word of A is combined with, bit by bit, by an exclusive or. As one of A's words it stands for as much
        as each byte has become larger by, whatever their sign."""
        return _SIGN_BITS - (1 << 32) if self.flips_a else 0

    @property
    def a_is_first(self) -> bool:
        """Whether A's bytes, as they are packed, are the unsigned ones."""
        return self.b.is_signed


def dot_operands(unit: ComputeUnit, group: KernelGroup) -> DotOperands | None:
    """None where the unit is none of dot products or does not take the group."""
    if unit.kind is not UnitKind.DOT or group.kind is not GroupKind.CONTRACTION or group.operands is None:
        return None
    if group.space.compute_dtype is not unit.acc_dtype or group.is_dual_gemm:
        return None
    types = dict(group.inputs)
    a, b = (_element(unit, factor, types) for factor in (group.operands.a, group.operands.b))
    return None if a is None or b is None else DotOperands(unit.k_group, a, b)


def _element(unit: ComputeUnit, factor: Expr, types: Mapping[str, TensorType]) -> DType | None:
    """The type in which the unit is given all of a factor's values, none of them rounded."""
    if unit.in_dtype.is_float:
        return unit.in_dtype if _is_exact(factor, unit.in_dtype, types) else None
    found = value_dtype(factor)
    dtype = DType.UINT8 if found is DType.BOOL else found
    return dtype if dtype in _BYTES and _is_exact(factor, dtype, types) else None


def _is_exact(expr: Expr, dtype: DType, types: Mapping[str, TensorType]) -> bool:
    """Whether the type has the expression's values as a program that is followed to the letter computes them: those of
    operators on narrow floats are float32's."""
    match expr:
        case Const(value=value):
            return value == 0
        case Load():
            return has_all_values(dtype, expr.dtype) and types[expr.tensor].dtype is expr.dtype
        case Cast(arg=arg) if _keeps(expr):
            return _is_exact(arg, dtype, types)
        case Cast():
            return not expr.implicit and has_all_values(dtype, expr.dtype)
        case Select(then=then, otherwise=otherwise):
            return _is_exact(then, dtype, types) and _is_exact(otherwise, dtype, types)
        case Op():
            return not expr.dtype.is_float and has_all_values(dtype, expr.dtype)
        case _:
            return False


def element(expr: Expr, dtype: DType) -> Expr:
    """An expression all of whose values the type has, in that type, without detours through wider ones."""
    match expr:
        case Const(value=0):
            return Const(0.0 if dtype.is_float else 0, dtype)
        case Cast(arg=arg) if _keeps(expr):
            return element(arg, dtype)
        case Select(cond=cond, then=then, otherwise=otherwise):
            return Select(cond, element(then, dtype), element(otherwise, dtype), dtype)
        case _:
            return expr if expr.dtype is dtype else Cast(expr, dtype, implicit=True)


def _keeps(cast: Cast) -> bool:
    """Whether a conversion changes no value. One that is written may round to a narrow float what was computed."""
    rounds = cast.dtype.is_narrow_float and not cast.implicit
    return not rounds and has_all_values(cast.dtype, value_dtype(cast.arg) or cast.dtype)
