"""CPU memory model: which level serves repeated accesses, and seconds per byte from there."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from roller_svc.families.common.cpu.column_reduction import MAX_ROWS_PER_ITERATION, is_column_reduction
from roller_svc.perf.common import Launch
from roller_svc.perf.footprint import AccessFootprint, Tile
from roller_svc.perf.machine import Cache, Machine
from roller_svc.perf.workload import Workload

# Contiguous bytes that a task must write for prefetching to pay: cores that prefetch the same line steal it.
MIN_PREFETCH_SEGMENT_BYTES = 8192
L1_PANEL_FRACTION = 0.7  # of L1 that panels may fill to be retained; the rest is for outputs and streams
LINE_BYTES = 64
STORE_BUFFER_ENTRIES = 64  # of Zen 4; Skylake has 56
TEST_OPERATIONS = 3  # alignment test of a non-temporal vector: mask, compare, branch
PAGE_BYTES = 4096  # hardware prefetchers do not cross pages
# Distance of the L2 stream prefetcher: up to 20 lines, and no more than the length of the stream so far (Intel 64 and
# IA-32 Architectures Optimization Reference Manual, "Data Prefetching").
HARDWARE_PREFETCH_BYTES = {  # others load no more than is read, as measured on Zen 4
    "intel": 20 * 64
}  # others bring no more than is read, as far as pieces were measured on Zen 4
# The rest of a measured pointer-chase latency is page-table walks, nested in a virtual machine; prefetchers of other
# streams continue meanwhile.
MAX_LATENCY_CYCLES = 350.0
MAX_REREADS = 4.0  # reads of one byte: adjacent tasks find most shared data in a cache


def seconds_per_byte(mach: Machine, total_bytes: float, cores: int) -> float:
    """Return the seconds per byte for `cores` cores that read a working set of `total_bytes` in every call."""
    return sum(share * _level_seconds_per_byte(mach, cache, cores) for share, cache in _hit_fractions(mach, total_bytes))


def transfer_s(p: Workload[Any], tensor: AccessFootprint, block: Tile, grid: int) -> float:
    """Return the seconds to move all of a tensor, from caches and memory."""
    return sum(transfer_by_level_s(p, tensor, block, grid))


def cacheable_bytes(p: Workload[Any], streaming: float) -> float:
    """Return the bytes that the next call may find in a cache: all but non-temporal outputs."""
    return p.compulsory_bytes - streaming * sum(t.bytes(p.extents) for t in p.footprint.writes)


def transfer_by_level_s(
    p: Workload[Any], tensor: AccessFootprint, block: Tile, grid: int, streaming: float = 0.0
) -> tuple[float, float]:
    """Return the seconds to move all of a tensor in whole lines, (from caches, from memory).

    Short streams pay a start-up latency each; written lines are not prefetched unless segments are long.

    Args:
        streaming: Fraction of the outputs that is non-temporal.
    """
    mach, costs = p.machine, p.machine.costs.memory
    moved, stretch = tensor.transferred_bytes(p.extents), tensor.stream_bytes(block)
    to_memory = 1.0  # a cache is written as fast as it is read
    if tensor.access.is_output:
        is_prefetched = tensor.contiguous_elements(block) * tensor.elem_bytes >= MIN_PREFETCH_SEGMENT_BYTES
        moved *= 1.0 if is_prefetched else costs.unprefetched_write_penalty
        to_memory = costs.write_cost_factor * _write_cost_ratio(p)
    # overshoot is useless where L2 evicts it before it is read
    lost = 1.0 - costs.hit_rate(mach.caches[-2].bytes_per_core, p.footprint.bytes(block))
    beyond = lost * _prefetch_overshoot_bytes(p, tensor, block)
    together = lost * sum([_prefetch_overshoot_bytes(p, t, block) for t in p.footprint.accesses]) if lost else 0.0
    caches_s = memory_s = 0.0
    for share, cache in _hit_fractions(mach, cacheable_bytes(p, streaming) + together):
        each = _level_seconds_per_byte(mach, cache, grid)
        cycles = _stream_start_cycles(p, tensor, stretch, cache)
        missed = mach.seconds(cycles) / (each * min(grid, mach.cores))  # bytes that a core does not get meanwhile
        seconds = share * each * (moved * (1.0 + missed / (stretch + missed / 2)) + beyond)
        if cache is None:
            memory_s += to_memory * seconds
        else:
            caches_s += seconds
    return caches_s, memory_s


def dominant_level(p: Workload[Any], launch: Launch) -> str:
    """Return the level that serves most of a call's traffic, or that non-temporal outputs go to."""
    _, cache = max(_hit_fractions(p.machine, p.compulsory_bytes), key=lambda found: found[0])
    return p.machine.dram.name if cache is None or launch.pipeline.nontemporal else cache.name


