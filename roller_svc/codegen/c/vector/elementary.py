"""Elementary functions of vectors, as C source generic in the number of lanes.

They are branch-free and correct everywhere: NaN, infinities, both zeros, subnormal arguments and results. Exponentials
that round to zero are masked, because Intel CPUs take 150 cycles for an operation that underflows. They change no flag
of the process. `docs/cpu.md` states their error bounds and how these were measured.

Methods: reduction by ln 2 in two parts after Cody and Waite (Software Manual for the Elementary Functions, 1980);
rounding to an integer by adding 1.5 * 2^(digits - 1), whose low bits then hold it; log(1 + f) from s = f / (2 + f) for
float64 and log1p's term for what 1 + x rounds away, both after fdlibm (Sun Microsystems, 1993); tanh from expm1 of a
negative argument, which cannot overflow (the same). The coefficients are those that `tools/fit_minimax.py` prints.
"""

from __future__ import annotations

from collections.abc import Sequence
from string import Template

from roller_svc.codegen.c.vector.types import instruction, with_fallback
from roller_svc.codegen.dialect import SHORT
from roller_svc.ir.dtype import DType

_EXP_F32 = (0.5, 0.1666651964187622, 0.041666414588689804, 0.008368823677301407, 0.0013939491473138332)
_EXP2_F32 = (
    0.6931471824645996, 0.24022650718688965, 0.055503591895103455, 0.009618069976568222, 0.001339116133749485,
    0.00015459656424354762,
)  # fmt: skip
_LOG_F32 = (
    0.3333331346511841, -0.25000011920928955, 0.20002074539661407, -0.1666785478591919, 0.14220187067985535,
    -0.12408165633678436, 0.11886581778526306, -0.11661067605018616, 0.06732604652643204,
)  # fmt: skip
_ERF_F32 = (
    0.12837916612625122, -0.3761262893676758, 0.11283625662326813, -0.02685573324561119, 0.00519241439178586,
    -0.0008049918105825782, 7.997413194971159e-05,
)  # fmt: skip
_ERFC_F32 = (
    -0.0001603815471753478, 1.1294339895248413, 0.6335437297821045, 0.10801168531179428, -0.024895090609788895,
    0.00405346043407917, -0.00039672452840022743, 1.432092540198937e-05, 5.205696425036876e-07,
)  # fmt: skip
_SIN_F32 = (-0.16666655242443085, 0.008332189172506332, -0.00019518278713803738)
_COS_F32 = (0.04166664555668831, -0.0013887310633435845, 2.443256016704254e-05)
_EXP_F64 = (
    0.5000000000000013, 0.16666666666666682, 0.041666666666511254, 0.008333333333317145, 0.001388888894799312,
    0.00019841269896883124, 2.480148900846944e-05, 2.755723396576664e-06, 2.7631594010269863e-07,
    2.5112424027297413e-08,
)  # fmt: skip
_LOG_F64 = (
    0.6666666666666734, 0.39999999999416636, 0.2857142874204085, 0.2222219860232184, 0.18183563069734732,
    0.15314077337550583, 0.1479572691312117,
)  # fmt: skip


def _polynomial(coefficients: Sequence[float], of: str, suffix: str) -> str:
    """Print Horner's rule, which compilers contract to fused multiply-adds."""
    text = f"{coefficients[-1]!r}{suffix}"
    for c in reversed(coefficients[:-1]):
        text = f"({text} * {of} {'-' if c < 0 else '+'} {abs(c)!r}{suffix})"
    return text


