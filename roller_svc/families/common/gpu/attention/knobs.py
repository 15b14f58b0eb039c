"""Fields of an rProgram that a caller may not set on attention, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roller_svc.families.common.gpu.knobs import nearest_stages
from roller_svc.families.family import Knob, fixed_knob

ATTENTION_KNOBS: Mapping[str, Knob[Any]] = {
    "stages": nearest_stages,
    "stream_k": fixed_knob(0, "attention has no stream-K"),
    "raster": fixed_knob(1, "blocks of attention come in one order"),
}
