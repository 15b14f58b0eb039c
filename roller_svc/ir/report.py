"""A build: the request, the plans, the results."""

from __future__ import annotations

from dataclasses import dataclass, replace

from roller_svc.errors import BuildError
from roller_svc.ir.estimate import Candidate, Construction, Estimate, ProgramFloor, add_estimates
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.kernel import CompiledKernel, KernelSource, Measurement
from roller_svc.ir.options import KernelOptions
from roller_svc.ir.program import TensorProgram, TensorType


@dataclass(frozen=True, slots=True)
class BuildRequest(KernelOptions):
    """A request to build a kernel: a program, a device and options."""

    expression: str
    inputs: tuple[tuple[str, TensorType], ...]
    target: str = "local"
    outputs: tuple[str, ...] | None = None
    hardware: HardwareSpec | None = None  # instead of the spec named `target`
    programmatic: bool = False  # as the program's; see TensorProgram


@dataclass(frozen=True, slots=True)
class Plan:
    """One rProgram for every kernel group of a program. It becomes one artifact."""

    choices: tuple[Candidate, ...]

    @property
    def estimate(self) -> Estimate:
        """Return the sum of the estimates, stage by stage: the groups run one after the other, some of them once."""
        once_s = sum(c.estimate.seconds for c in self.choices if c.runs_once)
        return replace(add_estimates([c.estimate for c in self.calls]), once_s=once_s)

    @property
    def calls(self) -> tuple[Candidate, ...]:
        """Return the choices that run in every call."""
        return tuple(c for c in self.choices if not c.runs_once)

    @property
    def ranking_seconds(self) -> float:
        """Return the seconds by which plans are ranked."""
        return sum(c.ranking_seconds for c in self.calls)

    @property
    def dominant_choice(self) -> Candidate:
        """Return the choice that takes longest in a call."""
        return max(self.calls, key=lambda c: c.estimate.seconds)


@dataclass(frozen=True, slots=True)
class GroupedPlan:
    """A plan with the partition that its choices are for."""

    plan: Plan
    groups: tuple[KernelGroup, ...]


@dataclass(frozen=True, slots=True)
class Explored:
    """A partition, and the constructions of its groups."""

    groups: tuple[KernelGroup, ...]
    constructions: tuple[Construction, ...]


@dataclass(frozen=True, slots=True)
class CandidateResult:
    """The result of one plan: a compiled kernel, perhaps measured, or the error."""

    plan: Plan
    groups: tuple[KernelGroup, ...]
    source: KernelSource | None
    compiled: CompiledKernel | None
    measurement: Measurement | None
    error: BuildError | None


@dataclass(frozen=True, slots=True)
class BuildReport:
    """The result of a build."""

    request: BuildRequest
    program: TensorProgram
    hardware: HardwareSpec
    explored: tuple[Explored, ...]  # partitions of the results, that of the winner first
    results: tuple[CandidateResult, ...]  # best first, by measured time if measured, else by estimate
    notes: tuple[str, ...] = ()  # on the program and its plan
    remarks: tuple[str, ...] = ()  # on the build: why nothing was measured, or that times varied
    stage_seconds: tuple[tuple[str, float], ...] = ()
    floor: ProgramFloor | None = None  # None where nothing was built

    @property
    def groups(self) -> tuple[KernelGroup, ...]:
        """Groups of the winner."""
        return self.explored[0].groups

    @property
    def constructions(self) -> tuple[Construction, ...]:
        """Constructions of the winner's groups."""
        return self.explored[0].constructions

    @property
    def winner(self) -> CandidateResult:
        return self.results[0]
