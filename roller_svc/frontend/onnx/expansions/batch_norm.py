"""Expansion of BatchNormalization, with the mean and variance of the batch in training."""

from __future__ import annotations

from collections.abc import Sequence

from roller_svc.frontend.graph_builder import GraphBuilder
from roller_svc.frontend.onnx.expansions.expansion import Expansion
from roller_svc.frontend.onnx.table import NODES
from roller_svc.frontend.onnx.tensors import Tensor
from roller_svc.frontend.onnx.use import Node
from roller_svc.frontend.ops.operator import Operand


def _batch_norm(node: Node, builder: GraphBuilder) -> Sequence[Tensor]:
    if node.opset < 14 or not node.integer("training_mode", 0):
        use = NODES["BatchNormalization"](node)
        return [Tensor(builder.call(use.operator, use.operands, **use.parameters))]
    x, scale, bias, old_mean, old_variance = (node.operand(position) for position in range(5))
    momentum, epsilon = node.number("momentum", 0.9), node.number("epsilon", 1e-5)
    if x.rank < 2:
        raise node.invalid(f"input is {list(x.shape)}, and must have channels in dimension 1")
    axes = tuple(d for d in range(x.rank) if d != 1)
    mean = builder.call("reduce_mean", [x], axis=axes)
    column = builder.call("reshape", [mean], shape=(x.shape[1], *[1] * (x.rank - 2)))
    centred = builder.call("sub", [x, column])
    variance = builder.call("reduce_mean", [builder.call("square", [centred])], axis=axes)
    y = builder.call("batch_norm", [x, scale, bias, mean, variance], epsilon=epsilon)
    running = [_running(builder, old, new, momentum) for old, new in ((old_mean, mean), (old_variance, variance))]
    return [Tensor(y), *map(Tensor, running)]


def _running(builder: GraphBuilder, old: Operand, new: Operand, momentum: float) -> Operand:
    retained = builder.call("mul", [old, builder.fill(momentum, old.dtype)])
    added = builder.call("mul", [builder.cast(new, old.dtype), builder.fill(1 - momentum, old.dtype)])
    return builder.call("add", [retained, added])


BATCH_NORM: dict[str, Expansion] = {"BatchNormalization": _batch_norm}
