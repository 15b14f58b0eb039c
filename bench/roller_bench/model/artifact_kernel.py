"""Estimate windowed, strided and reducing rPrograms as ROLLER's artifact generates them.

Our kernels of these families read global memory directly. The artifact's kernels stage the bounding box of each input
in one shared-memory buffer, element by element, and read it from there for each tap (its codegenR.py). The terms are
those of `roller_svc.perf`, and the number of loads that the compiler keeps in flight per thread.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from roller_svc.families.common.gpu.serial_cost import BLOCK_CYCLES
from roller_svc.families.gpu.simt_contraction.cost import GUARD_OPS, LOAD_OPS, STORE_OPS
from roller_svc.families.gpu.simt_contraction.workload import BARRIER_CYCLES
from roller_svc.families.gpu.window.cost import LOADS_IN_FLIGHT
from roller_svc.ir.estimate import StageCost
from roller_svc.ir.group import TileAccess
from roller_svc.ir.hardware import TargetKind
from roller_svc.ir.rprogram import RProgram
from roller_svc.perf.banks import conflict_cycles
from roller_svc.perf.common import dram_bytes_with_reuse, load_latency_cycles, simt_waves, streaming_bandwidth
from roller_svc.perf.footprint import DIVISION_OPS
from roller_svc.perf.machine import Machine
from roller_svc.perf.occupancy import BlockResources, blocks_per_core, overhead_registers
from roller_svc.perf.workload import Workload

ISSUE_LEAK = 0.1  # unhidden fraction of the shorter of a core's two bounds, as for our kernels of these families
# Loads that LLVM 14 keeps in flight for gfx906 at -O2 when it stages in a loop over k-tiles: it waits for two loads,
# stores them with one ds_write2 and issues the next two. Whole rows, staged in one step, keep eight in flight.
PAIRED_LOADS = 2
Point = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Box:
    """The bounding box of a block's accesses to one input; `shape` has the outermost dimension first."""

    access: TileAccess
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * self.access.dtype.bytes

    def moved_bytes(self, line: int) -> float:
        """Return the bytes of whole cache lines, row by row."""
        shape = [min(extent, dim.size) for extent, dim in zip(self.shape, self.access.dims, strict=True)]
        rows, each = math.prod(shape[:-1]), self.access.dtype.bytes
        spill = 0 if shape[-1] == self.access.dims[-1].size else line - each
        return min(float(self.access.tensor_bytes), rows * (shape[-1] * each + spill))

    def byte_offset(self, point: Point) -> int:
        """Return the byte offset in the box of the first element that a point reads."""
        byte_offset = 0
        for dim, extent in zip(self.access.dims, self.shape, strict=True):
            byte_offset = byte_offset * extent + min(extent - 1, sum(abs(c) * point.get(name, 0) for name, c in dim.coeffs))
        return byte_offset * self.access.dtype.bytes


def artifact_seconds(p: Workload[Any], program: RProgram) -> tuple[float, tuple[StageCost, ...]]:
    """Return the seconds of the kernel and its stages."""
    mach, hw = p.machine, p.machine.hw
    boxes = _boxes(program)
    shared = sum(box.bytes for box in boxes)
    points = math.prod(program.thread[a.name] for a in program.space.spatial)
    registers = overhead_registers(hw.limits) + points * (1 + len(boxes))
    resident = blocks_per_core(BlockResources(program.threads, registers, shared), hw)
    step = _step(p, program, boxes)
    waits = program.steps * _serial_waits(p, program, boxes)
    latency = 0.0 if waits else load_latency_cycles(mach, p.compulsory_bytes)  # of concurrent loads
    latency_cycles = 2 * BARRIER_CYCLES + hw.block_level.latency_s * mach.clock_hz

    def block_cycles(blocks: float) -> float:
        # single buffer: loads and compute of one block do not overlap, those of different blocks do
        return BLOCK_CYCLES * blocks + program.steps * max(blocks * step, latency + latency_cycles + step)

    _, cycles = simt_waves(program.grid, resident, mach.cores, block_cycles)
    _, waited = simt_waves(program.grid, resident, mach.cores, lambda _: waits * mach.dram_latency_cycles)
    line = hw.dram.transaction_bytes
    moved = program.grid * program.steps * sum(box.moved_bytes(line) for box in boxes)
    whole = sum(box.access.tensor_bytes for box in boxes)
    stored = sum(t.transferred_bytes(p.extents) for t in p.footprint.writes)
    again = 1.0 + min(max(0.0, moved - whole) / whole, 4.0) * 0.25
    dram_bytes = stored + (dram_bytes_with_reuse(mach, whole, again) if moved > whole else moved)
    in_flight = min(program.grid, resident * mach.cores) * shared
    last = mach.llc
    stages = (
        StageCost("compute", mach.seconds(cycles)),
        StageCost(last.name if last else "cache", (moved + stored) / (last.bytes_per_s if last else math.inf)),
        StageCost("dram", dram_bytes / streaming_bandwidth(mach, in_flight)),
        StageCost("latency", mach.seconds(waited)),
    )
    # blocks of a wave run in lockstep: with a single buffer, memory and compute alternate
    body = stages[0].seconds + max(stage.seconds for stage in stages[1:])
    launch = hw.limits.launch_overhead_s
    return max(p.lower_bound_s, body) + launch, (*stages, StageCost("launch", launch))


