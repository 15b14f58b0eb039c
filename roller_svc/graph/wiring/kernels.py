"""Choose the kernels of a model by their seconds in the model (ASTRA, ASPLOS 2019).

Alone, a kernel finds its inputs and weights in the cache. In a model other kernels run between two of its calls.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from roller_svc.compiler.action import action_digest, estimate_digest
from roller_svc.compiler.artifact import package_candidate
from roller_svc.compiler.autotune import link_alone
from roller_svc.compiler.kernel_cache import KernelCache
from roller_svc.compiler.pipeline import compile_candidates, select_candidate
from roller_svc.errors import IndexRangeError, require
from roller_svc.graph.inputs import Sample, draw_sample
from roller_svc.graph.wiring.explore import Choices, Profiles, explore
from roller_svc.graph.wiring.index import Origin, ProfileIndex
from roller_svc.graph.wiring.tree import Node, Variable
from roller_svc.ir.kernel import KernelSource, Language
from roller_svc.ir.model_plan import KernelStep, ModelPlan
from roller_svc.ir.report import BuildRequest
from roller_svc.runtime.binding import Array
from roller_svc.runtime.graphs.cpu import CpuCalls
from roller_svc.runtime.graphs.switchable import BoundModel, SwitchableModel
from roller_svc.runtime.saved.plan_json import plan_to_json
from roller_svc.runtime.saved.serialization import KernelBundle
from roller_svc.runtime.thread_pool import limit_threads
from roller_svc.toolchain import tool_version

MIN_SHARE = 0.01  # of a call's estimate, below which a class is not explored
MAX_RATIO = 1.5  # of a candidate's seconds alone to those of the fastest
MAX_CHOICES = 4  # of a class
CALLS, CALLS_S = 20, 0.3  # of a trial
ROUNDS, CALLS_OF_ROUND = 8, 5  # in turns, of the kernels chosen alone and of those chosen in the model
TOLERANCE = 1e-2  # of results of other kernels, relative to the greatest
MIN_GAIN = 1.01  # of kernels that replace those chosen alone

MakePlan = Callable[[Sequence[KernelBundle]], ModelPlan]  # a serial one, of a kernel of each class
Open = Callable[[ModelPlan, Sequence[KernelSource]], SwitchableModel]  # links a plan's model with further kernels


@dataclass(frozen=True, slots=True)
class Trial:
    """A choice of every variable, and the seconds of each in a call."""

    choices: Mapping[str, str]
    seconds: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Tuning:
    """The kernels that trials have chosen, and how."""

    tree: Node
    chosen: Mapping[str, str]  # digest of the kernel of each variable
    trials: int  # that were measured now: an index had the others
    gain: float  # seconds of a call by the kernels chosen alone, over those by these
    history: tuple[Trial, ...]


def tune_kernels(
    requests: Sequence[BuildRequest],
    fastest: Sequence[KernelBundle],
    make_plan: MakePlan,
    open_switchable: Open,
    cache: KernelCache,
    budget_trials: int,
) -> tuple[list[KernelBundle], Tuning]:
    """Return a kernel for each class: the fastest in the model, if together they make its calls faster.

    Args:
        requests: of the classes.
        fastest: the fastest kernel of each class, alone.
        make_plan: makes the serial plan of kernels.
        open_switchable: links and loads a program with all kernels, of which plans are bound.
        cache: keeps the other kernels of the classes, and an index of seconds.
        budget_trials: how many choices of all kernels are measured at most, before whole calls of two are.
    """
    if not requests:  # a model of copies
        return [], Tuning(Node("parallel", ()), {}, 0, 1.0, ())
    plan = make_plan(fastest)
    choices = {
        f"kernel:{number}": (number, (fastest[number], *_find_alternatives(requests[number], fastest[number], cache)))
        for number in _explored_classes(plan)
    }
    choices = {name: (number, kernels) for name, (number, kernels) in choices.items() if len(kernels) > 1}
    variables = (
        Variable(name, "kernel", tuple(each.digest for each in kernels), key=action_digest(requests[number]), regions=(number,))
        for name, (number, kernels) in choices.items()
    )
    tree = Node("parallel", tuple(variables))
    sample = draw_sample(plan)
    sources = [kernel.source for kernel in plan.kernels]
    sources += [kernel.compiled.source for _, kernels in choices.values() for kernel in kernels]
    switchable = open_switchable(plan, sources)

    def load(bundles: Sequence[KernelBundle]) -> BoundModel:
        return switchable.bind(make_plan(bundles))

    by_fastest = load(fastest)
    try:
        expected = _run_once(by_fastest, sample)
    except IndexRangeError:  # random indices do not fit: nothing can be measured
        return list(fastest), Tuning(tree, {}, 0, 1.0, ())
    history: list[Trial] = []

    def assign(chosen: Mapping[str, int]) -> list[KernelBundle]:
        assigned = list(fastest)
        for name, choice in chosen.items():
            number, kernels = choices[name]
            assigned[number] = kernels[choice]
        return assigned

    def digests(chosen: Mapping[str, int]) -> dict[str, str]:
        return {name: choices[name][1][choice].digest for name, choice in chosen.items()}

    def measure(chosen: Choices) -> dict[str, float]:
        model = load(assign(chosen))
        if not _agree(_run_once(model, sample), expected):
            return {}
        by_kernel = _measure_kernels(model, sample)
        seconds = {name: by_kernel[choices[name][0]] for name in chosen}
        history.append(Trial(digests(chosen), seconds))
        return seconds

    index = ProfileIndex(cache.folder / "wiring.sqlite", _find_origin(plan, requests[0]))
    with closing(index), limit_threads(require(requests[0].hardware, "spec of a class").num_cores):
        best = explore(tree, measure, budget_trials=budget_trials, index=index)
        tuned, trials, gain = assign(best), best.trials, 1.0
        if tuned != list(fastest):  # whole calls decide: kernels that are the fastest themselves may slow others down
            gain, calls = _find_gain(digests(best), lambda: [by_fastest, load(tuned)], sample, index)
            trials += calls
    if gain < MIN_GAIN:
        return list(fastest), Tuning(tree, digests(dict.fromkeys(choices, 0)), trials, 1.0, tuple(history))
    return tuned, Tuning(tree, digests(best), trials, gain, tuple(history))


def _explored_classes(plan: ModelPlan) -> list[int]:
    """Return the numbers of the classes that take a part of a call, by the performance model."""
    seconds = [kernel.estimate_s * kernel.uses for kernel in plan.kernels]
    return [number for number, value in enumerate(seconds) if value >= MIN_SHARE * sum(seconds)]


def _find_alternatives(request: BuildRequest, fastest: KernelBundle, cache: KernelCache) -> list[KernelBundle]:
    """Return the other kernels of a request that are about as fast as the fastest alone, best first."""
    known = cache.load_alternatives(request)
    if known is None:
        report = select_candidate(compile_candidates(request))
        measured = [result for result in report.results if result.error is None and result.measurement is not None]
        least_s = min((require(each.measurement, "measurement").min_s for each in measured), default=0.0)
        near = [each for each in measured if require(each.measurement, "measurement").min_s <= MAX_RATIO * least_s]
        linked = [link_alone(each, report.program, report.hardware) for each in near[:MAX_CHOICES]]
        known = [package_candidate(each, report) for each in linked if each.error is None]
        cache.save_alternatives(request, known)
    return [each for each in known if each.digest != fastest.digest][: MAX_CHOICES - 1]


def _find_origin(plan: ModelPlan, request: BuildRequest) -> Origin:
    """Return what the seconds of a model's trials depend on: the device, the compiler, the generator and the model."""
    hw = require(request.hardware, "spec of a class")
    content = json.dumps([[kernel.source.key for kernel in plan.kernels], plan_to_json(plan)], sort_keys=True)
    return Origin(
        device=f"{hw.id}, {hw.num_cores} threads",
        driver=tool_version(Language.C, hw.arch),
        generator=estimate_digest(hw, request.winograd),
        bucket=hashlib.sha256(content.encode()).hexdigest(),
    )


