"""Memory layout of a contraction's operands on a CPU."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from roller_svc.analysis.operand import Operand, operands
from roller_svc.families.common.cpu.dot import DotOperands, dot_operands
from roller_svc.families.cpu.contraction.packed_columns import PackedColumns, packed_columns
from roller_svc.families.cpu.contraction.packed_words import PackedWords, packed_words
from roller_svc.ir.affine import Affine, affine
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Expr, Select, axes_of, iter_subexpressions
from roller_svc.ir.group import AxisRole, KernelGroup, TileAxis
from roller_svc.ir.program import TensorType
from roller_svc.perf.workload import Workload

WIDENED = (DType.FLOAT16, DType.BFLOAT16)  # types of operands that are transposed as float32
BYTES = (DType.INT8, DType.UINT8)  # types of operands whose rows are widened to int16 before they are transposed


class OperandLayout(Enum):
    """Layout in memory of a panel: elements along m or n, for every k."""

    PANEL_MAJOR = "along panel"  # contiguous along the panel
    K_MAJOR = "along k"  # contiguous along k: vectors must be transposed
    STRIDED = "apart"  # computed, or looked up element by element


@dataclass(frozen=True, slots=True)
class CpuOperand:
    """Layout of one operand."""

    layout: OperandLayout
    plain: bool  # a load of the packed type without guard, with one stride along k
    panel_stride: int  # elements between neighbours of a panel, if plain
    k_stride: int  # elements between neighbours along k, if plain
    constant: bool = False  # packed once for all calls
    tensor_bytes: int = 0  # of the whole tensor, if plain
    member_strides: tuple[int, ...] = ()  # elements between values of each member of a fused axis; empty if not affine
    guards_fused_k: bool = False  # a guard depends on members of k, which a word divides for each of its elements


COMPUTED = CpuOperand(OperandLayout.STRIDED, plain=False, panel_stride=0, k_stride=0)


def cpu_operands(group: KernelGroup, packed: tuple[DType, DType] | None = None) -> tuple[CpuOperand, CpuOperand]:
    """Return the layouts of A and B. `packed`: their packed types; None: the accumulator's.

    Operands that a group does not name are looked up element by element.
    """
    if group.operands is None:
        return COMPUTED, COMPUTED
    (m,), (n,), (k,) = (group.space.role(role) for role in (AxisRole.M, AxisRole.N, AxisRole.K))
    types, dtype = dict(group.inputs), group.product_sum_dtype
    both = zip(operands(group), (m, n), packed or (dtype, dtype), strict=True)
    layouts = [
        replace(_cpu_operand(operand, (axis, k), types, dtype), guards_fused_k=_guards_fused_k(operand, k))
        for operand, axis, dtype in both
    ]
    constant = [all(x.constant for x in group.space.accesses if x.operand == name) for name in ("a", "b")]
    a, b = (replace(layout, constant=stays) for layout, stays in zip(layouts, constant, strict=True))
    return a, b


def _cpu_operand(operand: Operand, axes: tuple[TileAxis, TileAxis], types: Mapping[str, TensorType], dtype: DType) -> CpuOperand:
    axis, k = axes
    source = operand.source
    address = None if source is None else _address(source.index, types[source.tensor].shape)
    if source is None or len(axis.members) > 1:
        strides = tuple(address.coeff(member.name) for member in axis.members) if address is not None else ()
        return CpuOperand(OperandLayout.STRIDED, plain=False, panel_stride=0, k_stride=0, member_strides=strides)
    moved = 0 if address is None else address.coeff(axis.members[0].name)
    along_k = None if address is None else _stride_along(k, address)
    is_affine = operand.guard is None and along_k is not None
    plain = is_affine and operand.memory_dtype is dtype
    is_widened = is_affine and dtype is DType.FLOAT32 and operand.memory_dtype in WIDENED
    # elements of fused members are computed one by one
    is_widened = is_widened or (is_affine and dtype is DType.INT16 and operand.memory_dtype in BYTES and len(k.members) == 1)
    size = types[source.tensor].dtype.bytes * math.prod(types[source.tensor].shape) if plain else 0
    deeper = along_k if (plain or is_widened) and along_k is not None else 0
    if operand.k_major:
        return CpuOperand(OperandLayout.K_MAJOR if deeper == 1 else OperandLayout.STRIDED, plain, moved, deeper, tensor_bytes=size)
    return CpuOperand(OperandLayout.PANEL_MAJOR if moved == 1 else OperandLayout.STRIDED, plain, moved, deeper, tensor_bytes=size)


def _guards_fused_k(operand: Operand, k: TileAxis) -> bool:
    members = {member.name for member in k.members if member.extent > 1}
    guards = (part.cond for part in iter_subexpressions(operand.expr) if isinstance(part, Select))
    return len(members) > 1 and any(not members.isdisjoint(axes_of(guard)) for guard in guards)


def _stride_along(axis: TileAxis, address: Affine) -> int | None:
    """Return the elements between neighbours along a fused axis; None where rows of a member do not follow each other."""
    stride = step = address.coeff(axis.members[-1].name)
    for member in reversed(axis.members):
        if address.coeff(member.name) != step:
            return None
        step *= member.extent
    return stride


def _address(index: tuple[Expr, ...], shape: tuple[int, ...]) -> Affine | None:
    """Return the address in elements; None where an index is not affine."""
    known = [affine(i) for i in index]
    total: dict[str, int] = {}
    for d, part in enumerate(known):
        if part is None:
            return None
        for name, c in part.coeffs:
            total[name] = total.get(name, 0) + c * math.prod(shape[d + 1 :])
    return Affine(tuple(total.items()))


@dataclass(frozen=True, slots=True)
class ContractionFacts:
    """Layouts of both operands, their packed types where the unit has dot-product instructions, and few bits of B."""

    a: CpuOperand
    b: CpuOperand
    dot: DotOperands | None
    packed_b: PackedColumns | None = None  # of a constant B that float units multiply
    packed_words: PackedWords | None = None  # of a constant B that dot products multiply

    @property
    def has_packed_columns(self) -> bool:
        """Whether panels of B may have integers of few bits, from which the micro-kernel computes what it multiplies."""
        return self.packed_b is not None or self.packed_words is not None


def prepare(group: KernelGroup, base: Workload[None]) -> Workload[ContractionFacts] | None:
    """Prepare a contraction on a CPU; None for any other group or device."""
    if base.machine.is_gpu or not base.is_contraction:
        return None
    dot = dot_operands(base.machine.unit, group)
    a, b = cpu_operands(group, None if dot is None else (dot.a, dot.b))
    factors, space = group.operands, group.space
    if not b.constant or factors is None or factors.b2 is not None or space.k_bounds is not None:
        return base.with_facts(ContractionFacts(a, b, dot))
    operand, (k,) = factors.a if space.transposed else factors.b, space.role(AxisRole.K)
    if dot is not None:
        words = None if space.scale_runs is None else packed_words(operand, k, dot)  # else a column has one sum
        return base.with_facts(ContractionFacts(a, b, dot, packed_words=words))
    is_float = space.compute_dtype is DType.FLOAT32 and not factors.scales
    return base.with_facts(ContractionFacts(a, b, dot, packed_columns(operand, k.members) if is_float else None))


def count_members(p: Workload[Any], axis: int | None) -> int:
    """Return the number of members of an axis with more than one value; 1 without an axis."""
    return 1 if axis is None else len([m for m in p.space.axes[axis].members if m.extent > 1])
