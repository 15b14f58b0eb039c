"""Functions of Python that nodes may call. Models name them; only the program that runs the model registers them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from roller_svc.errors import ArgumentError, InvariantError
from roller_svc.frontend.lang.input_types import tensor_types
from roller_svc.graph.weights import Array
from roller_svc.ir.dtype import DType
from roller_svc.ir.graph import ANYTHING, Effects, HostNode
from roller_svc.ir.program import TensorType
from roller_svc.runtime.binding import numpy_dtype

PREFIX = "python:"  # begins the device of a node that calls a function
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}", re.ASCII)
_registered: dict[str, PythonOp] = {}


@dataclass(frozen=True, slots=True)
class PythonOp:
    """A function with its signature."""

    name: str
    function: Callable[..., Any]
    inputs: tuple[tuple[str, TensorType], ...]
    outputs: tuple[tuple[str, TensorType], ...]
    effects: Effects


def python_op(
    name: str,
    function: Callable[..., Any],
    inputs: Mapping[str, object],
    outputs: Mapping[str, object],
    reads: Iterable[str] = (),
    writes: Iterable[str] = (),
    *,
    pure: bool = True,
) -> None:
    """Register a function of Python for nodes of models in this process.

    Args:
        name: what models call it.
        function: takes the inputs in order, as arrays of numpy that it must not write, and returns the output, or a
            tuple of several in order.
        inputs: dtype and shape of each input.
        outputs: dtype and shape of each output.
        reads: names of the resources outside of the model that it reads.
        writes: names of those that it writes.
        pure: whether it has no other effects. If not, and it names no writes, it is taken to write everything.

    Raises ArgumentError for a name that is taken, or that models cannot have.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ArgumentError(f"the name of a Python operator has letters, digits and `_.-`, got {name!r:.80}", code="invalid-option")
    if name in _registered:
        raise ArgumentError(f"a Python operator is called {name!r} already", code="invalid-option")
    for what, names in (("reads", reads), ("writes", writes)):
        if isinstance(names, str) or not all(isinstance(each, str) for each in names):
            raise ArgumentError(f"{what} must be names of resources, as ('log',), got {names!r:.80}", code="invalid-option")
    if not callable(function):
        raise ArgumentError(f"the function of {name!r} must be callable, got {function!r:.80}", code="invalid-option")
    effects = Effects(frozenset(reads), frozenset(writes))
    if not pure and not effects.writes:
        effects = Effects(effects.reads, frozenset({ANYTHING}))
    taken, given = (tuple(tensor_types(types, least=0)) for types in (inputs, outputs))
    _registered[name] = PythonOp(name, function, taken, given, effects)


def find_python_op(name: str) -> PythonOp:
    """Return the operator of that name. Raises ArgumentError if none is registered."""
    known = _registered.get(name)
    if known is None:
        raise ArgumentError(
            f"no Python operator is called {name!r:.80}",
            code="unknown-python-op",
            hint="roller_svc.python_op registers one where the model runs; ROLLER_PYTHON_OPS names a function that does so",
        )
    return known


def describe_python_ops() -> list[Any]:
    """Return what compiled models depend on of each registered function: its name, types and effects, as JSON-compatible values."""
    return [
        [
            op.name,
            *([[name, t.dtype.value, list(t.shape)] for name, t in types] for types in (op.inputs, op.outputs)),
            sorted(op.effects.reads),
            sorted(op.effects.writes),
        ]
        for _, op in sorted(_registered.items())
    ]


def declare_python_ops(described: Iterable[Any]) -> None:
    """Register functions by what `describe_python_ops` returned, for a process that compiles models and never calls them."""
    for name, *tensors, reads, writes in described:
        taken, given = (tuple((each, TensorType(DType(dtype), tuple(shape))) for each, dtype, shape in part) for part in tensors)
        _registered[name] = PythonOp(name, _refuse_call, taken, given, Effects(frozenset(reads), frozenset(writes)))


def _refuse_call(*_: Array) -> Array:
    raise InvariantError("a process that compiles models calls no function of Python")


def make_host_node(
    name: str, function: str, inputs: Sequence[str], outputs: Sequence[str], types: Sequence[TensorType]
) -> HostNode:
    """Return a node that calls a registered function. Raises ArgumentError for tensors that it does not take."""
    op = find_python_op(function)
    expected = tuple(type_ for _, type_ in op.inputs)
    if tuple(types) != expected or len(outputs) != len(op.outputs):
        raise ArgumentError(
            f"node {name!r}: {PREFIX}{function} takes {_shown(expected)} and has {len(op.outputs)} outputs, "
            f"got {_shown(types)} and {len(outputs)}",
            code="shape-mismatch",
        )
    return HostNode(name, function, tuple(inputs), tuple(outputs), expected, tuple(t for _, t in op.outputs), op.effects)


def run_python_op(node: HostNode, inputs: Sequence[Array]) -> list[Array]:
    """Return the results of a node's function. Raises ArgumentError for a result of another type, and what it raises."""
    op = find_python_op(node.function)
    views = [array.view() for array in inputs]
    for view in views:
        view.flags.writeable = False
    try:
        returned = op.function(*views)
    except BaseException as error:
        error.add_note(f"in the Python operator {node.function!r} of node {node.name!r}")
        raise
    results = returned if isinstance(returned, tuple) else (returned,)
    if len(results) != len(node.outputs):
        raise _wrong(node, f"{len(results)} results, expected {len(node.outputs)}")
    if len(node.output_types) != len(results):
        raise InvariantError(f"node {node.name} has {len(node.output_types)} types of results")
    for (name, type_), result in zip(op.outputs, results, strict=True):
        if not isinstance(result, np.ndarray | np.generic):
            raise _wrong(node, f"{name} is a {type(result).__name__}, expected an array of numpy")
        if (result.shape, result.dtype) != (type_.shape, numpy_dtype(type_.dtype)):
            raise _wrong(node, f"{name} is {result.dtype}{list(result.shape)}, expected {type_.dtype.value}{list(type_.shape)}")
    return [np.array(result, order="C") for result in results]


def _wrong(node: HostNode, reason: str) -> ArgumentError:
    return ArgumentError(f"node {node.name!r}: {PREFIX}{node.function} returned {reason}", code="python-op-result")


def _shown(types: Iterable[TensorType]) -> str:
    return ", ".join(f"{t.dtype.value}{list(t.shape)}" for t in types) or "nothing"
