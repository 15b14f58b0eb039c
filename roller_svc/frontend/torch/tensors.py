"""torch's tensors as arrays and types of the project."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor

from roller_svc.errors import ArgumentError
from roller_svc.frontend.graph_builder import Array
from roller_svc.frontend.lang.limits import MAX_DIMENSIONS
from roller_svc.ir.dtype import DType
from roller_svc.ir.program import TensorType

DTYPES: dict[torch.dtype, DType] = {
    torch.float64: DType.FLOAT64, torch.float32: DType.FLOAT32, torch.bfloat16: DType.BFLOAT16,
    torch.float16: DType.FLOAT16, torch.float8_e4m3fn: DType.FLOAT8_E4M3FN, torch.float8_e5m2: DType.FLOAT8_E5M2,
    torch.int64: DType.INT64, torch.int32: DType.INT32, torch.int16: DType.INT16, torch.int8: DType.INT8,
    torch.uint64: DType.UINT64, torch.uint32: DType.UINT32, torch.uint16: DType.UINT16, torch.uint8: DType.UINT8,
    torch.bool: DType.BOOL,
}  # fmt: skip
TORCH_DTYPES: dict[DType, torch.dtype] = {dtype: theirs for theirs, dtype in DTYPES.items()}
# Types that numpy lacks: torch views their bits as integers, numpy views these as ml_dtypes' types.
_BIT_VIEWS: dict[torch.dtype, tuple[torch.dtype, Any]] = {
    torch.bfloat16: (torch.int16, ml_dtypes.bfloat16),
    torch.float8_e4m3fn: (torch.uint8, ml_dtypes.float8_e4m3fn),
    torch.float8_e5m2: (torch.uint8, ml_dtypes.float8_e5m2),
}
_OF_BITS = {np.dtype(kind): (theirs, str(bits).removeprefix("torch.")) for theirs, (bits, kind) in _BIT_VIEWS.items()}


@dataclass(frozen=True, slots=True)
class Empty:
    """A tensor without elements, which the language lacks."""

    shape: tuple[int, ...]


def dtype_of(theirs: torch.dtype) -> DType:
    """Return an element type. Raises ArgumentError for those that the language lacks."""
    dtype = DTYPES.get(theirs)
    if dtype is None:
        raise ArgumentError(f"elements of type {theirs} are not supported", code="unsupported-type")
    return dtype


def type_of(tensor: torch.Tensor) -> TensorType | Empty:
    """Return the type of a tensor. Raises ArgumentError for a symbolic extent, a sparse tensor, or a complex one."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        raise ArgumentError(
            "a sparse, nested or quantized tensor is not supported; only dense tensors are", code="unsupported-type"
        )
    for position, extent in enumerate(tensor.shape):
        if not isinstance(extent, int):
            raise ArgumentError(
                f"dimension {position} is symbolic ({extent}); shapes must be static",
                code="open-shape",
                hint="export the model without dynamic_shapes",
            )
    shape = tuple(tensor.shape)
    if len(shape) > MAX_DIMENSIONS:
        message = f"a tensor has {len(shape)} dimensions; at most {MAX_DIMENSIONS} are supported"
        raise ArgumentError(message, code="unsupported-type")
    return TensorType(dtype_of(tensor.dtype), shape) if math.prod(shape) else Empty(shape)


def memory_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the dimensions from the outermost in memory to the innermost; None for memory with gaps or repetition."""
    order = tuple(sorted(range(tensor.dim()), key=lambda d: (-tensor.stride(d), d)))
    return order if tensor.permute(order).is_contiguous() else None


def array_of(tensor: torch.Tensor) -> Array:
    """Return the elements as a dense array, which shares the memory of a dense tensor on the CPU."""
    return view_of(tensor.cpu().contiguous())


def view_of(tensor: torch.Tensor) -> Array:
    """Return an array that shares the memory of a tensor on the CPU, with its strides."""
    plain = tensor.detach() if tensor.requires_grad else tensor
    if plain.is_neg():
        plain = plain.resolve_neg()
    if plain.dtype in _BIT_VIEWS:
        bits, kind = _BIT_VIEWS[plain.dtype]
        return np.asarray(plain.view(bits).numpy().view(kind))
    array: Array = plain.numpy()
    return array


def argument_of(what: str, tensor: torch.Tensor, *, written: bool = False) -> Array:
    """Return the array of an argument of a call. Raises ArgumentError if it has no memory to share, or needs a gradient."""
    if written and tensor.is_neg():
        message = f"{what} is a view of negated numbers, which cannot be written"
        raise ArgumentError(message, code="not-an-array", hint="pass an array of its own")
    if isinstance(tensor, FakeTensor):
        hint = "register an operator with its fake: roller_svc.torch.op"
        raise ArgumentError(f"{what} is a tensor of a trace, without elements", code="not-an-array", hint=hint)
    if tensor.device.type != "cpu":
        message = f"{what} is a tensor on {tensor.device}; this runs on the CPU"
        raise ArgumentError(message, code="not-an-array", hint="pass .cpu()")
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        raise ArgumentError(f"{what} is a sparse, nested or quantized tensor; only dense ones are taken", code="not-an-array")
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(
            f"{what} requires a gradient, which kernels and models do not give",
            code="needs-gradient",
            hint="call below torch.no_grad(), or pass .detach()",
        )
    if tensor.dtype not in DTYPES:
        raise ArgumentError(f"{what} has dtype {tensor.dtype}, which is not supported", code="dtype-mismatch")
    return view_of(tensor)


def find_updated(arguments: Mapping[str, object], arrays: Mapping[str, Any], names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return the tensors that a call updates in place. One that is not dense, or is a view of negated numbers, is copied.

    Args:
        arguments: of the call, by name.
        arrays: what the call took for them.
        names: of the arguments that the call updates.
    """
    values = {name: arguments[name] for name in names if name in arguments}
    tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor) and not value.is_neg()}
    return {name: value for name, value in tensors.items() if arrays[name].flags.c_contiguous}


def note_writes(values: Iterable[object]) -> None:
    """Tell torch that these tensors were written, so that it does not compute gradients from what they were."""
    for value in values:
        if isinstance(value, torch.Tensor) and not value.is_inference():
            torch.autograd.graph.increment_version(value)


def tensor_of(array: Array) -> torch.Tensor:
    """Return a tensor that shares the array's memory."""
    found = _OF_BITS.get(array.dtype)
    if found is not None:
        theirs, bits = found
        return torch.from_numpy(array.reshape(-1).view(bits)).view(theirs).reshape(array.shape)
    return torch.from_numpy(array)
