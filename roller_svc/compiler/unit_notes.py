"""Plan → why a kernel that could use a matrix unit does not, in one clause for each kernel.

A kernel gets a note where a matrix unit would make the whole plan faster by MIN_GAIN, by the rooflines. Where float32
is multiplied by 16 bits, estimates decide: rounding may leave fewer kernels, of which rooflines know nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeGuard

from roller_svc.analysis.operand import STAGED_KINDS, dtypes_unsupported_reason, value_dtype
from roller_svc.analysis.sum_of_products import SumOfProducts, product_of, sum_of_products
from roller_svc.compiler.partition_cache import PartitionCache
from roller_svc.compiler.plans import RankedPartition, rank_partitions
from roller_svc.compiler.rank import construct, rank_units
from roller_svc.errors import NoCandidateError
from roller_svc.families.matching import units_for
from roller_svc.fusion.contraction import MAX_FACTORS, MIN_K, Contraction, as_contraction
from roller_svc.fusion.partition import MIN_TILED_ROWS
from roller_svc.fusion.scaled_sums import apply_scales_last
from roller_svc.ir.constraints import ScheduleConstraints
from roller_svc.ir.dtype import DType
from roller_svc.ir.estimate import COMPUTE, Candidate, Construction
from roller_svc.ir.expr import Cast, Const, Expr, Load, Op, OpKind, axes_of, iter_subexpressions, loads_of, rewrite
from roller_svc.ir.group import GroupKind, KernelGroup
from roller_svc.ir.hardware import ComputeUnit, HardwareSpec
from roller_svc.ir.printer import expression_text
from roller_svc.ir.program import StatementKind, TensorExpr, TensorProgram
from roller_svc.ir.report import Plan

AVOIDABLE = ("tf32 is not allowed", "takes allow_tf32")  # ends of causes that an option avoids: a gain decides
MIN_GAIN = 1.2  # of a plan's time over that of another spelling, from which a note is worth reading
TIE_RATIO = 1.05  # of the times of two spellings, up to which the first is better
HALVES = (DType.FLOAT16, DType.BFLOAT16)
Alternative = tuple[str, PartitionCache, ScheduleConstraints]  # what to write, and the program and options with it


@dataclass(frozen=True, slots=True)
class _Product:
    """The sum of products of a kernel group that takes the most arithmetic."""

    group: KernelGroup
    construction: Construction
    choice: Candidate
    statement: TensorExpr  # without `guard`
    written: TensorExpr  # of the program
    form: SumOfProducts
    factors: tuple[Expr, ...]
    guard: Expr | None  # of the product of all factors

    def dtypes(self, stored: Mapping[str, DType]) -> tuple[DType, DType]:
        """Return the types of the values of both largest factors. `stored` has those of tensors with narrower values."""
        types = dict(self.group.inputs) | {s.output: s.type for s in self.group.statements}

        def elements(factor: Expr) -> int:
            return max((types[load.tensor].elements for load in loads_of(factor) if load.tensor in types), default=0)

        def value_type(factor: Expr) -> DType:
            if isinstance(factor, Load) and factor.tensor in stored:
                return stored[factor.tensor]
            return value_dtype(factor) or factor.dtype

        first, second = map(value_type, sorted(self.factors, key=elements)[-2:])
        return first, second


def explain_units(
    cache: PartitionCache, hw: HardwareSpec, constraints: ScheduleConstraints, ranked: RankedPartition, plan: Plan, floor_s: float
) -> dict[str, str]:
    """Return, by the name of a kernel group, why no matrix unit computes it, or a slow one, and what would be faster.

    `floor_s` is the least time of the program.
    """
    units = [unit for unit in hw.units if unit.kind in STAGED_KINDS]
    notes: dict[str, str] = {}
    if not units or constraints.op_class is not None:
        return notes
    kernels = zip(ranked.groups, ranked.constructions, plan.choices, strict=True)
    products = [product for kernel in kernels if (product := _heaviest_product(*kernel, cache.program)) is not None]
    slow = [product for product in products if not product.choice.program.unit.is_matrix]
    is_above_floor = plan.estimate.seconds >= MIN_GAIN * floor_s
    if not _may_gain(slow, plan, units, hw):
        slow = [product for product in slow if is_above_floor and _has_wide_and_half(product.written)]
    known: dict[tuple[TensorProgram, ScheduleConstraints], float] = {}
    attention = _refused_attention(cache, hw, constraints, ranked) if is_above_floor else {}
    for product in products:
        if refusal := attention.get(product.statement.output):
            what = "" if product.choice.program.unit.is_matrix else "no matrix unit, "
            notes[product.group.name] = f"{_source_name(product.statement, cache.program)}: {what}{refusal}"
            attention = {name: other for name, other in attention.items() if other != refusal}
            continue
        what, cause = "no matrix unit", ""
        if product.choice.program.unit.is_matrix:
            what = "not on a faster unit"
            if not constraints.allow_tf32:
                cause = _faster_refused(product, units, ranked)
        elif product in slow:
            cause = _cause(product, units, hw, allow_tf32=constraints.allow_tf32)
        is_avoidable = cause.endswith(AVOIDABLE)  # one option for all products, which gain together
        if not cause and (divisors := _divisors(product.written)):
            cause, is_avoidable = f"factors are divided by {_names(divisors)} first, in float32", True
        if not product.choice.program.unit.is_matrix and not is_avoidable and not _may_gain([product], plan, units, hw):
            continue
        advice = ""
        if cause:
            advice = find_faster(_alternatives(product, cache, constraints, is_avoidable=is_avoidable), hw, plan, known)
        if advice or (cause and not is_avoidable):
            notes[product.group.name] = f"{_source_name(product.statement, cache.program)}: {what}, {cause}{advice}"
    return notes


def _refused_attention(
    cache: PartitionCache, hw: HardwareSpec, constraints: ScheduleConstraints, ranked: RankedPartition
) -> dict[str, str]:
    """Return why attention is not one kernel, by each tensor that the kernel would compute; none where it may be one."""
    refused: dict[str, str] = {}
    for groups in cache.partitions(hw):
        for group in (group for group in groups if group.attention is not None):
            causes = _broken_rules(group, hw, constraints) or _lost_time(group, groups, hw, constraints, ranked)
            if causes and group.attention is not None:
                cause = f"attention is not one kernel ({'; '.join(causes)})"
                names = (group.statements[0].output, *(s.output for s in group.attention.softmax_statements))
                refused |= dict.fromkeys(names, cause)
    return refused


def _broken_rules(group: KernelGroup, hw: HardwareSpec, constraints: ScheduleConstraints) -> list[str]:
    """Return the rule that most tiles of a group break, for each unit; none if a tile fits one of them."""
    causes = []
    for unit in units_for(group, hw, constraints).units:
        try:
            construct(group, hw, unit)
        except NoCandidateError as failure:
            rules = sorted(failure.rejections.items(), key=lambda rule: -rule[1])
            causes.append(f"{unit.name}: {rules[0][0] if rules else failure.message}")
        else:
            return []
    return causes


def _lost_time(
    group: KernelGroup,
    groups: tuple[KernelGroup, ...],
    hw: HardwareSpec,
    constraints: ScheduleConstraints,
    ranked: RankedPartition,
) -> list[str]:
    """Return how much longer a group takes than the kernels of the plan in its place, though its bound is lower by MIN_GAIN.

    `groups` is the partition of the group. None where the plan has the group, or differs elsewhere too.
    """
    others = [(each.statements, each.attention) for each in groups if each is not group]
    kernels = zip(ranked.groups, ranked.constructions, ranked.candidates, strict=True)
    parts = [(found, best[0]) for each, found, best in kernels if (each.statements, each.attention) not in others]
    if len(parts) < 2 or len(others) + len(parts) != len(ranked.groups) or not units_for(group, hw, constraints).units:
        return []
    try:
        (best, *_), construction = rank_units(group, hw, 1, constraints)
    except NoCandidateError:  # the caller's tiles fit the plan's kernels alone
        return []
    seconds, parts_s = best.estimate.seconds, sum(each.estimate.seconds for _, each in parts)
    bound_s, bound_of_parts_s = (
        sum(hw.limits.launch_overhead_s + max(bound.seconds for bound in each.roofline) for each in constructions)
        for constructions in ((construction,), [found for found, _ in parts])
    )
    if bound_of_parts_s < MIN_GAIN * bound_s or seconds < TIE_RATIO * parts_s:
        return []
    return [f"{best.program.unit.name}: {seconds / parts_s:.1f} times as long by the model"]


def _source_name(statement: TensorExpr, program: TensorProgram) -> str:
    """Return the name in the program of what a statement computes; that of a part is the whole's."""
    written = _written(statement, program)
    return statement.name if written is None else written.name


