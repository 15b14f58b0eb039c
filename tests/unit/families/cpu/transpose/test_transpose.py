"""Layout changes on CPUs: transposed tiles, interleaved short rows, non-temporal stores."""

from __future__ import annotations

import dataclasses
import itertools
import re

import pytest
from cases_cpu import cpu_case, hinting

from roller_svc.compiler.lower_and_emit import lower
from roller_svc.families.cpu.transpose.workload import TransposeKind, transpose_space
from roller_svc.hardware import load
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.schedule import Compute, Prefetch, Transpose, iter_nodes

AVX2, AVX512, NEON = load("cpu-x86-avx2"), load("cpu-x86-avx512"), load("cpu-arm-neon")
AXES = "abcd"


def permutation(shape: tuple[int, ...], order: tuple[int, ...]) -> str:
    return f"y[{', '.join(AXES[i] for i in order)}] = x[{', '.join(AXES[: len(shape)])}]"


def transpose_kind(group: KernelGroup) -> TransposeKind | None:
    layout = transpose_space(group, AVX2)
    return None if layout is None else layout.kind


@pytest.mark.parametrize(
    ("shape", "order"),
    [((37, 50), (1, 0)), *(((9, 21, 35), p) for p in itertools.permutations(range(3)) if p != (0, 1, 2))],
)
@pytest.mark.parametrize("hw", [AVX2, AVX512], ids=lambda hw: hw.id)
def test_permutations(shape: tuple[int, ...], order: tuple[int, ...], hw: HardwareSpec) -> None:
    cpu_case(permutation(shape, order), {"x": ("float32", shape)}, hw).check_some(3)


@pytest.mark.slow
@pytest.mark.parametrize("order", [p for p in itertools.permutations(range(4)) if p != (0, 1, 2, 3)])
def test_permutations_of_four_axes(order: tuple[int, ...]) -> None:
    shape = (3, 18, 5, 33)
    cpu_case(permutation(shape, order), {"x": ("float32", shape)}).check_some(2)


@pytest.mark.parametrize("dtype", ["float64", "int64", "int32", "float16", "bfloat16", "int8", "uint8", "bool"])
@pytest.mark.parametrize("shape", [(67, 45), (90, 3), (3, 90)], ids=str)
def test_elements_of_every_size(dtype: str, shape: tuple[int, int]) -> None:
    case = cpu_case("y[j, i] = x[i, j]", {"x": (dtype, shape)}, AVX512)
    assert transpose_space(case.group, AVX512) is not None
    case.check_some(2)


@pytest.mark.parametrize(("dtype", "side"), [("float16", 4), ("int8", 4), ("int8", 8), ("float16", 8), ("float32", 4)])
def test_squares_smaller_than_a_vector(dtype: str, side: int) -> None:
    case = cpu_case("y[j, i] = x[i, j]", {"x": (dtype, (side, side))}, AVX512)
    assert (transpose_space(case.group, AVX512) is not None) == (dtype == "float32" or (dtype, side) == ("float16", 8))
    case.check_some(2)


@pytest.mark.parametrize(
    ("text", "shape", "kind"),
    [
        ("y[c, i] = x[i, c]", (500, 3), TransposeKind.DEINTERLEAVE),
        ("y[i, c] = x[c, i]", (3, 500), TransposeKind.INTERLEAVE),
        ("y[c, w, h] = x[h, w, c]", (40, 30, 3), TransposeKind.BLOCK),
        ("y[i, c] = x[c, i]", (6, 500), TransposeKind.BLOCK),
        ("y[j, i] = x[i, j]", (3, 2), None),
        ("y[i, j] = x[i, j]", (64, 64), None),
        ("y[j, i] = x[i, j // 2] where j in 64", (64, 32), None),
        ("y[j, i] = x[i - 1, j].when([i >= 1], 0.0) where i in 65", (64, 64), None),
    ],
)
def test_transpose_kind_of_layout_changes(text: str, shape: tuple[int, ...], kind: TransposeKind | None) -> None:
    case = cpu_case(text, {"x": ("float32", shape)})
    assert transpose_kind(case.group) is kind
    case.check_some(3)


@pytest.mark.parametrize(
    ("text", "types"),
    [
        ("y[i, j] = x[j, i] * 2.0 + b[j]", {"x": (70, 41), "b": (70,)}),
        ("y[i, j] = x[j, i] + z[i, j] - w[j, i]", {"x": (70, 41), "z": (41, 70), "w": (70, 41)}),
        ("t[i, j] = x[j, i] * 2.0; y[i, j] = t[i, j] * t[i, j]", {"x": (70, 41)}),
        ("y[i, c] = (x[c, i] - m[c]) * s[c]", {"x": (3, 200), "m": (3,), "s": (3,)}),
        ("y[c, i] = x[i, c] * s[c]", {"x": (200, 3), "s": (3,)}),
        ("y[j, i] = x[i + 1, j] where i in 40", {"x": (41, 33)}),
    ],
)
@pytest.mark.parametrize("hw", [AVX2, AVX512], ids=lambda hw: hw.id)
def test_arithmetic_around_a_transpose(text: str, types: dict[str, tuple[int, ...]], hw: HardwareSpec) -> None:
    case = cpu_case(text, {name: ("float32", shape) for name, shape in types.items()}, hw)
    assert transpose_kind(case.group) is not None
    case.check_some(2)


