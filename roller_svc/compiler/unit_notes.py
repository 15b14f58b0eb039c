"""Plan → why a kernel that could use a matrix unit does not, in one clause for each kernel.

A kernel gets a note where a matrix unit would make the whole plan faster by MIN_GAIN, by the rooflines.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from roller_svc.analysis.operand import STAGED_KINDS, dtypes_unsupported_reason, value_dtype
from roller_svc.analysis.sum_of_products import SumOfProducts, sum_of_products
from roller_svc.compiler.partition_cache import PartitionCache
from roller_svc.compiler.plans import RankedPartition, rank_partitions
from roller_svc.fusion.contraction import MAX_FACTORS, as_contraction
from roller_svc.ir.constraints import ScheduleConstraints
from roller_svc.ir.dtype import DType
from roller_svc.ir.estimate import COMPUTE, Candidate, Construction
from roller_svc.ir.expr import Cast, Expr, axes_of, loads_of, rewrite
from roller_svc.ir.group import GroupKind, KernelGroup
from roller_svc.ir.hardware import ComputeUnit, HardwareSpec
from roller_svc.ir.printer import expression_text
from roller_svc.ir.program import TensorExpr, TensorProgram, TensorType
from roller_svc.ir.report import Plan

TF32 = "tf32 is not allowed"
MIN_GAIN = 1.2  # of a plan's time over that of another spelling, from which a note is worth reading
HALVES = (DType.FLOAT16, DType.BFLOAT16)
Alternative = tuple[str, PartitionCache, ScheduleConstraints]  # what to write, and the program and options with it


def explain_units(
    cache: PartitionCache, hw: HardwareSpec, constraints: ScheduleConstraints, ranked: RankedPartition, plan: Plan
) -> dict[str, str]:
    """Return, by the name of a kernel group, why no matrix unit computes it and what would be faster."""
    units = [unit for unit in hw.units if unit.kind in STAGED_KINDS]
    notes: dict[str, str] = {}
    if not units or constraints.op_class is not None:
        return notes
    types = dict(cache.program.types)
    for group, construction, choice in zip(ranked.groups, ranked.constructions, plan.choices, strict=True):
        if choice.program.unit.is_matrix:
            continue
        statement = _heaviest_product(group)
        if statement is None or not _may_gain(statement, construction, choice, plan, units, hw):
            continue
        types |= {s.output: s.type for s in group.statements} | dict(group.inputs)
        written = _as_written(statement, cache.program)
        cause = _cause(statement, written, group, construction, types, units, hw, allow_tf32=constraints.allow_tf32)
        advice = find_faster(_alternatives(statement, cache, constraints), hw, plan) if cause else ""
        if advice or (cause and TF32 not in cause):
            notes[group.name] = f"{_source_name(statement, cache.program)}: no matrix unit, {cause}{advice}"
    return notes


def _source_name(statement: TensorExpr, program: TensorProgram) -> str:
    """Return the name in the program of what a statement computes; that of a part is the whole's."""
    names = {s.output: s.name for s in program.statements}
    return names.get(statement.output) or names.get(statement.output.split(".")[0], statement.name)


def _as_written(statement: TensorExpr, program: TensorProgram) -> TensorExpr:
    """Return the program's statement from which a group's statement was made, if it computes the same tensor."""
    return next((s for s in program.statements if s.output == statement.output), statement)


def _wide_factors(statement: TensorExpr) -> list[Expr]:
    """Return the factors of a sum of products whose values are float32."""
    form = sum_of_products(statement)
    return [f for f in (() if form is None else _operands(form)) if (value_dtype(f) or f.dtype) is DType.FLOAT32]


def _heaviest_product(group: KernelGroup) -> TensorExpr | None:
    """Return the statement of a group with the most products of two factors; None if there is none."""
    products = [s for s in group.statements if (form := sum_of_products(s)) is not None and len(_operands(form)) > 1]
    return max(products, key=lambda s: s.points, default=None)


def _operands(form: SumOfProducts) -> list[Expr]:
    return [factor for factor in form.factors if axes_of(factor)]


def _may_gain(
    statement: TensorExpr, construction: Construction, choice: Candidate, plan: Plan, units: list[ComputeUnit], hw: HardwareSpec
) -> bool:
    """Return whether the plan's bound is lower by MIN_GAIN with the statement on a matrix unit of its width."""
    form = sum_of_products(statement)
    least_bytes = min((value_dtype(f) or f.dtype).bytes for f in (() if form is None else _operands(form)))
    wide = [unit for unit in units if unit.in_dtype.bytes >= least_bytes]
    if not wide or not construction.roofline:
        return False
    compute_s = next(bound.seconds for bound in construction.roofline if bound.level == COMPUTE)
    memory_s = max((bound.seconds for bound in construction.roofline if bound.level != COMPUTE), default=0.0)
    gained = choice.program.unit.flops_per_s / max(unit.flops_per_s for unit in wide)
    rest_s = plan.estimate.seconds - choice.estimate.seconds + hw.limits.launch_overhead_s
    return rest_s + max(compute_s, memory_s) >= MIN_GAIN * (rest_s + max(compute_s * gained, memory_s))


