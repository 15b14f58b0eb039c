"""Fields of an rProgram that a caller may set on persistent kernels of warpgroups."""

from __future__ import annotations

from typing import Any

from roller_svc.families.family import Nearest
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.rprogram import RProgram
from roller_svc.perf.model import Model

GUARDED = "tiles under a guard along k have steps of their own: each has a block of its own"


def nearest_blocks(group: KernelGroup, model: Model[Any], program: RProgram, wanted: int) -> Nearest:
    if wanted == 0:
        return Nearest(0)
    if group.space.k_bounds is not None:
        return Nearest(0, GUARDED)
    if program.pipeline.stream_k_blocks:
        return Nearest(0, "stream-K blocks are not persistent over whole tiles")
    if program.pipeline.cluster_k > 1:
        return Nearest(0, "blocks that split k within clusters are not persistent")
    size = program.pipeline.cluster_size
    near = max(1, min(wanted, program.grid) // size) * size
    reason = f"{program.grid} tiles of {program.tile_text} take at most as many, in whole clusters of {size} blocks"
    return Nearest(near, "" if near == wanted else reason)
