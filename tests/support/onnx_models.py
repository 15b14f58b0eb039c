"""Small ONNX models for tests."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

RNG = np.random.default_rng(11)


def mlp(batch: int | str = 2, *, sizes: tuple[int, ...] = (8, 16, 4), opset: int = 18) -> onnx.ModelProto:
    """Return Gemm and Relu, once for each pair of sizes."""
    nodes, initializers, tensor = [], [], "x"
    for layer, (before, after) in enumerate(pairwise(sizes)):
        weight = RNG.standard_normal((before, after), np.float32)
        initializers += [
            numpy_helper.from_array(weight, f"w{layer}"),
            numpy_helper.from_array(RNG.standard_normal(after, np.float32), f"b{layer}"),
        ]
        last = layer == len(sizes) - 2
        nodes.append(helper.make_node("Gemm", [tensor, f"w{layer}", f"b{layer}"], [f"h{layer}"], f"fc{layer}"))
        tensor = "y" if last else f"a{layer}"
        nodes.append(helper.make_node("Relu", [f"h{layer}"], [tensor], f"relu{layer}"))
    return model(nodes, {"x": (batch, sizes[0])}, {"y": (batch, sizes[-1])}, initializers, opset=opset)


def model(
    nodes: list[Any],
    inputs: dict[str, tuple[Any, ...]],
    outputs: dict[str, Any],
    initializers: Sequence[Any] = (),
    *,
    dtype: int = TensorProto.FLOAT,
    opset: int = 18,
) -> onnx.ModelProto:
    """Return a model of nodes; shapes may have names in place of extents."""
    graph = helper.make_graph(
        nodes,
        "model",
        [helper.make_tensor_value_info(name, dtype, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, dtype, shape) for name, shape in outputs.items()],
        initializers,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def branching() -> onnx.ModelProto:
    """Return a model whose input `rate` chooses a branch: x + x at 16000, else x + rate."""
    info, float_, whole = helper.make_tensor_value_info, TensorProto.FLOAT, TensorProto.INT64
    high = helper.make_graph([helper.make_node("Add", ["x", "x"], ["h"])], "high", [], [info("h", float_, [4])])
    low = helper.make_graph(
        [helper.make_node("Cast", ["rate"], ["r"], to=float_), helper.make_node("Add", ["x", "r"], ["l"])],
        "low",
        [],
        [info("l", float_, [4])],
    )
    nodes = [
        helper.make_node("Equal", ["rate", "high"], ["is_high"]),
        helper.make_node("If", ["is_high"], ["y"], "choose", then_branch=high, else_branch=low),
    ]
    kept = [numpy_helper.from_array(np.int64(16000), "high")]
    graph = helper.make_graph(nodes, "branching", [info("x", float_, [4]), info("rate", whole, [])], [info("y", float_, [4])], kept)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
