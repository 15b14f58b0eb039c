"""FP8 GEMM (e4m3) with scales of rows, and with scales of blocks of 128 (DeepSeek's): products in FP8, sums in float32.

`allow_tf32` permits the FP8 matrix unit, whose own sums keep 14 bits: they are added in float32 every 128 products. Without it
operands are multiplied as float16, exactly, at half the rate.
"""

import ml_dtypes
import numpy as np

import roller_svc

BLOCKS = """
    y[m, n]: float32 +=! A[m, k] * B[n, k] * (a[m, k // 128] * b[n // 128, k // 128]);
    Y[m, n] = y[m, n].cast(`bfloat16`)"""
ROWS = """
    y[m, n]: float32 +=! A[m, k] * B[n, k];
    Y[m, n] = (y[m, n] * a[m] * b[n]).cast(`bfloat16`)"""


def types(m, n, k, *, blocks):
    scales = (("float32", (m, k // 128)), ("float32", (n // 128, k // 128))) if blocks else (("float32", (m,)), ("float32", (n,)))
    return {"A": ("float8_e4m3fn", (m, k)), "B": ("float8_e4m3fn", (n, k)), "a": scales[0], "b": scales[1]}


def microseconds(text, *, blocks, allow_tf32):
    inputs = types(4096, 4096, 7168, blocks=blocks)
    (best,) = roller_svc.estimate(text, inputs, ["nvidia-h200-sxm"], allow_tf32=allow_tf32)["nvidia-h200-sxm"]
    return best.seconds * 1e6


for name, text, blocks in (("blocks", BLOCKS, True), ("rows", ROWS, False)):
    fp8, exact = (microseconds(text, blocks=blocks, allow_tf32=allowed) for allowed in (True, False))
    print(f"H200, 4096 x 4096 x 7168, scales of {name}: {fp8:.0f} us; without allow_tf32 {exact:.0f} us")

rng = np.random.default_rng(0)
A, B = (rng.standard_normal((rows, 256)).astype(ml_dtypes.float8_e4m3fn) for rows in (8, 128))
a, b = rng.random((8, 2), np.float32), rng.random((1, 2), np.float32)
got = roller_svc.compile(BLOCKS, {"A": A, "B": B, "a": a, "b": b}, select="model")(A=A, B=B, a=a, b=b)["Y"]
wide_a = A.astype(np.float32) * a.repeat(128, axis=1)
wide_b = B.astype(np.float32) * b.repeat(128, axis=1).repeat(128, axis=0)
np.testing.assert_allclose(got.astype(np.float32), wide_a @ wide_b.T, rtol=1e-2, atol=1e-2)
print("CPU: agrees with numpy")
