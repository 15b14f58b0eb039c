"""What a caller allows and asks of kernels, beyond that they are right and fast."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from roller_svc.ir.rprogram import RProgram

# Public option name → field of RProgram.
TILE_FIELDS = {
    "lanes": "reduce_threads", "split_k": "split_k", "stages": "stages", "raster": "raster",
    "stream_k": "stream_k_blocks", "blocks": "persistent_blocks", "cluster_m": "cluster_m", "cluster_n": "cluster_n",
}  # fmt: skip


class OpClass(Enum):
    """What a contraction on a GPU may run on."""

    SIMT = "simt"  # multiply-adds of single threads
    MMA = "mma"  # instructions of warps on matrix units
    WGMMA = "wgmma"  # instructions of warpgroups on matrix units, asynchronous


@dataclass(frozen=True, slots=True)
class ScheduleConstraints:
    """`allow_tf32`: float32 products may be rounded to tf32, and short sums of float8 products may keep 14 bits.

    `family` and `tiles` narrow down what is chosen from, for tests and experiments: the family of every contraction,
    and values that fields of its rProgram (TILE_FIELDS) must have: given to tiles that construction would run otherwise
    where they fit. In a program without contractions, `tiles` holds for every kernel.
    """

    allow_tf32: bool = False
    op_class: OpClass | None = None
    tiles: tuple[tuple[str, int], ...] = ()

    def is_satisfied_by(self, program: RProgram) -> bool:
        """Whether the rProgram has the tiles that are asked for."""
        return all(tile_value(program, option) == value for option, value in self.tiles)


def tile_value(program: RProgram, option: str) -> int:
    """Return the value of the rProgram's field that a public tile option (TILE_FIELDS) names."""
    value: int = getattr(program, TILE_FIELDS[option])
    return value


NO_CONSTRAINTS = ScheduleConstraints()
