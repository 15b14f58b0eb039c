"""Small models for GPUs, as JSON graphs: one for each thing that a plan does with memory or kernels."""

from __future__ import annotations

from typing import Any

import numpy as np

from roller_bench.gpu.graph_models import MATMUL, call, decode, encoder, graph, lstm, node, sigmoid, tensor

RNG = np.random.default_rng(61)


def constant(*shape: int, dtype: str = "float32", low: float | None = None, high: float | None = None) -> dict[str, Any]:
    """Return a constant with random values: integers from -3 to 3, or numbers up to a half, if no limits are given."""
    is_integer = dtype.startswith("int")
    first, last = (default if limit is None else limit for limit, default in ((low, -3), (high, 4)))
    least, most = (default if limit is None else limit for limit, default in ((low, -0.5), (high, 0.5)))
    values = RNG.integers(int(first), int(last), shape) if is_integer else RNG.uniform(least, most, shape).astype(np.float16)
    return {"dtype": dtype, "shape": list(shape), "values": values.tolist()}


def recurrent(hidden: int, steps: int = 4) -> dict[str, Any]:
    """Return a loop whose steps read and write a slice of `hidden` numbers."""
    cell = node("h", "C[i, j] +=! A[i, k] * B[k, j]", A="s", B="w")
    new = node("n", "C[i, j] = tanh(A[i, j] + B[i, j])", A="h", B="x")
    state = tensor(1, hidden)
    body = graph({"s": state, "x": state, "w": tensor(hidden, hidden)}, {}, [cell, new], "n", name="body")
    body["outputs"] = {"next": "n", "each": "n"}
    loop = {"steps": steps, "carried": 1, "scanned": [False], "stacked": [True], "body": body}
    nodes = [{"name": "scan", "loop": loop, "inputs": ["first", "xs", "w"], "outputs": ["last", "all"]}]
    return graph({"first": state, "xs": tensor(steps, 1, hidden)}, {"w": constant(hidden, hidden)}, nodes, "last", "all")


# the lengths of the columns depend on weights alone
NORMALIZED = "N[j] +=! W[k, j] * W[k, j]; P[i, j] +=! A[i, k] * W[k, j]; C[i, j] = P[i, j] / sqrt(N[j]) + S[j]"
MODELS: dict[str, dict[str, Any]] = {
    # two branches that a graph may run side by side, and what joins them
    "branches": graph(
        {"x": tensor(24, 32)},
        {"w": constant(32, 16), "v": constant(32, 16)},
        [
            node("left", MATMUL, A="x", B="w"),
            call("soft", "softmax", "left"),
            node("right", "C[i, j] +=! max(A[i, k], 0) * B[k, j]", A="x", B="v"),
            node("joined", "C[i, j] +=! A[i, k] * B[j, k]", A="soft", B="right"),
        ],
        "joined",
        "right",
    ),
    # pieces of a concatenation: the second begins at no multiple of 16 bytes
    "pieces": graph(
        {"x": tensor(3, 5), "y": tensor(4, 5)},
        {},
        [
            node("a", "C[i] +=! A[i, j]", A="x"),
            node("b", "C[i] +=! A[i, j] * A[i, j]", A="y"),
            call("both", "concat", "a", "b", axis=0),
            node("out", "C[i, j] = A[i] * A[j]", A="both"),
        ],
        "out",
        "both",
    ),
    # a view that begins at no multiple of 16 bytes, which a kernel and an output read
    "views": graph(
        {"x": tensor(6, 5)},
        {},
        [
            call("half", "slice", "x", starts=[1], stops=[4], axes=[0]),
            node("total", "C[i] +=! A[i, j]", A="half"),
            node("again", "C[j] +=! A[i, j]", A="half"),
        ],
        "half",
        "total",
        "again",
    ),
    "slices": recurrent(5),  # of 20 bytes: no multiple of 16
    "states": recurrent(20),
    "attention": graph(
        {"q": tensor(2, 32, 16, dtype="float16"), "k": tensor(2, 48, 16, dtype="float16"), "v": tensor(2, 48, 16, dtype="float16")},
        {},
        [call("o", "attention", "q", "k", "v"), node("out", "C[b, i, j] = A[b, i, j] * 2", A="o")],
        "out",
    ),
    "images": graph(
        {"x": tensor(1, 6, 9, 9)},
        {"w": constant(8, 6, 3, 3), "d": constant(8, 1, 3, 3)},
        [
            call("conv", "conv2d", "x", "w", padding=1, activation="relu"),
            call("depth", "depthwise_conv2d", "conv", "d", padding=1),
            call("pool", "max_pool2d", "depth", kernel=2),
            call("mean", "global_avg_pool2d", "pool"),
        ],
        "pool",
        "mean",
    ),
    # rows that data selects, and weights that statements on constants alone prepare
    "lookups": graph(
        {"ids": tensor(7, dtype="int32")},
        {"table": constant(11, 24), "w": constant(24, 12), "s": constant(12)},
        [
            node("rows", "C[i, j] = A[B[i], j]", A="table", B="ids"),
            node("out", NORMALIZED, A="rows", W="w", S="s"),
        ],
        "out",
    ),
    "halves": graph(
        {"x": tensor(64, 72, dtype="float16")},
        {"w": constant(72, 66, dtype="float16"), "g": constant(66, dtype="float16")},
        [
            node("h", MATMUL, A="x", B="w"),
            call("n", "rms_norm", "h", "g"),
            node("out", "C[i] >=! A[i, j]", A="n"),
        ],
        "n",
        "out",
    ),
}  # fmt: skip