def _write_cost_ratio(p: Workload[Any]) -> float:
    """Return the cost of a byte written to memory through the caches, over that of a byte read.

    As in a fill, or, to the extent that as much is read, as in a copy: each line is read before it is written back.
    """
    dram = p.machine.dram
    read, written = (sum(t.transferred_bytes(p.extents) for t in some) for some in (p.footprint.reads, p.footprint.writes))
    read_fraction = min(1.0, read / written)
    return (1 - read_fraction) / dram.write_gain + read_fraction * max(0.1, 2 / dram.copy_gain - 1)


def prefetch_rampup_cycles(mach: Machine, cache: Cache | None) -> float:
    """Return the exposed cycles at the start of a stream, until hardware prefetchers follow it."""
    costs = mach.costs.memory
    latency = mach.dram_latency_cycles if cache is None else cache.latency_cycles
    return costs.prefetch_restart_fraction * max(0.0, min(latency, MAX_LATENCY_CYCLES) - costs.hidden_cycles)


def _stream_start_cycles(p: Workload[Any], tensor: AccessFootprint, stretch: int, cache: Cache | None) -> float:
    """Return the exposed cycles at the start of each stream of a tensor.

    Rows of a column reduction start together and expose the whole memory latency at once: no other stream continues
    meanwhile.
    """
    mach, costs = p.machine, p.machine.costs.memory
    latency = mach.dram_latency_cycles
    if cache is None and tensor.varies_with_reduction and not tensor.access.is_output and is_column_reduction(p.space):
        return costs.prefetch_restart_fraction * max(0.0, latency - costs.hidden_cycles) / MAX_ROWS_PER_ITERATION
    if cache is None and stretch >= PAGE_BYTES:
        return costs.tlb_miss_latency_factor * latency
    return prefetch_rampup_cycles(mach, cache)


def _prefetch_overshoot_bytes(p: Workload[Any], tensor: AccessFootprint, block: Tile) -> float:
    """Return the bytes that prefetchers load past the ends of a tensor's streams; they cost bandwidth and capacity."""
    stretch = tensor.stream_bytes(block)
    to_page_end = -stretch % PAGE_BYTES / PAGE_BYTES  # share of the ends that have so much of a page after them
    prefetched = min(stretch, HARDWARE_PREFETCH_BYTES.get(p.machine.hw.vendor, 0))
    each = p.machine.costs.memory.prefetch_overshoot * prefetched * to_page_end
    return each * tensor.transferred_bytes(p.extents) / stretch


def dram_fraction(mach: Machine, working_set_bytes: float) -> float:
    """Return the fraction of a repeated working set that no cache retains."""
    return sum(share for share, cache in _hit_fractions(mach, working_set_bytes) if cache is None)


def reread_ratio(tensors: Iterable[AccessFootprint], grid: int, block: Tile, extents: Tile) -> float:
    """Return how often a byte is read on average: data that tasks share counts more than once."""
    tensors = tuple(tensors)
    whole = sum(t.transferred_bytes(extents) for t in tensors)
    of_tasks = grid * sum(t.transferred_bytes(block) for t in tensors)
    return min(MAX_REREADS, max(1.0, of_tasks / max(1.0, whole)))


