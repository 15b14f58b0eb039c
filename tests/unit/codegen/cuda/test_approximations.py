"""Functions of 16-bit values: their largest errors over all float16 and bfloat16 values, and their special values."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from emulator_support import cuda, module
from reference_kernels import tensor

from roller_svc.analysis.scalar_ops import apply
from roller_svc.codegen.dialect import CUDA
from roller_svc.codegen.helpers import helper
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import OpKind
from roller_svc.ir.kernel import LaunchSpec, Role
from roller_svc.semantics.rounding import propagate

pytestmark = pytest.mark.emulator

FUNCTIONS = {
    "exp": OpKind.EXP, "sigmoid": OpKind.SIGMOID, "silu": OpKind.SILU, "tanh": OpKind.TANH, "gelu": OpKind.GELU,
    "normcdf": OpKind.NORMCDF,
}  # fmt: skip
ALL_HALVES = np.arange(1 << 16, dtype=np.uint16)
RELATIVE_BOUND = 2.0**-16  # of results in float32's normal range: 1/32 of float16's roundoff


def computed(name: str, values: np.ndarray) -> np.ndarray:
    texts: dict[str, str] = {}

    def add(wanted: str) -> None:
        found = helper(wanted, CUDA)
        for need in found.needs:
            add(need)
        texts.setdefault(wanted, found.text)

    add(f"{name}_approx_f32")
    text = (
        "\n".join(texts.values())
        + f"""
extern "C" __global__ void one(const float *a, float *c) {{
  const int i = (int)(blockIdx.x * 128 + threadIdx.x);
  c[i] = {name}_approx_f32(a[i]);
}}
"""
    )
    buffers = tuple(tensor(n, n.lower(), role, DType.FLOAT32, values.shape) for n, role in (("A", Role.INPUT), ("C", Role.OUTPUT)))
    launch = LaunchSpec("one", ("a", "c"), (len(values) // 128, 1, 1), (128, 1, 1))
    return module(cuda(text, buffers, launch)).run({"A": values})["C"]


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_error_is_within_the_bounds(name: str, dtype: np.dtype) -> None:
    """Within the bounds of float32 functions, and small against the roundoff of the type."""
    kind = FUNCTIONS[name]
    values = ALL_HALVES.view(dtype).astype(np.float32)
    found = computed(name, values).astype(np.float64)
    with np.errstate(all="ignore"):
        exact = apply(kind, DType.FLOAT64, DType.FLOAT64, (values.astype(np.float64),))
        allowed = propagate(kind, DType.FLOAT32, DType.FLOAT32, (values.astype(np.float64),), (None,), exact)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(exact))
    assert allowed is not None
    finite = np.isfinite(exact) & (np.abs(exact) < 3e38)
    error = np.abs(found[finite] - exact[finite])
    assert (error <= np.broadcast_to(allowed, exact.shape)[finite]).all()
    size = np.abs(exact[finite])
    normal = (size > 2.0**-120) & (np.abs(values[finite]) < 16)
    assert (error[normal] / size[normal]).max() <= RELATIVE_BOUND


@pytest.mark.parametrize("name", FUNCTIONS)
def test_infinities_are_those_of_the_exact_function(name: str) -> None:
    values = np.resize(np.array([math.inf, -math.inf], np.float32), 128)
    with np.errstate(all="ignore"):
        exact = apply(FUNCTIONS[name], DType.FLOAT64, DType.FLOAT64, (values.astype(np.float64),))
    np.testing.assert_array_equal(computed(name, values)[:2], exact[:2].astype(np.float32))
