"""Tables of the language's names: functions with their arity, methods; and suggestions for unknown names."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from roller_svc.frontend.lang.synonyms import find_name, find_words
from roller_svc.ir.dtype import ALIASES, DType
from roller_svc.ir.expr import OpKind


class Rule(Enum):
    """Typing rule of a function."""

    FLOATING = "floats; integers become float32"
    NUMERIC = "any type, which is preserved"
    TO_INT32 = "floor and ceil: int32"
    PREDICATE = "isnan and isinf: int8"
    BITS = "integers, whose type is preserved"
    REMAINDER = "with one argument the part after the floor"


@dataclass(frozen=True, slots=True)
class Function:
    kind: OpKind
    rule: Rule
    min_arguments: int
    max_arguments: int


def _functions() -> dict[str, Function]:
    table: dict[str, Function] = {}

    def add(names: str, rule: Rule, least: int, most: int) -> None:
        for name in names.split():
            table[name] = Function(OpKind(name), rule, least, most)

    add("exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal sin cos tan asin acos atan", Rule.FLOATING, 1, 1)
    add("sinh cosh tanh asinh acosh atanh erf normcdf sigmoid silu gelu softplus", Rule.FLOATING, 1, 1)
    add("rfloor rceil round trunc", Rule.FLOATING, 1, 1)
    add("square abs sign neg relu", Rule.NUMERIC, 1, 1)
    add("floor ceil", Rule.TO_INT32, 1, 1)
    add("isnan isinf", Rule.PREDICATE, 1, 1)
    add("max min", Rule.NUMERIC, 2, 16)
    add("fmax fmin pow fmod", Rule.NUMERIC, 2, 2)
    add("remainder", Rule.REMAINDER, 1, 2)
    add("atan2 hypot", Rule.FLOATING, 2, 2)
    add("fma clip", Rule.NUMERIC, 3, 3)
    add("trunc_div bitwise_and bitwise_or bitwise_xor", Rule.BITS, 2, 2)
    add("bitwise_not", Rule.BITS, 1, 1)
    # Antares' other names for some of them.
    table["fabs"] = table["abs"]
    table["rint"] = table["round"]
    table["shift_left"] = Function(OpKind.SHL, Rule.BITS, 2, 2)
    table["shift_right"] = Function(OpKind.SHR, Rule.BITS, 2, 2)
    return table


FUNCTIONS = _functions()
OPERATOR_FUNCTIONS = {"add": "+", "subtract": "-", "multiply": "*", "divide": "/"}
METHODS = ("call", "cast", "to", "when", "val", "size", "dtype", "like", "up_cast")
FORMS = ("const", "extent", "where")
SELECTS = ("where", "select", "ifelse", "if_then_else")
INFINITIES = {"inf": math.inf, "-inf": -math.inf}
TYPE_NAMES = tuple(dtype.value for dtype in DType) + tuple(ALIASES)


def function_named(name: str) -> Function | None:
    """Return the function of that name, ignoring Antares' fp16_ prefix."""
    return FUNCTIONS.get(name.removeprefix("fp16_"))


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the known name nearest to this one. Short names may differ in every other letter."""
    by_lower = {n.lower(): n for n in sorted(set(names))}
    cutoff = 0.5 if len(name) <= 3 else 0.65
    matches = difflib.get_close_matches(name.lower(), list(by_lower), n=1, cutoff=cutoff)
    return by_lower[matches[0]] if matches else None


def did_you_mean(name: str, names: Iterable[str]) -> str | None:
    """Return a hint: the known name of the same meaning, else the nearest one."""
    known = frozenset(names)
    match = find_name(name, known) or nearest(name, known)
    return None if match is None else f"did you mean `{match}`?"


def find_right_form(name: str, names: Iterable[str]) -> str | None:
    """Return a hint for a name that belongs to the language: a name of the same meaning, words, or the nearest name."""
    known = frozenset(names)
    return did_you_mean(name, known) if find_name(name, known) else find_words(name) or did_you_mean(name, known)


def known_names(name: str, known: Iterable[str], what: str) -> str:
    """Return a hint with the nearest name, or with the first few names."""
    names = sorted(known)
    shown = ", ".join(names[:MAX_NAMES_SHOWN]) + (", ..." if len(names) > MAX_NAMES_SHOWN else "")
    return did_you_mean(name, names) or (f"{what}: {shown}" if names else f"there are no {what}")


def arguments(min_count: int, max_count: int) -> str:
    """Return the number of arguments in words."""
    if min_count == max_count:
        return f"{min_count} argument{'' if min_count == 1 else 's'}"
    return f"{min_count} to {max_count} arguments"


MAX_NAMES_SHOWN = 8
