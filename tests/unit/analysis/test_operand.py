"""Operands of contractions: vector width, value type, supporting matrix units."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
from cases_matrix import ADA, AMPERE, TURING, contraction, operands_of, tiles, unit
from hypothesis import given, settings
from hypothesis import strategies as st
from run_tree import TreeRun

from roller_svc.analysis.operand import (
    MAX_VECTOR_WIDTH,
    Operand,
    aligned_vector_width,
    operands,
    operands_unsupported_reason,
    staged_dtype,
)
from roller_svc.fusion.split.reduction import split_group
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Expr, Load, axes_of
from roller_svc.ir.group import AxisRole, GroupKind, KernelGroup, TileAxis
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.index import add, div, le, logical_and, lt, mod, mul, num, ref
from roller_svc.ir.program import Axis, AxisKind, TensorType

Point = dict[str, int]


# runs against brute force --------------------------------------------------------------------------------------------
def points(axes: tuple[Axis, ...]) -> Iterator[Point]:
    """Every value of every axis, the last one fastest."""
    for values in itertools.product(*(range(axis.extent) for axis in axes)):
        yield dict(zip((axis.name for axis in axes), values, strict=True))


def address(load: Load, shape: tuple[int, ...], point: Point) -> int:
    run, place = TreeRun({}, point), 0
    for index, size in zip(load.index, shape, strict=True):
        place = place * size + run.value(index)
    return place


def moves_as_one(
    load: Load, guard: Expr | None, lead: TileAxis, others: tuple[Axis, ...], shape: tuple[int, ...], run: int
) -> bool:
    """Whether all `run` neighbours along the axis, from every multiple of `run` on, are one aligned piece of memory
    under one guard, wherever the other axes are."""
    along = list(points(lead.members))
    if len(along) % run:
        return False
    for other in points(others):
        for first in range(0, len(along), run):
            together = [other | point for point in along[first : first + run]]
            places = [address(load, shape, point) for point in together]
            if places[0] % run or places != list(range(places[0], places[0] + run)):
                return False
            if guard is not None and len({bool(TreeRun({}, point).value(guard)) for point in together}) > 1:
                return False
    return True


def longest_run(load: Load, guard: Expr | None, lead: TileAxis, others: tuple[Axis, ...], shape: tuple[int, ...]) -> int:
    runs = (1 << e for e in range(MAX_VECTOR_WIDTH.bit_length() - 1, -1, -1))
    return next(r for r in runs if moves_as_one(load, guard, lead, others, shape, r))


extents = st.sampled_from([1, 2, 3, 4, 6, 8, 16])
strides = st.sampled_from([1, 1, 1, 2, 3, 4, 8])
offsets = st.sampled_from([0, 0, 0, 1, 4, 8, -1])


@st.composite
def sums(draw: st.DrawFn, names: list[str]) -> Expr:
    """A sum of some axes with strides, perhaps cut by // or %."""
    total: Expr = num(draw(offsets))
    for name in names:
        total = add(total, mul(ref(name), num(draw(strides))))
    cut = draw(st.sampled_from(["", "", "", "", "//", "%"]))
    by = draw(st.sampled_from([2, 3, 4, 8]))
    return div(total, by) if cut == "//" else mod(total, by) if cut == "%" else total


@st.composite
def guards(draw: st.DrawFn, names: list[str]) -> Expr | None:
    found: Expr | None = None
    for _ in range(draw(st.sampled_from([0, 1, 1, 2]))):
        some = draw(st.lists(st.sampled_from(names), min_size=1, max_size=2, unique=True))
        place = draw(st.one_of(st.just(ref(names[-1])), st.just(ref(some[0])), sums(some)))
        bound = num(draw(st.sampled_from([0, 1, 2, 3, 4, 7, 8, 9, 12, 15, 16])))
        compare = draw(st.sampled_from([lt, le]))
        found = logical_and(found, compare(place, bound) if draw(st.booleans()) else compare(bound, place))
    return found


