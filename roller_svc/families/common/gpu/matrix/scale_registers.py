"""Registers and issue slots of the scales of a contraction's sums over blocks of k."""

from __future__ import annotations

import math
from typing import NamedTuple

from roller_svc.families.common.gpu.matrix.tile import COLUMNS
from roller_svc.ir.dtype import DType
from roller_svc.ir.group import ScaleRuns

ROWS_OF_LANE = 2  # of 16 x 8 accumulators
COLUMNS_OF_LANE = 2
LANE_ROWS = 8  # rows of a fragment that the lanes of a warp load at once
LOAD_SLOTS = 6  # issue slots of a load: address, guard, load, product


class ScaleRegisters(NamedTuple):
    """Registers of a lane for the scales of a k-tile."""

    fragments: int  # along m
    columns: int  # of the warp's tile
    row_run: int  # rows with one scale; 0: no scale varies with m
    column_run: int  # columns of the warp's tile with one scale, which divide it

    @classmethod
    def of(cls, runs: ScaleRuns, fragments: int, columns: int) -> ScaleRegisters:
        run = math.gcd(runs.n, columns)
        return cls(fragments, columns, runs.m, run if run % COLUMNS == 0 else 1)

    @property
    def num_rows(self) -> int:
        return self.fragments * ROWS_OF_LANE

    @property
    def num_columns(self) -> int:
        """Scales of columns; 0 if all columns have the same."""
        if self.column_run == self.columns:
            return 0
        return self.columns // self.column_run if self.column_run > 1 else self.columns // COLUMNS * COLUMNS_OF_LANE

    @property
    def count(self) -> int:
        return self.num_rows + self.num_columns

    @property
    def load_slots(self) -> int:
        """Issue slots of a warp to load the scales."""
        return LOAD_SLOTS * self.count

    @property
    def lines(self) -> int:
        """Cache lines that the loads of a warp touch, each a cycle of the core's L1."""
        rows = self.num_rows * (-(-LANE_ROWS // self.row_run) if self.row_run else 1)
        return rows + self.num_columns * (1 if self.column_run > 1 else COLUMNS // COLUMNS_OF_LANE)

    def promotion_slots(self, accumulators: int, sum_dtype: DType) -> int:
        """Return the issue slots of a warp to scale and add its sums: products, conversions of integers."""
        return accumulators * (1 + (self.num_columns > 0) + (not sum_dtype.is_float))
