"""Static quantization of a model by onnxruntime's tool, as a process: python -m roller_bench.zoo.quantize FILE TARGET.

Activations become uint8, weights int8 with a scale of each channel. They stand between QuantizeLinear and
DequantizeLinear (`qdq`), or are operands of quantized operators (`qoperator`). Random inputs decide the ranges, on
which times do not depend.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from roller_svc.graph.inputs import random_arrays
from roller_svc.graph.load import load_graph
from roller_svc.graph.weights import Weights

CALLS = 4  # whose values decide the ranges
QDQ = "qdq"
FORMATS = {QDQ: "QDQ", "qoperator": "QOperator"}  # with the names that onnxruntime has for them


class RandomInputs:
    """The inputs of some calls, as onnxruntime's calibration reads them."""

    def __init__(self, file: str) -> None:
        inputs = [(name, type_.dtype.value, type_.shape) for name, type_ in load_graph(file, Weights()).inputs]
        self._calls: Iterator[dict[str, Any]] = (random_arrays(inputs, seed) for seed in range(CALLS))

    def get_next(self) -> dict[str, Any] | None:
        """Return the inputs of the next call."""
        return next(self._calls, None)


def quantize(file: str, target: str, form: str = QDQ) -> None:
    """Write the quantized model of a file, in a form of FORMATS."""
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    with tempfile.TemporaryDirectory(prefix="roller-quantize-") as folder:
        prepared = str(Path(folder) / "prepared.onnx")
        quant_pre_process(file, prepared, skip_symbolic_shape=True)
        quantize_static(
            prepared,
            target,
            RandomInputs(file),
            quant_format=QuantFormat[FORMATS[form]],
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
        )


if __name__ == "__main__":
    quantize(*sys.argv[1:])
