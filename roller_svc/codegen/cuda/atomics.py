"""Helper reductions of scatters → device functions: one instruction where the device has it, else compare-and-swap.

Their results stay unused, so that NVRTC emits RED, which does not wait for memory.
"""

from __future__ import annotations

from roller_svc.codegen import dialect as dialects
from roller_svc.codegen.cuda.instructions import HIP_PREFIX
from roller_svc.codegen.helpers import Helper, helper
from roller_svc.ir.dtype import DType
from roller_svc.ir.hardware import Arch
from roller_svc.ir.program import Combine

PREFIX = "atomic_"
# Of sums of 16-bit elements whose number is odd. These functions also take the address of the last element.
ODD_SUFFIX = "_odd"
_HOPPER = Arch("sm_", 90)  # first with red.add.bf16x2 (PTX ISA, "red")
_BITS_OF = {32: ("int", "unsigned int"), 64: ("long long", "unsigned long long")}


def atomic_name(combine: Combine, dtype: DType, elements: int) -> str:
    """Return the name of the function that combines a value with an element of an array."""
    name = f"{PREFIX}{combine.name.lower()}_{dialects.SHORT[dtype]}"
    return f"{name}{ODD_SUFFIX}" if combine is Combine.SUM and dtype.bits == 16 and elements % 2 else name


def has_native_atomic(combine: Combine, dtype: DType, arch: Arch) -> bool:
    """Return whether the reduction needs no compare-and-swap."""
    if combine is Combine.SUM:
        return dtype.bits >= 32 or _adds_pairs(dtype, arch)
    if combine not in (Combine.MAX, Combine.MIN) or dtype.bits < 32:
        return False
    return arch.prefix != HIP_PREFIX or dtype.bits == 32  # HIP 5.2 has no signed 64-bit atomicMax


def atomic(name: str, arch: Arch, dialect: dialects.Dialect) -> Helper:
    """Return the function of that name."""
    _, which, short = name.removesuffix(ODD_SUFFIX).split("_", 2)
    dtype = next(d for d in DType if dialects.SHORT[d] == short)
    combine = Combine[which.upper()]
    is_odd = name.endswith(ODD_SUFFIX)
    head = _head(name, dtype, dialect, is_odd=is_odd)
    if not has_native_atomic(combine, dtype, arch):
        return _swap(head, combine, dtype, dialect, swaps_halves=arch.prefix != HIP_PREFIX)
    if combine is Combine.SUM:
        if dtype.bits != 16:
            return Helper(head + _sum(dtype, dialect) + "}")
        return _odd_pair_sum(head, name, dtype, dialect) if is_odd else _pair_sum(head, short)
    body = _float_order(which, dtype) if dtype.is_float else f"  atomic{which.title()}(place, value);\n"
    return Helper(head + body + "}")


def _head(name: str, dtype: DType, dialect: dialects.Dialect, *, is_odd: bool = False) -> str:
    stored = dialect.storage_type(dtype)
    last = f", {stored} *last" if is_odd else ""
    return f"__device__ __forceinline__ void {name}({stored} *place, {stored} value{last}) {{\n"


def _adds_pairs(dtype: DType, arch: Arch) -> bool:
    if arch.prefix == HIP_PREFIX:
        return False
    return dtype is DType.FLOAT16 or (dtype is DType.BFLOAT16 and arch >= _HOPPER)


def _sum(dtype: DType, dialect: dialects.Dialect) -> str:
    if dtype.is_float or dtype.bits == 32 or not dtype.is_signed:
        return "  atomicAdd(place, value);\n"
    word = dialect.value_type(DType.UINT64)  # the only 64-bit integer that atomicAdd takes
    return f"  atomicAdd(({word} *)place, ({word})value);\n"


def _pair_sum(head: str, short: str) -> Helper:
    """Add a pair of the value and -0, the neutral element of IEEE addition, to the element's aligned word.

    ptxas emits compare-and-swap for red.add.f16 of a single element.
    """
    text = (
        f"{head}  unsigned int shift = ((unsigned long long)place & 2) * 8;\n"
        f"  add_pair_{short}((unsigned int *)((unsigned long long)place & ~3ull),\n"
        f"{' ' * (12 + len(short))}(unsigned int)value << shift | 0x80000000u >> shift);\n}}"
    )
    return Helper(text, (f"add_pair_{short}",))


