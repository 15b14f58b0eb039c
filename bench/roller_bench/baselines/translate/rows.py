"""Match patterns of several statements that are one library call: softmax, norms, attention, argmax."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

from roller_bench.baselines.translate.nest import bare, bare_axes
from roller_svc.ir.expr import AxisRef, Const, Expr, Load, Op, OpKind, Select, iter_subexpressions, loads_of
from roller_svc.ir.program import Combine, StatementKind, TensorExpr, TensorType


@dataclass(frozen=True, slots=True)
class Softmax:
    data: str
    dims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ArgMost:
    data: str
    dim: int
    combine: Combine


@dataclass(frozen=True, slots=True)
class Norm:
    """A normalisation over `dims` of the data; `vectors` are scale and shift."""

    data: str
    dims: tuple[int, ...]
    vectors: tuple[str, ...]
    eps: float


@dataclass(frozen=True, slots=True)
class FixedNorm:
    """A normalisation of channels by input means and variances (batch norm)."""

    data: str
    mean: str
    variance: str
    vectors: tuple[str, ...]
    eps: float


@dataclass(frozen=True, slots=True)
class Attention:
    """softmax(scale q k) v; k and v are transposed if they are not [.., position, feature]."""

    query: str
    key: str
    value: str
    scale: float
    key_transposed: bool
    value_transposed: bool


_ROOTS = frozenset({OpKind.SQRT, OpKind.RSQRT})

Pattern = Softmax | ArgMost | Norm | FixedNorm | Attention

# Patterns are heuristic matches: the caller compares results with the reference.


def patterns_of(segment: Sequence[TensorExpr], types: dict[str, TensorType]) -> list[Pattern]:
    """Yield the patterns that the statements may be; only the last one is used elsewhere."""
    made = {s.output for s in segment}
    outside = list(dict.fromkeys(n for s in segment for n in s.reads_tensors if n not in made))
    if any(s.kind is StatementKind.SCATTER for s in segment):
        return []
    if len(segment) == 1:
        return _fixed_norms(segment[0], types)
    return [*_softmaxes_and_norms(segment, outside, types), *_argmosts(segment), *_attentions(segment, outside, types)]


def _softmaxes_and_norms(segment: Sequence[TensorExpr], outside: list[str], types: dict[str, TensorType]) -> list[Pattern]:
    data = next((n for n in outside if types[n].shape == segment[-1].type.shape), None)
    dims = () if data is None else _reduced_dims(segment, data)
    if data is None or not dims:
        return []
    found: list[Pattern] = []
    functions, joins = _functions(segment), [s.combine for s in segment]
    if OpKind.EXP in functions and len(outside) == 1 and Combine.MAX in joins:
        found.append(Softmax(data, dims))
    if functions & _ROOTS and Combine.SUM in joins and len(outside) <= 3:
        found.append(Norm(data, dims, tuple(n for n in outside if n != data), _eps(segment)))
    return found


def _functions(segment: Sequence[TensorExpr]) -> set[OpKind]:
    return {op.kind for op in _operators(segment, frozenset(OpKind))}


def _operators(segment: Sequence[TensorExpr], kinds: Set[OpKind]) -> Iterator[Op]:
    """Yield the operators of some kinds in all statements."""
    for node in (node for s in segment for node in iter_subexpressions(s.body)):
        if isinstance(node, Op) and node.kind in kinds:
            yield node


def _reduced_dims(segment: Sequence[TensorExpr], data: str) -> tuple[int, ...]:
    """Return the dimensions that all reductions sum; () if they differ or there are none."""
    found: set[tuple[int, ...]] = set()
    for statement in segment:
        if statement.kind is StatementKind.REDUCE:
            summed = {a.name for a in statement.reduced}
            for load in statement.reads:
                axes = bare_axes(load)
                if load.tensor == data and axes is not None:
                    found.add(tuple(d for d, name in enumerate(axes) if name in summed))
    return found.pop() if len(found) == 1 else ()


def _eps(segment: Sequence[TensorExpr]) -> float:
    """Return the epsilon under the square root, or 0."""
    for root in _operators(segment, _ROOTS):
        added = bare(root.args[0])
        if isinstance(added, Op) and added.kind is OpKind.ADD:
            return next((float(c.value) for c in map(_constant, added.args) if c is not None), 0.0)
    return 0.0


def _constant(expr: Expr) -> Const | None:
    expr = bare(expr)
    return expr if isinstance(expr, Const) else None


def _argmosts(segment: Sequence[TensorExpr]) -> list[Pattern]:
    """m = max x; min over i of (i where m == x)."""
    if len(segment) != 2:
        return []
    first, second = segment
    if first.combine not in (Combine.MAX, Combine.MIN) or second.combine is not Combine.MIN:
        return []
    data = bare(first.body)
    selects = [n for n in iter_subexpressions(second.body) if isinstance(n, Select)]
    if not isinstance(data, Load) or len(selects) != 1 or len(second.reduced) != 1:
        return []
    place = bare(selects[0].then)
    axes = [bare_axes(load) for load in second.reads if load.tensor == data.tensor]
    if not isinstance(place, AxisRef) or place.name != second.reduced[0].name or len(axes) != 1 or axes[0] is None:
        return []
    if place.name not in axes[0]:
        return []
    return [ArgMost(data.tensor, axes[0].index(place.name), first.combine)]


def _attentions(segment: Sequence[TensorExpr], outside: list[str], types: dict[str, TensorType]) -> list[Pattern]:
    products = [s for s in segment if s.combine is Combine.SUM and len(s.reduced) == 1 and len(_inputs(s, outside)) > 0]
    if len(outside) != 3 or len(products) < 2 or OpKind.EXP not in _functions(segment):
        return []
    scores, mixed = products[0], products[-1]
    of_scores, of_mixed = _inputs(scores, outside), _inputs(mixed, outside)
    if len(of_scores) != 2 or len(of_mixed) != 1:
        return []
    query, key = of_scores
    feature, position = scores.reduced[0].name, mixed.reduced[0].name
    axes = {n: _axes_of(scores, n) for n in of_scores} | {n: _axes_of(mixed, n) for n in of_mixed}
    if any(a is None or len(types[n].shape) < 3 for n, a in axes.items()):
        return []
    last = {n: a[-1] for n, a in axes.items() if a}
    if last[query] != feature:
        return []
    scale = _scale(segment)
    return [Attention(query, key, of_mixed[0], scale, last[key] != feature, last[of_mixed[0]] == position)]


def _scale(segment: Sequence[TensorExpr]) -> float:
    """Return the constant scale of the scores."""
    for node in _operators(segment, frozenset({OpKind.MUL, OpKind.DIV})):
        for number in map(_constant, node.args):
            if number is not None:
                return float(number.value) if node.kind is OpKind.MUL else 1.0 / float(number.value)
    return 1.0


def _inputs(statement: TensorExpr, outside: list[str]) -> list[str]:
    return [n for n in dict.fromkeys(load.tensor for load in statement.reads) if n in outside]


def _axes_of(statement: TensorExpr, tensor: str) -> tuple[str, ...] | None:
    found = {bare_axes(load) for load in statement.reads if load.tensor == tensor}
    return found.pop() if len(found) == 1 else None


def _fixed_norms(statement: TensorExpr, types: dict[str, TensorType]) -> list[Pattern]:
    """(x - mean) / sqrt(variance + eps), and vectors that scale and shift it."""
    if statement.kind is not StatementKind.MAP:
        return []
    data = [n for n in statement.reads_tensors if types[n].shape == statement.type.shape]
    under = {load.tensor for root in _operators([statement], _ROOTS) for load in loads_of(root)}
    subtracted = (bare(op.args[1]) for op in _operators([statement], frozenset({OpKind.SUB})))
    means = {load.tensor for load in subtracted if isinstance(load, Load)}
    rest = [n for n in statement.reads_tensors if n not in {*data, *under, *means}]
    vectors = [n for n in statement.reads_tensors if n not in data]
    if len(data) != 1 or len(under) != 1 or len(means) != 1 or len(rest) > 2 or len(statement.type.shape) < 2:
        return []
    channel = statement.spatial[1].name
    loads = [load for load in statement.reads if load.tensor in vectors]
    if any(bare_axes(load) != (channel,) for load in loads):
        return []
    return [FixedNorm(data[0], means.pop(), under.pop(), tuple(rest), _eps([statement]))]


def is_whole(load: Load, statement: TensorExpr) -> bool:
    """Return whether a load has the same index as the output of the statement."""
    return bare_axes(load) == tuple(a.name for a in statement.spatial)
