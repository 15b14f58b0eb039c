"""Separated windows and sorted lines match the interpreter, and only windows that gain are separated."""

from __future__ import annotations

import pytest
from cases_cpu import AVX2, Types, cpu_case

from roller_svc.compiler.lower_and_emit import lower
from roller_svc.families.common.cpu.window_reduction import WindowedSum
from roller_svc.families.cpu.window.deinterleave import deinterleave
from roller_svc.families.cpu.window.workload import plane_space
from roller_svc.ir.expr import loads_of
from roller_svc.ir.schedule import Storage, Transpose, iter_nodes

F32 = "float32"


def pool(combine: str, size: int, window: int, stride: int, value: str = "{x}", dtype: str = F32) -> tuple[str, Types]:
    """Return pooling of three planes with padding of `window // 2`."""
    pad, low = window // 2, "0.0" if combine == "+" else "const(-6e4)"
    out = (size + 2 * pad - window) // stride + 1
    h, w = (f"{a}*{stride} + {t} - {pad}" for a, t in (("h", "u"), ("w", "v")))
    inside = f"[{h} >= 0, {h} < {size}, {w} >= 0, {w} < {size}]"
    read = value.format(x=f"x[c, {h}, {w}]")
    where = f"h in {out}, w in {out}, u in {window}, v in {window}"
    text = f"y[c, h, w] {combine}=! {read}.when({inside}, {low}) where {where}"
    return text, {"x": (dtype, (3, size, size))}


CASES: dict[str, tuple[str, Types]] = {
    "max, stride 1": pool(">", 19, 3, 1),
    "max, stride 2": pool(">", 29, 3, 2),
    "max, stride 3 of wide lines": pool(">", 61, 5, 3),
    "max, stride 4": pool(">", 45, 5, 4),
    "short lines": pool(">", 14, 2, 2),
    "sum, stride 2": pool("+", 40, 3, 2),
    "of a function": pool(">", 29, 3, 2, "{x}.call(`relu`)"),
    "float64": pool(">", 29, 3, 2, dtype="float64"),
    "float16": pool(">", 29, 3, 2, dtype="float16"),
    "no overlap": ("y[c, h, w] <=! x[c, h*2 + u, w*2 + v].call(`exp`) where h in 9, w in 20, u in 2, v in 2",
                   {"x": (F32, (4, 18, 40))}),
    "int32, dilated": ("y[c, h, w] >=! x[c, h*2 + u*3, w*2 + v*3] where h in 9, w in 20, u in 3, v in 3",
                       {"x": ("int32", (4, 23, 45))}),
    "backwards": ("y[c, h, w] +=! x[c, h*2 - u + 2, w*2 - v + 2] where h in 9, w in 20, u in 3, v in 3",
                  {"x": (F32, (4, 19, 41))}),
    "long lines of channels": ("y[c, h, w] >=! x[h*2 + u, w*2 + v, c] where c in 3, h in 4, w in 60, u in 3, v in 3",
                               {"x": (F32, (9, 121, 3))}),
    "wider than a row block": ("y[h, w] >=! x[h*2 + u, w*2 + v] where h in 3, w in 5001, u in 2, v in 2",
                               {"x": (F32, (6, 10002))}),
}  # fmt: skip


def reduction(text: str, types: Types) -> WindowedSum:
    space = plane_space(cpu_case(text, types).group)
    assert space is not None
    return space.reductions[0]


@pytest.mark.parametrize("name", CASES)
def test_kernels_match_the_interpreter(name: str) -> None:
    case = cpu_case(*CASES[name])
    assert reduction(*CASES[name]).window_dims[-2].taps == 1
    case.check_some(2)


@pytest.mark.parametrize(
    "case",
    [
        pool("+", 19, 3, 1, "{x}.call(`exp`)"),  # each exponential would be computed three times
        ("y[c, h, w] *=! x[c, h + u, w + v] where h in 8, w in 9, u in 3, v in 3", {"x": (F32, (3, 10, 11))}),
        (
            "y[c, h, w] +=! x[c, h + u, w + v] * k[u, v] where h in 8, w in 9",
            {"x": (F32, (3, 10, 11)), "k": (F32, (3, 3))},
        ),
        ("y[c, h, w] >=! x[c, h + u, w + v] where h in 8, w in 9, u in 10, v in 3", {"x": (F32, (3, 17, 11))}),
    ],
)
def test_reductions_that_are_not_separated(case: tuple[str, Types]) -> None:
    assert reduction(*case).window_dims[-2].taps > 1


def test_neighbouring_lines_are_prefetched() -> None:
    (plane,) = reduction(*pool(">", 29, 3, 2)).planes
    assert len(loads_of(plane.value)) == 3
    assert plane.lines == 2


@pytest.mark.parametrize(
    ("phases", "first", "count", "expected"),
    [
        (2, 1, 112, (1, 56, 16)),
        (2, 0, 15, (0, 7, 4)),
        (3, 1, 61, (3, 19, 16)),
        (2, 0, 7, None),
        (5, 0, 90, None),
        (1, 0, 90, None),
    ],
)
def test_lines_are_sorted_by_whole_vectors(phases: int, first: int, count: int, expected: tuple[int, int, int] | None) -> None:
    found = deinterleave(phases, first, count, 16)
    assert (found and (found.first, found.rows, found.lanes)) == expected


@pytest.mark.parametrize("dtype", [F32, "float16", "bfloat16"])
def test_strided_lines_are_sorted_in_registers(dtype: str) -> None:
    """A depthwise line is read from memory, a maximum of lines from its buffer."""
    depthwise = (
        "y[c, h, w] +=! x[c, h*2 + u, w*2 + v] * k[c, u, v] where h in 8, w in 20",
        {"x": (dtype, (3, 17, 41)), "k": (dtype, (3, 3, 3))},
    )
    sources = []
    for text, types in (depthwise, pool(">", 29, 3, 2, dtype=dtype)):
        case = cpu_case(text, types)
        (tree,) = lower(case.group, case.ranked[0].program, AVX2)
        sources.append({n.source.tensor for n in iter_nodes(tree.body) if isinstance(n, Transpose)})
        buffers = {n.tensor for n in iter_nodes(tree.body) if isinstance(n, Storage)}
        assert (".plane0_0.line" in buffers) == (sources[-1] == {".plane0_0.line"})
    assert sources == [{"x"}, {".plane0_0.line"}]


def test_rows_of_many_strided_elements_are_loops_in_c() -> None:
    """A line of 121 elements, each the greatest of three, is a loop over vectors of eight and two in the remainder."""
    case = cpu_case(*CASES["long lines of channels"])
    assert case.source(case.ranked[0]).text.count("x[") < 121  # 373 without a loop
