"""Frozen dataclasses ↔ JSON: one strict codec, and the digest of a value.

A dataclass is an object with exactly its compared fields, plus "node" with the class's name where the field may have
several classes. Enums are their values, tuples arrays, frozensets sorted arrays. Infinities and NaN are the strings
"inf", "-inf", "nan". Decoding accepts only what encoding returns.

Marks in `Annotated[...]` change the form of a field: `Key`, `FLAT`, `OMIT_DEFAULT`, `UNTAGGED`. `Limit` and `Pattern`
restrict what decoding accepts. A class under `@as_array` is an array of its fields. `Any` is a JSON value.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache, cached_property
from typing import Annotated, Any, TypeVar

from roller_svc.errors import ArgumentError, InvariantError

T = TypeVar("T")

_NOT_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


class Mark(Enum):
    """A change of a field's form."""

    FLAT = "its fields stand among those of the object, or of the array, around it"
    OMIT_DEFAULT = "left out where it has its default value"
    UNTAGGED = "the keys of an object tell which class of a union it has"


FLAT, OMIT_DEFAULT, UNTAGGED = Mark


@dataclass(frozen=True, slots=True)
class Key:
    """The key of a field in JSON. Fields with one key are an array there."""

    name: str


class Check:
    """A restriction of what decoding accepts."""

    def check(self, value: Any) -> None:
        """Raise an error for a value that is not accepted."""


@dataclass(frozen=True, slots=True)
class Limit(Check):
    """The range of a number, or of the length of a text or an array."""

    least: int
    most: int

    def check(self, value: Any) -> None:
        is_number = type(value) in (int, float)
        size = value if is_number else len(value)
        if not self.least <= size <= self.most:
            what = "a number" if is_number else "a length"
            raise _wrong(f"{what} from {self.least} to {self.most}", size)


@dataclass(frozen=True, slots=True)
class Pattern(Check):
    """The regular expression that a whole text matches, and what it means."""

    expression: str
    name: str

    def check(self, value: Any) -> None:
        if not re.fullmatch(self.expression, value, re.ASCII):
            raise _wrong(self.name, value)


class Printable(Check):
    """A text of one line."""

    def check(self, value: Any) -> None:
        if not value.isprintable():
            raise _wrong("printable text", value)


def as_array(cls: type[T]) -> type[T]:
    """Encode a dataclass as an array of its fields in order."""
    _ARRAYS.add(cls)
    return cls


_ARRAYS: set[type] = set()


def to_json(value: object, without: Collection[str] = ()) -> Any:
    """Encode a dataclass as dicts, lists, strings, numbers, booleans and None, without some of its fields."""
    kind: Any = type(value)
    record = _record(kind)
    return record.encode_keys(value, without) if without else record.encode(value)


def from_json(cls: type[T], data: object, **given: object) -> T:
    """Decode a dataclass whose `given` fields the data lacks. Raises ArgumentError with the path of malformed data."""
    kind: Any = cls
    try:
        decoded: T = _record(kind).decode(data, given)
    except _MalformedError as error:
        raise ArgumentError(f"{cls.__name__}{error.path}: {error.message}", code="invalid-json") from error
    return decoded