@st.composite
def accesses(draw: st.DrawFn) -> tuple[Load, Expr | None, TileAxis, tuple[Axis, ...], TensorType]:
    lead = [Axis(f"k{i}", draw(extents), AxisKind.REDUCE) for i in range(draw(st.integers(1, 3)))]
    others = [Axis(f"m{i}", draw(st.integers(1, 3)), AxisKind.SPATIAL) for i in range(draw(st.integers(0, 2)))]
    axes = [*others, *lead]
    names = [axis.name for axis in axes]
    index: list[Expr] = [ref(name) for name in names]
    shape = [axis.extent for axis in axes]
    how = draw(st.sampled_from(["in order", "in order", "one cut", "sums"]))
    if how == "one cut":  # a row of a table, or a place in one: as memory is walked by an axis that is not itself
        cut = draw(st.integers(0, len(names) - 1))
        index.insert(0, draw(sums([names[cut]])))
        shape.insert(0, 64)
    elif how == "sums":
        turned = draw(st.permutations(names))
        at = draw(st.integers(0, len(names)))
        index = [draw(sums(part)) for part in (turned[:at], turned[at:])]
        shape = [64, draw(st.sampled_from([8, 12, 16, 24, 64]))]
    load = Load("A", tuple(index), DType.FLOAT16)
    axis = TileAxis("k", AxisRole.K, tuple(lead))
    return load, draw(guards(names)), axis, tuple(others), TensorType(DType.FLOAT16, tuple(shape))


@pytest.mark.slow
@given(accesses())
@settings(max_examples=300)
def test_a_run_is_side_by_side_aligned_and_under_one_guard(
    access: tuple[Load, Expr | None, TileAxis, tuple[Axis, ...], TensorType],
) -> None:
    load, guard, lead, others, type_ = access
    run = aligned_vector_width(load, guard, lead, type_)
    assert moves_as_one(load, guard, lead, others, type_.shape, run)


def role_axis(group: KernelGroup, operand: Operand, along: AxisRole) -> TileAxis:
    (axis,) = group.space.role(AxisRole.K if operand.k_major else along)
    return axis


def check_operands(group: KernelGroup) -> tuple[int, int]:
    """Both runs, each the longest that there is."""
    found = []
    for operand, role in zip(operands(group), (AxisRole.M, AxisRole.N), strict=True):
        assert operand.source is not None
        lead = role_axis(group, operand, role)
        used = axes_of(operand.source) | (axes_of(operand.guard) if operand.guard is not None else set())
        every = (m for axis in group.space.axes if axis is not lead for m in axis.members)
        others = tuple(m for m in every if m.name in used)
        shape = dict(group.inputs)[operand.source.tensor].shape
        assert operand.vector_width == longest_run(operand.source, operand.guard, lead, others, shape)
        found.append(operand.vector_width)
    return found[0], found[1]


@pytest.mark.parametrize("a", ["m, k", "k, m"])
@pytest.mark.parametrize("b", ["k, n", "n, k"])
@pytest.mark.parametrize(("m", "n", "k"), [(16, 32, 16), (24, 12, 20), (14, 18, 12), (24, 10, 25)])
def test_operands_of_a_matmul_move_in_the_longest_runs(a: str, b: str, m: int, n: int, k: int) -> None:
    extents = {"m": m, "n": n, "k": k}
    shapes = [" ".join(str(extents[x]) for x in order.split(", ")) for order in (a, b)]
    group = contraction(f"C[m, n] +=! A[{a}] * B[{b}]", A=f"float16 {shapes[0]}", B=f"float16 {shapes[1]}")
    runs = check_operands(group)
    assert runs == tuple(min(16, extents[order[-1]] & -extents[order[-1]]) for order in (a, b))


