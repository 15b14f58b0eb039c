"""Register tile of a contraction on a CPU: rows x columns sums over loops along k, operands from wherever they lie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from roller_svc.families.common.cpu.dot import WORD, DotOperands
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Const, Expr, Load, Op, OpKind
from roller_svc.ir.index import add, mul, num, ref
from roller_svc.ir.program import Combine
from roller_svc.ir.schedule import Branch, Compute, Loop, LoopKind, Node, Routine, Scope, Storage

LANE = ".lane"
ACC, ROW_B = ".acc", ".b"
ROW, VECTOR = ".row", ".vector"
SCARCE_REGISTERS = 16  # vector registers before AVX-512, NEON and SVE


@dataclass(frozen=True, slots=True)
class Tile:
    """Where a tile of C lies: a tensor, and the place in it of (row, column)."""

    tensor: str
    index: Callable[[Expr, Expr], tuple[Expr, ...]]


@dataclass(frozen=True, slots=True)
class Steps:
    """One loop along k: `var` from 0 to extent - 1, before `limit`."""

    var: str
    extent: int
    limit: Expr | None = None


@dataclass(frozen=True, slots=True)
class MicroKernel:
    """C[row, column] += sum of a(row) * b(column) over `steps`, outermost first, for rows x columns in registers.

    `a` gives one element of A, all lanes of a row share it; `b` one of B, neighbouring columns being neighbours in
    memory; both may use the variables of `steps`. `columns` is a multiple of `lanes`. `beside` goes on in each
    innermost step: what is fetched ahead. `kept`: where the row of B that a step has read is left for later tiles.
    `dot`: elements are words, and the product is one of their elements. `begins`: what columns' sums are at first, in
    place of zero. `registers`: vectors that a core has names for.
    """

    rows: int
    columns: int
    lanes: int
    dtype: DType
    steps: tuple[Steps, ...]
    a: Callable[[Expr], Expr]
    b: Callable[[Expr], Expr]
    registers: int
    beside: tuple[Node, ...] = ()
    kept: Callable[[Expr], Load] | None = None
    dot: DotOperands | None = None
    begins: Callable[[Expr], Expr] | None = None

    def nodes(self, to: Tile, fresh: Expr | None = None) -> tuple[Node, ...]:
        """Begin with zeros, walk k, store: the tile of sums is in `to` afterwards, joined to what was there unless
        `fresh` holds; None is always.

        Sums of a step join those of the steps before only at its end: a sum of K terms in steps of kc then errs by
        kc + K / kc roundings in place of K (blocked summation; Higham, Accuracy and Stability, 2002, section 4.2).
        """
        held = (ref(ROW), self._column())
        zero = Const(0.0 if self.dtype.is_float else 0, self.dtype)
        zeros = self._over_tile(Compute(ACC, held, zero if self.begins is None else self.begins(self._column())))
        walk = self._step()
        for step in reversed(self.steps):
            walk = (Loop(step.var, step.extent, LoopKind.SERIAL, walk, step.limit),)
        body = (zeros, *walk, self._stored(to, fresh))
        held_in = Storage(ACC, self.dtype, (self.rows, self.columns), Scope.REGISTER, body)
        return (Routine("multiply", (held_in,)),)

    def _stored(self, to: Tile, fresh: Expr | None) -> Node:
        held = (ref(ROW), self._column())
        place, total = to.index(*held), Load(ACC, held, self.dtype)
        store = self._over_tile(Compute(to.tensor, place, total))
        if fresh is None:
            return store
        join = self._over_tile(Compute(to.tensor, place, total, Combine.SUM))
        return Branch(fresh, (store,), (join,))

    def _step(self) -> tuple[Node, ...]:
        """One row of B into registers, then a multiply-add for each of A's elements and each vector."""
        column = self._column()
        loads = self._over_columns(Compute(ROW_B, (column,), self.b(column)))
        sums = self._over_tile(self._multiply_add(column))
        nodes = (loads, *self._left(column), sums)
        room = Storage(
            ROW_B, self._operand_dtype, (self.columns,), Scope.REGISTER, nodes, no_rematerialize=self._pins()
        )
        return (*self.beside, room)

    @property
    def _operand_dtype(self) -> DType:
        return self.dtype if self.dot is None else WORD

    def _multiply_add(self, column: Expr) -> Compute:
        a, b = self.a(ref(ROW)), Load(ROW_B, (column,), self._operand_dtype)
        held = (ref(ROW), column)
        if self.dot is None:
            return Compute(ACC, held, Op(OpKind.MUL, (a, b), self.dtype), Combine.SUM)
        words = (a, b) if self.dot.a_is_first else (b, a)
        return Compute(ACC, held, Op(OpKind.DOT, (Load(ACC, held, self.dtype), *words), self.dtype))

    def _left(self, column: Expr) -> tuple[Node, ...]:
        if self.kept is None:
            return ()
        place = self.kept(column)
        return (self._over_columns(Compute(place.tensor, place.index, Load(ROW_B, (column,), self._operand_dtype))),)

    def _pins(self) -> bool:
        """gcc folds loads of B back into multiply-adds, once a row, where registers seem scarce or rows are few: 70
        instead of 93 %, and for 3 rows of 4 vectors, half of 32 registers being free, 82 instead of 100."""
        vectors = self.columns // self.lanes
        if self.kept is not None:
            return True
        return self.rows > 1 and self.rows * vectors + vectors + 1 <= self.registers

    def _column(self) -> Expr:
        return add(mul(ref(VECTOR), num(self.lanes)), ref(LANE))

    def _over_tile(self, *nodes: Node) -> Node:
        return Loop(ROW, self.rows, LoopKind.UNROLL, (self._over_columns(*nodes),))

    def _over_columns(self, *nodes: Node) -> Node:
        lanes = Loop(LANE, self.lanes, LoopKind.VECTOR, nodes)
        return Loop(VECTOR, self.columns // self.lanes, LoopKind.UNROLL, (lanes,))
