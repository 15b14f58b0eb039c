"""What one block asks of a core → how many blocks a core holds at once."""

from __future__ import annotations

from dataclasses import dataclass

from roller_svc.ir.hardware import HardwareSpec, Limits

MAX_OVERHEAD_REGISTERS = 30  # addresses, loop counters, predicates of the simt kernel


@dataclass(frozen=True, slots=True)
class BlockNeeds:
    threads: int
    registers_per_thread: int
    shared_bytes: int


def blocks_per_core(needs: BlockNeeds, hw: HardwareSpec) -> int:
    """Resident blocks of one core; at least 1 where the block is legal at all."""
    limits = hw.limits
    granted = -(-needs.registers_per_thread // 8) * 8  # registers are handed out in eights
    by_registers = limits.registers_per_core // max(1, granted * needs.threads)
    by_threads = limits.max_threads_per_core // max(1, needs.threads)
    shared = needs.shared_bytes + limits.shared_bytes_reserved_per_block
    by_shared = limits.shared_bytes_per_core // shared if shared else limits.max_blocks_per_core
    return max(1, min(limits.max_blocks_per_core, by_registers, by_threads, by_shared))


def overhead_registers(limits: Limits) -> int:
    """Registers a thread needs beside its tile; an eighth where a thread has few (an IPU keeps addresses elsewhere)."""
    return min(MAX_OVERHEAD_REGISTERS, limits.max_registers_per_thread // 8)


def contraction_registers(thread_m: int, thread_n: int, words: int, limits: Limits) -> int:
    """Registers of a simt contraction's thread: accumulators, one column and one row of operands, overhead.

    ROLLER §3.3 counts m·n + m + n; `words` is 2 for an 8-byte type.
    """
    return (thread_m * thread_n + thread_m + thread_n) * words + overhead_registers(limits)
