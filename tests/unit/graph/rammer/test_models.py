"""Models by plans of a virtual device: the same results as by launches one after the other."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roller_svc.codegen.c import model as c_model
from roller_svc.errors import ArgumentError, IndexRangeError
from roller_svc.graph.interpret import interpret
from roller_svc.graph.load import load_graph
from roller_svc.graph.weights import Weights
from roller_svc.model import Model, compile_model, load_model
from roller_svc.runtime.thread_pool import limit_threads
from roller_svc.settings import read_settings, use

pytestmark = pytest.mark.two_cores
RNG = np.random.default_rng(0)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    use(read_settings(cache=folder))
    yield folder
    use(read_settings())


def constant(*shape: int) -> dict[str, Any]:
    return {"dtype": "float32", "shape": list(shape), "values": (RNG.standard_normal(shape) / shape[-1]).tolist()}


def node(name: str, expression: str, inputs: dict[str, str]) -> dict[str, Any]:
    return {"name": name, "expression": expression, "inputs": inputs, "outputs": {"C": name}}


# A row for each family of kernels, two branches that do not depend on each other, and one operator that joins them.
BRANCHES = {
    "format": "roller-graph/1",
    "name": "branches",
    "inputs": {"x": {"dtype": "float32", "shape": [384, 256]}, "image": {"dtype": "float32", "shape": [1, 32, 56, 56]}},
    "constants": {"w": constant(256, 192), "v": constant(256, 192), "f": constant(32, 32, 3, 3)},
    "nodes": [
        node("left", "C[i, j] +=! A[i, k] * B[k, j]", {"A": "x", "B": "w"}),
        node("right", "C[i, j] +=! A[i, k] * B[k, j]", {"A": "x", "B": "v"}),
        {"name": "soft", "operator": "softmax", "inputs": ["left"], "outputs": ["soft"], "parameters": {}},
        node("tall", "C[j, i] = A[i, j]", {"A": "right"}),
        {"name": "conv", "operator": "conv2d", "inputs": ["image", "f"], "outputs": ["conv"],
         "parameters": {"padding": [1, 1]}},
        {"name": "pool", "operator": "max_pool2d", "inputs": ["conv"], "outputs": ["pool"],
         "parameters": {"kernel": [2, 2], "stride": [2, 2]}},
        node("joined", "C[i, j] = A[i, j] * B[j, i] + D[0, i % 16, j % 10, 3]",
             {"A": "soft", "B": "tall", "D": "pool"}),
    ],
    "outputs": {"y": "joined", "pool": "pool"},
}  # fmt: skip
ARRAYS = {
    "x": RNG.standard_normal((384, 256)).astype(np.float32),
    "image": RNG.standard_normal((1, 32, 56, 56)).astype(np.float32),
}


def compiled(plan: Any, **options: Any) -> Model:
    given = {"select": "model", "top_k": 1, "threads": 2, "plan": plan} | options
    return compile_model(copy.deepcopy(BRANCHES), **given)


@pytest.fixture(scope="module")
def serial() -> Model:
    return compiled("serial")


def expected() -> dict[str, np.ndarray]:
    weights = Weights()
    return interpret(load_graph(copy.deepcopy(BRANCHES), weights), weights, ARRAYS)


def run(model: Model) -> dict[str, np.ndarray]:
    return model.run(ARRAYS)


def assert_same(model: Model, want: dict[str, np.ndarray]) -> None:
    for name, value in run(model).items():
        np.testing.assert_array_equal(value, want[name], err_msg=name)


def with_random_tasks(plan: dict[str, Any], seed: int) -> dict[str, Any]:
    """Return a serial plan in which two vEUs execute the rTasks of each launch, in a random order."""
    rng = random.Random(seed)
    steps = []
    for step in plan["steps"]:
        phases = plan["kernels"][step["kernel"]]["num_tasks"][step["launch"]] if "kernel" in step else []
        if not phases:
            steps.append(step)
            continue
        programs: list[list[dict[str, Any]]] = [[], []]
        for phase, tasks in enumerate(phases):
            order = rng.sample(range(tasks), tasks)
            if phase:
                ends = [len(program) - 1 for program in programs]
                for veu, program in enumerate(programs):
                    program += [{"wait": [[1 - veu, ends[1 - veu]]]}] if ends[1 - veu] >= 0 else []
            for task in order:
                programs[rng.randrange(2)].append({"execute": [phase, task, 1]})
        operators = [[0, phase] for phase in range(len(phases))]
        vdevice = {"num_tasks": phases, "programs": programs}
        steps.append({"node": step["node"], "steps": [step], "operators": operators, "vdevice": vdevice})
    return {"steps": steps}


@pytest.mark.slow
def test_row_16_rtasks_in_a_random_order_compute_the_same(serial: Model) -> None:
    want = run(serial)
    for name, value in expected().items():
        np.testing.assert_allclose(want[name], value, rtol=1e-4, atol=1e-5)
    assert sum(len(each) for kernel in serial.plan["kernels"] for each in kernel["num_tasks"]) >= 4
    for seed in range(3):
        assert_same(compiled(with_random_tasks(serial.plan, seed)), want)


@pytest.mark.parametrize("kind", ["rammer", "parallel"])
def test_row_17_a_plan_by_hand_computes_the_same(serial: Model, kind: str, tmp_path: Path) -> None:
    model = compiled(kind)
    assert model.plan["kind"] == kind
    assert model.plan["veus"] == 2
    assert_same(model, run(serial))
    again = compiled(model.plan)
    assert again.plan["steps"] == model.plan["steps"]
    assert again.plan["kind"] == "by hand"
    assert_same(again, run(serial))
    model.save(tmp_path / "saved")
    assert_same(load_model(tmp_path / "saved"), run(serial))


@pytest.mark.parametrize("threads", [1, 2])
def test_any_number_of_threads_runs_a_plan(serial: Model, threads: int) -> None:
    model = compiled("parallel")
    with limit_threads(threads):
        for _ in range(20):
            assert_same(model, run(serial))


def _swap(plan: dict[str, Any]) -> None:
    plan["steps"].reverse()


def _forget(plan: dict[str, Any]) -> None:
    plan["steps"].pop()


def _repeat(plan: dict[str, Any]) -> None:
    plan["steps"].append(plan["steps"][0])


def _rename(plan: dict[str, Any]) -> None:
    plan["steps"][0]["node"] = "other"


def _wait_for_nothing(plan: dict[str, Any]) -> None:
    next(step for step in plan["steps"] if "vdevice" in step)["vdevice"]["programs"][0][0] = {"wait": [[1, 10_000]]}


def _drop_waits(plan: dict[str, Any]) -> None:
    for step in plan["steps"]:
        for program in step["vdevice"]["programs"] if "vdevice" in step else []:
            for number, instruction in enumerate(program):
                if "wait" in instruction:
                    program[number] = {"wait": [[1 - step["vdevice"]["programs"].index(program), 0]]}


def _remove_operator(plan: dict[str, Any]) -> None:
    next(step for step in plan["steps"] if "vdevice" in step)["operators"].pop()


@pytest.mark.parametrize(
    ("kind", "edit"),
    [
        ("serial", _swap),
        ("serial", _forget),
        ("serial", _repeat),
        ("serial", _rename),
        ("parallel", _wait_for_nothing),
        ("parallel", _drop_waits),
        ("parallel", _remove_operator),
    ],
)
def test_row_17_an_illegal_plan_is_refused(kind: str, edit: Any) -> None:
    plan = copy.deepcopy(compiled(kind).plan)
    edit(plan)
    with pytest.raises(ArgumentError) as refused:
        compiled(plan)
    assert refused.value.code == "invalid-plan"


@pytest.mark.slow
def test_row_18_a_hundred_runs_with_random_delays_agree_bit_for_bit(serial: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Delays before rTasks, in a shared object that is built with them."""
    plain = c_model.model_unit
    delay = "static _Thread_local unsigned state = 1; state = state * 1664525 + 1013904223 + (unsigned)(long)&state;"
    spin = "for (volatile unsigned i = state >> 16; i; i--);"

    def delayed(plan: Any) -> str:
        text = plain(plan)
        head = "static void execute(struct device *device, struct veu *veu, const struct instruction *i) {\n"
        assert head in text
        return text.replace(head, f"{head}  {delay} {spin}\n")

    monkeypatch.setattr("roller_svc.graph.compile.model_unit", delayed)
    want = run(serial)
    for kind in ("parallel", "rammer"):
        model = compiled(kind)
        for _ in range(100):
            assert_same(model, want)


