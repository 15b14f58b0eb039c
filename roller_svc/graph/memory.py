"""Place buffers with lifetimes in one arena."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from roller_svc.analysis.happens_before import Clock, precedes

ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class Lifetime:
    """From when to when a buffer's contents are needed."""

    first: int  # launch that uses it first
    last: int  # launch that uses it last
    bytes: int
    start: Clock = ()  # what has finished in launch `first` before the buffer is used
    end: Clock = ()  # what has to finish in launch `last` for its last use

    def precedes(self, other: Lifetime) -> bool:
        """Return whether the last use comes before the first of the other."""
        if self.last != other.first:
            return self.last < other.first
        return bool(self.end) and precedes(self.end, other.start)


def align(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def place(buffers: Sequence[Lifetime], *, share: bool = True) -> tuple[tuple[int, ...], int]:
    """Return an offset for each buffer and the bytes of the arena.

    Buffers of a launch are placed from large to small, each at the lowest free offset. Those that are needed at the
    same time do not overlap. Without `share` no buffers overlap.
    """
    if not share:
        ends = list(accumulate(align(buffer.bytes) for buffer in buffers))
        return (0, *ends)[: len(buffers)], ends[-1] if ends else 0
    offsets = [0] * len(buffers)
    placed: list[tuple[int, int, int]] = []  # (offset, end, buffer), by offset; those that a later buffer may meet
    total = 0
    order = sorted(range(len(buffers)), key=lambda i: (buffers[i].first, buffers[i].start, -buffers[i].bytes))
    for i, earliest in zip(order, _earliest_starts([buffers[i] for i in order]), strict=True):
        buffer, size = buffers[i], align(buffers[i].bytes)
        placed = [entry for entry in placed if not buffers[entry[2]].precedes(earliest)]
        offset = 0
        for start, end, other in placed:
            if start - offset >= size:
                break
            if not (buffers[other].precedes(buffer) or buffer.precedes(buffers[other])):
                offset = max(offset, end)
        offsets[i] = offset
        insort(placed, (offset, offset + size, i))
        total = max(total, offset + size)
    return tuple(offsets), total


def _earliest_starts(buffers: Sequence[Lifetime]) -> list[Lifetime]:
    """Return for each buffer a lifetime that starts no later than it and all after it. They are in order of `first`."""
    earliest: list[Lifetime] = []
    for buffer in reversed(buffers):
        start = buffer.start
        if earliest and earliest[-1].first == buffer.first and start:
            start = tuple(map(min, start, earliest[-1].start))
        earliest.append(Lifetime(buffer.first, buffer.first, 0, start))
    return earliest[::-1]
