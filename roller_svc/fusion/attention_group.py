"""Attention match → kernel group: heads that share keys become rows of one tile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from roller_svc.fusion.contraction import Contraction
from roller_svc.fusion.delinearize import simplify_division
from roller_svc.fusion.space import attention_space
from roller_svc.ir.attention import Attention, RowResults, Scores, Weights, mask
from roller_svc.ir.expr import AxisRef, Const, Expr, Load, Op, OpKind, axes_of, loads_of, rewrite, substitute
from roller_svc.ir.group import GroupKind, KernelGroup
from roller_svc.ir.index import add, mul, num, ref
from roller_svc.ir.program import Axis, TensorExpr, TensorType

AttentionParts = tuple[Contraction, Attention]


def attention_group(
    name: str,
    statements: tuple[TensorExpr, ...],
    parts: AttentionParts,
    types: Mapping[str, TensorType],
    locals_: frozenset[str],
) -> KernelGroup:
    """Return the kernel group of the second contraction and maps of its points. `types` are those in memory."""
    if parts[1].weights is None:
        parts = (parts[0], replace(parts[1], unsplit=(parts[1].row_sum, *statements), unsplit_rows=parts[1].rows))
    for axis in parts[0].batch:
        statements, parts = _split_heads(statements, parts, axis)
    contraction, attention = _masked_rows_first(*parts)
    stored = tuple((s.output, types[s.output]) for s in (*statements, *attention.rows.stored) if s.output not in locals_)
    read = attention.reads | {t for s in statements[1:] for t in s.reads_tensors} - {s.output for s in statements}
    inputs = tuple((t, types[t]) for t in sorted(read))
    space = attention_space(statements, contraction, attention, dict((*inputs, *stored)))
    return KernelGroup(
        name,
        GroupKind.ATTENTION,
        statements,
        statements[0].spatial,
        locals_,
        stored,
        inputs,
        space,
        attention=attention,
    )


def _split_heads(
    statements: tuple[TensorExpr, ...], parts: AttentionParts, axis: Axis
) -> tuple[tuple[TensorExpr, ...], AttentionParts]:
    """Split the axis in two where k and v are indexed by its quotient (grouped heads): the inner part becomes rows."""
    contraction, attention = parts
    size = _common_divisor(attention, axis)
    if size is None or size == 1 or axis.extent % size:
        return statements, parts
    outer, inner = (
        replace(axis, name=f"{axis.name}.0", extent=axis.extent // size),
        replace(axis, name=f"{axis.name}.1", extent=size),
    )
    extents = {outer.name: outer.extent, inner.name: inner.extent}
    at = {axis.name: add(mul(ref(outer.name), num(size)), ref(inner.name))}

    def change(expr: Expr) -> Expr:
        return rewrite(substitute(expr, at), lambda node: simplify_division(node, extents))

    statements = tuple(_rewrite_statement(s, axis, (outer, inner), change) for s in statements)
    attention = replace(
        attention,
        q=change(attention.q),
        k=change(attention.k),
        v=change(attention.v),
        score=change(attention.score),
        scores_load=_rewrite_load(attention.scores_load, change),
        softmax_statements=tuple(_rewrite_statement(s, axis, (outer, inner), change) for s in attention.softmax_statements),
        rows=RowResults(
            None if attention.rows.result is None else change(attention.rows.result),
            tuple(_rewrite_statement(s, axis, (outer, inner), change) for s in attention.rows.stored),
        ),
        weights=None if attention.weights is None else _rewrite_weights(attention.weights, change),
    )
    batch = tuple(outer if a == axis else a for a in contraction.batch)
    contraction = replace(contraction, batch=batch, m=(*contraction.m, inner), a=change(contraction.a), b=change(contraction.b))
    return statements, (contraction, attention)


def _common_divisor(attention: Attention, axis: Axis) -> int | None:
    """Return the divisor of the axis in all indices of k and v, or None without a single one."""
    divisors: set[int] = set()
    for load in [x for part in (*attention.keys, attention.v) for x in loads_of(part)]:
        for index in load.index:
            match index:
                case Op(kind=OpKind.FLOORDIV, args=(AxisRef(name=name), Const(value=int(by)))) if name == axis.name:
                    divisors.add(by)
                case _ if axis.name in axes_of(index):
                    return None
    return divisors.pop() if len(divisors) == 1 else None


def _rewrite_statement(statement: TensorExpr, axis: Axis, parts: tuple[Axis, Axis], change: Callable[[Expr], Expr]) -> TensorExpr:
    axes = tuple(p for a in statement.axes for p in (parts if a.name == axis.name else (a,)))
    index = tuple(change(i) for i in statement.index)
    return replace(statement, axes=axes, index=index, body=change(statement.body))


def _rewrite_weights(weights: Weights, change: Callable[[Expr], Expr]) -> Weights:
    second, cond = weights.second, weights.cond
    if second is not None:
        second = Scores(change(second.q), change(second.k), _rewrite_load(second.load, change))
    return Weights(second, None if cond is None else change(cond))


def _rewrite_load(load: Load, change: Callable[[Expr], Expr]) -> Load:
    return replace(load, index=tuple(change(i) for i in load.index))


def _masked_rows_first(contraction: Contraction, attention: Attention) -> AttentionParts:
    """Move axes that the mask depends on outermost, so that rows of a tile attend to nearly the same keys."""
    found = mask(attention)
    masked = frozenset[str]() if found is None else axes_of(found.cond)
    rows = sorted(contraction.m, key=lambda a: a.name not in masked)
    return replace(contraction, m=tuple(rows)), attention
