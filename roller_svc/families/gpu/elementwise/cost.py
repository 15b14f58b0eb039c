"""Cost of an elementwise kernel on a GPU: elementwise programs, broadcasts, layout changes, gathers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from roller_svc.families.common.gpu.elementwise_space import REQUEST_THREADS, SECTOR_BYTES, MapAccess, MapSpace, Tile
from roller_svc.families.common.gpu.serial_cost import ThreadWork, Traffic, dram_bytes_of_blocks, simt_costs
from roller_svc.ir.hardware import Limits
from roller_svc.perf.common import Costs, Launch
from roller_svc.perf.footprint import ADDRESS_OPS, DIVISION_OPS
from roller_svc.perf.machine import SCHEDULERS, register_words
from roller_svc.perf.occupancy import BlockResources, blocks_per_core, overhead_registers
from roller_svc.perf.workload import Workload

BARRIER_CYCLES = 30.0
THREAD_INSTRUCTIONS = 20.0  # index of the thread, bounds of its tile, exit
STAGED_INSTRUCTIONS = 4.0  # addresses of a staged vector's source and target
SECTORS_PER_CYCLE = 4  # of L1
REGISTER_BYTES = 4


@dataclass(frozen=True, slots=True)
class MapTile:
    """A block's tile and a thread's."""

    map: MapSpace
    block: Tile
    thread: Tile
    width: int
    staged: tuple[MapAccess, ...]

    @classmethod
    def of(cls, p: Workload[MapSpace], block: Tile, thread: Tile) -> MapTile:
        return cls(p.facts, block, thread, p.facts.thread_vector_width(thread), p.facts.staged_accesses(block))

    @property
    def direct(self) -> tuple[MapAccess, ...]:
        """Tensors that threads access directly in memory."""
        return tuple([a for a in self.map.accesses if a not in self.staged]) if self.staged else self.map.accesses

    def elements(self, access: MapAccess) -> int:
        """Return the elements that a thread accesses."""
        points = access.columns
        for i, step in enumerate(access.steps):
            if step:
                points *= min(self.thread[i], self.map.extents[i])
        return points

    def access_width(self, access: MapAccess) -> int:
        """Return the elements that a thread accesses together."""
        if access.columns > 1:
            return access.column_width(self.map.row, self.width)
        return math.gcd(access.vector_width, self.width) if access.contiguous_axis == self.map.row else 1

    def staged_bytes(self, access: MapAccess) -> int:
        return math.prod([self.block[i] for i in access.index or ()]) * access.bytes

    @property
    def shared_bytes(self) -> int:
        total = 0
        for access in self.staged:
            row = self.block[access.tile_axes(self.map.row)[-1]]
            pad = self.map.padded_layout(access, self.block, self.thread).pad
            total += self.staged_bytes(access) // row * (row + pad)
        return total


def map_registers(p: Workload[MapSpace], tile: MapTile, limits: Limits) -> int:
    """Return a thread's registers: addresses, all loads before their first use, one vector of values."""
    loaded = sum([tile.elements(a) * a.bytes for a in tile.direct if not a.access.is_output])
    if tile.staged:
        threads = math.prod([b // t for b, t in zip(tile.block, tile.thread, strict=True)])
        loaded += sum([tile.staged_bytes(a) // threads for a in tile.staged])
    values = 2 * tile.width * register_words(p.space.compute_dtype)
    return overhead_registers(limits) + -(-loaded // REGISTER_BYTES) + values


def elementwise_cost(p: Workload[MapSpace], launch: Launch) -> Costs:
    """Return the longest of issue, cache and DRAM time."""
    mach, hw = p.machine, p.machine.hw
    tile = MapTile.of(p, launch.block, launch.thread)
    needs = BlockResources(launch.threads, map_registers(p, tile, hw.limits), tile.shared_bytes)
    resident = blocks_per_core(launch.compiled or needs, hw)
    warps = -(-launch.threads // hw.limits.warp_size)
    instructions, requests = _thread_work(p, tile, launch.threads)
    chain = mach.dram_latency_cycles + THREAD_INSTRUCTIONS * SCHEDULERS
    if tile.staged:
        chain += BARRIER_CYCLES + hw.block_level.latency_s * mach.clock_hz
    clipped = tuple([min(b, e) for b, e in zip(launch.block, p.extents, strict=True)])
    moved = launch.grid * p.footprint.transferred_bytes(clipped)
    requested = launch.grid * p.footprint.requested_bytes(clipped)
    in_flight = _loaded_bytes(tile, launch.threads) * min(launch.grid, resident * mach.cores)
    fma_s = p.space.flops * launch.grid * math.prod(launch.block) / p.outer_points / mach.unit.flops_per_s
    traffic = Traffic(requested, dram_bytes_of_blocks(p, moved), in_flight)
    work = ThreadWork(instructions, requests, chain)
    return simt_costs(mach, launch, needs, work, traffic, fma_s)._replace(
        issue_s=mach.seconds(launch.grid * warps * instructions / mach.issue_per_cycle / mach.cores),
        resident_blocks=min(resident, -(-launch.grid // mach.cores)),
    )


def _loaded_bytes(tile: MapTile, threads: int) -> int:
    """Return the bytes that a block requests before it waits; without inputs, as many are stored at once."""
    reads = [a for a in tile.map.accesses if not a.access.is_output] or tile.map.accesses
    return sum([tile.staged_bytes(a) if a in tile.staged else tile.elements(a) * a.bytes * threads for a in reads])


def _thread_work(p: Workload[MapSpace], tile: MapTile, threads: int) -> tuple[float, float]:
    """Return a thread's instructions, and a warp's cycles at L1 and shared memory."""
    points = math.prod(tile.thread)
    instructions, cycles = THREAD_INSTRUCTIONS + p.space.instructions / p.outer_points * points, 0.0
    for access in tile.direct:
        each = tile.access_width(access)
        accesses = tile.elements(access) / (each * math.gcd(access.repeat, tile.width))
        # elements of vectors and unrolled loops are at constant offsets where the index is affine
        address = DIVISION_OPS * len(access.access.dims) if access.is_divided else ADDRESS_OPS / 2
        instructions += accesses * (1.0 + address) + tile.elements(access) * _conversion(access)
        cycles += accesses * max(1.0, _sectors(tile, access, each) / SECTORS_PER_CYCLE)
    for access in tile.staged:
        width = math.gcd(access.vector_width, tile.block[access.tile_axes(tile.map.row)[-1]])
        loads = tile.staged_bytes(access) / (access.bytes * width * threads)
        layout = tile.map.padded_layout(access, tile.block, tile.thread)
        line = REQUEST_THREADS * width * access.bytes / SECTOR_BYTES
        instructions += loads * (STAGED_INSTRUCTIONS + 2.0 * width) + points
        cycles += loads * (max(1.0, line / SECTORS_PER_CYCLE) + layout.write_cycles) + points * layout.read_cycles
    return instructions, cycles


def _conversion(access: MapAccess) -> float:
    """Return the instructions to convert an element from or to float32: two results are packed by one."""
    if not access.access.dtype.is_narrow_float:
        return 0.0
    return 0.5 if access.access.is_output else 1.0


def _sectors(tile: MapTile, access: MapAccess, each: int) -> float:
    """Return the sectors of one warp access: lanes follow the row, then the next axes outwards."""
    if access.repeat > 1:
        return float(max(1, REQUEST_THREADS * tile.width // access.repeat * access.bytes // SECTOR_BYTES))
    if access.is_opaque and access.contiguous_axis != tile.map.row:
        return float(min(REQUEST_THREADS, -(-access.access.tensor_bytes // SECTOR_BYTES)))
    lanes = [
        (tile.block[i] // tile.thread[i], access.steps[i] * (tile.width if i == tile.map.row else 1))
        for i in reversed(tile.map.thread_order(tile.block))
    ]
    return access.sectors(each, lanes)
