"""Mutated ONNX files and JSON graphs: a graph, or an error of the project, in bounded time and memory."""

from __future__ import annotations

import contextlib
import copy
import json
import random
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graph_files import graph_to_json
from onnx import TensorProto, helper, numpy_helper
from onnx_models import mlp, model

from roller_svc.errors import InputError
from roller_svc.graph.load import load_graph
from roller_svc.graph.weights import Weights

# (models, mutations of each): the slow run has 10,000 in all
QUICK, SLOW = 40, 1250
MAX_GROWTH_KIB = 1 << 20  # of the process
SIZES = (0, -1, 1, 3, 1 << 20, 1 << 31, 1 << 40, (1 << 63) - 1)
ATTRIBUTES = ("pads", "axis", "perm", "to", "group", "z")
NAMES = ("", "x", "y", "a" * 5000, "../../etc/passwd", "/etc/passwd", "x\n", "*/ int main", "\u2603")


def classifier() -> onnx.ModelProto:
    """Convolution, pool, reshape by a constant, product, softmax."""
    rng = np.random.default_rng(0)
    nodes = [
        helper.make_node("Conv", ["x", "k"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("MaxPool", ["c"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Reshape", ["p", "shape"], ["f"]),
        helper.make_node("MatMul", ["f", "w"], ["m"]),
        helper.make_node("Softmax", ["m"], ["y"]),
    ]
    initializers = [
        numpy_helper.from_array(rng.standard_normal((4, 2, 3, 3), np.float32), "k"),
        numpy_helper.from_array(np.array([1, -1], np.int64), "shape"),
        numpy_helper.from_array(rng.standard_normal((36, 5), np.float32), "w"),
    ]
    return model(nodes, {"x": (1, 2, 6, 6)}, {"y": (1, 5)}, initializers)


def recurrent() -> onnx.ModelProto:
    """An LSTM, whose loop has a body, behind a transpose."""
    rng = np.random.default_rng(1)
    nodes = [
        helper.make_node("Transpose", ["x"], ["t"], perm=[1, 0, 2]),
        helper.make_node("LSTM", ["t", "w", "r"], ["", "h"], hidden_size=3),
        helper.make_node("Squeeze", ["h", "axes"], ["y"]),
    ]
    initializers = [
        numpy_helper.from_array(rng.standard_normal((1, 12, 4), np.float32), "w"),
        numpy_helper.from_array(rng.standard_normal((1, 12, 3), np.float32), "r"),
        numpy_helper.from_array(np.array([0], np.int64), "axes"),
    ]
    return model(nodes, {"x": (2, 5, 4)}, {"y": (2, 3)}, initializers)


def damage_bytes(proto: onnx.ModelProto, rng: random.Random) -> bytes:
    """Cut the file, or change, drop or repeat some of its bytes."""
    data = bytearray(proto.SerializeToString())
    for _ in range(rng.randint(1, 8)):
        at = rng.randrange(len(data))
        match rng.randrange(4):
            case 0:
                data[at] = rng.randrange(256)
            case 1:
                del data[at : at + rng.randint(1, 30)]
            case 2:
                data[at:at] = data[at : at + rng.randint(1, 30)]
            case _:
                del data[max(at, 8) :]
        if not data:
            break
    return bytes(data)


def damage_fields(proto: onnx.ModelProto, rng: random.Random) -> onnx.ModelProto:
    """Change names, shapes, attributes, the order of nodes, where data lies."""
    changed = onnx.ModelProto()
    changed.CopyFrom(proto)
    graph = changed.graph
    for _ in range(rng.randint(1, 3)):
        node = rng.choice(graph.node)
        match rng.randrange(10):
            case 0:
                node.op_type = rng.choice(["Conv", "Loop", "If", "NoSuchOperator", "Attention", "Einsum", "Resize", ""])
            case 1 if node.input:
                node.input[rng.randrange(len(node.input))] = rng.choice([*NAMES, *(n.output[0] for n in graph.node)])
            case 2 if node.output:
                node.output[rng.randrange(len(node.output))] = rng.choice([*NAMES, graph.node[0].output[0]])
            case 3:
                name, value = rng.choice(ATTRIBUTES), rng.choice([1, -7, 1 << 40, [1, 2], "same", 0.5])
                node.attribute.append(helper.make_attribute(name, value))
            case 4 if node.attribute:
                del node.attribute[rng.randrange(len(node.attribute))]
            case 5:
                dim = rng.choice(graph.input[0].type.tensor_type.shape.dim)
                dim.dim_value = rng.choice(SIZES)
            case 6:
                graph.input[0].type.tensor_type.elem_type = rng.choice([0, 1, 7, 8, 10, 16, 23, 99])
            case 7 if graph.initializer:
                tensor = rng.choice(graph.initializer)
                tensor.dims[rng.randrange(len(tensor.dims))] = rng.choice(SIZES)
            case 8 if graph.initializer:
                tensor = rng.choice(graph.initializer)
                tensor.data_location = TensorProto.EXTERNAL
                tensor.external_data.add(key="location", value=rng.choice(NAMES))
                tensor.external_data.add(key="length", value=str(rng.choice(SIZES)))
            case _:
                nodes = list(graph.node)
                rng.shuffle(nodes)
                del graph.node[:]
                graph.node.extend(nodes)
    return changed


def damage_json(document: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Replace, drop or repeat values anywhere in a JSON graph."""
    changed = copy.deepcopy(document)
    for _ in range(rng.randint(1, 4)):
        places: list[tuple[Any, Any]] = []
        stack: list[Any] = [changed]
        while stack:
            value = stack.pop()
            keys = list(value) if isinstance(value, dict) else range(len(value))
            places += [(value, key) for key in keys]
            stack += [value[key] for key in keys if isinstance(value[key], dict | list)]
        if not places:
            break
        holder, key = rng.choice(places)
        match rng.randrange(4):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, list):
                holder.insert(key, copy.deepcopy(holder[key]))
            case _:
                other, place = rng.choice(places)
                value = rng.choice([*SIZES, *NAMES, None, [], {}, 1.5, True])
                holder[key] = copy.deepcopy(other[place]) if rng.random() < 0.3 and place in other else value
    return changed


def check(source: object, weights: Weights | None = None) -> None:
    """The source gives a graph or an InputError; other exceptions pass, and fail the test."""
    with contextlib.suppress(InputError):
        load_graph(source, weights or Weights())


MODELS: list[Callable[[], onnx.ModelProto]] = [mlp, classifier, recurrent]


@pytest.mark.parametrize("count", [QUICK, pytest.param(SLOW, marks=pytest.mark.slow)])
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_damaged_files(make: Callable[[], onnx.ModelProto], count: int) -> None:
    proto, rng = make(), random.Random(count)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(count):
        check(damage_bytes(proto, rng))
        check(damage_fields(proto, rng))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MAX_GROWTH_KIB


@pytest.mark.parametrize("count", [QUICK, pytest.param(SLOW, marks=pytest.mark.slow)])
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_damaged_json_graphs(make: Callable[[], onnx.ModelProto], count: int) -> None:
    weights, rng = Weights(), random.Random(count)
    document = graph_to_json(load_graph(make(), weights))
    json.dumps(document)
    for _ in range(count):
        check(damage_json(document, rng), weights)


def test_no_file_outside_is_read(tmp_path: Path) -> None:
    """A model beside a secret: whatever its external data names, the secret is no weight."""
    secret = tmp_path / "secret.bin"
    secret.write_bytes(np.arange(8, dtype=np.float32).tobytes())
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "link.bin").symlink_to(secret)
    for location in ("../secret.bin", str(secret), "link.bin", "./../secret.bin", "model/../../secret.bin", ""):
        weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[8], data_location=TensorProto.EXTERNAL)
        weight.external_data.add(key="location", value=location)
        proto = model([helper.make_node("Add", ["x", "w"], ["y"])], {"x": (8,)}, {"y": (8,)}, [weight])
        (folder / "m.onnx").write_bytes(proto.SerializeToString())
        with pytest.raises(InputError):
            load_graph(folder / "m.onnx", Weights())
