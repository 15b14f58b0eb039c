"""Choose the kernels of a model by their seconds in the model (ASTRA, ASPLOS 2019).

Alone, a kernel finds its inputs and weights in the cache. In a model other kernels run between two of its calls.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Protocol

import numpy as np

from roller_svc.compiler.action import action_digest, estimate_digest
from roller_svc.compiler.artifact import package_candidate
from roller_svc.compiler.autotune import link_alone
from roller_svc.compiler.kernel_cache import SERIAL, KernelCache
from roller_svc.compiler.pipeline import compile_candidates, select_candidate
from roller_svc.errors import IndexRangeError, RollerError, require
from roller_svc.graph.inputs import Sample, draw_sample
from roller_svc.graph.wiring.checking import CheckingProcess, SwitchableProgram
from roller_svc.graph.wiring.explore import Choices, Profiles, explore
from roller_svc.graph.wiring.index import FILE, Origin, ProfileIndex
from roller_svc.graph.wiring.tree import Node, Variable, tree_to_json
from roller_svc.ir.kernel import KernelSource, Language
from roller_svc.ir.model_plan import KernelStep, ModelPlan
from roller_svc.ir.options import SelectionMode
from roller_svc.ir.report import BuildRequest
from roller_svc.runtime.binding import Array
from roller_svc.runtime.graphs.cpu import CpuCalls, Moment
from roller_svc.runtime.graphs.switchable import BoundModel, SwitchableModel
from roller_svc.runtime.saved.plan_json import plan_to_json
from roller_svc.runtime.saved.serialization import KernelBundle
from roller_svc.runtime.thread_pool import limit_threads
from roller_svc.toolchain import tool_version

MIN_SHARE = 0.01  # of a call's estimate, below which a class is not explored
LEADING_SHARE = 0.8  # of a call's estimate: the classes that make it are explored in the background
MAX_RATIO = 1.5  # of a candidate's seconds alone to those of the fastest
MAX_CHOICES = 4  # of a class
MAX_BACKGROUND = 3  # candidates of a class that are built in the background
CALLS, CALLS_S = 20, 0.3  # of a trial
ROUNDS, CALLS_OF_ROUND = 8, 5  # in turns, of the kernels chosen alone and of those chosen in the model
TOLERANCE = 1e-2  # of results of other kernels, relative to the greatest
MIN_GAIN = 1.01  # of kernels that replace those chosen alone
HANG_S, HANG_RATIO = 10.0, 1000.0  # a first call that takes longer than the sum, with the ratio to a call in use, hangs
EXACT_SAMPLES = 3  # random inputs for which results must have equal bits
COMMITTED = "committed"
OTHER_WEIGHTS = "it has weights, or loops, that the other plans do not have"
OUT_OF_RANGE = "random inputs are indices out of range: choices cannot be checked"

MakePlan = Callable[[Sequence[KernelBundle]], ModelPlan]  # a serial one, of a kernel of each class
# Yields the fastest kernels of each request, alone. The cache may then have their objects.
Build = Callable[[Sequence[BuildRequest], KernelCache], Iterable[list[KernelBundle]]]
BindKernels = Callable[[Mapping[str, int]], BoundModel | None]  # None: their results are wrong, or there is no such plan
OpenIndex = Callable[[int], ProfileIndex]  # which knows seconds of that number of samples
Open = Callable[[ModelPlan, Sequence[KernelSource]], SwitchableModel]  # links a plan's model with further kernels


# Without "fusion", whose kernels take compilers, and have gained nothing so far: docs/tuning.md#boundaries-of-fusion.
VARIABLES = ("kernel", "plan", "buffers")


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """How kernels are chosen by trials of the whole model on this machine."""

    kind: Literal["now", "online", "background"] = "now"
    budget_trials: int = 64  # at most, before whole calls are compared
    budget_s: float = math.inf  # no trial begins after this
    exact: bool = False  # choose only among kernels whose results have the bits of the fastest kernels'
    share: float = 0.5  # of users' calls that may be trials
    variables: tuple[str, ...] = VARIABLES  # kinds of those that are explored

    @property
    def is_online(self) -> bool:
        """Whether calls go on meanwhile, and are trials; otherwise trials precede all calls."""
        return self.kind != "now"

    @property
    def is_background(self) -> bool:
        """Whether the first calls run the performance model's choice."""
        return self.kind == "background"

    def request_alternatives(self, request: BuildRequest) -> BuildRequest:
        """Return the request of a class's other kernels."""
        top_k = min(request.top_k, MAX_BACKGROUND) if self.is_background else request.top_k
        return replace(request, select=SelectionMode.MEASURE, top_k=top_k)


