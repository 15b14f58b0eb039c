"""Softmax and norms on CPUs: cached intermediates, reciprocal division, and rows with tails."""

from __future__ import annotations

import re

import numpy as np
import pytest
from cases_cpu import cpu_case, hinting
from sampling import every

import roller_svc
from roller_svc.compiler.lower_and_emit import lower
from roller_svc.compiler.partition_cache import partition
from roller_svc.compiler.rank import rank
from roller_svc.frontend.lang.parser import parse
from roller_svc.hardware import load
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Expr, Op, OpKind, iter_subexpressions
from roller_svc.ir.program import TensorType
from roller_svc.ir.schedule import Branch, Compute, Loop, LoopKind, Node, Prefetch, Routine, iter_nodes

HW = hinting(load("cpu-x86-avx512"))
TARGETS = ("local", "cpu-x86-avx2")
SOFTMAX = "m[i] >=! x[i, j]; s[i] +=! exp(x[i, j] - m[i]); y[i, k] = exp(x[i, k] - m[i]) / s[i]"
TOLERANCE = {"float16": 2e-3, "float32": 2e-6, "float64": 1e-13}


def nodes(text: str, dtype: DType = DType.FLOAT32, shape: tuple[int, int] = (4096, 512)) -> list[Node]:
    (group,) = partition(parse(text, {"x": TensorType(dtype, shape)}), HW)
    (candidate,), _ = rank(group, HW, HW.unit_for(group.space.compute_dtype), 1)
    (tree,) = lower(group, candidate.program, HW)
    return list(iter_nodes(tree.body))


def operators(found: list[Node], kind: OpKind) -> int:
    computes = [n for n in found if isinstance(n, Compute)]
    return sum(isinstance(e, Op) and e.kind is kind for n in computes for e in iter_subexpressions(n.value))


def size_tests(found: list[Node]) -> list[Branch]:
    """Tests of a divisor's size."""
    return [n for n in found if isinstance(n, Branch) and isinstance(n.cond, Op) and n.cond.kind is OpKind.LAND]


def softmax(x: np.ndarray) -> np.ndarray:
    wide = x.astype(np.float64)
    e = np.exp(wide - wide.max(-1, keepdims=True))
    return np.asarray(e / e.sum(-1, keepdims=True), x.dtype)


def test_exponentials_are_cached_in_the_output_buffer() -> None:
    found = nodes(SOFTMAX)
    assert operators(found, OpKind.EXP) == 1
    written = [n for n in found if isinstance(n, Prefetch) and n.for_write]
    summing = [n for n in found if isinstance(n, Loop) and any(operators([c], OpKind.EXP) for c in iter_nodes(n.body))]
    assert written
    assert all(any(hint is n for n in iter_nodes(summing[-2].body)) for hint in written)


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        (SOFTMAX, DType.FLOAT16),  # an output narrower than the value cannot cache it
        ("s[i] +=! exp(x[i, j]); y[i, k] = exp(x[i, 511 - k]) / s[i] where k in 512", DType.FLOAT32),
        ("s[i] +=! exp(x[i, j]); y[i, k] = exp(x[i, k] * 2.0) / s[i]", DType.FLOAT32),
        ("s[i] +=! exp(x[i, j]).when([j < 9], 0.0); y[i, k] = exp(x[i, k]) / s[i]", DType.FLOAT32),
    ],
)
def test_other_values_are_recomputed(text: str, dtype: DType) -> None:
    assert operators(nodes(text, dtype), OpKind.EXP) > 1


def test_cheap_values_are_recomputed() -> None:
    found = nodes("s[i] +=! x[i, j] * x[i, j]; y[i, j] = x[i, j] * x[i, j] * s[i]")
    assert operators(found, OpKind.MUL) > 2


def shared_values(text: str, dtype: DType = DType.FLOAT32) -> list[Expr]:
    """Values that are computed once for a row."""
    return [n.value for n in nodes(text, dtype) if isinstance(n, Compute) and ".value" in n.tensor]


def test_values_of_a_row_are_computed_before_its_loops() -> None:
    text = (
        "s[i] +=! x[i, j] * x[i, j]; y[i, j] = x[i, j] * rsqrt(s[i] / 512.0 + 0.5); z[i, j] = x[i, j] - rsqrt(s[i] / 512.0 + 0.5)"
    )
    (value,) = shared_values(text)
    assert isinstance(value, Op)
    assert value.kind is OpKind.RSQRT
    assert operators(nodes(text), OpKind.RSQRT) == 1


def test_values_that_differ_by_the_sign_of_a_zero_are_two() -> None:
    text = "m[i] >=! x[i, j]; y[i, j] = x[i, j] / (m[i] * 0.0); z[i, j] = x[i, j] / (m[i] * -0.0)"
    assert len(shared_values(text)) == 2


