"""Accumulator precision of matrix units: addends are aligned to the largest one, and lower bits are truncated.

NVIDIA does not document it. It was measured by Fasi, Higham, Mikaitis and Pranesh (Numerical behavior of NVIDIA tensor
cores, PeerJ CS 7:e330), by Khattak and Mikaitis (Accurate models of NVIDIA tensor cores, arXiv:2512.07004), and, bit
for bit on eight generations, by Xie et al. (MMA-Sim, arXiv:2511.10909), whose numbers these are. DeepSeek-AI reports
the same of float8 on Hopper (DeepSeek-V3, arXiv:2412.19437, §3.3.2), SageAttention2 on Ada (arXiv:2411.10958).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from roller_svc.ir.dtype import DType
from roller_svc.ir.hardware import Arch, ComputeUnit, UnitKind

FLOAT32_BITS = 23
# float8 on wgmma, and on mma of Ada: fraction bits of aligned addends, and of the accumulator
FP8_ACCUMULATOR_BITS = 13
# Products of float8 that are accumulated before promotion to float32: the default of CUTLASS
# (`mma_promotion_interval` of 4 instructions) and of DeepSeek-V3.
FP8_PROMOTION_INTERVAL = 128
ADA, HOPPER = Arch("sm_", 89), Arch("sm_", 90)
_FULL_FP8_MMA = Arch("sm_", 120)  # mma of float8 accumulates as precisely as that of float16
_FLOAT8 = (DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2)
# (first architecture, fraction bits of aligned addends, bytes along k that are added at once)
_GENERATIONS = ((Arch("sm_", 70), 23, 8), (Arch("sm_", 75), 24, 16), (HOPPER, 25, 32))


@dataclass(frozen=True, slots=True)
class AccumulatorPrecision:
    """How a matrix unit accumulates.

    `products_per_add` products and the accumulator are added at once. Each addend is truncated below 2^-`addend_bits`
    of the largest one's power of two. The result keeps `result_bits` of its fraction.
    """

    addend_bits: int
    result_bits: int
    products_per_add: int
    promotion_interval: int | None = None  # products before promotion to a float32 accumulator; None: no promotion

    @property
    def is_reduced_precision(self) -> bool:
        """Return whether the accumulator has fewer bits than a float32."""
        return self.result_bits < FLOAT32_BITS

    @property
    def rounding_loss(self) -> float:
        """Return the largest error of adding one product, relative to the accumulator."""
        return 2.0**-self.addend_bits + 2.0**-self.result_bits / self.products_per_add


def accumulator_precision(unit: ComputeUnit, arch: Arch) -> AccumulatorPrecision | None:
    """Return None where nothing is truncated (integers, float64, FMA units) or nothing is known (AMD)."""
    is_modelled = unit.kind in (UnitKind.MMA, UnitKind.WGMMA) and unit.acc_dtype is DType.FLOAT32
    generations = [(bits, size) for first, bits, size in _GENERATIONS if arch.prefix == first.prefix and arch >= first]
    if not is_modelled or not generations:
        return None
    bits, size = generations[-1]
    if unit.in_dtype not in _FLOAT8:
        return AccumulatorPrecision(bits, FLOAT32_BITS, size // unit.in_dtype.bytes)
    if unit.kind is UnitKind.WGMMA or arch.number == ADA.number:
        return AccumulatorPrecision(FP8_ACCUMULATOR_BITS, FP8_ACCUMULATOR_BITS, size, FP8_PROMOTION_INTERVAL)
    # before sm_120 the assembler splits an mma of float8 into two of float16
    return AccumulatorPrecision(bits, FLOAT32_BITS, size if arch >= _FULL_FP8_MMA else size // DType.FLOAT16.bytes)


def least_precise(units: Iterable[ComputeUnit], arch: Arch) -> AccumulatorPrecision | None:
    """Return the lowest precision among the units, or None if none truncates."""
    precisions = [precision for unit in units if (precision := accumulator_precision(unit, arch)) is not None]
    return max(precisions, key=lambda precision: precision.rounding_loss, default=None)
