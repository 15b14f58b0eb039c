"""Wrappers of instructions without CUDA C++ functions, and of AMD's matrix instructions.

Inline assembly is only here, in hopper_instructions.py and in event_instructions.py. The emulator implements every
wrapper on the host. Shapes, fragments and sizes are those of the PTX ISA: "cp.async", "ldmatrix", "mma". AMD's wrappers
call builtins of clang for amdgcn (LLVM, "BuiltinsAMDGPU.def"), whose last three operands, which broadcast blocks, are 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from roller_svc.codegen.cuda.event_instructions import EVENT_WRAPPERS
from roller_svc.codegen.cuda.hopper_instructions import hopper_instruction
from roller_svc.codegen.dialect import SHORT
from roller_svc.codegen.helpers import RCP_APPROX, Helper
from roller_svc.errors import InvariantError
from roller_svc.ir.dtype import DType
from roller_svc.ir.hardware import Arch

HIP_PREFIX = "gfx"
WIDER_BYTES = Arch(HIP_PREFIX, 0x940)  # first with 32 bytes along k in an instruction, not 16


@dataclass(frozen=True, slots=True)
class _Mfma:
    """A builtin of AMD's matrix instructions."""

    builtin: str
    element_type: str  # in memory
    operand_type: str  # of the builtin
    count: int  # operands of a lane
    accumulator_type: str


_HALVES = "unsigned short"
_MFMA = {
    "mfma_16x16x16_f16": _Mfma("f32_16x16x16f16", _HALVES, "_Float16", 4, "float"),
    "mfma_16x16x16_bf16": _Mfma("f32_16x16x16bf16_1k", _HALVES, "short", 4, "float"),
    "mfma_16x16x4_f32": _Mfma("f32_16x16x4f32", "float", "float", 1, "float"),
    "mfma_16x16x16_s8": _Mfma("i32_16x16x16i8", "signed char", "int", 1, "int"),
    "mfma_16x16x32_s8": _Mfma("i32_16x16x32_i8", "signed char", "long", 1, "int"),
    "mfma_16x16x4_f64": _Mfma("f64_16x16x4f64", "double", "double", 1, "double"),
}
_MFMA_SHAPES = {
    DType.FLOAT16: "16_f16", DType.BFLOAT16: "16_bf16", DType.FLOAT32: "4_f32", DType.INT8: "16_s8", DType.FLOAT64: "4_f64",
}  # fmt: skip


def mfma_wrapper(dtype: DType, arch: Arch) -> str:
    """Return the name of the wrapper that multiplies fragments of 16 rows and 16 columns."""
    if dtype is DType.INT8 and arch >= WIDER_BYTES:
        return "mfma_16x16x32_s8"
    if dtype not in _MFMA_SHAPES:
        raise InvariantError(f"no MFMA of {dtype.value}")
    return f"mfma_16x16x{_MFMA_SHAPES[dtype]}"


def mfma(name: str) -> Helper | None:
    """Return the source of a wrapper, or None if the name is not one of a wrapper."""
    one = _MFMA.get(name)
    if one is None:
        return None
    vector = f" __attribute__((ext_vector_type({one.count})))" if one.count > 1 else ""
    return Helper(
        f"__device__ __forceinline__ void {name}"
        f"({one.accumulator_type} *d, const {one.element_type} *a, const {one.element_type} *b) {{\n"
        f"  typedef {one.accumulator_type} Sums __attribute__((ext_vector_type(4)));\n"
        f"  typedef {one.operand_type} Operand{vector};\n"
        f"  Sums sums = {{d[0], d[1], d[2], d[3]}};\n"
        f"  sums = __builtin_amdgcn_mfma_{one.builtin}(*(const Operand *)a, *(const Operand *)b, sums, 0, 0, 0);\n"
        f"  for (int i = 0; i < 4; i++) d[i] = sums[i];\n}}"
    )


AMPERE = Arch("sm_", 80)  # cp.async, and the larger mma of every type but float64
HOPPER = Arch("sm_", 90)  # the larger mma of float64

