"""Trials in users' calls: models that say their seconds by themselves, and a clock that they move."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gpu_models import MATMUL, constant, node, tensor
from gpu_models import graph as json_graph
from onnx_models import mlp

import roller_svc
from roller_svc.errors import ArgumentError, CompileError, IndexRangeError
from roller_svc.graph import compile as graph_compile
from roller_svc.graph.inputs import Sample
from roller_svc.graph.passes import boundaries
from roller_svc.graph.wiring import drift, kernels, online
from roller_svc.graph.wiring.explore import explore
from roller_svc.graph.wiring.kernels import Tuning
from roller_svc.graph.wiring.online import CALLS, MAX_REPEATED, ROUNDS, CallTimer, OnlineTuning
from roller_svc.graph.wiring.tree import Node, Variable
from roller_svc.graph.wiring.wirer import ExploringEndedError, Wirer
from roller_svc.ir.model_plan import KernelStep
from roller_svc.runtime.graphs.cpu import CpuCalls, Moment
from roller_svc.runtime.graphs.switchable import BoundModel, SwitchableModel
from roller_svc.settings import read_settings, use

X = np.arange(4.0)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Model:
    """A model of kernels with these seconds, which doubles `x` and adds it to the state `s`, if that is given."""

    def __init__(self, clock: Clock, *seconds: float, fault: Callable[[], Any] = lambda: None) -> None:
        self.clock, self.seconds, self.fault, self.calls = clock, seconds, fault, 0
        self.plan = SimpleNamespace(kernels=seconds, states=(("s", None),), steps=())

    def run(self, arrays: Mapping[str, Any], out: Mapping[str, Any] | None = None) -> dict[str, Any]:
        self.calls += 1
        self.clock.now_s += sum(self.seconds)
        if out is not None:
            out["s"][:] += arrays["x"]
        if self.fault() == "nan":
            return {"y": np.full(4, np.nan)}
        return {"y": arrays["x"] * 2}

    def run_timed(self, arrays: Mapping[str, Any], out: Mapping[str, Any] | None = None) -> Any:
        steps = (KernelStep(f"n{i}", i, 0, ()) for i in range(len(self.seconds)))
        return self.run(arrays, out), [Moment(s, 0.0, t, 0) for s, t in zip(steps, self.seconds, strict=True)]


@pytest.fixture
def clock() -> Clock:
    return Clock()


def call_until_done(wirer: Wirer, tuning: OnlineTuning, most: int = 100_000) -> int:
    """Call the model until it explores no more; every answer is right."""
    for number in range(most):
        np.testing.assert_array_equal(wirer.run({"x": X})["y"], X * 2)
        if tuning.state != "exploring":
            return number
    raise AssertionError("the model still explores")


def tune(wirer: Wirer, explore: Callable[[OnlineTuning], Any]) -> OnlineTuning:
    return OnlineTuning(wirer, explore, lambda _: None)


@pytest.mark.parametrize("reopens", [True, False])
def test_calls_that_are_slower_for_long_let_a_committed_model_explore_again(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, reopens: bool
) -> None:
    """The least of 16 timed calls counts, two windows in a row decide, and an hour lies between two times."""
    monkeypatch.setattr(drift, "TIMED_EVERY", 4)
    seconds = [1.0]

    def delay() -> None:
        clock.now_s += seconds[0]

    model: Any = Model(clock, fault=delay)
    model.run_plain = model.run
    used: list[Any] = []
    searches = 0

    def search(tuning: OnlineTuning) -> None:
        nonlocal searches
        searches += 1
        tuning.found = Tuning(Node("parallel", ()), call_s=1.0)

    tuning = OnlineTuning(Wirer(lambda: model, 1.0, clock), search, used.append, reopens=reopens, clock=clock)
    assert tuning.wait(60)

    def call(windows: int, slower: float) -> None:
        seconds[0] = slower
        for _ in range(windows * drift.WINDOW * drift.TIMED_EVERY):
            np.testing.assert_array_equal(used[-1].run({"x": X})["y"], X * 2)
        assert tuning.wait(60)

    call(3, 1.1)  # within what noise explains
    call(1, 1.2)
    call(1, 1.0)
    call(1, 1.2)
    assert (searches, tuning.notes) == (1, [])
    call(1, 1.2)
    assert (searches, tuning.notes, tuning.state) == (1 + reopens, [online.DRIFTED], "committed")
    assert isinstance(used[-1], drift.WatchedModel)
    assert any(isinstance(each, Wirer) for each in used) == reopens
    call(8, 1.2)  # 600 s: the hour is not over
    assert searches == 1 + reopens
    clock.now_s += online.REOPEN_S
    call(2, 1.2)
    assert searches == 1 + 2 * reopens
    tuning.stop()
    clock.now_s += online.REOPEN_S
    call(4, 1.2)
    assert searches == 1 + 2 * reopens


@pytest.mark.parametrize("when", ["before", "in the middle"])
def test_slower_calls_never_undo_a_stop(clock: Clock, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    model: Any = Model(clock, 1.0)
    searches: list[OnlineTuning] = []
    used: list[Any] = []
    wirer = Wirer(lambda: model, 1.0, clock)

    def search(tuning: OnlineTuning) -> None:
        searches.append(tuning)

    tuning = OnlineTuning(wirer, search, used.append, reopens=True, clock=clock)
    assert tuning.wait(60)
    if when == "before":
        tuning.stop()
    else:
        resume = wirer.resume
        monkeypatch.setattr(wirer, "resume", lambda: (tuning.stop(), resume()))
    tuning._note_drift()
    assert tuning.wait(60)
    assert (len(searches), tuning.is_stopped) == (1, True)
    assert wirer._is_ended


def test_no_call_fails_where_no_thread_can_be_started(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    model: Any = Model(clock, 1.0)
    used: list[Any] = []
    wirer = Wirer(lambda: model, 1.0, clock)
    tuning = OnlineTuning(wirer, lambda _: None, used.append, reopens=True, clock=clock)
    with monkeypatch.context() as patch:
        patch.setattr(online.Thread, "start", refuse)
        np.testing.assert_array_equal(wirer.run({"x": X})["y"], X * 2)
    assert (tuning.state, tuning.notes, used, tuning.wait(0)) == ("stopped", [online.NO_THREAD], [model], True)
    tuning.reopen()
    assert tuning.wait(60)
    assert tuning.state == "committed"
    assert repr(tuning) == f"<OnlineTuning committed, trials={tuning.trials}>"
    with monkeypatch.context() as patch:
        patch.setattr(online.Thread, "start", refuse)
        tuning._note_drift()
    assert (tuning.state, used[-1]) == ("stopped", model)
    assert tuning.notes[-2:] == [online.DRIFTED, online.NO_THREAD]


def test_a_model_is_reopened_after_a_stop_once_its_thread_has_ended(clock: Clock) -> None:
    go, begun = threading.Event(), threading.Event()
    refused: list[str] = []

    def search(tuning: OnlineTuning) -> None:
        begun.set()
        assert go.wait(60)
        try:
            tuning.reopen()  # in its own thread, it would wait for itself
        except ArgumentError as error:
            refused.append(error.message)

    model: Any = Model(clock, 1.0)
    tuning = tune(Wirer(lambda: model, 1.0, clock), search)
    tuning.start()
    assert begun.wait(60)
    first = tuning._thread
    tuning.stop()
    assert tuning.state == "exploring"
    ending = threading.Timer(0.05, go.set)
    ending.start()
    tuning.reopen()
    assert tuning._thread is not first
    assert tuning.wait(60)
    assert (tuning.state, len(refused)) == ("committed", 2)


def test_a_model_whose_calls_were_not_compared_is_watched_by_its_first_calls(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drift, "TIMED_EVERY", 1)
    noticed: list[float] = []
    seconds = itertools.chain([2.0] * drift.WINDOW, [2.2] * drift.WINDOW, [2.4] * 2 * drift.WINDOW)

    def delay() -> None:
        clock.now_s += next(seconds)

    model: Any = Model(clock, fault=delay)
    model.run_plain = lambda arrays, out=None: None if arrays is None else model.run(arrays, out)
    watched = drift.WatchedModel(model, None, lambda: noticed.append(clock.now_s), clock)
    assert watched.run_plain(None) is None  # arrays that have to be converted are not timed
    for _ in range(4 * drift.WINDOW):
        assert not noticed
        watched.run({"x": X})
    assert len(noticed) == 1


def test_row_7_each_call_is_answered_and_the_best_of_an_oracle_is_found(clock: Clock) -> None:
    table = [[3.0, 2.0, 4.0], [1.0, 5.0, 0.5]]
    tree = Node("parallel", tuple(Variable(f"k{i}", "kernel", ("a", "b", "c")) for i in range(2)))
    ended: list[Any] = []

    def search(tuning: OnlineTuning) -> None:
        def measure(choices: Mapping[str, int]) -> dict[str, float]:
            model: Any = Model(clock, *(table[i][choices[f"k{i}"]] for i in range(2)))
            tuning.found.trials += 1
            return {f"k{i}": value for i, value in enumerate(tuning.timer.time_kernels(model) or ())}

        ended.append(explore(tree, measure, budget_trials=100, rounds=ROUNDS))

    default: Any = Model(clock, 3.0, 1.0)
    wirer = Wirer(lambda: default, 0.5, clock)
    tuning = tune(wirer, search)
    call_until_done(wirer, tuning)
    assert dict(ended[0]) == {"k0": 1, "k1": 2}
    assert (tuning.state, tuning.trials) == ("committed", 3 * ROUNDS)
    assert default.calls >= 3 * ROUNDS  # no more than half of the calls were trials


def compared(tuning: OnlineTuning, *models: Any) -> list[float] | None:
    return tuning.timer.time_calls(models)


@pytest.mark.parametrize(("period", "other_s", "is_busy"), [(2, 0.95, False), (10**9, 0.95, True), (10**9, 0.9, False)])
def test_whole_calls_of_a_disturbed_machine_choose_only_what_is_far_faster(
    clock: Clock, period: int, other_s: float, is_busy: bool
) -> None:
    """In each second round another process delays the model in use, or in all rounds but the first."""
    rounds = iter(range(10**6))

    def delay() -> None:
        clock.now_s += next(rounds) % period > 0

    used: Any = Model(clock, 1.0, fault=delay)
    other: Any = Model(clock, other_s)
    default: Any = Model(clock, 1.0)
    found: list[Any] = []
    wirer = Wirer(lambda: default, 1.0, clock)
    tuning = tune(wirer, lambda tuning: found.append(compared(tuning, used, other)))
    call_until_done(wirer, tuning)
    assert tuning.notes == (["machine-busy"] if is_busy else [])
    assert tuning.state == ("stopped" if is_busy else "committed")
    assert found == ([None] if is_busy else [pytest.approx([1.0, other_s])])
    assert used.calls == (MAX_REPEATED + 2 if period > 2 else 2 * CALLS - 1)


@pytest.mark.parametrize(("is_found", "state"), [(True, "committed"), (False, "stopped")])
def test_a_choice_that_was_found_is_bound_though_a_later_one_was_disturbed(clock: Clock, is_found: bool, state: str) -> None:
    bound: list[int] = []
    default: Any = Model(clock, 1.0)

    def search(tuning: OnlineTuning) -> Callable[[], None] | None:
        tuning.found.notes.append("machine-busy")
        return (lambda: bound.append(1)) if is_found else None

    tuning = tune(Wirer(lambda: default, 1.0, clock), search)
    assert tuning.wait(60)
    assert (tuning.state, bound) == (state, [1] if is_found else [])


def fail() -> None:
    raise IndexRangeError("an index is out of range")


@pytest.mark.parametrize("fault", [fail, lambda: "nan"])
def test_a_candidate_that_fails_or_gives_nan_does_not_answer(clock: Clock, fault: Callable[[], Any]) -> None:
    default: Any = Model(clock, 1.0)
    bad: Any = Model(clock, 0.1, fault=fault)
    wirer = Wirer(lambda: default, 1.0, clock)
    found: list[Any] = []
    tuning = tune(wirer, lambda tuning: found.extend([tuning.timer.time_kernels(bad), compared(tuning, default, bad)]))
    state = np.zeros(4)
    for number in range(1, 1000):
        np.testing.assert_array_equal(wirer.run({"x": X}, {"s": state})["y"], X * 2)
        np.testing.assert_array_equal(state, number * X)
        if tuning.state != "exploring":
            break
    assert found == [None, None]
    assert bad.calls == 2
    assert len(tuning.notes) == 2


@pytest.mark.parametrize("fault", [fail, lambda: "nan"])
def test_a_call_that_writes_to_its_inputs_is_answered_from_those_of_before(clock: Clock, fault: Callable[[], Any]) -> None:
    class InPlace(Model):
        def run(self, arrays: Mapping[str, Any], out: Mapping[str, Any] | None = None) -> dict[str, Any]:
            self.calls += 1
            assert out is not None
            out["y"][:] = arrays["x"] * 2
            if self.fault() == "nan":
                out["y"][:] = np.nan
            return dict(out)

    default: Any = InPlace(clock, 1.0)
    bad: Any = InPlace(clock, 0.1, fault=fault)
    wirer = Wirer(lambda: default, 1.0, clock)
    tuning = tune(wirer, lambda tuning: tuning.timer.time_kernels(bad) and None)
    while tuning.state == "exploring":
        x = X.copy()
        assert wirer.run({"x": x}, {"y": x})["y"] is x
        np.testing.assert_array_equal(x, X * 2)
    assert bad.calls == 1


def test_a_call_whose_arrays_are_not_known_to_be_apart_is_no_trial(clock: Clock) -> None:
    default: Any = Model(clock, 1.0)
    other: Any = Model(clock, 0.5)
    wirer = Wirer(lambda: default, 1.0, clock)
    tuning = tune(wirer, lambda tuning: tuning.timer.time_kernels(other) and None)
    wirer.run({"x": X})
    while wirer._offer is None:
        threading.Event().wait(0.001)
    wirer.run({"x": X.tolist()}, {"s": np.zeros(4)})
    assert (other.calls, tuning.state) == (0, "exploring")
    wirer.run({"x": X}, {"s": np.zeros(4)})
    assert tuning.wait(60)
    assert other.calls == 1


def test_a_nan_that_the_model_gives_too_is_an_answer(clock: Clock) -> None:
    default: Any = Model(clock, 1.0, fault=lambda: "nan")
    other: Any = Model(clock, 0.5, fault=lambda: "nan")
    wirer = Wirer(lambda: default, 1.0, clock)
    found: list[Any] = []
    tuning = tune(wirer, lambda tuning: found.append(tuning.timer.time_kernels(other)))
    while tuning.state == "exploring":
        assert np.isnan(wirer.run({"x": X})["y"]).all()
    assert found == [[0.5]]


def test_arrays_that_are_refused_leave_the_trial_to_the_next_call(clock: Clock) -> None:
    default: Any = Model(clock, 1.0)
    refused = iter([True])

    def refuse() -> None:
        if next(refused, False):
            raise ArgumentError("the array has another shape")

    other: Any = Model(clock, 0.5, fault=refuse)
    wirer = Wirer(lambda: default, 1.0, clock)
    found: list[Any] = []
    tuning = tune(wirer, lambda tuning: found.append(tuning.timer.time_kernels(other)))
    raised = 0
    while tuning.state == "exploring":
        try:
            wirer.run({"x": X})
        except ArgumentError:
            raised += 1
    assert (raised, found, other.calls) == (1, [[0.5]], 2)


def test_one_call_explores_while_others_run_the_model(clock: Clock) -> None:
    inside, leave, measured = threading.Event(), threading.Event(), []

    def hold() -> None:
        inside.set()
        assert leave.wait(60)

    default: Any = Model(clock, 1.0)
    other: Any = Model(clock, 0.5, fault=hold)
    wirer = Wirer(lambda: default, 1.0, clock)
    tuning = tune(wirer, lambda tuning: measured.append(tuning.timer.time_kernels(other)))
    wirer.run({"x": X})

    def call_until_inside() -> None:
        while not inside.is_set():
            wirer.run({"x": X})

    caller = threading.Thread(target=call_until_inside)
    caller.start()
    assert inside.wait(60)
    for _ in range(10):
        np.testing.assert_array_equal(wirer.run({"x": X})["y"], X * 2)
    assert other.calls == 1
    leave.set()
    caller.join()
    assert tuning.wait(60)
    assert other.calls == 1


def test_a_commit_measures_without_users_and_a_stop_binds_nothing(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    default: Any = Model(clock, 1.0)
    other: Any = Model(clock, 0.5)
    monkeypatch.setattr(online, "measure_calls", lambda models, _: [sum(each.seconds) for each in models])
    bound: list[list[float] | None] = []

    def search(tuning: OnlineTuning) -> Callable[[], None]:
        tuning.timer.begin(1e9, Sample({}, {}, {}))
        seconds = compared(tuning, default, other)
        return lambda: bound.append(seconds)

    wirer = Wirer(lambda: default, 1.0, clock)
    tuning = tune(wirer, search)
    tuning.commit()
    assert (tuning.state, bound) == ("committed", [[1.0, 0.5]])
    tuning.reopen()
    with pytest.raises(ArgumentError):
        tuning.reopen()
    tuning.stop()
    assert tuning.wait(60)
    assert (tuning.state, len(bound)) == ("stopped", 1)
    unused = tune(Wirer(lambda: default, 1.0, clock), search)
    unused.stop()
    assert unused.state == "stopped"
    assert unused.wait(0)


def test_the_tuning_of_a_first_bucket_waits_for_all_and_stops_all(clock: Clock) -> None:
    default: Any = Model(clock, 1.0)
    go = threading.Event()
    first, second, third = (
        tune(Wirer(lambda: default, 1.0, clock), explore)
        for explore in (lambda _: None, lambda _: go.wait(60) and None, lambda _: None)
    )
    first.others = [second, third]
    assert not first.wait(0.2)
    assert (first._state, first.state, third._thread) == ("committed", "exploring", None)
    go.set()
    assert first.wait(60)
    assert [each.state for each in (first, second, third)] == ["committed"] * 3
    go.clear()
    first.reopen()
    first.stop()
    go.set()
    assert first.wait(60)
    assert second.state == "stopped"
    first.reopen()
    first.commit()
    assert [each.state for each in (first, second, third)] == ["committed"] * 3


def test_no_trial_begins_after_the_budget(clock: Clock) -> None:
    model: Any = Model(clock, 1.0)
    tuning = tune(Wirer(lambda: model, 1.0, clock), lambda _: None)
    tuning.timer.begin(-1.0, Sample({}, {}, {}))
    assert tuning.timer.time_kernels(model) is None
    assert model.calls == 0


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    use(read_settings(cache=tmp_path))
    yield tmp_path
    use(read_settings())


@pytest.fixture
def oracle(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let other kernels than the fastest be faster, one by one and in calls; tensors apart are no faster."""
    fastest: dict[object, list[str]] = {}

    def sum_kernels(model: CpuCalls, _: object) -> list[float]:
        keys = [kernel.source.key for kernel in model.plan.kernels]
        first = fastest.setdefault(model.plan.inputs, keys)  # the first trial is of the fastest kernels
        return [1.0 if key == other else 0.5 for key, other in zip(keys, first, strict=True)]

    def time_calls(timer: CallTimer, models: Sequence[CpuCalls]) -> list[float] | None:
        try:
            for model in models:
                timer._wirer.time_call(model)
        except ExploringEndedError:
            return None
        return [1.0, 1.0] if isinstance(models[0], BoundModel) else [2.0, 1.0]

    monkeypatch.setattr(kernels, "MAX_RATIO", float("inf"))
    monkeypatch.setattr(online, "sum_kernels", sum_kernels)
    monkeypatch.setattr(CallTimer, "time_calls", time_calls)
    return cache


