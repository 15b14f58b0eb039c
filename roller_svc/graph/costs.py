"""Costs of nodes by the performance model, each computed once, also across compiles of a model."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from roller_svc.compiler.partition_cache import PartitionCache
from roller_svc.compiler.plans import rank_partitions
from roller_svc.errors import NoCandidateError
from roller_svc.families.matching import supports_attention
from roller_svc.graph.concats import is_contiguous_concat
from roller_svc.graph.views import view_offset_elements
from roller_svc.ir.constraints import ScheduleConstraints, WinogradMode
from roller_svc.ir.graph import Constant, Graph, OpNode
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.printer import text
from roller_svc.ir.program import TensorProgram

# By the digest of a program: [kernels, seconds], or [kernels] of the partition with the fewest if it was not estimated,
# or None if no candidate fits the device.
StoredCosts = dict[str, list[float] | None]
_ProgramKey = tuple[TensorProgram, tuple[str, ...]]  # and which of its inputs are constants


@dataclass(frozen=True, slots=True)
class Cost:
    kernels: int
    seconds: float


@dataclass(slots=True)
class CostTable:
    """Kernels and estimates of programs."""

    hw: HardwareSpec
    winograd: WinogradMode = WinogradMode.AUTO
    stored: StoredCosts = field(default_factory=dict)  # of earlier compiles too
    known: dict[_ProgramKey, Cost | None] = field(default_factory=dict)
    counts: dict[_ProgramKey, float] = field(default_factory=dict)  # kernels of the partition with the fewest
    partitioned: dict[_ProgramKey, PartitionCache] = field(default_factory=dict)  # programs that are estimated next

    @property
    def computes_attention(self) -> bool:
        """Whether products on both sides of a softmax may be one kernel of the device."""
        return any(supports_attention(unit, self.hw) for unit in self.hw.units)

    def can_have_fewer_kernels(self, node: OpNode, constants: Mapping[str, Constant], kernels: int) -> bool:
        """Return whether a partition of a node has fewer kernels, which takes less time to find than its cost."""
        key = (node.program, _listed(node, constants))
        if key not in self.counts:
            self.counts[key] = self._count_kernels(key)
        is_less = self.counts[key] < kernels
        if not is_less:
            self.partitioned.pop(key, None)
        return is_less

    def cost(self, node: OpNode, constants: Mapping[str, Constant]) -> Cost | None:
        """Return the cost of a node; None if no candidate fits the device."""
        listed = _listed(node, constants)
        key = (node.program, listed)
        if key not in self.known:
            program = replace(node.program, constants=listed)
            digest = program_key(program)
            found = self.stored.get(digest, [])
            if found is not None and len(found) < 2:
                partitions = self.partitioned.pop(key, None) or PartitionCache(program)
                found = self.stored[digest] = self._estimate(partitions)
            self.known[key] = None if found is None else Cost(int(found[0]), found[1])
        return self.known[key]

    def graph_seconds(self, graph: Graph) -> float | None:
        """Return the estimate of all nodes but loops, one after the other; None if one has no candidate."""
        total = 0.0
        for node in graph.nodes:
            if isinstance(node, OpNode) and view_offset_elements(node) is None and not is_contiguous_concat(node):
                cost = self.cost(node, graph.constants)
                if cost is None:
                    return None
                total += cost.seconds
        return total

    def is_faster(self, merged: OpNode, members: Iterable[OpNode], constants: Mapping[str, Constant]) -> bool:
        """Return whether the model expects a node to take less time than those it is merged of."""
        cost, costs = self.cost(merged, constants), [self.cost(node, constants) for node in members]
        known = [each.seconds for each in costs if each is not None]
        return cost is not None and len(known) == len(costs) and cost.seconds < sum(known)

    @property
    def _constraints(self) -> ScheduleConstraints:
        return ScheduleConstraints(winograd=self.winograd)

    def _count_kernels(self, key: _ProgramKey) -> float:
        """Return the kernels of the partition with the fewest that a call runs; infinity if no candidate fits."""
        program, listed = key
        program = replace(program, constants=listed)
        digest = program_key(program)
        if digest not in self.stored:
            partitions = self.partitioned[key] = PartitionCache(program)
            counts = [sum(not group.runs_once for group in groups) for groups in partitions.partitions(self.hw, self._constraints)]
            self.stored[digest] = [min(counts)]
        found = self.stored[digest]
        return math.inf if found is None else found[0]

    def _estimate(self, partitions: PartitionCache) -> list[float] | None:
        try:
            best = rank_partitions(partitions, self.hw, 1, self._constraints)[0]
        except NoCandidateError:
            return None
        live = [candidates[0].estimate.seconds for candidates in best.candidates if not candidates[0].runs_once]
        return [len(live), sum(live)]


def _listed(node: OpNode, constants: Mapping[str, Constant]) -> tuple[str, ...]:
    """Return the names of the node's constant inputs in its program."""
    named = zip(node.program.inputs, node.inputs, strict=True)
    return tuple(name for (name, _), tensor in named if tensor in constants)


def program_key(program: TensorProgram) -> str:
    """Return the digest of what a program's cost depends on: text, types and constants."""
    types = [f"{name}:{type_.dtype.value}{type_.shape}" for name, type_ in program.inputs]
    results = [f"{output.name}:{program.types[output.tensor].dtype.value}" for output in program.outputs]
    parts = (text(program), *types, "->", *results, "constants", *program.constants)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
