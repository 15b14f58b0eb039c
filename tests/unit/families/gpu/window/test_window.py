"""Windows on GPUs: adjacent outputs of a thread share inputs, for all strides, paddings and edges."""

from __future__ import annotations

import pytest
from cases_gpu import ONE_CORE, Types, case
from sampling import slow

from roller_svc.families import model_of

_INSIDE = "[h + kh >= 1, h + kh - 1 < {h}, w + kw >= 1, w + kw - 1 < {w}]"
_WHERE = " where h in {h}, w in {w}"
_DEPTHWISE = "y[n, c, h, w] +=! x[n, c, h + kh - 1, w + kw - 1].when({inside}, 0.0) * k[c, kh, kw]" + _WHERE
_LAST = "y[n, h, w, c] +=! x[n, h + kh - 1, w + kw - 1, c].when({inside}, 0.0) * k[kh, kw, c]" + _WHERE


def depthwise(text: str, height: int, width: int) -> str:
    return text.format(inside=_INSIDE.format(h=height, w=width), h=height, w=width)


CASES: dict[str, tuple[str, Types]] = {
    "depthwise": (depthwise(_DEPTHWISE, 16, 32), {"x": ("float32", (2, 3, 16, 32)), "k": ("float32", (3, 3, 3))}),
    "edges": (depthwise(_DEPTHWISE, 13, 27), {"x": ("float32", (2, 3, 13, 27)), "k": ("float32", (3, 3, 3))}),
    "halves": (depthwise(_DEPTHWISE, 14, 30), {"x": ("float16", (2, 3, 14, 30)), "k": ("float16", (3, 3, 3))}),
    "channels last": (depthwise(_LAST, 12, 15), {"x": ("float16", (1, 12, 15, 24)), "k": ("float16", (3, 3, 24))}),
    "odd channels last": (depthwise(_LAST, 11, 12), {"x": ("float32", (1, 11, 12, 7)), "k": ("float32", (3, 3, 7))}),
    "stride 2": (
        "y[n, c, h, w] +=! x[n, c, h*2 + kh, w*2 + kw] * k[c, kh, kw] where h in 10, w in 21",
        {"x": ("float32", (2, 5, 21, 43)), "k": ("float32", (5, 3, 3))},
    ),
    "dilated": (
        "y[c, h, w] +=! x[c, h + kh*2, w + kw*2] * k[c, kh, kw] where h in 20, w in 24",
        {"x": ("float32", (5, 24, 28)), "k": ("float32", (5, 3, 3))},
    ),
    "max": ("y[n, c, h, w] >=! x[n, c, h*2 + kh, w*2 + kw] where h in 12, w in 16, kh in 2, kw in 2",
            {"x": ("float32", (2, 6, 24, 32))}),
    "overlapping max": ("y[n, h, w, c] >=! x[n, h*2 + kh, w*2 + kw, c] where h in 10, w in 11, kh in 3, kw in 3",
                        {"x": ("float16", (2, 21, 23, 16))}),
    "average": ("s[c, h, w] +=! x[c, h*2 + kh, w*2 + kw] where h in 14, w in 14, kh in 2, kw in 2; "
                "y[c, h, w] = relu(s[c, h, w] * 0.25 + b[c])", {"x": ("float32", (9, 28, 28)), "b": ("float32", (9,))}),
    "bytes": ("y[c, h, w] >=! x[c, h + kh, w + kw] where h in 18, w in 22, kh in 3, kw in 3",
              {"x": ("int8", (6, 20, 24))}),
    "one dimension": ("y[n, i] +=! x[n, i + t] * k[t] where i in 500",
                      {"x": ("float32", (9, 506)), "k": ("float32", (7,))}),
    "three dimensions": (
        "y[c, d, h, w] >=! x[c, d*2 + a, h*2 + b, w*2 + e] where d in 6, h in 7, w in 9, a in 3, b in 2, e in 2",
        {"x": ("float32", (4, 13, 14, 18))},
    ),
    "gaps": ("y[c, i] +=! x[c, i*4 + t] where i in 60, t in 2", {"x": ("float32", (20, 238))}),
    "a long window": ("y[c, i] +=! x[c, i + t] where i in 100, t in 101", {"x": ("float32", (20, 200))}),
    "two sums": ("s[c, i] +=! x[c, i + t] where i in 200, t in 3; q[c, i] +=! x[c, i + t] * x[c, i + t] "
                 "where i in 200, t in 3; y[c, i] = q[c, i] - s[c, i] * s[c, i]", {"x": ("float32", (9, 202))}),
}  # fmt: skip


@pytest.mark.emulator
@pytest.mark.parametrize("count", [1, slow(4)])
@pytest.mark.parametrize("name", CASES)
def test_tiles_match_the_interpreter(name: str, count: int) -> None:
    case(*CASES[name]).check_some(count)


@pytest.mark.parametrize("name", ["depthwise", "channels last", "stride 2", "max", "overlapping max"])
def test_the_best_threads_have_several_outputs(name: str) -> None:
    found = case(*CASES[name])
    assert max(extent for _, extent in found.ranked[0].thread.extents) > 1
    assert "line0[" in found.text(found.ranked[0])


def test_sliding_windows_are_worth_it_where_instructions_bound() -> None:
    found = case(depthwise(_DEPTHWISE, 64, 64), {"x": ("float16", (8, 32, 64, 64)), "k": ("float16", (32, 3, 3))})
    compute = {}
    for tiles in found.ranked:
        outputs = tiles.thread["h"] * tiles.thread["w"]
        stages = model_of(found.group, tiles, ONE_CORE).estimate(tiles).stages
        compute[outputs] = next(s.seconds for s in stages if s.name == "compute")
    assert compute[max(compute)] < compute[min(compute)] / 2
