"""RProgram → Estimate: the micro performance model.

`Model` prepares what depends only on the group, the device and the unit, and is then cheap for each rProgram;
`estimate` is the two in one step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from roller_svc.analysis.operand import Operand
from roller_svc.families.common.gpu.matrix.terms import at, tile_count
from roller_svc.families.cpu.contraction.cost import cpu_contraction
from roller_svc.families.cpu.convolution.cost import cpu_convolution
from roller_svc.families.cpu.loops.cost import cpu_nest
from roller_svc.families.cpu.transpose.cost import cpu_layout
from roller_svc.families.cpu.window.cost import cpu_window
from roller_svc.families.gpu.elementwise.cost import simt_map
from roller_svc.families.gpu.mma_attention.cost import mma_attention
from roller_svc.families.gpu.mma_contraction.cost import mma_contraction
from roller_svc.families.gpu.reduction.cost import simt_reduction
from roller_svc.families.gpu.scatter.cost import simt_nest
from roller_svc.families.gpu.simt_contraction.cost import simt_contraction
from roller_svc.families.gpu.wgmma_attention.cost import wgmma_attention
from roller_svc.families.gpu.wgmma_contraction.cost import wgmma_contraction
from roller_svc.families.gpu.window.cost import simt_window
from roller_svc.ir.estimate import Estimate, StageCost
from roller_svc.ir.group import TileSpace
from roller_svc.ir.hardware import ComputeUnit, HardwareSpec, UnitKind
from roller_svc.ir.kernel import Resources
from roller_svc.ir.rprogram import WARPGROUP, RProgram
from roller_svc.perf.common import Costs, Launch, launching_s, second_launch_s
from roller_svc.perf.cpu_costs import CpuCosts
from roller_svc.perf.machine import Machine
from roller_svc.perf.occupancy import BlockNeeds
from roller_svc.perf.uncertainty import uncertainty
from roller_svc.perf.workload import Problem, problem

Factors = tuple[Operand, ...]

OVERLAP_LEAK = 0.05  # stages of a SIMT kernel overlap, but not perfectly: this share of the others shows, at most


class Timed(NamedTuple):
    """What the model found for an rProgram: its seconds, and the costs from which the whole `estimate` follows.

    `launching_s`: of starting it; `joining_s`: of the launch that joins a split reduction; `copying_s`: of the copy of
    a scatter's target.
    """

    program: RProgram
    seconds: float
    costs: Costs
    launching_s: float
    joining_s: float
    copying_s: float
    machine: Machine
    floor: StageCost | None  # where it decides

    def estimate(self) -> Estimate:
        costs, mach = self.costs, self.machine
        stages = [StageCost(name, s) for name, s in costs.parts]
        if costs.core_stage is not None:
            stages.append(StageCost(costs.core_stage, costs.core_s))
        if self.floor is not None:
            stages.append(self.floor)
        stages.append(StageCost("launch", self.launching_s))
        if self.joining_s:
            stages.append(StageCost("combine", self.joining_s))
        if self.copying_s:
            stages.append(StageCost("copy", self.copying_s))
        return Estimate(
            seconds=self.seconds,
            stages=tuple(stages),
            occupancy=costs.occupancy,
            waves=costs.waves,
            uncertainty=uncertainty(stages, self.seconds, mach.assumed),
        )


@dataclass(frozen=True, slots=True)
class Model:
    """The model of one group on one unit of one device."""

    problem: Problem

    def estimate(self, program: RProgram, compiled: Resources | None = None) -> Estimate:
        """Seconds for the whole kernel, all its launches, and what they go to.

        `compiled`: what the compiler says that the main launch takes, in place of what the model assumes.
        """
        return self.timed(program, compiled).estimate()

    @property
    def cpu_family(self) -> str:
        """Which part of `CpuCosts` a CPU's estimates of this group rest on."""
        p = self.problem
        if p.planes is not None:
            return "window"
        if p.layout is not None:
            return "layout"
        if p.image is not None:
            return "convolution"
        return "contraction" if p.is_contraction else "nest"

    def with_costs(self, costs: CpuCosts) -> Model:
        """The same group with other constants of CPUs; nothing that is prepared depends on them."""
        p = self.problem
        return Model(replace(p, machine=replace(p.machine, costs=costs)))

    def timed(self, program: RProgram, compiled: Resources | None = None) -> Timed:
        """The same before it is written out: ranking needs the seconds of many and the estimates of few."""
        p = self.problem
        launch = _launch(p, program)
        if compiled is not None:
            needs = BlockNeeds(launch.threads, compiled.registers_per_thread, compiled.shared_bytes)
            launch = launch._replace(compiled=needs)
        mach = p.machine
        costs = _costs(p, launch)
        body = costs.core_s if costs.core_stage is None else _overlapped(costs)
        joining = second_launch_s(mach, launch.workspace_bytes) if launch.workspace_bytes else 0.0
        copying = second_launch_s(mach, p.space.copied_bytes) if p.space.copied_bytes else 0.0
        launching = launching_s(mach, launch.grid)
        floor_s = p.floor_s
        floor = p.floor if floor_s > body + copying else None
        seconds = max(floor_s, body + copying) + launching + joining
        return Timed(program, seconds, costs, launching, joining, copying, mach, floor)

    def needs(self, program: RProgram) -> BlockNeeds | None:
        """What a block of the main launch takes of a core, as the model assumes it; None where there are no blocks."""
        return _costs(self.problem, _launch(self.problem, program)).needs


