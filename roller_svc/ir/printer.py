"""TensorProgram → canonical expression: text that parses to the same program.

Every statement states the extents of all its axes. Implicit conversions are not printed. Parentheses are printed only
where operator precedence needs them. Everything but operators is printed as a call.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from roller_svc.errors import InvariantError
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import AxisRef, Cast, Const, Expr, Load, Op, OpKind, Select, rewrite
from roller_svc.ir.program import Combine, StatementKind, TensorExpr, TensorProgram

# Python's precedences, loosest first. A comparison binds looser than | and &.
_COMPARISON, _OR, _AND, _SHIFT, _SUM, _PRODUCT, _UNARY, _ATOM = range(8)

_BINARY = {
    OpKind.LT: _COMPARISON, OpKind.LE: _COMPARISON, OpKind.GT: _COMPARISON, OpKind.GE: _COMPARISON,
    OpKind.EQ: _COMPARISON, OpKind.NE: _COMPARISON, OpKind.LOR: _OR, OpKind.LAND: _AND, OpKind.SHL: _SHIFT,
    OpKind.SHR: _SHIFT, OpKind.ADD: _SUM, OpKind.SUB: _SUM, OpKind.MUL: _PRODUCT, OpKind.DIV: _PRODUCT,
    OpKind.FLOORDIV: _PRODUCT, OpKind.MOD: _PRODUCT,
}  # fmt: skip
_SIGNS = {OpKind.NEG: "-", OpKind.LNOT: "~"}


def text(program: TensorProgram) -> str:
    """Return all statements, in order, on one line."""
    names = {statement.output: statement.name for statement in program.statements}
    return "; ".join(statement_text(statement, names) for statement in program.statements)


def expression_text(expr: Expr, names: Mapping[str, str]) -> str:
    """Return the text of an expression. `names` maps tensor ids to their names in the source."""
    return _Printer(names).show(expr)


def statement_text(statement: TensorExpr, names: Mapping[str, str]) -> str:
    """Return the text of a statement. `names` maps tensor ids to their names in the source where these differ."""
    is_recurrence = statement.combine is Combine.RECURRENCE
    if is_recurrence:
        statement = _as_written(statement)
    printer = _Printer(names)
    index = ", ".join(printer.show(i) for i in statement.index)
    sign = "" if statement.combine is None else statement.combine.value
    match statement.kind:
        case StatementKind.MAP:
            operator = "="
        case StatementKind.REDUCE:
            operator = f"{sign}=!"
        case StatementKind.SCATTER:
            operator = "=" if statement.writes_once else f"{sign}=."
    body = printer.show(statement.body)
    if statement.predicate is not None:
        body = f"{printer.receiver(statement.body)}.when({printer.conditions(statement.predicate)})"
    stated = f": {statement.type.dtype.value}" if is_recurrence or _needs_type(statement) else ""
    where = ", ".join(f"{axis.name} in {axis.extent}" for axis in statement.axes)
    return f"{statement.name}[{index}]{stated} {operator} {body}" + (f" where {where}" if where else "")


def _as_written(statement: TensorExpr) -> TensorExpr:
    """Return a recurrence as the map that reads its own result."""
    joins, step = _recurrence_parts(statement)
    before, here = joins.args
    gate, initial, value = step.args
    is_reversed = joins.kind is OpKind.GE
    extent = statement.reduced[0].extent
    neighbour = Op(OpKind.ADD if is_reversed else OpKind.SUB, (here, Const(1, DType.INT32)), DType.INT32)
    first = Const(extent - 1 if is_reversed else 0, DType.INT32)
    is_later = Op(OpKind.LT if is_reversed else OpKind.GT, (here, first), DType.INT8)
    index = tuple(neighbour if i == here else i for i in statement.index)
    state: Expr = Load(statement.name, index, statement.type.dtype)
    state = Select(is_later, state, initial, step.dtype)
    gate, value = (rewrite(part, lambda node: here if node == before else node) for part in (gate, value))
    body = Op(OpKind.ADD, (Op(OpKind.MUL, (gate, state), step.dtype), value), step.dtype)
    return replace(statement, kind=StatementKind.MAP, combine=None, axes=statement.spatial, body=body)


def _recurrence_parts(statement: TensorExpr) -> tuple[Op, Op]:
    """Return the order of a recurrence's steps, and the step."""
    body = statement.body
    while isinstance(body, Cast):
        body = body.arg
    match body:
        case Select(cond=Op() as joins, then=Op(kind=OpKind.FMA) as step):
            return joins, step
        case _:
            raise InvariantError("the body of a recurrence is not a linear step")


