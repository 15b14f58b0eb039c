"""Windows over channels match the interpreter for all strides, paddings, tails and edges."""

from __future__ import annotations

import numpy as np
import pytest
from cases_cpu import AVX2, Types, cpu_case

from roller_svc.compiler.lower_and_emit import lower
from roller_svc.families.cpu.channel_window.schedule import MAX_MARGIN_POSITIONS
from roller_svc.families.cpu.channel_window.workload import channel_space
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import loads_of
from roller_svc.ir.schedule import Branch, Compute, Loop, LoopKind, Storage, iter_nodes
from roller_svc.schedule.prepack import prepack
from roller_svc.semantics.interpreter import evaluate

F32 = "float32"
LANES = AVX2.vector_bytes // 4


def depthwise(
    size: int,
    window: int,
    stride: int = 1,
    dilation: int = 1,
    channels: int = 24,
    images: int = 2,
    after: str = "",
    dtype: str = F32,
) -> tuple[str, Types]:
    """Return 'same' padding of square images, weights [c, kh, kw]."""
    pad = dilation * (window - 1) // 2
    out = (size + 2 * pad - dilation * (window - 1) - 1) // stride + 1
    h, w = (f"{a}*{stride} + {t}*{dilation} - {pad}" for a, t in (("h", "u"), ("w", "v")))
    guard = f".when([{h} >= 0, {h} < {size}, {w} >= 0, {w} < {size}], 0.0)" if pad else ""
    text = f"s[n, h, w, c] +=! x[n, {h}, {w}, c]{guard} * k[c, u, v] where h in {out}, w in {out}"
    text += after or "; y[n, h, w, c] = s[n, h, w, c]"
    return text, {"x": (dtype, (images, size, size, channels)), "k": (dtype, (channels, window, window))}


def pool(combine: str, size: int, window: int, stride: int, channels: int = 16) -> tuple[str, Types]:
    pad = window // 2
    out = (size + 2 * pad - window) // stride + 1
    h, w = (f"{a}*{stride} + {t} - {pad}" for a, t in (("h", "u"), ("w", "v")))
    guard = f"[{h} >= 0, {h} < {size}, {w} >= 0, {w} < {size}]"
    low = "0.0" if combine == "+" else "const(`-inf`)"
    text = f"y[n, h, w, c] {combine}=! x[n, {h}, {w}, c].when({guard}, {low}) where h in {out}, w in {out}, "
    return text + f"u in {window}, v in {window}", {"x": (F32, (2, size, size, channels))}


