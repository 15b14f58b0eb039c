"""Choose the kernels and the plan of a model while users call it."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Condition, Thread, current_thread
from typing import Any, Protocol
from weakref import WeakSet

from roller_svc.errors import ArgumentError, IndexRangeError, LaunchError, RollerError, require
from roller_svc.graph.inputs import Sample
from roller_svc.graph.wiring.building import BuildingProcess
from roller_svc.graph.wiring.drift import WatchedModel
from roller_svc.graph.wiring.fusions import FusedGraph, FusionChoices
from roller_svc.graph.wiring.index import ProfileIndex
from roller_svc.graph.wiring.kernels import (
    COMMITTED,
    OUT_OF_RANGE,
    Build,
    KernelChoices,
    OpenIndex,
    Trial,
    TuneOptions,
    Tuning,
    build_here,
    choose_kernels,
    choose_model,
    measure_calls,
    sum_kernels,
)
from roller_svc.graph.wiring.tree import Node, Variable
from roller_svc.graph.wiring.wirer import ExploringEndedError, TimedCall, Wirer
from roller_svc.ir.model_plan import ModelPlan
from roller_svc.runtime.graphs.cpu import CpuCalls, CpuModel, Moment
from roller_svc.runtime.graphs.switchable import BoundModel
from roller_svc.runtime.saved.serialization import KernelBundle

EXPLORING, STOPPED = "exploring", "stopped"
USED, MACHINE_BUSY = "used", "machine-busy"
ROUNDS = 5  # of each choice
CALLS = 16  # of each finalist, in turns
DISTURBED_RATIO = 1.1  # of the first finalist's seconds to its least: such a round is repeated
MAX_REPEATED = 3 * CALLS
FLIPPED = "flipped"  # a model of another graph than the one that it is compared with
NO_GRAPH = "the graph stays the same, or there is no kernel for a node"
LOWEST, APART = "lowest", "apart"  # places of tensors: shared by those that are not needed at once, or not
IDLE_S = 0.1  # without a call, after which calls with random arrays are trials in the background
FORKED = "the process is a fork of the one that explored"
NO_THREAD = "no thread could be started, which explores"
UNEXPECTED = "an error of the package ended exploring: its traceback is on the standard error"
NEVER = 1 << 62  # samples that no value of an index has

DRIFTED = "calls have become slower than those of the trials"
REOPEN_S = 3600.0  # at least, between two times that slower calls let a model explore again

Switch = Callable[[Wirer | WatchedModel | CpuModel], None]  # lets calls run it
Explore = Callable[["OnlineTuning"], Callable[[], None] | None]  # returns what binds a better choice; None: there is none


class MakePlans(Protocol):
    """A way to make the plans of a graph with a kernel for each of its classes, by their kinds."""

    def __call__(self, fused: FusedGraph, kernels: Sequence[KernelBundle], *, share_memory: bool) -> Mapping[str, ModelPlan]: ...


@dataclass(frozen=True, slots=True)
class OnlineSource:
    """A way to make the choices of a model after its first call."""

    options: TuneOptions
    graph: FusedGraph  # in use
    find_fusions: Callable[[Build], FusionChoices]  # with what builds other kernels
    find_choices: Callable[[Build, Sequence[KernelBundle]], KernelChoices]  # with further kernels in the program
    open_index: Callable[[ModelPlan, int], ProfileIndex]  # with the least number of samples
    make_plans: MakePlans
    kind: str  # of the model's plan
    shares_memory: bool  # in the model's plan


@dataclass(frozen=True, slots=True)
class Assignment:
    """A choice of all variables: the graph, a kernel for each of its classes, and their plan of a kind."""

    graph: FusedGraph
    kernels: Sequence[KernelBundle]
    kind: str
    plan: ModelPlan


def explore_online(
    source: OnlineSource, wirer: Wirer, bind: Callable[[Assignment], None], tuning: OnlineTuning
) -> Callable[[], None] | None:
    """Find the best kernels, plan and graph; return what binds them, if they are better than those in use."""
    is_background, before = source.options.is_background, tuning.found
    build = tuning.building.build if is_background else build_here
    fusions = source.find_fusions(build)
    choices = source.find_choices(build, fusions.kernels)
    tuning.found = Tuning(choices.root, removed=choices.removed, state=EXPLORING)
    tuning.timer.begin(source.options.budget_s, choices.sample, IDLE_S if is_background else math.inf)
    variables = source.options.variables
    plans: dict[str, ModelPlan] = {}
    models: dict[str, CpuCalls] = {USED: wirer.model}

    def add_models(made: Mapping[str, ModelPlan]) -> None:
        """Bind plans by their names, if their results are right."""
        for name, plan in made.items():
            model, fault = choices.bind_right(plan)
            if model is None:
                choices.removed.setdefault("plan", {})[name] = fault
            else:
                plans[name], models[name] = plan, model

    def make_plans(chosen: Mapping[str, int]) -> Mapping[str, ModelPlan]:
        return source.make_plans(source.graph, choices.assign(chosen), share_memory=source.shares_memory)

    def bind_kernels(kind: str, chosen: Mapping[str, int]) -> BoundModel | None:
        plan = make_plans(chosen).get(kind)
        return None if plan is None else choices.bind_right(plan)[0]

    def find_finalists(bests: Mapping[str, Mapping[str, int]]) -> dict[str, CpuCalls]:
        if any(any(best.values()) for best in bests.values()) or before.chosen or not choices.choices:
            made = {kind: make_plans(best) for kind, best in bests.items()}
            add_models({kind: plans[kind] for kind, plans in made.items() if kind in plans})
        return dict(models)

    def open_index(samples: int) -> ProfileIndex:
        """Open the index, which knows nothing to a model that explores again."""
        return source.open_index(choices.plan, NEVER if before.chosen else samples)

    found = tuning.found
    kinds = [kind for kind in make_plans({}) if "plan" in variables or kind == source.kind]
    kinds.sort(key=lambda kind: kind != source.kind)  # first the one in use, if the budget does not suffice for all
    best, name = choose_kernels(
        choices, tuning.timer, open_index, found, {kind: partial(bind_kernels, kind) for kind in kinds}, find_finalists,
        budget_trials=source.options.budget_trials, rounds=ROUNDS,
    )  # fmt: skip
    kind = source.kind if name == USED else name
    trees: list[Node | Variable] = [choices.root]
    if len(models) > 1:
        trees.append(Variable("plan", "plan", tuple(models)))
        found.chosen = {**found.chosen, "plan": name}
    is_known = name != USED or not before.chosen  # otherwise an earlier search has bound it
    if "buffers" in variables and source.shares_memory and not found.notes and is_known:
        made = source.make_plans(source.graph, choices.assign(best), share_memory=False)
        if kind in made:
            add_models({APART: made[kind]})
        if APART in models:
            fastest = {name: models[name], APART: models[APART]}
            name = choose_model(fastest, choices.name(best), tuning.timer, open_index, found)
            trees.append(Variable("buffers", "buffers", (LOWEST, APART)))
            found.chosen = {**found.chosen, "buffers": APART if name == APART else LOWEST}
    kernels = choices.assign(best)
    assigned = None if name == USED else Assignment(source.graph, kernels, kind, plans[name])
    if is_known:
        make_plans = partial(source.make_plans, share_memory=source.shares_memory and name != APART)
        compared, better = _choose_graph(source, kernels, kind, models[name], fusions, choices, make_plans, tuning, open_index)
        trees += compared
        assigned = better or assigned
    found.root = Node("prefix", tuple(trees)) if len(trees) > 1 else choices.root
    return None if assigned is None else partial(bind, assigned)


def _choose_graph(
    source: OnlineSource,
    kernels: Sequence[KernelBundle],
    kind: str,
    model: CpuCalls,
    fusions: FusionChoices,
    choices: KernelChoices,
    make_plans: Callable[[FusedGraph, Sequence[KernelBundle]], Mapping[str, ModelPlan]],
    tuning: OnlineTuning,
    open_index: OpenIndex,
) -> tuple[list[Variable], Assignment | None]:
    """Return the boundaries whose sides were compared, and a graph that is faster than the one in use, if any.

    Each boundary is compared with those before it at their best, in whole calls of plans of a kind.
    """
    found, graph = tuning.found, source.graph
    compared: list[Variable] = []
    better: Assignment | None = None
    for variable, boundary in fusions.variables:
        if found.notes or tuning.is_stopped:  # such as machine-busy
            break
        flipped = fusions.flip(graph, boundary, kernels)
        plan = None if flipped is None else make_plans(*flipped).get(kind)
        other, fault = (None, NO_GRAPH) if plan is None else choices.bind_right(plan)
        if flipped is None or plan is None or other is None:
            choices.removed.setdefault(variable.name, {})[variable.choices[1]] = fault
            continue
        digests = [[each.digest for each in bundles] for bundles in (kernels, flipped[1])]
        context = {"plan": kind, "arena_bytes": plan.arena_bytes, variable.key: digests}
        is_flipped = choose_model({USED: model, FLIPPED: other}, context, tuning.timer, open_index, found) == FLIPPED
        compared.append(variable)
        found.chosen = {**found.chosen, variable.name: variable.choices[is_flipped]}
        if is_flipped:
            (graph, kernels), model, better = flipped, other, Assignment(*flipped, kind, plan)
    return compared, better


class OnlineTuning:
    """The trials of a model in users' calls. The methods may be called from any thread.

    A thread prepares what calls measure, and binds the best when all is measured. It begins after the first call.
    """

    def __init__(
        self,
        wirer: Wirer,
        explore: Explore,
        switch: Switch,
        *,
        reopens: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Prepare to begin.

        Args:
            wirer: has the calls.
            explore: finds the best choice, in a thread.
            switch: lets calls run the wirer, or its model once nothing is measured.
            reopens: whether the model explores again once its calls have become slower. Otherwise a note says so.
            clock: returns seconds.
        """
        self.timer = CallTimer(self, wirer)
        self.building = BuildingProcess()
        self.others: list[OnlineTuning] = []  # of other buckets, which are stopped, committed and waited for with this one
        self._switch = switch
        self._wirer = wirer
        self._explore = explore
        self._reopens, self._clock = reopens, clock
        self._reopened_s = -math.inf  # when slower calls have last let the model explore again
        self._reason = ""  # why the model explores again
        self._condition = Condition()
        self._thread: Thread | None = None
        self._is_stopped = False
        self._state = EXPLORING
        self.found = Tuning(Node("parallel", ()), state=EXPLORING)
        wirer.on_first_call = self.start
        _of_this_process.add(self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.state}, trials={self.trials}>"

    @property
    def state(self) -> str:
        """The state: exploring, committed or stopped. It is exploring while any bucket is."""
        return EXPLORING if any(each.state == EXPLORING for each in self.others) else self._state

    @property
    def is_stopped(self) -> bool:
        """Whether nothing is to be bound."""
        return self._is_stopped

    @property
    def tree(self) -> dict[str, Any]:
        """The tree of choices as JSON, with those that were removed."""
        return self.found.tree

    @property
    def trials(self) -> int:
        """How many trials calls have made."""
        return self.found.trials

    @property
    def history(self) -> list[Trial]:
        """The trials."""
        return list(self.found.history)

    @property
    def gain(self) -> float:
        """Seconds of a call before the choice over those after it."""
        return self.found.gain

    @property
    def chosen(self) -> dict[str, str]:
        """Digest of the kernel of each variable that was chosen."""
        return dict(self.found.chosen)

    @property
    def notes(self) -> list[str]:
        """Why exploring ended without a choice, or what disturbed it."""
        return list(self.found.notes)

    def start(self) -> None:
        """Begin, unless it has begun. Where no thread can be started, the model is stopped, and a note says so."""
        with self._condition:
            if self._thread is not None or self._state != EXPLORING:
                return
            self._thread = Thread(target=self._run, name="roller-tuning", daemon=True)
            try:
                self._thread.start()
                return
            except RuntimeError:  # the system has no more threads
                self._thread = None
                self.found.notes += [each for each in (self._reason, NO_THREAD) if each]
                self._state = self.found.state = STOPPED
                self._condition.notify_all()
        self._switch(self._wirer.model)

    def commit(self) -> None:
        """Bind the best choice so far, and return when it is bound."""
        for each in (self, *self.others):
            each.start()
            each._wirer.end()
        self.wait()

    def stop(self) -> None:
        """End exploring. Calls run the model as it was compiled."""
        for each in self.others:
            each.stop()
        with self._condition:
            self._is_stopped = True
            if self._thread is None and self._state == EXPLORING:
                self._state = STOPPED
            self._condition.notify_all()
            building = self.building
        self._wirer.end()
        building.stop()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the model explores no more; return whether it does. Trials online need calls by other threads."""
        end_s = math.inf if timeout is None else time.monotonic() + timeout
        return all(each._wait_alone(end_s) for each in (self, *self.others))

    def _wait_alone(self, end_s: float) -> bool:
        self.start()
        with self._condition:
            left_s = None if end_s == math.inf else max(0.0, end_s - time.monotonic())
            return self._condition.wait_for(lambda: self._state != EXPLORING, left_s)

    def reopen(self) -> None:
        """Explore again, from nothing. After a stop, this waits until what was under way has ended."""
        for each in (self, *self.others):
            each._wait_for_stop()
        if self.state == EXPLORING:
            raise ArgumentError("a model that explores cannot be reopened: expected it committed or stopped")
        for each in (self, *self.others):
            with each._condition:
                if each._state == EXPLORING:
                    continue
                each._begin_again("")
            each._resume()

    def _wait_for_stop(self) -> None:
        with self._condition:
            if self._is_stopped and self._thread is not current_thread():
                self._condition.wait_for(lambda: self._state != EXPLORING or not self._is_stopped)

    def _begin_again(self, reason: str) -> None:
        """Set the state of a model that explores again. The caller has the lock."""
        self._thread, self._is_stopped, self._state, self._reason = None, False, EXPLORING, reason
        self.building = BuildingProcess()

    def _resume(self) -> None:
        """Let calls measure again, unless a stop has come meanwhile."""
        self._wirer.resume()
        if self._is_stopped:
            self._wirer.end()
        self._switch(self._wirer)
        self.start()

    def _note_drift(self) -> None:
        """Explore again because calls have become slower, or note it."""
        now_s = self._clock()
        with self._condition:
            if self._state != COMMITTED or self._is_stopped or now_s - self._reopened_s < REOPEN_S:
                return
            self._reopened_s = now_s
            if not self._reopens:
                self.found.notes += [DRIFTED] if DRIFTED not in self.found.notes else []
                return
            self._begin_again(DRIFTED)
        self._resume()

    def stop_in_fork(self) -> None:
        """Be stopped in a fork, which has no thread that explores. Where none has begun, only locks are renewed."""
        self._condition = Condition()
        self._wirer.renew_in_fork()
        self.building = BuildingProcess()
        if self._thread is not None:
            self._wirer.end()
            self._thread, self._is_stopped, self._state = None, True, STOPPED
            self.found = Tuning(self.found.root, notes=[FORKED], state=STOPPED)

    def _run(self) -> None:
        state, note = STOPPED, UNEXPECTED
        try:
            bind = self._explore(self)
            if not self._is_stopped and (bind is not None or MACHINE_BUSY not in self.found.notes):
                if bind is not None:
                    bind()
                state = COMMITTED
            note = ""
        except IndexRangeError:
            note = OUT_OF_RANGE
        except RollerError as error:
            note = error.message
        except OSError as error:  # such as a full disk
            note = f"cannot build other kernels: {error.strerror}"
        finally:
            self.found.notes += [each for each in (self._reason, note) if each]
            self._wirer.end()
            model, call_s = self._wirer.model, self.found.call_s
            self._switch(WatchedModel(model, call_s, self._note_drift, self._clock) if state == COMMITTED else model)
            with self._condition:
                self._state = self.found.state = state
                self._thread = None
                self._condition.notify_all()


_of_this_process: WeakSet[OnlineTuning] = WeakSet()


def _stop_in_fork() -> None:
    for tuning in list(_of_this_process):
        tuning.stop_in_fork()


os.register_at_fork(after_in_child=_stop_in_fork)


class CallTimer:
    """Calls of users. After an end, or the seconds of the budget, nothing is measured."""

    def __init__(self, tuning: OnlineTuning, wirer: Wirer) -> None:
        self._tuning = tuning
        self._wirer = wirer
        self._end_s = math.inf
        self._patience_s = math.inf
        self._sample: Sample | None = None

    def begin(self, budget_s: float, sample: Sample, patience_s: float = math.inf) -> None:
        """Count the budget from now on.

        The sample is for calls after a commit, and after seconds of patience without a call of a user.
        """
        self._end_s = time.monotonic() + budget_s
        self._sample, self._patience_s = sample, patience_s

    def time_kernels(self, model: CpuCalls) -> list[float] | None:
        """Return the seconds of each kernel in a call; None if the model fails in it."""
        if time.monotonic() > self._end_s:
            return None
        try:
            timed = self._time_call(model, is_profiled=True)
        except ExploringEndedError:
            return None
        if timed.failure:
            self._tuning.found.notes.append(timed.failure)
            return None
        return sum_kernels(model, timed.moments)

    def time_calls(self, models: Sequence[CpuCalls]) -> list[float] | None:
        """Return the least seconds of a call of each model, in rounds in which the first is not disturbed."""
        least = [math.inf] * len(models)
        rounds = repeated = 0
        while rounds < CALLS:
            try:
                timed = [self._time_call(model) for model in models]
            except ExploringEndedError:
                return None if self._tuning.is_stopped or self._sample is None else measure_calls(models, self._sample)
            failure = next((each.failure for each in timed if each.failure), "")
            if failure:
                self._tuning.found.notes.append(failure)
                return None
            if repeated == MAX_REPEATED:
                if DISTURBED_RATIO * min(least) < least[0]:
                    return least  # by more than what disturbs the machine
                self._tuning.found.notes.append(MACHINE_BUSY)
                return None
            disturbed = timed[0].seconds > DISTURBED_RATIO * least[0]
            rounds, repeated = (rounds, repeated + 1) if disturbed else (rounds + 1, repeated)
            least = [min(a, each.seconds) for a, each in zip(least, timed, strict=True)]
        return least

    def _time_call(self, model: CpuCalls, *, is_profiled: bool = False) -> TimedCall:
        """Return the measurement of a user's call, or of one with random arrays if nobody calls."""
        timed = self._wirer.time_call(model, is_profiled=is_profiled, patience_s=self._patience_s)
        if timed is not None:
            return timed
        sample = require(self._sample, "arrays for calls")
        states, start = sample.restore(), time.perf_counter()
        try:
            moments: Sequence[Moment] = ()
            if is_profiled:
                moments = model.profile(sample.inputs, states)
            else:
                model.run(sample.inputs, states)
        except (IndexRangeError, LaunchError) as error:
            return TimedCall(0.0, failure=error.message)
        return TimedCall(time.perf_counter() - start, moments)
