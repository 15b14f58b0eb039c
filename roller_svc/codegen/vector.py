"""Vector types of C kernels, the variables of such types, and blocks of vectors turned."""

from __future__ import annotations

from roller_svc.codegen.dialect import SHORT, C
from roller_svc.ir.dtype import DType

VECTOR_TYPES = (DType.FLOAT32, DType.FLOAT64, DType.INT32)


def register_name(identifier: str, index: list[int], lanes: int) -> str:
    """acc, (2, 32), 16 → acc_2_2: the variable that holds elements 32 to 47 of row 2."""
    return "_".join([identifier, *(str(i) for i in index[:-1]), str(index[-1] // lanes)])


def vector_type(dtype: DType, lanes: int) -> str:
    return f"v{SHORT[dtype]}x{lanes}"


def vector_header(dtype: DType, lanes: int, c_type: str) -> str:
    """Unaligned vector type: dense tensors give no more than element alignment."""
    name = vector_type(dtype, lanes)
    attributes = f"vector_size({dtype.bytes * lanes}), aligned({dtype.bytes}), may_alias"
    return f"typedef {c_type} {name} __attribute__(({attributes}));"


def block_transpose(name: str, dtype: DType, lanes: int) -> str:
    """A block of lanes x lanes elements turned in registers: off-diagonal quarters change places, then quarters of
    those, ... (J. O. Eklundh, A fast computer method for matrix transposing, IEEE Trans. Comput. C-21, 1972)."""
    vector = vector_type(dtype, lanes)
    mask = vector_type({8: DType.INT8, 16: DType.INT16, 32: DType.INT32, 64: DType.INT64}[dtype.bits], lanes)
    element = C.value_type(dtype)
    rows = range(lanes)
    lines = [f"  const {vector} r0_{i} = *(const {vector} *)(from + {i} * from_stride);" for i in rows]
    step, half = 0, lanes // 2
    while half:
        low = ", ".join(str(j - half + lanes if j & half else j) for j in rows)
        high = ", ".join(str(j + lanes if j & half else j + half) for j in rows)
        for i in rows:
            if not i & half:
                pair = f"r{step}_{i}, r{step}_{i + half}"
                for to, order in ((i, low), (i + half, high)):
                    lines.append(f"  const {vector} r{step + 1}_{to} = __builtin_shuffle({pair}, ({mask}){{{order}}});")
        step, half = step + 1, half // 2
    lines += [f"  *({vector} *)(to + {i} * to_stride) = r{step}_{i};" for i in rows]
    head = f"static inline void {name}({element} *to, long to_stride, const {element} *from, long from_stride) {{"
    return "\n".join([head, *lines, "}"])
