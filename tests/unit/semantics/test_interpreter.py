"""The reference interpreter against values computed by hand."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from roller_svc.analysis.wide_values import storage_dtype
from roller_svc.errors import ArgumentError, IndexRangeError
from roller_svc.frontend.lang import parse
from roller_svc.ir.dtype import DType
from roller_svc.ir.program import TensorProgram, TensorType
from roller_svc.semantics import interpreter
from roller_svc.semantics.inputs import random_inputs
from roller_svc.semantics.interpreter import evaluate, evaluate_sample, reference

BY_STORAGE = {storage_dtype(d): d for d in DType}


def program_of(expression: str, arrays: dict[str, np.ndarray[Any, Any]], outputs: list[str] | None = None) -> TensorProgram:
    return parse(expression, {k: TensorType(BY_STORAGE[v.dtype], v.shape) for k, v in arrays.items()}, outputs)


def run(expression: str, **arrays: Any) -> Any:
    """Return the only output of a program."""
    given = {k: np.asarray(v) for k, v in arrays.items()}
    (result,) = reference(program_of(expression, given), given).values()
    return result


def f32(*values: float) -> np.ndarray[Any, Any]:
    return np.array(values, np.float32)


def i8(*values: int) -> np.ndarray[Any, Any]:
    return np.array(values, np.int8)


def i32(*values: int) -> np.ndarray[Any, Any]:
    return np.array(values, np.int32)


class TestFloats:
    def test_matmul(self) -> None:
        a, b = np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(12, dtype=np.float32).reshape(3, 4)
        assert np.array_equal(run("C[m, n] +=! A[m, k] * B[k, n]", A=a, B=b), a @ b)

    def test_sum_accumulates_wider_than_its_type(self) -> None:
        ones = np.ones(4096, np.float16)
        assert run("s[] +=! x[n]", x=ones) == np.float16(4096)

    def test_division_by_zero(self) -> None:
        got = run("y[n] = x[n] / z[n]", x=f32(1, -1, 0), z=f32(0, 0, 0))
        assert got[0] == np.inf
        assert got[1] == -np.inf
        assert np.isnan(got[2])

    def test_percent_is_fmod(self) -> None:
        assert run("y[n] = x[n] % z[n]", x=f32(-5.5, 5.5), z=f32(2, -2)).tolist() == [-1.5, 1.5]

    def test_remainder_is_ieee(self) -> None:
        got = run("y[n] = remainder(x[n], z[n])", x=f32(5, 7, -5, 3, 5.5), z=f32(2, 2, 2, 2, 3))
        assert got.tolist() == [1.0, -1.0, -1.0, -1.0, -0.5]

    def test_remainder_of_one_argument(self) -> None:
        assert run("y[n] = remainder(x[n])", x=f32(-0.25, 1.75)).tolist() == [0.75, 0.75]

    def test_round_half_to_even(self) -> None:
        assert run("y[n] = round(x[n])", x=f32(0.5, 1.5, 2.5, -0.5)).tolist() == [0, 2, 2, 0]

    def test_floor_and_ceil_give_int32_saturated(self) -> None:
        got = run("y[n] = floor(x[n])", x=f32(-1.5, 3e9, np.nan, -3e9))
        assert got.dtype == np.int32
        assert got.tolist() == [-2, 2**31 - 1, 0, -(2**31)]
        assert run("y[n] = ceil(x[n])", x=f32(-1.5, 1.25)).tolist() == [-1, 2]

    def test_max_propagates_nan_and_fmax_does_not(self) -> None:
        x, z = f32(np.nan, 1), f32(2, np.nan)
        assert np.isnan(run("y[n] = max(x[n], z[n])", x=x, z=z)).all()
        assert run("y[n] = fmax(x[n], z[n])", x=x, z=z).tolist() == [2, 1]

    def test_max_reduction_propagates_nan(self) -> None:
        assert np.isnan(run("y[] >=! x[n]", x=f32(1, np.nan, 3)))
        assert run("y[] <=! x[n]", x=f32(1, -2, 3)) == -2

    def test_gelu_is_the_erf_form(self) -> None:
        assert run("y[n] = gelu(x[n])", x=f32(1.0))[0] == pytest.approx(0.8413447, rel=1e-6)

    def test_comparison_gives_int8_and_nan_is_true(self) -> None:
        got = run("y[n] = x[n] > 0", x=f32(1, 0, np.nan))
        assert got.dtype == np.int8
        assert got.tolist() == [1, 0, 0]
        assert run("y[n] = (x[n] & 1).cast(`int8`)", x=f32(np.nan, 0)).tolist() == [1, 0]


class TestCasts:
    def test_float_to_integer_truncates_and_saturates(self) -> None:
        got = run("y[n] = x[n].cast(`int8`)", x=f32(1.9, -1.9, 300, -300, np.nan, np.inf, -np.inf))
        assert got.tolist() == [1, -1, 127, -128, 0, 127, -128]

    def test_float_to_the_widest_integers(self) -> None:
        assert run("y[n] = x[n].cast(`int64`)", x=f32(1e30, -1e30)).tolist() == [2**63 - 1, -(2**63)]
        assert run("y[n] = x[n].cast(`uint64`)", x=f32(1e30, -5, 2.0**63)).tolist() == [2**64 - 1, 0, 2**63]

    def test_integer_to_narrower_wraps(self) -> None:
        assert run("y[n] = x[n].cast(`int8`)", x=i32(128, 257, -129)).tolist() == [-128, 1, 127]
        assert run("y[n] = x[n].cast(`uint8`)", x=i32(-1, 256)).tolist() == [255, 0]

    def test_to_float8_saturates(self) -> None:
        got = run("y[n] = x[n].cast(`float8_e4m3fn`)", x=f32(1000, -1e30, 0.3, np.nan))
        assert got.dtype == ml_dtypes.float8_e4m3fn
        assert got[:3].astype(float).tolist() == [448, -448, 0.3125]
        assert np.isnan(got[3].astype(float))
        assert run("y[n] = x[n].cast(`float8_e5m2`)", x=f32(1e9))[0].astype(float) == 57344

    def test_cast_rounds_where_it_stands(self) -> None:
        assert run("y[n] = x[n].cast(`float16`).cast(`float32`)", x=f32(1 / 3))[0] == np.float16(1 / 3)

    def test_output_in_bfloat16(self) -> None:
        x = np.array([1.00390625, 3.0], np.float32).astype(ml_dtypes.bfloat16)
        got = run("y[n] = x[n] + 0.001953125", x=x)
        assert got.dtype == ml_dtypes.bfloat16
        assert got.astype(float).tolist() == [1.0, 3.0]

    def test_bool(self) -> None:
        got = run("y[n] = x[n].cast(`bool`)", x=f32(0, 0.25, np.nan))
        assert got.dtype == np.bool_
        assert got.tolist() == [False, True, True]


class TestIntegers:
    def test_operations_wrap(self) -> None:
        assert run("y[n] = x[n] + x[n]", x=i8(100, -100)).tolist() == [-56, 56]
        assert run("y[n] = x[n] * x[n]", x=i32(65536, 46341)).tolist() == [0, 46341 * 46341 - 2**32]
        assert run("y[n] = -x[n]", x=i8(-128)).tolist() == [-128]
        assert run("y[n] = x[n] - 1", x=np.array([0], np.uint64)).tolist() == [2**64 - 1]

    def test_sum_wraps_and_a_stated_type_widens_it(self) -> None:
        x = i8(100, 100, 100)
        assert run("s[] +=! x[n]", x=x) == 300 - 256
        assert run("s[]: int32 +=! x[n]", x=x) == 300

    def test_division_floors(self) -> None:
        assert run("y[n] = x[n] // z[n]", x=i32(7, -7, 7, -7, 5), z=i32(2, 2, -2, -2, 0)).tolist() == [3, -4, -4, 3, 0]
        assert run("y[n] = x[n] % z[n]", x=i32(7, -7, 7, -7, 5), z=i32(2, 2, -2, -2, 0)).tolist() == [1, 1, -1, -1, 0]

    def test_truncating_division(self) -> None:
        x, z = i32(7, -7, 7, -6, 5), i32(2, 2, -2, 2, 0)
        assert run("y[n] = trunc_div(x[n], z[n])", x=x, z=z).tolist() == [3, -3, -3, -3, 0]
        assert run("y[n] = fmod(x[n], z[n])", x=x, z=z).tolist() == [1, -1, 1, 0, 0]

    def test_least_integer_divided_by_minus_one_wraps(self) -> None:
        assert run("y[n] = x[n] // z[n]", x=i32(-(2**31)), z=i32(-1)).tolist() == [-(2**31)]

    def test_power(self) -> None:
        got = run("y[n] = pow(x[n], z[n])", x=i32(3, 2, -1, 0, 0, -2), z=i32(4, -1, -3, -1, 0, 3))
        assert got.tolist() == [81, 0, -1, 0, 1, -8]

    def test_shifts_by_the_width_or_more(self) -> None:
        assert run("y[n] = x[n] << z[n]", x=i32(1, 1, 3), z=i32(31, 32, 33)).tolist() == [-(2**31), 0, 0]
        assert run("y[n] = x[n] >> z[n]", x=i32(-8, -8, 8), z=i32(1, 40, 40)).tolist() == [-4, -1, 0]
        high = np.array([2**63], np.uint64)
        assert run("y[n] = x[n] >> z[n]", x=high, z=np.array([63], np.uint64)).tolist() == [1]

    def test_bits(self) -> None:
        x, z = i8(12, -1), i8(10, 5)
        assert run("y[n] = bitwise_xor(x[n], z[n])", x=x, z=z).tolist() == [6, -6]
        assert run("y[n] = bitwise_not(x[n])", x=np.array([0, 255], np.uint8)).tolist() == [255, 0]

    def test_all_and_any_give_0_or_1(self) -> None:
        x = np.array([[2, 3], [0, 5], [0, 0]], np.int32)
        assert run("y[n] &=! x[n, k]", x=x).tolist() == [1, 0, 0]
        assert run("y[n] |=! x[n, k]", x=x).tolist() == [1, 1, 0]

    def test_axis_as_a_value(self) -> None:
        assert run("y[n] = n * 2 + x[n]", x=i32(1, 1, 1)).tolist() == [1, 3, 5]


class TestReading:
    def test_guarded_read_outside(self) -> None:
        got = run("y[n] = x[n - 1].when([n >= 1], 0.0) where n in 4", x=f32(1, 2, 3, 4))
        assert got.tolist() == [0, 1, 2, 3]

    def test_gather(self) -> None:
        table = np.arange(6, dtype=np.float32).reshape(3, 2)
        assert run("y[n, c] = t[ids[n], c]", t=table, ids=i32(2, 0)).tolist() == [[4, 5], [0, 1]]

    def test_gather_out_of_range_names_tensor_dimension_and_value(self) -> None:
        with pytest.raises(IndexRangeError, match=r"t: index 3 in dimension 0 is outside 0\.\.2") as caught:
            run("y[n] = t[ids[n]]", t=f32(1, 2, 3), ids=i32(0, 3))
        assert caught.value.code == "index-out-of-range"

    def test_a_branch_not_taken_is_not_read(self) -> None:
        got = run("y[n] = t[ids[n]].when([ids[n] >= 0, ids[n] < 3], -1.0)", t=f32(1, 2, 3), ids=i32(0, 3, -7))
        assert got.tolist() == [1, -1, -1]

    def test_and_does_not_read_behind_a_false_left(self) -> None:
        got = run("y[n] = (ids[n] < 3) & (t[ids[n]] > 1)", t=f32(1, 2, 3), ids=i32(0, 1, 9))
        assert got.tolist() == [0, 1, 0]

    def test_or_does_not_read_behind_a_true_left(self) -> None:
        got = run("y[n] = (ids[n] >= 3) | (t[ids[n]] > 1)", t=f32(1, 2, 3), ids=i32(0, 1, 9))
        assert got.tolist() == [0, 1, 1]

    def test_scalars(self) -> None:
        assert run("y[] = x[] * 2", x=np.array(3, np.float32)) == 6


class TestScatter:
    def test_plain(self) -> None:
        got = run("d[p[n]] =. x[n]", d=f32(0, 0, 0), p=i32(2, 0), x=f32(5, 6))
        assert got.tolist() == [6, 0, 5]

    def test_the_last_of_two_writes_wins(self) -> None:
        assert run("d[p[n]] =. x[n]", d=f32(0, 0), p=i32(1, 1), x=f32(5, 6)).tolist() == [0, 6]

    def test_the_target_array_is_not_written(self) -> None:
        d = f32(0, 0)
        run("d[p[n]] =. x[n]", d=d, p=i32(1), x=f32(5))
        assert d.tolist() == [0, 0]

    def test_reducing(self) -> None:
        d, p, x = i8(100, 1), i32(0, 0, 1), i8(20, 20, -3)
        assert run("d[p[n]] +=. x[n]", d=d, p=p, x=x).tolist() == [-116, -2]
        assert run("d[p[n]] *=. x[n]", d=d, p=p, x=x).tolist() == [64, -3]  # 100 * 20 * 20 wraps
        assert run("d[p[n]] >=. x[n]", d=d, p=p, x=x).tolist() == [100, 1]
        assert run("d[p[n]] <=. x[n]", d=d, p=p, x=x).tolist() == [20, -3]

    def test_nothing_is_written_nor_indexed_where_the_condition_fails(self) -> None:
        got = run("d[p[n]] =. x[n].when([p[n] < 2])", d=f32(0, 0), p=i32(1, 99), x=f32(5, 6))
        assert got.tolist() == [0, 5]

    def test_out_of_range(self) -> None:
        with pytest.raises(IndexRangeError, match=r"d: index -1 in dimension 0"):
            run("d[p[n]] =. x[n]", d=f32(0, 0), p=i32(-1), x=f32(5))

    def test_the_value_takes_the_type_of_the_target(self) -> None:
        assert run("d[p[n]] =. x[n]", d=i8(0, 0), p=i32(0), x=f32(300.5)).tolist() == [127, 0]


class TestStatements:
    def test_softmax(self) -> None:
        x = np.array([[0, 1], [1000, 1000]], np.float32)
        got = run("m[a] >=! x[a, b]; e[a, b] = exp(x[a, b] - m[a]); s[a] +=! e[a, b]; y[a, b] = e[a, b] / s[a]", x=x)
        assert got == pytest.approx(np.array([[0.26894142, 0.73105858], [0.5, 0.5]]), rel=1e-6)

    def test_reads_after_a_scatter_see_it(self) -> None:
        got = run("d[p[n]] =. x[n]; y[m] = d[m] * 2", d=f32(1, 1), p=i32(0), x=f32(5))
        assert got.tolist() == [10, 2]

    def test_blocks_cover_the_whole(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rng = np.random.default_rng(0)
        a, b = rng.uniform(-1, 1, (5, 7, 3)), rng.uniform(-1, 1, (3, 7, 4))
        monkeypatch.setattr(interpreter, "BLOCK_POINTS", 5)
        got = run("C[m, n] +=! A[m, k, j] * B[j, k, n]", A=a, B=b)
        assert got == pytest.approx(np.einsum("mkj,jkn->mn", a, b), rel=1e-12)


class TestArguments:
    def test_missing_unknown_and_wrong_arrays(self) -> None:
        program = program_of("y[n] = x[n]", {"x": f32(1, 2)})
        with pytest.raises(ArgumentError, match="x is missing"):
            reference(program, {})
        with pytest.raises(ArgumentError, match="no input z"):
            reference(program, {"x": f32(1, 2), "z": f32(1)})
        with pytest.raises(ArgumentError, match="expected float32"):
            reference(program, {"x": np.zeros(2)})


class TestSampled:
    def test_equals_the_whole_and_has_the_corners(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rng = np.random.default_rng(1)
        arrays = {
            "A": rng.uniform(-1, 1, (64, 8)).astype(np.float32),
            "B": rng.uniform(-1, 1, (8, 64)).astype(np.float32),
        }
        text = "C[m, n] +=! A[m, k] * B[k, n]; s[m] >=! C[m, n]; D[m, n] = exp(C[m, n] - s[m])"
        program = program_of(text, arrays)
        whole = evaluate(program, arrays)["D"].wide.reshape(-1)
        monkeypatch.setattr(interpreter, "WHOLE_POINTS", 16)
        some = evaluate_sample(program, arrays, 100)["D"]
        assert some.indices is not None
        assert len(some.indices) == len(set(some.indices.tolist())) >= 100
        assert {0, 63, 64 * 63, 64 * 64 - 1} <= set(some.indices.tolist())
        assert some.wide == pytest.approx(whole[some.indices], rel=1e-12)

    def test_a_sample_that_depends_on_every_point_is_rejected(self) -> None:
        arrays = {"x": np.ones((64, 64), np.float32)}
        program = program_of("s[] +=! x[m, n]; y[m] = x[m, 0] / s[]", arrays)
        with pytest.raises(ArgumentError, match="too many points of s") as caught:
            evaluate_sample(program, arrays, 5, limit_points=1000)
        assert caught.value.code == "reference-too-large"

    def test_guarded_reads_of_an_intermediate(self, monkeypatch: pytest.MonkeyPatch) -> None:
        arrays = {"x": np.arange(32, dtype=np.float32)}
        program = program_of("a[n] = x[n] * 2; y[n] = a[n - 1].when([n >= 1], 0.0) where n in 32", arrays)
        monkeypatch.setattr(interpreter, "WHOLE_POINTS", 1)
        some = evaluate_sample(program, arrays, 5)["y"]
        assert some.indices is not None
        assert some.wide.tolist() == [2.0 * (i - 1) if i else 0.0 for i in some.indices.tolist()]


def test_the_least_integer_is_found_before_it_is_converted() -> None:
    program = parse("y[a]: uint8 <=! x[a, k]", {"x": TensorType(DType.INT8, (1, 3))})
    assert reference(program, {"x": np.array([[-1, 3, 2]], np.int8)})["y"].tolist() == [255]


@pytest.mark.parametrize(
    ("body", "dtype"),
    [
        ("y[i, j] +=! x[i, o].when([o <= j], 0.0)", "float32"),
        ("y[i, j] +=! exp(x[i, o]).when([o > j], 0.0)", "float16"),
        ("y[i, j] *=! (x[i, o] * 2.0).when([o < j], 1.0)", "float32"),
        ("y[i, j] >=! exp(x[i, o]).when([o >= j], const(`-inf`))", "float16"),
        ("y[i, j] <=! x[i, o].when([o < j], 127)", "int8"),
        ("y[i, j] *=! x[i, o].when([o <= j], 1)", "int64"),
        ("y[i, j] +=! x[i, o].when([o <= j], 0)", "uint8"),
    ],
)
def test_a_scan_in_one_pass_is_the_reduction_of_each_element(body: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = parse(f"{body} where j in 67", {"x": TensorType(DType(dtype), (5, 67))})
    arrays = random_inputs(program, 3)
    if dtype == "float32":
        arrays["x"][1, 5], arrays["x"][1, 9], arrays["x"][2, 9] = np.inf, -np.inf, np.nan
    one_pass = evaluate(program, arrays)["y"]
    monkeypatch.setattr("roller_svc.semantics.interpreter.match_scan", lambda statement: None)
    each = evaluate(program, arrays)["y"]
    np.testing.assert_allclose(one_pass.wide.astype(float), each.wide.astype(float), rtol=1e-12)
    assert (one_pass.error is None) == (each.error is None)
    if one_pass.error is not None and each.error is not None:
        np.testing.assert_allclose(one_pass.error, each.error, rtol=1e-6, atol=1e-12)