@pytest.mark.parametrize(
    "text",
    [
        "m[i] >=! x[i, j]; y[i, j] = x[i, j] - m[i]",  # no operation
        "m[i] >=! x[i, j]; y[i, j] = where(m[i] > 0.0, x[i, j], 0.0)",  # a truth value
        "m[i] <=! j.when([x[i, j] > 0.0], 512); y[i, j] = x[i, j] * (m[i] + i)",  # arithmetic of axes is exact
        "m[i] >=! x[i, j]; y[i, j] = x[i, j] * (m[i] * x[i, 0])",  # memory that conditions may guard
        "m[i] >=! x[i, j]; y[i] = m[i] * 2.0 + 1.0",  # a row has one point
    ],
)
def test_other_values_stay_where_they_are(text: str) -> None:
    assert not shared_values(text)


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        ("s[i] +=! x[i, j]; y[i, j] = x[i, j] + where(s[i] != 0, 1000 // s[i] + (s[i] * 1431655765) % 7, -1)", "int32"),
        ("m[i] >=! x[i, j]; y[i, j] = where(x[i, j] < m[i], x[i, j] * (m[i] * 3.1).cast(float16), sqrt(m[i] - 1.5))", "float16"),
        (
            "m[i] >=! x[i, j]; c[i] +=! where(x[i, j] >= m[i] * 0.25 + 0.01, 1, 0); d[i] +=! where(x[i, j] < m[i] - c[i], 1, 0)",
            "float32",
        ),
    ],
)
@pytest.mark.parametrize("shape", [(6, 70), (40, 3)])
def test_shared_values_are_those_of_the_interpreter(text: str, dtype: str, shape: tuple[int, int]) -> None:
    cpu_case(text, {"x": (dtype, shape)}, load("local")).check_some(2)


ROUNDS = (
    "c[i] +=! where(x[i, j] >= 0.5, 1, 0); d[i] +=! where(x[i, j] >= c[i] * 0.01, 1, 0);"
    " e[i] +=! where(x[i, j] >= d[i] * 0.02, 1, 0); f[i] +=! where(x[i, j] < e[i] * 0.02, 1, 0); y[i] = d[i] - 2 * e[i] + 4 * f[i]"
)


@pytest.mark.parametrize("shape", [(64, 200), (1, 70)])
def test_rounds_that_differ_in_values_of_the_row_are_one_function(shape: tuple[int, int]) -> None:
    inputs = {"x": ("float32", shape)}
    kernel = roller_svc.compile(ROUNDS, inputs, outputs=["y"], select="model", top_k=1)
    calls = re.findall(r"^ +(reduce\d+)_i32\(", kernel.source, re.MULTILINE)
    assert len(calls) == 2
    assert len(set(calls)) == 1
    x = np.random.default_rng(5).standard_normal(shape).astype(np.float32)
    np.testing.assert_array_equal(kernel.run({"x": x})["y"], roller_svc.reference(ROUNDS, inputs, {"x": x}, outputs=["y"])["y"])


@pytest.mark.parametrize("text", [SOFTMAX, "y[i] +=! x[i, j]; z[i] +=! x[i, j] * x[i, j]"])
def test_reductions_of_other_values_are_in_place(text: str) -> None:
    assert not any(isinstance(node, Routine) for node in nodes(text))


def test_row_division_becomes_one_reciprocal() -> None:
    (safe,) = size_tests(nodes("s[i] +=! x[i, j]; y[i, j] = x[i, j] / s[i] * 0.5"))
    in_loops = [n for n in iter_nodes(safe.then) if isinstance(n, Loop) and n.kind is LoopKind.VECTOR]
    assert in_loops
    assert not operators(list(iter_nodes(tuple(in_loops))), OpKind.DIV)


@pytest.mark.parametrize(
    "text",
    [
        "s[i] +=! x[i, j]; y[i, j] = floor(x[i, j] / s[i])",
        "s[i] +=! x[i, j]; y[i, j] = x[i, j] / s[i] - 1.0",
        "s[i] +=! x[i, j]; y[i, j] = s[i] / x[i, j]",
    ],
)
def test_exact_divisions_stay(text: str) -> None:
    assert not size_tests(nodes(text))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("columns", every(2, [127, 1, 5000, 129]))
