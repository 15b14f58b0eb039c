"""Casts to narrow floats round once, to nearest even, in the interpreter and in kernels of all dialects.

float64, int32, int64 and uint64 pass through float32, where a value near the middle of two neighbours may become the
middle. The expected elements come from exact comparisons of Python's numbers.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import cache
from itertools import pairwise, product

import ml_dtypes
import numpy as np
import pytest

import roller_svc
from roller_svc.analysis.wide_values import convert, widen
from roller_svc.ir.dtype import DType

NARROW = {
    "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn), "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}  # fmt: skip
SOURCES = ("float64", "int32", "int64", "uint64")
FINITE = {"float16": 0x7C00, "bfloat16": 0x7F80, "float8_e4m3fn": 0x7F, "float8_e5m2": 0x7C}  # elements of at least 0
INFINITE = {"float16": 2.0**16, "bfloat16": 2.0**128}  # the number that stands for infinity; float8 saturates
STEPS = {"float16": 131, "bfloat16": 61, "float8_e4m3fn": 1, "float8_e5m2": 1}  # primes: all fractions get their turn


@cache
def middles(target: str) -> list[float]:
    """The numbers between the neighbours among the elements of at least 0, in the elements' order."""
    dtype = NARROW[target]
    codes = np.arange(FINITE[target]).astype(f"u{dtype.itemsize}")
    values = [*codes.view(dtype).astype(np.float64).tolist(), *([INFINITE[target]] if target in INFINITE else [])]
    return [(a + b) / 2 for a, b in pairwise(values)]


def near_middles(source: str) -> np.ndarray:
    """Middles of all narrow types, and numbers just above and below, of both signs, within the source's range."""
    chosen = [m for target in NARROW for m in (*middles(target)[:: STEPS[target]], middles(target)[-1])]
    if source == "float64":
        at = np.array(chosen)
        near = [at, np.nextafter(at, np.inf), np.nextafter(at, 0.0), at * (1 + 2.0**-30), at * (1 - 2.0**-30)]
        sizes = np.concatenate([*near, [0.0, 1e-300, 5e-324, 1e39, 1e300, np.inf]])
        return np.concatenate([sizes, -sizes, [np.nan]])
    limits = np.iinfo(source)
    whole = [int(m) + d for m in chosen if m == int(m) for d in (0, 1, -1, 1 << 9, -(1 << 9))]
    whole += [limits.max, limits.min, limits.max - 1]
    return np.array([n for n in (*whole, *(-n for n in whole)) if limits.min <= n <= limits.max], source)


def round_exactly(numbers: np.ndarray, target: str) -> np.ndarray:
    """The elements as float32. Python compares an int and a float by their exact values."""
    table, dtype = middles(target), NARROW[target]
    codes = list[int]()
    for number in numbers.tolist():
        if number != number:
            codes.append(FINITE[target])  # replaced below
            continue
        code = bisect_left(table, abs(number))
        if code < len(table) and table[code] == abs(number):
            code += code & 1  # a tie, to even
        codes.append(code)
    sizes = np.array(codes).astype(f"u{dtype.itemsize}").view(dtype).astype(np.float32)
    return np.where(numbers != numbers, np.float32("nan"), np.where(numbers < 0, -sizes, sizes))


# A cast is stored, or computed with. In float16 and float8, integers that float32 does not represent are infinite.
CASTS = [*(("float64", narrow) for narrow in NARROW), *((source, "bfloat16") for source in SOURCES[1:])]
LARGE = [("int64", "float16"), ("int64", "float8_e5m2")]
RESULTS = [*product(("stored", "computed"), CASTS), *product(("stored",), LARGE)]
INPUTS = {source: near_middles(source) for source in SOURCES}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("narrow", sorted(NARROW))
def test_interpreter(narrow: str, source: str) -> None:
    x = widen(INPUTS[source], DType(source))
    got = convert(x, DType(source), DType(narrow), rounded=True)
    np.testing.assert_array_equal(got, round_exactly(x, narrow))


@pytest.mark.parametrize("source", ["int64", "uint64"])
def test_integers_to_float32_in_the_interpreter(source: str) -> None:
    x = np.array([(1 << 62) + (1 << 38) + 1, (1 << 62) + (1 << 38)], source)
    got = convert(x, DType(source), DType.FLOAT32, rounded=True)
    assert got.tolist() == [2.0**62 + 2.0**39, 2.0**62]


@pytest.mark.parametrize("target", ["local", "nvidia-h200-sxm"])
def test_literals(target: str) -> None:
    expression = f"y[i] = x[i] + const({1 + 2.0**-11 + 2.0**-30!r}, `float16`)"
    runtime = "auto" if target == "local" else "emulator"
    kernel = roller_svc.compile(expression, {"x": ("float16", (64,))}, target=target, select="model", top_k=1, runtime=runtime)
    assert (kernel.run({"x": np.zeros(64, np.float16)})["y"] == np.float16(1 + 2.0**-10)).all()


@pytest.mark.slow
@pytest.mark.parametrize("target", ["local", "nvidia-h200-sxm", "amd-mi250x"])
def test_kernels(target: str) -> None:
    results = [f"{how}_{source}_{narrow}" for how, (source, narrow) in RESULTS]
    casts = [f"x_{source}[i].cast(`{narrow}`)" for _, (source, narrow) in RESULTS]
    more = [".cast(`float32`) + 0.0" if how == "computed" else "" for how, _ in RESULTS]
    statements = [f"{result}[i] = {cast}{rest}" for result, cast, rest in zip(results, casts, more, strict=True)]
    kernel = roller_svc.compile(
        "; ".join(statements),
        {f"x_{source}": (source, x.shape) for source, x in INPUTS.items()},
        target=target,
        select="model",
        top_k=1,
        runtime="auto" if target == "local" else "emulator",
    )
    got = kernel.run({f"x_{source}": x for source, x in INPUTS.items()})
    for result, (_, (source, narrow)) in zip(results, RESULTS, strict=True):
        np.testing.assert_array_equal(got[result].astype(np.float32), round_exactly(INPUTS[source], narrow), result)


@pytest.mark.parametrize("target", ["local", "nvidia-h200-sxm", "amd-mi250x"])
def test_a_cast_to_the_type_of_arithmetic_rounds(target: str) -> None:
    rng = np.random.default_rng(5)
    given = {f"{name}_{narrow}": rng.uniform(1, 2, 64).astype(dtype) for narrow, dtype in NARROW.items() for name in "ab"}
    kernel = roller_svc.compile(
        "; ".join(
            f"{n}[i]: float32 = (a_{n}[i] * b_{n}[i]).cast(`{n}`) - 1.0; {n}_twice[i]: float32 = (a_{n}[i] *"
            f" b_{n}[i]).cast(`{n}`).cast(`{n}`) * 3.0"
            for n in NARROW
        ),
        {name: (name.split("_", 1)[1], (64,)) for name in given},
        target=target,
        select="model",
        top_k=1,
        runtime="auto" if target == "local" else "emulator",
    )
    got = kernel.run(given)
    for narrow, dtype in NARROW.items():
        product = given[f"a_{narrow}"].astype(np.float32) * given[f"b_{narrow}"].astype(np.float32)
        rounded = product.astype(dtype).astype(np.float32)
        np.testing.assert_array_equal(got[narrow], rounded - 1, narrow)
        np.testing.assert_array_equal(got[f"{narrow}_twice"], rounded * 3, narrow)
