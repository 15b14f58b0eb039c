"""Where a tensor lies: what a generator must know to print the address of an element."""

from __future__ import annotations

from dataclasses import dataclass

from roller_svc.ir.dtype import DType

# Shared memory answers a quarter warp of 16-byte accesses at once: eight groups of four banks.
CHUNK_BYTES, BANK_GROUPS = 16, 8


@dataclass(frozen=True, slots=True)
class BufferRef:
    """Where a tensor lies: identifier, element type in memory, shape, and elements between rows of the last but one.

    `swizzled`: element c of row r of the last dimension lies where element c xor mask(r) would.
    """

    identifier: str
    dtype: DType
    shape: tuple[int, ...]
    pad: int = 0
    swizzled: bool = False

    @property
    def strides(self) -> tuple[int, ...]:
        strides, step = [], 1
        for d in range(len(self.shape) - 1, -1, -1):
            strides.append(step)
            step *= self.shape[d] + (self.pad if d == len(self.shape) - 1 else 0)
        return tuple(reversed(strides))

    @property
    def swizzle(self) -> tuple[int, int, int]:
        """(rows that share a mask, masks, elements of a 16-byte chunk): mask(r) = r / rows % masks * chunk.

        Eight consecutive rows then have their chunk c in eight different groups of four banks, whatever the row's
        length: the masks permute the largest power of two of chunks, up to eight, that a row is made of.
        """
        chunk = CHUNK_BYTES // self.dtype.bytes
        chunks = self.shape[-1] // chunk
        masks = min(BANK_GROUPS, chunks & -chunks)
        return BANK_GROUPS // masks, masks, chunk
