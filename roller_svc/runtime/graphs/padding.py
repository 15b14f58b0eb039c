"""Call a model on fewer rows than it has: pad the inputs, slice the results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from roller_svc.errors import ArgumentError
from roller_svc.ir.program import TensorType
from roller_svc.runtime.binding import Array, numpy_dtype

Tensors = Sequence[tuple[str, TensorType]]


@dataclass(frozen=True, slots=True)
class Padding:
    """The padded axes of a model for one set of extents."""

    dims: Mapping[str, int]
    axes: Mapping[str, Mapping[str, int]]  # dimension → input or output → its padded axis

    def extents_of(self, shapes: Mapping[str, tuple[int, ...]], inputs: Tensors) -> dict[str, int] | None:
        """Return the extents that a call has; None if it has other shapes than padding makes fit."""
        found: dict[str, int] = {}
        for name, type_ in inputs:
            if len(shapes[name]) != len(type_.shape):
                return None
            for axis, (given, full) in enumerate(zip(shapes[name], type_.shape, strict=True)):
                dim = next((each for each, tensors in self.axes.items() if tensors.get(name) == axis), None)
                if dim is None:
                    if given != full:
                        return None
                    continue
                extent, rest = divmod(given, full // self.dims[dim])
                if rest or not 1 <= extent <= self.dims[dim] or found.setdefault(dim, extent) != extent:
                    return None
        return found

    def pad(self, array: Array, shape: tuple[int, ...]) -> Array:
        """Return the array in a model's shape. The first elements are repeated: they are values that the model takes."""
        padded = np.empty(shape, array.dtype)
        padded[tuple(slice(extent) for extent in array.shape)] = array
        valid = list(array.shape)
        for axis, (given, full) in enumerate(zip(array.shape, shape, strict=True)):
            if given < full:
                rest = [slice(extent) for extent in valid]
                first = list(rest)
                rest[axis], first[axis] = slice(given, full), slice(1)
                padded[tuple(rest)] = padded[tuple(first)]
                valid[axis] = full
        return padded

    def slice(self, name: str, array: Array, extents: Mapping[str, int]) -> Array:
        """Return the elements of a result that do not depend on padding."""
        where = [slice(None)] * array.ndim
        for dim, tensors in self.axes.items():
            if name in tensors:
                axis = tensors[name]
                where[axis] = slice(array.shape[axis] // self.dims[dim] * extents[dim])
        return array[tuple(where)]


def write_results(results: Mapping[str, Array], out: Mapping[str, Any]) -> dict[str, Any]:
    """Copy results to the arrays in `out`. Raises ArgumentError for one that does not fit."""
    for name, target in out.items():
        if name not in results:
            raise ArgumentError(f"unknown output {name!r}; expected: {', '.join(results)}", code="unknown-output")
        result = results[name]
        if not isinstance(target, np.ndarray) or (target.shape, target.dtype) != (result.shape, result.dtype):
            raise ArgumentError(
                f"output {name!r} must be an array of {result.dtype.name} with shape {result.shape}", code="shape-mismatch"
            )
        if not target.flags.writeable:
            raise ArgumentError(f"output {name!r} is read-only", code="out-not-writeable")
        target[...] = result
    return {**results, **out}


def check_dtypes(arrays: Mapping[str, Any], inputs: Tensors) -> None:
    """Raise ArgumentError for an array of another element type than the model's."""
    for name, type_ in inputs:
        if arrays[name].dtype != (expected := numpy_dtype(type_.dtype)):
            shown = f"argument {name!r} has dtype {arrays[name].dtype}, expected {expected.name}"
            raise ArgumentError(shown, code="dtype-mismatch")
