"""A saved kernel's metadata.json → CompiledKernel. It may come from anywhere, so nothing in it is believed."""

from __future__ import annotations

import math
import re
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

FORMAT = "roller-kernel/2"
MAX_METADATA_BYTES = 64 << 20

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}", re.ASCII)
_MAX_NAME = 1024
_MAX_ELEMENTS = 1 << 48  # the language's own limit on a shape
_MAX_RANK = 16
_MAX_ITEMS = 4096  # launches, buffers, parameters of one launch
_MAX_GRID = (2**31 - 1, 65535, 65535)
_MAX_BLOCK = (1024, 1024, 64)
_MAX_SHARED_BYTES = 1 << 20
_STATUS_SHAPE = (4,)


class Damaged(Exception):
    """What is read is not what save() wrote."""


def read_compiled(document: dict[str, Any], text: str, binary: bytes) -> CompiledKernel:
    """The kernel that `document` describes, every field checked, its source's key too."""
    arch = arch_named(_text(document, "arch"))
    if arch is None:
        raise Damaged(f"arch {document['arch']!r} is no architecture")
    launches = _items(document, "launches")
    source = KernelSource(
        name=_text(document, "name"),
        language=Language(document["language"]),
        arch=arch,
        text=text,
        buffers=tuple(_buffer(item) for item in _items(document, "buffers")),
        launches=tuple(_launch(item) for item in launches),
        checks=tuple(_check(item) for item in _items(document, "checks")),
        options=tuple(_string(item) for item in _items(document, "options")),
        constants=tuple(_string(item) for item in _items(document, "constants")),
    )
    _check_references(source)
    if source.key != document["source_key"]:
        raise Damaged("source_key does not fit the rest of the metadata")
    seconds = document["compile_seconds"]
    if not isinstance(seconds, int | float) or not math.isfinite(seconds):
        raise Damaged("compile_seconds is no number")
    log = document["log"]
    if not isinstance(log, str):
        raise Damaged("log is no text")
    return CompiledKernel(source, binary, log, tuple(_resources(item["resources"]) for item in launches), seconds)


def _buffer(item: dict[str, Any]) -> Buffer:
    shape = tuple(_count(extent, 1, _MAX_ELEMENTS) for extent in _items(item, "shape"))
    if len(shape) > _MAX_RANK or math.prod(shape) > _MAX_ELEMENTS:
        raise Damaged(f"shape {shape} is too large")
    buffer = Buffer(_text(item, "name"), _identifier(item["symbol"]), Role(item["role"]), DType(item["dtype"]), shape)
    if buffer.role is Role.STATUS and (buffer.dtype is not DType.INT64 or buffer.shape != _STATUS_SHAPE):
        raise Damaged(f"{buffer.symbol} is no status record")
    return buffer


def _launch(item: dict[str, Any]) -> LaunchSpec:
    return LaunchSpec(
        name=_identifier(item["entry"]),
        args=tuple(_identifier(parameter["symbol"]) for parameter in _items(item, "parameters")),
        grid=_triple(item["grid"], _MAX_GRID),
        block=_triple(item["block"], _MAX_BLOCK),
        shared_bytes=_count(item["dynamic_shared_bytes"], 0, _MAX_SHARED_BYTES),
        zeroed=tuple(_identifier(symbol) for symbol in _items(item, "zeroed")),
        prepares=_flag(item["prepares"]),
    )


def _check(item: dict[str, Any]) -> RuntimeCheck:
    dimension = _count(item["dimension"], 0, _MAX_RANK)
    size = _count(item["size"], 0, _MAX_ELEMENTS)
    return RuntimeCheck(_text(item, "tensor"), dimension, size, _string(item["index"]), _string(item["axis"]))


def _resources(item: dict[str, Any]) -> Resources:
    limit = 1 << 31
    return Resources(
        _count(item["registers_per_thread"], 0, limit),
        _count(item["shared_bytes"], 0, limit),
        _count(item["spill_bytes"], 0, limit),
    )


def _check_references(source: KernelSource) -> None:
    symbols = [b.symbol for b in source.buffers]
    if len(set(symbols)) != len(symbols):
        raise Damaged("two buffers have one symbol")
    if not source.launches:
        raise Damaged("there is no launch")
    if unknown := set(source.constants).difference(b.name for b in source.buffers_of(Role.INPUT)):
        raise Damaged(f"constants that are no inputs: {sorted(unknown)}")
    for launch in source.launches:
        if unknown := {*launch.args, *launch.zeroed}.difference(symbols):
            raise Damaged(f"{launch.name} uses buffers that are not there: {sorted(unknown)}")
        if math.prod(launch.block) > _MAX_BLOCK[0]:
            raise Damaged(f"{launch.name} has blocks of {math.prod(launch.block)} threads")


def _items(document: dict[str, Any], key: str) -> list[Any]:
    value = document[key]
    if not isinstance(value, list) or len(value) > _MAX_ITEMS:
        raise Damaged(f"{key} is no list, or too long")
    return value


def _triple(value: Any, limits: tuple[int, int, int]) -> tuple[int, int, int]:
    if not isinstance(value, list) or len(value) != 3:
        raise Damaged(f"{value!r} is no triple")
    x, y, z = (_count(v, 1, limit) for v, limit in zip(value, limits, strict=True))
    return x, y, z


def _count(value: Any, least: int, greatest: int) -> int:
    if type(value) is not int or not least <= value <= greatest:  # a bool is no count
        raise Damaged(f"{value!r} is no whole number from {least} to {greatest}")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise Damaged(f"{value!r} is neither true nor false")
    return value


def _text(document: dict[str, Any], key: str) -> str:
    value = document[key]
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_NAME or not value.isprintable():
        raise Damaged(f"{key} is no name")
    return value


def _string(value: Any) -> str:
    if not isinstance(value, str) or len(value) > 1 << 16:
        raise Damaged("a text is too long or none")
    return value


def _identifier(value: Any) -> str:
    if not isinstance(value, str) or not _IDENTIFIER.fullmatch(value):
        raise Damaged(f"{value!r} is no C identifier")
    return value