_F = "__device__ __forceinline__"
_SHARED_ADDRESS = f"""{_F} unsigned int shared_address(const void *p) {{
  return (unsigned int)__cvta_generic_to_shared(p);
}}"""
_COMMIT = f"""{_F} void commit_copies() {{ asm volatile("cp.async.commit_group;" ::: "memory"); }}"""
_AWAIT = f"""template <int PENDING> {_F} void await_copies() {{
  asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory");
}}"""
_ROUND = f"""{_F} unsigned int round_tf32(unsigned int bits) {{
  unsigned int rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(__uint_as_float(bits)));
  return rounded;
}}"""
_FMA_PAIR = f"""{_F} unsigned int fma_f16x2(unsigned int a, unsigned int b, unsigned int c) {{
  unsigned int word;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(word) : "r"(a), "r"(b), "r"(c));
  return word;
}}"""
# One instruction; of two constants the compiler would make two.
_AND_OR = f"""{_F} unsigned int and_or(unsigned int a, unsigned int mask, unsigned int bits) {{
  unsigned int word;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(word) : "r"(a), "r"(mask), "r"(bits));
  return word;
}}"""
_PLAIN = {"commit_copies": _COMMIT, "await_copies": _AWAIT, "round_tf32": _ROUND, "rcp_approx": RCP_APPROX,
          "fma_f16x2": _FMA_PAIR, "and_or": _AND_OR}  # fmt: skip