def _odd_pair_sum(head: str, name: str, dtype: DType, dialect: dialects.Dialect) -> Helper:
    """Add pairs to all elements but the last, whose word ends beyond the array.

    Adding -0 there would change the bits of what looks like a NaN.
    """
    swap = _swap(_head(f"{name}_last", dtype, dialect), Combine.SUM, dtype, dialect)
    pairs = _pair_sum(f"{head}  if (place == last) return {name}_last(place, value);\n", dialects.SHORT[dtype])
    return Helper(f"{swap.text}\n{pairs.text}", (*swap.needs, *pairs.needs))


def _float_order(which: str, dtype: DType) -> str:
    """Return the body of a float's maximum or minimum, by the order of its bits as an integer.

    Bits of floats order as signed integers if one is positive, and as unsigned ones in reverse if both are negative.
    A NaN is stored with the bits that win in either order. An element that is NaN before all updates stays.
    """
    signed, unsigned = _BITS_OF[dtype.bits]
    value = "float" if dtype.bits == 32 else "double"
    other = "Min" if which == "max" else "Max"
    nan = f"({signed})(~({unsigned})0 >> 1)" if which == "max" else "-1"
    return (
        f"  {value} seen = *(volatile {value} *)place;\n"
        f"  if (seen != seen || seen {'>=' if which == 'max' else '<='} value) return;\n"
        f"  {signed} bits = value != value ? {nan} : *({signed} *)&value;\n"
        f"  if (bits >= 0) atomic{which.title()}(({signed} *)place, bits);\n"
        f"  else atomic{other}(({unsigned} *)place, ({unsigned})bits);\n"
    )


def _swap(head: str, combine: Combine, dtype: DType, dialect: dialects.Dialect, *, swaps_halves: bool = True) -> Helper:
    """Return a reduction by compare-and-swap, for any type and operator.

    A maximum or minimum that leaves the element as it is ends without a swap. No device swaps bytes, and HIP no halves
    of words (`swaps_halves`): the enclosing word is swapped, which may exceed the array.
    """
    short, which = dialects.SHORT[dtype], combine.name.lower()
    stored, value = dialect.storage_type(dtype), dialect.value_type(dtype)
    is_order = combine in (Combine.MAX, Combine.MIN)
    needed: tuple[str, ...] = ()
    old, new = "old", "join"
    if dtype.is_narrow_float:
        back, to = f"{short}_to_f32", f"f32_to_{short}"
        needed = (*helper(back, dialect).needs, *helper(to, dialect).needs, back, to)
        old, new = f"{back}(old)", f"{to}(join)"
    if is_order:
        function = f"{which}_{dialects.SHORT[dtype.compute]}"
        needed = (*needed, function)
        join = f"{function}({old}, {'value' if not dtype.is_narrow_float else f'{short}_to_f32(value)'})"
    else:
        sign = "+" if combine is Combine.SUM else "*"
        operand = f"{short}_to_f32(value)" if dtype.is_narrow_float else "value"
        if not dtype.is_float:  # unsigned arithmetic wraps
            unsigned = "unsigned long long" if dtype.bits == 64 else "unsigned int"
            old, operand = f"({unsigned}){old}", f"({unsigned}){operand}"
        join = f"({value})({old} {sign} {operand})"
    word = {64: "unsigned long long", 16: "unsigned short"}.get(dtype.bits, "unsigned int")
    if dtype.bits >= (16 if swaps_halves else 32):
        whole = f"*({word} *)&stored"
        locate = f"  {word} *at = ({word} *)place;\n"
        extract = f"    {stored} old = *({stored} *)&seen;\n"
    else:
        word, bits = "unsigned int", "unsigned char" if dtype.bits == 8 else "unsigned short"
        whole = f"(seen & ~mask) | ((unsigned int)*({bits} *)&stored << shift & mask)"
        locate = (
            "  unsigned int *at = (unsigned int *)((unsigned long long)place & ~3ull);\n"
            "  unsigned int shift = ((unsigned long long)place & 3) * 8;\n"
            f"  unsigned int mask = {(1 << dtype.bits) - 1}u << shift;\n"
        )
        extract = f"    {bits} part = ({bits})((seen & mask) >> shift);\n    {stored} old = *({stored} *)&part;\n"
    unchanged = f"    if (({whole}) == before) return;\n" if is_order else ""
    text = (
        f"{head}{locate}"
        f"  {word} seen = *(volatile {word} *)at, before;\n  do {{\n    before = seen;\n{extract}"
        f"    {value} join = {join};\n    {stored} stored = ({stored}){new};\n{unchanged}"
        f"    seen = atomicCAS(at, before, {whole});\n  }} while (seen != before);\n}}"
    )
    return Helper(text, needed)
