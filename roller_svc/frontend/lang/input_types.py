"""Input types in JSON-compatible form → TensorTypes."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from roller_svc.errors import ArgumentError, ShapeError
from roller_svc.frontend.lang.limits import MAX_DIMENSIONS
from roller_svc.frontend.lang.names import TYPE_NAMES, find_right_form
from roller_svc.ir.dtype import DType, dtype_named
from roller_svc.ir.program import TensorType

_PROTOCOLS = ("__array_interface__", "__array__", "__dlpack__")


def tensor_types(inputs: object, *, least: int = 1) -> tuple[tuple[str, TensorType], ...]:
    """Return types by name, in order.

    Takes {"A": ("float32", (4, 4))}, {"A": {"dtype": "float32", "shape": [4, 4]}}, or arrays, whose types are taken.

    Args:
        inputs: types or arrays by name.
        least: the least extent; 0 for models, whose inputs may have no elements.
    """
    if not isinstance(inputs, Mapping):
        raise ArgumentError(f"inputs must map names to (dtype, shape), got {kind_of(inputs)}", code="invalid-inputs")
    for name in inputs:
        if not isinstance(name, str):
            raise ArgumentError(f"an input's name must be text, got {short_repr(name)}", code="invalid-inputs")
    return tuple((name, tensor_type(name, value, least=least)) for name, value in inputs.items())


def tensor_type(name: str, value: object, *, least: int = 1) -> TensorType:
    """Return the type of one input."""
    if isinstance(value, TensorType):
        return value
    if isinstance(value, Mapping):
        if set(value) != {"dtype", "shape"}:
            raise ArgumentError(f"input {name!r} must have dtype and shape, has {sorted(map(str, value))}", code="invalid-inputs")
        dtype, shape = value["dtype"], value["shape"]
    elif isinstance(value, tuple | list) and len(value) == 2:
        dtype, shape = value
    elif is_array(value):
        dtype, shape = _array_type(value)
    else:
        raise ArgumentError(f"input {name!r} must be (dtype, shape), got {short_repr(value)}", code="invalid-inputs")
    return TensorType(_dtype(name, dtype), _shape(name, shape, least))


def is_array(value: object) -> bool:
    """Whether a value is an array of any library: with dtype and shape, or with a protocol to exchange arrays."""
    if isinstance(value, type):
        return False
    return (hasattr(value, "dtype") and hasattr(value, "shape")) or any(hasattr(value, each) for each in _PROTOCOLS)


def _array_type(value: Any) -> tuple[object, object]:
    """Return the type of an array of any library. Reads no element."""
    if not (hasattr(value, "dtype") and hasattr(value, "shape")):
        value = np.from_dlpack(value) if hasattr(value, "__dlpack__") else np.asarray(value)
    return value.dtype, value.shape


def _dtype(name: str, value: object) -> DType:
    if isinstance(value, DType):
        return value
    if isinstance(value, str):
        text = value
    else:
        # type objects: numpy.float32, numpy.dtype("float32"), torch.float32
        named = getattr(value, "name", None) or getattr(value, "__name__", None)
        text = named if isinstance(named, str) else short_repr(value).removeprefix("torch.")
    dtype = dtype_named(text)
    if dtype is None:
        hint = find_right_form(text[:40], TYPE_NAMES) or f"dtypes are {', '.join(d.value for d in DType)}"
        raise ArgumentError(f"input {name!r}: unknown dtype {text[:40]!r}", code="unknown-dtype", hint=hint)
    return dtype


def _shape(name: str, value: object, least: int) -> tuple[int, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ShapeError(f"input {name!r}: shape must be a list of extents, got {short_repr(value)}", code="invalid-shape")
    extents = tuple(whole_number(extent) for extent in value)
    if len(extents) > MAX_DIMENSIONS:
        raise ShapeError(f"input {name!r} has {len(extents)} dimensions; {MAX_DIMENSIONS} are the most", code="invalid-shape")
    good = tuple(extent for extent in extents if extent is not None and extent >= least)
    if len(good) < len(extents):
        raise ShapeError(
            f"input {name!r}: every extent must be a {'positive ' if least else ''}whole number, got {short_repr(value)}",
            code="invalid-shape",
        )
    return good


def whole_number(value: object) -> int | None:
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]  # not an integer is what the except is for
    except TypeError:
        return None


def kind_of(value: object) -> str:
    return "nothing" if value is None else type(value).__qualname__


def short_repr(value: object) -> str:
    """Return a value's representation, cut; its class for numbers and lists that are too large for one."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."