@dataclass(frozen=True, slots=True)
class Trial:
    """A choice of every variable, and the seconds of each in a call."""

    choices: Mapping[str, str]
    seconds: Mapping[str, float]


@dataclass(slots=True)
class Tuning:
    """The kernels that trials have chosen, and how."""

    root: Node
    chosen: Mapping[str, str] = field(default_factory=dict)  # digest of the kernel of each variable
    trials: int = 0  # that were measured now: an index had the others
    gain: float = 1.0  # seconds of a call by the kernels chosen alone, over those by these
    history: list[Trial] = field(default_factory=list)
    removed: dict[str, dict[str, str]] = field(default_factory=dict)  # by variable: why each of these kernels was removed
    notes: list[str] = field(default_factory=list)
    state: str = COMMITTED
    call_s: float | None = None  # least seconds of a call by what was chosen; None if no calls were compared

    def stop(self) -> None:
        """Do nothing: trials that precede all calls have ended."""

    def wait(self, timeout: float | None = None) -> bool:
        """Return that nothing is explored any more, as `timeout` seconds would not change."""
        return True

    @property
    def tree(self) -> dict[str, Any]:
        """The tree of choices as JSON, with those that were removed."""
        return tree_to_json(self.root) | ({"removed": self.removed} if self.removed else {})

    def to_json(self) -> dict[str, Any]:
        """Return the assignment, and what it is based on, for the report of a model."""
        return {"chosen": dict(self.chosen), "trials": self.trials, "gain": self.gain, "notes": list(self.notes)}

    def to_document(self) -> dict[str, Any]:
        """Return all that is known of the choices, as JSON-compatible values."""
        history = [{"choices": dict(each.choices), "seconds": dict(each.seconds)} for each in self.history]
        return {"tree": self.tree, **self.to_json(), "history": history}


class Timer(Protocol):
    """A way to measure models. It returns None where a model has failed, or the machine was too busy."""

    def time_kernels(self, model: CpuCalls) -> list[float] | None: ...
    def time_calls(self, models: Sequence[CpuCalls]) -> list[float] | None: ...


