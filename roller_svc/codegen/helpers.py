"""Emitted helper functions that implement the language's semantics where those of C differ.

`helper(name, dialect)` returns the source of a helper and the helpers it needs. Names end in the type: max_f32,
floordiv_i64. Only the helpers that a kernel uses are emitted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from roller_svc.analysis.scans import LEAST_GATE, gate_product_dtype
from roller_svc.codegen.dialect import SHORT, Dialect
from roller_svc.errors import InvariantError
from roller_svc.ir.dtype import DType
from roller_svc.ir.kernel import Language

_BY_SHORT = {short: dtype for dtype, short in SHORT.items()}


@dataclass(frozen=True, slots=True)
class Helper:
    text: str
    needs: tuple[str, ...] = ()


# {T}: the type, {t}: its short name, {s}: suffix of math functions, {U}: unsigned type, {w}: width in bits
_FLOAT = {
    "max": "{F} {T} max_{t}({T} a, {T} b) {{ return a > b || a != a ? a : b; }}  // a NaN on either side stays",
    "min": "{F} {T} min_{t}({T} a, {T} b) {{ return a < b || a != a ? a : b; }}",
    "relu": "{F} {T} relu_{t}({T} a) {{ return a > 0 || a != a ? a : 0; }}",
    "square": "{F} {T} square_{t}({T} a) {{ return a * a; }}",
    "sign": "{F} {T} sign_{t}({T} a) {{ return a != a ? a : ({T})((a > 0) - (a < 0)); }}",
    "isnan": "{F} int isnan_{t}({T} a) {{ return a != a; }}",
    "isinf": "{F} int isinf_{t}({T} a) {{ return fabs{s}(a) == {inf}; }}",
    "sigmoid": "{F} {T} sigmoid_{t}({T} a) {{ return 1 / (1 + exp{s}(-a)); }}",
    "silu": "{F} {T} silu_{t}({T} a) {{ return a / (1 + exp{s}(-a)); }}",
    "normcdf": "{F} {T} normcdf_{t}({T} a) {{ return ({T})0.5 * (1 + erf{s}(a * ({T})0.70710678118654752440)); }}",
    "gelu": "{F} {T} gelu_{t}({T} a) {{ return a * ({T})0.5 * (1 + erf{s}(a * ({T})0.70710678118654752440)); }}",
    "softplus": ("{F} {T} softplus_{t}({T} a) {{ return log1p{s}(exp{s}(-fabs{s}(a))) + (a > 0 || a != a ? a : 0); }}"),
}
# Functions of 16-bit values in CUDA; tests/unit/codegen/cuda/test_approximations.py has their bounds. Coefficients are
# those of `python tools/fit_minimax.py`.
_APPROXIMATE: dict[str, Helper] = {
    "exp": Helper("{F} float exp_approx_f32(float a) {{ return exp2_approx(a * 1.44269504f); }}", ("exp2_approx",)),
    "sigmoid": Helper(
        "{F} float sigmoid_approx_f32(float a) {{ return rcp_approx(1.0f + exp2_approx(a * -1.44269504f)); }}",
        ("exp2_approx", "rcp_approx"),
    ),
    "silu": Helper("{F} float silu_approx_f32(float a) {{ return a * sigmoid_approx_f32(a); }}", ("sigmoid_approx_f32",)),
    "tanh": Helper(
        "{F} float tanh_approx_f32(float a) {{  // near 0 the difference would cancel\n"
        "  float s = a * a, far = 1.0f - 2.0f * rcp_approx(1.0f + exp2_approx(a * 2.88539008f));\n"
        "  float near = a + a * s * (-0.333316594f + s * (0.132721558f + s * -0.0475071408f));\n"
        "  return s < 0.16f ? near : far;\n}}",
        ("exp2_approx", "rcp_approx"),
    ),
    "upper_tail": Helper(
        "{F} float upper_tail_approx_f32(float a) {{  // of the normal distribution, beyond a >= 0\n"
        "  float t = rcp_approx(1.0f + 0.36f * a);\n"
        "  float p = 0.143713489f + t * (0.14176473f + t * (0.139771119f + t * (0.0263783783f\n"
        "    + t * (0.1812464f + t * (-0.180012196f + t * 0.047137931f)))));\n"
        "  return t * p * exp2_approx(a * a * -0.72134752f);\n}}",
        ("exp2_approx", "rcp_approx"),
    ),
    "normcdf": Helper(
        "{F} float normcdf_approx_f32(float a) {{\n"
        "  float tail = upper_tail_approx_f32(fabsf(a));\n  return a < 0.0f ? tail : 1.0f - tail;\n}}",
        ("upper_tail_approx_f32",),
    ),
    "gelu": Helper(
        "{F} float gelu_approx_f32(float a) {{\n"
        "  float size = fminf(fabsf(a), 14.0f);  // beyond, the tail is 0 in float32; a factor inf makes it NaN\n"
        "  return max_f32(a, 0.0f) - fmaxf(-a, size) * upper_tail_approx_f32(size);\n}}",
        ("max_f32", "upper_tail_approx_f32"),
    ),
}
# Wrappers of instructions that helpers call. The emulator implements them on the host.
EXP2_APPROX = """__device__ __forceinline__ float exp2_approx(float a) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(a));
  return power;
}"""
# V_EXP_F32 alone: 1 ulp, and 0 for subnormal results (AMD Instinct MI200 ISA). clang 15 has no builtin of it.
EXP2_HIP = """extern "C" __device__ float __ocml_native_exp2_f32(float);
__device__ __forceinline__ float exp2_approx(float a) { return __ocml_native_exp2_f32(a); }"""
RCP_APPROX = """__device__ __forceinline__ float rcp_approx(float a) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(a));
  return inverse;
}"""
# Rounds a quotient by a constant of at least 1 as a division does: the remainder is exact (Markstein 1990), unless it
# is subnormal, which costs a unit in the last place. A remainder of 0 leaves a zero's sign; that of an infinity is NaN.
_DIV_CONST_CUDA = """__device__ __forceinline__ float div_const_f32(float a, float b, float inverse) {
  float q = a * inverse, rest = fmaf(-q, b, a);
  return fabsf(rest) > 0.0f ? fmaf(rest, inverse, q) : q;
}"""
_EXTREMUM_CUDA = """__device__ __forceinline__ float {which}_f32(float a, float b) {{  // a NaN on either side stays
#if __CUDA_ARCH__ >= 800
  float found;
  asm("{which}.NaN.f32 %0, %1, %2;" : "=f"(found) : "f"(a), "f"(b));
  return found;
#else
  return a {sign} b || a != a ? a : b;
#endif
}}"""
_INTEGER = {
    "max": "{F} {T} max_{t}({T} a, {T} b) {{ return a > b ? a : b; }}",
    "min": "{F} {T} min_{t}({T} a, {T} b) {{ return a < b ? a : b; }}",
    "relu": "{F} {T} relu_{t}({T} a) {{ return a > 0 ? a : 0; }}",
    "square": "{F} {T} square_{t}({T} a) {{ return ({T})(({W})a * ({W})a); }}",
    "sign": "{F} {T} sign_{t}({T} a) {{ return ({T})((a > 0) - (a < 0)); }}",
    "abs": "{F} {T} abs_{t}({T} a) {{ return a < 0 ? ({T})(({W})0 - ({W})a) : a; }}",
    "floordiv": (
        "{F} {T} floordiv_{t}({T} a, {T} b) {{  // floors; by zero gives 0\n"
        "  if (b == 0) return 0;\n"
        "  if (b == ({T})-1) return ({T})(({W})0 - ({W})a);\n"
        "  return ({T})(a / b - (a % b != 0 && (a < 0) != (b < 0)));\n}}"
    ),
    "mod": (
        "{F} {T} mod_{t}({T} a, {T} b) {{  // the sign of b; by zero gives 0\n"
        "  if (b == 0 || b == ({T})-1) return 0;\n"
        "  {T} r = ({T})(a % b);\n  return ({T})(r != 0 && (r < 0) != (b < 0) ? r + b : r);\n}}"
    ),
    "truncdiv": (
        "{F} {T} truncdiv_{t}({T} a, {T} b) {{\n"
        "  if (b == 0) return 0;\n  return b == ({T})-1 ? ({T})(({W})0 - ({W})a) : ({T})(a / b);\n}}"
    ),
    "truncmod": ("{F} {T} truncmod_{t}({T} a, {T} b) {{ return b == 0 || b == ({T})-1 ? ({T})0 : ({T})(a % b); }}"),
    "remainder": (
        "{F} {T} remainder_{t}({T} a, {T} b) {{  // by the nearest quotient, ties to even; by zero gives 0\n"
        "  if (b == 0 || b == ({T})-1) return 0;\n"
        "  {T} r = ({T})(a % b);\n"
        "  {W} size = b < 0 ? ({W})0 - ({W})b : ({W})b, far = r < 0 ? ({W})0 - ({W})r : ({W})r;\n"
        "  if (far < size - far || (far == size - far && !(a / b & 1))) return r;\n"
        "  return ({T})(r < 0 ? ({W})r + size : ({W})r - size);\n}}"
    ),
    "shl": ("{F} {T} shl_{t}({T} a, {T} b) {{ return b >= {w} ? ({T})0 : ({T})(({W})a << (b < 0 ? 0 : b)); }}"),
    "shr": ("{F} {T} shr_{t}({T} a, {T} b) {{ return b >= {w} ? ({T})(a < 0 ? -1 : 0) : ({T})(a >> (b < 0 ? 0 : b)); }}"),
    "pow": (
        "{F} {T} pow_{t}({T} a, {T} b) {{  // by squaring; a negative power is truncated\n"
        "  if (b < 0) return a == 1 ? ({T})1 : a == ({T})-1 ? ({T})(b & 1 ? -1 : 1) : ({T})0;\n"
        "  {W} p = 1, square = ({W})a, e = ({W})b;\n"
        "  for (; e; e >>= 1, square *= square) if (e & 1) p *= square;\n  return ({T})p;\n}}"
    ),
}
# unsigned types: no negative operand, no -1 to divide by
_UNSIGNED = {
    "abs": "{F} {T} abs_{t}({T} a) {{ return a; }}",
    "relu": "{F} {T} relu_{t}({T} a) {{ return a; }}",
    "sign": "{F} {T} sign_{t}({T} a) {{ return ({T})(a != 0); }}",
    "floordiv": "{F} {T} floordiv_{t}({T} a, {T} b) {{ return b == 0 ? ({T})0 : ({T})(a / b); }}",
    "mod": "{F} {T} mod_{t}({T} a, {T} b) {{ return b == 0 ? ({T})0 : ({T})(a % b); }}",
    "truncdiv": "{F} {T} truncdiv_{t}({T} a, {T} b) {{ return b == 0 ? ({T})0 : ({T})(a / b); }}",
    "truncmod": "{F} {T} truncmod_{t}({T} a, {T} b) {{ return b == 0 ? ({T})0 : ({T})(a % b); }}",
    "remainder": (
        "{F} {T} remainder_{t}({T} a, {T} b) {{\n"
        "  if (b == 0) return 0;\n"
        "  {W} r = a % b, far = b - r;\n  return ({T})(r < far || (r == far && !(a / b & 1)) ? r : r - b);\n}}"
    ),
    "shl": "{F} {T} shl_{t}({T} a, {T} b) {{ return b >= {w} ? ({T})0 : ({T})(a << b); }}",
    "shr": "{F} {T} shr_{t}({T} a, {T} b) {{ return b >= {w} ? ({T})0 : ({T})(a >> b); }}",
    "pow": (
        "{F} {T} pow_{t}({T} a, {T} b) {{\n"
        "  {W} p = 1, square = a, e = b;\n"
        "  for (; e; e >>= 1, square *= square) if (e & 1) p *= square;\n  return ({T})p;\n}}"
    ),
}

_BITS_C = """typedef union { float f; unsigned int u; } bits_f32;
static inline unsigned int f32_bits(float a) { bits_f32 b; b.f = a; return b.u; }
static inline float bits_to_f32(unsigned int u) { bits_f32 b; b.u = u; return b.f; }"""
_BITS_CUDA = """__device__ __forceinline__ unsigned int f32_bits(float a) { return __float_as_uint(a); }
__device__ __forceinline__ float bits_to_f32(unsigned int u) { return __uint_as_float(u); }"""
_HALF_C_TO = """static inline float f16_to_f32(unsigned short h) {
  union { unsigned short u; _Float16 h; } b;
  b.u = h;
  return b.h;
}"""
_HALF_C_FROM = "static inline _Float16 f32_to_f16(float a) { return (_Float16)a; }"
_HALF_CUDA_TO = """__device__ __forceinline__ float f16_to_f32(unsigned short h) {
  float a;
  asm("cvt.f32.f16 %0, %1;" : "=f"(a) : "h"(h));
  return a;
}"""
_HALF_HIP_TO = """__device__ __forceinline__ float f16_to_f32(unsigned short h) {
  return (float)__builtin_bit_cast(_Float16, h);
}"""
_HALF_HIP_FROM = """__device__ __forceinline__ unsigned short f32_to_f16(float a) {
  return __builtin_bit_cast(unsigned short, (_Float16)a);
}"""
_HALF_CUDA_FROM = """__device__ __forceinline__ unsigned short f32_to_f16(float a) {
  unsigned short h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(a));
  return h;
}"""
_BFLOAT_CUDA_FROM = """__device__ __forceinline__ unsigned short f32_to_bf16(float a) {  // to nearest even, NaN to NaN
#if __CUDA_ARCH__ >= 800
  unsigned short h;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(a));
  return h;