# substitutions in the templates below, by type
_WORDS = {
    DType.FLOAT32: {
        "f": "f", "magic": "12582912.0f", "magic_bits": "0x4b400000", "log2e": "1.44269504f", "digits": "23",
        "bias": "127", "least": "-104.0f", "greatest": "89.0f", "tanh_least": "-20.0f", "expm1_least": "-18.0f",
        "ln2_hi": "0.693145752f", "ln2_lo": "1.42860677e-6f", "sign": "(-2147483647 - 1)", "rest": "0x7fffffff",
        "exp": _polynomial(_EXP_F32, "r", "f"), "inf": "__builtin_inff()", "nan": "__builtin_nanf(\"\")",
        "normal": "1.17549435e-38f", "scale": "8388608.0f", "root": "0x3f3504f3", "fraction": "0x7fffff",
        "lift": "(int)0x3f800000", "log": _polynomial(_LOG_F32, "f", "f"),
    },
    DType.FLOAT64: {
        "f": "", "magic": "6755399441055744.0", "magic_bits": "0x4338000000000000LL", "log2e": "1.4426950408889634",
        "digits": "52", "bias": "1023", "least": "-746.0", "greatest": "710.0", "tanh_least": "-44.0",
        "expm1_least": "-40.0", "ln2_hi": "6.93147180369123816490e-01", "ln2_lo": "1.90821492927058770002e-10",
        "sign": "(-9223372036854775807LL - 1)", "rest": "0x7fffffffffffffffLL",
        "exp": _polynomial(_EXP_F64, "r", ""), "inf": "__builtin_inf()", "nan": "__builtin_nan(\"\")",
        "normal": "2.2250738585072014e-308", "scale": "4503599627370496.0", "root": "0x3fe6a09e667f3bcdLL",
        "fraction": "0xfffffffffffffLL", "lift": "0x3ff0000000000000LL", "log": _polynomial(_LOG_F64, "z", ""),
    },
}  # fmt: skip

_REDUCE = """  $V t = a * $log2e + $magic, k = t - $magic;
  $V r = (a - k * $ln2_hi) - k * $ln2_lo;
  $I n = ($I)t - $magic_bits;
  $V y = $exp * (r * r) + r;  // e^r - 1
"""
# the exponent is split in two: the result may be subnormal, or its power of two may overflow
_SCALED = """  $I h = ($I)(($U)(n + 4096) >> 1) - 2048;
  y = ((y + 1) * ($V)((h + $bias) << $digits)) * ($V)((n - h + $bias) << $digits);
  return select_$V(zero, ($V){0}, y);"""
_ZERO = """  $I zero = x < $lowest;
  $V a = at_most_$V(select_$V(zero, ($V){0}, x), $highest)"""
_LOG_REDUCE = """  $I i = ($I)a - $root;
  $I e = ($I)(($U)(i + $lift) >> $digits) - $bias;
"""
_LOG_CORE = {
    DType.FLOAT32: "  $V s = f * f, y = $log * (f * s) - 0.5f * s;  // log(1 + f) - f\n",
    DType.FLOAT64: """  $V s = f / (f + 2.0), z = s * s, q = 0.5 * (f * f);
  $V y = s * (q + z * $log) - q;  // log(1 + f) - f
""",
}
_LOG_EDGES = """  y = select_$V(x < $inf, y, x);
  y = select_$V(x == 0, -$inf - ($V){0}, y);
  return select_$V(x < 0, $nan - ($V){0}, y);
"""
_LOG_SPLIT = f"""  $I tiny = x < $normal;
  $V a = select_$V(tiny, x * $scale, x);
{_LOG_REDUCE}  $V f = ($V)((i & $fraction) + $root) - 1;
  e -= tiny & $digits;
"""

