"""The most efficient candidate of a request: the one that takes least time on one worker (RAMMER, OSDI 2020, §3.3).

The fastest candidate divides its work among all workers. Where these have other kernels to run, fewer and larger tasks
may take less time in all.
"""

from __future__ import annotations

from collections.abc import Sequence

from roller_svc.compiler.autotune import DISTINCT_VALUES, build_alone, link_alone
from roller_svc.compiler.backends import Backend
from roller_svc.compiler.pipeline import RANKED_FOR_MODELS, CompiledCandidates
from roller_svc.compiler.plans import merge_ranked_plans
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.kernel import Role
from roller_svc.ir.program import TensorProgram
from roller_svc.ir.report import BuildReport, CandidateResult, GroupedPlan, Plan
from roller_svc.runtime.measure import measure
from roller_svc.runtime.thread_pool import limit_threads
from roller_svc.semantics.inputs import random_inputs

# Times of the fastest candidate on one worker over those of the most efficient one: by measurement, whose noise is
# about 2 %, and by the model, which is less certain of small kernels.
MEASURED_RATIO, MODELLED_RATIO = 1.05, 1.1
MAX_MEASURED = 3  # that the model expects to take least time on one worker
ROUNDS, ROUND_S = 3, 5e-3  # for each candidate


def find_efficient(compiled: CompiledCandidates, report: BuildReport) -> CandidateResult | None:
    """Return the most efficient candidate of a CPU, built; None if no other one is better than the fastest by a margin.

    It has fewer tasks than the fastest, in one parallel region. Neither has a workspace: a node may then use either,
    and its weights are not needed both packed and as they are.
    """
    fastest, hw = report.winner, report.hardware
    if hw.num_cores == 1 or _region_tasks(fastest) is None:
        return None
    if compiled.backend is not None:
        return _measured(fastest, report.results, report.program, hw, compiled.backend)
    count = max(compiled.request.top_k, RANKED_FOR_MODELS) if compiled.request.top_k > 1 else 1
    return _modelled(fastest, merge_ranked_plans(compiled.partitions, count), report.program, hw)


def _measured(
    fastest: CandidateResult,
    results: Sequence[CandidateResult],
    program: TensorProgram,
    hw: HardwareSpec,
    backend: Backend,
) -> CandidateResult | None:
    others = [result for result in results if result.measurement is not None and _may_replace(result, fastest)]
    if not others:
        return None
    candidates = (fastest, *sorted(others, key=lambda result: _alone_s(result.plan, hw))[:MAX_MEASURED])
    arrays = backend.to_device(random_inputs(program, seed=0, distinct=DISTINCT_VALUES))
    calls = [backend.load(each.compiled).bind(arrays) for each in candidates if each.compiled is not None]
    times = [float("inf")] * len(calls)
    with limit_threads(1):
        for _ in range(ROUNDS):
            for i, call in enumerate(calls):
                times[i] = min(times[i], measure(call, ROUND_S).min_s)
    best = min(range(len(calls)), key=lambda i: times[i])
    return link_alone(candidates[best], program, hw) if times[0] > MEASURED_RATIO * times[best] else None


def _modelled(
    fastest: CandidateResult, plans: Sequence[GroupedPlan], program: TensorProgram, hw: HardwareSpec
) -> CandidateResult | None:
    tasks = _num_tasks(fastest.plan)
    others = [each for each in plans if len(each.plan.choices) == 1 and _num_tasks(each.plan) < tasks]
    best = min(others, key=lambda each: _alone_s(each.plan, hw), default=None)
    if best is None or _alone_s(fastest.plan, hw) <= MODELLED_RATIO * _alone_s(best.plan, hw):
        return None
    built = build_alone(best, program, hw, for_model=True)
    return built if built.compiled is not None and _may_replace(built, fastest) else None


def _may_replace(result: CandidateResult, fastest: CandidateResult) -> bool:
    tasks, most = _region_tasks(result), _region_tasks(fastest)
    return result.error is None and tasks is not None and most is not None and tasks < most


def _region_tasks(result: CandidateResult) -> int | None:
    """Return the tasks of a call that is one parallel region without workspace; None if it is more than that."""
    source = result.source
    if source is None or source.buffers_of(Role.WORKSPACE) or len(source.launches) > 1 or len(source.num_tasks[0]) > 1:
        return None
    if source.num_tasks[0]:
        return source.num_tasks[0][0]
    return 1 if _num_tasks(result.plan) == 1 else None


def _num_tasks(plan: Plan) -> int:
    return max(choice.program.grid for choice in plan.choices)


def _alone_s(plan: Plan, hw: HardwareSpec) -> float:
    """Return the model's seconds on one worker, without the costs of launches."""
    seconds = 0.0
    for choice in plan.choices:
        if choice.runs_once:
            continue
        launch_s = sum(stage.seconds for stage in choice.estimate.stages if stage.name == "launch")
        seconds += (choice.estimate.seconds - launch_s) * min(hw.num_cores, choice.program.grid)
    return seconds
