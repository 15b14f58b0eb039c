"""TensorProgram → statements with cheap elementwise producers inlined (Halide's default schedule)."""

from __future__ import annotations

from dataclasses import replace

from roller_svc.analysis.inlining import canonicalize, inline_loads
from roller_svc.analysis.scans import match_scan
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Cast, Const, Expr, Load, Op, OpKind, children, iter_subexpressions, substitute
from roller_svc.ir.program import StatementKind, TensorExpr, TensorProgram, live_statements

# Larger bodies are not repeated in every consumer: chains must not double for ever.
MAX_BODY_NODES = 400
MAX_INLINED_NODES = 120
# An expensive producer is stored if each of its values would be computed more often.
MAX_RECOMPUTES = 4

_CHEAP = frozenset({
    OpKind.ADD, OpKind.SUB, OpKind.MUL, OpKind.NEG, OpKind.LT, OpKind.LE, OpKind.GT, OpKind.GE, OpKind.EQ, OpKind.NE,
    OpKind.LAND, OpKind.LOR, OpKind.LNOT, OpKind.BITAND, OpKind.BITOR, OpKind.BITXOR, OpKind.BITNOT, OpKind.SHL,
    OpKind.SHR, OpKind.MAX, OpKind.MIN, OpKind.FMAX, OpKind.FMIN, OpKind.ABS, OpKind.RELU, OpKind.SQUARE, OpKind.FMA,
    OpKind.CLIP, OpKind.SIGN, OpKind.FLOORDIV, OpKind.MOD,
})  # fmt: skip


def inline_elementwise(program: TensorProgram, *, inline_outputs: bool = False) -> tuple[TensorExpr, ...]:
    """Return the statements that are not inlined, in order, with the others inlined into their readers.

    Args:
        program: the statements.
        inline_outputs: whether outputs that a reduction reads are inlined too. They are last, so that the nest of a
            reader may store them.
    """
    return _inline_except(program, frozenset(), inline_outputs=inline_outputs)


def _inline_except(program: TensorProgram, stored: frozenset[str], *, inline_outputs: bool) -> tuple[TensorExpr, ...]:
    outputs = {output.tensor for output in program.outputs}
    readers = _readers(program)
    inlinable: dict[str, TensorExpr] = {}
    statements: list[TensorExpr] = []
    recomputed: list[TensorExpr] = []
    for statement in live_statements(program, outputs):
        inlined = inline_loads(statement, inlinable)
        if inlined is None:  # what it reads is stored
            too_large = inlinable.keys() & set(statement.reads_tensors)
            return _inline_except(program, stored | too_large, inline_outputs=inline_outputs)
        new = canonicalize(inlined)
        read_by, is_output = readers.get(new.output, ()), new.output in outputs
        is_reduced = any(reader.kind is StatementKind.REDUCE for reader, _ in read_by)
        is_stored = new.output in stored or (is_output and not (inline_outputs and is_reduced))
        if is_stored or not _may_inline(new, read_by):
            statements.append(new)
            continue
        inlinable[new.output] = new
        if is_output:
            recomputed.append(new)
    return (*statements, *recomputed)


def drop_unit_axes(statement: TensorExpr) -> TensorExpr:
    """Drop axes of extent 1, made by keepdims, except for the last reduced one. More rows can then share a nest."""
    if statement.kind is StatementKind.SCATTER:
        return statement
    unit = {a.name for a in statement.spatial if a.extent == 1}
    long = [a for a in statement.reduced if a.extent > 1]
    unit |= {a.name for a in statement.reduced if a.extent == 1 and (long or a is not statement.reduced[-1])}
    if not unit:
        return statement
    zero: dict[str, Expr] = {name: Const(0, DType.INT32) for name in unit}
    return replace(
        statement,
        axes=tuple(a for a in statement.axes if a.name not in unit),
        index=tuple(substitute(i, zero) for i in statement.index),
        body=substitute(statement.body, zero),
    )


def _readers(program: TensorProgram) -> dict[str, tuple[tuple[TensorExpr, Load | None], ...]]:
    """Return the readers of each tensor, one for each load; a scatter reads its target whole (None)."""
    readers: dict[str, list[tuple[TensorExpr, Load | None]]] = {}
    for statement in program.statements:
        for load in statement.reads:
            readers.setdefault(load.tensor, []).append((statement, load))
        if statement.target is not None:
            readers.setdefault(statement.target, []).append((statement, None))
    return {name: tuple(found) for name, found in readers.items()}


def _may_inline(statement: TensorExpr, readers: tuple[tuple[TensorExpr, Load | None], ...]) -> bool:
    if statement.kind is not StatementKind.MAP:
        return False
    size = sum(1 for _ in iter_subexpressions(statement.body))
    if size > MAX_INLINED_NODES:
        return False
    if any(load is None or any(load.bounds_checked) for _, load in readers):
        return False  # an index from data must meet a tensor that exists, to be checked against
    if size * len(readers) > MAX_BODY_NODES:
        return False
    if not is_expensive(statement.body):
        return True
    recomputes = sum(_uses_per_element(reader, statement) for reader, _ in readers)
    return recomputes <= MAX_RECOMPUTES


def _uses_per_element(reader: TensorExpr, producer: TensorExpr) -> float:
    """Return how often a reader needs each value. A contraction stages its operands: once, as in a scan."""
    if reader.kind is StatementKind.REDUCE and (_is_product(reader.body) or match_scan(reader) is not None):
        return 1.0
    return reader.points / max(1, producer.points)


def _is_product(body: Expr) -> bool:
    while isinstance(body, Cast):
        body = body.arg
    return isinstance(body, Op) and body.kind is OpKind.MUL


def is_expensive(body: Expr) -> bool:
    """Return whether a value takes more than a few instructions, such as a function or a division."""
    return any(isinstance(node, Op) and node.kind not in _CHEAP for node in _value_nodes(body))


def _value_nodes(expr: Expr) -> list[Expr]:
    """Return the nodes of the value, without those in indices."""
    found: list[Expr] = []
    stack = [expr]
    while stack:
        node = stack.pop()
        found.append(node)
        if not isinstance(node, Load):
            stack.extend(children(node))
    return found
