"""Quantized products as sums of integers: exact integers, ends of types, and what is left alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from dot_specs import BYTES_SPEC
from graphs import add_input, builder_of, operators, random_arrays
from quantized import F32, S8, U8, add_number, dequantize, quantize

from roller_svc.frontend.graph_builder import GraphBuilder
from roller_svc.frontend.ops.operator import Operand
from roller_svc.graph.costs import CostTable
from roller_svc.graph.interpret import interpret
from roller_svc.graph.passes.dead import remove_dead_nodes
from roller_svc.graph.passes.quantization import sum_integers
from roller_svc.graph.weights import Weights
from roller_svc.hardware import load
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Op, OpKind, iter_subexpressions
from roller_svc.ir.graph import FUSED, Graph, LoopNode, OpNode, verify
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.program import StatementKind


def add_weight(builder: GraphBuilder, shape: tuple[int, ...], dtype: DType, zero: object, axis: int | None) -> Operand:
    """A dequantized constant of all bytes that its zero point allows as signed ones, with the ends among them."""
    rng, (low, high) = np.random.default_rng(sum(shape)), dtype.integer_range
    array = rng.integers(low, high + 1, shape).astype(dtype.value)
    array.reshape(-1)[:2] = low, high
    scale = rng.uniform(0.001, 0.01, () if axis is None else shape[axis])
    zeros = np.broadcast_to(np.asarray(zero), scale.shape if axis is not None else ())
    return dequantize(builder, builder.add_constant(array, dtype), scale, zeros, 1 if axis is None else axis)


def rewritten(graph: Graph, weights: Weights, hw: HardwareSpec = BYTES_SPEC) -> Graph:
    return verify(remove_dead_nodes(sum_integers(graph, weights, CostTable(hw))))


def byte_arrays(graph: Graph) -> dict[str, Any]:
    """Inputs of all values, with both ends of integers."""
    arrays, rng = random_arrays(graph), np.random.default_rng(5)
    for name, type_ in graph.inputs:
        if not type_.dtype.is_float:
            low, high = type_.dtype.integer_range
            arrays[name] = rng.integers(low, high + 1, type_.shape).astype(type_.dtype.value)
            arrays[name].reshape(-1)[:2] = low, high
    return arrays


def check_close(before: Graph, after: Graph, weights: Weights, *, steps: int = 100) -> None:
    """Floats agree to rounding, integers to one step."""
    arrays = byte_arrays(before)
    want, got = interpret(before, weights, arrays), interpret(after, weights, arrays)
    for name, value in want.items():
        assert got[name].dtype == value.dtype
        if value.dtype.kind == "f":
            np.testing.assert_allclose(got[name], value, rtol=1e-5, atol=1e-5 * np.abs(value).max())
        else:
            assert np.abs(got[name].astype(int) - value).max() <= 1
            assert np.ptp(value) >= steps  # a test of steps needs many of them


def sums_of(graph: Graph) -> list[str]:
    """Types of the sums in the graph."""
    statements = (s for node in graph.nodes if isinstance(node, OpNode) for s in node.program.statements)
    return [s.type.dtype.value for s in statements if s.kind is StatementKind.REDUCE]


ZEROS = [(U8, 0), (U8, 255), (U8, 128), (U8, 13), (S8, -128), (S8, 127), (S8, 0)]


@pytest.mark.parametrize(("kind", "zero"), ZEROS)
@pytest.mark.parametrize("weight", [(S8, 0), (U8, 128), (S8, 9)])
@pytest.mark.parametrize("axis", [None, 1])
def test_products_are_sums_of_integers(kind: DType, zero: int, weight: tuple[DType, int], axis: int | None) -> None:
    builder, weights = builder_of()
    x = add_input(builder, "x", 40, 64, dtype=kind)
    product = builder.call("matmul", [dequantize(builder, x, 0.02, zero), add_weight(builder, (64, 48), *weight, axis)])
    result = quantize(builder, builder.call("relu", [builder.call("add", [product, add_number(builder, 0.3, F32)])]), 0.05, 7)
    graph = builder.finish([("y", result), ("product", product)])
    after = rewritten(graph, weights)
    assert sums_of(after) == ["int32"]
    check_close(graph, after, weights)


def test_sums_have_the_integers_of_the_specification() -> None:
    """Scales of one: the products are the integers themselves, and no float rounds them."""
    builder, weights = builder_of()
    x = add_input(builder, "x", 8, 200, dtype=U8)
    stored = np.random.default_rng(5).integers(-128, 128, (200, 16)).astype(np.int8)
    w = dequantize(builder, builder.add_constant(stored, S8), 1.0, 0)
    graph = builder.finish([("y", builder.call("matmul", [dequantize(builder, x, 1.0, 200), w]))])
    after = rewritten(graph, weights)
    assert sums_of(after) == ["int32"]
    arrays = byte_arrays(graph)
    expected = (arrays["x"].astype(np.int64) - 200) @ stored.astype(np.int64)
    np.testing.assert_array_equal(interpret(after, weights, arrays)["y"], expected.astype(np.float32))


CONVOLUTIONS: dict[str, tuple[str, tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "padded": ("conv2d", (1, 8, 9, 9), (16, 8, 3, 3), {"padding": 1}),
    "strided, dilated": ("conv2d", (2, 8, 11, 12), (16, 8, 3, 3), {"padding": 2, "stride": 2, "dilation": 2}),
    "grouped": ("conv2d", (1, 16, 9, 9), (16, 8, 3, 3), {"padding": 1, "groups": 2}),
    "1x1": ("conv2d", (1, 32, 9, 9), (16, 32, 1, 1), {}),
    "one dimension": ("conv1d", (1, 16, 40), (16, 16, 3), {"padding": 4, "dilation": 4}),
}


@pytest.mark.parametrize("zero", [0, 117, 255])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_are_sums_of_integers(name: str, zero: int) -> None:
    """Padding is the zero point, which is zero."""
    operator, shape, filters, parameters = CONVOLUTIONS[name]
    builder, weights = builder_of()
    x = dequantize(builder, add_input(builder, "x", *shape, dtype=U8), 0.02, zero)
    bias = builder.add_constant(np.random.default_rng(5).standard_normal(filters[0]).astype(np.float32), F32)
    y = builder.call(operator, [x, add_weight(builder, filters, S8, 0, 0), bias], **parameters)
    graph = builder.finish([("y", y), ("q", quantize(builder, y, 0.02, 128))])
    after = rewritten(graph, weights)
    assert sums_of(after) == ["int32"]
    check_close(graph, after, weights)


def test_two_factors_that_vary_are_multiplied_as_differences() -> None:
    builder, weights = builder_of()
    a, b = add_input(builder, "a", 2, 64, 96, dtype=U8), add_input(builder, "b", 2, 96, 64, dtype=U8)
    product = builder.call("matmul", [dequantize(builder, a, 0.02, 3), dequantize(builder, b, 0.01, 250)])
    graph = builder.finish([("y", product)])
    after = rewritten(graph, weights)
    assert sums_of(after) == ["int32"]
    check_close(graph, after, weights)


def test_depthwise_convolutions_stay_floats() -> None:
    """No dot product has their terms side by side, and integers are not faster one by one."""
    builder, weights = builder_of()
    x = dequantize(builder, add_input(builder, "x", 1, 32, 20, 20, dtype=U8), 0.02, 7)
    graph = builder.finish([("y", builder.call("depthwise_conv2d", [x, add_weight(builder, (32, 1, 3, 3), S8, 0, 0)], padding=1))])
    assert operators(rewritten(graph, weights)) == operators(graph)


@pytest.mark.parametrize("why", ["scale varies", "scale of a summed axis", "blocks", "too long", "small scale", "no unit"])
def test_products_that_stay_floats(why: str) -> None:
    builder, weights = builder_of()
    depth = 70_000 if why == "too long" else 64
    x, w = add_input(builder, "x", 40, depth, dtype=U8), np.random.default_rng(5).integers(-128, 128, (depth, 48)).astype(np.int8)
    stored = builder.add_constant(w, S8)
    if why == "blocks":
        second = builder.call("dequantize_linear", [stored, builder.fill(0.1, F32, (4, 48))], axis=0, block=16)
    else:
        second = dequantize(builder, stored, np.full(depth, 0.1) if why == "scale of a summed axis" else 0.1, 0, axis=0)
    scale = (
        add_input(builder, "scale") if why == "scale varies" else add_number(builder, 1e-30 if why == "small scale" else 0.1, F32)
    )
    first = builder.call("dequantize_linear", [x, scale, add_number(builder, 3, U8)])
    graph = builder.finish([("y", builder.call("matmul", [first, second]))])
    after = rewritten(graph, weights, load("cpu-x86-avx512") if why == "no unit" else BYTES_SPEC)
    assert sums_of(after) == ["float32"]


def test_a_tensor_that_is_quantized_as_it_was_is_not_converted() -> None:
    builder, weights = builder_of()
    x = add_input(builder, "x", 4, 6, dtype=U8)
    y = x
    for _ in range(2):
        y = quantize(builder, dequantize(builder, y, 0.3, 9), 0.3, 9)
    others = [quantize(builder, dequantize(builder, x, 0.3, 9), *numbers) for numbers in ((0.3, 8), (0.31, 9), (0.3, 9, S8))]
    graph = builder.finish([("y", y), *((f"other{i}", each) for i, each in enumerate(others))])
    after = rewritten(graph, weights)
    assert operators(after).count(FUSED) == 3
    assert dict(after.outputs)["y"] == "x"
    arrays = {"x": np.arange(24, dtype=np.uint8).reshape(4, 6) * 11}
    for name, value in interpret(graph, weights, arrays).items():
        np.testing.assert_array_equal(interpret(after, weights, arrays)[name], value)


def divisions(graph: Graph) -> int:
    bodies = (s.body for node in graph.nodes if isinstance(node, OpNode) for s in node.program.statements)
    return sum(isinstance(each, Op) and each.kind is OpKind.DIV for body in bodies for each in iter_subexpressions(body))


def residual_block(builder: GraphBuilder, bias: Operand, result: float = 0.05) -> tuple[Operand, Operand]:
    """A convolution with a bias, and its sum with its input; both quantized."""
    x = dequantize(builder, add_input(builder, "x", 1, 16, 6, 6, dtype=U8), 0.02, 117)
    y = builder.call("conv2d", [x, add_weight(builder, (16, 16, 3, 3), S8, 0, 0), bias], padding=1)
    first = quantize(builder, builder.call("relu", [y]), 0.01, 0)
    total = builder.call("add", [dequantize(builder, first, 0.01, 0), x])
    return first, quantize(builder, builder.call("relu", [total]), result, 9)


def test_scales_are_divided_in_place_of_results() -> None:
    """Of a convolution with its bias, which is dequantized too, and of a residual sum."""
    builder, weights = builder_of()
    bias = add_weight(builder, (16,), S8, 0, 0)
    first, second = residual_block(builder, bias)
    graph = builder.finish([("first", first), ("second", second)])
    after = rewritten(graph, weights)
    assert (divisions(graph), divisions(after)) == (2, 0)
    check_close(graph, after, weights)


def test_one_factor_of_a_product_is_divided() -> None:
    """The other one may be a function, of which nothing can be divided."""
    builder, weights = builder_of()
    a, b = (dequantize(builder, add_input(builder, name, 40, 30, dtype=U8), 0.03, 99) for name in "ab")
    gate, first, second = builder.call("sigmoid", [a]), builder.call("exp", [a]), builder.call("exp", [b])
    both = builder.call("add", [builder.call("mul", [first, b]), builder.call("mul", [second, a])])  # may cancel each other
    results = [builder.call("mul", [gate, b]), builder.call("mul", [first, second]), both]
    graph = builder.finish([(f"y{i}", quantize(builder, each, 0.03, 40)) for i, each in enumerate(results)])
    after = rewritten(graph, weights)
    assert (divisions(graph), divisions(after)) == (3, 2)
    check_close(graph, after, weights)


@pytest.mark.parametrize("why", ["another reader", "large bias", "large scale", "result"])
def test_results_that_are_divided(why: str) -> None:
    """What others read keeps its numbers; large ones would round by more than a step."""
    builder, weights = builder_of()
    bias = builder.add_constant(np.full(16, 3e4 if why == "large bias" else 0.1, np.float32), F32)
    first, second = residual_block(builder, bias, 1e-6 if why == "large scale" else 0.05)
    outputs = [("first", first), ("second", second)]
    if why in ("another reader", "result"):
        node = next(node for node in builder.nodes if node.operator == "relu")
        floats = Operand(node.outputs[0], builder.types[node.outputs[0]])
        outputs.append(("other", builder.call("exp", [floats]) if why == "another reader" else floats))
    assert divisions(rewritten(builder.finish(outputs), weights)) == 1


@pytest.mark.parametrize("scale", [2.0**-40, 1e-9, 0.017, 1.0, 2.0**40])
@pytest.mark.parametrize("kind", [U8, S8, DType.INT16, DType.UINT16])
def test_quantizing_again_gives_every_integer_back(scale: float, kind: DType) -> None:
    """The range of scales within which the pass relies on it."""
    low, high = kind.integer_range
    for zero in (low, (low + high) // 3, high):
        q = np.arange(low, high + 1)
        x = (q - zero).astype(np.float32) * np.float32(scale)
        np.testing.assert_array_equal(np.rint(x / np.float32(scale)).astype(np.int64) + zero, q)


@pytest.mark.parametrize("operator", ["transpose", "max_pool2d", "concat", "reshape"])
def test_integers_are_moved_in_place_of_floats(operator: str) -> None:
    builder, weights = builder_of()
    x = dequantize(builder, add_input(builder, "x", 1, 3, 8, 8, dtype=U8), 0.3, 9)
    calls: dict[str, tuple[list[Operand], dict[str, Any]]] = {
        "transpose": ([x], {"permutation": (0, 2, 3, 1)}),
        "max_pool2d": ([x], {"kernel": 3, "stride": 2}),
        "concat": ([x, dequantize(builder, add_input(builder, "b", 1, 2, 8, 8, dtype=U8), 0.3, 9)], {"axis": 1}),
        "reshape": ([x], {"shape": (3, 64)}),
    }
    operands, parameters = calls[operator]
    y = builder.call(operator, operands, **parameters)
    graph = builder.finish([("y", quantize(builder, y, 0.3, 9)), ("other", quantize(builder, y, 0.2, 8))])
    after = rewritten(graph, weights)
    assert operators(after) == [operator, "dequantize_linear", FUSED]
    check_close(graph, after, weights, steps=1)
    arrays = byte_arrays(graph)
    np.testing.assert_array_equal(interpret(after, weights, arrays)["y"], interpret(graph, weights, arrays)["y"])


def test_what_is_not_only_moved_stays_floats() -> None:
    """Numbers of other scales, elements that a condition compares, and padding of a maximum."""
    builder, weights = builder_of()
    x = dequantize(builder, add_input(builder, "x", 1, 3, 8, 8, dtype=U8), 0.3, 9)
    other = dequantize(builder, add_input(builder, "b", 1, 3, 8, 8, dtype=U8), 0.2, 9)
    results = [builder.call("concat", [x, other], axis=1), builder.call("max_pool2d", [x], kernel=3, padding=1),
               builder.call("relu", [x]), builder.call("max", [x, x])]  # fmt: skip
    graph = builder.finish([(f"y{i}", each) for i, each in enumerate(results)])
    assert operators(rewritten(graph, weights)) == operators(graph)


def test_bodies_of_loops_are_rewritten() -> None:
    builder, weights = builder_of()
    body = builder.subgraph("body")
    state = add_input(body, "state", 32, 64, dtype=U8)
    product = body.call("matmul", [dequantize(body, state, 0.02, 3), add_weight(body, (64, 64), S8, 0, 1)])
    (last,) = builder.add_loop(
        body.finish([("state", quantize(body, product, 0.05, 128))]), 3, 1, (), (), [add_input(builder, "x", 32, 64, dtype=U8)]
    )
    graph = builder.finish([("y", last)])
    after = rewritten(graph, weights)
    (loop,) = after.nodes
    assert isinstance(loop, LoopNode)
    assert FUSED in operators(loop.body)


@pytest.mark.parametrize("kind", [(S8, 0), (U8, 128)])
@pytest.mark.parametrize("axis", [0, 1])
def test_scales_move_with_transposed_weights(axis: int, kind: tuple[DType, int]) -> None:
    """Scales of rows become those of columns; those of the summed axis leave the product to floats."""
    builder, weights = builder_of()
    x = add_input(builder, "x", 40, 64, dtype=U8)
    w = builder.call("transpose", [add_weight(builder, (48, 64), *kind, axis)], permutation=(1, 0))
    product = builder.call("matmul", [dequantize(builder, x, 0.02, 120), w])
    graph = builder.finish([("y", quantize(builder, product, 0.05, 7))])
    after = rewritten(graph, weights)
    assert sums_of(after) == ["int32" if axis == 0 else "float32"]
    check_close(graph, after, weights)


def test_scales_of_an_axis_that_is_split_stay() -> None:
    builder, weights = builder_of()
    x = dequantize(builder, add_input(builder, "x", 4, 48, dtype=S8), np.linspace(0.01, 0.1, 48), np.zeros(48))
    graph = builder.finish([("y", builder.call("reshape", [x], shape=(4, 6, 8)))])
    assert operators(rewritten(graph, weights)) == ["dequantize_linear", "reshape"]


def test_scales_of_rows_move_with_data() -> None:
    builder, weights = builder_of()
    x = dequantize(builder, add_input(builder, "x", 4, 48, 5, dtype=S8), np.linspace(0.01, 0.1, 48), np.zeros(48))
    graph = builder.finish([("y", builder.call("transpose", [x], permutation=(2, 0, 1)))])
    after = rewritten(graph, weights)
    assert operators(after) == ["transpose", "dequantize_linear"]
    check_close(graph, after, weights)
