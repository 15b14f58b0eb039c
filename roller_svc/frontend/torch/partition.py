"""Parts of a torch.fx graph → graphs, and which nodes can be part of one."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from roller_svc.errors import ArgumentError, InputError, InvariantError, UnsupportedModelError, UnsupportedNode
from roller_svc.frontend.graph_builder import Evaluate, GraphBuilder, WeightStore
from roller_svc.frontend.ops.operator import Operand
from roller_svc.frontend.torch.convert import GraphConverter, add_input
from roller_svc.frontend.torch.tensors import Empty, array_of, dtype_of, memory_order, type_of
from roller_svc.ir.graph import Graph


class SupportChecker:
    """Tells which nodes can be converted, by converting each in a graph of its own."""

    def __init__(self, weights: WeightStore, evaluate: Evaluate) -> None:
        self._weights = weights
        self._evaluate = evaluate
        self._reasons: dict[fx.Node, str | None] = {}

    def reason_against(self, node: fx.Node) -> str | None:
        """Return why a node cannot be converted; None if it can."""
        if node not in self._reasons:
            self._reasons[node] = self._item(node) if node.target is operator.getitem else self._try(node)
        return self._reasons[node]

    def _item(self, node: fx.Node) -> str | None:
        source = node.args[0]
        return self.reason_against(source) if isinstance(source, fx.Node) else "it reads no node"

    def _try(self, node: fx.Node) -> str | None:
        if node.op != "call_function":
            return f"a node of kind {node.op} is not supported"
        converter = GraphConverter(GraphBuilder("trial", self._weights, self._evaluate))
        try:
            for each in node.all_input_nodes:
                converter.bind(each, _trial_value(each, converter.builder))
            for tensor in _tensors(node.meta.get("val")):
                if isinstance(type_of(tensor), Empty) and not isinstance(node.meta["val"], tuple | list):
                    return "its result has no elements"
                _check_device(tensor)
            converter.convert_nodes([node, *(user for user in node.users if user.target is operator.getitem)])
        except InputError as error:
            return error.message
        except InvariantError as error:
            return f"a defect of its conversion: {error}"
        return converter.unsupported[0].reason if converter.unsupported else None


def _trial_value(node: fx.Node, builder: GraphBuilder) -> object:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        _check_device(value)
        type_ = type_of(value)
        return type_ if isinstance(type_, Empty) else builder.add_input(type_)
    raise ArgumentError(f"argument {node.name} is a {type(value).__name__}, not a tensor", code="unsupported-type")


def _check_device(tensor: torch.Tensor) -> None:
    if tensor.device.type != "cpu":
        raise ArgumentError(f"a tensor on {tensor.device} is not supported; models run on CPUs", code="unsupported-type")


def _tensors(value: object) -> list[torch.Tensor]:
    listed = value if isinstance(value, tuple | list) else [value]
    return [each for each in listed if isinstance(each, torch.Tensor)]


def import_partition(
    module: fx.GraphModule, constants: Mapping[int, torch.Tensor], weights: WeightStore, evaluate: Evaluate
) -> Graph:
    """Return the graph of a module of supported nodes. Its inputs are called input0, ..., its outputs output0, ...

    Outputs have their dimensions in the order in which torch has them in memory.

    Args:
        module: placeholders and results have the types that the tracer infers.
        constants: values of inputs, by position; other inputs are those of the graph.
        weights: takes the arrays of constants.
        evaluate: runs a program on arrays.

    Raises:
        UnsupportedModelError: nodes are not supported; it lists all of them.
    """
    builder = GraphBuilder("torch", weights, evaluate)
    converter = GraphConverter(builder)
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    for position, node in enumerate(placeholders):
        if position in constants:
            tensor = constants[position]
            converter.bind(node, builder.add_constant(array_of(tensor), dtype_of(tensor.dtype)))
        else:
            name = f"input{position}"
            converter.bind(node, add_input(name, node.meta["val"], builder))
    converter.convert_nodes(module.graph.nodes)
    outputs = []
    for position, node in enumerate(result_nodes(module)):
        value = converter.values.get(node)
        if isinstance(value, Operand):
            order = memory_order(node.meta["val"])
            if order is not None and order != tuple(range(value.rank)):
                value = builder.call("transpose", [value], permutation=order)
            outputs.append((f"output{position}", value))
        elif not converter.unsupported:
            converter.unsupported.append(UnsupportedNode("output", node.name, "it is not a tensor with elements"))
    if converter.unsupported:
        raise UnsupportedModelError(tuple(converter.unsupported))
    return builder.finish(outputs)


def result_nodes(module: fx.GraphModule) -> Sequence[fx.Node]:
    """Return the nodes whose values a module returns."""
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    results: Any = output.args[0]
    return [results] if isinstance(results, fx.Node) else list(results)
