"""GEMM with an epilogue: bias and ReLU are computed on the results in registers, in one kernel."""

import numpy as np

import roller_svc

FUSED = "C = matmul(A, B, dtype=float32); Y[m, n] = relu(C[m, n] + bias[n]).cast(`float16`)"
PRODUCT = "C = matmul(A, B)"
EPILOGUE = "Y[m, n] = relu(C[m, n] + bias[n])"


def types(size):
    matrix = ("float16", (size, size))
    return {"A": matrix, "B": matrix, "C": matrix, "bias": ("float16", (size,))}


def microseconds(expression, *names):
    inputs = {name: types(4096)[name] for name in names}
    (best,) = roller_svc.estimate(expression, inputs, ["nvidia-h200-sxm"])["nvidia-h200-sxm"]
    return best.seconds * 1e6


apart = microseconds(PRODUCT, "A", "B") + microseconds(EPILOGUE, "C", "bias")
print(f"H200, 4096^3: {microseconds(FUSED, 'A', 'B', 'bias'):.1f} us; as two kernels {apart:.1f} us")

rng = np.random.default_rng(0)
arrays = {name: rng.standard_normal(types(64)[name][1]).astype(np.float16) for name in ("A", "B", "bias")}
kernel = roller_svc.compile(FUSED, arrays, select="model")
wide = {name: array.astype(np.float32) for name, array in arrays.items()}
np.testing.assert_allclose(kernel(**arrays)["Y"], np.maximum(wide["A"] @ wide["B"] + wide["bias"], 0), rtol=2e-3, atol=2e-2)
print("CPU: agrees with numpy")
