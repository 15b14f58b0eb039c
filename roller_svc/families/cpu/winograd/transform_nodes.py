"""One- and two-dimensional transforms as schedule nodes: vectors in registers, no multiplication by 0 or 1.

Rows of points +p and -p share their even and their odd part: E + f * O and E - f * O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

from roller_svc.analysis.winograd import Matrix, Row
from roller_svc.families.common.cpu.micro_kernel import LANE
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Const, Expr, Load, Op, OpKind
from roller_svc.ir.index import num, ref
from roller_svc.ir.schedule import Compute, Loop, LoopKind, Node, Scope, Storage

EVEN, ODD, HALF = ".even", ".odd", ".half"

Source = Callable[[int], Expr]  # element of a vector of operands
Target = Callable[[int, Expr], Compute]  # stores one element of the result
TileSource = Callable[[tuple[int, ...]], Expr]  # of a tile of one or two dimensions
TileTarget = Callable[[tuple[int, ...], Expr], Compute]


@dataclass(frozen=True, slots=True)
class VectorTransform:
    """Transforms `lanes` adjacent channels or filters at a time."""

    lanes: int
    dtype: DType

    def along(self, dims: int, matrix: Matrix, source: TileSource, target: TileTarget) -> tuple[Node, ...]:
        """Return target((p,)) = (M x)[p] for x[i] = source((i,)), or target((p, q)) = (M X M^T)[p, q] of two dimensions."""
        if dims == 1:
            nodes = tuple(self.apply(matrix, lambda i: source((i,)), lambda p, value: target((p,), value)))
            return self._with_registers(nodes, {ODD: (), EVEN: ()})
        rows, columns = len(matrix), len(matrix[0])
        halves: list[Node] = []
        for j in range(columns):
            halves += self.apply(matrix, partial(_column, source, j), partial(self._half, j))
        for p in range(rows):
            halves += self.apply(matrix, partial(self._half_element, p), partial(_in_row, target, p))
        return self._with_registers(tuple(halves), {HALF: (rows, columns), ODD: (), EVEN: ()})

    def _with_registers(self, body: tuple[Node, ...], shapes: Mapping[str, tuple[int, ...]]) -> tuple[Node, ...]:
        for name, shape in shapes.items():
            body = (Storage(name, self.dtype, (*shape, self.lanes), Scope.REGISTER, body),)
        return body

    def apply(self, matrix: Matrix, source: Source, target: Target) -> Iterator[Node]:
        """Yield target(r) = sum of matrix[r][k] * source(k)."""
        partners = _opposite_rows(matrix)
        for r, row in enumerate(matrix):
            if r not in partners:
                yield self._over_lanes(target(r, self._combination(row, source)))
            elif partners[r] > r:
                even = tuple((a + b) / 2 for a, b in zip(row, matrix[partners[r]], strict=True))
                odd = tuple((a - b) / 2 for a, b in zip(row, matrix[partners[r]], strict=True))
                factor = next(c for c in reversed(odd) if c)
                monic = tuple(c / factor for c in odd)
                yield self._over_lanes(Compute(EVEN, (ref(LANE),), self._combination(even, source)))
                yield self._over_lanes(Compute(ODD, (ref(LANE),), self._combination(monic, source)))
                pair = self._load(EVEN), self._load(ODD)
                yield self._over_lanes(target(r, self._add(pair[0], factor, pair[1])))
                yield self._over_lanes(target(partners[r], self._add(pair[0], -factor, pair[1])))

    def _combination(self, row: Row, source: Source) -> Expr:
        """Return the sum of the row's terms; one without a multiplication begins it."""
        terms = sorted(((c, k) for k, c in enumerate(row) if c), key=lambda term: (term[0] != 1, term[1]))
        (c, k), *others = terms
        total = source(k) if c == 1 else Op(OpKind.MUL, (self._number(c), source(k)), self.dtype)
        for c, k in others:
            total = self._add(total, c, source(k))
        return total

    def _add(self, total: Expr, factor: Fraction, value: Expr) -> Expr:
        kind = OpKind.ADD if factor > 0 else OpKind.SUB
        if abs(factor) != 1:
            value = Op(OpKind.MUL, (self._number(abs(factor)), value), self.dtype)
        return Op(kind, (total, value), self.dtype)

    def _number(self, value: Fraction) -> Const:
        return Const(float(value), self.dtype)

    def _half(self, j: int, p: int, value: Expr) -> Compute:
        return Compute(HALF, (num(p), num(j), ref(LANE)), value)

    def _half_element(self, p: int, j: int) -> Expr:
        return self._load(HALF, num(p), num(j))

    def _load(self, tensor: str, *index: Expr) -> Load:
        return Load(tensor, (*index, ref(LANE)), self.dtype)

    def _over_lanes(self, node: Compute) -> Node:
        return Loop(LANE, self.lanes, LoopKind.VECTOR, (node,))


def _column(source: TileSource, j: int, i: int) -> Expr:
    return source((i, j))


def _in_row(target: TileTarget, p: int, q: int, value: Expr) -> Compute:
    return target((p, q), value)


def _opposite_rows(matrix: Matrix) -> dict[int, int]:
    """Return {row: row of the opposite point}: every coefficient has the same size, and some the same sign."""
    partners: dict[int, int] = {}
    for r, row in enumerate(matrix):
        for s in range(r + 1, len(matrix)):
            other = matrix[s]
            same = [a == b != 0 for a, b in zip(row, other, strict=True)]
            opposite = [a == -b != 0 for a, b in zip(row, other, strict=True)]
            covers = all(a or b or x == y == 0 for a, b, x, y in zip(same, opposite, row, other, strict=True))
            if covers and any(same) and any(opposite) and not {r, s} & partners.keys():
                partners |= {r: s, s: r}
    return partners


def count_operations(matrix: Matrix) -> int:
    """Return the multiply-adds, additions and multiplications of one application."""
    partners = _opposite_rows(matrix)
    total = 0
    for r, row in enumerate(matrix):
        terms = sum(c != 0 for c in row)
        has_unit = any(c == 1 for c in row)
        if r not in partners:
            total += terms - has_unit
        elif partners[r] > r:
            total += terms - 2 + 2  # even and odd part begin with one term each; two sums
    return total
