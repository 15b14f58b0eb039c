"""Models over several devices: each subgraph is compiled for its device, and copies between memories are steps.

A tensor is in the memories that a step has written it to. A step finds its inputs in its own memory alone, so that a
missing copy is a fault, and never a wrong value.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from roller_svc.compiler.kernel_cache import SERIAL, KernelCache
from roller_svc.errors import ArgumentError, InvariantError, require
from roller_svc.graph.choose import AUTO
from roller_svc.graph.compile import BuiltModel, ModelOptions, build_model
from roller_svc.graph.devices.cut import Part
from roller_svc.graph.devices.labels import Placed
from roller_svc.graph.devices.plan import HOST, Copy, MixedPlan, Subgraph, cut_graph, plan_parts, subgraph_of
from roller_svc.graph.estimate import GraphEstimate, estimate_graph
from roller_svc.graph.python_ops import PREFIX, run_python_op
from roller_svc.graph.weights import Weights
from roller_svc.ir.graph import Graph, HostNode
from roller_svc.ir.hardware import TargetKind
from roller_svc.ir.model_plan import FIRST_INPUT, ModelPlan
from roller_svc.ir.options import RuntimeChoice
from roller_svc.modes.events import Event, Member
from roller_svc.modes.loading import load_built
from roller_svc.modes.stepping import Steps, prepare_steps
from roller_svc.runtime.binding import ELEMENT_ALIGNMENT, Array, NumpyArrays
from roller_svc.runtime.graphs.buffers import bind_call, call_buffers
from roller_svc.runtime.graphs.cpu import CpuModel
from roller_svc.runtime.graphs.gpu import GpuModel
from roller_svc.runtime.saved.serialization import KernelBundle

DATAFLOW = "dataflow"
ORDERS = (DATAFLOW, SERIAL)
_POISON = 0xFF  # every byte of the target of a copy before: NaN as a number

Call = Callable[[Mapping[str, Array]], Mapping[str, Array]]


class MixedMoment(NamedTuple):
    """When a step ran."""

    name: str
    place: str  # the device, or the link of a copy
    start_s: float
    end_s: float


class LoadedPart(NamedTuple):
    """A subgraph that can be called, and what it was loaded from."""

    name: str  # begins the names of its functions
    model: CpuModel | GpuModel
    kernels: tuple[KernelBundle, ...]
    binary: bytes  # empty for a GPU


@dataclass(frozen=True, slots=True)
class MixedProgram:
    """A model over several devices, whose subgraphs can be loaded."""

    plan: MixedPlan
    caller: ModelPlan  # the inputs, outputs and states, and all kernels
    graph: Graph  # its inputs and outputs; of its nodes the functions of Python, and of its constants what these and outputs read
    constants: Mapping[str, Array]  # by tensor
    parts: Mapping[str, Callable[[], LoadedPart]]  # by the first node of a subgraph
    plans: Mapping[str, ModelPlan]  # of the parts, in the order of the caller's kernels
    runtime: RuntimeChoice
    order: str


@dataclass(frozen=True, slots=True)
class BuiltParts:
    """The compiled subgraphs of a graph, and the plan that runs them."""

    placed: Placed
    plan: MixedPlan
    caller: ModelPlan  # the inputs, outputs and states, and all kernels
    built: Mapping[str, BuiltModel]  # by the first node of a subgraph
    weights: Weights
    runtime: RuntimeChoice
    order: str

    @property
    def program(self) -> MixedProgram:
        """The parts of a model that runs the subgraphs."""
        graph = self.placed.graph
        hosts = tuple(node for node in graph.nodes if isinstance(node, HostNode))
        read = {tensor for _, tensor in graph.outputs}.union(*(node.inputs for node in hosts))
        constants = {tensor: constant for tensor, constant in graph.constants.items() if tensor in read}
        arrays = {tensor: self.weights.array(constant) for tensor, constant in constants.items()}
        parts = {node: partial(_load_part, built, self.weights, self.runtime) for node, built in self.built.items()}
        plans = {node: built.plan for node, built in self.built.items()}
        shell = replace(graph, nodes=hosts, constants=constants)
        return MixedProgram(self.plan, self.caller, shell, arrays, parts, plans, self.runtime, self.order)


def _load_part(built: BuiltModel, weights: Weights, runtime: RuntimeChoice) -> LoadedPart:
    name = built.plan.name
    binary = built.link(name)
    return LoadedPart(name, load_built(built, name, binary, weights, runtime), tuple(built.kernels), binary)


def build_parts(
    placed: Placed,
    states: Sequence[str],
    weights: Weights,
    options: ModelOptions,
    cache: KernelCache,
    runtime: RuntimeChoice,
    across: str,
    order: str,
) -> BuiltParts:
    """Compile the subgraphs of a graph that has no states, and plan their execution. `states` are inputs of it.

    Raises as `build_model` does.
    """
    graph = placed.graph
    parts = cut_graph(graph, placed.devices)
    built = {
        part.nodes[0]: build_model(subgraph_of(graph, part, f"part{i}"), weights, _options(part, placed, options), cache)
        for i, part in enumerate(parts)
        if not part.device.startswith(PREFIX)
    }
    plan = _plan(placed, parts, lambda part: _seconds(built.get(part.nodes[0])), across)
    return BuiltParts(placed, plan, _caller_plan(placed, states, built, options), built, weights, runtime, order)


def estimate_parts(
    placed: Placed, weights: Weights, options: ModelOptions, across: str
) -> tuple[MixedPlan, tuple[GraphEstimate, ...]]:
    """Return the plan of a graph that has no states, and the estimates of its subgraphs. Raises as `estimate_graph` does."""
    parts = cut_graph(placed.graph, placed.devices)
    estimates = {
        part.nodes[0]: estimate_graph(subgraph_of(placed.graph, part, f"part{i}"), weights, _options(part, placed, options))
        for i, part in enumerate(parts)
        if not part.device.startswith(PREFIX)
    }

    def seconds(part: Part) -> float:
        estimate = estimates.get(part.nodes[0])
        return 0.0 if estimate is None else estimate.seconds

    return _plan(placed, parts, seconds, across), tuple(estimates.values())


def _plan(placed: Placed, parts: Sequence[Part], seconds: Callable[[Part], float], across: str) -> MixedPlan:
    memories = {spec.id: HOST if spec.family is TargetKind.CPU else spec.id for spec in placed.specs.values()}
    return plan_parts(placed.graph, parts, memories, seconds, across)


def _options(part: Part, placed: Placed, options: ModelOptions) -> ModelOptions:
    own = placed.specs[part.device]
    return replace(options, hardware=own) if own == options.hardware else replace(options, hardware=own, plan=AUTO)


def _seconds(built: BuiltModel | None) -> float:
    """Return the estimate of a subgraph; of a function of Python there is none."""
    if built is None:
        return 0.0
    lowering = built.lowerings.get(built.plan.lowering)
    return float(lowering["seconds"]) if lowering else sum(each.uses * each.estimate_s for each in built.plan.kernels)


def _caller_plan(placed: Placed, states: Sequence[str], built: Mapping[str, BuiltModel], options: ModelOptions) -> ModelPlan:
    """Return the tensors of a call and the kernels of all subgraphs as a plan without steps."""
    graph, types = placed.graph, placed.graph.types
    inputs = tuple((name, type_) for name, type_ in graph.inputs if name not in states)
    outputs = tuple((name, types[tensor]) for name, tensor in graph.outputs if name not in states)
    kernels = tuple(kernel for each in built.values() for kernel in each.plan.kernels)
    slots = FIRST_INPUT + len(inputs) + len(outputs) + len(states)
    given = dict(graph.inputs)
    return ModelPlan(
        graph.name, options.hardware.id, inputs, outputs, kernels, (), (), (), 0, 0, 0, 0, 0, slots,
        tuple((name, given[name]) for name in states),
    )  # fmt: skip


class MixedModel:
    """A loaded model over several devices. Calls from several threads may overlap."""

    def __init__(self, program: MixedProgram) -> None:
        """Load the subgraphs."""
        self.plan = program.caller
        self.program = program
        self.parts = {node: load() for node, load in program.parts.items()}  # by the first node of a subgraph
        self.weights: Array = np.empty(0, np.uint8)
        self.packed: Array = np.empty(0, np.uint8)
        self._mixed = program.plan
        self._in_order = program.order == SERIAL
        self._buffers = call_buffers(program.caller)
        self._calls: dict[str, Call] = {node: part.model.run for node, part in self.parts.items()}
        hosts = [node for node in program.graph.nodes if isinstance(node, HostNode)]
        self._calls |= {node.name: _call_host(node, program.constants) for node in hosts}

    def run(self, arrays: Mapping[str, object], out: Mapping[str, object] | None = None) -> dict[str, Array]:
        """Return the outputs by name; write them to arrays in `out` if given. States are in `out`, and are results too.

        States are written after the last step. Raises as CpuModel.run does, what a function of Python raises, and
        ArgumentError for a GPU that is not emulated.
        """
        return self._run(arrays, out, [])

    def profile(self, arrays: Mapping[str, object], out: Mapping[str, object] | None = None) -> list[MixedMoment]:
        """Run the model once and return when each step ran, in seconds since the first began."""
        moments: list[MixedMoment] = []
        self._run(arrays, out, moments)
        first = min((each.start_s for each in moments), default=0.0)
        return sorted(
            (each._replace(start_s=each.start_s - first, end_s=each.end_s - first) for each in moments), key=lambda m: m.start_s
        )

    def _run(self, arrays: Mapping[str, object], out: Mapping[str, object] | None, moments: list[MixedMoment]) -> dict[str, Array]:
        _check_emulated(self._mixed, self.program.runtime)
        binding = bind_call(self._buffers, arrays, out, NumpyArrays(ELEMENT_ALIGNMENT))
        first, end = len(self.plan.inputs), len(self.plan.inputs) + len(self.plan.outputs)
        states = {b.name: binding.memory[b.symbol] for b in self._buffers[end:]}
        given = {b.name: binding.memory[b.symbol] for b in self._buffers[:first]}
        given |= {name: array.copy() for name, array in states.items()}  # another output may be the value before the call
        written = {b.name: binding.memory[b.symbol] for b in self._buffers[first:end]} | states
        memory = {(HOST, name): array for name, array in given.items()}
        _Execution(self._mixed, self._calls, memory, moments).run(in_order=self._in_order)
        constants, outputs = self.program.constants, self.program.graph.outputs
        results = [(name, constants.get(tensor, memory.get((HOST, tensor)))) for name, tensor in outputs]
        for name, array in results:
            written[name][...] = require(array, f"value of the output {name}")
        binding.copy_back()
        return binding.results()


def _check_emulated(plan: MixedPlan, runtime: RuntimeChoice) -> None:
    gpus = [each.device for each in plan.subgraphs if each.memory != HOST]
    if gpus and runtime is not RuntimeChoice.EMULATOR:
        raise ArgumentError(
            f"nodes on {gpus[0]} beside those of another device run in the emulator alone",
            code="unsupported-target",
            hint='runtime="emulator"',
        )


def _call_host(node: HostNode, constants: Mapping[str, Array]) -> Call:
    """Return what runs a function of Python on the arrays of the host's memory."""

    def call(values: Mapping[str, Array]) -> Mapping[str, Array]:
        known = {**constants, **values}
        return dict(zip(node.outputs, run_python_op(node, [known[tensor] for tensor in node.inputs]), strict=True))

    return call


