"""RProgram → Estimate: the micro performance model (ROLLER §4).

A kernel family's `cost` gives the stages of a launch. `Model` adds the roofline bound, launches and the uncertainty.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from roller_svc.ir.estimate import COMPUTE, FLOOR, LAUNCH, Combines, Estimate, RateSource, StageCost, Term, combine_terms
from roller_svc.ir.kernel import Resources
from roller_svc.ir.rprogram import RProgram
from roller_svc.perf.common import Costs, Launch, launch_overhead_s, second_launch_s
from roller_svc.perf.machine import Machine
from roller_svc.perf.occupancy import BlockResources
from roller_svc.perf.uncertainty import EXPOSED, uncertainty
from roller_svc.perf.workload import Workload

F = TypeVar("F")

MIN_EXPOSED_FRACTION = 1e-9  # of a body: less is rounding
ARITHMETIC_STAGES = frozenset({"fma", "mma", COMPUTE + FLOOR})  # at the rate of the unit
IMPERFECT_OVERLAP = 0.05  # fraction of a SIMT kernel's shorter stages that stays exposed, at most


class Timed(NamedTuple):
    """Predicted seconds of an rProgram, and the costs from which its whole `estimate` follows."""

    program: RProgram
    seconds: float
    costs: Costs
    launch_s: float  # starting the kernel
    combine_s: float  # the launch that combines a split reduction
    copy_s: float  # copying a scatter's target
    machine: Machine
    lower_bound: StageCost | None  # roofline bound, where it decides
    operations: int  # executed, without padding

    def terms(self) -> tuple[Term, ...]:
        """Return the terms, which combine to the seconds."""
        terms = [*self._body_terms(), *self._terms_of(Combines.ADDS, (("copy", self.copy_s),))]
        if self.lower_bound is not None:
            terms += self._terms_of(Combines.FLOOR, ((self.lower_bound.name, self.lower_bound.seconds),))
        return (*terms, *self._terms_of(Combines.AFTER, ((LAUNCH, self.launch_s), ("combine", self.combine_s))))

    def _body_terms(self) -> list[Term]:
        """Return the terms between start and end of the main launch, with one for what does not overlap."""
        costs = self.costs
        stages = [stage for stage in costs.stage_seconds if stage[0] != EXPOSED]
        if costs.core_stage is not None:
            terms = self._terms_of(Combines.OVERLAPS, [*stages, (costs.core_stage, costs.core_s)])
            body_s = overlap_stages(costs)
        elif self.machine.is_gpu:
            terms, body_s = self._terms_of(Combines.OVERLAPS, stages), costs.core_s
        else:
            terms, body_s = self._terms_of(Combines.SUMS, stages[:-1]), costs.core_s
            if costs.added_fraction is None:
                terms += self._terms_of(Combines.OVERLAPS, stages[-1:])
            else:
                terms += self._terms_of(Combines.ADDS, stages[-1:], costs.added_fraction)
        exposed_s = body_s - combine_terms(terms)
        if exposed_s > MIN_EXPOSED_FRACTION * body_s:
            terms += self._terms_of(Combines.ADDS, ((EXPOSED, exposed_s),))
        return terms

    def _terms_of(self, combines: Combines, stages: Iterable[tuple[str, float]], fraction: float = 1.0) -> list[Term]:
        """Return the terms of stages, without those of no time."""
        terms = []
        for name, seconds in stages:
            if seconds > 0.0:
                amount, unit = self._amount(name, seconds)
                source = RateSource.ASSUMED if name in self.machine.assumed_stages else RateSource.MEASURED
                terms.append(Term(name, seconds, combines, amount, unit, amount / seconds, source, fraction))
        return terms

    def _amount(self, name: str, seconds: float) -> tuple[float, str]:
        """Return what a stage does in its seconds, and the unit of that."""
        mach, moved = self.machine, dict(self.costs.moved_bytes)
        level = name.removesuffix(FLOOR)
        if name in moved:
            return moved[name], "B"
        if level in {each.name for each in mach.hw.levels}:
            return seconds * (mach.max_bytes_per_s(level) if level != name else mach.hw.level(level).bandwidth_bytes_per_s), "B"
        if name in ARITHMETIC_STAGES:
            return seconds * mach.unit.flops_per_s, "operations"
        if name == LAUNCH and mach.hw.limits.launch_overhead_s:
            return seconds / mach.hw.limits.launch_overhead_s, "launches"
        return seconds * mach.clock_hz, "cycles"

    def estimate(self) -> Estimate:
        costs, mach = self.costs, self.machine
        stages = [StageCost(name, s) for name, s in costs.stage_seconds]
        if costs.core_stage is not None:
            stages.append(StageCost(costs.core_stage, costs.core_s))
        if self.lower_bound is not None:
            stages.append(self.lower_bound)
        stages.append(StageCost(LAUNCH, self.launch_s))
        if self.combine_s:
            stages.append(StageCost("combine", self.combine_s))
        if self.copy_s:
            stages.append(StageCost("copy", self.copy_s))
        return Estimate(
            seconds=self.seconds,
            stages=tuple(stages),
            occupancy=costs.occupancy,
            waves=costs.waves,
            uncertainty=uncertainty(stages, self.seconds, mach.assumed_stages),
        )


@dataclass(frozen=True, slots=True)
class Model(Generic[F]):
    """Performance model of one group on one unit of a device. `cost` is its kernel family's cost function."""

    workload: Workload[F]
    cost: Callable[[Workload[F], Launch], Costs]
    launch: Callable[[Workload[F], RProgram], Launch]

    def estimate(self, program: RProgram, compiled: Resources | None = None) -> Estimate:
        """Estimate the whole kernel: seconds of all its launches, by stage.

        Args:
            compiled: Registers and shared memory of the compiled main launch, in place of the model's own values.
        """
        return self.timed(program, compiled).estimate()

    def timed(self, program: RProgram, compiled: Resources | None = None) -> Timed:
        """Return the seconds without the stages: ranking needs seconds of many rPrograms, and estimates of few."""
        p = self.workload
        launch = self.launch(p, program)
        if compiled is not None:
            needs = BlockResources(launch.threads, compiled.registers_per_thread, compiled.shared_bytes)
            launch = launch._replace(compiled=needs)
        mach = p.machine
        costs = self.cost(p, launch)
        body = costs.core_s if costs.core_stage is None else overlap_stages(costs)
        joining = second_launch_s(mach, launch.workspace_bytes) if launch.workspace_bytes else 0.0
        copying = second_launch_s(mach, p.space.copied_bytes) if p.space.copied_bytes else 0.0
        launching = launch_overhead_s(mach, launch.grid)
        floor_s = p.lower_bound_s
        floor = p.lower_bound if floor_s > body + copying else None
        seconds = max(floor_s, body + copying) + launching + joining
        return Timed(program, seconds, costs, launching, joining, copying, mach, floor, p.operations)

    def resources(self, program: RProgram) -> BlockResources | None:
        """Return the predicted resources of a block of the main launch, or None if the launch has no thread blocks."""
        return self.cost(self.workload, self.launch(self.workload, program)).resources


