"""Vector functions against double precision: error bounds, special values, equal bits of lanes and scalars."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

import roller_svc
from roller_svc.codegen.c.vector.elementary import has_function
from roller_svc.ir.dtype import DType

Array = np.ndarray
_erf = np.vectorize(math.erf, otypes=[np.float64])


def _sigmoid(x: Array) -> Array:
    return np.where(x > 0, 1 / (1 + np.exp(-x)), np.exp(x) / (1 + np.exp(x)))


# units in the last place that docs/cpu.md promises: of float32, of float64
BOUNDS: dict[str, tuple[Callable[[Array], Array], float, float | None]] = {
    "exp": (np.exp, 1.03, 1.1), "exp2": (np.exp2, 1.0, None), "expm1": (np.expm1, 1.52, 2.0), "log": (np.log, 1.0, 1.5),
    "log2": (np.log2, 1.0, None), "log10": (np.log10, 1.0, None), "log1p": (np.log1p, 1.0, 1.5),
    "tanh": (np.tanh, 2.5, 3.5), "sigmoid": (_sigmoid, 2.41, 3.0), "erf": (_erf, 1.0, None), "sin": (np.sin, 1.6, None),
    "cos": (np.cos, 1.6, None),
}  # fmt: skip


def kernel(name: str, dtype: str, count: int, target: str = "local") -> Callable[[Array], Array]:
    built = roller_svc.compile(f"y[n] = x[n].call(`{name}`)", {"x": (dtype, (count,))}, select="model", top_k=1, target=target)
    return lambda x: built(x=x)["y"]


def ulps(got: Array, want: Array) -> Array:
    """Distance in units in the last place of the result's type; of subnormals the unit is the least number."""
    info = np.finfo(got.dtype)
    size = np.maximum(np.abs(want), float(info.tiny))
    unit = np.exp2(np.floor(np.log2(size)) - info.nmant)
    return np.abs(got.astype(want.dtype) - want) / unit


def agree(name: str, x: Array, got: Array, bound: float) -> None:
    reference = BOUNDS[name][0]
    with np.errstate(all="ignore"):
        wide = reference(x.astype(np.float64 if x.dtype == np.float32 else np.longdouble))
        want = wide.astype(x.dtype)
        np.testing.assert_array_equal(np.isnan(got), np.isnan(want), err_msg=name)
        finite = np.isfinite(want) & np.isfinite(got)
        np.testing.assert_array_equal(got[~finite], want[~finite], err_msg=name)
        zero = finite & (want == 0) & (got == 0)
        np.testing.assert_array_equal(np.signbit(got[zero]), np.signbit(want[zero]), err_msg=f"{name}: sign of zero")
        distance = ulps(got[finite], wide[finite])
    if not distance.size:
        return
    worst = int(np.argmax(distance))
    assert distance[worst] <= bound, f"{name}({x[finite][worst]!r}) is {distance[worst]:.3f} ulp off"


@pytest.mark.parametrize("target", ["local", "cpu-x86-avx2"])
@pytest.mark.parametrize("name", sorted(BOUNDS))
def test_float32_of_all_exponents(name: str, target: str) -> None:
    codes = np.arange(0, 1 << 32, 16381, dtype=np.uint64).astype(np.uint32)
    x = np.concatenate([codes.view(np.float32), np.array([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf], np.float32)])
    agree(name, x, kernel(name, "float32", len(x), target)(x), BOUNDS[name][1])


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(BOUNDS.keys() - {"erf"}))
def test_every_thirteenth_float32(name: str) -> None:
    count, step = 1 << 22, 13
    call = kernel(name, "float32", count)
    for first in range(0, 1 << 32, count * step):
        codes = np.minimum(np.arange(first, first + count * step, step, dtype=np.uint64), 0xFFFFFFFF)
        x = codes.astype(np.uint32).view(np.float32)
        agree(name, x, call(x), BOUNDS[name][1])


@pytest.mark.parametrize("name", sorted(n for n, (_, _, bound) in BOUNDS.items() if bound is not None))
def test_float64(name: str) -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 1 << 64, 20000, dtype=np.uint64).view(np.float64)
    near = rng.standard_normal(20000) * 10.0 ** rng.integers(-3, 3, 20000)
    x = np.concatenate([codes, near, [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 5e-324, 709.78, 709.79, -745.2]])
    agree(name, x, kernel(name, "float64", len(x))(x), BOUNDS[name][2] or 0.0)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "float32") for name in (*sorted(BOUNDS), "gelu", "silu", "softplus", "normcdf")),
        *((name, "float64") for name in sorted(BOUNDS) if has_function(name, DType.FLOAT64)),
        ("silu", "float64"),
    ],
)
def test_a_single_value_has_the_bits_of_a_lane(name: str, dtype: str) -> None:
    x = (np.random.default_rng(1).standard_normal(16 + 1) * 3).astype(dtype)
    whole = kernel(name, dtype, 16)(x[:16])
    single = np.concatenate([kernel(name, dtype, 1)(x[i : i + 1]) for i in (0, 7)])
    np.testing.assert_array_equal(single.view(np.uint8), whole[[0, 7]].view(np.uint8))


@pytest.mark.parametrize("name", ["gelu", "silu", "softplus", "normcdf"])
def test_activations_at_the_ends(name: str) -> None:
    ends = {"gelu": (np.nan, np.inf), "silu": (np.nan, np.inf), "softplus": (0.0, np.inf), "normcdf": (0.0, 1.0)}
    x = np.array([-np.inf, np.inf, np.nan, 0.0] * 8, np.float32)
    got = kernel(name, "float32", 32)(x)
    np.testing.assert_array_equal(got[:2], np.array(ends[name], np.float32))
    assert np.isnan(got[2])
    assert got[3] == {"gelu": 0.0, "silu": 0.0, "softplus": np.float32(math.log(2)), "normcdf": 0.5}[name]
