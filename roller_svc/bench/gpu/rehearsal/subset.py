"""What a rehearsal does of everything: a few checks of each family, a few cases of all kinds."""

from __future__ import annotations

from collections.abc import Sequence

from roller_svc.bench.gpu.cases.check import Check
from roller_svc.bench.gpu.samples import TimedCase, data_bytes

CHECKS_PER_FAMILY = 2
EMULATED_BYTES = 2 << 20  # of the arrays of a case: a larger one has times, and no results
CASE_STRIDE = 5  # of the other cases


def rehearsal_checks(every: Sequence[Check]) -> list[Check]:
    """The first of each family, but for those that fill a device, which no emulator runs."""
    families: dict[str, list[Check]] = {}
    for check in every:
        if not check.family.endswith("-large"):
            families.setdefault(check.family, []).append(check)
    return [check for of_family in families.values() for check in of_family[:CHECKS_PER_FAMILY]]


def rehearsal_cases(every: Sequence[TimedCase]) -> list[TimedCase]:
    """Small ones first, whose results are judged; then some of the others, whose times alone are known."""
    small = [case for case in every if data_bytes(case.program()) <= EMULATED_BYTES]
    return [*small, *[case for case in every if case not in small][::CASE_STRIDE]]
