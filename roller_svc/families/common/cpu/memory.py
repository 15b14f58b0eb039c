"""Where a CPU finds data that it walks through again and again, and what a byte from there costs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from roller_svc.families.common.cpu.column_reduction import STEPS_AT_ONCE, walks_columns
from roller_svc.perf.common import Launch
from roller_svc.perf.footprint import AccessFootprint, Tile
from roller_svc.perf.machine import Cache, Machine
from roller_svc.perf.workload import Workload

# What a task must write in one piece to ask for its lines ahead: cores take lines that both ask for from each other.
HINTED_RUN_BYTES = 8192
PANEL_OF_L1 = 0.7  # what panels may fill to be found there again, the rest being for results and what passes by
LINE_BYTES = 64
STORES_HELD = 64  # by a core, until they are done: by Zen 4; by Skylake 56
TEST_OPERATIONS = 3  # whether a vector that streams is aligned: its address masked, compared, a branch
PAGE_BYTES = 4096  # prefetchers do not cross it
# How far ahead of a stretch prefetchers of the second cache run, up to 20 lines and no further than it is long by then
# (Intel 64 and IA-32 Architectures Optimization Reference Manual, "Data Prefetching").
AHEAD_BYTES = {"intel": 20 * 64}  # others bring no more than is read, as far as pieces were measured on Zen 4
# What more a chase through memory takes are walks through tables of pages, in a virtual machine through two:
# prefetchers that follow other stretches go on meanwhile.
MOST_LATENCY_CYCLES = 350.0
MOST_READS = 4.0  # of one byte: neighbouring tasks find much of what they share in a cache


def byte_seconds(mach: Machine, total_bytes: float, cores: int) -> float:
    """Of one byte read on so many cores, which share what they all walk through from call to call."""
    return sum(share * _byte_seconds(mach, cache, cores) for share, cache in _found(mach, total_bytes))


def moving_s(p: Workload[Any], tensor: AccessFootprint, block: Tile, grid: int) -> float:
    """Seconds for all of a tensor, from caches and from memory."""
    return sum(moving_parts_s(p, tensor, block, grid))


def kept_bytes(p: Workload[Any], streaming: float) -> float:
    """What a call walks through and the next one may find in a cache: not the share of results that go past them."""
    return p.compulsory_bytes - streaming * sum(t.bytes(p.extents) for t in p.touched.writes)


def moving_parts_s(
    p: Workload[Any], tensor: AccessFootprint, block: Tile, grid: int, streaming: float = 0.0
) -> tuple[float, float]:
    """Seconds for all of a tensor from caches, and from memory, once and in whole lines: where the stretches that a
    task meets of it are short, each begins with a wait, and nothing asks ahead for lines that are written. `streaming`:
    the share of results that go past the caches."""
    mach, costs = p.machine, p.machine.costs.memory
    moved, stretch = tensor.moved_bytes(p.extents), tensor.stretch_bytes(block)
    to_memory = 1.0  # a cache takes a line as fast as it gives one
    if tensor.access.is_output:
        hinted = tensor.run(block) * tensor.elem_bytes >= HINTED_RUN_BYTES
        moved *= 1.0 if hinted else costs.unasked
        to_memory = costs.written * _written(p)
    # of no use where L2 has lost it before the walk comes there
    lost = 1.0 - costs.held_share(mach.caches[-2].bytes_per_core, p.touched.bytes(block))
    beyond = lost * _overrun_bytes(p, tensor, block)
    together = lost * sum([_overrun_bytes(p, t, block) for t in p.touched.accesses]) if lost else 0.0
    caches_s = memory_s = 0.0
    for share, cache in _found(mach, kept_bytes(p, streaming) + together):
        each = _byte_seconds(mach, cache, grid)
        cycles = _begun_cycles(p, tensor, stretch, cache)
        missed = mach.seconds(cycles) / (each * min(grid, mach.cores))  # bytes that a core does not get meanwhile
        seconds = share * each * (moved * (1.0 + missed / (stretch + missed / 2)) + beyond)
        if cache is None:
            memory_s += to_memory * seconds
        else:
            caches_s += seconds
    return caches_s, memory_s


def moved_from(p: Workload[Any], launch: Launch) -> str:
    """Name of the level that most of what a call moves comes from, or, past the caches, goes to: the stage it is."""
    _, cache = max(_found(p.machine, p.compulsory_bytes), key=lambda found: found[0])
    return p.machine.dram.name if cache is None or launch.streamed else cache.name


def _written(p: Workload[Any]) -> float:
    """What a byte of results takes in memory through the caches, in what one that is read does: as in a fill, or, as
    far as as much is read beside it, as in a copy. Each line comes before it is written, and goes back later."""
    dram = p.machine.dram
    read, written = (sum(t.moved_bytes(p.extents) for t in some) for some in (p.touched.reads, p.touched.writes))
    beside = min(1.0, read / written)
    return (1 - beside) / dram.write_gain + beside * max(0.1, 2 / dram.copy_gain - 1)


def waiting_cycles(mach: Machine, cache: Cache | None) -> float:
    """What a stretch of neighbours waits where it begins in a cache, or in DRAM, until prefetchers follow it."""
    costs = mach.costs.memory
    latency = mach.dram_latency_cycles if cache is None else cache.latency_cycles
    return costs.restart * max(0.0, min(latency, MOST_LATENCY_CYCLES) - costs.hidden_cycles)


def _begun_cycles(p: Workload[Any], tensor: AccessFootprint, stretch: int, cache: Cache | None) -> float:
    """What each stretch of a tensor waits where it begins. Rows that columns are joined of side by side begin at once,
    and wait for memory at once: for all of its latency, since no other stretch goes on meanwhile."""
    mach, costs = p.machine, p.machine.costs.memory
    latency = mach.dram_latency_cycles
    if cache is None and tensor.walks_reduced and not tensor.access.is_output and walks_columns(p.space):
        return costs.restart * max(0.0, latency - costs.hidden_cycles) / STEPS_AT_ONCE
    if cache is None and stretch >= PAGE_BYTES:
        return costs.elsewhere * latency
    return waiting_cycles(mach, cache)


def _overrun_bytes(p: Workload[Any], tensor: AccessFootprint, block: Tile) -> float:
    """What prefetchers bring beyond the ends of a tensor's stretches. It takes bandwidth and room in the caches."""
    stretch = tensor.stretch_bytes(block)
    to_page_end = -stretch % PAGE_BYTES / PAGE_BYTES  # share of the ends that have so much of a page after them
    ahead = min(stretch, AHEAD_BYTES.get(p.machine.hw.vendor, 0))
    each = p.machine.costs.memory.overrun * ahead * to_page_end
    return each * tensor.moved_bytes(p.extents) / stretch


