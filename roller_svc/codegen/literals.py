"""Numbers → text in a C-like dialect."""

from __future__ import annotations

import math

from roller_svc.codegen.dialect import Dialect
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Const, Expr

# Integers up to here have no gaps between them: two to the number of significant bits.
EXACT_INTEGERS = {DType.FLOAT16: 2048, DType.BFLOAT16: 256, DType.FLOAT8_E4M3FN: 16, DType.FLOAT8_E5M2: 8}


def literal(value: float, dtype: DType, dialect: Dialect) -> str:
    """A number in the value type of its dtype."""
    if not dtype.is_float:
        return _integer(int(value), dtype)
    double = dtype is DType.FLOAT64
    if math.isinf(value):
        text = dialect.inf_f64 if double else dialect.inf_f32
        return text if value > 0 else f"(-{text})"
    if math.isnan(value):
        zero = literal(0.0, dtype, dialect)
        return f"({zero} / {zero})"
    text = repr(float(value))
    text = text if any(c in text for c in ".en") else f"{text}.0"
    text = text if double else f"{text}f"
    return f"({text})" if text.startswith("-") else text  # -0.0 too: two signs would be a decrement


def is_beyond(expr: Expr) -> bool:
    """Whether it is a number that its own integer type cannot hold."""
    if not isinstance(expr, Const) or expr.dtype.is_float:
        return False
    least, greatest = expr.dtype.integer_range
    return not least <= expr.value <= greatest


def _integer(value: int, dtype: DType) -> str:
    if dtype is DType.INT64 and value == -(1 << 63):
        return "(-9223372036854775807LL - 1)"
    suffix = {DType.INT64: "LL", DType.UINT64: "ULL", DType.UINT32: "u"}.get(dtype, "")
    if dtype is DType.INT32 and value == -(1 << 31):
        return "(-2147483647 - 1)"
    return f"({value}{suffix})" if value < 0 else f"{value}{suffix}"
