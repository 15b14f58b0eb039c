"""Build candidate plans and select the fastest by measuring them, as ASTRA does among a few good candidates."""

from __future__ import annotations

import os
import time
from bisect import bisect
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import accumulate
from threading import Lock

from roller_svc.codegen.c.model import kernel_unit
from roller_svc.compiler.backends import Backend, Call
from roller_svc.compiler.lower_and_emit import emit_plan, emit_plans
from roller_svc.errors import BuildError
from roller_svc.ir.hardware import HardwareSpec, TargetKind
from roller_svc.ir.kernel import CompiledKernel, KernelSource, Language, Measurement, Resources
from roller_svc.ir.program import TensorProgram
from roller_svc.ir.report import CandidateResult, GroupedPlan, Plan
from roller_svc.ir.rprogram import RTile
from roller_svc.runtime.measure import measure
from roller_svc.semantics.inputs import random_inputs
from roller_svc.toolchain import availability, compile_combined, compile_source, compile_unlinked, link_single

SCREENING_S = 0.03  # for each candidate
# A candidate whose first, cold call takes this multiple of the best time is not sampled further. Calls longer than
# SCREENING_S are slowed down less by cold caches.
COLD_CALL_RATIO, LONG_COLD_CALL_RATIO = 1.5, 1.2
# Cold calls of a candidate where the best call is shorter than SHORT_CALL_S: one alone wakes threads and misses caches.
COLD_CALLS, SHORT_CALL_S = 3, 1e-3
# Allowance for the first call of a binary with several plans: it page-faults the scratch buffers of all threads.
PAGE_FAULT_S = 0.1
# Candidates within TIE_RATIO of the best after screening are measured again in interleaved rounds.
MAX_FINALISTS = 4
TIE_RATIO = 1.1
ROUNDS = 5
ROUND_S = 0.02  # for each finalist
MAX_ROUNDS_S = 0.2  # no further round starts after this: long calls need fewer samples
# Random values are repeated in large arrays, because drawing them is slow. Prime, so that no two rows are equal.
DISTINCT_VALUES = 1_048_573
SHARED_TILE_COST = 0.3  # compile time of a plan that shares its register tiles with an earlier one, relative to others
NOT_SHARED: AbstractContextManager[object] = nullcontext()  # of a thread that waits for no other one to print
PRINTING_FRACTION = 0.2  # of the compile time of a source: printing it, which is sequential


def build_alone(
    grouped: GroupedPlan,
    program: TensorProgram,
    hw: HardwareSpec,
    *,
    for_model: bool = False,
    printing: AbstractContextManager[object] = NOT_SHARED,
) -> CandidateResult:
    """Build a single plan; only generate its source if no compiler for the device is installed.

    Args:
        grouped: the plan.
        program: what it computes.
        hw: the device.
        for_model: Make the object that models are linked from. A CPU's kernel then has no binary.
        printing: What is entered while the source is printed, as a lock of several threads.
    """
    with printing:
        source = emit_plan(grouped.plan, program, grouped.groups, hw)
    toolchain = availability(hw)
    if not toolchain.ok:
        unknown = tuple(Resources() for _ in source.launches)
        compiled = CompiledKernel(source, b"", f"not compiled: {toolchain.reason}", unknown)
        return CandidateResult(grouped.plan, grouped.groups, source, compiled, None, None)
    return _compiled(grouped, source, for_model=for_model)


def build_first_without_spills(
    plans: tuple[GroupedPlan, ...],
    program: TensorProgram,
    hw: HardwareSpec,
    *,
    for_model: bool = False,
    printing: AbstractContextManager[object] = NOT_SHARED,
) -> tuple[CandidateResult, ...]:
    """Build plans as `build_alone` does until one compiles without register spills; return all that were built."""
    results: list[CandidateResult] = []
    for grouped in plans:
        results.append(build_alone(grouped, program, hw, for_model=for_model, printing=printing))
        if results[-1].error is None and not spills(results[-1]):
            break
    return tuple(results)


