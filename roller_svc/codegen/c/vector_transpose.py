"""C functions that transpose blocks in vector registers: squares, a few rows, and (de)interleaving of short rows.

Rows are interleaved within 128-bit chunks, then chunks are permuted (after the 8 x 8 transpose by unpacks in Intel's
Optimization Reference Manual, chapter on AVX). These instructions need no index vectors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from roller_svc.codegen.c.vector.types import vector_type
from roller_svc.codegen.dialect import SHORT, C
from roller_svc.ir.dtype import DType
from roller_svc.ir.schedule import Transpose

SHUFFLE = """#ifdef __clang__
#define SHUFFLE(type, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(type, a, b, ...) __builtin_shuffle(a, b, (type){__VA_ARGS__})
#endif
#if defined(__clang__) || __GNUC__ >= 12
#define CONCATENATE(a, b) __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7)
#endif"""
_BITS = {8: DType.INT8, 16: DType.INT16, 32: DType.INT32, 64: DType.INT64}
_KINDS = ("transpose", "deinterleave", "interleave")
_SOURCE = "_of_"  # before the type of rows that are widened to float32
_CHUNK_BYTES = 16  # within which unpack instructions interleave


def as_bits(dtype: DType) -> DType:
    """Return the element type of vectors that move elements of a type: float32, float64, or an integer as wide."""
    return dtype if dtype in (DType.FLOAT32, DType.FLOAT64) else _BITS[dtype.bits]


def transpose_name(node: Transpose, dtype: DType, lanes: int) -> str:
    """Return the name of the helper.

    deinterleave3 takes rows of three to three rows of `lanes`; interleave3 is its inverse. transpose6 transposes six
    rows of `lanes`; transpose transposes a square; transpose_of_f16 transposes rows of float16 as float32, and
    deinterleave2_of_f16 takes such rows.
    """
    vector, source = vector_type(dtype, lanes), node.source.dtype
    widened = f"{_SOURCE}{SHORT[source]}" if node.dtype is None and dtype is DType.FLOAT32 is not source else ""
    if node.columns is not None:
        return f"deinterleave{node.columns}{widened}_{vector}"
    if node.rows is not None and node.column_dim is not None:
        return f"interleave{node.rows}_{vector}"
    return f"transpose{'' if node.rows in (None, lanes) else node.rows}{widened}_{vector}"


def is_transpose_helper(name: str) -> bool:
    """Return whether a helper transposes."""
    return _kind(name.partition("_v")[0]) in _KINDS


def transpose_helper(base: str, dtype: DType, lanes: int) -> str:
    """Return the source of the C function `base`_`vector`."""
    kind = _kind(base)
    count = int(base.partition(_SOURCE)[0].removeprefix(kind) or lanes)
    if kind == "deinterleave":
        return _deinterleave(base, count, dtype, lanes)
    return _interleave(count, dtype, lanes) if kind == "interleave" else _transpose(base, count, dtype, lanes)


def _kind(base: str) -> str:
    return base.partition(_SOURCE)[0].rstrip("0123456789")


def _deinterleave(base: str, short: int, dtype: DType, lanes: int) -> str:
    """Emit to[j * stride + l] = from[l * short + j]."""
    vector, element, stored = vector_type(dtype, lanes), C.storage_type(dtype), _stored_type(base, dtype)
    lines = [f"  const {vector} a{m} = {_row(f'from + {m * lanes}', stored, dtype, lanes)};" for m in range(short)]
    for j in range(short):
        picks = [divmod(lane * short + j, lanes) for lane in range(lanes)]
        lines += _select_lanes(f"b{j}", short, (dtype, lanes), picks)
        lines.append(f"  *({vector} *)(to + {j} * stride) = b{j};")
    if short == 2 and lanes * dtype.bytes == 2 * _CHUNK_BYTES and stored.bytes == 4:
        lines = ["#ifdef CONCATENATE", *_deinterleave_chunks(dtype, lanes), "#else", *lines, "#endif"]
    head = f"static inline void {base}_{vector}({element} *to, long stride, const {C.storage_type(stored)} *from) {{"
    return "\n".join([head, *lines, "}"])


def _stored_type(base: str, dtype: DType) -> DType:
    """Return the type in memory of the rows that a helper reads as `dtype`."""
    return next((d for d, short in SHORT.items() if short == base.partition(_SOURCE)[2]), dtype)


