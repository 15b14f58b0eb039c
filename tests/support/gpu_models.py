"""Small models for GPUs, as JSON graphs: one for each thing that a plan does with memory or kernels."""

from __future__ import annotations

from typing import Any

import numpy as np

RNG = np.random.default_rng(61)


def constant(*shape: int, dtype: str = "float32") -> dict[str, Any]:
    values = RNG.integers(-3, 4, shape) if dtype.startswith("int") else RNG.uniform(-0.5, 0.5, shape).astype(np.float16)
    return {"dtype": dtype, "shape": list(shape), "values": values.tolist()}


def tensor(*shape: int, dtype: str = "float32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape)}


def node(name: str, expression: str, **inputs: str) -> dict[str, Any]:
    return {"name": name, "expression": expression, "inputs": inputs, "outputs": {"C": name}}


def call(name: str, operator: str, *inputs: str, **parameters: Any) -> dict[str, Any]:
    return {"name": name, "operator": operator, "inputs": list(inputs), "outputs": [name], "parameters": parameters}


def graph(
    inputs: dict[str, Any], constants: dict[str, Any], nodes: list[dict[str, Any]], *outputs: str, name: str = "small"
) -> dict[str, Any]:
    return {
        "format": "roller-graph/1", "name": name, "inputs": inputs, "constants": constants, "nodes": nodes,
        "outputs": {each: each for each in outputs},
    }  # fmt: skip


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


MATMUL = "C[i, j] +=! A[i, k] * B[k, j]"
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
LAYER = graph(
    {"x": tensor(16, 32)},
    {name: constant(32, 32) for name in ("q_w", "k_w", "v_w", "o_w")} | {"up_w": constant(32, 48), "down_w": constant(48, 32)},
    [
        *(node(each, MATMUL, A="x", B=f"{each}_w") for each in "qkv"),
        node("scores", "C[i, j] +=! A[i, k] * B[j, k]", A="q", B="k"),
        call("weights", "softmax", "scores"),
        node("mixed", MATMUL, A="weights", B="v"),
        node("o", MATMUL, A="mixed", B="o_w"),
        node("first", "C[i, j] = A[i, j] + B[i, j]", A="o", B="x"),
        node("up", MATMUL, A="first", B="up_w"),
        node("active", "C[i, j] = max(A[i, j], 0)", A="up"),
        node("down", MATMUL, A="active", B="down_w"),
        node("out", "C[i, j] = A[i, j] + B[i, j]", A="down", B="first"),
    ],
    "out",
    name="encoder",
)
SIGMOID = graph(
    {"a": tensor(128, 128), "b": tensor(128, 32)},
    {},
    [
        node("sigmoid", "C[i, j] = 1 / (1 + exp(-A[i, j]))", A="a"),
        node("product", MATMUL, A="sigmoid", B="b"),
        node("relu", "C[i, j] = max(A[i, j], 0)", A="product"),
    ],
    "sigmoid",
    "relu",
    name="sigmoid",
)


def lstm(hidden: int, steps: int) -> dict[str, Any]:
    """Return a loop of LSTM cells."""
    state = tensor(1, hidden)
    gates = "C[i, j] +=! A[i, k] * B[k, j]"
    nodes = [node(f"{gate}_sum", gates, A="h", B=f"{gate}_w") for gate in "ifgo"]
    nodes += [node(gate, "C[i, j] = 1 / (1 + exp(-A[i, j] - B[i, j]))", A=f"{gate}_sum", B="x") for gate in "ifo"]
    nodes += [
        node("g", "C[i, j] = tanh(A[i, j] + B[i, j])", A="g_sum", B="x"),
        {
            "name": "cell",
            "expression": "C[i, j] = F[i, j] * S[i, j] + I[i, j] * G[i, j]",
            "inputs": {"F": "f", "S": "c", "I": "i", "G": "g"},
            "outputs": {"C": "cell"},
        },
        node("next", "C[i, j] = A[i, j] * tanh(B[i, j])", A="o", B="cell"),
    ]
    weights = {f"{gate}_w": tensor(hidden, hidden) for gate in "ifgo"}
    body = graph({"h": state, "c": state, "x": state, **weights}, {}, nodes, "next", "cell", name="body")
    loop = {"steps": steps, "carried": 2, "scanned": [False], "stacked": [], "body": body}
    inputs = ["h0", "c0", "xs", *weights]
    scan = {"name": "scan", "loop": loop, "inputs": inputs, "outputs": ["h", "c"]}
    constants = {name: constant(hidden, hidden) for name in weights}
    return graph({"h0": state, "c0": state, "xs": tensor(steps, 1, hidden)}, constants, [scan], "h", "c", name="lstm")


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

PAGE = 16  # keys
INT4 = "((((A[n, k // 8] >> (k % 8 * 4)).call(`bitwise_and`, [15])) - 8).cast(`bfloat16`) * S[n, k // 64])"


def decode(bits: int, pages: int, width: int = 256, heads: int = 4, shared: int = 2) -> dict[str, Any]:
    """Return a layer of a decode step of one row over a paged cache. `bits`: of the weights, 16 or 4."""
    features, hidden = width // heads, 2 * width
    shapes = {"qkv": (width + 2 * shared * features, width), "o": (width, width), "down": (width, hidden)}
    shapes |= dict.fromkeys(("gate", "up"), (hidden, width))
    constants: dict[str, Any] = {name: constant(width, dtype="bfloat16") for name in ("g1", "g2")}
    for name, (rows, columns) in shapes.items():
        if bits == 4:
            words = {"dtype": "int32", "shape": [rows, columns // 8]}
            values = RNG.integers(-(2**31), 2**31, (rows, columns // 8)).tolist()
            scales = {"values": (RNG.integers(1, 4, (rows, columns // 64)) / 128).tolist()}
            constants |= {f"{name}_w": {**words, "values": values}}
            constants |= {f"{name}_s": tensor(rows, columns // 64, dtype="bfloat16") | scales}
        else:
            constants[f"{name}_w"] = constant(rows, columns, dtype="bfloat16")
    weight = INT4 if bits == 4 else "A[n, k]"

    def product(name: str, x: str, epilogue: str = "P[m, n]", **more: str) -> dict[str, Any]:
        expression = f"P[m, n]: float32 +=! X[m, k] * {weight}; C[m, n]: bfloat16 = ({epilogue}).cast(`bfloat16`)"
        scales = {"S": f"{name}_s"} if bits == 4 else {}
        return node(name, expression, X=x, A=f"{name}_w", **scales, **more)

    def part(name: str, first: int, count: int) -> dict[str, Any]:
        return node(name, f"C[b, h, d] = A[b, (h + {first}) * {features} + d] where b in 1, h in {count}, d in {features}", A="qkv")

    def write(name: str, rows: str) -> dict[str, Any]:
        place = f"pages[0, (lengths[b] - 1) // {PAGE}], (lengths[b] - 1) % {PAGE}"
        text = f"T[{place}, h, d] = N[b, h, d] where b in 1, h in {shared}, d in {features}"
        inputs = {"T": name, "N": rows, "pages": "pages", "lengths": "lengths"}
        return {
            "name": f"write_{name}",
            "expression": text,
            "inputs": inputs,
            "outputs": {"T": f"new_{name}"},
            "updates": {"T": name},
        }

    nodes = [
        call("n1", "rms_norm", "x", "g1"),
        product("qkv", "n1"),
        part("q", 0, heads),
        part("k", heads, shared),
        part("v", heads + shared, shared),
        call("turned_q", "rope", "q", "cos", "sin", "position"),
        call("turned_k", "rope", "k", "cos", "sin", "position"),
        write("keys", "turned_k"),
        write("values", "v"),
        call("mixed", "paged_attention", "turned_q", "keys", "values", "pages", "lengths"),
        node("rows", f"C[b, j] = A[b, j // {features}, j % {features}] where b in 1, j in {width}", A="mixed"),
        product("o", "rows", "P[m, n] + B[m, n]", B="x"),
        call("n2", "rms_norm", "o", "g2"),
        product("gate", "n2"),
        product("up", "n2", "P[m, n] * (G[m, n] / (1 + exp(-G[m, n])))", G="gate"),
        product("down", "up", "P[m, n] + B[m, n]", B="o"),
    ]
    cache = tensor(pages + 1, PAGE, shared, features, dtype="bfloat16")
    table = tensor(PAGE * pages, features // 2)
    index = tensor(1, dtype="int32")
    inputs = {"x": tensor(1, width, dtype="bfloat16"), "cos": table, "sin": table, "position": index, "lengths": index}
    inputs |= {"pages": tensor(1, pages, dtype="int32")}
    return graph(inputs, constants, nodes, "down", name=f"decode_{bits}") | {"states": {"keys": cache, "values": cache}}


RAMMER_MODELS: dict[str, dict[str, Any]] = {"encoder": LAYER, "sigmoid": SIGMOID, "lstm": lstm(16, 3), "nasnet": NASNET}
DECODE_MODELS = {"decode_16": decode(16, pages=16), "decode_4": decode(4, pages=4)}