def build_candidates(plans: tuple[GroupedPlan, ...], program: TensorProgram, hw: HardwareSpec) -> tuple[CandidateResult, ...]:
    """Build all plans on all cores.

    CPU plans are compiled in batches, one translation unit each, that share micro-kernels and the compiler's start-up.
    """
    cores = len(os.sched_getaffinity(0))
    printing = Lock()
    batches = _batches(plans, cores) if hw.family is TargetKind.CPU else [(grouped,) for grouped in plans]

    def build_batch(batch: tuple[GroupedPlan, ...]) -> tuple[CandidateResult, ...]:
        with printing:  # the GIL serialises this: let the first source reach its compiler before the last is printed
            sources = emit_plans(tuple(grouped.plan for grouped in batch), program, batch[0].groups, hw)
        return _build_batch(batch, sources) or tuple(build_alone(grouped, program, hw) for grouped in batch)

    with ThreadPoolExecutor(max_workers=cores) as pool:
        by_plan = {id(result.plan): result for results in pool.map(build_batch, batches) for result in results}
    return tuple(by_plan[id(grouped.plan)] for grouped in plans)


def _batches(plans: tuple[GroupedPlan, ...], limit: int) -> list[tuple[GroupedPlan, ...]]:
    """Batch plans of one partition into translation units; they share kernels."""
    by_partition: dict[int, list[GroupedPlan]] = {}
    for grouped in plans:
        by_partition.setdefault(id(grouped.groups), []).append(grouped)
    return [
        tuple(GroupedPlan(plan, same_partition[0].groups) for plan in batch)
        for same_partition in by_partition.values()
        for batch in batch_plans(tuple(grouped.plan for grouped in same_partition), limit)
    ]


def batch_plans(plans: tuple[Plan, ...], limit: int) -> tuple[tuple[Plan, ...], ...]:
    """Split plans into at most `limit` batches; plans with equal register tiles are adjacent.

    Batches are printed sequentially and compiled concurrently. Earlier ones are larger, so that all end together.
    """
    by_tile: dict[tuple[RTile, ...], list[Plan]] = {}
    for plan in plans:
        by_tile.setdefault(tuple(choice.program.thread for choice in plan.choices), []).append(plan)
    costs = [(plan, SHARED_TILE_COST if i else 1.0) for group in by_tile.values() for i, plan in enumerate(group)]
    total = sum(cost for _, cost in costs)
    weights = [(1 + PRINTING_FRACTION) ** -i for i in range(limit)]
    ends = [total * end / sum(weights) for end in accumulate(weights)]
    batches: list[list[Plan]] = [[] for _ in range(limit)]
    done = 0.0
    for plan, cost in costs:
        batches[min(limit - 1, bisect(ends, done + cost / 2))].append(plan)
        done += cost
    return tuple(tuple(batch) for batch in batches if batch)


def _build_batch(plans: tuple[GroupedPlan, ...], sources: tuple[KernelSource, ...]) -> tuple[CandidateResult, ...]:
    """Compile plans as one translation unit; return nothing if that fails, so that each is then built alone."""
    if len(plans) == 1:
        return (_compiled(plans[0], sources[0]),)
    try:
        compiled = compile_combined(sources[0])
    except BuildError:
        return ()
    return tuple(
        CandidateResult(grouped.plan, grouped.groups, source, replace(compiled, source=source), None, None)
        for grouped, source in zip(plans, sources, strict=True)
    )


def _compiled(grouped: GroupedPlan, source: KernelSource, *, for_model: bool = False) -> CandidateResult:
    is_unlinked = for_model and source.language is Language.C
    try:
        compiled = compile_unlinked(source, kernel_unit(source)) if is_unlinked else compile_source(source)
        return CandidateResult(grouped.plan, grouped.groups, source, compiled, None, None)
    except BuildError as failure:
        return CandidateResult(grouped.plan, grouped.groups, source, None, None, failure)


def spills(result: CandidateResult) -> int:
    """Return the bytes of spilled registers of all launches."""
    return sum(r.spill_bytes for r in result.compiled.resources) if result.compiled else 0


def measure_candidates(
    results: tuple[CandidateResult, ...], program: TensorProgram, backend: Backend
) -> tuple[CandidateResult, ...]:
    """Time every built plan on the same random inputs and output memory.

    Slow candidates are cut short against the best time so far. Finalists are measured in interleaved rounds, so that
    interference affects all of them.
    """
    arrays = backend.to_device(random_inputs(program, seed=0, distinct=DISTINCT_VALUES))
    outputs = None
    calls: dict[int, Call] = {}
    seen_binaries = set[bytes]()
    times: dict[int, Measurement] = {}
    failures: dict[int, BuildError] = {}
    for i, result in enumerate(results):
        if result.compiled is None:
            continue
        best_s = min((t.min_s for t in times.values()), default=None)
        try:
            call = backend.load(result.compiled).bind(arrays, outputs)
            times[i] = _screen(call, best_s, 0.0 if result.compiled.binary in seen_binaries else PAGE_FAULT_S)
            outputs = call.results() if outputs is None else outputs
        except BuildError as failure:
            failures[i] = failure
            times.pop(i, None)  # if the call was timed and fetching its outputs failed
            continue
        calls[i] = call
        seen_binaries.add(result.compiled.binary)
        tie_s = TIE_RATIO * min(t.min_s for t in times.values())
        calls = {j: tied for j, tied in calls.items() if times[j].min_s <= tie_s}  # frees the others' memory
    _measure_interleaved(_finalists(times), calls, times)
    return tuple(
        replace(result, measurement=times.get(i), error=result.error or failures.get(i)) for i, result in enumerate(results)
    )


