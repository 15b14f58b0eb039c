"""Seconds of CUDA graphs whose nodes start early, on plans made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from roller_svc import hardware
from roller_svc.codegen.cuda.ring import PageUse
from roller_svc.errors import require
from roller_svc.graph import model_story
from roller_svc.graph.lowerings.cuda_graph import estimate, has_programmatic_edges
from roller_svc.graph.lowerings.lowering import JoinedKernel, LoweringEstimate, OverlapEstimate, UnrolledPlan
from roller_svc.graph.model_story import StorySource
from roller_svc.graph.plan import PlannedModel
from roller_svc.ir.dtype import DType
from roller_svc.ir.graph import Graph
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.kernel import Buffer, KernelSource, Language, LaunchSpec, Resources, Role
from roller_svc.ir.model_plan import ARENA, WEIGHTS, Address, KernelStep, ModelKernel, ModelPlan

H200 = hardware.load("nvidia-h200-sxm")
LIMITS, RATE = H200.limits, H200.levels[0].bandwidth_bytes_per_s
PAGE, STAGES = 16384, 4
MATRIX = 64 << 20
NORM_S, PRODUCT_S = 3e-6, 20e-6


def plan_of(hw: HardwareSpec, norm_shared: int = 0, *, programmatic: bool = True, products: int = 1) -> UnrolledPlan:
    """A norm of one block, and products that stream: 132 blocks with four pages each in flight."""
    buffers = {"w": (Role.INPUT, MATRIX), "x": (Role.INPUT, 8192), "y": (Role.OUTPUT, 8192)}

    def kernel(args: tuple[str, ...], blocks: int, seconds: float) -> ModelKernel:
        used = tuple(Buffer(name, name, buffers[name][0], DType.UINT8, (buffers[name][1],)) for name in args)
        launch = LaunchSpec("k", args, (blocks, 1, 1), (256, 1, 1), programmatic=programmatic)
        source = KernelSource("k", Language.CUDA, hw.arch, "", used, (launch,), constants=("w",))
        return ModelKernel(source, seconds + LIMITS.launch_overhead_s, 1)

    kernels = (kernel(("x", "y"), 1, NORM_S), kernel(("w", "x", "y"), 132, PRODUCT_S))
    x, y, *results = [Address(ARENA, number * 8192) for number in range(2 + products)]
    norm = KernelStep("norm", 0, 0, (x, y))
    steps = (norm, *(KernelStep("product", 1, 0, (Address(WEIGHTS), y, result)) for result in results))
    plan = ModelPlan("m", hw.id, (), (), kernels, (), steps, (), MATRIX, MATRIX, 0, (2 + products) * 8192, 0, 3)
    use = PageUse((0,), PAGE, 8, 0, MATRIX, STAGES, 64, 132, busy_s=PRODUCT_S / 4)
    known = (JoinedKernel((Resources(32, norm_shared, 0),)), JoinedKernel((Resources(64, 5 * PAGE, 0),), None, (use,)))
    return UnrolledPlan(plan, steps, known)


def seconds_of(unrolled: UnrolledPlan, hw: HardwareSpec = H200) -> LoweringEstimate:
    result = estimate(unrolled, hw)
    assert isinstance(result, LoweringEstimate)
    return result


def test_a_node_behind_a_kernel_costs_less_and_fetches_its_first_pages() -> None:
    plain, early = seconds_of(plan_of(H200, programmatic=False)), seconds_of(plan_of(H200))
    node_s, early_s = LIMITS.graph_node_s, LIMITS.pdl_node_s
    assert node_s is not None
    assert early_s is not None
    assert plain == LoweringEstimate(pytest.approx(NORM_S + PRODUCT_S + LIMITS.launch_overhead_s + 2 * node_s), 1)
    first_s = 132 * STAGES * PAGE / RATE
    idle_s = NORM_S - 2 * 8192 / RATE + early_s
    assert early.overlap is not None
    assert early.overlap == OverlapEstimate(1, pytest.approx(min(first_s, idle_s)))
    assert early.seconds == pytest.approx(plain.seconds - (node_s - early_s) - early.overlap.hidden_s)


def test_a_node_is_idle_once_for_all_behind_it() -> None:
    early_s, first_s = LIMITS.pdl_node_s, 132 * STAGES * PAGE / RATE
    assert early_s is not None
    idle_s = NORM_S - 2 * 8192 / RATE
    for products in (2, 8):
        overlap = seconds_of(plan_of(H200, products=products)).overlap
        assert overlap is not None
        assert overlap.nodes == products
        assert overlap.hidden_s == pytest.approx(min(products * first_s, products * early_s + idle_s))


@pytest.mark.parametrize("products", [1, 2, 8])
def test_steps_of_a_story_take_the_seconds_that_the_estimate_adds(products: int) -> None:
    unrolled = plan_of(H200, products=products)
    estimated = seconds_of(unrolled)
    graph = Graph("m", (), {}, (), ())
    plan = replace(unrolled.plan, lowering="graph")
    source = StorySource(graph, (), (), (), plan, "graph", (), H200, estimated.seconds, unrolled.kernels)
    norm_s, *products_s = model_story._gpu_times(source, PlannedModel(plan, (), (), ())).launch_s
    assert norm_s + sum(products_s) + LIMITS.launch_overhead_s == pytest.approx(estimated.seconds)
    node_s, early_s = require(LIMITS.graph_node_s, "node"), require(LIMITS.pdl_node_s, "early node")
    assert norm_s == pytest.approx(NORM_S + node_s)
    first_s, idle_s = 132 * STAGES * PAGE / RATE, NORM_S - 2 * 8192 / RATE
    for seconds in products_s:  # memory is idle during the norm for the first ones alone
        saved_s = min(first_s, idle_s + early_s)
        idle_s -= max(0.0, saved_s - early_s)
        assert seconds == pytest.approx(PRODUCT_S + early_s - saved_s)


def test_blocks_that_do_not_share_a_core_hide_nothing() -> None:
    room = LIMITS.shared_bytes_per_core - 5 * PAGE - 2 * LIMITS.shared_bytes_reserved_per_block
    for shared, hides in ((room, True), (room + 1, False)):
        overlap = seconds_of(plan_of(H200, shared)).overlap
        assert overlap is not None
        assert overlap.nodes == 1
        assert (overlap.hidden_s > 0) == hides


@pytest.mark.parametrize("early_s", [None, LIMITS.graph_node_s])
def test_edges_are_plain_where_the_spec_does_not_say_that_others_cost_less(early_s: float | None) -> None:
    hw = replace(H200, limits=replace(LIMITS, pdl_node_s=early_s))
    assert has_programmatic_edges(H200)
    assert not has_programmatic_edges(hw)
    assert seconds_of(plan_of(hw), hw) == seconds_of(plan_of(hw, programmatic=False))
    assert not any(has_programmatic_edges(hardware.load(each)) for each in ("nvidia-a100-sxm-80gb", "amd-mi300x", "cpu-x86-avx2"))
