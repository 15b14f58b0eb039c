"""Tensor map ↔ its parameter in a saved kernel's metadata, in the driver's terms. What is read is not believed."""

from __future__ import annotations

from typing import Any

from roller_svc.errors import InvariantError
from roller_svc.ir.dtype import DType
from roller_svc.ir.tensor_map import MAX_EXTENT, MAX_RANK, MAX_STRIDE_BYTES, MapMode, Swizzle, TensorMap
from roller_svc.runtime.metadata_values import Damaged, count, identifier, items

KIND = "tensor_map"
MAP_BYTES = 128  # of CUtensorMap (CUDA driver API), which CUDA 13 aligns to 128
MAP_ALIGNMENT_BYTES = 128
L2_PROMOTION_BYTES = 256  # what the last cache fetches at once: rows of boxes lie side by side
_LARGEST_NUMBER = 1 << 16  # boxes, steps and corners are smaller

# Elements are moved as unsigned integers, so that none is taken for a number (a NaN keeps its bits).
_DATA_TYPES = {1: "UINT8", 2: "UINT16", 4: "UINT32", 8: "UINT64"}
_TF32 = "TFLOAT32"


def data_type(view: TensorMap) -> str:
    """CU_TENSOR_MAP_DATA_TYPE_... of the map's elements."""
    return _TF32 if view.tf32 else _DATA_TYPES[view.dtype.bytes]


def map_json(view: TensorMap) -> dict[str, Any]:
    """The arguments of cuTensorMapEncodeTiled or cuTensorMapEncodeIm2col, but for the address: `offset_bytes` into
    `buffer`. Of pixels, `box` is channelsPerPixel and pixelsPerColumn, corners are listed w, h, d."""
    return {
        "kind": KIND,
        "symbol": view.symbol,
        "bytes": MAP_BYTES,
        "alignment": MAP_ALIGNMENT_BYTES,
        "mode": view.mode.value,
        "buffer": view.buffer,
        "offset_bytes": view.offset_bytes,
        "dtype": view.dtype.value,
        "data_type": data_type(view),
        "extents": list(view.extents),
        "strides_bytes": list(view.strides_bytes),
        "box": list(view.box),
        "element_strides": list(view.element_strides),
        "lower_corner": list(view.lower),
        "upper_corner": list(view.upper),
        "swizzle_bytes": view.swizzle.value,
        "l2_promotion_bytes": L2_PROMOTION_BYTES,
    }


def read_map(item: dict[str, Any]) -> TensorMap:
    """Every field checked, and the driver's rules."""
    dtype = DType(item["dtype"])
    try:
        view = TensorMap(
            identifier(item["symbol"]), identifier(item["buffer"]), dtype, MapMode(item["mode"]),
            _numbers(item, "extents", 1, MAX_EXTENT), _numbers(item, "strides_bytes", 1, MAX_STRIDE_BYTES),
            _numbers(item, "box", 1, _LARGEST_NUMBER), _numbers(item, "element_strides", 1, _LARGEST_NUMBER),
            _numbers(item, "lower_corner", -_LARGEST_NUMBER, _LARGEST_NUMBER),
            _numbers(item, "upper_corner", -_LARGEST_NUMBER, _LARGEST_NUMBER),
            Swizzle(count(item["swizzle_bytes"], 0, _LARGEST_NUMBER)),
            count(item["offset_bytes"], 0, MAX_STRIDE_BYTES), tf32=item["data_type"] == _TF32,
        )  # fmt: skip
    except InvariantError as error:
        raise Damaged(str(error)) from error
    if item["data_type"] != data_type(view):
        raise Damaged(f"{view.symbol}: {dtype.value} elements are not moved as {item['data_type']}")
    return view


def _numbers(item: dict[str, Any], key: str, least: int, greatest: int) -> tuple[int, ...]:
    values = items(item, key)
    if len(values) > MAX_RANK:
        raise Damaged(f"{key} has {len(values)} numbers")
    return tuple(count(value, least, greatest) for value in values)
