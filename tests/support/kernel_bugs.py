"""Kernels that broke other compilers (tests/data/kernel_bugs.json): their inputs, right values and a comparison.

A case has `expr`, `options` of compile, and `inputs` with type, shape and `values`: a numpy expression of `rng`,
`seed`, `shape` and earlier inputs. Without it floats are normal and integers small. `targets` are "local" (a CPU),
"emulate" and "gpu" (compiled only). `expect` gives each output as a numpy expression of the inputs, in which floats are
float64, after those of `let`; or it is "refuse" (by compile), "refuse-call" or "builds". `tol` is relative and absolute
for floats, otherwise by type; integers are exact.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import roller_svc
from roller_svc.errors import InputError

Json = dict[str, Any]
Arrays = dict[str, np.ndarray]
CASES: list[Json] = json.loads((Path(__file__).parents[1] / "data" / "kernel_bugs.json").read_text())["cases"]
NARROW = ("bfloat16", "float8_e4m3fn", "float8_e5m2")
TOLERANCES = {
    "float64": (1e-12, 1e-12), "float32": (2e-5, 2e-5), "float16": (4e-3, 4e-3), "bfloat16": (3e-2, 3e-2),
    "float8_e4m3fn": (0.15, 0.1), "float8_e5m2": (0.3, 0.1),
}  # fmt: skip


def cases_for(kind: str) -> list[Json]:
    return [case for case in CASES if kind in case["targets"]]


def check_case(case: Json, target: str, *, emulate: bool = False, runs: bool = True, seeds: int = 2) -> None:
    """Compile a case, and compare its results with numpy's. `runs`: whether this machine can run the kernel."""
    signature = {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in case["inputs"].items()}
    options = case.get("options", {}) | ({"runtime": "emulator"} if emulate else {})

    def build() -> roller_svc.Kernel:
        return roller_svc.compile(case["expr"], signature, target=target, select="model", top_k=1, **options)

    if case["expect"] == "refuse":
        with pytest.raises(InputError):
            build()
        return
    kernel = build()
    assert sum(resources.spill_bytes for resources in kernel.resources) == 0
    if case["expect"] == "builds" or not runs:
        assert kernel.binary
        return
    for seed in range(seeds):
        arrays = make_arrays(case, seed)
        passed = {name: array.copy() for name, array in arrays.items()}
        if case["expect"] == "refuse-call":
            with pytest.raises(InputError):
                kernel.run(passed)
            continue
        results = kernel.run(passed)
        assert all(passed[name].tobytes() == array.tobytes() for name, array in arrays.items()), "an input has changed"
        compare(case, results, expected_values(case, arrays))


def make_arrays(case: Json, seed: int) -> Arrays:
    rng = np.random.default_rng([seed, *case["id"].encode()])
    arrays: Arrays = {}
    for name, entry in case["inputs"].items():
        dtype, shape = _dtype(entry["dtype"]), tuple(entry["shape"])
        if "values" in entry:
            names = {"np": np, "rng": rng, "seed": seed, "shape": shape, "to": _to, "dtype_of": _dtype}
            values = eval(entry["values"], names | arrays)
        elif _is_float(dtype):
            values = rng.standard_normal(shape)
        elif dtype.kind == "b":
            values = rng.integers(0, 2, shape)
        else:
            values = rng.integers(0 if dtype.kind == "u" else -4, 5, shape)
        arrays[name] = np.ascontiguousarray(np.broadcast_to(_to(values, entry["dtype"]), shape))
    return arrays


def expected_values(case: Json, arrays: Arrays) -> Arrays:
    scope = FUNCTIONS | {name: _lift(array) for name, array in arrays.items()}
    with np.errstate(all="ignore"):
        for name, text in case.get("let", {}).items():
            scope[name] = eval(text, scope)
        return {name: np.asarray(eval(text, scope)) for name, text in case["expect"].items()}


def compare(case: Json, results: Arrays, expected: Arrays) -> None:
    assert set(results) == set(expected)
    for name, values in expected.items():
        result = np.asarray(results[name])
        assert str(result.dtype) == case.get("dtypes", {}).get(name, str(result.dtype))
        assert result.shape == values.shape or result.size == 1
        correct = _agreement(result, values.reshape(result.shape), case.get("tol") or TOLERANCES.get(str(result.dtype)))
        wrong = np.argwhere(~correct)
        shown = [(tuple(at), result[tuple(at)], values.reshape(result.shape)[tuple(at)]) for at in wrong[:3]]
        assert len(wrong) == 0, f"{name}: {len(wrong)} of {result.size} are wrong: (index, result, expected) {shown}"


def _agreement(result: np.ndarray, values: np.ndarray, tolerance: tuple[float, float]) -> np.ndarray:
    """Return where results agree. Infinities and NaN agree with themselves only."""
    if not _is_float(result.dtype):
        values = values if values.dtype.kind in "iubO" else np.rint(values)
        return np.asarray(result.astype(object) == values.astype(object), bool)
    relative, absolute = tolerance
    with np.errstate(all="ignore"):
        values = values.astype(np.float64)
        if result.dtype == np.float32:
            values = values.astype(np.float32).astype(np.float64)
        result = result.astype(np.float64)
        near = np.abs(result - values) <= absolute + relative * np.abs(values)
        return (result == values) | (np.isnan(result) & np.isnan(values)) | (near & np.isfinite(values))


