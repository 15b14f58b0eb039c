"""Cost terms that matrix-unit families share: one k-tile on each pipe of a core, operand traffic, epilogue.

Names follow §5 of the design notes on ROLLER, as those of `mma_contraction/cost.py` do.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from roller_svc.analysis.packed_operands import unpacking_of
from roller_svc.construct.rules import (
    extent_on,
)
from roller_svc.families.common.gpu.matrix.tile import (
    CHUNK_BYTES,
    LoadKind,
    MmaTile,
    OperandLoad,
    is_unpacked,
)
from roller_svc.ir.dtype import DType
from roller_svc.ir.hardware import Arch
from roller_svc.ir.program import operators
from roller_svc.perf.common import Launch, load_latency_cycles, second_launch_s, wave_rectangle
from roller_svc.perf.footprint import ADDRESS_OPS, Tile
from roller_svc.perf.machine import SCHEDULERS, Machine
from roller_svc.perf.workload import OperandFootprint, Workload

# Latency of a dependent mma.sync, of any type (Sun et al., "Dissecting Tensor Cores via
# Microbenchmarks", arXiv:2206.02874). So does an MFMA of 16 x 16: eight passes of four cycles (AMD Instinct MI200 ISA).
MMA_LATENCY_CYCLES = 33.0
IMPERFECT_OVERLAP = 0.05  # fraction of the other pipes' time that adds to the longest one


class MmaBlock(NamedTuple):
    """A block's tile with the fewest stages, and the registers of its threads."""

    tile: MmaTile
    registers: int


class MatrixStep(NamedTuple):
    """One k-tile of one block, in cycles of a core."""

    warps: int
    mma: float
    shared: float
    issue: float
    port: float  # of the core's port to the LLC
    llc: float  # at an even share of the LLC bandwidth, while every core works
    dram: float  # the same of DRAM
    chain: float  # latency of a warp's dependent instructions
    latency: float  # from the request of a k-tile's first byte to its arrival
    imperfect_overlap: float = IMPERFECT_OVERLAP  # fraction of the other pipes that adds to the longest

    def cycles(self, blocks: float, prefetch_stages: int, device_fill: float = 1.0) -> float:
        """Return t_k of `blocks` blocks of a core.

        Args:
            prefetch_stages: K-tiles requested before their use.
            device_fill: Concurrent blocks over the blocks of a full device.
        """
        total = blocks * self.warps
        uneven = SCHEDULERS * math.ceil(total / SCHEDULERS) / total  # a warp stays on one scheduler
        memory = max(self.port, self.llc * device_fill)
        pipes = (self.mma * uneven, self.issue * uneven, self.shared, memory, self.dram * device_fill)
        longest = max(pipes)
        busy = blocks * (longest + self.imperfect_overlap * (sum(pipes) - longest))
        # Little's law: each block has `prefetch_stages` k-tiles in flight
        arriving = (self.latency + blocks * max(pipes[3:])) / prefetch_stages
        return max(busy, self.chain, arriving)


def device_fill(grid: int, resident: int, cores: int, blocks: float) -> float:
    """Return the concurrent blocks of a wave over the blocks of a full device, with `blocks` blocks per core."""
    concurrent_blocks = resident * cores
    full = blocks == resident and grid >= concurrent_blocks
    return 1.0 if full else grid % concurrent_blocks / (blocks * cores)


CORE_L2_BYTES_PER_CYCLE = 64.0  # one core's port to the LLC (A100 whitepaper: 5,120 bytes a clock, 80 ports)
BARRIER_CYCLES = 30.0
STEP_OPS = 12.0  # of a warp for one k-tile: stage indices, waits, branches
# address, predicate, load, pack
LOAD_OPS = {LoadKind.ASYNC: 3.0, LoadKind.VECTOR: 4.0, LoadKind.UNPACK: 3.0,
            LoadKind.TRANSPOSE: 4.0, LoadKind.ELEMENT: 3.0}  # fmt: skip
FLOAT8_SLOTS = 8.0  # one float8 to float16 conversion by integer operations, as the generated helpers do it
STORE_OPS = 2.0  # of a chunk copied through registers
PERMUTE_OPS = 1.0  # of an element that is transposed in registers: clang 15 joins two by two instructions
SECTOR_BYTES = 32  # of an LLC request (CUDA Best Practices Guide)
LLC_REUSE_FRACTION = 0.6  # of the LLC, for data that is read again; the rest streams


