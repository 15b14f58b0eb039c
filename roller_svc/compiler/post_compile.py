"""A plan and what the compiler made of it → the plan's estimate with the registers and shared memory of the binary."""

from __future__ import annotations

from collections.abc import Sequence

from roller_svc.families import model_of
from roller_svc.ir.estimate import Candidate
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.hardware import HardwareSpec, TargetKind
from roller_svc.ir.kernel import CompiledKernel
from roller_svc.ir.report import Plan
from roller_svc.ir.rprogram import RProgram
from roller_svc.perf.occupancy import BlockResources


def reestimate_plan(
    plan: Plan, groups: Sequence[KernelGroup], compiled: CompiledKernel | None, hw: HardwareSpec
) -> Plan | None:
    """The same choices, estimated again; None where no compiler has said what they take: no binary, or a CPU's."""
    if compiled is None or not compiled.binary or hw.family is TargetKind.CPU:
        return None
    choices = []
    for group, choice in zip(groups, plan.choices, strict=True):
        used = compiled.resources[compiled.source.main_launch(group.name)]
        again = model_of(group, choice.program, hw).estimate(choice.program, used)
        choices.append(Candidate(choice.program, again))
    return Plan(tuple(choices))


def predict_resources(group: KernelGroup, program: RProgram, hw: HardwareSpec) -> BlockResources | None:
    """What the model assumes that a block of the group's main launch takes; None where there are no blocks."""
    return model_of(group, program, hw).resources(program)
