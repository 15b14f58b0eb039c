"""Comparison of a kernel's arrays: correct ones pass, wrong ones do not."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from roller_svc.frontend.lang import parse
from roller_svc.ir.dtype import DType
from roller_svc.ir.program import TensorProgram, TensorType
from roller_svc.semantics.compare import agrees
from roller_svc.semantics.inputs import random_inputs
from roller_svc.semantics.interpreter import evaluate, evaluate_sample, reference


def types(**shapes: tuple[DType, tuple[int, ...]]) -> dict[str, TensorType]:
    return {name: TensorType(dtype, shape) for name, (dtype, shape) in shapes.items()}


MATMUL = "C[m, n] +=! A[m, k] * B[k, n]"


def matmul(dtype: DType = DType.FLOAT32, k: int = 200) -> TensorProgram:
    return parse(MATMUL, types(A=(dtype, (16, k)), B=(dtype, (k, 12))))


def test_a_float32_matmul_agrees() -> None:
    program = matmul()
    arrays = random_inputs(program, 0)
    assert agrees(program, {"C": arrays["A"] @ arrays["B"]}, evaluate(program, arrays)).ok


def test_one_wrong_element_is_found_and_named() -> None:
    program = matmul()
    arrays = random_inputs(program, 0)
    got = arrays["A"] @ arrays["B"]
    got[3, 4] += 0.01
    verdict = agrees(program, {"C": got}, evaluate(program, arrays))
    assert not verdict.ok
    assert verdict.detail.startswith("C[3, 4] is ")
    assert verdict.max_abs_error == pytest.approx(0.01, rel=1e-2)


def test_one_term_missing_from_a_long_sum_is_found() -> None:
    program = matmul(k=2000)
    arrays = random_inputs(program, 0)
    got = arrays["A"][:, 1:] @ arrays["B"][1:]
    assert not agrees(program, {"C": got}, evaluate(program, arrays)).ok


def test_nan_poison_is_found() -> None:
    program = matmul()
    arrays = random_inputs(program, 0)
    got = arrays["A"] @ arrays["B"]
    got[-1, -1] = np.nan
    assert not agrees(program, {"C": got}, evaluate(program, arrays)).ok


def test_tf32_needs_its_permission() -> None:
    program = matmul()
    arrays = random_inputs(program, 0)
    cut = {k: (v.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32) for k, v in arrays.items()}
    got = {"C": cut["A"] @ cut["B"]}
    assert not agrees(program, got, evaluate(program, arrays)).ok
    assert agrees(program, got, evaluate(program, arrays, allow_tf32=True)).ok


def test_float16_may_accumulate_in_float32_but_not_in_float16() -> None:
    program = matmul(DType.FLOAT16, 2000)
    arrays = random_inputs(program, 0)
    want = evaluate(program, arrays)
    wide = {k: v.astype(np.float32) for k, v in arrays.items()}
    assert agrees(program, {"C": (wide["A"] @ wide["B"]).astype(np.float16)}, want).ok
    narrow = np.zeros((16, 12), np.float16)
    for k in range(2000):
        narrow += arrays["A"][:, k : k + 1] * arrays["B"][k : k + 1]
    assert not agrees(program, {"C": narrow}, want).ok


@pytest.mark.parametrize(
    ("text", "is_rounded"),
    [
        ("C[m, n] +=! A[m, k] * (B[k, n] * S[n])", True),
        ("C[m, n] +=! A[m, k] * S[n] * B[k, n]", True),
        ("C[m, n] +=! A[m, k] * (B[k, n] * S[n]).cast(`float32`)", True),
        ("C[m, n] +=! A[m, k] * (B[k, n].cast(`float32`) * S[n].cast(`float32`))", False),
    ],
)
def test_computed_factors_may_be_rounded_to_their_type(text: str, *, is_rounded: bool) -> None:
    half = DType.BFLOAT16
    program = parse(text, types(A=(half, (16, 200)), B=(half, (200, 12)), S=(half, (12,))))
    arrays = random_inputs(program, 0)
    wide = {k: v.astype(np.float32) for k, v in arrays.items()}
    factor = (wide["B"] * wide["S"]).astype(arrays["B"].dtype).astype(np.float32)
    (output,) = program.outputs
    got = (wide["A"] @ factor).astype(arrays["B"].dtype if program.types[output.tensor].dtype is half else np.float32)
    assert agrees(program, {"C": got}, evaluate(program, arrays)).ok is is_rounded


def test_integers_must_be_equal() -> None:
    program = matmul(DType.INT32)
    arrays = random_inputs(program, 0)
    got = arrays["A"] @ arrays["B"]
    want = evaluate(program, arrays)
    assert want["C"].error is None
    assert agrees(program, {"C": got}, want).ok
    got[0, 0] += 1
    assert not agrees(program, {"C": got}, want).ok


def test_errors_propagate_through_statements() -> None:
    text = "C[m, n] +=! A[m, k] * B[k, n]; M[m] >=! C[m, n]; E[m, n] = exp(C[m, n] - M[m]); S[m] +=! E[m, n]; "
    text += "Y[m, n] = E[m, n] / S[m]"
    program = parse(text, types(A=(DType.FLOAT32, (16, 500)), B=(DType.FLOAT32, (500, 12))))
    arrays = random_inputs(program, 0)
    c = arrays["A"] @ arrays["B"]
    e = np.exp(c - c.max(1, keepdims=True))
    want = evaluate(program, arrays)
    verdict = agrees(program, {"Y": e / e.sum(1, keepdims=True)}, want)
    assert verdict.ok
    assert verdict.unchecked == 0
    assert not agrees(program, {"Y": 1.01 * e / e.sum(1, keepdims=True)}, want).ok


def test_a_value_decided_by_rounding_counts_as_unchecked() -> None:
    # 0.1 + 0.2 - 0.3 is 0 or not as it is rounded: what follows from its sign is anybody's.
    program = parse("y[n] = (a[n] + b[n] > c[n]) * 1.0", types(**dict.fromkeys("abc", (DType.FLOAT32, (2,)))))
    arrays = {"a": np.float32([0.1, 1]), "b": np.float32([0.2, 1]), "c": np.float32([0.1, 1]) + np.float32([0.2, 0])}
    want = evaluate(program, arrays)["y"]
    assert want.error is not None
    assert want.error[0] >= 1
    assert want.error[1] < 1e-6


def test_a_minimum_of_infinite_terms_is_unknown_where_their_errors_are() -> None:
    program = parse("d[m, n] +=! A[m, k] * B[k, n]; y[m] <=! d[m, n]", types(A=(DType.FLOAT32, (1, 4)), B=(DType.FLOAT32, (4, 2))))
    arrays = {"A": np.ones((1, 4), np.float32), "B": np.ones((4, 2), np.float32)}
    arrays["B"][2, 1] = np.inf
    want = evaluate(program, arrays, allow_tf32=True)
    assert want["y"].error is not None
    assert not np.isnan(want["y"].error).any()
    assert agrees(program, {"y": np.float32([4])}, want).ok


def test_overflow_must_be_infinite() -> None:
    program = parse("y[n] = x[n] * 2", types(x=(DType.FLOAT16, (2,))))
    arrays = {"x": np.array([60000, 1], np.float16)}
    want = evaluate(program, arrays)
    assert np.isinf(reference(program, arrays)["y"][0])
    assert agrees(program, reference(program, arrays), want).ok
    assert not agrees(program, {"y": np.array([1, 2], np.float16)}, want).ok


def test_wrong_type_and_shape() -> None:
    program = matmul()
    arrays = random_inputs(program, 0)
    want = evaluate(program, arrays)
    got: Any = arrays["A"] @ arrays["B"]
    assert "expected float32" in agrees(program, {"C": got.astype(np.float64)}, want).detail
    assert "[12, 16]" in agrees(program, {"C": got.T}, want).detail


def test_samples_are_compared_at_their_indices() -> None:
    program = matmul()
    arrays = random_inputs(program, 0)
    want = evaluate_sample(program, arrays, 20)
    got = np.full((16, 12), np.nan, np.float32)
    assert want["C"].indices is not None
    got.reshape(-1)[want["C"].indices] = (arrays["A"] @ arrays["B"]).reshape(-1)[want["C"].indices]
    assert agrees(program, {"C": got}, want).ok
    got[0, 0] = 100
    assert not agrees(program, {"C": got}, want).ok


def test_infinities_of_copies_are_equal_without_a_warning() -> None:
    program = parse("C[i] = A[i]", types(A=(DType.FLOAT32, (3,))))
    arrays = {"A": np.array([np.inf, -np.inf, 1], np.float32)}
    want = evaluate(program, arrays)
    assert agrees(program, {"C": arrays["A"]}, want).ok
    assert not agrees(program, {"C": -arrays["A"]}, want).ok


def test_states_after_an_overflow_may_be_anything_until_a_reset() -> None:
    """The first one beyond the range is not NaN, unless its terms cancel: parts of it may be infinities of both signs."""
    step = "where(f[t] != 0, 0.0, g[t] * h[t - 1].when([t > 0], 0.0)) + x[t]"
    row = {"f": (DType.BOOL, (6,)), "g": (DType.FLOAT32, (6,)), "x": (DType.FLOAT32, (6,))}
    program = parse(f"h[t] = {step}", types(**row))
    arrays = {"f": np.arange(6) == 4, "g": np.float32([1, 1e30, 2, 2, 2, 2]), "x": np.float32([1e30, 1, 1, 1, 3, 1])}
    expected = np.float32([1e30, math.inf, math.inf, math.inf, 3, 7])

    def is_allowed(position: int, state: float) -> bool:
        got = np.where(np.arange(6) == position, np.float32(state), expected)
        return agrees(program, {"h": got}, evaluate(program, arrays)).ok

    anything = (math.inf, math.nan, -math.inf, 5.0)
    assert [is_allowed(t, state) for t in (2, 3) for state in anything] == [True] * 8
    assert (is_allowed(1, math.inf), is_allowed(1, math.nan)) == (True, False)
    assert not any(is_allowed(t, state) for t in (0, 4, 5) for state in (math.nan, math.inf))
    verdict = agrees(program, {"h": np.where(np.arange(6) == 1, np.float32(math.nan), expected)}, evaluate(program, arrays))
    assert "h[1] is nan, expected inf, as 1.00000003e+60 is beyond the range of float32; " in verdict.detail

    arrays |= {"g": np.float32([1, 1, 1e30, 2, 2, 2]), "x": np.float32([1e9, -6e8, 1, 1, 3, 1])}
    expected[:3] = 1e9, 4e8, math.inf
    assert is_allowed(2, math.nan)  # as 1e39 - 6e38
