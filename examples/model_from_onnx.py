"""A model from an ONNX file: compiled for this CPU, called, saved, and loaded without a compiler."""

import tempfile
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import roller_svc

rng = np.random.default_rng(0)
weights = {"w": rng.standard_normal((64, 32)).astype(np.float32), "b": rng.standard_normal(32).astype(np.float32)}
graph = helper.make_graph(
    [helper.make_node("Gemm", ["x", "w", "b"], ["h"]), helper.make_node("Relu", ["h"], ["y"])],
    "layer",
    [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 64])],
    [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 32])],
    [numpy_helper.from_array(array, name) for name, array in weights.items()],
)

with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), file)
    model = roller_svc.compile_model(file, dims={"batch": [1, 8]}, select="model", threads=1)
    x = rng.standard_normal((8, 64)).astype(np.float32)
    np.testing.assert_allclose(model(x=x)["y"], np.maximum(x @ weights["w"] + weights["b"], 0), rtol=1e-4, atol=1e-5)
    model.save(Path(folder) / "saved")  # model.so, model.h for C and C++, weights
    loaded = roller_svc.load_model(Path(folder) / "saved")
    np.testing.assert_array_equal(loaded(x=x[:1])["y"], model(x=x[:1])["y"])
    print("CPU: agrees with numpy; buckets", *loaded.buckets)
