"""Instructions of operators on an NVIDIA GPU, counted in SASS by `tools/count_instructions.py`.

The performance model takes these for every GPU. AMD's functions have other counts, which are not known here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Cast, Const, Expr, Load, Op, OpKind, axes_of, children, loads_of, split_restated
from roller_svc.ir.hardware import Arch
from roller_svc.ir.program import Combine, TensorExpr

ARCH = Arch("sm_", 80)
TYPES = (DType.FLOAT32, DType.FLOAT16, DType.FLOAT64, DType.INT32)  # bfloat16 has the counts of float16
# Operators that take more than one instruction. 16-bit values have those of float32 but for these.
INSTRUCTIONS: dict[DType, dict[OpKind, int]] = {
    DType.FLOAT32: {
        OpKind.DIV: 12, OpKind.MOD: 66, OpKind.EXP: 8, OpKind.EXP2: 4, OpKind.EXPM1: 28, OpKind.LOG: 25,
        OpKind.LOG2: 27, OpKind.LOG10: 26, OpKind.LOG1P: 27, OpKind.SQRT: 13, OpKind.RSQRT: 4,
        OpKind.RECIPROCAL: 12, OpKind.SIGN: 7, OpKind.SIN: 83, OpKind.COS: 84, OpKind.TAN: 82, OpKind.ASIN: 22,
        OpKind.ACOS: 23, OpKind.ATAN: 18, OpKind.SINH: 23, OpKind.COSH: 15, OpKind.TANH: 15, OpKind.ASINH: 39,
        OpKind.ACOSH: 41, OpKind.ATANH: 35, OpKind.ERF: 21, OpKind.NORMCDF: 24, OpKind.SIGMOID: 22, OpKind.SILU: 22,
        OpKind.GELU: 25, OpKind.SOFTPLUS: 37, OpKind.FLOOR: 11, OpKind.CEIL: 11, OpKind.POW: 90, OpKind.FMOD: 66,
        OpKind.REMAINDER: 86, OpKind.ATAN2: 43, OpKind.HYPOT: 26,
    },
    DType.FLOAT16: {
        OpKind.EXP: 2, OpKind.TANH: 12, OpKind.NORMCDF: 15, OpKind.SIGMOID: 4, OpKind.SILU: 5, OpKind.GELU: 17,
    },
    DType.FLOAT64: {
        OpKind.DIV: 19, OpKind.MOD: 237, OpKind.EXP: 32, OpKind.EXP2: 34, OpKind.EXPM1: 49, OpKind.LOG: 60,
        OpKind.LOG2: 63, OpKind.LOG10: 63, OpKind.LOG1P: 99, OpKind.SQRT: 20, OpKind.RSQRT: 36,
        OpKind.RECIPROCAL: 16, OpKind.SIGN: 9, OpKind.SIN: 40, OpKind.COS: 40, OpKind.TAN: 48, OpKind.ASIN: 57,
        OpKind.ACOS: 67, OpKind.ATAN: 38, OpKind.SINH: 82, OpKind.COSH: 35, OpKind.TANH: 56, OpKind.ASINH: 127,
        OpKind.ACOSH: 122, OpKind.ATANH: 122, OpKind.ERF: 51, OpKind.NORMCDF: 54, OpKind.SIGMOID: 53,
        OpKind.SILU: 57, OpKind.GELU: 55, OpKind.RELU: 3, OpKind.SOFTPLUS: 142, OpKind.FLOOR: 10, OpKind.CEIL: 10,
        OpKind.MAX: 4, OpKind.MIN: 4, OpKind.FMAX: 7, OpKind.FMIN: 7, OpKind.POW: 67, OpKind.FMOD: 237,
        OpKind.REMAINDER: 244, OpKind.ATAN2: 77, OpKind.HYPOT: 38,
    },
    DType.INT32: {
        OpKind.FLOORDIV: 38, OpKind.MOD: 32, OpKind.SHL: 4, OpKind.SHR: 3, OpKind.ABS: 2, OpKind.SIGN: 4,
        OpKind.FLOOR: 12, OpKind.CEIL: 12, OpKind.POW: 29, OpKind.FMOD: 27, OpKind.REMAINDER: 48,
        OpKind.TRUNC_DIV: 32,
    },
}  # fmt: skip
CONSTANT_DIVISOR_INSTRUCTIONS = 4  # multiply-high, shift, multiply-subtract
CONSTANT_FLOAT_DIVISOR_INSTRUCTIONS = 4  # product, remainder, comparison, correction
_SHIFTS = frozenset({OpKind.SHL, OpKind.SHR})
_CONSTANT_DIVISIONS = frozenset({OpKind.FLOORDIV, OpKind.MOD, OpKind.TRUNC_DIV, OpKind.FMOD})


def instructions_of(kind: OpKind, dtype: DType) -> int:
    """Return the instructions of an operator on values of a type."""
    if dtype.is_float and dtype.bits == 16 and kind in INSTRUCTIONS[DType.FLOAT16]:
        return INSTRUCTIONS[DType.FLOAT16][kind]
    known = dtype.compute if dtype.is_float else DType.INT32
    return INSTRUCTIONS[known].get(kind, 1)


def count_instructions(statements: Sequence[TensorExpr]) -> int:
    """Return the instructions of statements, without loads, stores and indices other than data.

    They are those of the operators that `TensorExpr.flops` counts. A division by a sum of the statements is a product.
    """
    sums = frozenset(s.output for s in statements if s.combine is Combine.SUM)
    return sum(s.points * (_count(s.body, sums)[0] + (1 if s.combine else 0)) for s in statements)


def sums_products(statement: TensorExpr) -> bool:
    """Return whether a statement sums products, whose last multiplication adds to the sum."""
    body, _ = split_restated(statement.body)
    while isinstance(body, Cast):
        body = body.arg
    return statement.combine is Combine.SUM and isinstance(body, Op) and body.kind is OpKind.MUL


def count_by_axes(statement: TensorExpr) -> dict[frozenset[str], int]:
    """Return the instructions at a point of a sum of products by the axes that their values depend on.

    A thread computes a value once for all points that it does not depend on. The last product adds to the sum.
    """
    counts: dict[frozenset[str], int] = {}

    def count(expr: Expr) -> None:
        below = 0
        for child in children(expr):
            count(child)
            below += _count(child, frozenset())[0]
        own = _count(expr, frozenset())[0] - below
        if own:
            axes = frozenset(axes_of(expr))
            counts[axes] = counts.get(axes, 0) + own

    count(statement.body)
    return counts


def count_value_instructions(value: Expr) -> int:
    """Return the instructions of one value, without loads and indices other than data."""
    return _count(value, frozenset())[0]


def _count(expr: Expr, sums: frozenset[str]) -> tuple[int, bool]:
    """Return the instructions on values from tensors, and whether the expression is a value from tensors."""
    count, of_tensors = 0, isinstance(expr, Load)
    for child in children(expr):  # of a load: its index, whose operators count if it is data
        below, is_value = _count(child, sums)
        count += below
        of_tensors |= is_value
    if isinstance(expr, Cast) and of_tensors and expr.dtype.is_float is not expr.arg.dtype.is_float:
        return count + 1, True
    if not isinstance(expr, Op) or not of_tensors or expr.dtype is DType.INT8:
        return count, of_tensors
    return count + _own(expr, sums), True


def _own(op: Op, sums: frozenset[str]) -> int:
    divisor = op.args[-1]
    if op.kind in _SHIFTS and not loads_of(divisor):
        return 1  # by constants in unrolled code, which are known to be below the width
    if op.kind is OpKind.DIV:
        is_power = isinstance(divisor, Const) and abs(math.frexp(divisor.value)[0]) == 0.5
        if is_power or (isinstance(divisor, Load) and divisor.tensor in sums):
            return 1  # multiplied by the reciprocal
        if isinstance(divisor, Const) and op.dtype is DType.FLOAT32 and abs(divisor.value) >= 1.0:
            return CONSTANT_FLOAT_DIVISOR_INSTRUCTIONS
    if isinstance(divisor, Const) and op.kind in _CONSTANT_DIVISIONS and not op.dtype.is_float:
        return CONSTANT_DIVISOR_INSTRUCTIONS
    return instructions_of(op.kind, op.dtype if op.dtype.is_float else op.args[0].dtype)
