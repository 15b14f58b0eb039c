"""Blocks of elements that are turned → C functions: short rows dealt to vectors or woven of them, narrow elements."""

from __future__ import annotations

from collections.abc import Sequence

from roller_svc.codegen.dialect import C
from roller_svc.codegen.vector import vector_type
from roller_svc.ir.dtype import DType

_BITS = {8: DType.INT8, 16: DType.INT16, 32: DType.INT32, 64: DType.INT64}


def as_bits(dtype: DType) -> DType:
    """A type of vectors that moves elements of another one: floats that vectors compute in, else integers as wide."""
    return dtype if dtype in (DType.FLOAT32, DType.FLOAT64) else _BITS[dtype.bits]


def turn_helper(base: str, dtype: DType, lanes: int) -> str:
    """deal3: short rows of three behind each other → three rows of `lanes`; weave3: the way back; turn: a square of
    elements of one or two bytes."""
    if base == "turn":
        return _square(dtype, lanes)
    is_dealt = base.startswith("deal")
    short = int(base.removeprefix("deal" if is_dealt else "weave"))
    return (_dealt if is_dealt else _woven)(short, dtype, lanes)


def _dealt(short: int, dtype: DType, lanes: int) -> str:
    """to[j * stride + l] = from[l * short + j]."""
    vector, element = vector_type(dtype, lanes), C.storage_type(dtype)
    lines = [f"  const {vector} a{m} = *(const {vector} *)(from + {m * lanes});" for m in range(short)]
    for j in range(short):
        picks = [divmod(lane * short + j, lanes) for lane in range(lanes)]
        lines += _picked(f"b{j}", short, (dtype, lanes), picks)
        lines.append(f"  *({vector} *)(to + {j} * stride) = b{j};")
    head = f"static inline void deal{short}_{vector}({element} *to, long stride, const {element} *from) {{"
    return "\n".join([head, *lines, "}"])


def _woven(short: int, dtype: DType, lanes: int) -> str:
    """to[l * short + j] = from[j * stride + l]."""
    vector, element = vector_type(dtype, lanes), C.storage_type(dtype)
    lines = [f"  const {vector} a{j} = *(const {vector} *)(from + {j} * stride);" for j in range(short)]
    for m in range(short):
        picks = [divmod(m * lanes + lane, short)[::-1] for lane in range(lanes)]
        lines += _picked(f"b{m}", short, (dtype, lanes), picks)
        lines.append(f"  *({vector} *)(to + {m * lanes}) = b{m};")
    head = f"static inline void weave{short}_{vector}({element} *to, const {element} *from, long stride) {{"
    return "\n".join([head, *lines, "}"])


def _picked(
    name: str, count: int, type_: tuple[DType, int], picks: Sequence[tuple[int, ...]]
) -> list[str]:
    """A vector each lane of which is (vector, lane) of the a: of two of them, then one more at a time."""
    dtype, lanes = type_
    vector, mask = vector_type(dtype, lanes), vector_type(_BITS[dtype.bits], lanes)
    first = ", ".join(str(m * lanes + at if m < 2 else 0) for m, at in picks)
    lines = [f"  {vector} {name} = SHUFFLE({mask}, a0, a1, {first});"]
    for m in range(2, count):
        order = ", ".join(str(lanes + at if k == m else lane) for lane, (k, at) in enumerate(picks))
        lines.append(f"  {name} = SHUFFLE({mask}, {name}, a{m}, {order});")
    return lines


def _square(dtype: DType, lanes: int) -> str:
    """Rows i and i + lanes / 2 taken element by element in turn become rows 2 i and 2 i + 1; log2(lanes) times."""
    vector, element = vector_type(dtype, lanes), C.storage_type(dtype)
    rows, half = range(lanes), lanes // 2
    lines = [f"  const {vector} r0_{i} = *(const {vector} *)(from + {i} * from_stride);" for i in rows]
    ends = [", ".join(f"{i}, {lanes + i}" for i in range(first, first + half)) for first in (0, half)]
    steps = lanes.bit_length() - 1
    for step in range(steps):
        for i in range(half):
            pair = f"r{step}_{i}, r{step}_{i + half}"
            for end, order in enumerate(ends):
                name = f"r{step + 1}_{2 * i + end}"
                lines.append(f"  const {vector} {name} = SHUFFLE({vector}, {pair}, {order});")
    lines += [f"  *({vector} *)(to + {i} * to_stride) = r{steps}_{i};" for i in rows]
    parameters = f"{element} *to, long to_stride, const {element} *from, long from_stride"
    head = f"static inline void turn_{vector}({parameters}) {{"
    return "\n".join([head, *lines, "}"])
