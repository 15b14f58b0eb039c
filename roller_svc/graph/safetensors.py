"""Read the safetensors format: a JSON header, and the bytes of dense little-endian arrays.

The numpy side of the format's own library has neither bfloat16 nor float8.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

import numpy as np

from roller_svc.errors import ArgumentError
from roller_svc.graph.weights import Array
from roller_svc.ir.dtype import DType
from roller_svc.ir.program import TensorType
from roller_svc.runtime.binding import numpy_dtype

MAX_HEADER_BYTES = 100_000_000  # the limit of the format's own library
_LENGTH_BYTES = 8
DTYPES = {
    "F64": DType.FLOAT64, "F32": DType.FLOAT32, "BF16": DType.BFLOAT16, "F16": DType.FLOAT16,
    "F8_E4M3": DType.FLOAT8_E4M3FN, "F8_E5M2": DType.FLOAT8_E5M2, "I64": DType.INT64, "U64": DType.UINT64,
    "I32": DType.INT32, "U32": DType.UINT32, "I16": DType.INT16, "U16": DType.UINT16, "I8": DType.INT8,
    "U8": DType.UINT8, "BOOL": DType.BOOL,
}  # fmt: skip


def decode_tensors(content: bytes) -> dict[str, tuple[TensorType, Array]]:
    """Return the tensors of a file, which share its memory. Raises ArgumentError if it is damaged."""
    data = memoryview(content)
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    if len(data) < _LENGTH_BYTES or not 2 <= length <= min(MAX_HEADER_BYTES, len(data) - _LENGTH_BYTES):
        raise _damaged("its header's length does not fit")
    try:
        header = json.loads(bytes(data[_LENGTH_BYTES : _LENGTH_BYTES + length]))
    except (ValueError, RecursionError) as error:
        raise _damaged("its header is no JSON") from error
    if not isinstance(header, dict):
        raise _damaged("its header is no mapping")
    header.pop("__metadata__", None)
    body = data[_LENGTH_BYTES + length :]
    return {name: _decode(name, entry, body) for name, entry in header.items()}


def _decode(name: str, entry: object, body: memoryview) -> tuple[TensorType, Array]:
    if not isinstance(entry, Mapping) or not {"dtype", "shape", "data_offsets"} <= set(entry):
        raise _damaged(f"tensor {name[:80]!r} has no dtype, shape or data_offsets")
    shape, offsets = _whole_numbers(name, entry["shape"]), _whole_numbers(name, entry["data_offsets"])
    kind = entry["dtype"]
    dtype = DTYPES.get(kind) if isinstance(kind, str) else None
    if dtype is None:
        raise _damaged(f"tensor {name[:80]!r} has elements of type {str(kind)[:20]!r}")
    size = math.prod(shape) * dtype.bytes
    if len(offsets) != 2 or offsets[1] > len(body) or offsets[1] - offsets[0] != size:
        raise _damaged(f"tensor {name[:80]!r} does not have the bytes of its shape")
    array = np.frombuffer(body[offsets[0] : offsets[1]], np.uint8).view(numpy_dtype(dtype)).reshape(shape)
    return TensorType(dtype, shape), array


def _whole_numbers(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(each) is int and 0 <= each < 1 << 48 for each in value):
        raise _damaged(f"tensor {name[:80]!r} has a shape or offsets that are no whole numbers")
    return tuple(value)


def _damaged(reason: str) -> ArgumentError:
    return ArgumentError(f"the file of weights is damaged: {reason}", code="invalid-model")