# name → (body of a function of x, what it calls); in both widths
_BOTH = {
    "exp": (
        f"{_ZERO};\n{_REDUCE}$scaled".replace("$lowest", "$least").replace("$highest", "$greatest"),
        ("select", "at_most"),
    ),
    "expm1": (
        f"  $V a = at_least_$V(at_most_$V(x, $greatest), $expm1_least);\n{_REDUCE}"
        "  $V half = ($V)((n + $bias - 1) << $digits);\n"
        "  y = 2 * (half * y + (half - 0.5$f));\n"
        "  return ($V)(($I)y | (($I)x & $sign));  // for -0\n",
        ("at_least", "at_most"),
    ),
    "tanh": (
        f"  $V a = at_least_$V(-2 * ($V)(($I)x & $rest), $tanh_least);\n{_REDUCE}"
        "  $V power = ($V)((n + $bias) << $digits);\n"
        "  y = (power * y + (power - 1)) / (power * y + (power + 1));  // (e^(-2 |x|) - 1) / (e^(-2 |x|) + 1)\n"
        "  return ($V)((($I)y & $rest) | (($I)x & $sign));\n",
        ("at_least",),
    ),
    "log": (
        f"{_LOG_SPLIT}  $V k = ($V)(e + $magic_bits) - $magic;\n$core"
        f"  y = (y + k * $ln2_lo) + f;\n  y = k * $ln2_hi + y;\n{_LOG_EDGES}",
        ("select",),
    ),
    "log1p": (
        f"  $V a = x + 1;\n{_LOG_REDUCE}"
        "  $V f = select_$V(e == 0, x, ($V)((i & $fraction) + $root) - 1);\n"
        "  $V lost = select_$V(x > 1, 1 - (a - x), x - (a - 1)) / a;  // of 1 + x by rounding\n"
        "  lost = select_$V(e == 0, ($V){0}, lost);\n"
        "  $V k = ($V)(e + $magic_bits) - $magic;\n$core"
        "  y = (y + (k * $ln2_lo + lost)) + f;\n  y = k * $ln2_hi + y;\n"
        "  y = ($V)(($I)y | (($I)x & $sign));  // for -0\n"
        "  y = select_$V(x < $inf, y, x);\n"
        "  y = select_$V(x == -1, -$inf - ($V){0}, y);\n"
        "  return select_$V(x < -1, $nan - ($V){0}, y);\n",
        ("select",),
    ),
    "sigmoid": (
        "  $V e = exp_$V(($V)(($I)x | $sign));\n  return select_$V(x < 0, e, 1 - ($V){0}) / (1 + e);\n",
        ("select", "exp"),
    ),
    "silu": (
        "  $V e = exp_$V(($V)(($I)x | $sign));\n  return select_$V(x < 0, x * e, x) / (1 + e);\n", ("select", "exp"),
    ),
    "softplus": (
        "  return log1p_$V(exp_$V(($V)(($I)x | $sign))) + select_$V(x < 0, ($V){0}, x);\n",
        ("select", "exp", "log1p"),
    ),
    "normcdf": ("  return 0.5$f * (1 + erf_$V(x * 0.70710678118654752440$f));\n", ("erf",)),
    "gelu": ("  return x * 0.5$f * (1 + erf_$V(x * 0.70710678118654752440$f));\n", ("erf",)),
}  # fmt: skip

