"""The language's value rules in compiled kernels: conversions, wrapping, division, NaN."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import roller_svc

F8 = {"float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2}
NARROW = {**F8, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def run(expression: str, **arrays: np.ndarray) -> np.ndarray:
    inputs = {name: (str(a.dtype), a.shape) for name, a in arrays.items()}
    kernel = roller_svc.compile(expression, inputs, select="model", top_k=1)
    return next(iter(kernel(**arrays).values()))


@pytest.mark.parametrize("name", sorted(NARROW))
def test_every_narrow_float_widens_exactly(name: str) -> None:
    codes = np.arange(256, dtype=np.uint8) if name in F8 else np.arange(65536, dtype=np.uint16)
    x = codes.view(NARROW[name])
    got = run("y[n] = x[n].cast(`float32`)", x=x)
    np.testing.assert_array_equal(got, x.astype(np.float32))


@pytest.mark.parametrize("name", sorted(NARROW))
def test_float32_rounds_to_nearest_even(name: str) -> None:
    rng = np.random.default_rng(7)
    scale = rng.choice([1e-9, 1e-4, 1e-2, 1.0, 100.0], 4096)
    x = (rng.standard_normal(4096) * scale).astype(np.float32)
    # halfway cases, where rounding to even shows
    codes = np.arange(0, 100, dtype=np.uint8 if name in F8 else np.uint16).view(NARROW[name]).astype(np.float32)
    x[: codes.size - 1] = (codes[1:] + codes[:-1]) / 2
    got = run(f"y[n] = x[n].cast(`{name}`)", x=x)
    np.testing.assert_array_equal(got.astype(np.float32), x.astype(NARROW[name]).astype(np.float32))


@pytest.mark.parametrize(("name", "greatest"), [("float8_e4m3fn", 448.0), ("float8_e5m2", 57344.0)])
def test_float8_saturates(name: str, greatest: float) -> None:
    x = np.array([1e9, -1e9, np.inf, -np.inf, greatest, greatest * 1.2], np.float32)
    got = run(f"y[n] = x[n].cast(`{name}`)", x=x).astype(np.float32)
    np.testing.assert_array_equal(got, np.sign(x) * greatest)


@pytest.mark.parametrize("name", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
def test_float_to_integer_truncates_and_saturates(name: str) -> None:
    limits = np.iinfo(name)
    x = np.array([1.9, -1.9, np.nan, np.inf, -np.inf, 1e30, -1e30, 100.5], np.float32)
    got = run(f"y[n] = x[n].cast(`{name}`)", x=x)
    least, greatest = int(limits.min), int(limits.max)
    minus_one = -1 if least else 0
    assert got.tolist() == [1, minus_one, 0, greatest, least, greatest, least, 100]


@pytest.mark.parametrize("name", ["int8", "int16", "int32", "int64"])
def test_integers_wrap_and_divide_by_flooring(name: str) -> None:
    least, greatest = int(np.iinfo(name).min), int(np.iinfo(name).max)
    a = np.array([greatest, least, -7, 7, -7, 5, least], name)
    b = np.array([1, -1, 2, -2, -2, 0, -1], name)
    np.testing.assert_array_equal(run("y[n] = a[n] + b[n]", a=a, b=b), a + b)
    np.testing.assert_array_equal(run("y[n] = a[n] * b[n]", a=a, b=b), a * b)
    assert run("y[n] = a[n] // b[n]", a=a, b=b).tolist() == [greatest, least, -4, -4, 3, 0, least]
    assert run("y[n] = a[n] % b[n]", a=a, b=b).tolist() == [0, 0, 1, -1, -1, 0, 0]
    assert run("y[n] = trunc_div(a[n], b[n])", a=a, b=b).tolist() == [greatest, least, -3, -3, 3, 0, least]


def test_shifts_by_the_width_or_more() -> None:
    a = np.array([1, -8, 127, -1], np.int8)
    b = np.array([8, 1, 1, 9], np.int8)
    assert run("y[n] = a[n] << b[n]", a=a, b=b).tolist() == [0, -16, -2, 0]
    assert run("y[n] = a[n] >> b[n]", a=a, b=b).tolist() == [0, -4, 63, -1]


def test_max_and_min_keep_nan_and_fmax_drops_it() -> None:
    a = np.array([1, np.nan, np.nan, 2] * 8, np.float32)
    b = np.array([np.nan, 1, np.nan, 3] * 8, np.float32)
    np.testing.assert_array_equal(run("y[n] = max(a[n], b[n])", a=a, b=b), np.maximum(a, b))
    np.testing.assert_array_equal(run("y[n] = min(a[n], b[n])", a=a, b=b), np.minimum(a, b))
    np.testing.assert_array_equal(run("y[n] = fmax(a[n], b[n])", a=a, b=b), np.fmax(a, b))
    rows = np.stack([a, b])
    np.testing.assert_array_equal(run("y[m] >=! x[m, n]", x=rows), rows.max(axis=1))


def test_no_flush_to_zero_from_a_kernel() -> None:
    tiny = np.full(64, 1e-40, np.float32)
    assert run("y[n] = x[n] * 0.5", x=tiny)[0] == np.float32(5e-41)
    assert np.float32(1e-40) * np.float32(0.5) == np.float32(5e-41)


def test_a_branch_that_is_not_taken_reads_nothing() -> None:
    x = np.arange(4, dtype=np.float32)
    got = run("y[n] = x[n - 1].when([n >= 1], -1.0) where n in 4", x=x)
    assert got.tolist() == [-1, 0, 1, 2]


def test_a_sum_accumulates_in_a_stated_wider_type() -> None:
    x = np.full((1, 1000), 100, np.int8)
    assert run("y[m]: int32 +=! x[m, k]", x=x).tolist() == [100_000]
    assert run("y[m] +=! x[m, k]", x=x).tolist() == [np.int32(100_000).astype(np.int8)]


def test_floating_arithmetic_of_an_axis_rounds_after_every_operation() -> None:
    """A fused multiply-add would give other integers."""
    n = np.arange(1000, dtype=np.float32)
    want = np.floor(n * np.float32(0.1) + np.float32(0.9))
    x = np.arange(101, dtype=np.float32)
    got = run("y[n] = x[(n.cast(`float32`) * 0.1 + 0.9).call(`floor`)] where n in 1000", x=x)
    np.testing.assert_array_equal(got, want)


def test_an_index_from_data_is_reported_in_terms_of_the_program() -> None:
    table, rows = np.zeros((4, 2), np.float32), np.array([0, 9], np.int32)
    with pytest.raises(roller_svc.errors.IndexRangeError, match=r"index 9 .* \(axis n\) of table.*: rows\[n\]"):
        run("y[n, c] = table[rows[n], c]", table=table, rows=rows)


BOTH = pytest.mark.parametrize("options", [{}, {"target": "nvidia-t4", "runtime": "emulator"}])


@BOTH
@pytest.mark.parametrize(
    ("value", "want"),
    [
        ("-x[n]", [0, 1, 2]),
        ("x[n] << 1", [0, 1, 2]),
        ("bitwise_not(x[n])", [0, 1, 2]),
        ("x[n] - x[0]", [0, 1, 2]),
    ],
)
def test_a_bool_is_0_or_1_on_the_way_too(value: str, want: list[int], options: dict[str, str]) -> None:
    x = np.array([False, True, True])
    kernel = roller_svc.compile(f"y[n] = ({value}) * n", {"x": ("bool", (3,))}, select="model", **options)
    assert kernel(x=x)["y"].tolist() == want


@BOTH
@pytest.mark.parametrize(
    ("index", "dtype", "ids"),
    [
        ("(i[n] * 100) % 5", "int8", [1, 2, 3, 4]),
        ("(i[n] - 1) % 7", "uint8", [0, 1, 2, 0]),
        ("(i[n] * 1000000) % 10", "int32", [3000, 10000, 2, 7777]),
        ("(n * n * n) % 10", "int32", [0] * 2000),
        ("(n * n * n).cast(`int64`) % 10", "int32", [0] * 2000),
    ],
)
def test_indices_from_data_wrap_and_those_of_axes_do_not(index: str, dtype: str, ids: list[int], options: dict[str, str]) -> None:
    arrays = {"x": np.arange(10, dtype=np.float32), "i": np.array(ids, dtype)}
    inputs = {"x": ("float32", (10,)), "i": (dtype, (len(ids),))}
    expression = f"y[n] = x[{index}] + i[n] * 0"
    kernel = roller_svc.compile(expression, inputs, select="model", **options)
    np.testing.assert_array_equal(kernel(**arrays)["y"], roller_svc.reference(expression, inputs, arrays)["y"])