class KernelChoices:
    """The kernels of each class that takes a part of a call, as plans of one switchable program."""

    def __init__(
        self,
        requests: Sequence[BuildRequest],
        fastest: Sequence[KernelBundle],
        make_plan: MakePlan,
        open_switchable: Open,
        find_alternatives: Callable[[ModelPlan], Mapping[int, Sequence[KernelBundle]]],
        *,
        others: Sequence[KernelSource] = (),
        exact: bool = False,
    ) -> None:
        """Link all kernels.

        Args:
            requests: of the classes.
            fastest: the kernel of each class in the model as it was compiled.
            make_plan: makes the serial plan of kernels.
            open_switchable: links and loads a program with all kernels, of which plans are bound.
            find_alternatives: returns the other kernels of the classes that are explored in a plan, by their numbers.
            others: kernels of classes of other graphs that compute the same.
            exact: whether results of other kernels must have the same bits.

        Raises:
            IndexRangeError: random inputs are indices out of range.
        """
        self._fastest = list(fastest)
        self._make_plan = make_plan
        self._exact = exact
        self.plan = make_plan(fastest)
        self.choices = {
            f"kernel:{number}": (number, (fastest[number], *others))
            for number, others in find_alternatives(self.plan).items()
            if others
        }
        self.root = Node(
            "parallel",
            tuple(
                Variable(name, "kernel", tuple(each.digest for each in kernels), 0, action_digest(requests[number]), (number,))
                for name, (number, kernels) in self.choices.items()
            ),
        )
        sources = [kernel.source for kernel in self.plan.kernels]
        sources += [kernel.compiled.source for _, kernels in self.choices.values() for kernel in kernels]
        sources += others
        self._switchable = open_switchable(self.plan, sources)
        self.by_fastest = self.bind(self.plan)
        self._samples = [draw_sample(self.plan, seed) for seed in range(EXACT_SAMPLES if exact else 1)]
        start_s = time.perf_counter()
        self._expected = [_run_once(self.by_fastest, sample) for sample in self._samples]
        self._limit_s = HANG_S + HANG_RATIO * (time.perf_counter() - start_s)
        self._checking = CheckingProcess(SwitchableProgram.of(self._switchable, self.plan, sources), len(self._samples))
        self._checked: dict[tuple[str, int], bool] = {}
        self.removed: dict[str, dict[str, str]] = {}

    @property
    def sample(self) -> Sample:
        """Arrays for calls."""
        return self._samples[0]

    def assign(self, chosen: Mapping[str, int]) -> list[KernelBundle]:
        """Return the kernels of all classes."""
        assigned = list(self._fastest)
        for name, choice in chosen.items():
            number, kernels = self.choices[name]
            assigned[number] = kernels[choice]
        return assigned

    def name(self, chosen: Mapping[str, int]) -> dict[str, str]:
        """Return the digest of the kernel of each variable."""
        return {name: self.choices[name][1][choice].digest for name, choice in chosen.items()}

    def bind(self, plan: ModelPlan) -> BoundModel:
        """Return a plan of some of the kernels as a model."""
        return self._switchable.bind(plan)

    def make_plan(self, chosen: Mapping[str, int]) -> ModelPlan:
        """Return the serial plan of kernels."""
        return self._make_plan(self.assign(chosen))

    def is_right(self, name: str, choice: int) -> bool:
        """Return whether the results of a choice with the fastest other kernels are right; it is checked once."""
        if choice == 0:
            return True
        if (name, choice) not in self._checked:
            reason = self.bind_right(self.make_plan({name: choice}))[1]
            self._checked[name, choice] = not reason
            if reason:
                self.removed.setdefault(name, {})[self.choices[name][1][choice].digest] = reason
        return self._checked[name, choice]

    def bind_right(self, plan: ModelPlan) -> tuple[BoundModel | None, str]:
        """Return a plan as a model, and ""; or None, and why it may not answer calls.

        Its kernels are called in another process first (ADR 0101).
        """
        if not self._switchable.can_bind(plan):
            return None, OTHER_WEIGHTS
        fault = self._checking.find_fault(plan, self._limit_s)
        if fault:
            return None, fault
        model = self.bind(plan)
        fault = self._find_difference(model)
        return (None if fault else model), fault

    def _find_difference(self, model: BoundModel) -> str:
        """Return how results differ from those of the model in use; "" if they do not."""
        for sample, expected in zip(self._samples, self._expected, strict=True):
            try:
                results = _run_once(model, sample)
            except RollerError as error:
                return error.message
            if self._exact and any(results[name].tobytes() != array.tobytes() for name, array in expected.items()):
                return "results have other bits"
            if not _agree(results, expected):
                return "results are wrong"
        return ""


