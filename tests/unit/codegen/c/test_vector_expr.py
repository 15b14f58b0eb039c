"""Vector forms of expressions: every operation and pair of types against the interpreter, on special values too."""

from __future__ import annotations

import ctypes
import mmap
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from sampling import every

import roller_svc
from roller_svc.analysis.wide_values import storage_dtype
from roller_svc.codegen.c.vector.loops import vector_cover
from roller_svc.errors import IndexRangeError
from roller_svc.frontend.lang import parse
from roller_svc.hardware.catalog import load
from roller_svc.hardware.yaml_text import to_yaml
from roller_svc.ir.dtype import DType
from roller_svc.ir.hardware import UnitKind
from roller_svc.ir.program import TensorType
from roller_svc.semantics.compare import agrees
from roller_svc.semantics.interpreter import evaluate, reference

TARGETS = pytest.mark.parametrize("target", ["local", "cpu-x86-avx2"])
FLOATS = ("float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "bool")
# every length from nothing but a tail to beyond a vector of bytes, and two of bytes
LENGTHS = (*range(1, 36), 63, 64, 65, 67, 127, 129)
Arrays = dict[str, np.ndarray]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Overflow and NaN are what is tested here."""
    with np.errstate(all="ignore"):
        yield


def values(dtype: str, count: int, seed: int = 0) -> np.ndarray:
    """Random values of all magnitudes, the special ones among them."""
    rng = np.random.default_rng(seed)
    to = storage_dtype(DType(dtype))
    if dtype == "bool":
        return rng.integers(0, 2, count).astype(bool)
    if dtype in INTEGERS:
        limits = np.iinfo(to)
        drawn = rng.integers(limits.min, limits.max, count, dtype=to, endpoint=True)
        small = rng.integers(0, 10, count).astype(to)
        drawn = np.where(rng.random(count) < 0.5, drawn, small)
        special = np.array([limits.min, limits.max, 0, 1], to)
    else:
        drawn = (rng.standard_normal(count) * 10.0 ** rng.integers(-3, 4, count)).astype(to)
        numbers = [0.0, -0.0, np.nan, np.inf, -np.inf, 1e-40, 0.5, -1.5, 2.5, 255.7, 3e9]
        special = np.array(numbers, np.float32).astype(to)
        special = special if dtype != "float8_e4m3fn" else special[:1]
    places = rng.permutation(count)[: min(count // 2, len(special))]
    drawn[places] = special[: len(places)]
    return drawn


def check(bodies: Sequence[str], arrays: Arrays, target: str, *, is_vector: bool = True) -> None:
    """All of them in one program, y0, y1, ...: a compile costs more than a statement."""
    types = {name: TensorType(DType(str(a.dtype)), a.shape) for name, a in arrays.items()}
    text = "; ".join(body.replace("y[", f"y{i}[", 1) for i, body in enumerate(bodies))
    outputs = tuple(f"y{i}" for i in range(len(bodies)))
    program = parse(text, types, outputs)
    signature = {name: (t.dtype.value, t.shape) for name, t in types.items()}
    kernel = roller_svc.compile(text, signature, select="model", top_k=1, target=target, outputs=outputs)
    verdict = agrees(program, kernel(**arrays), evaluate(program, arrays))
    assert verdict.ok, f"{bodies[int(verdict.output[1:])]} {signature}: {verdict}\n{kernel.source}"
    assert not (is_vector and "for (long lane" in kernel.source), kernel.source


NESTED = (
    "a[n] // (b[n] % c[n])", "trunc_div(a[n], trunc_div(b[n], c[n] % (a[n] // (b[n] % a[n]))))",
    "(a[n] % b[n]) // (b[n] // (c[n] % (a[n] // b[n])))", "a[n] << ((b[n] << (c[n] & 1)) & 7)",
    "a[n] >> (b[n] % c[n] & 7)", "a[n] % (b[n] + b[n] % c[n])",
    "max(a[n] // b[n], a[n] // (a[n] % 7))",
)  # fmt: skip


@pytest.mark.parametrize("dtype", ["uint16", "int32", "int64"])
@TARGETS
def test_operators_without_a_vector_form_are_nested(dtype: str, target: str) -> None:
    """In either operand, at any depth."""
    arrays = {name: np.maximum(values(dtype, 140, seed), 1) for seed, name in enumerate("abc")}
    check([f"y[n] = {body}" for body in NESTED], arrays, target, is_vector=False)
    check([f"y[] +=! {body}" for body in NESTED], arrays, target, is_vector=False)


@pytest.mark.parametrize("dtype", ["uint32", "int32"])
@TARGETS
def test_quotients_of_zero_and_one_are_no_masks(dtype: str, target: str) -> None:
    """gcc 12 at -O3 took lanes of a vector that are 0 or 1 for a comparison."""
    arrays = {"a": (np.arange(8 * 4 * 9 * 2) % 9).astype(dtype).reshape(8, 4, 9, 2)}
    body = "clip(trunc_div(a[i, j, k, l], a[i, j, k, l]), 0, 9)"
    check([f"y[l, k, j, i] = {body}"], arrays, target, is_vector=False)


def test_vector_cover_is_exact_or_overlaps_at_the_end() -> None:
    assert vector_cover(37, 16, 4, overlapping=False) == ((0, 16), (16, 16), (32, 4), (36, 1))
    assert vector_cover(37, 16, 4, overlapping=True) == ((0, 16), (16, 16), (29, 8))
    assert vector_cover(3, 16, 4, overlapping=True) == ((0, 1), (1, 1), (2, 1))
    for extent in range(1, 70):
        for overlapping in (False, True):
            cover = vector_cover(extent, 16, 4, overlapping=overlapping)
            points = [first + i for first, lanes in cover for i in range(lanes)]
            assert set(points) == set(range(extent))
            assert overlapping or len(points) == extent
            assert all(lanes == 1 or 4 <= lanes <= 16 for _, lanes in cover)


@TARGETS
@pytest.mark.parametrize("target_type", every(3, [*FLOATS, *INTEGERS]))
def test_every_type_becomes_every_other(target_type: str, target: str) -> None:
    sources = [t for t in (*FLOATS, *INTEGERS) if t != target_type]
    arrays = {f"x{i}": values(t, 137, i) for i, t in enumerate(sources)}
    bodies = [f"y[n] = {name}[n].cast(`{target_type}`)" for name in arrays]
    check(bodies, arrays, target, is_vector=False)


@TARGETS
def test_bytes_whose_value_is_needed_at_once_saturate(target: str) -> None:
    """No elements are stored between: ends, halves beyond them, infinities and NaN as if they were."""
    ends = [-129.0, -128.5, -128.0, -127.5, -1.0, -0.5, -0.0, 0.5, 126.5, 127.0, 127.5, 128.0, 254.5, 255.0, 255.5, 256.0,
            -32769.0, -32768.5, 32767.5, 32768.0, 65535.5, 65536.0, 2147483648.0, -2147483904.0, 1e30, -1e30,
            np.inf, -np.inf, np.nan]  # fmt: skip
    x = np.array([*ends, *np.linspace(-300, 300, 115)], np.float32)
    types = ("int8", "uint8", "int16", "uint16")
    bodies = [f"y[n] = x[n].cast(`{dtype}`){wide}" for dtype in types for wide in ("", ".cast(`int32`) - 7")]
    check([*bodies, *(body.replace("x[n]", "d[n]") for body in bodies)], {"x": x, "d": x.astype(np.float64)}, target)


@TARGETS
def test_rounded_floats_plus_bytes_saturate(target: str) -> None:
    """One instruction rounds and converts: ties, ends, numbers beyond int32, infinities and NaN, for every zero point."""
    ends = [-2147483904.0, -256.5, -255.5, -1.5, -0.5, -0.0, 0.49999997, 0.5, 1.5, 2.5, 126.5, 127.5, 254.5, 255.5, 256.5,
            8388609.0, 2147483648.0, 3e9, 1e30, -1e30, np.inf, -np.inf, np.nan]  # fmt: skip
    x = np.repeat(np.array([*ends, *np.linspace(-400, 400, 41)], np.float32), 6)
    u = np.resize(np.array([0, 1, 127, 128, 254, 255], np.uint8), x.size)
    arrays = {"x": x, "u": u, "s": (u ^ 128).view(np.int8), "a": np.uint8([131]), "b": np.int8([-5])}
    rounded = [f"(x[n].call(`round`) + {zero}).cast(`{dtype}`)" for zero in ("u[n]", "s[n]", "a[0]", "b[0]")
               for dtype in ("uint8", "int8")]  # fmt: skip
    check([f"y[n] = {body}{wide}" for body in rounded for wide in ("", ".cast(`int32`) - 7")], arrays, target)
    double = ["y[n] = (d[n].call(`round`) + u[n]).cast(`uint8`)", "y[n] = (x[n].call(`round`) + d[n]).cast(`int8`)"]
    check(double, {"x": x, "d": x.astype(np.float64) + 2.0**-30, "u": u}, target)


UNARY = (
    "-x[n]", "abs(x[n])", "sqrt(x[n])", "rsqrt(x[n])", "1.0 / x[n]", "x[n].call(`sign`)", "relu(x[n])", "floor(x[n])",
    "ceil(x[n])", "x[n].call(`round`)", "x[n].call(`trunc`)", "isnan(x[n])", "isinf(x[n])", "x[n] * x[n] + 1.0",
    "max(x[n], 0.5)", "min(0.5, x[n])", "clip(x[n], 0.0 - 1.0, 1.0)", "x[n] > 0.5", "~(x[n] <= 0.5)",
    "x[n].when([x[n] > 0.0, x[n] < 2.0], 0.0 - x[n])", "(x[n] > 0.0) | (x[n] < 0.0 - 1.0)", "tan(x[n])", "atan(x[n])",
)  # fmt: skip


BINARY = (
    "a[n] + b[n]", "a[n] - b[n]", "a[n] * b[n]", "a[n] / b[n]", "max(a[n], b[n])", "min(a[n], b[n])",
    "fmax(a[n], b[n])", "fmin(a[n], b[n])", "fma(a[n], b[n], a[n])", "a[n] == b[n]", "a[n] != b[n]", "a[n] >= b[n]",
    "atan2(a[n], b[n])", "fmod(a[n], b[n])", "a[n].when([a[n] < b[n]], b[n])", "pow(abs(a[n]), 1.5)",
)  # fmt: skip


@TARGETS
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_operators_of_one_float(dtype: str, target: str) -> None:
    check([f"y[n] = {value}" for value in UNARY], {"x": values(dtype, 140)}, target)


@TARGETS
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_operators_of_two_floats(dtype: str, target: str) -> None:
    bodies = [f"y[n] = {value}" for value in BINARY]
    check(bodies, {"a": values(dtype, 100), "b": values(dtype, 100, 1)}, target)


@TARGETS
@pytest.mark.parametrize("dtype", every(3, INTEGERS))
def test_operators_of_integers(dtype: str, target: str) -> None:
    bodies = [
        "a[n] + b[n]", "a[n] - b[n]", "a[n] * b[n]", "-a[n]", "a[n] // b[n]", "a[n] % b[n]", "max(a[n], b[n])",
        "min(a[n], b[n])", "a[n] < b[n]", "a[n] == b[n]", "bitwise_and(a[n], b[n])", "bitwise_or(a[n], b[n])",
        "bitwise_xor(a[n], b[n])", "bitwise_not(a[n])", "a[n] << b[n]", "a[n] >> b[n]",
        "a[n].when([a[n] > b[n]], b[n])", "(a[n] > b[n]) & (b[n] < 1)", "a[n].when([n % 2 == 0], b[n])",
    ]  # fmt: skip
    if dtype != "bool":
        bodies += ["a[n] // 4", "a[n] % 8", "a[n] // 7", "a[n] % 7", "a[n] << 3", "a[n] >> 2", "a[n] + n"]
    arrays = {"a": values(dtype, 139), "b": values(dtype, 139, 1)}
    check([f"y[n] = {body}" for body in bodies], arrays, target, is_vector=False)


@TARGETS
@pytest.mark.parametrize(
    "case",
    [
        ("y[n] = a[n].cast(`float32`) * b[n]", "uint8", "float32"),
        ("y[n] = a[n] + b[n]", "float16", "float32"),
        ("y[n] = a[n].cast(`float64`) + b[n].cast(`float64`)", "float32", "int64"),
        ("y[n] = (a[n] > 0.0).cast(`int64`) * b[n]", "float32", "int64"),
        ("y[n] = a[n].when([b[n] > 3], 0.0)", "float16", "int8"),
        ("y[n] = a[n].when([b[n]], 0.0)", "float64", "bool"),
        ("y[n] = a[n] * b[n].cast(`float16`)", "float16", "int8"),
        ("y[n] = a[n].when([b[n] < 0.5], b[n])", "bfloat16", "bfloat16"),
        ("y[n] = (a[n] + b[n]) & 1 == 1", "int16", "int16"),
    ],
)
def test_widths_mix(case: tuple[str, str, str], target: str) -> None:
    expression, a, b = case
    check([expression], {"a": values(a, 140), "b": values(b, 140, 1)}, target)


@TARGETS
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32"])
def test_a_quotient_that_is_a_truth_value_is_widened_as_a_number(dtype: str, target: str) -> None:
    """x // x is 0 or 1, which gcc 12 put into a vector as 0 or -1."""
    arrays = {"x": values(dtype, 37), "b": values("int64", 37, 1)}
    check(["y[n] = b[n] + (x[n] // x[n])", "y[n] = b[n] + trunc_div(x[n], x[n])"], arrays, target, is_vector=False)


@pytest.mark.slow
@TARGETS
def test_every_length_has_its_tail(target: str) -> None:
    for dtype in ("float32", "float64", "int8", "float16"):
        arrays = {f"x{i}": values(dtype, count) for i, count in enumerate(LENGTHS)}
        check([f"y[n] = max({x}[n] * 2, {x}[n] + 1)" for x in arrays], arrays, target, is_vector=False)


PLACES = (
    "y[m, n] = x[m, 2 * n] where n in 35", "y[m, n] = x[m, 2 * n + 1] where n in 35",
    "y[m, n] = x[m, 70 - n] where n in 70",
    "y[m, n] = x[m, 3 * n] where n in 20", "y[m, n] = x[m, n // 2] where n in 140",
    "y[m, n] = x[m, n % 7] where n in 100",
    "y[m, n] = x[n, m] where m in 71, n in 6", "y[m, n] = x[m, n - 1].when([n >= 1, n < 60], 0.25) where n in 72",
    "y[m, n] = x[m, 2 * n - 3].when([2 * n >= 3, 2 * n < 74], 0.25) where n in 50", "y[m, n] = x[m, 3] + x[m, n]",
    "y[m, n] = x[m, n].when([x[m, n] > 0.0], x[m, n + 1].when([n < 70], 0.5))",
    "y[m, n] = x[m, n - 2].when([~(n < 2), (n < 40) | (n > 60)], x[m, n + 1].when([n < 70], 1.5)) where n in 73",
    "y[m] +=! x[m, n] * x[m, 70 - n]", "y[m] >=! x[m, n].when([n > 3], 0.0)", "y[n] <=! x[m, n]",
    "y[n] +=! x[m, n].cast(`float64`)", "y[m] +=! exp(x[m, n] - 3.0) where n in 71",
)  # fmt: skip


@TARGETS
def test_vector_accesses_of_all_kinds(target: str) -> None:
    x = np.random.default_rng(3).standard_normal((6, 71)).astype(np.float32)
    check(PLACES, {"x": x}, target, is_vector=False)


def readable_page() -> np.ndarray:
    """Return a page between two that cannot be read: reading these would end the process."""
    libc = ctypes.CDLL(None, use_errno=True)
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 3 * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for at in (start, start + 2 * page):
        assert libc.mprotect(ctypes.c_void_p(at), page, 0) == 0
    return np.frombuffer(memory, np.uint8, page, page)


@TARGETS
def test_what_is_not_wanted_is_not_read(target: str) -> None:
    x = readable_page().view(np.float32)
    n = len(x)
    x[:] = np.arange(n)
    kernel = roller_svc.compile(
        f"y[n] = x[n - 1].when([n >= 1, n <= {n}], -1.0) + x[n].when([n < {n}], 0.0) where n in {n + 2}",
        {"x": ("float32", (n,))},
        select="model",
        top_k=1,
        target=target,
    )
    got = kernel(x=x)["y"]
    want = np.concatenate([[-1.0], x, [-1.0]]) + np.concatenate([x, [0.0, 0.0]])
    np.testing.assert_array_equal(got, want.astype(np.float32))


@TARGETS
def test_indices_that_are_not_wanted_are_not_read(target: str) -> None:
    """The mask bounds the index, so that the table's element always exists; the masked word does not."""
    q = readable_page().view(np.int32)[3:]  # the last vector begins within and ends outside
    n = len(q)
    q[:] = np.arange(n)
    t = np.arange(64, dtype=np.float32)
    kernel = roller_svc.compile(
        f"y[n] = t[bitwise_and(q[n], 63)].when([n < {n}], -1.0) where n in {n + 3}",
        {"q": ("int32", (n,)), "t": ("float32", (64,))},
        select="model",
        top_k=1,
        target=target,
    )
    np.testing.assert_array_equal(kernel(q=q, t=t)["y"], np.concatenate([t[q % 64], [-1.0] * 3]).astype(np.float32))


def at_the_end(count: int, dtype: str) -> np.ndarray:
    """Numbers at the end of a page that nothing readable follows."""
    page = readable_page().view(storage_dtype(DType(dtype)))
    page[:] = (np.arange(len(page)) % 100).astype(page.dtype)
    return page[-count:]


# Neither masked loads nor gathers: the helpers' plain forms.
AVX2 = load("cpu-x86-avx2")
UNITS = tuple(replace(unit, shape=(2, 4)) if unit.kind is UnitKind.DOT else unit for unit in AVX2.units)
WITHOUT_GATHERS = to_yaml(replace(AVX2, vector_bytes=16, units=UNITS)).replace("x86-64-v3", "x86-64-v2")
WIDTHS = ("float32", "float64", "float16", "int8", "int32", "int64", "uint16")
# Lanes whose guard fails are beyond the page, before it, or on a place that another tensor has; rows are, too.
PARTLY_GUARDED = (
    "y[n] = x[n * 3].when([n * 3 < {size}], 1) where n in {size}",
    "y[n] = x[300 - n * 5].when([n * 5 > 300 - {size}, n <= 60], 1) where n in {size}",
    "y[i, n] = x[i * 24 + n * 3].when([i * 24 + n * 3 < {size}], 1) where i in 40, n in 70",
    "y[n] = x[k[n]].when([k[n] >= 0, k[n] < {size}], 1)",
    "y[n] = x[k[n + 9]].when([n + 9 < {keys}, k[min(n + 9, {keys} - 1)] >= 0, k[min(n + 9, {keys} - 1)] < {size}], 1)"
    " where n in {keys}",
    "y[n] = x[{size} - 1 - k[n] // 2].when([k[n] // 2 >= 0, k[n] // 2 < {size}], 1)",
)
# A value that all lanes share, below guards that some, all and no lanes pass.
SHARED = (
    "y[j] +=! x[o * 7].when([o <= j, o * 7 < {size}], 0) where j in 70, o in 50",
    "y[i, j] +=! x[i * 9 + o].when([o <= j, i * 9 + o < {size}], 0) where i in 30, j in 37, o in 29",
    "y[j] +=! (x[o * 7] + x[o * 7 - 7]).when([o <= j, o >= 1, o * 7 < {size}], 0) where j in 70, o in 50",
    "y[j] +=! x[j].when([o + j < 9, o * 40 + j < {size}, x[o * 40] > x[o * 40]], x[j]) where j in 9, o in 60",
)


def check_at_the_end(text: str, dtype: str, target: str, helper: str) -> None:
    x = at_the_end(211, dtype)
    k = np.random.default_rng(3).integers(-300, 500, 150).astype(np.int32)
    text = text.format(size=len(x), keys=len(k))
    arrays = {"x": x} if "k[" not in text else {"x": x, "k": k}
    types = {name: TensorType(DType(str(a.dtype)), a.shape) for name, a in arrays.items()}
    shapes = {name: (t.dtype.value, t.shape) for name, t in types.items()}
    hardware = WITHOUT_GATHERS if target == "v2" else None
    kernel = roller_svc.compile(text, shapes, select="model", top_k=1, target="local" if hardware else target, hardware=hardware)
    program = parse(text, types, ("y",))
    verdict = agrees(program, kernel(**arrays), evaluate(program, arrays))
    assert verdict.ok, f"{text}: {verdict}\n{kernel.source}"
    assert f"{helper}_v" in kernel.source


@pytest.mark.parametrize("target", ["local", "cpu-x86-avx2", "v2"])
@pytest.mark.parametrize("dtype", every(2, WIDTHS))
def test_gathers_do_not_touch_what_their_guards_exclude(dtype: str, target: str) -> None:
    for text in PARTLY_GUARDED:
        check_at_the_end(text, dtype, target, "gathered")


@pytest.mark.parametrize("target", ["local", "cpu-x86-avx2", "v2"])
@pytest.mark.parametrize("dtype", every(2, WIDTHS))
def test_shared_values_are_not_read_where_no_lane_needs_them(dtype: str, target: str) -> None:
    for text in SHARED:
        check_at_the_end(text, dtype, target, "any")


@TARGETS
@pytest.mark.parametrize("dtype", ["int8", "uint32", "int32", "int64", "uint64"])
def test_an_index_out_of_range_is_reported_where_its_guard_holds(dtype: str, target: str) -> None:
    to, x = np.dtype(dtype), np.arange(100, dtype=np.float32)
    k = np.arange(90).astype(to)
    beyond = np.iinfo(to).max
    kernel = roller_svc.compile(
        "y[n] = x[k[n]].when([w[n] > 0], -1.0)",
        {"x": ("float32", (100,)), "k": (dtype, (90,)), "w": ("int32", (90,))},
        select="model",
        top_k=1,
        target=target,
    )
    w = np.arange(90, dtype=np.int32) % 3
    for wrong in (beyond, np.iinfo(to).min if to.kind == "i" else beyond - 1):
        for place in (0, 33, 39, 89):
            k[place] = wrong
            w[place] = 0
            np.testing.assert_array_equal(kernel(x=x, k=k, w=w)["y"], np.where(w > 0, x[np.clip(k, 0, 99).astype(int)], -1))
            w[place] = 1
            with pytest.raises(IndexRangeError, match=f"index {np.array(wrong).astype(np.int64)} ") as raised:
                kernel(x=x, k=k, w=w)
            assert "k[n]" in raised.value.message
            k[place] = place


@TARGETS
def test_quotients_by_what_is_not_wanted_do_not_trap(target: str) -> None:
    arrays = {"x": values("int32", 40), "s": np.array([3, 0, -1, 7], np.int32)}
    check(["y[n, k] = (x[n] // s[k + 1]).when([n < 20 + k, k + 1 < 4], 5) where k in 9, n in 40"], arrays, target, is_vector=False)
    check(["y[k, n] = (x[n] // s[k + 1]).when([n < 20 + k, k + 1 < 4], 5) where k in 9, n in 40"], arrays, target, is_vector=False)


def test_halves_round_as_numpy_does() -> None:
    codes = np.arange(1 << 16, dtype=np.uint16)
    halves = codes.view(np.float16)
    up = np.nextafter(halves.astype(np.float32), np.float32(np.inf))
    middle = ((halves[:-1].astype(np.float64) + halves[1:].astype(np.float64)) / 2).astype(np.float32)
    for name, type_ in (("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16)):
        for x in (up, middle, halves.astype(np.float32)):
            inputs = {"x": ("float32", x.shape)}
            kernel = roller_svc.compile(f"y[n] = x[n].cast(`{name}`)", inputs, select="model", top_k=1)
            want = x.astype(type_)
            np.testing.assert_array_equal(kernel(x=x)["y"].astype(np.float32), want.astype(np.float32))


@TARGETS
def test_shifts_by_what_is_unrolled_are_shifts_of_vectors(target: str) -> None:
    """Eight weights of four bits in a word, as quantised layers keep them."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal(64).astype(np.float32)
    q = rng.integers(-(2**31), 2**31, (8, 96), dtype=np.int64).astype(np.int32)
    kernel = roller_svc.compile(
        "y[N] +=! x[S] * bitwise_and(q[S // 8, N] >> S % 8 * 4, 15).cast(`float32`) where S in 64",
        {"x": ("float32", x.shape), "q": ("int32", q.shape)},
        select="model",
        top_k=1,
        target=target,
    )
    assert "shr_i32(" not in kernel.source
    weights = (q[np.arange(64) // 8] >> (np.arange(64) % 8 * 4)[:, None]) & 15
    np.testing.assert_allclose(kernel(x=x, q=q)["y"], x @ weights.astype(np.float32), rtol=1e-5, atol=1e-4)


FEW_BITS = (
    "(bitwise_and(x[n], 7).cast(`float32`) - 3.0) * 0.75", "bitwise_and(x[n] >> 2, 7).cast(`bfloat16`) * 1.125",
    "bitwise_and(x[n] >> 1, 5).cast(`float32`) / 3.0", "bitwise_and(x[n], 3) * bitwise_and(x[n], 3).cast(`int32`)",
    "(x[n] % 8).cast(`float32`) * 0.625", "(x[n] % 8 - 4).cast(`float32`).when([x[n] % 8 > 2], 0.0 - 1.0)",
    "max(bitwise_and(x[n], 6).cast(`float32`) * 0.375, 1.0)",
    "(bitwise_and(x[n], 7).cast(`float32`) * 1.75).cast(`float16`)",
)  # fmt: skip
FOUR_BITS = tuple(body.replace("7)", "15)").replace("% 8", "% 16") for body in FEW_BITS)


@TARGETS
@pytest.mark.parametrize("bodies", [FEW_BITS, FOUR_BITS], ids=["three", "four"])
@pytest.mark.parametrize("dtype", every(3, [t for t in INTEGERS if t != "bool"]))
def test_functions_of_few_bits_are_what_they_were(dtype: str, bodies: tuple[str, ...], target: str) -> None:
    """Looked up where a vector has a lane for each of their values; to the last bit what the interpreter says."""
    x, names = values(dtype, 139), tuple(f"y{i}" for i in range(len(bodies)))
    text = "; ".join(f"{name}[n] = {body}" for name, body in zip(names, bodies, strict=True))
    program = parse(text, {"x": TensorType(DType(dtype), x.shape)}, names)
    kernel = roller_svc.compile(
        text,
        {"x": (dtype, x.shape)},
        select="model",
        top_k=1,
        target=target,
        outputs=names,
    )
    got, want = kernel(x=x), reference(program, {"x": x})
    for name in names:
        np.testing.assert_array_equal(got[name], want[name], err_msg=f"{name} of {text}\n{kernel.source}")


def printed(body: str, dtype: str, target: str) -> str:
    inputs = {"x": (dtype, (4096,)), "s": ("float32", (4096,))}
    return roller_svc.compile(f"y[n] = {body} + s[n]", inputs, select="model", top_k=1, target=target).source


@pytest.mark.parametrize(
    ("body", "dtype", "most"),
    [
        ("bitwise_and(x[n] >> 4, 15).cast(`float32`)", "int32", 16),
        ("(x[n] >> 4).cast(`float32`)", "uint8", 16),
        ("(x[n] % 16).cast(`float32`)", "int8", 16),
        ("bitwise_and(x[n], 7).cast(`float32`)", "int32", 8),
        ("bitwise_and(x[n], 16).cast(`float32`)", "int32", 0),
        ("(x[n] >> 4).cast(`float32`)", "int8", 0),
        ("(bitwise_and(x[n], 15) + x[n]).cast(`float32`)", "int32", 0),
        ("bitwise_and(n, 15).cast(`float32`)", "int32", 0),
        ("(bitwise_and(x[n], 15) * bitwise_and(x[n] >> 4, 15)).cast(`float32`)", "int32", 0),
        ("bitwise_and(x[n], 15).cast(`float32`) * (x[n] % 16).cast(`float32`)", "int32", 16),
    ],
)
def test_tables_have_a_lane_for_each_value(body: str, dtype: str, most: int) -> None:
    """`most`: entries that the function needs, 0 where it is none of few bits of one value."""
    for target, lanes in (("cpu-x86-avx512", 16), ("cpu-x86-avx2", 8)):
        source = printed(body, dtype, target)
        assert ("looked_up_v" in source) == (0 < most <= lanes), source


# Rows of words, along which 3 to 64 lanes share an element: maps over k of q[n, k // shared].
WORD_ROWS = {
    "int4": ("(q[n, k // 8] >> (k % 8 * 4)).call(`bitwise_and`, [15]).cast(`float32`)", {"q": ("int32", 8)}),
    "high nibbles first": (
        "(q[n, k // 2] >> ((1 - k % 2) * 4)).call(`bitwise_and`, [15]).cast(`float32`)", {"q": ("uint8", 2)}),
    "bits of unsigned words": ("(q[n, k // 32] >> (k % 32)).call(`bitwise_and`, [1])", {"q": ("uint32", 32)}),
    "int2": ("(q[n, k // 8] >> (k % 8 * 2)).call(`bitwise_and`, [3]) * 2", {"q": ("int16", 8)}),
    "a scale of three": ("q[n, k // 3] * 2", {"q": ("int32", 3)}),
    "float16 by a table": (
        "t[(q[n, k // 8] >> (k % 8 * 4)).call(`bitwise_and`, [15])] * s[n, k // 16]",
        {"q": ("int32", 8), "s": ("float16", 16), "t": ("float16", 0)}),
    "float8 by a table": (
        "t[(q[n, k // 2].cast(`int32`) >> (k % 2 * 4)).call(`bitwise_and`, [15])].cast(`float32`) "
        "* s[n, k // 32].cast(`float32`)", {"q": ("uint8", 2), "s": ("float8_e4m3fn", 32), "t": ("float8_e5m2", 0)}),
    "float32 by a table, powers of two": (
        "t[(q[n, k // 8] >> (k % 8 * 4)).call(`bitwise_and`, [15])] * exp2(s[n, k // 32].cast(`float32`) - 127.0)",
        {"q": ("int32", 8), "s": ("uint8", 32), "t": ("float32", 0)}),
    "remainders of quotients": ("q[n, k // 4 % 16] + q[n, k % 16]", {"q": ("int32", 4)}),
}  # fmt: skip


@TARGETS
@pytest.mark.parametrize("length", [192, 99])
@pytest.mark.parametrize("name", WORD_ROWS)
def test_lanes_that_share_elements_have_the_values_of_the_interpreter(name: str, length: int, target: str) -> None:
    body, tensors = WORD_ROWS[name]
    arrays = {
        tensor: values(dtype, 16) if each == 0 else values(dtype, 7 * -(-length // each)).reshape(7, -1)
        for tensor, (dtype, each) in tensors.items()
    }
    if "powers" in name:  # products that float32 represents: the interpreter's exp2 is a float64
        arrays |= {"s": np.clip(arrays["s"], 100, 140), "t": np.arange(-8, 8, dtype=np.float32)}
    types = {tensor: TensorType(DType(dtype), arrays[tensor].shape) for tensor, (dtype, _) in tensors.items()}
    text = f"y[n, k] = {body} where k in {length}"
    inputs = {tensor: (type_.dtype.value, type_.shape) for tensor, type_ in types.items()}
    kernel = roller_svc.compile(text, inputs, select="model", top_k=1, target=target)
    np.testing.assert_array_equal(kernel(**arrays)["y"], reference(parse(text, types), arrays)["y"], kernel.source)


def test_words_are_loaded_once_for_the_lanes_that_share_them() -> None:
    for name, (body, tensors) in WORD_ROWS.items():
        shapes = {tensor: (16,) if each == 0 else (7, 192 // each) for tensor, (_, each) in tensors.items()}
        inputs = {tensor: (dtype, shapes[tensor]) for tensor, (dtype, _) in tensors.items()}
        text = f"y[n, k] = {body} where k in 192"
        source = roller_svc.compile(text, inputs, select="model", top_k=1, target="cpu-x86-avx512").source
        assert ("repeat" in source) == (name in ("int4", "high nibbles first", "int2") or "table" in name), source
        assert ("looked_up_v" in source) == ("table" in name or name in ("int4", "high nibbles first", "int2")), source


def test_tables_of_two_vectors_are_in_two_registers() -> None:
    body, _ = WORD_ROWS["float16 by a table"]
    inputs = {"q": ("int32", (7, 24)), "s": ("float16", (7, 12)), "t": ("float16", (16,))}
    text = f"y[n, k] = {body} where k in 192"
    assert "looked_up2_vf32x8(" in roller_svc.compile(text, inputs, select="model", top_k=1, target="cpu-x86-avx2").source


# conditions that hold in whole vectors or not, by the first part's extent
CHOICES = (
    "y[m, n] = a[m, n].when([n < {w}], b[m, n - {w}]) where n in {n}",
    "y[m, n] = a[m, n].when([n <= {w} - 1], b[m, n - {w}]) where n in {n}",
    "y[m, n] = b[m, n - {w}].when([n >= {w}], a[m, n]) where n in {n}",
    "y[m, n] = b[m, n - {w}].when([{w} - 1 < n], a[m, n]) where n in {n}",
    "y[m, n] = c[m, n // {w}, n % {w}].when([n // {w} < 1], d[m, n // {w} - 1, n % {w}]) where n in {n}",
    "y[m, n] = a[m, n].when([n < {w}, m > 1], b[m, n - {w}].when([n >= {w}], 0.5)) where n in {n}",
)


@TARGETS
@pytest.mark.parametrize("width", [128, 96, 48, 40, 17])
def test_parts_of_a_concatenation_have_the_values_of_the_interpreter(width: int, target: str) -> None:
    shapes = {"a": (3, width), "b": (3, width), "c": (3, 1, width), "d": (3, 1, width)}
    arrays = {name: values("float32", int(np.prod(shape)), i).reshape(shape) for i, (name, shape) in enumerate(shapes.items())}
    check([choice.format(w=width, n=2 * width) for choice in CHOICES], arrays, target, is_vector=False)


@pytest.mark.parametrize("choice", CHOICES[:5])
def test_whole_vectors_of_a_concatenation_are_chosen_by_one_condition(choice: str) -> None:
    shapes = {"a": (3, 128), "b": (3, 128), "c": (3, 1, 128), "d": (3, 1, 128)}
    text = choice.format(w=128, n=256)
    types = {name: ("float32", shape) for name, shape in shapes.items() if f"{name}[" in text}
    source = roller_svc.compile(text, types, select="model", top_k=1, target="local").source
    assert "select_v" not in source
    assert "masked_v" not in source
    assert re.search(r"\? \(v\w+\)\*\(v\w+ \*\)", source)
