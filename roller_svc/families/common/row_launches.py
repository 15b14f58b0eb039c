"""Launches of a contraction with a row reduction, on units that do not reduce rows in registers."""

from __future__ import annotations

from collections.abc import Iterable

from roller_svc.families.family import GroupLaunch, launch_or_split
from roller_svc.fusion.split.row_reduction import store_then_reduce_groups
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.rprogram import RProgram


def row_reduction_launches(group: KernelGroup, program: RProgram, hw: HardwareSpec) -> Iterable[GroupLaunch]:
    """Store the results and reduce their rows in a second launch; without such a reduction, split as usual."""
    if group.row_reduction is None:
        return launch_or_split(group, program, hw)
    launches = store_then_reduce_groups(group, program)
    contraction = GroupLaunch(launches.contraction, launches.program, launches.workspace)
    return (contraction, GroupLaunch(launches.reduction, None))
