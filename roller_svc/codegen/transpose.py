"""Lanes x lanes elements → C function that transposes them in registers: unpacks inside 128 bits, then whole 128 bits.

The networks are those of 4 x 4 transposes by unpacks (Intel, Optimization Reference Manual, 15.11 for 8 x 8), with
quarters exchanged by two-source shuffles behind them.
"""

from __future__ import annotations

from roller_svc.codegen.dialect import SHORT
from roller_svc.ir.dtype import DType

SHUFFLE = """#ifdef __clang__
#define SHUFFLE(type, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(type, a, b, ...) __builtin_shuffle(a, b, (type){__VA_ARGS__})
#endif"""
_QUARTER_BYTES = 16


def transpose_name(count: int, dtype: DType, lanes: int) -> str:
    return f"transpose{count}_v{SHORT[dtype]}x{lanes}"


def transpose_helper(count: int, dtype: DType, lanes: int) -> str:
    """target[i * width + j] = source[j * stride + i] for j in `count`, i in `lanes`. 2 <= count <= lanes.

    Where rows of the target follow each other without a gap, whole vectors are stored, each over what the one before
    it wrote beyond its row; the last rows are stored as they are long.
    """
    type_, mask = f"v{SHORT[dtype]}x{lanes}", f"vi{dtype.bits}x{lanes}"
    scalar = {DType.FLOAT32: "float", DType.FLOAT64: "double", DType.INT32: "int"}[dtype]
    writer = _Writer(type_, mask, lanes, [])
    rows = [f"r{j}" for j in range(count)]
    lines = [f"  {type_} {', '.join(f'r{j} = *({type_} *)(source + {j} * stride)' for j in range(count))};"]
    columns = writer.columns(rows + [rows[-1]] * (lanes - count), count, _QUARTER_BYTES // dtype.bytes)
    stores = []
    for i, column in enumerate(columns):
        stores.append(f"  if (WIDE({i})) *({type_} *)(target + {i} * width) = {column};")
        stores.append(f"  else __builtin_memcpy(target + {i} * width, &{column}, {count * dtype.bytes});")
    head = f"static inline void {transpose_name(count, dtype, lanes)}"
    head += f"({scalar} *target, long width, const {scalar} *source, long stride) {{"
    wide = f"#define WIDE(i) (width == {count} ? (i) * {count} + {lanes} <= {lanes * count} : {int(count == lanes)})"
    return "\n".join([wide, head, *lines, *writer.lines, *stores, "}", "#undef WIDE"])


class _Writer:
    """Lines of C; every value has a name."""

    def __init__(self, type_: str, mask: str, lanes: int, lines: list[str]) -> None:
        self.type_, self.mask, self.lanes, self.lines = type_, mask, lanes, lines

    def shuffled(self, name: str, a: str, b: str, picks: list[int]) -> str:
        self.lines.append(f"  {self.type_} {name} = SHUFFLE({self.mask}, {a}, {b}, {', '.join(map(str, picks))});")
        return name

    def columns(self, rows: list[str], count: int, quarter: int) -> list[str]:
        """Of `lanes` rows, `count` of them of interest; `quarter`: elements in 128 bits."""
        groups = [self._inside(g, rows[g : g + quarter], quarter) for g in range(0, count, quarter)]
        groups += [groups[-1]] * (self.lanes // quarter - len(groups))  # what becomes of the others is not stored
        found = [""] * self.lanes
        for c in range(quarter):
            for q, name in enumerate(self._across(c, [group[c] for group in groups], quarter)):
                found[q * quarter + c] = name
        return found

    def _inside(self, g: int, rows: list[str], quarter: int) -> list[str]:
        """`quarter` rows → vectors c that hold, in each 128 bits, their elements of column c there."""
        pair = self._unpacked
        if quarter == 2:
            return [pair(f"t{g}_{high}", rows[0], rows[1], (quarter, 1, high)) for high in (0, 1)]
        low = [pair(f"u{g}_{j}_{high}", rows[j], rows[j + 1], (quarter, 1, high)) for j in (0, 2) for high in (0, 1)]
        ends = ((low[0], low[2], 0), (low[0], low[2], 1), (low[1], low[3], 0), (low[1], low[3], 1))
        return [pair(f"t{g}_{c}", a, b, (quarter, 2, high)) for c, (a, b, high) in enumerate(ends)]

    def _unpacked(self, name: str, a: str, b: str, how: tuple[int, int, int]) -> str:
        """Runs of `size` elements from a and b in turn, out of the low or high half of each 128 bits."""
        quarter, size, high = how
        picks: list[int] = []
        for start in range(0, self.lanes, quarter):
            for i in range(start + high * quarter // 2, start + (high + 1) * quarter // 2, size):
                picks += [*range(i, i + size), *range(self.lanes + i, self.lanes + i + size)]
        return self.shuffled(name, a, b, picks)

    def _across(self, c: int, parts: list[str], quarter: int) -> list[str]:
        """Vectors of one column of each group → vectors of one 128 bits of all groups."""
        if len(parts) == 1:
            return parts

        def half(name: str, a: str, b: str, odd: int) -> str:
            starts = range(odd * quarter, 2 * self.lanes, 2 * quarter)
            picks = [x for start in starts for x in range(start, start + quarter)]
            return self.shuffled(name, a, b, picks)

        if len(parts) == 2:
            return [half(f"w{c}_{odd}", parts[0], parts[1], odd) for odd in (0, 1)]
        halves = [[half(f"x{c}_{i}_{odd}", parts[i], parts[i + 1], odd) for i in (0, 2)] for odd in (0, 1)]
        return [half(f"w{c}_{q}", halves[q % 2][0], halves[q % 2][1], q // 2) for q in range(4)]