def test_a_model_binds_other_kernels_while_it_is_called_and_finds_them_again(oracle: Path) -> None:
    source = json_graph({"x": tensor(8, 64)}, {"w": constant(64, 48)}, [node("y", MATMUL, A="x", B="w")], "y")
    x = np.random.default_rng(1).standard_normal((8, 64)).astype(np.float32)
    before = roller_svc.compile_model(source, threads=1, top_k=3)
    expected = before(x=x)["y"]
    model = roller_svc.compile_model(source, threads=1, top_k=3, tune="online", tune_options={"share": 1.0})
    tuning = model.tuning
    assert isinstance(tuning, OnlineTuning)
    assert (tuning.state, model.digest) == ("exploring", before.digest)
    calls = 0
    while tuning.state == "exploring":
        np.testing.assert_allclose(model(x=x)["y"], expected, atol=1e-5)
        calls += 1
    assert tuning.state == "committed"
    assert 0 < tuning.trials <= calls
    assert isinstance(tuning.found, Tuning)
    np.testing.assert_allclose(model(x=x)["y"], expected, atol=1e-5)
    chosen = tuning.chosen["kernel:0"]
    assert (tuning.gain, tuning.chosen["plan"], tuning.chosen["buffers"]) == (2, "serial", "lowest")
    assert [each.get("kind", each.get("mode")) for each in tuning.tree["children"]] == ["parallel", "plan", "buffers"]
    assert model.digest != before.digest
    assert [kernel.digest for kernel in model.kernels] == [chosen]
    again = roller_svc.compile_model(source, threads=1, top_k=3, tune="online")
    assert isinstance(again.tuning, OnlineTuning)
    assert again.tuning.wait(60)  # without a call
    assert (again.tuning.trials, again.tuning.chosen, again.digest) == (0, tuning.chosen, model.digest)
    assert isinstance(model._variants[0].loaded, drift.WatchedModel)
    assert model._run_plain is not None
    assert {step.kernel for step in model.profile({"x": x})} == {chosen}
    loaded = roller_svc.load_model(model.save(oracle / "saved"))
    assert loaded.report["tuning"]["chosen"] == tuning.chosen
    np.testing.assert_array_equal(loaded(x=x)["y"], model(x=x)["y"])
    for kind, code in (("online", "cannot-measure"), ("now", "cannot-measure"), ("sometimes", "invalid-option")):
        with pytest.raises(ArgumentError, match="tune must be") as refusal:
            roller_svc.load_model(oracle / "saved", tune=kind)
        assert refusal.value.code == code
    assert roller_svc.load_model(oracle / "saved", tune="off").digest == model.digest


