"""Elements of tables of 256 bytes that bytes choose, against the interpreter."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from dot_specs import FLAGS, spec_with

import roller_svc
from roller_svc.frontend.lang import parse
from roller_svc.hardware import load
from roller_svc.hardware.detect import probe
from roller_svc.ir.dtype import DType
from roller_svc.ir.hardware import Arch, HardwareSpec
from roller_svc.ir.program import TensorType
from roller_svc.semantics.interpreter import evaluate

PERMUTING, WIDE = spec_with(frozenset({"avx512vbmi"})), spec_with(frozenset())
permutes = pytest.mark.skipif("avx512vbmi" not in probe().flags, reason="the CPU at hand has no such instructions")
NARROW = replace(load("cpu-x86-avx2"), vector_bytes=16, arch=Arch("x86-64-v", 2), isa=())
SOURCE = """a[n] = t[x[n]] where n in {width}; b[n] = s[x[n].cast(uint8)] where n in {width};
c[n] = s[z[n].cast(uint8)] where n in {width};
d[n] = t[(f[n] * 3).cast(uint8)].cast(float32) * 2 where n in {width};
e[n] = s[t[x[n]]].when(n >= 3, 9) where n in {width};
g[n] = v[x[n]] where n in {width}"""
is_wide = pytest.mark.skipif(not probe().flags >= FLAGS, reason="the CPU at hand has no AVX-512")


@pytest.mark.parametrize(
    "hw", [pytest.param(PERMUTING, marks=permutes), pytest.param(WIDE, marks=is_wide), load("cpu-x86-avx2"), NARROW]
)
@pytest.mark.parametrize("width", [31, 1100])
def test_lookups_have_the_values_of_the_interpreter(width: int, hw: HardwareSpec) -> None:
    rng = np.random.default_rng(width)
    arrays = {
        "x": rng.integers(0, 256, width).astype(np.uint8),
        "z": rng.integers(-128, 128, width).astype(np.int8),
        "f": np.resize(np.array([np.nan, np.inf, -np.inf, -1.0, 84.99, 85.0, 1e9, 0.4], np.float32), width),
        "t": rng.permutation(256).astype(np.uint8),
        "s": rng.permutation(256).astype(np.uint8).view(np.int8),
        "v": rng.permutation(256).astype(np.uint16),
    }
    types = {name: TensorType(DType(str(array.dtype)), array.shape) for name, array in arrays.items()}
    source = SOURCE.format(width=width)
    expected = evaluate(parse(source, types), arrays)
    inputs = {name: (type_.dtype.value, type_.shape) for name, type_ in types.items()}
    kernel = roller_svc.compile(source, inputs=inputs, hardware=hw, select="model")
    for name, value in kernel.run(arrays).items():
        np.testing.assert_array_equal(value, expected[name].wide)


@pytest.mark.parametrize(("size", "count"), [(256, 1), (128, 0)])
def test_only_whole_tables_are_looked_up(size: int, count: int) -> None:
    """A shorter table ends before the registers do."""
    types = {"x": ("uint8", (640,)), "t": ("uint8", (size,))}
    kernel = roller_svc.compile(f"y[n] = t[x[n] // {256 // size}] where n in 640", inputs=types, hardware=PERMUTING, select="model")
    assert kernel.source.count("vpermi2b") == 2 * count