def _find_gain(
    chosen: Mapping[str, str], load_both: Callable[[], Sequence[CpuCalls]], sample: Sample, index: Profiles
) -> tuple[float, int]:
    """Return the seconds of a call by the kernels chosen alone over those by others, and how many were measured."""
    text = json.dumps(chosen, sort_keys=True)
    calls = Variable("calls", "kernel", (f"alone, measured with {text}", text))  # equally often, as least seconds fall
    known = [index.look_up(calls, choice, {}) for choice in (0, 1)]
    seconds = [value for value in known if value is not None]
    if len(seconds) == len(known):
        return seconds[0] / seconds[1], 0
    seconds = _measure_calls(load_both(), sample)
    for choice, value in enumerate(seconds):
        index.record(calls, choice, {}, value)
    return seconds[0] / seconds[1], len(seconds)


def _run_once(model: CpuCalls, sample: Sample) -> dict[str, Array]:
    """Return the results of a call, which later calls do not change."""
    results = model.run(sample.inputs, sample.restore())
    return {**results, **{name: array.copy() for name, array in sample.states.items()}}


def _agree(results: Mapping[str, Array], expected: Mapping[str, Array]) -> bool:
    """Return whether results differ by rounding alone: other kernels add in another order."""
    pairs = ((results[name].astype(np.float64), array.astype(np.float64)) for name, array in expected.items())
    return all(
        np.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE * np.max(np.abs(b), initial=0.0, where=np.isfinite(b)), equal_nan=True)
        for a, b in pairs
    )


def _measure_kernels(model: CpuCalls, sample: Sample) -> list[float]:
    """Return the seconds of each kernel in a call: the least sum over its launches."""
    least = [math.inf] * len(model.plan.kernels)
    end = time.perf_counter() + CALLS_S
    for number in range(CALLS):
        if number > 1 and time.perf_counter() > end:
            break
        seconds = [0.0] * len(least)
        for moment in model.profile(sample.inputs, sample.restore()):
            if isinstance(moment.step, KernelStep):
                seconds[moment.step.kernel] += moment.end_s - moment.start_s
        least = [min(a, b) for a, b in zip(least, seconds, strict=True)]
    return least


def _measure_calls(models: Sequence[CpuCalls], sample: Sample) -> list[float]:
    """Return the least seconds of a call of each model, in turns."""
    least = [math.inf] * len(models)
    for _ in range(ROUNDS):
        for number, model in enumerate(models):
            for _ in range(CALLS_OF_ROUND):
                states = sample.restore()
                start = time.perf_counter()
                model.run(sample.inputs, states)
                least[number] = min(least[number], time.perf_counter() - start)
    return least