def choose_kernels(
    choices: KernelChoices,
    timer: Timer,
    open_index: OpenIndex,
    tuning: Tuning,
    binders: Mapping[str, BindKernels],
    find_finalists: Callable[[Mapping[str, Mapping[str, int]]], Mapping[str, CpuCalls]],
    *,
    budget_trials: int,
    rounds: int = 1,
) -> tuple[Mapping[str, int], str]:
    """Return the choice of each variable, and which finalist has it. `tuning` gets what the search finds.

    Kernels are explored in each kind of plan: those that are the fastest on all threads are not on one.

    Args:
        choices: the kernels.
        timer: measures models.
        open_index: opens the index of seconds, which knows those of a least number of samples.
        tuning: of these choices.
        binders: bind kernels in a plan of each kind.
        find_finalists: returns models by name, whose calls are compared: first the one that is used now, then those of
            the best kernels of kinds of plans, by these. Without others nothing is compared.
        budget_trials: how many choices of all kernels are measured at most.
        rounds: how often each is.
    """
    bests: dict[str, Mapping[str, int]] = {}
    with closing(open_index(rounds)) as index:
        for kind, bind_kernels in binders.items():
            measure = partial(_measure_choice, choices, timer, tuning, kind, bind_kernels, {})
            best = explore(choices.root, measure, budget_trials=budget_trials, index=_InPlan(index, kind), rounds=rounds)
            bests[kind] = best
            budget_trials -= best.trials
            if budget_trials < 1:
                break
    finalists = find_finalists(bests)
    fastest = choose_model(finalists, {kind: choices.name(each) for kind, each in bests.items()}, timer, open_index, tuning)
    chosen = bests.get(fastest, dict.fromkeys(choices.choices, 0))
    tuning.chosen = choices.name(chosen)
    return chosen, fastest


def _measure_choice(
    choices: KernelChoices,
    timer: Timer,
    tuning: Tuning,
    kind: str,
    bind_kernels: BindKernels,
    bound: dict[tuple[int, ...], BoundModel | None],
    chosen: Choices,
) -> dict[str, float]:
    """Return the seconds of kernels in a plan. `bound` keeps plans, whose packed weights later rounds use."""
    right = {name: choice if choices.is_right(name, choice) else 0 for name, choice in chosen.items()}
    if all(right[name] != choice for name, choice in chosen.items()):
        return {}
    key = tuple(right.values())
    if key not in bound:
        bound[key] = bind_kernels(right)
    model = bound[key]
    by_kernel = None if model is None else timer.time_kernels(model)
    if by_kernel is None:
        return {}
    tuning.trials += 1
    seconds = {name: by_kernel[choices.choices[name][0]] for name, choice in chosen.items() if right[name] == choice}
    tuning.history.append(Trial({**choices.name(right), "plan": kind}, seconds))
    return seconds


@dataclass(frozen=True, slots=True)
class _InPlan:
    """An index of seconds in a kind of plans."""

    index: Profiles
    kind: str

    def look_up(self, variable: Variable, choice: int, context: Mapping[str, str]) -> float | None:
        return self.index.look_up(variable, choice, {**context, "plan": self.kind})

    def record(self, variable: Variable, choice: int, context: Mapping[str, str], seconds: float) -> None:
        self.index.record(variable, choice, {**context, "plan": self.kind}, seconds)


def choose_model(
    models: Mapping[str, CpuCalls], chosen: Mapping[str, object], timer: Timer, open_index: OpenIndex, tuning: Tuning
) -> str:
    """Return the name of the model whose calls are the fastest: the first one, if no other is faster by a margin.

    `chosen` are the kernels of the others.
    """
    used = next(iter(models))
    if len(models) == 1:
        return used
    with closing(open_index(1)) as index:
        seconds, measured = _time_models(models, timer, index, chosen)
    tuning.trials += measured
    if seconds is None:
        return used
    fastest = min(models, key=lambda name: seconds[name])
    if seconds[used] < MIN_GAIN * seconds[fastest]:
        tuning.call_s = seconds[used]
        return used
    tuning.call_s = seconds[fastest]
    tuning.gain *= seconds[used] / seconds[fastest]
    return fastest


