"""Elements at constant distances within a memory line: columns of short rows, such as x[i, 0], x[i, 1], x[i, 2]."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from roller_svc.ir.affine import affine
from roller_svc.ir.expr import Load

LINE_BYTES = 128  # of memory


@dataclass(frozen=True, slots=True)
class Columns:
    """Consecutive elements of a tensor that are read at each point."""

    count: int
    places: tuple[tuple[Load, int], ...]  # the loads, first that of the first element, with their elements

    @property
    def first(self) -> Load:
        return self.places[0][0]


def share_lines(first: Load, second: Load, shape: Sequence[int]) -> bool:
    """Return whether at each point two loads of a tensor are less than a memory line apart."""
    if first.index == second.index:
        return True
    distance, stride = 0, 1
    for i, j, size in reversed(list(zip(first.index, second.index, shape, strict=True))):
        if i != j:
            a, b = affine(i), affine(j)
            if a is None or b is None or a.coeffs != b.coeffs:
                return False
            distance += (a.offset - b.offset) * stride
        stride *= size
    return abs(distance) * first.dtype.bytes < LINE_BYTES


def find_columns(loads: Iterable[Load]) -> tuple[Columns, ...]:
    """Return the columns that several loads read. There are none where neighbouring points read the gaps."""
    rows: dict[tuple[object, ...], dict[Load, int]] = {}
    steps: dict[tuple[object, ...], int] = {}
    for load in loads:
        form = affine(load.index[-1]) if load.index and not any(load.bounds_checked) else None
        if form is not None:
            row = (load.tensor, load.index[:-1], form.coeffs)
            rows.setdefault(row, {})[load] = form.offset
            steps[row] = min((abs(c) for _, c in form.coeffs), default=LINE_BYTES)
    found: list[Columns] = []
    for place, offsets in rows.items():
        (first, least), *others = sorted(offsets.items(), key=lambda item: item[1])
        count = others[-1][1] - least + 1 if others else 1
        if 1 < count <= min(steps[place], LINE_BYTES // first.dtype.bytes):
            found.append(Columns(count, ((first, 0), *((load, offset - least) for load, offset in others))))
    return tuple(found)
