"""Blocking of a CPU contraction: which operands a task packs, and in which order panels meet, decided once."""

from __future__ import annotations

import math
from dataclasses import dataclass

from roller_svc.construct.rules import extent_on
from roller_svc.families.cpu.contraction.workload import ContractionFacts, OperandLayout
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.perf.footprint import Tile
from roller_svc.perf.workload import Workload

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


@dataclass(frozen=True, slots=True)
class Blocking:
    """Loops and buffers of a task. Extents along k count packed words."""

    mr: int
    nr: int
    kc: int
    depth: int
    steps: int  # blocks along k
    run: int  # words of a block of k whose products are added before they are scaled; all of them without scales
    block_rows: int  # rows of A that L2 holds at once, in whole panels: those of a packed block
    packs_a: bool
    packs_b_on_first_use: bool  # the first panel of A packs each panel of B that it meets
    rows_outer: bool  # one panel of A meets all panels of B before the next panel of A
    streams_b: bool  # prepacked panels of B are read once, by the only panel of A
    column_run: int  # points of a block of k with one value of packed columns (`packed_columns.py`); 0: panels of B are floats
    has_packed_words: bool = False  # panels of B have unsigned integers (`packed_words.py`)

    @property
    def runs(self) -> int:
        """Return the sums of a block of k."""
        return -(-self.kc // self.run)


def plan_blocking(p: Workload[ContractionFacts], block: Tile, thread: Tile, split_k: int = 1) -> Blocking:
    """Return what tasks of `block` pack, and in which order their panels meet in register tiles of `thread`."""
    hw, size, (a, b) = p.machine.hw, p.elem_bytes, (p.facts.a, p.facts.b)
    l2_bytes = hw.block_level.capacity_bytes
    mr, nr = extent_on(thread, p.m), extent_on(thread, p.n)
    rows, columns = (-(-extent_on(block, axis) // tile) * tile for axis, tile in ((p.m, mr), (p.n, nr)))
    depth = p.packed_words(-(-p.extent(p.k) // split_k))
    kc = min(p.packed_words(extent_on(block, p.k)), depth)
    steps = -(-depth // kc)
    # positions along k are not divided
    reads_in_place = p.facts.dot is None and (p.k is None or len(p.space.axes[p.k].members) == 1)
    packs_a = not (
        reads_in_place
        and a.plain
        and not a.constant
        and a.layout is OperandLayout.K_MAJOR
        and _skips_packing_of_a(columns, (mr, nr, kc), a.panel_stride * size, size, hw)
    )
    is_plain = reads_in_place and b.plain and b.layout is OperandLayout.PANEL_MAJOR and not b.constant
    is_plain = is_plain and p.space.k_bounds is None  # a guard leaves the first panel of A a part of k
    packs_b_on_first_use = (
        is_plain and steps == 1 and _packs_b_on_first_use(rows // mr, rows * kc * size, nr * size, b.tensor_bytes, hw)
    )
    block_rows = rows_per_block(rows, mr, kc, size, l2_bytes)
    at_once = block_rows if packs_a else rows
    rows_outer = not packs_b_on_first_use and _loops_over_rows_first(at_once, columns, kc, size, l2_bytes, b_is_constant=b.constant)
    run = _run_words(p, kc, steps)
    return Blocking(
        mr,
        nr,
        kc,
        depth,
        steps,
        run,
        block_rows,
        packs_a,
        packs_b_on_first_use,
        rows_outer,
        streams_b=b.constant and rows == mr,
        column_run=_column_run(p, kc, depth) if b.constant and rows == mr else 0,
        has_packed_words=rows == mr and _has_packed_words(p, kc, run),
    )


def _has_packed_words(p: Workload[ContractionFacts], kc: int, run: int) -> bool:
    """Return whether words of panels, and runs of k with one offset, begin where blocks and sums of `run` words do."""
    packed = p.facts.packed_words
    if packed is None or kc % packed.words or run % packed.words:
        return False
    return packed.is_shared or packed.run % (run * packed.dot.group) == 0


def _column_run(p: Workload[ContractionFacts], kc: int, depth: int) -> int:
    """Return the points of a block of k with one value of packed columns; 0 where blocks do not begin at such runs."""
    packed = p.facts.packed_b
    if packed is None:
        return 0
    run = kc if packed.run >= depth else min(kc, packed.run) if kc == depth else math.gcd(kc, packed.run)
    return run if run == kc == depth or run % packed.granule == 0 else 0


def _run_words(p: Workload[ContractionFacts], kc: int, steps: int) -> int:
    """Return the words of a block of k that have one scale, from its first one on; the block's without scales."""
    if p.space.scale_runs is None:
        return kc
    run = p.space.scale_runs.k // p.machine.unit.k_group
    return min(kc, run) if steps == 1 else math.gcd(kc, run)


def rows_per_block(rows: int, mr: int, kc: int, elem_bytes: int, l2_bytes: int) -> int:
    """Return the rows of A that a task packs per sweep over panels of B.

    Whole register tiles in about equal blocks that fit in L2 (mc of Goto and van de Geijn, Anatomy of High-Performance
    Matrix Multiplication, 2008).
    """
    panels = math.ceil(rows / mr)
    max_panels = max(1, int(L2_BLOCK_FRACTION * l2_bytes / (mr * kc * elem_bytes)))
    return math.ceil(panels / math.ceil(panels / max_panels)) * mr


def _columns_fit_l2(columns: int, kc: int, elem_bytes: int, l2_bytes: int) -> bool:
    """Return whether L2 holds a task's packed columns of B, so that the loop over panels of A is the outer one."""
    return columns * kc * elem_bytes <= L2_COLUMNS_FRACTION * l2_bytes


def _loops_over_rows_first(rows: int, columns: int, kc: int, elem_bytes: int, l2_bytes: int, *, b_is_constant: bool) -> bool:
    """Return whether the loop over panels of A is the outer one, for `rows` of A at once and a task's `columns` of B.

    L2 then holds the columns. Prepacked columns come from L3: each panel is read once instead, while the one before is
    multiplied by rows that L2 holds.
    """
    if b_is_constant and rows * kc * elem_bytes <= L2_BLOCK_FRACTION * l2_bytes:
        return False
    return _columns_fit_l2(columns, kc, elem_bytes, l2_bytes)


def _packs_b_on_first_use(panels: int, panels_bytes: int, piece_bytes: int, b_bytes: int, hw: HardwareSpec) -> bool:
    """Return whether the first panel of A that uses a panel of B packs it.

    B then arrives during multiply-adds, and its panel stays in cache until the last row has used it. The task has
    `panels` panels of A whose k is one block; a panel has segments of `piece_bytes` of B's rows.

    Segments arrive slower than whole rows, so this pays where a sweep over a panel is short. Segments of a line or less
    are too slow.
    """
    if panels_bytes > L2_BLOCK_FRACTION * hw.block_level.capacity_bytes or piece_bytes <= hw.block_level.transaction_bytes:
        return False
    return panels <= FIRST_USE_PANELS and b_bytes <= FIRST_USE_LLC_FRACTION * hw.levels[1].capacity_bytes


def _skips_packing_of_a(nc: int, tile: tuple[int, int, int], row_bytes: int, elem_bytes: int, hw: HardwareSpec) -> bool:
    """Return whether the micro-kernel reads unpacked rows of A, K-major and `row_bytes` apart.

    For a task of `nc` columns in tiles of (mr, nr, kc). Where L2 holds the task's columns, each row stays in cache
    while all of them use it, and arrives during the row before it. Rows that would conflict in an L1 set are packed.
    """
    mr, nr, kc = tile
    if math.ceil(nc / nr) <= MAX_UNPACKED_PANELS:
        return True
    fits_l2 = _columns_fit_l2(nc, kc, elem_bytes, hw.block_level.capacity_bytes)
    return fits_l2 and lines_per_set(mr, row_bytes) <= count_l1_ways(hw) - FREE_WAYS


def count_l1_ways(hw: HardwareSpec) -> int:
    """Return the lines of an L1 set."""
    return hw.levels[-2].capacity_bytes // L1_SET_PERIOD_BYTES


def lines_per_set(rows: int, row_bytes: int) -> int:
    """Return how many of those rows have their lines in one L1 set."""
    return math.ceil(rows * math.gcd(row_bytes, L1_SET_PERIOD_BYTES) / L1_SET_PERIOD_BYTES)
