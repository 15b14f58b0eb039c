"""Int4 weights as AWQ packs them (W4A16): eight columns in a word, in the order 0 2 4 6 1 3 5 7, zeros likewise.

Weights are rounded to the activations' type before the product. In float32 they are as fast with activations in float16:
a matrix unit multiplies the integers, and the sums of groups are scaled.
"""

import numpy as np

import roller_svc


def expression(k, n, type_of_weights="float16"):
    shift = "(n % 2 * 4 + n % 8 // 2) * 4"
    return f"""
    q[k, n] = bitwise_and(qweight[k, n // 8] >> {shift}, 15) where k in {k}, n in {n};
    z[g, n] = bitwise_and(qzeros[g, n // 8] >> {shift}, 15) where g in {k // 128}, n in {n};
    w[k, n] = (q[k, n] - z[k // 128, n]).cast(`{type_of_weights}`) * scales[k // 128, n];
    y[m, n]: float32 +=! x[m, k] * w[k, n];
    Y[m, n] = y[m, n].cast(`float16`)"""


def types(m, k, n):
    packed = {"qweight": ("int32", (k, n // 8)), "qzeros": ("int32", (k // 128, n // 8))}
    return {"x": ("float16", (m, k)), **packed, "scales": ("float16", (k // 128, n))}


def microseconds(text):
    (best,) = roller_svc.estimate(text, types(16, 4096, 4096), ["nvidia-h200-sxm"])["nvidia-h200-sxm"]
    return best.seconds * 1e6


good, float32 = microseconds(expression(4096, 4096)), microseconds(expression(4096, 4096, "float32"))
print(f"H200, 16 rows, 4096^2 weights: {good:.1f} us; with float32 weights {float32:.1f} us")

rng = np.random.default_rng(0)
q, z = rng.integers(0, 16, (256, 64)), rng.integers(0, 16, (2, 64))
x, scales = rng.standard_normal((3, 256)).astype(np.float16), rng.random((2, 64)).astype(np.float16) / 16


def packed(values):
    nibbles = values.reshape(*values.shape[:-1], -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]].astype(np.uint32)
    return np.bitwise_or.reduce(nibbles << np.arange(0, 32, 4, dtype=np.uint32), axis=-1).view(np.int32)


kernel = roller_svc.compile(expression(256, 64), types(3, 256, 64), select="model")
got = kernel(x=x, qweight=packed(q), qzeros=packed(z), scales=scales)["Y"]
want = x.astype(np.float32) @ ((q - z.repeat(128, axis=0)).astype(np.float16) * scales.repeat(128, axis=0)).astype(np.float32)
np.testing.assert_allclose(got, want, rtol=2e-3, atol=2e-2)
print("CPU: agrees with numpy")
