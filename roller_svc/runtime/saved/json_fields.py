"""Validate JSON values: numbers, names and lists within limits. Raises CorruptKernelError for others."""

from __future__ import annotations

import re
from typing import Any

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}", re.ASCII)
_OPTION = re.compile(r"-(O[0-3]|f[a-z][a-z0-9-]{0,62}|m[a-z][a-z0-9-]{0,62}(=\d{1,4})?)", re.ASCII)
_MAX_NAME = 1024
_MAX_TEXT = 1 << 16
_MAX_ITEMS = 4096  # launches, buffers, parameters of one launch


class CorruptKernelError(Exception):
    """The data read differs from what save() writes."""


def items(document: dict[str, Any], key: str) -> list[Any]:
    value = document[key]
    if not isinstance(value, list) or len(value) > _MAX_ITEMS:
        raise CorruptKernelError(f"{key} must be a list of at most {_MAX_ITEMS} items")
    return value


def triple(value: Any, limits: tuple[int, int, int]) -> tuple[int, int, int]:
    if not isinstance(value, list) or len(value) != 3:
        raise CorruptKernelError(f"expected three numbers, got {value!r}")
    x, y, z = (count(v, 1, limit) for v, limit in zip(value, limits, strict=True))
    return x, y, z


def count(value: Any, minimum: int, maximum: int) -> int:
    if type(value) is not int or not minimum <= value <= maximum:  # a bool is not a count
        raise CorruptKernelError(f"{value!r} is not a whole number from {minimum} to {maximum}")
    return value


def flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise CorruptKernelError(f"expected true or false, got {value!r}")
    return value


def printable(document: dict[str, Any], key: str) -> str:
    value = document[key]
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_NAME or not value.isprintable():
        raise CorruptKernelError(f"{key} is not a name")
    return value


def string(value: Any, max_length: int = _MAX_TEXT) -> str:
    if not isinstance(value, str) or len(value) > max_length:
        raise CorruptKernelError(f"expected a string of at most {max_length} characters")
    return value


def mapping(document: dict[str, Any], key: str) -> dict[str, Any]:
    value = document[key]
    if not isinstance(value, dict):
        raise CorruptKernelError(f"{key} is not a mapping")
    return value


def option(value: Any) -> str:
    """Validate a compiler option: one that generators write, without the name of a file or program."""
    if not isinstance(value, str) or not _OPTION.fullmatch(value):
        raise CorruptKernelError(f"{value!r} is not a compiler option of kernels")
    return value


def identifier(value: Any) -> str:
    if not isinstance(value, str) or not _IDENTIFIER.fullmatch(value):
        raise CorruptKernelError(f"{value!r} is not a C identifier")
    return value
