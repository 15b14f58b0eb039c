"""Operands of contractions that a CPU's dot-product instructions compute: of bytes, of pairs of int16, of bfloat16.

One instruction adds the products of a few adjacent k to the accumulator of each lane; these k share 32 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from roller_svc.analysis.constant_folding import holds
from roller_svc.analysis.operand import can_represent_all, value_dtype
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Cast, Const, Expr, Load, Op, OpKind, Select
from roller_svc.ir.group import GroupKind, KernelGroup
from roller_svc.ir.hardware import ComputeUnit, UnitKind
from roller_svc.ir.program import Combine, TensorType, identity

WORD = DType.INT32  # holds `group` packed elements
_BYTES = (DType.INT8, DType.UINT8)
_SIGN_BITS = 0x80808080  # sign bits of the four bytes of a word


@dataclass(frozen=True, slots=True)
class DotOperands:
    """Types of the packed elements; a word holds `group` of them."""

    group: int
    a: DType
    b: DType

    @property
    def operator(self) -> OpKind:
        """Return the operator that adds the products of two words to a sum."""
        return OpKind.DOT_PAIRS if self.a is DType.INT16 else OpKind.DOT

    @property
    def flips_sign_of_a(self) -> bool:
        """Return whether the sign bits of A are flipped: instructions multiply unsigned by signed bytes.

        A flipped signed byte is unsigned and 128 larger; a flipped unsigned byte is signed and 128 smaller.
        """
        return self.a in _BYTES and self.a.is_signed == self.b.is_signed

    @property
    def sign_mask(self) -> int:
        """Return the mask that is xored with a word of A, 0 if signs stay.

        Read as a word of A, the mask equals the amount by which the flip increases each byte, with either sign.
        """
        return _SIGN_BITS - (1 << 32) if self.flips_sign_of_a else 0

    @property
    def a_is_first(self) -> bool:
        """Return whether A is the first word: of packed bytes the unsigned ones, of other elements either."""
        return self.b.is_signed


def dot_operands(unit: ComputeUnit, group: KernelGroup) -> DotOperands | None:
    """Return the packed operand types, or None if the unit does not support the group."""
    if unit.kind is not UnitKind.DOT or group.kind is not GroupKind.CONTRACTION or group.operands is None:
        return None
    if group.product_sum_dtype is not unit.acc_dtype or group.is_dual_gemm:
        return None
    if (runs := group.space.scale_runs) is not None and runs.k % unit.k_group:
        return None  # a word has one scale
    types = dict(group.inputs)
    a, b = (_operand_dtype(unit, operand, types) for operand in (group.operands.a, group.operands.b))
    return None if a is None or b is None else DotOperands(unit.k_group, a, b)


def _operand_dtype(unit: ComputeUnit, operand: Expr, types: Mapping[str, TensorType]) -> DType | None:
    """Return the type in which the unit takes all values of an operand without rounding, or None."""
    if unit.in_dtype not in _BYTES:
        return unit.in_dtype if _is_exact(operand, unit.in_dtype, types) else None
    source = value_dtype(operand)
    dtype = DType.UINT8 if source is DType.BOOL else source
    return dtype if dtype in _BYTES and _is_exact(operand, dtype, types) else None


def _is_exact(expr: Expr, dtype: DType, types: Mapping[str, TensorType]) -> bool:
    """Return whether the type represents all values that strict evaluation gives the expression.

    Strict evaluation computes operators on narrow floats in float32.
    """
    match expr:
        case Const(value=value):
            return value == 0 or (not dtype.is_float and holds(int(value), dtype))
        case Load():
            return can_represent_all(dtype, expr.dtype) and types[expr.tensor].dtype is expr.dtype
        case Cast(arg=arg) if _is_lossless_cast(expr):
            return _is_exact(arg, dtype, types)
        case Cast():
            return not expr.implicit and can_represent_all(dtype, expr.dtype)
        case Select(then=then, otherwise=otherwise):
            return _is_exact(then, dtype, types) and _is_exact(otherwise, dtype, types)
        case Op():
            return not expr.dtype.is_float and can_represent_all(dtype, expr.dtype)
        case _:
            return False


def cast_element(expr: Expr, dtype: DType) -> Expr:
    """Return the expression in a type that represents all of its values, without conversions to wider types."""
    match expr:
        case Const(value=0):
            return identity(Combine.SUM, dtype)
        case Const(value=value) if not dtype.is_float:
            return Const(value, dtype)
        case Cast(arg=arg) if _is_lossless_cast(expr):
            return cast_element(arg, dtype)
        case Select(cond=cond, then=then, otherwise=otherwise):
            return Select(cond, cast_element(then, dtype), cast_element(otherwise, dtype), dtype)
        case _:
            return expr if expr.dtype is dtype else Cast(expr, dtype, implicit=True)


def _is_lossless_cast(cast: Cast) -> bool:
    """Return whether a conversion changes no value; an explicit one may round to a narrow float."""
    rounds = cast.dtype.is_narrow_float and not cast.implicit
    return not rounds and can_represent_all(cast.dtype, value_dtype(cast.arg) or cast.dtype)
