"""Products, convolutions and normalisations of com.microsoft with what follows or precedes them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from roller_svc.frontend.graph_builder import GraphBuilder
from roller_svc.frontend.onnx.expansions.expansion import Expansion, add_use
from roller_svc.frontend.onnx.expansions.results import RESULTS
from roller_svc.frontend.onnx.table import NODES
from roller_svc.frontend.onnx.tensors import Tensor
from roller_svc.frontend.onnx.use import Node
from roller_svc.frontend.ops.operator import Operand
from roller_svc.ir.dtype import DType

# Activation → its operator, and the names and defaults of its parameters in the order of activation_params.
_ACTIVATIONS: dict[str, tuple[str, dict[str, float]]] = {
    "Clip": ("clip", {"least": float("-inf"), "most": float("inf")}),
    "Elu": ("elu", {"alpha": 1.0}),
    "HardSigmoid": ("hard_sigmoid", {"alpha": 0.2, "beta": 0.5}),
    "HardSwish": ("hard_swish", {}),
    "LeakyRelu": ("leaky_relu", {"alpha": 0.01}),
    "Relu": ("relu", {}),
    "Sigmoid": ("sigmoid", {}),
    "Softplus": ("softplus", {}),
    "Tanh": ("tanh", {}),
}


def _activated(node: Node, builder: GraphBuilder, x: Operand, given: Sequence[float | None]) -> Operand:
    """Return the activation that the node names, with these parameters."""
    name = node.text("activation", "")
    if not name:
        return x
    if name not in _ACTIVATIONS:
        raise node.unsupported(f"activation {name[:40]!r}", f"supported are {', '.join(_ACTIVATIONS)}")
    operator, defaults = _ACTIVATIONS[name]
    if any(value is not None for value in given[len(defaults) :]):
        raise node.invalid(f"{name} has {len(defaults)} parameters, got {list(given)}")
    values = [*given, *[None] * len(defaults)]
    parameters = {key: default if value is None else value for (key, default), value in zip(defaults.items(), values, strict=False)}
    return builder.call(operator, [x], **parameters)


def _fused_matmul(node: Node, builder: GraphBuilder) -> Sequence[Tensor]:
    node.check_default("transBatchA", 0)
    node.check_default("transBatchB", 0)
    a, b = node.operand(0), node.operand(1)
    flags = {f"transpose_{side.lower()}": bool(node.integer(f"trans{side}", 0)) and x.rank > 1 for side, x in (("A", a), ("B", b))}
    product = builder.call("matmul", [a, b], **flags)
    alpha = node.number("alpha", 1.0)
    return [Tensor(product if alpha == 1 else builder.call("mul", [product, builder.fill(alpha, product.dtype)]))]


def _fused_gemm(node: Node, builder: GraphBuilder) -> Sequence[Tensor]:
    given = [node.number(f"activation_{name}", float("nan")) for name in ("alpha", "beta", "gamma")]
    parameters = [None if value != value else value for value in given]
    return [Tensor(_activated(node, builder, add_use(NODES["Gemm"](node), builder), parameters))]


def _fused_conv(node: Node, builder: GraphBuilder) -> Sequence[Tensor]:
    """Return a convolution, plus the fourth operand, with an activation."""
    result = add_use(NODES["Conv"](node), builder)
    added = node.optional(3)
    if added is not None:
        result = builder.call("add", [result, added])
    given = node.attribute("activation_params") or []
    if not isinstance(given, list) or not all(isinstance(value, int | float) for value in given):
        raise node.invalid(f"activation_params must be a list of numbers, got {given!r:.60}")
    return [Tensor(_activated(node, builder, result, given))]


def _normalised(node: Node, builder: GraphBuilder, operands: Sequence[Operand | None], epsilon: float) -> list[Tensor]:
    """Return the layer norm of the last dimension, and its mean and inverse deviation if they are needed."""
    present = tuple(operand for operand in operands if operand is not None)
    plain = Node(
        "LayerNormalization",
        17,
        {"axis": -1, "epsilon": epsilon},
        present,
        (None,) * len(present),
        (True, *node.results[1:3]),
    )
    return list(RESULTS["LayerNormalization"](plain, builder))


def _skip_layer_norm(node: Node, builder: GraphBuilder, *, simplified: bool) -> Sequence[Tensor]:
    """Return the norm of the sum of both operands and a bias, and that sum."""
    x, skip, gamma = (node.operand(position) for position in range(3))
    beta, bias = (None, node.optional(3)) if simplified else (node.optional(3), node.optional(4))
    total = builder.call("add", [x, skip] if bias is None else [x, skip, bias])
    epsilon = node.number("epsilon", 1e-12)
    if not simplified:
        results = _normalised(node, builder, (total, gamma, beta), epsilon)
    elif any(node.results[1:3]):
        raise node.unsupported("a mean or deviation as a result")
    else:
        results = [Tensor(builder.call("rms_norm", [total, gamma], axis=-1, epsilon=epsilon))]
    return [*results, *[Tensor()] * (3 - len(results)), Tensor(total)][: len(node.results)]


def _embed_layer_norm(node: Node, builder: GraphBuilder) -> Sequence[Tensor]:
    """Return the norm of the sum of word, position and segment embeddings, the lengths of the masks, and the sum."""
    ids, segments, mask, places = node.operand(0), node.optional(1), node.optional(7), node.optional(8)
    words, positions, kinds = node.operand(2), node.operand(3), node.optional(4)
    node.integer("mask_index_type", 0)
    if ids.rank != 2:
        raise node.invalid(f"input_ids are {list(ids.shape)}; [batch, length] is expected")
    batch, length = ids.shape
    terms = [builder.call("gather", [words, ids], axis=0)]
    if places is not None:
        terms.append(builder.call("gather", [positions, places], axis=0))
    else:
        terms.append(builder.call("slice", [positions], starts=(0,), stops=(length,), axes=(0,)))
    if segments is not None and kinds is not None:
        terms.append(builder.call("gather", [kinds, segments], axis=0))
    total = builder.call("add", terms)
    first = _normalised(node, builder, (total, node.operand(5), node.optional(6)), node.number("epsilon", 1e-12))[:1]
    if mask is None:
        lengths = builder.fill(0, DType.INT32, (batch,))
    else:
        lengths = builder.call("reduce_sum", [builder.cast(mask, DType.INT32)], axis=(1,), keepdims=False, dtype=DType.INT32.value)
    return [*first, Tensor(lengths), Tensor(total)][: len(node.results)]


FUSED: dict[str, Expansion] = {
    "EmbedLayerNormalization": _embed_layer_norm,
    "FusedConv": _fused_conv,
    "FusedGemm": _fused_gemm,
    "FusedMatMul": _fused_matmul,
    "SkipLayerNormalization": partial(_skip_layer_norm, simplified=False),
    "SkipSimplifiedLayerNormalization": partial(_skip_layer_norm, simplified=True),
    "TransposeMatMul": _fused_matmul,
}
