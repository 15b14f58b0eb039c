"""Models of one ONNX node, and what the library's reference evaluator says of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from onnx import ModelProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from roller_svc.frontend.onnx.model import import_model
from roller_svc.graph.interpret import interpret
from roller_svc.graph.weights import Weights
from roller_svc.ir.graph import Graph, verify
from roller_svc.semantics.interpreter import reference

Array = np.ndarray[Any, Any]


def model_of(
    op_type: str,
    attributes: Mapping[str, Any],
    tensors: Sequence[Array | None],
    *,
    constants: Sequence[int] = (),
    results: int = 1,
    opset: int = 21,
    omitted: Sequence[int] = (),
) -> ModelProto:
    """Return a model of one node. Inputs `t0`, `t1`, ..., of which some are constants; results `y0`, `y1`, ..."""
    names = ["" if tensor is None else f"t{i}" for i, tensor in enumerate(tensors)]
    outputs = ["" if i in omitted else f"y{i}" for i in range(results)]
    node = helper.make_node(op_type, names, outputs, **attributes)
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(tensor.dtype), tensor.shape)
        for i, (name, tensor) in enumerate(zip(names, tensors, strict=True))
        if tensor is not None and i not in constants
    ]
    kept = [numpy_helper.from_array(tensor, f"t{i}") for i in constants if (tensor := tensors[i]) is not None]
    types = [helper.make_tensor_value_info(name, 1, None) for name in outputs if name]
    graph = helper.make_graph([node], "node", inputs, types, kept)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])


def import_node(model: ModelProto) -> tuple[Graph, Weights]:
    """Return the verified graph of a model."""
    weights = Weights()
    return verify(import_model(model, weights, reference)), weights


def run_node(model: ModelProto, tensors: Sequence[Array | None]) -> list[Array]:
    """Return the results by the interpreter of graphs."""
    graph, weights = import_node(model)
    return list(interpret(graph, weights, {name: tensors[int(name[1:])] for name, _ in graph.inputs}).values())


def told(model: ModelProto, tensors: Sequence[Array | None]) -> list[Array]:
    """Return the results by the library's reference evaluator."""
    declared = [info.name for info in model.graph.input]
    return list(ReferenceEvaluator(model).run(None, {name: tensors[int(name[1:])] for name in declared}))


def node_result(op_type: str, attributes: Mapping[str, Any], *tensors: Array | None, opset: int = 21) -> Array:
    """Return the first result of a node by the reference evaluator."""
    return np.asarray(told(model_of(op_type, attributes, tensors, opset=opset), tensors)[0])


def check_node(op_type: str, attributes: Mapping[str, Any], tensors: Sequence[Array | None], **options: Any) -> list[Array]:
    """Compare the results of a node with those of the reference evaluator, in value and type."""
    model = model_of(op_type, attributes, tensors, **options)
    found, expected = run_node(model, tensors), told(model, tensors)
    assert len(found) == len(expected)
    for a, b in zip(found, map(np.asarray, expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a.astype(np.float64), b.astype(np.float64), rtol=1e-3, atol=1e-5)
    return found
