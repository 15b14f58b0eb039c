"""Constraints that a caller puts on schedules."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from roller_svc.ir.rprogram import RProgram

# Public option name → how to read its field of an RProgram.
TILE_FIELDS = {
    "lanes": attrgetter("reduce_threads"), "split_k": attrgetter("split_k"), "stages": attrgetter("pipeline.stages"),
    "raster": attrgetter("pipeline.raster"), "stream_k": attrgetter("pipeline.stream_k_blocks"),
    "blocks": attrgetter("pipeline.persistent_blocks"), "cluster_m": attrgetter("pipeline.cluster_m"),
    "cluster_n": attrgetter("pipeline.cluster_n"), "pingpong": attrgetter("pipeline.pingpong"),
    "cluster_k": attrgetter("pipeline.cluster_k"),
}  # fmt: skip


class OpClass(Enum):
    """Hardware that a contraction runs on (CUTLASS: OpClass)."""

    SIMT = "simt"  # FMA units
    MMA = "mma"  # matrix units, instructions of warps
    WGMMA = "wgmma"  # matrix units, asynchronous instructions of warpgroups


class WinogradMode(Enum):
    """Which convolutions may be computed by Winograd's algorithm. See analysis/winograd.py for its accuracy."""

    AUTO = "auto"  # F(2 x 2) wherever it applies, F(4 x 4) where the bound on its error holds
    NEVER = "never"  # direct convolution only
    ALWAYS = "always"  # nothing else where it applies


@dataclass(frozen=True, slots=True)
class ScheduleConstraints:
    """Constraints on the rPrograms of one program.

    `tiles` holds for every contraction; in a program without contractions, for every kernel. Construction also sets
    the fields on tiles that it would run otherwise, where they fit.
    """

    allow_tf32: bool = False  # round float32 operands to tf32, and keep float8 accumulators at 14 bits
    op_class: OpClass | None = None
    tiles: tuple[tuple[str, int], ...] = ()  # (public option, value); see TILE_FIELDS
    winograd: WinogradMode = WinogradMode.AUTO
    allow_expanded_squares: bool = False  # (a - b)² as a² + b² - 2ab: its error is relative to a² + b²
    joinable: bool = False  # leave out warpgroups, whose kernels cannot be rTasks of a kernel with others
    streams: bool = False  # stream the matrix of each product of few rows that can

    def is_satisfied_by(self, program: RProgram) -> bool:
        """Return whether the rProgram has all values of `tiles`."""
        return all(tile_value(program, option) == value for option, value in self.tiles)


def tile_value(program: RProgram, option: str) -> int:
    """Return the value of the rProgram's field that a public tile option (TILE_FIELDS) names."""
    return int(TILE_FIELDS[option](program))


NO_CONSTRAINTS = ScheduleConstraints()
