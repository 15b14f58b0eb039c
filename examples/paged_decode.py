"""Decoding with a paged key-value cache: one query of each sequence attends to pages that a table lists.

The operator rounds the probabilities to the type of the values: then matrix units multiply both, in one kernel. `window`,
`soft_cap` and `sinks` are options of the same kernel, and several queries of a sequence (speculative decoding) its shape.
"""

import numpy as np

import roller_svc

DECODE = "Y = paged_attention(Q, K, V, pages, lengths)"
# Written by hand, with probabilities in float32: three kernels, none on a matrix unit.
BY_HAND = """
    S[b, h, n]: float32 +=! Q[b, h, d] * K[pages[b, n // 16], n % 16, h // 4, d] where n in 2048, h in 32;
    A[b, h, n] = where(n < lengths[b], S[b, h, n] * 0.088388, -65504.0);
    M[b, h] >=! A[b, h, n];
    E[b, h, n] = where(n < lengths[b], exp(A[b, h, n] - M[b, h]), 0.0);
    Z[b, h] +=! E[b, h, n];
    X[b, h, d]: float32 +=! E[b, h, n] * V[pages[b, n // 16], n % 16, h // 4, d];
    Y[b, h, d] = (X[b, h, d] / Z[b, h]).cast(`bfloat16`)"""


def types(sequences, pages, heads, shared, features, dtype):
    cache = (dtype, (sequences * pages, 16, shared, features))
    table = {"pages": ("int32", (sequences, pages)), "lengths": ("int32", (sequences,))}
    return {"Q": (dtype, (sequences, heads, features)), "K": cache, "V": cache, **table}


def microseconds(text):
    (best,) = roller_svc.estimate(text, types(8, 128, 32, 8, 128, "bfloat16"), ["nvidia-h200-sxm"])["nvidia-h200-sxm"]
    return best.seconds * 1e6


print(f"H200, 8 sequences of 2048 keys: {microseconds(DECODE):.1f} us; by hand {microseconds(BY_HAND):.1f} us")

rng = np.random.default_rng(0)
small = types(2, 3, 4, 2, 8, "float32")
arrays = {name: rng.standard_normal(small[name][1]).astype(np.float32) for name in "QKV"}
arrays |= {"pages": rng.permutation(6).reshape(2, 3).astype(np.int32), "lengths": np.array([40, 5], np.int32)}
got = roller_svc.compile(DECODE, small, select="model")(**arrays)["Y"]
for b, h in np.ndindex(2, 4):
    keys, values = (arrays[name][arrays["pages"][b]].reshape(48, 2, 8)[: arrays["lengths"][b], h // 2] for name in "KV")
    weights = np.exp(keys @ arrays["Q"][b, h] / np.sqrt(8))
    np.testing.assert_allclose(got[b, h], weights @ values / weights.sum(), rtol=1e-4, atol=1e-5)
print("CPU: agrees with numpy")
