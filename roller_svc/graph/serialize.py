"""Graph ↔ JSON. Arrays of constants stand beside it, by digest; a small one may be nested lists in it.

    {"format": "roller-graph/1", "name": "mlp",
     "inputs": {"x": {"dtype": "float32", "shape": [1, 8]}},
     "constants": {"w": {"dtype": "float32", "shape": [8, 4], "digest": "..."},
                   "b": {"dtype": "float32", "shape": [4], "values": [0, 0, 0, 0]}},
     "nodes": [{"name": "fc", "operator": "linear", "inputs": ["x", "w"], "outputs": ["h"], "parameters": {}},
               {"name": "act", "expression": "C[i, j] = max(A[i, j], 0) where i in 1, j in 4",
                "inputs": {"A": "h"}, "outputs": {"C": "y"}},
               {"name": "rnn", "loop": {"steps": 3, "carried": 1, "scanned": [false], "stacked": [], "body": {...}},
                "inputs": ["y", "xs"], "outputs": ["last"]}],
     "outputs": {"y": "last"}}

A node reads inputs, constants, states and results of earlier nodes. A graph may have states, memory of the caller that
a call updates: `"states": {"k": {"dtype": "float32", "shape": [8]}}`. With `"updates": {"T": "k"}` the result T of a node's
program is the new value of k: nodes before it read the old value by the name k, and later nodes and outputs the new one.
The form is untrusted: every field is checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from roller_svc.errors import (
    ArgumentError,
    InputError,
    InvariantError,
    UnsupportedModelError,
    UnsupportedNode,
    require,
)
from roller_svc.frontend.graph_builder import EINSUM, program_of_call
from roller_svc.frontend.lang.input_types import short_repr, tensor_type, whole_number
from roller_svc.frontend.parse import parse_forms
from roller_svc.graph.python_ops import PREFIX, make_host_node
from roller_svc.graph.safetensors import decode_tensors
from roller_svc.graph.weights import Weights
from roller_svc.ir.graph import FUSED, Constant, Effects, Graph, HostNode, LoopNode, Node, OpNode, verify
from roller_svc.ir.program import TensorProgram, TensorType
from roller_svc.runtime.binding import numpy_dtype

FORMAT = "roller-graph/1"
MAX_NODES = 1 << 18
MAX_DEPTH = 16  # loops within each other
MAX_VALUES = 1 << 20  # of a constant in the JSON
MAX_NAME = 1024
LABEL_OF_TARGET = "target"  # of a node without a label
_NOT_FINITE = ("inf", "-inf", "nan")


def add_safetensors(content: bytes, weights: Weights) -> None:
    """Add the arrays of a safetensors file to the weights. Raises ArgumentError if one differs from its digest."""
    for name, (type_, array) in decode_tensors(content).items():
        if weights.add_typed(array, type_).digest != name:
            message = f"the weights are damaged: an array is not the one that {name[:16]!r} names"
            raise ArgumentError(message, code="invalid-model")


def graph_from_json(document: object, weights: Weights) -> Graph:
    """Return the graph of a JSON form whose constants' arrays are in the weights, or in the form.

    Raises:
        UnsupportedModelError: nodes that are not programs; it lists all of them.
        ArgumentError: the form is malformed, or an array is missing.
    """
    unsupported: list[UnsupportedNode] = []
    graph = _Reader(weights, unsupported).graph(document, 0)
    if unsupported:
        raise UnsupportedModelError(tuple(unsupported))
    try:
        return verify(graph)
    except InvariantError as error:
        raise _malformed(error.message) from error


class _Reader:
    """Reads graphs. Nodes that are not programs are recorded; what depends on them is skipped."""

    def __init__(self, weights: Weights, unsupported: list[UnsupportedNode]) -> None:
        self.weights = weights
        self.unsupported = unsupported
        self.devices: dict[str, str] = {}  # of the outer graph's nodes

    def graph(self, document: object, depth: int) -> Graph:
        fields = _mapping(document, "the graph")
        if fields.get("format") != FORMAT:
            raise _malformed(f"its format is {short_repr(fields.get('format'))}, expected {FORMAT!r}")
        if depth > MAX_DEPTH:
            raise _malformed(f"loops are nested more than {MAX_DEPTH} deep")
        optional = {"name", "constants", *(() if depth else ("states",))}
        _check_fields(fields, "the graph", {"format", "inputs", "nodes", "outputs"}, optional)
        inputs = _types(fields["inputs"], "inputs")
        states = _types(fields.get("states", {}), "states")
        if clash := sorted(inputs.keys() & states.keys()):
            raise _malformed(f"an input and a state are called {clash[0]!r}")
        inputs |= states
        constants = {_name(n): self.constant(n, value) for n, value in _mapping(fields.get("constants", {}), "constants").items()}
        types: dict[str, TensorType | None] = dict(inputs)  # None: of a node that failed
        if clash := sorted(types.keys() & constants.keys()):
            raise _malformed(f"an input and a constant are called {clash[0]!r}")
        types |= {name: constant.type for name, constant in constants.items()}
        values = {name: name for name in states}  # the tensor with the value of each state
        nodes = [node for node in self.nodes(fields["nodes"], types, depth, values) if node is not None]
        outputs = tuple((_name(n), _name(tensor)) for n, tensor in _mapping(fields["outputs"], "outputs").items())
        for _, tensor in outputs:
            if tensor not in types:
                raise _malformed(f"output {tensor!r} is written by no node")
        if not outputs and not states:
            raise _malformed("it has no outputs")
        if clash := sorted(dict(outputs).keys() & states.keys()):
            raise _malformed(f"an output and a state are called {clash[0]!r}")
        results = (*((name, values.get(tensor, tensor)) for name, tensor in outputs), *values.items())
        name = _name(fields.get("name", "model"))
        devices = {} if depth else self.devices
        return Graph(name, tuple(inputs.items()), constants, tuple(nodes), results, tuple(states), devices)

    def constant(self, name: object, value: object) -> Constant:
        where = f"constant {_name(name)!r}"
        fields = _mapping(value, where)
        _check_fields(fields, where, {"dtype", "shape"}, {"digest", "values"})
        type_ = tensor_type(str(name), {"dtype": fields["dtype"], "shape": fields["shape"]}, least=0)
        if "values" in fields:
            return self.weights.add_typed(_array(where, type_, fields["values"]), type_)
        constant = Constant(type_, _name(fields.get("digest")))
        if not self.weights.has(constant):
            message = f"the weights have no array for {where} with that digest and type"
            raise ArgumentError(message, code="invalid-model")
        return constant

    def nodes(
        self, listed: object, types: dict[str, TensorType | None], depth: int, states: dict[str, str]
    ) -> Iterable[Node | None]:
        """Yield each node and add its results to the types; None for a node that failed.

        `states` has the tensor with the value of each state, which updates change.
        """
        names: set[str] = set()
        for position, value in enumerate(_list(listed, "nodes", MAX_NODES)):
            fields = _mapping(value, f"node {position}")
            name = _name(fields.get("name", f"node{position}"))
            if name in names:
                raise _malformed(f"two nodes are called {name!r}")
            names.add(name)
            node = self.node(name, fields, types, depth)
            updates = _mapping(fields.get("updates", {}), f"updates of {name!r}")
            if node is not None:
                node = replace(node, inputs=tuple(states.get(tensor, tensor) for tensor in node.inputs))
            given = fields["outputs"]
            results = [_name(t) for t in (given.values() if isinstance(given, Mapping) else given)]
            kinds = [None] * len(results) if node is None else list(node.output_types)
            for result, kind in zip(results, kinds, strict=True):
                if result in types:
                    raise _malformed(f"node {name!r} writes {result!r}, which exists")
                types[result] = kind
            if node is not None:
                states |= _updated(node, updates, states, types)
            yield node

    def node(self, name: str, fields: Mapping[str, Any], types: Mapping[str, TensorType | None], depth: int) -> Node | None:
        kinds = sorted({"operator", "expression", "loop"} & fields.keys())
        where = f"node {name!r}"
        device = _name(fields.get("device", LABEL_OF_TARGET))
        if "device" in fields and depth:
            raise _malformed(f"{where} is in a loop, whose nodes have the loop's device")
        if device.startswith(PREFIX) and not kinds:
            return _host_node(name, where, device.removeprefix(PREFIX), fields, types)
        if len(kinds) != 1:
            raise _malformed(f"{where} must have one of operator, expression and loop, has {kinds or 'none'}")
        if "device" in fields:
            self.devices[name] = device
        optional = {"name", "updates", "device", *({"parameters"} if kinds == ["operator"] else ())}
        _check_fields(fields, where, {*kinds, "inputs", "outputs"}, optional)
        if kinds == ["expression"]:
            inputs, outputs = _mapping(fields["inputs"], where), _mapping(fields["outputs"], where)
            tensors: Sequence[Any] = list(inputs.values())
            results: Sequence[Any] = list(outputs.values())
        else:
            tensors, results = _list(fields["inputs"], where), _list(fields["outputs"], where)
        for tensor in tensors:
            if _name(tensor) not in types:
                raise _malformed(f"{where} reads {tensor!r}, which nothing before it writes")
        if not results:
            raise _malformed(f"{where} has no outputs")
        known = [type_ for tensor in tensors if (type_ := types[tensor]) is not None]
        if len(known) < len(tensors):
            return None
        ends = tuple(tensors), tuple(map(_name, results))
        try:
            if empty := [tensor for tensor in tensors if not require(types[tensor], "type").elements]:
                raise ArgumentError(f"it reads {empty[0]!r}, which has no elements", code="unsupported-type")
            if kinds == ["loop"]:
                return self.loop(name, fields["loop"], ends, known, depth)
            if kinds == ["operator"]:
                return _call(name, fields, ends, known)
            return _expression(name, fields, ends, known)
        except _Malformed:
            raise
        except InputError as error:
            operator = str(fields.get("operator", kinds[0]))[:80]
            self.unsupported.append(UnsupportedNode(operator, name, error.message))
            return None

    def loop(
        self,
        name: str,
        value: object,
        ends: tuple[tuple[str, ...], tuple[str, ...]],
        types: Sequence[TensorType],
        depth: int,
    ) -> LoopNode | None:
        where = f"loop {name!r}"
        fields = _mapping(value, where)
        _check_fields(fields, where, {"steps", "carried", "scanned", "stacked", "body"}, set())
        failures = len(self.unsupported)
        body = self.graph(fields["body"], depth + 1)
        if len(self.unsupported) > failures:
            return None
        steps, carried = whole_number(fields["steps"]), whole_number(fields["carried"])
        flags = [_list(fields[key], where) for key in ("scanned", "stacked")]
        inputs, outputs = ends
        if (
            steps is None
            or carried is None
            or not 1 <= steps < 1 << 31
            or not all(isinstance(flag, bool) for listed in flags for flag in listed)
            or not 0 <= carried <= len(inputs) - len(flags[0])
            or carried + len(flags[1]) != len(outputs)
            or (len(inputs), len(outputs)) != (len(body.inputs), len(body.outputs))
        ):
            raise _malformed(f"{where}: steps, carried, scanned and stacked do not fit its inputs and outputs")
        node = LoopNode(name, body, steps, carried, tuple(flags[0]), tuple(flags[1]), inputs, outputs)
        if tuple(types) != node.input_types:
            raise _malformed(f"{where} is given {_shown(types)}, its body takes {_shown(node.input_types)}")
        return node


def _host_node(
    name: str, where: str, function: str, fields: Mapping[str, Any], types: Mapping[str, TensorType | None]
) -> HostNode | None:
    """Return a node that calls a function of Python, which is registered here."""
    _check_fields(fields, where, {"device", "inputs", "outputs"}, {"name", "effects"})
    tensors, results = ([_name(each) for each in _list(fields[key], where)] for key in ("inputs", "outputs"))
    if unknown := [tensor for tensor in tensors if tensor not in types]:
        raise _malformed(f"{where} reads {unknown[0]!r}, which nothing before it writes")
    known = [type_ for tensor in tensors if (type_ := types[tensor]) is not None]
    if len(known) < len(tensors):
        return None
    effects = _mapping(fields.get("effects", {}), f"effects of {name!r}")
    _check_fields(effects, f"effects of {name!r}", set(), {"read", "write"})
    reads, writes = (frozenset(map(_name, _list(effects.get(key, ()), where))) for key in ("read", "write"))
    node = make_host_node(name, function, tensors, results, known)
    return replace(node, effects=Effects(node.effects.reads | reads, node.effects.writes | writes))


def _types(value: object, what: str) -> dict[str, TensorType]:
    return {_name(name): tensor_type(name, given, least=0) for name, given in _mapping(value, what).items()}


def _updated(
    node: Node, updates: Mapping[str, Any], states: Mapping[str, str], types: Mapping[str, TensorType | None]
) -> dict[str, str]:
    """Return the tensor with the new value of each state that a node updates."""
    if not updates:
        return {}
    if not isinstance(node, OpNode):
        raise _malformed(f"{node.name!r} is a loop, which has no updates: give them to a node `identity` of its results")
    results = {output.name: tensor for output, tensor in zip(node.program.outputs, node.outputs, strict=True)}
    updated: dict[str, str] = {}
    for result, state in ((result, _name(state)) for result, state in updates.items()):
        if result not in results:
            raise _malformed(f"node {node.name!r} updates a state by {result!r:.80}, and its results are {', '.join(results)}")
        if state not in states or state in updated:
            raise _malformed(f"node {node.name!r} updates {state!r:.80}, which is not a state, or is updated by another result")
        if types[results[result]] != types[state]:
            raise _malformed(f"node {node.name!r} updates {state!r} by a result of another type")
        updated[state] = results[result]
    return updated


def _call(
    name: str, fields: Mapping[str, Any], ends: tuple[tuple[str, ...], tuple[str, ...]], types: Sequence[TensorType]
) -> OpNode:
    operator = _name(fields["operator"])
    given = _mapping(fields.get("parameters", {}), f"parameters of {name!r}")
    parameters = tuple(sorted((_name(key), _parameter(value)) for key, value in given.items()))
    if operator == EINSUM and not isinstance(given.get("equation"), str):
        raise ArgumentError("einsum takes the parameter equation", code="missing-parameter")
    program = program_of_call(operator, tuple(types), parameters)
    return _op_node(name, operator, program, ends, parameters)


def _expression(
    name: str, fields: Mapping[str, Any], ends: tuple[tuple[str, ...], tuple[str, ...]], types: Sequence[TensorType]
) -> OpNode:
    expression = fields["expression"]
    if not isinstance(expression, str):
        raise _malformed(f"node {name!r}: the expression must be text, got {short_repr(expression)}")
    inputs = dict(zip(fields["inputs"], types, strict=True))
    forms = parse_forms(expression, inputs, tuple(fields["outputs"]))
    node = _op_node(name, FUSED, forms[0], ends, ())
    return replace(node, forms=forms) if len(forms) > 1 else node


def _op_node(
    name: str,
    operator: str,
    program: TensorProgram,
    ends: tuple[tuple[str, ...], tuple[str, ...]],
    parameters: tuple[tuple[str, Any], ...],
) -> OpNode:
    inputs, outputs = ends
    if len(outputs) != len(program.outputs):
        raise _malformed(f"node {name!r} has {len(program.outputs)} results, {len(outputs)} are named")
    return OpNode(name, operator, program, inputs, outputs, parameters)


def _parameter(value: object) -> Any:
    if isinstance(value, Mapping) and set(value) == {"float"} and value["float"] in _NOT_FINITE:
        return float(value["float"])
    if isinstance(value, list | tuple):
        return tuple(_parameter(each) for each in value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise _malformed(f"a parameter is {short_repr(value)}; expected a number, text, a flag or a list")


def _array(where: str, type_: TensorType, values: object) -> np.ndarray[Any, np.dtype[Any]]:
    """Return nested lists as an array of exactly that type."""
    if type_.elements > MAX_VALUES:
        raise _malformed(f"{where} has {type_.elements} values, {MAX_VALUES} at most: use weights beside the graph")
    given = np.array(values, object)
    if given.shape != type_.shape and (given.size or type_.elements):
        raise _malformed(f"{where}: values are not nested lists of the shape {list(type_.shape)}")
    exact = [_element(where, type_, value) for value in given.flat]
    wide = np.array(exact, np.float64 if type_.dtype.is_float else object)
    return wide.astype(numpy_dtype(type_.dtype)).reshape(type_.shape)


def _element(where: str, type_: TensorType, value: object) -> object:
    if type_.dtype.is_float:
        if isinstance(value, str) and value in _NOT_FINITE:
            return float(value)
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1 << 1023:
            return float(value)
    elif isinstance(value, int):
        low, high = type_.dtype.integer_range
        if low <= value <= high:
            return value
    raise _malformed(f"{where}: {short_repr(value)} is no {type_.dtype.value}")


class _Malformed(ArgumentError):
    """The form itself is wrong, not the program of a node."""


def _malformed(reason: str) -> ArgumentError:
    return _Malformed(f"the JSON graph is malformed: {reason}", code="invalid-model")


def _check_fields(fields: Mapping[str, Any], where: str, required: set[str], optional: set[str]) -> None:
    if missing := sorted(required - fields.keys()):
        raise _malformed(f"{where} has no {missing[0]!r}")
    if unknown := sorted(set(fields) - required - optional):
        raise _malformed(f"{where} has the unknown field {unknown[0]!r:.80}")


def _mapping(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise _malformed(f"{where} must be a mapping of names, got {short_repr(value)}")
    return value


def _list(value: object, where: str, most: int = 4096) -> Sequence[Any]:
    if not isinstance(value, list | tuple) or len(value) > most:
        raise _malformed(f"{where} must have a list of at most {most} items, got {short_repr(value)}")
    return value


def _name(value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME:
        raise _malformed(f"a name must be text of 1 to {MAX_NAME} characters, got {short_repr(value)}")
    return value


def _shown(types: Iterable[TensorType]) -> str:
    return ", ".join(f"{t.dtype.value}{list(t.shape)}" for t in types)
