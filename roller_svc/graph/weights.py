"""Arrays of constants by digest, and in the memory of a plan. Equal arrays are kept once."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roller_svc.errors import require
from roller_svc.frontend.lang.input_types import tensor_type
from roller_svc.ir.graph import Constant
from roller_svc.ir.model_plan import ModelPlan
from roller_svc.ir.program import TensorType
from roller_svc.runtime.binding import numpy_dtype
from roller_svc.runtime.graphs.cpu import weights_block

Array = NDArray[Any]


class Weights:
    """The values of a graph's constants. It only grows, so passes may share it."""

    def __init__(self) -> None:
        self._arrays: dict[str, Array] = {}

    def add(self, array: Array) -> Constant:
        """Keep a dense copy of the array and return its constant. Raises ArgumentError for an unsupported dtype."""
        type_ = tensor_type("constant", (array.dtype, array.shape))
        return self.add_typed(array, type_)

    def add_typed(self, array: Array, type_: TensorType) -> Constant:
        """Keep an array whose type is known."""
        dense = np.ascontiguousarray(array).reshape(array.shape)
        digest = _digest(dense, type_)
        self._arrays.setdefault(digest, dense)
        return Constant(type_, digest)

    def has(self, constant: Constant) -> bool:
        """Return whether there is an array of the constant's digest and type."""
        array = self._arrays.get(constant.digest)
        type_ = constant.type
        return array is not None and (array.shape, array.dtype) == (type_.shape, numpy_dtype(type_.dtype))

    def array(self, constant: Constant) -> Array:
        """Return the value of a constant. It must not be written."""
        return require(self._arrays.get(constant.digest), f"array of the constant {constant.digest[:12]}")


def _digest(dense: Array, type_: TensorType) -> str:
    hashed = hashlib.sha256(f"{type_.dtype.value}{type_.shape}".encode())
    hashed.update(dense.reshape(-1).view(np.uint8).data)
    return hashed.hexdigest()


def place_weights(plan: ModelPlan, weights: Weights) -> Array:
    """Return the constants of a plan, each at its offset."""
    arrays = [(p.type, p.offset_bytes, weights.array(Constant(p.type, p.digest))) for p in plan.weights]
    return weights_block(arrays, plan.weights_bytes)
