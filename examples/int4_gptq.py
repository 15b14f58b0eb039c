"""Int4 weights as GPTQ packs them (W4A16): eight rows in a word, zeros less one by columns.

Without act-order, groups are 128 consecutive rows. With it, g_idx gives the group of each row: sort the rows of weights and
activations by it once, ahead, and groups are consecutive again.
"""

import numpy as np

import roller_svc


def expression(k, n, group="k // 128"):
    return f"""
    q[k, n] = bitwise_and(qweight[k // 8, n] >> k % 8 * 4, 15) where k in {k};
    z[g, n] = bitwise_and(qzeros[g, n // 8] >> n % 8 * 4, 15) + 1 where g in {k // 128}, n in {n};
    w[k, n] = (q[k, n] - z[{group}, n]).cast(`float16`) * scales[{group}, n];
    y[m, n]: float32 +=! x[m, k] * w[k, n];
    Y[m, n] = y[m, n].cast(`float16`)"""


def types(m, k, n):
    packed = {"qweight": ("int32", (k // 8, n)), "qzeros": ("int32", (k // 128, n // 8))}
    return {"x": ("float16", (m, k)), **packed, "scales": ("float16", (k // 128, n))}


def microseconds(text, **more):
    (best,) = roller_svc.estimate(text, types(16, 4096, 4096) | more, ["nvidia-h200-sxm"])["nvidia-h200-sxm"]
    return best.seconds * 1e6


sorted_rows = microseconds(expression(4096, 4096))
act_order = microseconds(expression(4096, 4096, "g_idx[k]"), g_idx=("int32", (4096,)))
print(f"H200, 16 rows, 4096^2 weights: {sorted_rows:.1f} us; with g_idx in the kernel {act_order:.1f} us")

rng = np.random.default_rng(0)
q, z = rng.integers(0, 16, (256, 64)), rng.integers(0, 15, (2, 64))
x, scales = rng.standard_normal((3, 256)).astype(np.float16), rng.random((2, 64)).astype(np.float16) / 16


def packed(values):  # along the last dimension
    nibbles = values.reshape(*values.shape[:-1], -1, 8).astype(np.uint32)
    return np.bitwise_or.reduce(nibbles << np.arange(0, 32, 4, dtype=np.uint32), axis=-1).view(np.int32)


kernel = roller_svc.compile(expression(256, 64), types(3, 256, 64), select="model")
got = kernel(x=x, qweight=np.ascontiguousarray(packed(q.T).T), qzeros=packed(z), scales=scales)["Y"]
weights = (q - z.repeat(128, axis=0) - 1).astype(np.float16) * scales.repeat(128, axis=0)
np.testing.assert_allclose(got, x.astype(np.float32) @ weights.astype(np.float32), rtol=2e-3, atol=2e-2)
print("CPU: agrees with numpy")
