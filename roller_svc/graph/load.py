"""Read models from files, bytes and objects of frameworks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roller_svc.errors import ArgumentError
from roller_svc.graph.weights import Weights
from roller_svc.ir.graph import Graph
from roller_svc.ir.program import TensorType
from roller_svc.semantics.interpreter import reference

MAX_MODEL_BYTES = 1 << 31  # of a protobuf file, which holds no more


def load_graph(
    source: object, weights: Weights, inputs: Mapping[str, TensorType] | None, dims: Mapping[str, int] | None
) -> Graph:
    """Return the graph of a model, and add its constants to the weights.

    Raises:
        ArgumentError: the source is no model, or is damaged.
        UnsupportedModelError: nodes are not supported.
    """
    if isinstance(source, str | os.PathLike):
        return _import_onnx(_read_onnx(Path(source)), weights, inputs, dims)
    if isinstance(source, bytes):
        return _import_onnx(_parse_onnx(source), weights, inputs, dims)
    if type(source).__name__ == "ModelProto":
        return _import_onnx(source, weights, inputs, dims)
    raise ArgumentError(
        f"a model is the path or the bytes of an ONNX file, an onnx.ModelProto, got {type(source).__qualname__}",
        code="invalid-model",
    )


def _import_onnx(
    model: Any, weights: Weights, inputs: Mapping[str, TensorType] | None, dims: Mapping[str, int] | None
) -> Graph:
    from roller_svc.frontend.onnx.model import import_model  # loads the onnx package

    return import_model(model, weights, reference, inputs=inputs, dims=dims)


def _onnx() -> Any:
    try:
        import onnx
    except ImportError as error:
        raise ArgumentError("reading ONNX files takes the onnx package: pip install 'roller-svc[onnx]'",
                            code="missing-package") from error  # fmt: skip
    return onnx
