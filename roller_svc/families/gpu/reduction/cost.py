"""The cost of a reduction on a GPU: of rows that threads share, or of single points."""

from __future__ import annotations

from roller_svc.families.common.gpu.row_cost import row_reduction_cost
from roller_svc.families.common.gpu.row_space import RowSpace
from roller_svc.families.common.gpu.serial_cost import serial_cost
from roller_svc.perf.common import Costs, Launch
from roller_svc.perf.workload import Workload


def reduction_cost(p: Workload[RowSpace | None], launch: Launch) -> Costs:
    return serial_cost(p, launch) if p.facts is None else row_reduction_cost(p, p.facts, launch)
