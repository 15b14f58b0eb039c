"""Transposed convolutions as a GEMM and col2im: which statements, their points, their meaning, when they pay."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from roller_svc import hardware
from roller_svc.compiler.plans import rank_best_partition
from roller_svc.frontend.parse import parse
from roller_svc.fusion.col2im import insert_col2im
from roller_svc.fusion.partition import stored_types
from roller_svc.ir.dtype import DType
from roller_svc.ir.group import GroupKind
from roller_svc.ir.program import TensorExpr, TensorProgram, TensorType
from roller_svc.semantics.inputs import random_inputs
from roller_svc.semantics.interpreter import evaluate

ROW = (
    "O[f, w] +=! X[c, ({at}) // {s}].when([{at} >= 0, ({at}) % {s} == 0, ({at}) // {s} < {size}], 0.0) * W[c, f, k]"
    " where w in {extent}"
)


def program(text: str, dtype: DType = DType.FLOAT32, **inputs: tuple[int, ...]) -> TensorProgram:
    return parse(text, {name: TensorType(dtype, shape) for name, shape in inputs.items()})


def row(at: str = "w + 1 - k", s: int = 2, size: int = 9, taps: int = 4, text: str = ROW) -> TensorProgram:
    """Return a transposed convolution of a row of 6 channels, by 5 filters."""
    return program(text.format(at=at, s=s, size=size, extent=18), X=(6, size), W=(6, 5, taps))


def rewritten(compute: TensorProgram, *, in_phases: bool = False) -> tuple[TensorExpr, ...]:
    return insert_col2im(compute.statements, stored_types(compute), in_phases=in_phases)


def points(statement: TensorExpr) -> int:
    return math.prod(a.extent for a in statement.axes)


def conv_transpose(
    size: tuple[int, ...],
    taps: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    more: int,
    *,
    channels_last: bool,
    groups: int = 1,
    channels: int = 4,
    filters: int = 3,
) -> TensorProgram:
    rank = len(size)
    layout = "NHWC" if channels_last else "NCHW"
    layout = layout if rank == 2 else layout.replace("H", "")
    shape = (2, *size, channels) if channels_last else (2, channels, *size)
    options = {"stride": list(stride), "padding": list(padding), "output_padding": [more] * rank, "groups": groups}
    said = ", ".join(f"{name}={value}" for name, value in options.items())
    return program(f'Y = conv_transpose{rank}d(X, W, {said}, layout="{layout}")', X=shape, W=(channels, filters, *taps))


# which ----------------------------------------------------------------------------------------------------------------
def test_each_product_is_computed_once() -> None:
    gemm, sums = rewritten(row())
    assert (gemm.output, sums.output) == ("O.products", "O")
    assert points(gemm) == 6 * 5 * 4 * 9  # channels, filters, taps, data
    assert points(sums) == 5 * 18 * 2  # of four taps, two
    gemm, phases, interleave = rewritten(row(), in_phases=True)
    assert points(gemm) == 6 * 5 * 4 * 9
    assert phases.type.shape == (2, 5, 10)  # remainder, filter, quotient
    assert points(interleave) == 5 * 18


def test_small_images_need_no_stride() -> None:
    gemm, sums = rewritten(conv_transpose((1, 1), (7, 7), (1, 1), (0, 0), 0, channels_last=False))
    assert (points(gemm), points(sums)) == (2 * 4 * 3 * 49, 2 * 3 * 49 * 49)
    large = conv_transpose((20, 20), (7, 7), (1, 1), (0, 0), 0, channels_last=False)  # 26 x 26 results
    assert rewritten(large) == large.statements


def test_taps_are_not_innermost() -> None:
    (gemm, _) = rewritten(conv_transpose((4, 5), (4, 4), (2, 2), (1, 1), 0, channels_last=False))
    assert gemm.type.shape == (2, 3, 4, 4, 4, 5)
    (gemm, _) = rewritten(conv_transpose((4, 5), (4, 4), (2, 2), (1, 1), 0, channels_last=True))
    assert gemm.type.shape == (2, 4, 5, 4, 4, 3)


def test_depthwise_has_no_gemm() -> None:
    depthwise = conv_transpose((4, 5), (4, 4), (2, 2), (1, 1), 0, channels_last=True, groups=4)
    (sums,) = rewritten(depthwise)
    assert points(sums) * 4 == points(depthwise.statements[0])


@pytest.mark.parametrize(
    "compute",
    [
        row(text=ROW.replace("+=!", ">=!")),
        row(text=ROW.replace("({at}) % {s} == 0, ", "")),
        row(text=ROW.replace("({at}) % {s} == 0", "({at} + 1) % {s} == 0")),
        row(at="w + 2 - 2 * k"),  # dilated
        row(text=ROW.replace("0.0) *", "1.0) *")),
        row(text=ROW.replace("W[c, f, k]", "(W[c, f, k] + w.cast(`float32`))")),
        row(text=ROW.replace("({at}) % {s} == 0", "({at}) % {s} == 0, (w + k) % 3 == 0")),
    ],
    ids=["maximum", "no test", "another remainder", "dilation", "not zero elsewhere", "reads w", "another guard"],
)
def test_others_are_not(compute: TensorProgram) -> None:
    assert rewritten(compute) == compute.statements


# meaning --------------------------------------------------------------------------------------------------------------
@given(
    size=st.lists(st.integers(1, 6), min_size=1, max_size=2),
    channels_last=st.booleans(),
    in_phases=st.booleans(),
    data=st.data(),
)
@settings(max_examples=100)
def test_the_result_is_the_same(size: list[int], channels_last: bool, in_phases: bool, data: st.DataObject) -> None:
    rank = len(size)
    taps, stride = (tuple(data.draw(st.lists(st.integers(1, 5), min_size=rank, max_size=rank))) for _ in range(2))
    padding = tuple(data.draw(st.integers(0, tap - 1)) for tap in taps)
    more = data.draw(st.integers(0, max(0, min(stride) - 1)))
    assume(all((n - 1) * s + k - 2 * p + more > 0 for n, s, k, p in zip(size, stride, taps, padding, strict=True)))
    groups = data.draw(st.sampled_from((1, 2, 4)))
    compute = conv_transpose(tuple(size), taps, stride, padding, more, channels_last=channels_last, groups=groups)
    changed = replace(compute, statements=rewritten(compute, in_phases=in_phases))
    arrays = random_inputs(compute, seed=0)
    expected, found = (evaluate(each, arrays)["Y"].wide for each in (compute, changed))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("guard", "size"),
    [
        ("w + 1 - k >= 2, (w + 1 - k) % 2 == 0, (w + 1 - k) // 2 < 7", 9),
        ("w - k >= -1, (w + 1 - k) % 2 == 0, w + 1 - k < 13", 9),
        ("w + 1 >= k, (w + 1 - k) % 2 == 0, (w + 1 - k) // 2 <= 5, c < 4", 9),
        ("w + 1 >= k, 11 > w - k, (w + 1 - k) % 2 == 0", 9),
    ],
)
@pytest.mark.parametrize("in_phases", [False, True])
def test_other_bounds_are_kept(guard: str, size: int, in_phases: bool) -> None:
    compute = program(
        f"O[f, w] +=! X[c, (w + 1 - k) // 2].when([{guard}], 0.0) * W[c, f, k] where w in 18",
        X=(6, size),
        W=(6, 5, 4),
    )
    statements = rewritten(compute, in_phases=in_phases)
    assert len(statements) > 1
    arrays = random_inputs(compute, seed=0)
    found = evaluate(replace(compute, statements=statements), arrays)["O"].wide
    np.testing.assert_allclose(found, evaluate(compute, arrays)["O"].wide, rtol=1e-5, atol=1e-5)


# when -----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("target", ["nvidia-h200-sxm", "nvidia-a100-sxm-80gb", "cpu-x86-avx2"])
def test_the_model_prefers_a_gemm(target: str) -> None:
    large = program("Y = conv_transpose2d(X, W, stride=2, padding=1)", DType.FLOAT16, X=(8, 128, 32, 32), W=(128, 64, 4, 4))
    best = rank_best_partition(large, hardware.load(target), 1)
    assert best.groups[0].kind is GroupKind.CONTRACTION
    assert [name for name, _ in best.groups[0].stored] == ["Y.products"]
