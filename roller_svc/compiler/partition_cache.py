"""A program on several devices: what its partitions and footprints have in common is found once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from roller_svc.fusion.aligned_copies import may_align
from roller_svc.fusion.partition import Traits, computed, partition_of, traits
from roller_svc.ir.group import GroupKind, KernelGroup
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.program import TensorExpr, TensorProgram
from roller_svc.ir.report import Plan
from roller_svc.perf.footprint import Footprints


@dataclass(frozen=True, slots=True)
class Shared:
    """Remembers by content, so that the answers do not depend on which devices came before. For one thread."""

    program: TensorProgram
    footprints: Footprints = field(default_factory=dict, compare=False)
    _statements: dict[bool, tuple[TensorExpr, ...]] = field(default_factory=dict, compare=False)
    _groups: dict[Traits, tuple[KernelGroup, ...]] = field(default_factory=dict, compare=False)

    def groups(self, hw: HardwareSpec) -> tuple[KernelGroup, ...]:
        """`partition` of the program."""
        return self._groups_of(traits(hw))

    def groupings(self, hw: HardwareSpec) -> tuple[tuple[KernelGroup, ...], ...]:
        """`groups`, where one of them is attention those that it would be as several kernels, and before these the same
        with pairs of sums where there are any, and with aligned copies of what bulk copies do not take."""
        ways = [traits(hw)]
        if any(group.attention is not None for group in self.groups(hw)):
            ways.append(ways[0].apart)
        plain = [self._groups_of(way) for way in ways]
        paired = [self._groups_of(way.paired) for way, groups in zip(ways, plain, strict=True) if _may_pair(groups)]
        whole = (*(groups for groups in paired if any(group.is_paired for group in groups)), *plain)
        return (*self._aligned(ways[-1], whole), *whole)

    def _aligned(self, way: Traits, whole: tuple[tuple[KernelGroup, ...], ...]) -> Iterator[tuple[KernelGroup, ...]]:
        """Those that read such copies, with and without pairs."""
        if not (way.moves_boxes and may_align(self.program)):
            return
        types = self.program.types
        pairs = any(group.is_paired for groups in whole for group in groups)
        for aligned in (way.aligned.paired, way.aligned) if pairs else (way.aligned,):
            groups = self._groups_of(aligned)
            if any(tensor not in types for group in groups for tensor, _ in group.stored):
                yield groups

    def grouping_of(self, plan: Plan, hw: HardwareSpec) -> tuple[KernelGroup, ...]:
        """The groups that the plan's choices are for. On a CPU, where spaces may be views, there are no others."""
        spaces = [choice.program.space for choice in plan.choices]
        ways = self.groupings(hw)
        return next((groups for groups in ways if [group.space for group in groups] == spaces), ways[0])

    def _groups_of(self, of_device: Traits) -> tuple[KernelGroup, ...]:
        statements = self._statements.get(of_device.is_cpu)
        if statements is None:
            statements = self._statements[of_device.is_cpu] = computed(self.program, of_device)
        key = of_device if len(statements) > 1 else of_device.alone
        groups = self._groups.get(key)
        if groups is None:
            groups = self._groups[key] = partition_of(self.program, statements, of_device)
        return groups


def _may_pair(groups: tuple[KernelGroup, ...]) -> bool:
    return sum(group.kind is GroupKind.CONTRACTION for group in groups) > 1
