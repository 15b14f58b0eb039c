"""Emitted helper functions of C kernels on vectors, and the scalar ones that share their source.

Names end in the vector type: max_vf32x16, from_u8_vf32x16. A loop over lanes is vectorized by the compiler where the
machine has the instruction. There are also horizontal reductions by shuffles of halves, and non-temporal stores with
their fence.
"""

from __future__ import annotations

import re
from functools import cache

from roller_svc.analysis.lookup_tables import SHUFFLED_BYTES
from roller_svc.codegen.c.vector.elementary import LIBRARY_OF, calls, function_text, has_function
from roller_svc.codegen.c.vector.types import (
    byte_permutations_text,
    dot_text,
    gather,
    instruction,
    pair_dot_text,
    resizing,
    shuffled_entries,
    vector_header,
    vector_type,
    with_fallback,
    zero_extension,
)
from roller_svc.codegen.dialect import SHORT, C, Dialect
from roller_svc.codegen.helpers import SIGNIFICAND_BITS, Helper, helper
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
    """Return the name of a horizontal reduction, such as join_max_vf32x16."""
    return f"join_{combine.name.lower()}_{vector_type(dtype, lanes)}"


def horizontal_needs(combine: Combine, dtype: DType, lanes: int) -> tuple[str, ...]:
    """Return the helpers that combine two vectors of each width, if that is not an operator."""
    if combine in _INFIX:
        return ()
    return tuple(f"{combine.name.lower()}_{vector_type(dtype, width)}" for width in dict.fromkeys(_joined_lanes(dtype, lanes)))


