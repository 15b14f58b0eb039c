"""Cost of rows reduced by threads, warps or blocks of a GPU: bytes in flight against rows."""

from __future__ import annotations

import math
from typing import Any

from roller_svc.families.common.gpu.row_space import RowAccess, RowIteration, RowSpace
from roller_svc.ir.schedule import shared_bytes
from roller_svc.perf.common import Costs, Launch, simt_waves, streaming_bandwidth
from roller_svc.perf.footprint import ADDRESS_OPS, Tile
from roller_svc.perf.occupancy import BlockResources, blocks_per_core
from roller_svc.perf.workload import Workload

SECTOR_BYTES = 32
BLOCK_CYCLES = 50.0  # a core starts one block after another
SHUFFLE_CYCLES = 30.0  # a shuffle and its dependent operation
BARRIER_CYCLES = 60.0  # a store to shared memory, a barrier, a load
LOOP_OPS = 4.0  # a chunk's counter, address and bound
OPS_PER_FLOP = 1.5  # with the overhead of a row's flop: comparisons, moves
STAGING_INSTRUCTIONS = 3.0  # of an element copied to shared memory: a load, a store, their loop
LLC_REUSE_FRACTION = 0.6  # of the LLC that concurrent rows may take and be retained for the next pass


def row_reduction_cost(p: Workload[Any], rows: RowSpace, launch: Launch) -> Costs:
    """Return the longest of issue, cache and DRAM time, or of a block's chain of loads and reductions."""
    mach, hw = p.machine, p.machine.hw
    iteration = rows.row_iteration(launch.block, launch.thread, launch.reduce_threads, launch.split_k)
    warp = hw.limits.warp_size
    registers = rows.registers(launch.thread, iteration, launch.threads, hw.limits)
    buffers = rows.shared_buffers(launch.block, launch.thread, iteration, launch.reduce_threads, hw.limits)
    needs = BlockResources(launch.threads, registers, shared_bytes(buffers))
    resident = blocks_per_core(launch.compiled or needs, hw)
    warps = -(-launch.threads // warp)
    instructions = thread_instructions(p, rows, launch, iteration)
    sectors = iteration.serial_rows * sum([_warp_sectors(rows, a, launch, iteration, warp) for a in rows.accesses])
    sectors += 2 * sum([_staged_elements(rows, a, launch) * a.bytes for a in rows.accesses]) * warp / SECTOR_BYTES
    chain = iteration.serial_rows * _chain_cycles(p, rows, launch, iteration)

    def block_cycles(blocks: float) -> float:
        issue = blocks * (warps * instructions / mach.issue_per_cycle + BLOCK_CYCLES)
        lsu = blocks * warps * sectors * SECTOR_BYTES / mach.l1_bytes_per_cycle
        return max(issue, lsu, chain) + 0.1 * min(issue, chain)

    waves, core_cycles = simt_waves(launch.grid, resident, mach.cores, block_cycles)
    busy = min(launch.grid, resident * mach.cores)
    dram, cache = _moved_bytes(p, rows, launch, iteration, busy)
    requested = (
        busy
        * launch.threads
        * iteration.chunks_in_flight
        * sum([a.elements(rows.row_thread(launch.thread)) * a.bytes for a in rows.read])
    )
    in_flight = max(1.0, requested * min(1.0, dram / max(1.0, cache)))
    last = mach.llc
    return Costs(
        core_s=mach.seconds(core_cycles),
        core_stage="latency" if chain * waves > 0.7 * core_cycles else "compute",
        stage_seconds=(
            ("fma", p.operations / mach.unit.flops_per_s),
            (last.name if last else "cache", cache / (last.bytes_per_s if last else math.inf)),
            ("dram", dram / streaming_bandwidth(mach, in_flight)),
        ),
        occupancy=min(1.0, resident * launch.threads / hw.limits.max_threads_per_core),
        waves=waves,
        resources=needs,
        moved_bytes=(("dram", dram),),
    )


def _passes(access: RowAccess, iteration: RowIteration) -> int:
    return 1 if iteration.is_single_pass or not access.varies_along_row else access.num_passes


def thread_instructions(p: Workload[Any], rows: RowSpace, launch: Launch, iteration: RowIteration) -> float:
    """Return the instructions of one thread."""
    each = _row_instructions(p, rows, launch, iteration)
    staged = sum([math.ceil(_staged_elements(rows, access, launch)) for access in rows.accesses])
    return iteration.serial_rows * each + STAGING_INSTRUCTIONS * staged + 40.0


def _staged_elements(rows: RowSpace, access: RowAccess, launch: Launch) -> float:
    """Return the elements of a tensor that a thread copies to shared memory."""
    return rows.points / launch.threads if rows.is_staged(access, launch.block, launch.thread) else 0.0


def _row_instructions(p: Workload[Any], rows: RowSpace, launch: Launch, iteration: RowIteration) -> float:
    """Return the instructions of one thread for the rows that it computes together."""
    packed = rows.packed_in(launch.thread)
    if packed is not None:
        computed = packed.instructions(launch.thread, iteration.points)
    else:
        computed = _computed_instructions(p, rows, launch, iteration)
    repeated = LOOP_OPS + computed
    for access in rows.accesses:
        if access.is_looked_up:
            repeated += _lookups(rows, access, launch, iteration) * (1.0 + ADDRESS_OPS / 2)
        elif access.varies_along_row:
            count = access.elements(rows.row_thread(launch.thread))
            loads = -(-count // _width(p, rows, access, launch))
            is_weight = packed is not None and access.footprint.access.tensor in packed.tensors
            narrow = count if access.bytes < 4 and not is_weight else 0  # each is converted
            repeated += _passes(access, iteration) * (loads * (1.0 + access.footprint.address_ops / 4) + narrow)
    if rows.is_shared(iteration, launch.threads, p.machine.hw.limits):
        for access in rows.cached_inputs:
            chunk = access.elements(rows.row_thread(launch.thread)) / _width(p, rows, access, launch)
            repeated += chunk * (1.0 + access.num_passes)
    if rows.contiguous_along_reduction:
        elements = iteration.vector_elems if packed is None else 0  # accumulators to add
        join = iteration.points * (elements + 2 * math.log2(launch.reduce_threads))
    else:  # threads of the first lanes add those of all lanes, the others wait
        join = 4.0 * iteration.points
    along = sum([access.varies_along_row for access in rows.accesses])
    edges = iteration.edge_iterations * (LOOP_OPS * rows.num_reductions + 2 * along + computed / iteration.vector_elems)
    return edges + iteration.iterations * repeated + rows.num_reductions * join


def _computed_instructions(p: Workload[Any], rows: RowSpace, launch: Launch, iteration: RowIteration) -> float:
    """Return the instructions of a thread for one chunk of each of its points, without loads."""
    if rows.products is not None:
        thread = rows.row_thread(launch.thread)
        return sum([count * iteration.vector_elems * math.prod([thread[i] for i in axes]) for count, axes in rows.products])
    # functions are counted in full
    operations = (p.space.instructions + (OPS_PER_FLOP - 1.0) * p.space.flops) / (p.outer_points * p.inner_points)
    return iteration.vector_elems * iteration.points * operations


def _lookups(rows: RowSpace, access: RowAccess, launch: Launch, iteration: RowIteration) -> int:
    """Return the loads from a table by a thread for one chunk: none if it is in registers."""
    packed = rows.packed_in(launch.thread)
    if packed is not None and access.footprint.access.tensor in packed.tensors:
        return 0
    return iteration.points * iteration.vector_elems


def _width(p: Workload[Any], rows: RowSpace, access: RowAccess, launch: Launch) -> int:
    """Elements that one access of a thread moves."""
    is_contiguous = access.contiguous_axis is not None and (access.stride == 1 or access.is_divided)
    if not is_contiguous or not _has_vectors(rows, access, launch):
        return 1
    count = access.elements(rows.row_thread(launch.thread))
    return max(1, min(count, _contiguous(access, launch.thread), p.machine.hw.vector_bytes // access.bytes))


def _has_vectors(rows: RowSpace, access: RowAccess, launch: Launch) -> bool:
    """Return whether adjacent elements of a thread are aligned: not in all tensors, and not in splits of a row."""
    if not rows.is_peeled(launch.thread[rows.inner]):
        return True
    is_staged = rows.is_staged(access, launch.block, launch.thread)
    return (access.is_aligned or is_staged) and launch.split_k == 1


def _contiguous(access: RowAccess, thread: Tile) -> int:
    """Return the adjacent elements of a thread along the axis that adjacent threads follow."""
    if access.contiguous_axis is None:
        return 1
    points = thread[access.contiguous_axis]
    return max(1, math.floor(points * access.density)) if access.is_divided else points


def _warp_sectors(rows: RowSpace, access: RowAccess, launch: Launch, iteration: RowIteration, warp: int) -> float:
    """Return the sectors of a warp: adjacent threads follow the contiguous axis, then other rows."""
    count = access.elements(rows.row_thread(launch.thread))
    times = iteration.iterations * _passes(access, iteration) if access.varies_along_row else 1
    if access.is_looked_up:
        sectors = min(warp, -(-access.footprint.access.tensor_bytes // SECTOR_BYTES))
        return float(times * _lookups(rows, access, launch, iteration) * sectors)
    if access.contiguous_axis is None:  # all lanes read the same element
        return float(count * times)
    own = min(count, _contiguous(access, launch.thread))
    neighbours = min(
        warp,
        launch.reduce_threads
        if rows.contiguous_along_reduction
        else launch.block[access.contiguous_axis] // launch.thread[access.contiguous_axis],
    )
    if rows.contiguous_along_reduction and launch.reduce_threads * iteration.vector_elems >= rows.points:
        neighbours = warp  # rows follow one another
    step: float = access.stride or warp
    if access.is_divided:  # adjacent threads follow one another
        step = min(1.0, launch.thread[access.contiguous_axis] * access.density)
    span_bytes = neighbours * own * access.bytes * step
    groups = warp / neighbours * count / own
    if not _has_vectors(rows, access, launch):
        groups *= own  # each element's access touches the sectors of all
    return times * min(float(warp * count), groups * max(1.0, span_bytes / SECTOR_BYTES))


def _chain_cycles(p: Workload[Any], rows: RowSpace, launch: Launch, iteration: RowIteration) -> float:
    """Return a block's latency on an empty core: loads in order, later passes from the cache, reductions."""
    mach = p.machine
    first = mach.dram_latency_cycles
    later = mach.llc.latency_cycles if mach.llc is not None else first
    passes = max([_passes(a, iteration) for a in rows.read], default=1)
    loads = iteration.steps * (first + (passes - 1) * later)
    if rows.contiguous_along_reduction:
        far = BARRIER_CYCLES if launch.reduce_threads > mach.hw.limits.warp_size else 0.0
        join = math.log2(launch.reduce_threads) * SHUFFLE_CYCLES + far
    else:
        join = 2 * BARRIER_CYCLES + launch.reduce_threads * SHUFFLE_CYCLES / 8 if launch.reduce_threads > 1 else 0.0
    return loads + rows.num_reductions * (join + iteration.vector_elems * 4.0) + 0.4 * first


def _moved_bytes(p: Workload[Any], rows: RowSpace, launch: Launch, iteration: RowIteration, busy: int) -> tuple[float, float]:
    """Return (DRAM bytes, LLC bytes); a pass that misses rows reads them from DRAM again."""
    tile = tuple([
        max(1, -(-e // launch.split_k)) if i == rows.inner else min(b, e)
        for i, (b, e) in enumerate(zip(launch.block, p.extents, strict=True))
    ])  # fmt: skip
    last = p.machine.llc
    capacity = LLC_REUSE_FRACTION * last.total_bytes if last is not None else 0.0
    dram = cache = 0.0
    for access in rows.accesses:
        whole, block = access.transferred_bytes(p.extents), access.transferred_bytes(tile)
        passes = _passes(access, iteration)
        cache += launch.grid * access.requested_bytes(tile) * passes
        gone = 1.0 - min(1.0, capacity / max(1.0, busy * block))
        evicted = max(0.0, 1.0 - capacity / max(1.0, whole))
        chosen = access.footprint.times_gathered  # blocks that run together need not choose the same rows
        again = max(0.0, min(1.0, launch.grid * block / max(1.0, whole * chosen) - 1.0)) / 4
        dram += whole * (1.0 + (passes - 1) * gone + (chosen * (1.0 + again) - 1.0) * evicted)
    return dram + launch.workspace_bytes, cache
