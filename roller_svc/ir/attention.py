"""Attention: the operands, scores and mask of a kernel group of that kind."""

from __future__ import annotations

from dataclasses import dataclass, replace

from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Cast, Const, Expr, Load, Select, loads_of
from roller_svc.ir.program import TensorExpr


@dataclass(frozen=True, slots=True)
class Attention:
    """out[b, m, n] = sum of p v / sum of p over all keys, p = exp(scale (score - max of score))."""

    q: Expr  # over batch, m, head dimension
    k: Expr  # over batch, keys, head dimension
    v: Expr  # over batch, keys, n
    scores_load: Load  # the load of QK^T in `score`
    score: Expr
    scale: float
    dtype: DType  # in which a matrix unit gets q, k, p and v
    softmax_statements: tuple[TensorExpr, TensorExpr, TensorExpr]  # QK^T, row maximum, row sum of exponentials
    unsplit: tuple[TensorExpr, ...] = ()  # row sum and the group's statements before heads are split into two axes

    @property
    def row_sum(self) -> TensorExpr:
        """Return the statement of the sum of exponentials."""
        return self.softmax_statements[2]

    @property
    def reads(self) -> frozenset[str]:
        """Return the tensors that attention reads."""
        parts = (self.q, self.k, self.v, self.score)
        return frozenset(load.tensor for part in parts for load in loads_of(part)) - {self.scores_load.tensor}

    @property
    def softmax_flops(self) -> int:
        return sum(s.flops for s in self.softmax_statements)


@dataclass(frozen=True, slots=True)
class Mask:
    """Scores are `fill_value` where the condition fails."""

    cond: Expr
    fill_value: float


def mask(attention: Attention) -> Mask | None:
    """Return the mask of the scores, or None without one or if masked scores are not a constant."""
    match _strip_casts(attention.score):
        case Select(cond=cond, otherwise=otherwise):
            fill_value = _strip_casts(otherwise)
            return Mask(cond, float(fill_value.value)) if isinstance(fill_value, Const) else None
        case _:
            return None


def unmasked(attention: Attention) -> Expr:
    """Return the score where the condition of its mask holds."""

    def visit(expr: Expr) -> Expr:
        match expr:
            case Cast(arg=arg):
                return replace(expr, arg=visit(arg))
            case Select(then=then):
                return then
            case _:
                return expr

    return attention.score if mask(attention) is None else visit(attention.score)


def _strip_casts(expr: Expr) -> Expr:
    while isinstance(expr, Cast):
        expr = expr.arg
    return expr