def _row(address: str, stored: DType, dtype: DType, lanes: int) -> str:
    """Return the vector at an address, widened from the stored type."""
    row = f"*(const {vector_type(stored, lanes)} *)({address})"
    return row if stored is dtype else f"from_{SHORT[stored]}_{vector_type(dtype, lanes)}({row})"


def _deinterleave_chunks(dtype: DType, lanes: int) -> list[str]:
    """Emit two loads of chunks for each vector, so that one shuffle within chunks sorts its elements.

    Shuffles between the chunks of AVX2 vectors take three cycles each.
    """
    vector, chunk, half = vector_type(dtype, lanes), vector_type(dtype, lanes // 2), lanes // 2
    lines = [f"  typedef {C.storage_type(dtype)} {chunk} __attribute__((vector_size({_CHUNK_BYTES}), aligned(4)));"]
    for m in range(2):
        low, high = (f"*(const {chunk} *)(from + {i * half})" for i in (m, m + 2))
        lines.append(f"  const {vector} c{m} = CONCATENATE({low}, {high});")
    mask = vector_type(_BITS[dtype.bits], lanes)
    for j in range(2):
        order = [k + start for start in (0, half) for k in (j, j + 2, lanes + j, lanes + j + 2)]
        lines.append(f"  *({vector} *)(to + {j} * stride) = SHUFFLE({mask}, c0, c1, {', '.join(map(str, order))});")
    return lines


def _interleave(short: int, dtype: DType, lanes: int) -> str:
    """Emit to[l * short + j] = from[j * stride + l]."""
    vector, element = vector_type(dtype, lanes), C.storage_type(dtype)
    lines = [f"  const {vector} a{j} = *(const {vector} *)(from + {j} * stride);" for j in range(short)]
    for m in range(short):
        picks = [divmod(m * lanes + lane, short)[::-1] for lane in range(lanes)]
        lines += _select_lanes(f"b{m}", short, (dtype, lanes), picks)
        lines.append(f"  *({vector} *)(to + {m * lanes}) = b{m};")
    head = f"static inline void interleave{short}_{vector}({element} *to, const {element} *from, long stride) {{"
    return "\n".join([head, *lines, "}"])


def _select_lanes(name: str, count: int, type_: tuple[DType, int], picks: Sequence[tuple[int, ...]]) -> list[str]:
    """Emit a vector with lanes picked as (vector, lane) from a0, a1, ...: two vectors, then one more each time."""
    dtype, lanes = type_
    vector, mask = vector_type(dtype, lanes), vector_type(_BITS[dtype.bits], lanes)
    first = ", ".join(str(m * lanes + at if m < 2 else 0) for m, at in picks)
    lines = [f"  {vector} {name} = SHUFFLE({mask}, a0, a1, {first});"]
    for m in range(2, count):
        order = ", ".join(str(lanes + at if k == m else lane) for lane, (k, at) in enumerate(picks))
        lines.append(f"  {name} = SHUFFLE({mask}, {name}, a{m}, {order});")
    return lines


def _transpose(base: str, rows: int, dtype: DType, lanes: int) -> str:
    """Emit to[j * to_stride + i] = from[i * from_stride + j] for i in `rows`, j in `lanes`. 2 <= rows <= lanes.

    Columns are stored in segments of a power of two. If columns are contiguous, whole segments are stored, each over
    the excess of the previous one; the last columns are stored with their exact length.
    """
    network = _ShuffleNetwork(dtype, lanes)
    vector, element = vector_type(dtype, lanes), C.storage_type(dtype)
    stored = _stored_type(base, dtype)
    for i in range(rows):
        row = _row(f"from + {i} * from_stride", stored, dtype, lanes)
        network.lines.append(f"const {vector} r{i} = {row};")
    piece, columns = network.columns(rows)
    for j, (name, first) in enumerate(columns):
        address, source = f"to + {j} * to_stride", (name, first * dtype.bytes)
        store = f"*({vector} *)({address}) = {name};"
        if piece < lanes:
            store = _store_bytes(address, source, piece * dtype.bytes)
        if rows < piece:
            store = f"if (WIDE({j})) {store}\n  else {{ {_store_bytes(address, source, rows * dtype.bytes)} }}"
        network.lines.append(store)
    parameters = f"{element} *to, long to_stride, const {C.storage_type(stored)} *from, long from_stride"
    text = [f"static inline void {base}_{vector}({parameters}) {{", *(f"  {line}" for line in network.lines), "}"]
    if rows < piece:
        wide = f"#define WIDE(j) (to_stride == {rows} && (j) * {rows} + {piece} <= {rows * lanes})"
        text = [wide, *text, "#undef WIDE"]
    return "\n".join(text)


def _store_bytes(address: str, source: tuple[str, int], size: int) -> str:
    """Emit stores of `size` bytes of a vector from a byte on, in powers of two."""
    name, first = source
    statements: list[str] = []
    done = 0
    while done < size:
        power = 1 << (size - done).bit_length() - 1
        to = f"(char *)({address}) + {done}" if done else address
        behind = f" + {first + done}" if first + done else ""
        statements.append(f"__builtin_memcpy({to}, (const char *)&{name}{behind}, {power});")
        done += power
    return " ".join(statements)


@dataclass(frozen=True, slots=True)
class _ShuffleNetwork:
    """A network of vector shuffles, one line of C each. A chunk is 128 bits of a vector."""

    dtype: DType
    lanes: int
    lines: list[str] = field(default_factory=list)

    @property
    def chunk(self) -> int:
        """Return the elements of a chunk."""
        return _CHUNK_BYTES // self.dtype.bytes

    def columns(self, count: int) -> tuple[int, list[tuple[str, int]]]:
        """Transpose vectors r0, r1, ...: return (elements of a segment, (vector, first lane) of each column)."""
        chunk, chunks = self.chunk, self.lanes // self.chunk
        groups = [[f"r{min(i, count - 1)}" for i in range(g, g + chunk)] for g in range(0, count, chunk)]
        parts = [self._transpose_chunks(rows) for rows in groups]
        chunks_per_column = 1 << (len(parts) - 1).bit_length()  # chunks of a column, one of each group
        parts += [parts[-1]] * (chunks_per_column - len(parts))  # padding, not stored
        positions = [("", 0)] * self.lanes
        for c in range(chunk):
            for v, name in enumerate(self._concatenate_chunks([part[c] for part in parts])):
                for p in range(chunks // chunks_per_column):
                    column = v * (chunks // chunks_per_column) + p
                    positions[column * chunk + c] = (name, p * chunks_per_column * chunk)
        return chunks_per_column * chunk, positions

    def _transpose_chunks(self, rows: list[str]) -> list[str]:
        """Transpose within chunks: repeatedly, halves of rows i and i + half become rows 2 i and 2 i + 1."""
        half = self.chunk // 2
        for _ in range(half.bit_length()):
            rows = [self._unpack(rows[i], rows[i + half], end) for i in range(half) for end in (0, half)]
        return rows

    def _unpack(self, a: str, b: str, end: int) -> str:
        """Interleave the low or high halves of each chunk of a and b."""
        picks = [
            x
            for start in range(end, self.lanes, self.chunk)
            for i in range(start, start + self.chunk // 2)
            for x in (i, self.lanes + i)
        ]
        return self._shuffle(a, b, picks)

    def _concatenate_chunks(self, parts: list[str]) -> list[str]:
        """Concatenate the chunks of one column over all groups."""
        chunks = self.lanes // self.chunk
        if len(parts) == 1:
            return parts
        if len(parts) == 2:
            halves = (range(chunks // 2), range(chunks // 2, chunks))
            return [self._select_chunks((parts[0], parts[1]), [x for k in half for x in (k, chunks + k)]) for half in halves]
        pairs = ((parts[0], parts[1]), (parts[2], parts[3]))
        low, high = ([self._select_chunks(pair, range(odd, 8, 2)) for odd in (0, 1)] for pair in pairs)
        return [self._select_chunks((low[odd], high[odd]), range(late, 8, 2)) for late in (0, 1) for odd in (0, 1)]

    def _select_chunks(self, pair: tuple[str, str], order: Iterable[int]) -> str:
        """Select chunks of two vectors, numbered consecutively."""
        return self._shuffle(*pair, [x for k in order for x in range(k * self.chunk, (k + 1) * self.chunk)])

    def _shuffle(self, a: str, b: str, picks: list[int]) -> str:
        if a == b:
            picks = [x % self.lanes for x in picks]
        vector, mask = vector_type(self.dtype, self.lanes), vector_type(_BITS[self.dtype.bits], self.lanes)
        name = f"s{len(self.lines)}"
        self.lines.append(f"const {vector} {name} = SHUFFLE({mask}, {a}, {b}, {', '.join(map(str, picks))});")
        return name
