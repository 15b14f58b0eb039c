"""Memory layout of a contraction's operands, and what a CPU task packs of them; the model and the schedule agree."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from roller_svc.analysis.operand import Operand, operands
from roller_svc.ir.affine import Affine, affine
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Expr
from roller_svc.ir.group import AxisRole, KernelGroup, TileAxis
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.program import TensorType
from roller_svc.perf.workload import OperandFootprint, Workload

# Panels of B up to which A is not packed: a packed copy would be reused too little.
MAX_UNPACKED_PANELS = 2
# Bytes after which addresses share an L1 set: a page, as L1 is indexed by virtual addresses.
L1_SET_PERIOD_BYTES = 4096
# Ways that unpacked rows of A must leave to B and C.
FREE_WAYS = 4
# Fraction of L2 for packed rows of A; the rest is for panels of B, C and the system.
L2_BLOCK_FRACTION = 0.4
# Packing B on first use pays up to this many panels of A, while B fits in this fraction of the LLC.
FIRST_USE_PANELS, FIRST_USE_LLC_FRACTION = 12, 0.25
# Fraction of L2 for packed columns of B, up to which the loop over rows of A is the outer one.
L2_COLUMNS_FRACTION = 0.6


WIDENED = (DType.FLOAT16, DType.BFLOAT16)  # types of operands that are transposed as float32


class OperandLayout(Enum):
    """Layout in memory of a panel: elements along m or n, for every k."""

    PANEL_MAJOR = "along panel"  # contiguous along the panel
    K_MAJOR = "along k"  # contiguous along k: vectors must be transposed
    STRIDED = "apart"  # computed, or looked up element by element


@dataclass(frozen=True, slots=True)
class CpuOperand:
    """Layout of one operand."""

    layout: OperandLayout
    plain: bool  # a load of the packed type without guard, which a micro-kernel can read unpacked
    panel_stride: int  # elements between neighbours of a panel, if plain
    k_stride: int  # elements between neighbours along k, if plain
    constant: bool = False  # packed once for all calls
    tensor_bytes: int = 0  # of the whole tensor, if plain
    member_strides: tuple[int, ...] = ()  # elements between values of each member of a fused axis; empty if not affine


def cpu_operands(group: KernelGroup, packed: tuple[DType, DType] | None = None) -> tuple[CpuOperand, CpuOperand]:
    """Return the layouts of A and B. `packed`: their packed types; None: the accumulator's."""
    (m,), (n,), (k,) = (group.space.role(role) for role in (AxisRole.M, AxisRole.N, AxisRole.K))
    types, dtype = dict(group.inputs), group.space.compute_dtype
    both = zip(operands(group), (m, n), packed or (dtype, dtype), strict=True)
    layouts = [_cpu_operand(operand, (axis, k), types, dtype) for operand, axis, dtype in both]
    constant = [
        all(x.constant for x in group.space.accesses if x.operand == name) for name in ("a", "b")
    ]  # fmt: skip
    a, b = (replace(layout, constant=stays) for layout, stays in zip(layouts, constant, strict=True))
    return a, b


def _cpu_operand(
    operand: Operand, axes: tuple[TileAxis, TileAxis], types: Mapping[str, TensorType], dtype: DType
) -> CpuOperand:
    axis, k = axes
    source = operand.source
    address = None if source is None else _address(source.index, types[source.tensor].shape)
    if source is None or len(axis.members) > 1:
        strides = tuple(address.coeff(member.name) for member in axis.members) if address is not None else ()
        return CpuOperand(OperandLayout.STRIDED, plain=False, panel_stride=0, k_stride=0, member_strides=strides)
    moved = 0 if address is None else address.coeff(axis.members[0].name)
    is_affine = address is not None and operand.guard is None and len(k.members) == 1
    plain = is_affine and operand.memory_dtype is dtype
    is_widened = is_affine and dtype is DType.FLOAT32 and operand.memory_dtype in WIDENED
    size = types[source.tensor].dtype.bytes * math.prod(types[source.tensor].shape) if plain else 0
    deeper = address.coeff(k.members[0].name) if (plain or is_widened) and address is not None else 0
    if operand.k_major:
        return CpuOperand(
            OperandLayout.K_MAJOR if deeper == 1 else OperandLayout.STRIDED, plain, moved, deeper, tensor_bytes=size
        )
    return CpuOperand(
        OperandLayout.PANEL_MAJOR if moved == 1 else OperandLayout.STRIDED, plain, moved, deeper, tensor_bytes=size
    )


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


def rows_per_block(rows: int, mr: int, kc: int, elem_bytes: int, l2_bytes: int) -> int:
    """Return the rows of A that a task packs per sweep over panels of B.

    Whole register tiles in about equal blocks that fit in L2 (mc of Goto and van de Geijn, Anatomy of High-Performance
    Matrix Multiplication, 2008).
    """
    panels = math.ceil(rows / mr)
    max_panels = max(1, int(L2_BLOCK_FRACTION * l2_bytes / (mr * kc * elem_bytes)))
    return math.ceil(panels / math.ceil(panels / max_panels)) * mr


