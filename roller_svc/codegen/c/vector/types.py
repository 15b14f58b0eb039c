"""Helper functions of vectors → the x86 instruction that does the same, by the builtin that GCC has for it.

GCC 12 finds none of these in plain text. `maxps` and `minps` give their second operand where either is a NaN or both
are zeros, `vscalefps` multiplies by a power of two and rounds once (Intel SDM, volume 2).

Vector types of C kernels, and the variables of such types.
"""

from __future__ import annotations

from collections.abc import Callable

from roller_svc.codegen.dialect import SHORT
from roller_svc.ir.dtype import DType


def register_name(identifier: str, index: list[int], lanes: int) -> str:
    """acc, (2, 32), 16 → acc_2_2: the variable that holds elements 32 to 47 of row 2."""
    return "_".join([identifier, *(str(i) for i in index[:-1]), str(index[-1] // lanes)])


def vector_type(dtype: DType, lanes: int) -> str:
    return f"v{SHORT[dtype]}x{lanes}"


def vector_header(dtype: DType, lanes: int, c_type: str) -> str:
    """Unaligned vector type: dense tensors give no more than element alignment."""
    name = vector_type(dtype, lanes)
    attributes = f"vector_size({dtype.bytes * lanes}), aligned({dtype.bytes}), may_alias"
    return f"typedef {c_type} {name} __attribute__(({attributes}));"


_SUFFIX = {DType.FLOAT32: "ps", DType.FLOAT64: "pd"}
_ORDERED = 7  # the predicate of a comparison that holds where neither operand is a NaN
_ALL_LANES = "-1, 4"  # and the rounding that is set


def with_fallback(call: tuple[str, str] | None, plain: str) -> str:
    """Statements of a helper: the call where the macro before it is defined, else the plain text."""
    if call is None:
        return f"{plain}\n"
    return f"#if defined({call[0]}) && !defined(__clang__)\n  return {call[1]};\n#else\n{plain}\n#endif\n"


def instruction(base: str, dtype: DType, lanes: int) -> tuple[str, str] | None:
    """(macro of the instruction set, the value) of that helper, in the names of its parameters."""
    if dtype not in _SUFFIX:
        return None
    match lanes * dtype.bytes, base:
        case 64, "max" | "min":
            ordered = f"__builtin_ia32_cmp{_SUFFIX[dtype]}512_mask(a, a, {_ORDERED}, {_ALL_LANES})"
            return "__AVX512F__", f"__builtin_ia32_{base}{_SUFFIX[dtype]}512_mask(a, b, a, {ordered}, 4)"
        case 32, "max" | "min":
            name = f"__builtin_ia32_{base}{_SUFFIX[dtype]}256"
            return "__AVX__", f"select_{vector_type(dtype, lanes)}(a != a, a, {name}(a, b))"
        case 64, "at_least" | "at_most":
            end, name = ("least", "max") if base == "at_least" else ("most", "min")
            return "__AVX512F__", _masked(name, dtype, f"{end} - ({vector_type(dtype, lanes)}){{0}}", "x")
        case 32, "at_least" | "at_most":
            end, name = ("least", "max") if base == "at_least" else ("most", "min")
            bound = f"{end} - ({vector_type(dtype, lanes)}){{0}}"
            return "__AVX__", f"__builtin_ia32_{name}{_SUFFIX[dtype]}256({bound}, x)"
        case 64, "scaled":
            return "__AVX512F__", _masked("scalef", dtype, "y + 1", "k")
        case _:
            return None


def _masked(name: str, dtype: DType, a: str, b: str) -> str:
    zeros = f"(v{SHORT[dtype]}x{64 // dtype.bytes}){{0}}"
    return f"__builtin_ia32_{name}{_SUFFIX[dtype]}512_mask({a}, {b}, {zeros}, {_ALL_LANES})"


def zero_extension(source: DType, lanes: int, use: Callable[[str], str]) -> tuple[str, str] | None:
    """What is `used` on {x}, elements made words of 32 bits, the rest zeros: GCC 12 takes two steps and puts halves
    together in between."""
    if lanes != 16:
        return None
    letter, element = ("b", "char") if source is DType.UINT8 else ("w", "short")  # char: none of our vectors' types
    operand = f"({element} __attribute__((vector_size({source.bytes * lanes})))){{x}}"
    return "__AVX512F__", use(f"(vu32x16)__builtin_ia32_pmovzx{letter}d512_mask({operand}, (vi32x16){{{{0}}}}, -1)")


def dot_text(dtype: DType, lanes: int) -> str:
    """sum + the products of a's and b's elements: four bytes a lane, a's unsigned, or two of bfloat16. As text for the
    assembler, which compilers agree on: of the builtins' operands they think differently."""
    name = "vdpbf16ps" if dtype.is_float else "vpdpbusd"  # not vpdpbusds, which saturates
    vector, words = vector_type(dtype, lanes), vector_type(DType.INT32, lanes)
    return (
        f"static inline {vector} dot_{vector}({vector} sum, {words} a, {words} b) {{\n"
        f'  __asm__("{name} %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));\n  return sum;\n}}'
    )