def accumulator_columns(p: Workload[Any], tile: Tile) -> int:
    """Return the columns of accumulators in the tile; a dual GEMM has two adjacent halves."""
    return extent_on(tile, p.n) * p.space.num_accumulators


def resource_seconds(
    p: Workload[Any], launch: Launch, step: MatrixStep, steps: float, dram_bytes: float, buffered_cycles: float
) -> list[tuple[str, float]]:
    """Return the seconds of each resource alone, for `steps` k-tiles on the whole device.

    Args:
        buffered_cycles: Of shared memory for a tile's results, on their way to memory.
    """
    mach = p.machine
    each = steps / mach.cores
    return [
        ("mma", mach.seconds(each * step.mma)),
        ("shared", mach.seconds(each * step.shared + result_tiles(p, launch) / mach.cores * buffered_cycles)),
        ("issue", mach.seconds(each * step.issue)),
        *memory_seconds(p, launch, each * step.llc, dram_bytes),
    ]


def memory_seconds(p: Workload[Any], launch: Launch, load_cycles: float, dram_bytes: float) -> list[tuple[str, float]]:
    """Return the seconds of the LLC and of DRAM alone, with results.

    Args:
        load_cycles: Of the LLC for all loads of operands.
    """
    mach = p.machine
    return [
        (
            mach.llc.name if mach.llc else "cache",
            mach.seconds(load_cycles + result_bytes(p, launch) / mach.cores / mach.llc_bytes_per_cycle),
        ),
        ("dram", (dram_bytes + p.epilogue.total_bytes) / mach.dram.bandwidth_bytes_per_s),
    ]


def result_bytes(p: Workload[Any], launch: Launch) -> float:
    """Return the bytes of outputs and epilogue operands in the LLC; 0 where a second launch writes them."""
    if launch.workspace_bytes:
        return 0.0
    # each transposed result is in a sector of its own
    sectors = p.outer_points * SECTOR_BYTES if p.space.transposed else 0
    return max(p.epilogue.total_bytes, sectors)


def result_tiles(p: Workload[Any], launch: Launch) -> int:
    """Return the tiles that pass through shared memory: those of blocks, or all where blocks take parts of k-tiles."""
    return tile_count(p, launch.block) if launch.pipeline.stream_k_blocks else launch.grid


