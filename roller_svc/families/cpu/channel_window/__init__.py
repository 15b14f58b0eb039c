"""Pooling and depthwise convolution on a CPU with channels last: vectors of channels."""

from __future__ import annotations

from roller_svc.families.cpu.channel_window.cost import channel_window_cost
from roller_svc.families.cpu.channel_window.rules import channel_window_rules
from roller_svc.families.cpu.channel_window.workload import prepare
from roller_svc.families.family import Family

CPU_CHANNEL_WINDOW = Family(
    name="cpu/channel_window",
    prepare=prepare,
    rules=lambda workload: channel_window_rules(workload, workload.facts),
    cost=channel_window_cost,
    can_split=False,
)
