"""Run a graph one node after the other. Each node is a call whose results are arrays of their own.

States are values here: a node that updates one makes a new array, which is copied to the state after the last node.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Protocol

import numpy as np

from roller_svc.api import Kernel
from roller_svc.compiler.kernel_cache import SERIAL, KernelCache
from roller_svc.errors import IndexRangeError, InvariantError
from roller_svc.graph.compile import ModelOptions, build_model, build_nodes, transform_graph
from roller_svc.graph.concats import is_contiguous_concat
from roller_svc.graph.interpret import interpret
from roller_svc.graph.plan import kernel_key
from roller_svc.graph.subgraphs import extract_nodes
from roller_svc.graph.views import view_offset_elements
from roller_svc.graph.weights import Weights
from roller_svc.ir.graph import Graph, LoopNode, Node, OpNode
from roller_svc.ir.options import RuntimeChoice
from roller_svc.modes.events import Event, Member
from roller_svc.modes.loading import load_built
from roller_svc.runtime.binding import Array
from roller_svc.runtime.saved.serialization import KernelBundle

NODE = "node"  # the name of the shared object of a loop
Call = Callable[[Mapping[str, Array]], Sequence[Array]]  # tensors → the node's results, in its order


@dataclass(frozen=True, slots=True)
class Steps:
    """A graph whose nodes can be called one after the other."""

    graph: Graph
    device: str
    calls: tuple[tuple[Node, Call], ...]
    constants: Mapping[str, Array]
    single: Graph  # the same graph without fusion
    weights: Weights

    def run(self, arrays: Mapping[str, Array]) -> Generator[Event, None, dict[str, Any]]:
        """Yield an event after each node, and return the outputs by name, which are arrays of their own."""
        values: dict[str, Array] = {**self.constants, **arrays}
        last_reads = {tensor: node.name for node in self.graph.nodes for tensor in node.inputs}
        returned = {tensor for _, tensor in self.graph.outputs}
        for node, call in self.calls:
            inputs = {tensor: values[tensor] for tensor in node.inputs}
            start = perf_counter()
            try:
                results = call(inputs)
            except IndexRangeError as error:
                raise IndexRangeError(f"node {node.name!r}: {error.message}", hint=error.hint) from error
            seconds = perf_counter() - start
            event = Event(node, self.device, inputs, dict(zip(node.outputs, results, strict=True)), seconds, self.members)
            yield event
            values |= event.outputs
            for tensor in inputs:
                if last_reads[tensor] == node.name and tensor not in returned:
                    del values[tensor]
        given = [*arrays.values(), *self.constants.values()]
        results_by_name: dict[str, Array] = {}
        for name, tensor in self.graph.outputs:
            array = values[tensor]
            shared = any(np.may_share_memory(array, each) for each in (*given, *results_by_name.values()))
            results_by_name[name] = array.copy() if shared else array
        return results_by_name

    def members(self, node: Node, inputs: Mapping[str, Array]) -> tuple[Member, ...]:
        """Return the operators of a node, with their results on its inputs by the interpreter."""
        nodes = _find_members(self.single, node)
        part = extract_nodes(self.single if node not in nodes else self.graph, nodes, NODE, [t for n in nodes for t in n.outputs])
        given = {name: inputs[name] for name, _ in part.inputs}
        values = interpret(part, self.weights, given)
        return tuple(Member(n.name, n.operator, {tensor: values[tensor] for tensor in n.outputs}) for n in nodes)


class Stepper(Protocol):
    """The nodes of a model, compiled."""

    def run(self, arrays: Mapping[str, Array]) -> Generator[Event, None, dict[str, Any]]:
        """Yield an event after each node, and return the outputs by name."""


class PrepareSteps(Protocol):
    """Compiles the nodes of a model."""

    def __call__(self, *, fused: bool) -> Stepper: ...


def _find_members(single: Graph, node: Node) -> tuple[Node, ...]:
    """Return the nodes of a graph without fusion that compute a node's results from its inputs; itself if there are none."""
    producers = single.producers
    found: dict[str, Node] = {}
    waiting = list(node.outputs)
    while waiting:
        tensor = waiting.pop()
        producer = producers.get(tensor)
        if tensor in node.inputs or tensor in single.constants:
            continue
        if producer is None:
            return (node,)
        if producer.name not in found:
            found[producer.name] = producer
            waiting += producer.inputs
    return tuple(each for each in single.nodes if each.name in found)


