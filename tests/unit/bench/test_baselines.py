"""The calls that stand for numpy's and torch's experts: right, and right again on other values."""

from __future__ import annotations

import numpy as np
import pytest

from roller_bench.baselines import Baseline, baseline_of, calls_of, inference, matching_translations
from roller_bench.baselines.calls import Calls
from roller_bench.baselines.translate.nest import nest_of
from roller_svc.errors import ArgumentError, BuildError
from roller_svc.frontend.parse import parse
from roller_svc.ir.dtype import DType
from roller_svc.ir.program import TensorProgram, TensorType
from roller_svc.semantics.compare import agrees
from roller_svc.semantics.inputs import random_inputs
from roller_svc.semantics.interpreter import evaluate

Shapes = dict[str, tuple[int, ...]]

PADDED = "X[n, c, h + kh - 1, w + kw - 1].when([h + kh - 1 >= 0, h + kh - 1 < 9, w + kw - 1 >= 0, w + kw - 1 < 9], 0.0)"

# name: text, shapes of inputs (int32 where a name begins with i), the peers that must have it, what each must call
CASES: dict[str, tuple[str, Shapes, dict[str, str]]] = {
    "matmul": ("C[m, n] +=! A[m, k] * B[k, n]", {"A": (5, 7), "B": (7, 6)}, {"numpy": "mm", "torch": "mm"}),
    "transposed": ("C[m, n] +=! A[k, m] * B[n, k]", {"A": (7, 5), "B": (6, 7)}, {"numpy": "mm", "torch": "mm"}),
    "columns first": ("C[n, m] +=! A[m, k] * B[k, n]", {"A": (5, 7), "B": (7, 6)}, {"numpy": "mm", "torch": "mm"}),
    "batched": (
        "C[b, m, n] +=! A[b, m, k] * B[b, k, n]", {"A": (3, 5, 7), "B": (3, 7, 6)}, {"numpy": "bmm", "torch": "bmm"},
    ),
    "matrix times vector": ("C[m, n] +=! A[m, k] * B[k, n]", {"A": (5, 7), "B": (7, 1)}, {"numpy": "m", "torch": "m"}),
    "three factors": (
        "Y[a, d] +=! A[a, b] * B[b, c] * C[d, c]", {"A": (4, 5), "B": (5, 6), "C": (7, 6)},
        {"numpy": "einsum", "torch": "einsum"},
    ),
    "divided sum": (
        "Y[m, n] +=! A[m, k] * B[k, n] / z[m]", {"A": (5, 7), "B": (7, 6), "z": (5,)}, {"numpy": "mm", "torch": "mm"},
    ),
    "conv2d": (
        f"Y[n, f, h, w] +=! {PADDED} * W[f, c, kh, kw] where h in 9, w in 9",
        {"X": (2, 3, 9, 9), "W": (4, 3, 3, 3)}, {"torch": "conv2d"},
    ),
    "conv2d stride 2": (
        "Y[n, f, h, w] +=! X[n, c, h * 2 + kh, w * 2 + kw] * W[f, c, kh, kw] where h in 4, w in 4",
        {"X": (2, 3, 9, 9), "W": (4, 3, 3, 3)}, {"torch": "conv2d"},
    ),
    "conv2d channels last": (
        "Y[n, h, w, f] +=! X[n, h + kh, w + kw, c] * W[kh, kw, c, f] where h in 7, w in 7",
        {"X": (2, 9, 9, 3), "W": (3, 3, 3, 4)}, {"torch": "conv2d"},
    ),
    "conv2d of patches": (
        "Y[n, f, h, w] +=! X[n, k // 9, h + k % 9 // 3, w + k % 9 % 3] * W[f, k] where h in 7, w in 7",
        {"X": (2, 3, 9, 9), "W": (4, 27)}, {"torch": "conv2d"},
    ),
    "conv2d 1x1": (
        "Y[n, f, h, w] +=! X[n, c, h, w] * W[f, c, 0, 0]", {"X": (2, 3, 9, 9), "W": (4, 3, 1, 1)},
        {"numpy": "bmm", "torch": ""},
    ),
    "conv1d": (
        "Y[n, f, h] +=! X[n, c, h + kh] * W[f, c, kh] where h in 7", {"X": (2, 3, 9), "W": (4, 3, 3)},
        {"torch": "conv1d"},
    ),
    "conv3d": (
        "Y[n, f, d, h, w] +=! X[n, c, d + r, h + s, w + t] * W[f, c, r, s, t] where d in 3, h in 4, w in 4",
        {"X": (2, 3, 5, 6, 6), "W": (4, 3, 3, 3, 3)}, {"torch": "conv3d"},
    ),
    "grouped": (
        "Y[n, f, h, w] +=! X[n, f // 2 * 3 + c, h + kh, w + kw] * W[f, c, kh, kw] where h in 7, w in 7",
        {"X": (2, 6, 9, 9), "W": (4, 3, 3, 3)}, {"torch": "conv2d"},
    ),
    "depthwise": (
        f"Y[n, c, h, w] +=! {PADDED} * W[c, kh, kw] where h in 9, w in 9",
        {"X": (2, 3, 9, 9), "W": (3, 3, 3)}, {"torch": "conv2d"},
    ),
    "conv, bias, relu": (
        f"C[n, f, h, w] +=! {PADDED} * W[f, c, kh, kw] where h in 9, w in 9; "
        "Y[n, f, h, w] = (C[n, f, h, w] + b[f]).call(`max`, [0.0])",
        {"X": (2, 3, 9, 9), "W": (4, 3, 3, 3), "b": (4,)}, {"torch": "conv2d, relu"},
    ),
    "average pooling": (
        f"Y[n, c, h, w] +=! {PADDED} / 9.0 where h in 9, w in 9, kh in 3, kw in 3",
        {"X": (2, 3, 9, 9)}, {"numpy": "sum", "torch": "avg_pool"},
    ),
    "greatest of windows": (
        "Y[c, h, w] >=! X[c, h * 2 + kh, w * 2 + kw].when([h * 2 + kh < 8, w * 2 + kw < 8], const(-3.4e38)) "
        "where h in 4, w in 4, kh in 3, kw in 3",
        {"X": (3, 8, 8)}, {"numpy": "max", "torch": "max_pool"},
    ),
    "softmax": (
        "m[r] >=! X[r, v]; s[r] +=! (X[r, v] - m[r]).call(`exp`); Y[r, v] = (X[r, v] - m[r]).call(`exp`) / s[r]",
        {"X": (5, 9)}, {"numpy": "softmax", "torch": "softmax"},
    ),
    "layer norm": (
        "s[r] +=! X[r, k]; u[r] = s[r] / 8.0; q[r] +=! (X[r, k] - u[r]) * (X[r, k] - u[r]); "
        "Y[r, k] = (X[r, k] - u[r]) * (q[r] / 8.0 + 1e-05).call(`rsqrt`) * w[k] + b[k]",
        {"X": (5, 8), "w": (8,), "b": (8,)}, {"numpy": "", "torch": "layer_norm"},
    ),
    "rms norm": (
        "q[r] +=! X[r, k] * X[r, k]; Y[r, k] = X[r, k] * (q[r] / 8.0 + 0.000001).call(`rsqrt`) * w[k]",
        {"X": (5, 8), "w": (8,)}, {"numpy": "", "torch": "rms_norm"},
    ),
    "batch norm": (
        "Y[n, c, h] = b[c] + w[c] * (X[n, c, h] - u[c]) / (v[c] + 0.00001).call(`sqrt`)",
        {"X": (2, 3, 5), "u": (3,), "v": (3,), "w": (3,), "b": (3,)}, {"numpy": "", "torch": ""},
    ),
    "attention": (
        "s[h, i, j] +=! q[h, i, d] * k[h, j, d]; m[h, i] >=! s[h, i, j]; "
        "e[h, i, j] = ((s[h, i, j] - m[h, i]) * 0.125).call(`exp`); z[h, i] +=! e[h, i, j]; "
        "Y[h, i, d] +=! e[h, i, j] * v[h, j, d] / z[h, i]",
        {"q": (2, 6, 4), "k": (2, 6, 4), "v": (2, 6, 4)}, {"numpy": "bmm", "torch": ""},
    ),
    "gelu": (
        "H[m, n] +=! A[m, k] * B[k, n]; Y[m, n] = 0.5 * (H[m, n] + b[n]) * "
        "(1.0 + ((H[m, n] + b[n]) * 0.70710678).call(`erf`))",
        {"A": (5, 7), "B": (7, 6), "b": (6,)}, {"torch": "gelu"},
    ),
    "argmax": (
        "m[r] >=! X[r, v]; Y[r] <=! v.when([m[r] == X[r, v]], v.val()).cast(`int64`)",
        {"X": (5, 9)}, {"numpy": "argmax", "torch": "argmax"},
    ),
    "row sum": ("Y[r] +=! X[r, v]", {"X": (5, 9)}, {"numpy": "sum", "torch": "sum"}),
    "column max": ("Y[v] >=! X[r, v]", {"X": (5, 9)}, {"numpy": "max", "torch": "max"}),
    "relu": ("Y[i] = X[i].call(`max`, [0.0])", {"X": (50,)}, {"numpy": "relu", "torch": "relu"}),
    "guarded relu": ("Y[i] = X[i].when([X[i] > 0.0], 0.0)", {"X": (50,)}, {"numpy": "relu", "torch": "relu"}),
    "chain": (
        "Y[i, j] = (X[i, j] - Z[i, j] * 0.5) / w[i] + j", {"X": (5, 6), "Z": (5, 6), "w": (5,)},
        {"numpy": "", "torch": ""},
    ),
    "cast": ("Y[i] = (X[i] * 9.0).cast(`int32`)", {"X": (50,)}, {"numpy": "cast", "torch": "cast"}),
    "transpose": ("Y[k, j, i] = X[i, j, k]", {"X": (4, 5, 6)}, {"numpy": "copy", "torch": "copy"}),
    "broadcast": ("Y[i, j, k] = X[i, k] where j in 4", {"X": (5, 6)}, {"numpy": "copy", "torch": "copy"}),
    "enlarged": ("Y[i, j] = X[i // 2, j // 2] where i in 8, j in 6", {"X": (4, 3)}, {"numpy": "copy", "torch": "copy"}),
    "border": (
        "Y[i] = X[i - 1].when([i >= 1, i < 6], 0.0) where i in 7", {"X": (5,)}, {"numpy": "pad", "torch": "pad"},
    ),
    "gather": ("Y[i, c] = X[i0[i], c]", {"X": (9, 4), "i0": (5,)}, {"numpy": "take", "torch": "take"}),
    "gather columns": ("Y[i, c] = X[i, i0[c]]", {"X": (9, 4), "i0": (3,)}, {"numpy": "take", "torch": "take"}),
    "scatter": (
        "X[i0[b, 0], i0[b, 1], m] =. U[b, m]", {"X": (4, 4, 3), "i0": (2, 2), "U": (2, 3)},
        {"numpy": "put", "torch": "put"},
    ),
    "dequantised": (
        "w[s, n] = z[s // 4, n] * ((i0[s // 8, n] >> (s % 8 * 4)).call(`bitwise_and`, [15]) - 8) where s in 16; "
        "Y[n] +=! X[s] * w[s, n]",
        {"X": (16,), "i0": (2, 5), "z": (4, 5)}, {"numpy": "m", "torch": "m"},
    ),
}  # fmt: skip