def _written(statement: TensorExpr, program: TensorProgram) -> TensorExpr | None:
    """Return the statement of the program that a statement is, or is a part of."""
    statements = {s.output: s for s in program.statements}
    return statements.get(statement.output) or statements.get(statement.output.split(".")[0])


def _heaviest_product(group: KernelGroup, construction: Construction, choice: Candidate, program: TensorProgram) -> _Product | None:
    """Return the sum of a group with the most products of two factors; None if there is none."""
    products = []
    for statement in group.statements:
        form, guard = sum_of_products(statement), None
        if form is not None and len(_operands(form)) == 1 and form.selects:
            guard, statement = form.selects[0].cond, replace(statement, body=form.selects[0].then)
            form = sum_of_products(statement)
        if form is not None and len(factors := _operands(form)) > 1:
            written = _written(statement, program) or statement
            products.append(_Product(group, construction, choice, statement, written, form, factors, guard))
    return max(products, key=lambda each: each.statement.points, default=None)


def _operands(form: SumOfProducts | None) -> tuple[Expr, ...]:
    return () if form is None else tuple(factor for factor in form.factors if axes_of(factor))


def _wide_factors(statement: TensorExpr) -> list[Expr]:
    """Return the factors of a sum of products whose values are float32."""
    return [f for f in _operands(sum_of_products(statement)) if (value_dtype(f) or f.dtype) is DType.FLOAT32]