def _cause(
    statement: TensorExpr,
    written: TensorExpr,
    group: KernelGroup,
    construction: Construction,
    types: Mapping[str, TensorType],
    units: list[ComputeUnit],
    hw: HardwareSpec,
    *,
    allow_tf32: bool,
) -> str:
    """Return why no matrix unit computes a statement, in one clause; "" where the model prefers another unit."""
    form = sum_of_products(statement)
    if form is None:
        return ""
    first, second = sorted(_operands(form), key=lambda f: _elements(f, types))[-2:]
    dtypes = (value_dtype(first) or first.dtype, value_dtype(second) or second.dtype)
    able = [u for u in units if not dtypes_unsupported_reason(u, statement.accumulator, dtypes, allow_tf32=allow_tf32)]
    if not able:
        return _type_cause(written, statement.accumulator, dtypes, units, hw)
    if group.kind is GroupKind.CONTRACTION:
        refusals = dict(refusal.split(": ", 1) for refusal in construction.unsupported_units)
        best = max(able, key=lambda unit: unit.flops_per_s)
        return f"{best.name}: {refusals[best.name]}" if best.name in refusals else ""
    return _form_cause(statement, form, group)


def _type_cause(
    written: TensorExpr, accumulator: DType, dtypes: tuple[DType, DType], units: list[ComputeUnit], hw: HardwareSpec
) -> str:
    if any(not dtypes_unsupported_reason(unit, accumulator, dtypes, allow_tf32=True) for unit in units):
        names = dict.fromkeys(_tensor_name(factor) for factor in _wide_factors(written))
        return f"{' and '.join(names) or 'a factor'} in float32, and {TF32}"
    sums = [u.acc_dtype for u in units if not dtypes_unsupported_reason(u, u.acc_dtype, dtypes, allow_tf32=True)]
    if other := next((dtype for dtype in sums if dtype.is_float == accumulator.is_float), None):
        return f"sums in {accumulator.value}, the unit's are {other.value}"
    return f"no unit of {hw.id} multiplies {dtypes[0].value} by {dtypes[1].value}"


def _form_cause(statement: TensorExpr, form: SumOfProducts, group: KernelGroup) -> str:
    """Return why a statement is no contraction, or not one of its own."""
    for load in (load for factor in form.factors for load in loads_of(factor)):
        selected = [index for index in load.index if loads_of(index)]
        if selected:
            return f"data selects the rows of {load.tensor}: {expression_text(selected[0], {})}"
    if len(form.factors) > MAX_FACTORS:
        return f"a product of {len(form.factors)} factors"
    contraction = as_contraction(statement, is_thin=True)
    if contraction is None:
        return "a sum of so few products fills no tile"
    rows, columns = (math.prod(axis.extent for axis in axes) for axes in (contraction.m, contraction.n))
    if as_contraction(statement) is None:
        return f"its products have {rows} rows and {columns} columns, too few to fill a tile"
    return f"one kernel computes it with {len(group.statements) - 1} other statements"


def _elements(factor: Expr, types: Mapping[str, TensorType]) -> int:
    return max((types[load.tensor].elements for load in loads_of(factor)), default=0)


def _tensor_name(factor: Expr) -> str:
    """Return the name of the tensor that a factor reads, or its text if it reads several."""
    names = list(dict.fromkeys(load.tensor for load in loads_of(factor)))
    return names[0] if len(names) == 1 else "a factor"


def _alternatives(statement: TensorExpr, cache: PartitionCache, constraints: ScheduleConstraints) -> Iterator[Alternative]:
    """Yield the spellings and options that may bring a product in float32 to a matrix unit."""
    written = _as_written(statement, cache.program)
    form = sum_of_products(written)
    if form is None or statement.accumulator is not DType.FLOAT32:
        return
    wide = _wide_factors(written)
    half = next((dtype for dtype in map(value_dtype, _operands(form)) if dtype in HALVES), None)
    if len(wide) == 1 and half is not None:
        text = expression_text(wide[0], {s.output: s.name for s in cache.program.statements})
        program = _with_rounded_factor(cache.program, written, wide[0], half)
        yield f"{text}.cast(`{half.value}`)", PartitionCache(program), constraints
    if wide and not constraints.allow_tf32:
        yield "allow_tf32", cache, replace(constraints, allow_tf32=True)


def _with_rounded_factor(program: TensorProgram, statement: TensorExpr, factor: Expr, dtype: DType) -> TensorProgram:
    """Return the program with one factor of a statement rounded to a type."""
    rounded = Cast(Cast(factor, dtype), factor.dtype, implicit=True)
    body = rewrite(statement.body, lambda node: rounded if node == factor else node)
    changed = replace(statement, body=body)
    return replace(program, statements=tuple(changed if s is statement else s for s in program.statements))


def find_faster(alternatives: Iterable[Alternative], hw: HardwareSpec, plan: Plan) -> str:
    """Return the fastest alternative to a plan with its gain; "" if none is faster by MIN_GAIN."""
    found = []
    for text, cache, constraints in alternatives:
        candidates = rank_partitions(cache, hw, 1, constraints)[0].candidates
        found.append((sum(each[0].estimate.seconds for each in candidates), text))
    if not found:
        return ""
    seconds, text = min(found)
    gain = plan.estimate.seconds / seconds
    return f"; {text}: {gain:.1f} times as fast by the model" if gain >= MIN_GAIN else ""
