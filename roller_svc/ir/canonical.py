"""Frozen dataclasses ↔ JSON: one strict codec, and the digest of a value.

A dataclass is an object with exactly its compared fields, plus "node" with the class's name where the field may have
several classes. Enums are their values, tuples arrays, frozensets sorted arrays, bytes base64 text. Infinities and NaN
are the strings "inf", "-inf", "nan". Decoding accepts only what encoding returns.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, TypeVar

from roller_svc import errors
from roller_svc.errors import ArgumentError, InvariantError, RollerError

T = TypeVar("T")

_NOT_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def to_json(value: object) -> Any:
    """Encode a value as dicts, lists, strings, numbers, booleans and None."""
    return _encode(value, type(value))


def from_json(cls: type[T], data: object) -> T:
    """Decode a value. Raises ArgumentError with the path of malformed data."""
    result: T = _decode(data, cls, cls.__name__)
    return result


def canonical_text(value: object) -> str:
    """Return one line of JSON, the same for equal values: keys sorted, no white space."""
    return json.dumps(to_json(value), sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(value: object) -> str:
    """Return the sha256 of the class's name and the canonical JSON, as hex."""
    return hashlib.sha256(f"{type(value).__name__}:{canonical_text(value)}".encode()).hexdigest()


@cache
def _field_types(cls: type) -> Mapping[str, Any]:
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in fields(cls) if f.init and f.compare}


@cache
def _members(declared: Any) -> tuple[Any, ...] | None:
    """Return the alternatives of a union, or None for other types."""
    if typing.get_origin(declared) in (typing.Union, types.UnionType):
        return typing.get_args(declared)
    return None


@cache
def _is_dataclass(declared: Any) -> bool:
    return isinstance(declared, type) and is_dataclass(declared)


