"""Kernels of a model that trials of the whole model choose."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_models import constant, tensor
from gpu_models import graph as json_graph
from graphs import add_input, add_random, builder_of, load_linked

from roller_svc import hardware
from roller_svc.codegen.c.model import MODEL
from roller_svc.compiler.kernel_cache import KernelCache
from roller_svc.errors import ArgumentError
from roller_svc.graph.compile import BuiltModel, ModelOptions, build_model, check_tuning
from roller_svc.graph.inputs import Sample, draw_sample
from roller_svc.graph.interpret import interpret
from roller_svc.graph.load import load_graph
from roller_svc.graph.weights import Weights
from roller_svc.graph.wiring import checking, kernels
from roller_svc.graph.wiring.child import PREPARE
from roller_svc.graph.wiring.index import Origin, ProfileIndex
from roller_svc.graph.wiring.kernels import TuneOptions, Tuning, choose_kernels
from roller_svc.graph.wiring.tree import Node, Variable
from roller_svc.hardware.catalog import restrict_cores
from roller_svc.ir.dtype import DType
from roller_svc.ir.model_plan import ModelPlan
from roller_svc.ir.options import SelectionMode
from roller_svc.ir.program import TensorType
from roller_svc.ir.report import BuildRequest
from roller_svc.runtime.graphs.cpu import CpuCalls

BY_ALTERNATIVES = 2.0  # how much faster than by the fastest kernels calls are said to be


def build(cache: KernelCache, trials: int = 16, **tune: Any) -> BuiltModel:
    builder, weights = builder_of()
    product = builder.call("matmul", [add_input(builder, "x", 8, 64), add_random(builder, 0, 64, 48)])
    graph = builder.finish([("y", builder.call("softmax", [product], axis=1))])
    options = ModelOptions(restrict_cores(hardware.load("local"), 1), top_k=3, tune=TuneOptions(budget_trials=trials, **tune))
    built = build_model(graph, weights, options, cache)
    model = load_linked(built, weights)
    x = np.random.default_rng(1).standard_normal((8, 64)).astype(np.float32)
    expected = interpret(graph, weights, {"x": x})["y"]
    np.testing.assert_allclose(model.run({"x": x})["y"], expected, atol=1e-5)
    return built


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def cache(folder: Path) -> KernelCache:
    """Return a cache with the kernels of other tests, and without seconds."""
    for file in folder.glob("wiring.sqlite*"):
        file.unlink()
    return KernelCache(folder)


class Measures:
    """Seconds as a test says them: others than the fastest kernels are faster, one by one and in calls."""

    def __init__(self) -> None:
        self.trials = self.calls = 0
        self.fastest: list[str] | None = None
        self.gain = BY_ALTERNATIVES

    def kernels(self, model: CpuCalls, _: Mapping[str, Any]) -> list[float]:
        self.trials += 1
        keys = [kernel.source.key for kernel in model.plan.kernels]
        self.fastest = self.fastest or keys
        return [1.0 if key in self.fastest else 0.5 for key in keys]

    def whole(self, models: Sequence[CpuCalls], _: Mapping[str, Any]) -> list[float]:
        self.calls += 1
        return [1.0, 1.0 / self.gain]


@pytest.fixture
def measures(monkeypatch: pytest.MonkeyPatch) -> Measures:
    measures = Measures()
    monkeypatch.setattr(kernels, "MAX_RATIO", float("inf"))  # every candidate, whatever this machine is doing
    monkeypatch.setattr(kernels, "_measure_kernels", measures.kernels)
    monkeypatch.setattr(kernels, "measure_calls", measures.whole)
    return measures


def test_kernels_that_are_faster_in_the_model_are_bound_and_found_again(measures: Measures, cache: KernelCache) -> None:
    first = build(cache)
    assert first.tuning is not None
    chosen = set(first.tuning.chosen.values())
    assert first.tuning.gain == BY_ALTERNATIVES
    assert chosen
    assert chosen <= {bundle.digest for bundle in first.kernels}
    for variable in first.tuning.root.children:
        assert first.tuning.chosen[variable.name] != variable.choices[variable.default]
    assert first.tuning.trials == measures.trials + 2
    measured = measures.trials, measures.calls
    again = build(cache)
    assert again.tuning is not None
    assert again.tuning.trials == 0
    assert (measures.trials, measures.calls) == measured
    assert [bundle.digest for bundle in again.kernels] == [bundle.digest for bundle in first.kernels]


def test_row_6_the_tree_of_three_operators_has_a_variable_of_each_class_and_no_choice_beyond_the_limits(
    measures: Measures, cache: KernelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two products are one class. A class that takes too little of a call, and kernels with too large workspaces, are left out."""
    builder, weights = builder_of()
    x = add_input(builder, "x", 8, 64)
    first, second = (builder.call("matmul", [x, add_random(builder, seed, 64, 48)]) for seed in range(2))
    graph = builder.finish([("y", builder.call("softmax", [first], axis=1)), ("z", second)])

    def tree(**more: Any) -> list[dict[str, Any]]:
        options = ModelOptions(
            restrict_cores(hardware.load("local"), 1), top_k=3, tune=TuneOptions(budget_trials=1), fuse=False, **more
        )
        tuning = build_model(graph, weights, options, cache).tuning
        assert tuning is not None
        assert (tuning.tree["format"], tuning.tree["mode"]) == ("roller-wiring/1", "parallel")
        return list(tuning.tree["children"])

    variables = tree()
    assert [(each["variable"], each["kind"], each["default"]) for each in variables] == [
        ("kernel:0", "kernel", 0), ("kernel:1", "kernel", 0)
    ]  # fmt: skip
    assert all(len(set(each["choices"])) == len(each["choices"]) > 1 for each in variables)
    monkeypatch.setattr(kernels, "MIN_SHARE", 0.5)
    assert len(tree()) == 1
    request = BuildRequest("C[i] = A[i]", (("A", TensorType(DType.FLOAT32, (4,))),), "local", max_workspace_bytes=1)
    assert TuneOptions().request_alternatives(request).max_workspace_bytes == 1


