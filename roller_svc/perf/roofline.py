"""Problem → the least time that each level of the device needs for it, before any tile is chosen."""

from __future__ import annotations

from roller_svc.ir.estimate import COMPUTE, Roof
from roller_svc.perf.workload import Problem


def roofline(p: Problem) -> tuple[Roof, ...]:
    """Arithmetic at the unit's rate, then every memory level outside the registers, the outermost first: each tensor
    once at the most that the level reaches. Of a CPU's caches the innermost that keeps any of it from run to run counts
    as if it kept all, and levels outside it move nothing: no tile is faster than that."""
    hw = p.machine.hw
    levels = [level for level in hw.levels if level.name != hw.tile_levels[1]]
    names = [level.name for level in levels]
    outermost = names.index(p.found_in)
    roofs = [Roof(COMPUTE, p.operations, p.operations / p.machine.unit.flops_per_s)]
    for place, level in enumerate(levels):
        moved = p.compulsory_bytes if place >= outermost else 0
        roofs.append(Roof(level.name, moved, moved / p.machine.most_bytes_per_s(level.name)))
    return tuple(roofs)


def together(rooflines: tuple[tuple[Roof, ...], ...]) -> tuple[Roof, ...]:
    """Of kernels that run one after another on one device."""
    return tuple(
        Roof(roofs[0].level, sum(r.amount for r in roofs), sum(r.seconds for r in roofs))
        for roofs in zip(*rooflines, strict=True)
    )
