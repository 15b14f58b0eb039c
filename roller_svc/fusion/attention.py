"""Attention in programs: two contractions around a softmax, matched by their algebra.

The pattern is QK^T, scores, their maximum over the keys, the sum of exp(score - maximum), and the contraction of these
exponentials with V, divided by the sum before or after it. One kernel then keeps a running maximum and sum and stores
no scores (FlashAttention-2: Dao, arXiv:2307.08691).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from roller_svc.analysis.inlining import inline_loads
from roller_svc.analysis.operand import can_represent_all, value_dtype
from roller_svc.analysis.sum_of_products import SumOfProducts, product_of, sum_of_products
from roller_svc.fusion.attention_rows import (
    RowStatements,
    RowValues,
    align,
    largest_unmasked,
    strip_float_casts,
    take_result,
    times,
)
from roller_svc.fusion.contraction import Contraction
from roller_svc.ir.attention import Attention, RowResults, state_names
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import (
    Cast,
    Const,
    Expr,
    Load,
    Op,
    OpKind,
    Select,
    axes_of,
    iter_subexpressions,
    loads_of,
    rewrite,
)
from roller_svc.ir.index import require_expr
from roller_svc.ir.program import Axis, AxisKind, Combine, StatementKind, TensorExpr, identity

MAX_FLOAT32 = (2.0 - 2.0**-23) * 2.0**127
_LOG_OF_BASE = {OpKind.EXP: 1.0, OpKind.EXP2: math.log(2.0)}


@dataclass(frozen=True, slots=True)
class Exponential:
    """exp(scale (score - reference)), or 0 where a condition fails. The reference is a value of the row."""

    score: Expr
    scale: float
    reference: Expr
    dtype: DType = field(compare=False)  # of the score: the reference may promote the exponential
    cond: Expr | None = None  # the score is minus infinity elsewhere


def exponential(expr: Expr, score: Expr, rows: frozenset[str]) -> Exponential | None:
    """Match exp(scale (score - reference)) of the score that is given; `rows` are the axes of rows.

    An exponential that a condition sets to 0 counts as that of a score of minus infinity. The reference, which only
    avoids overflow, may then be the maximum of the other scores.
    """
    match strip_float_casts(expr):
        case Select(cond=cond, then=then, otherwise=otherwise) if value_dtype(otherwise) is None:
            inner = exponential(then, score, rows)
            if inner is None or inner.cond is not None:
                return None
            return replace(inner, score=_masked(cond, inner.score), cond=cond)
        case Op(kind=kind, args=(exponent,)) if kind in _LOG_OF_BASE:
            below, factor = _scaled(strip_float_casts(exponent))
            value, reference = _subtracted(below, rows)
            if factor > 0 and strip_float_casts(value) == strip_float_casts(score):
                return Exponential(score, factor * _LOG_OF_BASE[kind], reference, _computed_dtype(value))
            return None
        case _:
            return None


def _subtracted(below: Expr, rows: Collection[str]) -> tuple[Expr, Expr]:
    """Return (x, r) of a difference x - r with a value of the row; otherwise 0 is subtracted."""
    match below:
        case Op(kind=OpKind.SUB, args=(value, row)) if axes_of(row) <= set(rows):
            return value, strip_float_casts(row)
        case _:
            return below, Const(0.0, DType.FLOAT32)


def _computed_dtype(value: Expr) -> DType:
    """Return the type of a value before it is promoted."""
    while isinstance(value, Cast) and value.implicit:
        value = value.arg
    return value.dtype


def _masked(cond: Expr, score: Expr) -> Expr:
    """Return the score where the condition holds, else minus infinity."""
    match strip_float_casts(score):
        case Select(cond=same, then=then) if same == cond:
            score = then
    return Select(cond, score, identity(Combine.MAX, score.dtype), score.dtype)


def _scaled(expr: Expr) -> tuple[Expr, float]:
    """Return (x, c) of a product c x, or of a division by a constant."""
    match expr:
        case Op(kind=OpKind.MUL, args=(x, Const(value=c))) | Op(kind=OpKind.MUL, args=(Const(value=c), x)):
            return strip_float_casts(x), float(c)
        case Op(kind=OpKind.DIV, args=(x, Const(value=c))) if c:
            return strip_float_casts(x), 1.0 / float(c)
        case _:
            return expr, 1.0


def _factor_out(exponent: Exponential) -> Exponential:
    """Move a positive constant factor of the scores to the scale, which costs nothing in the exponent.

    A constant score of masked keys is divided by the factor. It must stay a finite float32 if it was one.
    """
    match exponent.score:
        case Select(cond=cond, then=then, otherwise=Const(value=fill) as otherwise, dtype=dtype):
            inner = _factor_out(replace(exponent, score=then))
            scaled = float(fill) * exponent.scale / inner.scale
            if math.isfinite(fill) and abs(scaled) > MAX_FLOAT32:
                return exponent
            masked = Select(cond, inner.score, replace(otherwise, value=scaled), dtype)
            return replace(exponent, score=masked, scale=inner.scale)
        case Cast(arg=arg) if exponent.score.dtype is arg.dtype:
            return _factor_out(replace(exponent, score=arg))
        case Op(kind=OpKind.MUL | OpKind.DIV, dtype=dtype) if dtype.compute is DType.FLOAT32:
            score, factor = _scaled(exponent.score)
            if score.dtype is dtype and 0 < factor < math.inf:
                return replace(exponent, score=score, scale=exponent.scale * factor)
            return exponent
        case _:
            return exponent


HALF_DTYPES = (
    DType.FLOAT16,
    DType.BFLOAT16,
)  # operand types: fragments of tf32 have another layout than accumulators


@dataclass(frozen=True, slots=True)
class AttentionMatch:
    """A match of attention."""

    pv: TensorExpr  # the second contraction
    contraction: Contraction
    attention: Attention


def match_attentions(
    statements: tuple[TensorExpr, ...], outputs: Collection[str], dtypes: Collection[DType]
) -> tuple[tuple[TensorExpr, ...], Mapping[str, AttentionMatch]]:
    """Match attention. Returns the statements with one for each match, and the matches by its tensor.

    `dtypes` are the allowed operand types of the matrix unit.
    """
    matches: dict[str, AttentionMatch] = {}
    # of products that are added, the one of fewest features is computed in the kernel; the others are read
    order = sorted(statements, key=lambda s: (_first_reduction(s, statements), math.prod(a.extent for a in s.reduced)))
    for name in [s.output for s in order]:
        # an earlier match may have changed the statement: its readers read quotients
        qk = next((s for s in statements if s.output == name), None)
        scores = None if qk is None else sum_of_products(qk)
        if qk is None or scores is None or name in matches:
            continue
        chain = _chain(qk, scores, statements, outputs)
        found = None if chain is None else _attention(chain, statements, outputs)
        if found is not None and found[0].attention.dtype in dtypes:
            match, statements = found
            matches[match.pv.output] = match
    return statements, matches


def _first_reduction(dots: TensorExpr, statements: Sequence[TensorExpr]) -> int:
    """Return the place of the first reduction that reads a tensor, or maps of it: attention comes before what reads it."""
    names = {dots.output}
    for place, statement in enumerate(statements):
        if not names.isdisjoint(statement.reads_tensors):
            if statement.kind is not StatementKind.MAP:
                return place
            names.add(statement.output)
    return len(statements)


@dataclass(frozen=True, slots=True)
class _Chain:
    """All reductions that read QK^T, with maps inlined and axes named as those of QK^T."""

    qk: TensorExpr
    scores: SumOfProducts  # of qk
    rows: RowStatements
    pv: TensorExpr
    values: SumOfProducts  # of pv
    maps: frozenset[str]

    @property
    def key(self) -> Axis:
        return self.rows.row_sum.reduced[0]

    @property
    def replaced(self) -> frozenset[str]:
        """Return the tensors of the statements that attention replaces, but for its result."""
        return frozenset((self.qk.output, *self.maps)) | self.rows.names


def _chain(dots: TensorExpr, scores: SumOfProducts, statements: Sequence[TensorExpr], wanted: Collection[str]) -> _Chain | None:
    depending = _depending_on(dots.output, statements)
    reductions = [s for s in depending if s.kind is not StatementKind.MAP]
    read = {dots.output, *(s.output for s in depending if s.kind is StatementKind.MAP)}
    if not read.isdisjoint(wanted) or len(reductions) not in (2, 3) or any(s.kind is not StatementKind.REDUCE for s in reductions):
        return None  # before maps are inlined: most sums of products have other readers
    maps: dict[str, TensorExpr] = {}
    readers: list[TensorExpr] = []
    for statement in depending:
        inlined = inline_loads(statement, maps)
        if inlined is None:
            return None
        if statement.kind is StatementKind.MAP:
            maps[statement.output] = inlined
        else:
            readers.append(inlined)
    aligned = [align(s, {dots.output: dots}) for s in readers]
    highs = [s for s in aligned if s is not None and s.combine is Combine.MAX]
    sums = sorted((s for s in aligned if s is not None and s.combine is Combine.SUM), key=lambda s: len(s.spatial))
    values = sum_of_products(sums[-1]) if sums else None
    if len(aligned) != len(highs) + 2 or len(highs) > 1 or len(sums) != 2 or values is None:
        return None
    row_max = highs[0] if highs else _maximum_of(sums[0])
    if row_max is None or not _share_rows(dots, row_max, *sums):
        return None
    rows = RowStatements.of(row_max, sums[0], statements, {dots.output, *maps, sums[1].output})
    return _Chain(dots, scores, rows, sums[1], values, frozenset(maps))


def _depending_on(tensor: str, statements: Sequence[TensorExpr]) -> list[TensorExpr]:
    """Return the statements that read a tensor, or maps of it."""
    names, found = {tensor}, list[TensorExpr]()
    for statement in statements:
        if not names.isdisjoint(statement.reads_tensors):
            found.append(statement)
            names |= {statement.output} if statement.kind is StatementKind.MAP else set()
    return found


def _maximum_of(total: TensorExpr) -> TensorExpr | None:
    """Return the maximum of the scores below a sum of exponentials, for a program that computes none."""
    exponents = [n.args[0] for n in iter_subexpressions(total.body) if isinstance(n, Op) and n.kind in _LOG_OF_BASE]
    if len(exponents) != 1:
        return None
    below, _ = _scaled(strip_float_casts(exponents[0]))
    score, _ = _subtracted(below, [a.name for a in total.spatial])
    return replace(total, output=f"{total.output}.max", combine=Combine.MAX, body=score)


def _share_rows(dots: TensorExpr, row_max: TensorExpr, row_sum: TensorExpr, pv: TensorExpr) -> bool:
    """Return whether all three reduce the same axis and keep the others; only the last has axes of its own."""
    if any(len(s.reduced) != 1 or s.reduced[0].name != row_max.reduced[0].name for s in (row_max, row_sum, pv)):
        return False
    rows = {a.name for a in dots.spatial} - {row_max.reduced[0].name}
    of_high, of_total, of_mixed = ({a.name for a in s.spatial} for s in (row_max, row_sum, pv))
    return of_high == of_total == rows and rows < of_mixed


def _attention(
    chain: _Chain, statements: Sequence[TensorExpr], wanted: Collection[str]
) -> tuple[AttentionMatch, tuple[TensorExpr, ...]] | None:
    """Return the match and the statements with it. The statement of the second contraction stands for all of attention."""
    rows, axes = chain.rows, chain.rows.axes
    plain = exponential(rows.row_sum.body, rows.row_max.body, axes)
    weights, values = _weights(chain)
    if plain is None or weights is None or not values:
        return None
    divided, probability = _divided(weights, values, chain)
    others = [f for f in values if not _is_row_factor(f, chain)]
    if not others or exponential(probability, rows.row_max.body, axes) != plain:
        return None
    exponent = _factor_out(plain)
    factors = _query_and_key(chain)
    v = product_of(others)
    if factors is None or not axes_of(v) & {a.name for a in chain.pv.spatial} - _rows(chain):
        return None
    q, k = factors
    # a factor that is computed in float16 or bfloat16 may be rounded to it; values of the row do not count
    dtype = _common_dtype((q, k, v, weights)) or _common_dtype((q, k, v, Const(1.0, exponent.dtype)))
    parts = (q, k, v, exponent.score)
    gathered = [x for part in (q, exponent.score) for x in loads_of(part) if any(x.bounds_checked)]
    inner = rows.names | {chain.pv.output}
    if dtype is None or gathered or any(x.tensor in inner for part in parts for x in loads_of(part)):
        return None  # keys and values may be gathered: pages of a cache
    if any(s.accumulator is not DType.FLOAT32 for s in (chain.qk, rows.row_sum, chain.pv)):
        return None
    results = _with_results(statements, chain, divided, (parts, wanted))
    if results is None:
        return None
    row_results = _row_results(chain, results, _row_values(chain, plain, exponent))
    if row_results is None:
        return None
    return _make_match(chain, exponent, (q, k, v), dtype, row_results), results.statements


@dataclass(frozen=True, slots=True)
class _Results:
    """The statements with one for attention, what it computes from each undivided result, and the rows to store."""

    statements: tuple[TensorExpr, ...]
    result: Expr
    stored: tuple[str, ...]


def _row_results(chain: _Chain, results: _Results, values: RowValues | None) -> RowResults | None:
    """Return what the kernel computes of rows, from what it keeps. None if that does not tell."""
    is_plain = _is_quotient(results.result, chain)
    if values is None:
        return RowResults() if is_plain and not results.stored else None
    mixed = chain.pv.output
    stored = tuple(chain.rows.statement(name) for name in results.stored)
    return RowResults(
        None if is_plain else values.of(results.result, chain.rows, mixed),
        tuple(replace(s, body=values.of(s.body, chain.rows, mixed)) for s in stored),
    )


def _divided(weights: Expr, values: Sequence[Expr], chain: _Chain) -> tuple[Expr | None, Expr]:
    """Return what the statement divides or multiplies each undivided result by, as an expression, and the exponential.

    None in place of the expression if it does neither by a value of the row.
    """
    load: Expr = Load(chain.pv.output, chain.pv.index, DType.FLOAT32)
    probability, result = strip_float_casts(weights), load
    match probability:
        case Op(kind=OpKind.DIV, args=(value, row)) if _is_row_factor(row, chain):
            probability, result = value, Op(OpKind.DIV, (load, row), DType.FLOAT32)
        case _:
            pass
    for factor in values:
        result = times(result, factor) if _is_row_factor(factor, chain) else result
    return (None if result is load else result), probability


def _is_row_factor(expr: Expr, chain: _Chain) -> bool:
    """Return whether a factor is a value of the row that the kernel's maximum or sum decides."""
    inlined = chain.rows.inline(expr)
    if inlined is None or not chain.rows.reads_only_rows(inlined):
        return False
    return any(load.tensor in chain.rows.names for load in loads_of(inlined))


