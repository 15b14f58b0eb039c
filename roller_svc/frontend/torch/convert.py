"""Nodes of a torch.fx graph → calls of named operators."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from roller_svc.errors import ArgumentError, InputError, InvariantError, UnsupportedNode
from roller_svc.frontend.graph_builder import GraphBuilder
from roller_svc.frontend.ops.operator import Operand
from roller_svc.frontend.torch.aten import ATEN
from roller_svc.frontend.torch.call import AtenCall
from roller_svc.frontend.torch.tensors import Empty, dtype_of, type_of
from roller_svc.ir.program import TensorType

# Checks of the exporter. Types and shapes are static, so the first kind always holds; the other ones are of data.
ASSERTIONS = frozenset({"aten._assert_tensor_metadata.default", "aten._assert_async.msg", "aten._assert_scalar.default"})


DEVICE_KEY = "roller_device"  # in the custom metadata of a node, which torch.fx.traceback.annotate writes: its label
_TRAINING = "it is for training: call .eval() on the module first"
_FROM_DATA = "a result's shape or a Python number depends on data; shapes are static"
# Operator that is not supported → why, and what to do.
REASONS = {
    **dict.fromkeys(
        ["aten._native_batch_norm_legit.default", "aten._native_batch_norm_legit_functional.default",
         "aten.alpha_dropout.default", "aten.bernoulli.p", "aten.feature_dropout.default",
         "aten.native_batch_norm.default", "aten.native_dropout.default", "aten.rrelu_with_noise_functional.default"],
        _TRAINING,
    ),
    **dict.fromkeys(["aten._local_scalar_dense.default", "aten.masked_select.default", "aten.nonzero.default",
                     "aten.sym_size.int", "aten.unique_consecutive.default", "aten._unique2.default"], _FROM_DATA),
}  # fmt: skip
# Numbers of a program with symbolic extents; what depends on a refused node has these.
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


class Failed:
    """The value of a node that is not supported, or depends on one."""


FAILED = Failed()


def operator_name(node: fx.Node) -> str:
    """Return the name of the operator that a node calls, as "aten.add.Tensor", also of one with effects."""
    target = node.target
    if str(target) == "with_effects":
        target = node.args[1]
    return str(target) if not callable(target) or isinstance(target, torch._ops.OperatorBase) else target.__name__


class GraphConverter:
    """Converts nodes in order. Nodes that fail are recorded; what depends on them is skipped."""

    def __init__(self, builder: GraphBuilder) -> None:
        self.builder = builder
        self.values: dict[fx.Node, Any] = {}  # operands, empty tensors, lists of both, numbers, FAILED
        self.unsupported: list[UnsupportedNode] = []

    def bind(self, node: fx.Node, value: object) -> None:
        self.values[node] = value

    def convert_nodes(self, nodes: Iterable[fx.Node]) -> None:
        for node in nodes:
            if node.op not in ("placeholder", "output"):
                self.bind(node, self._convert(node))

    def _convert(self, node: fx.Node) -> object:
        """Return the value of a node; FAILED where it is not supported."""
        if node.target is operator.getitem:
            return self._item(node)
        if operator_name(node) in ASSERTIONS:
            return None
        name = operator_name(node)
        converter = ATEN.get(name) if node.op == "call_function" else None
        depends_on_failed = any(self.values.get(each) is FAILED for each in node.all_input_nodes)
        if converter is None and not (depends_on_failed and isinstance(node.meta.get("val"), _SYMBOLS)):
            return self._note(node, REASONS.get(name, "the operator is not supported"))
        if converter is None or depends_on_failed:
            return FAILED
        self.builder.at = node.name
        self.builder.device = str(node.meta.get("custom", {}).get(DEVICE_KEY, ""))
        try:
            call = call_of(node, self._value, self.builder)
            if len(call.results) == 1 and isinstance(call.results[0], Empty):
                return call.results[0]
            results = converter(call)
            call.check_all_read()
        except InputError as error:
            return self._note(node, error.reason)
        finally:
            self.builder.at = self.builder.device = ""
        return _check(node, results, call.results)

    def _item(self, node: fx.Node) -> object:
        source, index = node.args
        values = self.values.get(source) if isinstance(source, fx.Node) else None
        if values is FAILED or not isinstance(values, list) or not isinstance(index, int):
            return FAILED
        if values[index] is None and node.users:
            return self._note(source, f"result {index} is not supported")
        return values[index]

    def _value(self, argument: object) -> object:
        """Return an argument, with values for the nodes in it."""
        if isinstance(argument, fx.Node):
            return self.values[argument]
        if isinstance(argument, list | tuple):
            return [self._value(item) for item in argument]
        return argument

    def _note(self, node: object, reason: str) -> Failed:
        if isinstance(node, fx.Node):
            self.unsupported.append(UnsupportedNode(operator_name(node)[:80], node.name[:80], reason))
        return FAILED


def call_of(node: fx.Node, value: Callable[[object], object], builder: GraphBuilder) -> AtenCall:
    """Return a node as a call, with the schema's names for its arguments."""
    target: Any = node.target
    arguments: dict[str, object] = {}
    defaults: dict[str, object] = {}
    positional = iter(node.args)
    for argument in target._schema.arguments:
        if argument.has_default_value():
            defaults[argument.name] = argument.default_value
        given = None if argument.kwarg_only else next(positional, _ABSENT)
        if argument.kwarg_only or given is _ABSENT:
            given = node.kwargs.get(argument.name, defaults.get(argument.name))
        arguments[argument.name] = value(given)
    kinds = node.meta["val"]
    listed = kinds if isinstance(kinds, list | tuple) else [kinds]
    results = tuple(type_of(each) if isinstance(each, torch.Tensor) else None for each in listed)
    needed = frozenset(range(len(results)))
    if isinstance(kinds, list | tuple):
        needed = frozenset(user.args[1] for user in node.users if user.target is operator.getitem and user.users)
    return AtenCall(operator_name(node), builder, arguments, defaults, results, needed)


_ABSENT = object()


def _check(
    node: fx.Node, results: Operand | Sequence[Operand | Empty | None], expected: Sequence[TensorType | Empty | None]
) -> object:
    """Return the results if they have the types that torch infers. Raises InvariantError if not.

    A converter may return the first result alone; nodes that read further ones are then not supported.
    """
    listed = [results] if isinstance(results, Operand) else list(results)
    if isinstance(results, Operand):
        listed += [each if isinstance(each, Empty) else None for each in expected[1:]]
    if len(listed) != len(expected):
        raise InvariantError(f"{operator_name(node)} {node.name}: {len(listed)} results, torch has {len(expected)}")
    for result, type_ in zip(listed, expected, strict=True):
        if isinstance(result, Operand) and result.type != type_:
            raise InvariantError(f"{operator_name(node)} {node.name}: the result is {result.type}, torch's {type_}")
    return listed[0] if isinstance(results, Operand) and len(listed) == 1 else listed


def add_input(name: str, tensor: torch.Tensor, builder: GraphBuilder) -> Operand | Empty:
    """Add an input of the graph; nodes read one without elements as a known value. Errors name the input."""
    try:
        type_ = type_of(tensor)
    except ArgumentError as error:
        raise ArgumentError(f"input {name!r}: {error.message}", code=error.code, hint=error.hint) from error
    if isinstance(type_, Empty):
        builder.add_input(TensorType(dtype_of(tensor.dtype), type_.shape), name)
        return type_
    return builder.add_input(type_, name)
