"""C-like dialects as data: types, qualifiers, functions that differ by a word."""

from __future__ import annotations

from dataclasses import dataclass, replace

from roller_svc.ir.dtype import DType
from roller_svc.ir.kernel import Language

# short names of types, used in helpers' names: max_f32, floordiv_i64
SHORT = {
    DType.FLOAT64: "f64", DType.FLOAT32: "f32", DType.BFLOAT16: "bf16", DType.FLOAT16: "f16",
    DType.FLOAT8_E4M3FN: "e4m3", DType.FLOAT8_E5M2: "e5m2", DType.INT64: "i64", DType.UINT64: "u64",
    DType.INT32: "i32", DType.UINT32: "u32", DType.INT16: "i16", DType.UINT16: "u16", DType.INT8: "i8",
    DType.UINT8: "u8", DType.BOOL: "bool",
}  # fmt: skip

_INTEGERS = {
    DType.INT64: "long long", DType.UINT64: "unsigned long long", DType.INT32: "int", DType.UINT32: "unsigned int",
    DType.INT16: "short", DType.UINT16: "unsigned short", DType.INT8: "signed char", DType.UINT8: "unsigned char",
    DType.BOOL: "unsigned char",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Dialect:
    language: Language
    function: str  # how a helper function is declared
    index: str  # type of indices
    wide_index: str  # the same where a tensor has more than 2^31 elements
    inf_f32: str
    inf_f64: str
    half: str  # type that a float16 is stored as
    wraps: bool  # signed integer arithmetic wraps (a compiler flag says so)
    static_shared_bytes: int = 0  # a GPU's; more shared memory is dynamic, which a launch must ask for
    shuffle_xor: str = ""  # what the lane across has of {a}, {across} being where the lanes' numbers differ
    bounded_simds: int = 0  # HIP: SIMDs of a core, each of which holds the waves that launch bounds count; 0: blocks

    def storage_type(self, dtype: DType) -> str:
        """The type of an element in memory."""
        if dtype is DType.FLOAT16:
            return self.half
        if dtype is DType.BFLOAT16:
            return "unsigned short"
        if dtype in (DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2):
            return "unsigned char"
        return self.value_type(dtype)

    @staticmethod
    def value_type(dtype: DType) -> str:
        """The type in which its values are computed."""
        if dtype is DType.FLOAT64:
            return "double"
        return "float" if dtype.is_float else _INTEGERS[dtype]


C = Dialect(
    language=Language.C, function="static inline", index="long", wide_index="long",
    inf_f32="__builtin_inff()", inf_f64="__builtin_inf()", half="_Float16", wraps=True,
)  # fmt: skip
CUDA = Dialect(
    language=Language.CUDA, function="__device__ __forceinline__", index="int", wide_index="long long",
    inf_f32="__int_as_float(0x7f800000)", inf_f64="__longlong_as_double(0x7ff0000000000000LL)",
    half="unsigned short", wraps=False, static_shared_bytes=48 << 10,  # CUDA programming guide
    shuffle_xor="__shfl_xor_sync(0xffffffffu, {a}, {across})",
)  # fmt: skip
# Lanes of a wave are in step and need no mask. All of a core's 64 KiB can be static (AMD ISA documents, "LDS"); the
# second figure of __launch_bounds__ is waves of a SIMD, of which a core has four (HIP programming guide).
HIP = replace(
    CUDA, language=Language.HIP, static_shared_bytes=64 << 10, shuffle_xor="__shfl_xor({a}, {across})", bounded_simds=4
)
