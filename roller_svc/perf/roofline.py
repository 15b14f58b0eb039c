"""Roofline bounds of a workload (Williams et al., 2009): arithmetic and every memory level, before tiling."""

from __future__ import annotations

from typing import Any

from roller_svc.ir.estimate import COMPUTE, RooflineBound
from roller_svc.perf.workload import Workload


def roofline(p: Workload[Any]) -> tuple[RooflineBound, ...]:
    """Return the arithmetic bound, then one bound for each memory level outside the registers, outermost first.

    Each tensor is moved once at the level's peak. On a CPU, the innermost cache that retains data between runs counts
    as if it retained all, and levels outside it move nothing.
    """
    hw = p.machine.hw
    levels = [level for level in hw.levels if level.name != hw.tile_levels[1]]
    names = [level.name for level in levels]
    outermost = names.index(p.data_level)
    bounds = [RooflineBound(COMPUTE, p.operations, p.operations / p.machine.unit.flops_per_s)]
    for index, level in enumerate(levels):
        moved = p.compulsory_bytes if index >= outermost else 0
        bounds.append(RooflineBound(level.name, moved, moved / p.machine.max_bytes_per_s(level.name)))
    return tuple(bounds)


def add_rooflines(rooflines: tuple[tuple[RooflineBound, ...], ...]) -> tuple[RooflineBound, ...]:
    """Add the rooflines of kernels that run one after another on one device."""
    return tuple(
        RooflineBound(bounds[0].level, sum(r.amount for r in bounds), sum(r.seconds for r in bounds))
        for bounds in zip(*rooflines, strict=True)
    )