class _Execution:
    """One call: which steps have run, and what each memory has."""

    def __init__(
        self, plan: MixedPlan, calls: Mapping[str, Call], memory: dict[tuple[str, str], Array], moments: list[MixedMoment]
    ) -> None:
        self.plan = plan
        self.calls = calls
        self.memory = memory
        self.moments = moments

    def run(self, *, in_order: bool) -> None:
        if in_order:
            for step in self.plan.steps:
                self._run_step(step)
            return
        waiting = [set(before) for before in self.plan.before]
        hosts = [i for i, step in enumerate(self.plan.steps) if isinstance(step, Subgraph) and step.is_host]
        others = [i for i in range(len(waiting)) if i not in hosts]
        running: dict[Future[None], int] = {}
        done: set[int] = set()
        with ThreadPoolExecutor(max(2, len({self._place(step) for step in self.plan.steps}))) as pool:
            while len(done) < len(waiting):
                for i in [each for each in others if waiting[each] <= done]:
                    others.remove(i)
                    running[pool.submit(self._run_step, self.plan.steps[i])] = i
                if hosts and waiting[hosts[0]] <= done:  # functions of Python run here, in the order of the plan
                    self._run_step(self.plan.steps[hosts[0]])
                    done.add(hosts.pop(0))
                    continue
                finished, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in finished:
                    future.result()
                    done.add(running.pop(future))

    @staticmethod
    def _place(step: Subgraph | Copy) -> str:
        return step.device if isinstance(step, Subgraph) else f"{step.source} to {step.target}"

    def _run_step(self, step: Subgraph | Copy) -> None:
        start = time.perf_counter()
        if isinstance(step, Copy):
            name = f"copy {step.tensor}"
            self.memory[step.target, step.tensor] = _copy(self._read(step.source, step.tensor))
        else:
            name = "+".join(step.nodes)
            results = self.calls[step.nodes[0]]({tensor: self._read(step.memory, tensor) for tensor in step.inputs})
            for tensor in step.outputs:
                self.memory[step.memory, tensor] = results[tensor]
        self.moments.append(MixedMoment(name, self._place(step), start, time.perf_counter()))

    def _read(self, memory: str, tensor: str) -> Array:
        if (memory, tensor) not in self.memory:
            raise InvariantError(f"{tensor} is not in the memory of {memory}")
        return self.memory[memory, tensor]


