"""The lanes of one vector → their sum, product, maximum or minimum: halves onto each other, in shuffles."""

from __future__ import annotations

from roller_svc.codegen.dialect import SHORT, Dialect
from roller_svc.codegen.vector import vector_type
from roller_svc.ir.dtype import DType
from roller_svc.ir.program import Combine

_INFIX = {Combine.SUM: "+", Combine.PROD: "*"}
HORIZONTAL = frozenset((*_INFIX, Combine.MAX, Combine.MIN))
SHUFFLED = """#if defined(__clang__)
#define SHUFFLED(a, mask, ...) __builtin_shufflevector(a, a, __VA_ARGS__)
#else
#define SHUFFLED(a, mask, ...) __builtin_shuffle(a, (mask){__VA_ARGS__})
#endif"""


def horizontal_name(combine: Combine, dtype: DType, lanes: int) -> str:
    """join_max_vf32x16."""
    return f"join_{combine.name.lower()}_{vector_type(dtype, lanes)}"


def horizontal_needs(combine: Combine, dtype: DType, lanes: int) -> tuple[str, ...]:
    """The helper that joins two vectors, where that is no operator."""
    return () if combine in _INFIX else (f"{combine.name.lower()}_{vector_type(dtype, lanes)}",)


def horizontal_text(name: str, dialect: Dialect) -> str:
    """The function of one vector that the name says."""
    _, which, type_ = name.split("_")
    combine, (short, count) = Combine[which.upper()], type_[1:].split("x")
    dtype, lanes = next(d for d, s in SHORT.items() if s == short), int(count)
    mask = vector_type({8: DType.INT8, 16: DType.INT16, 32: DType.INT32, 64: DType.INT64}[dtype.bits], lanes)
    lines = [f"static inline {dialect.value_type(dtype)} {name}({type_} a) {{"]
    half = lanes // 2
    while half:
        order = ", ".join(str((i + half) % lanes) for i in range(lanes))
        other = f"SHUFFLED(a, {mask}, {order})"
        joined = f"a {_INFIX[combine]} {other}" if combine in _INFIX else f"{which}_{type_}(a, {other})"
        lines.append(f"  a = {joined};")
        half //= 2
    return "\n".join([*lines, "  return a[0];", "}"])