def _program(name: str) -> TensorProgram:
    text, shapes, _ = CASES[name]
    return parse(text, {n: TensorType(_dtype(n), shape) for n, shape in shapes.items()}, None)


def _dtype(name: str) -> DType:
    return DType.INT32 if name == "i0" else DType.FLOAT32


def _calls(library: str) -> Calls:
    if library == "torch":
        pytest.importorskip("torch")
    return calls_of(library, 1)


@pytest.mark.parametrize(("name", "library"), [(name, one) for name, case in CASES.items() for one in case[2]])
def test_a_peer_is_right_on_every_call(name: str, library: str) -> None:
    calls = _calls(library)
    program = _program(name)
    arrays = random_inputs(program, 0)
    with inference(library), np.errstate(all="ignore"):
        found = matching_translations(program, arrays, calls, evaluate(program, arrays))
        for array_name, array in random_inputs(program, 1).items():  # the same memory, other values
            arrays[array_name][...] = array
        want = evaluate(program, arrays)
        for way in found:
            way.trace.run()
            verdict = agrees(program, way.results(calls), want)
            assert verdict.ok, f"{way.trace.names}: {verdict.detail}"
    named = [", ".join(way.trace.names) for way in found]
    assert any(CASES[name][2][library] in calls_made for calls_made in named), named