def _half_factor(statement: TensorExpr) -> DType | None:
    """Return the 16-bit type of a factor of a sum of products; None if there is none."""
    return next((dtype for f in _operands(sum_of_products(statement)) if (dtype := value_dtype(f)) in HALVES), None)


def _has_wide_and_half(statement: TensorExpr) -> bool:
    """Return whether a sum multiplies float32 by 16 bits: a rounding may make attention of it, with fewer kernels."""
    return bool(_wide_factors(statement)) and _half_factor(statement) is not None


def _may_gain(products: list[_Product], plan: Plan, units: list[ComputeUnit], hw: HardwareSpec) -> bool:
    """Return whether the plan's bound is lower by MIN_GAIN with products on matrix units of their width."""
    now_s = gained_s = plan.estimate.seconds
    for product in products:
        least_bytes = min((value_dtype(factor) or factor.dtype).bytes for factor in product.factors)
        wide = [unit for unit in units if unit.in_dtype.bytes >= least_bytes]
        roofline, choice = product.construction.roofline, product.choice
        if not wide or not roofline:
            continue
        compute_s = next(bound.seconds for bound in roofline if bound.level == COMPUTE)
        memory_s = max((bound.seconds for bound in roofline if bound.level != COMPUTE), default=0.0)
        gained = choice.program.unit.flops_per_s / max(unit.flops_per_s for unit in wide)
        rest_s = hw.limits.launch_overhead_s - choice.estimate.seconds
        now_s += rest_s + max(compute_s, memory_s)
        gained_s += rest_s + max(compute_s * gained, memory_s)
    return now_s >= MIN_GAIN * gained_s


def _refusals(product: _Product) -> dict[str, str]:
    return dict(refusal.split(": ", 1) for refusal in product.construction.unsupported_units)


def _faster_refused(product: _Product, units: list[ComputeUnit], ranked: RankedPartition) -> str:
    """Return the fastest unit that only allow_tf32 keeps from the product, and why; "" if there is none.

    Copies of operands have the types of other units, and the values of what they copy.
    """
    maps = (s for group in ranked.groups for s in group.statements if s.kind is StatementKind.MAP)
    dtypes = product.dtypes({s.output: value_dtype(s.body) or s.type.dtype for s in maps})
    accumulator, own = product.statement.accumulator, product.choice.program.unit
    able = [u for u in units if not dtypes_unsupported_reason(u, accumulator, dtypes, allow_tf32=True)]
    best = max(able, key=lambda unit: unit.flops_per_s, default=own)
    if best.flops_per_s < MIN_GAIN * own.flops_per_s:
        return ""
    refusal = _refusals(product).get(best.name, "")
    return f"{best.name}: {refusal if refusal.endswith(AVOIDABLE) else f'it {AVOIDABLE[1]}'}"


def _cause(product: _Product, units: list[ComputeUnit], hw: HardwareSpec, *, allow_tf32: bool) -> str:
    """Return why no matrix unit computes a product, in one clause; "" where the model prefers another unit."""
    accumulator = product.statement.accumulator
    first, second = product.dtypes({})
    able = [u for u in units if not dtypes_unsupported_reason(u, accumulator, (first, second), allow_tf32=allow_tf32)]
    if not able:  # no other option brings a product without tiles to a matrix unit
        is_lost = _is_thin(product.statement) and not _has_wide_and_half(product.written)
        return "" if is_lost else _type_cause(product, (first, second), units, hw)
    if product.guard is not None:
        return f"the condition {expression_text(product.guard, {})} depends on both factors"
    if product.group.kind is GroupKind.CONTRACTION:
        refusals, best = _refusals(product), max(able, key=lambda unit: unit.flops_per_s)
        return f"{best.name}: {refusals[best.name]}" if best.name in refusals else ""
    return _form_cause(product)


