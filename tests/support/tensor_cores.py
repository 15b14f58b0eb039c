"""How tensor cores add products, in numpy: T-FDPA of MMA-Sim (arXiv:2511.10909), float64 standing for exact numbers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from roller_svc.ir.accumulation import AccumulatorPrecision

Floats = NDArray[np.float64]
FLOAT32_LEAST = -126  # power of two of its least normal number


def _powers(values: Floats, least: int) -> NDArray[np.int64]:
    """Exponents of the values' powers of two, subnormal ones having that of the least normal number."""
    return np.maximum(np.frexp(values)[1] - 1, least)


def _added(a: Floats, b: Floats, total: Floats, sums: AccumulatorPrecision, least: int) -> Floats:
    """total[m, n] + a[m, k] b[n, k], of as many products as are added at once."""
    products = a[:, None, :] * b[None, :, :]
    exponents = _powers(a, least)[:, None, :] + _powers(b, least)[None, :, :]
    exponents = np.where(products == 0, FLOAT32_LEAST, exponents)
    own = np.where(total == 0, FLOAT32_LEAST, _powers(total, FLOAT32_LEAST))
    most = np.maximum(exponents.max(-1), own)
    quantum = np.ldexp(1.0, most - sums.addend_bits)
    found = np.trunc(total / quantum) + np.trunc(products / quantum[..., None]).sum(-1)
    fraction, exponent = np.frexp(found * quantum)
    kept = np.trunc(np.ldexp(fraction, sums.result_bits + 1))
    return np.ldexp(kept, exponent - sums.result_bits - 1)


def product(a: Floats, b: Floats, sums: AccumulatorPrecision, *, least: int = -14, start: Floats | None = None) -> Floats:
    """start[m, n] + a[m, k] b[n, k], chain after chain, chains added in float32. `least`: of the operands' type."""
    chain, total = sums.promotion_interval or a.shape[1], np.zeros((a.shape[0], b.shape[0])) if start is None else start
    whole = np.zeros_like(total, dtype=np.float32)
    for first in range(0, a.shape[1], chain):
        for k in range(first, min(first + chain, a.shape[1]), sums.products_per_add):
            some = slice(k, k + sums.products_per_add)
            total = _added(a[:, some], b[:, some], total, sums, least)
        whole, total = whole + total.astype(np.float32), np.zeros_like(total)
    return whole.astype(np.float64)
