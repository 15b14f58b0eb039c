"""Tile extents of attention in whole instructions."""

from __future__ import annotations

from roller_svc.perf.footprint import Tile

INSTRUCTION_GRANULE = 16  # keys, features and columns of the result that whole instructions take
MAX_COLUMNS = 256  # of the result that a warp has in registers: more are computed apart, with scores of their own
MAX_STAGES = 3


def round_up_to_instruction(extent: int) -> int:
    """The extent in whole instructions."""
    return -(-extent // INSTRUCTION_GRANULE) * INSTRUCTION_GRANULE


def sizes_up_to(sizes: Tile, extent: int) -> Tile:
    """Those no larger than what the extent takes in whole instructions; the smallest in any case."""
    return (sizes[0], *(size for size in sizes[1:] if size <= round_up_to_instruction(extent)))