@cache
def _generic(declared: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return the origin of a generic type, None for other types, and its parameters."""
    return typing.get_origin(declared), typing.get_args(declared)


def _encode(value: Any, declared: Any) -> Any:
    members = _members(declared)
    if members is not None:
        if is_dataclass(value) and sum(map(_is_dataclass, members)) > 1:
            return {"node": type(value).__name__} | _encode(value, type(value))
        return None if value is None else _encode(value, _member_of(value, members))
    origin, args = _generic(declared)
    if origin is tuple:
        kinds = [args[0]] * len(value) if len(args) == 2 and args[1] is Ellipsis else args
        return [_encode(item, kind) for item, kind in zip(value, kinds, strict=True)]
    if origin is frozenset:
        return sorted((_encode(item, args[0]) for item in value), key=json.dumps)
    if origin is dict or (origin is not None and issubclass(origin, Mapping)):
        return {key: _encode(item, args[1]) for key, item in value.items()}
    if _is_dataclass(declared):
        return {name: _encode(getattr(value, name), kind) for name, kind in _field_types(declared).items()}
    return _encode_leaf(value, declared)


def _encode_leaf(value: Any, declared: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, RollerError):
        return {"error": type(value).__name__, "code": value.code, "message": value.message}
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if declared is float:
        number = float(value)
        return number if math.isfinite(number) else str(number)
    if isinstance(value, bool | int | str):
        return value
    raise InvariantError(f"{type(value).__name__} has no JSON form")


def _member_of(value: object, members: tuple[Any, ...]) -> Any:
    """Return the alternative of a union that a value belongs to."""
    for member in members:
        kind = _generic(member)[0] or member
        if isinstance(kind, type) and type(value) is kind:
            return member
    for member in members:
        kind = typing.get_origin(member) or member
        if isinstance(kind, type) and isinstance(value, kind):
            return member
    raise InvariantError(f"{type(value).__name__} is none of {members}")


def _wrong(path: str, expected: str, data: object) -> ArgumentError:
    shown = json.dumps(data, default=str)
    return ArgumentError(f"{path}: expected {expected}, got {shown[:60]}", code="invalid-json")


def _decode(data: Any, declared: Any, path: str) -> Any:
    members = _members(declared)
    if members is not None:
        return _decode_union(data, members, path)
    origin, args = typing.get_origin(declared), typing.get_args(declared)
    if origin is tuple:
        return _decode_tuple(data, args, path)
    if origin is frozenset:
        if not isinstance(data, list):
            raise _wrong(path, "an array", data)
        return frozenset(_decode(item, args[0], f"{path}[{i}]") for i, item in enumerate(data))
    if origin is dict or (origin is not None and issubclass(origin, Mapping)):
        if not isinstance(data, dict):
            raise _wrong(path, "an object", data)
        return {key: _decode(item, args[1], f"{path}.{key}") for key, item in data.items()}
    if _is_dataclass(declared):
        return _decode_dataclass(data, declared, path)
    return _decode_leaf(data, declared, path)


def _decode_tuple(data: Any, args: tuple[Any, ...], path: str) -> tuple[Any, ...]:
    if not isinstance(data, list):
        raise _wrong(path, "an array", data)
    kinds = [args[0]] * len(data) if len(args) == 2 and args[1] is Ellipsis else list(args)
    if len(kinds) != len(data):
        raise _wrong(path, f"{len(kinds)} items", data)
    return tuple(_decode(item, kind, f"{path}[{i}]") for i, (item, kind) in enumerate(zip(data, kinds, strict=True)))


def _decode_union(data: Any, members: tuple[Any, ...], path: str) -> Any:
    if data is None and types.NoneType in members:
        return None
    classes = {member.__name__: member for member in members if _is_dataclass(member)}
    if isinstance(data, dict) and len(classes) > 1:
        if data.get("node") not in classes:
            raise _wrong(f"{path}.node", f"one of {', '.join(sorted(classes))}", data.get("node"))
        return _decode_dataclass({k: v for k, v in data.items() if k != "node"}, classes[data["node"]], path)
    rest = [member for member in members if member is not types.NoneType]
    if set(rest) == {int, float}:
        return _decode(data, int if type(data) is int else float, path)
    if len(rest) == 1:
        return _decode(data, rest[0], path)
    for member in rest:
        if isinstance(member, type) and type(data) is member:
            return data
    raise _wrong(path, f"one of {rest}", data)


def _decode_dataclass(data: Any, cls: Callable[..., Any], path: str) -> Any:
    if not isinstance(data, dict):
        raise _wrong(path, "an object", data)
    kinds = _field_types(typing.cast(type, cls))
    if unknown := sorted(set(data) - set(kinds)):
        raise ArgumentError(f"{path}.{unknown[0]}: unknown field", code="invalid-json")
    if missing := sorted(set(kinds) - set(data)):
        raise ArgumentError(f"{path}.{missing[0]}: missing", code="invalid-json")
    values = {name: _decode(data[name], kind, f"{path}.{name}") for name, kind in kinds.items()}
    try:
        return cls(**values)
    except InvariantError as error:
        raise ArgumentError(f"{path}: {error}", code="invalid-json") from error


def _decode_leaf(data: Any, declared: Any, path: str) -> Any:
    if isinstance(declared, type) and issubclass(declared, Enum):
        for member in declared:
            if member.value == data and type(member.value) is type(data):
                return member
        raise _wrong(path, f"one of {', '.join(str(m.value) for m in declared)}", data)
    if isinstance(declared, type) and issubclass(declared, RollerError):
        return _decode_error(data, declared, path)
    if declared is bytes and isinstance(data, str):
        try:
            return base64.b64decode(data, validate=True)
        except binascii.Error as failure:
            raise _wrong(path, "base64", data) from failure
    if declared is float and isinstance(data, str) and data in _NOT_FINITE:
        return _NOT_FINITE[data]
    if declared is float and type(data) in (int, float):
        try:
            return float(data)
        except OverflowError as failure:
            raise _wrong(path, "a number that 64 bits hold", data) from failure
    if declared in (int, str, bool) and type(data) is declared:
        return data
    raise _wrong(path, getattr(declared, "__name__", str(declared)), data)


def _decode_error(data: Any, declared: type[RollerError], path: str) -> RollerError:
    if not isinstance(data, dict) or set(data) != {"error", "code", "message"}:
        raise _wrong(path, "an error", data)
    cls = getattr(errors, str(data["error"]), None)
    if not (isinstance(cls, type) and issubclass(cls, declared)):
        raise _wrong(f"{path}.error", f"a {declared.__name__}", data["error"])
    return cls(str(data["message"]), code=str(data["code"]))
