"""Stores that go past the caches (non-temporal ones): C functions of vectors, and the fence behind the last of them."""

from __future__ import annotations

from roller_svc.codegen.helpers import Helper
from roller_svc.codegen.vector import vector_type
from roller_svc.ir.dtype import DType

# Intel SDM, MOVNTPS: the address is aligned to the vector; the store is ordered behind others by SFENCE only.
_STORES = {
    64: ("__AVX512F__", "__builtin_ia32_movntps512"),
    32: ("__AVX__", "__builtin_ia32_movntps256"),
    16: ("__SSE__", "__builtin_ia32_movntps"),
}
STORES_DONE = """static inline void stores_done(void) {
#if defined(__SSE__)
  __builtin_ia32_sfence();
#endif
}"""


def is_streamable(dtype: DType, lanes: int) -> bool:
    """Whether there is such a store of a vector."""
    return dtype.bytes * lanes in _STORES


def stream_helper(dtype: DType, lanes: int) -> Helper:
    """A vector past the caches where it is aligned, else stored like any other."""
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
