"""Attention in programs: two contractions around a softmax, matched by their algebra.

The pattern is QK^T, scores, their maximum over the keys, the sum of exp(score - maximum), and the contraction of these
exponentials with V, divided by the sum before or after it. One kernel then keeps a running maximum and sum and stores
no scores (FlashAttention-2: Dao, arXiv:2307.08691).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from roller_svc.analysis.inlining import value_of
from roller_svc.analysis.operand import can_represent_all, value_dtype
from roller_svc.analysis.sum_of_products import SumOfProducts, product_of, sum_of_products
from roller_svc.fusion.contraction import Contraction
from roller_svc.ir.attention import Attention
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import (
    AxisRef,
    Cast,
    Const,
    Expr,
    Load,
    Op,
    OpKind,
    Select,
    axes_of,
    loads_of,
    rewrite,
    substitute,
)
from roller_svc.ir.index import require_expr
from roller_svc.ir.program import Axis, AxisKind, Combine, StatementKind, TensorExpr, identity

MAX_FLOAT32 = (2.0 - 2.0**-23) * 2.0**127
_LOG_OF_BASE = {OpKind.EXP: 1.0, OpKind.EXP2: math.log(2.0)}


@dataclass(frozen=True, slots=True)
class Exponential:
    """exp(scale (score - the row's maximum))."""

    score: Expr
    scale: float


def exponential(expr: Expr, high: TensorExpr) -> Exponential | None:
    """Match exp(scale (score - maximum)) with the maximum that the statement `high` computes.

    An exponential that a condition sets to 0 counts as that of a score of minus infinity. The maximum, which only
    avoids overflow, may then be that of the other scores.
    """
    match _strip_float_casts(expr):
        case Select(cond=cond, then=then, otherwise=otherwise) if value_dtype(otherwise) is None:
            inner = exponential(then, high)
            return None if inner is None else replace(inner, score=_masked(cond, inner.score))
        case Op(kind=kind, args=(exponent,)) if kind in _LOG_OF_BASE:
            below, factor = _scaled(_strip_float_casts(exponent))
            if factor > 0 and _is_below(below, high):
                return Exponential(high.body, factor * _LOG_OF_BASE[kind])
            return None
        case _:
            return None


def _strip_float_casts(expr: Expr) -> Expr:
    """Strip casts between floats: operands of a matrix unit are rounded anyway."""
    while isinstance(expr, Cast) and expr.dtype.is_float and expr.arg.dtype.is_float:
        expr = expr.arg
    return expr


def _masked(cond: Expr, score: Expr) -> Expr:
    """Return the score where the condition holds, else minus infinity."""
    match _strip_float_casts(score):
        case Select(cond=same, then=then) if same == cond:
            score = then
    return Select(cond, score, identity(Combine.MAX, score.dtype), score.dtype)


def _scaled(expr: Expr) -> tuple[Expr, float]:
    """Return (x, c) of a product c x, or of a division by a constant."""
    match expr:
        case Op(kind=OpKind.MUL, args=(x, Const(value=c))) | Op(kind=OpKind.MUL, args=(Const(value=c), x)):
            return _strip_float_casts(x), float(c)
        case Op(kind=OpKind.DIV, args=(x, Const(value=c))) if c:
            return _strip_float_casts(x), 1.0 / float(c)
        case _:
            return expr, 1.0


def _factor_out(exponent: Exponential) -> Exponential:
    """Move a positive constant factor of the scores to the scale, which costs nothing in the exponent.

    A constant score of masked keys is divided by the factor. It must stay a finite float32 if it was one.
    """
    match exponent.score:
        case Select(cond=cond, then=then, otherwise=Const(value=fill) as otherwise, dtype=dtype):
            inner = _factor_out(Exponential(then, exponent.scale))
            scaled = float(fill) * exponent.scale / inner.scale
            if math.isfinite(fill) and abs(scaled) > MAX_FLOAT32:
                return exponent
            masked = Select(cond, inner.score, replace(otherwise, value=scaled), dtype)
            return Exponential(masked, inner.scale)
        case Cast(arg=arg) if exponent.score.dtype is arg.dtype:
            return _factor_out(replace(exponent, score=arg))
        case Op(kind=OpKind.MUL | OpKind.DIV, dtype=dtype) if dtype.compute is DType.FLOAT32:
            score, factor = _scaled(exponent.score)
            if score.dtype is dtype and 0 < factor < math.inf:
                return Exponential(score, exponent.scale * factor)
            return exponent
        case _:
            return exponent


def _is_below(expr: Expr, high: TensorExpr) -> bool:
    """Return whether it is the reduced value minus the maximum of its row."""
    match expr:
        case Op(kind=OpKind.SUB, args=(value, row)):
            return _is_row_value(row, high) and _strip_float_casts(value) == _strip_float_casts(high.body)
        case _:
            return False


def _is_row_value(expr: Expr, statement: TensorExpr) -> bool:
    expr = _strip_float_casts(expr)
    return isinstance(expr, Load) and expr.tensor == statement.output and expr.index == statement.index


def dividend(expr: Expr, total: TensorExpr) -> Expr | None:
    """Return the dividend of a division by the sum of the row, or None."""
    match _strip_float_casts(expr):
        case Op(kind=OpKind.DIV, args=(value, row)) if _is_row_value(row, total):
            return value
        case _:
            return None


def replace_quotients(statement: TensorExpr, mixed: TensorExpr, total: TensorExpr) -> TensorExpr | None:
    """Replace divisions of `mixed` by its row sum by loads of `mixed`. None if the statement reads either otherwise."""
    divided = f"{mixed.output}.divided"

    def change(node: Expr) -> Expr:
        match node:
            case Op(kind=OpKind.DIV, args=(value, row)):
                return _quotient(_strip_float_casts(value), _strip_float_casts(row)) or node
            case _:
                return node

    def _quotient(value: Expr, row: Expr) -> Expr | None:
        if not isinstance(value, Load) or not isinstance(row, Load) or value.tensor != mixed.output:
            return None
        at = {a.name: i for a, i in zip(mixed.index, value.index, strict=True) if isinstance(a, AxisRef)}
        same_row = row.tensor == total.output and row.index == tuple(substitute(i, at) for i in total.index)
        return replace(value, tensor=divided) if same_row else None

    body = rewrite(statement.body, change)
    found = replace(statement, body=body)
    if {mixed.output, total.output} & set(found.reads_tensors):
        return None
    own = rewrite(body, lambda n: replace(n, tensor=mixed.output) if isinstance(n, Load) and n.tensor == divided else n)
    return replace(statement, body=own)


HALF_DTYPES = (
    DType.FLOAT16,
    DType.BFLOAT16,
)  # operand types: fragments of tf32 have another layout than accumulators
MAX_HEAD_DIM = 256  # a warp iterates over all of it for every score


@dataclass(frozen=True, slots=True)
class AttentionMatch:
    """A match of attention."""

    pv: TensorExpr  # the second contraction, divided by the sum of exponentials
    contraction: Contraction
    attention: Attention
    replaced: frozenset[str]  # tensors of the statements that attention replaces


def match_attentions(
    statements: tuple[TensorExpr, ...], outputs: Collection[str], dtypes: Collection[DType]
) -> tuple[tuple[TensorExpr, ...], Mapping[str, AttentionMatch]]:
    """Match attention. Returns the statements with one for each match, and the matches by its tensor.

    `dtypes` are the allowed operand types of the matrix unit.
    """
    matches: dict[str, AttentionMatch] = {}
    for qk in statements:
        scores = sum_of_products(qk)
        if scores is None or qk.output not in _output_names(statements):
            continue
        chain = _chain(qk, scores, statements, outputs)
        candidate = None if chain is None else _attention(chain)
        if candidate is not None and candidate.attention.dtype not in dtypes:
            continue
        rest = None if candidate is None else _replace_statements(statements, candidate, outputs)
        if candidate is not None and rest is not None:
            statements, matches[candidate.pv.output] = rest, candidate
    return statements, matches


def _output_names(statements: Sequence[TensorExpr]) -> set[str]:
    return {s.output for s in statements}


@dataclass(frozen=True, slots=True)
class _Chain:
    """All reductions that read QK^T, with maps inlined and axes named as those of QK^T."""

    qk: TensorExpr
    scores: SumOfProducts  # of qk
    row_max: TensorExpr
    row_sum: TensorExpr
    pv: TensorExpr
    values: SumOfProducts  # of pv
    maps: frozenset[str]

    @property
    def key(self) -> Axis:
        return self.row_max.reduced[0]


def _chain(dots: TensorExpr, scores: SumOfProducts, statements: Sequence[TensorExpr], wanted: Collection[str]) -> _Chain | None:
    maps: dict[str, TensorExpr] = {}
    readers: list[TensorExpr] = []
    for statement in statements:
        if not {dots.output, *maps} & set(statement.reads_tensors):
            continue
        inlined = _inlined(statement, maps)
        if statement.kind is StatementKind.MAP:
            maps[statement.output] = inlined
        else:
            readers.append(inlined)
    if {dots.output, *maps} & set(wanted) or any(s.kind is not StatementKind.REDUCE for s in readers):
        return None
    aligned = [_aligned(s, dots) for s in readers]
    highs = [s for s in aligned if s is not None and s.combine is Combine.MAX]
    sums = sorted((s for s in aligned if s is not None and s.combine is Combine.SUM), key=lambda s: len(s.spatial))
    values = sum_of_products(sums[-1]) if sums else None
    if len(aligned) != 3 or len(highs) != 1 or len(sums) != 2 or values is None:
        return None
    chain = _Chain(dots, scores, highs[0], sums[0], sums[1], values, frozenset(maps))
    return chain if _shares_rows(chain) and _output_names((chain.row_max, chain.row_sum)).isdisjoint(wanted) else None


def _inlined(statement: TensorExpr, maps: Mapping[str, TensorExpr]) -> TensorExpr:
    def change(node: Expr) -> Expr:
        return value_of(maps[node.tensor], node.index) if isinstance(node, Load) and node.tensor in maps else node

    return replace(statement, body=rewrite(statement.body, change))


def _aligned(statement: TensorExpr, dots: TensorExpr) -> TensorExpr | None:
    """Rename the axes of a reader of QK^T to those of QK^T. None if it reads several elements at a point."""
    names: dict[str, str] | None = None
    for load in loads_of(statement.body):
        if load.tensor == dots.output:
            here = _renaming(dots, load, statement)
            if here is None or names not in (None, here):
                return None
            names = here
    if names is None:
        return None
    used = {a.name for a in dots.axes}
    for axis in statement.axes:
        if axis.name not in names:
            names[axis.name] = _unused_name(axis.name, used)
            used.add(names[axis.name])
    refs: dict[str, Expr] = {old: AxisRef(new) for old, new in names.items()}
    return replace(
        statement,
        axes=tuple(replace(a, name=names[a.name]) for a in statement.axes),
        index=tuple(substitute(i, refs) for i in statement.index),
        body=substitute(statement.body, refs),
    )


def _unused_name(name: str, used: Collection[str]) -> str:
    while name in used:
        name += "_"
    return name


def _renaming(dots: TensorExpr, load: Load, reader: TensorExpr) -> dict[str, str] | None:
    """Return {reader's axis: axis of QK^T}, or None if they do not correspond one to one."""
    extents = reader.extents
    names: dict[str, str] = {}
    for written, read in zip(dots.index, load.index, strict=True):
        match written, read:
            case AxisRef(name=mine), AxisRef(name=its) if its not in names and extents[its] == dots.extents[mine]:
                names[its] = mine
            case Const(), Const():
                continue
            case _:
                return None
    return names if len(names) == len(dots.spatial) else None


def _shares_rows(chain: _Chain) -> bool:
    """Return whether all three reduce the same axis and keep the others; only the last has axes of its own."""
    if any(
        len(s.reduced) != 1 or s.reduced[0].name != chain.row_max.reduced[0].name for s in (chain.row_max, chain.row_sum, chain.pv)
    ):
        return False
    rows = {a.name for a in chain.qk.spatial} - {chain.key.name}
    of_high, of_total, of_mixed = ({a.name for a in s.spatial} for s in (chain.row_max, chain.row_sum, chain.pv))
    return of_high == of_total == rows and rows < of_mixed


def _attention(chain: _Chain) -> AttentionMatch | None:
    exponent = exponential(chain.row_sum.body, chain.row_max)
    weights, values = _weights(chain)
    if exponent is None or weights is None or not values:
        return None
    quotient = dividend(weights, chain.row_sum)
    if exponential(weights if quotient is None else quotient, chain.row_max) != exponent:
        return None
    exponent = _factor_out(exponent)
    factors = _query_and_key(chain)
    v = product_of(values)
    if factors is None or not axes_of(v) & {a.name for a in chain.pv.spatial} - _rows(chain):
        return None
    q, k = factors
    dtype = _common_dtype((q, k, v, weights))
    parts = (q, k, v, exponent.score)
    gathered = [x for part in (q, exponent.score) for x in loads_of(part) if any(x.bounds_checked)]
    inner = _output_names((chain.qk, chain.row_max, chain.row_sum, chain.pv)) - {chain.qk.output}
    if dtype is None or gathered or any(x.tensor in inner for part in parts for x in loads_of(part)):
        return None  # keys and values may be gathered: pages of a cache
    if any(s.accumulator is not DType.FLOAT32 for s in (chain.qk, chain.row_sum, chain.pv)):
        return None
    return _make_match(chain, exponent, (q, k, v), dtype, divided=quotient is not None)


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
    if not keys or not queries or math.prod(a.extent for a in chain.scores.reduced) > MAX_HEAD_DIM:
        return None
    return product_of(queries), product_of(keys)


def _common_dtype(operands: Sequence[Expr]) -> DType | None:
    """Return the narrow float that can represent all operands."""
    types = [t for f in operands if (t := value_dtype(f)) is not None]
    return next((half for half in HALF_DTYPES if all(can_represent_all(half, t) for t in types)), None)


def _make_match(
    chain: _Chain, exponent: Exponential, factors: tuple[Expr, Expr, Expr], dtype: DType, *, divided: bool
) -> AttentionMatch:
    q, k, v = factors
    shared = axes_of(k) | axes_of(v)
    rows = [a for a in chain.pv.spatial if a.name in _rows(chain)]
    batch = tuple(a for a in rows if a.name in shared)
    queries = tuple(a for a in rows if a.name not in shared)
    values = tuple(a for a in chain.pv.spatial if a not in rows)
    key = replace(chain.key, kind=AxisKind.REDUCE)
    product = Load(chain.qk.output, chain.qk.index, chain.qk.type.dtype)
    before = (chain.qk, chain.row_max, chain.row_sum)
    attention = Attention(q, k, v, product, exponent.score, exponent.scale, dtype, before)
    weights, _ = _weights(chain)
    contraction = Contraction(batch, queries, values, (key,), require_expr(weights, "weight, which was found before"), v)
    # a contraction that is divided later is divided at once, and its readers are rewritten
    taken = frozenset(_output_names((chain.qk, chain.row_max, chain.row_sum)) | chain.maps)
    return AttentionMatch(chain.pv, contraction, attention, taken if divided else taken | {chain.pv.output})


def _replace_statements(
    statements: Sequence[TensorExpr], candidate: AttentionMatch, wanted: Collection[str]
) -> tuple[TensorExpr, ...] | None:
    """Replace attention by its second contraction. Readers that divide by the row sum read the quotient instead.

    None if the row sum or the undivided result has another reader.
    """
    mixed, total = candidate.pv, candidate.attention.row_sum
    later_divided = mixed.output in candidate.replaced
    if later_divided and mixed.output in wanted:
        return None
    result: list[TensorExpr] = []
    for statement in statements:
        if statement.output == mixed.output:
            result.append(mixed)
        elif statement.output not in candidate.replaced:
            divided = replace_quotients(statement, mixed, total) if later_divided else statement
            if divided is None or total.output in divided.reads_tensors:
                return None
            result.append(divided)
    return tuple(result)
