"""RProgram → schedule tree."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from roller_svc.errors import InvariantError, ScheduleError
from roller_svc.ir.group import AxisRole, GroupKind, KernelGroup
from roller_svc.ir.hardware import Family, HardwareSpec, UnitKind
from roller_svc.ir.rprogram import RProgram
from roller_svc.ir.schedule import ScheduleTree
from roller_svc.lower.attention_mma import lower_attention_mma
from roller_svc.lower.attention_wgmma import lower_attention_wgmma
from roller_svc.lower.contraction_cpu import lower_contraction_cpu
from roller_svc.lower.contraction_gpu import lower_contraction_gpu
from roller_svc.lower.contraction_mma import lower_contraction_mma
from roller_svc.lower.contraction_wgmma import lower_contraction_wgmma
from roller_svc.lower.convolution_cpu import lower_convolution_cpu
from roller_svc.lower.layout_cpu import lower_layout_cpu
from roller_svc.lower.legality import check
from roller_svc.lower.nest_cpu import lower_nest_cpu
from roller_svc.lower.nest_gpu import lower_nest_gpu
from roller_svc.lower.past_caches_cpu import past_caches
from roller_svc.lower.scatter import lower_scatter
from roller_svc.lower.window_cpu import lower_window_cpu
from roller_svc.perf.layout_tile import layout_space
from roller_svc.perf.plane_tile import plane_space


def lower(group: KernelGroup, program: RProgram, hw: HardwareSpec) -> tuple[ScheduleTree, ...]:
    """The launches of one group, in order. `program` has no split reduction left (construct.split took it apart)."""
    buffers = {name for name, _ in (*group.inputs, *group.stored)}
    return tuple(verified(tree, buffers, hw.limits.warp_size) for tree in _lowered(group, program, hw))


def verified(tree: ScheduleTree, buffers: Collection[str], warp: int) -> ScheduleTree:
    """The tree, once it has been found to obey the rules; a tree of our own making that does not is a bug."""
    try:
        check(tree.body, buffers, warp)
    except ScheduleError as error:
        raise InvariantError(f"the tree of {tree.name} is not legal: {error.message}") from error
    return tree


def _lowered(group: KernelGroup, program: RProgram, hw: HardwareSpec) -> tuple[ScheduleTree, ...]:
    family = hw.family
    if group.kind is GroupKind.SCATTER:
        return lower_scatter(group, family)
    if group.kind is GroupKind.ATTENTION:
        by_groups = program.unit.kind is UnitKind.WGMMA
        return (lower_attention_wgmma if by_groups else lower_attention_mma)(group, program, hw.arch)
    if program.unit.takes_fragments:
        return lower_contraction_mma(group, program, hw)
    if program.unit.kind is UnitKind.WGMMA:
        return lower_contraction_wgmma(group, program, hw.arch)
    if group.kind is GroupKind.CONTRACTION:
        if program.space.role(AxisRole.PIXEL):
            return lower_convolution_cpu(group, program, hw)
        if family is Family.CPU:
            return lower_contraction_cpu(replace(group, space=program.space), program, hw)
        return lower_contraction_gpu(group, program, hw)
    if family is Family.CPU:
        if (planes := plane_space(group)) is not None:
            return lower_window_cpu(group, program, planes, hw)
        if (layout := layout_space(group, hw)) is not None:
            return lower_layout_cpu(group, program, layout, hw)
        trees = lower_nest_cpu(group, program, hw)
        return tuple(past_caches(tree, group) for tree in trees) if program.streamed else trees
    return lower_nest_gpu(group, program, hw)