def _type_cause(product: _Product, dtypes: tuple[DType, DType], units: list[ComputeUnit], hw: HardwareSpec) -> str:
    accumulator = product.statement.accumulator
    if any(not dtypes_unsupported_reason(unit, accumulator, dtypes, allow_tf32=True) for unit in units):
        names = dict.fromkeys(_tensor_name(factor) for factor in _wide_factors(product.written))
        return f"{' and '.join(names) or 'a factor'} in float32, and tf32 is not allowed"
    sums = [u.acc_dtype for u in units if not dtypes_unsupported_reason(u, u.acc_dtype, dtypes, allow_tf32=True)]
    if other := next((dtype for dtype in sums if dtype.is_float == accumulator.is_float), None):
        return f"sums in {accumulator.value}, the unit's are {other.value}"
    return f"no unit of {hw.id} multiplies {dtypes[0].value} by {dtypes[1].value}"


def _form_cause(product: _Product) -> str:
    """Return why a statement is not a contraction, or not one of its own."""
    for load in (load for factor in product.factors for load in loads_of(factor)):
        selected = [index for index in load.index if loads_of(index)]
        if selected:
            return f"data selects the rows of {load.tensor}: {expression_text(selected[0], {})}"
    if len(product.form.factors) > MAX_FACTORS:
        return f"a product of {len(product.form.factors)} factors"
    contraction = as_contraction(product.statement, is_thin=True)
    if contraction is None:
        return f"fewer than {MIN_K} products a sum fill no tile"
    rows, columns = _sides(contraction)
    if min(rows, columns) < MIN_TILED_ROWS:
        return f"its products have {rows} x {columns} rows and columns, too few to fill a tile"
    return f"one kernel computes it with {len(product.group.statements) - 1} other statements"


def _is_thin(statement: TensorExpr) -> bool:
    """Return whether a sum of products has too few rows or columns for tiles, as a sum of squares does."""
    contraction = as_contraction(statement, is_thin=True)
    return contraction is not None and min(_sides(contraction)) < MIN_TILED_ROWS


def _sides(contraction: Contraction) -> tuple[int, int]:
    """Return the rows and the columns of a contraction."""
    rows, columns = (math.prod(axis.extent for axis in axes) for axes in (contraction.m, contraction.n))
    return rows, columns


def _tensor_name(factor: Expr) -> str:
    """Return the name of the tensor that a factor reads, but for indices; "a factor" if it reads several."""
    loads = loads_of(factor)
    indices = {inner for load in loads for index in load.index for inner in loads_of(index)}
    names = list(dict.fromkeys(load.tensor for load in loads if load not in indices))
    return names[0] if len(names) == 1 else "a factor"


def _alternatives(
    product: _Product, cache: PartitionCache, constraints: ScheduleConstraints, *, is_avoidable: bool
) -> Iterator[Alternative]:
    """Yield the spellings and options that may bring a product in float32, or of float8, to a faster unit: exact ones first."""
    wide = _wide_factors(product.written)
    yield from multiply_by_inverses(cache, constraints)
    yield from _scale_sums(product.statement.output.split(".")[0], cache, constraints)
    if wide and product.statement.accumulator is DType.FLOAT32:
        yield from _round_operand(product.written, cache, constraints)
    if (is_avoidable or wide) and not constraints.allow_tf32:
        yield "allow_tf32", cache, replace(constraints, allow_tf32=True)


def _round_operand(statement: TensorExpr, cache: PartitionCache, constraints: ScheduleConstraints) -> Iterator[Alternative]:
    """Yield the program that rounds to 16 bits what it multiplies by a factor of 16 bits: one factor, or several."""
    form, program = sum_of_products(statement), cache.program
    others = [factor for factor in _operands(form) if value_dtype(factor) not in HALVES]
    half = _half_factor(statement)
    if form is None or half is None or (len(others) > 1 and form.selects):
        return
    rounded = Cast(Cast(product_of(others), half), DType.FLOAT32, implicit=True)
    if len(others) == 1:
        text = f"{expression_text(others[0], {s.output: s.name for s in program.statements})}.cast(`{half.value}`)"
        body = rewrite(statement.body, lambda node: rounded if node == others[0] else node)
    else:
        text = f"{_names(others, ' * ')} in {half.value}"
        body = product_of([*(factor for factor in form.factors if factor not in others), rounded])
    changed = replace(statement, body=body)
    statements = tuple(changed if s is statement else s for s in program.statements)
    yield text, PartitionCache(replace(program, statements=statements)), constraints


