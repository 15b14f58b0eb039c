"""READ FIRST. Text and a device in, the fastest kernel we can make out: all stages are strung together here.

parse → partition → (construct → estimate) a group → plans → (lower → emit → compile → measure) a plan → report
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from roller_svc import hardware
from roller_svc.compiler.autotune import (
    build_candidates,
    build_first_without_spills,
    measure_candidates,
    select_best,
    sort_best_first,
)
from roller_svc.compiler.backends import Backend, backend_for
from roller_svc.compiler.partition_cache import PartitionCache
from roller_svc.compiler.plans import merge_ranked_plans, rank_partitions, select_for_measurement
from roller_svc.errors import ToolchainMissingError
from roller_svc.frontend.parse import parse
from roller_svc.ir.estimate import Construction
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.report import BuildReport, BuildRequest, GroupedPlan, RuntimeChoice, Select
from roller_svc.toolchain import availability

T = TypeVar("T")
Trace = Callable[[str, Any], Any]

# Plans beyond top_k that are built only where the ones before them fail to compile or spill registers.
FALLBACK_PLANS = 3


def no_trace(_: str, value: T) -> T:
    """A trace that watches nothing."""
    return value


def build_kernel(request: BuildRequest, trace: Trace = no_trace) -> BuildReport:
    """The whole way. Raises InputError for what the caller did wrong, BuildError where no plan could be built."""
    clock = StageTimer()
    program = parse(request.expression, dict(request.inputs), request.outputs)
    program = trace("parse", replace(program, constants=request.constants))
    clock.record("parse")
    hw: HardwareSpec = trace("hardware", request.hardware or hardware.load(request.target))
    clock.record("hardware")
    partitions = rank_partitions(PartitionCache(program), hw, request.top_k + FALLBACK_PLANS, request.demands)
    trace("construct", partitions)
    plans = merge_ranked_plans(partitions, request.top_k + FALLBACK_PLANS)
    shortlist: tuple[GroupedPlan, ...] = trace("shortlist", select_for_measurement(plans, partitions, request.top_k))
    clock.record("construct")
    backend = _available_backend(request, hw)
    can_measure, notes = _may_measure(request, hw, backend)
    if can_measure:
        attempts = build_candidates(shortlist, program, hw)
    else:
        attempts = build_first_without_spills(plans, program, hw)
    clock.record("compile")
    if can_measure:
        attempts = measure_candidates(attempts, program, backend)
        clock.record("measure")
        attempts = select_best(attempts, program, hw)
        clock.record("settle")
    attempts = sort_best_first(attempts, shortlist)
    if attempts[0].error is not None:
        raise attempts[0].error
    winner = next(ranked for ranked in partitions if ranked.groups is attempts[0].groups)
    notes = (*notes, *_unit_notes(winner.groups, winner.constructions))
    report = BuildReport(request, program, hw, winner.groups, winner.constructions, attempts, notes, clock.stages)
    trace("report", report)
    return report


def _unit_notes(groups: tuple[KernelGroup, ...], constructions: tuple[Construction, ...]) -> tuple[str, ...]:
    """Of each contraction that none of the device's matrix units takes, why."""
    return tuple(
        f"{group.name} is not on a matrix unit: {'; '.join(construction.unsupported_units)}"
        for group, construction in zip(groups, constructions, strict=True)
        if construction.unsupported_units and all(not p.unit.is_matrix for p in construction.programs)
    )


def _available_backend(request: BuildRequest, hw: HardwareSpec) -> Backend:
    """The device's back end, once something compiles for it here; else an error that says what is missing.

    The emulator takes the text: it does without.
    """
    backend = backend_for(hw)
    toolchain = availability(hw)
    if not toolchain.ok and request.runtime is not RuntimeChoice.EMULATOR:
        raise ToolchainMissingError(toolchain.reason)
    return backend


def _may_measure(request: BuildRequest, hw: HardwareSpec, backend: Backend) -> tuple[bool, tuple[str, ...]]:
    """Whether candidates can be timed; where they were to be and cannot, a note that says why."""
    if request.select is Select.MODEL:
        return False, ()
    if not backend.is_present(hw):
        return False, (f"nothing was measured: there is no {hw.id} here, the model chose",)
    return True, ()


@dataclass(slots=True)
class StageTimer:
    """Seconds of each stage."""

    last: float = field(default_factory=time.perf_counter)
    stages: tuple[tuple[str, float], ...] = ()

    def record(self, stage: str) -> None:
        now = time.perf_counter()
        self.stages = (*self.stages, (stage, now - self.last))
        self.last = now