WINDOW = "y*2+i>=1, y*2+i-1<5, x*2+j>=1, x*2+j-1<5"
CONVOLUTIONS = {
    "nhwc": ("Y[n,y,x,f] +=! X[n,y+i,x+j,c] * W[i,j,c,f] where y in 3, x in 3", "1 5 5 8", "3 3 8 16", (8, 16)),
    "nhwc, padded": (
        f"Y[n,y,x,f] +=! X[n,y*2+i-1,x*2+j-1,c].when([{WINDOW}], 0.0) * W[i,j,c,f] where y in 3, x in 3, i in 3",
        "1 5 5 8", "3 3 8 4", (8, 4),
    ),
    "nhwc, weights turned": ("Y[n,y,x,f] +=! X[n,y+i,x+j,c] * W[f,i,j,c] where y in 3, x in 3", "1 5 5 4", "8 3 3 4",
                             (4, 4)),
    "nchw, pointwise": ("Y[n,f,y,x] +=! W[f,c] * X[n,c,y,x]", "2 16 2 4", "8 16", (16, 8)),
    "nchw, window": ("Y[n,f,y,x] +=! W[f,c,i,j] * X[n,c,y+i,x+j] where y in 3, x in 4", "1 4 5 7", "8 4 3 4", (16, 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_operands_of_a_convolution_move_in_the_longest_runs(name: str) -> None:
    text, x, w, expected = CONVOLUTIONS[name]
    assert check_operands(contraction(text, X=f"float16 {x}", W=f"float16 {w}")) == expected


@pytest.mark.parametrize(("a", "b", "runs"), [("m, k", "n, k", (8, 8)), ("k, m", "k, n", (16, 8))])
@pytest.mark.parametrize("split_k", [2, 3])
def test_split_reduction_keeps_vector_width(a: str, b: str, runs: tuple[int, int], split_k: int) -> None:
    """A piece is whole steps of 16 elements; 56 of them leave the last piece ragged, under a guard."""
    sizes = {"m": 16, "n": 8, "k": 56}
    a_shape, b_shape = (" ".join(str(sizes[x]) for x in order.split(", ")) for order in (a, b))
    group = contraction(f"C[m, n] +=! A[{a}] * B[{b}]", A=f"float16 {a_shape}", B=f"float16 {b_shape}")
    halves = split_group(group, tiles(group, unit(AMPERE, "mma_f16"), (16, 8, 16), (16, 8), split_k=split_k))
    assert check_operands(halves.partial) == runs


# types of values -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("factor", "stored", "expected"),
    [
        ("A[m, k].cast(`float32`)", "float16", DType.FLOAT16),  # a cast that loses nothing is folded
        ("A[m, k].cast(`float16`).cast(`float32`)", "float8_e5m2", DType.FLOAT8_E5M2),
        ("A[m, k].cast(`float16`)", "float32", DType.FLOAT16),  # one that rounds is what it rounds to
        ("A[m, k].cast(`bfloat16`)", "float16", DType.BFLOAT16),
        ("A[m, k].cast(`float16`).cast(`float32`)", "bfloat16", DType.FLOAT16),
        ("(A[m, k] + 0.5)", "float16", DType.FLOAT16),  # arithmetic counts as rounded to its own type
        ("relu(A[m, k])", "bfloat16", DType.BFLOAT16),
        ("(A[m, k] + 0.5)", "float8_e4m3fn", DType.FLOAT32),  # which would lose too much of a float8
        ("(A[m, k] + 0.5).cast(`float8_e4m3fn`)", "float8_e4m3fn", DType.FLOAT8_E4M3FN),
        ("A[m, k].when(m < k, 0.0)", "float16", DType.FLOAT16),  # every type has zero
        ("A[m, k].cast(`float32`).when(m < k, 1.0)", "float16", DType.FLOAT32),
        ("A[m, k]", "float32", DType.FLOAT32),
    ],
)
def test_a_float_factor_has_the_narrowest_type_of_its_values(factor: str, stored: str, expected: DType) -> None:
    a, b = operands_of(f"C[m, n] +=! {factor} * B[k, n].cast(`float32`)", A=f"{stored} 32 16", B="float16 16 32")
    assert (a.dtype, a.memory_dtype if a.source else expected) == (expected, DType(stored) if a.source else expected)
    assert b.dtype is DType.FLOAT16


@pytest.mark.parametrize(
    ("factor", "stored", "expected"),
    [
        ("A[m, k].cast(`int32`)", "int8", DType.INT8),
        ("A[m, k].cast(`int32`)", "uint8", DType.UINT8),
        ("A[m, k].cast(`int32`)", "bool", DType.BOOL),
        ("A[m, k].cast(`uint8`).cast(`int32`)", "int8", DType.UINT8),  # wraps, and is then what it wrapped to
        ("(A[m, k] + 1).cast(`int32`)", "int8", DType.INT8),  # int8 arithmetic wraps
        ("max(A[m, k].cast(`int32`), -9)", "int8", DType.INT8),  # fits
        ("max(A[m, k].cast(`int32`), 300)", "int8", DType.INT32),
        ("A[m, k]", "int32", DType.INT32),
        ("A[m, k].cast(`int32`)", "int16", DType.INT16),
    ],
)
def test_an_integer_factor_has_the_type_it_wraps_to(factor: str, stored: str, expected: DType) -> None:
    a, _ = operands_of(f"C[m, n] +=! ({factor}) * B[k, n].cast(`int32`)", A=f"{stored} 32 16", B="int8 16 32")
    assert a.dtype is expected


@pytest.mark.parametrize(
    ("factor", "has_source", "has_guard"),
    [
        ("A[m, k].cast(`float32`)", True, False),
        ("A[m, k].when(m < k, 0.0)", True, True),
        ("A[m, k].when(m < k, 0.0).when(k < 9, 0.0)", True, True),
        ("A[m, k].when(m < k, 1.0)", False, False),  # what stands in is no zero
        ("(A[m, k] + 0.5)", False, False),
        ("A[m, k].when(A[m, 0] > 0.0, 0.0)", False, False),  # a guard that reads is no guard of a copy
        ("A[m, ids[k]]", False, False),  # a place from data may lie outside
    ],
)
def test_a_factor_is_a_load_only_where_it_is_that_or_zero(factor: str, has_source: bool, has_guard: bool) -> None:
    more = {"ids": "int32 16"} if "ids" in factor else {}
    a, _ = operands_of(f"C[m, n] +=! {factor} * B[k, n]", A="float16 32 16", B="float16 16 32", **more)
    assert (a.source is not None, a.guard is not None) == (has_source, has_guard)
    assert has_source or a.vector_width == 1


# units ---------------------------------------------------------------------------------------------------------------
def reason(hw: HardwareSpec, name: str, a: str, b: str, cast: str = "float32", *, allow_tf32: bool = False) -> str:
    """Why that unit does not take a matmul of those types, summed in `cast`."""
    text = f"C[m, n] +=! A[m, k].cast(`{cast}`) * B[k, n].cast(`{cast}`)"
    group = contraction(text, A=f"{a} 32 32", B=f"{b} 32 32")
    accumulator = group.space.compute_dtype
    return operands_unsupported_reason(unit(hw, name), accumulator, operands(group), allow_tf32=allow_tf32)


@pytest.mark.parametrize(
    ("name", "a", "b", "cast"),
    [
        ("mma_f16", "float16", "float16", "float32"),
        ("mma_bf16", "bfloat16", "bfloat16", "float32"),
        ("mma_f16", "float8_e4m3fn", "float16", "float32"),
        ("mma_f16", "int8", "float8_e5m2", "float32"),
        ("mma_bf16", "int8", "bfloat16", "float32"),
        ("mma_e4m3", "float8_e4m3fn", "float8_e5m2", "float32"),
        ("mma_e5m2", "float8_e4m3fn", "float8_e4m3fn", "float32"),
        ("mma_s8", "int8", "uint8", "int32"),
        ("mma_u8", "int8", "int8", "int32"),
        ("mma_s8", "bool", "int8", "int32"),
    ],
)
def test_a_unit_takes_what_its_type_holds(name: str, a: str, b: str, cast: str) -> None:
    assert reason(ADA, name, a, b, cast) == ""


@pytest.mark.parametrize(
    ("name", "a", "b", "cast", "expected"),
    [
        ("mma_f16", "bfloat16", "float16", "float32", "operand a is bfloat16, the unit takes float16"),
        ("mma_bf16", "bfloat16", "float16", "float32", "operand b is float16, the unit takes bfloat16"),
        ("mma_f16", "float16", "int16", "float32", "operand b is int16, the unit takes float16"),
        ("mma_e4m3", "float16", "float8_e4m3fn", "float32", "operand a is float16, the unit takes float8_e4m3fn"),
        ("mma_s8", "int8", "int16", "int32", "operand b is int16, the unit takes int8"),
        ("mma_f16", "float16", "float16", "float64", "sums in float64, the unit in float32"),
        ("mma_s8", "int8", "int8", "float32", "sums in float32, the unit in int32"),
        ("mma_tf32", "float16", "float32", "float32", "operand b is float32, and tf32 is not allowed"),
        ("fma_f32", "float32", "float32", "float32", "no rules for units of kind fma"),
    ],
)
def test_a_unit_says_why_it_does_not_take_a_product(name: str, a: str, b: str, cast: str, expected: str) -> None:
    assert reason(ADA, name, a, b, cast) == expected


def test_tf32_is_taken_where_it_is_allowed() -> None:
    assert reason(AMPERE, "mma_tf32", "float32", "float16", allow_tf32=True) == ""


def test_what_is_no_contraction_has_no_operands() -> None:
    group = contraction("C[m, n] +=! A[m, k] * B[k, n]", A="float16 32 32", B="float16 32 32")
    nest = replace(group, kind=GroupKind.NEST)
    with pytest.raises(ValueError, match="is not a contraction"):
        operands(nest)


def test_bytes_are_staged_as_they_are_and_the_rest_as_the_unit_takes_it() -> None:
    text = "C[m, n] +=! A[m, k].cast(`int32`) * B[k, n].cast(`int32`)"
    a, b = operands_of(text, A="bool 32 32", B="int8 32 32")
    assert [staged_dtype(unit(AMPERE, "mma_s8"), o) for o in (a, b)] == [DType.UINT8, DType.INT8]
    a, b = operands_of("C[m, n] +=! A[m, k] * B[k, n]", A="float8_e5m2 32 32", B="float16 32 32")
    assert [staged_dtype(unit(TURING, "mma_f16"), o) for o in (a, b)] == [DType.FLOAT16, DType.FLOAT16]
    a, b = operands_of(
        "C[m, n] +=! A[m, k].cast(`float32`) * B[k, n].cast(`float32`)", A="float8_e5m2 32 32", B="float8_e4m3fn 32 32"
    )
    assert [staged_dtype(unit(ADA, "mma_e4m3"), o) for o in (a, b)] == [DType.FLOAT8_E5M2, DType.FLOAT8_E4M3FN]


@pytest.mark.parametrize(
    ("text", "k_major"),
    [
        ("C[m, n] +=! X[m, k] * T[Q[n, k]]", True),  # as the indices are, not the table
        ("C[m, n] +=! X[m, k] * T[Q[k, n]]", False),
        ("C[m, n] +=! X[m, k] * (S[k // 8, n] * T[Q[n, k]])", True),  # the tensor with the most bytes
        ("C[m, n] +=! X[m, k] * (S[k // 8, n] * T[Q[k, n]])", False),
    ],
)
def test_looked_up_operand_is_contiguous_as_its_indices_are(text: str, k_major: bool) -> None:
    shape = "64 64"
    _, b = operands_of(text, X="float16 64 64", T="float16 16", Q=f"int32 {shape}", S="float16 8 64")
    assert b.k_major is k_major
