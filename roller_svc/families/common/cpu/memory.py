"""Where a CPU finds data that it walks through again and again, and what a byte from there costs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from roller_svc.families.common.cpu.column_reduction import MAX_ROWS_PER_ITERATION, is_column_reduction
from roller_svc.perf.common import Launch
from roller_svc.perf.footprint import AccessFootprint, Tile
from roller_svc.perf.machine import Cache, Machine
from roller_svc.perf.workload import Workload

# What a task must write in one piece to ask for its lines ahead: cores take lines that both ask for from each other.
MIN_PREFETCH_SEGMENT_BYTES = 8192
L1_PANEL_FRACTION = 0.7  # what panels may fill to be found there again, the rest being for results and what passes by
LINE_BYTES = 64
STORE_BUFFER_ENTRIES = 64  # by a core, until they are done: by Zen 4; by Skylake 56
TEST_OPERATIONS = 3  # whether a vector that streams is aligned: its address masked, compared, a branch
PAGE_BYTES = 4096  # prefetchers do not cross it
# How far ahead of a stretch prefetchers of the second cache run, up to 20 lines and no further than it is long by then
# (Intel 64 and IA-32 Architectures Optimization Reference Manual, "Data Prefetching").
HARDWARE_PREFETCH_BYTES = {
    "intel": 20 * 64
}  # others bring no more than is read, as far as pieces were measured on Zen 4
# What more a chase through memory takes are walks through tables of pages, in a virtual machine through two:
# prefetchers that follow other stretches go on meanwhile.
MAX_LATENCY_CYCLES = 350.0
MAX_REREADS = 4.0  # of one byte: neighbouring tasks find much of what they share in a cache


def seconds_per_byte(mach: Machine, total_bytes: float, cores: int) -> float:
    """Of one byte read on so many cores, which share what they all walk through from call to call."""
    return sum(
        share * _level_seconds_per_byte(mach, cache, cores) for share, cache in _hit_fractions(mach, total_bytes)
    )


def transfer_s(p: Workload[Any], tensor: AccessFootprint, block: Tile, grid: int) -> float:
    """Seconds for all of a tensor, from caches and from memory."""
    return sum(transfer_by_level_s(p, tensor, block, grid))


def cacheable_bytes(p: Workload[Any], streaming: float) -> float:
    """What a call walks through and the next one may find in a cache: not the share of results that go past them."""
    return p.compulsory_bytes - streaming * sum(t.bytes(p.extents) for t in p.footprint.writes)


def transfer_by_level_s(
    p: Workload[Any], tensor: AccessFootprint, block: Tile, grid: int, streaming: float = 0.0
) -> tuple[float, float]:
    """Seconds for all of a tensor from caches, and from memory, once and in whole lines: where the stretches that a
    task meets of it are short, each begins with a wait, and nothing asks ahead for lines that are written. `streaming`:
    the share of results that go past the caches."""
    mach, costs = p.machine, p.machine.costs.memory
    moved, stretch = tensor.transferred_bytes(p.extents), tensor.stream_bytes(block)
    to_memory = 1.0  # a cache takes a line as fast as it gives one
    if tensor.access.is_output:
        hinted = tensor.contiguous_elements(block) * tensor.elem_bytes >= MIN_PREFETCH_SEGMENT_BYTES
        moved *= 1.0 if hinted else costs.unprefetched_write_penalty
        to_memory = costs.write_cost_factor * _write_cost_ratio(p)
    # of no use where L2 has lost it before the walk comes there
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
    """Name of the level that most of what a call moves comes from, or, past the caches, goes to: the stage it is."""
    _, cache = max(_hit_fractions(p.machine, p.compulsory_bytes), key=lambda found: found[0])
    return p.machine.dram.name if cache is None or launch.nontemporal else cache.name


def _write_cost_ratio(p: Workload[Any]) -> float:
    """What a byte of results takes in memory through the caches, in what one that is read does: as in a fill, or, as
    far as as much is read beside it, as in a copy. Each line comes before it is written, and goes back later."""
    dram = p.machine.dram
    read, written = (
        sum(t.transferred_bytes(p.extents) for t in some) for some in (p.footprint.reads, p.footprint.writes)
    )
    beside = min(1.0, read / written)
    return (1 - beside) / dram.write_gain + beside * max(0.1, 2 / dram.copy_gain - 1)


def prefetch_rampup_cycles(mach: Machine, cache: Cache | None) -> float:
    """What a stretch of neighbours waits where it begins in a cache, or in DRAM, until prefetchers follow it."""
    costs = mach.costs.memory
    latency = mach.dram_latency_cycles if cache is None else cache.latency_cycles
    return costs.prefetch_restart_fraction * max(0.0, min(latency, MAX_LATENCY_CYCLES) - costs.hidden_cycles)


def _stream_start_cycles(p: Workload[Any], tensor: AccessFootprint, stretch: int, cache: Cache | None) -> float:
    """What each stretch of a tensor waits where it begins. Rows that columns are joined of side by side begin at once,
    and wait for memory at once: for all of its latency, since no other stretch goes on meanwhile."""
    mach, costs = p.machine, p.machine.costs.memory
    latency = mach.dram_latency_cycles
    if cache is None and tensor.varies_with_reduction and not tensor.access.is_output and is_column_reduction(p.space):
        return costs.prefetch_restart_fraction * max(0.0, latency - costs.hidden_cycles) / MAX_ROWS_PER_ITERATION
    if cache is None and stretch >= PAGE_BYTES:
        return costs.tlb_miss_latency_factor * latency
    return prefetch_rampup_cycles(mach, cache)


def _prefetch_overshoot_bytes(p: Workload[Any], tensor: AccessFootprint, block: Tile) -> float:
    """What prefetchers bring beyond the ends of a tensor's stretches. It takes bandwidth and room in the caches."""
    stretch = tensor.stream_bytes(block)
    to_page_end = -stretch % PAGE_BYTES / PAGE_BYTES  # share of the ends that have so much of a page after them
    ahead = min(stretch, HARDWARE_PREFETCH_BYTES.get(p.machine.hw.vendor, 0))
    each = p.machine.costs.memory.prefetch_overshoot * ahead * to_page_end
    return each * tensor.transferred_bytes(p.extents) / stretch


