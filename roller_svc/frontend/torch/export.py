"""torch.export programs → graphs."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import (
    ConstantArgument,
    InputKind,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.utils import _pytree as pytree

from roller_svc.errors import ArgumentError, UnsupportedModelError, UnsupportedNode
from roller_svc.frontend.graph_builder import Evaluate, GraphBuilder, WeightStore
from roller_svc.frontend.ops.operator import Operand
from roller_svc.frontend.torch.aten import ATEN
from roller_svc.frontend.torch.convert import FAILED, GraphConverter, add_input
from roller_svc.frontend.torch.failures import check_module, translated_failures
from roller_svc.frontend.torch.tensors import Empty, array_of, dtype_of
from roller_svc.ir.graph import Graph

_STATE = {InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR}
_MUTATIONS = (OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION)


def export_module(
    module: torch.nn.Module,
    inputs: Sequence[object],
    named: Mapping[str, object] | None = None,
    dynamic_shapes: Any = None,
) -> ExportedProgram:
    """Return the program of a module for inputs like these. Shapes are theirs but for dynamic ones."""
    check_module(module)
    for value in (*inputs, *(named or {}).values()):
        if isinstance(value, np.ndarray):
            raise ArgumentError(
                "example inputs of a torch module must be tensors of torch, got an array of numpy",
                code="not-exportable",
                hint="torch.from_numpy(x)",
            )
    with torch.no_grad(), translated_failures():
        return torch.export.export(module, tuple(inputs), dict(named or {}), dynamic_shapes=dynamic_shapes)


def complete_dims(program: ExportedProgram, dims: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return extents for each symbolic dimension: those given, else the range of its torch.export.Dim.

    Raises ArgumentError for a name that the program does not have, and for a dimension without an upper end.
    """
    symbols = _symbols(program)
    given = dict(dims or {})
    if unknown := [name for name in given if name not in symbols]:
        listed = ", ".join(symbols) or "none"
        message = f"the program has no dimension {unknown[0]!r}; its symbolic dimensions are {listed}"
        raise ArgumentError(message, code="unknown-argument")
    for name, symbol in symbols.items():
        bounds = program.range_constraints.get(symbol)
        if name in given:
            continue
        if bounds is None or not bounds.upper.is_Integer:
            raise ArgumentError(
                f"the program leaves the dimension {name} open", code="open-shape", hint=f'give it, as dims={{"{name}": "1..64"}}'
            )
        given[name] = f"{max(1, int(bounds.lower))}..{int(bounds.upper)}"
    return given or None


def _symbols(program: ExportedProgram) -> dict[str, Any]:
    """Return the symbol of each dimension by its name, that of torch.export.Dim where there is one."""
    symbols: dict[str, Any] = {}
    for tensor in _input_tensors(program):
        environment = tensor.fake_mode.shape_env
        names = {str(environment.source_to_var.get(source)): name for source, name in environment.source_name_to_debug_name.items()}
        for extent in tensor.shape:
            if isinstance(extent, torch.SymInt):
                for symbol in sorted(extent.node.expr.free_symbols, key=str):
                    symbols.setdefault(names.get(str(symbol), str(symbol)), symbol)
    return symbols


def _input_tensors(program: ExportedProgram) -> list[Any]:
    """Return the inputs as torch infers them, without numbers."""
    names = {spec.arg.name for spec in program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT}
    values = [node.meta.get("val") for node in program.graph.find_nodes(op="placeholder") if node.name in names]
    return [value for value in values if isinstance(value, torch.Tensor)]


def specialize(program: ExportedProgram, extents: Mapping[str, int]) -> ExportedProgram:
    """Return the program for these extents of its symbolic dimensions. Raises ArgumentError for one out of its range."""
    symbols = _symbols(program)
    for name, symbol in symbols.items():
        bounds = program.range_constraints.get(symbol)
        if name in extents and bounds is not None and bounds.upper.is_Integer and extents[name] > bounds.upper:
            raise ArgumentError(
                f"dims: {name} is {extents[name]}, and the program's torch.export.Dim ends at {bounds.upper}",
                code="invalid-option",
                hint=f'end dims at {bounds.upper}, or export the program with a larger torch.export.Dim("{name}", max=...)',
            )
    values = {symbol: extents[name] for name, symbol in symbols.items() if name in extents}
    tensors = iter(_input_tensors(program))

    def example(given: object) -> object:
        if not isinstance(given, torch.Tensor):
            return given
        shape = [int(d) if isinstance(d, int) else int(d.node.expr.subs(values)) for d in next(tensors).shape]
        return torch.zeros(shape, dtype=given.dtype)

    if program.example_inputs is None:
        raise ArgumentError("the program has no example inputs, which give its arguments", code="not-exportable")
    arguments, named = pytree.tree_map(example, program.example_inputs)
    return export_module(program.module(), arguments, named)


