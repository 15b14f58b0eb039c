"""Operator fusion: epilogues, prologues, chains of maps, and views between them.

A node joins the fused node of one of its producers if the program of both has fewer kernels than the two, and the
performance model estimates that they take no longer. A node that only moves data for one reader is offered to the
reader first. A map that several fused nodes read is computed by each of them, where the whole graph is then faster. A
node that reads products through a softmax joins both at once: attention is one kernel, and neither
half of it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from roller_svc.graph.concats import is_contiguous_concat
from roller_svc.graph.costs import Cost, CostTable
from roller_svc.graph.merge import can_merge, list_members, merge_nodes
from roller_svc.graph.passes.boundaries import Boundaries, Boundary
from roller_svc.graph.views import view_offset_elements
from roller_svc.ir.expr import Load
from roller_svc.ir.graph import Graph, LoopNode, Node, OpNode, in_dependency_order
from roller_svc.ir.program import Combine, StatementKind

MAX_NODES = 24  # of a fused node
# Fusing must not make the estimate worse than by this factor: the model's own noise.
TOLERANCE = 1.02
MAX_COPY_ROUNDS = 3  # a map that reads another one is copied first, and then the other one


def fuse_operators(graph: Graph, costs: CostTable, boundaries: Boundaries | None = None, runs: int = 1) -> Graph:
    """Return the graph with nodes merged for the device of the costs, in bodies of loops too.

    Args:
        graph: the graph.
        costs: estimates for the device.
        boundaries: those that it meets are added, and some may be the other way.
        runs: how often a call runs the graph, which may be the body of a loop.
    """
    met = Boundaries() if boundaries is None else boundaries
    fusion = _Fusion(graph, costs, met, runs)
    best = fusion.run()
    least_s = costs.graph_seconds(best)
    for _ in range(MAX_COPY_ROUNDS):
        copied = fusion.copy_shared_maps()
        if copied is None or least_s is None:
            break
        fusion = _Fusion(copied, costs, met, runs)
        fused = fusion.run()
        seconds = costs.graph_seconds(fused)
        if seconds is not None and seconds < least_s:
            best, least_s = fused, seconds
    return best


@dataclass(slots=True, eq=False)
class _Cluster:
    """Nodes that become one."""

    nodes: list[OpNode]
    cost: Cost
    fixed: bool = False  # it stays alone: no candidate fits, or it updates a tensor


def _sums(cluster: _Cluster) -> bool:
    """Return whether a statement of the cluster adds up."""
    return any(statement.combine is Combine.SUM for node in cluster.nodes for statement in node.program.statements)


def _is_map(node: OpNode) -> bool:
    return all(statement.kind is StatementKind.MAP for statement in node.program.statements)


def _renamed(node: OpNode, reader: str, used: set[str]) -> OpNode:
    """Return a node of one result with names that the graph does not use, for a reader of it."""

    def choose(name: str) -> str:
        name = f"{name}@{reader}"
        while name in used:
            name += "_"
        used.add(name)
        return name

    (tensor,) = node.outputs
    name = choose(node.name)
    return replace(node, name=name, outputs=(name if tensor == node.name else choose(tensor),))


class _Fusion:
    def __init__(self, graph: Graph, costs: CostTable, boundaries: Boundaries | None = None, runs: int = 1) -> None:
        self.graph, self.costs, self.runs = graph, costs, runs
        self.boundaries = Boundaries() if boundaries is None else boundaries
        self.order = {node.name: i for i, node in enumerate(graph.nodes)}
        self.producers = graph.producers
        self.readers = graph.readers
        self.outputs = {tensor for _, tensor in graph.outputs}
        self.views = {node.name for node in graph.nodes if view_offset_elements(node) is not None}
        self.cluster_of: dict[str, _Cluster] = {}

    def run(self) -> Graph:
        others: list[Node] = []
        moves: list[OpNode] = []
        for node in self.graph.nodes:
            if isinstance(node, LoopNode):
                body = fuse_operators(node.body, self.costs, self.boundaries, self.runs * node.steps)
                others.append(replace(node, body=body))
            elif not isinstance(node, OpNode) or node.name in self.views or is_contiguous_concat(node):
                others.append(node)
            else:
                self._begin(node)
                if self._moves_for_one_reader(node):
                    moves.append(node)
                else:
                    self._grow(node)
        for node in moves:
            self._grow(node)
        clusters = dict.fromkeys(self.cluster_of.values())
        return self._assemble(others, list(clusters))

    def _begin(self, node: OpNode) -> None:
        """Make a cluster of one node."""
        cost = self.costs.cost(node, self.graph.constants) if can_merge([node]) else None
        self.cluster_of[node.name] = _Cluster([node], Cost(1, 0.0) if cost is None else cost, fixed=cost is None)

    def _moves_for_one_reader(self, node: OpNode) -> bool:
        """Return whether the node only moves data, for one reader: that may read it where it is."""
        statements = node.program.statements
        if len(node.outputs) != 1 or node.outputs[0] in self.outputs or len(statements) != 1:
            return False
        only_loads = statements[0].kind is StatementKind.MAP and isinstance(statements[0].body, Load)
        return only_loads and len(self.readers.get(node.outputs[0], ())) == 1

    def _grow(self, node: OpNode) -> None:
        """Merge the cluster of a node with those of its producers while that pays."""
        own = self.cluster_of[node.name]
        if own.fixed:
            return
        tried: set[int] = set()
        while True:
            for producer, views in self._producers(own):
                cluster = self.cluster_of[producer.name]
                if cluster is own or cluster.fixed or id(cluster) in tried:
                    continue
                tried.add(id(cluster))
                merged = self._merge((cluster, own), views) or self._merge_around(cluster, views, own)
                if merged is not None:
                    for each in merged.nodes:
                        self.cluster_of[each.name] = merged
                    own = merged
                    break
            else:
                return

    def copy_shared_maps(self) -> Graph | None:
        """Return the graph as it was, where readers in several fused nodes have copies of the maps that they share.

        None if no such map costs less in its readers. Run it after `run`.
        """
        changed: dict[str, OpNode] = {}
        copies: dict[str, list[OpNode]] = {}
        used = {*self.order, *self.graph.types}
        for node in reversed(self.graph.nodes):
            if not isinstance(node, OpNode) or not self._is_shared_map(node):
                continue
            (tensor,) = node.outputs
            readers = [each for each in self.readers[tensor] if isinstance(each, OpNode)]
            if any(each.name in copies for each in readers):  # which this round replaces
                continue
            own = [_renamed(node, each.name, used) for each in readers]
            if not self._are_faster(node, own, readers):
                continue
            copies[node.name] = own
            for copy, reader in zip(own, readers, strict=True):
                current = changed.get(reader.name, reader)
                inputs = tuple(copy.outputs[0] if each == tensor else each for each in current.inputs)
                changed[reader.name] = replace(current, inputs=inputs)
        nodes = [new for node in self.graph.nodes for new in copies.get(node.name, [changed.get(node.name, node)])]
        return replace(self.graph, nodes=tuple(nodes)) if copies else None

    def _is_shared_map(self, node: OpNode) -> bool:
        """Return whether a node computes maps of one tensor, which several fused nodes read, from maps and other nodes."""
        own = self.cluster_of.get(node.name)
        if own is None or own.fixed or len(node.outputs) != 1 or node.outputs[0] in self.outputs:
            return False
        readers = self.readers.get(node.outputs[0], ())
        clusters = {id(self.cluster_of.get(each.name)) for each in readers}
        if not _is_map(node) or len(clusters) < 2 or any(each.name not in self.cluster_of for each in readers):
            return False
        stack = [node]
        while stack:  # behind a sum of its own fused node it costs nothing
            before = (each for each, _ in self._producers(_Cluster([stack.pop()], own.cost)))
            inside = [each for each in before if self.cluster_of[each.name] is own]
            if not all(map(_is_map, inside)):
                return False
            stack += inside
        return True

    def _are_faster(self, node: OpNode, copies: Sequence[OpNode], readers: Sequence[OpNode]) -> bool:
        """Return whether the model expects readers with copies of a node to be faster, each as many kernels as alone."""
        stored = self.costs.cost(node, self.graph.constants)
        if stored is None:
            return False
        before_s, after_s = stored.seconds, 0.0
        for copy, reader in zip(copies, readers, strict=True):
            if not can_merge([copy, reader]):
                return False
            inputs = tuple(copy.outputs[0] if each == node.outputs[0] else each for each in reader.inputs)
            merged = merge_nodes([copy, replace(reader, inputs=inputs)], set(reader.outputs))
            alone, cost = self.costs.cost(reader, self.graph.constants), self.costs.cost(merged, self.graph.constants)
            if alone is None or cost is None or cost.kernels > alone.kernels:
                return False
            before_s, after_s = before_s + alone.seconds, after_s + cost.seconds
        return after_s < before_s

    def _producers(self, cluster: _Cluster) -> list[tuple[OpNode, list[OpNode]]]:
        """Return the nodes that a cluster's last node reads, the latest first, with the views between."""
        found: list[tuple[OpNode, list[OpNode]]] = []
        for tensor in dict.fromkeys(t for node in cluster.nodes for t in node.inputs):
            views: list[OpNode] = []
            producer = self.producers.get(tensor)
            while isinstance(producer, OpNode) and producer.name in self.views:
                views.append(producer)
                producer = self.producers.get(producer.inputs[0])
            if isinstance(producer, OpNode) and producer.name in self.cluster_of:
                found.append((producer, views[::-1]))
        return sorted(found, key=lambda pair: -self.order[pair[0].name])

    def _merge_around(self, middle: _Cluster, views: Sequence[OpNode], last: _Cluster) -> _Cluster | None:
        """Merge a cluster that sums products with one that it reads, and with what that reads: scores and softmax."""
        if not self.costs.computes_attention or not _sums(last) or not _sums(middle):
            return None
        for producer, other_views in self._producers(middle):
            first = self.cluster_of[producer.name]
            if first not in (middle, last) and not first.fixed and _sums(first):
                merged = self._merge((first, middle, last), [*other_views, *views])
                if merged is not None:
                    return merged
        return None

    def _merge(self, clusters: Sequence[_Cluster], views: Sequence[OpNode]) -> _Cluster | None:
        """Return the clusters as one, with views between them; None if that has as many kernels, or takes longer."""
        members = {node.name: node for node in (*views, *(node for each in clusters for node in each.nodes))}
        nodes = sorted(members.values(), key=lambda node: self.order[node.name])
        if len(nodes) > MAX_NODES or not can_merge(nodes) or self._is_cyclic(nodes):
            return None
        merged = merge_nodes(nodes, self._visible(nodes))
        kernels = sum(each.cost.kernels for each in clusters)
        if not self.costs.can_have_fewer_kernels(merged, self.graph.constants, kernels):  # most tries end here
            return None
        cost = self.costs.cost(merged, self.graph.constants)
        if cost is None or cost.kernels >= kernels:
            return None
        apart_s = sum(each.cost.seconds for each in clusters)
        boundary = Boundary(merged.program, cost.seconds <= TOLERANCE * apart_s, cost.seconds, apart_s)
        is_one = self.boundaries.decide(boundary, [node.name for node in nodes], self.runs)
        return _Cluster(nodes, cost) if is_one else None

    def _visible(self, nodes: Sequence[OpNode]) -> set[str]:
        """Return the tensors that something outside of the nodes reads.

        A view that others read stays outside too, so its tensor is visible in its place.
        """
        inside = {node.name for node in nodes}
        visible = {
            tensor
            for node in nodes
            for tensor in node.outputs
            if tensor in self.outputs or any(reader.name not in inside for reader in self.readers.get(tensor, ()))
        }
        for node in reversed(nodes):
            if node.name in self.views and not visible.isdisjoint(node.outputs):
                visible.difference_update(node.outputs)
                visible.update(node.inputs)
        return visible & {tensor for node in nodes for tensor in node.outputs}

    def _is_cyclic(self, nodes: Sequence[OpNode]) -> bool:
        """Return whether something outside of the nodes reads from them and is read by them."""
        inside = {node.name for node in nodes}
        first = min(self.order[node.name] for node in nodes)
        stack: list[Node] = []
        seen: set[str] = set()
        for node in nodes:
            stack += self._outside_producers(node, inside, first, seen)
        while stack:
            for member in self._members(stack.pop()):
                for tensor in member.inputs:
                    producer = self.producers.get(tensor)
                    if producer is not None and producer.name in inside:
                        return True
                stack += self._outside_producers(member, inside, first, seen)
        return False

    def _members(self, node: Node) -> Sequence[Node]:
        """Return the nodes that run with a node."""
        cluster = self.cluster_of.get(node.name)
        return [node] if cluster is None else cluster.nodes

    def _outside_producers(self, node: Node, inside: set[str], first: int, seen: set[str]) -> list[Node]:
        """Return the producers of a node's inputs that are not inside, not seen, and may depend on what is inside."""
        found: list[Node] = []
        for tensor in node.inputs:
            producer = self.producers.get(tensor)
            if producer is None or producer.name in inside or producer.name in seen:
                continue
            members = self._members(producer)
            if any(self.order[member.name] > first for member in members):
                seen.update(member.name for member in members)
                found.append(producer)
        return found

    def _assemble(self, others: Sequence[Node], clusters: Sequence[_Cluster]) -> Graph:
        """Return the graph of merged nodes, in topological order."""
        nodes: list[Node] = [node for node in others if node.name not in self.views]
        for cluster in clusters:
            if len(cluster.nodes) == 1:
                nodes.append(cluster.nodes[0])
                continue
            own = [node for node in cluster.nodes if node.name not in self.views]
            merged = merge_nodes(cluster.nodes, self._visible(cluster.nodes))
            name = "+".join(node.name for node in own)
            name = name if len(name) <= 200 else f"{own[0].name}+{len(own) - 1} more"
            nodes.append(replace(merged, name=name, members=list_members(own)))
        needed = self.outputs | {tensor for node in nodes for tensor in node.inputs}
        for node in reversed(others):
            if node.name in self.views and not needed.isdisjoint(node.outputs):
                nodes.append(node)
                needed.update(node.inputs)
        order = {tensor: i for i, node in enumerate(self.graph.nodes) for tensor in node.outputs}
        nodes.sort(key=lambda node: max(order[tensor] for tensor in node.outputs))
        return replace(self.graph, nodes=in_dependency_order(nodes))