def canonical_text(value: object) -> str:
    """Return one line of JSON, the same for equal values: keys sorted, no white space."""
    return json.dumps(to_json(value), sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(value: object) -> str:
    """Return the sha256 of the class's name and the canonical JSON, as hex."""
    return hashlib.sha256(f"{type(value).__name__}:{canonical_text(value)}".encode()).hexdigest()


class _MalformedError(Exception):
    """Data that encoding does not return. What decodes around it puts its own step before the path."""

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.path = path


def _wrong(expected: str, data: object) -> _MalformedError:
    return _MalformedError(f"expected {expected}, got {json.dumps(data, default=str)[:60]}")


@dataclass(frozen=True, slots=True)
class _Codec:
    """How values of one type are encoded and decoded."""

    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


@cache
def _unwrap(declared: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return a type and its marks."""
    if typing.get_origin(declared) is Annotated:
        return declared.__origin__, declared.__metadata__
    return declared, ()


def _is_dataclass(kind: Any) -> bool:
    return isinstance(kind, type) and is_dataclass(kind)


@cache
def _codec(declared: Any) -> _Codec:
    kind, marks = _unwrap(declared)
    codec = _untagged_union(typing.get_args(kind)) if UNTAGGED in marks else _codec_of(kind)
    checks = [mark.check for mark in marks if isinstance(mark, Check)]
    if not checks:
        return codec

    def decode(data: Any) -> Any:
        value = codec.decode(data)
        for check in checks:
            check(value)
        return value

    return _Codec(codec.encode, decode)


def _codec_of(kind: Any) -> _Codec:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _union(args)
    if origin is tuple:
        return _sequence(args[0], tuple) if args[-1] is Ellipsis else _row_codec(args)
    if origin is frozenset:
        items = _sequence(args[0], frozenset)
        return _Codec(lambda value: sorted(items.encode(value), key=json.dumps), items.decode)
    if origin is not None and issubclass(origin, Mapping):
        return _mapping(args[1])
    if _is_dataclass(kind):
        record = _record(kind)
        return _Codec(record.encode, record.decode)
    return _leaf(kind)


# Objects and arrays ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    type: Any
    default: object  # MISSING where it may not be left out


class _Entry:
    """One key of an object: a field, or an array of several. A flat field has keys of its own."""

    def __init__(self, key: str, listed: Sequence[_Field]) -> None:
        self.key = key
        self.names = [each.name for each in listed]
        self.default = listed[0].default
        kind, marks = _unwrap(listed[0].type)
        self.flat = _record(kind) if FLAT in marks else None
        self.codec = _codec(listed[0].type) if len(listed) == 1 else _row_codec([each.type for each in listed])

    def get(self, value: Any) -> Any:
        if len(self.names) == 1:
            return getattr(value, self.names[0])
        return [getattr(value, name) for name in self.names]


@cache
def _record(cls: Any) -> _Record:
    return _Record(cls)


class _Record:
    """The codec of a dataclass. Its fields are looked up at the first use, as a class may contain itself."""

    def __init__(self, cls: Any) -> None:
        self.cls = cls
        self.is_array = cls in _ARRAYS

    @cached_property
    def fields(self) -> tuple[_Field, ...]:
        hints = typing.get_type_hints(self.cls, include_extras=True)
        return tuple(
            _Field(each.name, hints[each.name], each.default if OMIT_DEFAULT in _unwrap(hints[each.name])[1] else MISSING)
            for each in fields(self.cls)
            if each.init and each.compare
        )

    @cached_property
    def entries(self) -> tuple[_Entry, ...]:
        by_key: dict[str, list[_Field]] = {}
        for each in self.fields:
            key = next((mark.name for mark in _unwrap(each.type)[1] if isinstance(mark, Key)), each.name)
            by_key.setdefault(key, []).append(each)
        return tuple(_Entry(key, listed) for key, listed in by_key.items())

    @cached_property
    def row(self) -> _Row:
        return _Row([each.type for each in self.fields])

    @cached_property
    def keys(self) -> tuple[frozenset[str], frozenset[str]]:
        """The keys that an object must have, and those that it may have."""
        required, known = set[str](), set[str]()
        for entry in self.entries:
            inner = entry.flat.keys if entry.flat else ({entry.key}, {entry.key})
            known |= inner[1]
            if entry.default is MISSING:
                required |= inner[0]
        return frozenset(required), frozenset(known)

    def encode(self, value: Any) -> Any:
        return self.encode_items(value) if self.is_array else self.encode_keys(value)

    def encode_items(self, value: Any) -> list[Any]:
        return self.row.encode([getattr(value, each.name) for each in self.fields])

    def encode_keys(self, value: Any, without: Collection[str] = ()) -> dict[str, Any]:
        encoded: dict[str, Any] = {}
        for entry in self.entries:
            item = entry.get(value)
            if entry.flat is not None:
                encoded |= entry.flat.encode_keys(item)
            elif entry.key not in without and (entry.default is MISSING or item != entry.default):
                encoded[entry.key] = entry.codec.encode(item)
        return encoded

    def decode(self, data: Any, given: Mapping[str, object] = types.MappingProxyType({})) -> Any:
        if self.is_array:
            return self.decode_items(data)
        if not isinstance(data, dict):
            raise _wrong("an object", data)
        required, known = self.keys
        if given or not required <= data.keys() <= known:
            if unknown := (data.keys() - known) | (data.keys() & given.keys()):
                raise _MalformedError("unknown field", f".{min(unknown, key=str)}")
            if missing := required - data.keys() - given.keys():
                raise _MalformedError("missing", f".{min(missing)}")
        return self.decode_keys(data, given)

    def decode_items(self, data: Any) -> Any:
        values = self.row.decode(data)
        return self.make({each.name: value for each, value in zip(self.fields, values, strict=True)})

    def decode_keys(self, data: Mapping[str, Any], given: Mapping[str, object]) -> Any:
        values = dict(given)
        for entry in self.entries:
            if entry.flat is not None:
                values[entry.names[0]] = entry.flat.decode_keys(data, {})
            elif entry.key in data:
                try:
                    value = entry.codec.decode(data[entry.key])
                except _MalformedError as error:
                    error.path = f".{entry.key}{error.path}"
                    raise
                if len(entry.names) == 1:
                    values[entry.names[0]] = value
                else:
                    values |= zip(entry.names, value, strict=True)
        return self.make(values)

    def make(self, values: Mapping[str, object]) -> Any:
        try:
            return self.cls(**values)
        except InvariantError as error:
            raise _MalformedError(str(error)) from error


class _Row:
    """The codec of an array with an item for each of some types. A flat dataclass has as many items as fields."""

    def __init__(self, kinds: Sequence[Any]) -> None:
        self.codecs = [_codec(kind) for kind in kinds]
        self.flat = [_record(kind) if FLAT in marks else None for kind, marks in map(_unwrap, kinds)]
        self.width: int = sum(1 if flat is None else flat.row.width for flat in self.flat)

    def encode(self, values: Sequence[Any]) -> list[Any]:
        items: list[Any] = []
        for value, flat, codec in zip(values, self.flat, self.codecs, strict=True):
            items += [codec.encode(value)] if flat is None else flat.encode_items(value)
        return items

    def decode(self, data: Any) -> tuple[Any, ...]:
        if not isinstance(data, list):
            raise _wrong("an array", data)
        if len(data) != self.width:
            raise _wrong(f"{self.width} items", data)
        values: list[Any] = []
        at = 0
        for flat, codec in zip(self.flat, self.codecs, strict=True):
            if flat is None:
                values.append(_decode_item(codec, data, at))
                at += 1
            else:
                values.append(flat.decode_items(data[at : at + flat.row.width]))
                at += flat.row.width
        return tuple(values)


def _row_codec(kinds: Sequence[Any]) -> _Codec:
    row = _Row(kinds)
    return _Codec(row.encode, row.decode)


def _decode_item(codec: _Codec, data: Sequence[Any], at: int) -> Any:
    try:
        return codec.decode(data[at])
    except _MalformedError as error:
        error.path = f"[{at}]{error.path}"
        raise


def _sequence(kind: Any, make: Callable[[Any], Any]) -> _Codec:
    codec = _codec(kind)

    def decode(data: Any) -> Any:
        if not isinstance(data, list):
            raise _wrong("an array", data)
        items: list[Any] = []
        try:
            for item in data:
                items.append(codec.decode(item))
        except _MalformedError as error:
            error.path = f"[{len(items)}]{error.path}"
            raise
        return make(items)

    return _Codec(lambda value: [codec.encode(item) for item in value], decode)


def _mapping(kind: Any) -> _Codec:
    codec = _codec(kind)

    def decode(data: Any) -> Any:
        if not isinstance(data, dict):
            raise _wrong("an object", data)
        decoded = {}
        for key, item in data.items():
            try:
                decoded[key] = codec.decode(item)
            except _MalformedError as error:
                error.path = f".{key}{error.path}"
                raise
        return decoded

    return _Codec(lambda value: {key: codec.encode(item) for key, item in value.items()}, decode)


# Unions ---------------------------------------------------------------------------------------------------------------


def _union(members: Sequence[Any]) -> _Codec:
    classes = {member.__name__: _record(member) for member in members if _is_dataclass(member)}
    tagged = len(classes) > 1
    codecs = {_class_of(member): _codec(member) for member in members if member is not types.NoneType}

    def encode(value: Any) -> Any:
        if value is None:
            return None
        codec = codecs.get(type(value)) or next((c for kind, c in codecs.items() if isinstance(value, kind)), None)
        if codec is None:
            raise InvariantError(f"{type(value).__name__} is none of {members}")
        encoded = codec.encode(value)
        return {"node": type(value).__name__} | encoded if tagged and is_dataclass(value) else encoded

    def decode(data: Any) -> Any:
        if data is None and types.NoneType in members:
            return None
        if tagged and isinstance(data, dict):
            record = classes.get(str(data.get("node")))
            if record is None:
                raise _at_node(_wrong(f"one of {', '.join(sorted(classes))}", data.get("node")))
            return record.decode({key: item for key, item in data.items() if key != "node"})
        if len(codecs) == 1:
            return next(iter(codecs.values())).decode(data)
        codec = codecs.get(type(data)) or codecs.get(float)  # infinities are text
        if codec is None:
            raise _wrong(f"one of {', '.join(kind.__name__ for kind in codecs)}", data)
        return codec.decode(data)

    return _Codec(encode, decode)


def _class_of(declared: Any) -> Any:
    kind = _unwrap(declared)[0]
    return typing.get_origin(kind) or kind


def _at_node(error: _MalformedError) -> _MalformedError:
    return _MalformedError(error.message, ".node")


def _untagged_union(members: Sequence[Any]) -> _Codec:
    """Return the codec of dataclasses that differ in the keys of their objects."""
    records = {member: _record(member) for member in members}

    def decode(data: Any) -> Any:
        for record in records.values() if isinstance(data, dict) else ():
            required, known = record.keys
            if required <= data.keys() <= known:
                return record.decode_keys(data, {})
        forms = " or ".join(", ".join(sorted(record.keys[0])) for record in records.values())
        raise _wrong(f"an object with the fields {forms}", data)

    return _Codec(lambda value: records[type(value)].encode(value), decode)


# Leaves ---------------------------------------------------------------------------------------------------------------


def _leaf(kind: Any) -> _Codec:
    if kind is Any:
        return _Codec(lambda value: value, lambda data: data)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _enum(kind)
    if kind is float:
        return _Codec(_encode_float, _decode_float)

    def decode(data: Any) -> Any:
        if kind in (int, str, bool) and type(data) is kind:
            return data
        raise _wrong(getattr(kind, "__name__", str(kind)), data)

    return _Codec(_encode_plain, decode)


def _encode_plain(value: Any) -> Any:
    if isinstance(value, bool | int | str):
        return value
    raise InvariantError(f"{type(value).__name__} has no JSON form")


def _enum(kind: type[Enum]) -> _Codec:
    members = {(type(member.value), member.value): member for member in kind}

    def decode(data: Any) -> Any:
        member = members.get((type(data), data)) if isinstance(data, str | int) else None
        if member is None:
            raise _wrong(f"one of {', '.join(str(member.value) for member in kind)}", data)
        return member

    return _Codec(lambda value: value.value, decode)


def _encode_float(value: Any) -> float | str:
    number = float(value)
    return number if math.isfinite(number) else str(number)


def _decode_float(data: Any) -> float:
    if isinstance(data, str) and data in _NOT_FINITE:
        return _NOT_FINITE[data]
    if type(data) not in (int, float):
        raise _wrong("float", data)
    try:
        return float(data)
    except OverflowError as failure:
        raise _wrong("a number that 64 bits hold", data) from failure
