"""READ FIRST. Text and a device in, the fastest kernel we can make out: all stages are strung together here.

parse → partition → (construct → estimate) a group → plans → (lower → emit → compile → measure) a plan → report
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from roller_svc import hardware
from roller_svc.compiler.autotune import best_first, built_for_trial, first_built, measured, settled
from roller_svc.compiler.backends import Backend, backend_for
from roller_svc.compiler.partition_cache import Shared
from roller_svc.compiler.plans import plans_of_all, ranked_groupings, shortlisted
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
SPARE_PLANS = 3


def silent(_: str, value: T) -> T:
    """A trace that watches nothing."""
    return value


def build_kernel(request: BuildRequest, trace: Trace = silent) -> BuildReport:
    """The whole way. Raises InputError for what the caller did wrong, BuildError where no plan could be built."""
    clock = _Clock()
    program = parse(request.expression, dict(request.inputs), request.outputs)
    program = trace("parse", replace(program, constants=request.constants))
    clock.lap("parse")
    hw: HardwareSpec = trace("hardware", request.hardware or hardware.load(request.target))
    clock.lap("hardware")
    groupings = ranked_groupings(Shared(program), hw, request.top_k + SPARE_PLANS, request.demands)
    trace("construct", groupings)
    plans = plans_of_all(groupings, request.top_k + SPARE_PLANS)
    shortlist: tuple[GroupedPlan, ...] = trace("shortlist", shortlisted(plans, groupings, request.top_k))
    clock.lap("construct")
    backend = _available_backend(request, hw)
    measuring, notes = _may_measure(request, hw, backend)
    if measuring:
        attempts = built_for_trial(shortlist, program, hw)
    else:
        attempts = first_built(plans, program, hw)
    clock.lap("compile")
    if measuring:
        attempts = measured(attempts, program, backend)
        clock.lap("measure")
        attempts = settled(attempts, program, hw)
        clock.lap("settle")
    attempts = best_first(attempts, shortlist)
    if attempts[0].error is not None:
        raise attempts[0].error
    won = next(ranked for ranked in groupings if ranked.groups is attempts[0].groups)
    notes = (*notes, *_unit_notes(won.groups, won.constructions))
    report = BuildReport(request, program, hw, won.groups, won.constructions, attempts, notes, clock.laps)
    trace("report", report)
    return report


def _unit_notes(groups: tuple[KernelGroup, ...], constructions: tuple[Construction, ...]) -> tuple[str, ...]:
    """Of each contraction that none of the device's matrix units takes, why."""
    return tuple(
        f"{group.name} is not on a matrix unit: {'; '.join(construction.refusals)}"
        for group, construction in zip(groups, constructions, strict=True)
        if construction.refusals and all(not p.unit.is_matrix for p in construction.programs)
    )


def _available_backend(request: BuildRequest, hw: HardwareSpec) -> Backend:
    """The device's back end, once something compiles for it here; else an error that says what is missing.

    The emulator takes the text: it does without.
    """
    backend = backend_for(hw)
    found = availability(hw)
    if not found.ok and request.runtime is not RuntimeChoice.EMULATOR:
        raise ToolchainMissingError(found.reason)
    return backend


def _may_measure(request: BuildRequest, hw: HardwareSpec, backend: Backend) -> tuple[bool, tuple[str, ...]]:
    """Whether candidates can be timed; where they were to be and cannot, a note that says why."""
    if request.select is Select.MODEL:
        return False, ()
    if not backend.present(hw):
        return False, (f"nothing was measured: there is no {hw.id} here, the model chose",)
    return True, ()


@dataclass(slots=True)
class _Clock:
    """Seconds of each stage."""

    last: float = field(default_factory=time.perf_counter)
    laps: tuple[tuple[str, float], ...] = ()

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.laps = (*self.laps, (stage, now - self.last))
        self.last = now
