"""Dequantized constants that products of floats dequantize themselves: bits, zero points, transposes, what stays folded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from dot_specs import BYTES_SPEC
from graphs import add_input, builder_of, operators, random_arrays

from roller_svc import hardware
from roller_svc.frontend.graph_builder import GraphBuilder
from roller_svc.frontend.ops.operator import Operand
from roller_svc.graph.costs import CostTable
from roller_svc.graph.interpret import interpret
from roller_svc.graph.passes.dead import remove_dead_nodes
from roller_svc.graph.passes.quantization import sum_integers
from roller_svc.graph.weights import Weights
from roller_svc.ir.dtype import DType
from roller_svc.ir.graph import FUSED, Graph, verify
from roller_svc.ir.hardware import HardwareSpec

S8, U8 = DType.INT8, DType.UINT8


def with_memory(hw: HardwareSpec, bandwidth_bytes_per_s: float) -> HardwareSpec:
    """A CPU whose caches hold 2 MiB, so that larger constants come from memory."""
    caches = tuple(replace(level, capacity_bytes=min(level.capacity_bytes, 2 << 20)) for level in hw.levels[1:])
    return replace(hw, num_cores=1, levels=(replace(hw.dram, bandwidth_bytes_per_s=bandwidth_bytes_per_s), *caches))


SLOW = with_memory(hardware.load("cpu-x86-avx512"), 2e10)


def constant(builder: GraphBuilder, array: np.ndarray[Any, Any]) -> Operand:
    return builder.add_constant(array, DType(array.dtype.name))


def weight(
    builder: GraphBuilder, shape: tuple[int, int], low: int, high: int, dtype: DType, *, block: int = 32, zeros: bool = False
) -> Operand:
    """A dequantized matrix with a scale for each block along the last dimension, with the ends of its integers."""
    random = np.random.default_rng(3)
    integers = random.integers(low, high + 1, shape).astype(dtype.value)
    integers[0, :2] = low, high
    blocks = (shape[0], -(-shape[1] // block))
    operands = [constant(builder, integers), constant(builder, random.uniform(0.01, 0.1, blocks).astype(np.float32))]
    if zeros:
        operands.append(constant(builder, random.integers(low, high + 1, blocks).astype(dtype.value)))
    return builder.call("dequantize_linear", operands, axis=1, block=block)


def rewritten(graph: Graph, weights: Weights, hw: HardwareSpec = SLOW) -> Graph:
    return verify(remove_dead_nodes(sum_integers(graph, weights, CostTable(hw))))


def dtypes(graph: Graph) -> set[tuple[DType, tuple[int, ...]]]:
    read = {tensor for node in graph.nodes for tensor in node.inputs}
    return {(c.type.dtype, c.type.shape) for name, c in graph.constants.items() if name in read and not c.type.dtype.is_float}


def assert_equal(graph: Graph, changed: Graph, weights: Weights) -> None:
    arrays = random_arrays(graph)
    wanted, got = interpret(graph, weights, arrays), interpret(changed, weights, arrays)
    for name, value in wanted.items():
        np.testing.assert_allclose(got[name], value, rtol=0, atol=1e-5 * float(np.abs(value).max()))


@pytest.mark.parametrize(
    ("low", "high", "dtype", "zeros", "stored"),
    [
        (-8, 7, S8, False, (U8, (1024, 512))),
        (0, 15, U8, True, (U8, (1024, 512))),
        (-8, 8, S8, False, (S8, (1024, 1024))),
        (-1, 15, S8, True, (S8, (1024, 1024))),
        (0, 255, U8, True, (U8, (1024, 1024))),
    ],
)
def test_a_product_takes_integers_of_its_constant(
    low: int, high: int, dtype: DType, zeros: bool, stored: tuple[DType, tuple[int, ...]]
) -> None:
    builder, weights = builder_of()
    x = add_input(builder, "x", 1, 1024)
    graph = builder.finish([("y", builder.call("linear", [x, weight(builder, (1024, 1024), low, high, dtype, zeros=zeros)]))])
    changed = rewritten(graph, weights)
    assert operators(changed) == [FUSED]
    assert stored in dtypes(changed), "four bits, or a byte"
    assert_equal(graph, changed, weights)


def test_a_product_of_rounded_rows_takes_their_bytes() -> None:
    """A device with dot products of bytes multiplies them; another one multiplies what they represent."""
    for spec, products in ((BYTES_SPEC, 2), (BYTES_SPEC, 1), (SLOW, 1)):
        builder, weights = builder_of()
        x, scale = add_input(builder, "x", 1, 1024, dtype=S8), add_input(builder, "s", 1, 32)
        rounded = builder.call("dequantize_linear", [x, scale], axis=-1, block=32)
        results = [builder.call("linear", [rounded, weight(builder, (1024, 1024), -8, 7, S8)]) for _ in range(products)]
        graph = builder.finish([(f"y{i}", each) for i, each in enumerate(results)])
        changed = rewritten(graph, weights, with_memory(spec, 2e10))
        before = [] if spec is BYTES_SPEC else ["dequantize_linear"]
        assert operators(changed) == [*before, *[FUSED] * products]
        assert_equal(graph, changed, weights)


@pytest.mark.parametrize("shape", [(512, 2048), (513, 2047)], ids=["transposed", "odd"])
def test_a_transpose_between_is_an_index(shape: tuple[int, int]) -> None:
    builder, weights = builder_of()
    x = add_input(builder, "x", 2, shape[1])
    turned = builder.call("transpose", [weight(builder, shape, -8, 7, S8, block=16)], permutation=(1, 0))
    graph = builder.finish([("y", builder.call("matmul", [x, turned]))])
    changed = rewritten(graph, weights)
    assert operators(changed) == [FUSED]
    assert dtypes(changed) == {(U8, (shape[0], -(-shape[1] // 2)))}
    assert_equal(graph, changed, weights)


def test_what_is_read_twice_or_is_no_factor_stays() -> None:
    builder, weights = builder_of()
    x, other = (add_input(builder, name, 1, 1024) for name in "xz")
    shared, alone = weight(builder, (1024, 1024), -8, 7, S8), weight(builder, (1, 1024), -8, 7, S8)
    results = [builder.call("linear", [x, shared]), builder.call("linear", [other, shared]), builder.call("add", [x, alone])]
    graph = builder.finish([(f"y{i}", each) for i, each in enumerate(results)])
    assert rewritten(graph, weights).nodes == graph.nodes


def test_constants_are_as_far_as_all_of_the_graph_are() -> None:
    """4 KiB of floats take no longer than their integers in a cache; 4 MiB take the time of memory, which varies."""
    for extent, rows, hw, is_packed in ((32, 4, SLOW, False), (1024, 1, SLOW, True), (1024, 1, with_memory(SLOW, 4e12), False)):
        builder, weights = builder_of()
        x = add_input(builder, "x", rows, extent)
        graph = builder.finish([("y", builder.call("linear", [x, weight(builder, (extent, extent), -8, 7, S8)]))])
        assert (operators(rewritten(graph, weights, hw)) == [FUSED]) is is_packed
