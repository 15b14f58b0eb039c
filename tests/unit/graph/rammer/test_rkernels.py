"""Models whose operators have two rKernels: the fastest on all workers and the most efficient one."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roller_svc.compiler import efficient, pipeline
from roller_svc.errors import ArgumentError
from roller_svc.graph import choose
from roller_svc.graph.plan import PlannedStep
from roller_svc.graph.rammer.schedules import StepTimes, find_segments, make_schedule
from roller_svc.ir.dtype import DType
from roller_svc.ir.hardware import Arch
from roller_svc.ir.kernel import Buffer, KernelSource, Language, LaunchSpec, Phase, Role
from roller_svc.ir.model_plan import ModelKernel, ROperator
from roller_svc.ir.report import CandidateResult
from roller_svc.model import Model, compile_model, load_model
from roller_svc.settings import read_settings, use

pytestmark = pytest.mark.two_cores
RNG = np.random.default_rng(0)
US = 1e-6


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    use(read_settings(cache=folder))
    yield folder
    use(read_settings())


@pytest.fixture(scope="module", autouse=True)
def always_efficient() -> Iterator[None]:
    """Take a kernel of one task whenever the model expects it to save anything; the cache keeps that choice."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(efficient, "MODELLED_RATIO", 1.0)
        yield


def tower(number: int) -> list[dict[str, Any]]:
    """Return products of a vector and a matrix that depend on each other, and on no other tower."""
    product = "C[n] +=! A[k] * B[k, n]"
    return [
        {
            "name": f"wide{number}",
            "expression": product,
            "inputs": {"A": f"x{number}", "B": f"w{number}"},
            "outputs": {"C": f"wide{number}"},
        },
        {
            "name": f"bent{number}",
            "expression": "C[n] = tanh(A[n])",
            "inputs": {"A": f"wide{number}"},
            "outputs": {"C": f"bent{number}"},
        },
        {
            "name": f"thin{number}",
            "expression": product,
            "inputs": {"A": f"bent{number}", "B": f"v{number}"},
            "outputs": {"C": f"y{number}"},
        },
    ]


# As inputs: matrices that are constants are packed, and packed products have no other rKernel.
SHAPES = {
    **{f"x{i}": (256,) for i in range(3)}, **{f"w{i}": (256, 512) for i in range(3)},
    **{f"v{i}": (512, 512) for i in range(3)},
}  # fmt: skip
TOWERS = {
    "format": "roller-graph/1",
    "name": "towers",
    "inputs": {name: {"dtype": "float32", "shape": list(shape)} for name, shape in SHAPES.items()},
    "constants": {},
    "nodes": [node for i in range(3) for node in tower(i)],
    "outputs": {f"y{i}": f"y{i}" for i in range(3)},
}
ARRAYS = {name: (RNG.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32) for name, shape in SHAPES.items()}


def compiled(plan: Any, **options: Any) -> Model:
    given = {"select": "model", "top_k": 8, "threads": 2, "plan": plan} | options
    return compile_model(copy.deepcopy(TOWERS), **given)


def steps_of(plan: dict[str, Any]) -> list[dict[str, Any]]:
    return [inner for step in plan["steps"] for inner in step.get("steps", [step])]


