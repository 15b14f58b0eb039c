"""Program, device → the least time of the program, and why an estimate is far above it.

The floor depends on neither the groups nor the units of a plan, as its roofline does.
"""

from __future__ import annotations

from collections import Counter

from roller_svc.analysis.operand import can_represent_all, dtypes_unsupported_reason, value_dtype
from roller_svc.analysis.sum_of_products import sum_of_products
from roller_svc.compiler.partition_cache import PartitionCache, traits
from roller_svc.fusion.space import read_bytes
from roller_svc.ir.constraints import ScheduleConstraints
from roller_svc.ir.dtype import DType
from roller_svc.ir.estimate import COMPUTE, Candidate, Construction, ProgramFloor, RooflineBound
from roller_svc.ir.expr import Expr, axes_of, loads_of
from roller_svc.ir.group import GroupKind, KernelGroup, source_names
from roller_svc.ir.hardware import ComputeUnit, HardwareSpec, UnitKind
from roller_svc.ir.program import TensorExpr, TensorProgram, TensorType
from roller_svc.ir.report import Plan
from roller_svc.perf.common import launch_overhead_s
from roller_svc.perf.machine import prepare_machine
from roller_svc.perf.workload import find_data_level

Roofline = tuple[RooflineBound, ...]
EXPLAINED_RATIO = 3.0  # of an estimate to the floor, from which the estimate says why
MAX_NAMES = 3  # of tensors in a reason


def program_floor(cache: PartitionCache, hw: HardwareSpec, constraints: ScheduleConstraints, roofline: Roofline) -> ProgramFloor:
    """Return the floor of a program on a device.

    Args:
        roofline: Of the best plan: its operations bound those of the floor. Masked keys of attention are not computed,
            and neither are the products that Winograd's algorithm saves.
    """
    program, statements = cache.program, cache.statements(traits(hw, constraints))
    types = dict(program.types) | {s.output: s.type for s in statements}
    rates: dict[str, float] = {}
    operations: Counter[str] = Counter()
    for statement in statements:
        unit, count = _arithmetic(statement, types, hw, allow_tf32=constraints.allow_tf32)
        rates[unit.name] = unit.flops_per_s
        operations[unit.name] += count
    arithmetic_s, name = max((count / rates[unit], unit) for unit, count in operations.items())
    computed = operations[name]
    (chosen,) = [bound for bound in roofline if bound.level == COMPUTE]
    if chosen.seconds < arithmetic_s:
        arithmetic_s, computed = chosen.seconds, chosen.amount
    moved = _traffic_bytes(program, statements)
    machine = prepare_machine(hw, hw.unit_for(DType.FLOAT32))
    level = find_data_level(machine, moved)
    traffic_s = moved / machine.max_bytes_per_s(level)
    return ProgramFloor(level, moved, traffic_s, name, computed, arithmetic_s, launch_overhead_s(machine, 1))


def _traffic_bytes(program: TensorProgram, statements: tuple[TensorExpr, ...]) -> int:
    """Return the bytes of inputs that a statement reads, and of outputs."""
    writers = {s.output: s for s in statements}
    written = sum(_written_bytes(writers[tensor]) for tensor in {o.tensor for o in program.outputs})
    return read_bytes(statements, dict(program.inputs)) + written


def _written_bytes(statement: TensorExpr) -> int:
    """Return the bytes of a result; of a scatter only those that it writes, since its target may be donated."""
    written = statement.points * statement.type.dtype.bytes
    return statement.type.bytes if statement.target is None else min(written, statement.type.bytes)


def _arithmetic(
    statement: TensorExpr, types: dict[str, TensorType], hw: HardwareSpec, *, allow_tf32: bool
) -> tuple[ComputeUnit, int]:
    """Return the fastest unit of a statement, and the operations that it executes."""
    plain = hw.unit_for(statement.accumulator)
    product = sum_of_products(statement)
    factors = () if product is None else tuple(f for f in product.factors if axes_of(f))
    if len(factors) < 2:
        return plain, statement.flops
    largest = sorted(factors, key=lambda f: _factor_elements(f, types))[-2:]
    first, second = (value_dtype(f) or f.dtype for f in largest)
    units = [u for u in hw.units if _takes(u, statement.accumulator, (first, second), allow_tf32=allow_tf32)]
    return max((*units, plain), key=lambda unit: unit.flops_per_s), 2 * statement.points


