"""metadata.json of a saved kernel → CompiledKernel. The file is untrusted: every field is checked.

Tensor maps are stored as the arguments of the driver's encoding functions.
"""

from __future__ import annotations

import math
import sys
from typing import Any

from roller_svc.errors import InvariantError
from roller_svc.ir.dtype import DType
from roller_svc.ir.hardware import arch_named
from roller_svc.ir.kernel import (
    Buffer,
    CompiledKernel,
    KernelSource,
    Language,
    LaunchSpec,
    Phase,
    Resources,
    Role,
    RuntimeCheck,
)
from roller_svc.ir.tensor_map import MAX_EXTENT, MAX_RANK, MAX_STRIDE_BYTES, MapMode, Swizzle, TensorMap
from roller_svc.runtime.saved.json_fields import (
    CorruptKernelError,
    count,
    flag,
    identifier,
    items,
    option,
    printable,
    string,
    triple,
)

KIND = "tensor_map"
MAP_BYTES = 128  # size of CUtensorMap (CUDA driver API), which CUDA 13 aligns to 128
MAP_ALIGNMENT_BYTES = 128
L2_PROMOTION_BYTES = 256  # granularity of L2 fetches: rows of boxes are adjacent
_MAX_NUMBER = 1 << 16  # boxes, steps and corners are smaller

# Elements are copied as unsigned integers, which preserves all bits (of a NaN, too).
_DATA_TYPES = {1: "UINT8", 2: "UINT16", 4: "UINT32", 8: "UINT64"}
_TF32 = "TFLOAT32"


def data_type(view: TensorMap) -> str:
    """Return CU_TENSOR_MAP_DATA_TYPE_... of the map's elements."""
    return _TF32 if view.tf32 else _DATA_TYPES[view.dtype.bytes]


def map_json(view: TensorMap) -> dict[str, Any]:
    """Return the arguments of cuTensorMapEncodeTiled or cuTensorMapEncodeIm2col.

    The address is given as `offset_bytes` into `buffer`. In im2col mode `box` is (channelsPerPixel, pixelsPerColumn)
    and corners are listed w, h, d.
    """
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
    """Read a tensor map, checking every field and the driver's rules."""
    dtype = DType(item["dtype"])
    try:
        view = TensorMap(
            identifier(item["symbol"]), identifier(item["buffer"]), dtype, MapMode(item["mode"]),
            _numbers(item, "extents", 1, MAX_EXTENT), _numbers(item, "strides_bytes", 1, MAX_STRIDE_BYTES),
            _numbers(item, "box", 1, _MAX_NUMBER), _numbers(item, "element_strides", 1, _MAX_NUMBER),
            _numbers(item, "lower_corner", -_MAX_NUMBER, _MAX_NUMBER),
            _numbers(item, "upper_corner", -_MAX_NUMBER, _MAX_NUMBER),
            Swizzle(count(item["swizzle_bytes"], 0, _MAX_NUMBER)),
            count(item["offset_bytes"], 0, MAX_STRIDE_BYTES), tf32=item["data_type"] == _TF32,
        )  # fmt: skip
    except InvariantError as error:
        raise CorruptKernelError(str(error)) from error
    if item["data_type"] != data_type(view):
        raise CorruptKernelError(f"{view.symbol}: {dtype.value} elements cannot have data_type {item['data_type']}")
    return view


def _numbers(item: dict[str, Any], key: str, minimum: int, maximum: int) -> tuple[int, ...]:
    values = items(item, key)
    if len(values) > MAX_RANK:
        raise CorruptKernelError(f"{key} has {len(values)} numbers")
    return tuple(count(value, minimum, maximum) for value in values)


FORMAT = "roller-kernel/5"
MAX_METADATA_BYTES = 8 << 20  # some hundred kilobytes with a hundred candidates

_MAX_ELEMENTS = 1 << 48  # the language's own limit on a shape
_MAX_RANK = 16
_MAX_GRID = (2**31 - 1, 65535, 65535)
_MAX_BLOCK = (1024, 1024, 64)
_MAX_CLUSTER = 8  # blocks; the portable maximum (CUDA programming guide, "Thread Block Clusters")
_MAX_SHARED_BYTES = 1 << 20
_MAX_WORKSPACE_BYTES = 8 * _MAX_ELEMENTS
_STATUS_SHAPE = (4,)


def read_compiled(document: dict[str, Any], text: str, binary: bytes) -> CompiledKernel:
    """Read the kernel that `document` describes, checking every field and the source's key."""
    arch = arch_named(printable(document, "arch"))
    if arch is None:
        raise CorruptKernelError(f"unknown arch {document['arch']!r}")
    launches = items(document, "launches")
    source = KernelSource(
        name=identifier(document["name"]),
        language=Language(document["language"]),
        arch=arch,
        text=text,
        buffers=tuple(_buffer(item) for item in items(document, "buffers")),
        launches=tuple(_launch(item) for item in launches),
        checks=tuple(_check(item) for item in items(document, "checks")),
        options=tuple(option(item) for item in items(document, "options")),
        constants=tuple(string(item) for item in items(document, "constants")),
    )
    _check_references(source)
    if source.key != document["source_key"]:
        raise CorruptKernelError("source_key does not fit the rest of the metadata")
    seconds = document["compile_seconds"]
    if not isinstance(seconds, int | float) or not 0 <= seconds <= sys.float_info.max:
        raise CorruptKernelError("compile_seconds is not a time")
    log = document["log"]
    if not isinstance(log, str):
        raise CorruptKernelError("log is not a string")
    return CompiledKernel(source, binary, log, tuple(_resources(item["resources"]) for item in launches), seconds)


