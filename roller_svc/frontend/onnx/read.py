"""Bytes of ONNX files → ModelProto, with its external data. The file is untrusted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError
from onnx import (
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    checker,
    shape_inference,
    version_converter,
)

from roller_svc.errors import ArgumentError
from roller_svc.frontend.onnx.table import DATA_TYPES, FOUR_BITS
from roller_svc.ir.dtype import DType

MAX_EXTERNAL_BYTES = 1 << 36  # of all tensors of a model
_MAX_OFFSET_DIGITS = 16
DOMAINS = ("", "ai.onnx")
_OF_TORCH = (
    "load it with torch and pass (module.eval(), example inputs), torch.export.load(path) for a .pt2 file, or export "
    "it with torch.onnx.export"
)
# Offset and bytes that files of other programs begin with, what they are, what to do.
_OTHER_FORMATS = (
    (0, b"PK\x03\x04", "a zip archive, as torch.save, torch.jit.save and torch.export.save write it", _OF_TORCH),
    (0, b"\x80\x02", "a pickle, as torch.save writes it", _OF_TORCH),
    (4, b"ORTM", "a model in onnxruntime's own format", "use the .onnx file that it was made of"),
    (4, b"TFL3", "a TensorFlow Lite model", "convert it with tf2onnx: python -m tf2onnx.convert --tflite FILE"),
    (0, b"\x89HDF", "a HDF5 file, as Keras writes it", "export the model to ONNX, as with tf2onnx"),
    (0, b"GGUF", "weights without a program", "export the model to ONNX"),
    (8, b'{"', "a file of weights (safetensors), without a program", "load them into their module, and pass "
     "(module.eval(), example inputs)"),
)  # fmt: skip
FIRST_BROADCASTING_OPSET = 7  # before it, nodes have attributes for broadcasting
UPGRADED_OPSET = 13


@dataclass(frozen=True, slots=True)
class ExternalData:
    """Where a tensor's bytes are: a file in the folder of the model, and a part of it."""

    tensor: str
    location: str  # a relative path
    offset_bytes: int
    length_bytes: int


ReadExternal = Callable[[ExternalData], bytes]


def parse_model(content: bytes) -> ModelProto:
    """Return the model in the bytes of a file. Raises ArgumentError if they are not a model."""
    check_format(content)
    try:
        model: ModelProto = ModelProto.FromString(content)
    except DecodeError as error:
        raise ArgumentError(
            "the file is not an ONNX model, or is damaged: its protobuf cannot be parsed", code="invalid-model"
        ) from error
    if not model.HasField("graph"):
        raise ArgumentError("the file is not an ONNX model: it has no graph", code="invalid-model")
    check_text(model)
    return model


def check_format(content: bytes) -> None:
    """Raise ArgumentError for the files of other programs. Its hint is the way to a model."""
    for offset, start, what, hint in _OTHER_FORMATS:
        if content[offset : offset + len(start)] == start:
            raise ArgumentError(f"the file is {what}, not an ONNX model", code="invalid-model", hint=hint)


def upgraded_model(model: ModelProto) -> ModelProto | None:
    """Return a model of an old operator set in a newer one; None if it is not old, or cannot be converted."""
    opset = max((each.version for each in model.opset_import if each.domain in DOMAINS), default=1)
    if opset >= FIRST_BROADCASTING_OPSET:
        return None
    try:
        checker.check_model(model, full_check=True)  # the converter expects a valid model
        upgraded: ModelProto = version_converter.convert_version(model, UPGRADED_OPSET)
    except (RuntimeError, ValueError, checker.ValidationError, shape_inference.InferenceError):
        return None
    return upgraded