#else
  unsigned int u = __float_as_uint(a);
  if (a != a) return (unsigned short)(u >> 16 | 64);
  return (unsigned short)((u + 0x7fff + (u >> 16 & 1)) >> 16);
#endif
}"""
# float8 conversions come in pairs, the second operand in the low byte; inf saturates, any NaN gives 0x7f
_FLOAT8_CUDA_FROM = """__device__ __forceinline__ unsigned char f32_to_{t}(float a) {{  // to nearest even, saturating
#if __CUDA_ARCH__ >= 890
  unsigned short pair;
  asm("cvt.rn.satfinite.{t}x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(a));
  return (unsigned char)pair;
#else
{body}
#endif
}}"""
# every index from data has a number in KernelSource.checks, so that it can be reported
_IN_RANGE_CUDA = """__device__ __forceinline__ int in_range(long long at, unsigned long long size, int check) {
  return (unsigned long long)at < size;
}"""
# Helpers that languages write in different ways.
_OF_LANGUAGE: dict[Language, dict[str, Helper]] = {
    Language.C: {
        "f32_bits": Helper(_BITS_C),
        "f16_to_f32": Helper(_HALF_C_TO),
        "f32_to_f16": Helper(_HALF_C_FROM),
    },
    Language.CUDA: {
        "f32_bits": Helper(_BITS_CUDA),
        "f16_to_f32": Helper(_HALF_CUDA_TO),
        "f32_to_f16": Helper(_HALF_CUDA_FROM),
        "f32_to_bf16": Helper(_BFLOAT_CUDA_FROM),
        "in_range": Helper(_IN_RANGE_CUDA),
        "div_const_f32": Helper(_DIV_CONST_CUDA),
        "exp2_approx": Helper(EXP2_APPROX),
        "rcp_approx": Helper(RCP_APPROX),
        "max_f32": Helper(_EXTREMUM_CUDA.format(which="max", sign=">")),
        "min_f32": Helper(_EXTREMUM_CUDA.format(which="min", sign="<")),
        "relu_f32": Helper("__device__ __forceinline__ float relu_f32(float a) { return max_f32(a, 0.0f); }", ("max_f32",)),
    },
    Language.HIP: {
        "f32_bits": Helper(_BITS_CUDA),
        "f16_to_f32": Helper(_HALF_HIP_TO),
        "f32_to_f16": Helper(_HALF_HIP_FROM),
        "exp2_approx": Helper(EXP2_HIP),
        "in_range": Helper(_IN_RANGE_CUDA),
    },
}
_CONVERSIONS = {
    "bf16_to_f32": (
        "{F} float bf16_to_f32(unsigned short h) {{ return bits_to_f32((unsigned int)h << 16); }}", ("f32_bits",)
    ),
    "bf16_of_word": (
        "{F} float bf16_of_word(const unsigned short *run, int i) {{  // of an array that is aligned to words\n"
        "  unsigned int word = *(const unsigned int *)&run[i & ~1];\n"
        "  return bits_to_f32(i & 1 ? word & 0xffff0000u : word << 16);\n}}", ("f32_bits",)
    ),
    "f32_to_bf16": (
        "{F} unsigned short f32_to_bf16(float a) {{  // to nearest even; NaN stays NaN\n"
        "  unsigned int u = f32_bits(a);\n"
        "  if (a != a) return (unsigned short)(u >> 16 | 64);\n"
        "  return (unsigned short)((u + 0x7fff + (u >> 16 & 1)) >> 16);\n}}", ("f32_bits",)
    ),
    "e5m2_to_f32": (
        "{F} float e5m2_to_f32(unsigned char e) {{ return f16_to_f32((unsigned short)(e << 8)); }}", ("f16_to_f32",)
    ),
    "e4m3_to_f32": (
        "{F} float e4m3_to_f32(unsigned char e) {{  // a float16 with a bias of 7, not 15; 0x7f is NaN, not infinity\n"
        "  unsigned int m = e & 127;\n"
        "  float a = f16_to_f32((unsigned short)((e & 128) << 8 | m << 7)) * 256.0f;\n"
        "  return m == 127 ? bits_to_f32((unsigned int)(e & 128) << 24 | 0x7fc00000) : a;\n}}",
        ("f32_bits", "f16_to_f32")
    ),
    "f32_to_e4m3": (
        "{F} unsigned char f32_to_e4m3(float a) {{  // to nearest even, saturating at 448\n"
        "  unsigned int u = f32_bits(a), sign = u >> 24 & 128;\n"
        "  u &= 0x7fffffff;\n"
        "  if (u > 0x7f800000) return (unsigned char)(sign | 127);\n"
        "  if (u >= 0x43e00000) return (unsigned char)(sign | 126);\n"
        "  if (u < 0x3c800000) return (unsigned char)(sign | (f32_bits(bits_to_f32(u) + 16384.0f) - 0x46800000));\n"
        "  u += 0x7ffff + (u >> 20 & 1);\n"
        "  u = (u >> 20) - 960;\n"
        "  return (unsigned char)(sign | (u > 126 ? 126 : u));\n}}", ("f32_bits",)
    ),
    "f32_to_e5m2": (
        "{F} unsigned char f32_to_e5m2(float a) {{  // to nearest even, saturating at 57344\n"
        "  unsigned int u = f32_bits(a), sign = u >> 24 & 128;\n"
        "  u &= 0x7fffffff;\n"
        "  if (u > 0x7f800000) return (unsigned char)(sign | 127);\n"
        "  if (u >= 0x47600000) return (unsigned char)(sign | 123);\n"
        "  if (u < 0x38800000) return (unsigned char)(sign | (f32_bits(bits_to_f32(u) + 128.0f) - 0x43000000));\n"
        "  u += 0xfffff + (u >> 21 & 1);\n"
        "  u = (u >> 21) - 448;\n"
        "  return (unsigned char)(sign | (u > 123 ? 123 : u));\n}}", ("f32_bits",)
    ),
}  # fmt: skip

# Rounds to float32, to the neighbour whose last bit is one unless exact: rounding that to a narrow type is rounding
# once (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008). Integers of more digits than the
# float of as many bits are made exact first: the digits below its last one set that one.
_ODD_DOUBLE = """{F} float odd_f64(double a) {{
  const float near = (float)a;
  const double back = near;
  if (!(back < a || back > a)) return near;  // exact, or NaN
  return bits_to_f32((f32_bits(near) - (a < 0 ? back < a : back > a)) | 1);
}}"""
_ODD_INTEGER = """{F} float odd_{t}({T} a) {{
  const {T} high = a >> {digits}, rest = a & {mask};
  if (high != 0 && high != ({T})-1) a = a - rest + (rest ? {last} : 0);
  return {result};
}}"""

SIGNIFICAND_BITS = {32: 24, 64: 53}  # of the float of as many bits

CVT_BITS = 32  # of the widest integer that saturates in one conversion of a float32, with 0 for NaN

# A product that is rounded before an addition. Where float arithmetic of axes determines an index, the compiler must
# not contract the two, or the index may leave its proven range.
_ROUNDED_PRODUCT = {
    Language.C: "{F} {T} mul_rn_{t}({T} a, {T} b) {{\n  volatile {T} product = a * b;\n  return product;\n}}",
    Language.CUDA: "{F} {T} mul_rn_{t}({T} a, {T} b) {{ return __{r}mul_rn(a, b); }}",
    # HIP's __fmul_rn is a plain product, which the compiler contracts
    Language.HIP: ("{F} {T} mul_rn_{t}({T} a, {T} b) {{\n  #pragma clang fp contract(off)\n  return a * b;\n}}"),
}


def helper(name: str, dialect: Dialect) -> Helper:
    """Return the helper with a name: 'max_f32', 'to_i8', 'bf16_to_f32', 'pow_i32', 'f32_bits', ..."""
    if (own := _OF_LANGUAGE[dialect.language].get(name)) is not None:
        return own
    if dialect.language is Language.CUDA and (found := _cuda_helper(name, dialect)) is not None:
        return found
    if name in _CONVERSIONS:
        text, needs = _CONVERSIONS[name]
        return Helper(text.format(F=dialect.function), needs)
    base, _, short = name.rpartition("_")
    dtype = _BY_SHORT.get(short)
    if dtype is None:
        raise InvariantError(f"no helper {name}")
    if base.startswith("gather"):
        return _gather(int(base.removeprefix("gather")), dtype, dialect)
    if base.startswith("run"):
        size = int(base.removeprefix("run")) * dtype.bytes
        return Helper(f"typedef {dialect.storage_type(dtype)} {name} __attribute__((vector_size({size})));")
    if base.startswith("lane_"):
        return _warp_reduce(base.removeprefix("lane_"), dtype, dialect)
    if base.startswith("before_"):
        return _warp_scan(base.removeprefix("before_"), dtype, dialect)
    if (make := _MAKERS.get(base)) is not None:
        return make(dtype, dialect)
    table = _FLOAT if dtype.is_float else _INTEGER if dtype.is_signed else {**_INTEGER, **_UNSIGNED}
    if base not in table:
        raise InvariantError(f"no helper {name}")
    return Helper(table[base].format(**_words(dtype, dialect)))


def _cuda_helper(name: str, dialect: Dialect) -> Helper | None:
    """Return a helper that is made of instructions of NVIDIA GPUs, or None."""
    base, _, short = name.rpartition("_")
    if base == "f32_to" and short in _BY_SHORT and not _BY_SHORT[short].is_float:
        return _truncating_cuda(_BY_SHORT[short], dialect)
    if base.endswith("_approx"):
        general = _APPROXIMATE[base.removesuffix("_approx")]
        return Helper(general.text.format(F=dialect.function), general.needs)
    if name in ("f32_to_e4m3", "f32_to_e5m2"):
        text, needs = _CONVERSIONS[name]
        body = text.format(F=dialect.function).partition("\n")[2].removesuffix("\n}")
        return Helper(_FLOAT8_CUDA_FROM.format(t=short, body=body), needs)
    return None


def _words(dtype: DType, dialect: Dialect) -> dict[str, str]:
    return {
        "F": dialect.function,
        "T": dialect.value_type(dtype),
        "t": SHORT[dtype],
        "s": "" if dtype is DType.FLOAT64 else "f",
        "w": str(dtype.bits),
        # arithmetic in a type at least as wide that wraps
        "W": "unsigned long long" if dtype.bits == 64 else "unsigned int",
        "inf": dialect.inf_f64 if dtype is DType.FLOAT64 else dialect.inf_f32,
    }


def _gather(dims: int, dtype: DType, dialect: Dialect) -> Helper:
    """Return the helper that loads an element at `dims` indices from data, or 0 if one is out of range."""
    type_ = dialect.storage_type(dtype)
    parameters = "".join(f", long long i{d}, long long n{d}, long long s{d}, int c{d}" for d in range(dims))
    inside = " && ".join(f"in_range(i{d}, n{d}, c{d})" for d in range(dims))
    place = " + ".join(f"i{d} * s{d}" for d in range(dims))
    text = (
        f"{dialect.function} {type_} gather{dims}_{SHORT[dtype]}(const {type_} *p{parameters}) {{\n"
        f"  return {inside} ? p[{place}] : ({type_})0;\n}}"
    )
    return Helper(text, ("in_range",))


def _warp_reduce(which: str, dtype: DType, dialect: Dialect) -> Helper:
    """Return the helper that reduces over lanes by butterfly shuffles: 'max', or 'max_by16' for lanes 16 apart."""
    words = _words(dtype, dialect)
    combine, _, stride = which.partition("_by")
    joined, needs = _joined_lanes(combine, dtype, dialect)
    shuffled = dialect.shuffle_xor.format(a="a", across="across")
    note = "aligned neighbours, for all of them to see"
    first, last = "lanes / 2", "across"
    if stride:
        note, first, last = f"lanes {stride} apart, for all of them to see", f"lanes * {int(stride) // 2}", f"across >= {stride}"
    text = (
        "{F} {T} lane_{which}_{t}({T} a, int lanes) {{  // of {note}\n"
        "  #pragma unroll\n  for (int across = {first}; {last}; across /= 2) {{\n"
        "    {T} b = {shuffled};\n    a = {joined};\n  }}\n  return a;\n}}"
    ).format(which=which, note=note, first=first, last=last, joined=joined, shuffled=shuffled, **words)
    return Helper(text, needs)


def _warp_scan(which: str, dtype: DType, dialect: Dialect) -> Helper:
    """Return the helper that combines the values of the lanes before each one (Hillis and Steele)."""
    words = _words(dtype, dialect)
    if which in ("recurrence", "resets"):
        return _warp_recurrence(which, dtype, dialect)
    joined, needs = _joined_lanes(which, dtype, dialect)
    up, last = (dialect.shuffle_up.format(a="a", by=by) for by in ("by * stride", "stride"))
    text = (
        "{F} {T} before_{which}_{t}({T} a, {T} neutral, int place, int lanes, int stride) {{  // lanes of a group\n"
        "  #pragma unroll\n  for (int by = 1; by < lanes; by *= 2) {{\n"
        "    {T} b = {up};\n    if (place >= by) a = {joined};\n  }}\n"
        "  a = {last};\n  return place ? a : neutral;\n}}"
    ).format(which=which, joined=joined, up=up, last=last, **words)
    return Helper(text, needs)


def _warp_recurrence(which: str, dtype: DType, dialect: Dialect) -> Helper:
    """Return the helper that composes the linear steps of the lanes before each one: `gate * state + value`.

    `LinearStep` says which products are formed.
    """
    gate = gate_product_dtype(dtype)
    words = _words(dtype, dialect) | {"G": dialect.value_type(gate), "least": repr(LEAST_GATE)}
    values, gates, last_value, last_gate = (
        dialect.shuffle_up.format(a=a, by=by) for by in ("by * stride", "stride") for a in ("v", "g")
    )
    joined, product = "({T})(({W})g * ({W})b + ({W})v)", "({T})(({W})g * ({W})f)"
    if dtype.is_float:
        joined, product = "b != 0 ? ({T})(g * b + v) : v", "g * f"
    if which == "resets":
        joined = f"g != 0 ? ({joined}) : v"
        if dtype.is_float:
            gated = "fabs(g) <= {least} ? g : fabs(g * f) <= {least} ? {least} : g * f"
            product = f"fabs(f) <= {{least}} ? (g != 0 ? f : 0) : {gated}"
    text = (
        "{F} void before_{which}_{t}({T} *value, {G} *gate, int place, int lanes, int stride) {{  // lanes of a group\n"
        "  {T} v = *value;\n  {G} g = *gate;\n"
        "  #pragma unroll\n  for (int by = 1; by < lanes; by *= 2) {{\n"
        f"    const {{T}} b = {values};\n    const {{G}} f = {gates};\n"
        f"    if (place >= by) {{{{ v = {joined}; g = {product}; }}}}\n  }}}}\n"
        f"  const {{T}} b = {last_value};\n  const {{G}} f = {last_gate};\n"
        "  *value = place ? b : 0;\n  *gate = place ? f : 1;\n}}"
    ).format(which=which, **words)
    return Helper(text)


def _joined_lanes(which: str, dtype: DType, dialect: Dialect) -> tuple[str, tuple[str, ...]]:
    """Return the combination of `a` and `b` of two lanes, and the helpers that it calls."""
    if which in ("max", "min"):
        name = f"{which}_{SHORT[dtype]}"
        return f"{name}(a, b)", (name,)
    sign = "+" if which == "sum" else "*"
    return (f"a {sign} b" if dtype.is_float else f"({{T}})(({{W}})a {sign} ({{W}})b)".format(**_words(dtype, dialect))), ()


def _rounded_product(dtype: DType, dialect: Dialect) -> Helper:
    words = _words(dtype, dialect) | {"r": "d" if dtype is DType.FLOAT64 else "f"}
    return Helper(_ROUNDED_PRODUCT[dialect.language].format(**words))


def _round_to_odd(dtype: DType, dialect: Dialect) -> Helper:
    """Return the conversion of a wide value to a float32, whose later rounding to a narrow type is the only one."""
    words = _words(dtype, dialect)
    if dtype is DType.FLOAT64:
        return Helper(_ODD_DOUBLE.format(**words), ("f32_bits",))
    result, needs = ("odd_f64((double)a)", ("odd_f64",)) if dtype.bits == 64 else ("(float)a", ())
    digits = SIGNIFICAND_BITS[dtype.bits]
    last = 1 << (dtype.bits - digits)
    return Helper(_ODD_INTEGER.format(**words, digits=digits, mask=2 * last - 1, last=last, result=result), needs)


def _saturating(dtype: DType, dialect: Dialect) -> Helper:
    """Return the conversion of float to integer: it truncates and saturates, and NaN gives 0."""
    least, greatest = dtype.integer_range
    type_ = dialect.value_type(dtype)
    low = f"({type_})({least + 1} - 1)" if least else "0"
    suffix = "LL" if dtype is DType.INT64 else "ULL" if dtype is DType.UINT64 else ""
    if dtype is DType.INT64:
        low = "(-9223372036854775807LL - 1)"
    text = (
        f"{dialect.function} {type_} to_{SHORT[dtype]}(double a) {{  // truncates and saturates; NaN gives 0\n"
        f"  if (a != a) return 0;\n"
        f"  if (a <= {float(least)!r}) return {low};\n"
        f"  if (a >= {float(greatest + 1)!r}) return {greatest}{suffix};\n"
        f"  return ({type_})a;\n}}"
    )
    return Helper(text)


_MAKERS: dict[str, Callable[[DType, Dialect], Helper]] = {
    "mul_rn": _rounded_product, "odd": _round_to_odd, "to": _saturating,
}  # fmt: skip


def _truncating_cuda(dtype: DType, dialect: Dialect) -> Helper:
    """Return the conversion of float32 to an integer of at most 32 bits, by one cvt.rzi and a clamp.

    cvt saturates, and NaN gives 0 (PTX ISA, cvt).
    """
    least, greatest = dtype.integer_range
    head = f"{dialect.function} {dialect.value_type(dtype)} f32_to_{SHORT[dtype]}(float a)"
    if dtype.bits == CVT_BITS:
        return Helper(f"{head} {{ return __float2{'' if dtype.is_signed else 'u'}int_rz(a); }}")
    return Helper(
        f"{head} {{\n  const int i = __float2int_rz(a);\n  return i < {least} ? {least} : i > {greatest} ? {greatest} : i;\n}}"
    )
