"""Functions of one byte as tables: the results of the nodes for every byte, and what is left alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from dot_specs import spec_with
from graphs import add_input, builder_of, operators
from quantized import S8, U8, dequantize, quantize

from roller_svc.frontend.graph_builder import GraphBuilder
from roller_svc.frontend.ops.operator import Operand
from roller_svc.graph.costs import CostTable
from roller_svc.graph.interpret import interpret
from roller_svc.graph.passes.byte_tables import tabulate_bytes
from roller_svc.graph.passes.dead import remove_dead_nodes
from roller_svc.graph.weights import Weights
from roller_svc.hardware import load
from roller_svc.ir.dtype import DType
from roller_svc.ir.graph import FUSED, Graph, verify
from roller_svc.ir.hardware import HardwareSpec

SHAPE = (3, 32, 64)
PERMUTING = spec_with(frozenset({"avx512vbmi"}))


def rewritten(graph: Graph, weights: Weights, hw: HardwareSpec = PERMUTING) -> Graph:
    return verify(remove_dead_nodes(tabulate_bytes(graph, weights, CostTable(hw))))


def every_byte(graph: Graph) -> dict[str, Any]:
    """Inputs in which every byte occurs."""
    rng = np.random.default_rng(3)
    return {
        name: rng.permutation(np.arange(type_.elements) % 256).astype(np.uint8).view(type_.dtype.value).reshape(type_.shape)
        for name, type_ in graph.inputs
    }


def check_equal(before: Graph, after: Graph, weights: Weights) -> None:
    want, got = interpret(before, weights, every_byte(before)), interpret(after, weights, every_byte(before))
    for name, value in want.items():
        assert got[name].dtype == value.dtype
        np.testing.assert_array_equal(got[name], value)


def function(builder: GraphBuilder, x: Operand, name: str, zero: int = 7, result: DType = U8) -> Operand:
    """A function of the numbers that bytes are, as bytes."""
    return quantize(builder, builder.call(name, [dequantize(builder, x, 0.05, zero)]), 0.01, zero, result)


@pytest.mark.parametrize("dtype", [U8, S8])
@pytest.mark.parametrize("name", ["tanh", "sigmoid", "gelu", "log", "reciprocal"])  # NaN and infinities among them
def test_function_of_a_byte_is_a_table(dtype: DType, name: str) -> None:
    builder, weights = builder_of()
    x = add_input(builder, "x", *SHAPE, dtype=dtype)
    graph = builder.finish([("y", function(builder, x, name, result=dtype))])
    after = rewritten(graph, weights)
    assert operators(after) == [FUSED]
    assert [weights.array(after.constants[t]).shape for t in after.nodes[0].inputs[1:]] == [(256,)]
    check_equal(graph, after, weights)


def test_table_of_a_table_is_one_table() -> None:
    builder, weights = builder_of()
    x = add_input(builder, "x", *SHAPE, dtype=S8)
    graph = builder.finish([("y", function(builder, function(builder, x, "tanh"), "sigmoid"))])
    after = rewritten(graph, weights)
    assert operators(after) == [FUSED]
    check_equal(graph, after, weights)


def test_each_factor_of_a_gate_is_a_table() -> None:
    builder, weights = builder_of()
    a, b = (add_input(builder, name, *SHAPE, dtype=U8) for name in "ab")
    gates = [
        dequantize(builder, function(builder, a, "tanh"), 0.01, 7),
        dequantize(builder, function(builder, b, "sigmoid"), 0.01, 7),
    ]
    graph = builder.finish([("y", quantize(builder, builder.call("mul", gates), 0.01, 9))])
    after = rewritten(graph, weights)
    assert sorted(operators(after)) == ["dequantize_linear", "dequantize_linear", FUSED, FUSED, "mul", "quantize_linear"]
    check_equal(graph, after, weights)


def test_numbers_that_others_read_stay() -> None:
    """x * sigmoid(x), whose conversion another node reads too."""
    builder, weights = builder_of()
    x = dequantize(builder, add_input(builder, "x", *SHAPE, dtype=U8), 0.05, 100)
    y = quantize(builder, builder.call("mul", [x, builder.call("sigmoid", [x])]), 0.02, 20)
    graph = builder.finish([("y", y), ("sum", builder.call("reduce_sum", [x]))])
    after = rewritten(graph, weights)
    assert sorted(operators(after)) == ["dequantize_linear", FUSED, "reduce_sum"]
    check_equal(graph, after, weights)


def _other_place(builder: GraphBuilder, x: Operand) -> Operand:
    return quantize(
        builder,
        builder.call("transpose", [builder.call("tanh", [dequantize(builder, x, 0.05, 7)])], permutation=(0, 2, 1)),
        0.01,
        7,
    )


def _scales_of_channels(builder: GraphBuilder, x: Operand) -> Operand:
    scales = np.linspace(0.01, 0.1, SHAPE[1])
    return quantize(builder, builder.call("tanh", [dequantize(builder, x, scales, np.zeros(SHAPE[1]))]), 0.01, 7)


def _two_tensors(builder: GraphBuilder, x: Operand) -> Operand:
    y = dequantize(builder, add_input(builder, "z", *SHAPE, dtype=U8), 0.05, 3)
    return quantize(builder, builder.call("tanh", [builder.call("add", [dequantize(builder, x, 0.05, 7), y])]), 0.01, 7)


@pytest.mark.parametrize("build", [_scales_of_channels, _two_tensors])
def test_other_functions_stay(build: Any) -> None:
    builder, weights = builder_of()
    graph = builder.finish([("y", build(builder, add_input(builder, "x", *SHAPE, dtype=U8)))])
    assert operators(rewritten(graph, weights)) == operators(graph)


def test_moved_elements_are_not_functions_of_their_place() -> None:
    builder, weights = builder_of()
    graph = builder.finish([("y", _other_place(builder, add_input(builder, "x", *SHAPE, dtype=U8)))])
    after = rewritten(graph, weights)
    assert "transpose" in operators(after)
    check_equal(graph, after, weights)


def test_few_elements_are_not_looked_up() -> None:
    builder, weights = builder_of()
    graph = builder.finish([("y", function(builder, add_input(builder, "x", 16, 16, dtype=U8), "tanh"))])
    assert operators(rewritten(graph, weights)) == operators(graph)


@pytest.mark.parametrize("target", ["nvidia-h200-sxm", "cpu-x86-avx2"])
def test_functions_stay_where_a_lookup_is_not_known_to_be_faster(target: str) -> None:
    """Epilogues of GPUs do not price lookups; AVX2 looks bytes up one by one."""
    builder, weights = builder_of()
    graph = builder.finish([("y", function(builder, add_input(builder, "x", *SHAPE, dtype=U8), "relu"))])
    assert operators(rewritten(graph, weights, load(target))) == operators(graph)