def check_text(model: ModelProto) -> None:
    """Raise ArgumentError if a name is not UTF-8: protobuf gives bytes then."""
    for graph, nodes in _bodies(model):
        names = [text for node in nodes for text in (node.op_type, node.domain, node.name, *node.input, *node.output)]
        names += [attribute.name for node in nodes for attribute in node.attribute]
        if isinstance(graph, GraphProto):
            names += [graph.name, *(each.name for each in (*graph.input, *graph.output, *graph.initializer))]
        else:
            names += [graph.name, graph.domain, *graph.input, *graph.output]
        if damaged := [name for name in names if not isinstance(name, str)]:
            raise ArgumentError(f"the model is damaged: the name {damaged[0]!r:.80} is no UTF-8", code="invalid-model")


def load_external_data(model: ModelProto, read: ReadExternal | None) -> None:
    """Replace references to external data by the data.

    Args:
        read: returns a part of a file, of exactly its length; None if the model has no folder.

    Raises:
        ArgumentError: a reference is malformed, or its length is not that of the tensor.
    """
    total = 0
    for tensor in _tensors(model):
        if tensor.data_location != TensorProto.EXTERNAL:
            continue
        where = _external_data(tensor)
        total += where.length_bytes
        if read is None:
            raise ArgumentError(
                f"tensor {where.tensor!r} is in another file, {where.location!r}; only models that "
                "are read from a path have external data",
                code="external-data",
                hint="give the path of the .onnx file",
            )
        if total > MAX_EXTERNAL_BYTES:
            raise ArgumentError(f"external data has more than {MAX_EXTERNAL_BYTES} bytes", code="external-data")
        tensor.raw_data = read(where)
        tensor.ClearField("external_data")
        tensor.ClearField("data_location")


def _external_data(tensor: TensorProto) -> ExternalData:
    """Return the reference of a tensor. Its length is that of the elements."""
    name = tensor.name[:80]
    fields = {entry.key: entry.value for entry in tensor.external_data}
    dtype = DATA_TYPES.get(tensor.data_type)
    bits = DType.UINT8.bits // 2 if tensor.data_type in FOUR_BITS else 0 if dtype is None else dtype.bytes * 8
    if not bits or any(extent < 0 for extent in tensor.dims):
        raise ArgumentError(f"tensor {name!r} has external data of a type or shape that is not supported", code="external-data")
    size = -(-math.prod(tensor.dims) * bits // 8)
    offset = _number(name, "offset", fields.get("offset", "0"))
    length = _number(name, "length", fields["length"]) if "length" in fields else size
    if length != size:
        raise ArgumentError(f"tensor {name!r}: its external data has {length} bytes, expected {size}", code="external-data")
    if not fields.get("location"):
        raise ArgumentError(f"tensor {name!r}: its external data has no location", code="external-data")
    return ExternalData(name, fields["location"], offset, length)


def _number(tensor: str, key: str, text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > _MAX_OFFSET_DIGITS:
        raise ArgumentError(
            f"tensor {tensor!r}: {key} of its external data is no whole number: {text[:40]!r}", code="external-data"
        )
    return int(text)


def _bodies(model: ModelProto) -> Iterator[tuple[GraphProto | FunctionProto, Sequence[NodeProto]]]:
    """Yield every graph and function with its nodes, subgraphs too."""
    waiting: list[GraphProto | FunctionProto] = [model.graph, *model.functions]
    while waiting:
        body = waiting.pop()
        yield body, body.node
        for node in body.node:
            for attribute in node.attribute:
                if attribute.HasField("g"):
                    waiting.append(attribute.g)
                waiting += attribute.graphs


def _tensors(model: ModelProto) -> Iterator[TensorProto]:
    """Yield every tensor, also of subgraphs and functions."""
    for body, nodes in _bodies(model):
        if isinstance(body, GraphProto):
            yield from body.initializer
            for sparse in body.sparse_initializer:
                yield from (sparse.values, sparse.indices)
        for attribute in (attribute for node in nodes for attribute in node.attribute):
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
            for sparse in (attribute.sparse_tensor, *attribute.sparse_tensors):
                yield from (sparse.values, sparse.indices)