def _scale_sums(name: str, cache: PartitionCache, constraints: ScheduleConstraints) -> Iterator[Alternative]:
    """Yield the program that applies the scales of a sum after it.

    Sums of bfloat16 may exceed the range of float32 where scaled products do not: only the user may choose it.
    """
    program = cache.program
    statement = next((s for s in program.statements if s.output == name), None)
    form = None if statement is None else sum_of_products(statement)
    if statement is None or form is None or form.selects:
        return
    reduced = {axis.name for axis in form.reduced}
    scales = [f for f in _operands(form) if axes_of(f).isdisjoint(reduced)]
    parts = apply_scales_last(statement, form, may_exceed_range=True) if scales else None
    if parts is not None:
        statements = tuple(each for s in program.statements for each in (parts if s is statement else (s,)))
        names = dict.fromkeys(scale.tensor if isinstance(scale, Load) else _tensor_name(scale) for scale in scales)
        yield f"{' and '.join(names)} after the sum", PartitionCache(replace(program, statements=statements)), constraints


def multiply_by_inverses(cache: PartitionCache, constraints: ScheduleConstraints) -> Iterator[Alternative]:
    """Yield the program whose sums multiply by the inverses of the scales that they divide by.

    A quotient is rounded once, its product with an inverse twice: only the user may choose it.
    """
    program = cache.program
    divisors = [divisor for statement in program.statements for divisor in _divisors(statement)]
    if divisors:
        one = Const(1.0, DType.FLOAT32)

        def change(node: Expr) -> Expr:
            if _is_scaled_down(node):
                inverses = (Op(OpKind.DIV, (one, each), DType.FLOAT32) for each in _factors(node.args[1]))
                return product_of([node.args[0], *inverses])
            return node

        statements = tuple(replace(s, body=rewrite(s.body, change)) if _divisors(s) else s for s in program.statements)
        changed = PartitionCache(replace(program, statements=statements))
        yield f"multiply by inverses of {_names(divisors)}", changed, constraints


def _divisors(statement: TensorExpr) -> list[Expr]:
    """Return the scales that a sum's products are divided by."""
    if sum_of_products(statement) is None:
        return []
    return [each for node in iter_subexpressions(statement.body) if _is_scaled_down(node) for each in _factors(node.args[1])]


def _factors(divisor: Expr) -> list[Expr]:
    """Return the factors of a product in float32."""
    if isinstance(divisor, Op) and divisor.kind is OpKind.MUL:
        return [each for arg in divisor.args for each in _factors(arg)]
    return [divisor]


def _is_scaled_down(node: Expr) -> TypeGuard[Op]:
    """Return whether a value in float32 is divided by one that is read."""
    return (
        isinstance(node, Op)
        and node.kind is OpKind.DIV
        and node.dtype is DType.FLOAT32
        and not isinstance(node.args[0], Const)
        and bool(loads_of(node.args[1]))
    )


def _names(factors: Iterable[Expr], between: str = " and ") -> str:
    return between.join(dict.fromkeys(map(_tensor_name, factors)))


def find_faster(
    alternatives: Iterable[Alternative],
    hw: HardwareSpec,
    plan: Plan,
    known: dict[tuple[TensorProgram, ScheduleConstraints], float],
) -> str:
    """Return the first of the fastest alternatives to a plan with its gain; "" if none is faster by MIN_GAIN.

    `known` has the seconds of programs that were estimated, and gets those of others.
    """
    found = []
    for text, cache, constraints in alternatives:
        key = cache.program, constraints
        if key not in known:
            try:
                candidates = rank_partitions(cache, hw, 1, constraints)[0].candidates
            except NoCandidateError:  # the caller's tiles fit the plan alone
                continue
            known[key] = sum(each[0].estimate.seconds for each in candidates)
        found.append((known[key], text))
    if not found:
        return ""
    least_s = min(seconds for seconds, _ in found)
    seconds, text = next(each for each in found if each[0] <= TIE_RATIO * least_s)
    gain = plan.estimate.seconds / seconds
    return f"; {text}: {gain:.1f} times as fast by the model" if gain >= MIN_GAIN else ""