def memory_share(mach: Machine, walked_bytes: float) -> float:
    """How much of what a call walks through the next one finds in no cache."""
    return sum(share for share, cache in _found(mach, walked_bytes) if cache is None)


def repeated(tensors: Iterable[AccessFootprint], grid: int, block: Tile, extents: Tile) -> float:
    """How often, on average, a byte of what is read is: what tasks have in common more than once."""
    tensors = tuple(tensors)
    whole = sum(t.moved_bytes(extents) for t in tensors)
    of_tasks = grid * sum(t.moved_bytes(block) for t in tensors)
    return min(MOST_READS, max(1.0, of_tasks / max(1.0, whole)))


def beside_reads(mach: Machine, streamed_s: float, caches_s: float, reads_s: float) -> float:
    """What results that go past the caches take beside what is read meanwhile: `caches_s` from caches, which deliver
    while memory is written, and `reads_s` from memory. The ways to memory and from it are two, which hide a part of the
    shorter time: as much of it as in a copy, whose rate a spec has."""
    streamed_s = max(0.0, streamed_s - caches_s)
    dram = mach.dram
    read, written = 0.5, 0.5 / dram.streamed_write_gain  # of a copied byte, each in the time that a byte takes to read
    hidden = (read + written - 1 / dram.streamed_copy_gain) / min(read, written)
    return streamed_s - min(1.0, max(0.0, hidden)) * min(streamed_s, reads_s)


