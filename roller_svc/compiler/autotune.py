"""Plans → kernels, built, and the fastest found by measuring (ASTRA's choice among a few good candidates)."""

from __future__ import annotations

import os
import time
from bisect import bisect
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate
from threading import Lock

from roller_svc.compiler.backends import Backend, Call
from roller_svc.compiler.lower_and_emit import generate, generate_together
from roller_svc.errors import BuildError
from roller_svc.ir.hardware import Family, HardwareSpec
from roller_svc.ir.kernel import CompiledKernel, KernelSource, Measurement, Resources
from roller_svc.ir.program import TensorProgram
from roller_svc.ir.report import CandidateResult, GroupedPlan, Plan
from roller_svc.ir.rprogram import RTile
from roller_svc.reference.inputs import random_inputs
from roller_svc.runtime.measure import measure
from roller_svc.toolchain import availability, compile_source, compile_together, link_alone

# Every candidate is looked at; the few that lie within a noisy look's error of the best are then measured in turns.
SCREENING_S = 0.03
# A first call that takes so many times the best time is not looked at again; of calls that take longer than a look,
# which what is not yet in caches slows down little, so many. The first of a text with several plans is forgiven the
# time in which its memory came: all threads' rooms are cleared then. 80 MB took 62 ms beside 36 ms of work, by which
# the first plan had won before the others were looked at.
COLD_CALL_RATIO, LONG_COLD_CALL_RATIO, PAGE_FAULT_S = 1.5, 1.2, 0.1
MAX_FINALISTS = 4
TIE_RATIO = 1.1
ROUNDS = 5
ROUND_S = 0.02
MAX_ROUNDS_S = 0.2  # no other round begins once the finalists have had so long: calls of many milliseconds need fewer
# Of a large array so many random values, repeated: a prime, so that no two rows of a tensor are alike. Drawing takes
# five times as long as reading them from memory would.
DISTINCT_VALUES = 1_048_573
# Of what a plan with register tiles of its own costs to compile: a plan that shares them with one before it.
SHARED_TILE_COST = 0.3
# Of the compiler's time for a text: that of printing it, which texts take one after the other.
PRINTING_FRACTION = 0.2


def build_alone(grouped: GroupedPlan, program: TensorProgram, hw: HardwareSpec) -> CandidateResult:
    """One plan by itself; where nothing compiles for the device here, its text alone."""
    source = generate(grouped.plan, program, grouped.groups, hw)
    toolchain = availability(hw)
    if not toolchain.ok:
        unknown = tuple(Resources() for _ in source.launches)
        compiled = CompiledKernel(source, b"", f"not compiled: {toolchain.reason}", unknown)
        return CandidateResult(grouped.plan, grouped.groups, source, compiled, None, None)
    return _compiled(grouped, source)


def build_first_without_spills(
    plans: tuple[GroupedPlan, ...], program: TensorProgram, hw: HardwareSpec
) -> tuple[CandidateResult, ...]:
    """The first plan that builds without spilling registers, and the ones before it that did not."""
    attempts: list[CandidateResult] = []
    for grouped in plans:
        attempts.append(build_alone(grouped, program, hw))
        if attempts[-1].error is None and not spills(attempts[-1]):
            break
    return tuple(attempts)


def build_candidates(
    plans: tuple[GroupedPlan, ...], program: TensorProgram, hw: HardwareSpec
) -> tuple[CandidateResult, ...]:
    """All plans, on all cores; compilers are processes, so that threads suffice to keep the cores busy.

    Kernels of one C text share their micro-kernels and the compiler's start: the tenth costs little more than none.
    """
    cores = len(os.sched_getaffinity(0))
    printing = Lock()
    batches = _batches(plans, cores) if hw.family is Family.CPU else [(one,) for one in plans]

    def build_batch(batch: tuple[GroupedPlan, ...]) -> tuple[CandidateResult, ...]:
        with printing:  # one thread of Python runs at a time: the first text shall not wait for the last
            sources = generate_together(tuple(one.plan for one in batch), program, batch[0].groups, hw)
        return _build_batch(batch, sources) or tuple(build_alone(one, program, hw) for one in batch)

    with ThreadPoolExecutor(max_workers=cores) as pool:
        results = {id(attempt.plan): attempt for attempts in pool.map(build_batch, batches) for attempt in attempts}
    return tuple(results[id(one.plan)] for one in plans)