def assert_same(model: Model, want: dict[str, np.ndarray]) -> None:
    for name, value in model.run(ARRAYS).items():
        np.testing.assert_allclose(value, want[name], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.fixture(scope="module")
def serial() -> Model:
    return compiled("serial")


@pytest.fixture(scope="module")
def parallel() -> Model:
    return compiled("parallel")


def test_row_20_an_operator_on_one_veu_runs_its_most_efficient_rkernel(serial: Model, parallel: Model, tmp_path: Path) -> None:
    assert [step["rkernel"] for step in steps_of(parallel.plan)] == [1] * 6
    numbers = {step["kernel"] for step in steps_of(parallel.plan)}
    assert [parallel.plan["kernels"][number]["num_tasks"] for number in numbers] == [[[]], [[]]]
    assert [kernel.uses for kernel in parallel.kernels] == [0, 0, 3, 3]
    want = {name: value.copy() for name, value in serial.run(ARRAYS).items()}
    for number in range(3):
        value = np.tanh(ARRAYS[f"x{number}"] @ ARRAYS[f"w{number}"]) @ ARRAYS[f"v{number}"]
        np.testing.assert_allclose(want[f"y{number}"], value, rtol=1e-4, atol=1e-5)
    for _ in range(20):
        assert_same(parallel, want)
    parallel.save(tmp_path / "saved")
    assert_same(load_model(tmp_path / "saved"), want)


def test_a_serial_plan_has_no_other_kernels(serial: Model) -> None:
    assert all("rkernel" not in step for step in steps_of(serial.plan))
    assert [kernel.uses for kernel in serial.kernels] == [3, 3]


def test_row_17_a_plan_by_hand_names_rkernels(serial: Model, parallel: Model, tmp_path: Path) -> None:
    want = {name: value.copy() for name, value in serial.run(ARRAYS).items()}
    again = compiled(parallel.plan)
    assert again.plan["steps"] == parallel.plan["steps"]
    mixed = copy.deepcopy(serial.plan)
    mixed["steps"][2]["rkernel"] = 1
    model = compiled(mixed)
    assert [step.get("rkernel", 0) for step in model.plan["steps"]] == [0, 0, 1, 0, 0, 0]
    assert [kernel.uses for kernel in model.kernels] == [2, 3, 1]
    assert_same(model, want)
    model.save(tmp_path / "saved")
    loaded = load_model(tmp_path / "saved")
    assert loaded.plan["steps"] == model.plan["steps"]
    assert_same(loaded, want)


@pytest.mark.parametrize("rkernel", [2, -1, "1", None])
def test_an_unknown_rkernel_is_refused(serial: Model, rkernel: Any) -> None:
    plan = copy.deepcopy(serial.plan)
    plan["steps"][0]["rkernel"] = rkernel
    with pytest.raises(ArgumentError) as refused:
        compiled(plan)
    assert refused.value.code == "invalid-plan"


def test_a_node_without_another_rkernel_refuses_it(serial: Model) -> None:
    plan = copy.deepcopy(serial.plan)
    plan["steps"][0]["rkernel"] = 1
    with pytest.raises(ArgumentError, match="has no rKernel 1"):
        compiled(plan, top_k=1)


@pytest.mark.parametrize("phase", [0, 1, -1, "0", 0.5])
def test_a_phase_that_an_rkernel_does_not_have_is_refused(parallel: Model, phase: Any) -> None:
    plan = copy.deepcopy(parallel.plan)
    plan["steps"][0]["operators"][0] = [0, phase]  # the launch of its efficient rKernel has no phases
    with pytest.raises(ArgumentError) as refused:
        compiled(plan)
    assert refused.value.code == "invalid-plan"


def test_the_cache_keeps_both_kernels(parallel: Model, cache: Path) -> None:
    assert len(list((cache / "efficient").iterdir())) >= 2
    again = compiled("parallel")
    assert again.report["cache"]["misses"] == 0
    assert again.digest == parallel.digest


@pytest.mark.slow
def test_measured_plans_time_both_rkernels(monkeypatch: pytest.MonkeyPatch, serial: Model) -> None:
    """Replace the times of candidates and of steps, which depend on what else the machine does."""
    measure_all, measure, least_times, calls = (
        pipeline.measure_candidates, efficient.measure, choose._least_times, count(1)
    )  # fmt: skip

    def prefer_tasks(*given: Any) -> tuple[CandidateResult, ...]:
        return tuple(
            replace(each, measurement=replace(each.measurement, min_s=1 / each.plan.choices[0].program.grid))
            for each in measure_all(*given)
            if each.measurement is not None
        )

    monkeypatch.setattr(pipeline, "measure_candidates", prefer_tasks)
    monkeypatch.setattr(efficient, "measure", lambda *given: replace(measure(*given), min_s=1 / 2 ** next(calls)))
    ways = iter((40 * US, 30 * US, 20 * US))  # a step on one worker, on all, and its most efficient rKernel on one
    monkeypatch.setattr(choose, "_least_times", lambda *given: (next(ways),) * len(least_times(*given)))
    model = compiled("parallel", select="measure", top_k=4)
    assert model.report["plan_is_measured"] is True
    assert any("rkernel" in step for step in steps_of(model.plan))
    assert_same(model, {name: value.copy() for name, value in serial.run(ARRAYS).items()})


def kernel(*tasks: int) -> ModelKernel:
    x, y = (Buffer(name, name, role, DType.FLOAT32, (64,)) for name, role in (("x", Role.INPUT), ("y", Role.OUTPUT)))
    phases = tuple(Phase(f"phase{i}", ("x", "y"), each) for i, each in enumerate(tasks))
    launch = LaunchSpec("run", ("x", "y"), phases=phases)
    return ModelKernel(KernelSource("k", Language.C, Arch("x86-64-v", 3), "", (x, y), (launch,)), 1e-6, 0)


def wave(width: int, efficient_s: float | None) -> tuple[list[PlannedStep], StepTimes]:
    """Return steps of 16 rTasks, 40 us on one worker, that do not depend on each other."""
    steps = [PlannedStep(f"n{i}", (), 0, 0, (16,), efficient=kernel()) for i in range(width)]
    return steps, StepTimes((40 * US,) * width, (6 * US,) * width, False, (efficient_s,) * width)


@pytest.mark.parametrize(
    ("width", "efficient_s", "rkernel"),
    [
        (8, 20 * US, 1),
        (8, 39 * US, 1),
        (2, 20 * US, 0),
        (8, None, 0),
    ],
)
def test_row_20_wide_waves_take_efficient_rkernels(width: int, efficient_s: float | None, rkernel: int) -> None:
    steps, times = wave(width, efficient_s)
    (segment,) = find_segments("rammer", steps, times, 8)
    (launch,) = make_schedule("rammer", times, 8)(steps)
    assert segment.plan is not None
    assert segment.rkernels == launch.rkernels == (rkernel,) * width
    assert launch.operators == tuple(ROperator(i, None if rkernel else 0) for i in range(width))


def test_row_20_a_choice_that_ends_later_is_not_taken() -> None:
    """The efficient rKernels are faster in the first wave. They leave less time for the next one beside it."""
    steps, _ = wave(3, None)
    steps.append(PlannedStep("last", (0,), 0, 0, (16,)))
    alone_s, launch_s = (40 * US,) * 4, (12 * US,) * 4
    times = StepTimes(alone_s, launch_s, is_measured=False, efficient_s=(33 * US,) * 3 + (None,))
    segments = find_segments("rammer", steps, times, 4)
    assert segments == find_segments("rammer", steps, StepTimes(alone_s, launch_s, is_measured=False), 4)
    assert not any(rkernel for segment in segments for rkernel in segment.rkernels)