def tile_count(p: Workload[Any], block: Tile) -> int:
    """Return the number of output tiles."""
    return math.prod([-(-p.extents[i] // block[i]) for i in p.spatial])


def operand_dram_bytes(p: Workload[Any], launch: Launch, concurrent_blocks: int) -> float:
    """Return t_dram's bytes (§5): each wave reads rows of A and columns of B, less LLC hits."""
    m, n, _ = p.mnk(launch.block)
    grid_m, grid_n = -(-p.extent(p.m) // m), -(-p.extent(p.n) // n)
    batches = tile_count(p, launch.block) // (grid_m * grid_n)
    a, b = p.a.total_bytes / batches, p.b.total_bytes / batches
    tall, wide = wave_rectangle(
        grid_m,
        grid_n,
        max(1, concurrent_blocks // (launch.split_k * launch.pipeline.cluster_k)),
        launch.pipeline.raster,
    )
    panel = a * tall / grid_m
    a_bytes = _reread_dram_bytes(p.machine, a, grid_n / wide, panel + b * wide / grid_n)
    b_bytes = _reread_dram_bytes(p.machine, b, grid_m / tall, panel + b)
    return batches * (a_bytes + b_bytes)


def k_tile_latency_cycles(p: Workload[Any], launch: Launch, dram_bytes: float, steps: float) -> float:
    """Return the latency of a k-tile's loads, nearer to DRAM's the more of them miss the LLC."""
    mach = p.machine
    usual = load_latency_cycles(mach, p.a.total_bytes + p.b.total_bytes)
    last = mach.llc
    if last is None or usual <= last.latency_cycles:
        return usual
    requested = launch.grid * steps * (p.a.requested_bytes(launch.block) + p.b.requested_bytes(launch.block))
    first = min(1.0, dram_bytes / requested)
    return max(usual, last.latency_cycles + first * (mach.dram_latency_cycles - last.latency_cycles))


def shared_latency_cycles(mach: Machine) -> float:
    return mach.hw.block_level.latency_s * mach.clock_hz


class CopyCost(NamedTuple):
    """Cost of copying one operand's k-tile: cycles of the core's memory pipe, issue slots of all warps."""

    pipe: float
    slots: float


def copy_cost(feed: OperandLoad, elements: int, operand: OperandFootprint, mach: Machine) -> CopyCost:
    """Return the cost of a copy; elements that pass through registers are stored once more."""
    warp = mach.hw.limits.warp_size
    loads = elements / (feed.load.elements * warp)
    width = feed.load.elements * feed.dtype.bytes * warp
    plain = ADDRESS_OPS * max((len(t.access.dims) for t in operand.tensors), default=1)
    decoding = max(0.0, operand.address_ops - plain)  # recomputed for each load of a fused axis
    unpacking = unpacking_of(feed.operand.expr, feed.dtype) if feed.load.kind is LoadKind.UNPACK else None
    if unpacking is not None:
        loads, width = loads * unpacking.loads, 0
    slots = loads * (LOAD_OPS[feed.load.kind] + decoding)
    pipe = loads * max(1.0, width / mach.staged_bytes_per_cycle)
    if unpacking is not None:
        slots += elements / warp * unpacking.slots
    if not feed.is_async:
        staged_bytes = elements * feed.dtype.bytes
        converted = elements / warp * _convert_slots(feed, mach.hw.arch)
        packed = elements / warp * (1 + computed_operations(feed)) if feed.load.kind is LoadKind.ELEMENT else 0.0
        packed += elements / warp * PERMUTE_OPS if feed.load.kind is LoadKind.TRANSPOSE else 0.0
        slots += converted + packed + STORE_OPS * staged_bytes / (CHUNK_BYTES * warp)
        pipe += staged_bytes / mach.staged_bytes_per_cycle
    return CopyCost(pipe, slots)


def computed_operations(feed: OperandLoad) -> int:
    """Return the operations that compute one element of an operand; 0 if it is loaded."""
    return operators(feed.operand.expr) if feed.operand.source is None else 0


def epilogue_slots(p: Workload[Any], points: int) -> float:
    """Return the issue slots of all lanes for `points` outputs: operations, then vector loads and stores."""
    mainloop = 2 * p.inner_points * p.space.num_accumulators
    slots = points * max(0.0, p.space.instructions / p.outer_points - mainloop)
    for tensor in p.epilogue.tensors:
        together = p.machine.hw.vector_bytes / tensor.elem_bytes if tensor.strides.get(p.n or 0) == 1 else 1.0
        slots += points * (LOAD_OPS[LoadKind.VECTOR] + tensor.address_ops) / together
    return slots


def scale_latency_cycles(p: Workload[Any]) -> float:
    """Return the latency of a scale of a block of k, which is in L2 unless the scales are many."""
    read = sum(tensor.access.tensor_bytes for tensor in p.epilogue.tensors if not tensor.access.is_output)
    return load_latency_cycles(p.machine, read)


def epilogue_memory_cycles(p: Workload[Any], launch: Launch) -> float:
    """Return the memory cycles of one tile's outputs; 0 where a second launch writes them."""
    mach = p.machine
    written = result_bytes(p, launch) / launch.grid
    share = mach.dram.bandwidth_bytes_per_s / (min(mach.cores, launch.grid) * mach.clock_hz)
    return written / min(CORE_L2_BYTES_PER_CYCLE, share)


def _reread_dram_bytes(mach: Machine, tensor_bytes: float, times: float, between_bytes: float) -> float:
    """Return DRAM bytes of a tensor read `times` times, with `between_bytes` between two reads."""
    hit_rate = LLC_REUSE_FRACTION * mach.llc.total_bytes / max(1.0, between_bytes) if mach.llc else 0.0
    return tensor_bytes * (1.0 + max(0.0, times - 1.0) * (1.0 - min(1.0, hit_rate)))


def _convert_slots(feed: OperandLoad, arch: Arch) -> float:
    """Return the issue slots to convert one element in registers: those of pairs, where the architecture converts them."""
    source = feed.operand.memory_dtype
    if source is feed.dtype or feed.operand.copied is None or feed.load.kind is LoadKind.UNPACK:
        return 0.0  # no conversion, or part of a computed or unpacked operand
    unpacking = unpacking_of(feed.operand.expr, feed.dtype) if is_unpacked(feed.operand, feed.dtype, arch) else None
    if unpacking is not None and source.is_float:
        return unpacking.slots
    return FLOAT8_SLOTS if source in (DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2) else 0.5


def split_k_reduction_cycles(p: Workload[Any], sums: int) -> float:
    """Return the cycles of the launch that reduces `sums` partial sums."""
    mach = p.machine
    return mach.clock_hz * second_launch_s(mach, sums * p.elem_bytes)
