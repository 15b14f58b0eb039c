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
from roller_svc.ir.report import Attempt, GroupedPlan, Plan
from roller_svc.ir.rprogram import RTile
from roller_svc.reference.inputs import random_inputs
from roller_svc.runtime.measure import measure
from roller_svc.toolchain import availability, compile_source, compile_together, link_alone

# Every candidate is looked at; the few that lie within a noisy look's error of the best are then measured in turns.
LOOK_S = 0.03
# A first call that takes so many times the best time is not looked at again; of calls that take longer than a look,
# which what is not yet in caches slows down little, so many. The first of a text with several plans is forgiven the
# time in which its memory came: all threads' rooms are cleared then. 80 MB took 62 ms beside 36 ms of work, by which
# the first plan had won before the others were looked at.
FAR, FAR_WHEN_LONG, CLEARING_S = 1.5, 1.2, 0.1
FINALISTS = 4
CLOSE = 1.1
ROUNDS = 5
ROUND_S = 0.02
ROUNDS_S = 0.2  # no other round begins once the finalists have had so long: calls of many milliseconds need fewer
# Of a large array so many random values, repeated: a prime, so that no two rows of a tensor are alike. Drawing takes
# five times as long as reading them from memory would.
DISTINCT_VALUES = 1_048_573
# Of what a plan with register tiles of its own costs to compile: a plan that shares them with one before it.
SHARING = 0.3
# Of the compiler's time for a text: that of printing it, which texts take one after the other.
PRINTING = 0.2


def built(one: GroupedPlan, program: TensorProgram, hw: HardwareSpec) -> Attempt:
    """One plan by itself; where nothing compiles for the device here, its text alone."""
    source = generate(one.plan, program, one.groups, hw)
    found = availability(hw)
    if not found.ok:
        unknown = tuple(Resources() for _ in source.launches)
        compiled = CompiledKernel(source, b"", f"not compiled: {found.reason}", unknown)
        return Attempt(one.plan, one.groups, source, compiled, None, None)
    return _compiled(one, source)


def first_built(plans: tuple[GroupedPlan, ...], program: TensorProgram, hw: HardwareSpec) -> tuple[Attempt, ...]:
    """The first plan that builds without spilling registers, and the ones before it that did not."""
    attempts: list[Attempt] = []
    for one in plans:
        attempts.append(built(one, program, hw))
        if attempts[-1].error is None and not spills(attempts[-1]):
            break
    return tuple(attempts)


def built_for_trial(plans: tuple[GroupedPlan, ...], program: TensorProgram, hw: HardwareSpec) -> tuple[Attempt, ...]:
    """All plans, on all cores; compilers are processes, so that threads suffice to keep the cores busy.

    Kernels of one C text share their micro-kernels and the compiler's start: the tenth costs little more than none.
    """
    cores = len(os.sched_getaffinity(0))
    printing = Lock()
    lots = _lots(plans, cores) if hw.family is Family.CPU else [(one,) for one in plans]

    def build(lot: tuple[GroupedPlan, ...]) -> tuple[Attempt, ...]:
        with printing:  # one thread of Python runs at a time: the first text shall not wait for the last
            sources = generate_together(tuple(one.plan for one in lot), program, lot[0].groups, hw)
        return _built_from_one_text(lot, sources) or tuple(built(one, program, hw) for one in lot)

    with ThreadPoolExecutor(max_workers=cores) as pool:
        found = {id(attempt.plan): attempt for attempts in pool.map(build, lots) for attempt in attempts}
    return tuple(found[id(one.plan)] for one in plans)


def _lots(plans: tuple[GroupedPlan, ...], most: int) -> list[tuple[GroupedPlan, ...]]:
    """Plans that share a text: of one grouping, whose kernels it is that they have in common."""
    grouped: dict[int, list[GroupedPlan]] = {}
    for one in plans:
        grouped.setdefault(id(one.groups), []).append(one)
    return [
        tuple(GroupedPlan(plan, alike[0].groups) for plan in lot)
        for alike in grouped.values()
        for lot in texts_of(tuple(one.plan for one in alike), most)
    ]


def texts_of(plans: tuple[Plan, ...], most: int) -> tuple[tuple[Plan, ...], ...]:
    """The plans in at most so many lots, those that share register tiles side by side. Lots are printed in turn, and
    compiled side by side: earlier ones are larger, so that all end at about the same time."""
    alike: dict[tuple[RTile, ...], list[Plan]] = {}
    for plan in plans:
        alike.setdefault(tuple(choice.program.thread for choice in plan.choices), []).append(plan)
    costs = [(plan, SHARING if i else 1.0) for same in alike.values() for i, plan in enumerate(same)]
    total = sum(cost for _, cost in costs)
    weights = [(1 + PRINTING) ** -i for i in range(most)]
    ends = [total * end / sum(weights) for end in accumulate(weights)]
    lots: list[list[Plan]] = [[] for _ in range(most)]
    done = 0.0
    for plan, cost in costs:
        lots[min(most - 1, bisect(ends, done + cost / 2))].append(plan)
        done += cost
    return tuple(tuple(lot) for lot in lots if lot)