def _batches(plans: tuple[GroupedPlan, ...], limit: int) -> list[tuple[GroupedPlan, ...]]:
    """Plans that share a text: of one grouping, whose kernels it is that they have in common."""
    by_partition: dict[int, list[GroupedPlan]] = {}
    for grouped in plans:
        by_partition.setdefault(id(grouped.groups), []).append(grouped)
    return [
        tuple(GroupedPlan(plan, same_partition[0].groups) for plan in lot)
        for same_partition in by_partition.values()
        for lot in batch_plans(tuple(one.plan for one in same_partition), limit)
    ]


def batch_plans(plans: tuple[Plan, ...], limit: int) -> tuple[tuple[Plan, ...], ...]:
    """The plans in at most so many lots, those that share register tiles side by side. Lots are printed in turn, and
    compiled side by side: earlier ones are larger, so that all end at about the same time."""
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
    return tuple(tuple(lot) for lot in batches if lot)


def _build_batch(plans: tuple[GroupedPlan, ...], sources: tuple[KernelSource, ...]) -> tuple[CandidateResult, ...]:
    """The plans from one run of the compiler; none where that fails, so that one cannot spoil all."""
    if len(plans) == 1:
        return (_compiled(plans[0], sources[0]),)
    try:
        compiled = compile_together(sources[0])
    except BuildError:
        return ()
    return tuple(
        CandidateResult(one.plan, one.groups, source, replace(compiled, source=source), None, None)
        for one, source in zip(plans, sources, strict=True)
    )


def _compiled(one: GroupedPlan, source: KernelSource) -> CandidateResult:
    try:
        return CandidateResult(one.plan, one.groups, source, compile_source(source), None, None)
    except BuildError as failure:
        return CandidateResult(one.plan, one.groups, source, None, None, failure)


def spills(attempt: CandidateResult) -> int:
    """Bytes of registers that its launches keep in memory: a reason to prefer the next plan."""
    return sum(r.spill_bytes for r in attempt.compiled.resources) if attempt.compiled else 0


def measure_candidates(
    attempts: tuple[CandidateResult, ...], program: TensorProgram, backend: Backend
) -> tuple[CandidateResult, ...]:
    """Every plan that built, timed on the same random inputs and the same memory for results.

    The best time so far cuts the slower ones short. The finalists take turns: what disturbs the machine for a while
    then disturbs all of them.
    """
    arrays = backend.to_device(random_inputs(program, seed=0, distinct=DISTINCT_VALUES))
    results = None
    calls: dict[int, Call] = {}
    seen_binaries = set[bytes]()
    times: dict[int, Measurement] = {}
    failures: dict[int, BuildError] = {}
    for i, attempt in enumerate(attempts):
        if attempt.compiled is None:
            continue
        best_s = min((t.min_s for t in times.values()), default=None)
        try:
            call = backend.load(attempt.compiled).bind(arrays, results)
            times[i] = _screen(call, best_s, 0.0 if attempt.compiled.binary in seen_binaries else PAGE_FAULT_S)
            results = call.finish() if results is None else results
        except BuildError as failure:
            failures[i] = failure
            times.pop(i, None)  # of one whose results failed when it had been timed
            continue
        calls[i] = call
        seen_binaries.add(attempt.compiled.binary)
        tie_s = TIE_RATIO * min(t.min_s for t in times.values())
        calls = {j: kept for j, kept in calls.items() if times[j].min_s <= tie_s}  # lets go of the others' memory
    _measure_interleaved(_finalists(times), calls, times)
    return tuple(
        replace(attempt, measurement=times.get(i), error=attempt.error or failures.get(i))
        for i, attempt in enumerate(attempts)
    )


