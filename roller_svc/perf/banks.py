"""The cost of bank conflicts in shared memory."""

from __future__ import annotations

from collections.abc import Sequence

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
