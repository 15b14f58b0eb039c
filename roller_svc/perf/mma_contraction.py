"""The cost of a contraction on a matrix unit that warps drive: stages of shared memory, fragments, an epilogue.

Terms and names follow §5 of the design notes on ROLLER: t_k, the time of one staged step, is the longest of what the
unit, shared memory, the schedulers, the last cache and DRAM need for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from roller_svc.errors import InvariantError
from roller_svc.ir.dtype import DType
from roller_svc.perf.footprint import Tile
from roller_svc.perf.machine import SCHEDULERS, Machine
from roller_svc.perf.mma_step import MmaBlock, Step
from roller_svc.perf.mma_tile import (
    COLUMNS,
    ROWS,
    STEP_BYTES,
    Feed,
    LoadKind,
    MmaTile,
    StagedOperand,
    staged,
    thread_registers,
)
from roller_svc.perf.occupancy import BlockNeeds, blocks_per_core
from roller_svc.perf.problem import ADDRESS_OPS, Operand, Problem, address_ops
from roller_svc.perf.terms import Costs, Launch, load_latency_cycles, simt_waves

# A dependent mma.sync follows after about that many cycles, of any type (Sun et al., "Dissecting Tensor Cores via
# Microbenchmarks", arXiv:2206.02874).
MMA_LATENCY_CYCLES = 33.0
BARRIER_CYCLES = 30.0
CORE_L2_BYTES_PER_CYCLE = 64.0  # one core's port to the last cache (A100 whitepaper: 5,120 bytes a clock, 80 ports)
STEP_OPS = 12.0  # of a warp for one step of k: slots of the ring, waits, branches
CONVERT_SLOTS = 2.0  # one cvt.rna.tf32: 16 lanes a clock and scheduler (CUDA Programming Guide, throughput table)
LOAD_OPS = {LoadKind.ASYNC: 3.0, LoadKind.VECTOR: 4.0, LoadKind.ELEMENT: 3.0}  # address, predicate, load, pack
FLOAT8_SLOTS = 8.0  # one float8 to float16 by integer operations, as the generated helpers do it
STORE_OPS = 2.0  # of a chunk that went through registers
LEAST_STAGES = 2
CACHE_SHARE = 0.6  # of the last cache, for what is to be read again; the rest passes through


def mma_contraction(p: Problem, launch: Launch) -> Costs:
    """Waves of blocks, each a chain of staged steps between the fill of its stages and its epilogue."""
    mach, hw = p.machine, p.machine.hw
    block = mma_block(p, launch.block, launch.thread)
    tile = replace(block.tile, stages=launch.stages)
    needs = BlockNeeds(tile.threads, block.registers, tile.shared_bytes)
    resident = blocks_per_core(launch.compiled or needs, hw)
    steps = block_steps(p, launch)
    operand_bytes = _operand_bytes(p, launch, resident * mach.cores)
    dram = operand_bytes / (launch.grid * steps) / _core_share(mach.dram.bandwidth_bytes_per_s, mach)
    step = replace(
        block_step(p, launch.block, launch.thread), dram=dram, latency=_latency_cycles(p, launch, operand_bytes, steps)
    )
    ahead = steps_ahead(p, launch.stages)
    at_once = resident * mach.cores

    def block_cycles(blocks: float) -> float:
        full = blocks == resident and launch.grid >= at_once
        working = 1.0 if full else launch.grid % at_once / (blocks * mach.cores)
        return steps * step.cycles(blocks, ahead, working)

    waves, cycles = simt_waves(launch.grid, resident, mach.cores, block_cycles)
    together = min(resident, -(-launch.grid // mach.cores))
    edges = step.latency + step.last_cache + together * _epilogue_cycles(p, launch, tile)
    # blocks that share a core drift apart: but for the first fill and the last epilogue, one's edges hide behind others
    runs = tile_count(p, launch.block) / launch.grid if launch.stream_k else float(waves - 1)
    cycles += edges * (1 + runs / resident)
    each = launch.grid * steps / mach.cores
    parts = [
        ("mma", mach.seconds(each * step.mma)),
        ("shared", mach.seconds(each * step.shared)),
        ("issue", mach.seconds(each * step.issue)),
        (mach.last_cache.name if mach.last_cache else "cache", mach.seconds(each * step.last_cache)),
        ("dram", (operand_bytes + p.rest.total_bytes) / mach.dram.bandwidth_bytes_per_s),
    ]
    seconds = max(mach.seconds(cycles), *(s for _, s in parts))
    parts.append(("latency", seconds - max(s for _, s in parts)))
    occupancy = min(1.0, resident * tile.threads / hw.limits.max_threads_per_core)
    return Costs(seconds, None, tuple(parts), occupancy, waves, needs)


def mma_block(p: Problem, block: Tile, warp: Tile) -> MmaBlock:
    """What a block stages and its warps hold; remembered."""
    known = p.mma_blocks.get((block, warp))
    if known is None:
        a, b = _feeds(p)
        m, n, k = _at(block, p.m), _at(block, p.n), _at(block, p.k)
        tile = MmaTile(
            m, n, k, _at(warp, p.m), _at(warp, p.n), LEAST_STAGES,
            staged(a.operand, a.dtype, m, k), staged(b.operand, b.dtype, n, k),
        )  # fmt: skip
        known = p.mma_blocks[block, warp] = MmaBlock(tile, thread_registers(tile, a, b))
    return known


def steps_ahead(p: Problem, stages: int) -> int:
    """Steps that are requested before they are used: what goes through registers is one ahead, whatever the stages."""
    return stages - 1 if all(feed.is_async for feed in _feeds(p)) else 1


def block_steps(p: Problem, launch: Launch) -> int:
    """Staged steps of one block."""
    k = _at(launch.block, p.k)
    if launch.stream_k:
        return -(-tile_count(p, launch.block) * -(-p.extent(p.k) // k) // launch.stream_k)
    return -(-p.extent(p.k) // (launch.split_k * k))


def tile_count(p: Problem, block: Tile) -> int:
    """Tiles of the output."""
    return math.prod([-(-p.extents[i] // block[i]) for i in p.spatial])


def block_step(p: Problem, block: Tile, warp: Tile) -> Step:
    """t_mma, t_smem, t_issue and t_l2 of one block, remembered; DRAM, which depends on how blocks follow each other,
    left out."""
    known = p.mma_steps.get((block, warp))
    if known is None:
        known = p.mma_steps[block, warp] = _block_step(p, block, mma_block(p, block, warp).tile)
    return known


def _block_step(p: Problem, block: Tile, tile: MmaTile) -> Step:
    mach = p.machine
    a, b = _feeds(p)
    fill_a = _fill(a, tile.a, p.a, mach)
    fill_b = _fill(b, tile.b, p.b, mach)
    fragments = math.prod(tile.fragments)
    size = a.dtype.bytes
    # §5, t_smem: fragments are read once for each warp that shares them
    reads = tile.m * tile.n * tile.k * size * (1 / tile.warp_m + 1 / tile.warp_n)
    instruction = ROWS * COLUMNS * (STEP_BYTES // size) * SCHEDULERS / mach.fma_per_cycle
    moved = p.a.moved_bytes(block) + p.b.moved_bytes(block)
    chain = tile.k_steps * max(fragments * instruction, MMA_LATENCY_CYCLES)
    last = mach.last_cache
    return Step(
        warps=math.prod(tile.warps),
        mma=tile.m * tile.n * tile.k / mach.fma_per_cycle,
        shared=reads / mach.staged_bytes_per_cycle + fill_a.pipe + fill_b.pipe,
        issue=(_fragment_slots(p, tile) + fill_a.slots + fill_b.slots) / SCHEDULERS,
        port=moved / CORE_L2_BYTES_PER_CYCLE,
        last_cache=moved / _core_share(last.bytes_per_s if last else mach.dram.bandwidth_bytes_per_s, mach),
        dram=0.0,
        chain=chain + _shared_latency_cycles(mach) + BARRIER_CYCLES,
        latency=load_latency_cycles(mach, p.a.total_bytes + p.b.total_bytes),
    )


def wave_rectangle(grid_m: int, grid_n: int, at_once: int, raster: int) -> tuple[int, int]:
    """Tiles along m and n of those that are computed at once, `raster` rows of tiles being walked together."""
    tall = max(min(raster, grid_m), min(grid_m, at_once // grid_n))
    return tall, min(grid_n, max(1, at_once // tall))


@dataclass(frozen=True, slots=True)
class _Fill:
    """What bringing one operand's tile of a step costs: cycles of the core's memory pipe, issue slots of all warps."""

    pipe: float
    slots: float


def _fill(feed: Feed, tile: StagedOperand, operand: Operand, mach: Machine) -> _Fill:
    """One request moves `load.elements` a lane; what is not copied past the registers is stored once more."""
    warp = mach.hw.limits.warp_size
    elements = tile.rows * tile.row
    loads = elements / (feed.load.elements * warp)
    width = feed.load.elements * tile.dtype.bytes * warp
    plain = ADDRESS_OPS * max((len(t.access.dims) for t in operand.tensors), default=1)
    decoding = max(0.0, operand.address_ops - plain)  # what is computed anew for each load of a fused axis
    slots = loads * (LOAD_OPS[feed.load.kind] + decoding)
    pipe = loads * max(1.0, width / mach.staged_bytes_per_cycle)
    if not feed.is_async:
        converted = elements / warp * _convert_slots(feed)
        packed = elements / warp if feed.load.kind is LoadKind.ELEMENT else 0.0
        slots += converted + packed + STORE_OPS * tile.bytes / (16 * warp)
        pipe += tile.bytes / mach.staged_bytes_per_cycle
    return _Fill(pipe, slots)


def _convert_slots(feed: Feed) -> float:
    """Of one element on its way through registers."""
    source = feed.operand.stored
    if source is feed.dtype or feed.operand.source is None:
        return 0.0  # as it is, or computed: the factor's own operations
    return FLOAT8_SLOTS if source in (DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2) else 0.5


def _fragment_slots(p: Problem, tile: MmaTile) -> float:
    """Issue slots of all warps for one step: instructions of the unit, fragment loads, roundings to tf32."""
    m, n = tile.fragments
    unit = p.machine.unit
    pieces = ROWS * COLUMNS * (STEP_BYTES // tile.a.dtype.bytes) / math.prod(unit.shape)
    slots = m * n * max(1.0, pieces) + STEP_OPS
    # ldmatrix brings four matrices; 4-byte elements that lie along m or n come word by word
    slots += m * (1 if tile.a.swizzled else 4) + n * (0.5 if tile.b.swizzled else 2)
    a, b = _feeds(p)
    slots += CONVERT_SLOTS * (4 * m * (a.operand.dtype is DType.FLOAT32) + 2 * n * (b.operand.dtype is DType.FLOAT32))
    return math.prod(tile.warps) * tile.k_steps * slots


def _epilogue_cycles(p: Problem, launch: Launch, tile: MmaTile) -> float:
    """Sums through shared memory, then reads and writes of memory in vectors where n is contiguous there."""
    mach = p.machine
    points = tile.m * tile.n
    through = 2 * points * 4 / mach.staged_bytes_per_cycle
    through += 2 * BARRIER_CYCLES * (tile.fragments[0] // tile.epilogue_fragments)
    flops = max(0.0, p.space.flops / p.outer_points - 2 * p.inner_points)
    slots = points * flops
    for tensor in p.rest.tensors:
        together = mach.hw.vector_bytes / tensor.elem_bytes if tensor.strides.get(p.n or 0) == 1 else 1.0
        slots += points * (LOAD_OPS[LoadKind.VECTOR] + address_ops(tensor)) / together
    written = 0.0 if launch.workspace_bytes else p.rest.total_bytes / launch.grid  # else the second launch has it
    port = CORE_L2_BYTES_PER_CYCLE
    share = min(port, mach.dram.bandwidth_bytes_per_s / (min(mach.cores, launch.grid) * mach.clock_hz))
    return through + slots / (mach.hw.limits.warp_size * SCHEDULERS) + written / share


def _operand_bytes(p: Problem, launch: Launch, at_once: int) -> float:
    """§5, t_dram: each wave reads its rectangle's rows of A and columns of B, less what the last cache still holds."""
    grid_m, grid_n = (-(-p.extent(axis) // _at(launch.block, axis)) for axis in (p.m, p.n))
    batches = tile_count(p, launch.block) // (grid_m * grid_n)
    a, b = p.a.total_bytes / batches, p.b.total_bytes / batches
    tall, wide = wave_rectangle(grid_m, grid_n, max(1, at_once // launch.split_k), launch.raster)
    panel = a * tall / grid_m
    a_bytes = _read_again(p.machine, a, grid_n / wide, panel + b * wide / grid_n)
    b_bytes = _read_again(p.machine, b, grid_m / tall, panel + b)
    return batches * (a_bytes + b_bytes)


def _latency_cycles(p: Problem, launch: Launch, operand_bytes: float, steps: int) -> float:
    """Of one step's loads: the more of them no neighbour has asked for before, the nearer to that of DRAM."""
    mach = p.machine
    usual = load_latency_cycles(mach, p.a.total_bytes + p.b.total_bytes)
    last = mach.last_cache
    if last is None or usual <= last.latency_cycles:
        return usual
    asked = launch.grid * steps * (p.a.moved_bytes(launch.block) + p.b.moved_bytes(launch.block))
    first = min(1.0, operand_bytes / asked)
    return max(usual, last.latency_cycles + first * (mach.dram_latency_cycles - last.latency_cycles))


def _read_again(mach: Machine, tensor_bytes: float, times: float, between_bytes: float) -> float:
    """Bytes that DRAM delivers of a tensor read so many times, `between_bytes` having passed before each repetition."""
    held = CACHE_SHARE * mach.last_cache.total_bytes / max(1.0, between_bytes) if mach.last_cache else 0.0
    return tensor_bytes * (1.0 + max(0.0, times - 1.0) * (1.0 - min(1.0, held)))


def _core_share(bytes_per_s: float, mach: Machine) -> float:
    """Bytes a cycle that each core gets of a bandwidth that all of them share."""
    return bytes_per_s / (mach.cores * mach.clock_hz)


def _shared_latency_cycles(mach: Machine) -> float:
    return mach.hw.block_level.latency_s * mach.clock_hz


def _feeds(p: Problem) -> tuple[Feed, Feed]:
    if p.feeds is None:
        raise InvariantError("a matrix unit's problem was prepared without its factors")
    return p.feeds


def _at(tile: Tile, axis: int | None) -> int:
    return 1 if axis is None else tile[axis]