def _buffer(item: dict[str, Any]) -> Buffer:
    shape = tuple(count(extent, 1, _MAX_ELEMENTS) for extent in items(item, "shape"))
    if len(shape) > _MAX_RANK or math.prod(shape) > _MAX_ELEMENTS:
        raise CorruptKernelError(f"shape {shape} is too large")
    buffer = Buffer(
        printable(item, "name"), identifier(item["symbol"]), Role(item["role"]), DType(item["dtype"]), shape,
        flag(item["donated"]),
    )  # fmt: skip
    if buffer.role is Role.STATUS and (buffer.dtype is not DType.INT64 or buffer.shape != _STATUS_SHAPE):
        raise CorruptKernelError(f"{buffer.symbol} is not a status record")
    return buffer


def _launch(item: dict[str, Any]) -> LaunchSpec:
    parameters = items(item, "parameters")
    maps = [parameter["kind"] == KIND for parameter in parameters]
    if sorted(maps) != maps:
        raise CorruptKernelError("a buffer follows a tensor map")
    grid = triple(item["grid"], _MAX_GRID)
    cluster = triple(item["cluster"], (_MAX_CLUSTER, 1, 1))[0]
    if grid[0] % cluster:
        raise CorruptKernelError(f"{grid[0]} blocks do not make clusters of {cluster}")
    return LaunchSpec(
        name=identifier(item["entry"]),
        args=tuple(identifier(p["symbol"]) for p, is_map in zip(parameters, maps, strict=True) if not is_map),
        grid=grid,
        block=triple(item["block"], _MAX_BLOCK),
        shared_bytes=count(item["dynamic_shared_bytes"], 0, _MAX_SHARED_BYTES),
        zeroed=tuple(identifier(symbol) for symbol in items(item, "zeroed")),
        is_prepack=flag(item["prepares"]),
        tensor_maps=tuple(read_map(p) for p, is_map in zip(parameters, maps, strict=True) if is_map),
        cluster=cluster,
        phases=tuple(_phase(phase) for phase in items(item, "phases")),
    )


def _phase(item: dict[str, Any]) -> Phase:
    args = tuple(identifier(symbol) for symbol in items(item, "parameters"))
    return Phase(identifier(item["name"]), args, count(item["tasks"], 0, _MAX_ELEMENTS))


def _check(item: dict[str, Any]) -> RuntimeCheck:
    dimension = count(item["dimension"], 0, _MAX_RANK)
    size = count(item["size"], 0, _MAX_ELEMENTS)
    return RuntimeCheck(printable(item, "tensor"), dimension, size, string(item["index"]), string(item["axis"]))


def _resources(item: dict[str, Any]) -> Resources:
    limit = 1 << 31
    return Resources(
        count(item["registers_per_thread"], 0, limit),
        count(item["shared_bytes"], 0, limit),
        count(item["spill_bytes"], 0, limit),
    )


def _check_references(source: KernelSource) -> None:
    symbols = [b.symbol for b in source.buffers]
    if len(set(symbols)) != len(symbols):
        raise CorruptKernelError("two buffers have the same symbol")
    if not source.launches:
        raise CorruptKernelError("a kernel must have at least one launch, got none")
    if source.workspace_bytes > _MAX_WORKSPACE_BYTES:
        raise CorruptKernelError(f"{source.workspace_bytes} bytes of workspace are more than {_MAX_WORKSPACE_BYTES}")
    if unknown := set(source.constants).difference(b.name for b in source.buffers_of(Role.INPUT)):
        raise CorruptKernelError(f"constants that are not inputs: {sorted(unknown)}")
    for launch in source.launches:
        if unknown := {*launch.args, *launch.zeroed}.difference(symbols):
            raise CorruptKernelError(f"{launch.name} uses unknown buffers: {sorted(unknown)}")
        for phase in launch.phases:
            if unknown := set(phase.args).difference(launch.args):
                raise CorruptKernelError(f"{phase.name} uses what {launch.name} has not: {sorted(unknown)}")
        _check_maps(source, launch)
        if math.prod(launch.block) > _MAX_BLOCK[0]:
            raise CorruptKernelError(f"{launch.name} has blocks of {math.prod(launch.block)} threads")


def _check_maps(source: KernelSource, launch: LaunchSpec) -> None:
    """Check that each map is inside its buffer. Copies through it are not checked again."""
    if source.language is not Language.CUDA and (launch.tensor_maps or launch.cluster > 1):
        raise CorruptKernelError(f"{launch.name} has tensor maps or clusters, which only CUDA has")
    sizes = {b.symbol: b.bytes for b in source.buffers}
    for view in launch.tensor_maps:
        if view.end_bytes > sizes.get(view.buffer, 0):
            raise CorruptKernelError(f"{view.symbol} of {launch.name} exceeds {view.buffer}")
