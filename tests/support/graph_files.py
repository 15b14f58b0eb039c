"""Graph → JSON and a file of weights, which `load_graph` reads."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from roller_svc.frontend.graph_builder import EINSUM
from roller_svc.frontend.ops import OPS
from roller_svc.graph.load import GRAPH_FILE, WEIGHTS_FILE
from roller_svc.graph.safetensors import DTYPES
from roller_svc.graph.serialize import FORMAT
from roller_svc.graph.weights import Array, Weights
from roller_svc.ir.graph import Constant, Graph, LoopNode, Node
from roller_svc.ir.printer import text
from roller_svc.ir.program import TensorType

LENGTH_BYTES = 8
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def save_graph(graph: Graph, weights: Weights, folder: str | os.PathLike[str]) -> Path:
    """Write graph.json and weights.safetensors, which `load_graph` reads, and return the folder."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    (target / WEIGHTS_FILE).write_bytes(weights_to_safetensors(graph, weights))
    (target / GRAPH_FILE).write_text(json.dumps(graph_to_json(graph), allow_nan=False), encoding="utf-8")
    return target


def graph_to_json(graph: Graph) -> dict[str, Any]:
    """Return the graph as JSON-compatible values. Constants are digests of arrays in its weights."""
    return {
        "format": FORMAT,
        "name": graph.name,
        "inputs": {name: _type_json(type_) for name, type_ in graph.inputs},
        "constants": {name: _type_json(constant.type) | {"digest": constant.digest} for name, constant in graph.constants.items()},
        "nodes": [_node_json(node) for node in graph.nodes],
        "outputs": dict(graph.outputs),
    }


def weights_to_safetensors(graph: Graph, weights: Weights) -> bytes:
    """Return a safetensors file with the graph's constants, named by their digests."""
    constants = {constant.digest: constant for constant in _constants(graph)}
    return encode_tensors((digest, each.type, weights.array(each)) for digest, each in constants.items())


def _constants(graph: Graph) -> Iterable[Constant]:
    yield from graph.constants.values()
    for node in graph.nodes:
        if isinstance(node, LoopNode):
            yield from _constants(node.body)


def _type_json(type_: TensorType) -> dict[str, Any]:
    return {"dtype": type_.dtype.value, "shape": list(type_.shape)}


def _node_json(node: Node) -> dict[str, Any]:
    if isinstance(node, LoopNode):
        loop = {
            "steps": node.steps,
            "carried": node.carried,
            "scanned": list(node.scanned),
            "stacked": list(node.stacked),
            "body": graph_to_json(node.body),
        }
        return {"name": node.name, "loop": loop, "inputs": list(node.inputs), "outputs": list(node.outputs)}
    if node.operator in OPS or node.operator == EINSUM:
        return {
            "name": node.name,
            "operator": node.operator,
            "inputs": list(node.inputs),
            "outputs": list(node.outputs),
            "parameters": {name: _parameter_json(value) for name, value in node.parameters},
        }
    program = node.program
    return {
        "name": node.name,
        "expression": text(program),
        "inputs": {name: tensor for (name, _), tensor in zip(program.inputs, node.inputs, strict=True)},
        "outputs": {each.name: tensor for each, tensor in zip(program.outputs, node.outputs, strict=True)},
    }


def _parameter_json(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    return list(value) if isinstance(value, tuple) else value


def encode_tensors(tensors: Iterable[tuple[str, TensorType, Array]]) -> bytes:
    """Return a file with the tensors. Those with the widest elements come first, so that all are aligned."""
    header: dict[str, object] = {}
    parts: list[bytes] = []
    offset = 0
    for name, type_, array in sorted(tensors, key=lambda each: (-each[1].dtype.bytes, each[0])):
        content = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": NAMES[type_.dtype],
            "shape": list(type_.shape),
            "data_offsets": [offset, offset + len(content)],
        }
        parts.append(content)
        offset += len(content)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    return b"".join([len(text).to_bytes(LENGTH_BYTES, "little"), text, *parts])