def decompose(program: ExportedProgram) -> ExportedProgram:
    """Return the program in core ATen, with the operators of ATEN whole."""
    table = torch.export.default_decompositions()
    for overload in list(table):
        if str(overload) in ATEN:
            del table[overload]
    with translated_failures(), warnings.catch_warnings():
        # torch 2.13 copies a class that it deprecates
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)`", FutureWarning)
        return program.run_decompositions(table)


def import_program(program: ExportedProgram, weights: WeightStore, evaluate: Evaluate) -> Graph:
    """Return the graph of an exported program. Parameters and buffers become constants, which share their memory.

    Buffers and inputs that the program writes in place become states.

    Args:
        weights: takes the arrays of constants.
        evaluate: runs a program on arrays.

    Raises:
        UnsupportedModelError: nodes are not supported; it lists all of them.
        ArgumentError: an input has a symbolic extent or an unsupported type.
    """
    program = decompose(program)
    builder = GraphBuilder(type(program.graph_module).__name__.lower(), weights, evaluate)
    converter = GraphConverter(builder)
    _bind_inputs(program, converter)
    converter.convert_nodes(program.graph.nodes)
    outputs, states = _outputs(program, converter), _states(program, converter)
    if converter.unsupported:
        raise UnsupportedModelError(tuple(converter.unsupported))
    return builder.finish([*outputs, *states], [name for name, _ in states])


def _bind_inputs(program: ExportedProgram, converter: GraphConverter) -> None:
    """Give each placeholder its value: inputs of the graph, constants, and numbers."""
    placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    written = {spec.target for spec in program.graph_signature.output_specs if spec.kind is OutputKind.BUFFER_MUTATION}
    for spec in program.graph_signature.input_specs:
        node = placeholders[spec.arg.name]
        if spec.kind is InputKind.BUFFER and spec.target in written:
            value: object = add_input(str(spec.target), node.meta["val"], converter.builder)
        elif spec.kind in _STATE:
            tensor = _state(program, spec)
            value = Empty(tuple(tensor.shape))
            if tensor.numel():
                value = converter.builder.add_constant(array_of(tensor), dtype_of(tensor.dtype))
        elif spec.kind is InputKind.USER_INPUT and isinstance(spec.arg, ConstantArgument):
            value = spec.arg.value
        elif spec.kind is InputKind.USER_INPUT and isinstance(node.meta["val"], torch.Tensor):
            value = add_input(node.name, node.meta["val"], converter.builder)
        elif spec.kind is InputKind.TOKEN:  # it orders operators with effects, which are refused
            value = FAILED
        else:
            shown = spec.kind.name.lower().replace("_", " ")
            raise ArgumentError(
                f"input {node.name!r} is a {shown} of type {type(node.meta.get('val')).__name__}; "
                "only tensors and constants are supported",
                code="unsupported-type",
            )
        converter.bind(node, value)


def _state(program: ExportedProgram, spec: Any) -> torch.Tensor:
    """Return the tensor of a parameter, a buffer or a constant."""
    tensors = program.state_dict if spec.target in program.state_dict else program.constants
    tensor = tensors[spec.target]
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(f"{spec.target} is a {type(tensor).__name__}, not a tensor", code="unsupported-type")
    return tensor


def _outputs(program: ExportedProgram, converter: GraphConverter) -> list[tuple[str, Operand]]:
    """Return the outputs with their names."""
    specs = program.graph_signature.output_specs
    (output,) = (node for node in program.graph.nodes if node.op == "output")
    user = [(spec, node) for spec, node in zip(specs, output.args[0], strict=True) if spec.kind is OutputKind.USER_OUTPUT]
    for spec in specs:
        if spec.kind not in (OutputKind.USER_OUTPUT, OutputKind.TOKEN, *_MUTATIONS):
            converter.unsupported.append(_effect(spec))
    names = _output_names(program, len(user))
    outputs = []
    for name, (spec, node) in zip(names, user, strict=True):
        value = converter.values.get(node) if isinstance(spec.arg, TensorArgument) else node
        if isinstance(value, Empty):
            value = _constant(node.meta["val"], converter.builder)
        if isinstance(value, Operand):
            outputs.append((name, value))
        elif value is not FAILED:
            reason = f"it is {value!r:.40}, not a tensor with elements"
            converter.unsupported.append(UnsupportedNode("output", name, reason))
    return outputs


def _constant(tensor: torch.Tensor, builder: GraphBuilder) -> Operand:
    """Return a constant of a tensor without elements."""
    dtype = dtype_of(tensor.dtype)
    return builder.add_constant(np.empty(tuple(tensor.shape), dtype.value), dtype)


def _states(program: ExportedProgram, converter: GraphConverter) -> list[tuple[str, Operand]]:
    """Return the new values of the buffers and inputs that the program writes in place, with their names."""
    (output,) = (node for node in program.graph.nodes if node.op == "output")
    states: list[tuple[str, Operand]] = []
    for spec, node in zip(program.graph_signature.output_specs, output.args[0], strict=True):
        if spec.kind not in _MUTATIONS:
            continue
        value = converter.values.get(node)
        if isinstance(value, Operand):
            states.append((str(spec.target), value))
        elif isinstance(value, Empty):
            converter.unsupported.append(UnsupportedNode("state", str(spec.target), "it has no elements"))
    return states


def _effect(spec: OutputSpec) -> UnsupportedNode:
    kind = spec.kind.name.lower().replace("_", " ")
    target = spec.target or spec.arg.name
    return UnsupportedNode(kind, str(target), "the program has another effect than results and writes to tensors")


def _output_names(program: ExportedProgram, count: int) -> list[str]:
    """Return keys of the result where it is a dictionary or a dataclass, else output0, output1, ..."""
    plain = [f"output{i}" for i in range(count)]
    tree = program.call_spec.out_spec
    if tree is None or tree.num_leaves != count:
        return plain
    paths = pytree.tree_flatten_with_path(pytree.tree_unflatten(list(range(count)), tree))[0]
    names = ["_".join(_key(key) for key in path) for path, _ in paths]
    named = all(path and not isinstance(path[0], pytree.SequenceKey) for path, _ in paths)
    return names if named and max(Counter(names).values()) == 1 else plain


def _key(key: Any) -> str:
    """Return the text of one step of a path: a key, a field or a position."""
    return str(next(getattr(key, name) for name in ("key", "name", "idx") if hasattr(key, name)))
