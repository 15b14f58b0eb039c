"""The language's rules of integers on Python's integers, written from docs/language.md and from nothing else."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable

ORDER = ("int64", "uint64", "int32", "uint32", "int16", "uint16", "int8", "uint8")
COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip
MODULAR: dict[str, Callable[[int, int], int]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "bitwise_and": operator.and_, "bitwise_or": operator.or_,
    "bitwise_xor": operator.xor,
}  # fmt: skip
SHIFTS = ("<<", ">>")
EXTREMA: dict[str, Callable[[int, int], int]] = {"max": max, "min": min, "fmax": max, "fmin": min}
DIVISIONS = ("//", "%", "trunc_div", "fmod", "remainder", "pow")
BINARY = (*COMPARISONS, *MODULAR, *SHIFTS, *EXTREMA, *DIVISIONS)


def bits_of(dtype: str) -> int:
    return int(dtype.lstrip("uint"))


def is_signed(dtype: str) -> bool:
    return not dtype.startswith("u")


def wrap(value: int, dtype: str) -> int:
    bits = bits_of(dtype)
    value %= 1 << bits
    return value - (1 << bits) if is_signed(dtype) and value >= 1 << (bits - 1) else value


def limits(dtype: str) -> tuple[int, int]:
    bits = bits_of(dtype)
    return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if is_signed(dtype) else (0, (1 << bits) - 1)


def common(a: str, b: str) -> str:
    return min(a, b, key=ORDER.index)


def result_type(sign: str, a: str, b: str) -> str:
    if sign in COMPARISONS:
        return "int8"
    if sign in SHIFTS:
        return "int32" if bits_of(a) < min(bits_of(b), 32) else a
    return common(a, b)


def apply(sign: str, x: int, a: str, y: int, b: str) -> int:
    """Return the value of an operator, in its result's type."""
    dtype = result_type(sign, a, b)
    if sign in COMPARISONS:
        return int(COMPARISONS[sign](x, y))
    if sign in MODULAR:
        return wrap(MODULAR[sign](x, y), dtype)
    if sign in EXTREMA:
        return wrap(EXTREMA[sign](x, y), dtype)
    if sign in SHIFTS:
        count = min(max(y, 0), bits_of(dtype))
        return wrap(x << count if sign == "<<" else x >> count, dtype)
    if "uint64" in (a, b) and (is_signed(a) or is_signed(b)):
        x, y = wrap(x, dtype), wrap(y, dtype)
    return wrap(power(x, y) if sign == "pow" else divide(sign, x, y), dtype)


def divide(sign: str, x: int, y: int) -> int:
    if y == 0:
        return 0
    if sign in ("//", "%"):
        return x // y if sign == "//" else x % y
    truncated = abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)
    if sign == "trunc_div":
        return truncated
    if sign == "fmod":
        return x - truncated * y
    nearest, rest = divmod(x, abs(y))
    return x - (nearest + (2 * rest > abs(y) or (2 * rest == abs(y) and nearest % 2))) * abs(y)


def power(x: int, y: int) -> int:
    """Return the truncated power modulo 2^64; 0 where it is infinite."""
    if y >= 0:
        return pow(x, y, 1 << 64)
    return x ** (-y % 2) if abs(x) == 1 else 0


def text(sign: str, x: str, y: str) -> str:
    return f"{sign}({x}, {y})" if sign[0].isalpha() else f"({x} {sign} {y})"


def edges(dtype: str) -> list[int]:
    """Return values at which the rules differ: around 0, the type's limits, and those of all other types."""
    low, high = limits(dtype)
    near = {limit + d for other in ORDER for limit in limits(other) for d in (-1, 0, 1)} | {2, 3, 5, 7, -3, -7, 21, 39}
    return sorted(value for value in near if low <= value <= high)


def pairs(a: str, b: str) -> tuple[list[int], list[int]]:
    """Return all pairs of edges of two types, as two columns."""
    both = list(itertools.product(edges(a), edges(b)))
    return [x for x, _ in both], [y for _, y in both]
