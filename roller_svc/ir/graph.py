"""Graphs of tensor programs: a whole model as a value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from roller_svc.errors import InvariantError
from roller_svc.ir.program import Forms, TensorProgram, TensorType

Parameters = tuple[tuple[str, object], ...]


@dataclass(frozen=True, slots=True)
class Constant:
    """A tensor whose value is known. The array is in a `Weights`, under the digest."""

    type: TensorType
    digest: str


@dataclass(frozen=True, slots=True)
class OpNode:
    """One operator, or several that are fused, as a tensor program.

    `inputs` are the graph's tensors for `program.inputs`, in that order; `outputs` those for `program.outputs`.
    """

    name: str  # in the source of the model, for reports; unique in the graph
    operator: str  # of frontend.ops, or FUSED
    program: TensorProgram
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parameters: Parameters = ()  # of the operator; () of a fused node
    forms: Forms = ()  # of an expression that has several: `program` was the first of them
    members: tuple[str, ...] = ()  # names of the nodes that are fused; (): the node was not fused

    @property
    def input_types(self) -> tuple[TensorType, ...]:
        return tuple(type_ for _, type_ in self.program.inputs)

    @property
    def output_types(self) -> tuple[TensorType, ...]:
        types = self.program.types
        return tuple(types[output.tensor] for output in self.program.outputs)


FUSED = "fused"


@dataclass(frozen=True, slots=True)
class LoopNode:
    """A body that runs a fixed number of times (ONNX Scan, Loop, RNN, GRU, LSTM).

    Inputs of the body: `carried` states, then one slice for each of `scanned`, then the tensors that every step reads.
    Outputs of the body: the next states, then one slice for each of `stacked`. Slices are along dimension 0. The node
    has the same inputs and outputs, with whole tensors in place of slices. Reversed tensors run from the last slice.
    """

    name: str
    body: Graph
    steps: int
    carried: int
    scanned: tuple[bool, ...]  # of each scanned input: whether it is reversed
    stacked: tuple[bool, ...]  # of each stacked output: whether it is reversed
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    operator: str = "loop"

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.body.inputs) or len(self.outputs) != len(self.body.outputs):
            raise InvariantError(f"{self.name}: the body has other inputs or outputs than the node")

    @property
    def input_types(self) -> tuple[TensorType, ...]:
        scanned = range(self.carried, self.carried + len(self.scanned))
        return tuple(self._whole(type_) if i in scanned else type_ for i, (_, type_) in enumerate(self.body.inputs))

    @property
    def output_types(self) -> tuple[TensorType, ...]:
        types = self.body.types
        listed = (types[tensor] for _, tensor in self.body.outputs)
        return tuple(self._whole(type_) if i >= self.carried else type_ for i, type_ in enumerate(listed))

    def _whole(self, piece: TensorType) -> TensorType:
        return TensorType(piece.dtype, (self.steps, *piece.shape))


@dataclass(frozen=True, slots=True)
class Effects:
    """Resources outside of a graph that a node reads and writes, by name."""

    reads: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset()


ANYTHING = "*"  # a resource that is all of them


@dataclass(frozen=True, slots=True)
class HostNode:
    """A function of Python that is registered where the model runs. No pass sees one: graphs are cut before."""

    name: str
    function: str  # its registered name
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    input_types: tuple[TensorType, ...]
    output_types: tuple[TensorType, ...]
    effects: Effects = Effects()

    @property
    def operator(self) -> str:
        return f"python:{self.function}"


Node = OpNode | LoopNode | HostNode


@dataclass(frozen=True, slots=True)
class Graph:
    """Nodes in an order of execution. Each tensor is an input, a constant, or written by one node.

    A state is memory of the caller that a call updates: an input with the old value, and the output of its name with the
    new one. So what passes know of inputs and outputs holds for states, and values depend on data alone.
    """

    name: str
    inputs: tuple[tuple[str, TensorType], ...]
    constants: Mapping[str, Constant]
    nodes: tuple[Node, ...]
    outputs: tuple[tuple[str, str], ...]  # (name for the caller, tensor)
    states: tuple[str, ...] = ()  # inputs, each of which is also an output, in memory of the caller
    devices: Mapping[str, str] = field(default_factory=dict)  # labels of nodes by name, before the graph is cut

    @property
    def types(self) -> dict[str, TensorType]:
        """Return the type of every tensor."""
        types = dict(self.inputs) | {name: constant.type for name, constant in self.constants.items()}
        for node in self.nodes:
            types |= zip(node.outputs, node.output_types, strict=True)
        return types

    @property
    def producers(self) -> dict[str, Node]:
        """Return the node that writes each tensor; inputs and constants have none."""
        return {tensor: node for node in self.nodes for tensor in node.outputs}

    @property
    def readers(self) -> dict[str, list[Node]]:
        """Return the nodes that read each tensor, each once, in order."""
        readers: dict[str, list[Node]] = {}
        for node in self.nodes:
            for tensor in dict.fromkeys(node.inputs):
                readers.setdefault(tensor, []).append(node)
        return readers


def iter_nodes(graph: Graph) -> Iterator[Node]:
    """Yield every node, with those of loop bodies before the loop."""
    for node in graph.nodes:
        if isinstance(node, LoopNode):
            yield from iter_nodes(node.body)
        yield node


def in_dependency_order(nodes: Sequence[Node], after: Mapping[str, Sequence[Node]] | None = None) -> tuple[Node, ...]:
    """Return the nodes so that each comes after those whose results it reads, and else in their order.

    Args:
        nodes: the nodes.
        after: other nodes that a node comes after, by its name.

    Raises InvariantError if nodes depend on each other.
    """
    producer = {tensor: node for node in nodes for tensor in node.outputs}
    more = after or {}
    done: set[str] = set()
    waiting: set[str] = set()
    result: list[Node] = []
    for node in nodes:
        stack = [node]
        while stack:
            top = stack[-1]
            before = [*(producer[tensor] for tensor in top.inputs if tensor in producer), *more.get(top.name, ())]
            missing = [each for each in before if each.name not in done]
            if top.name in done:
                stack.pop()
            elif missing:
                waiting.add(top.name)
                if any(each.name in waiting for each in missing):
                    raise InvariantError(f"node {top.name} depends on itself")
                stack += missing
            else:
                done.add(top.name)
                waiting.discard(top.name)
                result.append(top)
                stack.pop()
    return tuple(result)


def verify(graph: Graph) -> Graph:
    """Return the graph if it is well-formed. Raises InvariantError that names the node and the tensor."""
    types = dict(graph.inputs)
    if len(types) != len(graph.inputs) or types.keys() & graph.constants.keys():
        raise InvariantError(f"graph {graph.name}: two inputs or constants have one name")
    types |= {name: constant.type for name, constant in graph.constants.items()}
    names: set[str] = set()
    for node in graph.nodes:
        if node.name in names:
            raise InvariantError(f"graph {graph.name}: two nodes are called {node.name}")
        names.add(node.name)
        for tensor, expected in zip(node.inputs, node.input_types, strict=True):
            if types.get(tensor) != expected:
                known = "is not written before" if tensor not in types else f"is {types[tensor]}"
                raise InvariantError(f"node {node.name} reads {tensor} as {expected}, which {known}")
        for tensor, type_ in zip(node.outputs, node.output_types, strict=True):
            if tensor in types:
                raise InvariantError(f"node {node.name} writes {tensor}, which exists")
            types[tensor] = type_
        if isinstance(node, LoopNode):
            _verify_loop(node)
    for name, tensor in graph.outputs:
        if tensor not in types:
            raise InvariantError(f"output {name} of graph {graph.name} is {tensor}, which nothing writes")
    before, after = dict(graph.inputs), {name: types[tensor] for name, tensor in graph.outputs}
    for name in graph.states:
        if name not in before or before[name] != after.get(name):
            raise InvariantError(f"state {name} of graph {graph.name} is {before.get(name)} before and {after.get(name)} after")
    return graph


def _verify_loop(node: LoopNode) -> None:
    verify(node.body)
    for (name, before), after in zip(node.body.inputs[: node.carried], node.output_types, strict=False):
        if before != after:
            raise InvariantError(f"loop {node.name} carries {name} as {before}, and leaves {after}")
