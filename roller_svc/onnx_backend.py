"""A backend for the onnx package: `prepare(model).run(inputs)`, which its own test runner accepts.

    import onnx.backend.test
    from roller_svc import onnx_backend
    suite = onnx.backend.test.BackendTest(onnx_backend, __name__).test_suite

Shapes are static. Where a model takes shapes, axes or counts as inputs, it is compiled for their values at a call.
"""

from __future__ import annotations

import contextlib
import unittest
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, ValueInfoProto, helper
from onnx.backend.base import Backend, BackendRep, Device, DeviceType, namedtupledict

from roller_svc.errors import ArgumentError, InputError
from roller_svc.frontend.lang.input_types import kind_of, tensor_type
from roller_svc.ir.program import TensorType
from roller_svc.model import Model, compile_model

Array = NDArray[Any]
MAX_PREPARED = 64  # compiled models of one BackendRep: for values and shapes of recent calls
MAX_SPECIALIZED_ELEMENTS = 1 << 12


class RefusedModelError(InputError, unittest.SkipTest):
    """A model is not supported. The test runner of onnx counts the test as skipped."""

    default_code = "unsupported-model"


class RollerRep(BackendRep):
    """A model that runs on arrays. It is compiled for the shapes and, where needed, the values of a call."""

    def __init__(self, model: ModelProto) -> None:
        self._model = model
        names = {tensor.name for tensor in model.graph.initializer}
        declared = [info for info in model.graph.input if info.name not in names]
        self._inputs = [info.name for info in declared]
        self._open = frozenset(info.name for info in declared if _is_open(info))
        self._compiled: dict[object, Model] = {}
        self._specialized: tuple[str, ...] | None = None  # inputs whose values decide; None: not known yet

    def run(self, inputs: Any, **options: Any) -> tuple[Any, ...]:
        """Return the outputs in the model's order. `inputs`: a list in the model's order, or arrays by name."""
        if options:
            raise ArgumentError(f"unknown option of run: {next(iter(options))!r}", code="invalid-option")
        arrays = self._named(inputs)
        model, constants = self._model_for(arrays)
        results = model.run({name: array for name, array in arrays.items() if name not in constants})
        names = [info.name for info in self._model.graph.output]
        return namedtupledict("Outputs", names)(*(results[name] for name in names))

    def compile_static(self) -> None:
        """Compile the model if it declares all shapes and no value decides. Otherwise a call does it."""
        if not self._open:
            with contextlib.suppress(InputError):
                self._prepared({}, ())
                self._specialized = ()

    def _named(self, inputs: Any) -> dict[str, Array]:
        values = inputs if isinstance(inputs, Mapping) else None
        if values is None:
            listed = list(inputs) if isinstance(inputs, Sequence) else [inputs]
            if len(listed) > len(self._inputs):
                raise ArgumentError(f"the model takes {len(self._inputs)} inputs, got {len(listed)}", code="unknown-argument")
            values = dict(zip(self._inputs, listed, strict=False))
        arrays: dict[str, Array] = {}
        for name, value in values.items():
            if not isinstance(value, np.ndarray | np.generic | int | float):
                raise RefusedModelError(
                    f"input {name!r} is a {kind_of(value)}; only dense tensors are supported", code="unsupported-type"
                )
            arrays[name] = np.asarray(value)
        return arrays

    def _model_for(self, arrays: Mapping[str, Array]) -> tuple[Model, tuple[str, ...]]:
        """Return the model compiled for these arrays, and the inputs that are constants of it."""
        if self._specialized is not None:
            return self._prepared(arrays, self._specialized), self._specialized
        refusal: InputError | None = None
        for constants in _specializations(arrays):
            try:
                model = self._prepared(arrays, constants)
            except InputError as error:
                refusal = refusal or error
                continue
            self._specialized = constants
            return model, constants
        raise _refused(refusal)

    def _prepared(self, arrays: Mapping[str, Array], constants: tuple[str, ...]) -> Model:
        types = {name: _type(name, arrays[name]) for name in self._open if name in arrays and name not in constants}
        values = tuple((name, arrays[name].dtype.str, arrays[name].shape, arrays[name].tobytes()) for name in constants)
        key = (tuple(sorted(types.items(), key=lambda each: each[0])), values)
        if key not in self._compiled:
            bound = {name: arrays[name] for name in constants}
            self._compiled[key] = compile_model(self._model, inputs=types, constants=bound, select="model", top_k=1)
            if len(self._compiled) > MAX_PREPARED:
                del self._compiled[next(iter(self._compiled))]
        return self._compiled[key]


