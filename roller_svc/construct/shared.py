"""A program on several devices: what its partitions and footprints have in common is found once."""

from __future__ import annotations

from dataclasses import dataclass, field

from roller_svc.construct.partition import Traits, computed, partition_of, traits
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.program import TensorExpr, TensorProgram
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
        """`groups` and, where one of them is attention, those that it would be as several kernels."""
        groups = self.groups(hw)
        if all(group.attention is None for group in groups):
            return (groups,)
        return groups, self._groups_of(traits(hw).apart)

    def _groups_of(self, of_device: Traits) -> tuple[KernelGroup, ...]:
        statements = self._statements.get(of_device.is_cpu)
        if statements is None:
            statements = self._statements[of_device.is_cpu] = computed(self.program, of_device)
        key = of_device if len(statements) > 1 else of_device.alone
        groups = self._groups.get(key)
        if groups is None:
            groups = self._groups[key] = partition_of(self.program, statements, of_device)
        return groups
