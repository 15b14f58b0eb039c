"""Build graphs from calls of named operators. Every importer of models uses it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from roller_svc.errors import ArgumentError, InvariantError
from roller_svc.frontend.forms import align_form
from roller_svc.frontend.lang import parse
from roller_svc.frontend.lang.equation import einsum_statement
from roller_svc.frontend.ops import operator_named
from roller_svc.frontend.ops.operator import Operand
from roller_svc.frontend.ops.parameters import Value
from roller_svc.ir.dtype import DType
from roller_svc.ir.graph import Constant, Graph, LoopNode, Node, OpNode, Parameters
from roller_svc.ir.program import Forms, TensorProgram, TensorType

Array = NDArray[Any]
EINSUM = "einsum"
# Matrices that it makes stay integers for products: `graph.passes.quantization` reads them before they are folded.
DEQUANTIZE = "dequantize_linear"
# Calls on constants with at most this many elements are evaluated while the graph is built: shapes, indices, masks.
MAX_FOLDED_ELEMENTS = 1 << 14
# Generated constants with more elements are refused: they are a model's mistake, or an attack.
MAX_GENERATED_ELEMENTS = 1 << 26
# Programs of recent calls. Models repeat few operators many times.
MAX_CACHED_PROGRAMS = 4096


class WeightStore(Protocol):
    """Store of the arrays of a builder's constants."""

    def add_typed(self, array: Array, type_: TensorType) -> Constant: ...
    def array(self, constant: Constant) -> Array: ...


Evaluate = Callable[[TensorProgram, Mapping[str, Array]], Mapping[str, Array]]


def program_of_call(operator: str, types: tuple[TensorType, ...], parameters: Parameters = ()) -> TensorProgram:
    """Return the program of an operator over x0, x1, ... with the result y. Raises an InputError of the operator."""
    return forms_of_call(operator, types, parameters)[0]


def forms_of_call(operator: str, types: tuple[TensorType, ...], parameters: Parameters = ()) -> Forms:
    """Return the forms of the program of an operator. Raises as `program_of_call` does."""
    return _forms_of_call(operator, types, parameters, repr(parameters))


@lru_cache(MAX_CACHED_PROGRAMS)
def _forms_of_call(
    operator: str, types: tuple[TensorType, ...], parameters: tuple[tuple[str, Value], ...], text_of_parameters: str
) -> Forms:
    """Return the forms. The text is part of the cache key: 0.0 == -0.0, and 1 == 1.0 == True."""
    inputs = {f"x{i}": type_ for i, type_ in enumerate(types)}
    if operator == EINSUM:
        text = einsum_statement(str(dict(parameters)["equation"]), list(inputs.items()), "y", frozenset(inputs))
        return (parse(text, inputs, ("y",)),)
    called = operator_named(operator)
    checked = {name: called.parameter(name).check(value) for name, value in parameters}
    call = [Operand(name, type_) for name, type_ in inputs.items()], "y", checked, inputs
    first, other = parse(called.source(*call), inputs, ("y",)), called.other_source(*call)
    return (first,) if other is None else (first, align_form(parse(other, inputs, ("y",)), first, ("y",)))


