"""Which groups are scans on a GPU, and how the threads of a block share one."""

from __future__ import annotations

import math
from dataclasses import dataclass

from roller_svc.analysis.scans import LinearStep, Scan, match_scan
from roller_svc.fusion.split.scan import may_split_scan, scan_totals
from roller_svc.ir.group import GroupKind, KernelGroup
from roller_svc.ir.program import TensorExpr
from roller_svc.perf.footprint import Tile
from roller_svc.perf.workload import Workload

MAX_ACCESS_BYTES = 16  # of one thread's access (LD.128)


@dataclass(frozen=True, slots=True)
class ScanSpace:
    """A scan as rules, cost and schedule see it. Axes are positions in the tile space.

    Tensors are contiguous along the scan, and adjacent threads share a row, or along `column`, and adjacent threads
    have a column each.
    """

    scan: Scan
    along: int
    column: int | None
    row: int | None  # the axis whose points share a block where tensors are contiguous along the scan
    width: int  # elements along the scan that one access moves
    may_split: bool  # whether rows may be cut into pieces
    totals: tuple[TensorExpr, ...] | None  # state and product of gates after all steps, where these alone are stored
    is_composed: bool  # whether the steps of the recurrence are compositions of several

    @property
    def step(self) -> LinearStep | None:
        """Return the step of a linear recurrence; None for other scans."""
        return self.scan.step

    @property
    def shared_axis(self) -> int | None:
        """The outer axis of which a block has several points."""
        return self.row if self.column is None else self.column


@dataclass(frozen=True, slots=True)
class ScanThreads:
    """The threads of a block: rows, of `lanes` threads along the scan, of `columns` adjacent threads.

    `in_warp` threads along the scan, `columns` apart, are in one warp.
    """

    rows: int
    lanes: int
    columns: int
    elements: int  # of a thread, adjacent along the scan
    tiles: int  # that the block visits, one after the other
    warp: int
    is_ordered: bool = False  # whether totals of threads combine in one order only
    has_totals: bool = False  # whether all threads must know the total of their row

    @property
    def in_warp(self) -> int:
        return max(1, min(self.lanes, self.warp // self.columns))

    @property
    def warps(self) -> int:
        """Groups of threads along the scan whose totals meet in shared memory."""
        return self.lanes // self.in_warp

    @property
    def has_gates(self) -> bool:
        """Return whether linear steps of several threads are composed, with a product of gates for each."""
        return self.is_ordered and self.lanes > 1

    @property
    def meets_in_shared(self) -> bool:
        """Whether totals pass through shared memory, rather than by shuffles within a warp."""
        is_carried = self.tiles > 1 or self.has_totals
        return self.warps > 1 or (is_carried and self.in_warp > 1 and (self.columns > 1 or self.is_ordered))

    @property
    def total_shape(self) -> tuple[int, ...]:
        """Return the shape of the totals in shared memory: two tiles', so that a barrier for each tile is enough.

        Totals of linear steps have a gate, too.
        """
        return (min(2, self.tiles), self.rows, self.warps, self.columns)


def scan_threads(p: Workload[ScanSpace], block: Tile, thread: Tile, lanes: int, pieces: int = 1) -> ScanThreads:
    """Return the threads of a block, which scans a row or one of its pieces."""
    space, warp = p.facts, p.machine.hw.limits.warp_size
    shared = 1 if space.shared_axis is None else block[space.shared_axis]
    rows, columns = (shared, 1) if space.column is None else (1, shared)
    tiles = -(-(p.extents[space.along] // pieces) // block[space.along])
    has_totals = space.totals is not None
    return ScanThreads(rows, lanes, columns, thread[space.along], tiles, warp, space.step is not None, has_totals)


def prepare(group: KernelGroup, base: Workload[None]) -> Workload[ScanSpace] | None:
    if not base.machine.is_gpu or not group.kind.is_scan:
        return None
    scan = match_scan(group.statements[0])
    if scan is None:
        return None
    (along,) = base.reduced
    column = base.vector_axis if base.vector_axis in base.spatial else None
    row = next((i for i in reversed(base.spatial) if base.extents[i] > 1), None)
    widest = max([access.elem_bytes for access in base.footprint.accesses if along in access.axes], default=base.elem_bytes)
    width = math.gcd(MAX_ACCESS_BYTES // widest, base.extents[along]) if column is None else 1
    is_composed = group.kind is GroupKind.SCAN_STEPS
    return base.with_facts(ScanSpace(scan, along, column, row, width, may_split_scan(scan, group), scan_totals(group), is_composed))
