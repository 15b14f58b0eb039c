"""Maps that are inlined stay small, also where each reads the one before twice, and in nested indices."""

from __future__ import annotations

import numpy as np
import pytest

import roller_svc
from roller_svc.analysis import inlining
from roller_svc.analysis.inlining import MAX_NODES, inline_loads
from roller_svc.compiler.partition_cache import partition
from roller_svc.frontend.parse import parse
from roller_svc.fusion import attention_rows
from roller_svc.fusion.inline import inline_elementwise
from roller_svc.hardware import load
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Expr, iter_subexpressions
from roller_svc.ir.program import TensorExpr, TensorProgram, TensorType


def program_of(text: str, **inputs: tuple[str, tuple[int, ...]]) -> TensorProgram:
    types = {name: TensorType(DType(dtype), shape) for name, (dtype, shape) in inputs.items()}
    return parse(text, types)


def count_nodes(expr: Expr) -> int:
    return sum(1 for _ in iter_subexpressions(expr))


def bisection(rounds: int, step: str) -> str:
    """Return a search of each row for a value by counts; `step` is the next candidate, from {t}, {c} and {s}."""
    text, before = "", "a[i]"
    for n in range(rounds):
        step_size = str(2.0**-n)
        text += f"c{n}[i] +=! where(x[i, k] >= {before} + {step_size}, 1, 0); "
        text += f"t{n}[i] = {step.format(t=before, c=f'c{n}[i] >= 10', s=step_size)}; "
        before = f"t{n}[i]"
    return text


TWICE, ONCE = "where({c}, {t} + {s}, {t})", "{t} + where({c}, {s}, 0.0)"


@pytest.mark.parametrize("target", ["nvidia-h200-sxm", "cpu-x86-avx2"])
@pytest.mark.parametrize("step", [TWICE, ONCE])
def test_chains_that_read_a_map_twice_are_matched_in_few_nodes(step: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = 0
    value_of = inlining.value_of

    def count(producer: TensorExpr, index: tuple[Expr, ...]) -> Expr:
        nonlocal made
        value = value_of(producer, index)
        made += count_nodes(value)
        return value

    monkeypatch.setattr(inlining, "value_of", count)
    monkeypatch.setattr(attention_rows, "value_of", count)
    program = program_of(bisection(20, step), x=("float32", (8, 64)), a=("float32", (8,)))
    groups = partition(program, load(target))
    assert sum(len(group.statements) for group in groups) >= 20
    assert made < 200_000  # 2 ** 20 loads if each round doubled


def nested(depth: int, repeats: int) -> str:
    """Return a read at an index that a map gives, again and again; the map repeats its axis."""
    index = "i"
    for _ in range(depth):
        index = f"t[min(max({index}, 0), 63)]"
    return f"t[i] = x[i] + {' + '.join(['i'] * repeats)}; y[i] = {index} where i in 64"


@pytest.mark.parametrize(("depth", "repeats", "statements"), [(1, 20, 1), (2, 20, 1), (5, 20, 2), (12, 20, 2)])
def test_map_that_nested_indices_multiply_is_stored(depth: int, repeats: int, statements: int) -> None:
    found = inline_elementwise(program_of(nested(depth, repeats), x=("int32", (64,))))
    assert len(found) == statements
    assert all(count_nodes(s.body) <= MAX_NODES for s in found)


def test_loads_are_inlined_up_to_the_bound_and_not_beyond() -> None:
    """The count before inlining is that of the result."""
    sizes = []
    for depth in range(1, 5):
        producer, reader = program_of(nested(depth, 20), x=("int32", (64,))).statements
        inlined = inline_loads(reader, {"t": producer})
        sizes.append(None if inlined is None else count_nodes(inlined.body))
    assert sizes[0] is not None
    assert sizes[-1] is None
    assert all(size is None or size <= MAX_NODES for size in sizes)


def test_stored_map_of_nested_indices_is_right_on_the_cpu() -> None:
    x = np.random.default_rng(0).integers(-64, 64, 64).astype(np.int32)
    y = roller_svc.compile(nested(5, 20), {"x": ("int32", (64,))}, select="model")(x=x)["y"]
    t = x + 20 * np.arange(64, dtype=np.int32)
    expected = np.arange(64)
    for _ in range(5):
        expected = t[np.clip(expected, 0, 63)]
    assert np.array_equal(y, expected)
