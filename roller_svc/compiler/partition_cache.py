"""Partitions and footprints of a program, computed once for all devices that share them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from roller_svc.families.matching import supports_attention
from roller_svc.fusion.aligned_copies import may_align
from roller_svc.fusion.partition import FusionOptions, normalize_statements, partition_statements
from roller_svc.ir.group import GroupKind, KernelGroup
from roller_svc.ir.hardware import HardwareSpec, TargetKind, UnitKind
from roller_svc.ir.program import TensorExpr, TensorProgram
from roller_svc.ir.report import Plan
from roller_svc.perf.footprint import Footprints


@dataclass(frozen=True, slots=True)
class PartitionCache:
    """Caches the partitions of a program by fusion options. Not thread-safe."""

    program: TensorProgram
    footprints: Footprints = field(default_factory=dict, compare=False)
    _statements: dict[bool, tuple[TensorExpr, ...]] = field(default_factory=dict, compare=False)
    _groups: dict[FusionOptions, tuple[KernelGroup, ...]] = field(default_factory=dict, compare=False)

    def groups(self, hw: HardwareSpec) -> tuple[KernelGroup, ...]:
        """Return the default partition of the program for a device."""
        return self._partition(traits(hw))

    def partitions(self, hw: HardwareSpec) -> tuple[tuple[KernelGroup, ...], ...]:
        """Return all fusion alternatives, the default partition last or before unfused attention.

        The alternatives are unfused attention, dual-GEMM variants, and variants that copy misaligned TMA operands.
        """
        options = [traits(hw)]
        if any(group.attention is not None for group in self.groups(hw)):
            options.append(options[0].without_attention)
        default = [self._partition(option) for option in options]
        dual_gemm = [
            self._partition(way.with_dual_gemm)
            for way, groups in zip(options, default, strict=True)
            if _may_have_dual_gemm(groups)
        ]
        unaligned = (*(groups for groups in dual_gemm if any(group.is_dual_gemm for group in groups)), *default)
        return (*self._aligned(options[-1], unaligned), *unaligned)

    def _aligned(
        self, option: FusionOptions, unaligned: tuple[tuple[KernelGroup, ...], ...]
    ) -> Iterator[tuple[KernelGroup, ...]]:
        """Yield the variants that copy misaligned TMA operands, with and without dual GEMM."""
        if not (option.has_tma and may_align(self.program)):
            return
        types = self.program.types
        has_dual_gemm = any(group.is_dual_gemm for groups in unaligned for group in groups)
        aligned = option.with_aligned_copies
        for options in (aligned.with_dual_gemm, aligned) if has_dual_gemm else (aligned,):
            groups = self._partition(options)
            if any(tensor not in types for group in groups for tensor, _ in group.stored):
                yield groups

    def partition_of_plan(self, plan: Plan, hw: HardwareSpec) -> tuple[KernelGroup, ...]:
        """Return the kernel groups of a plan; on a CPU, whose tile spaces may be views, the only partition."""
        spaces = [choice.program.space for choice in plan.choices]
        partitions = self.partitions(hw)
        return next((groups for groups in partitions if [group.space for group in groups] == spaces), partitions[0])

    def _partition(self, options: FusionOptions) -> tuple[KernelGroup, ...]:
        statements = self._statements.get(options.is_cpu)
        if statements is None:
            statements = self._statements[options.is_cpu] = normalize_statements(self.program, options)
        key = options if len(statements) > 1 else options.without_fusion
        groups = self._groups.get(key)
        if groups is None:
            groups = self._groups[key] = partition_statements(self.program, statements, options)
        return groups


def _may_have_dual_gemm(groups: tuple[KernelGroup, ...]) -> bool:
    return sum(group.kind is GroupKind.CONTRACTION for group in groups) > 1


def traits(hw: HardwareSpec) -> FusionOptions:
    attends_in = frozenset(u.in_dtype for u in hw.units if supports_attention(u, hw))
    return FusionOptions(
        hw.family is TargetKind.CPU, any(u.takes_fragments for u in hw.units), hw.num_cores, attends_in,
        has_tma=any(u.kind is UnitKind.WGMMA for u in hw.units),
    )  # fmt: skip


def partition(program: TensorProgram, hw: HardwareSpec) -> tuple[KernelGroup, ...]:
    """Partition a program into kernel groups in topological order, one kernel each (two if its reduction is split)."""
    return partition_statements(program, normalize_statements(program, traits(hw)), traits(hw))
