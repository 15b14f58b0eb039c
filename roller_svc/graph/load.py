"""Read models from files, bytes, JSON and objects of frameworks."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roller_svc.errors import ArgumentError, UnsupportedModelError
from roller_svc.frontend.lang.input_types import kind_of
from roller_svc.graph.files import read_file, read_part
from roller_svc.graph.serialize import add_safetensors, graph_from_json
from roller_svc.graph.weights import Weights
from roller_svc.ir.graph import Graph
from roller_svc.ir.program import TensorType
from roller_svc.semantics.interpreter import reference

MAX_MODEL_BYTES = 1 << 31  # of a protobuf file, which holds no more
MAX_JSON_BYTES = 1 << 28
MAX_WEIGHTS_BYTES = 1 << 36
GRAPH_FILE, WEIGHTS_FILE = "graph.json", "weights.safetensors"
_TORCH_FILES = (b"PK\x03\x04", b"\x80\x02")  # a zip archive; a pickle, as torch wrote before version 1.6
_SOURCES = (
    "the path or bytes of an ONNX file, an onnx.ModelProto, a torch.export.ExportedProgram, "
    "(torch.nn.Module, example inputs) or a JSON graph"
)


def load_graph(
    source: object,
    weights: Weights,
    inputs: Mapping[str, TensorType] | None = None,
    dims: Mapping[str, int] | None = None,
    constants: Mapping[str, object] | None = None,
    *,
    byte_group: int = 0,
) -> Graph:
    """Return the graph of a model, and add its constants to the weights.

    Args:
        source: an ONNX model (path, bytes, ModelProto), a torch program (ExportedProgram, or a module with example
            inputs), a JSON graph (dict, path of a .json file or of a folder with graph.json).
        weights: takes the arrays of constants.
        inputs: types of inputs that an ONNX model leaves open, or other ones.
        dims: extents of symbolic dimensions of an ONNX model.
        constants: values of inputs of an ONNX model, which are then constants.
        byte_group: bytes along a sum that an instruction of the device multiplies, 0 if none does. An ONNX model may allow factors
            that are rounded to them.

    Raises:
        ArgumentError: the source is not a model, or is damaged.
        UnsupportedModelError: nodes are not supported.
    """
    given = _Given(inputs, dims, constants, byte_group)
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        if path.suffix == ".json" or path.is_dir():
            given.check_none("a JSON graph")
            return _read_json(path, weights)
        return _import_onnx(read_file(path, MAX_MODEL_BYTES), path.parent, weights, given)
    if isinstance(source, bytes | bytearray | memoryview):
        return _import_onnx(bytes(source), None, weights, given)
    if isinstance(source, Mapping):
        if any(_is_kind(value, "torch", "Tensor") for value in source.values()):
            raise ArgumentError(
                "this is a state_dict, the weights of a torch module without the module",
                code="invalid-model",
                hint="load it: module.load_state_dict(state_dict); then pass (module, example inputs)",
            )
        given.check_none("a JSON graph")
        return graph_from_json(source, weights)
    if _is_kind(source, "onnx", "ModelProto"):
        return _import_onnx(source, None, weights, given)
    if _is_kind(source, "torch", "ExportedProgram") or (isinstance(source, tuple) and len(source) == 2):
        given.check_none("a torch program", but_dims=True)
        return _import_torch(source, weights, dims)
    hint = "example inputs give the shapes: (module, (x,))" if _is_kind(source, "torch", "Module") else None
    raise ArgumentError(f"a model is {_SOURCES}, got {kind_of(source)}", code="invalid-model", hint=hint)


@dataclass(frozen=True, slots=True)
class _Given:
    """Types and values of the inputs of an ONNX model, as a caller gives them, and what its device does."""

    inputs: Mapping[str, TensorType] | None
    dims: Mapping[str, int] | None
    constants: Mapping[str, object] | None
    byte_group: int  # of the device

    def check_none(self, what: str, *, but_dims: bool = False) -> None:
        if self.inputs or self.constants or (self.dims and not but_dims):
            raise ArgumentError(
                f"inputs, dims and constants are for ONNX models; {what} has its own shapes and values", code="invalid-option"
            )


def _is_kind(value: object, package: str, name: str) -> bool:
    """Return whether a value is of that class, without an import of the package."""
    return any(c.__name__ == name and c.__module__.partition(".")[0] == package for c in type(value).__mro__)


def _import_onnx(source: Any, folder: Path | None, weights: Weights, given: _Given) -> Graph:
    """Import bytes or a ModelProto."""
    if isinstance(source, bytes) and source.startswith(_TORCH_FILES):
        raise ArgumentError(
            "this is a torch pickle, not an ONNX file: export it, or pass (module, inputs)",
            code="invalid-model",
            hint="a file of torch.export.save: pass torch.export.load(file)",
        )
    try:
        from roller_svc.frontend.onnx import model, read  # noqa: PLC0415 - loads the onnx package
    except ModuleNotFoundError as error:
        raise ArgumentError(
            "reading ONNX files takes the onnx package", code="missing-package", hint="pip install 'roller-svc[onnx]'"
        ) from error
    try:
        if isinstance(source, bytes):
            proto = read.parse_model(source)
        else:
            proto = type(source)()
            proto.CopyFrom(source)

        def read_external(where: read.ExternalData) -> bytes:
            return read_part(folder or Path(), where.location, where.offset_bytes, where.length_bytes)

        def import_proto(proto: Any) -> Graph:
            return model.import_model(
                proto,
                weights,
                reference,
                inputs=given.inputs,
                dims=given.dims,
                constants=given.constants,
                byte_group=given.byte_group,
            )

        read.load_external_data(proto, None if folder is None else read_external)
        try:
            return import_proto(proto)
        except UnsupportedModelError:
            upgraded = read.upgraded_model(proto)
            if upgraded is None:
                raise
            return import_proto(upgraded)
    except UnicodeDecodeError as error:  # protobuf decodes a string when it is read
        raise ArgumentError(f"the model is damaged: a string is no UTF-8 ({error.reason})", code="invalid-model") from error


def prepare_source(source: object, dims: Mapping[str, Any] | None) -> tuple[object, Mapping[str, Any] | None]:
    """Return a torch program with dynamic shapes as an ExportedProgram, with the ranges of its dimensions.

    Other sources and given extents are returned as they are.
    """
    if isinstance(source, tuple) and len(source) == 3:  # module, example inputs, dynamic shapes
        _check_tuple(source)
        source = _torch_export().export_module(source[0], *_arguments(source[1]), dynamic_shapes=source[2])
    if not _is_kind(source, "torch", "ExportedProgram"):
        return source, dims
    return source, _torch_export().complete_dims(source, dims)


def _check_tuple(source: tuple[Any, ...]) -> None:
    if not _is_kind(source[0], "torch", "Module"):
        raise ArgumentError(f"a model is {_SOURCES}, got a tuple that begins with {kind_of(source[0])}", code="invalid-model")


def _torch_export() -> Any:
    """Return the module that reads torch programs. Raises ArgumentError if torch is not installed."""
    try:
        from roller_svc.frontend.torch import export  # noqa: PLC0415 - loads the torch package
    except ModuleNotFoundError as error:
        raise ArgumentError(
            "reading torch programs takes the torch package", code="missing-package", hint="pip install torch"
        ) from error
    return export


def _arguments(examples: object) -> tuple[Sequence[object], Mapping[str, object]]:
    """Return example inputs as positional arguments and keywords."""
    if isinstance(examples, Mapping):
        return (), examples
    return (examples if isinstance(examples, Sequence) else (examples,)), {}


def _import_torch(source: Any, weights: Weights, dims: Mapping[str, int] | None) -> Graph:
    """Import an ExportedProgram, or a module with example inputs: a tuple of tensors, or a mapping for keywords."""
    export, program = _torch_export(), source
    if isinstance(source, tuple):
        _check_tuple(source)
        if dims:
            raise ArgumentError(
                "dims of a module take the dynamic shapes of its inputs",
                code="invalid-option",
                hint='(module, (x,), {"x": {0: torch.export.Dim("batch", max=64)}})',
            )
        program = export.export_module(source[0], *_arguments(source[1]))
    elif dims:
        program = export.specialize(program, dims)
    graph: Graph = export.import_program(program, weights, reference)
    return graph


def _read_json(path: Path, weights: Weights) -> Graph:
    """Read a .json file, or graph.json of a folder, with weights.safetensors beside it if there is one."""
    file = path / GRAPH_FILE if path.is_dir() else path
    try:
        document = json.loads(read_file(file, MAX_JSON_BYTES))
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"{file} is no JSON: {error}", code="invalid-model") from error
    weights_file = file.parent / WEIGHTS_FILE
    if weights_file.exists():
        add_safetensors(read_file(weights_file, MAX_WEIGHTS_BYTES), weights)
    return graph_from_json(document, weights)
