"""Programs that take long: to check, to construct, or to refuse. All read x, of 64 elements."""

from __future__ import annotations

import random
from collections.abc import Callable


def polyhedral(rng: random.Random, conditions: int, statements: int) -> str:
    """Guards of quotients and remainders, which the polyhedral library takes long to decide."""
    lines = []
    for statement in range(statements):
        guards = []
        for n in range(conditions):
            a, b, c = rng.randrange(2, 9), rng.randrange(2, 9), rng.randrange(99)
            modulus = rng.choice((7, 11, 12, 13, 14, 17, 31))
            guards.append(f"((i*{a}+j*{b}+{c})//{rng.randrange(2, 7)}+k)%{modulus} == {n % modulus}")
        index = f"(i+j+k)//{rng.choice((40, 47, 50))}"
        lines.append(f"y{statement}[i,j,k]=x[{index}].when([{', '.join(guards)}], 0.0) where i in 1000, j in 1000, k in 1000")
    return "; ".join(lines)


def doubling(rng: random.Random, statements: int) -> str:
    """Each statement reads the one before it twice."""
    sign = rng.choice("+*-")
    lines = ["y0[i] = x[i]", *(f"y{n + 1}[i] = y{n}[i] {sign} y{n}[i]" for n in range(statements))]
    return "; ".join(lines)


def nested(rng: random.Random, depth: int) -> str:
    """Functions in functions."""
    value = "x[i]"
    for _ in range(depth):
        form = rng.choice(("abs({0})", "max({0}, x[i])", "where(x[i] > 0, {0}, -x[i])", "({0}) // 3", "min({0}, 1)"))
        value = form.format(value)
    return f"y[i] = {value}"


def expensive(rng: random.Random) -> str:
    """One of all forms."""
    big = rng.choice((4, 16, 30, 64, 200, 2000))
    axes = [f"a{n}" for n in range(rng.choice((4, 8, 15, 16, 17, 32)))]
    forms: tuple[Callable[[], str], ...] = (
        lambda: polyhedral(rng, rng.choice((4, 4, 6, 12)), rng.choice((1, 1, 2, 4, 8))),
        lambda: polyhedral(rng, rng.choice((4, 12)), 1),
        lambda: doubling(rng, min(big, 64)),
        lambda: nested(rng, rng.choice((3, 12, 30, 60, 70))),
        lambda: "y[i] = x[i] " + "** 2 " * big,
        lambda: "y[i] = " + "2 ** " * big + "2",
        lambda: f"y[{', '.join(axes)}] = x[{' + '.join(axes)}] where " + ", ".join(f"{a} in 2" for a in axes),
        lambda: "y[i] = " + " + ".join(f"x[(i * {n} + {n}) % 64]" for n in range(1, big + 1)),
        lambda: "y[i] = " + "(" * big + "x[i]" + ")" * big,
        lambda: "y[i] = " + "-" * big + "x[i]",
        lambda: "y[i] = " + "9" * (30 * big),
        lambda: "y[i] = x[i] * 1e400 + nan",
        lambda: "y[i] = " + " + ".join(["exp(x[i] * 1.5)"] * min(big, 40)),
        lambda: f"s[i] +=! x[(i*k + k*k) % 64] where i in 100000, k in {10 ** rng.randrange(2, 12)}",
        lambda: "; ".join(f"C{n}[m] +=! x[m] * x[k]" for n in range(min(big, 64))),
        lambda: "y[i] = x[i].when([" + ", ".join(f"(i + {n}) % {n + 2} != 1" for n in range(min(big, 64))) + "], 0.0)",
        lambda: "y[i] = x[i] # " + "a" * (30 * big),
        lambda: "y[i, j] = x[" + "(" * min(big, 60) + "i * j" + ") // 2" * min(big, 60) + "] where i in 9, j in 7",
    )
    return rng.choice(forms)()
