"""Fields of an rProgram that a caller may set on attention on warpgroups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roller_svc.families.common.gpu.attention.knobs import ATTENTION_KNOBS
from roller_svc.families.common.gpu.attention.mask import KeyBounds, key_bounds
from roller_svc.families.common.gpu.warpgroups.knobs import nearest_blocks
from roller_svc.families.family import Knob, Nearest, fixed_knob
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.rprogram import RProgram
from roller_svc.perf.model import Model


def nearest_split(group: KernelGroup, model: Model[Any], program: RProgram, wanted: int) -> Nearest:
    if wanted < 1:
        return Nearest(1, "a reduction has at least 1 part")
    return Nearest(1, "" if wanted == 1 else "blocks of warpgroups do not share keys")


def nearest_unmasked_blocks(group: KernelGroup, model: Model[Any], program: RProgram, wanted: int) -> Nearest:
    if wanted and key_bounds(group) != KeyBounds():
        return Nearest(0, "under a mask each tile of attention has a block")
    return nearest_blocks(group, model, program, wanted)


KNOBS: Mapping[str, Knob[Any]] = {
    **ATTENTION_KNOBS,
    "split_k": nearest_split,
    "cluster_m": fixed_knob(1, "blocks of attention form no clusters"),
    "cluster_n": fixed_knob(1, "blocks of attention form no clusters"),
    "blocks": nearest_unmasked_blocks,
}