EPILOGUE = "; y[n, h, w, c] = (s[n, h, w, c] + r[n, h, w, c] + b[c]).call(`relu`)"
residual = depthwise(9, 3, after=EPILOGUE)
residual[1].update({"r": (F32, (2, 9, 9, 24)), "b": (F32, (24,))})
CASES: dict[str, tuple[str, Types]] = {
    "3x3": depthwise(13, 3),
    "long lines": depthwise(37, 3, images=1, channels=8),
    "5x5, stride 2": depthwise(21, 5, 2),
    "7x7 of small images": depthwise(5, 7),
    "dilated": depthwise(17, 3, dilation=2),
    "dilated, stride 3": depthwise(16, 3, stride=3, dilation=4),
    "channels beyond a vector": depthwise(9, 3, channels=21),
    "many channels": depthwise(6, 3, channels=100, images=1),
    "without padding": depthwise(12, 1),
    "an epilogue": residual,
    "float64": depthwise(9, 3, dtype="float64"),
    "float16": depthwise(9, 3, dtype="float16"),
    "bfloat16, weights rounded to float16": (
        "y[h, w, c] +=! x[h + u, w + v, c] * (k[u, v, c] * k[u, v, c]).cast(`float16`) where h in 9, w in 20",
        {"x": ("bfloat16", (11, 22, 19)), "k": ("bfloat16", (3, 3, 19))},
    ),
    "max": pool(">", 15, 3, 2),
    "max, stride 1": pool(">", 14, 3, 1),
    "max, no overlap": pool(">", 14, 2, 2),
    "sum": pool("+", 14, 3, 2, channels=19),
    "average by counts": (
        "s[n, h, w, c] +=! x[n, h + u - 1, w + v - 1, c].when([h + u >= 1, h + u - 1 < 9, w + v >= 1, w + v - 1 < 11], "
        "0.0) where h in 9, w in 11, u in 3, v in 3; y[n, h, w, c] = s[n, h, w, c] / m[h, w]",
        {"x": (F32, (2, 9, 11, 16)), "m": (F32, (9, 11))},
    ),
    "backwards": ("y[h, w, c] +=! x[h - u + 2, w - v + 2, c] * k[u, v] where h in 9, w in 20",
                  {"x": (F32, (11, 22, 16)), "k": (F32, (3, 3))}),
    "int32": ("y[h, w, c] +=! x[h + u, w + v, c] * k[u, v, c] where h in 9, w in 20",
              {"x": ("int32", (11, 22, 16)), "k": ("int32", (3, 3, 16))}),
    "one dimension": ("y[n, t, c] +=! x[n, t + u, c] * k[u, c] where t in 50",
                      {"x": (F32, (3, 53, 24)), "k": (F32, (4, 24))}),
    "three dimensions": (
        "y[d, h, w, c] >=! x[d*2 + a, h*2 + b, w*2 + e, c] where d in 3, h in 4, w in 5, a in 3, b in 2, e in 2",
        {"x": (F32, (7, 8, 10, 16))},
    ),
    "three dimensions, padded": (
        "y[d, h, w, c] >=! x[d + a - 1, h*2 + b - 1, w*2 + e - 1, c].when([d + a >= 1, d + a < 5, h*2 + b >= 1, w*2 + e >= 1], "
        "-9.0) where d in 4, h in 4, w in 9, a in 3, b in 3, e in 3",
        {"x": (F32, (4, 9, 19, 16))},
    ),
    "lines that a mask selects": (
        "t[h, w, c] = select(m[h] > 0.0, x[h, w, c], 0.0); "
        "y[h, w, c] >=! t[h + u - 1, w + v - 1, c].when([h + u >= 1, h + u < 10, w + v >= 1, w + v < 21], -9.0) "
        "where h in 9, w in 20, u in 3, v in 3",
        {"x": (F32, (9, 20, 16)), "m": (F32, (9,))},
    ),
    "squares": ("y[h, w, c] +=! x[h + u, w + v, c] * x[h + u, w + v, c] where h in 8, w in 9, u in 3, v in 3",
                {"x": (F32, (10, 11, 16))}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_kernels_match_the_interpreter(name: str) -> None:
    case = cpu_case(*CASES[name])
    assert channel_space(case.group, LANES) is not None
    assert {c.program.family for c in case.ranked} == {"cpu/channel_window"}
    case.check_some(2)


def test_nan_and_infinities_match_the_interpreter() -> None:
    """A weight of infinity times a margin of zero is a NaN."""
    case = cpu_case(*depthwise(9, 3, channels=8))
    rng = np.random.default_rng(3)
    arrays = {name: rng.standard_normal(type_.shape).astype(np.float32) for name, type_ in case.program.inputs}
    arrays["x"][0, 3, 4, 5], arrays["k"][2, 0, 0] = np.nan, np.inf
    found = case.results(case.ranked[0], arrays)["y"]
    expected = evaluate(case.program, arrays)["y"].wide
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("expression", "types"),
    [
        ("y[c, h, w] >=! x[c, h + u, w + v] where h in 8, w in 16, u in 3, v in 3", {"x": (F32, (4, 10, 18))}),
        ("y[h, w, c] >=! x[h + u, w + v, c] where h in 8, w in 9, u in 3, v in 3", {"x": (F32, (10, 11, 5))}),
        ("y[h, w, c] >=! x[c, h + u, w + v] where h in 8, w in 9, u in 3, v in 3", {"x": (F32, (16, 10, 11))}),
        (
            "y[h, w, c] +=! x[h + u, w + v, c] * k[h, u, v] where w in 9",
            {"x": (F32, (10, 11, 16)), "k": (F32, (8, 3, 3))},
        ),
        ("y[h, w, c] +=! x[h + u, w, c] where h in 4, u in 200", {"x": (F32, (203, 9, 16))}),
    ],
)
def test_groups_that_are_not_windows_over_channels(expression: str, types: Types) -> None:
    assert channel_space(cpu_case(expression, types).group, LANES) is None


def test_constant_weights_are_packed_once() -> None:
    case = cpu_case(*CASES["3x3"])
    (tree,) = lower(case.group, case.ranked[0].program, AVX2)
    prepared = prepack(tree, frozenset({"k"}))
    assert len(prepared.launches) == 1
    read = {load for n in iter_nodes(prepared.tree.body) if isinstance(n, Compute) for load in _tensors(n)}
    assert "k" not in read


def test_narrow_weights_are_widened_as_they_are_packed() -> None:
    case = cpu_case(*depthwise(9, 3, dtype="bfloat16"))
    (tree,) = lower(case.group, case.ranked[0].program, AVX2)
    weights = [n for n in iter_nodes(tree.body) if isinstance(n, Storage) and n.tensor.startswith(".weights")]
    assert {storage.dtype for storage in weights} == {DType.FLOAT32}


def test_a_loaded_vector_serves_all_outputs_of_a_tile() -> None:
    """8 outputs of 3 taps read 10 columns."""
    case = cpu_case(*depthwise(56, 3, channels=LANES, images=1))
    program = case.ranked[0].program
    positions = program.thread["w"]
    space = channel_space(case.group, LANES)
    assert space is not None
    assert space.loaded_columns(positions) == positions + 2
    (tree,) = lower(case.group, program, AVX2)
    tiles = [n for n in iter_nodes(tree.body) if isinstance(n, Loop) and n.var == ".tile"]
    assert [n.kind for n in tiles] == [LoopKind.SERIAL]
    loads = [n for n in iter_nodes(tiles[0].body) if isinstance(n, Compute) and "x" in _tensors(n)]
    assert len(loads) == positions + 2


def test_lines_that_read_the_margin_have_smaller_tiles() -> None:
    case = cpu_case(*pool(">", 112, 3, 2, channels=LANES))
    (tree,) = lower(case.group, case.ranked[0].program, AVX2)
    (branch,) = [n for n in iter_nodes(tree.body) if isinstance(n, Branch)]
    tiles = [
        {n.shape[0] for n in iter_nodes(nodes) if isinstance(n, Storage) and n.tensor.endswith("acc")}
        for nodes in (branch.then, branch.otherwise)
    ]
    assert tiles == [{case.ranked[0].program.thread["w"]}, {MAX_MARGIN_POSITIONS}]


def test_conditions_that_load_are_not_tested_before_their_bounds() -> None:
    """The mask has no element for a line of the margin."""
    case = cpu_case(*CASES["lines that a mask selects"])
    (tree,) = lower(case.group, case.ranked[0].program, AVX2)
    branches = [n for n in iter_nodes(tree.body) if isinstance(n, Branch)]
    assert not any(loads_of(branch.cond) for branch in branches)
    loaders = [n for n in iter_nodes(tree.body) if isinstance(n, Compute) and "m" in _tensors(n)]
    assert loaders, "the mask is tested where it is read"


def _tensors(node: Compute) -> set[str]:
    return {load.tensor for load in loads_of(node.value)}
