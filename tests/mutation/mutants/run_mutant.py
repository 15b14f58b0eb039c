"""A case or a mutation of it → what the emulator says: on three inputs and orders of threads, races too if need be."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from roller_svc import hardware
from roller_svc.analysis.wide_values import Array
from roller_svc.compiler.backends import load_emulated
from roller_svc.compiler.lower_and_emit import emit_plan
from roller_svc.compiler.partition_cache import partition
from roller_svc.compiler.rank import rank_units
from roller_svc.errors import IndexRangeError, InvariantError, KernelTimeoutError, LaunchError, WrongAnswerError
from roller_svc.frontend.parse import parse
from roller_svc.ir.accumulation import AccumulatorPrecision
from roller_svc.ir.constraints import ScheduleConstraints
from roller_svc.ir.dtype import DType
from roller_svc.ir.kernel import CompiledKernel, KernelSource
from roller_svc.ir.program import TensorProgram, TensorType
from roller_svc.ir.report import Plan
from roller_svc.ir.rprogram import PipelineOptions, RProgram, RTile
from roller_svc.semantics.compare import agrees
from roller_svc.semantics.inputs import random_inputs
from roller_svc.semantics.interpreter import Value, evaluate
from roller_svc.verify.run_and_verify import accumulation_of
from tests.mutation.mutants.mutation import Case, Mutation

SEEDS = (0, 1, 2)


class Cause(Enum):
    """By what a kernel is found to be wrong."""

    NUMBERS = "wrong numbers"
    FAULT = "fault"
    RACE = "race"
    DIVERGENCE = "divergence or deadlock"
    LAUNCH = "refused launch"
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one run found. `races`: whether the run watched for races."""

    seed: int
    races: bool
    cause: Cause
    detail: str


@dataclass(frozen=True, slots=True)
class _Planned:
    """A case's program, its kernel, and how that adds products."""

    program: TensorProgram
    source: KernelSource
    sums: AccumulatorPrecision | None


def kernel(case: Case) -> tuple[TensorProgram, KernelSource]:
    """The case's program, and its kernel as it is generated."""
    planned = _planned(case)
    return planned.program, planned.source


@functools.cache
def _planned(case: Case) -> _Planned:
    types = {name: TensorType(DType(dtype), shape) for name, dtype, shape in case.inputs}
    program = parse(case.expression, types, None)
    hw = hardware.load(case.target)
    groups = partition(program, hw)
    if len(groups) != 1:
        raise InvariantError(f"{case.name} is {len(groups)} kernel groups, not one")
    candidates, _ = rank_units(groups[0], hw, 1, ScheduleConstraints(case.allow_tf32, case.unit))
    # the estimate, of other tiles, is only told in the text's first lines
    plan = Plan((dataclasses.replace(candidates[0], program=_tiled(candidates[0].program, case)),))
    return _Planned(program, emit_plan(plan, program, groups, hw), accumulation_of(plan, hw))


def _tiled(program: RProgram, case: Case) -> RProgram:
    tiles, names = case.tiles, [axis.name for axis in program.space.axes]
    block, thread = (RTile(tuple(zip(names, e, strict=True))) for e in (tiles.block, tiles.thread))
    pipeline = PipelineOptions(
        tiles.stages,
        stream_k_blocks=tiles.stream_k,
        persistent_blocks=tiles.blocks,
        cluster=tiles.cluster,
        pingpong=tiles.pingpong,
        cluster_k=tiles.cluster_k,
    )
    return dataclasses.replace(
        program, block=block, thread=thread, reduce_threads=tiles.lanes, split_k=tiles.split_k, pipeline=pipeline
    )


@functools.lru_cache(maxsize=2 * len(SEEDS))
def _reference(case: Case, seed: int) -> tuple[Mapping[str, Array], Mapping[str, Value]]:
    """Inputs, and what should come of them."""
    planned = _planned(case)
    program = planned.program
    hints = {name: {"range": (least, limit)} for name, least, limit in case.ranges}
    arrays = random_inputs(program, seed, hints)
    return arrays, evaluate(program, arrays, allow_tf32=case.allow_tf32, accumulation=planned.sums)


def findings(case: Case, source: KernelSource) -> tuple[Finding, ...]:
    """Of each seed whose run finds the kernel wrong, how. Races are watched for only where the numbers are right."""
    plain = _findings(case, source, races=False)
    return plain or _findings(case, source, races=True)


def _findings(case: Case, source: KernelSource, *, races: bool) -> tuple[Finding, ...]:
    tried = (_tried(case, source, seed, races=races) for seed in SEEDS)
    return tuple(finding for finding in tried if finding is not None)


def _tried(case: Case, source: KernelSource, seed: int, *, races: bool) -> Finding | None:
    program, _ = kernel(case)
    arrays, expected = _reference(case, seed)
    try:
        module = load_emulated(CompiledKernel(source, b"", "", ()), seed, races=races)
    except LaunchError as refused:
        return Finding(seed, races, Cause.LAUNCH, refused.message)
    try:
        found = module.run(arrays)
    except WrongAnswerError as fault:
        return Finding(seed, races, _cause(fault.message), fault.message)
    except IndexRangeError as outside:  # the inputs' indices are all inside
        return Finding(seed, races, Cause.FAULT, outside.message)
    except KernelTimeoutError as late:
        return Finding(seed, races, Cause.TIMEOUT, late.message)
    agreement = agrees(program, found, expected)
    return None if agreement.ok else Finding(seed, races, Cause.NUMBERS, agreement.detail)


def _cause(message: str) -> Cause:
    if " race: " in message:
        return Cause.RACE
    return Cause.DIVERGENCE if " divergence: " in message else Cause.FAULT


@functools.cache
def sound(case: Case) -> bool:
    """Whether the kernel as it is generated is right, and has no races."""
    _, source = kernel(case)
    return not any(_findings(case, source, races=races) for races in (False, True))


def mutated(mutation: Mutation) -> KernelSource:
    """The kernel with the bug in it."""
    _, source = kernel(mutation.case)
    return dataclasses.replace(source, text=mutation.applied(source.text))


def verdict(mutation: Mutation) -> tuple[Finding, ...]:
    """How the bug shows: nothing where it survives. Raises CompileError where it is no C++."""
    return findings(mutation.case, mutated(mutation))