# The models of RAMMER's section 3 and of its evaluation, small: by more nodes than those above.
LAYER = encoder(constant)
# A product on warpgroups of an H200, between nodes that can join a kernel with others.
PARTIAL = graph(
    {"x": tensor(128, 256, dtype="float16")},
    {"w": constant(256, 256, dtype="float16")},
    [
        node("sums", "C[i]: float32 +=! A[i, j]", A="x"),
        call("mean", "softmax", "x"),
        node("scaled", "C[i, j]: float16 = A[i, j] * B[i]", A="mean", B="sums"),
        node("product", "C[i, j]: float32 +=! A[i, k] * B[k, j]", A="scaled", B="w"),
        call("soft", "softmax", "product"),
        node("columns", "C[j] +=! A[i, j]", A="soft"),
        node("out", "C[i] +=! A[i, j] * B[j]", A="soft", B="columns"),
    ],
    "out",
    "mean",
    "scaled",
    name="partial",
)


def _separable(name: str, source: str) -> list[dict[str, Any]]:
    return [
        call(f"{name}_depth", "depthwise_conv2d", source, f"{name}_d", padding=1),
        call(name, "conv2d", f"{name}_depth", f"{name}_p", activation="relu"),
    ]


NASNET = graph(
    {"x": tensor(1, 8, 6, 6), "before": tensor(1, 8, 6, 6)},
    {f"{name}_d": constant(8, 1, 3, 3) for name in "abc"} | {f"{name}_p": constant(8, 8, 1, 1) for name in "abc"},
    [
        *_separable("a", "x"),
        *_separable("b", "before"),
        *_separable("c", "x"),
        call("mean", "avg_pool2d", "before", kernel=3, stride=1, padding=1),
        call("largest", "max_pool2d", "x", kernel=3, stride=1, padding=1),
        node("first", "C[n, c, h, w] = A[n, c, h, w] + B[n, c, h, w]", A="a", B="b"),
        node("second", "C[n, c, h, w] = A[n, c, h, w] + B[n, c, h, w]", A="c", B="mean"),
        node("third", "C[n, c, h, w] = A[n, c, h, w] + B[n, c, h, w]", A="largest", B="before"),
        call("out", "concat", "first", "second", "third", axis=1),
    ],
    "out",
    name="nasnet",
)

RAMMER_MODELS: dict[str, dict[str, Any]] = {
    "encoder": LAYER,
    "sigmoid": sigmoid(128, 32),
    "lstm": lstm(constant, 16, 3),
    "nasnet": NASNET,
}
DECODE_MODELS = {"decode_16": decode(constant, 16, pages=16), "decode_4": decode(constant, 4, pages=4)}
