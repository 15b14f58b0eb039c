"""How the operands of a contraction lie in memory, and what a CPU's task copies of them: model and lowering agree."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

from roller_svc.analysis.operand import Operand, operands
from roller_svc.ir.affine import Affine, affine
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Expr
from roller_svc.ir.group import AxisRole, KernelGroup, TileAxis
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.program import TensorType
from roller_svc.perf.workload import Workload

# Panels of B up to which rows of A are read where they lie: a copy would be used too seldom.
MAX_UNPACKED_PANELS = 2
# Bytes after which addresses share a set of the first cache, and lines that a set holds.
L1_SET_PERIOD_BYTES, L1_WAYS = 4096, 8
# Of these, what rows of A that are read side by side leave to B and C.
FREE_WAYS = 4
# Share of L2 that the packed rows of A may fill; the rest is for panels of B, C and the system.
L2_BLOCK_FRACTION = 0.4
# Panels of A up to which the first one that meets a panel of B packs it: 4 of them gained 30 to 50 %, 8 gained 9 to 22,
# 12 gained 3 to 12, 16 nothing. All of B must be near: that was so up to an eighth of the last cache; at a quarter
# nothing was gained, beyond it a fifth lost.
FIRST_USE_PANELS, FIRST_USE_LLC_FRACTION = 12, 0.25
# Share that packed columns of B may fill to be met by one panel of A after the other: 540 KiB of 1 MiB was faster by an
# eighth than panels of B that meet all of A one after the other, 750 KiB slower.
L2_COLUMNS_FRACTION = 0.6


class OperandLayout(Enum):
    """How a panel, neighbours along m or n for every k, comes from memory."""

    PANEL_MAJOR = "along panel"  # neighbours of the panel are neighbours there
    K_MAJOR = "along k"  # neighbours along k are: vectors must be transposed
    STRIDED = "apart"  # computed, or looked up element by element


@dataclass(frozen=True, slots=True)
class CpuOperand:
    """`plain`: a load of the packed type with nothing to test, which a micro-kernel can read where it lies.
    `panel_stride`, `k_stride`: elements from one of a panel, or one k, to the next; of plain ones. `constant`: packed
    once for all calls. `tensor_bytes`: of all of the tensor, of plain ones. `member_strides`: elements from one value
    of each member of a fused axis to the next; empty where addresses are no such sums."""

    layout: OperandLayout
    plain: bool
    panel_stride: int
    k_stride: int
    constant: bool = False
    tensor_bytes: int = 0
    member_strides: tuple[int, ...] = ()


def cpu_operands(group: KernelGroup, packed: tuple[DType, DType] | None = None) -> tuple[CpuOperand, CpuOperand]:
    """Of a contraction, a and b, of which elements of these types are packed; None: of the type of its sums."""
    (m,), (n,), (k,) = (group.space.role(role) for role in (AxisRole.M, AxisRole.N, AxisRole.K))
    types, dtype = dict(group.inputs), group.space.compute_dtype
    both = zip(operands(group), (m, n), packed or (dtype, dtype), strict=True)
    lies = [_cpu_operand(operand, (axis, k), types, dtype) for operand, axis, dtype in both]
    constant = [
        all(x.constant for x in group.space.accesses if x.operand == name) for name in ("a", "b")
    ]  # fmt: skip
    a, b = (replace(lie, constant=stays) for lie, stays in zip(lies, constant, strict=True))
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
    plain = address is not None and operand.guard is None and operand.memory_dtype is dtype and len(k.members) == 1
    size = types[source.tensor].dtype.bytes * math.prod(types[source.tensor].shape) if plain else 0
    deeper = address.coeff(k.members[0].name) if plain and address is not None else 0
    if operand.k_major:
        return CpuOperand(
            OperandLayout.K_MAJOR if deeper == 1 else OperandLayout.STRIDED, plain, moved, deeper, tensor_bytes=size
        )
    return CpuOperand(
        OperandLayout.PANEL_MAJOR if moved == 1 else OperandLayout.STRIDED, plain, moved, deeper, tensor_bytes=size
    )


def _address(index: tuple[Expr, ...], shape: tuple[int, ...]) -> Affine | None:
    """Offset in elements; None where an index is no sum of axes."""
    known = [affine(i) for i in index]
    total: dict[str, int] = {}
    for d, part in enumerate(known):
        if part is None:
            return None
        for name, c in part.coeffs:
            total[name] = total.get(name, 0) + c * math.prod(shape[d + 1 :])
    return Affine(tuple(total.items()))


def rows_per_block(rows: int, mr: int, kc: int, elem_bytes: int, l2_bytes: int) -> int:
    """Rows of A that a task packs for one sweep over its panels of B: whole register tiles, in about equal blocks that
    L2 has room for (mc of Goto and van de Geijn, Anatomy of High-Performance Matrix Multiplication, 2008)."""
    panels = math.ceil(rows / mr)
    room = max(1, int(L2_BLOCK_FRACTION * l2_bytes / (mr * kc * elem_bytes)))
    return math.ceil(panels / math.ceil(panels / room)) * mr


def columns_fit_l2(columns: int, kc: int, elem_bytes: int, l2_bytes: int) -> bool:
    """Whether L2 has room for a task's packed columns of B: then one panel of A after the other meets all of them."""
    return columns * kc * elem_bytes <= L2_COLUMNS_FRACTION * l2_bytes


def packs_b_on_first_use(panels: int, panels_bytes: int, piece_bytes: int, b_bytes: int, hw: HardwareSpec) -> bool:
    """Whether one panel of B after the other meets all panels of A, the first of them packing it: then B arrives beside
    multiply-adds, and its panel is near until it has met the last row. For a task of so many `panels` of A, whose k are
    all one step; a panel has pieces of `piece_bytes` of B's rows.

    Pieces come slower than whole rows, so that this gains where a sweep over a panel is short. Those of one line or
    less, two where rows begin anywhere, come too slowly: for 64 x 1500 x 512 a quarter was lost.
    """
    if (
        panels_bytes > L2_BLOCK_FRACTION * hw.block_level.capacity_bytes
        or piece_bytes <= hw.block_level.transaction_bytes
    ):
        return False
    return panels <= FIRST_USE_PANELS and b_bytes <= FIRST_USE_LLC_FRACTION * hw.levels[1].capacity_bytes


def skips_packing_of_a(nc: int, tile: tuple[int, int, int], row_bytes: int, elem_bytes: int, l2_bytes: int) -> bool:
    """Whether rows of A, `row_bytes` apart, neighbours in memory along k, are read from memory by the micro-kernel: for
    a task of `nc` columns in tiles of (mr, nr, kc).

    Where L2 holds the task's columns, each row is near while it meets all of them, and comes while the one before it
    is multiplied. A copy takes the place of rows that would crowd a set of the first cache.
    """
    mr, nr, kc = tile
    if math.ceil(nc / nr) <= MAX_UNPACKED_PANELS:
        return True
    return columns_fit_l2(nc, kc, elem_bytes, l2_bytes) and lines_per_set(mr, row_bytes) <= L1_WAYS - FREE_WAYS


def lines_per_set(rows: int, row_bytes: int) -> int:
    """How many of so many rows have their lines in one set of the first cache."""
    return math.ceil(rows * math.gcd(row_bytes, L1_SET_PERIOD_BYTES) / L1_SET_PERIOD_BYTES)


def prepare(group: KernelGroup, base: Workload[None]) -> Workload[None] | None:
    """Prepare a contraction on a CPU; None for any other group or device."""
    return base if not base.machine.is_gpu and base.is_contraction else None
