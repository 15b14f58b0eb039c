"""Launches of a scan whose rows may be split over blocks or tasks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from roller_svc.analysis.scans import match_scan
from roller_svc.errors import require
from roller_svc.families.family import GroupLaunch, Nearest
from roller_svc.fusion.split.scan import may_split_scan, split_scan
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.rprogram import RProgram
from roller_svc.perf.model import Model


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


def nearest_pieces(group: KernelGroup, model: Model[Any], program: RProgram, wanted: int) -> Nearest:
    """Return the nearest number of equal pieces of a scan's rows, of at least two points each."""
    if wanted < 1:
        return Nearest(1, "a row has at least 1 piece")
    if wanted == 1:
        return Nearest(1)
    scan = require(match_scan(group.statements[0]), "a scan")
    if not may_split_scan(scan, group):
        return Nearest(1, "rows of this scan cannot be split into pieces")
    row = scan.axis.extent
    pieces = next((n for n in range(min(wanted, row // 2), 1, -1) if row % n == 0), 1)
    return Nearest(pieces, "" if pieces == wanted else f"rows of {row} make no {wanted} equal pieces of two points or more")