def _row_values(chain: _Chain, plain: Exponential, exponent: Exponential) -> RowValues | None:
    """Return the row's maximum and sum in terms of those of the kernel. None if the maximum is not known.

    `plain` is the exponential of the statements, `exponent` the same with factors of the scores moved to its scale.
    """
    row_max, row_sum = chain.rows.row_max, chain.rows.row_sum
    high, total, undivided = state_names(row_sum)
    running_max, running_sum = (Load(name, row_sum.index, DType.FLOAT32) for name in (high, total))
    visible: Expr = times(running_max, Const(exponent.scale / plain.scale, DType.FLOAT32))
    # the kernel's maximum ignores NaN
    is_nan = Op(OpKind.LAND, (Op(OpKind.ISNAN, (running_sum,), DType.INT8), _is(OpKind.LT, visible, math.inf)), DType.INT8)
    visible = Select(is_nan, Const(math.nan, DType.FLOAT32), visible, DType.FLOAT32)
    maximum: Expr | None = visible
    if plain.cond is not None:
        maximum = largest_unmasked(visible, row_max.body, plain.cond, chain.key)
    reference = chain.rows.inline(plain.reference)
    if maximum is None or reference is None or not chain.rows.reads_only_rows(reference):
        return None

    def is_maximum(node: Expr) -> Expr:
        return maximum if isinstance(node, Load) and node.tensor == row_max.output else node

    below = Op(OpKind.SUB, (visible, rewrite(reference, is_maximum)), DType.FLOAT32)
    weight: Expr = Op(OpKind.EXP, (times(below, Const(plain.scale, DType.FLOAT32)),), DType.FLOAT32)
    if plain.cond is not None:
        weight = Select(_is(OpKind.EQ, running_max, -math.inf), Const(0.0, DType.FLOAT32), weight, DType.FLOAT32)
    element = Load(undivided, chain.pv.index, DType.FLOAT32)
    return RowValues(maximum, weight, times(running_sum, weight), element)


