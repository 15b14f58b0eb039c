"""A step of a Llama-like decoder as ONNX files that differ in their weights' types: python -m roller_bench.zoo.decode FOLDER.

Four layers of 1024 features, 16 heads over 512 cached keys (inputs, float32) and gated MLPs of 2816, one token. Weights
are random, on which times do not depend. `--modules bench/roller_bench/zoo/decode.py` of `roller bench model-zoo` has
Inductor compile the steps in float32 and bfloat16.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

WIDTH, HIDDEN, HEADS, KEYS, LAYERS, GROUP = 1024, 2816, 16, 512, 4, 32
FEATURES = WIDTH // HEADS
Array = np.ndarray[Any, Any]


class Step:
    """The graph in progress. `multiply` adds the product of a row with random weights of one type."""

    def __init__(self, multiply: Callable[[Step, str, int, int], str]) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self.multiply = multiply
        self.random = np.random.default_rng(0)

    def add(self, op_type: str, *inputs: str, count: int = 1, **attributes: Any) -> str:
        """Add a node and return its first result."""
        name = f"{op_type}_{len(self.nodes)}"
        results = [name, *(f"{name}.{i}" for i in range(1, count))]
        self.nodes.append(helper.make_node(op_type, inputs, results, name=name, **attributes))
        return name

    def constant(self, array: Array, data_type: int | None = None) -> str:
        """Add a constant. `data_type`: its type of 4 or 16 bits, which numpy does not have."""
        name = f"constant_{len(self.constants)}"
        if data_type is None:
            self.constants.append(numpy_helper.from_array(array, name))
        else:
            narrow = array.astype(helper.tensor_dtype_to_np_dtype(data_type))
            self.constants.append(numpy_helper.from_array(narrow, name))
        return name

    def norm(self, x: str) -> str:
        """Return the RMS norm of a row."""
        mean = self.add("ReduceMean", self.add("Mul", x, x), self.constant(np.array([-1], np.int64)), keepdims=1)
        root = self.add("Sqrt", self.add("Add", mean, self.constant(np.array(1e-5, np.float32))))
        return self.add("Mul", self.add("Div", x, root), self.constant(np.ones(WIDTH, np.float32)))

    def reshape(self, x: str, *shape: int) -> str:
        return self.add("Reshape", x, self.constant(np.array(shape, np.int64)))

    def attention(self, layer: int, x: str) -> str:
        """Return the mean of cached values by one query of each head. New keys and values are results."""
        q, k, v = (self.reshape(self.multiply(self, x, WIDTH, WIDTH), HEADS, 1, FEATURES) for _ in range(3))
        for name, new in (("key", k), ("value", v)):
            self.inputs.append(helper.make_tensor_value_info(f"{name}s{layer}", TensorProto.FLOAT, [HEADS, KEYS, FEATURES]))
            self.outputs.append(helper.make_tensor_value_info(new, TensorProto.FLOAT, [HEADS, 1, FEATURES]))
        scores = self.add("MatMul", q, self.add("Transpose", f"keys{layer}", perm=[0, 2, 1]))
        weights = self.add("Softmax", self.add("Mul", scores, self.constant(np.array(FEATURES**-0.5, np.float32))), axis=-1)
        return self.multiply(self, self.reshape(self.add("MatMul", weights, f"values{layer}"), 1, WIDTH), WIDTH, WIDTH)

    def mlp(self, x: str) -> str:
        gate, up = (self.multiply(self, x, WIDTH, HIDDEN) for _ in range(2))
        return self.multiply(self, self.add("Mul", self.add("Mul", gate, self.add("Sigmoid", gate)), up), HIDDEN, WIDTH)

    def model(self) -> onnx.ModelProto:
        """Return the whole step."""
        self.inputs.append(helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, WIDTH]))
        x = "x"
        for layer in range(LAYERS):
            x = self.add("Add", x, self.attention(layer, self.norm(x)))
            x = self.add("Add", x, self.mlp(self.norm(x)))
        self.outputs.append(helper.make_tensor_value_info(x, TensorProto.FLOAT, [1, WIDTH]))
        graph = helper.make_graph(self.nodes, "decode", self.inputs, self.outputs, self.constants)
        domains = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=domains, ir_version=10)

    def floats(self, *shape: int) -> Array:
        values: Array = self.random.standard_normal(shape) * shape[0] ** -0.5
        return values.astype(np.float32)

    def integers(self, low: int, high: int, *shape: int) -> Array:
        return self.random.integers(low, high, shape).astype(np.int8 if low < 0 else np.uint8)

    def scales(self, *shape: int) -> Array:
        return self.random.uniform(1e-4, 1e-3, shape).astype(np.float32)


def float32(step: Step, x: str, depth: int, columns: int) -> str:
    return step.add("MatMul", x, step.constant(step.floats(depth, columns)))


def bfloat16(step: Step, x: str, depth: int, columns: int) -> str:
    narrow = step.add("Cast", x, to=TensorProto.BFLOAT16)
    weights = step.constant(step.floats(depth, columns), TensorProto.BFLOAT16)
    return step.add("Cast", step.add("MatMul", narrow, weights), to=TensorProto.FLOAT)


def dynamic(step: Step, x: str, depth: int, columns: int) -> str:
    """Return the product of bytes whose range is that of the row."""
    row = step.add("DynamicQuantizeLinear", x, count=3)
    weights = step.constant(step.integers(-127, 128, depth, columns))
    total = step.add("Cast", step.add("MatMulInteger", row, weights, f"{row}.2"), to=TensorProto.FLOAT)
    return step.add("Mul", total, step.add("Mul", f"{row}.1", step.constant(step.scales(columns))))


def blocks_of(bits: int) -> Callable[[Step, str, int, int], str]:
    """Return MatMulNBits, with the permission to round activations to bytes."""

    def multiply(step: Step, x: str, depth: int, columns: int) -> str:
        packed = step.constant(step.integers(0, 256, columns, depth // GROUP, GROUP * bits // 8))
        scales = step.constant(step.scales(columns * depth // GROUP))
        shape = {"K": depth, "N": columns, "bits": bits, "block_size": GROUP}
        return step.add("MatMulNBits", x, packed, scales, domain="com.microsoft", accuracy_level=4, **shape)

    return multiply


def dequantized(data_type: int, *, has_blocks: bool) -> Callable[[Step, str, int, int], str]:
    def multiply(step: Step, x: str, depth: int, columns: int) -> str:
        four_bits = data_type == TensorProto.INT4
        integers = step.integers(-8, 8, depth, columns) if four_bits else step.integers(-127, 128, depth, columns)
        weights = step.constant(integers, data_type if four_bits else None)
        scales = step.constant(step.scales(depth // GROUP, columns) if has_blocks else step.scales(columns))
        axis = {"axis": 0, "block_size": GROUP} if has_blocks else {"axis": 1}
        return step.add("MatMul", x, step.add("DequantizeLinear", weights, scales, **axis))

    return multiply


FORMS: dict[str, Callable[[Step, str, int, int], str]] = {
    "float32": float32,
    "bfloat16": bfloat16,
    "int8-dynamic": dynamic,
    "nbits8": blocks_of(8),
    "nbits4": blocks_of(4),
    "dq8-channels": dequantized(TensorProto.INT8, has_blocks=False),
    "dq8-blocks": dequantized(TensorProto.INT8, has_blocks=True),
    "dq4-blocks": dequantized(TensorProto.INT4, has_blocks=True),
}


def build(name: str) -> tuple[Any, tuple[Any, ...], list[str], list[str]]:
    """Return a torch module of the step `decode-FORM`, its inputs, and their names and those of the outputs."""
    import torch

    graph = Step(FORMS[name.removeprefix("decode-")]).model().graph
    types = {TensorProto.FLOAT: torch.float32, TensorProto.BFLOAT16: torch.bfloat16}
    constants = {each.name: numpy_helper.to_array(each) for each in graph.initializer}
    shapes = {name: tuple(array.tolist()) for name, array in constants.items() if array.dtype == np.int64}  # or axes
    functions: dict[str, Callable[..., Any]] = {
        "Add": torch.add, "Mul": torch.mul, "Div": torch.div, "MatMul": torch.matmul, "Sqrt": torch.sqrt,
        "Sigmoid": torch.sigmoid, "Reshape": torch.reshape, "Softmax": lambda x, axis: torch.softmax(x, axis),
        "ReduceMean": lambda x, axes, keepdims: x.mean(axes, bool(keepdims)), "Transpose": lambda x, perm: x.permute(perm),
        "Cast": lambda x, to: x.to(types[to]),
    }  # fmt: skip

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for each in graph.initializer:
                if each.name not in shapes:
                    weights = torch.from_numpy(constants[each.name].astype(np.float32)).to(types[each.data_type])
                    self.register_buffer(each.name, weights)  # which Inductor freezes

        def forward(self, *inputs: Any) -> tuple[Any, ...]:
            values = {**shapes, **dict(self.named_buffers()), **dict(zip(names, inputs, strict=True))}
            for node, attributes in nodes:
                values[node.output[0]] = functions[node.op_type](*(values[each] for each in node.input), **attributes)
            return tuple(values[each] for each in outputs)

    nodes = [(node, {each.name: helper.get_attribute_value(each) for each in node.attribute}) for node in graph.node]
    names, outputs = [each.name for each in graph.input], [each.name for each in graph.output]
    extents = [[dim.dim_value for dim in each.type.tensor_type.shape.dim] for each in graph.input]
    return Module(), tuple(torch.zeros(each) for each in extents), names, outputs


if __name__ == "__main__":
    for form, multiply in FORMS.items():
        onnx.save(Step(multiply).model(), str(Path(sys.argv[1]) / f"decode-{form}.onnx"))
