"""Launches of attention whose keys may be split over blocks and warps (FlashDecoding)."""

from __future__ import annotations

from collections.abc import Iterable

from roller_svc.construct.rules import extent_on
from roller_svc.families.common.gpu.attention.tile import (
    AttentionOperands,
    mma_attention_tile,
    partial_results,
    prepare_attention_operands,
)
from roller_svc.families.family import GroupLaunch
from roller_svc.fusion.split.attention import split_attention
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.rprogram import RProgram
from roller_svc.perf.common import Launch
from roller_svc.perf.model import read_launch
from roller_svc.perf.workload import Workload


def split_kv_launches(group: KernelGroup, program: RProgram, hw: HardwareSpec) -> Iterable[GroupLaunch]:
    """Return one launch, or two where the keys are split: partial results, and their combination."""
    tile = mma_attention_tile(program, prepare_attention_operands(group, program.unit, hw.arch))
    if tile.num_splits == 1:
        return (GroupLaunch(group, program),)
    halves, of_rows = split_attention(group, program, partial_results(group, tile))
    combining = (halves.combining,) if of_rows is None else (halves.combining, of_rows)
    return (
        GroupLaunch(halves.partial, halves.partial_program, halves.workspaces),
        *(GroupLaunch(each, None) for each in combining),
    )


def split_kv_launch(p: Workload[AttentionOperands], program: RProgram) -> Launch:
    """Read a launch with a workspace for the partial results of each split."""
    launch = read_launch(p, program)
    splits = program.split_k * (extent_on(launch.block, p.k) // extent_on(launch.thread, p.k))
    points = splits * p.outer_points if splits > 1 else 0
    return launch._replace(workspace_bytes=points * p.elem_bytes)