def tune_kernels(
    find_choices: Callable[[], KernelChoices], cache: KernelCache, options: TuneOptions, requests: Sequence[BuildRequest]
) -> tuple[list[KernelBundle] | None, Tuning]:
    """Return a kernel for each class: the fastest in the model, if together they make its calls faster; or None.

    Args:
        find_choices: makes the kernels of the classes.
        cache: has the index of seconds.
        options: bounds the trials.
        requests: of the classes.
    """
    if not requests:  # a model of copies
        return None, Tuning(Node("parallel", ()))
    with limit_threads(require(requests[0].hardware, "spec of a class").num_cores):
        try:
            choices = find_choices()
        except IndexRangeError:
            return None, Tuning(Node("parallel", ()), notes=[OUT_OF_RANGE])
        tuning = Tuning(choices.root, removed=choices.removed)

        def find_finalists(bests: Mapping[str, Mapping[str, int]]) -> dict[str, CpuCalls]:
            """Whole calls decide: kernels that are the fastest themselves may slow others down."""
            models: dict[str, CpuCalls] = {"alone": choices.by_fastest}
            best = bests[SERIAL]
            tuned = choices.bind_right(choices.make_plan(best))[0] if any(best.values()) else None
            return models if tuned is None else models | {SERIAL: tuned}

        timer = _SampleTimer(choices.sample, time.perf_counter() + options.budget_s)
        opened = partial(open_index, choices.plan, cache, requests[0], options)
        binders: dict[str, BindKernels] = {SERIAL: lambda chosen: choices.bind(choices.make_plan(chosen))}
        best, _ = choose_kernels(choices, timer, opened, tuning, binders, find_finalists, budget_trials=options.budget_trials)
    return choices.assign(best), tuning


@dataclass(frozen=True, slots=True)
class _SampleTimer:
    """Calls with random arrays."""

    sample: Sample
    end_s: float

    def time_kernels(self, model: CpuCalls) -> list[float] | None:
        return None if time.perf_counter() > self.end_s else _measure_kernels(model, self.sample)

    def time_calls(self, models: Sequence[CpuCalls]) -> list[float] | None:
        return measure_calls(models, self.sample)


def find_alternatives(
    plan: ModelPlan,
    requests: Sequence[BuildRequest],
    fastest: Sequence[KernelBundle],
    cache: KernelCache,
    options: TuneOptions,
    build: Build,
) -> dict[int, list[KernelBundle]]:
    """Return the other kernels of the classes that are explored, best first. Those that the cache lacks are built."""
    if "kernel" not in options.variables:
        return {}
    numbers = _leading_classes(plan) if options.is_background else _explored_classes(plan)
    found = load_or_build([requests[number] for number in numbers], cache, options, build)
    return {
        number: [each for each in kernels if each.compiled.source.key != fastest[number].compiled.source.key][: MAX_CHOICES - 1]
        for number, kernels in zip(numbers, found, strict=True)
    }


def load_or_build(
    requests: Sequence[BuildRequest], cache: KernelCache, options: TuneOptions, build: Build
) -> list[Sequence[KernelBundle]]:
    """Return the fastest kernels of each request alone, best first. Those that the cache lacks are built."""
    wanted = [options.request_alternatives(request) for request in requests]
    found = [cache.load_alternatives(request) for request in wanted]
    missing = [number for number, kernels in enumerate(found) if kernels is None]
    if missing:
        for number, kernels in zip(missing, build([wanted[number] for number in missing], cache), strict=True):
            found[number] = kernels
            cache.save_alternatives(wanted[number], kernels)
    return [kernels or () for kernels in found]


def _estimates(plan: ModelPlan) -> list[float]:
    """Return the seconds of each class in a call, by the performance model."""
    return [kernel.estimate_s * kernel.uses for kernel in plan.kernels]


