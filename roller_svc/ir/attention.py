"""Attention: the operands, scores and mask of a kernel group of that kind."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import AxisRef, Cast, Const, Expr, Load, Select, loads_of, substitute
from roller_svc.ir.program import Axis, TensorExpr


@dataclass(frozen=True, slots=True)
class RowResults:
    """Values that a kernel computes from the maximum and sum of exponentials of each row (`state_names`).

    `result` is the value of an element; None: it is divided by the sum of its row.
    """

    result: Expr | None = None
    stored: tuple[TensorExpr, ...] = ()  # maps over rows

    @property
    def reads(self) -> frozenset[str]:
        """Return the tensors that the expressions load, those that the kernel keeps among them."""
        parts = [s.body for s in self.stored] + ([] if self.result is None else [self.result])
        return frozenset(load.tensor for part in parts for load in loads_of(part))


def state_names(row_sum: TensorExpr) -> tuple[str, str, str]:
    """Return the names of what a kernel keeps: the maximum and the sum of each row, and its undivided results."""
    return f"{row_sum.output}.high", f"{row_sum.output}.running", f"{row_sum.output}.undivided"


@dataclass(frozen=True, slots=True)
class Scores:
    """Another product QK^T that weights are made of."""

    q: Expr  # over batch, m, its own features
    k: Expr  # over batch, keys, its own features
    load: Load  # of the product in `score`


@dataclass(frozen=True, slots=True)
class Weights:
    """Probabilities that are the score itself, an elementwise value of one or two products, without softmax."""

    second: Scores | None = None
    cond: Expr | None = None  # they are 0 where it fails


@dataclass(frozen=True, slots=True)
class Attention:
    """out[b, m, n] = sum of p v / sum of p over all keys, p = exp(scale (score - max of score)).

    With `weights` it is the sum of p v, and p is the score.
    """

    q: Expr  # over batch, m, head dimension
    k: Expr  # over batch, keys, head dimension
    v: Expr  # over batch, keys, n
    scores_load: Load  # the load of QK^T in `score`
    score: Expr
    scale: float
    dtype: DType  # in which a matrix unit gets q, k, p and v
    # QK^T, row maximum, row sum of exponentials; with weights the products that these are made of
    softmax_statements: tuple[TensorExpr, ...]
    rows: RowResults = RowResults()
    unsplit_rows: RowResults = RowResults()  # before heads are split into two axes
    unsplit: tuple[TensorExpr, ...] = ()  # row sum and the group's statements before heads are split into two axes
    weights: Weights | None = None

    @property
    def row_sum(self) -> TensorExpr:
        """Return the statement of the sum of exponentials."""
        return self.softmax_statements[2]

    @property
    def queries(self) -> tuple[Expr, ...]:
        """Return Q of each product."""
        return (self.q,) if self._second is None else (self.q, self._second.q)

    @property
    def keys(self) -> tuple[Expr, ...]:
        """Return K of each product."""
        return (self.k,) if self._second is None else (self.k, self._second.k)

    @property
    def products(self) -> tuple[Load, ...]:
        """Return the loads of the products in the score."""
        return (self.scores_load,) if self._second is None else (self.scores_load, self._second.load)

    @property
    def _second(self) -> Scores | None:
        return None if self.weights is None else self.weights.second

    @property
    def reads(self) -> frozenset[str]:
        """Return the tensors that attention reads."""
        parts = (*self.queries, *self.keys, self.v, self.score)
        own = {load.tensor for load in self.products}
        if self.weights is None:
            own |= set(state_names(self.row_sum))
        return (frozenset(load.tensor for part in parts for load in loads_of(part)) | self.rows.reads) - own

    def has_values_in_keys(self, columns: tuple[Axis, ...]) -> bool:
        """Return whether V is the first columns of K, as in latent attention; `columns` are the axes of the results."""
        features = self.softmax_statements[0].reduced
        if len(columns) > 1 or len(features) > 1 or columns[0].extent > features[0].extent:
            return False
        return substitute(self.v, {columns[0].name: AxisRef(features[0].name)}) == self.k

    @property
    def softmax_flops(self) -> int:
        return sum(s.flops for s in self.softmax_statements)


@dataclass(frozen=True, slots=True)
class Mask:
    """Scores are `fill_value` where the condition fails."""

    cond: Expr
    fill_value: float


def mask(attention: Attention) -> Mask | None:
    """Return the mask of the scores, or None without one or if masked scores are not a constant.

    Weights of 0 count as scores of minus infinity.
    """
    if attention.weights is not None:
        return None if attention.weights.cond is None else Mask(attention.weights.cond, -math.inf)
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
