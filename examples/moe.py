"""Mixture of experts (MoE) as grouped GEMMs: each token's row is multiplied by the matrices of its expert.

The expert of each row is data. Rows are sorted by it inside, once for the three products.
"""

import numpy as np

import roller_svc

LAYER = """
    gate = grouped_matmul(x, w_gate, expert);
    up = grouped_matmul(x, w_up, expert);
    hidden = silu_mul(gate, up);
    y = grouped_matmul(hidden, w_down, expert)"""
# What array libraries write: a matrix for each token, gathered from those of the experts.
GATHER, PRODUCT = "g[t, k, n] = w[expert[t], k, n]", "y[t, n] +=! x[t, k] * g[t, k, n]"


def types(tokens, experts, features, hidden, dtype):
    wide, narrow = (dtype, (experts, features, hidden)), (dtype, (experts, hidden, features))
    weights = {"w_gate": wide, "w_up": wide, "w_down": narrow}
    return {"x": (dtype, (tokens, features)), **weights, "expert": ("int32", (tokens,))}


def microseconds(text, inputs):
    (best,) = roller_svc.estimate(text, inputs, ["nvidia-h200-sxm"])["nvidia-h200-sxm"]
    return best.seconds * 1e6


large = types(512, 8, 4096, 1024, "bfloat16")
gathered = microseconds(GATHER, {"w": large["w_up"], "expert": large["expert"]})
gathered += microseconds(PRODUCT, {"x": large["x"], "g": ("bfloat16", (512, 4096, 1024))})
print(f"H200, 512 tokens, 8 experts of 4096 x 1024: {microseconds(LAYER, large):.0f} us; gathered {3 * gathered:.0f} us")

rng = np.random.default_rng(0)
small = types(20, 4, 32, 16, "float32")
arrays = {name: rng.standard_normal(shape).astype(dtype) / 4 for name, (dtype, shape) in small.items() if name != "expert"}
arrays["expert"] = rng.integers(0, 4, 20).astype(np.int32)
got = roller_svc.compile(LAYER, small, select="model")(**arrays)["y"]
for row, expert in enumerate(arrays["expert"]):
    gate = arrays["x"][row] @ arrays["w_gate"][expert]
    hidden = gate / (1 + np.exp(-gate)) * (arrays["x"][row] @ arrays["w_up"][expert])
    np.testing.assert_allclose(got[row], hidden @ arrays["w_down"][expert], rtol=1e-4, atol=1e-5)
print("CPU: agrees with numpy")
