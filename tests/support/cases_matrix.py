"""Contractions for tests of the matrix-unit family: their kernel group, operands, and the devices they are for."""

from __future__ import annotations

from schedule_support import program

from roller_svc import hardware
from roller_svc.analysis.operand import Operand, operands
from roller_svc.compiler.partition_cache import partition
from roller_svc.ir.estimate import Candidate, Estimate, StageCost
from roller_svc.ir.group import AxisRole, GroupKind, KernelGroup
from roller_svc.ir.hardware import ComputeUnit, HardwareSpec
from roller_svc.ir.rprogram import PipelineOptions, RProgram, RTile

TURING = hardware.load("nvidia-t4")
AMPERE = hardware.load("nvidia-a100-sxm-80gb")
ADA = hardware.load("nvidia-rtx4090")
UNKNOWN = Estimate(1.0, (StageCost("compute", 1.0),), 1.0, 1, 1.0)


def unit(hw: HardwareSpec, name: str) -> ComputeUnit:
    return next(u for u in hw.units if u.name == name)


def contraction(text: str, hw: HardwareSpec = AMPERE, **inputs: str) -> KernelGroup:
    """The first contraction of a program whose inputs are given as `A="float16 64 32"`."""
    return next(g for g in partition(program(text, **inputs), hw) if g.kind is GroupKind.CONTRACTION)


def operands_of(text: str, **inputs: str) -> tuple[Operand, Operand]:
    return operands(contraction(text, **inputs))


def tiles(group: KernelGroup, unit: ComputeUnit, block: tuple[int, int, int], warp: tuple[int, int], **more: int) -> RProgram:
    """An rProgram by hand: a block's tile along m, n, k and a warp's along m, n; `more`: stages, split_k, ..."""
    names = {role: group.space.role(role)[0].name for role in (AxisRole.M, AxisRole.N, AxisRole.K)}
    one = {axis.name: 1 for axis in group.space.axes}
    whole = one | dict(zip(names.values(), block, strict=True))
    part = one | dict(zip((names[AxisRole.M], names[AxisRole.N]), warp, strict=True))
    lanes, split_k = more.pop("reduce_threads", 32), more.pop("split_k", 1)
    pipeline = PipelineOptions(**({"stages": 2} | more))
    return RProgram(group.space, unit, RTile(tuple(whole.items())), RTile(tuple(part.items())), lanes, split_k, pipeline)


def chosen(program: RProgram) -> Candidate:
    """Tiles by hand in the place of those that the model chooses."""
    return Candidate(program, UNKNOWN)
