"""What a warp multiplies at once on a matrix unit, and how much of it each lane holds.

Families of units differ in this alone: `mma.sync` of NVIDIA's devices and MFMA of AMD's are one family of kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from roller_svc.ir.hardware import ComputeUnit, UnitKind

REGISTER_BYTES, WAVE = 4, 64
LANE_SUMS = 4


@dataclass(frozen=True, slots=True)
class Fragment:
    """`rows` x `columns` sums, four a lane, of products over `step_bytes` along k. `a_words`, `b_words`: of a lane.

    `transposes`: operands that lie along m or n in shared memory are turned on their way into registers; else all lie
    along k. `b_loads`: instructions that load a fragment of B. `row_skew_words`: between rows of sums in shared memory,
    modulo the banks, so that lanes which store at once meet different ones.
    """

    rows: int
    columns: int
    step_bytes: int
    lanes: int
    a_words: int
    b_words: int
    transposes: bool
    b_loads: float
    row_skew_words: int

    @property
    def is_square(self) -> bool:
        """Whether a lane's sums are one below the other, as those of 16 x 16 are, not in pairs side by side."""
        return self.rows == self.columns


# Of every operand type (PTX ISA, "Matrix Fragments for mma.m16n8k16"). ldmatrix brings two fragments of B. The eight
# lanes of a quarter warp store pairs.
MMA_SYNC = Fragment(
    rows=16, columns=8, step_bytes=32, lanes=32, a_words=4, b_words=2, transposes=True, b_loads=0.5, row_skew_words=8
)


@lru_cache(maxsize=64)
def fragment_of(unit: ComputeUnit) -> Fragment:
    """The fragments that a unit whose instructions warps issue is given."""
    if unit.kind is not UnitKind.MFMA:
        return MMA_SYNC
    # V_MFMA_*_16X16Xk: lane l has the l / 16-th quarter along k of row, or column, l % 16, and of the sums four rows of
    # one column (AMD Instinct MI200 ISA, "Matrix Arithmetic Instructions"). Two rows of 16 lanes store at once, four
    # rows of sums apart.
    rows, columns, k = unit.shape
    step_bytes = k * unit.in_dtype.bytes
    words = rows * step_bytes // (REGISTER_BYTES * WAVE)
    return Fragment(rows, columns, step_bytes, WAVE, words, words, transposes=False, b_loads=1.0, row_skew_words=4)


def mfma_refusal(unit: ComputeUnit) -> str:
    """Why MFMA instructions of that shape are not used; '' where they are."""
    rows, columns, k = unit.shape
    if (rows, columns) != (16, 16):
        return f"instructions of {rows} x {columns}, kernels are made of 16 x 16"
    held = rows * k * unit.in_dtype.bytes
    return "" if held % (REGISTER_BYTES * WAVE) == 0 else f"lanes do not hold whole words of {rows} x {k} elements"
