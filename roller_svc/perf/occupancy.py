"""Resources of a thread block → blocks that are resident on a core (CUDA occupancy)."""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul
from typing import NamedTuple

from roller_svc.ir.hardware import HardwareSpec, Limits
from roller_svc.ir.search import BrokenRule

MAX_OVERHEAD_REGISTERS = 30  # addresses, loop counters, predicates of the simt kernel
REGISTER_WARPS = 4  # granularity of register allocation: one warp for each partition of a core


class BlockResources(NamedTuple):
    """Threads, registers and shared memory of a thread block."""

    threads: int
    registers_per_thread: int
    shared_bytes: int


def blocks_per_core(needs: BlockResources, hw: HardwareSpec) -> int:
    """Return the resident blocks of one core; at least 1 for a legal block.

    Registers of a core are divided among its schedulers. A block has whole warps, and its warps may be on any of them
    (cuda_occupancy.h): only the check that a single block fits rounds its warps up to all schedulers.
    """
    limits = hw.limits
    threads, registers, shared_bytes = needs
    block_warps = max(1, -(-threads // limits.warp_size))
    warps = limits.registers_per_core // (_allocated_registers(registers) * limits.warp_size)
    by_registers = warps // REGISTER_WARPS * REGISTER_WARPS // block_warps
    by_threads = limits.max_threads_per_core // limits.warp_size // block_warps
    shared = shared_bytes + limits.shared_bytes_reserved_per_block
    by_shared = limits.shared_bytes_per_core // shared if shared else limits.max_blocks_per_core
    return max(1, min(limits.max_blocks_per_core, by_registers, by_threads, by_shared))


def can_share_core(blocks: Sequence[tuple[BlockResources, int]], hw: HardwareSpec) -> bool:
    """Return whether a core holds blocks of several launches at once: of each its needs, and their number."""
    limits = hw.limits
    needed = [
        (each.threads, block_registers(*each[:2], limits), each.shared_bytes + limits.shared_bytes_reserved_per_block, 1)
        for each, _ in blocks
    ]
    most = (limits.max_threads_per_core, limits.registers_per_core, limits.shared_bytes_per_core, limits.max_blocks_per_core)
    counts = [count for _, count in blocks]
    sums = (sum(map(mul, counts, column)) for column in zip(*needed, strict=True))
    return all(total <= limit for total, limit in zip(sums, most, strict=True))


def _allocated_registers(registers_per_thread: int) -> int:
    """Round up to the allocation unit of eight registers."""
    return -(-registers_per_thread // 8) * 8


def overhead_registers(limits: Limits) -> int:
    """Return the registers of a thread in addition to its tile.

    An eighth of the limit where a thread has few (an IPU keeps addresses elsewhere).
    """
    return min(MAX_OVERHEAD_REGISTERS, limits.max_registers_per_thread // 8)


def block_registers(threads: int, registers_per_thread: int, limits: Limits) -> int:
    """Return the registers that a block allocates: multiples of 8 per thread, of four warps per block."""
    group = REGISTER_WARPS * limits.warp_size
    return _allocated_registers(registers_per_thread) * -(-threads // group) * group


def exceeded_limits(needs: BlockResources, hw: HardwareSpec) -> tuple[str, ...]:
    """Return the limits of the device that a block exceeds, and by how much."""
    return tuple(
        f"{needed:,} {name} where {hw.id} has {most:,}, {needed - most:,} too many"
        for name, needed, most in broken_limits(needs, hw)
    )


def broken_limits(needs: BlockResources, hw: HardwareSpec) -> tuple[BrokenRule, ...]:
    """Return the limits of the device that a block exceeds, as rules."""
    limits = hw.limits
    registers = block_registers(needs.threads, needs.registers_per_thread, limits)
    bounds = (
        ("threads in a block", needs.threads, limits.max_threads_per_block),
        ("registers in a thread", needs.registers_per_thread, limits.max_registers_per_thread),
        ("registers in a block", registers, limits.registers_per_core),
        ("bytes of shared memory in a block", needs.shared_bytes, limits.shared_bytes_per_block),
    )
    return tuple(BrokenRule(name, needed, most) for name, needed, most in bounds if needed > most)
