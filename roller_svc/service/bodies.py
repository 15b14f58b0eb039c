"""Validate the JSON of a request body: UTF-8, bounded size and depth, no duplicate names."""

from __future__ import annotations

import codecs
import json
import math
from collections import Counter

MAX_DEPTH = 32


class BodyError(ValueError):
    """A fault of a request body, described for the client."""


def max_value_count(body: bytes) -> int:
    """Return an upper bound of the number of values in a JSON text, from its punctuation."""
    return 1 + body.count(b",") + body.count(b"[") + body.count(b"{")


def check_json(body: bytes) -> None:
    """Reject JSON that parsers interpret differently, or that nests deeper than any request."""
    if body.startswith((codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise BodyError("the body must be UTF-8 without a byte order mark")
    try:
        text = body.decode("utf-8")
        value = json.loads(text, object_pairs_hook=_unique_fields, parse_constant=_reject_constant, parse_float=_parse_finite)
    except BodyError:
        raise
    except UnicodeDecodeError as error:
        raise BodyError(f"the body is not UTF-8: invalid byte at offset {error.start}") from error
    except json.JSONDecodeError as error:
        raise BodyError(f"the body is not JSON: line {error.lineno}, column {error.colno}: {error.msg}") from error
    except RecursionError as error:
        raise BodyError(f"the body nests deeper than {MAX_DEPTH} levels") from error
    except ValueError as error:  # an integer with thousands of digits
        raise BodyError("the body has a number with too many digits") from error
    _check_depth(value)


def _check_depth(value: object) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for node in level if isinstance(node, list | dict) for child in _children(node)]
        if not level:
            return
    raise BodyError(f"the body nests deeper than {MAX_DEPTH} levels")


def _children(node: list[object] | dict[str, object]) -> list[object]:
    return node if isinstance(node, list) else list(node.values())


def _unique_fields(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        duplicate, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise BodyError(f"the body has the name {duplicate[:100]!r} twice in one object")
    return fields


def _reject_constant(name: str) -> object:
    raise BodyError(f"the body is not JSON: {name} is not a number")


def _parse_finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise BodyError(f"the body has a number beyond float64: {text[:40]}")
    return value
