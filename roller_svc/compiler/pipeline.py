"""Compilation pipeline: expression + target → best kernel. Start reading here.

parse → partition → (construct → estimate) each group → plans → (lower → emit → compile → measure) each plan → report
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from roller_svc import hardware
from roller_svc.compiler.autotune import (
    NOT_SHARED,
    build_candidates,
    build_first_without_spills,
    measure_candidates,
    select_best,
    sort_best_first,
)
from roller_svc.compiler.backends import Backend, backend_for
from roller_svc.compiler.explain import FALLBACK_PLANS, assess_plan, explored_of, parse_request, rank_request
from roller_svc.compiler.notes import busy_notes, reject_notes
from roller_svc.compiler.plans import RankedPartitions, merge_ranked_plans, select_for_measurement
from roller_svc.errors import ArgumentError, ToolchainMissingError
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.options import MAX_TOP_K, RuntimeChoice, SelectionMode
from roller_svc.ir.program import TensorProgram
from roller_svc.ir.report import BuildReport, BuildRequest, CandidateResult, GroupedPlan
from roller_svc.toolchain import availability

# Candidates of a model's kernel that the performance model ranks: the most efficient is rarely among the few built.
RANKED_FOR_MODELS = 10

T = TypeVar("T")
Trace = Callable[[str, Any], Any]


def no_trace(_: str, value: T) -> T:
    """Return the value: a trace that observes nothing."""
    return value


@dataclass(slots=True)
class StageTimer:
    """Records the seconds of each stage."""

    last: float = field(default_factory=time.perf_counter)
    stages: tuple[tuple[str, float], ...] = ()

    def restart(self) -> None:
        """Leave out the time since the last stage."""
        self.last = time.perf_counter()

    def record(self, stage: str) -> None:
        now = time.perf_counter()
        self.stages = (*self.stages, (stage, now - self.last))
        self.last = now


@dataclass(frozen=True, slots=True)
class CompiledCandidates:
    """A request whose candidates are compiled, and not selected yet."""

    request: BuildRequest
    program: TensorProgram
    hardware: HardwareSpec
    partitions: RankedPartitions
    shortlist: tuple[GroupedPlan, ...]
    results: tuple[CandidateResult, ...]
    backend: Backend | None  # to measure them; None: the model selects
    remarks: tuple[str, ...]
    clock: StageTimer


def build_kernel(request: BuildRequest, trace: Trace = no_trace) -> BuildReport:
    """Compile a request. Raises InputError for an invalid request and BuildError if no plan could be built."""
    return select_candidate(compile_candidates(request, trace), trace)


def compile_candidates(
    request: BuildRequest,
    trace: Trace = no_trace,
    *,
    for_model: bool = False,
    printing: AbstractContextManager[object] = NOT_SHARED,
) -> CompiledCandidates:
    """Compile the candidates of a request, on all cores. Raises as `build_kernel` does.

    Args:
        request: what to compile.
        trace: What observes the stages.
        for_model: Make the object of a candidate that the performance model has chosen, to link models from it, and
            not its binary.
        printing: What is entered while candidates are ranked, and while a chosen one is printed.
    """
    if request.schedule is not None:
        raise ArgumentError("a schedule by hand has no candidates: compile and run take it", code="invalid-option")
    with printing:
        clock = StageTimer()
        forms = parse_request(request)
        program = trace("parse", forms[0])
        clock.record("parse")
        hw: HardwareSpec = trace("hardware", request.hardware or hardware.load(request.target))
        clock.record("hardware")
        may_share_cores = for_model and request.top_k > 1 and hw.num_cores > 1
        partitions = rank_request(request, forms, hw, RANKED_FOR_MODELS if may_share_cores else 0)
        trace("construct", partitions)
    plans = merge_ranked_plans(partitions, request.top_k + FALLBACK_PLANS)
    shortlist: tuple[GroupedPlan, ...] = trace("shortlist", select_for_measurement(plans, partitions, request.top_k))
    if request.candidate:
        plans = shortlist = (_find_candidate(request, partitions, shortlist),)
    clock.record("construct")
    backend = _available_backend(request, hw)
    can_measure, remarks = _may_measure(request, hw, backend)
    if can_measure:
        results = build_candidates(shortlist, program, hw)
    else:
        results = build_first_without_spills(plans, program, hw, for_model=for_model, printing=printing)
    clock.record("compile")
    return CompiledCandidates(
        request, program, hw, partitions, shortlist, results, backend if can_measure else None, remarks, clock
    )


def select_candidate(compiled: CompiledCandidates, trace: Trace = no_trace) -> BuildReport:
    """Select the best candidate by measuring them, or by the model. Raises BuildError if none could be built."""
    program, hw, clock, results = compiled.program, compiled.hardware, compiled.clock, compiled.results
    clock.restart()
    if compiled.backend is not None:
        results = measure_candidates(results, program, compiled.backend)
        clock.record("measure")
        results = select_best(results, program, hw)
        clock.record("settle")
    results = sort_best_first(results, compiled.shortlist)
    errors = [result.error for result in results if result.error is not None]
    if results[0].compiled is None and errors:  # unbuilt ones are sorted before failed ones
        raise errors[0]
    winner = next(ranked for ranked in compiled.partitions if ranked.groups is results[0].groups)
    floor, notes = assess_plan(program, hw, compiled.request.constraints, winner, results[0].plan)
    if compiled.request.strict:
        reject_notes(notes)
    report = BuildReport(
        *(compiled.request, program, hw, explored_of(results, compiled.partitions), results),
        *(notes, (*compiled.remarks, *busy_notes(results[0].measurement)), clock.stages, floor),
    )
    trace("report", report)
    return report


def _find_candidate(request: BuildRequest, partitions: RankedPartitions, ranked: tuple[GroupedPlan, ...]) -> GroupedPlan:
    """Return a candidate by its number from 1. Raises ArgumentError if there are fewer."""
    if request.candidate > len(ranked):
        hint = "a larger top_k may rank more candidates" if _may_rank_more(request, partitions, ranked) else "these are all"
        raise ArgumentError(
            f"candidate must be at most {len(ranked)}, the number of candidates of this request, got {request.candidate}",
            code="invalid-option",
            hint=hint,
        )
    return ranked[request.candidate - 1]


def _may_rank_more(request: BuildRequest, partitions: RankedPartitions, ranked: tuple[GroupedPlan, ...]) -> bool:
    """Return whether a larger top_k may rank more: kernels of a group, or plans of those that are known."""
    if any(len(candidates) >= request.top_k for each in partitions for candidates in each.candidates):
        return request.top_k < MAX_TOP_K
    return len(select_for_measurement(merge_ranked_plans(partitions, MAX_TOP_K), partitions, MAX_TOP_K)) > len(ranked)


def _available_backend(request: BuildRequest, hw: HardwareSpec) -> Backend:
    """Return the device's backend. Raises ToolchainMissingError if its compiler is not installed.

    The emulator needs no compiler for the device.
    """
    backend = backend_for(hw)
    toolchain = availability(hw)
    if not toolchain.ok and request.runtime is not RuntimeChoice.EMULATOR:
        raise ToolchainMissingError(toolchain.reason)
    return backend


def _may_measure(request: BuildRequest, hw: HardwareSpec, backend: Backend) -> tuple[bool, tuple[str, ...]]:
    """Return whether to measure candidates, and a note if measuring was requested but is impossible."""
    if request.select is SelectionMode.MODEL:
        return False, ()
    if not backend.is_present(hw):
        chooser = "caller" if request.candidate else "model"
        return False, (f"nothing was measured: this machine has no {hw.id}, the {chooser} chose",)
    return True, ()
