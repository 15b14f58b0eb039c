"""Which groups are scans on a CPU, and along which axis vectors lie."""

from __future__ import annotations

from dataclasses import dataclass

from roller_svc.analysis.scans import LinearStep, Scan, match_scan
from roller_svc.fusion.split.scan import may_split_scan, scan_totals
from roller_svc.ir.group import GroupKind, KernelGroup
from roller_svc.ir.program import Combine, TensorExpr
from roller_svc.perf.workload import Workload


@dataclass(frozen=True, slots=True)
class ScanSpace:
    """A scan as rules, cost and schedule see it. Axes are positions in the tile space.

    Tensors are contiguous along the scan, or along `column`, of which each lane of a vector has a point.
    """

    scan: Scan
    along: int
    column: int | None
    may_split: bool  # whether rows may be cut into pieces
    totals: tuple[TensorExpr, ...] | None  # state and product of gates after all steps, where these alone are stored
    is_composed: bool  # whether the steps of the recurrence are compositions of several

    @property
    def step(self) -> LinearStep | None:
        """Return the step of a linear recurrence; None for other scans."""
        return self.scan.step

    @property
    def has_slow_chain(self) -> bool:
        """Whether an operation takes several cycles, so that elements should not wait for each other.

        A maximum is one comparison, whose outcome a core predicts.
        """
        is_sum = self.scan.combine is Combine.SUM and self.scan.statement.accumulator.is_float
        return is_sum or self.scan.combine is Combine.PROD


def prepare(group: KernelGroup, base: Workload[None]) -> Workload[ScanSpace] | None:
    if base.machine.is_gpu or not group.kind.is_scan:
        return None
    scan = match_scan(group.statements[0])
    if scan is None:
        return None
    (along,) = base.reduced
    column = base.vector_axis if base.vector_axis in base.spatial else None
    is_composed = group.kind is GroupKind.SCAN_STEPS
    return base.with_facts(ScanSpace(scan, along, column, may_split_scan(scan, group), scan_totals(group), is_composed))