def columns_fit_l2(columns: int, kc: int, elem_bytes: int, l2_bytes: int) -> bool:
    """Return whether L2 holds a task's packed columns of B, so that the loop over panels of A is the outer one."""
    return columns * kc * elem_bytes <= L2_COLUMNS_FRACTION * l2_bytes


def loops_over_rows_first(
    rows: int, columns: int, kc: int, elem_bytes: int, l2_bytes: int, *, b_is_constant: bool
) -> bool:
    """Return whether the loop over panels of A is the outer one, for `rows` of A at once and a task's `columns` of B.

    L2 then holds the columns. Prepacked columns come from L3: each panel is read once instead, while the one before is
    multiplied by rows that L2 holds.
    """
    if b_is_constant and rows * kc * elem_bytes <= L2_BLOCK_FRACTION * l2_bytes:
        return False
    return columns_fit_l2(columns, kc, elem_bytes, l2_bytes)


def packs_b_on_first_use(panels: int, panels_bytes: int, piece_bytes: int, b_bytes: int, hw: HardwareSpec) -> bool:
    """Return whether the first panel of A that uses a panel of B packs it.

    B then arrives during multiply-adds, and its panel stays in cache until the last row has used it. The task has
    `panels` panels of A whose k is one block; a panel has segments of `piece_bytes` of B's rows.

    Segments arrive slower than whole rows, so this pays where a sweep over a panel is short. Segments of a line or less
    are too slow.
    """
    if (
        panels_bytes > L2_BLOCK_FRACTION * hw.block_level.capacity_bytes
        or piece_bytes <= hw.block_level.transaction_bytes
    ):
        return False
    return panels <= FIRST_USE_PANELS and b_bytes <= FIRST_USE_LLC_FRACTION * hw.levels[1].capacity_bytes


def skips_packing_of_a(nc: int, tile: tuple[int, int, int], row_bytes: int, elem_bytes: int, hw: HardwareSpec) -> bool:
    """Return whether the micro-kernel reads unpacked rows of A, K-major and `row_bytes` apart.

    For a task of `nc` columns in tiles of (mr, nr, kc). Where L2 holds the task's columns, each row stays in cache
    while all of them use it, and arrives during the row before it. Rows that would conflict in an L1 set are packed.
    """
    mr, nr, kc = tile
    if math.ceil(nc / nr) <= MAX_UNPACKED_PANELS:
        return True
    fits_l2 = columns_fit_l2(nc, kc, elem_bytes, hw.block_level.capacity_bytes)
    return fits_l2 and lines_per_set(mr, row_bytes) <= count_l1_ways(hw) - FREE_WAYS


def count_l1_ways(hw: HardwareSpec) -> int:
    """Return the lines of an L1 set."""
    return hw.levels[-2].capacity_bytes // L1_SET_PERIOD_BYTES


def lines_per_set(rows: int, row_bytes: int) -> int:
    """Return how many of those rows have their lines in one L1 set."""
    return math.ceil(rows * math.gcd(row_bytes, L1_SET_PERIOD_BYTES) / L1_SET_PERIOD_BYTES)


@dataclass(frozen=True, slots=True)
class PanelLayouts:
    """Layouts of the operands' panels, as far as the strides of their tensors tell."""

    a: OperandLayout
    b: OperandLayout


def prepare(group: KernelGroup, base: Workload[None]) -> Workload[PanelLayouts] | None:
    """Prepare a contraction on a CPU; None for any other group or device."""
    if base.machine.is_gpu or not base.is_contraction:
        return None
    return base.with_facts(PanelLayouts(_panel_layout(base, base.a, base.m), _panel_layout(base, base.b, base.n)))


def _panel_layout(p: Workload[None], operand: OperandFootprint, panel_axis: int | None) -> OperandLayout:
    strides = [tensor.strides for tensor in operand.tensors]
    if panel_axis is None or count_members(p, panel_axis) > 1 or len(strides) != 1:
        return OperandLayout.STRIDED
    if strides[0].get(panel_axis) == 1:
        return OperandLayout.PANEL_MAJOR
    dtypes = {tensor.access.dtype for tensor in operand.tensors}
    is_transposed = operand.elem_bytes * p.machine.unit.k_group == p.elem_bytes or (
        p.space.compute_dtype is DType.FLOAT32 and dtypes <= set(WIDENED)
    )
    single = p.k is not None and count_members(p, p.k) == 1 and is_transposed
    return OperandLayout.K_MAJOR if single and p.k is not None and strides[0].get(p.k) == 1 else OperandLayout.STRIDED


def count_members(p: Workload[Any], axis: int | None) -> int:
    """Return the number of members of an axis with more than one value; 1 without an axis."""
    return 1 if axis is None else len([m for m in p.space.axes[axis].members if m.extent > 1])
