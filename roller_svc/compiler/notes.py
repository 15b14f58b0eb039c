"""Program and plan → notes for the user: what is slow or looks mistaken, and what would be better.

A note is one clause. Programs that are fine have none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from roller_svc.analysis.sum_of_products import sum_of_products
from roller_svc.compiler.donation import donate_targets, find_donatable
from roller_svc.compiler.partition_cache import PartitionCache
from roller_svc.compiler.plans import RankedPartition, TargetEstimate
from roller_svc.compiler.program_floor import EXPLAINED_RATIO
from roller_svc.compiler.unit_notes import Alternative, explain_units, find_faster, multiply_by_inverses
from roller_svc.errors import StrictError
from roller_svc.families import stored_tensors
from roller_svc.ir.constraints import ScheduleConstraints
from roller_svc.ir.estimate import ProgramFloor
from roller_svc.ir.expr import Expr, axes_of, loads_of
from roller_svc.ir.group import source_names
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.kernel import Measurement
from roller_svc.ir.program import TensorExpr, TensorProgram
from roller_svc.ir.report import Plan

LARGE_WORKSPACE_BYTES = 10**9
MAX_VARIATION = 1.5  # of the median time over the least on a quiet machine
MAX_NAMES = 3  # of tensors in a note
MIN_LAUNCHES = 10  # launch overheads that a plan is above its floor: below, fixed costs decide
MIN_SHARE = 20  # of a workspace: smaller parts are not named


def find_notes(
    cache: PartitionCache,
    hw: HardwareSpec,
    constraints: ScheduleConstraints,
    ranked: RankedPartition,
    plan: Plan,
    floor: ProgramFloor,
    above_floor: str,
) -> tuple[str, ...]:
    """Return the notes on a plan.

    Args:
        ranked: The partition of the plan.
        above_floor: Why the plan is far above the program's floor; "" if it is not.
    """
    units = _square_notes(cache, hw, constraints, ranked, plan)
    units |= explain_units(cache, hw, constraints, ranked, plan, floor.seconds)
    if above_floor and _is_worth_saying(plan, floor, hw):
        slowest = ranked.groups[plan.choices.index(plan.dominant_choice)].name
        ratio = f"{plan.estimate.seconds / floor.seconds:.1f} times the program's floor"
        if slowest in units:
            units[slowest] += f"; {ratio}"
        else:
            units[slowest] = f"{ratio}: {above_floor}{find_faster(_alternatives(cache, constraints), hw, plan, {})}"
    return (*_program_notes(cache.program), *units.values(), *_workspace_notes(cache.program, hw, ranked, plan))


def _is_worth_saying(plan: Plan, floor: ProgramFloor, hw: HardwareSpec) -> bool:
    """Return whether a plan is far above its floor by more than fixed costs, even with all data in DRAM."""
    from_dram_s = floor.traffic_bytes / hw.dram.bandwidth_bytes_per_s
    cold_s = max(floor.arithmetic_s, from_dram_s) + floor.launch_s
    excess_s = plan.estimate.seconds - floor.seconds
    return plan.estimate.seconds > EXPLAINED_RATIO * cold_s and excess_s > MIN_LAUNCHES * hw.limits.launch_overhead_s


def add_notes(
    cache: PartitionCache, estimate: TargetEstimate, constraints: ScheduleConstraints, *, strict: bool = False
) -> TargetEstimate:
    """Return an estimate with notes on its first plan. Raises StrictError if there are any and `strict` is set."""
    first, above_floor = estimate.plans[0], estimate.reasons[0]
    notes = find_notes(cache, estimate.spec, constraints, estimate.ranked, first, estimate.floor, above_floor)
    if strict:
        reject_notes(notes)
    return replace(estimate, notes=notes)


def busy_notes(measurement: Measurement | None) -> Iterator[str]:
    """Explain that times of the chosen kernel varied: other processes used the machine."""
    if measurement is not None and measurement.median_s > MAX_VARIATION * measurement.min_s:
        ratio = measurement.median_s / measurement.min_s
        yield f"the machine was busy: the median time is {ratio:.1f} times the least, another choice may be faster"


def reject_notes(notes: Sequence[str]) -> None:
    """Raise StrictError if there are notes."""
    if notes:
        raise StrictError("; ".join(notes), hint="docs/limits.md explains what is slow; without strict these are notes")


def _alternatives(cache: PartitionCache, constraints: ScheduleConstraints) -> Iterator[Alternative]:
    """Yield the program that multiplies by inverses, and that whose scatters overwrite the inputs that they now copy."""
    yield from multiply_by_inverses(cache, constraints)
    program = cache.program
    targets = find_donatable(program)
    if targets:
        yield f"donate {', '.join(targets)}", PartitionCache(donate_targets(program, targets)), constraints


def _square_notes(
    cache: PartitionCache, hw: HardwareSpec, constraints: ScheduleConstraints, ranked: RankedPartition, plan: Plan
) -> dict[str, str]:
    """Return, by the name of a kernel group, what is gained if its squares of differences become products."""
    squares = frozenset[str]() if constraints.allow_expanded_squares else cache.rounded_squares(hw)
    group = next((group for group in ranked.groups if any(s.output in squares for s in group.statements)), None)
    if group is None:
        return {}
    allowing = replace(constraints, allow_expanded_squares=True)
    gain = find_faster([("allow_expanded_squares", cache, allowing)], hw, plan, {})
    name = next(s.name for s in cache.program.statements if s.output in squares)
    return {group.name: f"{name}: squares of differences are not expanded{gain}"} if gain else {}


def _program_notes(program: TensorProgram) -> Iterator[str]:
    read = {tensor for statement in program.statements for tensor in statement.reads_tensors}
    read |= {output.tensor for output in program.outputs}
    for name, _ in program.inputs:
        if name not in read:
            yield f"input {name} is not read"
    for statement in program.statements:
        yield from _lone_index_notes(statement)


def _lone_index_notes(statement: TensorExpr) -> Iterator[str]:
    """Explain that factors of a sum of products have no index in common.

    The sum over an index of one factor alone is the same for every value of the others' indices.
    """
    form = sum_of_products(statement)
    if form is None:
        return
    for axis in form.reduced:
        own, _ = form.split(axis.name)
        others = [each for each in form.reduced if each.name not in axes_of(own[0])] if len(own) == 1 else []
        if not others or axis.extent == 1:
            continue
        lone = f"{statement.name}: index {axis.name} occurs in {_first_tensor(own[0])} alone"
        equal = next((each for each in others if each.extent == axis.extent and len(form.split(each.name)[0]) == 1), None)
        if equal is None:
            yield f"{lone}: its sum could be computed once"
        else:
            other = _first_tensor(form.split(equal.name)[0][0])
            yield f"{lone}, and {equal.name} in {other}; are they meant to be one index?"
        return


def _first_tensor(factor: Expr) -> str:
    return next((load.tensor for load in loads_of(factor)), "a factor")


def _workspace_notes(program: TensorProgram, hw: HardwareSpec, ranked: RankedPartition, plan: Plan) -> Iterator[str]:
    """Explain a workspace of more than LARGE_WORKSPACE_BYTES: what is in it."""
    outside = {name for name, _ in program.inputs} | {output.tensor for output in program.outputs}
    stored = {
        name: type_
        for group, choice in zip(ranked.groups, plan.choices, strict=True)
        for name, type_ in stored_tensors(group, choice.program, hw).items()
        if name not in outside
    }
    sizes = {name: type_.bytes for name, type_ in stored.items()}
    total = sum(sizes.values())
    if total > LARGE_WORKSPACE_BYTES:
        largest = sorted(sizes, key=lambda name: -sizes[name])[:MAX_NAMES]
        names = source_names(ranked.groups)
        listed = ", ".join(f"{names.get(id_, id_)} {sizes[id_] / 1e9:.2f}" for id_ in largest if sizes[id_] * MIN_SHARE >= total)
        yield f"a call takes {total / 1e9:.2f} GB of workspace: {listed}"