def dram_fraction(mach: Machine, walked_bytes: float) -> float:
    """How much of what a call walks through the next one finds in no cache."""
    return sum(share for share, cache in _hit_fractions(mach, walked_bytes) if cache is None)


def reread_ratio(tensors: Iterable[AccessFootprint], grid: int, block: Tile, extents: Tile) -> float:
    """How often, on average, a byte of what is read is: what tasks have in common more than once."""
    tensors = tuple(tensors)
    whole = sum(t.transferred_bytes(extents) for t in tensors)
    of_tasks = grid * sum(t.transferred_bytes(block) for t in tensors)
    return min(MAX_REREADS, max(1.0, of_tasks / max(1.0, whole)))


def exposed_nontemporal_s(mach: Machine, nontemporal_write_s: float, caches_s: float, reads_s: float) -> float:
    """What results that go past the caches take beside what is read meanwhile: `caches_s` from caches, which deliver
    while memory is written, and `reads_s` from memory. The ways to memory and from it are two, which hide a part of the
    shorter time: as much of it as in a copy, whose rate a spec has."""
    nontemporal_write_s = max(0.0, nontemporal_write_s - caches_s)
    dram = mach.dram
    read, written = 0.5, 0.5 / dram.streamed_write_gain  # of a copied byte, each in the time that a byte takes to read
    hidden = (read + written - 1 / dram.streamed_copy_gain) / min(read, written)
    return nontemporal_write_s - min(1.0, max(0.0, hidden)) * min(nontemporal_write_s, reads_s)


def nontemporal_fraction(rows: int, row_bytes: int) -> float:
    """Of the rows of results those that begin with a line: vectors that lie across two are stored like any others, for
    no store past the caches takes them."""
    period = LINE_BYTES // math.gcd(LINE_BYTES, row_bytes)
    return -(-rows // period) / rows


def nontemporal_write_s(p: Workload[Any], tensor: AccessFootprint, grid: int) -> float:
    """The same of results that go past the caches: to memory, wherever the rest is found."""
    return (
        tensor.transferred_bytes(p.extents)
        * _level_seconds_per_byte(p.machine, None, grid)
        / p.machine.dram.streamed_write_gain
    )


def count_4k_aliasing(p: Workload[Any], block: Tile) -> float:
    """How often a read waits for a result on its way past the caches: a core takes a load for one that needs a store
    which it still holds where both lie at the same place of a page. Rows of whole pages, or of an even part of one,
    meet so where tasks walk pieces of them, each of fewer lines than stores are held: with the row before."""
    along = p.vector_axis
    if along is None or block[along] >= p.extents[along] or math.prod(block) == block[along]:
        return 0.0
    read, written = ([t for t in some if t.strides.get(along) == 1] for some in (p.footprint.reads, p.footprint.writes))
    if not read or not written:
        return 0.0
    period = PAGE_BYTES // math.gcd(PAGE_BYTES, *(t.row_bytes for t in (*read, *written)))  # rows until one meets it
    lines = -(-block[along] * written[0].elem_bytes // LINE_BYTES)
    pieces = p.outer_points * p.inner_points / block[along]
    return pieces / period * max(0.0, 1 - lines * period / STORE_BUFFER_ENTRIES)


def private_seconds_per_byte(mach: Machine, own_bytes: float) -> float:
    """The same of one core that walks again through what it alone has walked through before; nothing in L1, from where
    loads are counted by themselves."""
    found = _hit_fractions(mach, own_bytes, by_one=True)
    first = mach.caches[-1]
    return sum(
        share * _level_seconds_per_byte(mach, cache, mach.cores) * mach.cores
        for share, cache in found
        if cache != first
    )


def _hit_fractions(mach: Machine, walked_bytes: float, *, by_one: bool = False) -> Iterator[tuple[float, Cache | None]]:
    """Which share of what all cores, or one alone, walk through is where, the innermost cache first; None is DRAM."""
    known = 0.0
    for cache in reversed(mach.caches):
        capacity = cache.bytes_per_core if by_one else cache.total_bytes
        share = mach.costs.memory.hit_rate(capacity, walked_bytes, is_last=cache is mach.llc)
        if share > known:
            yield share - known, cache
            known = share
    if known < 1.0:
        yield 1.0 - known, None


def private_bandwidth(mach: Machine, task_bytes: int) -> float:
    """Bandwidth for one core of the smallest cache in which it can keep that much."""
    for cache in reversed(mach.caches):
        if task_bytes <= cache.bytes_per_core // 2:
            return cache.bytes_per_s / mach.cores
    return mach.dram.bandwidth_bytes_per_s / mach.cores


def _level_seconds_per_byte(mach: Machine, cache: Cache | None, cores: int) -> float:
    """Cores have equal parts of a cache's bandwidth; of memory's, few of them reach more than theirs."""
    at_work = min(1.0, cores / mach.cores)
    if cache is not None:
        return 1 / (cache.bytes_per_s * at_work)
    return 1 / (mach.dram.bandwidth_bytes_per_s * min(1.0, at_work / mach.costs.memory.single_core_bandwidth_fraction))
