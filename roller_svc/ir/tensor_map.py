"""Tensor maps: descriptors of a tensor in memory and of the boxes that the tensor memory accelerator (TMA) copies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from roller_svc.errors import InvariantError
from roller_svc.ir.dtype import DType

# Limits of cuTensorMapEncodeTiled and cuTensorMapEncodeIm2col (CUDA driver API, "Tensor Map Object Management").
MAX_RANK = 5
MIN_IM2COL_RANK = 3
MAX_EXTENT = 1 << 32
# Coordinates are signed 32-bit integers (PTX ISA, "cp.async.bulk.tensor"); the last tile may exceed the tensor.
MAX_COORDINATE = (1 << 31) - (1 << 16)
STRIDE_BYTES = 16  # strides, the tensor's address and a box's rows are multiples of it
MAX_STRIDE_BYTES = 1 << 40
MAX_BOX = 256
MAX_ELEMENT_STRIDE = 8
MAX_CHANNELS = 256
MAX_PIXELS = 1024
CORNER_BITS = {3: 16, 4: 8, 5: 4}  # of one signed corner, by rank...
OFFSET_BITS = {3: 16, 4: 8, 5: 5}  # ...and of one unsigned offset of an im2col copy (CUTLASS, copy_traits_sm90_im2col)


class MapMode(Enum):
    TILED = "tiled"
    IM2COL = "im2col"


class Swizzle(Enum):
    """Bytes of a row of shared memory within which 16-byte chunks are permuted."""

    NONE = 0
    B32 = 32
    B64 = 64
    B128 = 128


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A view of a tensor for TMA copies. Elements outside of it are loaded as zeros and are not stored.

    Dimensions are listed innermost first. TILED: a copy moves `box` elements of the tensor along each dimension, in
    steps of `element_strides`, rounded up. IM2COL: dimensions are c, w[, h[, d]], n, and `box` is (channels, pixels). A
    copy moves consecutive pixels along w, h, d, n, in steps, from the corner `lower` to before extent + `upper`.
    """

    symbol: str  # the kernel's parameter
    buffer: str  # Buffer symbol of the tensor
    dtype: DType
    mode: MapMode
    extents: tuple[int, ...]  # elements
    strides_bytes: tuple[int, ...]  # of all dimensions but the innermost, which is contiguous
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    lower: tuple[int, ...] = ()
    upper: tuple[int, ...] = ()
    swizzle: Swizzle = Swizzle.NONE
    offset_bytes: int = 0  # of the view in the buffer
    tf32: bool = False  # round float32 elements to tf32 on loads

    def __post_init__(self) -> None:
        reason = invalid_map_reason(self)
        if reason:
            raise InvariantError(f"tensor map {self.symbol}: {reason}")

    @property
    def rank(self) -> int:
        return len(self.extents)

    @property
    def box_elements(self) -> tuple[int, ...]:
        """Return the elements that one copy moves along each dimension, innermost first, or (channels, pixels)."""
        if self.mode is MapMode.IM2COL:
            return self.box
        return tuple(-(-size // step) for size, step in zip(self.box, self.element_strides, strict=True))

    @property
    def bytes(self) -> int:
        """Return the bytes of a whole box in shared memory: an mbarrier counts them even outside of the tensor."""
        return math.prod(self.box_elements) * self.dtype.bytes

    @property
    def end_bytes(self) -> int:
        """Return the bytes from the buffer's start to the end of the view's last element."""
        last = sum((e - 1) * s for e, s in zip(self.extents[1:], self.strides_bytes, strict=True))
        return self.offset_bytes + last + self.extents[0] * self.dtype.bytes


def invalid_map_reason(view: TensorMap) -> str:
    """Return why the driver would reject the map, or "" if it would not."""
    return _invalid_tensor_reason(view) or (
        _invalid_im2col_reason(view) if view.mode is MapMode.IM2COL else _invalid_box_reason(view)
    )


def _invalid_tensor_reason(view: TensorMap) -> str:
    rank = len(view.extents)
    if not 1 <= rank <= MAX_RANK or len(view.strides_bytes) != rank - 1 or len(view.element_strides) != rank:
        return f"{rank} dimensions, strides {view.strides_bytes}, steps {view.element_strides}"
    if not all(1 <= extent <= MAX_EXTENT for extent in view.extents):
        return f"extents {view.extents} are not from 1 to 2^32"
    if not all(0 < stride < MAX_STRIDE_BYTES and stride % STRIDE_BYTES == 0 for stride in view.strides_bytes):
        return f"strides {view.strides_bytes} are no multiples of {STRIDE_BYTES} bytes below 2^40"
    if view.offset_bytes < 0 or view.offset_bytes % STRIDE_BYTES:
        return f"it begins at byte {view.offset_bytes}, no multiple of {STRIDE_BYTES}"
    if view.element_strides[0] != 1 or not all(1 <= s <= MAX_ELEMENT_STRIDE for s in view.element_strides):
        return f"steps {view.element_strides} are not from 1 to {MAX_ELEMENT_STRIDE}, 1 along the innermost dimension"
    if view.tf32 and view.dtype is not DType.FLOAT32:
        return f"{view.dtype.value} elements cannot be rounded to tf32"
    return ""


def _invalid_box_reason(view: TensorMap) -> str:
    if len(view.box) != len(view.extents) or view.lower or view.upper:
        return f"box {view.box} of {len(view.extents)} dimensions, corners {view.lower} {view.upper}"
    if not all(1 <= size <= MAX_BOX for size in view.box):
        return f"box {view.box} is not from 1 to {MAX_BOX} elements along each dimension"
    return _invalid_row_reason(view)


def _invalid_im2col_reason(view: TensorMap) -> str:
    rank = len(view.extents)
    if rank < MIN_IM2COL_RANK or len(view.box) != 2 or not len(view.lower) == len(view.upper) == rank - 2:
        return f"{rank} dimensions, box {view.box}, corners {view.lower} {view.upper}"
    if not (1 <= view.box[0] <= MAX_CHANNELS and 1 <= view.box[1] <= MAX_PIXELS):
        return f"{view.box[0]} channels of {view.box[1]} pixels are more than {MAX_CHANNELS} of {MAX_PIXELS}"
    limit = 1 << (CORNER_BITS[rank] - 1)
    if not all(-limit <= corner < limit for corner in (*view.lower, *view.upper)):
        return f"corners {view.lower} {view.upper} are not from {-limit} to {limit - 1}"
    spatial = view.extents[1:-1]
    if not all(low < e + up for low, e, up in zip(view.lower, spatial, view.upper, strict=True)):
        return f"there is nothing between the corners {view.lower} {view.upper}"
    return _invalid_row_reason(view)


def _invalid_row_reason(view: TensorMap) -> str:
    row = view.box[0] * view.dtype.bytes
    if row % STRIDE_BYTES:
        return f"rows of {row} bytes are no multiples of {STRIDE_BYTES}"
    if view.swizzle is not Swizzle.NONE and row > view.swizzle.value:
        return f"rows of {row} bytes are longer than the swizzle's {view.swizzle.value}"
    return ""
