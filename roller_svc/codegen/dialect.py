"""C-like dialects as data: types, qualifiers, function names by operator, literals."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Const, Expr, OpKind
from roller_svc.ir.kernel import Language
from roller_svc.ir.origin import Derived, shown

# short names of types, used in helpers' names: max_f32, floordiv_i64
SHORT = {
    DType.FLOAT64: "f64", DType.FLOAT32: "f32", DType.BFLOAT16: "bf16", DType.FLOAT16: "f16",
    DType.FLOAT8_E4M3FN: "e4m3", DType.FLOAT8_E5M2: "e5m2", DType.INT64: "i64", DType.UINT64: "u64",
    DType.INT32: "i32", DType.UINT32: "u32", DType.INT16: "i16", DType.UINT16: "u16", DType.INT8: "i8",
    DType.UINT8: "u8", DType.BOOL: "bool",
}  # fmt: skip

_INTEGERS = {
    DType.INT64: "long long", DType.UINT64: "unsigned long long", DType.INT32: "int", DType.UINT32: "unsigned int",
    DType.INT16: "short", DType.UINT16: "unsigned short", DType.INT8: "signed char", DType.UINT8: "unsigned char",
    DType.BOOL: "unsigned char",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Dialect:
    language: Language
    function: str  # how a helper function is declared
    index: str  # type of indices
    wide_index: str  # type of indices if a tensor has more than 2^31 elements
    inf_f32: str
    inf_f64: str
    half: str  # type of a float16 in memory
    wraps: bool  # signed integer arithmetic wraps (a compiler flag says so)
    static_shared_bytes: int = 0  # GPU: limit of static shared memory; more must be dynamic
    shuffle_xor: str = ""  # value of {a} in the lane whose number differs in the bits {across}
    shuffle_up: str = ""  # value of {a} in the lane whose number is lower by {by}
    bounded_simds: int = 0  # HIP: SIMDs of a core; launch bounds count waves per SIMD. 0: they count blocks

    def storage_type(self, dtype: DType) -> str:
        """Return the type of an element in memory."""
        if dtype is DType.FLOAT16:
            return self.half
        if dtype is DType.BFLOAT16:
            return "unsigned short"
        if dtype in (DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2):
            return "unsigned char"
        return self.value_type(dtype)

    @staticmethod
    def value_type(dtype: DType) -> str:
        """Return the type of a value."""
        if dtype is DType.FLOAT64:
            return "double"
        return "float" if dtype.is_float else _INTEGERS[dtype]


C = Dialect(
    language=Language.C,
    function="static inline",
    index="long",
    wide_index="long",
    inf_f32="__builtin_inff()",
    inf_f64="__builtin_inf()",
    half="_Float16",
    wraps=True,
)
CUDA = Dialect(
    language=Language.CUDA,
    function="__device__ __forceinline__",
    index="int",
    wide_index="long long",
    inf_f32="__int_as_float(0x7f800000)",
    inf_f64="__longlong_as_double(0x7ff0000000000000LL)",
    half="unsigned short",
    wraps=False,
    static_shared_bytes=48 << 10,  # CUDA programming guide
    shuffle_xor="__shfl_xor_sync(0xffffffffu, {a}, {across})",
    shuffle_up="__shfl_up_sync(0xffffffffu, {a}, {by})",
)
# Lanes of a wave run in lockstep and need no mask. All of a core's 64 KiB can be static (AMD ISA documents, "LDS"). The
# second argument of __launch_bounds__ is waves per SIMD, of which a core has four (HIP programming guide).
HIP = replace(
    CUDA,
    language=Language.HIP,
    static_shared_bytes=64 << 10,
    shuffle_xor="__shfl_xor({a}, {across})",
    shuffle_up="__shfl_up({a}, {by})",
    bounded_simds=4,
)


# functions with one name in C's math library and in CUDA, with the suffix f for float
LIBRARY = {
    OpKind.EXP: "exp", OpKind.EXP2: "exp2", OpKind.EXPM1: "expm1", OpKind.LOG: "log", OpKind.LOG2: "log2",
    OpKind.LOG10: "log10", OpKind.LOG1P: "log1p", OpKind.SQRT: "sqrt", OpKind.SIN: "sin", OpKind.COS: "cos",
    OpKind.TAN: "tan", OpKind.ASIN: "asin", OpKind.ACOS: "acos", OpKind.ATAN: "atan", OpKind.SINH: "sinh",
    OpKind.COSH: "cosh", OpKind.TANH: "tanh", OpKind.ASINH: "asinh", OpKind.ACOSH: "acosh", OpKind.ATANH: "atanh",
    OpKind.ERF: "erf", OpKind.RFLOOR: "floor", OpKind.RCEIL: "ceil", OpKind.ROUND: "rint", OpKind.TRUNC: "trunc",
    OpKind.FMAX: "fmax", OpKind.FMIN: "fmin", OpKind.POW: "pow", OpKind.FMOD: "fmod", OpKind.REMAINDER: "remainder",
    OpKind.ATAN2: "atan2", OpKind.HYPOT: "hypot", OpKind.FMA: "fma", OpKind.ABS: "fabs", OpKind.MOD: "fmod",
}  # fmt: skip
# emitted helper functions of floats and integers
HELPER_FUNCTIONS = {
    OpKind.MAX: "max", OpKind.MIN: "min", OpKind.SQUARE: "square", OpKind.SIGN: "sign", OpKind.RELU: "relu",
    OpKind.SIGMOID: "sigmoid", OpKind.SILU: "silu", OpKind.GELU: "gelu", OpKind.NORMCDF: "normcdf",
    OpKind.SOFTPLUS: "softplus", OpKind.ISINF: "isinf",
}  # fmt: skip
INTEGER_HELPER_FUNCTIONS = {
    OpKind.FLOORDIV: "floordiv", OpKind.MOD: "mod", OpKind.SHL: "shl", OpKind.SHR: "shr", OpKind.ABS: "abs",
    OpKind.TRUNC_DIV: "truncdiv", OpKind.FMOD: "truncmod", OpKind.POW: "pow", OpKind.FMAX: "max", OpKind.FMIN: "min",
    OpKind.REMAINDER: "remainder",
}  # fmt: skip
HALVES = (DType.FLOAT16, DType.BFLOAT16)
# Functions whose CUDA helpers for values of 16 bits use `ex2.approx` and `rcp.approx`, within the bounds of
# semantics/rounding.py. float32 values keep the library's functions.
APPROXIMATE_FUNCTIONS = {
    OpKind.EXP: "exp_approx", OpKind.SIGMOID: "sigmoid_approx", OpKind.SILU: "silu_approx", OpKind.TANH: "tanh_approx",
    OpKind.GELU: "gelu_approx", OpKind.NORMCDF: "normcdf_approx",
}  # fmt: skip
# library functions that emitted helpers call
NEEDS_LIBRARY = {
    "sigmoid": ("exp",), "silu": ("exp",), "gelu": ("erf",), "normcdf": ("erf",), "softplus": ("log1p", "exp", "fabs"),
    "isinf": ("fabs",), "gelu_approx": ("fabs", "fmin", "fmax"), "normcdf_approx": ("fabs",),
}  # fmt: skip


# All integers up to here are exact: two to the number of significant bits.
EXACT_INTEGERS = {
    DType.FLOAT32: 1 << 24, DType.FLOAT16: 2048, DType.BFLOAT16: 256, DType.FLOAT8_E4M3FN: 16, DType.FLOAT8_E5M2: 8,
}  # fmt: skip


def literal(value: float, dtype: DType, dialect: Dialect) -> str:
    """Return a number in the value type of its dtype."""
    if not dtype.is_float:
        return _integer(value if isinstance(value, Derived) else int(value), dtype)
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


def exceeds_type(expr: Expr) -> bool:
    """Return whether it is a constant that its own integer type cannot represent."""
    if not isinstance(expr, Const) or expr.dtype.is_float:
        return False
    low, high = expr.dtype.integer_range
    return not low <= expr.value <= high


def _integer(value: int, dtype: DType) -> str:
    if dtype is DType.INT64 and value == -(1 << 63):
        return "(-9223372036854775807LL - 1)"
    suffix = {DType.INT64: "LL", DType.UINT64: "ULL", DType.UINT32: "u"}.get(dtype, "")
    if dtype is DType.INT32 and value == -(1 << 31):
        return "(-2147483647 - 1)"
    return f"({value}{suffix})" if value < 0 else f"{shown(value)}{suffix}"
