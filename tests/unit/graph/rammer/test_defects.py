"""Defects that NNFusion, the code of RAMMER, had: each as a test. Rows 14 and 24 of the feature table are here too.

Defects 1, 2, 6 and 12 are in tests/unit/codegen/cuda/test_persistent.py, defect 4 in tests/unit/runtime/test_cuda_models.py.
"""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_models import LAYER, MATMUL, MODELS, call, constant, graph, node, tensor
from persistent import Node, build_graph, spec

from roller_svc import hardware
from roller_svc.analysis.happens_before import check_plan
from roller_svc.compiler.action import action_digest
from roller_svc.compiler.request import build_request
from roller_svc.errors import ArgumentError, InvariantError
from roller_svc.graph import lowerings
from roller_svc.graph.costs import CostTable
from roller_svc.graph.interpret import interpret
from roller_svc.graph.load import load_graph
from roller_svc.graph.lowerings import choose_lowering, persistent
from roller_svc.graph.lowerings.lowering import LoweringEstimate, Refusal, UnrolledPlan
from roller_svc.graph.lowerings.segments import cut_into_segments
from roller_svc.graph.passes import run_passes
from roller_svc.graph.rammer.ranges import schedule_by_ranges
from roller_svc.graph.weights import Weights
from roller_svc.ir.constraints import WinogradMode
from roller_svc.ir.dtype import DType
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.model_plan import ARENA, FIRST_INPUT, CopyStep, KernelStep, VDeviceStep, unroll_steps
from roller_svc.ir.program import TensorType
from roller_svc.ir.vdevice import Execute, VDevicePlan, WaitEvent, executes
from roller_svc.model import Model, compile_model
from roller_svc.settings import read_settings, use

A100, CPU = "nvidia-a100-sxm-80gb", "cpu-x86-avx2"
CORES = 8


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    use(read_settings(cache=folder))
    yield folder
    use(read_settings())


@pytest.fixture(autouse=True)
def few_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    load = hardware.load

    def load_small(target: str) -> Any:
        hw = load(target)
        return dataclasses.replace(hw, num_cores=min(CORES, hw.num_cores))

    monkeypatch.setattr(hardware, "load", load_small)


def compiled(source: dict[str, Any], target: str = A100, **options: Any) -> Model:
    runtime = "auto" if target == CPU else "emulator"
    return compile_model(copy.deepcopy(source), target, select="model", top_k=1, runtime=runtime, **options)


# defects --------------------------------------------------------------------------------------------------------------


def test_defect_3_ranges_of_rtasks_do_not_overlap() -> None:
    rng = random.Random(7)
    for _ in range(200):
        num_tasks = [rng.choice([1, 2, 7, 64, 300]) for _ in range(rng.randint(1, 6))]
        plan = schedule_by_ranges(num_tasks, [()] * len(num_tasks), rng.randint(1, 9))
        ranges = sorted((each.operator, each.first, each.first + each.count) for _, _, each in executes(plan))
        for (operator, _, end), (other, first, _) in pairwise(ranges):
            assert operator != other or end == first
    overlapping = VDevicePlan((4,), ((Execute(0, 0, 3),), (Execute(0, 2, 2),)))
    with pytest.raises(InvariantError, match="rTask 2 of rOperator 0 is executed twice"):
        check_plan(overlapping)


def test_defect_5_waits_that_others_imply_are_gone_from_the_plan() -> None:
    chain = schedule_by_ranges([8] * 6, [(), (0,), (0, 1), (0, 1, 2), (0, 3), (1, 4)], 4)
    for program in chain.programs:
        assert [each.event for each in program if isinstance(each, WaitEvent)] == [0, 1, 2, 3, 4]
    # one vEU executes 0 and then 1: the others wait for 1 alone, which implies 0
    apart = schedule_by_ranges([1, 1, 8], [(), (0,), (0, 1)], 4)
    waits = [[each for each in program if isinstance(each, WaitEvent)] for program in apart.programs]
    assert sorted(map(len, waits)) == [0, 1, 1, 1]
    assert apart.events == (1,)


def test_defect_7_tensors_between_operators_of_one_kernel_are_no_outputs_and_share_memory() -> None:
    model = compiled(LAYER, plan="persistent")
    plan = model._variants[0].plan
    (step,) = plan.steps
    assert isinstance(step, KernelStep)
    assert [name for name, _ in plan.outputs] == ["out"]
    slots = {at.slot for at in step.arguments if at is not None}
    assert max(slots) == FIRST_INPUT + len(plan.inputs) + len(plan.outputs) - 1
    (events,) = (at.offset_bytes for at, _ in step.zeroed if at.slot == ARENA)  # behind the tensors
    assert events < plan.tensor_bytes


def test_defect_8_a_kernel_is_not_joined_around_a_launch_that_it_waits_for() -> None:
    # 0 and 2 join, 1 cannot: 0 -> 1 -> 2 and 0 -> 2
    segments = cut_into_segments([(), (0,), (0, 1), (0,), (2,)], [True, False, True, True, True])
    assert [(each.steps, each.is_joined) for each in segments] == [((0, 3), True), ((1,), False), ((2, 4), True)]