def _factor_elements(factor: Expr, types: dict[str, TensorType]) -> int:
    return max((types[load.tensor].elements for load in loads_of(factor)), default=0)


def _takes(unit: ComputeUnit, accumulator: DType, factors: tuple[DType, DType], *, allow_tf32: bool) -> bool:
    if unit.kind is UnitKind.DOT:
        if unit.in_dtype.bytes == 1:
            takes = {1} == {f.bytes for f in factors}
        else:
            takes = all(can_represent_all(unit.in_dtype, f) for f in factors)
        return unit.acc_dtype is accumulator and takes
    return not dtypes_unsupported_reason(unit, accumulator, factors, allow_tf32=allow_tf32)


def reason_above_floor(
    floor: ProgramFloor,
    plan: Plan,
    groups: tuple[KernelGroup, ...],
    constructions: tuple[Construction, ...],
    roofline: Roofline,
) -> str:
    """Return why an estimate is more than EXPLAINED_RATIO times the floor, in one clause; "" if it is not."""
    if plan.estimate.seconds <= EXPLAINED_RATIO * floor.seconds:
        return ""
    chosen = plan.dominant_choice
    position = next(i for i, choice in enumerate(plan.choices) if choice is chosen)
    group, construction, own = groups[position], constructions[position], chosen.program.unit
    compute, *levels = roofline
    decides = compute.seconds > max(EXPLAINED_RATIO * floor.arithmetic_s, plan.estimate.seconds / EXPLAINED_RATIO)
    if decides and own.name != floor.unit:
        return f"{group.name} computes on {own.name}, not on {floor.unit}: {_unit_reason(group, construction, floor.unit)}"
    memory = next(bound for bound in levels if bound.level == floor.level)
    if memory.amount > EXPLAINED_RATIO * floor.traffic_bytes:
        ratio = memory.amount / floor.traffic_bytes
        return f"{memory.level} traffic is {ratio:.1f} times the least{_list_intermediates(groups)}"
    launches_s = len(groups) * floor.launch_s
    if len(groups) > 1 and launches_s > plan.estimate.seconds / 2:
        return f"launches of {len(groups)} kernels take {launches_s / plan.estimate.seconds:.0%} of the time"
    return _stage_reason(chosen, group, construction, plan, floor.traffic_bytes)


def _list_intermediates(groups: tuple[KernelGroup, ...]) -> str:
    """Return the tensors that one kernel stores and another one reads, the largest first."""
    read = {name for group in groups for name, _ in group.inputs}
    sizes = {name: type_.bytes for group in groups for name, type_ in group.stored if name in read}
    largest = sorted(sizes, key=lambda name: -sizes[name])[:MAX_NAMES]
    names = source_names(groups)
    return f": {len(groups)} kernels pass on {', '.join(names.get(id_, id_) for id_ in largest)}" if largest else ""


def _stage_reason(chosen: Candidate, group: KernelGroup, construction: Construction, plan: Plan, traffic_bytes: int) -> str:
    """Return the longest stage of the slowest kernel, and how far it is from the least for its resource.

    Args:
        traffic_bytes: Of the program's floor. Levels of a CPU whose bound is less hold only a part of the data.
    """
    longest = max(chosen.estimate.stages, key=lambda stage: stage.seconds)
    share = f"`{longest.name}` of {group.name} takes {min(longest.seconds / plan.estimate.seconds, 1.0):.0%} of the time"
    least = next((bound for bound in construction.roofline if bound.level == longest.name), None)
    if least is None or longest.seconds <= EXPLAINED_RATIO * least.seconds:
        return share
    if longest.name == COMPUTE:
        return f"{share}, at {max(least.seconds / longest.seconds, 0.01):.0%} of the rate of {chosen.program.unit.name}"
    return f"{share}: it moves each byte {longest.seconds / least.seconds:.0f} times" if least.amount >= traffic_bytes else share


def _unit_reason(group: KernelGroup, construction: Construction, unit: str) -> str:
    refusals = dict(refusal.split(": ", 1) for refusal in construction.unsupported_units)
    if unit in refusals:
        return refusals[unit]
    if group.kind is GroupKind.CONTRACTION:
        return "the model prefers it"
    return f"a {group.kind.value} of {len(group.statements)} statements is no contraction"