def test_seconds_of_another_spec_compiler_generator_or_model_are_not_known(
    measures: Measures, cache: KernelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, hw = build(cache).plan, hardware.load("local")
    request = BuildRequest("C[i] = A[i]", (("A", TensorType(DType.FLOAT32, (4,))),), hw.id, hardware=hw)
    variable, options = Variable("kernel:0", "kernel", ("a", "b"), 0, "key", (0,)), TuneOptions()

    def is_known(request: BuildRequest = request, plan: ModelPlan = plan, options: TuneOptions = options) -> bool:
        with closing(kernels.open_index(plan, cache, request, options, 1)) as index:
            return index.look_up(variable, 1, {}) is not None

    with closing(kernels.open_index(plan, cache, request, options, 1)) as index:
        index.record(variable, 1, {}, 1.0)
    assert is_known()
    assert not is_known(replace(request, hardware=restrict_cores(hw, 1)))
    assert not is_known(replace(request, hardware=replace(hw, clock_hz=2 * hw.clock_hz)))
    assert not is_known(plan=replace(plan, arena_bytes=plan.arena_bytes + 64))
    assert not is_known(options=TuneOptions(exact=True))
    for name in ("tool_version", "estimate_digest"):
        with monkeypatch.context() as patch:
            patch.setattr(kernels, name, lambda *_: "another one")
            assert not is_known()
    assert is_known()


def test_kernels_that_slow_a_call_down_are_not_bound(measures: Measures, cache: KernelCache) -> None:
    measures.gain = 0.9
    built = build(cache)
    assert built.tuning is not None
    assert built.tuning.gain == 1.0
    for variable in built.tuning.root.children:
        assert built.tuning.chosen[variable.name] == variable.choices[variable.default]


def test_kernels_with_wrong_results_are_not_bound(measures: Measures, cache: KernelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_agree", lambda results, expected: results is expected)
    built = build(cache)
    assert built.tuning is not None
    assert len(built.tuning.history) == measures.trials == 1  # of the fastest kernels
    assert measures.calls == 0
    for variable in built.tuning.root.children:
        assert built.tuning.tree["removed"][variable.name] == dict.fromkeys(variable.choices[1:], "results are wrong")


@pytest.mark.parametrize(("end", "reason"), [("crash", "SIGSEGV"), ("hang", "does not return")])
def test_kernels_that_crash_or_hang_are_not_bound(
    measures: Measures, cache: KernelCache, monkeypatch: pytest.MonkeyPatch, end: str, reason: str
) -> None:
    ends = "ctypes.string_at(0)" if end == "crash" else "threading.Event().wait()"
    program = (
        "import ctypes, threading; from roller_svc.graph.wiring import checking; "
        "from roller_svc.runtime.graphs.switchable import BoundModel; "
        f"BoundModel.run = lambda *_: {ends}; checking.answer_checks(int(sys.argv[2]))"
    )
    monkeypatch.setattr(checking, "_PROGRAM", PREPARE + program)
    monkeypatch.setattr(kernels, "HANG_S", 60.0 if end == "crash" else 0.2)
    monkeypatch.setattr(kernels, "HANG_RATIO", 0.0)
    built = build(cache)
    assert built.tuning is not None
    assert measures.trials == 1
    for variable in built.tuning.root.children:
        removed = built.tuning.removed[variable.name]
        assert set(removed) == set(variable.choices[1:])
        assert all(reason in each for each in removed.values())


class Oracle:
    """Choices of one kernel, whose seconds depend on the kind of plan, and a timer of them."""

    def __init__(self) -> None:
        self.table = {"serial": (1.0, 2.0, 3.0), "rammer": (2.0, 3.0, 0.5)}
        variable = Variable("kernel:0", "kernel", ("a", "b", "c"), 0, "key", (0,))
        self.root, self.choices = Node("parallel", (variable,)), {"kernel:0": (0, "abc")}

    def is_right(self, name: str, choice: int) -> bool:
        return True

    def name(self, chosen: Mapping[str, int]) -> dict[str, str]:
        return {name: "abc"[choice] for name, choice in chosen.items()}

    def time_kernels(self, seconds: float) -> list[float]:
        return [seconds]

    def time_calls(self, models: Sequence[float]) -> list[float]:
        return list(models)


def choose_by(oracle: Any, tmp_path: Path, budget_trials: int) -> tuple[dict[str, int], str, Tuning]:
    def bind(kind: str, chosen: Mapping[str, int]) -> Any:
        return oracle.table[kind][chosen["kernel:0"]]

    def find_finalists(bests: Mapping[str, Mapping[str, int]]) -> Any:
        return {"used": 1.0} | {kind: bind(kind, best) for kind, best in bests.items()}

    def open_index(samples: int) -> ProfileIndex:
        return ProfileIndex(tmp_path / "wiring.sqlite", Origin("device", "driver", "generator"), min_samples=samples)

    tuning = Tuning(oracle.root)
    binders = {kind: partial(bind, kind) for kind in oracle.table}
    best, name = choose_kernels(oracle, oracle, open_index, tuning, binders, find_finalists, budget_trials=budget_trials)
    return dict(best), name, tuning


def test_kernels_are_explored_in_each_kind_of_plan(tmp_path: Path) -> None:
    """The kernel that is the fastest in one kind of plan is the slowest in the other one."""
    best, name, tuning = choose_by(Oracle(), tmp_path, 64)
    assert (best, name, tuning.trials, tuning.gain) == ({"kernel:0": 2}, "rammer", 3 + 3 + 3, 2.0)
    measured = [(each.choices["plan"], each.choices["kernel:0"]) for each in tuning.history]
    assert [kind for kind, _ in measured] == ["serial"] * 3 + ["rammer"] * 3
    assert sorted(measured) == sorted(itertools.product(("serial", "rammer"), "abc"))
    again = choose_by(Oracle(), tmp_path, 64)
    assert (again[:2], again[2].trials, again[2].chosen) == ((best, name), 0, tuning.chosen)


def test_a_budget_that_ends_leaves_other_kinds_of_plans_as_they_are(tmp_path: Path) -> None:
    best, name, tuning = choose_by(Oracle(), tmp_path, 3)
    assert (best, name, tuning.trials) == ({"kernel:0": 0}, "used", 3 + 2)


def test_a_budget_of_one_trial_keeps_the_fastest_kernels(measures: Measures, cache: KernelCache) -> None:
    built = build(cache, trials=1)
    assert built.tuning is not None
    assert (built.tuning.trials, built.tuning.gain) == (1, 1.0)


@pytest.mark.parametrize("ulps", [0, 1])
def test_exact_removes_kernels_with_other_bits(
    measures: Measures, cache: KernelCache, monkeypatch: pytest.MonkeyPatch, ulps: int
) -> None:
    """Results of other kernels than the fastest are those of the fastest, or the next number for one of three inputs."""
    plain, fastest = kernels._run_once, []

    def run_once(model: CpuCalls, sample: Sample) -> dict[str, Any]:
        keys = [kernel.source.key for kernel in model.plan.kernels]
        fastest.append(plain(model, sample)) if not measures.fastest or keys == measures.fastest else None
        measures.fastest = measures.fastest or keys
        expected = fastest[next(seed for seed in range(3) if draws[seed] is sample)]
        is_other = ulps and keys != measures.fastest and sample is draws[2]
        return {name: np.nextafter(array, np.inf, dtype=array.dtype) if is_other else array for name, array in expected.items()}

    draws: list[Sample] = []
    monkeypatch.setattr(kernels, "draw_sample", lambda plan, seed: draws.append(draw_sample(plan, seed)) or draws[-1])
    monkeypatch.setattr(kernels, "_run_once", run_once)
    built = build(cache, exact=True)
    assert built.tuning is not None
    assert len(draws) == kernels.EXACT_SAMPLES
    for variable in built.tuning.root.children:
        removed = built.tuning.removed.get(variable.name, {})
        assert removed == (dict.fromkeys(variable.choices[1:], "results have other bits") if ulps else {})


def test_no_trial_begins_after_the_budget(measures: Measures, cache: KernelCache) -> None:
    built = build(cache, budget_s=1e-9)
    assert built.tuning is not None
    assert (built.tuning.trials, measures.trials, built.tuning.gain) == (0, 0, 1.0)


@pytest.mark.parametrize(
    ("results", "agree"),
    [
        ([1.0, -2.0, 0.001], True),
        ([1.001, -2.0, 0.0], True),
        ([1.1, -2.0, 0.001], False),
        ([1.0, -2.0, np.nan], False),
    ],
)
def test_results_agree_up_to_rounding(results: list[float], agree: bool) -> None:
    expected = {"y": np.array([1.0, -2.0, 0.001], np.float32)}
    assert kernels._agree({"y": np.array(results, np.float32)}, expected) == agree


def test_measures_are_least_seconds(cache: KernelCache) -> None:
    """Real trials, which must end and be positive; what is faster here, nobody knows."""
    built = build(cache)
    assert built.tuning is not None
    assert built.tuning.gain >= 1.0
    assert all(seconds > 0 for trial in built.tuning.history for seconds in trial.seconds.values())
    assert built.link(MODEL)


@pytest.mark.slow
def test_trials_of_a_model_with_states_find_them_as_the_first(cache: KernelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state `sum` grows from call to call, and `at` would leave the range of an index."""
    text = "S[i, j] = s[i, j] + t[at[0], j]; N[i] = at[i] + 1; C[i, j] +=! A[i, k] * B[k, j]"
    operands = {"s": "sum", "t": "t", "at": "at", "A": "x", "B": "w"}
    counting = {"name": "n", "expression": text, "inputs": operands, "outputs": {"C": "y", "S": "next", "N": "after"}}
    counting["updates"] = {"S": "sum", "N": "at"}
    source = json_graph({"x": tensor(8, 64)}, {"w": constant(64, 48), "t": constant(8, 48)}, [counting], "y")
    source["states"] = {"sum": tensor(8, 48), "at": tensor(1, dtype="int32")}
    weights, agreed = Weights(), []
    agree = kernels._agree
    monkeypatch.setattr(kernels, "_agree", lambda *results: agreed.append(agree(*results)) or agreed[-1])
    monkeypatch.setattr(kernels, "MAX_RATIO", float("inf"))
    options = ModelOptions(restrict_cores(hardware.load("local"), 1), top_k=3, tune=TuneOptions(budget_trials=16))
    built = build_model(load_graph(source, weights), weights, options, cache)
    assert built.tuning is not None
    assert len(built.tuning.history) > 1
    assert all(agreed)
    assert len(agreed) >= len(built.tuning.history) - 1  # each kernel but the fastest was compared


def test_trials_need_this_machine() -> None:
    for spec, select, code in (
        ("nvidia-h200-sxm", SelectionMode.MEASURE, "cannot-measure"),
        ("local", SelectionMode.MODEL, "invalid-option"),
    ):
        with pytest.raises(ArgumentError) as caught:
            check_tuning(ModelOptions(hardware.load(spec), select=select, tune=TuneOptions()))
        assert caught.value.code == code


def test_a_model_without_kernels_is_not_measured(cache: KernelCache) -> None:
    builder, weights = builder_of()
    x = add_input(builder, "x", 4, 6)
    graph = builder.finish([("y", builder.call("reshape", [x], shape=[6, 4]))])
    built = build_model(graph, weights, ModelOptions(hardware.load("local"), tune=TuneOptions()), cache)
    assert built.tuning is not None
    assert built.tuning.trials == 0
