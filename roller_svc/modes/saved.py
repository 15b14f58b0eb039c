"""Save and load models over several devices: a directory with the models of the subgraphs, and what joins them.

part.0, ...     the model of each subgraph, as `save_model` writes it
constants.bin   constants that functions of Python read, or that are outputs
metadata.json   everything else; it is written last. A function of Python is its name.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from roller_svc.errors import ArgumentError
from roller_svc.graph.devices.plan import ACROSS, HOST, MixedPlan, Subgraph, check_mixed_plan
from roller_svc.graph.python_ops import find_python_op, make_host_node
from roller_svc.ir.canonical import Limit, to_json
from roller_svc.ir.graph import Constant, Effects, Graph, HostNode
from roller_svc.ir.model_plan import MAX_BYTES, ModelPlan
from roller_svc.ir.options import RuntimeChoice
from roller_svc.modes.loading import load_variant
from roller_svc.modes.mixed import ORDERS, LoadedPart, MixedModel, MixedProgram
from roller_svc.runtime.binding import Array, numpy_dtype
from roller_svc.runtime.saved import models as saved
from roller_svc.runtime.saved.metadata import CorruptKernelError, FileEntry, Identifier, Text
from roller_svc.runtime.saved.models import MAX_METADATA_BYTES, MakeHeader, ModelBundle, VariantBundle
from roller_svc.runtime.saved.plan_json import plan_from_json, plan_to_json
from roller_svc.runtime.saved.serialization import (
    METADATA,
    KernelBundle,
    check_digest,
    read_block,
    read_file,
    read_folder,
    read_metadata,
    write_folder,
)

FORMAT = "roller-mixed-model/1"
CONSTANTS = "constants.bin"
_ALIGNMENT_BYTES = 64  # of a constant in its file
_MAX_PARTS = 1 << 12


@dataclass(frozen=True, slots=True)
class MixedMetadata:
    """The whole metadata.json of a model over several devices."""

    format: str
    name: Identifier
    digest: Text
    target: Text
    order: str
    caller: Any  # a plan without steps: inputs, outputs and states
    outputs: tuple[tuple[str, str], ...]  # name for the caller, and tensor
    hosts: tuple[HostNode, ...]
    constants: Mapping[str, Constant]  # by tensor, in the order of their file
    plan: MixedPlan
    parts: Annotated[tuple[str, ...], Limit(0, _MAX_PARTS)]  # the first node of the subgraph of each folder
    files: Mapping[str, FileEntry]
    report: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class MixedBundle:
    """A model over several devices as it is saved. `report` is a JSON value."""

    digest: str
    name: str
    target: str
    program: MixedProgram
    kernels: tuple[KernelBundle, ...]  # of all subgraphs, in the order of the caller's plan
    report: Mapping[str, Any]


def is_mixed(directory: str | os.PathLike[str]) -> bool:
    """Return whether a saved model is over several devices; False also for a folder that has none."""
    path = Path(directory)
    if not (path / METADATA).is_file():
        return False
    try:
        document = json.loads(read_file(path, METADATA, MAX_METADATA_BYTES))
    except (CorruptKernelError, ValueError, RecursionError):  # whoever loads it says what is wrong
        return False
    return isinstance(document, dict) and document.get("format") == FORMAT


def save_mixed(model: MixedModel, bundle: MixedBundle, directory: str | os.PathLike[str], make_header: MakeHeader) -> Path:
    """Write a loaded model and its bundle to a directory, which need not exist, and return its path."""

    def write(folder: Path) -> None:
        program = bundle.program
        for number, part in enumerate(model.parts.values()):
            saved.save_model(_part_bundle(part), folder / _folder(number), make_header)
        block = _constants_block(program.graph.constants, program.constants)
        (folder / CONSTANTS).write_bytes(block.data)
        metadata = MixedMetadata(
            FORMAT, bundle.name, bundle.digest, bundle.target, program.order, plan_to_json(program.caller),
            program.graph.outputs, tuple(node for node in program.graph.nodes if isinstance(node, HostNode)),
            dict(program.graph.constants), program.plan, tuple(model.parts),
            {CONSTANTS: FileEntry(hashlib.sha256(block.data).hexdigest(), block.nbytes)}, bundle.report,
        )  # fmt: skip
        (folder / METADATA).write_text(json.dumps(to_json(metadata), allow_nan=False) + "\n", encoding="utf-8")

    return write_folder(directory, write)


def load_mixed(directory: str | os.PathLike[str], runtime: RuntimeChoice) -> MixedBundle:
    """Read a model. Its functions of Python have to be registered. Runs nothing.

    Raises ArgumentError (unknown-python-op, shape-mismatch) for functions that this process lacks or has otherwise, and
    (damaged-kernel) for files that have changed since they were saved.
    """
    metadata = read_folder(directory, "model", _read_metadata)
    hosts = tuple(map(_registered, metadata.hosts))
    return read_folder(directory, "model", partial(_read, metadata=metadata, hosts=hosts, runtime=runtime))


def _read_metadata(path: Path) -> MixedMetadata:
    return read_metadata(path, MixedMetadata, MAX_METADATA_BYTES, FORMAT)


def _registered(node: HostNode) -> HostNode:
    """Return a saved node with the effects of the function that this process has, too."""
    found = make_host_node(node.name, node.function, node.inputs, node.outputs, node.input_types)
    if found.output_types != node.output_types:
        raise ArgumentError(f"node {node.name!r}: {node.operator} has results of other types", code="shape-mismatch")
    effects = find_python_op(node.function).effects
    return replace(node, effects=Effects(node.effects.reads | effects.reads, node.effects.writes | effects.writes))


def _read(path: Path, metadata: MixedMetadata, hosts: tuple[HostNode, ...], runtime: RuntimeChoice) -> MixedBundle:
    if metadata.order not in ORDERS:
        raise CorruptKernelError(f"no order is called {metadata.order!r:.80}")
    if metadata.plan.across not in ACROSS:
        raise CorruptKernelError(f"no plan over several devices is called {metadata.plan.across!r:.80}")
    parts = {node: saved.load_model(path / _folder(number)) for number, node in enumerate(metadata.parts)}
    firsts = [each.nodes[0] for each in metadata.plan.subgraphs if not each.is_host]
    called = [each.nodes[0] for each in metadata.plan.subgraphs if each.is_host]
    if sorted(firsts) != sorted(metadata.parts) or sorted(called) != sorted(node.name for node in hosts):
        raise CorruptKernelError("the plan has other subgraphs than there are folders and functions of Python")
    caller = plan_from_json(metadata.caller, [kernel for each in parts.values() for kernel in each.variants[0].plan.kernels])
    if metadata.target != caller.target:
        raise CorruptKernelError(f"the model is for {metadata.target!r:.80}, and its plan for {caller.target!r:.80}")
    graph = Graph(caller.name, (*caller.inputs, *caller.states), metadata.constants, hosts, metadata.outputs)
    check_mixed_plan(metadata.plan, graph)
    for each in metadata.plan.subgraphs:
        _check_place(each, {node.name: node for node in hosts}, parts)
    _check_types(caller, graph, metadata.plan, {node: each.variants[0].plan for node, each in parts.items()})
    program = MixedProgram(
        metadata.plan, caller, graph, _read_constants(path, metadata), {n: _loader(each, runtime) for n, each in parts.items()},
        {node: each.variants[0].plan for node, each in parts.items()}, runtime, metadata.order,
    )  # fmt: skip
    kernels = tuple(each.kernels[position] for each in parts.values() for position in each.variants[0].kernels)
    return MixedBundle(metadata.digest, metadata.name, metadata.target, program, kernels, metadata.report)


def _check_place(subgraph: Subgraph, hosts: Mapping[str, HostNode], parts: Mapping[str, ModelBundle]) -> None:
    """Raise CorruptKernelError if a subgraph is not where the model of its folder, or its function of Python, runs."""
    first = subgraph.nodes[0]
    if subgraph.is_host:
        device, memory = hosts[first].operator, HOST
    else:
        device = parts[first].target
        memory = HOST if parts[first].variants[0].binary else device
    if (subgraph.device, subgraph.memory) != (device, memory):
        given = f"{subgraph.device!r:.80} with the memory of {subgraph.memory!r:.80}"
        raise CorruptKernelError(f"the subgraph of {first} is on {given}, expected {device} with that of {memory}")


def _check_types(caller: ModelPlan, graph: Graph, plan: MixedPlan, parts: Mapping[str, ModelPlan]) -> None:
    """Raise CorruptKernelError if a subgraph has other tensors than the plan says, or a tensor has two types."""
    types = graph.types
    signatures = {node: (dict(part.inputs), dict(part.outputs)) for node, part in parts.items()}
    for each in plan.subgraphs:
        if each.is_host:
            continue
        taken, given = signatures[each.nodes[0]]
        if set(taken) != set(each.inputs) or set(given) != set(each.outputs):
            raise CorruptKernelError(f"the model of {each.nodes[0]} has other inputs or outputs than the plan")
        for tensor, type_ in (*taken.items(), *given.items()):
            if types.setdefault(tensor, type_) != type_:
                raise CorruptKernelError(f"{tensor} has two types")
    for copy in plan.copies:
        if copy.tensor not in types or copy.bytes != types[copy.tensor].bytes:
            raise CorruptKernelError(f"the copy of {copy.tensor!r:.80} has {copy.bytes} bytes, which its tensor has not")
    results = dict((*caller.outputs, *caller.states))
    if dict(graph.outputs).keys() != results.keys() or any(types.get(tensor) != results[name] for name, tensor in graph.outputs):
        raise CorruptKernelError("the outputs have other types than their tensors")


def _loader(bundle: ModelBundle, runtime: RuntimeChoice) -> Callable[[], LoadedPart]:
    variant = bundle.variants[0]

    def load() -> LoadedPart:
        model = load_variant(variant, bundle, runtime)
        kernels = tuple(bundle.kernels[position] for position in variant.kernels)
        return LoadedPart(variant.name, model, kernels, variant.binary)

    return load


def _part_bundle(part: LoadedPart) -> ModelBundle:
    plan = part.model.plan
    weights_bytes = plan.read_weights_bytes if part.binary else plan.weights_bytes
    variant = VariantBundle(
        (), part.name, plan, tuple(range(len(part.kernels))), part.binary,
        part.model.weights[:weights_bytes], part.model.packed[: plan.packed_bytes],
    )  # fmt: skip
    content = json.dumps([plan_to_json(plan), [kernel.digest for kernel in part.kernels]])
    digest = f"sha256:{hashlib.sha256(content.encode()).hexdigest()}"
    return ModelBundle(digest, part.name, plan.target, part.kernels, (variant,), {})


def _folder(number: int) -> str:
    return f"part.{number}"


def _offsets(constants: Mapping[str, Constant]) -> tuple[dict[str, int], int]:
    """Return where each constant begins in the file, and the size of the file."""
    offsets: dict[str, int] = {}
    end = 0
    for tensor, constant in constants.items():
        offsets[tensor] = end
        end += -(-constant.type.bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return offsets, end


def _constants_block(constants: Mapping[str, Constant], arrays: Mapping[str, Array]) -> Array:
    offsets, size_bytes = _offsets(constants)
    block: Array = np.zeros(size_bytes, np.uint8)
    for tensor, offset in offsets.items():
        content = np.ascontiguousarray(arrays[tensor]).reshape(-1).view(np.uint8)
        block[offset : offset + content.size] = content
    return block


def _read_constants(path: Path, metadata: MixedMetadata) -> dict[str, Array]:
    offsets, size_bytes = _offsets(metadata.constants)
    if size_bytes > MAX_BYTES:
        raise CorruptKernelError(f"the constants have {size_bytes} bytes, expected {MAX_BYTES} at most")
    block = read_block(path, CONSTANTS, size_bytes)
    check_digest(CONSTANTS, block.data, metadata.files)
    arrays: dict[str, Array] = {}
    for tensor, offset in offsets.items():
        type_ = metadata.constants[tensor].type
        arrays[tensor] = block[offset : offset + type_.bytes].view(numpy_dtype(type_.dtype)).reshape(type_.shape)
        arrays[tensor].flags.writeable = False
    return arrays
