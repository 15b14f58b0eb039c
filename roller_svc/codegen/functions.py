"""Names of functions in C-like languages, by operator."""

from __future__ import annotations

from roller_svc.ir.expr import OpKind

# functions that both C's math library and CUDA have under one name, with f for float
LIBRARY = {
    OpKind.EXP: "exp", OpKind.EXP2: "exp2", OpKind.EXPM1: "expm1", OpKind.LOG: "log", OpKind.LOG2: "log2",
    OpKind.LOG10: "log10", OpKind.LOG1P: "log1p", OpKind.SQRT: "sqrt", OpKind.SIN: "sin", OpKind.COS: "cos",
    OpKind.TAN: "tan", OpKind.ASIN: "asin", OpKind.ACOS: "acos", OpKind.ATAN: "atan", OpKind.SINH: "sinh",
    OpKind.COSH: "cosh", OpKind.TANH: "tanh", OpKind.ASINH: "asinh", OpKind.ACOSH: "acosh", OpKind.ATANH: "atanh",
    OpKind.ERF: "erf", OpKind.RFLOOR: "floor", OpKind.RCEIL: "ceil", OpKind.ROUND: "rint", OpKind.TRUNC: "trunc",
    OpKind.FMAX: "fmax", OpKind.FMIN: "fmin", OpKind.POW: "pow", OpKind.FMOD: "fmod", OpKind.REMAINDER: "remainder",
    OpKind.ATAN2: "atan2", OpKind.HYPOT: "hypot", OpKind.FMA: "fma", OpKind.ABS: "fabs", OpKind.MOD: "fmod",
}  # fmt: skip
# helpers of ours, both for floats and integers
OURS = {
    OpKind.MAX: "max", OpKind.MIN: "min", OpKind.SQUARE: "square", OpKind.SIGN: "sign", OpKind.RELU: "relu",
    OpKind.SIGMOID: "sigmoid", OpKind.SILU: "silu", OpKind.GELU: "gelu", OpKind.NORMCDF: "normcdf",
    OpKind.SOFTPLUS: "softplus", OpKind.ISINF: "isinf",
}  # fmt: skip
OURS_INTEGER = {
    OpKind.FLOORDIV: "floordiv", OpKind.MOD: "mod", OpKind.SHL: "shl", OpKind.SHR: "shr", OpKind.ABS: "abs",
    OpKind.TRUNC_DIV: "truncdiv", OpKind.FMOD: "truncmod", OpKind.POW: "pow", OpKind.FMAX: "max", OpKind.FMIN: "min",
}  # fmt: skip
# what helpers of ours call
NEEDS_LIBRARY = {
    "sigmoid": ("exp",), "silu": ("exp",), "gelu": ("erf",), "normcdf": ("erf",), "softplus": ("log1p", "exp", "fabs"),
    "isinf": ("fabs",),
}  # fmt: skip