def streaming_share(rows: int, row_bytes: int) -> float:
    """Of the rows of results those that begin with a line: vectors that lie across two are stored like any others, for
    no store past the caches takes them."""
    period = LINE_BYTES // math.gcd(LINE_BYTES, row_bytes)
    return -(-rows // period) / rows


def streamed_s(p: Workload[Any], tensor: AccessFootprint, grid: int) -> float:
    """The same of results that go past the caches: to memory, wherever the rest is found."""
    return tensor.moved_bytes(p.extents) * _byte_seconds(p.machine, None, grid) / p.machine.dram.streamed_write_gain


def met_stores(p: Workload[Any], block: Tile) -> float:
    """How often a read waits for a result on its way past the caches: a core takes a load for one that needs a store
    which it still holds where both lie at the same place of a page. Rows of whole pages, or of an even part of one,
    meet so where tasks walk pieces of them, each of fewer lines than stores are held: with the row before."""
    along = p.vector
    if along is None or block[along] >= p.extents[along] or math.prod(block) == block[along]:
        return 0.0
    read, written = ([t for t in some if t.strides.get(along) == 1] for some in (p.touched.reads, p.touched.writes))
    if not read or not written:
        return 0.0
    period = PAGE_BYTES // math.gcd(PAGE_BYTES, *(t.row_bytes for t in (*read, *written)))  # rows until one meets it
    lines = -(-block[along] * written[0].elem_bytes // LINE_BYTES)
    pieces = p.outer_points * p.inner_points / block[along]
    return pieces / period * max(0.0, 1 - lines * period / STORES_HELD)


def own_byte_seconds(mach: Machine, own_bytes: float) -> float:
    """The same of one core that walks again through what it alone has walked through before; nothing in L1, from where
    loads are counted by themselves."""
    found = _found(mach, own_bytes, by_one=True)
    first = mach.caches[-1]
    return sum(share * _byte_seconds(mach, cache, mach.cores) * mach.cores for share, cache in found if cache != first)


def _found(mach: Machine, walked_bytes: float, *, by_one: bool = False) -> Iterator[tuple[float, Cache | None]]:
    """Which share of what all cores, or one alone, walk through is where, the innermost cache first; None is DRAM."""
    known = 0.0
    for cache in reversed(mach.caches):
        capacity = cache.bytes_per_core if by_one else cache.total_bytes
        share = mach.costs.memory.held_share(capacity, walked_bytes, is_last=cache is mach.last_cache)
        if share > known:
            yield share - known, cache
            known = share
    if known < 1.0:
        yield 1.0 - known, None


def bandwidth_held_at(mach: Machine, task_bytes: int) -> float:
    """Bandwidth for one core of the smallest cache in which it can keep that much."""
    for cache in reversed(mach.caches):
        if task_bytes <= cache.bytes_per_core // 2:
            return cache.bytes_per_s / mach.cores
    return mach.dram.bandwidth_bytes_per_s / mach.cores


def _byte_seconds(mach: Machine, cache: Cache | None, cores: int) -> float:
    """Cores have equal parts of a cache's bandwidth; of memory's, few of them reach more than theirs."""
    at_work = min(1.0, cores / mach.cores)
    if cache is not None:
        return 1 / (cache.bytes_per_s * at_work)
    return 1 / (mach.dram.bandwidth_bytes_per_s * min(1.0, at_work / mach.costs.memory.alone))