# add, subtract and multiply two pairs of 16-bit floats; bfloat16 has one instruction for all (PTX ISA, "fma").
_PAIR_OPS = {"add": "+", "sub": "-", "mul": "*"}
# Its third input %3: 1, -1 or -0 in both halves.
_FMA_OPERANDS = {
    "add": ("%1, %3, %2", "0x3f803f80u"), "sub": ("%2, %3, %1", "0xbf80bf80u"), "mul": ("%1, %2, %3", "0x80008000u"),
}  # fmt: skip
_PAIR_CONVERSIONS = {
    "e4m3x2_to_f16x2": Helper(f"""{_F} unsigned int e4m3x2_to_f16x2(unsigned short bytes) {{
#if __CUDA_ARCH__ >= 890
  unsigned int word;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(word) : "h"(bytes));
  return word;
#else
  unsigned int low = f32_to_f16(e4m3_to_f32((unsigned char)bytes));
  return low | (unsigned int)f32_to_f16(e4m3_to_f32((unsigned char)(bytes >> 8))) << 16;
#endif
}}""", ("e4m3_to_f32", "f32_to_f16")),
    # the high byte of a float16
    "e5m2x2_to_f16x2": Helper(f"""{_F} unsigned int e5m2x2_to_f16x2(unsigned short bytes) {{
  return __byte_perm(bytes, 0, 0x1404);
}}"""),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Registers:
    """Types of a lane's registers: of the sums, with their letter and PTX's name, and of the operands."""

    sum_type: str
    sum_letter: str
    sum_name: str
    operand_type: str = "unsigned int"
    operand_letter: str = "r"


_SUMS_F32, _SUMS_S32 = _Registers("float", "f", "f32"), _Registers("int", "r", "s32")
_SUMS_F64 = _Registers("double", "d", "f64", "double", "d")
# Shape → a lane's sums, and its registers of a and b. Tf32 and float64 have one element in a register.
_MMA = {"m16n8k16": (4, 4, 2), "m16n8k8": (4, 2, 1), "m16n8k32": (4, 4, 2), "m8n8k16": (2, 1, 1), "m8n8k4": (2, 1, 1)}
_ONE_ELEMENT = {"m16n8k8": (4, 4, 2), "m8n8k4": (2, 1, 1)}
_NAMES = {"i8": "s8"}  # PTX's own names for types


def mma_wrapper(a: DType, b: DType, arch: Arch) -> str:
    """Return the name of the wrapper that multiplies fragments of 16 x 32 and 32 x 8 bytes; of float64, twice these."""
    if arch.prefix == HIP_PREFIX:
        return mfma_wrapper(a, arch)
    one, other = (_NAMES.get(SHORT[d], SHORT[d]) for d in (a, b))
    if a is DType.FLOAT32:
        return "mma_m16n8k8_tf32"
    if a is DType.FLOAT64:
        return "mma_m16n8k8_f64" if arch >= HOPPER else "mma_four_m8n8k4_f64"
    if a.bits == 16:
        return "mma_m16n8k16_" + one if arch >= AMPERE else "mma_two_m16n8k8_" + one
    if not a.is_float and arch < AMPERE:
        return f"mma_four_m8n8k16_{one}{other}"
    return f"mma_m16n8k32_{one}{other}"


def instruction(name: str) -> Helper | None:
    """Return the source of a wrapper, or None if the name is not one of a wrapper."""
    if wrapper := mfma(name):
        return wrapper
    if text := _PLAIN.get(name):
        return Helper(text)
    if name in EVENT_WRAPPERS:
        return EVENT_WRAPPERS[name]
    if name in _PAIR_CONVERSIONS:
        return _PAIR_CONVERSIONS[name]
    if found := re.fullmatch(r"(add|sub|mul)_(f16|bf16)x2", name):
        return _pair(name, found[1], found[2])
    if found := re.fullmatch(r"add_pair_(f16|bf16)", name):
        return Helper(_add_pair(found[1]))
    if name == "shared_address":
        return Helper(_SHARED_ADDRESS)
    if found := re.fullmatch(r"copy_async_(4|8|16)", name):
        return Helper(_copy(int(found[1])), ("shared_address",))
    if found := re.fullmatch(r"load_matrix_([124])(_transposed)?", name):
        return Helper(_load_matrix(int(found[1]), transposed=found[2] is not None), ("shared_address",))
    if found := re.fullmatch(r"pack_(f16|bf16)", name):
        return Helper(_pack(found[1]), (f"f32_to_{found[1]}",))
    if found := re.fullmatch(r"mma_two_m16n8k8_(\w+)", name):
        one = f"mma_m16n8k8_{found[1]}"
        return Helper(_composed(name, _SUMS_F32, (f"{one}(d, a, b);", f"{one}(d, a + 2, b + 1);")), (one,))
    if found := re.fullmatch(r"mma_four_(m8n8k16|m8n8k4)_(\w+)", name):
        one = f"mma_{found[1]}_{found[2]}"
        steps = (f"{one}(d, a, b);", f"{one}(d, a + 2, b + 1);", f"{one}(d + 2, a + 1, b);",
                 f"{one}(d + 2, a + 3, b + 1);")  # fmt: skip
        return Helper(_composed(name, _registers(found[2]), steps), (one,))
    if found := re.fullmatch(r"mma_(m\d+n\d+k\d+)_(\w+)", name):
        return Helper(_mma(name, found[1], found[2]))
    return hopper_instruction(name)


def _pair(name: str, operation: str, short: str) -> Helper:
    head = f"{_F} unsigned int {name}(unsigned int a, unsigned int b) {{\n"
    order, constant = _FMA_OPERANDS[operation]
    asm, more = (f"{operation}.f16x2 %0, %1, %2", "") if short == "f16" else (f"fma.rn.bf16x2 %0, {order}", f', "r"({constant})')
    body = f'  unsigned int word;\n  asm("{asm};" : "=r"(word) : "r"(a), "r"(b){more});\n  return word;\n'
    if short == "f16":
        return Helper(f"{head}{body}}}")
    sign = _PAIR_OPS[operation]
    return Helper(
        f"{head}#if __CUDA_ARCH__ >= 800\n{body}#else\n"
        f"  unsigned int low = f32_to_bf16(__uint_as_float(a << 16) {sign} __uint_as_float(b << 16));\n"
        f"  float high = __uint_as_float(a & 0xffff0000u) {sign} __uint_as_float(b & 0xffff0000u);\n"
        f"  return low | (unsigned int)f32_to_bf16(high) << 16;\n#endif\n}}",
        ("f32_to_bf16",),
    )


def _copy(size: int) -> str:
    # 16 bytes go past L1, which has no use for them; smaller copies are only to be had through it
    cache = "cg" if size == 16 else "ca"
    return (
        f"{_F} void copy_async_{size}(void *shared, const void *memory, bool inside) {{\n"
        f"  int bytes = inside ? {size} : 0;  // the rest is filled with zeros\n"
        f'  asm volatile("cp.async.{cache}.shared.global [%0], [%1], {size}, %2;"\n'
        f'               :: "r"(shared_address(shared)), "l"(memory), "r"(bytes) : "memory");\n}}'
    )


def _load_matrix(count: int, *, transposed: bool) -> str:
    words = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"=r"(words[{i}])' for i in range(count))
    suffix, trans = ("_transposed", ".trans") if transposed else ("", "")
    return (
        f"{_F} void load_matrix_{count}{suffix}(unsigned int *words, const void *row) {{\n"
        f'  asm volatile("ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{words}}}, [%{count}];"\n'
        f'               : {outputs} : "r"(shared_address(row)) : "memory");\n}}'
    )


def _pack(short: str) -> str:
    # of two operands the first goes to the high half (PTX ISA, "cvt")
    return (
        f"{_F} unsigned int pack_{short}(float low, float high) {{\n"
        f"#if __CUDA_ARCH__ >= 800\n  unsigned int word;\n"
        f'  asm("cvt.rn.{short}x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));\n  return word;\n'
        f"#else\n  return (unsigned int)f32_to_{short}(low) | (unsigned int)f32_to_{short}(high) << 16;\n#endif\n}}"
    )


def _add_pair(short: str) -> str:
    return (
        f"{_F} void add_pair_{short}(unsigned int *at, unsigned int pair) {{\n"
        f'  asm volatile("red.global.add.noftz.{short}x2 [%0], %1;"\n'
        f'               :: "l"(__cvta_generic_to_global(at)), "r"(pair) : "memory");\n}}'
    )


def _mma(name: str, shape: str, types: str) -> str:
    operands = _operand_types(types)
    d, a, b = (_ONE_ELEMENT if types in ("tf32", "f64") else _MMA)[shape]
    registers = _registers(types)
    results = ", ".join(f'"+{registers.sum_letter}"(d[{i}])' for i in range(d))
    letter, short = registers.operand_letter, registers.sum_name
    inputs = ", ".join([*(f'"{letter}"(a[{i}])' for i in range(a)), *(f'"{letter}"(b[{i}])' for i in range(b))])
    numbers = iter(range(d + a + b))
    d_list, a_list, b_list = (_listed(numbers, count) for count in (d, a, b))
    return (
        f"{_F} void {name}({registers.sum_type} *d, const {registers.operand_type} *a, const {registers.operand_type} *b) {{\n"
        f'  asm("mma.sync.aligned.{shape}.row.col.{short}.{operands[0]}.{operands[1]}.{short} "\n'
        f'      "{{{d_list}}}, {{{a_list}}}, {{{b_list}}}, {{{d_list}}};"\n'
        f"      : {results} : {inputs});\n}}"
    )


def _registers(types: str) -> _Registers:
    """Return the registers of products of the types in a wrapper's name."""
    if types == "f64":
        return _SUMS_F64
    return _SUMS_S32 if types[0] in "su" else _SUMS_F32


def _operand_types(types: str) -> tuple[str, str]:
    """Split 's8u8' into ('s8', 'u8'); a single name is the type of both."""
    found = re.fullmatch(r"(s8|u8|e4m3|e5m2)(s8|u8|e4m3|e5m2)", types)
    if found:
        return found[1], found[2]
    if types in ("f16", "bf16", "tf32", "f64"):
        return types, types
    raise InvariantError(f"no mma of {types}")


def _listed(numbers: Iterator[int], count: int) -> str:
    return ", ".join(f"%{next(numbers)}" for _ in range(count))


def _composed(name: str, registers: _Registers, steps: tuple[str, ...]) -> str:
    body = "\n".join(f"  {step}" for step in steps)
    element, operand = registers.sum_type, registers.operand_type
    return f"{_F} void {name}({element} *d, const {operand} *a, const {operand} *b) {{\n{body}\n}}"
