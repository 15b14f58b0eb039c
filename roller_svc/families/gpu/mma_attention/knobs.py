"""Fields of an rProgram that a caller may set on attention on warps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roller_svc.families.common.gpu.attention.knobs import ATTENTION_KNOBS
from roller_svc.families.family import Knob, Nearest
from roller_svc.ir.group import AxisRole, KernelGroup
from roller_svc.ir.rprogram import RProgram
from roller_svc.perf.model import Model


def nearest_split(group: KernelGroup, model: Model[Any], program: RProgram, wanted: int) -> Nearest:
    """Return the nearest KV split without empty parts."""
    if wanted < 1:
        return Nearest(1, "a reduction has at least 1 part")
    if group.attention is not None and group.attention.weights is not None:
        return Nearest(1, "keys of chained products are not split")
    (keys,) = program.space.role(AxisRole.K)
    steps = -(-keys.extent // program.block[keys.name])
    parts = next(n for n in range(min(wanted, steps), 0, -1) if (n - 1) * -(-steps // n) < steps)
    return Nearest(parts, "" if parts == wanted else f"{program.tile_text} makes {steps} steps over the keys")


KNOBS: Mapping[str, Knob[Any]] = {**ATTENTION_KNOBS, "split_k": nearest_split}