class GraphBuilder:
    """A graph in progress. Inputs have the caller's names, other tensors are named after the operator."""

    def __init__(self, name: str, weights: WeightStore, evaluate: Evaluate, *, byte_group: int = 0) -> None:
        self.name = name
        self.weights = weights
        self.evaluate = evaluate
        self.byte_group = byte_group  # that the device multiplies at once: a model may allow factors that are rounded to bytes
        self.inputs: dict[str, TensorType] = {}
        self.constants: dict[str, Constant] = {}
        self.nodes: list[Node] = []
        self.types: dict[str, TensorType] = {}
        self.at = ""  # the node of the source that is being imported
        self.device = ""  # its label
        self.devices: dict[str, str] = {}  # labels of nodes
        self._count = 0
        self._constant_names: dict[Constant, str] = {}
        self._node_names: set[str] = set()

    def add_input(self, type_: TensorType, name: str | None = None) -> Operand:
        """Add an input. Raises ArgumentError if its name is taken."""
        if name in self.types:
            raise ArgumentError(f"two inputs are called {name!r}", code="invalid-graph")
        chosen = self._name("input") if name is None else name
        self.inputs[chosen] = self.types[chosen] = type_
        return Operand(chosen, type_)

    def add_constant(self, array: Array, dtype: DType) -> Operand:
        """Add a constant of the array's shape. `dtype` is its element type, whose storage type the array has."""
        return self.use_constant(self.weights.add_typed(array, TensorType(dtype, tuple(array.shape))))

    def use_constant(self, constant: Constant) -> Operand:
        """Add a constant whose array the weights have."""
        name = self._constant_names.get(constant)
        if name is None:
            name = self._constant_names[constant] = self._name("constant")
            self.constants[name] = constant
            self.types[name] = constant.type
        return Operand(name, constant.type)

    def fill(self, value: float, dtype: DType, shape: tuple[int, ...] = ()) -> Operand:
        """Add a constant whose elements all have one value. Raises ArgumentError for a shape that is too large."""
        _check_elements(math.prod(shape))
        wide = DType.FLOAT64 if dtype.is_float else DType.INT64
        return self.cast(self.add_constant(np.full(shape, value, wide.value), wide), dtype)

    def count(self, elements: int) -> Operand:
        """Add the int64 constant 0, 1, ... of that many elements. Raises ArgumentError if they are too many."""
        _check_elements(elements)
        return self.add_constant(np.arange(elements, dtype=np.int64), DType.INT64)

    def value(self, operand: Operand) -> Array | None:
        """Return the value of a constant; None for other tensors."""
        constant = self.constants.get(operand.name)
        return None if constant is None else self.weights.array(constant)

    def inputs_of(self, operand: Operand) -> list[str]:
        """Return the inputs of the graph on which a tensor depends, in their order."""
        producers = {tensor: node for node in self.nodes for tensor in node.outputs}
        waiting, seen = [operand.name], {operand.name}
        while waiting:
            node = producers.get(waiting.pop())
            found = set(node.inputs) - seen if node is not None else set()
            seen |= found
            waiting += found
        return [name for name in self.inputs if name in seen]

    def call(self, operator: str, operands: Sequence[Operand], /, **parameters: object) -> Operand:
        """Add a call of an operator and return its result. A call on small constants becomes a constant."""
        listed = tuple((name, _hashable(value)) for name, value in sorted(parameters.items()))
        program = program_of_call(operator, tuple(operand.type for operand in operands), listed)
        return self._add_program(operator, program, operands, listed)

    def join(self, operator: str, operands: Sequence[Operand], /, **parameters: object) -> Operand:
        """Return a call of an operator on several operands; the operand itself if there is one."""
        return operands[0] if len(operands) == 1 else self.call(operator, operands, **parameters)

    def cast(self, operand: Operand, dtype: DType) -> Operand:
        """Return the operand in an element type; itself if it has it."""
        return operand if operand.dtype is dtype else self.call("cast", [operand], dtype=dtype.value)

    def add_loop(
        self,
        body: Graph,
        steps: int,
        carried: int,
        scanned: Sequence[bool],
        stacked: Sequence[bool],
        operands: Sequence[Operand],
    ) -> tuple[Operand, ...]:
        """Add a loop and return the last states and the stacked outputs."""
        outputs = tuple(self._name("loop") for _ in body.outputs)
        node = LoopNode(
            self._node_name("loop"),
            body,
            steps,
            carried,
            tuple(scanned),
            tuple(stacked),
            tuple(operand.name for operand in operands),
            outputs,
        )
        self.nodes.append(node)
        self.types |= zip(outputs, node.output_types, strict=True)
        return tuple(Operand(name, self.types[name]) for name in outputs)

    def subgraph(self, name: str) -> GraphBuilder:
        """Return a builder for the body of a loop, over the same weights."""
        return GraphBuilder(name, self.weights, self.evaluate, byte_group=self.byte_group)

    def finish(self, outputs: Sequence[tuple[str, Operand]], states: Sequence[str] = ()) -> Graph:
        """Return the graph. Constants that nothing reads, as those that were folded, are left out.

        `states` are inputs whose new values are the outputs of their names.
        """
        if len(dict(outputs)) < len(outputs):
            raise ArgumentError("two results, or a result and a state, have one name", code="invalid-graph")
        read = {name for node in self.nodes for name in node.inputs} | {operand.name for _, operand in outputs}
        return Graph(
            self.name,
            tuple(self.inputs.items()),
            {n: c for n, c in self.constants.items() if n in read},
            tuple(self.nodes),
            tuple((name, operand.name) for name, operand in outputs),
            tuple(states),
            self.devices,
        )

    def _add_program(
        self,
        operator: str,
        program: TensorProgram,
        operands: Sequence[Operand],
        parameters: tuple[tuple[str, Value], ...],
    ) -> Operand:
        (output,) = program.outputs
        type_ = program.types[output.tensor]
        values = [self.value(operand) for operand in operands]
        known = [value for value in values if value is not None]
        is_weight = operator == DEQUANTIZE and len(type_.shape) > 1
        if (
            len(known) == len(values)
            and not is_weight
            and type_.elements <= MAX_FOLDED_ELEMENTS
            and all(value.size <= MAX_FOLDED_ELEMENTS for value in known)
        ):
            arrays = {name: value for (name, _), value in zip(program.inputs, known, strict=True)}
            return self.add_constant(self.evaluate(program, arrays)[output.name], type_.dtype)
        name = self._name(operator)
        self.types[name] = type_
        self.nodes.append(
            OpNode(self._node_name(operator), operator, program, tuple(o.name for o in operands), (name,), parameters)
        )
        return Operand(name, type_)

    def _name(self, hint: str) -> str:
        """Return a new name of a tensor that begins with the hint."""
        while True:
            self._count += 1
            name = f"{hint}_{self._count}"
            if name not in self.types:
                return name

    def _node_name(self, operator: str) -> str:
        """Return a unique name: of the node in the source, with the operator if it becomes several."""
        first = self.at or operator
        name, count = first, 1
        while name in self._node_names:
            count += 1
            name = f"{first}/{operator}" if count == 2 else f"{first}/{operator}.{count - 1}"
        self._node_names.add(name)
        if self.device:
            self.devices[name] = self.device
        return name


def _check_elements(elements: int) -> None:
    if elements > MAX_GENERATED_ELEMENTS:
        raise ArgumentError(
            f"a constant of {elements} elements is needed; at most {MAX_GENERATED_ELEMENTS} are made", code="invalid-graph"
        )


def _hashable(value: object) -> Value:
    if isinstance(value, list | tuple):
        return tuple(value)
    if isinstance(value, np.generic):
        return _hashable(value.item())
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise InvariantError(f"a parameter is a {type(value).__qualname__}")
