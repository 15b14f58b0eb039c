"""Matrix unit, architecture → how it adds products: aligned to the greatest of them, bits below cut off.

NVIDIA says nothing of it. Found on devices by Fasi, Higham, Mikaitis and Pranesh (Numerical behavior of NVIDIA tensor
cores, PeerJ CS 7:e330), by Khattak and Mikaitis (Accurate models of NVIDIA tensor cores, arXiv:2512.07004), and, bit
for bit on eight generations, by Xie and others (MMA-Sim, arXiv:2511.10909), whose figures these are. Of float8 on
Hopper DeepSeek-AI reports the same (DeepSeek-V3, arXiv:2412.19437, §3.3.2), on Ada SageAttention2 (arXiv:2411.10958).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from roller_svc.ir.dtype import DType
from roller_svc.ir.hardware import Arch, ComputeUnit, UnitKind

FLOAT32_BITS = 23
# float8 on wgmma, and on Ada's mma: bits behind the leading one of the greatest addend, and of a sum
FP8_ACCUMULATOR_BITS = 13
# Products of float8 that a short sum takes in before it is added up in float32: what CUTLASS takes by default
# (`mma_promotion_interval` of 4 instructions), and DeepSeek-V3.
FP8_PROMOTION_INTERVAL = 128
ADA, HOPPER = Arch("sm_", 89), Arch("sm_", 90)
_FULL_FP8_MMA = Arch("sm_", 120)  # with mma of float8 whose sums are as long as those of float16
_FLOAT8 = (DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2)
# first architecture → bits kept behind the greatest exponent's, bytes of k that are added at once
_GENERATIONS = ((Arch("sm_", 70), 23, 8), (Arch("sm_", 75), 24, 16), (HOPPER, 25, 32))


@dataclass(frozen=True, slots=True)
class AccumulatorPrecision:
    """`together` products and the sum so far are added as one: of each, what is less than 2^-`kept_bits` of the
    greatest one's power of two is cut off, and of the result all but `result_bits` of its fraction.

    `chain`: products that are added so before another sum begins; None: all of a result.
    """

    addend_bits: int
    result_bits: int
    products_per_add: int
    promotion_interval: int | None = None

    @property
    def is_reduced_precision(self) -> bool:
        """Whether sums have fewer bits than a float32."""
        return self.result_bits < FLOAT32_BITS

    @property
    def rounding_loss(self) -> float:
        """What a product's addition takes off at most, in parts of the sum that it is added to."""
        return 2.0**-self.addend_bits + 2.0**-self.result_bits / self.products_per_add


def accumulator_precision(unit: ComputeUnit, arch: Arch) -> AccumulatorPrecision | None:
    """None where nothing is cut off: integers, float64, scalar lanes; and AMD's units, which are not looked at."""
    wanted = unit.kind in (UnitKind.MMA, UnitKind.WGMMA) and unit.acc_dtype is DType.FLOAT32
    known = [(bits, size) for first, bits, size in _GENERATIONS if arch.prefix == first.prefix and arch >= first]
    if not wanted or not known:
        return None
    bits, size = known[-1]
    if unit.in_dtype not in _FLOAT8:
        return AccumulatorPrecision(bits, FLOAT32_BITS, size // unit.in_dtype.bytes)
    if unit.kind is UnitKind.WGMMA or arch.number == ADA.number:
        return AccumulatorPrecision(FP8_ACCUMULATOR_BITS, FP8_ACCUMULATOR_BITS, size, FP8_PROMOTION_INTERVAL)
    # before sm_120 the assembler makes two products of float16 of one of float8
    return AccumulatorPrecision(bits, FLOAT32_BITS, size if arch >= _FULL_FP8_MMA else size // DType.FLOAT16.bytes)


def least_precise(units: Iterable[ComputeUnit], arch: Arch) -> AccumulatorPrecision | None:
    """Of the sums of those units the ones that lose most; None where none loses anything."""
    found = [sums for unit in units if (sums := accumulator_precision(unit, arch)) is not None]
    return max(found, key=lambda sums: sums.rounding_loss, default=None)
