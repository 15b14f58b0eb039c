"""Graphs as JSON: round trips, graphs by hand, malformed forms."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from graph_files import encode_tensors, graph_to_json, save_graph
from onnx import TensorProto, helper
from onnx_models import mlp, model

from roller_svc.errors import ArgumentError, UnsupportedModelError
from roller_svc.graph.interpret import interpret
from roller_svc.graph.load import load_graph
from roller_svc.graph.safetensors import decode_tensors
from roller_svc.graph.serialize import graph_from_json
from roller_svc.graph.weights import Weights
from roller_svc.ir.dtype import DType
from roller_svc.ir.graph import LoopNode
from roller_svc.ir.program import TensorType
from roller_svc.runtime.binding import numpy_dtype

BY_HAND: dict[str, Any] = {
    "format": "roller-graph/1",
    "inputs": {"x": {"dtype": "float32", "shape": [2, 3]}},
    "constants": {"w": {"dtype": "float32", "shape": [3, 2], "values": [[1, 0], [0, 1], [2, "inf"]]}},
    "nodes": [
        {"operator": "matmul", "inputs": ["x", "w"], "outputs": ["h"]},
        {"expression": "C[i, j] = max(A[i, j], 0)", "inputs": {"A": "h"}, "outputs": {"C": "y"}},
    ],
    "outputs": {"result": "y"},
}


def scan() -> Any:
    """Return a model that adds up slices, and returns each partial sum."""
    body = helper.make_graph(
        [helper.make_node("Add", ["s", "x"], ["t"]), helper.make_node("Relu", ["t"], ["z"])],
        "body",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, (3,)) for name in ("s", "x")],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, (3,)) for name in ("t", "z")],
    )
    node = helper.make_node("Scan", ["s0", "xs"], ["last", "y"], body=body, num_scan_inputs=1)
    return model([node], {"s0": (3,), "xs": (5, 3)}, {"last": (3,), "y": (5, 3)})


@pytest.mark.parametrize("source", [mlp(), scan()], ids=["mlp", "scan"])
def test_a_graph_survives_a_folder(tmp_path: Path, source: Any) -> None:
    weights = Weights()
    graph = load_graph(source, weights)
    folder = save_graph(graph, weights, tmp_path / "graph")
    for path in (folder, folder / "graph.json"):
        again = Weights()
        assert load_graph(path, again) == graph
        assert all(again.has(constant) for constant in graph.constants.values())
    assert "base64" not in (folder / "graph.json").read_text()


def test_scan_is_a_loop_in_the_json() -> None:
    graph = load_graph(scan(), Weights())
    assert any(isinstance(node, LoopNode) for node in graph.nodes)
    assert any("loop" in node for node in graph_to_json(graph)["nodes"])


def test_a_graph_by_hand_computes() -> None:
    weights = Weights()
    graph = graph_from_json(json.loads(json.dumps(BY_HAND)), weights)
    x = np.array([[1, 2, 3], [-4, 5, 0.5]], np.float32)
    with np.errstate(invalid="ignore"):
        expected = np.maximum(x @ np.array([[1, 0], [0, 1], [2, np.inf]], np.float32), 0)
    np.testing.assert_allclose(interpret(graph, weights, {"x": x})["result"], expected)


@pytest.mark.parametrize("dtype", list(DType))
def test_values_of_every_type_are_read(dtype: DType) -> None:
    document = copy.deepcopy(BY_HAND)
    document["constants"] = {"w": {"dtype": dtype.value, "shape": [3], "values": [0, 1, 1]}}
    document["nodes"] = []
    document["outputs"] = {"y": "w"}
    weights = Weights()
    graph = graph_from_json(document, weights)
    array = weights.array(graph.constants["w"])
    assert array.dtype == numpy_dtype(dtype)
    assert array.tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("format",), "roller-graph/9", "format"),
        (("inputs",), [], "mapping"),
        (("inputs", "x", "dtype"), "float31", "dtype"),
        (("inputs", "w"), {"dtype": "float32", "shape": [1]}, "input and a constant"),
        (("constants", "w", "values"), [[1, 2]], "nested lists"),
        (("constants", "w", "values"), [[1, 2], [1, 2], [1, "a"]], "is no float32"),
        (("constants", "w"), {"dtype": "float32", "shape": [3, 2], "digest": "0" * 64}, "digest"),
        (("nodes", 0, "inputs"), ["x", "absent"], "absent"),
        (("nodes", 0, "outputs"), ["x"], "exists"),
        (("nodes", 0, "outputs"), [], "no outputs"),
        (("nodes", 0, "outputs"), ["h", "g"], "results"),
        (("nodes", 0, "more"), 1, "unknown field"),
        (("nodes", 1, "inputs"), {"A": 3}, "name"),
        (("nodes",), 3, "list"),
        (("outputs",), {}, "no outputs"),
        (("outputs",), {"y": "absent"}, "absent"),
    ],
)
def test_a_malformed_form_is_refused(path: tuple[Any, ...], value: object, message: str) -> None:
    document = copy.deepcopy(BY_HAND)
    at = document
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    with pytest.raises(ArgumentError, match=message):
        graph_from_json(document, Weights())


def test_all_nodes_that_are_wrong_are_listed() -> None:
    document = copy.deepcopy(BY_HAND)
    document["nodes"] = [
        {"name": "a", "operator": "matmull", "inputs": ["x", "w"], "outputs": ["h"]},
        {"name": "b", "operator": "relu", "inputs": ["h"], "outputs": ["g"]},
        {"name": "c", "expression": "C[i] = A[i, 9]", "inputs": {"A": "x"}, "outputs": {"C": "y"}},
    ]
    with pytest.raises(UnsupportedModelError) as refusal:
        graph_from_json(document, Weights())
    assert [node.name for node in refusal.value.nodes] == ["a", "c"]


def test_safetensors_keep_every_type() -> None:
    tensors = []
    for dtype in DType:
        array = np.arange(6).astype(numpy_dtype(dtype)).reshape(2, 3)
        tensors.append((dtype.value, TensorType(dtype, (2, 3)), array))
    tensors.append(("scalar", TensorType(DType.BFLOAT16, ()), np.array(2, ml_dtypes.bfloat16)))
    read = decode_tensors(encode_tensors(tensors))
    for name, type_, array in tensors:
        assert read[name][0] == type_
        np.testing.assert_array_equal(read[name][1], array)


def test_damaged_safetensors_are_refused() -> None:
    content = encode_tensors([("a", TensorType(DType.FLOAT32, (4,)), np.zeros(4, np.float32))])
    length = int.from_bytes(content[:8], "little")
    headers = [b"[]", b"{", b'{"a": 1}', b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 64]}}']
    damaged = [b"", content[:4], content[:-1], b"\xff" * 8 + content[8:]]
    damaged += [len(header).to_bytes(8, "little") + header + content[8 + length :] for header in headers]
    for each in damaged:
        with pytest.raises(ArgumentError, match="weights is damaged"):
            decode_tensors(each)
