"""Vector types of C kernels, variables of these types, and x86 builtins for helper functions.

GCC 12 does not select these instructions from plain C. `maxps` and `minps` return their second operand if either is a
NaN or both are zeros. Masked with a memory operand it waits for the mask before it loads, so the operand is loaded
before it. `vscalefps` multiplies by a power of two and rounds once (Intel SDM, volume 2).
"""

from __future__ import annotations

from collections.abc import Callable

from roller_svc.analysis.lookup_tables import MIN_SHUFFLED_BYTES, SHUFFLED_BYTES
from roller_svc.codegen.dialect import SHORT
from roller_svc.ir.dtype import DType


def register_name(identifier: str, index: list[int], lanes: int) -> str:
    """Return the variable of a vector: acc, (2, 32), 16 → acc_2_2, with elements 32 to 47 of row 2."""
    return "_".join([identifier, *(str(i) for i in index[:-1]), str(index[-1] // lanes)])


def vector_type(dtype: DType, lanes: int) -> str:
    return f"v{SHORT[dtype]}x{lanes}"


def vector_header(dtype: DType, lanes: int, c_type: str) -> str:
    """Return the definition of a vector type with element alignment, as dense tensors have."""
    name = vector_type(dtype, lanes)
    attributes = f"vector_size({dtype.bytes * lanes}), aligned({dtype.bytes}), may_alias"
    return f"typedef {c_type} {name} __attribute__(({attributes}));"


_SUFFIX = {DType.FLOAT32: "ps", DType.FLOAT64: "pd"}
_AVX_BYTES = 32
_ORDERED = 7  # comparison predicate: neither operand is a NaN
_ALL_LANES = "-1, 4"  # mask, and the current rounding mode


def with_fallback(call: tuple[str, str] | None, plain: str) -> str:
    """Return the body of a helper: the builtin if its macro is defined, else plain C."""
    if call is None:
        return f"{plain}\n"
    return f"#if defined({call[0]}) && !defined(__clang__)\n  return {call[1]};\n#else\n{plain}\n#endif\n"


def instruction(base: str, dtype: DType, lanes: int) -> tuple[str, str] | None:
    """Return (macro of the instruction set, expression over the helper's parameters), or None."""
    if base == "any":
        return _any_bit(lanes * dtype.bytes)
    if dtype not in _SUFFIX:
        return None
    match lanes * dtype.bytes, base:
        case 64, "max" | "min":
            ordered = f"__builtin_ia32_cmp{_SUFFIX[dtype]}512_mask(a, a, {_ORDERED}, {_ALL_LANES})"
            extremum = f"__builtin_ia32_{base}{_SUFFIX[dtype]}512_mask(a, b, a, {ordered}, 4)"
            return "__AVX512F__", f'({{ __asm__("" : "+v"(b)); {extremum}; }})'
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
        case 64, "greater" | "lesser":
            return "__AVX512F__", _masked("max" if base == "greater" else "min", dtype, "a", "b")
        case 32, "greater" | "lesser":
            return "__AVX__", f"__builtin_ia32_{'max' if base == 'greater' else 'min'}{_SUFFIX[dtype]}256(a, b)"
        case 64, "segment" if dtype is DType.FLOAT32:
            vector = vector_type(dtype, lanes)
            return "__AVX512F__", f"__builtin_shuffle(*(const {vector} *)table, *(const {vector} *)(table + 16), at)"
        case 64, "nearest":
            return "__AVX512F__", f"(vi32x16)__builtin_ia32_cvtps2dq512_mask(a, (vi32x16){{0}}, {_ALL_LANES})"
        case 32, "nearest":
            return "__AVX__", "(vi32x8)__builtin_ia32_cvtps2dq256(a)"
        case 16, "nearest":
            return "__SSE2__", "(vi32x4)__builtin_ia32_cvtps2dq(a)"
        case 64, "scaled":
            vector = f"v{SHORT[dtype]}x{lanes}"
            return "__AVX512F__", f"select_{vector}(zero, ({vector}){{0}}, {_masked('scalef', dtype, 'y + 1', 'k')})"
        case _:
            return None


def _any_bit(size: int) -> tuple[str, str] | None:
    """Return (macro of the instruction set, whether a bit of m is set), or None. `size`: bytes of m."""
    words = f"(__attribute__((vector_size({size}))) long long)m"
    match size:
        case 64:
            return "__AVX512F__", f"__builtin_ia32_ptestmq512({words}, {words}, -1) != 0"
        case 32:
            return "__AVX__", f"!__builtin_ia32_ptestz256({words}, {words})"
        case 16:
            return "__SSE4_1__", f"!__builtin_ia32_ptestz128({words}, {words})"
        case _:
            return None


def gather(dtype: DType, lanes: int) -> tuple[str, str] | None:
    """Return (macro of the instruction set, masked gather of p[at]) for 32 and 64 bits, or None."""
    vector, bits = vector_type(dtype, lanes), dtype.bits
    number = DType.INT32 if bits == DType.INT32.bits else DType.INT64
    native, letter = vector_type(number, lanes), "i" if number is DType.INT32 else "q"
    if bits != number.bits:
        return None
    match lanes * dtype.bytes:
        case 64:
            chosen = f"__builtin_ia32_ptestm{'d' if letter == 'i' else letter}512(m, m, -1)"
            name = "gathersiv16si" if letter == "i" else "gathersiv8di"
            return "__AVX512F__", f"({vector})__builtin_ia32_{name}(({native}){{0}}, p, at, {chosen}, {dtype.bytes})"
        case 32:
            name, pointer = ("gathersiv8si", "int") if letter == "i" else ("gathersiv4di", "long long")
            text = f"__builtin_ia32_{name}(({native}){{0}}, (const {pointer} *)p, at, m, {dtype.bytes})"
            return "__AVX2__", f"({vector}){text}"
        case _:
            return None


def _masked(name: str, dtype: DType, a: str, b: str) -> str:
    zeros = f"(v{SHORT[dtype]}x{64 // dtype.bytes}){{0}}"
    return f"__builtin_ia32_{name}{_SUFFIX[dtype]}512_mask({a}, {b}, {zeros}, {_ALL_LANES})"


def zero_extension(source: DType, lanes: int, use: Callable[[str], str]) -> tuple[str, str] | None:
    """Return `use` applied to {x} zero-extended to 32 bits, which GCC 12 would do in two steps with a merge."""
    if lanes != 16:
        return None
    letter, element = ("b", "char") if source is DType.UINT8 else ("w", "short")  # char: not an element type of these vectors
    operand = f"({element} __attribute__((vector_size({source.bytes * lanes})))){{x}}"
    return "__AVX512F__", use(f"(vu32x16)__builtin_ia32_pmovzx{letter}d512_mask({operand}, (vi32x16){{{{0}}}}, -1)")


def resizing(text: str, source: DType, target: DType, lanes: int) -> tuple[str, str] | None:
    """Return (macro of the instruction set, conversion between bytes and 32 bits), or None.

    GCC 12 narrows by general permutations, and widens bytes of memory one by one.
    """
    if lanes != 16 or {source.bits, target.bits} != {8, 32}:
        return None
    bytes_, words = "(char __attribute__((vector_size(16))))", vector_type(DType.INT32, lanes)
    if target.bits == 8:
        call = f"__builtin_ia32_pmovdb512_mask(({words}){text}, {bytes_}{{0}}, -1)"
    else:
        name = "pmovsxbd512" if source.is_signed else "pmovzxbd512"
        call = f"__builtin_ia32_{name}_mask({bytes_}{text}, ({words}){{0}}, -1)"
    return "__AVX512F__", f"({vector_type(target, lanes)}){call}"


def byte_permutations_text(lanes: int) -> str:
    """Return the helper that looks up bytes in a table of 256: AVX512_VBMI chooses from two registers by seven bits.

    It uses inline assembly, because an instruction set beyond the architecture's is not enabled.
    """
    vector = vector_type(DType.UINT8, lanes)
    permute = '  __asm__("vpermi2b %g2, %g1, %g0" : "+v"({half}) : "v"(t[{first}]), "v"(t[{second}]));\n'
    halves = (permute.format(half="low", first=0, second=1), permute.format(half="high", first=2, second=3))
    return (
        f"static inline {vector} permuted_entries_{vector}(const unsigned char *table, {vector} at) {{\n"
        f"  const vu8x64 *t = (const vu8x64 *)table;\n  {vector} low = at, high = at;\n{''.join(halves)}"
        f"  return select_{vector}(({vector_type(DType.INT8, lanes)})at < 0, high, low);\n}}"
    )


def shuffled_entries(lanes: int, chunk: str) -> str | None:
    """Return the body of a lookup of bytes in a table of 256 for AVX2, or None for few lanes.

    The lowest four bits of a byte choose in both halves of eight registers, the highest three among the registers, and
    bit 4 a half. `vpblendvb` reads the highest bit of each byte, to which a shift of 16-bit words moves another one.
    `chunk`: the lookup of `SHUFFLED_BYTES`, which others use.
    """
    if lanes < MIN_SHUFFLED_BYTES:
        return None
    vector, whole = vector_type(DType.UINT8, lanes), vector_type(DType.UINT8, SHUFFLED_BYTES)
    if lanes < SHUFFLED_BYTES:
        return (
            "  long long __attribute__((vector_size(16))) both = {0};\n  __builtin_memcpy(&both, &at, sizeof at);\n"
            f"  both = (long long __attribute__((vector_size(16)))){chunk}(table, ({whole})both);\n"
            f"  {vector} r;\n  __builtin_memcpy(&r, &both, sizeof r);\n  return r;\n"
        )
    if lanes > SHUFFLED_BYTES:
        chunks = (f"(({whole} *)&r)[{i}] = {chunk}(table, (({whole} *)&at)[{i}]);" for i in range(lanes // SHUFFLED_BYTES))
        return "\n  ".join((f"  {vector} r;", *chunks, "return r;\n"))
    lines = [
        "typedef char half __attribute__((vector_size(16)));",
        "typedef char whole __attribute__((vector_size(32), aligned(1), may_alias));",
        "const whole *t = (const whole *)table;",
        "const whole both = (whole)__builtin_ia32_vbroadcastsi256((long long __attribute__((vector_size(16))))at);",
        "const whole low = both & 15;",
        "const short __attribute__((vector_size(32))) words = (short __attribute__((vector_size(32))))both;",
    ]
    parts = [f"__builtin_ia32_pshufb256(t[{i}], low)" for i in range(8)]
    for bit, shift in ((5, " << 2"), (6, " << 1"), (7, "")):
        names = [f"bit{bit}_{i}" for i in range(len(parts) // 2)]
        for name, zero, one in zip(names, parts[::2], parts[1::2], strict=True):
            lines.append(f"const whole {name} = __builtin_ia32_pblendvb256({zero}, {one}, (whole)(words{shift}));")
        parts = names
    half_words = "(half)((short __attribute__((vector_size(16))))at << 3)"
    ends = (f"(half)__builtin_ia32_extract128i256((long long __attribute__((vector_size(32)))){parts[0]}, {i})" for i in (0, 1))
    lines.append(f"return ({whole})__builtin_ia32_pblendvb128({', '.join(ends)}, {half_words});")
    return "".join(f"  {line}\n" for line in lines)


def pair_dot_text(lanes: int) -> str:
    """Return the helper sum + dot(a, b): two int16 a lane. `vpmaddwd` wraps where both products are 2^30."""
    vector, size = vector_type(DType.INT32, lanes), DType.INT32.bytes * lanes
    pairs = f"(short __attribute__((vector_size({size}))))"
    product = f"__builtin_ia32_pmaddwd{8 * size}({pairs}a, {pairs}b)"
    return (
        f"static inline {vector} dot_pairs_{vector}({vector} sum, {vector} a, {vector} b) {{\n"
        f"  return sum + ({vector}){product};\n}}"
    )


def dot_text(dtype: DType, lanes: int) -> str:
    """Return the helper sum + dot(a, b): four bytes a lane, a's unsigned, or two bfloat16.

    It uses inline assembly, because the operand types of the builtins differ between compilers.
    """
    name = "vdpbf16ps" if dtype.is_float else "vpdpbusd"  # not vpdpbusds, which saturates
    name = f"%{{vex%}} {name}" if lanes * dtype.bytes == _AVX_BYTES else name  # AVX-VNNI
    vector, words = vector_type(dtype, lanes), vector_type(DType.INT32, lanes)
    return (
        f"static inline {vector} dot_{vector}({vector} sum, {words} a, {words} b) {{\n"
        f'  __asm__("{name} %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));\n  return sum;\n}}'
    )