@pytest.mark.slow
def test_row_19_times_are_labelled(serial: Model) -> None:
    modelled, measured = compiled("auto"), compiled("auto", select="measure", top_k=2)
    assert modelled.report["plan_is_measured"] is False
    assert measured.report["plan_is_measured"] is True
    for model in (modelled, measured):
        assert set(model.report["plan_seconds"]) >= {"serial"}
        assert all(seconds > 0 for seconds in model.report["plan_seconds"].values())
        assert_close(run(model))


@pytest.mark.slow
def test_row_23_static_and_dynamic_execution_agree(serial: Model) -> None:
    """A serial plan deals out tasks at run time, RAMMER's at compile time."""
    model = compiled("rammer", select="measure", top_k=2)
    assert {"serial", "rammer"} <= set(model.report["plan_seconds"])
    assert_close(run(model))


def assert_close(results: dict[str, np.ndarray]) -> None:
    for name, value in expected().items():
        np.testing.assert_allclose(results[name], value, rtol=1e-4, atol=1e-5)


def test_a_profile_has_the_vEU_of_each_step() -> None:
    model = compiled("parallel")
    profile = model.profile(ARRAYS)
    assert {step.veu for step in profile} == {0, 1}
    assert {step.operator for step in profile} >= {each["node"] for each in _inner(model.plan)}
    assert all(0 <= step.start_s <= step.end_s for step in profile)


def _inner(plan: dict[str, Any]) -> list[dict[str, Any]]:
    return [inner for step in plan["steps"] for inner in (step["steps"] if "vdevice" in step else [step])]


@pytest.mark.parametrize("plan", ["serial", "parallel"])
def test_an_index_out_of_range_is_found_in_every_call(plan: str) -> None:
    source = {
        "format": "roller-graph/1", "name": "gather", "constants": {},
        "inputs": {"i": {"dtype": "int64", "shape": [4]}, "x": {"dtype": "float32", "shape": [8]}},
        "nodes": [node("a", "C[n] = A[I[n]] * 2", {"A": "x", "I": "i"}), node("b", "C[n] = exp(A[n])", {"A": "x"})],
        "outputs": {"a": "a", "b": "b"},
    }  # fmt: skip
    model = compile_model(source, plan=plan, threads=2, select="model", top_k=1)
    x = np.arange(8, dtype=np.float32)
    for _ in range(2):  # an error does not affect later calls
        np.testing.assert_array_equal(model(i=np.array([0, 7, 1, 2]), x=x)["a"], [0, 14, 2, 4])
        with pytest.raises(IndexRangeError, match="node 'a'"):
            model(i=np.array([0, 8, 1, 2]), x=x)