def test_large_results_may_use_nontemporal_stores() -> None:
    case = cpu_case("y[j, i] = x[i, j]", {"x": ("float32", (2048, 1040))}, AVX512)
    assert {c.program.pipeline.nontemporal for c in case.ranked} == {False, True}
    streamed = next(c for c in case.ranked if c.program.pipeline.nontemporal)
    (tree,) = lower(case.group, streamed.program, AVX512)
    written = [n for n in iter_nodes(tree.body) if isinstance(n, Compute) and n.tensor == "y"]
    assert written
    assert all(n.nontemporal for n in written)
    text = case.source(streamed).text
    assert "movntps" in text
    assert text.index("stream_vf32x16(&") < text.rindex("stores_done()")


def test_small_results_use_cached_stores() -> None:
    case = cpu_case("y[j, i] = x[i, j]", {"x": ("float32", (128, 128))}, AVX512)
    assert not any(c.program.pipeline.nontemporal for c in case.ranked)


@pytest.mark.parametrize("hw", [AVX2, AVX512, NEON], ids=lambda hw: hw.id)
def test_transpose_uses_the_vector_width_of_the_cpu(hw: HardwareSpec) -> None:
    case = cpu_case("y[j, i] = x[i, j]", {"x": ("float32", (256, 256))}, hw)
    (tree,) = lower(case.group, case.ranked[0].program, hw)
    (transposes,) = {n.lanes for n in iter_nodes(tree.body) if isinstance(n, Transpose)}
    assert transposes == case.hw.vector_bytes // 4


def test_tail_tiles_share_the_buffer() -> None:
    case = cpu_case("y[j, i] = x[i, j]", {"x": ("float32", (270, 290))}, AVX512)
    large = max(case.ranked, key=lambda c: c.program.thread["i"] * c.program.thread["j"])
    assert len(re.findall(r"float \w*x_transposed0\[\d+\] __attribute__", case.source(large).text)) == 1


def test_maps_beyond_the_llc_may_use_nontemporal_stores() -> None:
    case = cpu_case("y[i] = x[i] + z[i]", {"x": ("float32", (1 << 24,)), "z": ("float32", (1 << 24,))}, AVX512)
    first = case.ranked[0].program
    assert first.pipeline.nontemporal  # Zen's stores are faster so
    (tree,) = lower(case.group, first, AVX512)
    assert all(n.nontemporal for n in iter_nodes(tree.body) if isinstance(n, Compute))
    assert not any(n.for_write for n in iter_nodes(tree.body) if isinstance(n, Prefetch))


@pytest.mark.parametrize(("gain", "prefetching"), [(0.8, False), (1.4, True)])
def test_prefetches_only_with_a_measured_gain(gain: float, prefetching: bool) -> None:
    hw = hinting(AVX512, gain)
    case = cpu_case("y[i] = x[i] * 2.0", {"x": ("float32", (1 << 24,))}, hw)
    for streamed in (False, True):  # with non-temporal stores prefetches gain on every machine
        program = next(c.program for c in case.ranked if c.program.pipeline.nontemporal == streamed)
        (tree,) = lower(case.group, program, hw)
        assert any(isinstance(n, Prefetch) for n in iter_nodes(tree.body)) == (streamed or prefetching)


def test_nontemporal_candidates_rank_second_where_slower() -> None:
    (dram, *levels) = AVX512.levels
    dram = dataclasses.replace(dram, streamed_write_gain=0.56, streamed_copy_gain=0.8)  # Skylake-SP
    slow = dataclasses.replace(AVX512, levels=(dram, *levels))
    case = cpu_case("y[i] = x[i] * 2.0", {"x": ("float32", (1 << 24,))}, slow)
    assert not case.ranked[0].program.pipeline.nontemporal


def test_nontemporal_maps_with_tails() -> None:
    tiny = dataclasses.replace(AVX2, levels=tuple(dataclasses.replace(v, capacity_bytes=64) for v in AVX2.levels))
    case = cpu_case("y[i, j] = x[i, j] + b[j]", {"x": ("float32", (37, 43)), "b": ("float32", (43,))}, tiny)
    assert any(c.program.pipeline.nontemporal for c in case.ranked)
    case.check_some(6)


def test_only_full_vectors_are_nontemporal() -> None:
    """Rows of 30: parts of lines, each going to memory by itself, made a map take twice as long."""
    tiny = dataclasses.replace(AVX512, levels=tuple(dataclasses.replace(v, capacity_bytes=64) for v in AVX512.levels))
    case = cpu_case("y[i, j] = x[i, j] * b[j]", {"x": ("float32", (64, 30)), "b": ("float32", (30,))}, tiny)
    found = [case.source(c).text for c in case.ranked if c.program.pipeline.nontemporal]
    assert any("stream_vf32x16(&" in text for text in found)
    assert not any(f"stream_vf32x{lanes}(&" in text for text in found for lanes in (8, 4))
    case.check_some(6)
