"""Select a few checks of each family and a few cases for a rehearsal."""

from __future__ import annotations

from collections.abc import Sequence

from roller_bench.gpu.cases.check import Check
from roller_bench.gpu.samples import TimedCase, data_bytes

CHECKS_PER_FAMILY = 2
EMULATED_BYTES = 2 << 20  # array bytes of a case; the emulator does not run larger ones
CASE_STRIDE = 5  # every nth of the larger cases


def rehearsal_checks(candidates: Sequence[Check]) -> list[Check]:
    """Return the first checks of each family, without large ones, which the emulator cannot run."""
    families: dict[str, list[Check]] = {}
    for check in candidates:
        if not check.family.endswith("-large"):
            families.setdefault(check.family, []).append(check)
    return [check for of_family in families.values() for check in of_family[:CHECKS_PER_FAMILY]]


def rehearsal_cases(candidates: Sequence[TimedCase]) -> list[TimedCase]:
    """Return the small cases, whose results are checked, then some larger ones, which are only timed."""
    small = [case for case in candidates if data_bytes(case.program()) <= EMULATED_BYTES]
    return [*small, *[case for case in candidates if case not in small][::CASE_STRIDE]]
