"""Nodes of ONNX that become loops, gathers and integer products: the compiled model against the interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graphs import load_linked
from onnx_node_models import import_node, model_of

from roller_svc import hardware
from roller_svc.compiler.kernel_cache import KernelCache
from roller_svc.graph.compile import ModelOptions, build_model
from roller_svc.graph.interpret import interpret
from roller_svc.ir.options import SelectionMode

RNG = np.random.default_rng(2)


def random(*shape: int) -> Any:
    return RNG.uniform(-1, 1, shape).astype(np.float32)


LSTM = [random(5, 2, 8), random(2, 24, 8), random(2, 24, 6), random(2, 48), np.array([5, 2], np.int32)]
GRU = [random(2, 5, 8), random(1, 18, 8), random(1, 18, 6), random(1, 36)]
SCALES = np.array([1, 1, 1.5, 0.6], np.float32)
BYTES = [
    np.asarray(x)
    for x in (
        RNG.integers(0, 256, (9, 20)).astype(np.uint8),
        np.float32(0.01),
        np.uint8(100),
        RNG.integers(-128, 128, (20, 7)).astype(np.int8),
        np.float32(0.02),
        np.int8(3),
        np.float32(0.05),
        np.uint8(120),
    )
]

# op type, attributes, tensors, positions of constants, results
CASES: list[tuple[str, dict[str, Any], list[Any], tuple[int, ...], int]] = [
    ("LSTM", {"hidden_size": 6, "direction": "bidirectional"}, LSTM, (1, 2, 3), 3),
    ("GRU", {"hidden_size": 6, "layout": 1, "linear_before_reset": 1}, GRU, (1, 2, 3), 2),
    ("GRU", {"hidden_size": 6, "layout": 1, "direction": "reverse"}, GRU, (), 2),
    ("Resize", {"mode": "nearest"}, [random(1, 3, 6, 10), None, SCALES], (2,), 1),
    ("Resize", {"mode": "cubic", "antialias": 1}, [random(1, 3, 6, 10), None, SCALES], (2,), 1),
    ("QLinearMatMul", {}, BYTES, (1, 2, 3, 4, 5, 6, 7), 1),
    ("DFT", {"onesided": 1, "axis": 1}, [random(2, 12, 1)], (), 1),
    ("BatchNormalization", {"training_mode": 1}, [random(4, 3, 5), *(np.abs(random(3)) for _ in range(4))], (), 3),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{'-'.join(map(str, case[1].values()))}")
def test_the_compiled_node_is_the_interpreted_one(
    case: tuple[str, dict[str, Any], list[Any], tuple[int, ...], int], tmp_path: Path
) -> None:
    op_type, attributes, tensors, constants, results = case
    graph, weights = import_node(
        model_of(op_type, attributes, tensors, constants=constants, results=results, opset=17 if op_type == "DFT" else 19)
    )
    options = ModelOptions(hardware.load("local"), select=SelectionMode.MODEL, top_k=1)
    built = build_model(graph, weights, options, KernelCache(tmp_path))
    model = load_linked(built, weights)
    arrays = {name: tensors[int(name[1:])] for name, _ in graph.inputs}
    got: Any = model.run(arrays)
    for name, want in interpret(graph, weights, arrays).items():
        assert got[name].dtype == want.dtype
        np.testing.assert_allclose(got[name].astype(np.float64), want.astype(np.float64), rtol=1e-4, atol=1e-5)