def _built_from_one_text(plans: tuple[GroupedPlan, ...], sources: tuple[KernelSource, ...]) -> tuple[Attempt, ...]:
    """The plans from one run of the compiler; none where that fails, so that one cannot spoil all."""
    if len(plans) == 1:
        return (_compiled(plans[0], sources[0]),)
    try:
        first = compile_together(sources[0])
    except BuildError:
        return ()
    return tuple(
        Attempt(one.plan, one.groups, source, replace(first, source=source), None, None)
        for one, source in zip(plans, sources, strict=True)
    )


def _compiled(one: GroupedPlan, source: KernelSource) -> Attempt:
    try:
        return Attempt(one.plan, one.groups, source, compile_source(source), None, None)
    except BuildError as failure:
        return Attempt(one.plan, one.groups, source, None, None, failure)


def spills(attempt: Attempt) -> int:
    """Bytes of registers that its launches keep in memory: a reason to prefer the next plan."""
    return sum(r.spill_bytes for r in attempt.compiled.resources) if attempt.compiled else 0


def measured(attempts: tuple[Attempt, ...], program: TensorProgram, backend: Backend) -> tuple[Attempt, ...]:
    """Every plan that built, timed on the same random inputs and the same memory for results.

    The best time so far cuts the slower ones short. The finalists take turns: what disturbs the machine for a while
    then disturbs all of them.
    """
    arrays = backend.place(random_inputs(program, seed=0, distinct=DISTINCT_VALUES))
    results = None
    calls: dict[int, Call] = {}
    texts = set[bytes]()
    times: dict[int, Measurement] = {}
    failures: dict[int, BuildError] = {}
    for i, attempt in enumerate(attempts):
        if attempt.compiled is None:
            continue
        best_s = min((t.min_s for t in times.values()), default=None)
        try:
            call = backend.load(attempt.compiled).bound(arrays, results)
            times[i] = _look(call, best_s, 0.0 if attempt.compiled.binary in texts else CLEARING_S)
            results = call.finish() if results is None else results
        except BuildError as failure:
            failures[i] = failure
            times.pop(i, None)  # of one whose results failed when it had been timed
            continue
        calls[i] = call
        texts.add(attempt.compiled.binary)
        close_s = CLOSE * min(t.min_s for t in times.values())
        calls = {j: kept for j, kept in calls.items() if times[j].min_s <= close_s}  # lets go of the others' memory
    _take_turns(_finalists(times), calls, times)
    return tuple(
        replace(attempt, measurement=times.get(i), error=attempt.error or failures.get(i))
        for i, attempt in enumerate(attempts)
    )


def _look(call: Call, best_s: float | None, forgiven_s: float) -> Measurement:
    """A few samples after a first call, which is cold: it is the measurement only where it is far from the best."""
    cold = measure(call, 0.0)
    if best_s is not None and cold.min_s > (FAR if best_s < LOOK_S else FAR_WHEN_LONG) * best_s + forgiven_s:
        return cold
    return measure(call, max(0.0, LOOK_S - cold.min_s), best_s=best_s)


def _finalists(times: dict[int, Measurement]) -> list[int]:
    """The few candidates whose first look does not tell them apart; none where there is but one."""
    ordered = sorted(times, key=lambda i: times[i].min_s)[:FINALISTS]
    close = [i for i in ordered if times[i].min_s <= CLOSE * times[ordered[0]].min_s]
    return close if len(close) > 1 else []


def _take_turns(finalists: list[int], calls: dict[int, Call], times: dict[int, Measurement]) -> None:
    """Measures each in every round and joins that to its times."""
    start = time.perf_counter()
    for _ in range(ROUNDS):
        for i in finalists:
            times[i] = _joined(times[i], measure(calls[i], ROUND_S))
        if time.perf_counter() - start > ROUNDS_S:
            break


def _joined(a: Measurement, b: Measurement) -> Measurement:
    """Two measurements of one kernel: the lesser minimum, the lesser median."""
    return replace(a, median_s=min(a.median_s, b.median_s), min_s=min(a.min_s, b.min_s), samples=a.samples + b.samples)


def settled(attempts: tuple[Attempt, ...], program: TensorProgram, hw: HardwareSpec) -> tuple[Attempt, ...]:
    """Best first, the winner with a text and a binary of its own."""
    alone: set[int] = set()
    while True:
        best, *others = best_first(attempts)
        if best.error is not None or best.source is None or id(best.plan) in alone:
            return (best, *others)
        best = _alone(best, generate(best.plan, program, best.groups, hw))
        alone.add(id(best.plan))
        attempts = (best, *others)


def _alone(attempt: Attempt, source: KernelSource) -> Attempt:
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


def best_first(attempts: tuple[Attempt, ...], plans: tuple[GroupedPlan, ...] = ()) -> tuple[Attempt, ...]:
    """By measured time, then as the model ranks them, spilling and failed ones last; unbuilt behind built ones."""

    def order(attempt: Attempt) -> tuple[bool, bool, bool, float]:
        timed = attempt.measurement
        seconds = timed.min_s if timed else attempt.plan.ranked_s
        spilled = timed is None and spills(attempt) > 0
        return attempt.error is not None, attempt.compiled is None, spilled, seconds

    tried = {id(a.plan) for a in attempts}
    rest = (Attempt(one.plan, one.groups, None, None, None, None) for one in plans if id(one.plan) not in tried)
    return tuple(sorted((*attempts, *rest), key=order))
