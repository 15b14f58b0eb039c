"""Plans over several devices: subgraphs, and copies of what one memory has and another one needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from roller_svc.errors import InvariantError
from roller_svc.graph.devices.cut import Part, check_cut, cut
from roller_svc.graph.effects import check_order, order_effects
from roller_svc.graph.python_ops import PREFIX
from roller_svc.graph.subgraphs import extract_nodes
from roller_svc.ir.canonical import Limit
from roller_svc.ir.graph import Graph, HostNode
from roller_svc.ir.model_plan import Bytes

HOST = "host"  # the memory of CPUs, of functions of Python and of the caller
# Assumed of every GPU: a link of 16 lanes of PCIe 5, and a copy's start and end.
LINK_BYTES_PER_S, LINK_LATENCY_S = 55e9, 8e-6
SPLIT, MERGED = "split", "merged"
ACROSS = (MERGED, SPLIT)
_MAX_NODES = 1 << 24
COPIES_RATIO = 0.1  # of the estimate: where copies take more, the caller is warned


@dataclass(frozen=True, slots=True)
class Subgraph:
    """Nodes that one call of a device runs, or one function of Python."""

    device: str  # id, or python:NAME
    memory: str  # HOST, or the id of a GPU
    nodes: Annotated[tuple[str, ...], Limit(1, _MAX_NODES)]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    seconds: float = 0.0  # by the performance model

    @property
    def is_host(self) -> bool:
        """Whether it is a function of Python."""
        return self.device.startswith(PREFIX)


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of a tensor between memories."""

    tensor: str
    source: str
    target: str
    bytes: Bytes
    reason: str

    @property
    def seconds(self) -> float:
        """Seconds by the model."""
        return LINK_LATENCY_S + self.bytes / LINK_BYTES_PER_S


