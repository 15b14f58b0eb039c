"""What a caller allows and asks of kernels, beyond that they are right and fast."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from roller_svc.ir.rprogram import RProgram

# of an RProgram
TILE_FIELDS = ("lanes", "split_k", "stages", "raster", "stream_k", "blocks", "cluster_m", "cluster_n")


class KernelFamily(Enum):
    """What a contraction on a GPU may run on."""

    SIMT = "simt"  # multiply-adds of single threads
    MMA = "mma"  # instructions of warps on matrix units
    WGMMA = "wgmma"  # instructions of warpgroups on matrix units, asynchronous


@dataclass(frozen=True, slots=True)
class Demands:
    """`allow_tf32`: float32 products may be rounded to tf32, and short sums of float8 products may keep 14 bits.

    `family` and `tiles` narrow down what is chosen from, for tests and experiments: the family of every contraction,
    and values that fields of its rProgram (TILE_FIELDS) must have: given to tiles that construction would run otherwise
    where they fit. In a program without contractions, `tiles` holds for every kernel.
    """

    allow_tf32: bool = False
    family: KernelFamily | None = None
    tiles: tuple[tuple[str, int], ...] = ()

    def admits(self, program: RProgram) -> bool:
        """Whether the rProgram has the tiles that are asked for."""
        return all(getattr(program, field) == value for field, value in self.tiles)


NO_DEMANDS = Demands()