def _is(kind: OpKind, value: Expr, other: float) -> Expr:
    return Op(kind, (value, Const(other, DType.FLOAT32)), DType.INT8)


def _is_quotient(result: Expr, chain: _Chain) -> bool:
    """Return whether a result is divided by the sum of its row, and nothing else."""
    match strip_float_casts(result):
        case Op(kind=OpKind.DIV, args=(value, row)):
            tensors = [x.tensor if isinstance(x := strip_float_casts(arg), Load) else "" for arg in (value, row)]
            return tensors == [chain.pv.output, chain.rows.row_sum.output]
        case _:
            return False


def _rows(chain: _Chain) -> set[str]:
    return {a.name for a in chain.qk.spatial}


def _weights(chain: _Chain) -> tuple[Expr | None, list[Expr]]:
    """Return the operand of the second contraction that is made of scores, and the other factors."""
    factors = chain.values.factors
    made = [f for f in factors if any(load.tensor == chain.qk.output for load in loads_of(f))]
    return (made[0], [f for f in factors if f is not made[0]]) if len(made) == 1 else (None, [])


def _query_and_key(chain: _Chain) -> tuple[Expr, Expr] | None:
    """Return (q, k) of the first contraction: k varies with the keys."""
    keys, queries = chain.scores.split(chain.key.name)
    if not keys or not queries:
        return None
    return product_of(queries), product_of(keys)