def test_the_peer_is_one_of_the_ways() -> None:
    program = _program("matmul")
    arrays = random_inputs(program, 0)
    calls = calls_of("numpy", 1)
    want = evaluate(program, arrays)
    baseline: Baseline = baseline_of(program, arrays, calls, want)
    assert baseline.calls in [tuple(way.trace.names) for way in matching_translations(program, arrays, calls, want)]


def test_no_peer_says_why() -> None:
    program = parse("Y[i] = X[i].call(`erf`)", {"X": TensorType(DType.FLOAT32, (4,))}, None)
    arrays = random_inputs(program, 0)
    with pytest.raises(BuildError, match="numpy has no erf") as failure:
        baseline_of(program, arrays, calls_of("numpy", 1), evaluate(program, arrays))
    assert failure.value.code == "no-peer"


def test_a_wrong_peer_is_not_taken() -> None:
    """Where the reference wants something else, no way to write the program is right."""
    program = _program("matmul")
    arrays = random_inputs(program, 0)
    other = evaluate(program, random_inputs(program, 1))
    with pytest.raises(BuildError, match="WrongAnswerError: mm: C"):
        baseline_of(program, arrays, calls_of("numpy", 1), other)


def test_a_peer_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    for part in ("library", "rows", "windows"):
        monkeypatch.delitem(__import__("sys").modules, f"roller_bench.baselines.torch_{part}", raising=False)
    with pytest.raises(ArgumentError, match="torch is not installed"):
        calls_of("torch", 1)


def test_axes_under_divisions_are_split_until_indices_are_affine() -> None:
    """b // 12 % 5 * 2 and b % 12 of an axis of 60 times 2."""
    program = parse(
        "Y[b] = X[b // 60, b // 12 % 5, b % 12] where b in 120",
        {"X": TensorType(DType.FLOAT32, (2, 5, 12))},
        None,
    )
    nest = nest_of(program.statements[0])
    assert [axis.extent for axis in nest.axes] == [2, 5, 12]
    assert all(type(part).__name__ == "AxisRef" for part in nest.body.index)
