"""The passes over graphs, in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from roller_svc.graph.costs import CostTable
from roller_svc.graph.passes.batch_norms import fold_batch_norms
from roller_svc.graph.passes.batching import batch_operators
from roller_svc.graph.passes.boundaries import Boundaries
from roller_svc.graph.passes.byte_tables import tabulate_bytes
from roller_svc.graph.passes.constants import fold_constants
from roller_svc.graph.passes.dead import remove_dead_nodes
from roller_svc.graph.passes.duplicates import merge_duplicates
from roller_svc.graph.passes.forms import choose_forms
from roller_svc.graph.passes.fusion import fuse_operators
from roller_svc.graph.passes.horizontal import fuse_horizontally
from roller_svc.graph.passes.layouts import choose_layouts
from roller_svc.graph.passes.quantization import sum_integers
from roller_svc.graph.passes.updates import update_states
from roller_svc.graph.weights import Weights
from roller_svc.ir.graph import Graph, iter_nodes, verify


@dataclass(frozen=True, slots=True)
class PassReport:
    """The effect of a pass: nodes before and after."""

    name: str
    nodes_before: int
    nodes_after: int


def run_passes(
    graph: Graph, weights: Weights, costs: CostTable, *, fuse: bool = True, boundaries: Boundaries | None = None
) -> tuple[Graph, tuple[PassReport, ...]]:
    """Return the graph after all passes, and what each did. The graph is verified after each.

    `boundaries` are of fusion, to which those that it meets are added.
    """
    passes: list[tuple[str, Callable[[Graph], Graph]]] = [
        ("sum_integers", lambda g: sum_integers(g, weights, costs)),
        ("fold_constants", lambda g: fold_constants(g, weights)),
        ("fold_batch_norms", lambda g: fold_batch_norms(g, weights)),
        ("merge_duplicates", merge_duplicates),
        ("tabulate_bytes", lambda g: tabulate_bytes(g, weights, costs)),
        ("remove_dead_nodes", remove_dead_nodes),
        ("choose_forms", lambda g: choose_forms(g, costs)),
    ]
    if fuse:
        passes.append(("batch_operators", lambda g: batch_operators(g, costs)))
        passes.append(("fuse_operators", lambda g: fuse_operators(g, costs, boundaries)))
        passes.append(("fuse_horizontally", lambda g: fuse_horizontally(g, weights, costs, boundaries)))
        passes.append(("choose_layouts", lambda g: choose_layouts(g, costs)))
    if graph.states:
        passes.append(("update_states", update_states))
    reports = []
    graph = verify(graph)
    for name, run in passes:
        before = sum(1 for _ in iter_nodes(graph))
        graph = verify(run(graph))
        reports.append(PassReport(name, before, sum(1 for _ in iter_nodes(graph))))
    return graph, tuple(reports)