def model(space: TileSpace, hw: HardwareSpec, unit: ComputeUnit, factors: Factors | None = None) -> Model:
    """Prepare the model of a group's space. A matrix unit's needs the operands of the contraction, `factors`."""
    return Model(problem(space, hw, unit, factors))


def estimate(program: RProgram, hw: HardwareSpec, factors: Factors | None = None) -> Estimate:
    """What the model says of one rProgram. For many of one group, prepare a `model` once."""
    return model(program.space, hw, program.unit, factors).estimate(program)


def _costs(p: Problem, launch: Launch) -> Costs:
    if p.attention_groups is not None:
        return wgmma_attention(p, p.attention_groups, launch)
    if p.attention is not None:
        return mma_attention(p, p.attention, launch)
    if p.machine.unit.takes_fragments:
        return mma_contraction(p, launch)
    if p.machine.unit.kind is UnitKind.WGMMA:
        return wgmma_contraction(p, launch)
    if p.machine.simt:
        if p.map is not None:
            return simt_map(p, launch)
        if p.windows is not None and launch.lanes == launch.split_k == 1:
            return simt_window(p, launch)
        if p.rows is not None:
            return simt_reduction(p, p.rows, launch)
        return simt_contraction(p, launch) if p.is_contraction else simt_nest(p, launch)
    if p.planes is not None:
        return cpu_window(p, launch)
    if p.layout is not None:
        return cpu_layout(p, p.layout, launch)
    if p.image is not None:
        return cpu_convolution(p, p.image, launch)
    return cpu_contraction(p, launch) if p.is_contraction else cpu_nest(p, launch)


def _launch(p: Problem, program: RProgram) -> Launch:
    touched = p.touched
    block, thread = touched.tile(program.block), touched.tile(program.thread)
    grid, threads = program.split_k, program.lanes
    for i in p.spatial:
        grid *= -(-touched.extents[i] // block[i])
        threads *= block[i] // thread[i]
    if program.unit.kind is UnitKind.WGMMA:
        threads += WARPGROUP
    points = program.split_k * p.outer_points if program.split_k > 1 else 0
    if p.attention is not None and (pieces := program.split_k * (at(block, p.k) // at(thread, p.k))) > 1:
        points = pieces * p.outer_points
    if program.stream_k:
        # of each block at most the first and the last tile are shared with others
        grid, tiles = program.stream_k, tile_count(p, block)
        points = min(2 * grid, grid + tiles) * math.prod(block[i] for i in p.spatial)
    return Launch(
        block, thread, program.lanes, program.split_k, grid, threads, points * p.elem_bytes,
        program.stages, program.raster, program.stream_k, program.streamed, program.blocks, program.cluster,
    )  # fmt: skip


def _overlapped(costs: Costs) -> float:
    """Of a block that loads once the others leak whole: memory has nothing to do while its wave computes. Blocks of
    many loads keep it evenly busy, and what is left is waiting in its queue, the more the busier it is."""
    times = [costs.core_s, *(s for _, s in costs.parts)]
    longest = max(times)
    shown = [s * (s / longest + (1.0 - s / longest) / costs.loads) for s in times]
    return longest + OVERLAP_LEAK * (math.fsum(shown) - longest)
