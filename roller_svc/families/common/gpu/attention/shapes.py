"""Tile extents of attention in whole instructions."""

from __future__ import annotations

from roller_svc.construct.align import round_up
from roller_svc.perf.footprint import Tile

INSTRUCTION_GRANULE = 16  # keys, head_dim and output columns come in whole instructions
MAX_COLUMNS = 256  # output columns in a warp's registers; more are computed in separate passes
MAX_STAGES = 3


def round_up_to_instruction(extent: int) -> int:
    """Round the extent up to whole instructions."""
    return round_up(extent, INSTRUCTION_GRANULE)


def sizes_up_to(sizes: Tile, extent: int) -> Tile:
    """Return the sizes up to the extent in whole instructions; the smallest in any case."""
    return (sizes[0], *(size for size in sizes[1:] if size <= round_up_to_instruction(extent)))
