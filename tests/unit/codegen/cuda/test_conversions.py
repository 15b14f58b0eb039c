"""Conversions of float32 to integers on NVIDIA GPUs: one cvt.rzi, which saturates, and a clamp."""

from __future__ import annotations

import numpy as np
import pytest

import roller_svc

EDGES = np.array(
    [
        0.0,
        -0.0,
        1.5,
        -1.5,
        127.99,
        128.0,
        -128.9,
        -129.0,
        255.5,
        256.0,
        32767.9,
        32768.0,
        -32769.0,
        65535.9,
        65536.0,
        2147483520.0,
        2147483648.0,
        -2147483648.0,
        -2147483904.0,
        4294967040.0,
        4294967296.0,
        3e38,
        -3e38,
        np.inf,
        -np.inf,
        np.nan,
        1e-40,
    ],
    np.float32,
)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32"])
def test_float32_saturates_in_one_conversion(dtype: str) -> None:
    expression, inputs = f"y[i] = x[i].cast(`{dtype}`)", {"x": ("float32", EDGES.shape)}
    kernel = roller_svc.compile(expression, inputs, target="nvidia-h200-sxm", select="model", top_k=1, runtime="emulator")
    assert "int_rz(" in kernel.source
    assert "double" not in kernel.source
    least, greatest = np.iinfo(dtype).min, np.iinfo(dtype).max
    expected = np.clip(np.trunc(np.nan_to_num(EDGES.astype(np.float64), nan=0.0)), least, greatest).astype(dtype)
    np.testing.assert_array_equal(kernel.run({"x": EDGES})["y"], expected)


@pytest.mark.parametrize(("source_dtype", "dtype"), [("float64", "int8"), ("float32", "int64")])
def test_other_conversions_compare_as_float64(source_dtype: str, dtype: str) -> None:
    x = EDGES.astype(source_dtype)
    kernel = roller_svc.compile(
        f"y[i] = x[i].cast(`{dtype}`)",
        {"x": (source_dtype, x.shape)},
        target="nvidia-h200-sxm",
        select="model",
        top_k=1,
        runtime="emulator",
    )
    on_cpu = roller_svc.compile(f"y[i] = x[i].cast(`{dtype}`)", {"x": (source_dtype, x.shape)}, select="model", top_k=1)
    np.testing.assert_array_equal(kernel.run({"x": x})["y"], on_cpu.run({"x": x})["y"])