def test_softmax_of_rows_with_nan_and_infinities(target: str, dtype: str, columns: int) -> None:
    x = np.random.default_rng(0).uniform(-8, 8, (11, columns)).astype(dtype)
    x[1, columns // 2], x[2, 0], x[3], x[4, 0], x[5, columns // 2] = np.nan, np.inf, -np.inf, -np.inf, 60
    kernel = roller_svc.compile(SOFTMAX, {"x": (dtype, x.shape)}, target=target, outputs=["y"], select="model")
    with np.errstate(invalid="ignore"):
        want = softmax(x)
    np.testing.assert_allclose(kernel(x=x)["y"], want, rtol=TOLERANCE[dtype], atol=1e-7)


@pytest.mark.parametrize("target", TARGETS)
def test_softmax_of_columns(target: str) -> None:
    x = np.random.default_rng(0).uniform(-8, 8, (70, 37)).astype(np.float32)
    text = "m[j] >=! x[i, j]; s[j] +=! exp(x[i, j] - m[j]); y[i, j] = exp(x[i, j] - m[j]) / s[j]"
    kernel = roller_svc.compile(text, {"x": ("float32", x.shape)}, target=target, outputs=["y"], select="model")
    np.testing.assert_allclose(kernel(x=x)["y"], softmax(x.T).T, rtol=2e-6)


@pytest.mark.parametrize("target", TARGETS)
def test_rows_divide_by_any_number(target: str) -> None:
    divisors = np.array([0, -0.0, 1e-45, -1e-42, 1.2e-38, 3.0, -7e37, 1e38, 3e38, np.inf, -np.inf, np.nan], np.float32)
    tops = np.array([0, -0.0, 1e-45, 1e-38, 1, -3, 1e38, np.inf, -np.inf, np.nan], np.float32)
    x = np.broadcast_to(np.concatenate([tops, np.zeros(40, np.float32)]), (len(divisors), 50)).copy()
    text = "s[i] +=! d[i] * (k[j]); y[i, j] = x[i, j] / s[i]"
    inputs = {"x": ("float32", x.shape), "d": ("float32", divisors.shape), "k": ("float32", (50,))}
    kernel = roller_svc.compile(text, inputs, target=target, outputs=["y"], select="model")
    with np.errstate(all="ignore"):
        one = np.eye(1, 50, dtype=np.float32)[0]
        want = x / (divisors[:, None] * one).sum(1, dtype=np.float32)[:, None]
    np.testing.assert_allclose(kernel(x=x, d=divisors, k=one)["y"], want, rtol=3e-7, atol=2e-45)


ATTENTION = (
    "s[i, j] +=! q[i, d] * k[j, d]; m[i] >=! s[i, j]; e[i, j] = exp((s[i, j] - m[i]) * 0.125); z[i] +=! e[i, j]; "
    "Y[i, d] +=! e[i, j] * v[j, d] / z[i]"
)


def groups(text: str, outputs: tuple[str, ...] = ("Y",), target: str = "cpu-x86-avx512") -> list[list[str]]:
    shapes = {"q": (96, 64), "k": (80, 64), "v": (80, 64)}
    inputs = {name: TensorType(DType.FLOAT32, shape) for name, shape in shapes.items()}
    found = partition(parse(text, inputs, outputs), load(target))
    return [[s.output for s in group.statements] for group in found]


def test_attention_on_a_cpu_is_two_contractions_around_a_softmax() -> None:
    assert groups(ATTENTION) == [["s"], ["m", "z", "e"], ["Y"]]
    assert groups(ATTENTION, target="nvidia-h100-sxm")[-1] == ["Y"]
    assert ["m", "z", "e"] not in groups(ATTENTION, target="nvidia-h100-sxm")


@pytest.mark.parametrize(
    ("outputs", "change"),
    [
        (("Y", "e"), ("", "")),
        (("Y",), ("z[i] +=! e[i, j]", "z[i] +=! e[i, j] * e[i, j]")),
        (("Y",), ("z[i] +=! e[i, j]", "z[i] +=! s[i, j]")),
        (("Y",), ("/ z[i]", "/ z[i + 0 * d] * e[i, 0]")),
    ],
)
def test_rows_read_elsewhere_stay_undivided(outputs: tuple[str, ...], change: tuple[str, str]) -> None:
    assert ["m", "z", "e"] not in groups(ATTENTION.replace(*change), outputs)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("keys", [5, 80, 300])
def test_attention_against_its_definition(target: str, keys: int) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.uniform(-1, 1, (n, 64)).astype(np.float32) for n in (70, keys, keys))
    q[3] = np.nan
    inputs = {name: ("float32", x.shape) for name, x in (("q", q), ("k", k), ("v", v))}
    kernel = roller_svc.compile(ATTENTION, inputs, target=target, outputs=["Y"], select="model")
    want = softmax(q.astype(np.float64) @ k.T.astype(np.float64) / 8) @ v
    np.testing.assert_allclose(kernel(q=q, k=k, v=v)["Y"], want, rtol=1e-4, atol=1e-5)
