"""Re-estimate a plan with the registers and shared memory of its binary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from roller_svc.families import model_of
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.hardware import HardwareSpec, TargetKind
from roller_svc.ir.kernel import CompiledKernel
from roller_svc.ir.report import Plan
from roller_svc.ir.rprogram import RProgram
from roller_svc.perf.occupancy import BlockResources


def reestimate_plan(plan: Plan, groups: Sequence[KernelGroup], compiled: CompiledKernel | None, hw: HardwareSpec) -> Plan | None:
    """Estimate the same choices with compiled resources. Returns None without a binary, and on a CPU."""
    if compiled is None or not compiled.binary or hw.family is TargetKind.CPU:
        return None
    choices = []
    for group, choice in zip(groups, plan.choices, strict=True):
        used = compiled.resources[compiled.source.main_launch(group.name)]
        again = model_of(group, choice.program, hw).estimate(choice.program, used)
        choices.append(replace(choice, estimate=again, tie_break_factor=1.0))
    return Plan(tuple(choices))


def predict_resources(group: KernelGroup, program: RProgram, hw: HardwareSpec) -> BlockResources | None:
    """Return the predicted resources of a block of the main launch, or None if the launch has no thread blocks."""
    return model_of(group, program, hw).resources(program)
