"""Fuzz the parser with mutated expressions: each is parsed or rejected, without a crash or a hang.

    python tests/fuzz/fuzz_parser.py --count 100000 --seed 1

Seeds are in tests/data/fuzz_seeds.txt, one a line: `name=dtype[shape] ... | expression`. Prints one JSON document;
exits 1 when any text crashed the parser or took longer than the limit.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from roller_svc.errors import InputError
from roller_svc.frontend.lang import parse
from roller_svc.ir.dtype import DType, dtype_named
from roller_svc.ir.program import TensorProgram, TensorType

SEEDS = Path(__file__).parents[1] / "data" / "fuzz_seeds.txt"
LIMIT_S = 2.0

_INPUT = re.compile(r"(\w+)=(\w+)\[([\d,]*)\]")
_TOKEN = re.compile(r"\s+|[A-Za-z_]\w*|\d+\.?\d*(?:[eE][-+]?\d+)?|`[^`]*`|//|<<|>>|[<>=!+*&|]=[!.]?|=[!.]|\*\*|.", re.DOTALL)
_POOL = (
    *"""+ - * / // % ** << >> & | ^ ~ < <= > >= == != = += +=! *=! >=! <=! &=! |=! =. +=. >=. <=. ( ) [ ] , ; : . #
    where in n m k N M K N0 x y x0 x1 input0 output0 0 1 2 3 7 -1 0.0 .5 1e-5 1e38 255 256 65536 2147483648 1e400
    99999999999999999999 max( min( abs( exp( floor( const( extent( where( pow( clip( fma( isnan( bitwise_and(
    .when([ .cast( .call( .val() .dtype() .like( .size(0) `exp` `max` `float16` `int8` 'any' merge_op= dtype=
    float32 int32 bool einsum( if else lambda and or not import strs.max""".split(),  # noqa: SIM905 - words are read more easily
    *("\n", "\t", "\r\n", "\x00", "\x7f", "é", "“", "\u2028", "\U0001f600", "\ud800", "\\", "\n#"),
)


@dataclass(frozen=True, slots=True)
class Seed:
    """An expression and its inputs."""

    expression: str
    inputs: tuple[tuple[str, TensorType], ...]


def read_seeds(path: Path = SEEDS) -> tuple[Seed, ...]:
    """Read the seeds of a file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return tuple(_seed(*line.split(" | ", 1)) for line in lines if " | " in line)


def _seed(inputs: str, expression: str) -> Seed:
    found: list[tuple[str, TensorType]] = []
    for name, dtype, shape in _INPUT.findall(inputs):
        known = dtype_named(dtype)
        if known is None:
            raise ValueError(f"{dtype} is no type")
        found.append((name, TensorType(known, tuple(int(size) for size in shape.split(",") if size))))
    return Seed(expression, tuple(found))


def mutated(rng: random.Random, seeds: tuple[Seed, ...]) -> Seed:
    """Mutate a seed in a few positions, sometimes also in its inputs."""
    seed = rng.choice(seeds)
    tokens = _TOKEN.findall(seed.expression)
    for _ in range(rng.choice((0, 1, 1, 1, 1, 1, 2, 2, 3, 6))):
        tokens = rng.choice(_MUTATIONS)(rng, tokens, seeds)
    inputs = tuple((name, _changed(rng, type_)) for name, type_ in seed.inputs)
    return Seed("".join(tokens), inputs)


def _changed(rng: random.Random, type_: TensorType) -> TensorType:
    if rng.random() > 0.05:
        return type_
    shape = list(type_.shape)
    match rng.randrange(4):
        case 0:
            return TensorType(rng.choice(tuple(DType)), type_.shape)
        case 1 if shape:
            shape[rng.randrange(len(shape))] = rng.choice((1, 2, 3, 5, 64, 1000, 2**31, 2**47))
        case 2:
            shape.append(rng.choice((1, 2, 7)))
        case _:
            shape = shape[1:]
    return TensorType(type_.dtype, tuple(shape))


def _delete(rng: random.Random, tokens: list[str], _seeds: tuple[Seed, ...]) -> list[str]:
    at = rng.randrange(len(tokens) + 1)
    return tokens[:at] + tokens[at + rng.choice((1, 1, 2, 5)) :]


def _insert(rng: random.Random, tokens: list[str], _seeds: tuple[Seed, ...]) -> list[str]:
    at = rng.randrange(len(tokens) + 1)
    return [*tokens[:at], rng.choice(_POOL), *tokens[at:]]


def _replace(rng: random.Random, tokens: list[str], _seeds: tuple[Seed, ...]) -> list[str]:
    at = rng.randrange(len(tokens) + 1)
    return [*tokens[:at], rng.choice((*_POOL, *tokens[:50])), *tokens[at + 1 :]]


def _swap(rng: random.Random, tokens: list[str], _seeds: tuple[Seed, ...]) -> list[str]:
    changed = list(tokens)
    if len(changed) > 1:
        a, b = rng.randrange(len(changed)), rng.randrange(len(changed))
        changed[a], changed[b] = changed[b], changed[a]
    return changed


def _repeat(rng: random.Random, tokens: list[str], _seeds: tuple[Seed, ...]) -> list[str]:
    a = rng.randrange(len(tokens) + 1)
    b = min(len(tokens), a + rng.choice((1, 2, 4, 8, 30)))
    times = rng.choice((2, 2, 3, 10, 70, 300))
    return tokens[:a] + tokens[a:b] * times + tokens[b:]


def _splice(rng: random.Random, tokens: list[str], seeds: tuple[Seed, ...]) -> list[str]:
    other = _TOKEN.findall(rng.choice(seeds).expression)
    a, b = sorted((rng.randrange(len(other) + 1), rng.randrange(len(other) + 1)))
    at = rng.randrange(len(tokens) + 1)
    return tokens[:at] + other[a:b] + tokens[at + rng.choice((0, b - a)) :]


def _wrap(rng: random.Random, tokens: list[str], _seeds: tuple[Seed, ...]) -> list[str]:
    a = rng.randrange(len(tokens) + 1)
    b = min(len(tokens), a + rng.choice((1, 4, 12)))
    depth = rng.choice((1, 1, 3, 63, 65, 500))
    opened, closed = rng.choice((("(", ")"), ("-(", ")"), ("exp(", ")"), ("[", "]"), ("-", ""), ("abs(abs(", "))")))
    return [*tokens[:a], opened * depth, *tokens[a:b], closed * depth, *tokens[b:]]


def _number(rng: random.Random, tokens: list[str], _seeds: tuple[Seed, ...]) -> list[str]:
    places = [i for i, token in enumerate(tokens) if token[:1].isdigit()]
    changed = list(tokens)
    if places:
        changed[rng.choice(places)] = rng.choice(("0", "1", "2", "3", "9", "100", "65537", "2147483647", "1.5", "1e9"))
    return changed


def _cut(rng: random.Random, tokens: list[str], _seeds: tuple[Seed, ...]) -> list[str]:
    return tokens[: rng.randrange(len(tokens) + 1)]


# A and B stand for names of the text; a space before a method keeps it apart for the reader only.
_SUFFIXES = tuple(
    """ + A; - A; * A; * 2 + A; / 2; // A; // 3; % 4; % A; ** 2; << 1; >> A; & A; | A < 3; < A; >= 2; == 0; * 0.5;
    + 0.5; * B; - B; * extent(A); [A]; .call(`abs`); .call(`floor`); .call(`max`, [A]); .call(`min`, [3]); .call(`exp`);
    .cast(`float32`); .cast(`int32`); .cast(`int8`); .cast(`float16`); .like(A); .when([A >= 1]); .when([A > 1], 0);
    .when([A % 2 == 0, A < 5], A); .when(A * B < 7 | A == B, 1)""".split(";")  # noqa: SIM905 - words are read more easily
)


def _grow(rng: random.Random, tokens: list[str], _seeds: tuple[Seed, ...]) -> list[str]:
    """Append a well-formed suffix to an operand."""
    ends = [i for i, t in enumerate(tokens) if t in "])" or t[:1].isalnum()]
    names = [t for t in tokens if t[:1].isalpha() and t not in ("where", "in")] or ["n"]
    if not ends:
        return tokens
    suffix = rng.choice(_SUFFIXES).replace("A", rng.choice(names)).replace("B", rng.choice(names))
    at = rng.choice(ends) + 1
    return [*tokens[:at], *_TOKEN.findall(suffix), *tokens[at:]]


def _guard(rng: random.Random, tokens: list[str], _seeds: tuple[Seed, ...]) -> list[str]:
    """Guard or offset the value of the last statement by an expression of its indices."""
    text = "".join(tokens)
    indices = re.findall(r"\[([^\[\]]+)\]", text) or ["n"]
    conditions = [f"{rng.choice(indices).split(',')[0]} {rng.choice(('<', '>=', '==', '!='))} {rng.randrange(9)}" for _ in range(2)]
    head, where, tail = text.rpartition(" where ")
    body = head if where else tail
    left, sign, value = body.rpartition("= ")
    return _TOKEN.findall(f"{left}{sign}({value}).when([{', '.join(conditions)}], 0){where}{tail if where else ''}")


_MUTATIONS = (
    _grow,
    _grow,
    _grow,
    _grow,
    _grow,
    _guard,
    _number,
    _number,
    _delete,
    _insert,
    _insert,
    _replace,
    _replace,
    _swap,
    _repeat,
    _splice,
    _wrap,
    _number,
    _number,
    _cut,
)


def outcome(case: Seed) -> str:
    """Return the error code or `parsed`; other exceptions than InputError propagate."""
    try:
        program = parse(case.expression, dict(case.inputs))
    except InputError as error:
        shown = error.render(case.expression)
        if error.line is not None and (error.column or 0) < 1:
            raise AssertionError(f"no column: {shown}") from error
        return error.code
    if not isinstance(program, TensorProgram):
        raise TypeError(f"parse gave {type(program).__name__}")
    return "parsed"


def main() -> int:
    """Run the mutations and print a summary."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--count", type=int, default=10_000)
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()
    seeds, rng = read_seeds(), random.Random(given.seed)
    codes: collections.Counter[str] = collections.Counter()
    failures: list[dict[str, object]] = []
    slowest = 0.0
    for _ in range(given.count):
        case = mutated(rng, seeds)
        start = time.process_time()
        try:
            codes[outcome(case)] += 1
        except Exception as crash:  # noqa: BLE001 - whatever comes through is the finding
            failures.append({"expression": case.expression, "inputs": repr(case.inputs), "crash": repr(crash)})
        seconds = time.process_time() - start
        slowest = max(slowest, seconds)
        if seconds > LIMIT_S:
            failures.append({"expression": case.expression, "inputs": repr(case.inputs), "seconds": seconds})
    result = {
        "count": given.count,
        "seed": given.seed,
        "slowest_s": round(slowest, 4),
        "codes": dict(codes.most_common()),
        "failures": failures,
    }
    sys.stdout.write(json.dumps(result, indent=1) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
