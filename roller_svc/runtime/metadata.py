"""A saved kernel's metadata.json → CompiledKernel. It may come from anywhere, so nothing in it is believed."""

from __future__ import annotations

import math
import sys
from typing import Any

from roller_svc.ir.dtype import DType
from roller_svc.ir.hardware import arch_named
from roller_svc.ir.kernel import (
    Buffer,
    CompiledKernel,
    KernelSource,
    Language,
    LaunchSpec,
    Resources,
    Role,
    RuntimeCheck,
)
from roller_svc.runtime.map_metadata import KIND, read_map
from roller_svc.runtime.metadata_values import (
    Damaged,
    count,
    flag,
    identifier,
    items,
    option,
    printable,
    string,
    triple,
)

FORMAT = "roller-kernel/3"
MAX_METADATA_BYTES = 8 << 20  # some hundred kilobytes with a hundred candidates

_MAX_ELEMENTS = 1 << 48  # the language's own limit on a shape
_MAX_RANK = 16
_MAX_GRID = (2**31 - 1, 65535, 65535)
_MAX_BLOCK = (1024, 1024, 64)
_MAX_CLUSTER = 8  # blocks, without asking for more (CUDA programming guide, "Thread Block Clusters")
_MAX_SHARED_BYTES = 1 << 20
_MAX_WORKSPACE_BYTES = 8 * _MAX_ELEMENTS
_STATUS_SHAPE = (4,)


def read_compiled(document: dict[str, Any], text: str, binary: bytes) -> CompiledKernel:
    """The kernel that `document` describes, every field checked, its source's key too."""
    arch = arch_named(printable(document, "arch"))
    if arch is None:
        raise Damaged(f"arch {document['arch']!r} is no architecture")
    launches = items(document, "launches")
    source = KernelSource(
        name=printable(document, "name"),
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
        raise Damaged("source_key does not fit the rest of the metadata")
    seconds = document["compile_seconds"]
    if not isinstance(seconds, int | float) or not 0 <= seconds <= sys.float_info.max:
        raise Damaged("compile_seconds is no time")
    log = document["log"]
    if not isinstance(log, str):
        raise Damaged("log is no text")
    return CompiledKernel(source, binary, log, tuple(_resources(item["resources"]) for item in launches), seconds)


def _buffer(item: dict[str, Any]) -> Buffer:
    shape = tuple(count(extent, 1, _MAX_ELEMENTS) for extent in items(item, "shape"))
    if len(shape) > _MAX_RANK or math.prod(shape) > _MAX_ELEMENTS:
        raise Damaged(f"shape {shape} is too large")
    buffer = Buffer(
        printable(item, "name"), identifier(item["symbol"]), Role(item["role"]), DType(item["dtype"]), shape
    )
    if buffer.role is Role.STATUS and (buffer.dtype is not DType.INT64 or buffer.shape != _STATUS_SHAPE):
        raise Damaged(f"{buffer.symbol} is no status record")
    return buffer


def _launch(item: dict[str, Any]) -> LaunchSpec:
    parameters = items(item, "parameters")
    maps = [parameter["kind"] == KIND for parameter in parameters]
    if sorted(maps) != maps:
        raise Damaged("a buffer comes behind a tensor map")
    grid = triple(item["grid"], _MAX_GRID)
    cluster = triple(item["cluster"], (_MAX_CLUSTER, 1, 1))[0]
    if grid[0] % cluster:
        raise Damaged(f"{grid[0]} blocks do not make clusters of {cluster}")
    return LaunchSpec(
        name=identifier(item["entry"]),
        args=tuple(identifier(p["symbol"]) for p, is_map in zip(parameters, maps, strict=True) if not is_map),
        grid=grid,
        block=triple(item["block"], _MAX_BLOCK),
        shared_bytes=count(item["dynamic_shared_bytes"], 0, _MAX_SHARED_BYTES),
        zeroed=tuple(identifier(symbol) for symbol in items(item, "zeroed")),
        prepares=flag(item["prepares"]),
        maps=tuple(read_map(p) for p, is_map in zip(parameters, maps, strict=True) if is_map),
        cluster=cluster,
    )


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
        raise Damaged("two buffers have one symbol")
    if not source.launches:
        raise Damaged("there is no launch")
    if source.workspace_bytes > _MAX_WORKSPACE_BYTES:
        raise Damaged(f"{source.workspace_bytes} bytes of workspace are more than {_MAX_WORKSPACE_BYTES}")
    if unknown := set(source.constants).difference(b.name for b in source.buffers_of(Role.INPUT)):
        raise Damaged(f"constants that are no inputs: {sorted(unknown)}")
    for launch in source.launches:
        if unknown := {*launch.args, *launch.zeroed}.difference(symbols):
            raise Damaged(f"{launch.name} uses buffers that are not there: {sorted(unknown)}")
        _check_maps(source, launch)
        if math.prod(launch.block) > _MAX_BLOCK[0]:
            raise Damaged(f"{launch.name} has blocks of {math.prod(launch.block)} threads")


def _check_maps(source: KernelSource, launch: LaunchSpec) -> None:
    """None reaches beyond its buffer: what is copied through it is not looked at again."""
    if source.language is not Language.CUDA and (launch.maps or launch.cluster > 1):
        raise Damaged(f"{launch.name} has tensor maps or clusters, which only CUDA has")
    sizes = {b.symbol: b.bytes for b in source.buffers}
    for view in launch.maps:
        if view.reach_bytes > sizes.get(view.buffer, 0):
            raise Damaged(f"{view.symbol} of {launch.name} reaches beyond {view.buffer}")
