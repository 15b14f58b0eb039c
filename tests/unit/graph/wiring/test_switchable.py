"""Plans that are bound to one shared object compute what their own shared objects do."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gpu_models import MODELS, constant, node, tensor
from gpu_models import graph as json_graph
from graphs import load_linked

from roller_svc import hardware
from roller_svc.analysis.model_tables import list_functions
from roller_svc.codegen.c.model import MODEL
from roller_svc.compiler.kernel_cache import KernelCache
from roller_svc.errors import InvariantError
from roller_svc.graph import compile as graph_compile
from roller_svc.graph.compile import BuiltModel, ModelOptions, build_model
from roller_svc.graph.inputs import draw_sample
from roller_svc.graph.load import load_graph
from roller_svc.graph.weights import Weights, place_weights
from roller_svc.hardware.catalog import restrict_cores
from roller_svc.ir.model_plan import VDeviceStep
from roller_svc.ir.options import SelectionMode
from roller_svc.runtime.graphs.switchable import SwitchableModel

HW = restrict_cores(hardware.load("local"), 2)
MATMUL = "C[i, j] +=! A[i, k] * B[k, j]"
# one class of nodes, two of which have the same constant
PRODUCTS = json_graph(
    {"x": tensor(32, 64)},
    {"w": constant(64, 64), "v": constant(64, 64)},
    [node("a", MATMUL, A="x", B="w"), node("b", MATMUL, A="a", B="v"), node("c", MATMUL, A="b", B="w")],
    "a",
    "c",
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> KernelCache:
    return KernelCache(tmp_path_factory.mktemp("cache"))


def build(source: dict[str, Any], cache: KernelCache, plan: str, **options: Any) -> tuple[BuiltModel, Weights]:
    weights = Weights()
    chosen = ModelOptions(HW, select=SelectionMode.MODEL, top_k=1, plan=plan, **options)
    return build_model(load_graph(source, weights), weights, chosen, cache), weights


def switchable(built: BuiltModel, weights: Weights, cache: KernelCache, *others: BuiltModel) -> SwitchableModel:
    sources = [kernel.source for each in (built, *others) for kernel in each.plan.kernels]
    binary = graph_compile._link_switchable(built.plan, sources, cache, HW)
    return SwitchableModel(MODEL, binary, built.plan, sources, place_weights(built.plan, weights))


@pytest.mark.parametrize("source", [MODELS["states"], MODELS["branches"]], ids=["loop", "branches"])
def test_bound_plans_compute_the_bits_of_linked_ones_and_switch(source: dict[str, Any], cache: KernelCache) -> None:
    built, weights = build(source, cache, "serial")
    other, _ = build(source, cache, "parallel")
    sample = draw_sample(built.plan)
    program = switchable(built, weights, cache, other)
    models = [program.bind(each.plan) for each in (built, other, built)]
    linked = [load_linked(each, weights) for each in (built, other, built)]
    for _ in range(2):
        for bound, expected in zip(models, linked, strict=True):
            results = expected.run(sample.inputs)
            timed, moments = bound.run_timed(sample.inputs)
            assert len(moments) == len(expected.profile(sample.inputs))
            for each in (bound.run(sample.inputs), timed):
                assert {name: array.tobytes() for name, array in each.items()} == {
                    name: array.tobytes() for name, array in results.items()
                }
    if source is MODELS["branches"]:
        assert any(isinstance(step, VDeviceStep) for step in models[1].plan.steps)


def test_packed_weights_are_shared_by_plans_and_freed_with_the_last(cache: KernelCache) -> None:
    built, weights = build(PRODUCTS, cache, "serial")
    assert built.plan.packed_bytes
    program = switchable(built, weights, cache)
    first = program.bind(built.plan)
    packed = list(program._packed)
    assert len(packed) == 2  # of w and of v
    assert len(first.plan.prepack) > 0
    second = program.bind(built.plan)
    assert second.plan.prepack == ()
    assert list(program._packed) == packed
    sample = draw_sample(built.plan)
    expected = load_linked(built, weights).run(sample.inputs)["c"]
    np.testing.assert_array_equal(first.run(sample.inputs)["c"], expected)
    del first
    gc.collect()
    np.testing.assert_array_equal(second.run(sample.inputs)["c"], expected)
    assert list(program._packed) == packed
    del second
    gc.collect()
    assert not program._packed


def test_a_plan_of_unknown_kernels_constants_or_slots_is_refused(cache: KernelCache) -> None:
    built, weights = build(PRODUCTS, cache, "serial")
    program = switchable(built, weights, cache)
    unknown = replace(built.plan, weights=tuple(replace(each, digest="0") for each in built.plan.weights))
    for plan, message in ((unknown, "no constant"), (replace(built.plan, num_slots=99), "99 slots")):
        assert not program.can_bind(plan)
        with pytest.raises(InvariantError, match=message):
            program.bind(plan)
    assert program.can_bind(built.plan)
    program.functions = list_functions([])
    with pytest.raises(InvariantError, match="no function"):
        program.bind(built.plan)
