"""Shared-memory rows → the padding that keeps their columns in different banks (ROLLER's third alignment)."""

from __future__ import annotations

from roller_svc.ir.hardware import MemoryLevel


def bank_padding(row_elements: int, thread_elements: int, level: MemoryLevel, elem_bytes: int) -> int:
    """Elements to add to a row of `row_elements` that is read by threads taking `thread_elements` each.

    ROLLER §3.1: pad = (B·L + L·ceil(n/L) - N mod B·L) mod B·L, with B banks of L elements. A padded row starts
    ceil(n/L) banks after the one above it, so a walk down a column does not stay in one bank. Memory without banks
    (a CPU's caches, an IPU's tile) needs none.
    """
    if level.banks <= 1:
        return 0
    bank_elements = max(1, level.bank_bytes // elem_bytes)
    all_banks = max(1, level.banks * level.bank_bytes // elem_bytes)
    offset = bank_elements * -(-thread_elements // bank_elements)
    return (all_banks + offset - row_elements % all_banks) % all_banks
