"""Chained products in programs: the left operand of a contraction is an elementwise value of other contractions.

out[b, m, n] = sum over keys of w[b, m, key] v[b, key, n], where w is made of one product QK^T, or of two of as many
features, and of values of rows and keys: the backward pass of attention, attention without softmax. One kernel then
computes w tile by tile and stores none of it, as attention does (FlashAttention: Dao et al., arXiv:2205.14135, §B.2).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from roller_svc.analysis.index_ranges import exists
from roller_svc.analysis.inlining import inline_loads
from roller_svc.analysis.operand import can_represent_all, value_dtype
from roller_svc.analysis.sum_of_products import product_of, sum_of_products
from roller_svc.fusion.attention import HALF_DTYPES, AttentionMatch
from roller_svc.fusion.contraction import Contraction
from roller_svc.fusion.delinearize import simplify_division
from roller_svc.ir.attention import Attention, Scores, Weights
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import AxisRef, Cast, Const, Expr, Load, Op, OpKind, Select, axes_of, loads_of, rewrite, substitute
from roller_svc.ir.index import logical_and
from roller_svc.ir.program import Axis, AxisKind, StatementKind, TensorExpr

MAX_PRODUCTS = 2  # that weights are made of
MAX_FEATURES = 256  # of a product, which a block holds whole, and columns of results: more would compute weights again


def match_chains(
    statements: tuple[TensorExpr, ...], outputs: Collection[str], dtypes: Collection[DType], taken: Collection[str]
) -> tuple[tuple[TensorExpr, ...], Mapping[str, AttentionMatch]]:
    """Match chained products. Returns the statements without the inner products, and the matches by their tensors.

    A product stays a kernel of its own if anything but chains reads it. `taken` are the results of other matches.
    """
    products = {s.output: s for s in statements if s.output not in taken and _is_product(s)}
    readers = _Readers.of(statements, products)
    sums = {name: s for name, s in readers.sums.items() if name not in taken}
    found = {name: match for name, s in sums.items() if (match := _chain(s, products, dtypes)) is not None}
    while found:
        inner = {load.tensor for match in found.values() for load in match.attention.products}
        needed = {name for name in inner if name in outputs or name in found or not readers.are_chains(name, outputs, found)}
        remaining = {n: match for n, match in found.items() if needed.isdisjoint(load.tensor for load in match.attention.products)}
        if len(remaining) == len(found):
            replaced = inner | readers.maps_of(inner)
            return tuple(found[s.output].pv if s.output in found else s for s in statements if s.output not in replaced), found
        found = remaining
    return statements, {}


def _is_product(statement: TensorExpr) -> bool:
    scores = sum_of_products(statement)
    features = math.prod(axis.extent for axis in statement.reduced)
    return scores is not None and len(scores.factors) > 1 and features <= MAX_FEATURES and statement.accumulator is DType.FLOAT32


@dataclass(frozen=True, slots=True)
class _Readers:
    """Statements that read products, or maps of these: maps, and reductions with maps inlined."""

    maps: Mapping[str, TensorExpr]
    sums: Mapping[str, TensorExpr]
    depends: Mapping[str, frozenset[str]]  # of every statement that reads any: the products

    @classmethod
    def of(cls, statements: Sequence[TensorExpr], products: Mapping[str, TensorExpr]) -> _Readers:
        maps: dict[str, TensorExpr] = {}
        sums: dict[str, TensorExpr] = {}
        depends: dict[str, frozenset[str]] = {}
        for statement in statements:
            read = set(statement.reads_tensors)
            through = frozenset[str]().union(*(depends[name] for name in read & maps.keys()))
            if not (through or read & products.keys()):
                continue
            depends[statement.output] = through | (read & products.keys())
            inlined = inline_loads(statement, maps)
            if inlined is None:
                continue
            if statement.kind is StatementKind.MAP:
                maps[statement.output] = inlined
            elif statement.kind is StatementKind.REDUCE:
                sums[statement.output] = inlined
        return cls(maps, sums, depends)

    def are_chains(self, product: str, outputs: Collection[str], chains: Collection[str]) -> bool:
        """Return whether chains alone read a product, and maps that only they read."""
        readers = [name for name, read in self.depends.items() if product in read]
        return all(name in chains or (name in self.maps and name not in outputs) for name in readers)

    def maps_of(self, products: Collection[str]) -> set[str]:
        return {name for name in self.maps if not self.depends[name].isdisjoint(products)}


@dataclass(frozen=True, slots=True)
class _Factors:
    """Q and K of a product at the points of a chain."""

    queries: list[Expr]
    keys: list[Expr]


def _chain(statement: TensorExpr, products: Mapping[str, TensorExpr], dtypes: Collection[DType]) -> AttentionMatch | None:
    """Return a sum of weights times values as a match, or None."""
    values = sum_of_products(statement)
    if values is None or statement.accumulator is not DType.FLOAT32 or not statement.reduced:
        return None
    made, others = _split_factors(values.factors, products)
    if not others or not made:
        return None
    weight, v = product_of(made), product_of(others)
    read = list(dict.fromkeys(load for load in loads_of(weight) if load.tensor in products))
    ranges = {axis.name: (0, axis.extent - 1) for axis in statement.axes}
    if any(loads_of(index) for load in read for index in load.index):
        return None
    if not all(exists(load, products[load.tensor].type.shape, ranges) for load in read):
        return None  # Q and K are read at all points: no guard of the product applies to them
    if not 0 < len(read) <= MAX_PRODUCTS or len({load.tensor for load in read}) != len(read):
        return None
    keys = {a.name for a in statement.reduced}
    columns = axes_of(v) - axes_of(weight)
    rows = axes_of(weight) - axes_of(v)
    if not columns or not keys <= axes_of(weight) & axes_of(v) or math.prod(statement.extents[x] for x in columns) > MAX_FEATURES:
        return None
    sides = _sides(statement, [(load, products[load.tensor]) for load in read], (rows, keys))
    if sides is None:
        return None
    factors, dots = sides
    pairs = [(product_of(f.queries), product_of(f.keys)) for f in factors]
    dtype = _common_dtype([part for pair in pairs for part in pair] + [v, weight])
    checked = [load for part in (weight, *(q for q, _ in pairs)) for load in loads_of(part) if any(load.bounds_checked)]
    if dtype is None or dtype not in dtypes or checked:
        return None
    batch = tuple(a for a in statement.spatial if a.name not in rows | columns)
    m, n = (tuple(a for a in statement.spatial if a.name in names) for names in (rows, columns))
    second = None if len(pairs) < MAX_PRODUCTS else Scores(*pairs[1], read[1])
    weights = Weights(second, _condition(weight))
    attention = Attention(*pairs[0], v, read[0], weight, 1.0, dtype, dots, weights=weights)
    chain = Contraction(batch, m, n, tuple(replace(a, kind=AxisKind.REDUCE) for a in statement.reduced), weight, v)
    return AttentionMatch(statement, chain, attention)


def _split_factors(factors: Sequence[Expr], products: Collection[str]) -> tuple[list[Expr], list[Expr]]:
    """Return the factors of weights and those of V: the ones with columns, and others that vary with no more than these."""
    of_products = {f for f in factors if any(load.tensor in products for load in loads_of(f))}
    points = frozenset[str]().union(*map(axes_of, of_products))
    of_values = frozenset[str]().union(*(axes_of(f) for f in factors if not axes_of(f) <= points))
    others = [f for f in factors if f not in of_products and axes_of(f) and axes_of(f) <= of_values]
    return [f for f in factors if f not in others], others


def _sides(
    statement: TensorExpr, read: Sequence[tuple[Load, TensorExpr]], axes: tuple[frozenset[str], set[str]]
) -> tuple[list[_Factors], tuple[TensorExpr, ...]] | None:
    """Return Q and K of each product at the points of the sum, and the products there. None if they do not separate.

    All products have the features of the first one, by other names than the sum's axes.
    """
    rows, keys = axes
    features = read[0][1].reduced
    names = {a.name: f"{a.name}.{read[0][1].output}" for a in features}
    shared = tuple(Axis(names[a.name], a.extent, AxisKind.REDUCE) for a in features)
    extents = statement.extents | {a.name: a.extent for a in shared}
    factors: list[_Factors] = []
    dots: list[TensorExpr] = []
    for load, product in read:
        scores = sum_of_products(product)
        if scores is None or [a.extent for a in product.reduced] != [a.extent for a in features]:
            return None
        at: dict[str, Expr] = {a.name: i for a, i in zip(product.index, load.index, strict=True) if isinstance(a, AxisRef)}
        at |= {mine.name: AxisRef(axis.name) for mine, axis in zip(product.reduced, shared, strict=True)}
        parts = [rewrite(substitute(f, at), lambda node: simplify_division(node, extents)) for f in scores.factors]
        of_keys = [part for part in parts if not keys.isdisjoint(axes_of(part))]
        of_rows = [part for part in parts if part not in of_keys]
        if not of_keys or not of_rows or any(not rows.isdisjoint(axes_of(part)) for part in of_keys):
            return None
        if any(axes_of(part).isdisjoint(a.name for a in shared) for part in (product_of(of_keys), product_of(of_rows))):
            return None
        factors.append(_Factors(of_rows, of_keys))
        used = frozenset[str]().union(*map(axes_of, parts))
        points = tuple(a for a in statement.axes if a.name in used and a.name not in names.values())
        index = tuple(AxisRef(a.name) for a in points)
        spatial = tuple(replace(a, kind=AxisKind.SPATIAL) for a in points)
        shape = replace(product.type, shape=tuple(a.extent for a in points))
        dots.append(replace(product, type=shape, axes=(*spatial, *shared), index=index, body=product_of(parts)))
    return factors, tuple(dots)


def _condition(weight: Expr) -> Expr | None:
    """Return a condition outside of which weights are 0; None without one.

    Only finite numbers may multiply what it guards: 0 times another factor, which may be infinite or NaN, may be NaN.
    """
    match weight:
        case Cast(arg=arg):
            return _condition(arg)
        case Select(cond=cond, then=then, otherwise=Const(value=0)):
            return logical_and(cond, _condition(then))
        case Op(kind=OpKind.MUL, args=args):
            others = [arg for arg in args if not _is_finite_number(arg)]
            return _condition(others[0]) if len(others) == 1 else None
        case _:
            return None


def _is_finite_number(factor: Expr) -> bool:
    while isinstance(factor, Cast) and factor.implicit:
        factor = factor.arg
    return isinstance(factor, Const) and math.isfinite(factor.value)


def _common_dtype(operands: Sequence[Expr]) -> DType | None:
    """Return the narrow float that can represent all operands, the weights among them."""
    types = [t for f in operands if (t := value_dtype(f)) is not None]
    return next((half for half in HALF_DTYPES if all(can_represent_all(half, t) for t in types)), None)
