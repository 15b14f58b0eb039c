"""Models for GPUs as JSON graphs: RAMMER's example, recurrent layers, a layer of an encoder, a step of a decoder.

A builder takes a function that makes constants: small ones have their values in the graph, large ones beside it.
"""

from __future__ import annotations

from typing import Any, Protocol

Json = dict[str, Any]
MATMUL = "C[i, j] +=! A[i, k] * B[k, j]"
PAGE = 16  # keys
INT4 = "((((A[n, k // 8] >> (k % 8 * 4)).call(`bitwise_and`, [15])) - 8).cast(`bfloat16`) * S[n, k // 64])"


class MakeConstant(Protocol):
    """Returns a constant with random values from `low` to `high`."""

    def __call__(self, *shape: int, dtype: str = "float32", low: float = -0.5, high: float = 0.5) -> Json: ...


def tensor(*shape: int, dtype: str = "float32") -> Json:
    return {"dtype": dtype, "shape": list(shape)}


def node(name: str, expression: str, **inputs: str) -> Json:
    return {"name": name, "expression": expression, "inputs": inputs, "outputs": {"C": name}}


def call(name: str, operator: str, *inputs: str, **parameters: Any) -> Json:
    return {"name": name, "operator": operator, "inputs": list(inputs), "outputs": [name], "parameters": parameters}


def graph(inputs: Json, constants: Json, nodes: list[Json], *outputs: str, name: str = "small") -> Json:
    return {
        "format": "roller-graph/1", "name": name, "inputs": inputs, "constants": constants, "nodes": nodes,
        "outputs": {each: each for each in outputs},
    }  # fmt: skip


def encoder(constant: MakeConstant, rows: int = 16, width: int = 32, hidden: int = 48) -> Json:
    """Return a layer of an encoder with one head, without norms."""
    weights = {f"{name}_w": constant(width, width) for name in ("q", "k", "v", "o")}
    weights |= {"up_w": constant(width, hidden), "down_w": constant(hidden, width)}
    nodes = [
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
    ]
    return graph({"x": tensor(rows, width)}, weights, nodes, "out", name="encoder")


def sigmoid(rows: int, columns: int) -> Json:
    """Return the sigmoid of a square matrix, its product with another one, and relu."""
    nodes = [
        node("sigmoid", "C[i, j] = 1 / (1 + exp(-A[i, j]))", A="a"),
        node("product", MATMUL, A="sigmoid", B="b"),
        node("relu", "C[i, j] = max(A[i, j], 0)", A="product"),
    ]
    return graph({"a": tensor(rows, rows), "b": tensor(rows, columns)}, {}, nodes, "sigmoid", "relu", name="sigmoid")


def lstm(constant: MakeConstant, hidden: int, steps: int, layers: int = 1) -> Json:
    """Return layers of loops of LSTM cells. Each layer but the first reads what the one before it has stacked."""
    state = tensor(1, hidden)
    weights = {f"{gate}_w": tensor(hidden, hidden) for gate in "ifgo"}
    nodes = [node(f"{gate}_sum", MATMUL, A="h", B=f"{gate}_w") for gate in "ifgo"]
    nodes += [node(gate, "C[i, j] = 1 / (1 + exp(-A[i, j] - B[i, j]))", A=f"{gate}_sum", B="x") for gate in "ifo"]
    nodes += [
        node("g", "C[i, j] = tanh(A[i, j] + B[i, j])", A="g_sum", B="x"),
        node("cell", "C[i, j] = F[i, j] * S[i, j] + I[i, j] * G[i, j]", F="f", S="c", I="i", G="g"),
        node("next", "C[i, j] = A[i, j] * tanh(B[i, j])", A="o", B="cell"),
    ]
    inputs: Json = {"xs": tensor(steps, 1, hidden)}
    constants: Json = {}
    scans: list[Json] = []
    xs = "xs"
    for layer in range(layers):
        end = "" if layer == layers - 1 else f"_{layer}"
        body = graph({"h": state, "c": state, "x": state, **weights}, {}, nodes, "next", "cell", name="body")
        body["outputs"] |= {"each": "next"} if end else {}
        loop = {"steps": steps, "carried": 2, "scanned": [False], "stacked": [False] if end else [], "body": body}
        first = [f"h0{end}", f"c0{end}"]
        own = {f"{name}{end}": constant(hidden, hidden) for name in weights}
        outputs = [f"h{end}", f"c{end}", *([f"all{end}"] if end else [])]
        scans.append({"name": f"scan{end}", "loop": loop, "inputs": [*first, xs, *own], "outputs": outputs})
        inputs |= dict.fromkeys(first, state)
        constants |= own
        xs = f"all{end}"
    return graph(inputs, constants, scans, "h", "c", name="lstm")


def decode(
    constant: MakeConstant, bits: int, pages: int, width: int = 256, heads: int = 4, shared: int = 2, hidden: int | None = None
) -> Json:
    """Return a layer of a decode step of one row over a paged cache.

    Args:
        constant: makes constants.
        bits: of the weights, 16 or 4.
        pages: of the cache.
        width: features of a row.
        heads: of queries.
        shared: heads of keys and values.
        hidden: features between the products of the MLP; None: twice the width.
    """
    features = width // heads
    hidden = hidden or 2 * width
    shapes = {"qkv": (width + 2 * shared * features, width), "o": (width, width), "down": (width, hidden)}
    shapes |= dict.fromkeys(("gate", "up"), (hidden, width))
    constants: Json = {name: constant(width, dtype="bfloat16") for name in ("g1", "g2")}
    for name, (rows, columns) in shapes.items():
        if bits == 4:
            constants[f"{name}_w"] = constant(rows, columns // 8, dtype="int32", low=-(2**31), high=2**31)
            constants[f"{name}_s"] = constant(rows, columns // 64, dtype="bfloat16", low=1 / 128, high=3 / 128)
        else:
            constants[f"{name}_w"] = constant(rows, columns, dtype="bfloat16")
    weight = INT4 if bits == 4 else "A[n, k]"

    def product(name: str, x: str, epilogue: str = "P[m, n]", **more: str) -> Json:
        expression = f"P[m, n]: float32 +=! X[m, k] * {weight}; C[m, n]: bfloat16 = ({epilogue}).cast(`bfloat16`)"
        scales = {"S": f"{name}_s"} if bits == 4 else {}
        return node(name, expression, X=x, A=f"{name}_w", **scales, **more)

    def part(name: str, first: int, count: int) -> Json:
        return node(name, f"C[b, h, d] = A[b, (h + {first}) * {features} + d] where b in 1, h in {count}, d in {features}", A="qkv")

    def write(name: str, rows: str) -> Json:
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
