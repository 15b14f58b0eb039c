"""Launches of a contraction on a matrix unit: whole, streamed (stream-K), split, or with a second row reduction."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from roller_svc.families.common.gpu.matrix.stream_k import partial_tiles
from roller_svc.families.family import GroupLaunch, launch_or_split
from roller_svc.fusion.split.row_reduction import column_tiles, reduce_then_combine_groups
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.rprogram import RProgram


def matrix_launches(group: KernelGroup, program: RProgram, hw: HardwareSpec) -> Iterable[GroupLaunch]:
    """Return the launches of one choice; a block reduces the rows of its own tile."""
    if group.row_reduction is not None:
        tiles = column_tiles(program)
        if tiles == 1:
            return (GroupLaunch(group, program),)
        parts = reduce_then_combine_groups(group, program, tiles)
        return (GroupLaunch(parts.contraction, parts.program, parts.workspace), GroupLaunch(parts.reduction, None))
    if program.pipeline.stream_k_blocks:
        workspace = partial_tiles(group.name, program)
        return (GroupLaunch(replace(group, stored=(*group.stored, workspace)), program, (workspace,)),)
    return launch_or_split(group, program, hw)