def _common_dtype(operands: Sequence[Expr]) -> DType | None:
    """Return the narrow float that can represent all operands."""
    types = [t for f in operands if (t := value_dtype(f)) is not None]
    return next((half for half in HALF_DTYPES if all(can_represent_all(half, t) for t in types)), None)


def _make_match(
    chain: _Chain, exponent: Exponential, factors: tuple[Expr, Expr, Expr], dtype: DType, rows: RowResults
) -> AttentionMatch:
    q, k, v = factors
    shared = axes_of(k) | axes_of(v)
    spatial = [a for a in chain.pv.spatial if a.name in _rows(chain)]
    batch = tuple(a for a in spatial if a.name in shared)
    queries = tuple(a for a in spatial if a.name not in shared)
    values = tuple(a for a in chain.pv.spatial if a not in spatial)
    key = replace(chain.key, kind=AxisKind.REDUCE)
    product = Load(chain.qk.output, chain.qk.index, chain.qk.type.dtype)
    before = (chain.qk, chain.rows.row_max, chain.rows.row_sum)
    attention = Attention(q, k, v, product, exponent.score, exponent.scale, dtype, before, rows)
    weights, _ = _weights(chain)
    contraction = Contraction(batch, queries, values, (key,), require_expr(weights, "weight, which was found before"), v)
    return AttentionMatch(chain.pv, contraction, attention)


