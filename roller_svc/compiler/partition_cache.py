"""Partitions and footprints of a program, computed once for all devices that share them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain

from roller_svc.errors import InvariantError
from roller_svc.families.matching import SCALING_KINDS, has_view, supports_attention, unloadable_operands
from roller_svc.fusion.col2im import is_transposed_convolution
from roller_svc.fusion.grouped_gemm import selects_matrices
from roller_svc.fusion.linear_sums import has_rounded_squares
from roller_svc.fusion.operand_copies import OperandCopy
from roller_svc.fusion.partition import FusionOptions, finds_other_contractions, normalize_statements, partition_statements
from roller_svc.fusion.scaled_sums import has_scaled_sum
from roller_svc.ir.constraints import NO_CONSTRAINTS, ScheduleConstraints
from roller_svc.ir.dtype import DType
from roller_svc.ir.group import GroupKind, KernelGroup
from roller_svc.ir.hardware import HardwareSpec, TargetKind, UnitKind
from roller_svc.ir.program import Forms, TensorExpr, TensorProgram
from roller_svc.ir.report import Plan
from roller_svc.perf.footprint import Footprints

Partition = tuple[KernelGroup, ...]
MAX_COPY_ROUNDS = 2  # a copy may change the order of k, which the other operand must then follow


@dataclass(frozen=True, slots=True)
class PartitionCache:
    """Caches the partitions of a program by fusion options. Not thread-safe.

    `others` are those of other forms of the program: fusion alternatives as well.
    """

    program: TensorProgram
    others: tuple[PartitionCache, ...] = ()
    footprints: Footprints = field(default_factory=dict, compare=False)
    _statements: dict[tuple[bool | frozenset[OperandCopy], ...], tuple[TensorExpr, ...]] = field(
        default_factory=dict, compare=False
    )
    _groups: dict[FusionOptions, Partition] = field(default_factory=dict, compare=False)

    @classmethod
    def of_forms(cls, forms: Forms) -> PartitionCache:
        """Return the cache of a program with all its forms."""
        return cls(forms[0], tuple(map(cls, forms[1:])))

    def groups(self, hw: HardwareSpec) -> Partition:
        """Return the default partition of the program for a device."""
        return self._partition(traits(hw))

    def partitions(self, hw: HardwareSpec, constraints: ScheduleConstraints = NO_CONSTRAINTS) -> tuple[Partition, ...]:
        """Return the fusion alternatives without operand copies, the default last or before unfused attention.

        The alternatives are those of other forms, unfused attention, squares of differences as products where that is
        allowed, dual-GEMM variants, transposed convolutions as GEMM and col2im, sums of blocks that are scaled in
        registers, and on a GPU outputs that their readers compute again where that makes fewer kernels.
        """
        options = self._plain_options(hw, constraints)
        default = [self._partition(option) for option in options]
        recomputed = [
            self._partition(replace(option, inline_outputs=True))
            for option in options
            if not option.is_cpu and len(self.program.outputs) > 1
        ]
        fewer = [groups for groups in recomputed if len(groups) < min(map(len, default))]
        dual_gemm = [
            self._partition(option.with_dual_gemm)
            for option, groups in zip(options, default, strict=True)
            if _may_have_dual_gemm(groups)
        ]
        return (
            *(groups for other in self.others for groups in other.partitions(hw, constraints)),
            *fewer,
            *self._with_col2im(options, default),
            *self._with_grouped_rows(options, hw),
            *self._with_packed_constants(options, default),
            *self._with_thin_nests(options, default),
            *self._with_scaled_sums(options, default, hw),
            *(groups for groups in dual_gemm if any(group.is_dual_gemm for group in groups)),
            *default,
        )

    def _with_col2im(self, options: list[FusionOptions], default: list[Partition]) -> list[Partition]:
        """Return the partitions with col2im that differ from the default ones."""
        if not self._has_transposed_convolution:
            return []
        found = [self._partition(replace(option, col2im=True)) for option in options]
        return [groups for groups in found if groups not in default]

    def _with_grouped_rows(self, options: list[FusionOptions], hw: HardwareSpec) -> list[Partition]:
        """Return the partitions of a GPU with grouped GEMMs, and those that differ where scales are factors of sums."""
        if not self._selects_matrices or any(option.is_cpu for option in options):
            return []
        grouped = [replace(option, group_rows=True) for option in options]
        found = [self._partition(option) for option in grouped]
        scaling = [replace(option, scale_partial_sums=True) for option in grouped if _scales_sums(hw)]
        scaled = [self._partition(option) for option in scaling]
        return [*found, *(groups for groups in scaled if groups not in found)]

    def _with_scaled_sums(self, options: list[FusionOptions], default: list[Partition], hw: HardwareSpec) -> list[Partition]:
        """Return the partitions with kernels that scale sums in registers, if the program has such sums."""
        outputs = {o.tensor for o in self.program.outputs}
        if not _scales_sums(hw) or not any(has_scaled_sum(self.statements(o), outputs, is_cpu=o.is_cpu) for o in options):
            return []
        scaling = [replace(option, scale_partial_sums=True) for option in options]
        constants = frozenset(self.program.constants)
        packing = [replace(option, packed_constants=constants) for option in scaling if option.is_cpu and constants]
        found = [self._partition(option) for option in (*packing, *scaling)]
        return [groups for groups in found if groups not in default]

    def _with_packed_constants(self, options: list[FusionOptions], default: list[Partition]) -> list[Partition]:
        """Return the partitions that pack the constants of products of few rows, and differ from the default ones."""
        constants = frozenset(self.program.constants)
        packed = [replace(option, packed_constants=constants) for option in options]
        return self._with_other_contractions(options, packed, default) if constants else []

    def _with_thin_nests(self, options: list[FusionOptions], default: list[Partition]) -> list[Partition]:
        """Return the partitions of a CPU whose contractions of few rows are nests, and that differ from the default ones."""
        if not any(group.kind is GroupKind.CONTRACTION for groups in default for group in groups):
            return []
        return self._with_other_contractions(options, [replace(option, has_thin_nests=True) for option in options], default)

    def _with_other_contractions(
        self, options: list[FusionOptions], changed: list[FusionOptions], default: list[Partition]
    ) -> list[Partition]:
        """Return the partitions of a CPU by changed options that find other contractions, and differ from the default ones."""
        found = [
            self._partition(other)
            for option, other in zip(options, changed, strict=True)
            if option.is_cpu and finds_other_contractions(self.program, self.statements(option), other, option)
        ]
        return [groups for groups in found if groups not in default]

    def unloadable_operands(
        self, groups: Partition, hw: HardwareSpec, constraints: ScheduleConstraints = NO_CONSTRAINTS
    ) -> frozenset[OperandCopy]:
        """Return the copies of all operands of a partition that no copy engine of the device can load."""
        return frozenset[OperandCopy]().union(*(unloadable_operands(group, hw, constraints) for group in groups))

    def with_operand_copies(
        self, groups: Partition, hw: HardwareSpec, constraints: ScheduleConstraints = NO_CONSTRAINTS
    ) -> Iterator[Partition]:
        """Yield the variants of a partition whose unloadable operands are copied first, with and without dual GEMM.

        There is none if a copy engine cannot load the copies either.
        """
        options = self._plain_options(hw, constraints)
        if self._has_transposed_convolution:
            options += [replace(option, col2im=True) for option in options]
        if self._selects_matrices:
            options += [replace(option, group_rows=True) for option in options]
        options += [replace(option, scale_partial_sums=True) for option in options if not option.col2im]
        option = next((o for o in options if self._partition(o) is groups), None)
        if option is None:
            for other in self.others:
                yield from other.with_operand_copies(groups, hw, constraints)
            return
        wanted = self.unloadable_operands(groups, hw, constraints)
        if not wanted:
            return
        for _ in range(MAX_COPY_ROUNDS):
            copying = replace(option, operand_copies=wanted)
            copied = self._partition(copying)
            missing = self.unloadable_operands(copied, hw, constraints)
            if not missing:
                dual_gemm = self._partition(copying.with_dual_gemm) if _may_have_dual_gemm(copied) else ()
                yield from (way for way in (dual_gemm,) if any(group.is_dual_gemm for group in way))
                yield copied
                return
            if {copy.operand for copy in missing} & {copy.operand for copy in wanted}:
                return
            wanted |= missing

    def partition_of_plan(self, plan: Plan, hw: HardwareSpec, constraints: ScheduleConstraints = NO_CONSTRAINTS) -> Partition:
        """Return the kernel groups of a plan: those that have its tile spaces as views.

        Raises InvariantError if no partition has, as of a plan that another version has made.
        """
        programs = [choice.program for choice in plan.choices]

        def has_views(groups: Partition) -> bool:
            return len(groups) == len(programs) and all(
                has_view(group, program, hw, constraints.winograd) for group, program in zip(groups, programs, strict=True)
            )

        plain = self.partitions(hw, constraints)
        copied = (way for groups in plain for way in self.with_operand_copies(groups, hw, constraints))
        found = next(filter(has_views, chain(plain, copied)), None)
        if found is None:
            raise InvariantError(f"no partition of the program has the tile spaces of the plan's {len(programs)} kernels")
        return found

    def _plain_options(self, hw: HardwareSpec, constraints: ScheduleConstraints) -> list[FusionOptions]:
        """Return the default options, and those that make other partitions.

        They have squares as products, no fused attention, or no signed bytes.
        """
        options = [traits(hw)]
        if constraints.streams:
            options.append(replace(options[0], separate_sums=True))
        if constraints.allow_expanded_squares and self.rounded_squares(hw):
            options.append(traits(hw, constraints))
        options += [
            replace(option, attention_dtypes=frozenset())
            for option in options
            if any(group.attention is not None for group in self._partition(option))
        ]
        if options[0].has_signed_bytes_only and any(type_.dtype is DType.UINT8 for type_ in self.program.types.values()):
            unsigned = replace(options[0], has_signed_bytes_only=False)
            options += [unsigned] if self._partition(unsigned) != self.groups(hw) else []
        return options

    @property
    def _has_transposed_convolution(self) -> bool:
        types = self.program.types
        return any(is_transposed_convolution(each, types) for each in self.program.statements)

    @property
    def _selects_matrices(self) -> bool:
        types = self.program.types
        return any(selects_matrices(each, types) for each in self.program.statements)

    def rounded_squares(self, hw: HardwareSpec) -> frozenset[str]:
        """Return the sums of squares of differences that are products only if the caller allows it."""
        statements = self.statements(traits(hw))
        types = dict(self.program.types) | {s.output: s.type for s in statements}
        return frozenset(s.output for s in statements if has_rounded_squares(s, types))

    def statements(self, options: FusionOptions) -> tuple[TensorExpr, ...]:
        """Return the normalized statements of the program."""
        form = (
            *(options.is_cpu, options.operand_copies, options.inline_outputs, options.col2im, options.group_rows),
            *(options.has_signed_bytes_only, options.scale_partial_sums, options.allow_expanded_squares),
        )
        statements = self._statements.get(form)
        if statements is None:
            statements = self._statements[form] = normalize_statements(self.program, options)
        return statements

    def _partition(self, options: FusionOptions) -> Partition:
        statements = self.statements(options)
        key = options if len(statements) > 1 else options.without_fusion
        groups = self._groups.get(key)
        if groups is None:
            groups = self._groups[key] = partition_statements(self.program, statements, options)
        return groups


def _may_have_dual_gemm(groups: Partition) -> bool:
    return sum(group.kind is GroupKind.CONTRACTION for group in groups) > 1


def _scales_sums(hw: HardwareSpec) -> bool:
    """Return whether kernels of a device may scale sums in registers."""
    return hw.family is TargetKind.CPU or any(unit.kind in SCALING_KINDS for unit in hw.units)


def traits(hw: HardwareSpec, constraints: ScheduleConstraints = NO_CONSTRAINTS) -> FusionOptions:
    attends_in = frozenset(u.in_dtype for u in hw.units if supports_attention(u, hw))
    is_signed = any(u.kind is UnitKind.MFMA and u.in_dtype is DType.INT8 for u in hw.units)
    return FusionOptions(
        hw.family is TargetKind.CPU,
        any(u.takes_fragments for u in hw.units),
        hw.num_cores,
        attends_in,
        has_signed_bytes_only=is_signed,
        allow_expanded_squares=constraints.allow_expanded_squares,
    )


def partition(program: TensorProgram, hw: HardwareSpec) -> Partition:
    """Partition a program into kernel groups in topological order, one kernel each (two if its reduction is split)."""
    return partition_statements(program, normalize_statements(program, traits(hw)), traits(hw))
