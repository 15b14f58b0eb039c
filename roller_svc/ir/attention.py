"""Attention: what surrounds the online softmax of a kernel group of that kind."""

from __future__ import annotations

from dataclasses import dataclass, replace

from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Cast, Const, Expr, Load, Select, loads_of
from roller_svc.ir.program import TensorExpr


@dataclass(frozen=True, slots=True)
class Attention:
    """out[b, m, n] = sum of p v / sum of p over all keys, p = exp(scale (score - max of score)).

    `q`: factor over batch, m and features; `k` over batch, keys and features; `v` over batch, keys and n. `product`:
    the load by which the score reads their first contraction, the sum of q k over features. `dtype`: in which a matrix
    unit gets the factors, exponentials among them.

    `before`: the statements of the product, the maximum and the sum of exponentials, for each row. `unsplit`: that
    sum's and the group's own over the axes of the program, none of which stands for heads in two parts.
    """

    q: Expr
    k: Expr
    v: Expr
    scores_load: Load
    score: Expr
    scale: float
    dtype: DType
    softmax_statements: tuple[TensorExpr, TensorExpr, TensorExpr]
    unsplit: tuple[TensorExpr, ...] = ()

    @property
    def row_sum(self) -> TensorExpr:
        """The sum of exponentials."""
        return self.softmax_statements[2]

    @property
    def reads(self) -> frozenset[str]:
        """Tensors from which all of it follows."""
        parts = (self.q, self.k, self.v, self.score)
        return frozenset(load.tensor for part in parts for load in loads_of(part)) - {self.scores_load.tensor}

    @property
    def softmax_flops(self) -> int:
        return sum(s.flops for s in self.softmax_statements)


@dataclass(frozen=True, slots=True)
class Mask:
    """Scores are `filled` wherever the condition fails."""

    cond: Expr
    fill_value: float


def mask(attention: Attention) -> Mask | None:
    """That of the scores; None where they have none, or are no constant under it."""
    match _strip_casts(attention.score):
        case Select(cond=cond, otherwise=otherwise):
            filled = _strip_casts(otherwise)
            return Mask(cond, float(filled.value)) if isinstance(filled, Const) else None
        case _:
            return None


def unmasked(attention: Attention) -> Expr:
    """The score where the condition of its mask holds."""

    def visit(expr: Expr) -> Expr:
        match expr:
            case Cast(arg=arg):
                return replace(expr, arg=visit(arg))
            case Select(then=kept):
                return kept
            case _:
                return expr

    return attention.score if mask(attention) is None else visit(attention.score)


def _strip_casts(expr: Expr) -> Expr:
    while isinstance(expr, Cast):
        expr = expr.arg
    return expr
