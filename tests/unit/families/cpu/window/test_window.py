"""Windows on a CPU: staged planes match the interpreter for all strides, paddings and edges."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cases_cpu import AVX2, Types, cpu_case
from sampling import every, slow

from roller_svc import hardware
from roller_svc.compiler.lower_and_emit import lower
from roller_svc.compiler.pipeline import build_kernel
from roller_svc.compiler.request import build_request
from roller_svc.families.common.cpu.window_analysis import MAX_STRIDE
from roller_svc.families.common.cpu.window_reduction import PlaneWindowDim
from roller_svc.families.cpu.window.workload import (
    CROWDED,
    Dimension,
    PlaneLayout,
    plane_space,
)
from roller_svc.ir.rprogram import RTile
from roller_svc.ir.schedule import Compute, Loop, LoopKind, Storage, iter_nodes
from roller_svc.semantics.interpreter import evaluate

_PADDED = (
    "y[n, c, h, w] +=! x[n, c, h*{s} + kh*{d} - {p}, w*{s} + kw*{d} - {p}].when([h*{s} + kh*{d} >= {p}, "
    "h*{s} + kh*{d} - {p} < {i}, w*{s} + kw*{d} >= {p}, w*{s} + kw*{d} - {p} < {i}], 0.0) * k[c, kh, kw] "
    "where h in {o}, w in {o}"
)


def depthwise(
    size: int, window: int, stride: int = 1, dilation: int = 1, planes: tuple[int, int] = (2, 3), dtype: str = "float32"
) -> tuple[str, Types]:
    """'Same' padding of a square plane."""
    pad = dilation * (window - 1) // 2
    out = (size + 2 * pad - dilation * (window - 1) - 1) // stride + 1
    text = _PADDED.format(s=stride, d=dilation, p=pad, i=size, o=out)
    return text, {"x": (dtype, (*planes, size, size)), "k": (dtype, (planes[1], window, window))}


CASES: dict[str, tuple[str, Types]] = {
    "3x3": depthwise(13, 3),
    "3x3, bfloat16, stride 2": depthwise(37, 3, 2, dtype="bfloat16"),
    "5x5, bfloat16, stride 3": depthwise(52, 5, 3, dtype="bfloat16"),
    "5x5, float16, stride 2": depthwise(21, 5, 2, dtype="float16"),
    "3x3, float8, stride 2": depthwise(37, 3, 2, dtype="float8_e4m3fn"),
    "5x5 on small planes": depthwise(7, 5, planes=(3, 5)),
    "7x7, taps in a loop": depthwise(11, 7),
    "wide planes in bands": depthwise(70, 3, planes=(1, 2)),
    "a window larger than the plane": depthwise(4, 9),
    "stride 2": depthwise(21, 5, stride=2),
    "stride 3": depthwise(20, 3, stride=3),
    "dilated": depthwise(17, 3, dilation=2),
    "dilated, stride 2": depthwise(16, 3, stride=2, dilation=3),
    "float64": depthwise(12, 3, dtype="float64"),
    "float16": depthwise(12, 3, dtype="float16"),
    "valid": ("y[c, h, w] +=! x[c, h + kh, w + kw] * k[c, kh, kw] where h in 10, w in 21",
              {"x": ("float32", (5, 12, 25)), "k": ("float32", (5, 3, 5))}),
    "backwards": ("y[c, h, w] +=! x[c, h - kh + 2, w - kw + 4] * k[c, kh, kw] where h in 10, w in 21",
                  {"x": ("float32", (5, 12, 25)), "k": ("float32", (5, 3, 5))}),
    "a statement of padding": (
        "p[c, h, w] = x[c, h - 1, w - 1].when([1 <= h, h < 12, 1 <= w, w < 12], 0.0) where c in 4, h in 13, w in 13; "
        "q[c, u, v] = k[c, u, v] where c in 4, u in 3, v in 3; s[c, h, w] +=! p[c, h*1 + u, w*1 + v] * q[c, u, v] "
        "where c in 4, h in 11, w in 11, u in 3, v in 3; y[c, h, w] = s[c, h, w] where c in 4, h in 11, w in 11",
        {"x": ("float32", (4, 11, 11)), "k": ("float32", (4, 3, 3))},
    ),
    "average": ("s[c, h, w] +=! x[c, h*3 + u, w*3 + v] where h in 9, w in 11, u in 3, v in 3; "
                "y[c, h, w] = s[c, h, w] * 0.111111", {"x": ("float32", (6, 27, 33))}),
    "average by counts": (
        "s[c, h, w] +=! x[c, h + u - 1, w + v - 1].when([h + u >= 1, h + u - 1 < 9, w + v >= 1, w + v - 1 < 11], 0.0) "
        "where h in 9, w in 11, u in 3, v in 3; "
        "y[c, h, w] = s[c, h, w] / n[h, w] + b[c]",
        {"x": ("float32", (6, 9, 11)), "n": ("float32", (9, 11)), "b": ("float32", (6,))},
    ),
    "divided in the sum": (
        "y[c, h, w] +=! x[c, h + u - 1, w + v - 1].when([h + u >= 1, h + u - 1 < 9, w + v >= 1, w + v - 1 < 11], 0.0) "
        "/ 9.0 where h in 9, w in 11, u in 3, v in 3", {"x": ("float32", (6, 9, 11))},
    ),
    "max": ("y[c, h, w] >=! x[c, h*2 + u - 1, w*2 + v - 1].when([h*2 + u - 1 >= 0, h*2 + u - 1 < 21, w*2 + v - 1 >= 0, "
            "w*2 + v - 1 < 21], const(-3.4e38)) where h in 11, w in 11, u in 3, v in 3",
            {"x": ("float32", (5, 21, 21))}),
    "min at one edge": ("y[c, h, w] <=! x[c, h*2 + u, w*2 + v].when([h*2 + u < 14, w*2 + v < 18], const(3.4e38)) "
                        "where h in 7, w in 9, u in 3, v in 3", {"x": ("float32", (5, 14, 18))}),
    "max of bytes": ("y[c, h, w] >=! x[c, h + u, w + v] where h in 18, w in 22, u in 3, v in 3",
                     {"x": ("int8", (6, 20, 24))}),
    "integers": ("y[c, h, w] +=! x[c, h + u, w + v] where h in 8, w in 22, u in 3, v in 3",
                 {"x": ("int32", (6, 10, 24))}),
    "one dimension": ("y[n, i] +=! x[n, i + t] * k[t] where i in 500",
                      {"x": ("float32", (9, 506)), "k": ("float32", (7,))}),
    "one long row": ("y[i] +=! x[i + t - 3].when([i + t >= 3, i + t < 20003], 0.0) * k[t] where i in 20000, t in 7",
                     {"x": ("float32", (20000,)), "k": ("float32", (7,))}),
    "one long row, stride 2": ("y[i] >=! x[i*2 + t - 1].when([i*2 + t >= 1, i*2 + t < 20002], const(-9.0)) "
                               "where i in 10001, t in 3", {"x": ("float32", (20001,))}),
    "along columns": ("y[c, h, w] +=! x[c, h*2 + u, w] * k[c, u] where h in 10, w in 21",
                      {"x": ("float32", (3, 23, 21)), "k": ("float32", (3, 5))}),
    "three dimensions": (
        "y[c, d, h, w] >=! x[c, d*2 + a, h*2 + b, w*2 + e] where d in 6, h in 7, w in 9, a in 3, b in 2, e in 2",
        {"x": ("float32", (4, 13, 14, 18))},
    ),
    "many taps": ("y[c, i] +=! x[c, i + t] where i in 100, t in 101", {"x": ("float32", (20, 200))}),
    "many lines of taps": ("y[h, w] +=! x[h + u, w + v] where h in 9, w in 20, u in 61, v in 3",
                           {"x": ("float32", (69, 22))}),
    "channels last": ("y[n, h, w, c] >=! x[n, h*2 + u, w*2 + v, c] where h in 5, w in 6, u in 3, v in 3",
                      {"x": ("float32", (2, 11, 13, 24))}),
    "two sums": ("s[c, i] +=! x[c, i + t] where i in 200, t in 3; q[c, i] +=! x[c, i + t] * x[c, i + t] "
                 "where i in 200, t in 3; y[c, i] = q[c, i] - s[c, i] * s[c, i]", {"x": ("float32", (9, 202))}),
    "mirrored edges": ("y[c, h, w] +=! x[c, abs(h + u - 1), w + v].when([h + u <= 9], x[c, 8, w + v]) * k[u, v] "
                       "where h in 9, w in 20, u in 3, v in 3",
                       {"x": ("float32", (2, 10, 22)), "k": ("float32", (3, 3))}),
    "functions of the sums": ("s[c, h, w] +=! x[c, h + u, w + v] * k[c, u, v] where h in 6, w in 9; "
                              "y[c, h, w] = (s[c, h, w] + r[c, h, w]).call(`tanh`)",
                              {"x": ("float32", (4, 8, 11)), "k": ("float32", (4, 3, 3)),
                               "r": ("float32", (4, 6, 9))}),
}  # fmt: skip


@pytest.mark.parametrize("count", [1, slow(2)])
@pytest.mark.parametrize("name", every(2, CASES))
def test_kernels_match_the_interpreter(name: str, count: int) -> None:
    case = cpu_case(*CASES[name])
    assert plane_space(case.group) is not None
    case.check_some(count)


@pytest.mark.parametrize("name", ["3x3", "stride 2", "max", "one dimension"])
def test_vectors_of_sixteen_match_the_interpreter(name: str) -> None:
    hw = hardware.load("local")
    if "avx512f" in hw.isa:
        cpu_case(*CASES[name], hw=hw).check_some(2)


@pytest.mark.parametrize(("planes", "tile", "at_once"), [(12, 12, 4), (6, 4, 4), (9, 6, 3), (10, 2, 2), (7, 7, 1)])
def test_small_planes_are_staged_together(planes: int, tile: int, at_once: int) -> None:
    case = cpu_case(*depthwise(7, 3, planes=(2, planes)))
    best = case.ranked[0]
    block = RTile(tuple((axis, tile if axis == "c" else size) for axis, size in best.program.block.extents))
    candidate = replace(best, program=replace(best.program, block=block))
    tree = lower(case.group, candidate.program, AVX2)[0]
    buffers = {node.tensor: node.shape[0] for node in iter_nodes(tree.body) if isinstance(node, Storage)}
    assert buffers[".plane0_0"] == buffers["y.totals"] == at_once
    replace(case, ranked=(candidate,)).check_some(1)


@pytest.mark.parametrize("name", ["max", "min at one edge"])
def test_nan_and_infinities_match_numpy(name: str) -> None:
    case = cpu_case(*CASES[name])
    (shape,) = (type_.shape for _, type_ in case.program.inputs)
    values = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
    values[0, 3, 4], values[1, 2, 2], values[2, 0, 0], values[2, 5, 5] = np.nan, np.inf, -np.inf, -np.nan
    found = case.results(case.ranked[0], {"x": values})["y"]
    assert np.isnan(found).any()
    assert np.isinf(found).any()
    np.testing.assert_array_equal(found, evaluate(case.program, {"x": values})["y"].wide)


@pytest.mark.parametrize(
    ("expression", "types"),
    [
        ("y[m, n] +=! a[m, k] * b[k, n]", {"a": ("float32", (4, 5)), "b": ("float32", (5, 6))}),
        ("y[m] +=! a[m, k]", {"a": ("float32", (4, 50))}),
        ("y[h, w] +=! x[h + u, w + v] * z[h, w, u, v]", {"x": ("float32", (6, 7)), "z": ("float32", (4, 5, 3, 3))}),
        ("y[i] +=! x[i + t + s] where i in 20, t in 3, s in 4", {"x": ("float32", (25,))}),
        ("y[i] +=! x[i + t] * x[i + 2*t] where i in 20, t in 3", {"x": ("float32", (25,))}),
        ("y[i] +=! x[c, i + t] where i in 20, t in 3, c in 4", {"x": ("float32", (4, 25))}),
        (f"y[i] +=! x[{MAX_STRIDE + 1}*i + t] where i in 20, t in 80", {"x": ("float32", (2000,))}),
    ],
)
def test_groups_that_are_not_windows(expression: str, types: Types) -> None:
    assert plane_space(cpu_case(expression, types).group) is None


def test_large_windows_have_short_sources() -> None:
    """Split, its halves are windows half a tensor apart."""
    text = build_request("y[] +=! x[i]", {"x": ("int8", (3_000_000,))}, target="cpu-x86-avx512", select="model")
    source = build_kernel(text).winner.source
    assert source is not None
    assert len(source.text) < 20_000


def test_lines_share_loads() -> None:
    case = cpu_case(*depthwise(56, 5, planes=(4, 32)))
    best = case.ranked[0].program
    assert best.thread["h"] > 1
    totals = best.thread["h"] * best.thread["w"] // best.unit.shape[-1]
    assert totals >= 4  # independent sums hide the latency of one
    assert totals < AVX2.limits.max_registers_per_thread


def storages(name: str, tile: dict[str, int]) -> dict[str, Storage]:
    """Return the storages of a case's kernel with that register tile, by name."""
    case = cpu_case(*CASES[name])
    first = case.ranked[0].program
    thread = RTile(tuple((axis, tile.get(axis, size)) for axis, size in first.thread.extents))
    block = RTile(tuple((axis, -(-size // thread[axis]) * thread[axis]) for axis, size in first.block.extents))
    tree = lower(case.group, replace(first, block=block, thread=thread), AVX2)[0]
    return {node.tensor: node for node in iter_nodes(tree.body) if isinstance(node, Storage)}


@pytest.mark.parametrize(("rows", "width", "is_pinned"), [(1, 16, False), (2, 16, True), (4, 24, True), (4, 32, False)])
def test_staged_vectors_are_loaded_once_if_registers_suffice(rows: int, width: int, *, is_pinned: bool) -> None:
    assert storages("3x3", {"h": rows, "w": width})[".plane0_0.vectors"].no_rematerialize is is_pinned


def test_reductions_read_by_a_map_share_one_buffer() -> None:
    assert {"s.totals", "s.row"} & storages("functions of the sums", {}).keys() == {"s.totals"}


@pytest.mark.parametrize(("columns", "kind"), [(11, LoopKind.VECTOR), (5, LoopKind.VECTOR), (3, LoopKind.SERIAL)])
def test_short_output_lines_are_partial_vectors(columns: int, kind: LoopKind) -> None:
    case = cpu_case(*depthwise(columns, 3))
    tree = lower(case.group, case.ranked[0].program, AVX2)[0]
    loops = [node for node in iter_nodes(tree.body) if isinstance(node, Loop) and isinstance(node.body[0], Compute)]
    assert {(loop.kind, loop.extent) for loop in loops if loop.body[0].tensor == "y"} == {(kind, columns)}


@pytest.mark.parametrize("rows", [42, 44, 48])
def test_phases_avoid_cache_set_conflicts(rows: int) -> None:
    """44 rows in four phases, 83 columns, 5 x 5 taps: phases of 12 x 85 elements would have buffers of 4 KiB."""
    down, along = PlaneWindowDim("h", 83, "u", 5, 2, 1), PlaneWindowDim("w", 83, "v", 5, 2, 1)
    found = PlaneLayout((Dimension(down, rows, 4), Dimension(along, 83, 1)), 64)
    assert found.phase_elements >= found.dims[0].size * found.dims[1].size
    assert found.phase_elements % CROWDED
