"""Names and signs of other languages and libraries → what this language has for them.

A value lists alternatives in order of preference. One without a space is a name, which counts where such a name may
stand. Any other is the right form in words. Keys are in lower case and without underscores, as `plain` returns them.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

_PRODUCT = "write `C = matmul(A, B)`, or `C[m, n] +=! A[m, k] * B[k, n]`"
_TRANSPOSED = "write the axes in the other order: `A[k, m]`"
_SIZED_BY_DATA = "the shape of a result must not depend on data; write a mask of the same shape"
_PACKED = "pack several into an integer, and unpack them by shifts and masks, as the packed weights of docs/language.md"
_SELECTION = "write `x.when([condition], y)` or `where(condition, x, y)`"
_PLAIN_NUMBERS = "write real and imaginary parts as a dimension of 2"
_FLOAT8 = "write float8_e4m3fn or float8_e5m2"

SYNONYMS: dict[str, tuple[str, ...]] = {
    # reductions
    "sum": ("reduce_sum", "write a reduction: `y[i] +=! x[i, j]`"),
    "prod": ("reduce_prod", "write a reduction: `y[i] *=! x[i, j]`"),
    "max": ("reduce_max", "write a reduction: `y[i] >=! x[i, j]`, or `max(x, y)` of two values"),
    "min": ("reduce_min", "write a reduction: `y[i] <=! x[i, j]`, or `min(x, y)` of two values"),
    "amax": ("reduce_max", "write a reduction: `y[i] >=! x[i, j]`"),
    "amin": ("reduce_min", "write a reduction: `y[i] <=! x[i, j]`"),
    "mean": ("reduce_mean", "write `s[i] +=! x[i, j]; y[i] = s[i] / x.size(1)`, or the operator `Y = reduce_mean(X, axis=1)`"),
    "average": ("reduce_mean", "write the operator `Y = reduce_mean(X, axis=1)`"),
    "all": ("reduce_all", "write a reduction: `y[i] &=! x[i, j]`"),
    "any": ("reduce_any", "write a reduction: `y[i] |=! x[i, j]`"),
    "norm": ("reduce_l2", "write `s[i] +=! square(x[i, j]); y[i] = sqrt(s[i])`"),
    "logsumexp": ("reduce_log_sum_exp", "write the operator `Y = reduce_log_sum_exp(X, axis=1)`"),
    "var": ("write `Y = reduce_mean(X, axis=1)`, then the mean of `square(x[i, j] - Y[i])`",),
    "std": ("write `Y = reduce_mean(X, axis=1)`, then the root of the mean of `square(x[i, j] - Y[i])`",),
    # activations
    "swish": ("silu",),
    "logistic": ("sigmoid",),
    "expit": ("sigmoid",),
    "gelutanh": ('write the operator `Y = gelu(X, approximate="tanh")`',),
    "gelunew": ('write the operator `Y = gelu(X, approximate="tanh")`',),
    "quickgelu": ("write `x * sigmoid(1.702 * x)`",),
    "relu6": ("write `clip(x, 0.0, 6.0)`",),
    "hardtanh": ("write `clip(x, -1.0, 1.0)`",),
    "swiglu": ("silu_mul", "write `silu(x) * y`"),
    "geglu": ("gelu_mul", "write `gelu(x) * y`"),
    "dropout": ("leave it out: in inference it changes nothing",),
    # arithmetic
    "maximum": ("max",),
    "minimum": ("min",),
    "power": ("pow",),
    "ln": ("log",),
    "absolute": ("abs",),
    "negative": ("neg",),
    "sgn": ("sign",),
    "sqr": ("square",),
    "rcp": ("reciprocal",),
    "inversesqrt": ("rsqrt",),
    "clamp": ("clip",),
    "saturate": ("write `clip(x, 0.0, 1.0)`",),
    "arcsin": ("asin",),
    "arccos": ("acos",),
    "arctan": ("atan",),
    "arctan2": ("atan2",),
    "erfc": ("write `1.0 - erf(x)`",),
    "cbrt": ("write `sign(x) * pow(abs(x), 1.0 / 3.0)`",),
    "isfinite": ("write abs(x) < const(`inf`)",),
    "mod": ("write `x % y`",),
    "sub": ("write `x - y`",),
    "mul": ("write `x * y`",),
    "div": ("write `x / y`, or `x // y` of integers",),
    "floordivide": ("div", "write `x // y`"),
    # tensors
    "dot": ("matmul", _PRODUCT),
    "mm": ("matmul", _PRODUCT),
    "bmm": ("matmul", _PRODUCT),
    "addmm": ("gemm",),
    "dense": ("linear",),
    "fullyconnected": ("linear",),
    "conv": ("conv2d",),
    "convolution": ("conv2d",),
    "maxpool": ("max_pool2d",),
    "averagepool": ("avg_pool2d",),
    "avgpool": ("avg_pool2d",),
    "globalaveragepool": ("global_avg_pool2d",),
    "layernormalization": ("layer_norm",),
    "batchnormalization": ("batch_norm",),
    "rmsnormalization": ("rms_norm",),
    "groupnormalization": ("group_norm",),
    "sdpa": ("attention",),
    "scaleddotproductattention": ("attention",),
    "flashattention": ("attention",),
    "multiheadattention": ("attention",),
    "permute": ("transpose",),
    "flatten": ("reshape",),
    "view": ("reshape",),
    "cat": ("concat",),
    "concatenate": ("concat",),
    "stack": ("concat",),
    "split": ("slice",),
    "chunk": ("slice",),
    "expand": ("broadcast_to",),
    "repeat": ("tile",),
    "tril": ("trilu",),
    "triu": ("trilu",),
    "indexselect": ("gather",),
    "take": ("gather", "write `y[i, j] = x[index[i], j]`"),
    "sort": ("top_k_values", "top_k_indices"),
    "topk": ("top_k_indices",),
    "argsort": ("top_k_indices",),
    "interpolate": ("resample_nearest",),
    "upsample": ("resample_nearest",),
    "pixelshuffle": ("depth_to_space",),
    "astype": ("cast",),
    "nonzero": (_SIZED_BY_DATA,),
    "unique": (_SIZED_BY_DATA,),
    "arange": ("an axis is a value: write `y[i] = i where i in 10`",),
    "zeros": ("write `y[i] = 0.0 where i in 10`",),
    "ones": ("write `y[i] = 1.0 where i in 10`",),
    "range": ("axes loop by themselves: write `where i in 10` after the statement",),
    "len": ("extent",),
    # parameters of operators
    "dim": ("axis",),
    "dims": ("axes", "axis"),
    "axes": ("axis",),
    "eps": ("epsilon",),
    "kernelsize": ("kernel",),
    "kernelshape": ("kernel",),
    "pads": ("padding",),
    "numgroups": ("groups",),
    "iscausal": ("causal",),
    "softmaxscale": ("scale",),
    "smscale": ("scale",),
    "perm": ("permutation",),
    "negativeslope": ("alpha",),
    # attributes and methods
    "t": (_TRANSPOSED,),
    "mt": (_TRANSPOSED,),
    "shape": ("write `x.size(0)` for the size of the first dimension",),
    "ndim": ("the number of indices of a tensor is fixed by its shape",),
    "item": ("write `x[]`, or `x[0]`",),
    # types
    "fp8": (_FLOAT8,),
    "float8": (_FLOAT8,),
    "e4m3": ("float8_e4m3fn",),
    "e4m3fn": ("float8_e4m3fn",),
    "fp8e4m3": ("float8_e4m3fn",),
    "e5m2": ("float8_e5m2",),
    "fp8e5m2": ("float8_e5m2",),
    "tf32": ("declare float32, and give allow_tf32=True",),
    "int4": (_PACKED,),
    "uint4": (_PACKED,),
    "fp4": (_PACKED,),
    "nf4": (_PACKED,),
    "complex64": (_PLAIN_NUMBERS,),
    "complex128": (_PLAIN_NUMBERS,),
    "long": ("int64",),
    "byte": ("uint8",),
    "single": ("float32",),
    "i64": ("int64",),
    "i32": ("int32",),
    "i16": ("int16",),
    "i8": ("int8",),
    "u8": ("uint8",),
    # Python's words
    "and": ("write `a & b`",),
    "or": ("write `a | b`",),
    "not": ("write `~a`",),
    "if": (_SELECTION,),
    "else": (_SELECTION,),
    "lambda": ("there are no functions to define; write the expression out",),
    "for": ("axes loop by themselves: name them in an index",),
    "import": ("nothing can be imported",),
    "true": ("write 1",),
    "false": ("write 0",),
    "none": ("leave the argument out",),
    # signs
    "@": (_PRODUCT,),
    "^": ("write `x ** 2` or `pow(x, 2)` for a power, `bitwise_xor(x, y)` for an exclusive or",),
    ":": ("name an axis for each dimension: `A[i, j]`",),
    "...": ("name an axis for each dimension: `A[i, j]`",),
    "&&": ("write `a & b`",),
    "||": ("write `a | b`",),
    "!": ("write `~a`",),
    "?": ("write `where(condition, x, y)`",),
    "\N{MIDDLE DOT}": ("write `*`",),
    "\N{DOT OPERATOR}": ("write `*`",),
    "\N{MULTIPLICATION SIGN}": ("write `*`",),
    "\N{DIVISION SIGN}": ("write `/`",),
    "\N{MINUS SIGN}": ("write `-`",),
    "\N{LESS-THAN OR EQUAL TO}": ("write `<=`",),
    "\N{GREATER-THAN OR EQUAL TO}": ("write `>=`",),
    "\N{NOT EQUAL TO}": ("write `!=`",),
    "\N{SQUARE ROOT}": ("write `sqrt(x)`",),
    "\N{INFINITY}": ("write const(`inf`)",),
    "\N{SUPERSCRIPT TWO}": ("write `x ** 2`, or `square(x)`",),
    "\N{N-ARY SUMMATION}": ("write a reduction: `y[i] +=! x[i, j]`",),
    "\N{GREEK SMALL LETTER PI}": ("write 3.141592653589793",),
    "\N{LEFT DOUBLE QUOTATION MARK}": ('write `"`',),
    "\N{RIGHT DOUBLE QUOTATION MARK}": ('write `"`',),
}


def plain(name: str) -> str:
    """Return a name as it is compared: capitals and underscores do not count."""
    return name.lower().replace("_", "")


def find_name(word: str, names: Iterable[str]) -> str | None:
    """Return the one of some names that a word is another spelling or a synonym of; None without one."""
    known = sorted(names)
    same = [each for each in known if plain(each) == plain(word)]
    return next((each for each in (*same, *SYNONYMS.get(plain(word), ())) if each in known), None)


def find_words(word: str) -> str | None:
    """Return the right form, in words, of a word or sign; None without one."""
    return next((each for each in SYNONYMS.get(plain(word), ()) if " " in each), None)


def explain_character(char: str) -> str | None:
    """Return what to write in place of a character."""
    letter = unicodedata.name(char, "").split()
    if letter[:1] == ["GREEK"] and "LETTER" in letter and char not in SYNONYMS:
        return f"write its name: `{letter[letter.index('LETTER') + 1].lower()}`"
    ascii_form = unicodedata.normalize("NFKC", char)
    return find_words(char) or (f"write `{ascii_form}`" if ascii_form != char and ascii_form.isascii() else None)