def _joined_lanes(dtype: DType, lanes: int) -> list[int]:
    """Return the lanes of the vectors that each step of a horizontal reduction combines."""
    least, steps = min(lanes, SCALAR_BYTES // dtype.bytes), []
    while lanes > least:
        lanes //= 2
        steps.append(lanes)
    return steps + [least] * (least.bit_length() - 1)


def horizontal_text(name: str, dialect: Dialect) -> str:
    """Return the source of a horizontal reduction.

    Halves of wide vectors are narrower vectors, which take fewer cycles. Halves of the narrowest are shuffled.
    """
    _, which, type_ = name.split("_")
    combine, (short, count) = Combine[which.upper()], type_[1:].split("x")
    dtype, lanes = next(d for d, s in SHORT.items() if s == short), int(count)
    lines = [f"static inline {dialect.value_type(dtype)} {name}({type_} a) {{"]
    value, lanes_of_value, half = "a", lanes, lanes
    for width in _joined_lanes(dtype, lanes):
        type_ = vector_type(dtype, width)
        if width < lanes_of_value:
            low, high = (f"(({type_} *)&{value})[{i}]" for i in range(2))
            value, lanes_of_value, half, target = f"a{width}", width, width, f"{type_} a{width}"
        else:
            half //= 2
            mask = vector_type(INTEGERS[dtype.bits], width)
            order = ", ".join(str((i + half) % width) for i in range(width))
            low, high, target = value, f"SHUFFLED({value}, {mask}, {order})", value
        joined = f"{low} {_INFIX[combine]} {high}" if combine in _INFIX else f"{which}_{type_}({low}, {high})"
        lines.append(f"  {target} = {joined};")
    return "\n".join([*lines, f"  return {value}[0];", "}"])


# Intel SDM, MOVNTPS: the address must be aligned to the vector; only SFENCE orders the store.
_STORES = {
    64: ("__AVX512F__", "__builtin_ia32_movntps512"),
    32: ("__AVX__", "__builtin_ia32_movntps256"),
    16: ("__SSE__", "__builtin_ia32_movntps"),
}
STORE_FENCE = """static inline void stores_done(void) {
#if defined(__SSE__)
  __builtin_ia32_sfence();
#endif
}"""


def has_nontemporal_store(dtype: DType, lanes: int) -> bool:
    """Return whether there is a non-temporal store of a vector."""
    return dtype.bytes * lanes in _STORES


def nontemporal_helper(dtype: DType, lanes: int) -> Helper:
    """Return the helper that stores a vector non-temporally if it is aligned, else normally."""
    vector, size = vector_type(dtype, lanes), dtype.bytes * lanes
    feature, store = _STORES[size]
    text = (
        f"static inline void stream_{vector}(void *to, {vector} a) {{\n"
        f"#if defined({feature}) && !defined(__clang__)\n"
        f"  typedef float native __attribute__((vector_size({size})));\n"
        f"  if (((__UINTPTR_TYPE__)to & {size - 1}) == 0) {{\n"
        f"    {store}((float *)to, (native)a);\n    return;\n  }}\n"
        f"#endif\n  *({vector} *)to = a;\n}}"
    )
    return Helper(text)


_BY_SHORT = {short: dtype for dtype, short in SHORT.items()}
_VECTOR_NAME = re.compile(r"(\w+)_v([a-z]+\d*\w*?)x(\d+)")
_SCALAR_NAME = re.compile(r"([a-z0-9]+)_(f32|f64)")
_TYPE = re.compile(r"\bv(f64|f32|f16|bf16|e4m3|e5m2|[iu](?:8|16|32|64)|bool)x(\d+)\b")
INTEGERS = {8: DType.INT8, 16: DType.INT16, 32: DType.INT32, 64: DType.INT64}
WORD_BYTES = (1, 2, 4, 8)  # of a scalar that a vector is filled with
UNSIGNED = {8: DType.UINT8, 16: DType.UINT16, 32: DType.UINT32, 64: DType.UINT64}
# functions with a compiler builtin, mostly one instruction → number of arguments
BUILTIN = {"sqrt": 1, "floor": 1, "ceil": 1, "rint": 1, "trunc": 1, "fma": 3}
# adjacent elements in memory as a word, of any alignment and type
_WORD_AT = Helper("static inline int word_at(const void *p) { int w; __builtin_memcpy(&w, p, sizeof w); return w; }")
SCALAR_BYTES = 16  # scalars use the narrowest vector that every machine has

# {V}: the vector type, {E}: its element's, {N}: lanes, {I}: signed integers as wide, {s}: suffix of math functions
_BODIES = {
    "select": ("({I} m, {V} a, {V} b)", "  return ({V})((m & ({I})a) | (~m & ({I})b));\n"),  # one blend
    "any": ("({I} m)", "  {E} r = 0;\n  for (int i = 0; i < {N}; i++) r |= m[i];\n  return r != 0;\n"),
    "checked": ("({I} m, {V} at, {E} size, long check, long long *status)",  # records what the mask wants out of range
                "  {V} bad = m & ~((at >= 0) & (at < size));\n  if (any_{V}(bad))\n"
                "    for (int i = 0; i < {N}; i++)\n      if (bad[i]) checked(at[i], size, check, status);\n"
                "  return m & ~bad;\n"),
    "isnan": ("({V} a)", "  return a != a;\n"),
    "square": ("({V} a)", "  return a * a;\n"),
}  # fmt: skip
_FLOAT_BODIES = {
    "max": ("({V} a, {V} b)", "  // a NaN on either side stays\n"
            "  return select_{V}((a != a) | (a > b), a, b);\n"),
    "min": ("({V} a, {V} b)", "  // a NaN on either side stays\n"
            "  return select_{V}((a != a) | (a < b), a, b);\n"),
    "fmax": ("({V} a, {V} b)", "  return select_{V}((b != b) | (a > b), a, b);\n"),
    "fmin": ("({V} a, {V} b)", "  return select_{V}((b != b) | (a < b), a, b);\n"),
    "relu": ("({V} a)", "  return select_{V}(a <= 0, ({V}){{0}}, a);\n"),
    "greater": ("({V} a, {V} b)", "  // b if either is a NaN\n  return select_{V}(a > b, a, b);\n"),
    "lesser": ("({V} a, {V} b)", "  // b if either is a NaN\n  return select_{V}(a < b, a, b);\n"),
    "at_least": ("({V} x, {E} least)", "  return select_{V}(x < least, least - ({V}){{0}}, x);\n"),  # NaN stays
    "at_most": ("({V} x, {E} most)", "  return select_{V}(x > most, most - ({V}){{0}}, x);\n"),
    "segment": ("(const {E} *table, {I} at)",  # of 32 entries, by the low bits
                "  {V} r;\n  for (int i = 0; i < {N}; i++) r[i] = table[at[i] & 31];\n  return r;\n"),
    "isinf": ("({V} a)", "  return ({V})(({I})a & {rest}) == {inf};\n"),
    "abs": ("({V} a)", "  return ({V})(({I})a & {rest});\n"),
    "sign": ("({V} a)", "  {I} sign = ({I})(a < 0) - ({I})(a > 0);\n"
             "  return select_{V}(a != a, a, __builtin_convertvector(sign, {V}));\n"),
}  # fmt: skip
_INTEGER_BODIES = {
    "max": ("({V} a, {V} b)", "  return select_{V}(a > b, a, b);\n"),
    "min": ("({V} a, {V} b)", "  return select_{V}(a < b, a, b);\n"),
    "relu": ("({V} a)", "  return select_{V}(a > 0, a, ({V}){{0}});\n"),
    "abs": ("({V} a)", "  return select_{V}(a < 0, -a, a);\n"),
    "sign": ("({V} a)", "  return ({V})((a < 0) - (a > 0));\n"),
}  # fmt: skip


@cache
def c_helper(name: str) -> Helper:
    """Return the C helper with a name, of vectors or scalars."""
    if match := _VECTOR_NAME.fullmatch(name):
        return _vector_helper(match[1], _BY_SHORT[match[2]], int(match[3]))
    if (match := _SCALAR_NAME.fullmatch(name)) and has_function(match[1], _BY_SHORT[match[2]]):
        return _scalar_from_vector(match[1], _BY_SHORT[match[2]])
    return _WORD_AT if name == "word_at" else helper(name, C)


def library_of(name: str) -> str | None:
    """Return the library function that the helper falls back to, or None."""
    if (match := _VECTOR_NAME.fullmatch(name)) and match[2] == "f32":
        return LIBRARY_OF.get(match[1])
    return None


def vector_typedefs(text: str) -> str:
    """Return the definitions of the vector types in a source."""
    used = {(_BY_SHORT[short], int(lanes)) for short, lanes in _TYPE.findall(text)}
    ordered = sorted(used, key=lambda v: (v[0].value, v[1]))
    return "\n".join(vector_header(dtype, lanes, C.storage_type(dtype)) for dtype, lanes in ordered)


def _scalar_from_vector(base: str, dtype: DType) -> Helper:
    """Return a scalar function: lane 0 of the vector function, so that scalars and lanes have the same bits."""
    type_, vector = C.value_type(dtype), vector_type(dtype, SCALAR_BYTES // dtype.bytes)
    text = f"static inline {type_} {base}_{SHORT[dtype]}({type_} a) {{ return {base}_{vector}(({vector}){{a}})[0]; }}"
    return Helper(text, (f"{base}_{vector}",))


def _vector_helper(base: str, dtype: DType, lanes: int) -> Helper:
    vector = vector_type(dtype, lanes)
    if has_function(base, dtype):
        return Helper(function_text(base, dtype, lanes), tuple(f"{n}_{vector}" for n in calls(base, dtype)))
    kind, _, short = base.partition("_")
    if kind in _OF_TWO_TYPES:
        return _OF_TWO_TYPES[kind](_BY_SHORT[short], dtype, lanes)
    if base == "nearest":
        return _nearest(lanes)
    if base.startswith("odd_"):
        return _rounded_to_odd(_BY_SHORT[base.removeprefix("odd_")], lanes)
    if base in BUILTIN:
        return _builtin(base, dtype, lanes)
    if base == "stream":
        return nontemporal_helper(dtype, lanes)
    if base == "dot":
        return Helper(dot_text(dtype, lanes))
    if base == "dot_pairs":
        return Helper(pair_dot_text(lanes))
    if base in ("word2", "word4"):
        return _word(base, dtype, lanes)
    if base in _ELEMENTS:
        return _ELEMENTS[base](dtype, lanes)
    if base in ("looked_up", "looked_up2"):
        return _lookup(base, dtype, lanes)
    if base.startswith("repeat"):
        return _repeated_elements(int(base.removeprefix("repeat")), dtype, lanes)
    table = _BODIES | (_FLOAT_BODIES if dtype.is_float else _INTEGER_BODIES)
    if base not in table:
        return _library_loop(base, dtype, lanes)
    parameters, body = table[base]
    words = {
        "V": vector, "E": C.storage_type(dtype), "N": lanes, "I": vector_type(INTEGERS[dtype.bits], lanes),
        "rest": "0x7fffffff" if dtype.bits == 32 else "0x7fffffffffffffffLL",
        "inf": C.inf_f64 if dtype is DType.FLOAT64 else C.inf_f32,
    }  # fmt: skip
    result = {"isnan": words["I"], "isinf": words["I"], "any": "int"}.get(base, vector)
    body = with_fallback(instruction(base, dtype, lanes), body.format(**words).removesuffix("\n"))
    text = f"static inline {result} {base}_{vector}{parameters.format(**words)} {{\n{body}}}"
    if base == "checked":
        return Helper(f"static long checked(long, long, long, long long *);\n{text}", (f"any_{vector}",))
    return Helper(text, (f"select_{vector}",) if "select_" in body else ())


def _word(base: str, dtype: DType, lanes: int) -> Helper:
    """Return the helper that packs consecutive elements into words, the first in the lowest bits."""
    count = int(base.removeprefix("word"))
    source = UNSIGNED[dtype.bits // count]
    vector, part, wide = (vector_type(t, lanes) for t in (dtype, source, DType.UINT32))
    parameters = ", ".join(f"{part} {x}" for x in "abcd"[:count])

    def joined(widened: str) -> str:
        shifted = [f"({widened.format(x=x)} << {i * source.bits})" for i, x in enumerate("abcd"[:count])]
        return f"({vector})({' | '.join(shifted)})"

    convert = f"from_{SHORT[source]}_{wide}"
    body = with_fallback(zero_extension(source, lanes, joined), f"  return {joined(f'{convert}({{x}})')};")
    return Helper(f"static inline {vector} {base}_{vector}({parameters}) {{\n{body}}}", (convert,))


def _even_elements(dtype: DType, lanes: int) -> Helper:
    """Return the helper that loads elements 0, 2, 4, ...; its second vector ends with the last of them.

    AVX2 selects 4-byte elements within chunks of 128 bits, then exchanges pairs: gcc does not find these two steps.
    """
    vector, mask = vector_type(dtype, lanes), vector_type(INTEGERS[dtype.bits], lanes)
    order = [2 * i if 2 * i < lanes else 2 * i + 1 for i in range(lanes)]
    picked, steps = f"__builtin_shuffle(a, b, ({mask}){{{', '.join(map(str, order))}}})", ""
    if lanes == 8 and dtype.bytes == 4:
        pairs, pair_order = vector_type(DType.FLOAT64, 4), vector_type(DType.INT64, 4)
        inside = [order[i] for i in (0, 1, 4, 5, 2, 3, 6, 7)]
        steps = f"  {vector} c = __builtin_shuffle(a, b, ({mask}){{{', '.join(map(str, inside))}}});\n"
        picked = f"({vector})__builtin_shuffle(({pairs})c, ({pair_order}){{0, 2, 1, 3}})"
    text = (
        f"static inline {vector} even_{vector}(const {C.storage_type(dtype)} *p) {{\n"
        f"  {vector} a = *({vector} *)p, b = *({vector} *)(p + {lanes - 1});\n"
        "#if defined(__clang__)\n"
        f"  return __builtin_shufflevector(a, b, {', '.join(map(str, order))});\n#else\n"
        f"{steps}  return {picked};\n#endif\n}}"
    )
    return Helper(text)


def _repeated_elements(times: int, dtype: DType, lanes: int) -> Helper:
    """Return the helper that loads a word of elements, each for `times` adjacent lanes."""
    vector, mask, count = vector_type(dtype, lanes), vector_type(INTEGERS[dtype.bits], lanes), lanes // times
    word = UNSIGNED[8 * count * dtype.bytes]
    words = vector_type(word, lanes * dtype.bytes // word.bytes)
    order = ", ".join(str(lane // times) for lane in range(lanes))
    text = (
        f"static inline {vector} repeat{times}_{vector}(const {C.storage_type(dtype)} *p) {{\n"
        f"  {C.storage_type(word)} word;\n  __builtin_memcpy(&word, p, sizeof word);\n"
        f"  {vector} a = ({vector})(word - ({words}){{0}});\n"
        "#if defined(__clang__)\n"
        f"  return __builtin_shufflevector(a, a, {order});\n#else\n"
        f"  return __builtin_shuffle(a, ({mask}){{{order}}});\n#endif\n}}"
    )
    return Helper(text)


def _permuted_elements(dtype: DType, lanes: int) -> Helper:
    """Return the helper that loads elements at distances of 0 to lanes - 1 from the first lane's.

    `first` is the position of the first lane's element, `last` the last position at which a vector begins. `at` grows
    by the distances.
    """
    vector, numbers = vector_type(dtype, lanes), vector_type(DType.INT32, lanes)
    macro = "__AVX512F__" if lanes * dtype.bytes == 64 else "__AVX2__"
    plain = f"  {vector} r;\n  for (int i = 0; i < {lanes}; i++) r[i] = p[first + at[i] - at[0]];\n  return r;"
    start = "(first < last ? first : last)"
    shuffled = f"__builtin_shuffle(*(const {vector} *)(p + {start}), at - (at[0] - (int)(first - {start})))"
    body = with_fallback((macro, shuffled), plain)
    parameters = f"const {C.storage_type(dtype)} *p, long first, long last, {numbers} at"
    return Helper(f"static inline {vector} permuted_{vector}({parameters}) {{\n{body}}}")


def _masked_elements(dtype: DType, lanes: int) -> Helper:
    """Return the helper that loads adjacent elements where a mask holds, and 0 elsewhere.

    Compilers turn the first loop into a masked load where the machine has one for the type. The second loads a zero
    where the mask fails, since a branch would depend on data. Compilers make a branch of a conditional address, and not
    of its bits.
    """
    vector, mask, element = vector_type(dtype, lanes), vector_type(INTEGERS[dtype.bits], lanes), C.storage_type(dtype)
    macro, bits = "__AVX2__" if dtype.bytes >= DType.INT32.bytes else "__AVX512BW__", "__UINTPTR_TYPE__"
    loop = f"  for (int i = 0; i < {lanes}; i++) r[i] ="
    address = f"zero + ((({bits})(p + i) - zero) & ({bits})(__INTPTR_TYPE__)m[i])"
    return Helper(
        f"static inline {vector} masked_{vector}({mask} m, const {element} *p) {{\n  {vector} r;\n"
        f"#if defined({macro})\n{loop} m[i] ? p[i] : 0;\n"
        f"#else\n  static const {element} none;\n  const {bits} zero = ({bits})&none;\n"
        f"{loop} *(const {element} *)({address});\n#endif\n  return r;\n}}"
    )


def _gathered_elements(dtype: DType, lanes: int) -> Helper:
    """Return the helper that loads elements at distances from an address where a mask holds, and any value elsewhere.

    The element at the address exists if the mask holds in a lane, as all lanes share the indices that it is made of.
    """
    vector, mask, element = vector_type(dtype, lanes), vector_type(INTEGERS[dtype.bits], lanes), C.storage_type(dtype)
    places, needed = vector_type(DType.INT32, lanes), f"any_{mask}"
    plain = (
        f"  static const {element} none;\n  {vector} r;\n  if (!{needed}(m)) p = &none;\n"
        f"  for (int i = 0; i < {lanes}; i++) r[i] = p[at[i] & m[i]];\n  return r;"
    )
    body = with_fallback(gather(dtype, lanes), plain)
    text = f"static inline {vector} gathered_{vector}({mask} m, const {element} *p, {places} at) {{\n{body}}}"
    return Helper(text, (needed,))


def _lookup(base: str, dtype: DType, lanes: int) -> Helper:
    """Return the helper that looks up entries of one or two tables by the lowest bits of each lane."""
    vector, numbers = vector_type(dtype, lanes), vector_type(DType.INT32, lanes)
    macro = "__AVX512F__" if lanes * dtype.bytes == 64 else "__AVX2__"
    tables: tuple[str, ...]
    if base == "looked_up":
        tables, entry = ("table",), f"table[at[i] & {lanes - 1}]"
    else:
        tables, entry = ("low", "high"), f"(at[i] & {lanes} ? high : low)[at[i] & {lanes - 1}]"
    plain = f"  {vector} r;\n  for (int i = 0; i < {lanes}; i++) r[i] = {entry};\n  return r;"
    body = with_fallback((macro, f"__builtin_shuffle({', '.join(tables)}, at)"), plain)
    parameters = ", ".join(f"{vector} {name}" for name in tables)
    return Helper(f"static inline {vector} {base}_{vector}({parameters}, {numbers} at) {{\n{body}}}")


def _byte_entries(dtype: DType, lanes: int) -> Helper:
    """Return the helper that looks up entries of a table of 256 bytes."""
    vector, chunk = vector_type(dtype, lanes), f"entries_{vector_type(dtype, SHUFFLED_BYTES)}"
    plain = f"  {vector} r;\n  for (int i = 0; i < {lanes}; i++) r[i] = table[at[i]];\n  return r;\n"
    shuffled = shuffled_entries(lanes, chunk)
    body = plain if shuffled is None else f"#if defined(__AVX2__) && !defined(__clang__)\n{shuffled}#else\n{plain}#endif\n"
    needs = (chunk,) if shuffled is not None and lanes != SHUFFLED_BYTES else ()
    return Helper(f"static inline {vector} entries_{vector}(const unsigned char *table, {vector} at) {{\n{body}}}", needs)


def _permuted_byte_entries(dtype: DType, lanes: int) -> Helper:
    """Return the same helper for CPUs that permute bytes."""
    return Helper(byte_permutations_text(lanes), (f"select_{vector_type(dtype, lanes)}",))


_ELEMENTS = {
    "even": _even_elements,
    "masked": _masked_elements,
    "gathered": _gathered_elements,
    "permuted": _permuted_elements,
    "entries": _byte_entries,
    "permuted_entries": _permuted_byte_entries,
}


def _builtin(base: str, dtype: DType, lanes: int) -> Helper:
    vector, suffix = vector_type(dtype, lanes), "" if dtype is DType.FLOAT64 else "f"
    letters = "abc"[: BUILTIN[base]]
    text = (
        f"static inline {vector} {base}_{vector}({', '.join(f'{vector} {x}' for x in letters)}) {{\n  {vector} r;\n"
        f"  for (int i = 0; i < {lanes}; i++)\n"
        f"    r[i] = __builtin_{base}{suffix}({', '.join(f'{x}[i]' for x in letters)});\n  return r;\n}}"
    )
    return Helper(text)


def _library_loop(base: str, dtype: DType, lanes: int) -> Helper:
    """Return a loop over lanes that calls a library function, which the compiler may vectorize."""
    vector, element, suffix = vector_type(dtype, lanes), C.value_type(dtype), "" if dtype is DType.FLOAT64 else "f"
    letters = "ab"[: LIBRARY_ARITY.get(base, 1)]
    arrays = "".join(f"  {element} {x}s[{lanes}];\n  *({vector} *){x}s = {x};\n" for x in letters)
    text = (
        f"static inline {vector} {base}_{vector}({', '.join(f'{vector} {x}' for x in letters)}) {{\n{arrays}"
        f"  {element} r[{lanes}];\n  #pragma omp simd\n"
        f"  for (int i = 0; i < {lanes}; i++) r[i] = {base}{suffix}({', '.join(f'{x}s[i]' for x in letters)});\n"
        f"  return *({vector} *)r;\n}}"
    )
    return Helper(text)


LIBRARY_ARITY = {"pow": 2, "fmod": 2, "remainder": 2, "atan2": 2, "hypot": 2}

# conversions ------------------------------------------------------------------------------------------------------


def _conversion(source: DType, target: DType, lanes: int) -> Helper:
    """Return the conversion of a vector from `source` to `target`."""
    v, t = vector_type(source, lanes), vector_type(target, lanes)
    head = f"static inline {t} from_{SHORT[source]}_{t}({v} a)"
    if source.is_narrow_float:
        return _widened(source, lanes, head)
    if target.is_narrow_float:
        return _narrowed(target, lanes, head)
    if target.is_float and (source.is_float or source.bits >= 32):
        return Helper(f"{head} {{ return __builtin_convertvector(a, {t}); }}")
    if target.is_float:
        between = vector_type(DType.INT32, lanes)
        return Helper(
            f"{head} {{ return __builtin_convertvector(from_{SHORT[source]}_{between}(a), {t}); }}",
            (f"from_{SHORT[source]}_{between}",),
        )
    if source.is_float:
        return _truncated(source, target, lanes, head)
    return Helper(f"{head} {{\n{_resized_body('a', source, target, lanes)}}}")


def _resized_body(text: str, source: DType, target: DType, lanes: int) -> str:
    """Return the body of an integer conversion: one instruction where AVX-512 has one."""
    steps = f"  return {_resized(text, source, target, lanes)};"
    return with_fallback(resizing(text, source, target, lanes), steps)


def _resized(text: str, source: DType, target: DType, lanes: int) -> str:
    """Print an integer conversion in steps of factor 2, for which every machine has instructions."""
    table = INTEGERS if source.is_signed else UNSIGNED
    bits = source.bits
    while bits != target.bits:
        bits = bits * 2 if bits < target.bits else bits // 2
        text = f"__builtin_convertvector({text}, {vector_type(table[bits], lanes)})"
    return f"({vector_type(target, lanes)}){text}"


def _truncated(source: DType, target: DType, lanes: int, head: str) -> Helper:
    """Return the saturating conversion of float to integer; NaN gives 0."""
    if target.bits < DType.INT32.bits:
        wide, clamped = vector_type(DType.INT32, lanes), f"clamped_{SHORT[target]}_{vector_type(source, lanes)}"
        body = _resized_body(f"__builtin_convertvector({clamped}(a), {wide})", DType.INT32, target, lanes)
        return Helper(f"{head} {{  // truncates and saturates; NaN gives 0\n{body}}}", (clamped,))
    v, t, mask = vector_type(source, lanes), vector_type(target, lanes), INTEGERS[source.bits]
    least, greatest = target.integer_range
    suffix = "" if source is DType.FLOAT64 else "f"
    ends = {DType.INT64: "LL", DType.UINT64: "ULL", DType.UINT32: "u"}.get(target, "")
    above, below = f"{float(greatest + 1)!r}{suffix}", f"{float(least)!r}{suffix}"

    def where(cond: str) -> str:
        return _resized(f"({vector_type(mask, lanes)})({cond})", mask, target, lanes)

    low = f"  r |= {where(f'a <= {below}')} & (-{greatest}{ends} - 1);\n" if least else ""
    text = (
        f"{head} {{  // truncates and saturates; NaN gives 0\n"
        f"  {v} inside = select_{v}((a > {below} - 1) & (a < {above}), a, ({v}){{0}});\n"
        f"  {t} r = __builtin_convertvector(inside, {t});\n"
        f"  r |= {where(f'a >= {above}')} & {greatest}{ends};\n{low}  return r;\n}}"
    )
    return Helper(text, (f"select_{v}",))


def _clamped(target: DType, source: DType, lanes: int) -> Helper:
    """Return the helper that gives floats the ends of a short integer type beyond them, and 0 for a NaN."""
    v, suffix = vector_type(source, lanes), "" if source is DType.FLOAT64 else "f"
    least, greatest = (f"{float(end)!r}{suffix} - ({v}){{0}}" for end in target.integer_range)
    known = f"select_{v}(a == a, a, ({v}){{0}})" if target.is_signed else "a"  # the least unsigned number is 0
    text = (
        f"static inline {v} clamped_{SHORT[target]}_{v}({v} a) {{\n"
        f"  return lesser_{v}(greater_{v}({known}, {least}), {greatest});\n}}"
    )
    return Helper(text, (f"select_{v}", f"greater_{v}", f"lesser_{v}"))


def _quantized(target: DType, source: DType, lanes: int) -> Helper:
    """Return the helper that rounds floats to integers, adds a short one, and saturates as a short type; NaN gives 0.

    It clamps before it rounds: the ends less an integer are integers, which rounding keeps in order.
    """
    v, words = vector_type(source, lanes), vector_type(DType.INT32, lanes)
    least, greatest = target.integer_range
    nan = f"  a = select_{v}(a == a, a, __builtin_convertvector(-zero, {v}));\n" if target.is_signed else ""
    text = (
        f"static inline {words} quantized_{SHORT[target]}_{v}({v} a, {words} zero) {{\n{nan}"
        f"  {v} least = __builtin_convertvector({least} - zero, {v});  // also of a NaN\n"
        f"  {v} greatest = __builtin_convertvector({greatest} - zero, {v});\n"
        f"  return nearest_{v}(lesser_{v}(greater_{v}(a, least), greatest)) + zero;\n}}"
    )
    return Helper(text, (f"select_{v}", f"greater_{v}", f"lesser_{v}", f"nearest_{v}"))


# by the name before that of the other type
_OF_TWO_TYPES = {"from": _conversion, "clamped": _clamped, "quantized": _quantized}


def _nearest(lanes: int) -> Helper:
    """Return the helper that rounds float32 to int32, for values in its range."""
    v, words = vector_type(DType.FLOAT32, lanes), vector_type(DType.INT32, lanes)
    plain = f"  return __builtin_convertvector(rint_{v}(a), {words});"
    body = with_fallback(instruction("nearest", DType.FLOAT32, lanes), plain)
    return Helper(f"static inline {words} nearest_{v}({v} a) {{\n{body}}}", (f"rint_{v}",))


def _widened(source: DType, lanes: int, head: str) -> Helper:
    f32, u32 = vector_type(DType.FLOAT32, lanes), vector_type(DType.UINT32, lanes)
    if source is DType.BFLOAT16:
        return Helper(f"{head} {{ return ({f32})(__builtin_convertvector(a, {u32}) << 16); }}")
    if source is DType.FLOAT16:
        call = {
            16: ("__AVX512F__", "__builtin_ia32_vcvtph2ps512_mask((vi16x16)a, (vf32x16){0}, -1, 4)"),
            8: ("__F16C__", "__builtin_ia32_vcvtph2ps256((vi16x8)a)"),
        }.get(lanes)
        plain = f"  return __builtin_convertvector(a, {f32});"
        return Helper(f"{head} {{\n{with_fallback(call, plain)}}}")
    name = f"{SHORT[source]}_to_f32"
    return Helper(f"{head} {{\n{_each_lane(f32, lanes, name)}}}", (name,))


def _rounded_to_odd(source: DType, lanes: int) -> Helper:
    """Return the conversion to the float32 whose later rounding to a narrow type is the only one, as of scalars.

    A loop over lanes would not do: gcc 12 makes masks of truth values that it finds in a vector's elements.
    """
    v, f32, i32 = vector_type(source, lanes), vector_type(DType.FLOAT32, lanes), vector_type(DType.INT32, lanes)
    head = f"static inline {f32} odd_{SHORT[source]}_{f32}({v} a)"
    if source is DType.FLOAT64:
        mask = vector_type(DType.INT64, lanes)
        text = (
            f"{head} {{\n  {f32} near = __builtin_convertvector(a, {f32});\n"
            f"  {v} back = __builtin_convertvector(near, {v});\n"
            f"  {mask} above = ((a < 0) & (back < a)) | ((a >= 0) & (back > a)), inexact = (back < a) | (back > a);\n"
            f"  {i32} bits = ({i32})near + __builtin_convertvector(above, {i32});\n"
            f"  return ({f32})(bits | (__builtin_convertvector(inexact, {i32}) & 1));\n}}"
        )
        return Helper(text)
    large = "(high != 0) & (high != -1)" if source.is_signed else "high != 0"
    wide, digits = vector_type(DType.FLOAT64, lanes), SIGNIFICAND_BITS[source.bits]
    last, is_long = 1 << (source.bits - digits), source.bits == DType.FLOAT64.bits
    result = f"odd_f64_{f32}(__builtin_convertvector(a, {wide}))" if is_long else f"__builtin_convertvector(a, {f32})"
    text = (
        f"{head} {{\n  {v} high = a >> {digits}, large = ({v})({large});\n"
        f"  {v} rest = a & large & {2 * last - 1};\n  a = a - rest + (({v})(rest != 0) & {last});\n"
        f"  return {result};\n}}"
    )
    return Helper(text, (f"odd_f64_{f32}",) if is_long else ())


def _narrowed(target: DType, lanes: int, head: str) -> Helper:
    u32, i32 = vector_type(DType.UINT32, lanes), vector_type(DType.INT32, lanes)
    t = vector_type(target, lanes)
    if target is DType.BFLOAT16:
        body = (
            f"  {u32} u = ({u32})a;  // to nearest even; NaN stays NaN\n"
            f"  {u32} r = (u + 0x7fff + (u >> 16 & 1)) >> 16;\n  {i32} nan = a != a;\n"
            f"  r = (r & ~({u32})nan) | ((u >> 16 | 64) & ({u32})nan);\n"
            f"  return __builtin_convertvector(r, {t});\n"
        )
        return Helper(f"{head} {{\n{body}}}")
    if target is DType.FLOAT16:
        call = {
            16: ("__AVX512F__", "(vf16x16)__builtin_ia32_vcvtps2ph512_mask(a, 4, (vi16x16){0}, -1)"),
            8: ("__F16C__", "(vf16x8)__builtin_ia32_vcvtps2ph256(a, 4)"),
        }.get(lanes)
        return Helper(f"{head} {{\n{with_fallback(call, f'  return __builtin_convertvector(a, {t});')}}}")
    name = f"f32_to_{SHORT[target]}"
    return Helper(f"{head} {{\n{_each_lane(t, lanes, name)}}}", (name,))


def _each_lane(vector: str, lanes: int, function: str) -> str:
    return f"  {vector} r;\n  for (int i = 0; i < {lanes}; i++) r[i] = {function}(a[i]);\n  return r;\n"
