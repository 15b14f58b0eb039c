"""Winograd's transforms are exact in rational arithmetic, and the error bound follows from them."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from roller_svc.analysis.winograd import (
    MAX_RELATIVE_ERROR,
    TAPS,
    Matrix,
    error_amplification,
    is_accurate,
    relative_error_bound,
    transforms,
)


def apply(matrix: Matrix, x: list[Fraction]) -> list[Fraction]:
    return [sum((a * b for a, b in zip(row, x, strict=True)), start=Fraction(0)) for row in matrix]


@pytest.mark.parametrize("m", [2, 4])
def test_transforms_compute_correlation_exactly(m: int) -> None:
    matrices = transforms(m)
    inputs = [Fraction(3 * i * i - 7, i + 1) for i in range(matrices.size)]
    taps = [Fraction(2), Fraction(-5, 3), Fraction(7, 4)]
    products = [u * v for u, v in zip(apply(matrices.filters, taps), apply(matrices.inputs, inputs), strict=True)]
    direct = [sum((inputs[p + k] * taps[k] for k in range(TAPS)), start=Fraction(0)) for p in range(m)]
    assert apply(matrices.outputs, products) == direct


@pytest.mark.parametrize("m", [2, 4])
def test_input_and_output_transforms_are_exact_in_float32(m: int) -> None:
    for row in (*transforms(m).inputs, *transforms(m).outputs):
        assert all(Fraction(float(np.float32(float(x)))) == x for x in row)


def test_larger_tiles_amplify_errors_more() -> None:
    assert 1.0 < error_amplification(2) < error_amplification(4) < 10.0
    assert 1.0 < error_amplification(4, 1) < error_amplification(4)


@pytest.mark.parametrize("m", [2, 4])
@pytest.mark.parametrize("channels", [16, 128])
def test_bound_covers_measured_errors_within_a_factor_of_eight(m: int, channels: int) -> None:
    rng = np.random.default_rng(m)
    matrices = transforms(m)
    size, count = matrices.size, 200
    inputs = rng.standard_normal((count, channels, size, size)).astype(np.float32)
    taps = rng.standard_normal((channels, TAPS, TAPS)).astype(np.float32)
    g, b, a = (
        np.array([[float(x) for x in row] for row in matrix]) for matrix in (matrices.filters, matrices.inputs, matrices.outputs)
    )
    b32, a32 = b.astype(np.float32), a.astype(np.float32)
    u = np.einsum("pi,cij,qj->cpq", g, taps.astype(np.float64), g).astype(np.float32)
    v = np.einsum("qj,tcpj->tcpq", b32, np.einsum("pi,tcij->tcpj", b32, inputs))
    products = np.zeros((count, size, size), np.float32)
    for c in range(channels):
        products += u[c] * v[:, c]
    got = np.einsum("qb,tpb->tpq", a32, np.einsum("pa,tab->tpb", a32, products))
    wide, wide_taps = inputs.astype(np.float64), taps.astype(np.float64)
    want = sum(
        np.einsum("tcyx,c->tyx", wide[:, :, i : i + m, j : j + m], wide_taps[:, i, j]) for i in range(TAPS) for j in range(TAPS)
    )
    error = np.abs(got - want).max() / np.std(want)
    bound = relative_error_bound(m, channels)
    assert bound / 8 < error < bound


@pytest.mark.parametrize("m", [2, 4])
@pytest.mark.parametrize("channels", [16, 128])
def test_bound_of_one_dimension_covers_measured_errors_within_a_factor_of_eight(m: int, channels: int) -> None:
    rng, matrices, count = np.random.default_rng(m), transforms(m), 2000
    inputs = rng.standard_normal((count, channels, matrices.size)).astype(np.float32)
    taps = rng.standard_normal((channels, TAPS)).astype(np.float32)
    g, b, a = (
        np.array([[float(x) for x in row] for row in matrix]) for matrix in (matrices.filters, matrices.inputs, matrices.outputs)
    )
    u = (taps.astype(np.float64) @ g.T).astype(np.float32)
    v = np.einsum("pi,tci->tcp", b.astype(np.float32), inputs)
    products = np.zeros((count, matrices.size), np.float32)
    for c in range(channels):
        products += u[c] * v[:, c]
    got = products @ a.astype(np.float32).T
    wide, wide_taps = inputs.astype(np.float64), taps.astype(np.float64)
    want = sum(np.einsum("tcx,c->tx", wide[:, :, i : i + m], wide_taps[:, i]) for i in range(TAPS))
    bound = relative_error_bound(m, channels, 1)
    assert bound / 8 < np.abs(got - want).max() / np.std(want) < bound


def test_small_tiles_need_no_leave_and_large_ones_a_bound() -> None:
    assert is_accurate(2, 1 << 20)
    assert is_accurate(4, 512)
    too_many = next(c for c in (1 << k for k in range(30)) if relative_error_bound(4, c) > MAX_RELATIVE_ERROR)
    assert not is_accurate(4, too_many)
