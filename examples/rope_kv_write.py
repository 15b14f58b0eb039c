"""Rotary embedding (RoPE) of queries and keys, and the new keys and values written to their slots of a paged cache.

The caches are donated: they are updated in place, and only the new rows are written. `=` promises that no two tokens have one
slot. `=.` lets the last one win, for which two more launches each find it.
"""

import numpy as np

import roller_svc

STEP = """
    rotated = rope(q, cos, sin, position);
    new = rope(k, cos, sin, position);
    K[slot[t] // 16, slot[t] % 16, h, d] = new[t, h, d];
    V[slot[t] // 16, slot[t] % 16, h, d] = v[t, h, d]"""
OUTPUTS = ["rotated", "K", "V"]


def types(tokens, heads, shared, features, pages, dtype):
    table, rows, cache = (
        ("float32", (4096, features // 2)),
        (dtype, (tokens, shared, features)),
        (dtype, (pages, 16, shared, features)),
    )
    index = ("int32", (tokens,))
    inputs = {"q": (dtype, (tokens, heads, features)), "k": rows, "v": rows, "cos": table, "sin": table}
    return {**inputs, "position": index, "slot": index, "K": cache, "V": cache}


def microseconds(text, **options):
    inputs = types(512, 32, 8, 128, 4096, "bfloat16")
    options |= {"outputs": OUTPUTS, "select": "model", "top_k": 1}
    kernel = roller_svc.compile(text, inputs, target="nvidia-h200-sxm", runtime="emulator", **options)  # needs no NVRTC
    return kernel.estimate.seconds * 1e6


in_place = microseconds(STEP, donate=["K", "V"])
last_wins = microseconds(STEP.replace("h, d] = ", "h, d] =. "), donate=["K", "V"])
print(f"H200, 512 tokens: {in_place:.1f} us; with `=.` {last_wins:.1f} us; with copies of the caches {microseconds(STEP):.1f} us")

rng = np.random.default_rng(0)
small = types(3, 2, 1, 8, 4, "float32")
arrays = {name: rng.standard_normal(small[name][1]).astype(np.float32) for name in ("q", "k", "v", "K", "V")}
angles = np.outer(np.arange(4096), 10000.0 ** (-np.arange(4) / 4))
arrays |= {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}
arrays |= {"position": np.array([7, 0, 30], np.int32), "slot": np.array([63, 5, 16], np.int32)}
kernel = roller_svc.compile(STEP, small, outputs=OUTPUTS, donate=["K", "V"], select="model")
results = kernel(**arrays)
c, s = (np.tile(arrays[name][arrays["position"]], 2)[:, None] for name in ("cos", "sin"))
for name, got in (("q", results["rotated"]), ("k", arrays["K"].reshape(64, 1, 8)[arrays["slot"]])):
    x = arrays[name]
    np.testing.assert_allclose(got, x * c + np.concatenate([-x[..., 4:], x[..., :4]], axis=-1) * s, rtol=1e-5, atol=1e-6)
print("CPU: agrees with numpy; the cache is updated in place:", results["K"] is arrays["K"])
