"""A plan and what the compiler made of it → the plan's estimate with the registers and shared memory of the binary."""

from __future__ import annotations

from collections.abc import Sequence

from roller_svc.analysis.operand import all_operands
from roller_svc.families.gpu.mma_attention.cost import attention_problem
from roller_svc.ir.estimate import Candidate
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.hardware import Family, HardwareSpec
from roller_svc.ir.kernel import CompiledKernel
from roller_svc.ir.report import Plan
from roller_svc.ir.rprogram import RProgram
from roller_svc.perf.model import Model, model
from roller_svc.perf.occupancy import BlockNeeds


def revised_plan(
    plan: Plan, groups: Sequence[KernelGroup], compiled: CompiledKernel | None, hw: HardwareSpec
) -> Plan | None:
    """The same choices, estimated again; None where no compiler has said what they take: no binary, or a CPU's."""
    if compiled is None or not compiled.binary or hw.family is Family.CPU:
        return None
    choices = []
    for group, choice in zip(groups, plan.choices, strict=True):
        used = compiled.resources[compiled.source.main_launch(group.name)]
        again = _model(group, choice.program, hw).estimate(choice.program, used)
        choices.append(Candidate(choice.program, again))
    return Plan(tuple(choices))


def planned_needs(group: KernelGroup, program: RProgram, hw: HardwareSpec) -> BlockNeeds | None:
    """What the model assumes that a block of the group's main launch takes; None where there are no blocks."""
    return _model(group, program, hw).needs(program)


def _model(group: KernelGroup, program: RProgram, hw: HardwareSpec) -> Model:
    if group.attention is not None:
        return Model(attention_problem(group, hw, program.unit))
    is_staged = group.factors is not None and hw.family is not Family.CPU
    factors = all_operands(group) if is_staged else None
    return model(program.space, hw, program.unit, factors)