def prepare_steps(
    graph: Graph,
    weights: Weights,
    options: ModelOptions,
    cache: KernelCache,
    runtime: RuntimeChoice,
    known: Mapping[tuple[str, str], KernelBundle],
) -> Steps:
    """Compile the nodes of a graph, which are fused if the options say so.

    Args:
        graph: the graph, as it was imported.
        weights: its constants.
        options: how it is built.
        cache: the kernel cache.
        runtime: where kernels of a GPU run.
        known: kernels that exist, by a node's key and the text of its program.
    """
    values = replace(graph, states=())
    single, _ = transform_graph(values, weights, replace(options, fuse=False), cache)
    fused = transform_graph(values, weights, options, cache)[0] if options.fuse else single
    bundles = build_nodes(fused, options, cache, known)
    constants = {name: weights.array(constant) for name, constant in fused.constants.items()}
    kernels: dict[str, Kernel] = {}
    calls: list[tuple[Node, Call]] = []
    for node in fused.nodes:
        bundle = bundles.get(kernel_key("", node))
        if isinstance(node, LoopNode):
            calls.append((node, _call_loop(fused, node, weights, options, cache, runtime)))
        elif bundle is None or not isinstance(node, OpNode):
            calls.append((node, _call_moves(node)))
        else:
            kernel = kernels.setdefault(bundle.digest, Kernel(bundle, None, (), runtime))
            calls.append((node, _call_kernel(node, kernel, bundle, constants)))
    return Steps(fused, options.hardware.id, tuple(calls), constants, single, weights)


def _call_kernel(node: OpNode, kernel: Kernel, bundle: KernelBundle, constants: Mapping[str, Array]) -> Call:
    bound = set(bundle.compiled.source.constants)
    named = [(name, tensor) for (name, _), tensor in zip(node.program.inputs, node.inputs, strict=True)]
    run = kernel.prepare(**{name: constants[tensor] for name, tensor in named if name in bound}).run if bound else kernel.run
    variables = [(name, tensor) for name, tensor in named if name not in bound]
    outputs = [output.name for output in node.program.outputs]

    def call(values: Mapping[str, Array]) -> Sequence[Array]:
        results = run({name: values[tensor] for name, tensor in variables})
        return [results[name] for name in outputs]

    return call


def _call_moves(node: Node) -> Call:
    """Return the call of a node without a kernel: a view of its input, or a concatenation of rows."""
    (result,) = node.output_types
    offset = view_offset_elements(node)
    if offset is not None:
        return lambda values: [values[node.inputs[0]].reshape(-1)[offset : offset + math.prod(result.shape)].reshape(result.shape)]
    if not is_contiguous_concat(node):
        raise InvariantError(f"node {node.name} has no kernel")
    return lambda values: [np.concatenate([values[tensor].reshape(-1) for tensor in node.inputs]).reshape(result.shape)]


def _call_loop(
    graph: Graph, node: LoopNode, weights: Weights, options: ModelOptions, cache: KernelCache, runtime: RuntimeChoice
) -> Call:
    """Return the call of a loop, which is compiled as a model."""
    part = extract_nodes(graph, [node], NODE, node.outputs)
    built = build_model(part, weights, replace(options, plan=SERIAL, tune=None), cache)
    runner = load_built(built, NODE, built.link(NODE), weights, runtime)
    names = [name for name, _ in part.inputs]

    def call(values: Mapping[str, Array]) -> Sequence[Array]:
        results = runner.run({name: values[name] for name in names})
        return [results[tensor] for tensor in node.outputs]

    return call
