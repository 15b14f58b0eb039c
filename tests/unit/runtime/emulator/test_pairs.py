"""Instructions on pairs of 16-bit floats in the emulator, against numpy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from emulator_support import cuda, module
from reference_kernels import tensor

from roller_svc.codegen.cuda.instructions import instruction
from roller_svc.errors import require
from roller_svc.ir.dtype import DType
from roller_svc.ir.kernel import LaunchSpec, Role

pytestmark = pytest.mark.emulator

COUNT = 512
OPERATIONS = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
FLOATS = {"f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}


def run(wrapper: str, expression: str, **inputs: np.ndarray) -> np.ndarray:
    """Return a word for each thread; inputs are words, too."""
    buffers = tuple(tensor(name, name.lower(), Role.INPUT, DType.UINT32, (COUNT,)) for name in inputs)
    parameters = "".join(f"const unsigned int *{name.lower()}, " for name in inputs)
    text = f"{require(instruction(wrapper), wrapper).text}\n"
    text += f'extern "C" __global__ void one({parameters}unsigned int *c) {{\n'
    text += f"  const int i = threadIdx.x;\n  c[i] = {expression};\n}}\n"
    names = (*(name.lower() for name in inputs), "c")
    source = cuda(
        text,
        (*buffers, tensor("C", "c", Role.OUTPUT, DType.UINT32, (COUNT,))),
        LaunchSpec("one", names, (1, 1, 1), (COUNT, 1, 1), 0),
    )
    return module(source).run(inputs)["C"]


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("short", FLOATS)
def test_pairs_are_rounded_once(operation: str, short: str) -> None:
    random, dtype = np.random.default_rng(3), FLOATS[short]
    a, b = (random.normal(scale=64.0, size=2 * COUNT).astype(dtype) for _ in range(2))
    name = f"{operation}_{short}x2"
    got = run(name, f"{name}(a[i], b[i])", A=a.view(np.uint32), B=b.view(np.uint32)).view(dtype)
    exact = OPERATIONS[operation](a.astype(np.float64), b.astype(np.float64))
    np.testing.assert_array_equal(got, exact.astype(np.float32).astype(dtype))


def test_multiply_add_of_pairs_is_exact_for_scaled_integers() -> None:
    codes = np.arange(2 * COUNT) % 16
    a = (1024.0 + 16.0 * codes).astype(np.float16)
    expression = "fma_f16x2(and_or(a[i], 0x00f000f0u, 0x64006400u), 0x2c002c00u, 0xd480d480u)"
    text = require(instruction("and_or"), "and_or").text  # the host's takes its place
    assert "lop3.b32" in text
    got = run("fma_f16x2", expression, A=a.view(np.uint32)).view(np.float16)
    np.testing.assert_array_equal(got, (codes - 8).astype(np.float16))


def test_every_float8_is_converted_exactly() -> None:
    codes = np.arange(2 * COUNT, dtype=np.uint16).astype(np.uint8)
    words = codes.reshape(COUNT, 2).astype(np.uint32)
    packed = words[:, 0] | words[:, 1] << 8
    got = run("e4m3x2_to_f16x2", "e4m3x2_to_f16x2((unsigned short)a[i])", A=packed).view(np.float16)
    np.testing.assert_array_equal(got, codes.view(ml_dtypes.float8_e4m3fn).astype(np.float16))
