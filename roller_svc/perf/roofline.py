"""Workload → the least time that each level of the device needs for it, before any tile is chosen."""

from __future__ import annotations

from typing import Any

from roller_svc.ir.estimate import COMPUTE, RooflineBound
from roller_svc.perf.workload import Workload


def roofline(p: Workload[Any]) -> tuple[RooflineBound, ...]:
    """Arithmetic at the unit's rate, then every memory level outside the registers, the outermost first: each tensor
    once at the most that the level reaches. Of a CPU's caches the innermost that keeps any of it from run to run counts
    as if it kept all, and levels outside it move nothing: no tile is faster than that."""
    hw = p.machine.hw
    levels = [level for level in hw.levels if level.name != hw.tile_levels[1]]
    names = [level.name for level in levels]
    outermost = names.index(p.data_level)
    roofs = [RooflineBound(COMPUTE, p.operations, p.operations / p.machine.unit.flops_per_s)]
    for place, level in enumerate(levels):
        moved = p.compulsory_bytes if place >= outermost else 0
        roofs.append(RooflineBound(level.name, moved, moved / p.machine.max_bytes_per_s(level.name)))
    return tuple(roofs)


def add_rooflines(rooflines: tuple[tuple[RooflineBound, ...], ...]) -> tuple[RooflineBound, ...]:
    """Of kernels that run one after another on one device."""
    return tuple(
        RooflineBound(roofs[0].level, sum(r.amount for r in roofs), sum(r.seconds for r in roofs))
        for roofs in zip(*rooflines, strict=True)
    )
