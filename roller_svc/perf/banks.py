"""Padding of shared-memory rows against bank conflicts (ROLLER's third alignment), and the cost of conflicts."""

from __future__ import annotations

from collections.abc import Sequence

from roller_svc.ir.hardware import MemoryLevel


def bank_padding(row_elements: int, thread_elements: int, level: MemoryLevel, elem_bytes: int) -> int:
    """Return the elements to add to a row of `row_elements` that threads read `thread_elements` at a time.

    ROLLER §3.1: pad = (B·L + L·ceil(n/L) - N mod B·L) mod B·L, with B banks of L elements. A padded row starts
    ceil(n/L) banks after the one above it, so that accesses down a column spread over the banks. Memory without banks
    (CPU caches, an IPU tile) needs no padding.
    """
    if level.banks <= 1:
        return 0
    bank_elements = max(1, level.bank_bytes // elem_bytes)
    all_banks = max(1, level.banks * level.bank_bytes // elem_bytes)
    offset = bank_elements * -(-thread_elements // bank_elements)
    return (all_banks + offset - row_elements % all_banks) % all_banks


BANKS, BANK_BYTES = 32, 4  # of every NVIDIA device since compute capability 5.0 (CUDA programming guide)


def conflict_cycles(addresses: Sequence[int], access_bytes: int) -> int:
    """Return cycles of one warp request whose lanes access `access_bytes` at these byte addresses.

    Lanes are served together while their words fill the banks once: all of them for 4 bytes, a quarter for 16. Each
    further word of a bank takes another cycle; a word that several lanes read is broadcast.
    """
    lanes = len(addresses) * BANK_BYTES // max(BANK_BYTES, access_bytes)
    cycles = 0
    for first in range(0, len(addresses), lanes):
        words: set[int] = set()
        for address in addresses[first : first + lanes]:
            words.update(range(address // BANK_BYTES, (address + access_bytes - 1) // BANK_BYTES + 1))
        loads = [0] * BANKS
        for word in words:
            loads[word % BANKS] += 1
        cycles += max(loads)
    return cycles
