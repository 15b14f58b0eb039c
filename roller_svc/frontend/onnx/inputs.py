"""Inputs of ONNX models: their types, and the values of those that a caller binds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from onnx import ValueInfoProto

from roller_svc.errors import ArgumentError
from roller_svc.frontend.graph_builder import Array
from roller_svc.frontend.lang.input_types import short_repr
from roller_svc.frontend.lang.names import did_you_mean
from roller_svc.frontend.onnx.table import DATA_TYPES, data_type_name
from roller_svc.ir.dtype import DType
from roller_svc.ir.program import TensorType

MAX_ELEMENTS = 1 << 60  # of an input; an address holds no more
# Kinds of numpy → kinds of element types that take numbers without a type of their own.
_TAKEN_BY = {"b": "b", "i": "iufV", "u": "iufV", "f": "fV"}


def declared_types(
    declared: Sequence[ValueInfoProto],
    given: Mapping[str, TensorType],
    dims: Mapping[str, int],
    bound: Mapping[str, object],
) -> dict[str, TensorType]:
    """Return the type of each input that is not bound. Raises ArgumentError that lists every open dimension.

    Args:
        declared: the inputs of the model.
        given: types of inputs that the model leaves open.
        dims: extents of symbolic dimensions.
        bound: values of inputs.
    """
    _check_names(declared, given, dims, bound)
    types: dict[str, TensorType] = {}
    left_open: list[ValueInfoProto] = []
    for info in declared:
        if info.name in bound:
            continue
        if info.name in given:
            _check_given(info, given[info.name], dims)
            types[info.name] = given[info.name]
        elif (complete := _complete_type(info, dims)) is not None:
            types[info.name] = complete
        else:
            left_open.append(info)
    if left_open:
        raise _open_shape(left_open, dims)
    return types


def _check_names(
    declared: Sequence[ValueInfoProto],
    given: Mapping[str, TensorType],
    dims: Mapping[str, int],
    bound: Mapping[str, object],
) -> None:
    """Raise ArgumentError if an option names what the model does not have, or two name one input."""
    names = [info.name for info in declared]
    for option, mapping in (("inputs", given), ("constants", bound)):
        if unknown := [name for name in mapping if name not in names]:
            raise ArgumentError(
                f"{option}: the model has no input {unknown[0]!r}; its inputs are {', '.join(names)}",
                code="unknown-argument",
                hint=did_you_mean(unknown[0][:60], names),
            )
    if both := [name for name in given if name in bound]:
        raise ArgumentError(
            f"{both[0]!r} is in inputs and in constants: a constant is not an input of the model",
            code="invalid-option",
            hint="leave it out of one of them",
        )
    symbols = {dim.dim_param for info in declared for dim in info.type.tensor_type.shape.dim if dim.dim_param}
    if unknown := [name for name in dims if name not in symbols]:
        listed = ", ".join(sorted(symbols)) or "none"
        raise ArgumentError(
            f"the model has no dimension {unknown[0]!r}; its symbolic dimensions are {listed}", code="unknown-argument"
        )


def _complete_type(info: ValueInfoProto, dims: Mapping[str, int]) -> TensorType | None:
    """Return the declared type of an input, or None if it leaves extents open."""
    tensor = _tensor_type(info)
    extents = _extents(tensor, dims)
    if extents is None or any(extent is None for extent in extents):
        return None
    shape = tuple(extent or 0 for extent in extents)
    if math.prod(extent for extent in shape if extent) > MAX_ELEMENTS:
        raise ArgumentError(f"input {info.name[:80]!r} has the shape {list(shape)}, which no array has", code="invalid-shape")
    return TensorType(dtype_of(tensor.elem_type, info.name), shape)


def bound_value(info: ValueInfoProto, value: object, dims: Mapping[str, int]) -> tuple[Array, DType]:
    """Return the value of a bound input as an array of the declared type. Raises ArgumentError if it does not fit."""
    tensor = _tensor_type(info)
    dtype = dtype_of(tensor.elem_type, info.name)
    what = f"constants: {info.name[:80]!r}"
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:  # lists with gaps, tensors of another library
        raise ArgumentError(
            f"{what} must be a number or an array, got {short_repr(value)}: {str(error)[:120]}",
            code="invalid-option",
            hint='constants={"x": 1}, or an array of numpy',
        ) from error
    extents = _extents(tensor, dims)
    if array.ndim == 0 and extents is not None and all(extent == 1 for extent in extents):
        array = array.reshape([1] * len(extents))
    if not array.size and not hasattr(value, "dtype"):
        array = _typed_nothing(array.shape, extents, dtype)
    if extents is not None and not _fits(array.shape, extents):
        raise ArgumentError(
            f"{what} has the shape {list(array.shape)}, the model declares {_shown(tensor, dims)}",
            code="shape-mismatch",
            hint="give an array of the declared shape",
        )
    target = np.dtype(dtype.value)
    if hasattr(value, "dtype"):
        if array.dtype != target:
            raise ArgumentError(
                f"{what} has elements of type {array.dtype}, the model declares {dtype.value}",
                code="dtype-mismatch",
                hint=f"convert it to {dtype.value}",
            )
    elif array.size and (target.kind not in _TAKEN_BY.get(array.dtype.kind, "") or not _holds(dtype, array)):
        raise ArgumentError(
            f"{what} is {short_repr(value)}, the model declares {dtype.value}",
            code="dtype-mismatch",
            hint=f"give a value that {dtype.value} holds",
        )
    return array.astype(target), dtype


def _typed_nothing(shape: tuple[int, ...], extents: Sequence[int | None] | None, dtype: DType) -> Array:
    """Return the array that a list without elements means. A list has no extents after one of 0, and no type."""
    missing = [] if extents is None else list(extents[len(shape) :])
    if shape[-1] == 0:
        shape = (*shape, *(extent or 0 for extent in missing))
    return np.empty(shape, dtype.value)


def dtype_of(data_type: int, name: str) -> DType:
    """Return an element type of ONNX. Raises ArgumentError, which names the tensor, for one that is not supported."""
    dtype = DATA_TYPES.get(data_type)
    if dtype is None:
        shown = data_type_name(data_type)
        raise ArgumentError(f"{name!r} has elements of type {shown}, which is not supported", code="unsupported-type")
    return dtype


def _holds(dtype: DType, array: Array) -> bool:
    """Return whether an element type has these numbers. Floats are rounded."""
    if dtype.is_float:
        return True
    if dtype is DType.BOOL:
        return array.dtype == np.bool_
    least, greatest = dtype.integer_range
    return least <= int(array.min()) and int(array.max()) <= greatest


def _open_shape(infos: Sequence[ValueInfoProto], dims: Mapping[str, int]) -> ArgumentError:
    """Return the error that names every open dimension of these inputs, with an example of the missing options."""
    parts: list[str] = []
    symbols: dict[str, None] = {}
    unnamed: list[str] = []
    for info in infos:
        tensor = _tensor_type(info)
        extents = _extents(tensor, dims)
        dtype = dtype_of(tensor.elem_type, info.name).value
        if extents is None:
            parts.append(f"all dimensions of {info.name}")
            unnamed.append(f'"{info.name}": ("{dtype}", (1, 1))')
            continue
        has_unnamed = False
        for position, (dim, extent) in enumerate(zip(tensor.shape.dim, extents, strict=True)):
            if extent is not None:
                continue
            name = _symbol(dim)
            has_unnamed |= name is None
            given = f"is {dim.dim_value}" if dim.HasField("dim_value") else f"({dim.dim_param or 'no name'})"
            parts.append(f"{info.name}[{position}] {given}")
            symbols |= {} if name is None else {name: None}
        if has_unnamed:
            example = ", ".join(str(1 if extent is None else extent) for extent in extents)
            unnamed.append(f'"{info.name}": ("{dtype}", ({example}{"," * (len(extents) == 1)}))')
    ways = []
    if symbols:
        ways.append("dims={" + ", ".join(f'"{name}": 1' for name in symbols) + "}")
    if unnamed:
        ways.append("inputs={" + ", ".join(unnamed) + "}")
    return ArgumentError(
        f"the model leaves extents open: {', '.join(parts)}", code="open-shape", hint=f"give them, as {' and '.join(ways)}"
    )


def _symbol(dim: Any) -> str | None:
    """Return the name of a dimension; None for one that no option can name."""
    return dim.dim_param if dim.dim_param and dim.dim_param.strip() not in ("?", "-1") else None


def _extents(tensor: Any, dims: Mapping[str, int]) -> tuple[int | None, ...] | None:
    """Return the extents of a declared type, with None for open ones; None if it has no shape."""
    if not tensor.HasField("shape"):
        return None
    return tuple(
        (dim.dim_value if dim.dim_value >= 0 else None) if dim.HasField("dim_value") else dims.get(dim.dim_param)
        for dim in tensor.shape.dim
    )


def _fits(shape: Sequence[int], extents: Sequence[int | None]) -> bool:
    return len(shape) == len(extents) and all(extent is None or extent == size for extent, size in zip(extents, shape, strict=True))


def _shown(tensor: Any, dims: Mapping[str, int]) -> str:
    extents = _extents(tensor, dims) or ()
    listed = (
        dim.dim_param or "?" if extent is None else str(extent) for extent, dim in zip(extents, tensor.shape.dim, strict=True)
    )
    return f"[{', '.join(listed)}]"


def _check_given(info: ValueInfoProto, given: TensorType, dims: Mapping[str, int]) -> None:
    """Raise ArgumentError if the type given for an input contradicts the declared type or `dims`."""
    tensor = _tensor_type(info)
    if tensor.elem_type and (declared := dtype_of(tensor.elem_type, info.name)) is not given.dtype:
        raise ArgumentError(
            f"inputs: {info.name!r} is given as {given.dtype.value}, the model declares {declared.value}",
            code="dtype-mismatch",
            hint=f"give {declared.value}, or convert the model",
        )
    # Some exporters write 0 for an extent that is open.
    extents = _extents(tensor, dims)
    if extents is not None and not _fits(given.shape, [extent or None for extent in extents]):
        raise ArgumentError(
            f"inputs: {info.name!r} is given with shape {list(given.shape)}, the model declares {_shown(tensor, dims)}",
            code="shape-mismatch",
            hint="`inputs` sets only extents that the model and `dims` leave open",
        )


def _tensor_type(info: ValueInfoProto) -> Any:
    kind = info.type.WhichOneof("value")
    if kind != "tensor_type":
        shown = kind or "value without a type"
        message = f"input {info.name!r} is a {shown}; only dense tensors are supported"
        raise ArgumentError(message, code="unsupported-type")
    return info.type.tensor_type