class RollerBackend(Backend):
    """Runs ONNX models on the host CPU."""

    @classmethod
    def is_compatible(cls, model: ModelProto, device: str = "CPU", **options: Any) -> bool:
        """Return whether the device is supported. Whether all nodes are is known when inputs are given."""
        return cls.supports_device(device)

    @classmethod
    def prepare(cls, model: ModelProto, device: str = "CPU", **options: Any) -> RollerRep:
        """Return the model. It is compiled now or at the first call, which raises RefusedModelError if it cannot be.

        Raises RefusedModelError for another device.
        """
        if not cls.supports_device(device):
            raise RefusedModelError(f"device {device!r} is not supported; use 'CPU'", code="unsupported-target")
        if not isinstance(model, ModelProto):
            raise ArgumentError(f"a model is an onnx.ModelProto, got {kind_of(model)}", code="invalid-model")
        prepared = RollerRep(model)
        prepared.compile_static()
        return prepared

    @classmethod
    def run_model(cls, model: ModelProto, inputs: Any, device: str = "CPU", **options: Any) -> tuple[Any, ...]:
        """Return the outputs of a model for inputs in its order."""
        return cls.prepare(model, device).run(inputs)

    @classmethod
    def run_node(
        cls, node: NodeProto, inputs: Any, device: str = "CPU", outputs_info: Any = None, **options: Any
    ) -> tuple[Any, ...]:
        """Return the results of a node for its inputs, in the operator set `opset_version`; default: the latest."""
        arrays = [np.asarray(value) for value in (inputs.values() if isinstance(inputs, Mapping) else inputs)]
        names = [name for name in node.input if name]
        if len(names) != len(arrays):
            raise ArgumentError(f"node {node.op_type} takes {len(names)} inputs, got {len(arrays)}", code="missing-argument")
        graph = helper.make_graph(
            [node],
            node.op_type,
            [
                helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
                for name, array in dict(zip(names, arrays, strict=True)).items()
            ],
            [helper.make_empty_tensor_value_info(name) for name in node.output if name],
        )
        version = options.get("opset_version")
        opsets = [helper.make_opsetid(node.domain, version)] if version else None
        return cls.run_model(helper.make_model(graph, opset_imports=opsets), arrays, device)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """Return whether the device is "CPU", with or without a number."""
        try:
            return bool(Device(device).type == DeviceType.CPU)
        except (AttributeError, ValueError):  # an unknown type, a number that is none
            return False


def _specializations(arrays: Mapping[str, Array]) -> list[tuple[str, ...]]:
    """Return the sets of inputs to try as constants: none, integers of rank 0 or 1, all of rank 0 or 1, all but one."""
    small = [name for name, array in arrays.items() if array.size <= MAX_SPECIALIZED_ELEMENTS]
    flat = [name for name in small if arrays[name].ndim <= 1]
    whole = [name for name in flat if arrays[name].dtype.kind in "iub"]
    tried = (), whole, flat, [name for name in small if name != next(iter(arrays))], small
    return list(dict.fromkeys(map(tuple, tried)))


def _is_open(info: ValueInfoProto) -> bool:
    """Return whether a declared type leaves extents open."""
    tensor = info.type.tensor_type
    return not tensor.HasField("shape") or not all(dim.HasField("dim_value") for dim in tensor.shape.dim)


def _type(name: str, array: Array) -> TensorType:
    return tensor_type(name, (array.dtype, array.shape), least=0)


def _refused(error: InputError | None) -> RefusedModelError:
    if error is None:
        return RefusedModelError("the model cannot be compiled")
    refusal = RefusedModelError(error.message, code=error.code, hint=error.hint)
    refusal.__cause__ = error
    return refusal


is_compatible = RollerBackend.is_compatible
prepare = RollerBackend.prepare
run_model = RollerBackend.run_model
run_node = RollerBackend.run_node
supports_device = RollerBackend.supports_device