@dataclass(frozen=True, slots=True)
class MixedPlan:
    """Subgraphs and copies, in an order in which they can run."""

    steps: tuple[Subgraph | Copy, ...]
    before: tuple[tuple[int, ...], ...]  # of each step: those that have to finish before it starts
    across: str

    @property
    def subgraphs(self) -> tuple[Subgraph, ...]:
        return tuple(step for step in self.steps if isinstance(step, Subgraph))

    @property
    def copies(self) -> tuple[Copy, ...]:
        return tuple(step for step in self.steps if isinstance(step, Copy))

    @property
    def seconds(self) -> float:
        """Seconds of a call by the model, without functions of Python: the longest chain of steps."""
        ends: list[float] = []
        for step, before in zip(self.steps, self.before, strict=True):
            ends.append(step.seconds + max((ends[each] for each in before), default=0.0))
        return max(ends, default=0.0)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON-compatible values."""
        return {
            "across": self.across,
            "seconds": self.seconds,
            "subgraphs": [
                {"device": each.device, "nodes": list(each.nodes), "inputs": list(each.inputs), "outputs": list(each.outputs),
                 "seconds": each.seconds}
                for each in self.subgraphs
            ],
            "copies": [
                {"tensor": each.tensor, "from": each.source, "to": each.target, "bytes": each.bytes, "seconds": each.seconds,
                 "reason": each.reason}
                for each in self.copies
            ],
        }  # fmt: skip


def cut_graph(graph: Graph, devices: Mapping[str, str]) -> list[Part]:
    """Return the parts of a graph, with the order of data and effects."""
    before = find_before(graph)
    hosts = [node.name for node in graph.nodes if isinstance(node, HostNode)]
    names = [node.name for node in graph.nodes]
    parts = cut(names, devices, before, hosts)
    check_cut(parts, names, devices, before, hosts)
    return parts


def find_before(graph: Graph) -> dict[str, list[str]]:
    """Return the nodes that have to run before each node, because of data or effects."""
    producers, effects = graph.producers, order_effects(graph.nodes)
    return {
        node.name: [*(producers[t].name for t in node.inputs if t in producers), *effects.get(node.name, ())]
        for node in graph.nodes
    }


def subgraph_of(graph: Graph, part: Part, name: str) -> Graph:
    """Return the nodes of a part as a graph."""
    inside = set(part.nodes)
    return extract_nodes(graph, [node for node in graph.nodes if node.name in inside], name)


def plan_parts(
    graph: Graph, parts: Sequence[Part], memories: Mapping[str, str], seconds: Callable[[Part], float], across: str
) -> MixedPlan:
    """Return the plan of parts.

    Args:
        graph: the graph that was cut.
        parts: its parts, in an order in which they can run.
        memories: the memory of each device; others have that of the host.
        seconds: the estimate of a part.
        across: SPLIT runs one step after the other; MERGED orders steps by data and effects alone.
    """
    types, producers = graph.types, graph.producers
    steps: list[Subgraph | Copy] = []
    before: list[tuple[int, ...]] = []
    made: dict[tuple[str, str], int | None] = {(HOST, name): None for name, _ in graph.inputs}  # step by memory and tensor
    home = {name: HOST for name, _ in graph.inputs}
    runs: dict[str, int] = {}  # step by node
    effects = order_effects(graph.nodes)

    def bring(tensor: str, memory: str, reader: str) -> None:
        """Add the copy of a tensor to a memory that does not have it."""
        if (memory, tensor) in made:
            return
        source = home[tensor]
        origin = f"{producers[tensor].name} makes it" if tensor in producers else "the caller gives it"
        reason = f"{origin} in the memory of {source}, {reader} in that of {memory}"
        first = made[source, tensor]
        made[memory, tensor] = len(steps)
        steps.append(Copy(tensor, source, memory, types[tensor].bytes, reason))
        before.append(() if first is None else (first,))

    for part in parts:
        memory = memories.get(part.device, HOST)
        extracted = subgraph_of(graph, part, "part")
        inputs = tuple(name for name, _ in extracted.inputs)
        for tensor in inputs:
            reader = next(node.name for node in extracted.nodes if tensor in node.inputs)
            bring(tensor, memory, f"{reader} reads it")
        waits = {at for tensor in inputs if (at := made[memory, tensor]) is not None}
        waits |= {runs[name] for node in part.nodes for name in effects.get(node, ())}
        outputs = tuple(name for name, _ in extracted.outputs)
        for tensor in outputs:
            made[memory, tensor] = len(steps)
            home[tensor] = memory
        runs |= dict.fromkeys(part.nodes, len(steps))
        steps.append(Subgraph(part.device, memory, part.nodes, inputs, outputs, seconds(part)))
        before.append(tuple(sorted(waits)))
    for name, tensor in graph.outputs:
        if tensor not in graph.constants:
            bring(tensor, HOST, f"the output {name} is")
    plan = MixedPlan(tuple(steps), tuple(before), across)
    if across == SPLIT:
        plan = replace(plan, before=tuple((i - 1,) if i else () for i in range(len(steps))))
    check_mixed_plan(plan, graph)
    return plan


def _check_form(plan: MixedPlan) -> None:
    """Raise InvariantError if steps wait for what does not come before them, or name a tensor twice."""
    if len(plan.before) != len(plan.steps):
        raise InvariantError(f"the plan has waits of {len(plan.before)} steps, expected {len(plan.steps)}")
    for number, (step, before) in enumerate(zip(plan.steps, plan.before, strict=True)):
        if any(not 0 <= each < number for each in before):
            raise InvariantError(f"step {number} waits for a step that does not come before it")
        for tensors in (step.inputs, step.outputs) if isinstance(step, Subgraph) else ():
            if len(set(tensors)) != len(tensors):
                raise InvariantError(f"step {number} names a tensor twice: {tensors}")


def check_mixed_plan(plan: MixedPlan, graph: Graph) -> None:
    """Raise InvariantError if a step may read what is not there yet, or if effects have no order.

    Each node runs once, each tensor is read in a memory that a step before has brought it to, and outputs reach the host.
    """
    ancestors: list[int] = []  # of each step, as bits
    made: dict[tuple[str, str], int] = {}
    given = {name for name, _ in graph.inputs}
    runs: dict[str, int] = {}

    def check_read(number: int, memory: str, tensor: str, reader: str) -> None:
        if memory == HOST and tensor in given:
            return
        writer = made.get((memory, tensor))
        if writer is None or (number < len(ancestors) and not ancestors[number] >> writer & 1):
            raise InvariantError(f"{reader} reads {tensor} in the memory of {memory}, and nothing before brings it there")

    _check_form(plan)
    for number, (step, before) in enumerate(zip(plan.steps, plan.before, strict=True)):
        ancestors.append(sum({1 << each for each in before}))
        for each in before:
            ancestors[number] |= ancestors[each]
        if isinstance(step, Copy):
            check_read(number, step.source, step.tensor, f"the copy of {step.tensor}")
            if step.source == step.target or (step.target, step.tensor) in made:
                raise InvariantError(f"the copy of {step.tensor} to the memory of {step.target} writes what is there")
            made[step.target, step.tensor] = number
            continue
        for tensor in step.inputs:
            check_read(number, step.memory, tensor, step.nodes[0])
        for name in step.nodes:
            if name in runs:
                raise InvariantError(f"node {name} runs twice")
            runs[name] = number
        made |= {(step.memory, tensor): number for tensor in step.outputs}
    if missing := [node.name for node in graph.nodes if node.name not in runs]:
        raise InvariantError(f"node {missing[0]} does not run")
    for name, tensor in graph.outputs:
        if tensor not in graph.constants:
            check_read(len(plan.steps), HOST, tensor, f"the output {name}")
    hosts = [node for node in graph.nodes if isinstance(node, HostNode)]
    check_order(hosts, {node.name: [n.name for n in hosts if ancestors[runs[node.name]] >> runs[n.name] & 1] for node in hosts})