def _boxes(program: RProgram) -> tuple[Box, ...]:
    extents: dict[str, int] = {}
    for axis in program.space.axes:
        extents |= axis.member_extents(program.block[axis.name])
    found = []
    for access in program.space.accesses:
        if not access.is_output:
            spans = [1 + sum(abs(c) * (extents.get(name, 1) - 1) for name, c in dim.coeffs) for dim in access.dims]
            found.append(Box(access, tuple(spans)))
    return tuple(found)


def _serial_waits(p: Workload[Any], program: RProgram, boxes: tuple[Box, ...]) -> float:
    """How many latencies of DRAM, one after another, a thread takes to stage a step; 0 where its loads go together.

    Only of AMD's plain reductions, whose elements are read once: no other staging was compiled to see.
    """
    plain = all(len(dim.coeffs) == 1 for box in boxes for dim in box.access.dims)
    if p.machine.hw.family is not TargetKind.AMD or not program.space.reduced or not plain:
        return 0.0
    under_way = LOADS_IN_FLIGHT if program.steps == 1 else PAIRED_LOADS
    return sum(box.elements for box in boxes) / program.threads / under_way


def _step(p: Workload[Any], program: RProgram, boxes: tuple[Box, ...]) -> float:
    """Return the cycles of one k-tile for a block that runs alone on a core."""
    mach, warp = p.machine, p.machine.hw.limits.warp_size
    warps = -(-program.threads // warp)
    taps = math.prod(program.block[a.name] for a in program.space.reduced)
    outputs = math.prod(program.thread[a.name] for a in program.space.spatial)
    instructions = taps * outputs * max(1.0, p.space.flops / (p.outer_points * p.inner_points) - 1.0)
    requests = 0.0
    for box in boxes:
        fetched = math.ceil(box.elements / program.threads)
        split = sum(1 for extent in box.shape if extent > 1) - 1
        guard = GUARD_OPS if any(len(dim.coeffs) > 1 for dim in box.access.dims) else 0.0
        instructions += fetched * (LOAD_OPS + STORE_OPS + guard + DIVISION_OPS * max(0, split))
        read = taps * _distinct(program, box)
        instructions += read
        requests += warps * (fetched + read * _conflicts(program, box, mach)) * warp / 32
    issue = warps * instructions / mach.issue_per_cycle
    return max(issue, requests) + ISSUE_LEAK * min(issue, requests)


def _distinct(program: RProgram, box: Box) -> int:
    """Return the elements of the box that a thread reads for one tap."""
    names = {name for dim in box.access.dims for name, _ in dim.coeffs}
    axes = [a for a in program.space.spatial if any(m.name in names for m in a.members)]
    return math.prod(program.thread[a.name] for a in axes)


def _conflicts(program: RProgram, box: Box, mach: Machine) -> float:
    """Return the cycles of one warp request; adjacent threads compute adjacent outputs (virtual threads)."""
    axes = program.space.spatial
    counts = [program.block[a.name] // program.thread[a.name] for a in axes]
    places = []
    for thread in range(min(32, program.threads)):
        point, rest = {}, thread
        for axis, count in zip(reversed(axes), reversed(counts), strict=True):
            point[axis.members[-1].name], rest = rest % count, rest // count
        places.append(box.byte_offset(point))
    wide = mach.hw.block_level.bank_bytes // 4  # banks of 8 bytes serve two adjacent words
    return float(conflict_cycles([byte_offset // wide for byte_offset in places], 4))