def read_launch(p: Workload[F], program: RProgram) -> Launch:
    """Return an rProgram as cost functions read it: one thread block for each tile and part of the reduction."""
    footprint = p.footprint
    block, thread = footprint.tile(program.block), footprint.tile(program.thread)
    grid, threads = program.split_k * program.pipeline.cluster_k, program.reduce_threads
    for i in p.spatial:
        grid *= -(-footprint.extents[i] // block[i])
        threads *= block[i] // thread[i]
    grid = math.ceil(grid * p.space.computed)
    points = program.split_k * p.outer_points if program.split_k > 1 else 0
    return Launch(
        block,
        thread,
        program.reduce_threads,
        program.split_k,
        grid,
        threads,
        points * p.elem_bytes,
        program.pipeline,
    )


def overlap_stages(costs: Costs) -> float:
    """Return the seconds of stages that overlap imperfectly.

    A block that loads once exposes IMPERFECT_OVERLAP of the other stages: memory is idle while its wave computes. With
    many loads a block keeps memory busy, and the exposed time is queueing, which grows with utilisation.

    Blocks that load everything before they compute overlap with other blocks of their core only. Alone on a core, such
    a block keeps memory idle while it computes. The exposed part is assumed to fall with the square of their number.
    """
    overlapped = [s for _, s in costs.stage_seconds]
    times = [costs.core_s, *overlapped]
    longest, loads = max(times), costs.loads_per_block
    shown = [s * (s / longest + (1.0 - s / longest) / loads) for s in times]
    memory = max(overlapped, default=0.0)
    alone = min(costs.issue_s, memory) / costs.resident_blocks**2
    return longest + max(alone, IMPERFECT_OVERLAP * (math.fsum(shown) - longest))
