"""Boundaries of fusion as choices: graphs that compute the same, whose plans are bound to one program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from roller_svc.graph.classes import NodeClass
from roller_svc.graph.costs import program_key
from roller_svc.graph.passes import PassReport
from roller_svc.graph.passes.boundaries import Boundary
from roller_svc.graph.wiring.tree import Variable
from roller_svc.ir.graph import Graph
from roller_svc.ir.program import TensorProgram
from roller_svc.runtime.saved.serialization import KernelBundle

MAX_BOUNDARIES = 4  # that are explored
MAX_TRIED = 8  # of which graphs are made: some stay as they are, since another boundary gives the same nodes
FUSED, SEPARATE = "fused", "separate"

Flipped = frozenset[TensorProgram]


@dataclass(frozen=True, slots=True)
class FusedGraph:
    """A graph after its passes, in which some boundaries of fusion are not as the performance model says."""

    graph: Graph
    passes: tuple[PassReport, ...]
    classes: tuple[NodeClass, ...]
    flipped: Flipped = frozenset()  # programs of the merged nodes of these boundaries

    @property
    def kernel_of(self) -> dict[str, int]:
        """The number of the class of each node."""
        return {node: number for number, each in enumerate(self.classes) for node in each.nodes}


MakeGraph = Callable[[Flipped], FusedGraph]
FindKernel = Callable[[NodeClass], KernelBundle | None]


class FusionChoices:
    """The graphs in which some boundaries are the other way, as far as there are kernels for them."""

    def __init__(
        self,
        first: FusedGraph,
        kernels: Sequence[KernelBundle],
        boundaries: Sequence[Boundary],
        make_graph: MakeGraph,
        find_kernel: FindKernel,
    ) -> None:
        """Find kernels for the graphs in which one boundary is the other way.

        Args:
            first: the graph in use.
            kernels: of its classes.
            boundaries: those that may be explored.
            make_graph: makes the graph of boundaries that are the other way.
            find_kernel: finds the fastest kernel of another class; None if there is none.
        """
        self._make_graph = make_graph
        self._graphs = {first.flipped: first}
        self._known = {each.key: kernel for each, kernel in zip(first.classes, kernels, strict=True)}
        self.kernels: list[KernelBundle] = []  # of classes that the graph in use does not have
        explored: list[Boundary] = []
        missing: dict[tuple[object, ...], NodeClass] = {}
        for boundary in boundaries:
            flipped = self._graph(first.flipped | {boundary.program})
            if flipped.graph != first.graph and len(explored) < MAX_BOUNDARIES:
                explored.append(boundary)
                missing |= {each.key: each for each in flipped.classes if each.key not in self._known}
        for each in missing.values():
            kernel = find_kernel(each)
            if kernel is not None:
                self._known[each.key] = kernel
                self.kernels.append(kernel)
        self.variables = [
            (Variable(f"fusion:{number}", "fusion", _name_choices(boundary), 0, program_key(boundary.program)), boundary)
            for number, boundary in enumerate(explored)
        ]

    def flip(
        self, graph: FusedGraph, boundary: Boundary, kernels: Sequence[KernelBundle]
    ) -> tuple[FusedGraph, list[KernelBundle]] | None:
        """Return a graph with a boundary of another one the other way, and its kernels.

        Classes that both have keep their kernels. None if a class has no kernel, or if the graph stays the same.
        """
        flipped = self._graph(graph.flipped | {boundary.program})
        known: Mapping[tuple[object, ...], KernelBundle] = self._known | {
            each.key: kernel for each, kernel in zip(graph.classes, kernels, strict=True)
        }
        if flipped.graph == graph.graph or any(each.key not in known for each in flipped.classes):
            return None
        return flipped, [known[each.key] for each in flipped.classes]

    def _graph(self, flipped: Flipped) -> FusedGraph:
        if flipped not in self._graphs:
            self._graphs[flipped] = self._make_graph(flipped)
        return self._graphs[flipped]


def _name_choices(boundary: Boundary) -> tuple[str, str]:
    return (FUSED, SEPARATE) if boundary.is_merged else (SEPARATE, FUSED)