def _screen(call: Call, best_s: float | None, page_fault_s: float) -> Measurement:
    """A few samples after a first call, which is cold: it is the measurement only where it is far from the best."""
    cold = measure(call, 0.0)
    if (
        best_s is not None
        and cold.min_s > (COLD_CALL_RATIO if best_s < SCREENING_S else LONG_COLD_CALL_RATIO) * best_s + page_fault_s
    ):
        return cold
    return measure(call, max(0.0, SCREENING_S - cold.min_s), best_s=best_s)


def _finalists(times: dict[int, Measurement]) -> list[int]:
    """The few candidates whose first look does not tell them apart; none where there is but one."""
    ordered = sorted(times, key=lambda i: times[i].min_s)[:MAX_FINALISTS]
    tied = [i for i in ordered if times[i].min_s <= TIE_RATIO * times[ordered[0]].min_s]
    return tied if len(tied) > 1 else []


def _measure_interleaved(finalists: list[int], calls: dict[int, Call], times: dict[int, Measurement]) -> None:
    """Measures each in every round and joins that to its times."""
    start = time.perf_counter()
    for _ in range(ROUNDS):
        for i in finalists:
            times[i] = _merge_measurements(times[i], measure(calls[i], ROUND_S))
        if time.perf_counter() - start > MAX_ROUNDS_S:
            break


def _merge_measurements(a: Measurement, b: Measurement) -> Measurement:
    """Two measurements of one kernel: the lesser minimum, the lesser median."""
    return replace(a, median_s=min(a.median_s, b.median_s), min_s=min(a.min_s, b.min_s), samples=a.samples + b.samples)


def select_best(
    attempts: tuple[CandidateResult, ...], program: TensorProgram, hw: HardwareSpec
) -> tuple[CandidateResult, ...]:
    """Best first, the winner with a text and a binary of its own."""
    linked: set[int] = set()
    while True:
        best, *others = sort_best_first(attempts)
        if best.error is not None or best.source is None or id(best.plan) in linked:
            return (best, *others)
        best = _link_alone(best, generate(best.plan, program, best.groups, hw))
        linked.add(id(best.plan))
        attempts = (best, *others)


def _link_alone(attempt: CandidateResult, source: KernelSource) -> CandidateResult:
    """The attempt with a text that holds no other plan: the functions that were measured, where these can be linked."""
    if attempt.compiled is None or source == attempt.source:
        return attempt
    try:
        linked = link_alone(attempt.compiled, source)
    except BuildError as failure:
        return replace(attempt, source=source, compiled=None, error=failure)
    if linked is not None:
        return replace(attempt, source=linked.source, compiled=linked)
    return replace(_compiled(GroupedPlan(attempt.plan, attempt.groups), source), measurement=attempt.measurement)


def sort_best_first(
    attempts: tuple[CandidateResult, ...], plans: tuple[GroupedPlan, ...] = ()
) -> tuple[CandidateResult, ...]:
    """By measured time, then as the model ranks them, spilling and failed ones last; unbuilt behind built ones."""

    def order(attempt: CandidateResult) -> tuple[bool, bool, bool, float]:
        measurement = attempt.measurement
        seconds = measurement.min_s if measurement else attempt.plan.ranking_seconds
        spilled = measurement is None and spills(attempt) > 0
        return attempt.error is not None, attempt.compiled is None, spilled, seconds

    attempted = {id(a.plan) for a in attempts}
    rest = (
        CandidateResult(one.plan, one.groups, None, None, None, None) for one in plans if id(one.plan) not in attempted
    )
    return tuple(sorted((*attempts, *rest), key=order))
