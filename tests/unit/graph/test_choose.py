"""The choice of a plan by measured times, on machines that other work disturbs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from roller_svc.compiler.kernel_cache import KernelCache, PlanChoice
from roller_svc.graph import choose
from roller_svc.graph.inputs import Sample
from roller_svc.graph.plan import Launch, PlannedStep
from roller_svc.graph.rammer.schedules import StepTimes
from roller_svc.graph.wiring import kernels
from roller_svc.ir.model_plan import VDeviceStep

MS = 1e-3
TIMES = StepTimes((10 * MS, 1 * MS), (5 * MS, 1 * MS), is_measured=True)
ALONE_S = 11.5 * MS  # a call on one worker: half a millisecond beside the steps
QUIET_S = 6.5 * MS
NOTHING = Sample({}, {}, {})


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


class TimedModel:
    """A model whose calls take what a function of the number of the call returns."""

    def __init__(self, clock: Clock, seconds: Callable[[int], float]) -> None:
        self.clock, self.seconds, self.calls = clock, seconds, 0

    def run(self, _: Mapping[str, object], __: Mapping[str, object]) -> None:
        self.clock.now_s += self.seconds(self.calls)
        self.calls += 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(choose, "time", clock)
    return clock


def test_a_quiet_call_has_the_least_time_of_each_step(clock: Clock) -> None:
    model: Any = TimedModel(clock, lambda call: ALONE_S if call % 3 == 2 else 14 * MS)
    assert choose._least_serial_s(model, NOTHING, TIMES) == pytest.approx(QUIET_S)


def test_a_disturbed_machine_gets_more_rounds(clock: Clock) -> None:
    quiet = TimedModel(clock, lambda _: QUIET_S)
    later = TimedModel(clock, lambda _: 12 * MS if clock.now_s < 1 else QUIET_S)
    never = TimedModel(clock, lambda _: 12 * MS)
    calls = {}
    for name, model in {"quiet": quiet, "later": later, "never": never}.items():
        clock.now_s = 0.0
        measured: Any = {choose.SERIAL: model}
        least = choose._measure_models(measured, NOTHING, 2, QUIET_S)[choose.SERIAL]
        assert least == pytest.approx(12 * MS if model is never else QUIET_S)
        calls[name] = model.calls * least
    round_s = calls["never"] / choose.MAX_ROUNDS
    assert calls["quiet"] < (choose.ROUNDS + 1) * round_s
    assert clock.now_s > (choose.MAX_ROUNDS - 1) * choose.ROUND_S


class Counter:
    """A model that counts its calls in a state, and takes no other position than the first."""

    plan = SimpleNamespace(steps=(), kernels=())
    calls = 0

    def run(self, _: Mapping[str, Any], states: Mapping[str, Any]) -> dict[str, Any]:
        assert states["at"].tolist() == [2]
        states["at"][0] += 1
        self.calls += 1
        return dict(states)

    def profile(self, inputs: Mapping[str, Any], states: Mapping[str, Any]) -> list[Any]:
        self.run(inputs, states)
        return []


def test_each_timed_call_finds_the_states_as_they_were_drawn() -> None:
    model: Any = Counter()
    sample = Sample({}, {"at": np.array([2])}, {"at": np.array([2])})
    expected = kernels._run_once(model, sample)
    choose._least_times(model, sample, 1)
    choose._least_call_s(model, sample)
    kernels._measure_kernels(model, sample)
    kernels.measure_calls([model, model], sample)
    assert model.calls > 2 * kernels.ROUNDS * kernels.CALLS_OF_ROUND
    assert expected["at"].tolist() == [3]  # and later calls do not change it


@pytest.mark.parametrize(("rammer_s", "kind"), [(11 * MS, "serial"), (6.4 * MS, "serial"), (6 * MS, "rammer")])
def test_another_plan_has_to_be_faster_than_a_quiet_serial_one(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, rammer_s: float, kind: str
) -> None:
    """With a disturbed worker a serial call takes 12 ms, more than a plan that uses only one worker."""
    seconds = {"serial": 12 * MS, "rammer": rammer_s, "parallel": 11.2 * MS}
    plans = {
        name: SimpleNamespace(steps=(object.__new__(VDeviceStep),), inputs=(), states=(), kernels=(), name=name) for name in seconds
    }
    loaded = {
        name: TimedModel(clock, lambda call, each=each: ALONE_S if call < 5 and each == 12 * MS else each)
        for name, each in seconds.items()
    }
    monkeypatch.setattr(choose, "measure_steps", lambda *_: TIMES)
    monkeypatch.setattr(choose, "_planned", lambda name, *_: plans[name])
    program = SimpleNamespace(bind=lambda plan: loaded[plan.name])
    options: Any = (choose.AUTO, plans["serial"], (), None, lambda *_: program, SimpleNamespace(num_cores=2))
    chosen = choose._choose_measured(*options)
    assert (chosen.choice.kind, chosen.plan) == (kind, plans[kind])
    assert chosen.choice.seconds["serial"] == pytest.approx(QUIET_S)


@pytest.mark.parametrize(("measured_s", "kept"), [(9 * MS, 9 * MS), (9.9 * MS, None)])
def test_an_efficient_rkernel_has_to_be_faster_on_one_worker(
    monkeypatch: pytest.MonkeyPatch, measured_s: float, kept: float | None
) -> None:
    other: Any = object()
    steps = [PlannedStep("a", (), efficient=other), PlannedStep("b", ())]
    schedules: list[list[Launch]] = []

    def make_plan(schedule: Any) -> Any:
        schedules.append(schedule(steps))
        return None, ()

    monkeypatch.setattr(choose, "_least_times", lambda *_: (measured_s, 0.1 * MS))
    program: Any = SimpleNamespace(bind=lambda _: None)
    times = choose._measure_efficient(steps, TIMES, {}, make_plan, program)
    assert times == (kept, None)
    assert schedules == [[Launch((0,), rkernels=(1,)), Launch((1,), rkernels=(0,))]]
    assert choose._measure_efficient(steps[1:], TIMES, {}, make_plan, program) == ()
    assert len(schedules) == 1


def test_a_choice_keeps_the_times_of_efficient_rkernels(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)
    choice = PlanChoice("rammer", (2 * MS, MS), (MS, MS), {"rammer": MS}, is_measured=True, efficient_s=(MS, None))
    cache.save_choice("a", choice)
    assert cache.load_choice("a") == choice
    steps = [PlannedStep("a", ()), PlannedStep("b", ())]
    assert choose._fits(choice, steps)
    assert not choose._fits(PlanChoice("rammer", (2 * MS, MS), (MS, MS), efficient_s=(MS,)), steps)
