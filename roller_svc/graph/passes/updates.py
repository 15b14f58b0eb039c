"""Updates of states in their memory: a scatter of a state writes elements, and copies nothing.

The new value of a state may be the result of scatters, each of the result of the one before, the first of the state
itself. They write the state's memory if each can run after all other nodes that read what it overwrites, and if no
result of the model is what it overwrites. A state with another new value gets that by a copy at the end of a call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from roller_svc.compiler.donation import donate_targets, find_donatable
from roller_svc.graph.views import view_offset_elements
from roller_svc.ir.expr import AxisRef, Load
from roller_svc.ir.graph import Graph, Node, OpNode, in_dependency_order
from roller_svc.ir.program import Output, StatementKind, TensorExpr, TensorProgram


@dataclass(frozen=True, slots=True)
class _Update:
    """A node that overwrites a part of a state."""

    node: OpNode  # as it updates its target in place
    target: str
    result: str


def update_states(graph: Graph) -> Graph:
    """Return the graph whose states are updated in their memory where that is possible."""
    after: dict[str, Sequence[Node]] = {}  # by the name of an updating node: what has to run before it
    replaced: dict[str, Node] = {}
    for name in graph.states:
        updates = _find_updates(graph, name)
        readers = None if not updates else _find_readers(graph, name, updates)
        if readers is None or _reads_later(graph, {**after, **readers}):
            continue
        after |= readers
        replaced |= {update.node.name: update.node for update in updates or ()}
    nodes = in_dependency_order(graph.nodes, after)
    return replace(graph, nodes=tuple(replaced.get(node.name, node) for node in nodes))


def _find_updates(graph: Graph, state: str) -> list[_Update] | None:
    """Return the scatters between a state and its new value, in order; None if that is another value."""
    producers = graph.producers
    updates: list[_Update] = []
    tensor = dict(graph.outputs)[state]
    while tensor != state:
        node = producers.get(tensor)
        if not isinstance(node, OpNode):
            return None
        if _is_whole_view(node):
            tensor = node.inputs[0]
            continue
        update = _as_update(node)
        if update is None:
            return None
        updates.append(update)
        tensor = update.target
    return updates[::-1]


def _is_whole_view(node: Node) -> bool:
    """Return whether a node's result is its whole input."""
    return view_offset_elements(node) == 0 and node.input_types[0].bytes == node.output_types[0].bytes


def _as_update(node: OpNode) -> _Update | None:
    """Return a scatter of an input as an update of that input's memory; None if the node is not one."""
    if len(node.outputs) != 1:
        return None
    program = _without_copy(node.program)
    scatter = program.statements[-1]
    target = scatter.target
    if scatter.kind is not StatementKind.SCATTER or target not in dict(program.inputs):
        return None
    named = replace(
        program,
        statements=(*program.statements[:-1], replace(scatter, name=target)),
        outputs=(Output(target, scatter.output),),
    )
    if target not in find_donatable(named):
        return None
    tensor = node.inputs[[name for name, _ in named.inputs].index(target)]
    if node.inputs.count(tensor) > 1:
        return None  # it reads what it overwrites
    return _Update(replace(node, program=donate_targets(named, (target,))), tensor, node.outputs[0])


def _without_copy(program: TensorProgram) -> TensorProgram:
    """Return the program of a copy and a scatter of it as a scatter of what is copied."""
    if len(program.statements) != 2:
        return program
    copy, scatter = program.statements
    source = _copied_input(copy, program)
    if source is None or scatter.target != copy.output or any(load.tensor == copy.output for load in scatter.reads):
        return program
    return replace(program, statements=(replace(scatter, target=source),))


def _copied_input(statement: TensorExpr, program: TensorProgram) -> str | None:
    """Return the input that a statement copies element by element; None if it does something else."""
    body, inputs = statement.body, dict(program.inputs)
    if statement.kind is not StatementKind.MAP or not isinstance(body, Load) or inputs.get(body.tensor) != statement.type:
        return None
    axes = tuple(AxisRef(axis.name) for axis in statement.axes)
    same = statement.index == body.index == axes
    whole = tuple(axis.extent for axis in statement.axes) == statement.type.shape
    return body.tensor if same and whole else None


def _find_readers(graph: Graph, state: str, updates: Sequence[_Update]) -> dict[str, Sequence[Node]] | None:
    """Return the nodes that read what each update overwrites, by its name; None if a result of the model is that.

    A view has its input's memory, so readers of views count.
    """
    outputs = {tensor for name, tensor in graph.outputs}
    found: dict[str, Sequence[Node]] = {}
    value = state
    for update in updates:
        memory = {value}
        readers: list[Node] = []
        for node in graph.nodes:
            if memory.isdisjoint(node.inputs) or node.name == update.node.name:
                continue
            if view_offset_elements(node) is not None:
                memory.update(node.outputs)
            else:
                readers.append(node)
        if not memory.isdisjoint(outputs) or len(memory.intersection(_node(graph, update).inputs)) > 1:
            return None
        found[update.node.name] = readers
        value = update.result
    return found


def _node(graph: Graph, update: _Update) -> Node:
    return next(node for node in graph.nodes if node.name == update.node.name)


def _reads_later(graph: Graph, after: Mapping[str, Sequence[Node]]) -> bool:
    """Return whether a node would have to run both before and after an update."""
    producers = graph.producers
    waiting = {
        node.name: {
            *(producers[tensor].name for tensor in node.inputs if tensor in producers),
            *(reader.name for reader in after.get(node.name, ())),
        }
        for node in graph.nodes
    }
    readers: dict[str, list[str]] = {}
    for name, before in waiting.items():
        for each in before:
            readers.setdefault(each, []).append(name)
    ready = [name for name, before in waiting.items() if not before]
    done = 0
    while ready:
        name = ready.pop()
        done += 1
        for reader in readers.get(name, ()):
            waiting[reader].discard(name)
            if not waiting[reader]:
                ready.append(reader)
    return done < len(graph.nodes)
