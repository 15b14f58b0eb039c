"""Classes of nodes: nodes that one kernel computes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from roller_svc.graph.concats import is_contiguous_concat
from roller_svc.graph.plan import kernel_key
from roller_svc.graph.views import view_offset_elements
from roller_svc.ir.graph import Graph, LoopNode, OpNode
from roller_svc.ir.printer import text
from roller_svc.ir.program import TensorProgram, TensorType


@dataclass(frozen=True, slots=True)
class NodeClass:
    """Nodes with the same program, types and constant inputs."""

    program: TensorProgram  # with its constants
    expression: str
    inputs: tuple[tuple[str, TensorType], ...]
    constants: tuple[str, ...]
    nodes: tuple[str, ...]  # keys: paths of nodes

    @property
    def key(self) -> tuple[object, ...]:
        """Return what classes of other graphs that the same kernel computes have in common."""
        return self.expression, self.inputs, self.outputs, self.constants, self.donated

    @property
    def outputs(self) -> tuple[str, ...]:
        return tuple(output.name for output in self.program.outputs)

    @property
    def donated(self) -> tuple[str, ...]:
        """Inputs in the memory of states, which the kernel updates."""
        return self.program.donated


def find_classes(graph: Graph) -> tuple[NodeClass, ...]:
    """Return the classes of all nodes that need a kernel, in order of their first node."""
    members: dict[tuple[object, ...], list[tuple[str, OpNode, tuple[str, ...]]]] = {}
    for key, node, constants in _kernels(graph, ""):
        program = (id(node.program), constants)
        members.setdefault(program, []).append((key, node, constants))
    merged: dict[tuple[object, ...], list[tuple[str, OpNode, tuple[str, ...]]]] = {}
    for same in members.values():  # programs are shared objects mostly: print each once
        _, node, constants = same[0]
        outputs = tuple(output.name for output in node.program.outputs)
        merged.setdefault((text(node.program), node.program.inputs, outputs, constants, node.program.donated), []).extend(same)
    return tuple(
        NodeClass(same[0][1].program, str(key[0]), same[0][1].program.inputs, same[0][2], tuple(k for k, _, _ in same))
        for key, same in merged.items()
    )


def _kernels(graph: Graph, path: str) -> Iterator[tuple[str, OpNode, tuple[str, ...]]]:
    """Yield (key, node, constant inputs) of each node that is not a view."""
    for node in graph.nodes:
        if isinstance(node, LoopNode):
            yield from _kernels(node.body, kernel_key(path, node))
        elif isinstance(node, OpNode) and view_offset_elements(node) is None and not is_contiguous_concat(node):
            named = zip(node.program.inputs, node.inputs, strict=True)
            yield kernel_key(path, node), node, tuple(name for (name, _), t in named if t in graph.constants)
