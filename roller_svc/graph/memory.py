"""Place buffers with lifetimes in one arena."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class Lifetime:
    """The steps between which a buffer's contents are needed, both included."""

    first: int
    last: int
    bytes: int


def align(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def place(buffers: Sequence[Lifetime], *, share: bool = True) -> tuple[tuple[int, ...], int]:
    """Return an offset for each buffer and the bytes of the arena.

    Buffers are placed in order of their first step, each at the lowest free offset. Buffers that are alive in one step
    do not overlap. Without `share` no buffers overlap.
    """
    if not share:
        ends = list(accumulate(align(buffer.bytes) for buffer in buffers))
        return (0, *ends)[: len(buffers)], ends[-1] if ends else 0
    offsets = [0] * len(buffers)
    alive: list[tuple[int, int, int]] = []  # (offset, end, buffer), by offset
    total = 0
    for i in sorted(range(len(buffers)), key=lambda i: (buffers[i].first, -buffers[i].bytes)):
        buffer, size = buffers[i], align(buffers[i].bytes)
        alive = [entry for entry in alive if buffers[entry[2]].last >= buffer.first]
        offset = 0
        for start, end, _ in alive:
            if start - offset >= size:
                break
            offset = max(offset, end)
        offsets[i] = offset
        insort(alive, (offset, offset + size, i))
        total = max(total, offset + size)
    return tuple(offsets), total