def exposed_nontemporal_s(mach: Machine, nontemporal_write_s: float, caches_s: float, reads_s: float) -> float:
    """Return the seconds of non-temporal writes that concurrent reads do not hide.

    Caches deliver during writes to memory (`caches_s`). Reads and writes of memory overlap as much as in a copy, whose
    rate the spec has (`reads_s`: reads from memory).
    """
    nontemporal_write_s = max(0.0, nontemporal_write_s - caches_s)
    dram = mach.dram
    read, written = 0.5, 0.5 / dram.streamed_write_gain  # of a copied byte, in the time to read a byte
    hidden = (read + written - 1 / dram.streamed_copy_gain) / min(read, written)
    return nontemporal_write_s - min(1.0, max(0.0, hidden)) * min(nontemporal_write_s, reads_s)


def nontemporal_fraction(rows: int, row_bytes: int) -> float:
    """Return the fraction of output rows that begin with a line.

    Vectors of other rows lie across two lines, and no non-temporal store takes them.
    """
    period = LINE_BYTES // math.gcd(LINE_BYTES, row_bytes)
    return -(-rows // period) / rows


def nontemporal_write_s(p: Workload[Any], tensor: AccessFootprint, grid: int) -> float:
    """Return the seconds to write all of a tensor with non-temporal stores."""
    return tensor.transferred_bytes(p.extents) * _level_seconds_per_byte(p.machine, None, grid) / p.machine.dram.streamed_write_gain


def count_4k_aliasing(p: Workload[Any], block: Tile) -> float:
    """Return how often a load aliases a pending non-temporal store (4K aliasing).

    A load waits for a store whose low 12 address bits match. Rows of whole pages, or of an even fraction of one, alias
    where tasks access segments of fewer lines than the store buffer holds.
    """
    along = p.vector_axis
    if along is None or block[along] >= p.extents[along] or math.prod(block) == block[along]:
        return 0.0
    read, written = ([t for t in some if t.strides.get(along) == 1] for some in (p.footprint.reads, p.footprint.writes))
    if not read or not written:
        return 0.0
    period = PAGE_BYTES // math.gcd(PAGE_BYTES, *(t.row_bytes for t in (*read, *written)))  # rows until addresses repeat
    lines = -(-block[along] * written[0].elem_bytes // LINE_BYTES)
    pieces = p.outer_points * p.inner_points / block[along]
    return pieces / period * max(0.0, 1 - lines * period / STORE_BUFFER_ENTRIES)


def private_seconds_per_byte(mach: Machine, own_bytes: float) -> float:
    """Return the seconds per byte of a core's repeated private working set.

    L1 counts as 0: loads from it are counted apart.
    """
    found = _hit_fractions(mach, own_bytes, by_one=True)
    first = mach.caches[-1]
    return sum(share * _level_seconds_per_byte(mach, cache, mach.cores) * mach.cores for share, cache in found if cache != first)


def _hit_fractions(mach: Machine, working_set_bytes: float, *, by_one: bool = False) -> Iterator[tuple[float, Cache | None]]:
    """Yield (fraction, level) of a repeated working set, innermost cache first; None is DRAM."""
    accounted = 0.0
    for cache in reversed(mach.caches):
        capacity = cache.bytes_per_core if by_one else cache.total_bytes
        share = mach.costs.memory.hit_rate(capacity, working_set_bytes, is_last=cache is mach.llc)
        if share > accounted:
            yield share - accounted, cache
            accounted = share
    if accounted < 1.0:
        yield 1.0 - accounted, None


def private_bandwidth(mach: Machine, task_bytes: int) -> float:
    """Return one core's bandwidth of the smallest cache that retains that much; DRAM's if none does."""
    for cache in reversed(mach.caches):
        if task_bytes <= cache.bytes_per_core // 2:
            return cache.bytes_per_s / mach.cores
    return mach.dram.bandwidth_bytes_per_s / mach.cores


def _level_seconds_per_byte(mach: Machine, cache: Cache | None, cores: int) -> float:
    """Return seconds per byte of a level.

    Cores share a cache's bandwidth evenly; a few cores achieve more than their share of the memory's.
    """
    at_work = min(1.0, cores / mach.cores)
    if cache is not None:
        return 1 / (cache.bytes_per_s * at_work)
    return 1 / (mach.dram.bandwidth_bytes_per_s * min(1.0, at_work / mach.costs.memory.single_core_bandwidth_fraction))