def test_defect_9_what_has_no_time_is_not_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    model = compiled(MODELS["branches"], plan="launches")
    plan, hw = model._variants[0].plan, hardware.load(A100)
    fails = [dataclasses.replace(each, estimate=lambda *_: Refusal("it failed")) for each in lowerings.LOWERINGS]
    for kept, each in enumerate(lowerings.LOWERINGS[:2]):
        monkeypatch.setattr(lowerings, "LOWERINGS", (*fails[:kept], each, *fails[kept + 1 :]))
        assert choose_lowering(None, [(plan, ())], hw).kind == each.kind
        with pytest.raises(ArgumentError, match="it failed"):
            choose_lowering(fails[1 - kept].kind, [(plan, ())], hw)

    def estimate_others(unrolled: UnrolledPlan, _: HardwareSpec) -> LoweringEstimate | Refusal:
        return Refusal("it failed") if unrolled.plan is plan else LoweringEstimate(1.0, 1)

    partial = dataclasses.replace(persistent.PERSISTENT, estimate=estimate_others)
    monkeypatch.setattr(lowerings, "LOWERINGS", (*fails[:3], partial))
    for kind in (None, partial.kind):
        chosen = choose_lowering(kind, [(plan, ()), (dataclasses.replace(plan, name="other"), ())], hw)
        assert (chosen.kind, chosen.plan_number, chosen.seconds) == (partial.kind, 1, 1.0)


def test_defect_10_extents_with_equal_digits_have_different_keys() -> None:
    def digest(*shape: int) -> str:
        return action_digest(build_request("y[i, j] = x[i, j] + 1", {"x": TensorType(DType.FLOAT32, shape)}, target=A100))

    assert len({digest(1, 128), digest(11, 28), digest(112, 8)}) == 3


def test_defect_11_dead_nodes_are_not_scheduled_and_places_survive_fusion() -> None:
    source = graph(
        {"x": tensor(4, 8)},
        {},
        [
            node("a", "C[i, j] = A[i, j] * 2", A="x"),
            node("b", "C[i, j] = max(A[i, j], 0)", A="a"),
            node("dead", "C[i] +=! A[i, j]", A="b"),
            node("e", "C[i, j] = A[i, j] - 1", A="x"),
            call("both", "concat", "b", "e", axis=0),
        ],
        "both",
    )
    for target in (A100, CPU):
        plan = compiled(source, target, plan="serial")._variants[0].plan
        steps = list(unroll_steps(plan.steps))
        assert sorted(step.node for step in steps) == ["a+b", "e"]
        assert not any(isinstance(step, CopyStep) for step in steps)  # the parts are written where the whole lies


# rows of the feature table --------------------------------------------------------------------------------------------


def test_row_14_sigmoid_matmul_relu_is_one_launch_that_waits_where_data_needs_it() -> None:
    types = {"a": tensor(1024, 1024), "b": tensor(1024, 128)}
    nodes = [
        node("sigmoid", "C[i, j] = 1 / (1 + exp(-A[i, j]))", A="a"),
        node("product", MATMUL, A="sigmoid", B="b"),
        node("relu", "C[i, j] = max(A[i, j], 0)", A="product"),
    ]
    weights, hw = Weights(), spec(A100, 108)
    loaded = load_graph(graph(types, {}, nodes, "sigmoid", "relu"), weights)
    fused, _ = run_passes(loaded, weights, CostTable(hw, WinogradMode.AUTO), fuse=True)
    assert [each.name for each in fused.nodes] == ["sigmoid", "product+relu"]  # relu needs no wait
    built = build_graph(
        [
            Node("S[i, j] = 1 / (1 + exp(-A[i, j]))", {"A": "A"}, {"S": "S"}),
            Node("C[i, j] +=! S[i, k] * B[k, j]; R[i, j] = max(C[i, j], 0)", {"S": "S", "B": "B"}, {"R": "R"}),
        ],
        {"A": TensorType(DType.FLOAT32, (1024, 1024)), "B": TensorType(DType.FLOAT32, (1024, 128))},
        ["S", "R"],
        hw,
    )
    plan = built.plan()
    assert len(built.kernel().source.launches) == 1
    assert len(plan.events) == len(built.operators) - 1
    waits = [(veu, i) for veu, p in enumerate(plan.programs) for i, each in enumerate(p) if isinstance(each, WaitEvent)]
    assert waits
    for veu, i in (waits[0], waits[-1]):
        program = plan.programs[veu]
        without = (*plan.programs[:veu], (*program[:i], *program[i + 1 :]), *plan.programs[veu + 1 :])
        with pytest.raises(InvariantError, match="depends on"):
            built.kernel(dataclasses.replace(plan, programs=without))


@pytest.mark.two_cores
@pytest.mark.emulator
def test_row_24_plans_of_one_graph_are_lowered_to_cuda_and_to_c() -> None:
    source = graph(
        {"x": tensor(24, 32)},
        {"w": constant(32, 16), "v": constant(32, 16)},
        [
            node("left", MATMUL, A="x", B="w"),
            node("right", MATMUL, A="x", B="v"),
            node("joined", "C[i, j] +=! A[i, k] * B[j, k]", A="left", B="right"),
        ],
        "joined",
    )
    x = np.random.default_rng(3).standard_normal((24, 32)).astype(np.float32)
    weights = Weights()
    wanted = interpret(load_graph(copy.deepcopy(source), weights), weights, {"x": x})["joined"]
    on_cpu = compiled(source, CPU, plan="parallel", threads=2)
    on_gpu = compiled(source, A100, plan="persistent")
    assert any(isinstance(step, VDeviceStep) for step in on_cpu._variants[0].plan.steps)
    assert any("event_wait" in kernel.compiled.source.text for kernel in on_gpu._kernel_bundles)
    for model in (on_cpu, on_gpu):
        np.testing.assert_allclose(model.run({"x": x})["joined"], wanted, rtol=1e-5, atol=1e-5)