def _dtype(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name) if name in NARROW else name)


def _is_float(dtype: np.dtype[Any]) -> bool:
    return dtype.kind == "f" or dtype.name in NARROW


def _to(values: Any, name: str) -> np.ndarray:
    """Round or wrap values to a type, as ml_dtypes and numpy do."""
    values, dtype = np.asarray(values), _dtype(name)
    with np.errstate(all="ignore"):
        if name in NARROW and values.dtype != dtype:
            values = values.astype(np.float32)
        return values.astype(dtype)


def _lift(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64) if _is_float(array.dtype) else array


def _round(values: Any, name: str) -> np.ndarray:
    return _to(values, name).astype(np.float64)


def _truncate(values: np.ndarray, name: str) -> np.ndarray:
    """Convert floats to integers as the language does: NaN is 0, what is out of range saturates."""
    info = np.iinfo(name)
    integers = [0 if math.isnan(v) else v if math.isinf(v) else int(v) for v in values.ravel().tolist()]
    return np.array([int(min(max(v, info.min), info.max)) for v in integers], name).reshape(values.shape)


def _softmax(scores: np.ndarray, axis: int = -1) -> np.ndarray:
    high = np.max(scores, axis=axis, keepdims=True)
    powers = np.exp(scores - np.where(np.isfinite(high), high, 0))
    powers = np.where(np.isnan(scores), np.nan, powers)
    return powers / np.sum(powers, axis=axis, keepdims=True)


def _shift(x: np.ndarray, offsets: list[int], extents: list[int], strides: list[int] | None = None, fill: Any = 0.0):
    """Return x[i0 * s0 + o0, i1 * s1 + o1, ...] for i in extents, and `fill` outside."""
    strides = strides or [1] * x.ndim
    axes = zip(extents, strides, offsets, strict=True)
    places = np.ix_(*[np.arange(extent) * stride + offset for extent, stride, offset in axes])
    inside = np.ones([1] * x.ndim, bool)
    for place, extent in zip(places, x.shape, strict=True):
        inside = inside & (place >= 0) & (place < extent)
    clipped = tuple(np.clip(place, 0, extent - 1) for place, extent in zip(places, x.shape, strict=True))
    return np.where(inside, x[clipped], fill)


def _conv2d(x: np.ndarray, w: np.ndarray, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1):
    (sh, sw), (ph, pw), (dh, dw) = (np.broadcast_to(pair, 2).tolist() for pair in (stride, padding, dilation))
    (n, _, height, width), (filters, group_channels, kh, kw) = x.shape, w.shape
    ho, wo = (height + 2 * ph - dh * (kh - 1) - 1) // sh + 1, (width + 2 * pw - dw * (kw - 1) - 1) // sw + 1
    y = np.zeros((n, filters, ho, wo), np.result_type(x, w))
    for group in range(groups):
        of_x = slice(group * group_channels, (group + 1) * group_channels)
        of_w = slice(group * (filters // groups), (group + 1) * (filters // groups))
        for i in range(kh):
            for j in range(kw):
                offsets, extents = [0, 0, i * dh - ph, j * dw - pw], [n, group_channels, ho, wo]
                part = _shift(x[:, of_x], offsets, extents, [1, 1, sh, sw], 0)
                y[:, of_w] += np.einsum("nchw,fc->nfhw", part, w[of_w, :, i, j])
    return y


def _conv_transpose2d(x: np.ndarray, w: np.ndarray, stride: int = 1, padding: int = 0, output_padding: int = 0, dilation: int = 1):
    (n, _, height, width), (_, filters, kh, kw) = x.shape, w.shape
    full = np.zeros(
        (
            n,
            filters,
            (height - 1) * stride + dilation * (kh - 1) + 1 + output_padding + padding,
            (width - 1) * stride + dilation * (kw - 1) + 1 + output_padding + padding,
        )
    )
    for i in range(kh):
        for j in range(kw):
            rows = slice(i * dilation, i * dilation + (height - 1) * stride + 1, stride)
            columns = slice(j * dilation, j * dilation + (width - 1) * stride + 1, stride)
            full[:, :, rows, columns] += np.einsum("nchw,cf->nfhw", x, w[:, :, i, j])
    high = (height - 1) * stride - 2 * padding + dilation * (kh - 1) + output_padding + 1
    wide = (width - 1) * stride - 2 * padding + dilation * (kw - 1) + output_padding + 1
    return full[:, :, padding : padding + high, padding : padding + wide]


FUNCTIONS: dict[str, Any] = {
    "np": np, "to": _to, "rnd": _round, "lift": _lift, "trunc_to": _truncate, "softmax": _softmax, "shifted": _shift,
    "conv2d": _conv2d, "conv_transpose2d": _conv_transpose2d, "erf": np.vectorize(math.erf, otypes=[float]),
}  # fmt: skip
