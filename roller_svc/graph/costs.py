"""Costs of nodes by the performance model, each computed once, also across compiles of a model."""

from __future__ import annotations

import hashlib
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

# By the digest of a program: [kernels, seconds], or None if no candidate fits the device.
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
    counts: dict[_ProgramKey, int] = field(default_factory=dict)

    @property
    def computes_attention(self) -> bool:
        """Whether products on both sides of a softmax may be one kernel of the device."""
        return any(supports_attention(unit, self.hw) for unit in self.hw.units)

    def count_kernels(self, node: OpNode, constants: Mapping[str, Constant]) -> int:
        """Return the kernels of the node's default partition, which takes less time to find than its cost."""
        listed = _listed(node, constants)
        key = (node.program, listed)
        if key not in self.counts:
            self.counts[key] = len(PartitionCache(replace(node.program, constants=listed)).groups(self.hw))
        return self.counts[key]

    def cost(self, node: OpNode, constants: Mapping[str, Constant]) -> Cost | None:
        """Return the cost of a node; None if no candidate fits the device."""
        listed = _listed(node, constants)
        key = (node.program, listed)
        if key not in self.known:
            program = replace(node.program, constants=listed)
            digest = _digest(program)
            if digest not in self.stored:
                self.stored[digest] = self._estimate(program)
            found = self.stored[digest]
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

    def _estimate(self, program: TensorProgram) -> list[float] | None:
        try:
            best = rank_partitions(PartitionCache(program), self.hw, 1, ScheduleConstraints(winograd=self.winograd))[0]
        except NoCandidateError:
            return None
        live = [candidates[0].estimate.seconds for candidates in best.candidates if not candidates[0].runs_once]
        return [len(live), sum(live)]


def _listed(node: OpNode, constants: Mapping[str, Constant]) -> tuple[str, ...]:
    """Return the names of the node's constant inputs in its program."""
    named = zip(node.program.inputs, node.inputs, strict=True)
    return tuple(name for (name, _), tensor in named if tensor in constants)


def _digest(program: TensorProgram) -> str:
    types = [f"{name}:{type_.dtype.value}{type_.shape}" for name, type_ in program.inputs]
    results = [f"{output.name}:{program.types[output.tensor].dtype.value}" for output in program.outputs]
    parts = (text(program), *types, "->", *results, "constants", *program.constants)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