def _with_results(
    statements: Sequence[TensorExpr], chain: _Chain, divided: Expr | None, needs: tuple[Sequence[Expr], Collection[str]]
) -> _Results | None:
    """Replace attention by its second contraction. Readers that all divide it alike read the quotients instead.

    Statements that read rows follow attention. `needs`: what attention reads, and outputs. None if attention would read
    what follows it.
    """
    mixed, rows, (operands, wanted) = chain.pv, chain.rows, needs
    readers = {s.output: s for s in statements if mixed.output in s.reads_tensors}
    taken = {name: take_result(s, mixed, rows) for name, s in readers.items()} if divided is None else {}
    found = {None if each is None else each[1] for each in taken.values()}
    result = rows.inline(Load(mixed.output, mixed.index, DType.FLOAT32) if divided is None else divided)
    if result is None:
        return None
    if len(found) == 1 and mixed.output not in wanted and None not in found:
        result = require_expr(found.pop(), "result, which was found")
        readers = {name: each[0] for name, each in taken.items() if each is not None}
    late = {*rows.names, mixed.output}
    order: list[tuple[bool, TensorExpr]] = []  # whether it follows attention
    for statement in statements:
        if statement.output not in chain.replaced and statement.output != mixed.output:
            current = readers.get(statement.output, statement)
            follows = not late.isdisjoint(current.reads_tensors)
            late |= {current.output} if follows else set()
            order.append((follows, current))
    stored = tuple(sorted(rows.names & ({t for follows, s in order if follows for t in s.reads_tensors} | set(wanted))))
    of_rows = [result, *(rows.statement(name).body for name in stored)]
    if not late.isdisjoint(x.tensor for part in operands for x in loads_of(part)):
        return None
    # what is independent of attention stays where it is, unless attention reads it
    position = sum(s.output not in chain.replaced for s in statements[: _position(statements, mixed)])
    read = {x.tensor for part in of_rows for x in loads_of(part)}
    if any(not follows and s.output in read for follows, s in order[position:]):
        position = len(order)
    before = [s for follows, s in order[:position] if not follows]
    after = [s for follows, s in order[:position] if follows] + [s for _, s in order[position:]]
    return _Results((*before, mixed, *after), result, stored)


def _position(statements: Sequence[TensorExpr], statement: TensorExpr) -> int:
    return next(i for i, s in enumerate(statements) if s.output == statement.output)
