"""torch's tensors as arrays and types of the project."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import torch

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


def array_of(tensor: torch.Tensor) -> Array:
    """Return the elements as an array, which shares the memory of a dense tensor on the CPU."""
    dense = tensor.detach().cpu().contiguous()
    if dense.dtype in _BIT_VIEWS:
        bits, kind = _BIT_VIEWS[dense.dtype]
        return np.asarray(dense.reshape(-1).view(bits).numpy().view(kind).reshape(tuple(dense.shape)))
    return np.asarray(dense.numpy())


def tensor_of(array: Array) -> torch.Tensor:
    """Return a tensor that shares the array's memory."""
    for theirs, (bits, kind) in _BIT_VIEWS.items():
        if array.dtype == np.dtype(kind):
            name = str(bits).removeprefix("torch.")
            return torch.from_numpy(array.reshape(-1).view(name)).view(theirs).reshape(array.shape)
    return torch.from_numpy(array)
