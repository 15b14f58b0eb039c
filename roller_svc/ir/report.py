"""What a build was asked for, what it tried, and what came of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from roller_svc.errors import BuildError
from roller_svc.ir.constraints import OpClass, ScheduleConstraints
from roller_svc.ir.estimate import Candidate, Construction, Estimate, StageCost
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.kernel import CompiledKernel, KernelSource, Measurement
from roller_svc.ir.program import TensorProgram, TensorType


class SelectionMode(Enum):
    MEASURE = "measure"  # compile and time the top candidates, keep the fastest
    MODEL = "model"  # trust the ranking


class RuntimeChoice(Enum):
    AUTO = "auto"
    EMULATOR = "emulator"


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """`hardware` stands in place of the spec named `target` where it is given; `family` and `tiles`: see Demands;
    `constants`: inputs that stay the same from call to call."""

    expression: str
    inputs: tuple[tuple[str, TensorType], ...]
    target: str = "local"
    outputs: tuple[str, ...] | None = None
    top_k: int = 10
    select: SelectionMode = SelectionMode.MEASURE
    runtime: RuntimeChoice = RuntimeChoice.AUTO
    allow_tf32: bool = False
    hardware: HardwareSpec | None = None
    op_class: OpClass | None = None
    tiles: tuple[tuple[str, int], ...] = ()
    constants: tuple[str, ...] = ()

    @property
    def constraints(self) -> ScheduleConstraints:
        return ScheduleConstraints(self.allow_tf32, self.op_class, self.tiles)


@dataclass(frozen=True, slots=True)
class Plan:
    """One choice of rProgram for every kernel group of a program: what becomes one artifact."""

    choices: tuple[Candidate, ...]

    @property
    def estimate(self) -> Estimate:
        """The groups run one after the other: seconds add up, stage by stage."""
        parts = [c.estimate for c in self.choices]
        seconds = sum(p.seconds for p in parts)
        stages: dict[str, float] = {}
        for part in parts:
            for stage in part.stages:
                stages[stage.name] = stages.get(stage.name, 0.0) + stage.seconds
        weight = [p.seconds / seconds for p in parts]
        return Estimate(
            seconds=seconds,
            stages=tuple(StageCost(name, cost) for name, cost in stages.items()),
            occupancy=sum(w * p.occupancy for w, p in zip(weight, parts, strict=True)),
            waves=max(p.waves for p in parts),
            uncertainty=math.prod(p.uncertainty**w for w, p in zip(weight, parts, strict=True)),
        )

    @property
    def ranking_seconds(self) -> float:
        """The seconds by which it stands among others."""
        return sum(c.ranking_seconds for c in self.choices)

    @property
    def dominant_choice(self) -> Candidate:
        """The choice that takes longest."""
        return max(self.choices, key=lambda c: c.estimate.seconds)


@dataclass(frozen=True, slots=True)
class GroupedPlan:
    """A plan and the kernel groups that its choices are for: attention may be one kernel or several, two sums over one
    factor one or two."""

    plan: Plan
    groups: tuple[KernelGroup, ...]


@dataclass(frozen=True, slots=True)
class CandidateResult:
    """What became of one plan for `groups`: compiled (and measured), or the error that stopped it."""

    plan: Plan
    groups: tuple[KernelGroup, ...]
    source: KernelSource | None
    compiled: CompiledKernel | None
    measurement: Measurement | None
    error: BuildError | None


@dataclass(frozen=True, slots=True)
class BuildReport:
    """`attempts` are best first: by measured time where measured, else by estimate; attempts[0] is the winner.

    `groups` and `constructions` are the winner's. `notes` say what the caller should know: that nothing was measured
    and why, that a group fell to another family.
    """

    request: BuildRequest
    program: TensorProgram
    hardware: HardwareSpec
    groups: tuple[KernelGroup, ...]
    constructions: tuple[Construction, ...]
    results: tuple[CandidateResult, ...]
    notes: tuple[str, ...] = ()
    stage_seconds: tuple[tuple[str, float], ...] = ()

    @property
    def winner(self) -> CandidateResult:
        return self.results[0]