def _screen(call: Call, best_s: float | None, page_fault_s: float) -> Measurement:
    """Return a few samples after the cold first calls, or a cold call itself if all are far slower than the best."""
    cold = measure(call, 0.0)
    for _ in range(COLD_CALLS - 1 if best_s is not None and best_s < SHORT_CALL_S else 0):
        cold = min(cold, measure(call, 0.0), key=lambda measured: measured.min_s)
    if (
        best_s is not None
        and cold.min_s > (COLD_CALL_RATIO if best_s < SCREENING_S else LONG_COLD_CALL_RATIO) * best_s + page_fault_s
    ):
        return cold
    return measure(call, max(0.0, SCREENING_S - cold.min_s), best_s=best_s)


def _finalists(times: dict[int, Measurement]) -> list[int]:
    """Return the candidates that are tied with the best after screening; empty if only one is."""
    ordered = sorted(times, key=lambda i: times[i].min_s)[:MAX_FINALISTS]
    tied = [i for i in ordered if times[i].min_s <= TIE_RATIO * times[ordered[0]].min_s]
    return tied if len(tied) > 1 else []


def _measure_interleaved(finalists: list[int], calls: dict[int, Call], times: dict[int, Measurement]) -> None:
    """Measure the finalists in interleaved rounds and merge the samples into `times`."""
    start = time.perf_counter()
    for _ in range(ROUNDS):
        for i in finalists:
            times[i] = _merge_measurements(times[i], measure(calls[i], ROUND_S))
        if time.perf_counter() - start > MAX_ROUNDS_S:
            break


def _merge_measurements(a: Measurement, b: Measurement) -> Measurement:
    """Merge two measurements of one kernel: the smaller minimum, the smaller median."""
    return replace(a, median_s=min(a.median_s, b.median_s), min_s=min(a.min_s, b.min_s), samples=a.samples + b.samples)


def select_best(results: tuple[CandidateResult, ...], program: TensorProgram, hw: HardwareSpec) -> tuple[CandidateResult, ...]:
    """Sort the results best first and give the winner a source and binary without other plans."""
    linked: set[int] = set()
    while True:
        best, *others = sort_best_first(results)
        if best.error is not None or best.source is None or id(best.plan) in linked:
            return (best, *others)
        best = link_alone(best, program, hw)
        linked.add(id(best.plan))
        results = (best, *others)


def link_alone(result: CandidateResult, program: TensorProgram, hw: HardwareSpec) -> CandidateResult:
    """Return the result with a source and a binary that have no other plan of its batch."""
    return _link_single(result, emit_plan(result.plan, program, result.groups, hw))


def _link_single(result: CandidateResult, source: KernelSource) -> CandidateResult:
    """Replace a batch's source and binary by the plan's own: link the measured functions if possible, else compile."""
    if result.compiled is None or source == result.source:
        return result
    try:
        linked = link_single(result.compiled, source)
    except BuildError as failure:
        return replace(result, source=source, compiled=None, error=failure)
    if linked is not None:
        return replace(result, source=linked.source, compiled=linked)
    return replace(_compiled(GroupedPlan(result.plan, result.groups), source), measurement=result.measurement)


def sort_best_first(results: tuple[CandidateResult, ...], plans: tuple[GroupedPlan, ...] = ()) -> tuple[CandidateResult, ...]:
    """Sort by measured or else predicted time; spilling, unbuilt and failed ones last, in this order."""

    def order(result: CandidateResult) -> tuple[bool, bool, bool, float]:
        measurement = result.measurement
        seconds = measurement.min_s if measurement else result.plan.ranking_seconds
        spilled = measurement is None and spills(result) > 0
        return result.error is not None, result.compiled is None, spilled, seconds

    seen = {id(result.plan) for result in results}
    rest = (
        CandidateResult(grouped.plan, grouped.groups, None, None, None, None) for grouped in plans if id(grouped.plan) not in seen
    )
    return tuple(sorted((*results, *rest), key=order))
