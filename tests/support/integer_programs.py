"""Random programs of integers with their values, by the rules of `integer_rules.py`."""

from __future__ import annotations

import functools
import math
import random
from dataclasses import dataclass

import numpy as np
from integer_rules import BINARY, DIVISIONS, ORDER, SHIFTS, apply, common, edges, limits, result_type, text, wrap

ELEMENTS = 37  # more than a vector, and a rest
MAX_DEPTH = 4
REDUCTIONS = ("+=!", "*=!", ">=!", "<=!", "&=!", "|=!")
UNARY = ("-", "abs", "sign", "square", "relu", "bitwise_not", "~", "cast")


@dataclass(frozen=True)
class Term:
    """An expression with its type and its value at each element."""

    text: str
    dtype: str
    values: tuple[int, ...]


@dataclass(frozen=True)
class IntegerProgram:
    expression: str
    arrays: dict[str, np.ndarray]
    expected: dict[str, np.ndarray]


def draw(seed: int, outputs: int = 6) -> IntegerProgram:
    """Return a program of one input of each type and some results, every third one a reduction."""
    rng = random.Random(seed)
    terms = [Term(f"x_{d}[i]", d, tuple(_value(rng, d) for _ in range(ELEMENTS))) for d in ORDER]
    arrays = {f"x_{t.dtype}": np.array(t.values, t.dtype) for t in terms}
    leaves = [*terms, Term("i", "int32", tuple(range(ELEMENTS)))]
    statements, expected = [], {}
    for n in range(outputs):
        term = _draw(rng, leaves, rng.randint(2, MAX_DEPTH))
        if n % 3 < 2:
            statements.append(f"y{n}[i] = {term.text} where i in {ELEMENTS}")
            expected[f"y{n}"] = np.array(term.values, term.dtype)
        else:
            sign = rng.choice(REDUCTIONS)
            statements.append(f"y{n}[] {sign} {term.text} where i in {ELEMENTS}")
            expected[f"y{n}"] = np.array(_reduce(sign, term), term.dtype)
    return IntegerProgram("; ".join(statements), arrays, expected)


def _value(rng: random.Random, dtype: str) -> int:
    low, high = limits(dtype)
    small = [value for value in range(-9, 41) if low <= value <= high]
    return rng.choice([rng.randint(low, high), rng.choice(edges(dtype)), rng.choice(small)])


def _draw(rng: random.Random, leaves: list[Term], depth: int) -> Term:
    if depth == 0 or rng.random() < 0.1:
        return rng.choice(leaves)
    below = functools.partial(_draw, rng, leaves, depth - 1)
    shape = rng.random()
    if shape < 0.55:
        return _binary(rng.choice(BINARY), below(), below())
    if shape < 0.68:
        return _with_literal(rng, rng.choice(BINARY), below())
    if shape < 0.8:
        return _unary(rng, rng.choice(UNARY), below())
    return _several(rng.choice(("where", "max", "min", "clip", "fma", "&", "|")), [below(), below(), below()])


def _binary(sign: str, a: Term, b: Term) -> Term:
    values = tuple(apply(sign, x, a.dtype, y, b.dtype) for x, y in zip(a.values, b.values, strict=True))
    return Term(text(sign, a.text, b.text), result_type(sign, a.dtype, b.dtype), values)


def _with_literal(rng: random.Random, sign: str, a: Term) -> Term:
    """Apply an operator to a term and a number, which has the term's type."""
    value = _value(rng, a.dtype)
    if sign in SHIFTS:
        value = abs(value) % 70
    elif sign in DIVISIONS:
        value = value or 1
    number = Term(f"({value})" if value < 0 else str(value), a.dtype, (value,) * ELEMENTS)
    return _binary(sign, a, number) if sign in (*SHIFTS, *DIVISIONS) or rng.random() < 0.5 else _binary(sign, number, a)


def _unary(rng: random.Random, sign: str, a: Term) -> Term:
    if sign == "cast":
        dtype = rng.choice(ORDER)
        return Term(f"({a.text}).cast(`{dtype}`)", dtype, tuple(wrap(x, dtype) for x in a.values))
    if sign == "~":
        return Term(f"(~{a.text})", "int8", tuple(int(x == 0) for x in a.values))
    function = {
        "-": lambda x: -x,
        "abs": abs,
        "sign": lambda x: (x > 0) - (x < 0),
        "square": lambda x: x * x,
        "relu": lambda x: max(x, 0),
        "bitwise_not": lambda x: ~x,
    }[sign]
    shown = f"(-{a.text})" if sign == "-" else f"{sign}({a.text})"
    return Term(shown, a.dtype, tuple(wrap(function(x), a.dtype) for x in a.values))


def _several(kind: str, terms: list[Term]) -> Term:
    a, b, c = terms
    if kind in ("&", "|"):
        join = all if kind == "&" else any
        values = tuple(int(join((x != 0, y != 0))) for x, y in zip(a.values, b.values, strict=True))
        return Term(f"({a.text} {kind} {b.text})", "int8", values)
    typed = terms[1:] if kind == "where" else terms
    dtype = functools.reduce(common, (term.dtype for term in typed))
    function = {
        "where": lambda x, y, z: y if x else z,
        "max": max,
        "min": min,
        "fma": lambda x, y, z: x * y + z,
        "clip": lambda x, y, z: min(max(x, y), z),
    }[kind]
    values = tuple(wrap(function(*each), dtype) for each in zip(a.values, b.values, c.values, strict=True))
    return Term(f"{kind}({a.text}, {b.text}, {c.text})", dtype, values)


def _reduce(sign: str, term: Term) -> int:
    function = {
        "+=!": sum,
        "*=!": math.prod,
        ">=!": max,
        "<=!": min,
        "&=!": all,
        "|=!": any,
    }[sign]
    return wrap(int(function(term.values)), term.dtype)
