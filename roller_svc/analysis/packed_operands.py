"""Operand of a contraction → whether it is unpacked in pairs of 16-bit floats, and its instructions for an element.

`codegen/cuda/packed_lanes.py` prints such values. This is what the performance model knows of them: the form, without
the alignment of a loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import AxisRef, Cast, Const, Expr, Load, Op, OpKind, Select, loads_of

PAIRS = (DType.FLOAT16, DType.BFLOAT16)
PAIR_SLOTS = 0.5  # of one element: an instruction for two
FIELD_SLOTS = 3 * PAIR_SLOTS  # prmt, lop3, subtraction of the exponent with a constant zero point
BYTE_SLOTS = 2 * PAIR_SLOTS  # prmt with the exponent's bytes, subtraction
SIGN_SLOTS = 0.25  # the sign bits of a word of four are flipped


@dataclass(frozen=True, slots=True)
class Unpacking:
    """Instructions for an element, and loads for the elements of one vector."""

    slots: float
    loads: int


@lru_cache(maxsize=256)
def unpacking_of(expr: Expr, dtype: DType) -> Unpacking | None:
    """Return how packed integers are unpacked as `dtype`; None for any other operand."""
    slots = _slots(expr) if dtype in PAIRS else None
    return None if slots is None else Unpacking(slots, len(set(loads_of(expr))))


def _slots(expr: Expr) -> float | None:
    """Return the slots of a field of bits with an offset, a scale and a guard; None for others."""
    match expr:
        case Select(then=then, otherwise=Const(value=0)):
            inner = _slots(then)
            return None if inner is None else inner + PAIR_SLOTS
        case Cast(arg=arg) if arg.dtype.is_float:
            return _slots(arg)
        case Cast(arg=arg):
            return _integer_slots(arg)
        case Op(kind=OpKind.MUL, args=(x, y)):
            field, other = (_slots(x), y) if _slots(x) is not None else (_slots(y), x)
            return None if field is None or not _is_scale(other) else field + PAIR_SLOTS
        case _:
            return None


def _integer_slots(expr: Expr) -> float | None:
    match expr:
        case Cast(arg=arg):
            return _integer_slots(arg)
        case Op(kind=OpKind.SUB | OpKind.ADD, args=(x, y)):
            field, other = _integer_slots(x), y.arg if isinstance(y, Cast) else y
            if field is None or isinstance(other, Const):
                return field
            zeros = None if isinstance(other, Load) else _integer_slots(other)  # packed along the row too
            return field + (zeros or 0.0) + PAIR_SLOTS
        case Op(kind=OpKind.BITAND, args=(Op(kind=OpKind.SHR, args=(word, _)), Const())):
            return FIELD_SLOTS if _is_packed_row(word) else None
        case Load(dtype=dtype) if dtype.bits == 8 and isinstance(expr.index[-1] if expr.index else None, AxisRef):
            return BYTE_SLOTS + (SIGN_SLOTS if dtype.is_signed else 0.0)
        case _:
            return None


def _is_packed_row(word: Expr) -> bool:
    """Return whether adjacent words hold adjacent elements of a row."""
    while isinstance(word, Cast):
        word = word.arg
    match word:
        case Load(index=(*_, Op(kind=OpKind.FLOORDIV, args=(AxisRef(), Const())))):
            return True
        case _:
            return False


def _is_scale(expr: Expr) -> bool:
    while isinstance(expr, Cast):
        expr = expr.arg
    return isinstance(expr, Load) and expr.dtype in PAIRS
