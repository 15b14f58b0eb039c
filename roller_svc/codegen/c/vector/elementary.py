"""Elementary functions of vectors, as C source generic in the number of lanes.

They are branch-free and correct everywhere: NaN, infinities, both zeros, subnormal arguments and results. Exponentials
that round to zero are masked, because Intel CPUs take 150 cycles for an operation that underflows. They change no flag
of the process. `docs/cpu.md` states their error bounds and how these were measured.

Methods: reduction by ln 2 in two parts after Cody and Waite (Software Manual for the Elementary Functions, 1980);
rounding to an integer by adding 1.5 * 2^(digits - 1), whose low bits then hold it; log(1 + f) from s = f / (2 + f) for
float64 and log1p's term for what 1 + x rounds away, both after fdlibm (Sun Microsystems, 1993); tanh from expm1 of a
negative argument, which cannot overflow (the same). With AVX-512, erf has a polynomial for each of
32 segments, whose coefficients two registers hold. At a segment's centre it is nearly a float (Gal, Computing
elementary functions: a new approach, 1986). The coefficients are those that `tools/fit_minimax.py` prints.
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
# erf in 32 segments of 1/8: centres, erf of them, and coefficients of a polynomial of the distance, the lowest first
_ERF_SEGMENTS_F32 = (
    (0.0, 0.0, 0.0, 0.0, 0.49999404, 0.624994934, 0.749982417, 0.874991179, 0.999995947, 1.12496531, 1.2499814,
     1.37497127, 1.49997759, 1.6249727, 1.74999464, 1.8749814, 1.99998665, 2.12497211, 2.24993587, 2.37494826,
     2.49998689, 2.62498093, 2.74992871, 2.87497354, 2.99992871, 3.125, 3.25, 3.375, 3.5, 3.62492871, 3.74992871,
     3.9374001),
    (0.0, 0.0, 0.0, 0.0, 0.52049464, 0.623237014, 0.711144328, 0.784070432, 0.842699111, 0.88837719, 0.92289573,
     0.948165178, 0.966102481, 0.978441536, 0.986671388, 0.991989434, 0.995321989, 0.997345626, 0.998536825,
     0.999216855, 0.999593019, 0.999794602, 0.999899328, 0.999952137, 0.999977887, 0.999990106, 0.999995708,
     0.999998212, 0.999999285, 0.999999702, 0.999999881, 1.0),
    (0.128379166, 0.128378808, 0.128351241, 0.128081679, 0.878787816, 0.763504386, 0.642948031, 0.524753153,
     0.415110856, 0.318298787, 0.236532122, 0.170373231, 0.118938282, 0.0804793984, 0.0527759865, 0.0335481688,
     0.0206680894, 0.0123422835, 0.00714438083, 0.00400746241, 0.00217842706, 0.00114799011, 0.000586507143,
     0.000290272466, 0.000139312629, 6.47586858e-05, 2.91890265e-05, 1.27517415e-05, 5.39942721e-06, 2.21706614e-06,
     8.81903702e-07, 2.08713132e-07),
    (4.77506319e-07, 1.59782048e-05, 0.000556139741, 0.00389932748, -0.439388335, -0.477186263, -0.482199609,
     -0.459154397, -0.415109158, -0.358075082, -0.295660883, -0.234258398, -0.178404838, -0.130776882, -0.0923577324,
     -0.0629022196, -0.0413359068, -0.0262269974, -0.0160743855, -0.00951749552, -0.00544603122, -0.00301344367,
     -0.00161284173, -0.000834520208, -0.000417925243, -0.000202367839, -9.48625602e-05, -4.30361397e-05,
     -1.889747e-05, -8.03654802e-06, -3.3069457e-06, -8.2101667e-07),
    (-0.376164287, -0.376393706, -0.380423337, -0.396085143, -0.146467328, -0.0556865409, 0.0267746747, 0.0929138139,
     0.138372958, 0.162460163, 0.167533129, 0.157942772, 0.138758346, 0.114846461, 0.0901585892, 0.0674434602,
     0.0482245907, 0.033040572, 0.0217293128, 0.0137333954, 0.00835052971, 0.00489080604, 0.00276132463,
     0.00150271959, 0.000789392856, 0.00040001556, 0.000195807457, 9.25815984e-05, 4.22946869e-05, 1.86821526e-05,
     7.9733245e-06, 2.11417273e-06),
    (0.000974097871, 0.0020417776, 0.0156465769, 0.0485082418, 0.182805344, 0.176285341, 0.150566146, 0.112369776,
     0.0691909641, 0.0280126184, -0.00604111375, -0.0303898063, -0.0445071831, -0.0496514179, -0.0480595268,
     -0.0422380902, -0.034442883, -0.0263722651, -0.0191007238, -0.0131523944, -0.00863493048, -0.00542506436,
     -0.00326819648, -0.0018875855, -0.00104815373, -0.000560060609, -0.000288017647, -0.000142692981,
     -6.81454549e-05, -3.13683631e-05, -1.3953867e-05, -3.4230286e-06),
    (0.104902655, 0.10648115, 0.0888998657, 0.0628349632, 0.00722789485, -0.025427755, -0.0525759459, -0.0660910085,
     -0.069989562, -0.0633668005, -0.0465287119, -0.0308648758, -0.0152638257, -0.00223228312, 0.00655162474,
     0.0115832677, 0.0131151592, 0.0124446694, 0.0106765768, 0.00833010115, 0.00612228317, 0.00422695093,
     0.00275788992, 0.00171847618, 0.00101955771, 0.000578837411, 0.000314958073, 0.000164444878, 8.25230745e-05,
     3.98335287e-05, 1.84928285e-05, 8.21820322e-06),
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


def _table(rows: Sequence[Sequence[float]]) -> str:
    """Print a table of float32 numbers."""
    return "{" + ", ".join("{" + ", ".join(f"{value!r}f" for value in row) + "}" for row in rows) + "}"


def _segment(row: int) -> str:
    return f"segment_$V(segments[{row}], ($I)t)"


# substitutions in the templates below, by type
_WORDS = {
    DType.FLOAT32: {
        "f": "f", "magic": "12582912.0f", "magic_bits": "0x4b400000", "log2e": "1.44269504f", "digits": "23",
        "bias": "127", "least": "-104.0f", "greatest": "89.0f", "tanh_least": "-20.0f", "certain": "20.0f", "expm1_least": "-18.0f",
        "ln2_hi": "0.693145752f", "ln2_lo": "1.42860677e-6f", "sign": "(-2147483647 - 1)", "rest": "0x7fffffff",
        "exp": _polynomial(_EXP_F32, "r", "f"), "inf": "__builtin_inff()", "nan": "__builtin_nanf(\"\")",
        "normal": "1.17549435e-38f", "scale": "8388608.0f", "root": "0x3f3504f3", "fraction": "0x7fffff",
        "lift": "(int)0x3f800000", "log": _polynomial(_LOG_F32, "f", "f"),
    },
    DType.FLOAT64: {
        "f": "", "magic": "6755399441055744.0", "magic_bits": "0x4338000000000000LL", "log2e": "1.4426950408889634",
        "digits": "52", "bias": "1023", "least": "-746.0", "greatest": "710.0", "tanh_least": "-44.0", "certain": "44.0",
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

_EXP = f"{_ZERO};\n{_REDUCE}$scaled".replace("$lowest", "$least")

# name → (body of a function of x, what it calls); in both widths
_BOTH = {
    "exp": (_EXP.replace("$highest", "$greatest"), ("select", "at_most")),
    "odds": (_EXP.replace("$highest", "$certain"), ("select", "at_most")),  # of a logit
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
        "  $V y = odds_$V(x);\n  return y / (1 + y);\n", ("odds",),
    ),
    "silu": (
        "  $V y = odds_$V(x);\n  return x * (y / (1 + y));\n", ("odds",),
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
        "#if defined(__AVX512F__)\n"
        f"  static const float _Alignas(64) segments[][32] = {_table(_ERF_SEGMENTS_F32)};\n"
        "  $V z = at_most_$V(($V)(($I)x & $rest), 3.9374f);  // beyond it erf rounds to 1\n"
        "  $V t = z * 8.0f + $magic;  // its low bits are the number of the segment\n"
        f"  $V r = z - {_segment(0)};\n"
        f"  $V y = {_segment(len(_ERF_SEGMENTS_F32) - 1)};\n"
        f"{''.join(f'  y = y * r + {_segment(i)};{chr(10)}' for i in range(len(_ERF_SEGMENTS_F32) - 2, 1, -1))}"
        f"  y = y * r + select_$V(z < 0.4375f, z, {_segment(1)});\n"
        "  return ($V)(($I)y | (($I)x & $sign));\n#else\n"
        "  $V z = ($V)(($I)x & $rest), s = x * x;\n"
        f"  $V near = {_polynomial(_ERF_F32, 's', 'f')} * x + x;\n"
        "  z = at_most_$V(z, 4.0f);\n"
        f"  $V a = -{_polynomial(_ERFC_F32, 'z', 'f')};  // log of 1 - erf(z)\n{_REDUCE}"
        "  $V power = ($V)((n + $bias) << $digits);\n"
        "  y = (1 - power) - power * y;\n"
        "  y = ($V)(($I)y | (($I)x & $sign));\n"
        "  return select_$V(z < 0.925f, near, y);\n#endif\n",
        ("select", "at_most", "segment"),
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
