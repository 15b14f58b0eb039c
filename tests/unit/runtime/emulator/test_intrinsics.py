"""Host implementations of wrapped instructions: bit-exact conversions, and one for each wrapper."""

from __future__ import annotations

import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from emulator_support import cuda, module
from reference_kernels import tensor

from roller_svc.codegen.cuda.instructions import instruction
from roller_svc.codegen.dialect import CUDA, SHORT
from roller_svc.codegen.helpers import helper
from roller_svc.errors import LaunchError
from roller_svc.ir.dtype import DType
from roller_svc.ir.kernel import LaunchSpec, Role
from roller_svc.runtime import emulator
from roller_svc.runtime.emulator.text import HOST_INTRINSICS, comment_out_wrappers

pytestmark = pytest.mark.emulator

RNG = np.random.default_rng(5)
TO, FROM = (helper(name, CUDA).text + "\n" for name in ("f16_to_f32", "f32_to_f16"))


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2])
def test_roundings_agree_with_ml_dtypes(dtype: DType) -> None:
    name = f"f32_to_{SHORT[dtype]}"
    narrow = {
        DType.BFLOAT16: ml_dtypes.bfloat16,
        DType.FLOAT8_E4M3FN: ml_dtypes.float8_e4m3fn,
        DType.FLOAT8_E5M2: ml_dtypes.float8_e5m2,
    }[dtype]
    needed = "".join(helper(n, CUDA).text + "\n" for n in helper(name, CUDA).needs)
    text = f"""{needed}{helper(name, CUDA).text}
extern "C" __global__ void narrow(const float *f, {CUDA.storage_type(dtype)} *n) {{
  int i = blockIdx.x * 256 + threadIdx.x;
  n[i] = {name}(f[i]);
}}
"""
    # every bfloat16, and so every float8 and every tie between two, with all the ways to lie between it and the next
    rest = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    floats = (np.arange(1 << 16, dtype=np.uint32)[:, None] << 16 | rest).reshape(-1).view(np.float32)
    buffers = (
        tensor("F", "f", Role.INPUT, DType.FLOAT32, floats.shape),
        tensor("N", "n", Role.OUTPUT, dtype, floats.shape),
    )
    launch = LaunchSpec("narrow", ("f", "n"), (floats.size // 256, 1, 1), (256, 1, 1))
    found = module(cuda(text, buffers, launch)).run({"F": floats})["N"].view(narrow)
    greatest = np.inf if dtype is DType.BFLOAT16 else float(ml_dtypes.finfo(narrow).max)
    with np.errstate(invalid="ignore"):
        expected = np.clip(floats, -greatest, greatest).astype(narrow)
    nan = np.isnan(floats)
    bits = f"u{found.dtype.itemsize}"
    np.testing.assert_array_equal(found.view(bits)[~nan], expected.view(bits)[~nan])
    assert np.isnan(found[nan].astype(np.float64)).all()


def test_half_conversions_agree_with_numpy() -> None:
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    text = f"""{TO}{FROM}
extern "C" __global__ void widen(const unsigned short *h, float *w) {{
  int i = blockIdx.x * 256 + threadIdx.x;
  w[i] = f16_to_f32(h[i]);
}}
extern "C" __global__ void narrow(const float *f, unsigned short *n) {{
  int i = blockIdx.x * 256 + threadIdx.x;
  n[i] = f32_to_f16(f[i]);
}}
"""
    shape = (1 << 16,)
    buffers = (
        tensor("H", "h", Role.INPUT, DType.FLOAT16, shape), tensor("F", "f", Role.INPUT, DType.FLOAT32, shape),
        tensor("W", "w", Role.OUTPUT, DType.FLOAT32, shape), tensor("N", "n", Role.OUTPUT, DType.FLOAT16, shape),
    )  # fmt: skip
    launches = (
        LaunchSpec("widen", ("h", "w"), (256, 1, 1), (256, 1, 1)),
        LaunchSpec("narrow", ("f", "n"), (256, 1, 1), (256, 1, 1)),
    )
    # halves, the ties between them, their neighbours, and numbers of every size
    exact = halves.astype(np.float32)
    near = exact.view(np.uint32)[::4]
    anything = RNG.integers(0, 1 << 32, 1 << 14, dtype=np.uint32)
    bits = np.concatenate([near + 0x1000, near + 0x0FFF, near + 0x1001, anything])
    floats = bits.astype(np.uint32).view(np.float32)
    found = module(cuda(text, buffers, *launches)).run({"H": halves, "F": floats})
    np.testing.assert_array_equal(found["W"], exact)
    with np.errstate(over="ignore", invalid="ignore"):
        np.testing.assert_array_equal(found["N"], floats.astype(np.float16))


@pytest.mark.parametrize("name", sorted(HOST_INTRINSICS - {"shared_address"}))
def test_every_removed_wrapper_has_a_host_implementation(name: str) -> None:
    headers = "".join(path.read_text() for path in Path(emulator.__file__).parent.glob("*.h"))
    one = name.removesuffix("_multicast")
    assert re.search(rf"\b{one}\b", headers)
    found = instruction(name) or helper(name, CUDA)
    assert name not in comment_out_wrappers(found.text).partition("//")[0]


def test_an_asm_without_a_host_implementation_is_rejected() -> None:
    stray = 'extern "C" __global__ void one(const float *a, float *c) {\n  asm volatile("membar.gl;");\n}\n'
    with pytest.raises(LaunchError, match="line 2") as raised:
        comment_out_wrappers(stray)
    assert raised.value.code == "emulator-no-twin"
    with pytest.raises(LaunchError, match="line 3"):
        comment_out_wrappers(TO.replace("f16_to_f32", "f16_to_f33"))
    assert comment_out_wrappers(f"{TO}// asm in a comment\n").count("\n") == TO.count("\n") + 1