@pytest.mark.slow
def test_row_13_boundaries_of_fusion_are_choices_and_apart_is_bound_where_it_is_faster(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls of more kernels are said to be faster. The model prefers one kernel, and is said to be wrong by any factor."""

    def time_calls(timer: CallTimer, models: Sequence[CpuCalls]) -> list[float]:
        for model in models:
            timer._wirer.time_call(model)
        return [1 / len(model.plan.kernels) for model in models]

    monkeypatch.setattr(CallTimer, "time_calls", time_calls)
    monkeypatch.setattr(boundaries, "ERROR_RATIO", 100.0)
    nodes = [node("p", MATMUL, A="x", B="w"), node("q", MATMUL, A="z", B="v")]
    nodes += [node(name, f"C[i, j] = {how}(A[i, j], 0)", A=of) for name, how, of in (("y", "max", "p"), ("r", "min", "q"))]
    source = json_graph({"x": tensor(8, 64), "z": tensor(4, 64)}, {"w": constant(64, 48), "v": constant(64, 32)}, nodes, "y", "r")
    rng = np.random.default_rng(1)
    arrays = {name: rng.standard_normal((rows, 64)).astype(np.float32) for name, rows in (("x", 8), ("z", 4))}
    options: dict[str, Any] = {"threads": 1, "top_k": 1, "tune_options": {"share": 1.0, "variables": ["fusion"]}}
    model = roller_svc.compile_model(source, tune="online", **options)
    expected, before = {name: array.copy() for name, array in model.run(arrays).items()}, model.digest
    assert len(model.kernels) == 2
    tuning = model.tuning
    assert isinstance(tuning, OnlineTuning)

    def check_results() -> None:
        for name, array in model.run(arrays).items():
            np.testing.assert_allclose(array, expected[name], atol=1e-5)

    while tuning.state == "exploring":
        check_results()
    assert (tuning.state, tuning.notes) == ("committed", [])
    assert tuning.chosen["fusion:0"] == tuning.chosen["fusion:1"] == "separate"
    assert [each["kind"] for each in tuning.tree["children"][-2:]] == ["fusion", "fusion"]
    assert (len(model.kernels), tuning.gain) == (4, pytest.approx(2))
    assert model.digest != before
    check_results()
    assert {event.node for event in model.step(arrays, fused=True)} == {"p", "q", "y", "r"}
    assert {each["name"] for each in model.story["nodes"]} == {"p", "q", "y", "r"}
    assert {step.operator for step in model.profile(arrays)} == {"p", "q", "y", "r"}
    loaded = roller_svc.load_model(model.save(cache / "saved"))
    for name, array in loaded.run(arrays).items():
        np.testing.assert_array_equal(array, model.run(arrays)[name])
    again = roller_svc.compile_model(source, tune="online", **options)
    assert isinstance(again.tuning, OnlineTuning)
    assert again.tuning.wait(60)  # without a call
    assert (again.tuning.trials, again.tuning.chosen, again.digest) == (0, tuning.chosen, model.digest)


@pytest.mark.slow
def test_a_graph_with_wrong_results_other_weights_or_no_kernels_is_not_bound(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boundaries, "ERROR_RATIO", 100.0)
    nodes = [node("p", MATMUL, A="x", B="w"), node("y", "C[i, j] = max(A[i, j], 0)", A="p")]
    source = json_graph({"x": tensor(8, 64)}, {"w": constant(64, 48)}, nodes, "y")

    def removed() -> Any:
        model = roller_svc.compile_model(
            source, threads=1, top_k=1, tune="online", tune_options={"variables": ["fusion"], "share": 1.0}
        )
        assert isinstance(model.tuning, OnlineTuning)
        model.tuning.commit()
        assert (model.tuning.state, len(model.kernels)) == ("committed", 1)
        return model.tuning.tree["removed"]["fusion:0"]

    with monkeypatch.context() as patch:
        patch.setattr(SwitchableModel, "can_bind", lambda _, plan: len(plan.kernels) == 1)
        assert removed() == {"separate": kernels.OTHER_WEIGHTS}
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "_agree", lambda *_: False)
        assert removed() == {"separate": "results are wrong"}
    with monkeypatch.context() as patch:
        patch.setattr(graph_compile, "load_or_build", lambda requests, *_: [()] * len(requests))
        assert removed() == {"separate": online.NO_GRAPH}

    def refuse(*_: object) -> None:
        raise CompileError("it does not compile")

    with monkeypatch.context() as patch:
        patch.setattr(graph_compile, "load_or_build", refuse)
        assert removed() == {"separate": online.NO_GRAPH}


@pytest.mark.slow
def test_each_bucket_binds_its_kernels_and_an_unused_model_explores_no_more(oracle: Path) -> None:
    source = mlp("batch").SerializeToString()
    options: dict[str, Any] = {"threads": 1, "top_k": 3, "tune": "online", "tune_options": {"share": 1.0}}
    model = roller_svc.compile_model(source, dims={"batch": [2, 3]}, **options)
    arrays = [np.linspace(-1, 1, batch * 8, dtype=np.float32).reshape(batch, 8) for batch in (2, 3)]
    expected, digests = [model(x=x)["y"] for x in arrays], {model.digest}
    while any(isinstance(variant.loaded, Wirer) for variant in model._variants):
        for x, results in zip(arrays, expected, strict=True):
            np.testing.assert_allclose(model(x=x)["y"], results, atol=1e-5)
        digests.add(model.digest)
    assert len(digests) == 3
    loaded = roller_svc.load_model(model.save(oracle / "saved"))
    assert loaded.digest == model.digest
    for x in arrays:
        np.testing.assert_array_equal(loaded(x=x)["y"], model(x=x)["y"])
    assert isinstance(model.tuning, OnlineTuning)
    model.tuning.reopen()
    tuning = model.tuning
    del model
    gc.collect()
    assert tuning.wait(60)
    assert tuning.state == "stopped"


@pytest.mark.parametrize(
    "tune_options",
    [{"budget": 1}, {"budget_s": 0}, {"budget_trials": 1.5}, {"exact": 1}, {"share": 2}, {"variables": ["kernels"]}, "exact"],
)
def test_options_out_of_range_are_refused(cache: Path, tune_options: Any) -> None:
    source = json_graph({"x": tensor(2)}, {}, [node("y", "C[i] = A[i] * 2", A="x")], "y")
    with pytest.raises(ArgumentError) as refused:
        roller_svc.compile_model(source, tune="online", tune_options=tune_options)
    assert refused.value.code == "invalid-option"
