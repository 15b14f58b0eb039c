"""Named wrappers of AMD's matrix instructions, around the compiler's builtins. The emulator has a twin of every one.

Builtins are those of clang for amdgcn (LLVM, "BuiltinsAMDGPU.def"); the last three operands, which broadcast blocks, 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from roller_svc.codegen.helpers import Helper
from roller_svc.errors import InvariantError
from roller_svc.ir.dtype import DType
from roller_svc.ir.hardware import Arch

HIP_PREFIX = "gfx"
WIDER_BYTES = Arch(HIP_PREFIX, 0x940)  # from here on an instruction multiplies 32 bytes along k, not 16


@dataclass(frozen=True, slots=True)
class _Mfma:
    """`held`: type of an element in memory; `operand`: the builtin's, of which a lane has `count`; `sums`: of a sum."""

    builtin: str
    held: str
    operand: str
    count: int
    sums: str


_HALVES = "unsigned short"
_OF = {
    "mfma_16x16x16_f16": _Mfma("f32_16x16x16f16", _HALVES, "_Float16", 4, "float"),
    "mfma_16x16x16_bf16": _Mfma("f32_16x16x16bf16_1k", _HALVES, "short", 4, "float"),
    "mfma_16x16x4_f32": _Mfma("f32_16x16x4f32", "float", "float", 1, "float"),
    "mfma_16x16x16_s8": _Mfma("i32_16x16x16i8", "signed char", "int", 1, "int"),
    "mfma_16x16x32_s8": _Mfma("i32_16x16x32_i8", "signed char", "long", 1, "int"),
}
_NAMES = {DType.FLOAT16: "16_f16", DType.BFLOAT16: "16_bf16", DType.FLOAT32: "4_f32", DType.INT8: "16_s8"}


def mfma_wrapper(dtype: DType, arch: Arch) -> str:
    """Name of the function that multiplies fragments of 16 rows and 16 columns."""
    if dtype is DType.INT8 and arch >= WIDER_BYTES:
        return "mfma_16x16x32_s8"
    if dtype not in _NAMES:
        raise InvariantError(f"no MFMA of {dtype.value}")
    return f"mfma_16x16x{_NAMES[dtype]}"


def mfma(name: str) -> Helper | None:
    """The text of a wrapper; None for a name that is no wrapper's."""
    one = _OF.get(name)
    if one is None:
        return None
    vector = f" __attribute__((ext_vector_type({one.count})))" if one.count > 1 else ""
    return Helper(
        f"__device__ __forceinline__ void {name}({one.sums} *d, const {one.held} *a, const {one.held} *b) {{\n"
        f"  typedef {one.sums} Sums __attribute__((ext_vector_type(4)));\n"
        f"  typedef {one.operand} Operand{vector};\n"
        f"  Sums sums = {{d[0], d[1], d[2], d[3]}};\n"
        f"  sums = __builtin_amdgcn_mfma_{one.builtin}(*(const Operand *)a, *(const Operand *)b, sums, 0, 0, 0);\n"
        f"  for (int i = 0; i < 4; i++) d[i] = sums[i];\n}}"
    )