def _literal(value: float) -> str:
    """Return a number as an argument of `const`, where infinities are quoted names."""
    return f"`{value!r}`" if math.isinf(value) else repr(value)


def _needs_type(statement: TensorExpr) -> bool:
    """Return whether the tensor's type differs from that of its body."""
    if statement.kind is StatementKind.SCATTER:
        return False
    return statement.type.dtype is not _own_dtype(statement.body)


def _own_dtype(expr: Expr) -> DType:
    """Return the type of an expression by itself, without implicit conversions."""
    while isinstance(expr, Cast) and expr.implicit:
        expr = expr.arg
    if isinstance(expr, Const):
        return DType.FLOAT32 if isinstance(expr.value, float) else DType.INT32
    if isinstance(expr, Select) and {type(expr.then), type(expr.otherwise)} == {Const}:
        return DType.FLOAT32 if expr.dtype.is_float else DType.INT32
    return expr.dtype


class _Printer:
    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = names

    def show(self, expr: Expr, min_precedence: int = _COMPARISON) -> str:
        """Return the expression, in parentheses if its precedence is below `min_precedence`."""
        printed, precedence = self._print(expr)
        return printed if precedence >= min_precedence else f"({printed})"

    def receiver(self, expr: Expr) -> str:
        """Return the expression before the dot of a method. A number needs parentheses there."""
        while isinstance(expr, Cast) and expr.implicit:
            expr = expr.arg
        return f"({self.show(expr)})" if isinstance(expr, Const) else self.show(expr, _ATOM)

    def conditions(self, condition: Expr) -> str:
        """Return the argument of `when(...)`: a list of the conjuncts of the condition."""
        chain: list[Expr] = []
        while isinstance(condition, Op) and condition.kind is OpKind.LAND:
            chain.append(condition.args[1])
            condition = condition.args[0]
        chain.append(condition)
        return "[" + ", ".join(self.show(c) for c in reversed(chain)) + "]"

    def _print(self, expr: Expr) -> tuple[str, int]:
        match expr:
            case Const(value=value) if math.isinf(value):
                return f"const({_literal(value)})", _ATOM
            case Const(value=value):
                return repr(value), _UNARY if value < 0 else _ATOM
            case AxisRef(name=name):
                return name, _ATOM
            case Load(tensor=tensor, index=index):
                return f"{self.names.get(tensor, tensor)}[{', '.join(self.show(i) for i in index)}]", _ATOM
            case Cast(arg=arg, implicit=True):
                return self._print(arg)
            case Cast(arg=Const(value=value), dtype=dtype):
                return f"const({_literal(value)}, `{dtype.value}`)", _ATOM
            case Cast(arg=arg, dtype=dtype):
                return f"{self.receiver(arg)}.cast(`{dtype.value}`)", _ATOM
            case Select(cond=cond, then=then, otherwise=otherwise):
                return f"{self.receiver(then)}.when({self.conditions(cond)}, {self.show(otherwise)})", _ATOM
            case Op():
                return self._operation(expr)

    def _operation(self, op: Op) -> tuple[str, int]:
        args = op.args
        if op.kind in _BINARY and len(args) == 2:
            precedence = _BINARY[op.kind]
            # Operators associate to the left, and a comparison does not chain at all.
            left = self.show(args[0], precedence + 1 if precedence == _COMPARISON else precedence)
            return f"{left} {op.kind.value} {self.show(args[1], precedence + 1)}", precedence
        if op.kind in _SIGNS and not isinstance(args[0], Const):
            return f"{_SIGNS[op.kind]}{self.show(args[0], _UNARY)}", _UNARY
        return f"{op.kind.value}({', '.join(self.show(a) for a in args)})", _ATOM
