"""Launches of a scan whose rows may be split over blocks or tasks."""

from __future__ import annotations

from collections.abc import Iterable

from roller_svc.families.family import GroupLaunch
from roller_svc.fusion.split.scan import split_scan
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.rprogram import RProgram


def split_scan_launches(group: KernelGroup, program: RProgram, hw: HardwareSpec) -> Iterable[GroupLaunch]:
    """Return one launch, or three where rows are split: totals of pieces, a scan of these, scans of pieces."""
    if program.split_k == 1:
        return (GroupLaunch(group, program),)
    split = split_scan(group, program.split_k)
    return (
        GroupLaunch(split.totals, None, split.totals.stored),
        GroupLaunch(split.before, None, split.before.stored),
        GroupLaunch(split.pieces, None),
    )