def _copy(source: Array) -> Array:
    """Return a copy in memory of its own, which nothing writes afterwards."""
    raw = np.full(source.nbytes, _POISON, np.uint8)
    target = raw.view(source.dtype).reshape(source.shape)
    np.copyto(target, source)
    target.flags.writeable = False
    return target


class MixedSteps:
    """The nodes of a model over several devices, one after the other."""

    def __init__(self, parts: BuiltParts, options: ModelOptions, cache: KernelCache) -> None:
        """Compile the nodes. Raises ArgumentError for a GPU that is not emulated."""
        _check_emulated(parts.plan, parts.runtime)
        self._parts = parts
        self._hosts = {node.name: node for node in parts.placed.graph.nodes if isinstance(node, HostNode)}
        self._steps: dict[str, Steps] = {}
        for each in parts.plan.subgraphs:
            if each.is_host:
                continue
            part = Part(each.device, each.nodes)
            chosen = replace(_options(part, parts.placed, options), tune=None)
            graph = subgraph_of(parts.placed.graph, part, "part")
            known = parts.built[each.nodes[0]].node_kernels
            runtime = RuntimeChoice.AUTO if chosen.hardware.family is TargetKind.CPU else parts.runtime
            self._steps[each.nodes[0]] = prepare_steps(graph, parts.weights, chosen, cache, runtime, known)

    def run(self, arrays: Mapping[str, Array]) -> Generator[Event, None, dict[str, Any]]:
        """Yield an event after each node, in the order of the plan, and return the outputs by name."""
        graph, weights = self._parts.placed.graph, self._parts.weights
        values = {**{name: weights.array(constant) for name, constant in graph.constants.items()}, **arrays}
        for each in self._parts.plan.subgraphs:
            if not each.is_host:
                values |= yield from self._steps[each.nodes[0]].run({tensor: values[tensor] for tensor in each.inputs})
                continue
            node = self._hosts[each.nodes[0]]
            start = time.perf_counter()
            inputs = {tensor: values[tensor] for tensor in node.inputs}
            results = run_python_op(node, [inputs[tensor] for tensor in node.inputs])
            seconds = time.perf_counter() - start
            event = Event(node, each.device, inputs, dict(zip(node.outputs, results, strict=True)), seconds, _evaluate_host)
            yield event
            values |= event.outputs
        return {name: np.array(values[tensor]) for name, tensor in graph.outputs}


def _evaluate_host(node: Any, inputs: Mapping[str, Array]) -> tuple[Member, ...]:
    results = run_python_op(node, [inputs[tensor] for tensor in node.inputs])
    return (Member(node.name, node.operator, dict(zip(node.outputs, results, strict=True))),)