def _explored_classes(plan: ModelPlan) -> list[int]:
    """Return the numbers of the classes that take a part of a call."""
    seconds = _estimates(plan)
    return [number for number, value in enumerate(seconds) if value >= MIN_SHARE * sum(seconds)]


def _leading_classes(plan: ModelPlan) -> list[int]:
    """Return the numbers of the fewest classes that take most of a call, the longest first."""
    seconds = _estimates(plan)
    longest = sorted(range(len(seconds)), key=lambda number: -seconds[number])
    before = [0.0, *itertools.accumulate(seconds[number] for number in longest)]
    return [number for number, done in zip(longest, before, strict=False) if done < LEADING_SHARE * sum(seconds)]


def build_here(requests: Sequence[BuildRequest], _: KernelCache) -> Iterable[list[KernelBundle]]:
    """Build the fastest kernels of each request in this process, without their objects."""
    return map(build_alternatives, requests)


def build_alternatives(request: BuildRequest) -> list[KernelBundle]:
    """Return the kernels of a request that are about as fast as the fastest alone, best first."""
    report = select_candidate(compile_candidates(request))
    measured = [result for result in report.results if result.error is None and result.measurement is not None]
    least_s = min((require(each.measurement, "measurement").min_s for each in measured), default=0.0)
    near = [each for each in measured if require(each.measurement, "measurement").min_s <= MAX_RATIO * least_s]
    linked = [link_alone(each, report.program, report.hardware) for each in near[:MAX_CHOICES]]
    return [package_candidate(each, report) for each in linked if each.error is None]


def open_index(plan: ModelPlan, cache: KernelCache, request: BuildRequest, options: TuneOptions, min_samples: int) -> ProfileIndex:
    """Return the index of seconds of a model's trials: by the device, the compiler, the generator and the model."""
    hw = require(request.hardware, "spec of a class")
    keys = [kernel.source.key for kernel in plan.kernels]
    content = json.dumps([keys, plan_to_json(plan), options.is_online, options.exact], sort_keys=True)
    origin = Origin(
        device=f"{hw.id}, {hw.num_cores} threads",
        driver=tool_version(Language.C, hw.arch),
        generator=estimate_digest(hw, request.winograd),
        bucket=hashlib.sha256(content.encode()).hexdigest(),
    )
    return ProfileIndex(cache.folder / FILE, origin, min_samples=min_samples)


def _time_models(
    models: Mapping[str, CpuCalls], timer: Timer, index: Profiles, chosen: Mapping[str, object]
) -> tuple[dict[str, float] | None, int]:
    """Return the seconds of a call of each model, and how many models were measured."""
    text = json.dumps([list(models), chosen], sort_keys=True)  # what is measured together: least seconds fall
    calls = Variable("calls", "plan", tuple(f"{name} of {text}" for name in models))
    known = [index.look_up(calls, choice, {}) for choice in range(len(models))]
    seconds = [value for value in known if value is not None]
    if len(seconds) == len(known):
        return dict(zip(models, seconds, strict=True)), 0
    measured = timer.time_calls(list(models.values()))
    if measured is None:
        return None, 0
    for choice, value in enumerate(measured):
        index.record(calls, choice, {}, value)
    return dict(zip(models, measured, strict=True)), len(measured)


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
        seconds = sum_kernels(model, model.profile(sample.inputs, sample.restore()))
        least = [min(a, b) for a, b in zip(least, seconds, strict=True)]
    return least


def sum_kernels(model: CpuCalls, moments: Sequence[Moment]) -> list[float]:
    """Return the seconds of each kernel in a call."""
    seconds = [0.0] * len(model.plan.kernels)
    for moment in moments:
        if isinstance(moment.step, KernelStep):
            seconds[moment.step.kernel] += moment.end_s - moment.start_s
    return seconds


def measure_calls(models: Sequence[CpuCalls], sample: Sample) -> list[float]:
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
