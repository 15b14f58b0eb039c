"""References to tensors in generated code, from which element addresses are printed."""

from __future__ import annotations

from dataclasses import dataclass

from roller_svc.ir.dtype import DType

# Shared memory serves a quarter warp of 16-byte accesses at once: eight groups of four banks.
CHUNK_BYTES, BANK_GROUPS = 16, 8


@dataclass(frozen=True, slots=True)
class BufferRef:
    """A tensor in generated code."""

    identifier: str
    dtype: DType  # of an element in memory
    shape: tuple[int, ...]
    pad: int = 0  # elements added to each row
    swizzled: bool = False  # element c of row r is at column c xor mask(r)
    in_words: bool = False  # a local array that is loaded in words: registers, each of several narrow elements

    @property
    def strides(self) -> tuple[int, ...]:
        strides, step = [], 1
        for d in range(len(self.shape) - 1, -1, -1):
            strides.append(step)
            step *= self.shape[d] + (self.pad if d == len(self.shape) - 1 else 0)
        return tuple(reversed(strides))

    @property
    def swizzle(self) -> tuple[int, int, int]:
        """Return (rows with one mask, masks, elements of a 16-byte chunk): mask(r) = r / rows % masks * chunk.

        Chunk c of eight consecutive rows is then in eight different groups of four banks. The masks permute the largest
        power of two of chunks, up to eight, that divides a row.
        """
        chunk = CHUNK_BYTES // self.dtype.bytes
        chunks = self.shape[-1] // chunk
        masks = min(BANK_GROUPS, chunks & -chunks)
        return BANK_GROUPS // masks, masks, chunk
