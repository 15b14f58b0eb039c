"""Layouts of images: equal results in every layout, and channels last where the model expects them to be faster."""

from __future__ import annotations

import pytest
from graphs import add_input, add_random, builder_of, check_equal

from roller_svc.graph.costs import CostTable
from roller_svc.graph.passes import run_passes
from roller_svc.graph.passes.fusion import fuse_operators
from roller_svc.graph.passes.layouts import choose_layouts, store_channels_last
from roller_svc.graph.weights import Weights
from roller_svc.hardware import load
from roller_svc.ir.graph import Graph, OpNode, verify

CPU = load("cpu-x86-avx2")


def inverted_residual(channels: int = 16, pixels: int = 14, expansion: int = 6) -> tuple[Graph, Weights]:
    """Two blocks of MobileNetV2 and a global pooling."""
    builder, weights = builder_of()
    x = y = add_input(builder, "x", 1, channels, pixels, pixels)
    wide = channels * expansion
    for seed in (0, 10):
        z = builder.call("conv2d", [y, add_random(builder, seed, wide, channels, 1, 1), add_random(builder, seed + 1, wide)])
        z = builder.call("relu", [z])
        z = builder.call("depthwise_conv2d", [z, add_random(builder, seed + 2, wide, 1, 3, 3)], padding=1)
        z = builder.call("relu", [z])
        z = builder.call("conv2d", [z, add_random(builder, seed + 3, channels, wide, 1, 1)])
        y = builder.call("add", [y, z])
    assert y is not x
    return builder.finish([("y", builder.call("reduce_mean", [y], axis=(2, 3), keepdims=False))]), weights


def images_of(graph: Graph) -> list[str]:
    return [t for node in graph.nodes for t in node.outputs if len(graph.types[t].shape) == 4]


def test_every_choice_of_layouts_gives_equal_results() -> None:
    graph, weights = inverted_residual(6, 5, 2)
    fused = fuse_operators(graph, CostTable(CPU))
    images = images_of(fused)
    assert len(images) >= 4
    for subset in range(1 << len(images)):
        chosen = frozenset(tensor for i, tensor in enumerate(images) if subset >> i & 1)
        stored = verify(store_channels_last(fused, chosen))
        for tensor in images:
            batch, channels, *pixels = fused.types[tensor].shape
            expected = (batch, *pixels, channels) if tensor in chosen else (batch, channels, *pixels)
            assert stored.types[tensor].shape == expected
        check_equal(graph, stored, weights)


def test_the_choice_is_the_cheapest_of_all() -> None:
    graph, _ = inverted_residual(24, 7, 4)
    costs = CostTable(CPU)
    fused = fuse_operators(graph, costs)
    images = images_of(fused)

    def seconds(of: Graph) -> float:
        known = [costs.cost(node, of.constants) for node in of.nodes if isinstance(node, OpNode)]
        return sum(cost.seconds for cost in known if cost is not None)

    subsets = [frozenset(t for i, t in enumerate(images) if n >> i & 1) for n in range(1 << len(images))]
    least = min(seconds(store_channels_last(fused, subset)) for subset in subsets)
    assert least < seconds(fused)
    assert seconds(choose_layouts(fused, costs)) == pytest.approx(least)


def test_mixed_layouts_are_estimated_only_where_they_may_pay() -> None:
    builder, _ = builder_of()
    y = add_input(builder, "x", 1, 3, 24, 24)  # fewer channels than lanes: planes are faster
    for seed in range(4):
        y = builder.call("depthwise_conv2d", [y, add_random(builder, seed, 3, 1, 3, 3)], padding=1)
    costs = CostTable(CPU)
    graph = fuse_operators(builder.finish([("y", y)]), costs)
    before = set(costs.stored)
    assert choose_layouts(graph, costs) is graph
    assert len(set(costs.stored) - before) == 3  # the first node, the last one, and the equal ones between


def test_the_better_layout_of_all_images_is_taken_without_estimates_of_mixed_ones() -> None:
    builder, _ = builder_of()
    y = add_input(builder, "x", 1, 64, 14, 14)
    for seed in range(4):
        y = builder.call("depthwise_conv2d", [y, add_random(builder, seed, 64, 1, 3, 3)], padding=1)
    costs = CostTable(CPU)
    graph = fuse_operators(builder.finish([("y", y)]), costs)
    before = set(costs.stored)
    after = choose_layouts(graph, costs)
    assert {node.output_types[0].shape for node in after.nodes[:-1]} == {(1, 14, 14, 64)}
    assert len(set(costs.stored) - before) == 3  # the first node, the last one, and the equal ones between


def test_inputs_outputs_views_and_copy_free_concatenations_stay() -> None:
    builder, weights = builder_of()
    x = add_input(builder, "x", 1, 32, 7, 7)
    wide = [builder.call("conv2d", [x, add_random(builder, i, 128, 32, 1, 1)]) for i in range(3)]
    joined = builder.call("concat", wide[:2], axis=1)
    flat = builder.call("reshape", [wide[2]], shape=(128, 49))
    graph = builder.finish([("raw", wide[0]), ("joined", joined), ("flat", builder.call("exp", [flat]))])
    after, _ = run_passes(graph, weights, CostTable(CPU))
    assert [node.output_types for node in choose_layouts(graph, CostTable(CPU)).nodes] == [
        node.output_types for node in graph.nodes
    ]
    check_equal(graph, after, weights)


def test_depthwise_blocks_are_stored_with_channels_last() -> None:
    graph, weights = inverted_residual(24, 28, 6)
    after, reports = run_passes(graph, weights, CostTable(CPU))
    assert reports[-1].name == "choose_layouts"
    assert any(after.types[t].shape == (1, 28, 28, 144) for node in after.nodes for t in node.outputs)
    check_equal(graph, after, weights)
