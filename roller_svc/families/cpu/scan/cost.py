"""Cost of a scan on a CPU: a chain of carries, vector work before and after it, memory."""

from __future__ import annotations

from roller_svc.families.common.cpu.memory import transfer_s
from roller_svc.families.common.cpu.task_costs import count_waves, sum_task_costs
from roller_svc.families.cpu.scan.workload import ScanSpace
from roller_svc.ir.program import Combine
from roller_svc.perf.common import Costs, Launch
from roller_svc.perf.workload import Workload

STEP = 8  # elements whose own prefixes are combined with one carry
ACCESSES = 2.0  # of an element: read, then written
GUARD_OPERATIONS = 7  # of a product of gates that may reset: magnitudes, comparisons, selections


def scan_cost(p: Workload[ScanSpace], launch: Launch) -> Costs:
    """Return the cost of the busiest core. Operations of a step overlap with the carry of the one before."""
    costs, scan = p.machine.costs.loops, p.facts.scan
    points = p.outer_points * p.inner_points / launch.grid
    is_extremum = scan.combine in (Combine.MAX, Combine.MIN)
    combine = costs.minmax_cycles if is_extremum else costs.operation_cycles
    vectors = points / p.machine.unit.shape[-1]
    accesses = len(p.footprint.accesses) * costs.load_cycles
    operations = p.space.flops / (p.outer_points * p.inner_points) * costs.operation_cycles
    step = p.facts.step
    combines = 2 if step is None or not step.has_guarded_products else 2 + GUARD_OPERATIONS
    composed = points * max(combines * combine + ACCESSES * costs.load_cycles / 2, costs.accumulate_latency_cycles / STEP)
    if p.facts.column is None:
        # elements wait for the carry, or are combined with those of their step before that
        scanned = points * max(combine + ACCESSES * costs.load_cycles / 2, 1.0)
        if p.facts.has_slow_chain or p.facts.totals is not None:
            scanned = composed
        elif step is not None:  # each step waits for the one before
            scanned = points * costs.accumulate_latency_cycles
        cycles = {"scan": scanned, "compute": vectors * (operations + accesses + ACCESSES * costs.load_cycles)}
    else:
        cycles = {"scan": vectors * (combine + ACCESSES * costs.load_cycles), "compute": vectors * (operations + accesses)}
        cycles["loops"] = p.inner_points * costs.startup_cycles
    cycles["task"] = p.machine.costs.task_cycles
    memory_s = sum([transfer_s(p, access, launch.block, launch.grid) for access in p.footprint.accesses])
    found = sum_task_costs(p, launch, cycles, count_waves(p, launch), memory_s, costs.imperfect_overlap)
    if launch.split_k == 1:
        return found
    # the launches that reduce the pieces, which read everything, and that scan their totals
    reading = sum([transfer_s(p, access, launch.block, launch.grid) for access in p.footprint.reads])
    folded = composed if step is not None and p.facts.column is None else 0.0
    before = max(reading, p.machine.seconds(count_waves(p, launch) * (vectors * operations + folded)))
    return found._replace(core_s=found.core_s + before + p.machine.hw.limits.launch_overhead_s)