_QUADRANT = """#if !defined(__FMA__) && !defined(__aarch64__)  // the reduction needs products that are not rounded
  const int far = 1;
#else
  $I outside = ~(($V)(($I)x & $rest) <= 30000.0f);
  int far = 0;
  for (int i = 0; i < $N; i++) far |= outside[i];
#endif
  if (far) {
    $V y;
    for (int i = 0; i < $N; i++) y[i] = ${which}f(x[i]);
    return y;
  }
  $V t = x * 0.636619772f + $magic, k = t - $magic;
  $V r = ((x - k * 1.57079637f) - k * -4.37113900e-8f) - k * -1.71512451e-15f, s = r * r;
"""
_QUADRANT_END = """  $V sine = $sin * (r * s) + r, cosine = $cos * (s * s) - 0.5f * s + 1;
"""
_F32_ONLY = {
    "exp2": (
        f"{_ZERO}, t = a + $magic, k = t - $magic, r = a - k;\n"
        f"  $I n = ($I)t - $magic_bits;\n  $V y = {_polynomial(_EXP2_F32, 'r', 'f')} * r;\n$scaled"
        .replace("$lowest", "-151.0f").replace("$highest", "129.0f"),
        ("select", "at_most"),
    ),
    "log2": (
        f"{_LOG_SPLIT}  $V k = __builtin_convertvector(e, $V);\n$core"
        "  y = f * 1.44269502f + (f * 1.92596303e-8f + y * 1.44269502f);\n  y = k + y;\n" + _LOG_EDGES,
        ("select",),
    ),
    "log10": (
        f"{_LOG_SPLIT}  $V k = __builtin_convertvector(e, $V);\n$core"
        "  y = f * 0.434294492f + (f * -1.01008290e-8f + y * 0.434294492f);\n"
        "  y = k * 0.301025391f + (k * 4.60503907e-6f + y);\n" + _LOG_EDGES,
        ("select",),
    ),
    "erf": (
        "  $V z = ($V)(($I)x & $rest), s = x * x;\n"
        f"  $V near = {_polynomial(_ERF_F32, 's', 'f')} * x + x;\n"
        "  z = at_most_$V(z, 4.0f);\n"
        f"  $V a = -{_polynomial(_ERFC_F32, 'z', 'f')};  // log of 1 - erf(z)\n{_REDUCE}"
        "  $V power = ($V)((n + $bias) << $digits);\n"
        "  y = (1 - power) - power * y;\n"
        "  y = ($V)(($I)y | (($I)x & $sign));\n"
        "  return select_$V(z < 0.925f, near, y);\n",
        ("select", "at_most"),
    ),
    "sin": (
        f"{_QUADRANT}  $I n = ($I)t - $magic_bits;\n{_QUADRANT_END}"
        "  $V y = select_$V((n & 1) != 0, cosine, sine);\n"
        "  y = ($V)(($I)y ^ ((n & 2) << 30));\n  return select_$V(x == 0, x, y);  // for -0\n",
        ("select",),
    ),
    "cos": (
        f"{_QUADRANT}  $I n = ($I)t - $magic_bits;\n{_QUADRANT_END}"
        "  $V y = select_$V((n & 1) != 0, sine, cosine);\n  return ($V)(($I)y ^ (((n + 1) & 2) << 30));\n",
        ("select",),
    ),
}  # fmt: skip

# library functions that a vector function calls for arguments outside of its range
LIBRARY_OF = {"sin": "sinf", "cos": "cosf"}
_TABLES = {DType.FLOAT32: _BOTH | _F32_ONLY, DType.FLOAT64: {k: v for k, v in _BOTH.items() if "erf" not in v[1]}}


def has_function(name: str, dtype: DType) -> bool:
    """Return whether there is a vector version of a function for a type."""
    return name in _TABLES.get(dtype, {})


def calls(name: str, dtype: DType) -> tuple[str, ...]:
    """Return the base names of the vector helpers that the function needs."""
    return _TABLES[dtype][name][1]


def function_text(name: str, dtype: DType, lanes: int) -> str:
    """Return the source of the function of vectors of `lanes` elements."""
    short, wide = SHORT[dtype], 8 * dtype.bytes
    words = _WORDS[dtype] | {
        "V": f"v{short}x{lanes}", "I": f"vi{wide}x{lanes}", "U": f"vu{wide}x{lanes}", "N": str(lanes), "which": name,
        "sin": _polynomial(_SIN_F32, "s", "f"), "cos": _polynomial(_COS_F32, "s", "f"),
    }  # fmt: skip
    scaled = with_fallback(instruction("scaled", dtype, lanes), _SCALED)
    words["scaled"] = Template(scaled).substitute(words)
    words["core"] = Template(_LOG_CORE[dtype]).substitute(words)
    body = Template(_TABLES[dtype][name][0]).substitute(words)
    return f"static inline {words['V']} {name}_{words['V']}({words['V']} x) {{\n{body}}}"
